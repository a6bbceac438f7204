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
_EXPONENT_BITS = 0x7FF << 52
"""The bits of a float64 that hold its exponent."""


@dataclass(frozen=True, slots=True)
class CubicSteps:
    """The global minimisers of cubic models, a row each.

    Attributes
    ----------
    y : Tensor
        The minimisers in the eigenbases.
    norm, multiplier, decrease : Tensor
        ‖y‖, μ = σ‖y‖, and the predicted decrease.
    hard_case : Tensor or None
        Whether a multiple of the first eigenvector, of either sign, is added; None: in no row.
    """

    y: Tensor
    norm: Tensor
    multiplier: Tensor
    decrease: Tensor
    hard_case: Tensor | None


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
        lowest = self.values[0]
        largest = torch.maximum(torch.maximum(-lowest, self.values[-1]), sigma.sqrt() * _norm(self.c).sqrt())
        magnitude = _power_of_two(largest)
        scale = magnitude / sigma
        c, values = self.c / magnitude / scale, self.values / magnitude
        mu_min = (-values[0]).clamp(min=0.0)
        gaps = (values + mu_min).clamp(min=_TINY)
        t = _find_secular_root(c, gaps, mu_min)
        y, mu, hard_case = -c / (gaps + t), mu_min + t, None
        if lowest.min().item() < 0.0:
            hard_case = (t == 0.0) & (mu_min > 0.0)
            y[0] = _first_component(y, t, mu_min, mu)
        decrease = torch.add(mu * mu * mu, (c * y).sum(0).abs(), alpha=3.0) / 6.0 * magnitude * scale * scale
        return CubicSteps((scale * y).T, scale * mu, magnitude * mu, decrease, hard_case)

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


def _power_of_two(numbers: Tensor) -> Tensor:
    """Return the largest powers of two up to some numbers, and at least the smallest normal number."""
    return (numbers.clamp(min=_TINY).view(torch.int64) & _EXPONENT_BITS).view(torch.float64)


def _first_component(y: Tensor, t: Tensor, mu_min: Tensor, mu: Tensor) -> Tensor:
    """Return the first components of the minimisers, given the others.

    In the hard case, t is 0 and ‖y(0)‖ is less than mu_min, and y has a multiple of the first eigenvector added.
    """
    other_norm = _norm(y[1:])
    first = ((mu - other_norm) * (mu + other_norm)).clamp(min=0.0).sqrt()
    # Nearly hard: t is a small difference, but ‖y‖, and with it |y₁|, is known to full precision.
    from_norm = (t == 0.0) | ((mu_min > 0.0) & (y[0].abs() > 0.5 * mu) & (other_norm < mu))
    return torch.where(from_norm, torch.copysign(first, torch.where(t == 0.0, 1.0, y[0])), y[0])


def _norm(v: Tensor) -> Tensor:
    """Return the norms of vectors whose entries are along the first dimension, and neither overflow nor underflow."""
    return (v * v).sum(0).sqrt()


def _find_secular_root(c: Tensor, gaps: Tensor, mu_min: Tensor) -> Tensor:
    """Return the t ≥ 0 at which ‖y(t)‖ = mu_min + t with y(t) = −c/(gaps + t), or 0 in the hard case.

    1/‖y(t)‖ is concave, so that its tangent is above it, and equals 1/(mu_min + t) at or below the root. So steps to
    these intersections never overshoot, from the largest root with a single component, and need no bracket. A step by
    less than a small fraction of all gaps + t, as in Newton's steps, is the last: the terms hardly change.
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
        newton_step = excess / factor  # relative to μ
        step = mu * newton_step / (0.5 + (0.25 + derivative / factor * newton_step).sqrt())
        t = torch.where(excess > 0.0, t + step, t)
        if not bool((torch.minimum(excess, step / shifted[0]) > QUADRATIC_CONVERGENCE).any()):
            break
    return t


def _quadratic_root(product: Tensor, gap: Tensor, mu_min: Tensor) -> Tensor:
    """Return the non-negative root of (mu_min + t)(gap + t) = product, or 0 if there is none."""
    excess = torch.addcmul(product, mu_min, gap, value=-1.0).clamp(min=0.0)
    total = mu_min + gap
    return 2.0 * excess / (total + torch.add(total * total, excess, alpha=4.0).sqrt())
