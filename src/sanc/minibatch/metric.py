"""The metric M in which steps on samples are measured, and M⁻¹g.

For a matrix of parameters with gradient G (a kernel is taken as out × the rest) the factors mean GGᵀ and mean GᵀG have
eigenvectors Q_L and Q_R, and with H = Q_LᵀGQ_R and V = mean H∘H

    M⁻¹g = Q_L (H / (√V + ε)) Q_Rᵀ,

the second moments of the gradient in the eigenbases of its Kronecker factors (Shampoo, Gupta et al. 2018; SOAP, Vyas et
al. 2024). Vectors, and a side that is longer than `largest_side`, keep the basis they have; with no basis at all M is
the diagonal of Adam. Matrices of one shape are worked on together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from sanc.core.saved import refuse, require_mapping, require_vector

MetricKind = Literal["kronecker", "diagonal", "none"]

_EPSILON = 1e-6
"""ε, in units of the root of a block's largest second moment: below it a direction is left alone, not blown up. It is
set when the bases are renewed."""
_RIDGE = 1e-3
"""δ, in units of the mean eigenvalue of a factor."""


class Metric:
    """M, learnt from gradients.

    Parameters
    ----------
    shapes : sequence of tuple
        Shapes of the parameters whose gradients lie one after another in a flat vector.
    kind : {"kronecker", "diagonal", "none"}
        Whether bases are turned, only coordinates are scaled, or M is the root mean square of the gradient's entries.
    like : Tensor
        A vector of the type and device of the gradients.
    largest_side : int
        A longer side of a matrix is not turned.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], kind: MetricKind, like: Tensor, largest_side: int) -> None:
        self._sizes = [math.prod(shape) for shape in shapes]
        self._scalar = kind == "none"
        self._unturned: list[int] = []
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, shape in enumerate(shapes):
            sides = turned_sides(shape, largest_side) if kind == "kronecker" else None
            if sides is None:
                self._unturned.append(place)
            else:
                places[sides].append(place)
        self._matrices = [_Matrices(shape, where, like, largest_side) for shape, where in places.items()]
        # V lies as it is worked on: the matrices of one shape after those of another, then what is not turned.
        self._order = [place for matrices in self._matrices for place in matrices.places] + self._unturned
        self._lengths = [len(m.places) * math.prod(m.shape) for m in self._matrices]
        self._lengths.append(sum(self._sizes) - sum(self._lengths))
        self._square = like.new_zeros(sum(self._sizes))
        self._alike = [math.prod(m.shape) for m in self._matrices for _ in m.places]  # coordinates of one ε
        self._alike += [self._lengths[-1]] if self._lengths[-1] else []
        self._floors = like.new_zeros(len(self._alike))

    def begin(self, g: Tensor) -> None:
        """Set up the bases with a first gradient."""
        self.direction(g, 1.0, 1.0)
        self.renew()

    def direction(self, g: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None = None) -> Tensor:
        """Learn from a gradient, which gets these weights in the second moments and in the factors; return M⁻¹g."""
        pieces = torch.split_with_sizes(g, self._sizes)
        blocks = [matrices.block(pieces) for matrices in self._matrices]
        if factor_weight is not None:
            for matrices, block in zip(self._matrices, blocks, strict=True):
                matrices.learn(block, factor_weight)
        turned = [matrices.turn(block) for matrices, block in zip(self._matrices, blocks, strict=True)]
        h = torch.cat([*(block.reshape(-1) for block in turned), *(pieces[place] for place in self._unturned)])
        square = h.square()
        self._square.lerp_(square.mean().expand_as(square) if self._scalar else square, weight)
        floor = torch.cat([one.expand(many) for one, many in zip(self._floors.unbind(), self._alike, strict=True)])
        h = h / (self._square.sqrt() + floor)
        *blocks, rest = torch.split_with_sizes(h, self._lengths)
        parts: list[Tensor] = []
        for matrices, block in zip(self._matrices, blocks, strict=True):
            back = matrices.turn_back(block.view(-1, *matrices.shape))
            parts += back.reshape(len(matrices.places), -1).unbind()
        parts += torch.split_with_sizes(rest, [self._sizes[place] for place in self._unturned])
        return torch.cat(self._in_order(parts))

    def _in_order(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Bring parts, that lie as V lies, into the order of the parameters."""
        return [part for _, part in sorted(zip(self._order, parts, strict=True), key=lambda pair: pair[0])]

    def renew(self) -> None:
        """Bring the eigenbases up to date with the factors, and ε with the second moments."""
        largest = []
        *blocks, rest = torch.split_with_sizes(self._square, self._lengths)
        for matrices, block in zip(self._matrices, blocks, strict=True):
            square = block.view(-1, *matrices.shape)
            matrices.renew(square)
            largest.append(square.amax(dim=(1, 2)))
        if len(rest):
            largest.append(rest.amax().reshape(1))
        self._floors.copy_(floor(torch.cat(largest)))

    def turned(self) -> list[int]:
        """Return the places of the matrices, in the order in which `floors` begins."""
        return self._order[: len(self._order) - len(self._unturned)]

    def tensors(self) -> list[Tensor]:
        """Return every tensor that the metric is made of, as it is."""
        return [self._square, self._floors, *(tensor for m in self._matrices for tensor in m.named().values())]

    def squares(self) -> Tensor:
        """Return the second moments V in the order of the parameters, each in the basis of its matrix."""
        lengths = [self._sizes[place] for place in self._order]
        return torch.cat(self._in_order(torch.split_with_sizes(self._square, lengths)))

    def factors(self) -> list[dict[str, Tensor]]:
        """Return for every parameter its factors and bases, as copies; of one that is not turned there are none."""
        found: list[dict[str, Tensor]] = [{} for _ in self._sizes]
        for matrices in self._matrices:
            for number, place in enumerate(matrices.places):
                found[place] = {name: tensor[number].clone() for name, tensor in matrices.named().items()}
        return found

    def floors(self) -> list[float]:
        """Return ε of every block."""
        found: list[float] = self._floors.tolist()
        return found

    def check(self, where: str, floors: Any, factors: Sequence[Mapping[str, Tensor]], *, known: bool) -> None:
        """Refuse what `floors` and `factors` cannot have returned; `known` says whether there was a metric at all."""
        wanted = self.factors() if known else []
        blocks = 1 + sum(map(bool, wanted)) if known else 0
        fits = isinstance(floors, (list, tuple)) and all(isinstance(e, float) and 0 <= e < math.inf for e in floors)
        if not fits or len(floors) != blocks:
            raise refuse(where, floors, f"a list of {blocks} finite numbers ≥ 0")
        nothing: dict[str, Tensor] = {}
        for place, (own, found) in enumerate(zip_longest(wanted, factors, fillvalue=nothing)):
            label = f"'factors' of parameter {place}"
            if set(require_mapping(label, found)) != set(own):
                raise refuse(label, sorted(found), f"tensors of the names {sorted(own)}")
            for name, tensor in own.items():
                require_vector(f"{label}, {name!r},", found[name], tuple(tensor.shape))

    def restore(self, squares: Tensor, factors: Sequence[Mapping[str, Tensor]], floors: Sequence[float]) -> None:
        """Go on from what `squares`, `factors` and `floors` returned."""
        self._floors.copy_(self._floors.new_tensor(floors))
        pieces = torch.split_with_sizes(squares, self._sizes)
        self._square.copy_(torch.cat([pieces[place] for place in self._order]))
        for matrices in self._matrices:
            for number, place in enumerate(matrices.places):
                for name, tensor in matrices.named().items():
                    tensor[number].copy_(factors[place][name])


class _Matrices:
    """Factors and bases of all matrices of one shape; a side that is not turned has a basis of no columns."""

    def __init__(self, shape: tuple[int, int], places: Sequence[int], like: Tensor, largest_side: int) -> None:
        self.shape, self.places = shape, places
        many, sides = len(places), [side if side <= largest_side else 0 for side in shape]
        self._factors = [like.new_zeros(many, side, side) for side in sides]
        self._bases = [torch.eye(side, dtype=like.dtype, device=like.device).repeat(many, 1, 1) for side in sides]
        self._left, self._right = (side > 0 for side in sides)

    def named(self) -> dict[str, Tensor]:
        """Return the factors and the bases."""
        names = ("left", "right", "left_basis", "right_basis")
        return dict(zip(names, (*self._factors, *self._bases), strict=True))

    def block(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the matrices among the pieces of a gradient, one after another."""
        first, *more = (pieces[place] for place in self.places)
        return (torch.stack([first, *more]) if more else first).view(-1, *self.shape)

    def learn(self, block: Tensor, weight: Tensor | float) -> None:
        """Let the factors learn."""
        if self._left:
            self._factors[0].lerp_(block @ block.mT, weight)
        if self._right:
            self._factors[1].lerp_(block.mT @ block, weight)

    def turn(self, block: Tensor) -> Tensor:
        """Return Q_Lᵀ G Q_R."""
        block = torch.bmm(self._bases[0].mT, block) if self._left else block
        return torch.bmm(block, self._bases[1]) if self._right else block

    def turn_back(self, block: Tensor) -> Tensor:
        """Return Q_L H Q_Rᵀ."""
        block = torch.bmm(self._bases[0], block) if self._left else block
        return torch.bmm(block, self._bases[1].mT) if self._right else block

    def renew(self, square: Tensor) -> None:
        """Make one step of the power method, Q ← the orthonormal factor of (F + δI)Q.

        δ keeps what the factor F says nothing about as it is, so that no basis depends on rounding. V, `square`, is
        carried over: what was diagonal in the old basis has, with U = Q_newᵀQ_old, the diagonal (U∘U)V in the new.
        """
        for side, (factor, basis) in enumerate(zip(self._factors, self._bases, strict=True)):
            if not basis.numel():
                continue
            ridge = _RIDGE * factor.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            new, fine = orthonormal(factor @ basis + ridge * basis)
            new = torch.where(fine[:, None, None], new, basis)
            change = (new.mT @ basis).square()
            square.copy_(change @ square if side == 0 else square @ change.mT)
            basis.copy_(new)


def orthonormal(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q of a = QR, and where it was found: from the Cholesky factor of aᵀa, which suits a GPU.

    In double precision QᵀQ = I up to 1e-16 times the square of a's condition, which for the power method is at most
    side/δ. M⁻¹ is symmetric and positive with any Q.
    """
    q = a.double() / a.abs().amax(dim=(-2, -1), keepdim=True)
    root, trouble = torch.linalg.cholesky_ex(q.mT @ q)
    fine = (trouble == 0) & torch.isfinite(q).all(-1).all(-1)
    return torch.linalg.solve_triangular(root, q.mT, upper=False).mT.to(a.dtype), fine


def turned_sides(shape: tuple[int, ...], largest_side: int) -> tuple[int, int] | None:
    """Return rows and columns of a parameter as a matrix; None where neither of its sides is turned."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(rows, 1)
    return (rows, columns) if 1 < min(rows, columns) <= largest_side else None


def floor(largest: Tensor) -> Tensor:
    """ε of blocks with these largest second moments."""
    return _EPSILON * largest.sqrt() + math.sqrt(torch.finfo(largest.dtype).tiny)
