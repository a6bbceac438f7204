"""Detection of a run that makes no more progress beyond roundoff."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sanc.core.record import Branch, Note, Record
from sanc.core.space import ROUNDING_ERRORS

STALL_LIMIT = 10
"""Consecutive iterations without progress beyond roundoff after which the run has stalled."""

GRADIENT_PROGRESS = 0.99
"""A gradient norm below this fraction of the smallest one so far is progress. One per cent exceeds its roundoff."""


@dataclass(frozen=True)
class StallMonitor:
    """Counts iterations of an exact objective that decrease neither the gradient norm nor, beyond roundoff, f.

    Attributes
    ----------
    count : int
        Consecutive iterations without progress.
    best_grad_norm : float
        Smallest gradient norm so far.
    """

    count: int = 0
    best_grad_norm: float = math.inf

    @property
    def has_stalled(self) -> bool:
        """Whether the run has stalled."""
        return self.count >= STALL_LIMIT

    def with_scaled_gradients(self, ratio: float) -> StallMonitor:
        """Return the monitor for variables in which the gradient norm is this multiple of the one so far."""
        return replace(self, best_grad_norm=self.best_grad_norm * ratio)

    def after(
        self,
        record: Record,
        eps: float,
        *,
        rejection_counts: bool,
        min_step_norm: float = 0.0,
        min_decrease: float = 0.0,
    ) -> StallMonitor:
        """Return the monitor after an iteration.

        Parameters
        ----------
        record : Record
            The record of the iteration.
        eps : float
            The machine epsilon of f.
        rejection_counts : bool
            Whether an iteration that stays counts as one without progress. With the paper's rule it does not before the
            stopping test holds, because σ grows for the next iteration. With interpolation σ was already raised to its
            bound in this one.
        min_step_norm : float
            Shorter steps are no progress, even if f decreases.
        min_decrease : float
            Smaller decreases of f are no progress: they may be noise.
        """
        gradient_decreased = record.grad_norm < GRADIENT_PROGRESS * self.best_grad_norm
        best_grad_norm = min(self.best_grad_norm, record.grad_norm)
        moved = record.branch is not Branch.STAYED
        roundoff = eps * abs(record.value)
        if record.model_decrease <= roundoff:  # the model predicts no decrease that f could show
            roundoff *= ROUNDING_ERRORS
        roundoff = max(roundoff, min_decrease)
        value_decreased = record.note != Note.BELOW_PRECISION and record.value - record.trial_value > roundoff
        value_decreased = value_decreased and record.step_norm >= min_step_norm
        if gradient_decreased or (moved and value_decreased):
            return StallMonitor(0, best_grad_norm)
        return StallMonitor(self.count + (moved or rejection_counts), best_grad_norm)
