"""Comparison of the steps of a run with its values, gradients and Hessian products.

The tests of `consistency.py` cost evaluations. The numbers of the first steps decide whether they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from sanc.core.oracle import Oracle
from sanc.core.record import Note, Record
from sanc.core.runs import consistency
from sanc.core.runs.consistency import Defect
from sanc.core.runs.status import CONTINUE, Ending, Status
from sanc.core.space import Vector

_COMPARED_ITERATIONS = 5
"""Number of first iterations in which changes of f are compared with its gradients."""
_MAX_MISMATCHES = 2
"""Mismatches allowed in these iterations. After one more, finite differences of f decide."""
_MIN_MISMATCH_ERRORS = 1e3
"""Rounding errors of f that a mismatch has to exceed as well, as cancellation between terms larger than f."""
_MISMATCH_RHO = 0.5
"""A step with a smaller ρ is a mismatch too: f decreased by less than half of what the model predicted."""
_MISMATCH_TOLERANCE = 0.15
"""A step is a mismatch if the change of f differs by more than this, relatively, from the change that the gradients
predict."""
_SYMMETRY_ITERATION = 50
"""The iteration after which the symmetry of the Hessian products is checked."""


class MadeStep(NamedTuple):
    """An iteration that was made.

    Attributes
    ----------
    before, after : vector
        The points before and after it; the same object if it stayed.
    g : vector
        The gradient before it.
    record : Record
        Its record.
    """

    before: Vector
    after: Vector
    g: Vector
    record: Record

    @property
    def stays(self) -> bool:
        """Whether trial points were evaluated, and all of them were rejected."""
        return self.after is self.before and self.record.trials > 0


@dataclass(frozen=True)
class StepMonitor:
    """Detects a run whose values, gradients and products contradict each other.

    Between two points f changes by about the mean of its directional derivatives there, and a step reaches at least
    half of the predicted decrease. After three of the first steps that contradict that, or after a rejected iteration,
    finite differences of f decide. A rejected iteration has tried every step, so a few more evaluations are cheap.
    After iteration `_SYMMETRY_ITERATION` the symmetry of the products is checked once.

    Attributes
    ----------
    mismatches : int
        Steps along which values and gradients disagree.
    gradient_verified : bool
        Whether differences of values confirmed the gradient.
    noise_checked : bool
        Whether the values were checked for noise.
    noise_found : bool
        Whether they had noise.
    noise_tolerated : bool
        Whether the run continued after noise had stalled it.
    """

    mismatches: int = 0
    gradient_verified: bool = False
    noise_checked: bool = False
    noise_found: bool = False
    noise_tolerated: bool = False

    def after(
        self, oracle: Oracle, step: MadeStep, first_length_scale: float, needs_products: bool
    ) -> tuple[StepMonitor, Ending]:
        """Return the monitor after a step of an exact objective, and the ending that the step causes."""
        if step.record.note == Note.GRADIENT_NOT_FINITE:
            return self, CONTINUE
        monitor, defect = self._compare_gradient(oracle, step, first_length_scale)
        checks_symmetry = (step.stays or step.record.iteration == _SYMMETRY_ITERATION) and needs_products
        if checks_symmetry and defect is None:
            defect = consistency.find_asymmetry(oracle, step.after)
        if defect is not None:
            status = Status.STALLED if oracle.differenced_gradient else Status.INCONSISTENT
            return monitor, Ending(status, defect.sentence)
        if step.stays and not monitor.noise_checked:
            defect = consistency.find_noise(oracle, step.after, first_length_scale, consistency.MAX_NOISE)
            monitor = replace(monitor, noise_checked=True, noise_found=defect is not None)
        return monitor, CONTINUE if defect is None else Ending(Status.STALLED, defect.sentence)

    def in_scaled_variables(self) -> StepMonitor:
        """Return the monitor of a run that continues in scaled variables, in which it tests its steps anew.

        Noise belongs to f and not to its variables: a run that tolerates it still does.
        """
        return replace(self, noise_found=False) if self.noise_tolerated else StepMonitor()

    def _compare_gradient(
        self, oracle: Oracle, step: MadeStep, first_length_scale: float
    ) -> tuple[StepMonitor, Defect | None]:
        """Return the monitor after a comparison of the step with its gradients, and the defect of the gradient.

        Differences of f, which cost evaluations, are computed after some mismatches only.
        """
        if self.gradient_verified or step.record.iteration >= _COMPARED_ITERATIONS:
            return self, None
        if not (step.stays or _is_mismatch(oracle, step)):
            return self, None
        monitor = replace(self, mismatches=self.mismatches + 1)
        if not step.stays and monitor.mismatches <= _MAX_MISMATCHES:
            return monitor, None
        defect = consistency.find_wrong_gradient(oracle, step.after, first_length_scale)
        return replace(monitor, gradient_verified=defect is None), defect


def _is_mismatch(oracle: Oracle, step: MadeStep) -> bool:
    """Return whether f decreased by less than half of the prediction, or not as the gradients at both ends predict.

    They predict the mean of the two directional derivatives. A point that did not change is no mismatch.
    """
    if step.after is step.before:
        return False
    space, record = oracle.space, step.record
    s = step.after - step.before
    first, last = space.dot(step.g, s), space.dot(oracle.gradient(step.after)[1], s)
    difference = abs(record.trial_value - record.value - 0.5 * (first + last))
    allowed = _MISMATCH_TOLERANCE * (abs(first) + abs(last)) + _MIN_MISMATCH_ERRORS * space.eps * abs(record.value)
    return difference > allowed or record.rho < _MISMATCH_RHO
