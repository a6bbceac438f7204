"""Fits of many rows of data at once.

Scales, σ and the test of the gradient are as in `least_squares`. The second-order term is the exact one, and the
offset test is not made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sanc.core.sigma import MIN_SIGMA_FACTOR_EXACT
from sanc.core.space import ROUNDING_ERRORS
from sanc.leastsquares.column_scales import exponent_limit
from sanc.leastsquares.jacobian_model import GAUSS_NEWTON_SIGMA_RATIO, MAX_STEP_GROWTH
from sanc.leastsquares.row_data import RowData
from sanc.leastsquares.row_models import MappedModel, PointwiseModel
from sanc.many import rules
from sanc.many.algebra import gram, multiply
from sanc.many.rows import Group, RowPoints, RowProblem, Rows, RowScales, Spectra
from sanc.many.spectra import decompose

_MIN_HESSIAN_FRACTION = 0.5
"""The whole Hessian is used if the curvature of its second-order term along the last step is at least this fraction of
Gauss–Newton's. It costs about as much as four Jacobians, and without it fits with large residuals converge slowly."""

_GAUSS_NEWTON_ITERATIONS = 5
"""Iterations without the whole Hessian: with small residuals a fit from a sensible start needs about as many."""

_MAX_PART_ENTRIES = 2**19
"""Entries of the Jacobians of the rows that are evaluated at a time on a CPU: 4 MB in float64, which caches hold."""
_MAX_GPU_PART_ENTRIES = 2**27
"""The same on a GPU: 1 GB in float64, so that the arithmetic of an operator takes longer than its launch."""
_MIN_PART_ROWS = 64
"""Rows that are evaluated at a time whatever their size: with fewer, calls take longer than their arithmetic."""


@dataclass(frozen=True)
class FitExtras(Group):
    """What a fit evaluates at a point beside cost, gradient and curvature.

    Attributes
    ----------
    exponents : Tensor
        Binary exponents of the column norms of the Jacobians; at current points, of the largest ones so far, from which
        the scales of the variables follow.
    is_certifiable : Tensor
        Whether `matrix` is the whole Hessian.
    gauss_newton : Tensor
        The products JᵀJ.
    """

    exponents: Tensor
    is_certifiable: Tensor
    gauss_newton: Tensor


