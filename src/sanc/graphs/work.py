"""Recordings of the vector work of averaged steps, and of refreshes of their metric.

The forward and backward passes stay as they are, so the loss may be any. The host launches one graph instead of a
hundred kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sanc.autograd.vector_work import CALLED, VectorWork
from sanc.errors import warn
from sanc.graphs.recording import Recorder, Recording, device_obstacle, restored

T = TypeVar("T")

MAX_ENTRIES = 2**21
"""The most entries of parameters whose work is recorded unless the caller asks for it. Recordings keep ten vectors of
that size, 80 MiB here in float32, and memory for what is computed between them."""


MAX_METRICS = 8
"""The most metrics of an optimiser whose work is recorded unless the caller asks for it. A metric is new if parameters
are frozen or join, and each of its recordings calls the work several times, so that it pays only if it is replayed."""


class RecordedWork(VectorWork):
    """Does the vector work by replaying recordings: one for each set of inputs that are not None, and for each part.

    Where that is not possible, the work is called.

    Parameters
    ----------
    requested : bool
        Whether the caller has asked for recordings. Then the parameters may have any size, and a warning gives the
        reason if the work cannot be recorded.

    Attributes
    ----------
    reason : str
        Why the work of the last step was not replayed; empty if it was.
    """

    def __init__(self, *, requested: bool) -> None:
        self._requested, self._warned = requested, False
        self.reason = "no step was made yet"
        self._failure = ""  # why recording has failed
        self._metrics = 0  # that were recorded
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the recordings, which belong to this process and its device."""
        nothing: dict[str, Any] = {
            "_recorder": None,
            "_preconditioner": None,
            "_steps": {},
            "_refreshes": {},
            "_static": {},
        }
        return self.__dict__ | nothing

    def reset(self) -> None:
        """Delete all recordings."""
        self._recorder: Recorder | None = None
        self._preconditioner: Any = None  # the one whose tensors the recordings change
        self._steps: dict[Any, Recording] = {}
        self._refreshes: dict[int, Recording] = {}
        self._static: dict[Any, Tensor] = {}  # the inputs of all recordings, by their place and shape

    def step(self, work: Any, value: Tensor, g: Tensor, inputs: Any) -> list[Tensor]:
        """Return ``work(value, g, inputs)``; the work is recorded at the first call with such inputs."""
        self.reason = self._failure or device_obstacle(g.device)
        if not self.reason and not self._requested:
            self.reason = self._reason_against(work.preconditioner, len(g))
        if not self.reason:
            self._use(work.preconditioner, g.device)
            replayed = self._attempt(lambda: self._replayed_step(work, value, g, inputs))
            if replayed is not None:
                return replayed
        self._warn()
        return CALLED.step(work, value, g, inputs)

    def _reason_against(self, preconditioner: Any, entries: int) -> str:
        """Return why recordings that the caller has not asked for do not pay; empty if they do."""
        if entries > MAX_ENTRIES:
            return f"the parameters have more than {MAX_ENTRIES} entries, for which capture = True is required"
        if preconditioner is not self._preconditioner and self._metrics >= MAX_METRICS:
            self.reset()
            return "the trainable parameters change too often, so that capture = True is required"
        return ""

    def _replayed_step(self, work: Any, value: Tensor, g: Tensor, inputs: Any) -> list[Tensor]:
        value, g, *others = (self._fill(place, tensor) for place, tensor in enumerate((value, g, *inputs)))
        static_inputs = inputs._make(others)
        key = (work, *(None if tensor is None else tensor.shape for tensor in static_inputs))
        if key not in self._steps:
            self._steps[key] = self._record(work.tensors(), lambda: work(value, g, static_inputs))
        return [result.clone() for result in self._steps[key].replay()]

    def refresh(self, preconditioner: Any, parts: Sequence[int]) -> None:
        """Refresh these parts; each refresh is recorded when it is first due after a recorded step."""
        if preconditioner is not self._preconditioner:
            CALLED.refresh(preconditioner, parts)
            return
        for part in parts:
            if self._attempt(lambda part=part: self._replayed_refresh(part)) is None:  # type: ignore[misc]
                preconditioner.refresh(part)

    def _replayed_refresh(self, part: int) -> bool:
        preconditioner = self._preconditioner

        def body() -> list[Tensor]:
            preconditioner.refresh(part)
            return []

        if part not in self._refreshes:
            self._refreshes[part] = self._record(preconditioner.tensors(), body)
        self._refreshes[part].replay()
        return True

    def _use(self, preconditioner: Any, device: torch.device) -> None:
        """Delete the recordings of another preconditioner."""
        if preconditioner is not self._preconditioner:
            self.reset()
            self._preconditioner, self._recorder = preconditioner, Recorder(device)
            self._metrics += 1

    def _record(self, changed: Sequence[Tensor], body: Callable[[], Sequence[Tensor]]) -> Recording:
        """Record a function, and restore the tensors that it changes."""
        assert self._recorder is not None
        with restored(changed):
            return self._recorder.record(body)

    def _attempt(self, replay: Callable[[], T]) -> T | None:
        """Return the result of a replay; None if its function cannot be recorded, so that it must be called."""
        if self._failure:
            return None
        try:
            return replay()
        except RuntimeError as error:
            text = str(error).strip().split("\n")[0]
            self.reason = self._failure = f"the step cannot be recorded ({text})"
            self.reset()
            return None

    def _fill(self, place: int, tensor: Tensor | None) -> Any:
        """Copy an input into static memory, and return that; None for None."""
        if tensor is None:
            return None
        key = place, tensor.shape
        if key in self._static:
            return self._static[key].copy_(tensor, non_blocking=True)
        self._static[key] = tensor.clone()
        return self._static[key]

    def _warn(self) -> None:
        """Warn once that steps are eager although the caller has asked for recordings."""
        if self._requested and not self._warned:
            self._warned = True
            warn(f"capture = True has no effect: {self.reason}.", RuntimeWarning)
