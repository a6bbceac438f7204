"""The Kronecker metric: second moments in the eigenbases of a matrix's Kronecker factors.

For a matrix of parameters with gradient G (a kernel is taken as out × the rest) the factors mean GGᵀ and mean GᵀG have
eigenvectors Q_L and Q_R, and with H = Q_LᵀGQ_R and V = mean H∘H

    M⁻¹g = Q_L (H / (√V + ε)) Q_Rᵀ

(Shampoo, Gupta et al. 2018; SOAP, Vyas et al. 2024). Vectors, and a side longer than `largest_side`, keep their
coordinates. Matrices of one shape are handled together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.settings import AT_LEAST_ONE, BELOW_ONE, COUNT, Piece, setting
from sanc.minibatch.metrics.base import Preconditioner, Reduce, Shape, epsilon, sizes_of

_RIDGE = 1e-3
"""δ, relative to the mean eigenvalue of a factor. It bounds the condition number of the power step by side/δ, so that
Cholesky in float64 leaves QᵀQ − I near 1e-16 (side/δ)², that is 1e-4 for a side of 1,000."""
_SIDES = ("left", "right")


@dataclass(frozen=True, kw_only=True)
class Kronecker(Piece):
    """Second moments in the eigenbases of the Kronecker factors of each matrix.

    Attributes
    ----------
    memory : float
        Decay of the means of GGᵀ, GᵀG and H∘H.
    refresh : int
        Steps after which the eigenbases are refreshed by one step of the power method; more often at first, less often
        in a long run.
    largest_side : int
        A longer side of a matrix keeps its coordinates, which saves memory and time.
    """

    memory: float = setting(0.95, BELOW_ONE)
    refresh: int = setting(50, AT_LEAST_ONE)
    largest_side: int = setting(1024, COUNT)

    def couples(self, shape: Shape) -> bool:
        """Whether a side of the matrix is rotated."""
        return rotated_sides(shape, self.largest_side) is not None

    def create(self, shapes: Sequence[Shape], like: Tensor, reduce: Reduce | None = None) -> Preconditioner:
        """Return the preconditioner; with `reduce`, the ranks may share parameters that are not coupled."""
        return _Kronecker(self, shapes, like, reduce)


def rotated_sides(shape: Shape, largest_side: int) -> tuple[int, int] | None:
    """Return rows and columns of a parameter as a matrix; None where neither side is rotated."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(rows, 1)
    return (rows, columns) if 1 < min(rows, columns) <= largest_side else None


