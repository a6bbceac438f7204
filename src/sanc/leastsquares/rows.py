"""Fits of many rows of data at once, by the rules of `least_squares`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from sanc.core.sigma import MIN_SIGMA_FACTOR_EXACT
from sanc.core.space import ROUNDING_ERRORS
from sanc.leastsquares.model import FIRST_SIGMA_FACTOR, MAX_GROWTH
from sanc.many import rules
from sanc.many.algebra import gram, multiply
from sanc.many.rows import Before, Evaluation, Problem, Rows

_WORTH_OF_HESSIAN = 0.5
"""The whole Hessian is used if the curvature of its second-order term along the last step is at least this fraction of
Gauss–Newton's. It costs about as much as four Jacobians, and without it fits with large residuals converge slowly."""

_GAUSS_NEWTON_ITERATIONS = 5
"""Iterations without the whole Hessian: with small residuals a fit from a sensible start needs about as many."""


class FitProblem(Problem):
    """Sums of squares of residuals, a row each, in variables scaled by the column norms of their Jacobians.

    Parameters
    ----------
    residuals : callable
        ``residuals(p, *data)`` returns the residuals of one row.
    data : sequence of Tensor
        Further arguments of `residuals`, with an entry for each row along the first dimension where `dims` is 0.
    dims : sequence of int or None
        Whether an argument has an entry for each row.
    dim : int
        Parameters of a row.
    eps : float
        Machine epsilon of the residuals.
    tol : float
        Tolerance on the cosine between residuals and columns of the Jacobian.
    """

    scales = True
    tries_longer_steps = False
    default_tol = True

    def __init__(
        self,
        residuals: Callable[..., Tensor],
        data: Sequence[Tensor],
        dims: Sequence[int | None],
        dim: int,
        eps: float,
        tol: float,
    ) -> None:
        self.residuals, self.data, self.dims = residuals, tuple(data), tuple(dims)
        self.dim, self.eps, self.tol = dim, eps, tol
        self._exponent_limit = 0.25 * math.frexp(torch.finfo(torch.float64).max)[1]
        self._hessian: Callable[..., Tensor] = self._forward_hessian

    # Evaluations.

    def mapped(self, function: Callable[..., Any], x: Tensor, ids: Tensor) -> Any:
        """Return a function of parameters and data of one row, for some of the rows."""
        data = [part if dim is None else part[ids] for part, dim in zip(self.data, self.dims, strict=True)]
        return vmap(function, in_dims=(0, *self.dims))(x, *data)

    def values(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            value = 0.5 * self.mapped(self.residuals, x, ids).double().square().sum(1)
        return torch.where(x.isfinite().all(1), value, torch.nan)

    def linearised(self, p: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals and the transposed Jacobian of one row."""
        directions = torch.eye(len(p), dtype=p.dtype, device=p.device)

        def along(direction: Tensor) -> Any:
            return jvp(lambda q: self.residuals(q, *data), (p,), (direction,))[1]

        return self.residuals(p, *data), vmap(along)(directions)

    def evaluate(self, x: Tensor, ids: Tensor) -> Evaluation:
        with torch.no_grad():
            r, columns = self.mapped(self.linearised, x, ids)
        r, columns = r.double(), columns.double()
        norms = torch.linalg.vector_norm(columns, dim=2)
        more = {
            "norms": norms,
            "residual_norm": torch.linalg.vector_norm(r, dim=1),
            "exponents": torch.full_like(norms, -torch.inf),
            "complete": torch.zeros(len(x), dtype=torch.bool, device=x.device),
        }
        g = multiply(columns, r)
        more["gauss_newton"] = matrix = gram(columns)
        return Evaluation(0.5 * (r * r).sum(1), g, matrix, more)

    def gradients(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mapped(grad(self._cost), x, ids).detach().double()  # type: ignore[no-any-return]

    def is_complete(self, rows: Rows) -> Tensor:
        return rows.more["complete"]

    def complete(self, rows: Rows) -> None:
        try:
            matrix = self.mapped(self._hessian, rows.x, rows.ids)
        except (RuntimeError, NotImplementedError):  # an operator without forward derivatives
            self._hessian = jacrev(grad(self._cost))
            matrix = self.mapped(self._hessian, rows.x, rows.ids)
        matrix = matrix.detach().double()
        matrix = 0.5 * (matrix + matrix.mT)
        finite = matrix.isfinite().flatten(1).all(1)
        assert rows.matrix is not None
        rows.matrix = torch.where(finite[:, None, None], matrix, rows.matrix)
        rows.more["complete"] = finite

    def _cost(self, p: Tensor, *data: Tensor) -> Tensor:
        return 0.5 * self.residuals(p, *data).square().sum()

    def _forward_hessian(self, p: Tensor, *data: Tensor) -> Tensor:
        """Return the Hessian of the cost of one row."""
        directions = torch.eye(len(p), dtype=p.dtype, device=p.device)
        return vmap(lambda v: jvp(lambda q: grad(self._cost)(q, *data), (p,), (v,))[1])(directions)  # type: ignore[no-any-return]

    # Units of the variables, and tolerances.

    def prepare(self, rows: Rows, before: Before | None) -> None:
        """Scale the variables by the largest column norms so far; at a stationary point, by those of the point."""
        norms = rows.more["norms"]
        now = torch.where(norms.isfinite(), norms.log2().round(), -torch.inf)
        old = now if before is None else before.more["exponents"]
        step = None if before is None else rows.x - before.x
        self._rescale(rows, torch.maximum(old, now), step, first=before is None)
        effects = norms * rows.x.abs()
        rounding = ROUNDING_ERRORS * self.eps * torch.linalg.vector_norm(effects, dim=1)
        weighted = rows.more["residual_norm"]
        rows.tol = self.tol * weighted + torch.where(rounding.isfinite(), rounding, 0.0)
        stationary = self._projected_norm(rows) <= rows.tol
        if bool(stationary.any()):
            has_effect = effects >= (ROUNDING_ERRORS * self.eps * weighted)[:, None]
            exponents = torch.where(now.isfinite() & has_effect & stationary[:, None], now, rows.more["exponents"])
            self._rescale(rows, exponents, step, first=before is None)
        self._add_second_order_term(rows, before)
        size = torch.linalg.vector_norm(effects, dim=1)
        share = torch.where(size > 0.0, (weighted / size).clamp(max=1.0), 1.0)
        rows.curvature_tol = (math.sqrt(self.tol) * share).clamp(min=self.tol)

    def _add_second_order_term(self, rows: Rows, before: Before | None) -> None:
        """Use the whole Hessian in rows where the second-order term is worth it, as measured along the last step."""
        late = rows.nit >= _GAUSS_NEWTON_ITERATIONS
        if before is None or not bool(late.any()):
            return
        step = (rows.x - before.x).double()
        model = (step * multiply(before.more["gauss_newton"], step)).sum(1)
        second = (step * (rows.g - before.g)).sum(1) - model
        places = torch.nonzero(late & (second.abs() > _WORTH_OF_HESSIAN * model)).reshape(-1)
        if len(places):
            part = rows.take(places)
            self.complete(part)
            rows.put(places, part)

    def _projected_norm(self, rows: Rows) -> Tensor:
        g = rows.g * rows.scale
        if rows.box is not None:
            g = g * rows.box.free(rows.x, g)
        norm: Tensor = torch.linalg.vector_norm(g, dim=1)
        return norm

    def _rescale(self, rows: Rows, exponents: Tensor, step: Tensor | None, *, first: bool) -> None:
        """Change the units of the variables; σ and the lengths change so that the last model keeps its terms."""
        rows.more["exponents"] = exponents
        old = rows.scale
        powers = torch.where(exponents.isfinite(), -exponents, 0.0).clamp(-self._exponent_limit, self._exponent_limit)
        rows.scale = torch.exp2(powers)
        if first or not bool((old != rows.scale).any()):
            return
        reference = rows.x if step is None else torch.where((step != 0.0).any(1)[:, None], step, rows.x)
        length = _ratio(reference / rows.scale, reference / old)
        slope = _ratio(rows.g * rows.scale, rows.g * old)
        rows.sigma = rows.sigma / length**3
        rows.unit_cubic = rows.unit_cubic / length**3
        rows.unit_length = rows.unit_length * length
        rows.last_step_norm = rows.last_step_norm * length
        rows.last_grad_norm = rows.last_grad_norm * slope
        rows.best_grad_norm = rows.best_grad_norm * slope

    # Rules for σ: steps are those of Gauss and Newton as long as they succeed.

    def first_sigma(self, rows: Rows) -> Tensor:
        return FIRST_SIGMA_FACTOR * rules.first_sigma(rows.unit_cubic)

    def max_step_norm(self, rows: Rows) -> tuple[Tensor, Tensor]:
        first = torch.where(rows.x_norm > 0.0, rows.x_norm, rows.unit_length)
        limit = torch.where(rows.last_step_norm > 0.0, MAX_GROWTH * rows.last_step_norm, first)
        return limit, torch.ones_like(rows.untested)

    def after_trial(self, rows: Rows, verdict: Tensor, actual: Tensor, rounding: Tensor) -> Tensor:
        sigma = super().after_trial(rows, verdict, actual, rounding)
        smallest = rules.bounded(MIN_SIGMA_FACTOR_EXACT * rows.step_sigma)
        return torch.where(verdict == rules.VERY_SUCCESSFUL, smallest, sigma)


def _ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return the ratios of norms; 1 where one is not a positive finite number."""
    ratio = torch.linalg.vector_norm(new, dim=1) / torch.linalg.vector_norm(old, dim=1)
    return torch.where((ratio > 0.0) & (ratio < torch.inf), ratio, 1.0)
