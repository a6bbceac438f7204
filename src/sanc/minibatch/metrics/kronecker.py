"""The Kronecker metric: second moments in the eigenbases of a matrix's Kronecker factors.

For a matrix of parameters with gradient G (a kernel is reshaped to its first dimension × the others), Q_L and Q_R are
the eigenvectors of the factors mean GGᵀ and mean GᵀG. With H = Q_LᵀGQ_R and V = mean H∘H

    M⁻¹g = Q_L (H / (√V + ε)) Q_Rᵀ

(Shampoo, Gupta et al. 2018; SOAP, Vyas et al. 2024). Vectors are not rotated, nor is a side longer than `largest_side`.
Matrices of one shape are stacked, so that one product serves all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.settings import AT_LEAST_ONE, BELOW_ONE, COUNT, Piece, setting
from sanc.minibatch.metrics.base import Preconditioner, RankReduction, Shape, epsilon_for, sizes_of

_RIDGE = 1e-3
"""δ, relative to the mean eigenvalue of a factor. It bounds the condition number of the power step by side/δ, so that
Cholesky in float64 leaves QᵀQ − I near 1e-16 (side/δ)², that is 1e-4 for a side of 1,000."""
_SIDES = ("left", "right")
"""Names of the sides in a saved state."""


@dataclass(frozen=True, kw_only=True)
class Kronecker(Piece):
    """Second moments in the eigenbases of the Kronecker factors of each matrix.

    Attributes
    ----------
    memory : float
        Decay of the means of GGᵀ, GᵀG and H∘H.
    refresh : int
        Steps between two refreshes of the eigenbases, each by one step of the power method; fewer at first, more in a
        long run.
    largest_side : int
        A longer side of a matrix is not rotated, which saves memory and time.
    """

    memory: float = setting(0.95, BELOW_ONE)
    refresh: int = setting(50, AT_LEAST_ONE)
    largest_side: int = setting(1024, COUNT)

    def couples(self, shape: Shape) -> bool:
        """Whether a side of the matrix is rotated."""
        return rotated_sides(shape, self.largest_side) is not None

    def create(self, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None = None) -> Preconditioner:
        """Return the preconditioner; with `reduce`, the ranks may share parameters that are not coupled."""
        return _Kronecker(self, shapes, like, reduce)


def rotated_sides(shape: Shape, largest_side: int) -> tuple[int, int] | None:
    """Return rows and columns of a parameter as a matrix; None if neither side is rotated."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(rows, 1)
    return (rows, columns) if 1 < min(rows, columns) <= largest_side else None


