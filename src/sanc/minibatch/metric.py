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
from typing import Literal

import torch
from torch import Tensor

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
        self._flat: list[int] = []
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, shape in enumerate(shapes):
            rows = shape[0] if len(shape) > 1 else 1
            columns = self._sizes[place] // max(rows, 1)
            if kind == "kronecker" and 1 < min(rows, columns) <= largest_side:
                places[rows, columns].append(place)
            else:
                self._flat.append(place)
        self._lengths = [self._sizes[place] for place in self._flat]
        self._square, self._floor = like.new_zeros(sum(self._lengths)), like.new_zeros(1)
        self._matrices = [_Matrices(shape, where, like, largest_side) for shape, where in places.items()]

    def begin(self, g: Tensor) -> None:
        """Set up the bases with a first gradient."""
        self.direction(g, 1.0, 1.0)
        self.renew()

    def direction(self, g: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None = None) -> Tensor:
        """Learn from a gradient, which gets these weights in the second moments and in the factors; return M⁻¹g."""
        pieces = torch.split_with_sizes(g, self._sizes)
        found = list(pieces)
        if self._flat:
            rest = torch.cat([pieces[place] for place in self._flat])
            square = rest.square()
            self._square.lerp_(square.mean().expand_as(square) if self._scalar else square, weight)
            rest = rest / (self._square.sqrt() + self._floor)
            for place, part in zip(self._flat, torch.split_with_sizes(rest, self._lengths), strict=True):
                found[place] = part
        for matrices in self._matrices:
            block = torch.stack([pieces[place] for place in matrices.places]).view(-1, *matrices.shape)
            turned = matrices.direction(block, weight, factor_weight).reshape(len(matrices.places), -1)
            for place, part in zip(matrices.places, turned, strict=True):
                found[place] = part
        return torch.cat(found)

    def renew(self) -> None:
        """Bring the eigenbases up to date with the factors, and ε with the second moments."""
        if self._flat:
            self._floor.copy_(_floor(self._square))
        for matrices in self._matrices:
            matrices.renew()

    def tensors(self) -> list[Tensor]:
        """Return every tensor that the metric is made of, as it is."""
        blocks = [(matrices.square, matrices.floor, *matrices.named().values()) for matrices in self._matrices]
        return [self._square, self._floor, *(tensor for block in blocks for tensor in block)]

    def squares(self) -> Tensor:
        """Return the second moments V as a flat vector, each in the basis of its matrix."""
        found: list[Tensor] = [self._square] * len(self._sizes)
        for place, part in zip(self._flat, torch.split_with_sizes(self._square, self._lengths), strict=True):
            found[place] = part
        for matrices in self._matrices:
            for place, part in zip(matrices.places, matrices.square, strict=True):
                found[place] = part.reshape(-1)
        return torch.cat(found)

    def factors(self) -> list[dict[str, Tensor]]:
        """Return for every parameter its factors and bases, as copies; of one that is not turned there are none."""
        found: list[dict[str, Tensor]] = [{} for _ in self._sizes]
        for matrices in self._matrices:
            for number, place in enumerate(matrices.places):
                found[place] = {name: tensor[number].clone() for name, tensor in matrices.named().items()}
        return found

    def floors(self) -> list[float]:
        """Return ε of every block."""
        found: list[float] = torch.cat([self._floor, *(block.floor.reshape(-1) for block in self._matrices)]).tolist()
        return found

    def restore(self, squares: Tensor, factors: Sequence[Mapping[str, Tensor]], floors: Sequence[float]) -> None:
        """Go on from what `squares`, `factors` and `floors` returned."""
        blocks = [self._floor, *(block.floor for block in self._matrices)]
        held = torch.split_with_sizes(self._floor.new_tensor(floors), [block.numel() for block in blocks])
        for floor, part in zip(blocks, held, strict=True):
            floor.copy_(part.view_as(floor))
        pieces = torch.split_with_sizes(squares, self._sizes)
        if self._flat:
            self._square.copy_(torch.cat([pieces[place] for place in self._flat]))
        for matrices in self._matrices:
            for number, place in enumerate(matrices.places):
                matrices.square[number].copy_(pieces[place].view(matrices.shape))
                for name, tensor in matrices.named().items():
                    tensor[number].copy_(factors[place][name])


class _Matrices:
    """The metric of all matrices of one shape; a side that is not turned has a basis of no columns."""

    def __init__(self, shape: tuple[int, int], places: Sequence[int], like: Tensor, largest_side: int) -> None:
        self.shape, self.places = shape, places
        many, sides = len(places), [side if side <= largest_side else 0 for side in shape]
        self._factors = [like.new_zeros(many, side, side) for side in sides]
        self._bases = [torch.eye(side, dtype=like.dtype, device=like.device).repeat(many, 1, 1) for side in sides]
        self.square, self.floor = like.new_zeros(many, *shape), like.new_zeros(many, 1, 1)
        self._left, self._right = (side > 0 for side in sides)

    def named(self) -> dict[str, Tensor]:
        """Return the factors and the bases."""
        names = ("left", "right", "left_basis", "right_basis")
        return dict(zip(names, (*self._factors, *self._bases), strict=True))

    def direction(self, block: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None) -> Tensor:
        """Learn from a block of gradients, and return M⁻¹ of each."""
        turned = block
        if self._left:
            turned = self._bases[0].mT @ turned
        if self._right:
            turned = turned @ self._bases[1]
        if factor_weight is not None and self._left:
            self._factors[0].lerp_(block @ block.mT, factor_weight)
        if factor_weight is not None and self._right:
            self._factors[1].lerp_(block.mT @ block, factor_weight)
        self.square.lerp_(turned.square(), weight)
        turned = turned / (self.square.sqrt() + self.floor)
        if self._left:
            turned = self._bases[0] @ turned
        return turned @ self._bases[1].mT if self._right else turned

    def renew(self) -> None:
        """Make one step of the power method, Q ← the orthonormal factor of (F + δI)Q.

        δ keeps what the factor F says nothing about as it is, so that no basis depends on rounding. V is carried over:
        what was diagonal in the old basis has, with U = Q_newᵀQ_old, the diagonal (U∘U)V in the new.
        """
        for side, (factor, basis) in enumerate(zip(self._factors, self._bases, strict=True)):
            if not basis.numel():
                continue
            ridge = _RIDGE * factor.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            new = torch.linalg.qr(factor @ basis + ridge * basis).Q
            if not bool(torch.isfinite(new).all()):
                continue
            change = (new.mT @ basis).square()
            self.square.copy_(change @ self.square if side == 0 else self.square @ change.mT)
            basis.copy_(new)
        self.floor.copy_(_floor(self.square))


def _floor(square: Tensor) -> Tensor:
    """ε for a vector, or each matrix of a block."""
    dims = (1, 2) if square.ndim == 3 else (0,)
    return _EPSILON * square.amax(dim=dims, keepdim=True).sqrt() + math.sqrt(torch.finfo(square.dtype).tiny)
