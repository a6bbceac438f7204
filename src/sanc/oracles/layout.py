"""Leaf tensors as flat vectors, and the losses that are made from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

Closure = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A loss on one sample: closures whose weighted sum it is, its size, and the seed its randomness replays.

    Attributes
    ----------
    name : str
        The argument it came from, for messages.
    parts : sequence of (float, callable)
        Weights and closures; more than one when the sample is cut into micro-batches.
    size : int
        Components in it.
    seed : int
        What its random draws are a function of; None for a function that draws nothing.
    """

    name: str
    parts: Sequence[tuple[float, Closure]]
    size: int
    seed: int | None


class Layout:
    """How flat vectors lie in leaf tensors, and the weight decay of each stretch."""

    def __init__(self, leaves: Sequence[Tensor], decays: Sequence[float]) -> None:
        self.leaves = list(leaves)
        self._sizes = [leaf.numel() for leaf in self.leaves]
        self._shapes = [leaf.shape for leaf in self.leaves]
        self.dim = sum(self._sizes)
        self.shares = [size / max(self.dim, 1) for size in self._sizes]  # of all entries
        self.repeats: dict[str, bool] = {}  # by kind of product: whether the loss uses leaves so often that it matters
        self.kind = (self.leaves[0].dtype, self.leaves[0].device)
        self._given = list(decays)
        self.decays: list[tuple[int, int, float]] = []
        offset = 0
        for size, decay in zip(self._sizes, decays, strict=True):
            if decay:
                if self.decays and self.decays[-1][1:] == (offset, decay):
                    self.decays[-1] = (self.decays[-1][0], offset + size, decay)
                else:
                    self.decays.append((offset, offset + size, decay))
            offset += size

    def matches(self, other: Layout) -> bool:
        """Whether vectors of one are vectors of the other: the same leaves, type and device."""
        if self is other:
            return True
        same = len(self.leaves) == len(other.leaves) and self.kind == other.kind
        return same and all(a is b for a, b in zip(self.leaves, other.leaves, strict=True))

    def is_of(self, leaves: Sequence[Tensor], decays: Sequence[float]) -> bool:
        """Whether it is the layout of these very leaves as they are now."""
        same = len(leaves) == len(self.leaves) and all(map(operator.is_, leaves, self.leaves))
        dtype, device = self.kind
        return same and decays == self._given and all(p.dtype == dtype and p.device == device for p in leaves)

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor | None = None, *, graph: bool = False) -> Tensor:
        """Join per-leaf tensors into one vector, new or `out`, with their graph or without; a missing one is zero."""
        dtype = self.kind[0]
        pieces = [
            leaf.new_zeros(leaf.numel()) if tensor is None else _plain(tensor, dtype, graph)
            for leaf, tensor in zip(self.leaves, tensors, strict=True)
        ]
        return torch.cat(pieces, out=out)

    def gather(self, tensors: Sequence[Tensor | None], weight: float, into: Tensor | None) -> Tensor:
        """Add weighted per-leaf tensors to a vector in place; to a new one where there is none yet."""
        if into is None:
            joined = self.flatten(tensors)
            return joined if weight == 1.0 else joined.mul_(weight)
        dtype = self.kind[0]
        pairs = [
            (part, _plain(t, dtype).view_as(part))
            for part, t in zip(self.split(into), tensors, strict=True)
            if t is not None
        ]
        if pairs:
            parts, found = zip(*pairs, strict=True)
            torch._foreach_add_(parts, found, alpha=weight)
        return into

    def split(self, vector: Tensor) -> list[Tensor]:
        """Cut a flat vector, or a block of them, into tensors of the leaves' shapes; of a vector they are views."""
        rows = vector.shape[:-1]
        if not rows and vector.is_contiguous() and all(self._sizes):
            return list(_unflatten_dense_tensors(vector, self.leaves))  # type: ignore[no-untyped-call]
        pieces = torch.split_with_sizes(vector, self._sizes, dim=-1)
        return [piece.reshape(rows + shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Undo `split`."""
        pairs = zip(tensors, self.leaves, strict=True)
        return torch.cat([t.reshape(*t.shape[: t.ndim - leaf.ndim], leaf.numel()) for t, leaf in pairs], dim=-1)

    def write(self, vector: Tensor) -> None:
        """Copy a flat vector into the leaves."""
        with torch.no_grad():
            torch._foreach_copy_(self.leaves, self.split(vector))
        torch.clear_autocast_cache()  # it may hold casts of the old content

    def penalised(self, loss: Tensor, x: Tensor) -> Tensor:
        """Add ½ Σ decay·‖x‖² over the stretches that have one, in float64 and not yet read."""
        total = loss.detach().double()
        for a, b, decay in self.decays:
            total = total + 0.5 * decay * torch.dot(x[a:b], x[a:b]).double()
        return total

    def add_decay(self, result: Tensor, v: Tensor) -> Tensor:
        """Add decay·v, the penalty's gradient and Hessian product alike, in place."""
        for a, b, decay in self.decays:
            result[a:b].add_(v[a:b], alpha=decay)
        return result


def _plain(tensor: Tensor, dtype: torch.dtype, graph: bool = False) -> Tensor:
    """Flatten one tensor, out of its graph or in it."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()  # an embedding may give sparse gradients
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    if tensor.requires_grad and not graph:
        tensor = tensor.detach()
    return tensor if tensor.ndim == 1 else tensor.flatten()