class FitProblem(RowProblem):
    """Sums of squares of residuals, a row each, in variables scaled by the column norms of their Jacobians.

    Parameters
    ----------
    model : MappedModel or PointwiseModel
        Residuals and their derivatives.
    data : RowData
        The data of all rows.
    eps : float
        Machine epsilon of the residuals.
    tol : float
        Tolerance on the cosine between residuals and columns of the Jacobian.

    Attributes
    ----------
    data_rows : Tensor
        The row of the data of each fit.
    """

    tries_longer_steps = False
    default_tol = is_bounded_below = True
    outputs = ("gauss_newton",)

    def __init__(self, model: MappedModel | PointwiseModel, data: RowData, eps: float, tol: float) -> None:
        self.model, self.data, self.eps, self.tol = model, data, eps, tol
        self._exponent_limit = exponent_limit(torch.finfo(torch.float64).max)
        self.data_rows = torch.arange(len(data), device=data.y.device)

    def of_rows(self, indices: Tensor) -> FitProblem:
        """Return the problem of the rows with these indices, which are numbered from 0."""
        return FitProblem(self.model, self.data.take(indices), self.eps, self.tol)

    def repeat_rows(self, indices: Tensor) -> None:
        """Add further fits of the rows with these indices, which have the next numbers."""
        self.data_rows = torch.cat([self.data_rows, indices])

    # Evaluations.

    def in_chunks(
        self, function: Callable[[Tensor, RowData], tuple[Tensor, ...]], x: Tensor, ids: Tensor
    ) -> list[Tensor]:
        """Return the results of a function of parameters and data, which is called with a chunk of the rows at a time.

        On a CPU the numbers of a chunk stay in its caches.
        """
        entries = _MAX_GPU_PART_ENTRIES if x.device.type == "cuda" else _MAX_PART_ENTRIES
        rows_at_a_time = max(_MIN_PART_ROWS, entries // (self.data.y.shape[1] * (x.shape[1] + 1)))
        count = max(1, math.ceil(len(x) / rows_at_a_time))
        data_rows = self.data_rows.index_select(0, ids)
        chunks = zip(torch.chunk(x, count), torch.chunk(data_rows, count), strict=True)
        results = [function(p, self.data.take(indices)) for p, indices in chunks]
        return [torch.cat(columns) if count > 1 else columns[0] for columns in zip(*results, strict=True)]

    def values(self, x: Tensor, ids: Tensor) -> Tensor:
        (value,) = self.in_chunks(lambda p, data: (_value(self.model.residuals(p, data).double()),), x, ids)
        return _where_finite(x, value)

    def evaluate(self, x: Tensor, ids: Tensor) -> RowPoints:
        value, g, matrix = self.in_chunks(self._evaluate_part, x, ids)
        extras = FitExtras(
            exponents=_column_norms(matrix).log2().round().nan_to_num(-torch.inf, -torch.inf, -torch.inf),
            is_certifiable=torch.zeros(len(x), dtype=torch.bool, device=x.device),
            gauss_newton=matrix,
        )
        return RowPoints(x, value, g, matrix, extras)

    def _evaluate_part(self, p: Tensor, data: RowData) -> tuple[Tensor, Tensor, Tensor]:
        """Return the costs of some rows, their gradients and the products JᵀJ."""
        columns = self.model.linearised(p, data).double()
        products, n = gram(columns), p.shape[1]
        return _value(columns[:, n]), products[:, n, :n], products[:, :n, :n]

    def evaluate_trials(self, x: Tensor, ids: Tensor) -> tuple[Tensor, RowPoints]:
        point = self.evaluate(x, ids)
        return _where_finite(x, point.value), point

    def gradients(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.evaluate(x, ids).g

    def spectra(self, rows: Rows) -> Spectra:
        return decompose(rows.point.matrix * rows.scale.unsqueeze(2) * rows.scale.unsqueeze(1), rows, self.eps)

    def can_certify(self, rows: Rows) -> Tensor:
        is_certifiable: Tensor = rows.point.extras.is_certifiable
        return is_certifiable

    def prepare_certificate(self, point: RowPoints, ids: Tensor) -> RowPoints:
        (matrix,) = self.in_chunks(lambda p, data: (self.model.hessians(p, data).double(),), point.x, ids)
        matrix = 0.5 * (matrix + matrix.mT)
        finite = matrix.isfinite().flatten(1).all(1)
        matrix = torch.where(finite[:, None, None], matrix, point.matrix)
        return replace(point, matrix=matrix, extras=replace(point.extras, is_certifiable=finite))

    # Units of the variables, and tolerances.

    def scales(self, rows: Rows, before: RowPoints | None) -> RowScales:
        """Scale the variables by the largest column norms so far; at a stationary point, by the norms at the point."""
        x, extras = rows.point.x, rows.point.extras
        norms, weighted, now = _column_norms(extras.gauss_newton), (2.0 * rows.point.value).sqrt(), extras.exponents
        exponents = now if before is None else torch.maximum(before.extras.exponents, now)
        effects = norms * x.abs()
        size = torch.linalg.vector_norm(effects, dim=1)
        rounding = ROUNDING_ERRORS * self.eps * size
        tol = torch.add(rounding.nan_to_num(posinf=0.0), weighted, alpha=self.tol)
        scale = self._scale(exponents)
        stationary = self._projected_norm(rows, scale) <= tol
        if bool(stationary.any()):
            has_effect = effects >= (ROUNDING_ERRORS * self.eps * weighted)[:, None]
            exponents = torch.where((now > -torch.inf) & has_effect & stationary[:, None], now, exponents)
            scale = self._scale(exponents)
        largest = math.sqrt(self.tol)
        curvature_tol = (largest * (weighted / size)).nan_to_num(nan=largest).clamp(self.tol, largest)
        point = replace(rows.point, extras=replace(extras, exponents=exponents))
        growth = self._growth(rows, scale, before)
        return RowScales(self._with_second_order_term(rows, point, before), scale, tol, curvature_tol, *growth)

    def _with_second_order_term(self, rows: Rows, point: RowPoints, before: RowPoints | None) -> RowPoints:
        """Return points with the whole Hessian where the last step shows that the second-order term is large."""
        if before is None or rows.nit.max().item() < _GAUSS_NEWTON_ITERATIONS:
            return point
        late = rows.nit >= _GAUSS_NEWTON_ITERATIONS
        step = (point.x - before.x).double()
        model = (step * multiply(before.extras.gauss_newton, step)).sum(1)
        second = (step * (point.g - before.g)).sum(1) - model
        indices = torch.nonzero(late & (second.abs() > _MIN_HESSIAN_FRACTION * model)).reshape(-1)
        if len(indices) == 0:
            return point
        return point.put(indices, self.prepare_certificate(point.take(indices), rows.ids[indices]))

    def _projected_norm(self, rows: Rows, scale: Tensor) -> Tensor:
        g = rows.point.g * scale
        if rows.free is not None:
            g = g * rows.free
        norm: Tensor = torch.linalg.vector_norm(g, dim=1)
        return norm

    def _scale(self, exponents: Tensor) -> Tensor:
        """Return the units of variables whose columns have norms of about 2 to some powers."""
        powers = (-exponents).nan_to_num(posinf=0.0)  # a column of zeros has no unit
        return torch.exp2(powers.clamp(-self._exponent_limit, self._exponent_limit))

    def _growth(self, rows: Rows, scale: Tensor, before: RowPoints | None) -> tuple[Tensor, Tensor] | tuple[()]:
        """Return the growth of step and gradient norms by new units; nothing if no unit changes after a step."""
        x, g, old = rows.point.x, rows.point.g, rows.scale
        if before is None or torch.equal(old, scale):
            return ()
        step = x - before.x
        reference = torch.where((step != 0.0).any(1)[:, None], step, x)
        return _ratio(reference / scale, reference / old), _ratio(g * scale, g * old)

    # Rules for σ: steps are Gauss–Newton steps as long as they succeed.

    def first_sigma(self, rows: Rows) -> Tensor:
        return GAUSS_NEWTON_SIGMA_RATIO * self.rules.first_sigma(rows.unit_cubic)

    def max_step_norm(self, rows: Rows) -> tuple[Tensor, None]:
        first = torch.where(rows.x_norm > 0.0, rows.x_norm, rows.first_length_scale)
        limit = torch.where(rows.last_step_norm > 0.0, MAX_STEP_GROWTH * rows.last_step_norm, first)
        return limit, None

    def after_trial(self, rows: Rows, verdict: Tensor, actual: Tensor, value_rounding: Tensor) -> Tensor:
        at_most_successful = verdict.clamp(max=rules.SUCCESSFUL)  # σ after very successful steps is set below
        sigma = super().after_trial(rows, at_most_successful, actual, value_rounding)
        smallest = self.rules.bounded(MIN_SIGMA_FACTOR_EXACT * rows.trial.sigma)
        return torch.where(verdict == rules.VERY_SUCCESSFUL, smallest, sigma)


def _value(r: Tensor) -> Tensor:
    """Return the costs of residuals."""
    return 0.5 * (r * r).sum(1)


def _column_norms(gauss_newton: Tensor) -> Tensor:
    """Return the norms of the columns of Jacobians, from the products JᵀJ."""
    return gauss_newton.diagonal(dim1=1, dim2=2).sqrt()


def _where_finite(x: Tensor, value: Tensor) -> Tensor:
    """Return the values of points with finite numbers only, and NaN for the others."""
    return value + (x - x).sum(1)  # ∞ − ∞ is NaN


def _ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return the ratios of norms; 1 where one is not a positive finite number."""
    ratio = torch.linalg.vector_norm(new, dim=1) / torch.linalg.vector_norm(old, dim=1)
    return torch.where((ratio > 0.0) & (ratio < torch.inf), ratio, 1.0)
