"""The cubic models of all rows, minimised globally: `sanc.core.cubic`, for many small problems at once.

`solve` and `sigma_lower_bound` compute for each row what their namesakes there compute for one problem, from the same
constants. The eigenvalues of a row ascend along the last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.cubic import MAX_SECULAR_STEPS, QUADRATIC_CONVERGENCE, SECULAR_TOLERANCE

_NEGLIGIBLE_SHIFT = 1e-17
"""Ratio of μ to the smallest eigenvalue that changes no digit of λ + μ in float64."""
_BOUND_STEPS = 8
"""Newton steps for the bound of σ: twice those for one problem, since every σ that is tried costs all rows."""


@dataclass(frozen=True, slots=True)
class CubicSteps:
    """The global minimisers of cubic models, a row each.

    Attributes
    ----------
    y : Tensor
        The minimisers in the eigenbases.
    sigma, norm, multiplier, decrease : Tensor
        σ, ‖y‖, μ = σ‖y‖, and the predicted decrease.
    hard_case : Tensor
        Whether a multiple of the first eigenvector, of either sign, is added.
    """

    y: Tensor
    sigma: Tensor
    norm: Tensor
    multiplier: Tensor
    decrease: Tensor
    hard_case: Tensor

    def take(self, rows: Tensor) -> CubicSteps:
        """Return the steps of some rows."""
        return CubicSteps(*(getattr(self, name)[rows] for name in self.__slots__))

    def put(self, rows: Tensor, others: CubicSteps) -> None:
        """Replace the steps of some rows."""
        for name in self.__slots__:
            getattr(self, name)[rows] = getattr(others, name)


def solve(values: Tensor, c: Tensor, sigma: Tensor, sign: Tensor | None = None) -> CubicSteps:
    """Minimise cᵀy + ½yᵀΛy + (σ/3)‖y‖³ globally in each row; `sign` is that of the hard case, by default 1.

    Where σ is so small that μ changes no digit of Newton's step, that is the solution.
    """
    y = -c / values
    norm = torch.linalg.vector_norm(y, dim=1)
    multiplier = sigma * norm
    decrease = -0.5 * (c * y).sum(1) + multiplier * norm * norm / 6.0
    is_newton = (multiplier <= _NEGLIGIBLE_SHIFT * values[:, 0]) & (norm > 0.0) & decrease.isfinite()
    places = torch.nonzero(~is_newton).reshape(-1)
    if len(places) == len(y):
        return _solve_all(values, c, sigma, sign)
    steps = CubicSteps(y, sigma.clone(), norm, multiplier, decrease, torch.zeros_like(is_newton))
    if len(places):
        part = None if sign is None else sign[places]
        steps.put(places, _solve_all(values[places], c[places], sigma[places], part))
    return steps


def _solve_all(values: Tensor, c: Tensor, sigma: Tensor, sign: Tensor | None) -> CubicSteps:
    """Solve the secular equation in each row.

    Here and below the components of a vector are along the first dimension, so that sums over them are vectorised.
    """
    values, c = values.T.contiguous(), c.T.contiguous()
    root = sigma.sqrt() * _norm(c).sqrt()
    largest = torch.maximum(torch.maximum(-values[0], values[-1]), root)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    unit = torch.where(largest > 0.0, unit, 1.0)
    scale = unit / sigma
    c = c / unit * (sigma / unit)
    values = values / unit
    mu_min = (-values[0]).clamp(min=0.0)
    t, y, hard_case = _solve_secular(c, (values + mu_min).clamp(min=0.0), mu_min)
    if sign is not None:
        y[0] = torch.where(hard_case, y[0] * sign, y[0])
    mu = mu_min + t
    norm, multiplier = scale * mu, unit * mu
    linear_term = (c * y).sum(0).abs()
    decrease = (0.5 * unit * linear_term * scale + multiplier * norm * mu / 6.0) * scale
    return CubicSteps((scale * y).T, sigma, norm, multiplier, decrease, hard_case)


def sigma_lower_bound(values: Tensor, c: Tensor, steps: CubicSteps, max_norm: Tensor) -> Tensor:
    """Return a lower bound of the σ whose step norm is `max_norm`, given longer steps; 0 in the hard case."""
    values, c = values.T.contiguous(), c.T.contiguous()
    mu = steps.multiplier
    for _ in range(_BOUND_STEPS):
        shifted = values + mu
        u = c / shifted
        terms = u * u
        square = terms.sum(0)
        mu = mu + (square.sqrt() / max_norm - 1.0) * square / (terms / shifted).sum(0)
    return torch.where(steps.hard_case, 0.0, mu / max_norm)


def _solve_secular(c: Tensor, gaps: Tensor, mu_min: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve ‖y(t)‖ = mu_min + t for t ≥ 0 with y(t) = −c/(gaps + t); return t, y and whether it is the hard case."""
    norm = _norm(c)
    lower = _quadratic_root(c.abs(), gaps, mu_min).amax(0)
    upper = _quadratic_root(norm, gaps[0], mu_min) * (1.0 + 1e-12)
    upper = torch.maximum(upper, lower).clamp(min=torch.finfo(lower.dtype).tiny)
    is_zero = (mu_min == 0.0) & (norm == 0.0)
    # The hard case: y(0) without the first component is shorter than mu_min.
    at_zero = torch.where((c != 0.0) & (gaps != 0.0), -c / gaps, 0.0)
    hard_case = (lower == 0.0) & (_norm(at_zero) <= mu_min) & ~is_zero
    without_root = hard_case | is_zero
    t = torch.where(lower > 0.0, lower, 0.5 * upper)
    t = _find_secular_root(c, gaps, mu_min, lower, upper, t, without_root)
    t = t.masked_fill(without_root, 0.0)
    y = torch.where(hard_case, at_zero, -c / (gaps + t))
    y = y.masked_fill(is_zero, 0.0)
    mu = mu_min + t
    other_norm = _norm(y[1:])
    nearly_hard = (mu_min > 0.0) & (y[0].abs() > 0.5 * mu) & (other_norm < mu)
    first = ((mu - other_norm) * (mu + other_norm)).clamp(min=0.0).sqrt()  # mu = mu_min in the hard case
    y[0] = torch.where(hard_case, first, torch.where(nearly_hard, torch.copysign(first, y[0]), y[0]))
    return t, y, hard_case


