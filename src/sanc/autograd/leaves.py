"""Leaf tensors as one flat vector, and samples of a loss over them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.autograd import internals
from sanc.autograd.masters import LOW_PRECISION, MasterValues
from sanc.core.space import Space

Closure = Callable[[], Tensor]
Grads = Sequence[Tensor | None]
"""One tensor per leaf; None if the loss does not depend on the leaf."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A loss on one sample, the weighted sum of its parts.

    Attributes
    ----------
    name : str
        The argument that it was passed as, for error messages.
    parts : sequence of (float, callable)
        Weights and closures: one closure of weight 1, or one for each micro-batch.
    size : int
        Number of components.
    seed : int or None
        Seed of the random generators before each evaluation; None for a function that draws no random numbers.
    terms : float or None
        Number of terms in the mean; None if it is not known.
    """

    name: str
    parts: Sequence[tuple[float, Closure]]
    size: int
    seed: int | None
    terms: float | None = None


@dataclass(frozen=True, slots=True)
class PartMoments:
    """Loss and gradient of a sample, and how much the gradients g_i of its parts differ.

    Attributes
    ----------
    value : float
        Σ w_i f_i.
    gradient : vector
        Σ w_i g_i.
    mean_square : float
        Σ w_i ‖g_i‖².
    count : int
        Number of parts on all ranks.
    """

    value: float
    gradient: Tensor
    mean_square: float
    count: int


class Leaves:
    """The layout of leaf tensors in a flat vector, and the weight decay and the rate of each leaf.

    Attributes
    ----------
    tensors : list of Tensor
        The leaves.
    decays, rates : list of float
        Weight decay of each leaf, and the factor on its step size; `rates` is empty if all are 1.
    shapes : list of tuple of int
        Shapes of the leaves, as far as this process holds them.
    dim : int
        Dimension of the vectors.
    device : torch.device
        Device of the leaves and the vectors.
    dtype : torch.dtype
        Type of the vectors: float32 for leaves of bfloat16 and float16, otherwise the type of the leaves.
    is_low_precision : bool
        Whether a leaf is of bfloat16 or float16.
    masters : MasterValues
        The float32 values of leaves of low precision. Layouts of the same leaves share them.
    """

    def __init__(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> None:
        self.tensors = list(tensors)
        self.decays = list(decays)
        self.rates = list(rates)
        self.shapes = [tuple(self.local_tensor(leaf).shape) for leaf in self.tensors]
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self.dim = sum(self._sizes)
        self._types = [leaf.dtype for leaf in self.tensors]
        self.is_low_precision = any(dtype in LOW_PRECISION for dtype in self._types)
        self.dtype = torch.float32 if self.is_low_precision else self._types[0]
        self.device = self.tensors[0].device
        self.masters = MasterValues()

    def local_tensor(self, tensor: Tensor) -> Tensor:
        """Return the part of a leaf, or of its gradient, that is in the vectors of this process: here, all of it."""
        return tensor

    def space(self) -> Space:
        """Return the space of the flat vectors."""
        return Space(self.dim, self.dtype, self.device)

    @property
    def intact(self) -> bool:
        """Whether the leaves still have the shapes, type and device of the flat vectors."""
        device = self.device
        pairs = zip(self.tensors, self._types, strict=True)
        has_kinds = all(leaf.dtype is dtype and leaf.device == device for leaf, dtype in pairs)
        return has_kinds and [self.local_tensor(leaf).shape for leaf in self.tensors] == self.shapes

    def matches(self, other: Leaves) -> bool:
        """Return whether both have the same leaves, shapes, type and device, so that vectors of one fit the other."""
        if self is other:
            return True
        same = self.shapes == other.shapes and (self._types, self.device) == (other._types, other.device)
        return same and all(map(operator.is_, self.tensors, other.tensors))

    def fits(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float]) -> bool:
        """Return whether a layout of these leaves, with these decays and rates, would be equal to this one."""
        same_leaves = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))
        return same_leaves and self.decays == list(decays) and self.rates == list(rates) and self.intact

    def indices_in(self, other: Leaves) -> list[int | None]:
        """Return the index of each leaf in the other layout; None if it is not there with the same shape and type."""
        same_kind = (self.dtype, self.device) == (other.dtype, other.device)
        indices = {id(leaf): index for index, leaf in enumerate(other.tensors)} if same_kind else {}
        candidates = (indices.get(id(leaf)) for leaf in self.tensors)
        return [
            index if index is not None and (other.shapes[index], other._types[index]) == kind else None
            for index, kind in zip(candidates, zip(self.shapes, self._types, strict=True), strict=True)
        ]

    @torch.no_grad()
    def flatten(self, tensors: Grads) -> Tensor:
        """Concatenate per-leaf tensors into one new vector without a graph; a tensor that is None counts as zero."""
        pieces = [
            torch.zeros(size, dtype=self.dtype, device=self.device)
            if tensor is None
            else _flat(self.local_tensor(tensor), self.dtype)
            for size, tensor in zip(self._sizes, tensors, strict=True)
        ]
        return torch.cat(pieces)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a flat vector into views with the shapes of the leaves."""
        pieces = zip(torch.split_with_sizes(vector, self._sizes), self.shapes, strict=True)
        return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in pieces]

    def pack(self, vector: Tensor) -> list[Tensor]:
        """Split a vector into tensors to be saved with the leaves; `flatten` is the inverse."""
        return self.split(vector)

    def read(self) -> Tensor:
        """Copy the leaves, or their master values, into a new flat vector."""
        with torch.no_grad():
            return torch.cat([self._values(leaf).flatten() for leaf in self.tensors])

    def _values(self, leaf: Tensor) -> Tensor:
        """Return the values of the part of a leaf that this process holds, in the type of the vectors."""
        held = self.local_tensor(leaf)
        return self.masters.read(leaf, held) if leaf.dtype in LOW_PRECISION else held

    def write(self, vector: Tensor) -> None:
        """Copy a flat vector into the leaves, which round it to their type; the master values are not rounded."""
        with torch.no_grad():
            internals.copy_all([self.local_tensor(leaf) for leaf in self.tensors], self.split(vector))
            self.keep_masters(vector)
        torch.clear_autocast_cache()  # it may hold casts of the old values

    @torch.no_grad()
    def keep_masters(self, vector: Tensor) -> None:
        """Copy a flat vector into the master values of leaves of low precision."""
        if self.is_low_precision:
            held = [self.local_tensor(leaf) for leaf in self.tensors]
            self.masters.write(self.tensors, held, self.split(vector))

    def penalised(self, loss: Tensor, x: Tensor) -> Tensor:
        """Return the loss plus ½ Σ decay·‖x_i‖² over the leaves, as a float64 tensor on the device."""
        total = loss.detach().double()
        for begin, end, decay in self._decay_ranges():
            total = total + 0.5 * decay * torch.dot(x[begin:end], x[begin:end]).double()
        return total

    def add_decay(self, result: Tensor, v: Tensor) -> Tensor:
        """Add decay·v in place: the gradient of the penalty at v, and its Hessian product with v."""
        for begin, end, decay in self._decay_ranges():
            result[begin:end].add_(v[begin:end], alpha=decay)
        return result

    def _decay_ranges(self) -> list[tuple[int, int, float]]:
        """Return (begin, end, decay) of the parts of a vector with decay, adjacent leaves of equal decay merged."""
        ranges: list[tuple[int, int, float]] = []
        offset = 0
        for size, decay in zip(self._sizes, self.decays, strict=True):
            if decay:
                if ranges and ranges[-1][1:] == (offset, decay):
                    ranges[-1] = (ranges[-1][0], offset + size, decay)
                else:
                    ranges.append((offset, offset + size, decay))
            offset += size
        return ranges


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one tensor as a flat one of this type."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()  # the gradients of an embedding may be sparse
    return (tensor if tensor.dtype is dtype else tensor.to(dtype)).flatten()
