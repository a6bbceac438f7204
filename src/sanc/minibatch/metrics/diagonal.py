"""The diagonal metric: second moments of the gradient's entries, as in Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.settings import AT_LEAST_ONE, BELOW_ONE, Piece, setting
from sanc.minibatch.metrics.base import Preconditioner, RankReduction, Shape, epsilon_for, sizes_of


@dataclass(frozen=True, kw_only=True)
class Diagonal(Piece):
    """M = diag(√V + ε) with V the mean of g∘g.

    Attributes
    ----------
    memory : float
        Decay of the mean.
    refresh : int
        Steps between two updates of ε.
    """

    memory: float = setting(0.95, BELOW_ONE)  # a mean over 20 gradients; docs/constants.md has 0.8 and 0.99
    refresh: int = setting(50, AT_LEAST_ONE)  # of ε, which changes slowly; nothing else is refreshed

    def couples(self, shape: Shape) -> bool:
        """Return False: each entry has its own second moment."""
        return False

    def create(self, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None = None) -> Preconditioner:
        """Return the preconditioner."""
        return DiagonalPreconditioner(shapes, like, reduce)


class DiagonalPreconditioner(Preconditioner):
    """The preconditioner of `Diagonal`: the second moments of all parameters in one vector, and one ε."""

    like_parameter = ("second_moment",)
    always_finite = True

    def __init__(self, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None) -> None:
        self._shapes, self._sizes, self._reduce = list(shapes), sizes_of(shapes), reduce
        self._second_moment, self._epsilon = like.new_zeros(sum(self._sizes)), like.new_zeros(1)

    def update(self, g: Tensor, weight: Tensor | float) -> Tensor:
        self._second_moment.lerp_(g.square(), weight)
        return self.apply(g)

    def apply(self, g: Tensor) -> Tensor:
        return g / (self._second_moment.sqrt() + self._epsilon)

    def refresh(self, part: int = 0) -> None:
        largest = torch.cat([self._second_moment, self._second_moment.new_zeros(1)]).amax().reshape(1)
        self._epsilon.copy_(epsilon_for(largest if self._reduce is None else self._reduce.largest(largest)))

    def state(self) -> list[dict[str, Tensor]]:
        parts = zip(torch.split_with_sizes(self._second_moment, self._sizes), self._shapes, strict=True)
        return [{"second_moment": part.view(shape), "epsilon": self._epsilon} for part, shape in parts]
