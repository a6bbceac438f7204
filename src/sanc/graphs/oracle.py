"""An oracle whose calls are recorded as CUDA graphs: the host launches one graph instead of a thousand kernels.

A graph repeats the same kernels on the same memory. So everything that changes from call to call lies in static memory:
batches, the point, and the vector that Lanczos starts at are copied into it. What cannot be recorded is said in a
`NotRecordableError`, and the caller goes on without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.randomness import Buffers, own_randomness
from sanc.core.krylov import Columns, Krylov, Lanczos
from sanc.core.oracle import Meter, Operator
from sanc.core.space import Floats, Space, Vector
from sanc.graphs.recording import (
    Inputs,
    NotNowError,
    NotRecordableError,
    Recorder,
    Recording,
    part_from_old_graphs,
    randomness,
)

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative difference from the eager gradient above which a recording is taken for wrong."""


class CapturedOracle(AutogradOracle):
    """An `AutogradOracle` that replays recordings.

    Parameters
    ----------
    batches : sequence of (Batch or None)
        Batches like those that will come, for gradient, Hessian and objective; None where it is the gradient's.
    limit, reorthogonalise
        How Lanczos works, that is recorded: its iterations, and whether it orthogonalises against all earlier vectors.
    joint : bool
        Whether every step asks for products, with Lanczos started at the gradient: both are then one recording.
    """

    def __init__(
        self,
        leaves: Leaves,
        batches: Sequence[Batch | None],
        *,
        limit: int,
        reorthogonalise: bool,
        joint: bool,
        hvp: Any,
        exact: bool,
        recorder: Recorder,
    ) -> None:
        super().__init__(leaves, hvp=hvp, exact=exact)
        self._inspected = True  # by the eager steps before
        self._inner = AutogradOracle(leaves, hvp=hvp)  # whose calls are recorded
        self._inner._inspected = True
        self._inputs = Inputs(batches)
        self._recorder = recorder
        self._limit, self._how, self._joint = limit, {"limit": limit, "reorthogonalise": reorthogonalise}, joint
        self._point, self._first = self.leaves.read(), self.leaves.read()
        self._places = _places(leaves)
        self._value_recordings: dict[Any, Recording] = {}
        self._work: dict[Any, tuple[list[Any], Buffers | None, Recording]] = {}  # gradients with vector work
        for name, batch in zip(("closure", "hessian", "objective"), batches, strict=True):
            for tensor in () if batch is None else batch.tensors:
                if tensor.device != leaves.device:
                    raise NotRecordableError(
                        f"{name} holds a tensor on {tensor.device} and the parameters are on {leaves.device}; move the "
                        "batch there first"
                    )
        self._build()

    # ------------------------------------------------------------------ recording

    def _build(self) -> None:
        """Make the recordings, and put parameters and buffers back to what they were."""
        leaves = self.leaves
        part_from_old_graphs(leaves.tensors)
        before = leaves.read()
        with Buffers() as buffers:
            try:
                with torch.enable_grad():
                    with own_randomness(leaves.device):
                        self._look_at_loss()
                    self._record()
            except RuntimeError as problem:
                text = str(problem).strip().split("\n")[0]
                raise NotRecordableError(f"the loss cannot be recorded ({text})") from problem
            finally:
                leaves.write(before)
                buffers.put_back()

    def _look_at_loss(self) -> None:
        """Find out whether the loss draws random numbers, and whether values need a graph."""
        inner, before = self._inner, randomness(self.leaves.device)
        inner.bind(*self._inputs.samples)
        inner.gradient(self._point)
        inner.evaluate(self._point, inner.samples[2])
        self._differentiates = inner._differentiates
        if randomness(self.leaves.device) != before:
            raise NotRecordableError("the loss draws random numbers (dropout?), which a recording would repeat")

    def _record(self) -> None:
        """Record a gradient, a value on each sample that needs one, and Lanczos."""
        record = self._recorder.record
        self._gradient_recording = record(self._joint_body if self._joint else self._gradient_body)
        self._check_gradient()
        for sample in {self._inputs.samples[0], self._inputs.samples[2]}:
            self._value_recordings[sample] = record(partial(self._value_body, sample))
        if not self._joint:
            self._first.copy_(self._gradient_recording.outputs[1])
            self._lanczos_recording = record(self._lanczos_body)

    def _gradient_body(self, *, products: bool = False) -> list[Tensor]:
        """Return f, ‖x‖ and ‖g‖ side by side, g, and the loss without decay."""
        inner = self._inner
        inner.bind(*self._inputs.samples)
        inner.begin(0, products=products)
        value, g = inner.unread_gradient(self._point)
        self._trained = inner.training  # in the memory of the recording
        assert inner.raw_loss is not None
        norms = torch.stack([inner.space.length(self._point), inner.space.length(g)])
        return [torch.cat([value.reshape(1), norms.double()]), g, inner.raw_loss]

    def _joint_body(self) -> list[Tensor]:
        """Return the same with the columns of T after ‖g‖, and the rows of Q; they share one graph."""
        read, g, raw = self._gradient_body(products=True)
        rows, numbers = self._columns(g)
        return [torch.cat([read, numbers[1:]]), g, raw, rows]

    def _value_body(self, sample: Sample) -> list[Tensor]:
        """Return f and ‖x‖ side by side."""
        self.leaves.write(self._point)
        value = self.leaves.penalised(self._inner.forward(sample), self._point)
        return [torch.stack([value, self.space.length(self._point).double()])]

    def _lanczos_body(self) -> list[Tensor]:
        self._inner.bind(*self._inputs.samples)
        return self._columns(self._first)

    def _columns(self, start: Tensor) -> list[Tensor]:
        """Run Lanczos to its end; return the rows of Q, and ‖start‖ and the columns of T."""
        operator = self._inner.hessian(self._point)
        made: Any = self._inner.lanczos(operator, start, **self._how)
        assert isinstance(made, Lanczos)
        for _ in range(self._limit):
            made.extend()
        operator.release()
        numbers = [made.length, *(number for column in made.columns for number in column)]
        return [made.basis(self._limit), torch.stack(numbers).double()]

    def _check_gradient(self) -> None:
        """Make sure that a recorded gradient is what an eager pass over the same batch gives."""
        read, g, *_ = self._gradient_recording.replay()
        value, g = read[0].clone(), g.clone()
        eager, slope = self._inner.unread_gradient(self._point)
        off = float(torch.linalg.vector_norm(slope - g) / torch.linalg.vector_norm(slope).clamp_min(1e-30))
        tolerance = _TOLERANCE[self.leaves.dtype]
        if not (math.isfinite(float(eager)) and math.isfinite(off)):
            raise NotNowError("the batch on which it was to be recorded is not finite")
        if off > tolerance or abs(float(eager) - float(value)) > tolerance * max(1.0, abs(float(eager))):
            raise NotRecordableError(f"the recorded gradient is off by {off:.1e} of its length from the eager one")

    # ------------------------------------------------------------------ answering

    def fits(self, leaves: Leaves) -> bool:
        """Whether the recordings still speak of these leaves."""
        return leaves.matches(self.leaves) and leaves.decays == self.leaves.decays and _places(leaves) == self._places

    def fill(self, batches: Sequence[Any], meter: Meter) -> None:
        """Begin a step: copy its batches in, and count with this meter."""
        self.bind(*self._inputs.samples)
        self._inputs.fill(batches)
        self.meter = meter

    def unbind(self) -> None:
        super().unbind()
        self._answered: tuple[Any, list[float]] = (None, [])  # the last gradient, and what was read with it
        self._norms: list[tuple[Any, float]] = []  # of the points and the gradient of this step

    def _at(self, x: Any) -> None:
        """Let the recordings speak of x; each of them writes it into the leaves."""
        self._point.copy_(x)
        self._graph = None
        self._loaded = x
        torch.clear_autocast_cache()

    def unread_gradient(self, x: Any) -> tuple[Any, Tensor]:
        if self.training is not None:  # the pass that counts as training was made; this one must leave buffers alone
            return super().unread_gradient(x)
        self._at(x)
        read, g, raw, *_ = self._gradient_recording.replay()
        self.raw_loss, self.training = raw.clone(), self._trained
        self.meter.count_gradient(self.samples[0].size)
        g = g.clone()
        value, x_norm, *numbers = read.tolist()
        self._answered = (g, numbers)
        self._norms += [(x, x_norm), (g, numbers[0])]
        return value, g

    def norm(self, v: Vector) -> float:
        for known, norm in self._norms:
            if known is v:
                return norm
        return super().norm(v)

    def evaluate(self, x: Any, sample: Any, *, graph: bool = False) -> float:
        recording = self._value_recordings.get(sample)
        if recording is None:
            return super().evaluate(x, sample, graph=graph)
        self._at(x)
        (read,) = recording.replay()
        value, norm = read.tolist()
        self._norms.append((x, norm))
        self.meter.count_value(sample.size)
        return float(value)

    def lanczos(self, operator: Operator, start: Vector, **how: Any) -> Columns:
        plain = {name: value for name, value in how.items() if name not in ("store", "linear")}
        usual = how.get("store", True) and how.get("linear") is None and plain == self._how
        known, numbers = self._answered
        if not usual or (self._joint and known is not start):
            return super().lanczos(operator, start, **how)
        if self._joint:
            rows = self._gradient_recording.outputs[3]
        else:
            self._at(operator.x)  # type: ignore[attr-defined]
            self._first.copy_(start)  # type: ignore[arg-type]
            rows, unread = self._lanczos_recording.replay()
            numbers = unread.tolist()
        for _ in range(self._limit):
            self.meter.count_product(self.samples[1].size)
        return Replayed(numbers, rows, self.space)

    def advance(self, work: Any, x: Any, offset: Any, *tensors: Any) -> list[Any]:
        if self.training is not None:
            return super().advance(work, x, offset, *tensors)
        key = (work, *(tensor is None for tensor in tensors))
        if key not in self._work:
            self._work[key] = self._record_work(work, (x, offset, *tensors))
        inputs, trained, recording = self._work[key]
        with torch.no_grad():
            for old, new in zip(inputs, (x, offset, *tensors), strict=True):
                if old is not None:
                    old.copy_(new)
        self._graph, self.training = None, trained
        self.meter.count_gradient(self.samples[0].size)
        raw, read, *found = recording.replay()
        self.raw_loss, *found = (tensor.clone() for tensor in (raw, *found))
        self._loaded = found[0]
        torch.clear_autocast_cache()
        return [read, *found]

    def _record_work(self, work: Any, tensors: Sequence[Any]) -> tuple[list[Any], Buffers | None, Recording]:
        """Record a gradient and vector work on copies of its tensors, which leaves the new point in the leaves.

        What that changes in place is put back.
        """
        inner, trained = self._inner, None
        inputs = [None if tensor is None else tensor.clone() for tensor in tensors]
        changed = work.tensors()
        before, point = [tensor.clone() for tensor in changed], self.leaves.read()

        def body() -> list[Tensor]:
            nonlocal trained
            inner.bind(*self._inputs.samples)
            inner.begin(0, products=False)
            read, *found = inner.advance(work, *inputs)
            self.leaves.write(found[0])
            trained = inner.training  # in the memory of the recording
            assert inner.raw_loss is not None
            return [inner.raw_loss, read, *found]

        with Buffers() as buffers:
            try:
                recording = self._recorder.record(body)
            finally:
                buffers.put_back()
                self.leaves.write(point)
                for tensor, content in zip(changed, before, strict=True):
                    tensor.copy_(content)
        return inputs, trained, recording


class Replayed:
    """The columns of T that a recording made at once; the rows are the recording's own memory."""

    def __init__(self, numbers: Sequence[float], rows: Tensor, space: Space) -> None:
        self.space, self.limit = space, len(rows)
        self.start_norm, *self._columns = numbers
        self._rows = rows

    def column(self, j: int) -> Sequence[float]:
        """Return α_j and β_j."""
        return self._columns[2 * j : 2 * j + 2]

    def combine(self, known: Krylov, coefficients: Sequence[Floats]) -> list[Vector]:
        """Q u for each coefficient vector u, as fresh vectors."""
        return [self.space.combine(self._rows[: known.dim], c) for c in coefficients]


def _places(leaves: Leaves) -> list[tuple[int, ...]]:
    """Return where and in which order the leaves lie."""
    return [(leaf.data_ptr(), *leaf.stride()) for leaf in leaves.tensors]
