"""How the vector work of averaged steps is done: called here, and replayed from recordings in `sanc.graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class VectorWork:
    """Calls the vector work of averaged steps, which `sanc.minibatch` defines.

    Attributes
    ----------
    reason : str
        Why the work of the last step was not replayed from a recording; empty if it was.
    """

    reason = "capture = False, or there are several ranks"

    def step(self, work: Any, value: Tensor, g: Tensor, inputs: Any) -> list[Tensor]:
        """Return ``work(value, g, inputs)``, for an `AveragedStep` and its `StepInputs`."""
        return list(work(value, g, inputs))

    def refresh(self, preconditioner: Any, parts: Sequence[int]) -> None:
        """Refresh these parts of a `Preconditioner`."""
        for part in parts:
            preconditioner.refresh(part)

    def reset(self) -> None:
        """Delete all recordings, if there are any."""


CALLED = VectorWork()
"""Calls the work, without a recording."""