class _Kronecker(Preconditioner):
    like_parameter = ("second_moment",)

    def __init__(self, metric: Kronecker, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None) -> None:
        self._shapes, self._sizes, self._reduce = list(shapes), sizes_of(shapes), reduce
        self._unrotated: list[int] = []  # the parameters that are not rotated
        by_sides: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, shape in enumerate(shapes):
            sides = rotated_sides(shape, metric.largest_side)
            if sides is None:
                self._unrotated.append(index)
            else:
                by_sides[sides].append(index)
        self._stacks = [_Stack(sides, indices, like, metric.largest_side) for sides, indices in by_sides.items()]
        # V holds one stack after the other, then the parameters that are not rotated. Each is a group of entries. A
        # block has one ε: it is a matrix, or all parameters that are not rotated.
        self._order = [index for stack in self._stacks for index in stack.indices] + self._unrotated
        self._group_sizes = [len(stack.indices) * math.prod(stack.sides) for stack in self._stacks]
        self._group_sizes.append(sum(self._sizes) - sum(self._group_sizes))
        self._second_moment = like.new_zeros(sum(self._sizes))
        self._block_sizes = [math.prod(stack.sides) for stack in self._stacks for _ in stack.indices]
        self._block_sizes += [self._group_sizes[-1]] if self._group_sizes[-1] else []
        self._epsilon = like.new_zeros(len(self._block_sizes))

    def update(self, g: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None = None) -> Tensor:
        h = self._rotated(g, factor_weight)
        self._second_moment.lerp_(h.square(), weight)
        return self._rotated_back(h)

    def apply(self, g: Tensor) -> Tensor:
        return self._rotated_back(self._rotated(g, None))

    def _rotated(self, g: Tensor, factor_weight: Tensor | float | None) -> Tensor:
        """Return g in the order of V, with H in place of G; update the factors unless `factor_weight` is None."""
        pieces = torch.split_with_sizes(g, self._sizes)
        rotated = []
        for stack in self._stacks:
            matrices = stack.gather(pieces)
            if factor_weight is not None:
                stack.update(matrices, factor_weight)
            rotated.append(stack.rotate(matrices).reshape(-1))
        return torch.cat([*rotated, *(pieces[index] for index in self._unrotated)])

    def _rotated_back(self, h: Tensor) -> Tensor:
        """Return M⁻¹g for a rotated gradient."""
        blocks = zip(self._epsilon.unbind(), self._block_sizes, strict=True)
        eps = torch.cat([value.expand(size) for value, size in blocks])
        *rotated, unrotated = torch.split_with_sizes(h / (self._second_moment.sqrt() + eps), self._group_sizes)
        parts: list[Tensor] = []
        for stack, group in zip(self._stacks, rotated, strict=True):
            matrices = stack.rotate_back(group.view(-1, *stack.sides))
            parts += matrices.reshape(len(stack.indices), -1).unbind()
        parts += torch.split_with_sizes(unrotated, [self._sizes[index] for index in self._unrotated])
        return torch.cat(self._in_order(parts))

    def _in_order(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return parts that are in the order of V in the order of the parameters."""
        return [part for _, part in sorted(zip(self._order, parts, strict=True), key=lambda pair: pair[0])]

    def refresh(self) -> None:
        largest = []
        *rotated, unrotated = torch.split_with_sizes(self._second_moment, self._group_sizes)
        for stack, group in zip(self._stacks, rotated, strict=True):
            second_moments = group.view(-1, *stack.sides)
            stack.refresh(second_moments)
            largest.append(second_moments.amax(dim=(1, 2)))
        if len(unrotated):
            local = unrotated.amax().reshape(1)
            largest.append(local if self._reduce is None else self._reduce.largest(local))
        self._epsilon.copy_(epsilon_for(torch.cat(largest)))

    def tensors(self) -> list[Tensor]:
        return [
            self._second_moment,
            self._epsilon,
            *(tensor for stack in self._stacks for tensor in stack.named_tensors().values()),
        ]

    def save(self) -> list[dict[str, Tensor]]:
        moments = self._in_order(
            torch.split_with_sizes(self._second_moment, [self._sizes[index] for index in self._order])
        )
        shaped = zip(moments, self._shapes, strict=True)
        saved = [{"second_moment": moment.clone().view(shape)} for moment, shape in shaped]
        for stack in self._stacks:
            for number, index in enumerate(stack.indices):
                saved[index] |= {name: tensor[number].clone() for name, tensor in stack.named_tensors().items()}
        for block, index in enumerate(self._order):
            saved[index]["epsilon"] = self._epsilon[min(block, len(self._epsilon) - 1)].reshape(1).clone()
        return saved

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        self._second_moment.copy_(torch.cat([saved[index]["second_moment"].reshape(-1) for index in self._order]))
        for stack in self._stacks:
            for name, tensor in stack.named_tensors().items():
                tensor.copy_(torch.stack([saved[index][name] for index in stack.indices]))
        for block in range(len(self._epsilon)):
            self._epsilon[block] = saved[self._order[block]]["epsilon"][0]


class _Stack:
    """Matrices of one shape, with their factors and eigenbases stacked."""

    def __init__(self, sides: tuple[int, int], indices: Sequence[int], like: Tensor, largest_side: int) -> None:
        self.sides, self.indices = sides, list(indices)
        self._rotates = [side <= largest_side for side in sides]
        basis_sizes = [side if rotates else 0 for side, rotates in zip(sides, self._rotates, strict=True)]
        self._factors = [like.new_zeros(len(indices), size, size) for size in basis_sizes]
        self._bases = [like.new_zeros(len(indices), size, size) for size in basis_sizes]
        for basis in self._bases:
            basis.diagonal(dim1=1, dim2=2).fill_(1.0)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the factors and the bases of the sides that are rotated."""
        tensors: dict[str, Tensor] = {}
        for side, rotates, factor, basis in zip(_SIDES, self._rotates, self._factors, self._bases, strict=True):
            if rotates:
                tensors |= {side: factor, f"{side}_basis": basis}
        return tensors

    def gather(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the matrices among the pieces of a gradient, one after another."""
        first, *others = (pieces[index] for index in self.indices)
        return (torch.stack([first, *others]) if others else first).view(-1, *self.sides)

    def update(self, block: Tensor, weight: Tensor | float) -> None:
        """Update the factors mean GGᵀ and mean GᵀG."""
        if self._rotates[0]:
            self._factors[0].lerp_(block @ block.mT, weight)
        if self._rotates[1]:
            self._factors[1].lerp_(block.mT @ block, weight)

    def rotate(self, block: Tensor) -> Tensor:
        """Return Q_Lᵀ G Q_R."""
        block = torch.bmm(self._bases[0].mT, block) if self._rotates[0] else block
        return torch.bmm(block, self._bases[1]) if self._rotates[1] else block

    def rotate_back(self, block: Tensor) -> Tensor:
        """Return Q_L H Q_Rᵀ."""
        block = torch.bmm(self._bases[0], block) if self._rotates[0] else block
        return torch.bmm(block, self._bases[1].mT) if self._rotates[1] else block

    def refresh(self, second_moments: Tensor) -> None:
        """Make one step of the power method, Q ← the orthonormal factor of (F + δI)Q.

        δ leaves basis vectors in the null space of the factor F unchanged, so that they do not depend on roundoff. The
        second moments V are transformed in place: a diagonal V in the old basis has, with U = Q_newᵀQ_old, the diagonal
        (U∘U)V in the new one.
        """
        for side, (factor, basis) in enumerate(zip(self._factors, self._bases, strict=True)):
            if not self._rotates[side]:
                continue
            ridge = _RIDGE * factor.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            new_basis, succeeded = orthonormal(factor @ basis + ridge * basis)
            new_basis = torch.where(succeeded[:, None, None], new_basis, basis)
            change = (new_basis.mT @ basis).square()
            second_moments.copy_(change @ second_moments if side == 0 else second_moments @ change.mT)
            basis.copy_(new_basis)


def orthonormal(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q of a = QR from the Cholesky factor of aᵀa, which is fast on a GPU, and whether that succeeded.

    In double precision QᵀQ = I up to 1e-16 times the square of a's condition number, which for the power method is at
    most side/δ. M⁻¹ is symmetric and positive with any Q.
    """
    q = a.double() / a.abs().amax(dim=(-2, -1), keepdim=True)
    factor, info = torch.linalg.cholesky_ex(q.mT @ q)
    succeeded = (info == 0) & torch.isfinite(q).all(-1).all(-1)
    return torch.linalg.solve_triangular(factor, q.mT, upper=False).mT.to(a.dtype), succeeded
