"""Functions on static memory, which are recorded once as CUDA graphs and then replayed.

On a device without graphs a `Recording` calls its function again and copies the results into the same static memory. A
graph has the same effect, so the code that uses recordings can be tested on any device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Sample
from sanc.errors import SancError

DEVICES = ("cuda",)
"""Devices on which steps are recorded. On others a recording runs eagerly, which is useful for tests only."""

_WARM_UPS = 2
"""Calls before a recording, as PyTorch's notes on CUDA graphs require: libraries are initialised lazily. One more call
follows in `Recorder._check_asynchronous`."""


def device_obstacle(device: torch.device) -> str:
    """Return why steps on this device cannot be recorded; empty if they can."""
    has_graphs = device.type in DEVICES
    return "" if has_graphs else f"the parameters are on {device}, and only {', '.join(DEVICES)} has graphs"


class NotRecordableError(SancError):
    """The loss cannot be recorded; the message gives the reason."""


class BatchNotRecordableError(NotRecordableError):
    """The loss cannot be recorded on this batch; it may be on a later one."""


class Recorder:
    """Records functions, with one memory pool and one stream for all recordings."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Sequence[Tensor]]) -> Recording:
        """Call a function a few times, then record it."""
        if not self.cuda:
            return Recording(body, body(), None)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                results = body()
            # Clones outside of the pool, whose memory earlier recordings may overwrite.
            outputs = [result.clone() for result in results]
            del results
            self._check_asynchronous(body)
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # freeing an old graph, for example, would break the recording
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                for output, result in zip(outputs, body(), strict=True):
                    output.copy_(result)
        except BaseException:
            self._recover()
            raise
        finally:
            if collecting:
                gc.enable()
        return Recording(body, outputs, graph)

    def _check_asynchronous(self, body: Callable[[], Any]) -> None:
        """Raise an error if the function makes the host wait for the device, which would break a recording."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _recover(self) -> None:
        """Make a trivial recording: after one that failed, the random generators are still in recording mode."""
        torch.cuda.synchronize(self.device)
        self._pool = torch.cuda.graph_pool_handle()  # the old pool is still in recording mode, too
        scratch = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            scratch.add_(1)


class Recording:
    """A recorded function on static memory; `outputs` are the tensors that hold its results."""

    def __init__(self, body: Callable[[], Sequence[Tensor]], outputs: Sequence[Tensor], graph: Any) -> None:
        self._body = body if graph is None else None  # a graph does not need the function
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> Sequence[Tensor]:
        """Run the function again, and return its results in static memory."""
        if self._graph is not None:
            self._graph.replay()
        else:
            assert self._body is not None
            with torch.enable_grad():  # as while recording
                results = self._body()
            with torch.no_grad():
                for old, new in zip(self.outputs, results, strict=True):
                    if old is not new:
                        old.copy_(new)
        return self.outputs


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the content of tensors after the block, in which recordings change them in place."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, content in zip(tensors, before, strict=True):
            tensor.copy_(content)


def reset_gradient_accumulators(leaves: Sequence[Tensor]) -> None:
    """Make torch create new AccumulateGrad nodes for the leaves in the next graph.

    A leaf keeps its node while any graph with it is alive, for example while the caller keeps a loss. The node is bound
    to the stream on which it was created, so a recording on another stream would fail. Data of another type makes torch
    delete the node; the leaf gets its data back at once.
    """
    for leaf in leaves:
        data = leaf.data
        leaf.data = data.new_empty(0, dtype=torch.float32 if data.dtype == torch.float64 else torch.float64)
        leaf.data = data


class Inputs:
    """The batches of a step in static memory, for gradient, Hessian and objective; None: the batch of the gradient."""

    def __init__(self, batches: Sequence[Batch | None]) -> None:
        # Keeps the objects alive, so that no other object gets an id that is part of `signature`.
        functions = [function for batch in batches if batch is not None for function in (batch.loss, batch.outputs)]
        self._dependencies = [dependencies(function) for function in functions if function is not None]
        self._batches: list[Batch | None] = []
        self.samples: list[Sample] = []
        for name, batch in zip(("closure", "hessian", "objective"), batches, strict=True):
            static = None
            if batch is not None:
                static = Batch(batch.loss, *(t.detach().clone() for t in batch.tensors), outputs=batch.outputs)
            self._batches.append(static)
            self.samples.append(self.samples[0] if static is None else Sample(name, [(1.0, static)], len(static), None))

    def fill(self, batches: Sequence[Batch | None]) -> None:
        """Copy the batches of a step into static memory."""
        with torch.no_grad():
            for static, batch in zip(self._batches, batches, strict=True):
                if static is not None and batch is not None:
                    for old, new in zip(static.tensors, batch.tensors, strict=True):
                        old.copy_(new, non_blocking=True)


def signature(batches: Sequence[Batch | None]) -> tuple[Any, ...]:
    """Return a key that is equal for steps with the same recordings: losses, and shapes and types of the batches."""
    return tuple(
        None
        if b is None
        else (identity(b.loss), identity(b.outputs), *((t.shape, t.dtype, t.device, t.stride()) for t in b.tensors))
        for b in batches
    )


def identity(function: Any) -> tuple[Any, ...]:
    """Return a key of a function: two lambdas with the same code and the same objects in it have equal keys."""
    return (getattr(function, "__code__", None), *map(id, dependencies(function)))


def dependencies(function: Any) -> list[Any]:
    """Return the objects on which a function depends besides its code: closure cells, defaults and globals."""
    if hasattr(function, "__func__"):
        return [function.__self__, *dependencies(function.__func__)]
    if not hasattr(function, "__code__"):
        return [function]
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell is still empty
        cells = [function]
    named = function.__kwdefaults__ or {}
    return [*cells, *(function.__defaults__ or ()), *(named[name] for name in sorted(named)), function.__globals__]
