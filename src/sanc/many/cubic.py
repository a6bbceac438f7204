"""The cubic models of all rows, minimised globally: `sanc.core.spectrum.cubic`, for many small problems at once.

`CubicModels.solve` computes for each row what `solve` there computes for one problem, to the same precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.spectrum.cubic import BOUND_NEWTON_STEPS, MAX_SECULAR_STEPS, QUADRATIC_CONVERGENCE

_TINY = torch.finfo(torch.float64).tiny
"""Smallest divisor, so that 0/0 is 0. If the divisor is smaller, so is the dividend."""


@dataclass(frozen=True, slots=True)
class CubicSteps:
    """The global minimisers of cubic models, a row each.

    Attributes
    ----------
    y : Tensor
        The minimisers in the eigenbases.
    norm, multiplier, decrease : Tensor
        ‖y‖, μ = σ‖y‖, and the predicted decrease.
    hard_case : Tensor
        Whether a multiple of the first eigenvector, of either sign, is added.
    """

    y: Tensor
    norm: Tensor
    multiplier: Tensor
    decrease: Tensor
    hard_case: Tensor


class CubicModels:
    """The models cᵀy + ½yᵀΛy + (σ/3)‖y‖³ of all rows, for any σ.

    Here the components of a vector are along the first dimension, so that sums over them are vectorised.

    Parameters
    ----------
    values, c : Tensor
        The eigenvalues Λ, which ascend, and the linear terms, a row each.
    """

    def __init__(self, values: Tensor, c: Tensor) -> None:
        self.values, self.c = values.T.contiguous(), c.T.contiguous()

    def solve(self, sigma: Tensor) -> CubicSteps:
        """Minimise the models globally; in the hard case, the first component is positive."""
        largest = torch.maximum(torch.maximum(-self.values[0], self.values[-1]), sigma.sqrt() * _norm(self.c).sqrt())
        magnitude = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
        scale = magnitude / sigma
        c, values = self.c / magnitude / scale, self.values / magnitude
        mu_min = (-values[0]).clamp(min=0.0)
        t, y = _solve_secular(c, (values + mu_min).clamp(min=_TINY), mu_min)
        hard_case = (t == 0.0) & (mu_min > 0.0)
        mu = mu_min + t
        norm, multiplier = scale * mu, magnitude * mu
        linear_term = (c * y).sum(0).abs()
        decrease = (0.5 * magnitude * linear_term * scale + multiplier * norm * mu / 6.0) * scale
        return CubicSteps((scale * y).T, norm, multiplier, decrease, hard_case)

    def exceed(self, sigma: Tensor, max_norm: Tensor) -> Tensor:
        """Return where the norm of the minimiser exceeds `max_norm`, without solving.

        ‖(Λ + μI)⁻¹c‖ decreases with μ, and μ/σ increases. They are equal at the minimiser, so that its norm exceeds Δ
        if ‖(Λ + μI)⁻¹c‖ > Δ for μ = σΔ, or if Λ + μI is not positive definite.
        """
        shifted = self.values + sigma * max_norm
        return (shifted[0] < 0.0) | (_norm(self.c / shifted.clamp(min=_TINY) / max_norm) > 1.0)

    def sigma_lower_bound(self, max_norm: Tensor) -> Tensor:
        """Return a lower bound of the σ whose minimiser has the norm `max_norm`.

        1/‖y‖ is concave as a function of μ, so that Newton's method for ‖y‖ = `max_norm` never overshoots, from the
        largest μ at which a single component has that norm.
        """
        mu = (self.c.abs() / max_norm - self.values).amax(0).clamp(min=0.0)
        for _ in range(BOUND_NEWTON_STEPS):
            shifted = (self.values + mu).clamp(min=_TINY)
            terms = (self.c / shifted / max_norm).square()
            square = terms.sum(0)
            larger = mu + (square.sqrt() - 1.0) * square / (terms / shifted).sum(0)
            mu = torch.where(larger > mu, larger, mu)  # in the hard case the first μ is the bound
        return mu / max_norm


def _solve_secular(c: Tensor, gaps: Tensor, mu_min: Tensor) -> tuple[Tensor, Tensor]:
    """Solve ‖y(t)‖ = mu_min + t for t ≥ 0 with y(t) = −c/(gaps + t); return t and y.

    In the hard case, t is 0 and ‖y(0)‖ is less than mu_min, and y has a multiple of the first eigenvector added.
    """
    t = _find_secular_root(c, gaps, mu_min)
    y = -c / (gaps + t)
    if not bool((mu_min > 0.0).any()):
        return t, y
    mu = mu_min + t
    other_norm = _norm(y[1:])
    first = ((mu - other_norm) * (mu + other_norm)).clamp(min=0.0).sqrt()
    # Nearly hard: t is a small difference, but ‖y‖, and with it |y₁|, is known to full precision.
    from_norm = (t == 0.0) | ((mu_min > 0.0) & (y[0].abs() > 0.5 * mu) & (other_norm < mu))
    y[0] = torch.where(from_norm, torch.copysign(first, torch.where(t == 0.0, 1.0, y[0])), y[0])
    return t, y


def _norm(v: Tensor) -> Tensor:
    """Return the norms of vectors whose entries are along the first dimension, and neither overflow nor underflow."""
    return (v * v).sum(0).sqrt()


def _find_secular_root(c: Tensor, gaps: Tensor, mu_min: Tensor) -> Tensor:
    """Return the t at which ‖y(t)‖ = mu_min + t, or 0 in the hard case.

    1/‖y(t)‖ is concave, so that its tangent is above it, and equals 1/(mu_min + t) at or below the root. So steps to
    these intersections never overshoot, from the largest root with a single component, and need no bracket. Where t
    changes no digit of gaps + t, as in Newton's steps, the first one is exact.
    """
    t = _quadratic_root(c.abs(), gaps, mu_min).amax(0)
    for _ in range(MAX_SECULAR_STEPS):
        mu, shifted = mu_min + t, gaps + t
        terms = c / shifted / mu
        terms = terms * terms
        square = terms.sum(0)
        derivative = mu * (terms / shifted).sum(0) / square  # of −log‖y‖ by log μ
        excess = square.sqrt() - 1.0
        factor = 1.0 + derivative
        newton_step = excess / factor  # relative to μ, as the next one
        step = newton_step / (0.5 + (0.25 + derivative / factor * newton_step).sqrt())
        t = torch.where(excess > 0.0, t + mu * step, t)
        if not bool((excess > QUADRATIC_CONVERGENCE).any()):
            break
    return t


def _quadratic_root(product: Tensor, gap: Tensor, mu_min: Tensor) -> Tensor:
    """Return the non-negative root of (mu_min + t)(gap + t) = product, or 0 if there is none."""
    excess = (product - mu_min * gap).clamp(min=0.0)
    total = mu_min + gap
    return 2.0 * excess / (total + (total * total + 4.0 * excess).sqrt())
