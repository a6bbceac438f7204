"""Endings of rows that have stalled: rounding errors of gradients, and saddles that their steps did not leave.

Both are tests of the core, `estimate_gradient_rounding` and `leave_saddle`, for many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sanc.core.runs.noise_estimates import (
    DIFFERENCE_VARIANCE,
    MIN_SCALE_FRACTION,
    NOISE_DIFFERENCE_ORDER,
    NOISE_SEED,
    NOISE_SPACING,
    ROUNDING_SAMPLES,
    ROUNDING_SEED,
)
from sanc.core.runs.status import Status
from sanc.core.space import ROUNDING_ERRORS
from sanc.many.algebra import multiply_decomposed
from sanc.many.rows import RowProblem, Rows


def is_success(status: Tensor) -> Tensor:
    """Return which rows ended at a point that passed the tests, as `Status.success`."""
    return torch.isin(status, torch.tensor([int(one) for one in Status if one.success], device=status.device))


def rounding_of_gradients(problem: RowProblem, rows: Rows) -> Tensor:
    """Return estimates of the norms of the rounding errors of gradients at x, in scaled variables."""
    generator = torch.Generator().manual_seed(ROUNDING_SEED)
    change = hessian_norm = torch.zeros_like(rows.point.value)
    x = rows.point.x / rows.scale
    for _ in range(ROUNDING_SAMPLES):
        v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        spectra = rows.spectra
        moved, product = (multiply_decomposed(spectra.values, spectra.vectors, part) for part in (x * v, v))
        change = torch.maximum(change, torch.linalg.vector_norm(moved, dim=1))
        hessian_norm = torch.maximum(hessian_norm, torch.linalg.vector_norm(product, dim=1))
    sum_error = problem.eps * (2.0 * hessian_norm).sqrt() * rows.point.value.abs().sqrt()
    return ROUNDING_ERRORS * (problem.eps * change + torch.minimum(sum_error, _gradient_noise(problem, rows)))


def _gradient_noise(problem: RowProblem, rows: Rows) -> Tensor:
    """Return the noise of the gradients near x from third differences on a line."""
    x = rows.point.x
    d = torch.randn(x.shape, generator=torch.Generator().manual_seed(NOISE_SEED), dtype=torch.float64).to(x.device)
    length_scale = torch.maximum(rows.x_norm, MIN_SCALE_FRACTION * rows.first_length_scale)
    line_scale = length_scale / torch.linalg.vector_norm(d, dim=1)
    step = (NOISE_SPACING * problem.eps * line_scale)[:, None] * d * rows.scale
    points = [(x + step * k).to(x.dtype) for k in range(-3, 4)]
    if rows.lower is not None:
        points = [point.clamp(rows.lower, rows.upper) for point in points]
    gradients = torch.stack([problem.gradients(point, rows.ids) * rows.scale for point in points])
    differences = gradients.diff(n=NOISE_DIFFERENCE_ORDER, dim=0)
    return (differences.square().sum((0, 2)) / (DIFFERENCE_VARIANCE * len(differences))).sqrt()


def leave_saddles(problem: RowProblem, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return points along negative curvature with lower values, and the indices of the rows that have one.

    The steps are chosen as in `sanc.core.runs.saddle`: from √(2 eps|f|/|λ|), where the decrease exceeds the roundoff of
    f, each twice the last, up to √(|f|/|λ|), ‖x‖ or the length scale.
    """
    error = ROUNDING_ERRORS * problem.eps * rows.spectra.hessian_norm
    indices = torch.nonzero(rows.spectra.ritz_value + error < -rows.curvature_tol).reshape(-1)
    if len(indices) == 0 or rows.lower is not None:
        return rows.point.x[:0], indices[:0]
    part, eps = rows.take(indices), problem.eps
    x, value, spectra = part.point.x, part.point.value, part.spectra
    decrease_length = (value.abs() / -spectra.ritz_value).sqrt()
    max_step = torch.maximum(torch.maximum(decrease_length, part.x_norm), part.first_length_scale)
    first_step = torch.maximum((2.0 * eps) ** 0.5 * decrease_length, eps**0.5 * max_step)
    sign = torch.where(spectra.c[:, 0] > 0.0, -1.0, 1.0)
    best, below = x, value - eps * value.abs()
    has_lower = torch.zeros_like(part.sigma_unconfirmed)
    for side in (1.0, -1.0):
        step, searching, lowered = first_step, ~has_lower, torch.zeros_like(has_lower)
        while bool((searching & (step <= max_step)).any()):
            searching = searching & (step <= max_step)
            d = (spectra.vectors[:, :, 0] * (side * sign * step)[:, None] * part.scale).to(x.dtype)
            value = problem.values(x + d, part.ids)
            is_lower = searching & (value < below) & (value > -torch.inf)
            if bool(is_lower.any()):
                is_lower = is_lower & problem.gradients(x + d, part.ids).isfinite().all(1)
            best = torch.where(is_lower[:, None], x + d, best)
            below = torch.where(is_lower, value, below)
            searching = searching & (is_lower | ~lowered)
            lowered = lowered | is_lower
            step = 2.0 * step
        has_lower = has_lower | lowered
    kept = torch.nonzero(has_lower & problem.evaluate(best, part.ids).is_finite()).reshape(-1)
    return best[kept], indices[kept]
