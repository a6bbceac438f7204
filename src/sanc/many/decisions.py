"""Decisions about the trial points of a round: they are returned, and `ManyIteration` writes them into the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sanc.core.acceptance import DECIDING_REDUCTION
from sanc.core.bounded.bounds import Box
from sanc.core.escape import MAX_ESCAPE_HALVINGS
from sanc.core.space import NEAR_ZERO, ROUNDING_ERRORS
from sanc.many import rules
from sanc.many.rows import CUBIC, Accepted, RowPoints, RowProblem, Rows, RowTrials


@dataclass(frozen=True)
class RowDecisions:
    """Which rows accept a trial point, and what the rows have then.

    Attributes
    ----------
    is_accepted : Tensor
        The rows that have accepted a trial point, and move to it unless they try a longer step next.
    accepted : Accepted
        The trial points that are accepted so far.
    sigma : Tensor
        σ of all rows.
    rejected : Tensor or None
        The rows whose cubic step is rejected; None: there are none.
    longer : Tensor or None
        The rows for which a longer step is worth a trial; None: there are none.
    gradients : Tensor or None
        The rows whose gradient was evaluated for the decision; None: there are none.
    """

    is_accepted: Tensor
    accepted: Accepted
    sigma: Tensor
    rejected: Tensor | None = None
    longer: Tensor | None = None
    gradients: Tensor | None = None


class HalvedSteps(NamedTuple):
    """Escape steps after some of them were halved.

    Attributes
    ----------
    trial : RowTrials
        The trial points.
    halvings : Tensor
        The halvings of each row.
    ended : Tensor
        The rows whose steps are too short, or were halved too often.
    """

    trial: RowTrials
    halvings: Tensor
    ended: Tensor


def decide_cubic_steps(problem: RowProblem, rows: Rows, value: Tensor, evaluated: RowPoints | None) -> RowDecisions:
    """Return which cubic steps are accepted and rejected, with the next σ.

    Parameters
    ----------
    problem : RowProblem
        Evaluates the rows.
    rows : Rows
        All rows of the round; only those whose trial point is a cubic step are decided.
    value : Tensor
        f at the trial points.
    evaluated : RowPoints or None
        The trial points with their gradients, if they were evaluated.
    """
    is_cubic = rows.trial.mode == CUBIC
    value_rounding = ROUNDING_ERRORS * problem.eps * rows.point.value.abs()
    actual, gradients = _guarded_decrease(problem, rows, rows.point.value - value, is_cubic, evaluated)
    verdict = problem.rules.classify(actual, rows.trial.predicted, value_rounding)
    sigma = problem.after_trial(rows, verdict, actual, value_rounding)
    is_accepted = is_cubic & (verdict != rules.UNSUCCESSFUL)
    rejected = is_cubic & ~is_accepted
    accepted, longer = Accepted(rows.trial, value, sigma, verdict), None
    if problem.tries_longer_steps:  # rows that try a longer step keep the point that they have accepted
        accepted = accepted.where(is_accepted, rows.accepted)
        rho = rules.ratio(actual, rows.trial.predicted, value_rounding)
        longer = is_accepted & rows.sigma_unconfirmed & rules.tries_longer_step(rho, sigma, rows.trial.sigma)
    sigma = torch.where(rejected, sigma, rows.sigma)
    return RowDecisions(is_accepted, accepted, sigma, rejected, longer, gradients)


def _guarded_decrease(
    problem: RowProblem, rows: Rows, actual: Tensor, is_cubic: Tensor, evaluated: RowPoints | None
) -> tuple[Tensor, Tensor | None]:
    """Return the decreases to use, and the rows whose gradient was evaluated.

    Within cancellation errors, a step that halves ‖g‖ counts as successful.
    """
    eps, predicted = problem.eps, rows.trial.predicted
    unsuccessful = (actual < problem.rules.eta1 * predicted) & is_cubic & (rows.trial_count == 1)
    if not bool(unsuccessful.any()):
        return actual, None
    length_scale = torch.maximum(rows.first_length_scale, rows.x_norm)
    term_size = rules.largest_term(rows.point.value, rows.spectra.hessian_norm, length_scale, rows.unit_value)
    below_cancellation = unsuccessful & rules.is_within_cancellation(actual, predicted, term_size, eps)
    indices = torch.nonzero(below_cancellation).reshape(-1)
    if len(indices) == 0:
        return actual, None
    trial = rows.trial.x[indices]
    g = problem.gradients(trial, rows.ids[indices]) if evaluated is None else evaluated.g[indices]
    g = g * rows.scale[indices]
    if rows.lower is not None and rows.upper is not None:
        g = g * Box(rows.lower[indices], rows.upper[indices]).free(trial, g)
    halved = torch.linalg.vector_norm(g, dim=1) <= DECIDING_REDUCTION * rows.grad_norm[indices]
    guarded = actual.index_copy(0, indices, torch.where(halved, predicted[indices], actual[indices]))
    return guarded, below_cancellation


def decide_longer_steps(problem: RowProblem, rows: Rows, value: Tensor, longer: Tensor) -> RowDecisions:
    """Return the decisions about the rows `longer`: longer steps with a lower value replace the accepted points."""
    is_lower = longer & (value > -torch.inf) & (value < rows.accepted.value)
    actual = rows.point.value - value
    zero = torch.zeros_like(actual)
    verdict = problem.rules.classify(actual, rows.trial.predicted, zero)
    sigma = problem.after_trial(rows, verdict, actual, zero)
    accepted = Accepted(rows.trial, value, sigma, rows.accepted.verdict).where(is_lower, rows.accepted)
    rho = rules.ratio(actual, rows.trial.predicted, zero)
    tries_longer = is_lower & rules.tries_longer_step(rho, sigma, rows.trial.sigma)
    return RowDecisions(longer, accepted, rows.sigma, longer=tries_longer)


def decide_escape_steps(rows: Rows, value: Tensor, escapes: Tensor) -> RowDecisions:
    """Return which of the escape steps are accepted: those with a lower value."""
    is_lower = escapes & (value > -torch.inf) & (value < rows.point.value)
    verdict = torch.full_like(rows.accepted.verdict, rules.UNSUCCESSFUL)
    accepted = Accepted(rows.trial, value, rows.sigma, verdict).where(is_lower, rows.accepted)
    return RowDecisions(is_lower, accepted, rows.sigma)


def halve_escape_steps(problem: RowProblem, rows: Rows, candidates: Tensor) -> HalvedSteps:
    """Return the trial points with the escape steps of some rows halved."""
    halvings, x = rows.halvings + candidates, rows.point.x
    halved = replace(rows.trial, x=x + 0.5 * (rows.trial.x - x), norm=0.5 * rows.trial.norm)
    trial = halved.where(candidates, rows.trial)
    is_short = trial.norm <= problem.eps * rows.x_norm.clamp(min=NEAR_ZERO)
    return HalvedSteps(trial, halvings, candidates & (is_short | (halvings >= MAX_ESCAPE_HALVINGS)))
