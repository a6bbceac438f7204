"""Cubic steps with bounds, for all rows: a point in the box that decreases the model of the row.

A step that leaves the box is replaced by the best of three points: the minimiser with the variables that leave it fixed
at their bounds, its projection on the box, and the Cauchy point on the projected gradient. The first one is found by
solving again until no further variable leaves the box. μ stays the μ of the step without bounds, with which the
matrices of all faces are positive semidefinite.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sanc.core.bounded.box_model import ARMIJO_FRACTION, MAX_MODEL_HALVINGS
from sanc.core.space import NEAR_ZERO
from sanc.many.algebra import multiply, multiply_decomposed
from sanc.many.rows import Rows, RowTrials, Spectra

_SINGULAR_SHIFT = 1e-14
"""Shift of the eigenvalues, relative to the largest, that makes singular matrices regular: 45 eps of float64."""


def fit_steps(rows: Rows, s: Tensor) -> RowTrials:
    """Return the trial points of rows with the steps s, where those outside the box are replaced."""
    assert rows.lower is not None
    assert rows.upper is not None
    assert rows.free is not None
    leaves = (rows.trial.x < rows.lower) | (rows.trial.x > rows.upper)
    if not bool(leaves.any()):
        return rows.trial
    indices = torch.nonzero(leaves.any(1)).reshape(-1)
    x, box_lower, box_upper, free, scale, g, s = (
        part.index_select(0, indices)
        for part in (rows.point.x, rows.lower, rows.upper, rows.free, rows.scale, rows.point.g, s)
    )
    trials, spectra = rows.trial.take(indices), rows.spectra.take(indices)
    lower, upper = (box_lower - x) / scale, (box_upper - x) / scale
    model = _BoxModels(
        spectra, g * scale * free, trials.sigma, torch.where(free, lower, 0.0), torch.where(free, upper, 0.0)
    )
    initial_step = s / scale
    best = initial_step.clamp(model.lower, model.upper)
    value = model.evaluate(best)
    for candidate in (model.fixed_minimiser(initial_step, trials.multiplier), model.cauchy_point()):
        other = model.evaluate(candidate)
        better = other < value
        best, value = torch.where(better[:, None], candidate, best), torch.where(better, other, value)
    trial = (x + (best * scale).to(x.dtype)).clamp(box_lower, box_upper)
    trial = torch.where((best <= lower) & free, box_lower, trial)
    trial = torch.where((best >= upper) & free, box_upper, trial)
    norm = torch.linalg.vector_norm(best, dim=1)
    fitted = replace(trials, x=trial, norm=norm, predicted=-value, truncated=torch.ones_like(trials.truncated))
    return rows.trial.put(indices, fitted)


class _BoxModels:
    """The cubic models of rows in their boxes, in scaled variables."""

    def __init__(self, spectra: Spectra, g: Tensor, sigma: Tensor, lower: Tensor, upper: Tensor) -> None:
        self.g, self._cubic_coefficient, self.lower, self.upper = g, sigma, lower, upper
        self.vectors, self.values = spectra.vectors, spectra.values

    def multiply(self, v: Tensor) -> Tensor:
        """Return Bv."""
        return multiply_decomposed(self.values, self.vectors, v)

    def evaluate(self, s: Tensor) -> Tensor:
        """Return m(s)."""
        norm: Tensor = torch.linalg.vector_norm(s, dim=1)
        return (
            (self.g * s).sum(1)
            + 0.5 * (s * self.multiply(s)).sum(1)
            + self._cubic_coefficient / 3.0 * norm * norm * norm
        )

    def fixed_minimiser(self, s: Tensor, multiplier: Tensor) -> Tensor:
        """Return the minimiser of the model with μ after fixing, in turn, the variables that leave the box."""
        shift = multiplier[:, None] + _SINGULAR_SHIFT * self.values.abs().amax(1, keepdim=True) + NEAR_ZERO
        matrix = (self.vectors * (self.values + shift)[:, None, :]) @ self.vectors.mT
        identity = torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
        fixed = (s < self.lower) | (s > self.upper)
        for _ in range(s.shape[1]):
            held = torch.where(fixed, s.clamp(self.lower, self.upper), 0.0)
            right = torch.where(fixed, held, -self.g - multiply(matrix, held))
            both = ~fixed[:, :, None] & ~fixed[:, None, :]
            reduced = torch.where(both, matrix, torch.where(fixed[:, :, None], identity, 0.0))
            solution, failed = torch.linalg.solve_ex(reduced, right[:, :, None])
            s = torch.where((failed == 0)[:, None], solution[:, :, 0], held)
            leaves = ((s < self.lower) | (s > self.upper)) & ~fixed
            if not bool(leaves.any()):
                break
            fixed = fixed | leaves
        return s.clamp(self.lower, self.upper)

    def cauchy_point(self) -> Tensor:
        """Return a point on the projected gradient at which m decreases, from its minimiser along −g without bounds."""
        g = self.g
        square = (g * g).sum(1)
        curvature, cubic = (g * self.multiply(g)).sum(1), self._cubic_coefficient * square * square.sqrt()
        denominator = curvature + (curvature * curvature + 4.0 * cubic * square).sqrt()
        step_size = torch.where(denominator > 0.0, 2.0 * square / denominator, 1.0)
        s, is_done = torch.zeros_like(g), torch.zeros_like(square, dtype=torch.bool)
        for _ in range(MAX_MODEL_HALVINGS):
            trial = (-g * step_size[:, None]).clamp(self.lower, self.upper)
            enough = self.evaluate(trial) <= ARMIJO_FRACTION * (g * trial).sum(1).clamp(max=0.0)
            s = torch.where((enough & ~is_done)[:, None], trial, s)
            is_done = is_done | enough
            if bool(is_done.all()):
                break
            step_size = 0.5 * step_size
        return s
