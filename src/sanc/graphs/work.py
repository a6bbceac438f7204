"""Recordings of the vector work of steps whose gradients the caller computed.

The forward and backward passes are the caller's, so only the work after them is recorded: the host launches one graph
instead of a hundred kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sanc.graphs.recording import Recorder, Recording, restored


class RecordedWork:
    """Does the work of `AveragedStep` by replaying recordings, one for each set of inputs that take part."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._preconditioner: Any = None  # the one whose tensors the recordings change
        self._recordings: dict[Any, tuple[list[Tensor | None], Recording]] = {}

    def __call__(self, work: Any, value: Tensor, g: Tensor, inputs: Any) -> list[Tensor]:
        """Return ``work(value, g, inputs)``."""
        if work.preconditioner is not self._preconditioner:
            self._recordings.clear()
            self._preconditioner = work.preconditioner
        tensors = [value, g, *inputs]
        key = (work, *(None if tensor is None else tensor.shape for tensor in tensors))
        if key not in self._recordings:
            self._recordings[key] = self._record(work, tensors, inputs)
        static, recording = self._recordings[key]
        for old, new in zip(static, tensors, strict=True):
            if old is not None and new is not None:
                old.copy_(new, non_blocking=True)
        return [result.clone() for result in recording.replay()]

    def _record(self, work: Any, tensors: list[Tensor | None], inputs: Any) -> tuple[list[Tensor | None], Recording]:
        """Record the work on static copies of its inputs; what it changes in place is restored."""
        static = [None if tensor is None else tensor.clone() for tensor in tensors]
        value, g, *others = static
        with restored(work.tensors()):
            recording = self._recorder.record(lambda: work(value, g, inputs._make(others)))
        return static, recording
