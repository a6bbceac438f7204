"""Functions on static memory, recorded once as CUDA graphs and replayed; and what has to lie there.

On a device without graphs a `Recording` runs its function again and copies the results to where the first ones were,
which is what a graph does, only slower: the logic is the same, and can be tested anywhere.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Sample
from sanc.errors import SancError

_WARM_UPS = 2


class NotRecordableError(SancError):
    """The loss cannot be recorded; the message says why."""


class NotNowError(NotRecordableError):
    """The loss cannot be recorded on this batch; another may do."""


class Recorder:
    """Makes recordings that share one memory pool and one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Sequence[Tensor]]) -> Recording:
        """Run a function a few times, then record it."""
        if not self.cuda:
            return Recording(body, body(), None)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                results = body()
            # Of their own: what lies in the pool may be scratch memory of a recording that was made before.
            outputs = [result.clone() for result in results]
            del results
            self._without_waiting(body)
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what it would throw away now, such as an old graph, may not be thrown away while recording
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

    def _without_waiting(self, body: Callable[[], Any]) -> None:
        """Run a function and fail where the host waits for the device, before that spoils a recording."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _recover(self) -> None:
        """Record nothing: after a recording that failed the random generators still take themselves for recorded."""
        torch.cuda.synchronize(self.device)
        self._pool = torch.cuda.graph_pool_handle()  # the old one takes itself for recorded too
        scratch = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            scratch.add_(1)


class Recording:
    """A function on static memory; `outputs` is where its results lie."""

    def __init__(self, body: Callable[[], Sequence[Tensor]], outputs: Sequence[Tensor], graph: Any) -> None:
        self._body = body if graph is None else None  # the graph needs it no longer
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> Sequence[Tensor]:
        """Do it again."""
        if self._graph is not None:
            self._graph.replay()
        else:
            assert self._body is not None
            with torch.enable_grad():  # as it was recorded
                results = self._body()
            with torch.no_grad():
                for old, new in zip(self.outputs, results, strict=True):
                    if old is not new:
                        old.copy_(new)
        return self.outputs


def part_from_old_graphs(leaves: Sequence[Tensor]) -> None:
    """Let the next graph give the leaves new nodes.

    As long as any graph of the loss is alive, somebody's who kept a loss, say, its leaves keep the nodes they have
    there, and these are tied to the stream on which they were made: a recording on another stream would fail. Content
    of another type, for a moment, makes torch forget them.
    """
    for leaf in leaves:
        own = leaf.data
        leaf.data = own.new_empty(0, dtype=torch.float32 if own.dtype == torch.float64 else torch.float64)
        leaf.data = own


class Inputs:
    """The samples of a step in static memory: gradient, Hessian and objective; a None among these is the gradient's."""

    def __init__(self, batches: Sequence[Batch | None]) -> None:
        self._described = [described(batch.loss) for batch in batches if batch is not None]  # so that ids stay
        self._batches: list[Batch | None] = []
        self.samples: list[Sample] = []
        for name, batch in zip(("closure", "hessian", "objective"), batches, strict=True):
            own = None if batch is None else Batch(batch.loss, *(tensor.detach().clone() for tensor in batch.tensors))
            self._batches.append(own)
            self.samples.append(self.samples[0] if own is None else Sample(name, [(1.0, own)], len(own), None))

    def fill(self, batches: Sequence[Batch | None]) -> None:
        """Copy a step's batches in."""
        with torch.no_grad():
            for own, batch in zip(self._batches, batches, strict=True):
                if own is not None and batch is not None:
                    for old, new in zip(own.tensors, batch.tensors, strict=True):
                        old.copy_(new, non_blocking=True)


def signature(batches: Sequence[Batch | None]) -> tuple[Any, ...]:
    """Return what two steps must share to share their recordings: the losses, and shapes and types of the batches."""
    return tuple(
        None if b is None else (identity(b.loss), *((t.shape, t.dtype, t.device, t.stride()) for t in b.tensors))
        for b in batches
    )


def identity(function: Any) -> tuple[Any, ...]:
    """Tell functions apart as far as a recording can see: two lambdas of one line over the same objects are one."""
    return (getattr(function, "__code__", None), *map(id, described(function)))


def described(function: Any) -> list[Any]:
    """Return the objects, beside its code, that make a function what it is."""
    if hasattr(function, "__func__"):
        return [function.__self__, *described(function.__func__)]
    if not hasattr(function, "__code__"):
        return [function]
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        cells = [function]
    named = function.__kwdefaults__ or {}
    return [*cells, *(function.__defaults__ or ()), *(named[name] for name in sorted(named)), function.__globals__]


def randomness(device: torch.device) -> tuple[Any, ...]:
    """Return the global random states, to see whether a loss draws from them."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    drawn = [torch.default_generator.get_state()]
    if device.type == "cuda":
        drawn.append(torch.cuda.get_rng_state(device))
    return (random.getstate(), numpy[1].tobytes(), numpy[2], *(state.numpy().tobytes() for state in drawn))
