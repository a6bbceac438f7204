"""What an iteration on samples returns: the next state, point and record, and what the next iteration reads of it."""

from __future__ import annotations

from typing import NamedTuple

from sanc.core.record import Record
from sanc.core.space import Vector
from sanc.minibatch.averaging import HostCopy, StepScalars
from sanc.minibatch.state import MinibatchState


class UnreadStep(NamedTuple):
    """A step whose results the host reads at the beginning of the next one, so that it need not wait for the device.

    Attributes
    ----------
    scalars : StepScalars
        The numbers that the host has chosen before the step.
    results : HostCopy
        The results, on their way to the host.
    record : Record
        The record with the fields that do not depend on the results.
    eps : float
        Machine epsilon of the vectors.
    """

    scalars: StepScalars[float]
    results: HostCopy
    record: Record
    eps: float


class IterationOutcome(NamedTuple):
    """What an iteration decided.

    Attributes
    ----------
    state : MinibatchState
        The state after it.
    point : vector
        The next point; the object x itself if the iteration stayed.
    record : Record
        Its record.
    has_returned : bool
        Whether the next point is an earlier one.
    unread : UnreadStep or None
        The step, if its results are missing in state and record until the host reads them.
    gradient_point : vector or None
        y for the next point, if the step has computed it.
    """

    state: MinibatchState
    point: Vector
    record: Record
    has_returned: bool = False
    unread: UnreadStep | None = None
    gradient_point: Vector | None = None
