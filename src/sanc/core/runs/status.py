"""How a minimisation ends: its status, the result of a test whether it ends, and what it ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from sanc.core.space import Vector
from sanc.core.spectrum.curvature import Certificate
from sanc.core.units import Units


class Status(IntEnum):
    """The ending of a minimisation; `sentence` describes it."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> Status:
        member = int.__new__(cls, number)
        member._value_ = number
        member.sentence = sentence
        return member

    SECOND_ORDER = 0, "Converged to a second-order point: the gradient is small and the curvature is certified."
    UNCERTIFIED = 1, "The gradient is small and no negative curvature was found, but it could not be certified."
    FIRST_ORDER = 2, "Converged to a first-order point only: negative curvature remains that was not escaped."
    STAGNATED = 3, "Stagnated: the escape step is zero, and the norm of the cubic step is at most epsilon_s."
    AT_REST = STAGNATED  # deprecated
    STALLED = 4, "No step lowers the objective any further in this precision, and the gradient is above the tolerance."
    ITERATION_LIMIT = 5, "The limit on iterations was reached."
    CALL_LIMIT = 6, "The limit on oracle calls was reached."
    TIME_LIMIT = 7, "The limit on time was reached."
    CALLBACK = 8, "The callback asked to stop."
    NOT_FINITE = 9, "The objective, its gradient or a Hessian product is not finite at the starting point."
    UNBOUNDED = 10, "The objective seems to be unbounded below."
    NO_GRADIENT = (
        11,
        "The gradient is not finite at points with lower values; the last point with a finite gradient is returned.",
    )
    INCONSISTENT = 12, "The objective, its gradient and its Hessian products are inconsistent."

    @property
    def success(self) -> bool:
        """Whether the point is stationary to tolerance, without known negative curvature."""
        return self in (Status.SECOND_ORDER, Status.UNCERTIFIED)


@dataclass(frozen=True)
class Ending:
    """The result of a test whether the run ends.

    Attributes
    ----------
    status : Status or None
        How the run ends; None if it continues.
    cause : str
        A sentence about the ending, in addition to the sentence of its status.
    direction : vector or None
        A direction of negative curvature, along which the next iteration leaves a stationary point.
    certificate : Certificate or None
        The certificate of the point, if the test computed it.
    gradient_rounding : float
        The error of the gradient, if it is not 0. The point is then tested again with this tolerance on ‖g‖. If there
        is a `cause` too, the run ends with it unless an error of that size changes f only slightly.
    """

    status: Status | None = None
    cause: str = ""
    direction: Vector | None = None
    certificate: Certificate | None = None
    gradient_rounding: float = 0.0


CONTINUE = Ending()
"""The run continues."""


@dataclass(frozen=True)
class Findings:
    """What a run has found, beside its point and its records.

    Attributes
    ----------
    first_value : float
        f at the start.
    initial_units : Units
        Units of a first point that is stationary, where no iteration measures them.
    certificate : Certificate or None
        The certificate of the current point, if it was computed.
    gradient_rounding : float
        Rounding error of the gradient at the current point, if the run stalled there.
    cause : str
        A sentence about the ending, in addition to the sentence of its status.
    """

    first_value: float = math.nan
    initial_units: Units = field(default_factory=Units)
    certificate: Certificate | None = None
    gradient_rounding: float = 0.0
    cause: str = ""
