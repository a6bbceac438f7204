"""The identity metric: one number for all entries, so that only the step norm is adapted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sanc.core.settings import AT_LEAST_ONE, BELOW_ONE, Piece, setting
from sanc.minibatch.metrics.base import Preconditioner, RankReduction, Shape, epsilon_for


@dataclass(frozen=True, kw_only=True)
class Identity(Piece):
    """M = (r + ε)·I with r the root mean square of the gradient's entries.

    Attributes
    ----------
    memory : float
        Decay of the mean.
    refresh : int
        Steps between two updates of ε.
    """

    memory: float = setting(0.95, BELOW_ONE)  # a mean over 20 gradients; docs/constants.md has 0.8 and 0.99
    refresh: int = setting(50, AT_LEAST_ONE)  # ε follows the second moment

    def couples(self, shape: Shape) -> bool:
        """Return False: M is a multiple of the identity."""
        return False

    def create(self, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None = None) -> Preconditioner:
        """Return the preconditioner."""
        return IdentityPreconditioner(len(shapes), like, reduce)


class IdentityPreconditioner(Preconditioner):
    """The preconditioner of `Identity`: one second moment and one ε for all parameters."""

    always_finite = True

    def __init__(self, count: int, like: Tensor, reduce: RankReduction | None) -> None:
        self._count, self._reduce = count, reduce
        self._second_moment, self._epsilon = like.new_zeros(1), like.new_zeros(1)

    def update(self, g: Tensor, weight: Tensor | float) -> Tensor:
        if self._reduce is None:
            mean = g.square().mean()
        else:
            mean = (self._reduce.total(g.square().sum().double()) / self._reduce.entries).to(g.dtype)
        self._second_moment.lerp_(mean, weight)
        return self.apply(g)

    def apply(self, g: Tensor) -> Tensor:
        return g / (self._second_moment.sqrt() + self._epsilon)

    def refresh(self, part: int = 0) -> None:
        self._epsilon.copy_(epsilon_for(self._second_moment))

    def state(self) -> list[dict[str, Tensor]]:
        return [{"second_moment": self._second_moment, "epsilon": self._epsilon}] * self._count
