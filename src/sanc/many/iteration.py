"""The iteration of all rows: in each round every row tries one point, and decides by the rules of the core.

A round is one trial point, not one iteration: a row whose step was rejected tries its next point in the next round,
from the same eigenvalues, while others have moved. So no row waits for another. Rows that end leave the batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sanc.core.runs.stall import STALL_LIMIT
from sanc.core.runs.status import Status
from sanc.core.space import ROUNDING_ERRORS
from sanc.many import rules
from sanc.many.algebra import norms_of
from sanc.many.decisions import (
    RowDecisions,
    decide_cubic_steps,
    decide_escape_steps,
    decide_longer_steps,
    halve_escape_steps,
)
from sanc.many.endings import leave_saddles, rounding_of_gradients
from sanc.many.proposals import RowProposals
from sanc.many.rows import (
    CUBIC,
    ESCAPE,
    LONGER,
    PENDING,
    RUNNING,
    WAITING,
    RowPoints,
    RowProblem,
    Rows,
    RowScales,
    RowTrials,
)


class ManyIteration:
    """Makes rounds of trial points for the rows of one batch.

    Parameters
    ----------
    problem : RowProblem
        Evaluates the rows.
    max_iter, max_trials : float
        Limits on the iterations and trial points of a row.
    seed : int
        Seed of the signs in the hard case and of escape steps along ±v.

    Attributes
    ----------
    rules : RowRules
        The decisions that depend on settings of the method.
    """

    def __init__(self, problem: RowProblem, max_iter: float, max_trials: float, seed: int) -> None:
        self.problem, self.max_iter, self.max_trials = problem, max_iter, max_trials
        self.rules = problem.rules
        self._proposals = RowProposals(problem, seed)

    def start(self, ids: Tensor, x: Tensor, lower: Tensor | None, upper: Tensor | None) -> Rows:
        """Return rows, evaluated at their starting points."""
        point = self.problem.evaluate(x, ids)
        failed = ~point.is_finite()
        if bool(failed.any()):
            point = _without_failed(point, failed)
        rows = Rows.start(ids, point, lower, upper)
        rows.status = torch.where(failed, int(Status.NOT_FINITE), rows.status)
        self._enter(rows, None)
        self._end_at_limits(rows)
        return rows

    def make_round(self, rows: Rows) -> None:
        """Evaluate a trial point of every row, and decide."""
        self._proposals.propose_pending(rows)
        value, evaluated = self.problem.evaluate_trials(rows.trial.x, rows.ids)
        unbounded = self._is_unbounded(rows, rows.point.value, value)
        if unbounded is not None:
            value = torch.where(unbounded, -torch.inf, value)  # one such value is not trusted
        rows.nfev, rows.trial_count = rows.nfev + 1, rows.trial_count + 1
        was_longer, was_escape = rows.trial.mode == LONGER, rows.trial.mode == ESCAPE
        decisions = decide_cubic_steps(self.problem, rows, value, evaluated)
        accepted = self._adopt(rows, decisions)
        if self.problem.tries_longer_steps and bool(was_longer.any()):
            accepted = accepted | self._adopt(rows, decide_longer_steps(self.problem, rows, value, was_longer))
        has_escapes, stays = bool(was_escape.any()), torch.zeros_like(accepted)
        if has_escapes:
            escapes = decide_escape_steps(rows, value, was_escape)
            stays = self._halve(rows, was_escape & ~escapes.is_accepted)
            accepted = accepted | self._adopt(rows, escapes)
        rejected = self._move(rows, accepted, evaluated)
        if decisions.rejected is not None:
            rejected = rejected | decisions.rejected
        if has_escapes:
            self._stay(rows, stays)
        mode = torch.where(rejected | (rows.trial_count == 0), PENDING, rows.trial.mode)
        rows.trial = replace(rows.trial, mode=mode)
        self._end_at_limits(rows)

    def _adopt(self, rows: Rows, decisions: RowDecisions) -> Tensor:
        """Write decisions into the rows, and propose longer steps. Return the rows that move to accepted points."""
        rows.accepted, rows.sigma = decisions.accepted, decisions.sigma
        if decisions.gradients is not None:
            rows.njev = rows.njev + decisions.gradients
        if decisions.longer is None:
            return decisions.is_accepted
        return decisions.is_accepted & ~self._proposals.propose_longer(rows, decisions.longer)

    def _halve(self, rows: Rows, candidates: Tensor) -> Tensor:
        """Halve the escape steps of some rows. Return those whose steps are too short, or were halved too often."""
        halved = halve_escape_steps(self.problem, rows, candidates)
        rows.trial, rows.halvings = halved.trial, halved.halvings
        return halved.ended

    # Moves.

    def _move(self, rows: Rows, accepted: Tensor, evaluated: RowPoints | None) -> Tensor:
        """Move rows to accepted points, and begin their next iteration. Return those whose cubic step is rejected.

        The points are evaluated unless the trial points have been. A step to a gradient that is not finite is rejected.
        """
        rejected = torch.zeros_like(accepted)
        indices = torch.nonzero(accepted).reshape(-1)
        if len(indices) == 0:
            return rejected
        all_moved = len(indices) == len(rows)
        moved = rows if all_moved else rows.take(indices)
        rows_before = replace(moved)
        if evaluated is None:
            new_point = self.problem.evaluate(moved.accepted.trial.x, moved.ids)
        else:  # the accepted points are trial points of this round
            new_point = evaluated if all_moved else evaluated.take(indices)
        moved.njev = moved.njev + 1
        finite = None if new_point.are_finite() else new_point.is_finite()
        if finite is not None and not bool(finite.all()):
            failed = torch.nonzero(~finite).reshape(-1)
            rejected = self._reject(rows, indices[failed], moved.take(failed))
            kept = torch.nonzero(finite).reshape(-1)
            if len(kept) == 0:
                return rejected
            all_moved, moved, indices, new_point = False, moved.take(kept), indices[kept], new_point.take(kept)
            rows_before = replace(moved)
        self._begin_iteration(moved, new_point)
        if all_moved:
            rows.discard_trials()
        else:
            rows.set(indices, moved, rows_before)
        return rejected

    def _begin_iteration(self, rows: Rows, new_point: RowPoints) -> None:
        """Begin the next iteration of all rows at their accepted points."""
        before, accepted, step = rows.point, rows.accepted, rows.accepted.trial
        rows.sigma, successful = accepted.sigma, accepted.verdict == rules.SUCCESSFUL
        if bool(successful.any()):
            end_derivative = (new_point.g * (new_point.x - before.x)).sum(1)
            lowered = self.rules.after_derivative(accepted.sigma, step.sigma, step.predicted, step.norm, end_derivative)
            rows.sigma = torch.where(successful, lowered, accepted.sigma)
        decreased = rules.value_decreases(before.value, accepted.value, step.predicted, self.problem.eps)
        self._count_iteration(rows, torch.ones_like(decreased), decreased)
        rows.last_step_norm = torch.where(step.norm > 0.0, step.norm, rows.last_step_norm)
        rows.point = new_point
        self._enter(rows, before)

    def _reject(self, rows: Rows, indices: Tensor, failed_rows: Rows) -> Tensor:
        """Reject steps to points with a gradient that is not finite. Halve escape steps, and return the cubic ones."""
        nan = torch.full_like(failed_rows.point.value, torch.nan)
        escapes = failed_rows.accepted.trial.mode == ESCAPE
        failed_rows.trial = replace(failed_rows.accepted.trial, mode=torch.where(escapes, ESCAPE, CUBIC))
        unsuccessful = torch.zeros_like(failed_rows.trial_count)
        sigma = self.problem.after_trial(failed_rows, unsuccessful, nan, torch.zeros_like(nan))
        failed_rows.sigma = torch.where(escapes, failed_rows.sigma, sigma)
        rows.set(indices, failed_rows)
        chosen = torch.zeros_like(rows.sigma_unconfirmed).index_fill(0, indices, True)
        stays = self._halve(rows, chosen & (rows.trial.mode == ESCAPE))
        if bool(stays.any()):
            self._stay(rows, stays)
        return chosen & (rows.trial.mode == CUBIC)

    def _stay(self, rows: Rows, ended: Tensor) -> None:
        """End the iteration of rows whose trial points were all rejected, and begin the next one at the same point."""
        indices = torch.nonzero(ended & (rows.status == RUNNING)).reshape(-1)
        if len(indices) == 0:
            return
        staying = rows.take(indices)
        none_of_them = torch.zeros_like(staying.sigma_unconfirmed)
        self._count_iteration(staying, moved=none_of_them, decreased=none_of_them)
        self._end_stalled(staying)
        staying.sigma_unconfirmed = none_of_them
        rows.set(indices, staying)

    def _count_iteration(self, rows: Rows, moved: Tensor, decreased: Tensor) -> None:
        """Count an iteration, and the iterations without progress."""
        rows.stalled_iterations, rows.best_grad_norm = rules.update_stall(
            rows.stalled_iterations, rows.best_grad_norm, rows.grad_norm, moved, decreased
        )
        is_flat = rows.trial.predicted <= ROUNDING_ERRORS * self.problem.eps * rows.point.value.abs()
        rows.flat_iterations = torch.where(is_flat, rows.flat_iterations + 1, 0)
        rows.nit = rows.nit + 1
        rows.trial_count = rows.halvings = torch.zeros_like(rows.trial_count)

    # The beginning of an iteration.

    def _enter(self, rows: Rows, before: RowPoints | None) -> None:
        """Begin an iteration at new points: measure them, and end the rows that have converged, stalled or diverged.

        The order matters. The free variables and the scales come first, since all norms refer to them. The norms at a
        stationary point may free fewer variables, of which the spectra are. The tests of endings need both; a row that
        has stalled may restart at a lower point, which enters by this method, too. The units come last, since only
        rows that go on need them, and a row whose length scale is 0 is at its first point.

        Parameters
        ----------
        rows : Rows
            All of them are at new points.
        before : RowPoints or None
            The points before the last step; None at the start of a row.
        """
        problem, box = self.problem, rows.box
        rows.free = None if box is None else box.free(rows.point.x, rows.point.g)
        self._set_scales(rows, problem.scales(rows, before))
        self._measure(rows)
        rows.spectra = problem.spectra(rows)
        unbounded = self._is_unbounded(rows, rows.first_value, rows.point.value)
        if unbounded is not None:
            rows.status = torch.where((rows.status == RUNNING) & unbounded, int(Status.UNBOUNDED), rows.status)
        self._end_stationary(rows, rows.grad_norm <= rows.tol)
        self._end_stalled(rows)
        rows.sigma_unconfirmed = (rows.first_length_scale == 0.0) & problem.tries_longer_steps  # at their first points
        self._measure_units(rows)

    def _is_unbounded(self, rows: Rows, first: Tensor, value: Tensor) -> Tensor | None:
        """Return where the decrease from the value `first` shows that f is unbounded; None if no f can be."""
        if self.problem.is_bounded_below:
            return None
        return first - value > rules.unbounded_decrease(first, rows.unit_value, self.problem.eps)

    def _set_scales(self, rows: Rows, scales: RowScales) -> None:
        """Set scales and tolerances; σ and norms change so that the last model keeps its terms."""
        rows.point, rows.scale, rows.tol = scales.point, scales.scale, scales.tol
        rows.curvature_tol = scales.curvature_tol
        if scales.step_growth is None or scales.gradient_growth is None:
            return
        cubed = scales.step_growth**3
        rows.sigma, rows.unit_cubic = rows.sigma / cubed, rows.unit_cubic / cubed
        rows.first_length_scale = rows.first_length_scale * scales.step_growth
        rows.last_step_norm = rows.last_step_norm * scales.step_growth
        rows.best_grad_norm = rows.best_grad_norm * scales.gradient_growth

    def _measure(self, rows: Rows) -> None:
        """Measure ‖x‖ and the gradient norm of the free variables; at stationary points, those between their bounds."""
        x, g, box = rows.point.x, rows.point.g * rows.scale, rows.box
        rows.x_norm = torch.linalg.vector_norm(x / rows.scale, dim=1)
        rows.grad_norm = torch.linalg.vector_norm(g if rows.free is None else g * rows.free, dim=1)
        stationary = rows.grad_norm <= rows.tol
        if box is not None and rows.free is not None and bool(stationary.any()):
            rows.free = torch.where(stationary[:, None], box.between(x), rows.free)
            rows.grad_norm = torch.linalg.vector_norm(g * rows.free, dim=1)

    def _end_stationary(self, rows: Rows, stationary: Tensor) -> None:
        """Test the curvature of rows with a small gradient; those without the whole Hessian wait for `certify`."""
        stationary = stationary & (rows.status == RUNNING)
        if bool(stationary.any()):
            g = rows.point.g * rows.scale
            g = g if rows.free is None else g * rows.free
            stationary = stationary & (norms_of(g) <= rows.tol)  # squares may have underflowed
            complete = self.problem.can_certify(rows)
            rows.status = torch.where(stationary & ~complete, WAITING, rows.status)
            self._end_by_curvature(rows, stationary & complete)

    def _end_by_curvature(self, rows: Rows, stationary: Tensor) -> None:
        """End rows whose curvature is certified, or cannot be; the others follow negative curvature."""
        if not bool(stationary.any()):
            return
        ritz_value, error = rows.spectra.ritz_value, rows.spectra.lambda_error
        certified = ritz_value - error >= -rows.curvature_tol
        saddle = ritz_value + error < -rows.curvature_tol
        ended = torch.where(certified, int(Status.SECOND_ORDER), int(Status.UNCERTIFIED))
        rows.status = torch.where(stationary, torch.where(saddle, RUNNING, ended), rows.status)

    def certify(self, rows: Rows) -> None:
        """Test the curvature of rows that waited for the whole Hessian; those at a saddle begin an iteration."""
        rows.point = self.problem.prepare_certificate(rows.point, rows.ids)
        rows.spectra = self.problem.spectra(rows)
        rows.status = torch.full_like(rows.status, int(Status.UNCERTIFIED))
        self._end_by_curvature(rows, self.problem.can_certify(rows))
        rows.trial, rows.trial_count = RowTrials.pending(rows.point.x), torch.zeros_like(rows.trial_count)
        self._end_at_limits(rows)

    def _end_stalled(self, rows: Rows) -> None:
        """End rows that have stalled, unless they can follow negative curvature."""
        if rows.stalled_iterations.max().item() < STALL_LIMIT:
            return
        indices = torch.nonzero((rows.stalled_iterations >= STALL_LIMIT) & (rows.status == RUNNING)).reshape(-1)
        if len(indices) == 0:
            return
        stalled = rows.take(indices)
        stalled.status = torch.full_like(stalled.status, int(Status.STALLED))
        if self.problem.default_tol:
            error = rounding_of_gradients(self.problem, stalled)
            small = (stalled.grad_norm <= error) & (stalled.flat_iterations >= STALL_LIMIT)
            stalled.status = torch.where(small, RUNNING, stalled.status)
            stalled.tol = torch.where(small, torch.maximum(stalled.tol, error), stalled.tol)
            self._end_stationary(stalled, small)
            stalled.status = torch.where(small & (stalled.status == RUNNING), int(Status.STALLED), stalled.status)
        lower_points, moved = leave_saddles(self.problem, stalled)
        rows.set(indices, stalled)
        if len(moved):
            again = indices[moved]
            at_saddles = rows.take(again)
            restarted = at_saddles.restarted(self.problem.evaluate(lower_points, at_saddles.ids))
            self._enter(restarted, None)
            rows.set(again, restarted)

    def _end_at_limits(self, rows: Rows) -> None:
        """End rows that have made `max_iter` iterations or `max_trials` trial points."""
        if rows.nfev.max().item() <= min(self.max_iter, self.max_trials):  # an iteration has a trial point
            return
        reached = (rows.nit >= self.max_iter) | (rows.nfev > self.max_trials)
        rows.status = torch.where(reached & (rows.status == RUNNING), int(Status.ITERATION_LIMIT), rows.status)

    def _measure_units(self, rows: Rows) -> None:
        """Measure the units of rows at their first points, and their initial σ."""
        first = rows.first_length_scale == 0.0
        if not bool(first.any()):
            return
        c, hessian_norm = rows.spectra.c, rows.spectra.hessian_norm
        product_norm = torch.linalg.vector_norm(rows.spectra.values * c, dim=1) / torch.linalg.vector_norm(c, dim=1)
        grad_norm = torch.where(rows.grad_norm <= self.problem.eps * product_norm * rows.x_norm, 0.0, rows.grad_norm)
        product_norm = torch.where((grad_norm > 0.0) & product_norm.isfinite(), product_norm, hessian_norm)
        length_scale, unit_cubic = rules.measure_units(rows.point.value, grad_norm, product_norm, rows.x_norm)
        rows.first_length_scale = torch.where(first, length_scale, rows.first_length_scale)
        rows.unit_cubic = torch.where(first, unit_cubic, rows.unit_cubic)
        rows.sigma = torch.where(first, self.problem.first_sigma(rows), rows.sigma)


def _without_failed(point: RowPoints, failed: Tensor) -> RowPoints:
    """Return points with gradients and curvature 0 in rows that have failed, so that no later operation fails."""
    g = torch.where(failed[:, None], 0.0, point.g)
    return replace(point, g=g, matrix=torch.where(failed[:, None, None], 0.0, point.matrix))
