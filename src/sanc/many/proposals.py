"""Trial points of rows: cubic steps, longer ones after a success, and escape steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sanc.core.acceptance import WORTHWHILE_GROWTH
from sanc.core.bounded.box_model import REPEATED_STEP_RATIO, SIGMA_INCREASE_FACTOR
from sanc.many import rules
from sanc.many.algebra import multiply
from sanc.many.box import fit_steps
from sanc.many.cubic import CubicModels
from sanc.many.rows import CUBIC, ESCAPE, LONGER, PENDING, RowProblem, Rows, RowTrials

_HASH_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""2⁶⁴ over the golden ratio, as a signed integer: the factor of Knuth's multiplicative hash."""


class RowProposals:
    """Writes trial points into rows, with σ where a limit on the step norm raises it.

    Parameters
    ----------
    problem : RowProblem
        Evaluates the rows.
    seed : int
        Seed of the signs in the hard case and of escape steps along ±v.
    """

    def __init__(self, problem: RowProblem, seed: int) -> None:
        self._problem, self._rules, self._seed = problem, problem.rules, seed

    def propose_longer(self, rows: Rows, candidates: Tensor) -> Tensor:
        """Set longer trial points where that is worthwhile among `candidates`, and return the mask of these rows."""
        indices = torch.nonzero(candidates & (rows.trial_count <= self._rules.max_resolves)).reshape(-1)
        proposed = torch.zeros_like(candidates)
        if len(indices) == 0:
            return proposed
        longer = rows.take(indices)
        longer.sigma = longer.accepted.sigma
        self._propose(longer)
        is_longer = (longer.trial.norm >= WORTHWHILE_GROWTH * longer.accepted.trial.norm) & (longer.trial.mode == CUBIC)
        longer.trial = replace(longer.trial, mode=torch.full_like(longer.trial.mode, LONGER))
        kept = torch.nonzero(is_longer).reshape(-1)
        rows.set(indices[kept], longer.take(kept))
        proposed[indices[kept]] = True
        return proposed

    def propose_pending(self, rows: Rows) -> None:
        """Propose the next steps of rows that begin an iteration or whose step was rejected."""
        pending = rows.trial.mode == PENDING
        count = int(pending.sum())
        if count == 0:
            return
        last_trial, last_sigma, last_unconfirmed = rows.trial, rows.sigma, rows.sigma_unconfirmed
        self._propose(rows)
        if rows.lower is not None:
            self._shorten(rows, pending & last_trial.truncated & (rows.trial_count > 0), last_trial.norm)
        last = torch.nonzero(pending & (rows.trial_count > self._rules.max_resolves)).reshape(-1)
        if len(last):
            rows.trial = rows.trial.put(last, self._escape_steps(rows.take(last)))
        if count < len(rows):  # few rows have a trial point already: a proposal for them costs less than a selection
            rows.trial = rows.trial.where(pending, last_trial)
            rows.sigma = torch.where(pending, rows.sigma, last_sigma)
            rows.sigma_unconfirmed = torch.where(pending, rows.sigma_unconfirmed, last_unconfirmed)

    def _shorten(self, rows: Rows, was_truncated: Tensor, last_norm: Tensor) -> None:
        """Raise σ where bounds determined a rejected step and its successor, until the latter is shorter."""
        while bool(was_truncated.any()):
            trial = rows.trial
            repeated = was_truncated & trial.truncated & (trial.norm > REPEATED_STEP_RATIO * last_norm)
            indices = torch.nonzero(
                repeated & (trial.mode == CUBIC) & (rows.sigma < self._rules.sigma_ceiling)
            ).reshape(-1)
            if len(indices) == 0:
                break
            too_long = rows.take(indices)
            too_long.sigma = self._rules.bounded(SIGMA_INCREASE_FACTOR * too_long.sigma)
            self._propose(too_long)
            rows.set(indices, too_long)

    def _propose(self, rows: Rows) -> None:
        """Set the cubic steps of all rows for their σ as trial points; escape steps where there is no cubic one.

        The norm of the first step of an iteration is limited.
        """
        models = CubicModels(rows.spectra.values, rows.spectra.c)
        is_first = rows.trial_count == 0
        if bool(is_first.any()):
            max_norm, always = self._problem.max_step_norm(rows)
            sigma = self._rules.limited_sigma(models, rows.sigma, torch.where(is_first, max_norm, torch.inf), always)
            if self._problem.tries_longer_steps:
                rows.sigma_unconfirmed = rows.sigma_unconfirmed | (sigma > rows.sigma)
            rows.sigma = sigma
        steps = models.solve(rows.sigma)
        y = steps.y
        if steps.hard_case is not None:
            y[:, 0] *= torch.where(steps.hard_case, self._signs(rows), 1.0)
        s = multiply(rows.spectra.vectors, y) * rows.scale
        rows.trial = RowTrials(
            mode=torch.full_like(rows.trial.mode, CUBIC),
            x=rows.point.x + s.to(rows.point.x.dtype),
            sigma=rows.sigma,
            norm=steps.norm,
            predicted=steps.decrease,
            multiplier=steps.multiplier,
            truncated=torch.zeros_like(rows.trial.truncated),
        )
        if rows.lower is not None:
            rows.trial = fit_steps(rows, s)
        below = rows.trial.norm <= self._problem.eps * rows.x_norm
        indices = torch.nonzero(below | ~(rows.trial.predicted > 0.0)).reshape(-1)
        if len(indices):
            escaping = rows.take(indices)
            trial = escaping.trial
            is_limited = (escaping.trial_count == 0) & (trial.multiplier > escaping.spectra.hessian_norm)
            norm_ratio = torch.where(is_limited, trial.norm / (self._problem.eps**0.5 * escaping.x_norm), 1.0)
            negligible = below[indices] & (trial.predicted > 0.0)
            escaping.sigma = torch.where(
                negligible, self._rules.after_negligible_step(escaping.sigma, norm_ratio), escaping.sigma
            )
            escaping.trial = self._escape_steps(escaping)
            rows.set(indices, escaping)

    def _escape_steps(self, rows: Rows) -> RowTrials:
        """Return an escape step of all rows as trial point: along negative curvature or the gradient."""
        spectra = rows.spectra
        along, size = rules.choose_branch(spectra.ritz_value, spectra.hessian_norm, rows.grad_norm, rows.sigma)
        v = spectra.vectors[:, :, 0]
        g = multiply(spectra.vectors, spectra.c)
        sign = -torch.sign(spectra.c[:, 0])
        sign = torch.where(sign == 0.0, self._signs(rows), sign)
        d = torch.where(along[:, None], v * (size * sign)[:, None], -g * size[:, None])
        x = rows.point.x + (d * rows.scale).to(rows.point.x.dtype)
        return replace(
            rows.trial,
            mode=torch.full_like(rows.trial.mode, ESCAPE),
            x=x if rows.lower is None else x.clamp(rows.lower, rows.upper),
            norm=torch.linalg.vector_norm(d, dim=1),
        )

    def _signs(self, rows: Rows) -> Tensor:
        """Return a random sign for each row, a function of seed, row and iteration."""
        hashed = (rows.ids + (rows.nit << 32) + self._seed) * _HASH_FACTOR  # modulo 2⁶⁴
        return 1.0 - 2.0 * (hashed < 0).double()
