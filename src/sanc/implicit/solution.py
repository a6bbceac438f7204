"""What `argmin` reports: the run, the curvature of the minimum, and the error of each derivative."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sanc.core.spectrum.curvature import Certificate


@dataclass(frozen=True, slots=True)
class Derivative:
    """One linear system H v = u that was solved for a derivative of the minimum.

    Reverse mode returns Mᵀv with M = ∂²f/∂x∂θ. Its entries may cancel, so that its relative error is larger than that
    of v: at a zero gradient it is infinite. Forward mode returns v itself. Errors of further derivatives, and of all
    inside transforms of torch.func, are those of v.

    Attributes
    ----------
    error : float
        Estimate of the relative error of the derivative: `absolute_error` over its norm.
    absolute_error : float
        Estimate of the error of the derivative: ‖M‖ ‖v‖ `solution_error`, with ‖M‖ estimated by products. If the
        Hessian was formed, ‖H⁻¹M‖ `residual` with the effect of the remaining gradient, if that is less.
    solution_error : float
        Estimate of the relative error of v: the bound ‖u − Hv‖ / (λ ‖v‖) with the lower bound λ of λ_min, the error of
        differenced products, and the effect of the remaining gradient. Infinite if λ_min is not bounded away from zero.
    residual : float
        ‖u − Hv‖.
    products : int
        Hessian products.
    """

    error: float
    absolute_error: float
    solution_error: float
    residual: float
    products: int


@dataclass
class Solution:
    """A report of a minimum and its derivatives, which `argmin` returns with ``details=True``.

    Every derivative that is computed later, as in ``backward()``, is added to `derivatives`.

    Attributes
    ----------
    result : Result
        The result of `minimize`.
    certificate : Certificate or None
        Bounds on λ_min of the Hessian with respect to the free variables; None if no derivative was asked for.
    grad_norm : float
        ‖∇f‖ at the returned point, after a last Newton step.
    hessian_change : float
        Relative change of the Hessian along that step: large at a degenerate minimum, and if the run did not converge.
    problem : str
        Why the minimum cannot be differentiated; empty if it can.
    derivatives : list of Derivative
        One entry for each linear system, the last one last.
    """

    result: Any
    certificate: Certificate | None = None
    grad_norm: float = math.nan
    hessian_change: float = 0.0
    problem: str = ""
    derivatives: list[Derivative] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Estimate of the relative error of the last derivative; NaN before the first one."""
        return self.derivatives[-1].error if self.derivatives else math.nan