def _norm(v: Tensor) -> Tensor:
    """Return the norms of vectors whose entries are along the first dimension, and neither overflow nor underflow."""
    return (v * v).sum(0).sqrt()


def _find_secular_root(
    c: Tensor, gaps: Tensor, mu_min: Tensor, lower: Tensor, upper: Tensor, t: Tensor, done: Tensor
) -> Tensor:
    """Return the t between two bounds at which ‖y(t)‖ = mu_min + t, by Newton's method with bisection."""
    initial_upper = upper
    for _ in range(MAX_SECULAR_STEPS):
        residual, t_next = _newton_step(c, gaps, mu_min, t)
        above = residual > 0.0
        upper, lower = torch.where(above, t, upper), torch.where(above, lower, t)
        error = residual.abs()
        solved = (error <= SECULAR_TOLERANCE) | (upper - lower <= SECULAR_TOLERANCE * upper)
        done = done | solved | residual.isnan()
        outside = ~((lower < t_next) & (t_next < upper))
        is_last = (error <= QUADRATIC_CONVERGENCE) & ~outside
        if bool(outside.any()):
            bisected = torch.where(lower > 0.0, lower.sqrt() * upper.sqrt(), 0.5 * upper)
            from_right = (t_next >= upper) & (upper == initial_upper)
            t_next = torch.where(outside, torch.where(from_right, upper, bisected), t_next)
        is_last = is_last | (t_next == t)
        t = torch.where(done, t, t_next)
        done = done | is_last
        if bool(done.all()):
            break
    return t


def _newton_step(c: Tensor, gaps: Tensor, mu_min: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual μ/‖y‖ − 1 of the secular equation at t, and the next t of Newton's method."""
    mu = mu_min + t
    shifted = gaps + t
    terms = (c / shifted / mu).square()
    square = terms.sum(0)
    ratio = square.sqrt()
    derivative = (terms / shifted).sum(0) / square
    too_large = ~(square > 1e-280) & ~square.isnan()
    residual = torch.where(too_large, torch.inf, 1.0 / ratio - 1.0)
    return residual, torch.where(too_large, 0.0, t - (1.0 - ratio) * mu / (1.0 + mu * derivative))


def _quadratic_root(product: Tensor, gap: Tensor, mu_min: Tensor) -> Tensor:
    """Return the non-negative root of (mu_min + t)(gap + t) = product, or 0 if there is none."""
    excess = (product - mu_min * gap).clamp(min=0.0)
    total = mu_min + gap
    root = 2.0 * excess / (total + (total * total + 4.0 * excess).sqrt())
    return torch.where(excess > 0.0, root, 0.0)
