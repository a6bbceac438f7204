"""The authors' program as a preset, for comparing its curves with curves of the paper's algorithm (D3).

It differs from the paper in the escape rule, in the lower bound of σ and in the sampling.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from sanc import Branch, Method, PaperEscape, Point, SigmaUpdate

_FLOAT32_FLOOR = 1e-20
"""Lower bound of σ in float32, as in the program. Its bound in float64, 1e-80, is 0 in float32."""


@dataclass(frozen=True, kw_only=True)
class AuthorsEscape(PaperEscape):
    """The escape rule of the program.

    It moves only if λ1 < −ε, compares with ε_g/L1 instead of ε_g²/L1, and uses the gradient on S_B.
    """

    def choose(self, ritz_value: float, grad_norm: float, *, model_proposes: bool) -> tuple[Branch, float]:
        """Return the branch with its step size: the step norm along v, or the factor of −g."""
        if not ritz_value < -self.epsilon:
            stays = model_proposes and not math.isnan(ritz_value)
            return (Branch.STAYED, 0.0) if stays else (Branch.GRADIENT, 1.0 / self.L1)
        slack = self.epsilon / 4 if self.epsilon_g is None else self.epsilon_g
        return self.choose_with_slack(ritz_value, grad_norm, slack)

    def gradient(self, here: Point, subspace: Any) -> Any:
        """Return the gradient on S_B. The subspace has to be a `KrylovSubspace`: others need not have an `operator`."""
        return here.g if subspace is None else subspace.operator.gradient()


@dataclass(frozen=True, kw_only=True)
class AuthorsSigma(SigmaUpdate):
    """The paper's rule for σ with the lower bound of the program."""

    sigma_floor: float | None = 1e-80

    def rule(self, eps: float, *, exact: bool = False) -> Any:
        """Return the rule, with the lower bound that the program has for this precision."""
        rule = super().rule(eps, exact=exact)
        return replace(rule, floor=max(rule.floor, _FLOAT32_FLOOR)) if eps > sys.float_info.epsilon else rule


AUTHORS = Method(escape=AuthorsEscape(), sigma=AuthorsSigma(), sampling="buffered")
"""The preset, passed as ``preset=AUTHORS``."""
