"""Leaf tensors as one flat vector, and the losses that are made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.space import Space

Closure = Callable[[], Tensor]
Grads = Sequence[Tensor | None]
"""A tensor for each leaf; None where the loss does not depend on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A loss on one sample: closures whose weighted sum it is, its size, and the seed its randomness replays."""

    name: str  # the argument it came from, for messages
    parts: Sequence[
        tuple[float, Closure]
    ]  # weights and closures; one of weight 1, or as many as there are micro-batches
    size: int  # components in it
    seed: int | None  # what its random draws are a function of; None for a function that draws nothing
    terms: float | None = None  # that its mean is over; None: nobody counted


class Leaves:
    """How a flat vector lies in leaf tensors, and the weight decay and the rate of each of these."""

    def __init__(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> None:
        self.tensors = list(tensors)
        self.decays = list(decays)
        self.rates = list(rates)
        self.shapes = [tuple(self.held(leaf).shape) for leaf in self.tensors]
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self.dim = sum(self._sizes)
        self.dtype, self.device = self.tensors[0].dtype, self.tensors[0].device

    def held(self, tensor: Tensor) -> Tensor:
        """Return the part of a leaf, or of its gradient, that vectors of this process hold: all of it."""
        return tensor

    def space(self) -> Space:
        """Return the arithmetic of the vectors."""
        return Space(self.dim, self.dtype, self.device)

    @property
    def intact(self) -> bool:
        """Whether the leaves are still of the shapes, type and device that vectors have."""
        kinds = {(leaf.dtype, leaf.device) for leaf in self.tensors}
        return kinds == {(self.dtype, self.device)} and [tuple(self.held(p).shape) for p in self.tensors] == self.shapes

    def matches(self, other: Leaves) -> bool:
        """Whether vectors of one are vectors of the other: the same leaves, shapes, type and device."""
        same = self.shapes == other.shapes and (self.dtype, self.device) == (other.dtype, other.device)
        return same and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))

    def flatten(self, tensors: Grads) -> Tensor:
        """Join per-leaf tensors into one new vector, out of any graph; a missing one is zero."""
        pieces = [
            torch.zeros(size, dtype=self.dtype, device=self.device)
            if tensor is None
            else _plain(self.held(tensor), self.dtype)
            for size, tensor in zip(self._sizes, tensors, strict=True)
        ]
        return torch.cat(pieces)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Cut a flat vector into views of the leaves' shapes."""
        pieces = torch.split_with_sizes(vector, self._sizes)
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def pack(self, vector: Tensor) -> list[Tensor]:
        """Cut a vector into tensors that are saved with the leaves; `flatten` undoes it."""
        return self.split(vector)

    def read(self) -> Tensor:
        """Gather the leaves into a new flat vector."""
        return torch.cat([self.held(leaf).detach().reshape(-1) for leaf in self.tensors])

    def write(self, vector: Tensor) -> None:
        """Copy a flat vector into the leaves."""
        with torch.no_grad():
            for leaf, piece in zip(self.tensors, self.split(vector), strict=True):
                self.held(leaf).copy_(piece)
        torch.clear_autocast_cache()  # it may hold casts of the old content

    def penalised(self, loss: Tensor, x: Tensor) -> Tensor:
        """Add ½ Σ decay·‖x‖² over the stretches that have one, in float64 and not yet read."""
        total = loss.detach().double()
        for begin, end, decay in self._stretches():
            total = total + 0.5 * decay * torch.dot(x[begin:end], x[begin:end]).double()
        return total

    def add_decay(self, result: Tensor, v: Tensor) -> Tensor:
        """Add decay·v, the penalty's gradient and Hessian product alike, in place."""
        for begin, end, decay in self._stretches():
            result[begin:end].add_(v[begin:end], alpha=decay)
        return result

    def _stretches(self) -> list[tuple[int, int, float]]:
        """Return where neighbouring leaves have the same decay, and how large it is."""
        found: list[tuple[int, int, float]] = []
        offset = 0
        for size, decay in zip(self._sizes, self.decays, strict=True):
            if decay:
                if found and found[-1][1:] == (offset, decay):
                    found[-1] = (found[-1][0], offset + size, decay)
                else:
                    found.append((offset, offset + size, decay))
            offset += size
        return found


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Flatten one tensor, out of its graph."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()  # an embedding may give sparse gradients
    return tensor.detach().to(dtype).reshape(-1)
