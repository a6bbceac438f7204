"""The Kronecker metric: second moments in the eigenbases of a matrix's Kronecker factors.

For a matrix of parameters with gradient G (a kernel is reshaped to its first dimension × the others), Q_L and Q_R are
the eigenvectors of the factors mean GGᵀ and mean GᵀG. With H = Q_LᵀGQ_R and V = mean H∘H

    M⁻¹g = Q_L (H / (√V + ε)) Q_Rᵀ

(Shampoo, Gupta et al. 2018; SOAP, Vyas et al. 2024). Vectors are not rotated. A side longer than `largest_side` is
divided into equal blocks, and its factor is the block diagonal of mean GGᵀ or mean GᵀG. Matrices of one shape are
stacked, so that one product serves all of them. The stacks are refreshed at different steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.settings import AT_LEAST_ONE, BELOW_ONE, Piece, setting
from sanc.minibatch.metrics.base import Preconditioner, RankReduction, Shape, epsilon_for, matrix_sides, sizes_of

_RELATIVE_RIDGE = 1e-3
"""δ, relative to the mean eigenvalue of a factor. It bounds the condition number of the power step by side/δ, so that
Cholesky in float64 leaves QᵀQ − I near 1e-16 (side/δ)², that is 1e-4 for a side of 1,000."""


@dataclass(frozen=True, kw_only=True)
class Kronecker(Piece):
    """Second moments in the eigenbases of the Kronecker factors of each matrix.

    Attributes
    ----------
    memory : float
        Decay of the means of GGᵀ, GᵀG and H∘H.
    refresh : int
        Steps between two refreshes of the eigenbases, each by one step of the power method; fewer at first.
    largest_side : int
        Longer sides of a matrix are split into blocks no longer than this and than the other side.
    """

    memory: float = setting(0.95, BELOW_ONE)  # a mean over 20 gradients; docs/constants.md has 0.8 and 0.99
    refresh: int = setting(10, AT_LEAST_ONE)  # docs/results/networks.md has 5, and what fewer refreshes lose
    largest_side: int = setting(1024, AT_LEAST_ONE)  # docs/results/networks.md has 256

    def couples(self, shape: Shape) -> bool:
        """Return whether the parameter has two sides, which are rotated."""
        return matrix_sides(shape) is not None

    def create(self, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None = None) -> Preconditioner:
        """Return the preconditioner; with `reduce`, the ranks may share parameters that are not coupled."""
        return KroneckerPreconditioner(self, shapes, like, reduce)


class KroneckerPreconditioner(Preconditioner):
    """The preconditioner of `Kronecker`: a stack for each shape of matrices, and the vectors, which are not rotated."""

    like_parameter = ("second_moment",)
    always_finite = True

    def __init__(self, metric: Kronecker, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None) -> None:
        self._shapes, self._sizes, self._reduce = list(shapes), sizes_of(shapes), reduce
        self._unrotated: list[int] = []  # the parameters that are not rotated
        by_sides: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, shape in enumerate(shapes):
            sides = matrix_sides(shape)
            if sides is None:
                self._unrotated.append(index)
            else:
                by_sides[sides].append(index)
        self._stacks = [
            _Stack(sides, indices, [self._sizes[index] for index in indices], like, metric.largest_side)
            for sides, indices in by_sides.items()
        ]
        self._unrotated_moment = like.new_zeros(sum(self._sizes[index] for index in self._unrotated))
        self._unrotated_epsilon = like.new_zeros(1)

    @property
    def parts(self) -> int:
        return max(len(self._stacks), 1)

    def part_of(self, index: int) -> int:
        return next((part for part, stack in enumerate(self._stacks) if index in stack.indices), 0)

    def update(self, g: Tensor, weight: Tensor | float) -> Tensor:
        return self._preconditioned(g, weight)

    def apply(self, g: Tensor) -> Tensor:
        return self._preconditioned(g, None)

    def _preconditioned(self, g: Tensor, weight: Tensor | float | None) -> Tensor:
        """Update factors and second moments, unless `weight` is None, and return M⁻¹g."""
        gradients = torch.split_with_sizes(g, self._sizes)
        directions: dict[int, Tensor] = {}
        for stack in self._stacks:
            matrices = stack.gather(gradients)
            if weight is not None:
                stack.update(matrices, weight)
            directions |= stack.preconditioned(matrices, weight)
        if self._unrotated:
            vectors = torch.cat([gradients[index] for index in self._unrotated])
            if weight is not None:
                self._unrotated_moment.lerp_(vectors.square(), weight)
            scaled = vectors.div_(self._unrotated_moment.sqrt().add_(self._unrotated_epsilon))
            sizes = [self._sizes[index] for index in self._unrotated]
            directions |= zip(self._unrotated, torch.split_with_sizes(scaled, sizes), strict=True)
        return torch.cat([directions[index] for index in range(len(self._sizes))])

    def refresh(self, part: int = 0) -> None:
        if self._stacks:
            self._stacks[part].refresh()
        if part == 0 and self._unrotated:
            local = self._unrotated_moment.amax().reshape(1)
            largest = local if self._reduce is None else self._reduce.largest(local)
            self._unrotated_epsilon.copy_(epsilon_for(largest))

    def tensors(self) -> list[Tensor]:
        return [
            self._unrotated_moment,
            self._unrotated_epsilon,
            *(t for stack in self._stacks for t in stack.tensors()),
        ]

    def save(self) -> list[dict[str, Tensor]]:
        saved: dict[int, dict[str, Tensor]] = {}
        for stack in self._stacks:
            saved |= stack.save()
        sizes = [self._sizes[index] for index in self._unrotated]
        for index, moment in zip(self._unrotated, torch.split_with_sizes(self._unrotated_moment, sizes), strict=True):
            saved[index] = {"second_moment": moment.clone(), "epsilon": self._unrotated_epsilon.clone()}
        for index, shape in enumerate(self._shapes):
            saved[index]["second_moment"] = saved[index]["second_moment"].view(shape)
        return [saved[index] for index in range(len(self._shapes))]

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        for stack in self._stacks:
            stack.restore(saved)
        if self._unrotated:
            moments = [saved[index]["second_moment"].reshape(-1) for index in self._unrotated]
            self._unrotated_moment.copy_(torch.cat(moments))
            self._unrotated_epsilon.copy_(saved[self._unrotated[0]]["epsilon"])


class _Side:
    """The factor and the eigenbasis of one side of the matrices in a stack, in equal blocks.

    Attributes
    ----------
    factor, basis : Tensor
        One matrix for each block of each matrix in the stack.
    blocks, block_side : int
        Number and side of the blocks. The last block may extend beyond the side.
    """

    def __init__(self, side: int, limit: int, count: int, like: Tensor) -> None:
        self.blocks = -(-side // limit)
        self.block_side = -(-side // self.blocks)
        self.factor = like.new_zeros(count * self.blocks, self.block_side, self.block_side)
        self.basis = torch.zeros_like(self.factor)
        self.basis.diagonal(dim1=1, dim2=2).fill_(1.0)


class _Stack:
    """Matrices of one shape, with their factors, eigenbases and second moments stacked.

    Matrices are padded with zeros to whole blocks.

    Attributes
    ----------
    indices : list of int
        The parameters that the matrices belong to.
    """

    def __init__(
        self, sides: tuple[int, int], indices: Sequence[int], sizes: Sequence[int], like: Tensor, largest_side: int
    ) -> None:
        self._sides, self.indices = sides, list(indices)
        self._counts = [size // math.prod(sides) for size in sizes]  # matrices of each parameter
        count = sum(self._counts)
        # A long side has blocks no longer than the other side, so that factors and bases have a bounded number of
        # entries: at most twice as many as the parameter for each.
        limits = [largest_side if side <= largest_side else min(largest_side, min(sides)) for side in sides]
        self._rows, self._columns = (_Side(s, limit, count, like) for s, limit in zip(sides, limits, strict=True))
        self._padded = (self._rows.blocks * self._rows.block_side, self._columns.blocks * self._columns.block_side)
        self._second_moment = like.new_zeros(count, *self._padded)
        self._epsilon = like.new_zeros(count, 1, 1)

    def gather(self, gradients: Mapping[int, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return the matrices among the gradients of all parameters, one after another, padded to whole blocks."""
        matrices = [gradients[index].view(-1, *self._sides) for index in self.indices]
        stacked = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
        (rows, columns), (padded_rows, padded_columns) = self._sides, self._padded
        if self._padded == self._sides:
            return stacked
        return torch.nn.functional.pad(stacked, (0, padded_columns - columns, 0, padded_rows - rows))

    def update(self, matrices: Tensor, weight: Tensor | float) -> None:
        """Update the factors mean GGᵀ and mean GᵀG."""
        by_rows, by_columns = self._by_rows(matrices), self._by_columns(matrices)
        self._rows.factor.lerp_(torch.bmm(by_rows, by_rows.mT), weight)
        self._columns.factor.lerp_(torch.bmm(by_columns.mT, by_columns), weight)

    def preconditioned(self, matrices: Tensor, weight: Tensor | float | None) -> dict[int, Tensor]:
        """Update V, unless `weight` is None, and return Q_L (H / (√V + ε)) Q_Rᵀ for each parameter."""
        h = torch.bmm(self._rows.basis.mT, self._by_rows(matrices)).view(matrices.shape)
        h = self._from_columns(torch.bmm(self._by_columns(h), self._columns.basis))
        if weight is not None:
            self._second_moment.lerp_(h.square(), weight)
        h = h / self._second_moment.sqrt().add_(self._epsilon)
        h = torch.bmm(self._rows.basis, self._by_rows(h)).view(matrices.shape)
        h = self._from_columns(torch.bmm(self._by_columns(h), self._columns.basis.mT))
        h = h[:, : self._sides[0], : self._sides[1]]
        return dict(zip(self.indices, (part.reshape(-1) for part in torch.split(h, self._counts)), strict=True))

    def _by_rows(self, matrices: Tensor) -> Tensor:
        """Return the blocks of rows of all matrices, one after another."""
        return matrices.view(-1, self._rows.block_side, self._padded[1])

    def _by_columns(self, matrices: Tensor) -> Tensor:
        """Return the blocks of columns of all matrices, one after another."""
        side = self._columns
        if side.blocks == 1:
            return matrices
        blocks = matrices.view(-1, self._padded[0], side.blocks, side.block_side).transpose(1, 2)
        return blocks.reshape(-1, self._padded[0], side.block_side)

    def _from_columns(self, blocks: Tensor) -> Tensor:
        """Return the matrices with these blocks of columns."""
        side = self._columns
        if side.blocks == 1:
            return blocks
        return blocks.view(-1, side.blocks, self._padded[0], side.block_side).transpose(1, 2).reshape(-1, *self._padded)

    def refresh(self) -> None:
        """Refresh the eigenbases, then ε.

        A diagonal V in the old basis has, with U = Q_newᵀQ_old, the diagonal (U∘U)V in the new one.
        """
        rows, columns = self._rows, self._columns
        new_rows, new_columns = self._refreshed_bases()
        moments = torch.bmm((new_rows.mT @ rows.basis).square(), self._by_rows(self._second_moment))
        moments = moments.view(self._second_moment.shape)
        moments = torch.bmm(self._by_columns(moments), (new_columns.mT @ columns.basis).square().mT)
        rows.basis.copy_(new_rows)
        columns.basis.copy_(new_columns)
        self._second_moment.copy_(self._from_columns(moments))
        self._epsilon.copy_(epsilon_for(self._second_moment.amax(dim=(1, 2), keepdim=True)))

    def _refreshed_bases(self) -> tuple[Tensor, Tensor]:
        """Return the refreshed bases of both sides, computed together if their blocks have the same size."""
        rows, columns = self._rows, self._columns
        if rows.block_side != columns.block_side:
            return refreshed_basis(rows.factor, rows.basis), refreshed_basis(columns.factor, columns.basis)
        factors, bases = torch.cat([rows.factor, columns.factor]), torch.cat([rows.basis, columns.basis])
        new_rows, new_columns = refreshed_basis(factors, bases).split([len(rows.factor), len(columns.factor)])
        return new_rows, new_columns

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is changed in place."""
        return [self._second_moment, self._epsilon, *self._side_tensors().values()]

    def _side_tensors(self) -> dict[str, Tensor]:
        """Return factors and bases by their names in a saved state."""
        named = (("left", self._rows), ("right", self._columns))
        factors = {name: side.factor for name, side in named}
        return factors | {f"{name}_basis": side.basis for name, side in named}

    def save(self) -> dict[int, dict[str, Tensor]]:
        """Return the state of each parameter; blocks are one below the other."""
        moments = self._second_moment[:, : self._sides[0], : self._sides[1]]
        saved: dict[int, dict[str, Tensor]] = {}
        for index, (begin, end) in self._ranges():
            entry = {"second_moment": moments[begin:end].reshape(-1).clone()}
            entry["epsilon"] = self._epsilon[begin:end].reshape(-1).clone()
            for name, tensor in self._side_tensors().items():
                blocks = len(tensor) // sum(self._counts)
                entry[name] = tensor[begin * blocks : end * blocks].reshape(-1, tensor.shape[-1]).clone()
            saved[index] = entry
        return saved

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore what `save` returned."""
        moments = {index: saved[index]["second_moment"].reshape(-1) for index in self.indices}
        self._second_moment.copy_(self.gather(moments))
        self._epsilon.copy_(torch.cat([saved[index]["epsilon"] for index in self.indices]).view(-1, 1, 1))
        for name, tensor in self._side_tensors().items():
            tensor.copy_(torch.cat([saved[index][name] for index in self.indices]).view(tensor.shape))

    def _ranges(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield each parameter with the range of its matrices in the stack."""
        begin = 0
        for index, count in zip(self.indices, self._counts, strict=True):
            yield index, (begin, begin + count)
            begin += count


def refreshed_basis(factor: Tensor, basis: Tensor) -> Tensor:
    """Return bases Q after a step of the power method on factors F: the orthonormal factor of (F + δI)Q.

    The columns are first sorted by QᵀFQ, largest first. δ leaves basis vectors in the null space of F unchanged, so
    that they do not depend on roundoff.
    """
    ridge = _RELATIVE_RIDGE * factor.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    product = factor @ basis
    order = (basis * product).sum(1).argsort(dim=1, descending=True, stable=True)[:, None, :].expand_as(basis)
    sorted_basis = basis.gather(2, order)
    new_basis, succeeded = orthonormal(product.gather(2, order) + ridge * sorted_basis)
    return torch.where(succeeded[:, None, None], new_basis, sorted_basis)


def orthonormal(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q of a = QR from the Cholesky factor of aᵀa, which is fast on a GPU, and whether that succeeded.

    In double precision QᵀQ = I up to 1e-16 times the square of a's condition number, which for the power method is at
    most side/δ. M⁻¹ is symmetric and positive with any Q.
    """
    q = a.double() / a.abs().amax(dim=(-2, -1), keepdim=True)
    factor, info = torch.linalg.cholesky_ex(q.mT @ q)
    succeeded = (info == 0) & torch.isfinite(q).all(-1).all(-1)
    return torch.linalg.solve_triangular(factor, q.mT, upper=False).mT.to(a.dtype), succeeded
