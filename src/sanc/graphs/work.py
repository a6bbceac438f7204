"""Recordings of the vector work of steps whose gradients the caller computed.

The forward and backward passes are the caller's, so only the work after them is recorded: the host launches one graph
instead of a hundred kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sanc.graphs.recording import Recorder, Recording, restored


class RecordedWork:
    """Does the work of `AveragedStep` by replaying recordings, one for each set of inputs that are not None."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._preconditioner: Any = None  # the one whose tensors the recordings change
        self._recordings: dict[Any, Recording] = {}
        self._static: dict[Any, Tensor] = {}  # the inputs of all recordings, by their place and shape

    def __call__(self, work: Any, value: Tensor, g: Tensor, inputs: Any) -> list[Tensor]:
        """Replay the work, recorded at the first call with such inputs, and return ``work(value, g, inputs)``."""
        if work.preconditioner is not self._preconditioner:
            self._recordings.clear()
            self._static.clear()
            self._preconditioner = work.preconditioner
        value, g, *others = (self._fill(place, tensor) for place, tensor in enumerate((value, g, *inputs)))
        static_inputs = inputs._make(others)
        key = (work, *(None if tensor is None else tensor.shape for tensor in static_inputs))
        if key not in self._recordings:
            with restored(work.tensors()):
                self._recordings[key] = self._recorder.record(lambda: work(value, g, static_inputs))
        return [result.clone() for result in self._recordings[key].replay()]

    def _fill(self, place: int, tensor: Tensor | None) -> Any:
        """Copy an input into static memory, and return that; None for None."""
        if tensor is None:
            return None
        key = place, tensor.shape
        if key in self._static:
            return self._static[key].copy_(tensor, non_blocking=True)
        self._static[key] = tensor.clone()
        return self._static[key]