class _Kronecker(Preconditioner):
    like_parameter = ("second_moment",)

    def __init__(self, metric: Kronecker, shapes: Sequence[Shape], like: Tensor, reduce: Reduce | None) -> None:
        self._shapes, self._sizes, self._reduce = list(shapes), sizes_of(shapes), reduce
        self._plain: list[int] = []  # places of the parameters that are not rotated
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, shape in enumerate(shapes):
            sides = rotated_sides(shape, metric.largest_side)
            if sides is None:
                self._plain.append(place)
            else:
                places[sides].append(place)
        self._stacks = [_Stack(sides, where, like, metric.largest_side) for sides, where in places.items()]
        # V lies stack by stack, followed by what is not rotated. A block is a matrix, or all that is not rotated.
        self._order = [place for stack in self._stacks for place in stack.places] + self._plain
        self._lengths = [len(stack.places) * math.prod(stack.sides) for stack in self._stacks]
        self._lengths.append(sum(self._sizes) - sum(self._lengths))
        self._square = like.new_zeros(sum(self._sizes))
        self._blocks = [math.prod(stack.sides) for stack in self._stacks for _ in stack.places]
        self._blocks += [self._lengths[-1]] if self._lengths[-1] else []
        self._epsilon = like.new_zeros(len(self._blocks))

    def update(self, g: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None = None) -> Tensor:
        h = self._rotated(g, factor_weight)
        self._square.lerp_(h.square(), weight)
        return self._rotated_back(h)

    def apply(self, g: Tensor) -> Tensor:
        return self._rotated_back(self._rotated(g, None))

    def _rotated(self, g: Tensor, factor_weight: Tensor | float | None) -> Tensor:
        """Return H of all matrices and the rest of g, in the order of V; update the factors on the way."""
        pieces = torch.split_with_sizes(g, self._sizes)
        rotated = []
        for stack in self._stacks:
            block = stack.gather(pieces)
            if factor_weight is not None:
                stack.update(block, factor_weight)
            rotated.append(stack.rotate(block).reshape(-1))
        return torch.cat([*rotated, *(pieces[place] for place in self._plain)])

    def _rotated_back(self, h: Tensor) -> Tensor:
        """Return M⁻¹g for a rotated gradient."""
        eps = torch.cat([one.expand(many) for one, many in zip(self._epsilon.unbind(), self._blocks, strict=True)])
        *blocks, rest = torch.split_with_sizes(h / (self._square.sqrt() + eps), self._lengths)
        parts: list[Tensor] = []
        for stack, block in zip(self._stacks, blocks, strict=True):
            back = stack.rotate_back(block.view(-1, *stack.sides))
            parts += back.reshape(len(stack.places), -1).unbind()
        parts += torch.split_with_sizes(rest, [self._sizes[place] for place in self._plain])
        return torch.cat(self._in_order(parts))

    def _in_order(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Bring parts from the order of V into that of the parameters."""
        return [part for _, part in sorted(zip(self._order, parts, strict=True), key=lambda pair: pair[0])]

    def refresh(self) -> None:
        largest = []
        *blocks, rest = torch.split_with_sizes(self._square, self._lengths)
        for stack, block in zip(self._stacks, blocks, strict=True):
            square = block.view(-1, *stack.sides)
            stack.refresh(square)
            largest.append(square.amax(dim=(1, 2)))
        if len(rest):
            over_rest = rest.amax().reshape(1)
            largest.append(over_rest if self._reduce is None else self._reduce.largest(over_rest))
        self._epsilon.copy_(epsilon(torch.cat(largest)))

    def tensors(self) -> list[Tensor]:
        return [self._square, self._epsilon, *(tensor for stack in self._stacks for tensor in stack.named().values())]

    def save(self) -> list[dict[str, Tensor]]:
        squares = self._in_order(torch.split_with_sizes(self._square, [self._sizes[place] for place in self._order]))
        shaped = zip(squares, self._shapes, strict=True)
        found = [{"second_moment": square.clone().view(shape)} for square, shape in shaped]
        for stack in self._stacks:
            for number, place in enumerate(stack.places):
                found[place] |= {name: tensor[number].clone() for name, tensor in stack.named().items()}
        for block, place in enumerate(self._order):
            found[place]["epsilon"] = self._epsilon[min(block, len(self._epsilon) - 1)].reshape(1).clone()
        return found

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        self._square.copy_(torch.cat([saved[place]["second_moment"].reshape(-1) for place in self._order]))
        for stack in self._stacks:
            for name, tensor in stack.named().items():
                tensor.copy_(torch.stack([saved[place][name] for place in stack.places]))
        for block in range(len(self._epsilon)):
            self._epsilon[block] = saved[self._order[block]]["epsilon"][0]


class _Stack:
    """Matrices of one shape, with their factors and eigenbases stacked."""

    def __init__(self, sides: tuple[int, int], places: Sequence[int], like: Tensor, largest_side: int) -> None:
        self.sides, self.places = sides, list(places)
        self._rotates = [side <= largest_side for side in sides]
        kept = [side if rotates else 0 for side, rotates in zip(sides, self._rotates, strict=True)]
        self._factors = [like.new_zeros(len(places), side, side) for side in kept]
        self._bases = [like.new_zeros(len(places), side, side) for side in kept]
        for basis in self._bases:
            basis.diagonal(dim1=1, dim2=2).fill_(1.0)

    def named(self) -> dict[str, Tensor]:
        """Return the factors and the bases of the sides that are rotated."""
        found: dict[str, Tensor] = {}
        for side, rotates, factor, basis in zip(_SIDES, self._rotates, self._factors, self._bases, strict=True):
            if rotates:
                found |= {side: factor, f"{side}_basis": basis}
        return found

    def gather(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the matrices among the pieces of a gradient, one after another."""
        first, *more = (pieces[place] for place in self.places)
        return (torch.stack([first, *more]) if more else first).view(-1, *self.sides)

    def update(self, block: Tensor, weight: Tensor | float) -> None:
        """Update the factors."""
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

    def refresh(self, square: Tensor) -> None:
        """Make one step of the power method, Q ← the orthonormal factor of (F + δI)Q.

        δ keeps the directions in which the factor F is zero as they are, so that no basis depends on roundoff. V,
        `square`, is carried over: a diagonal V in the old basis has, with U = Q_newᵀQ_old, the diagonal (U∘U)V in the
        new one.
        """
        for side, (factor, basis) in enumerate(zip(self._factors, self._bases, strict=True)):
            if not self._rotates[side]:
                continue
            ridge = _RIDGE * factor.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            new, found = orthonormal(factor @ basis + ridge * basis)
            new = torch.where(found[:, None, None], new, basis)
            change = (new.mT @ basis).square()
            square.copy_(change @ square if side == 0 else square @ change.mT)
            basis.copy_(new)


def orthonormal(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q of a = QR and whether it was found, from the Cholesky factor of aᵀa, which suits a GPU.

    In double precision QᵀQ = I up to 1e-16 times the square of a's condition number, which for the power method is at
    most side/δ. M⁻¹ is symmetric and positive with any Q.
    """
    q = a.double() / a.abs().amax(dim=(-2, -1), keepdim=True)
    root, trouble = torch.linalg.cholesky_ex(q.mT @ q)
    found = (trouble == 0) & torch.isfinite(q).all(-1).all(-1)
    return torch.linalg.solve_triangular(root, q.mT, upper=False).mT.to(a.dtype), found
