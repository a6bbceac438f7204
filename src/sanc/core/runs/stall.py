"""Detection of a run that makes no more progress beyond roundoff."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sanc.core.record import Branch, Note, Record
from sanc.core.space import ROUNDING_ERRORS

STALL_LIMIT = 10
"""Consecutive iterations without progress beyond roundoff after which the run has stalled."""

GRADIENT_PROGRESS = 0.99
"""A gradient norm below this fraction of the smallest one so far is progress. One per cent exceeds its roundoff."""


@dataclass
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

    def scale_gradients(self, ratio: float) -> None:
        """Continue in variables in which the gradient norm is this multiple of the one so far."""
        self.best_grad_norm *= ratio

    def update(
        self,
        record: Record,
        eps: float,
        *,
        rejection_counts: bool,
        min_step_norm: float = 0.0,
        min_decrease: float = 0.0,
    ) -> None:
        """Count an iteration, given its record and the machine epsilon of f.

        Steps below `min_step_norm` are no progress, even if f decreases, and neither are decreases below
        `min_decrease`, which may be noise.

        `rejection_counts` is whether an iteration that stays counts as one without progress. With the paper's rule it
        does not before the stopping test holds, because σ grows for the next iteration; with interpolation σ was
        already raised to its bound in this one.
        """
        gradient_decreased = record.grad_norm < GRADIENT_PROGRESS * self.best_grad_norm
        self.best_grad_norm = min(self.best_grad_norm, record.grad_norm)
        moved = record.branch is not Branch.STAYED
        roundoff = eps * abs(record.value)
        if record.model_decrease <= roundoff:  # the model predicts no decrease that f could show
            roundoff *= ROUNDING_ERRORS
        roundoff = max(roundoff, min_decrease)
        value_decreased = record.note != Note.BELOW_PRECISION and record.value - record.trial_value > roundoff
        value_decreased = value_decreased and record.step_norm >= min_step_norm
        if gradient_decreased or (moved and value_decreased):
            self.count = 0
        elif moved or rejection_counts:
            self.count += 1
