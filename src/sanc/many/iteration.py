"""The iteration of all rows: in each round every row tries one point, and decides by the rules of the core.

A round is one trial point, not one iteration: a row whose step was rejected tries its next point in the next round,
from the same eigenvalues, while others have moved. So no row waits for another. Rows that end leave the batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sanc.core.acceptance import CANCELLATION_ERRORS
from sanc.core.box_model import SHORTER_STEP
from sanc.core.escape import HALVINGS
from sanc.core.space import ROUNDING_ERRORS
from sanc.core.stall import STALL_LIMIT
from sanc.core.status import Status
from sanc.many import rules
from sanc.many.algebra import multiply
from sanc.many.box import fit_steps
from sanc.many.cubic import CubicModels
from sanc.many.endings import leave_saddles, rounding_of_gradients
from sanc.many.rows import CUBIC, ESCAPE, LONGER, RUNNING, WAITING, Before, Evaluation, Problem, Rows

_HASH_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""2⁶⁴ over the golden ratio, as a signed integer: the factor of Knuth's multiplicative hash."""


class ManyIteration:
    """Makes rounds of trial points for the rows of one batch.

    Parameters
    ----------
    problem : Problem
        Evaluates the rows.
    max_iter, max_trials : float
        Limits on the iterations and trial points of a row.
    seed : int
        Seed of the signs in the hard case and of escape steps along ±v.
    """

    def __init__(self, problem: Problem, max_iter: float, max_trials: float, seed: int) -> None:
        self.problem, self.max_iter, self.max_trials = problem, max_iter, max_trials
        self._seed = seed

    def start(self, rows: Rows) -> Rows:
        """Evaluate the rows at their starting points, and propose the first steps."""
        found = self.problem.evaluate(rows.x, rows.ids)
        rows.nfev += 1
        rows.njev += 1
        rows.accept(found)
        rows.status.fill_(RUNNING)
        rows.first_value = found.value.clone()
        rows.best_grad_norm.fill_(torch.inf)
        rows.status[~found.is_finite()] = Status.NOT_FINITE
        _replace_failed(rows)
        self._enter(rows, None)
        self._propose(rows)
        return rows

    def make_round(self, rows: Rows) -> None:
        """Evaluate the trial points of all rows, and decide; afterwards every running row has a new trial point."""
        value = self.problem.values(rows.trial, rows.ids)
        limit = (rows.value.abs() + rows.unit_value) / self.problem.eps**2
        value = torch.where(rows.value - value > limit, -torch.inf, value)  # one such value is not trusted
        rows.nfev += 1
        rows.trials += 1
        was_longer, was_escape = rows.mode == LONGER, rows.mode == ESCAPE
        accepted, rejected = self._test_cubic_steps(rows, value)
        if bool(was_longer.any()):
            accepted |= self._test_longer_steps(rows, value, was_longer)
        stays = torch.zeros_like(accepted)
        if bool(was_escape.any()):
            lower, stays = self._test_escape_steps(rows, value, was_escape)
            accepted |= lower
        rejected |= self._move(rows, accepted)
        if bool(was_escape.any()):
            self._stay(rows, stays)
        self._propose_next(rows, rejected)
        if self.max_trials < math.inf:
            reached = (rows.status == RUNNING) & (rows.nfev > self.max_trials)
            rows.status = torch.where(reached, int(Status.ITERATION_LIMIT), rows.status)

    # Decisions about trial points.

    def _test_cubic_steps(self, rows: Rows, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return which cubic steps are accepted, and which are rejected; some rows try a longer step instead."""
        is_cubic = rows.mode == CUBIC
        rounding = ROUNDING_ERRORS * self.problem.eps * rows.value.abs()
        actual = self._guarded_decrease(rows, rows.value - value, is_cubic)
        verdict = rules.classify(actual, rows.predicted, rounding)
        sigma = self.problem.after_trial(rows, verdict, actual, rounding)
        accepted = is_cubic & (verdict != rules.UNSUCCESSFUL)
        rejected = is_cubic & ~accepted
        _set(rows, accepted, value, sigma)
        rows.verdict = torch.where(accepted, verdict, rows.verdict)
        rows.sigma = torch.where(rejected, sigma, rows.sigma)
        if self.problem.tries_longer_steps:
            rho = rules.ratio(actual, rows.predicted, rounding)
            longer = accepted & rows.sigma_untested & rules.tries_longer_step(rho, sigma, rows.step_sigma)
            accepted = accepted & ~self._propose_longer(rows, longer)
        return accepted, rejected

    def _guarded_decrease(self, rows: Rows, actual: Tensor, is_cubic: Tensor) -> Tensor:
        """Return the decreases to use: within cancellation errors, a step that halves ‖g‖ counts as successful."""
        eps = self.problem.eps
        length = torch.maximum(rows.unit_length, rows.x_norm)
        quadratic_terms = rows.curvature * length * length
        f_scale = torch.maximum(rows.value.abs(), torch.minimum(quadratic_terms, rows.unit_value))
        within_cancellation = (actual.abs() <= CANCELLATION_ERRORS * eps * f_scale) & (
            rows.predicted <= eps**0.5 * f_scale
        )
        within_cancellation &= (actual < rules.ETA1 * rows.predicted) & is_cubic & (rows.trials == 1)
        places = torch.nonzero(within_cancellation).reshape(-1)
        if len(places) == 0:
            return actual
        part = rows.take(places)
        g = self.problem.gradients(part.trial, part.ids) * part.scale
        rows.njev[places] += 1
        if part.box is not None:
            g = g * part.box.free(part.trial, g)
        halved = torch.linalg.vector_norm(g, dim=1) <= 0.5 * part.grad_norm
        actual = actual.clone()
        actual[places] = torch.where(halved, part.predicted, actual[places])
        return actual

    def _propose_longer(self, rows: Rows, wanted: Tensor) -> Tensor:
        """Set longer trial points in some of the rows `wanted`; return in which."""
        places = torch.nonzero(wanted & (rows.trials <= rules.RESOLVES)).reshape(-1)
        proposed = torch.zeros_like(wanted)
        if len(places) == 0:
            return proposed
        part = rows.take(places)
        part.sigma = part.next_sigma
        self._propose(part)
        is_longer = (part.step_norm >= 2.0 * part.next_norm) & (part.mode == CUBIC)
        part.mode.fill_(LONGER)
        kept = torch.nonzero(is_longer).reshape(-1)
        rows.put(places[kept], part.take(kept))
        proposed[places[kept]] = True
        return proposed

    def _test_longer_steps(self, rows: Rows, value: Tensor, longer: Tensor) -> Tensor:
        """Accept longer steps with a lower value; return the rows that do not try a further one."""
        lower = longer & (value > -torch.inf) & (value < rows.next_value)
        actual = rows.value - value
        zero = torch.zeros_like(actual)
        verdict = rules.classify(actual, rows.predicted, zero)
        sigma = self.problem.after_trial(rows, verdict, actual, zero)
        _set(rows, lower, value, sigma)
        rho = rules.ratio(actual, rows.predicted, zero)
        return longer & ~self._propose_longer(rows, lower & rules.tries_longer_step(rho, sigma, rows.step_sigma))

    def _test_escape_steps(self, rows: Rows, value: Tensor, escapes: Tensor) -> tuple[Tensor, Tensor]:
        """Accept escape steps with a lower value, and halve the others; return the former, and the rows that stay."""
        lower = escapes & (value > -torch.inf) & (value < rows.value)
        _set(rows, lower, value, rows.sigma)
        return lower, self._halve(rows, escapes & ~lower)

    def _halve(self, rows: Rows, wanted: Tensor) -> Tensor:
        """Halve the escape steps of some rows; return those whose steps are too short."""
        rows.halvings += wanted
        rows.step_norm = torch.where(wanted, 0.5 * rows.step_norm, rows.step_norm)
        rows.trial = torch.where(wanted[:, None], rows.x + 0.5 * (rows.trial - rows.x), rows.trial)
        is_short = rows.step_norm <= self.problem.eps * rows.x_norm.clamp(min=1e-300)
        return wanted & (is_short | (rows.halvings >= HALVINGS))

    def _propose_next(self, rows: Rows, rejected: Tensor) -> None:
        """Propose the next steps of rows that begin an iteration or whose step was rejected."""
        places = torch.nonzero((rejected | (rows.trials == 0)) & (rows.status == RUNNING)).reshape(-1)
        if len(places) == 0:
            return
        every = len(places) == len(rows)
        part = rows if every else rows.take(places)
        last_norm, was_truncated = part.step_norm, part.truncated & (part.trials > 0)
        self._propose(part)
        if part.lower is not None:
            self._shorten(part, was_truncated, last_norm)
        last = torch.nonzero(part.trials > rules.RESOLVES).reshape(-1)
        if len(last):
            ending = part.take(last)
            self._propose_escape(ending)
            part.put(last, ending)
        if not every:
            rows.put(places, part)

    def _shorten(self, rows: Rows, was_truncated: Tensor, last_norm: Tensor) -> None:
        """Raise σ where bounds determined a rejected step and its successor, until the latter is shorter."""
        while True:
            repeated = was_truncated & rows.truncated & (rows.step_norm > SHORTER_STEP * last_norm)
            places = torch.nonzero(repeated & (rows.mode == CUBIC) & (rows.sigma < rules.SIGMA_CEILING)).reshape(-1)
            if len(places) == 0:
                break
            part = rows.take(places)
            part.sigma = rules.bounded(4.0 * part.sigma)
            self._propose(part)
            rows.put(places, part)

    # Moves.

    def _move(self, rows: Rows, accepted: Tensor) -> Tensor:
        """Evaluate the accepted points, and begin the next iteration there.

        Return where a gradient is not finite, so that the cubic step is rejected.
        """
        rejected = torch.zeros_like(accepted)
        places = torch.nonzero(accepted).reshape(-1)
        if len(places) == 0:
            return rejected
        every = len(places) == len(rows)
        part = rows if every else rows.take(places)
        found = self.problem.evaluate(part.next_x, part.ids)
        part.njev += 1
        finite = found.is_finite()
        if not bool(finite.all()):
            failed = torch.nonzero(~finite).reshape(-1)
            rejected = self._reject(rows, places[failed], part.take(failed))
            kept = torch.nonzero(finite).reshape(-1)
            if len(kept) == 0:
                return rejected
            every, part, places = False, part.take(kept), places[kept]
            found = _taken_evaluation(found, kept)
        self._advance(part, found)
        if not every:
            rows.put(places, part)
        return rejected

    def _advance(self, part: Rows, found: Evaluation) -> None:
        """Begin the next iteration of all rows at their accepted points."""
        before = Before(part.x, part.value, part.g, part.more)
        end_derivative = (found.g * (part.next_x - part.x)).sum(1)
        lowered = rules.after_derivative(
            part.next_sigma, part.next_step_sigma, part.next_predicted, part.next_norm, end_derivative
        )
        uses_derivative = (part.verdict == rules.SUCCESSFUL) & (part.mode != ESCAPE)
        part.sigma = torch.where(uses_derivative, lowered, part.next_sigma)
        decreased = part.value - part.next_value > self.problem.eps * part.value.abs()
        self._count_iteration(part, torch.ones_like(decreased), decreased)
        part.last_step_norm = torch.where(part.next_norm > 0.0, part.next_norm, part.last_step_norm)
        part.x = part.next_x
        part.accept(found)
        self._enter(part, before)

    def _reject(self, rows: Rows, places: Tensor, part: Rows) -> Tensor:
        """Reject steps to points with a gradient that is not finite; halve escape steps. Return the cubic ones."""
        nan = torch.full_like(part.value, torch.nan)
        part.step_sigma, part.step_norm, part.predicted = part.next_step_sigma, part.next_norm, part.next_predicted
        escapes = part.mode == ESCAPE
        sigma = self.problem.after_trial(part, torch.zeros_like(part.verdict), nan, torch.zeros_like(nan))
        part.sigma = torch.where(escapes, part.sigma, sigma)
        part.mode = torch.where(escapes, ESCAPE, CUBIC)
        rows.put(places, part)
        chosen = torch.zeros(len(rows), dtype=torch.bool, device=rows.x.device)
        chosen[places] = True
        stays = self._halve(rows, chosen & (rows.mode == ESCAPE))
        if bool(stays.any()):
            self._stay(rows, stays)
        return chosen & (rows.mode == CUBIC)

    def _stay(self, rows: Rows, ended: Tensor) -> None:
        """End the iteration of rows whose trial points were all rejected, and begin the next one at the same point."""
        places = torch.nonzero(ended & (rows.status == RUNNING)).reshape(-1)
        if len(places) == 0:
            return
        part = rows.take(places)
        no = torch.zeros(len(part), dtype=torch.bool, device=part.x.device)
        self._count_iteration(part, no, no)
        self._test_stall(part)
        self._test_limit(part)
        part.sigma_untested = no
        rows.put(places, part)

    def _count_iteration(self, part: Rows, moved: Tensor, decreased: Tensor) -> None:
        """Count an iteration, and the iterations without progress."""
        part.stall, part.best_grad_norm = rules.update_stall(
            part.stall, part.best_grad_norm, part.grad_norm, moved, decreased
        )
        is_flat = part.predicted <= ROUNDING_ERRORS * self.problem.eps * part.value.abs()
        part.flat = torch.where(is_flat, part.flat + 1, 0)
        part.nit += 1
        part.trials = torch.zeros_like(part.trials)
        part.halvings = torch.zeros_like(part.halvings)
        part.verdict = torch.zeros_like(part.verdict)

    # The beginning of an iteration.

    def _enter(self, rows: Rows, before: Before | None) -> None:
        """Test rows at new points for their endings."""
        problem = self.problem
        problem.prepare(rows, before)
        self._measure(rows)
        self._set_spectra(rows)
        unbounded = rows.first_value - rows.value > (rows.first_value.abs() + rows.unit_value) / problem.eps**2
        rows.status = torch.where((rows.status == RUNNING) & unbounded, int(Status.UNBOUNDED), rows.status)
        self._test_stationary(rows, rows.grad_norm <= rows.tol)
        self._test_stall(rows)
        self._test_limit(rows)
        self._measure_units(rows)

    def _set_spectra(self, rows: Rows) -> None:
        """Set the eigenpairs of the curvature."""
        found = self.problem.spectra(rows)
        rows.values, rows.vectors, rows.c, rows.lambda_error = found.values, found.vectors, found.c, found.lambda_error

    def _measure(self, rows: Rows) -> None:
        """Measure ‖x‖, the free variables and the norm of their gradient."""
        g = rows.g * rows.scale
        rows.x_norm = torch.linalg.vector_norm(rows.x / rows.scale, dim=1)
        box = rows.box
        if box is not None:
            free = box.free(rows.x, g)
            stationary = torch.linalg.vector_norm(g * free, dim=1) <= rows.tol
            rows.free = torch.where(stationary[:, None], box.between(rows.x), free)
            g = g * rows.free
        rows.grad_norm = torch.linalg.vector_norm(g, dim=1)

    def _test_stationary(self, rows: Rows, stationary: Tensor) -> None:
        """Test the curvature of rows with a small gradient; those without the whole Hessian wait for `certify`."""
        stationary = stationary & (rows.status == RUNNING)
        if bool(stationary.any()):
            complete = self.problem.is_complete(rows)
            rows.status = torch.where(stationary & ~complete, WAITING, rows.status)
            self._test_curvature(rows, stationary & complete)

    def _test_curvature(self, rows: Rows, stationary: Tensor) -> None:
        """End rows whose curvature is certified, or cannot be; the others follow negative curvature."""
        certified = rows.ritz_value - rows.lambda_error >= -rows.curvature_tol
        saddle = rows.ritz_value + rows.lambda_error < -rows.curvature_tol
        ended = torch.where(certified, int(Status.SECOND_ORDER), int(Status.UNCERTIFIED))
        rows.status = torch.where(stationary, torch.where(saddle, RUNNING, ended), rows.status)

    def certify(self, rows: Rows) -> None:
        """Test the curvature of rows that waited for the whole Hessian; those at a saddle have a new trial point."""
        self.problem.set_whole_hessians(rows)
        self._set_spectra(rows)
        complete = self.problem.is_complete(rows)
        rows.status.fill_(int(Status.UNCERTIFIED))
        self._test_curvature(rows, complete)
        rows.trials = torch.zeros_like(rows.trials)
        self._propose(rows)

    def _test_stall(self, rows: Rows) -> None:
        """End rows that have stalled, unless they can follow negative curvature."""
        places = torch.nonzero((rows.stall >= STALL_LIMIT) & (rows.status == RUNNING)).reshape(-1)
        if len(places) == 0:
            return
        part = rows.take(places)
        part.status.fill_(int(Status.STALLED))
        if self.problem.default_tol:
            error = rounding_of_gradients(self.problem, part)
            small = (part.grad_norm <= error) & (part.flat >= STALL_LIMIT)
            part.status[small] = RUNNING
            part.tol = torch.where(small, torch.maximum(part.tol, error), part.tol)
            self._test_stationary(part, small)
            part.status[small & (part.status == RUNNING)] = int(Status.STALLED)
        moved = leave_saddles(self.problem, part)
        rows.put(places, part)
        if bool(moved.any()):
            again = places[moved]
            fresh = rows.take(again)
            fresh.accept(self.problem.evaluate(fresh.x, fresh.ids))
            fresh.status.fill_(RUNNING)
            for number in (fresh.stall, fresh.flat, fresh.unit_length, fresh.unit_cubic, fresh.last_step_norm):
                number.zero_()
            fresh.best_grad_norm.fill_(torch.inf)
            self._enter(fresh, None)
            rows.put(again, fresh)

    def _test_limit(self, rows: Rows) -> None:
        """End rows that have made `max_iter` iterations."""
        reached = (rows.status == RUNNING) & (rows.nit >= self.max_iter)
        rows.status = torch.where(reached, int(Status.ITERATION_LIMIT), rows.status)

    def _measure_units(self, rows: Rows) -> None:
        """Measure the units of rows at their first points, and their initial σ."""
        first = rows.unit_length == 0.0
        rows.sigma_untested = first & self.problem.tries_longer_steps
        if not bool(first.any()):
            return
        norm = torch.linalg.vector_norm(rows.c, dim=1)
        product_norm = torch.linalg.vector_norm(rows.values * rows.c, dim=1) / norm
        grad_norm = torch.where(rows.grad_norm <= self.problem.eps * product_norm * rows.x_norm, 0.0, rows.grad_norm)
        product_norm = torch.where((grad_norm > 0.0) & product_norm.isfinite(), product_norm, rows.curvature)
        length, unit_cubic = rules.measure_units(rows.value, grad_norm, product_norm, rows.x_norm)
        rows.unit_length = torch.where(first, length, rows.unit_length)
        rows.unit_cubic = torch.where(first, unit_cubic, rows.unit_cubic)
        rows.sigma = torch.where(first, self.problem.first_sigma(rows), rows.sigma)

    # Proposals.

    def _propose(self, rows: Rows) -> None:
        """Set the cubic steps of all rows for their σ as trial points; escape steps where there is no cubic one.

        The norm of the first step of an iteration is limited.
        """
        models = CubicModels(rows.values, rows.c)
        is_first = rows.trials == 0
        if bool(is_first.any()):
            max_norm, always = self.problem.max_step_norm(rows)
            sigma = rules.limited_sigma(models, rows.sigma, torch.where(is_first, max_norm, torch.inf), always)
            rows.sigma_untested = rows.sigma_untested | ((sigma > rows.sigma) & self.problem.tries_longer_steps)
            rows.sigma = sigma
        steps = models.solve(rows.sigma, self._signs(rows))
        rows.step_sigma, rows.step_norm, rows.multiplier = rows.sigma, steps.norm, steps.multiplier
        rows.predicted = steps.decrease
        rows.mode = torch.full_like(rows.mode, CUBIC)
        s = multiply(rows.vectors, steps.y) * rows.scale
        rows.trial = rows.x + s.to(rows.x.dtype)
        if rows.lower is not None:
            fitted = fit_steps(rows, s)
            rows.trial, rows.truncated = fitted.trial, fitted.truncated
            rows.step_norm, rows.predicted = fitted.step_norm, fitted.predicted
        below = rows.step_norm <= self.problem.eps * rows.x_norm
        none = (below | ~(rows.predicted > 0.0)) & (rows.status == RUNNING)
        places = torch.nonzero(none).reshape(-1)
        if len(places):
            part = rows.take(places)
            is_limited = (part.trials == 0) & (part.multiplier > part.curvature)
            norm_ratio = torch.where(is_limited, part.step_norm / (self.problem.eps**0.5 * part.x_norm), 1.0)
            negligible = below[places] & (part.predicted > 0.0)
            part.sigma = torch.where(negligible, rules.after_negligible_step(part.sigma, norm_ratio), part.sigma)
            self._propose_escape(part)
            rows.put(places, part)

    def _propose_escape(self, rows: Rows) -> None:
        """Set an escape step of all rows as trial point: along negative curvature or the gradient."""
        along, size = rules.choose_branch(rows.ritz_value, rows.curvature, rows.grad_norm, rows.sigma)
        v = rows.vectors[:, :, 0]
        g = multiply(rows.vectors, rows.c)
        sign = -torch.sign(rows.c[:, 0])
        sign = torch.where(sign == 0.0, self._signs(rows), sign)
        d = torch.where(along[:, None], v * (size * sign)[:, None], -g * size[:, None])
        rows.step_norm = torch.linalg.vector_norm(d, dim=1)
        trial = rows.x + (d * rows.scale).to(rows.x.dtype)
        rows.trial = trial if rows.lower is None else trial.clamp(rows.lower, rows.upper)
        rows.mode = torch.full_like(rows.mode, ESCAPE)

    def _signs(self, rows: Rows) -> Tensor:
        """Return a random sign for each row, which depends on seed, row and iteration alone."""
        hashed = (rows.ids + (rows.nit << 32) + self._seed) * _HASH_FACTOR  # modulo 2⁶⁴
        return 1.0 - 2.0 * (hashed < 0).double()


def _set(rows: Rows, chosen: Tensor, value: Tensor, sigma: Tensor) -> None:
    """Set the trial points of some rows as their next points."""
    rows.next_x = torch.where(chosen[:, None], rows.trial, rows.next_x)
    numbers: tuple[tuple[str, Any], ...] = (
        ("next_value", value),
        ("next_sigma", sigma),
        ("next_norm", rows.step_norm),
        ("next_predicted", rows.predicted),
        ("next_step_sigma", rows.step_sigma),
    )
    for name, number in numbers:
        setattr(rows, name, torch.where(chosen, number, getattr(rows, name)))


def _taken_evaluation(found: Evaluation, rows: Tensor) -> Evaluation:
    """Return the evaluation of some rows."""
    more = {name: part[rows] for name, part in found.more.items()}
    return Evaluation(found.value[rows], found.g[rows], found.matrix[rows], more)


def _replace_failed(rows: Rows) -> None:
    """Replace numbers that are not finite in rows that have ended, so that no later operation fails for them."""
    failed = rows.status != RUNNING
    if not bool(failed.any()):
        return
    rows.g = torch.where(failed[:, None], 0.0, rows.g)
    rows.matrix = torch.where(failed[:, None, None], 0.0, rows.matrix)
