"""An oracle whose calls are recorded as CUDA graphs: the host launches one graph instead of a thousand kernels.

A graph repeats the same kernels on the same memory. So all inputs of a call are copied into static memory: the batches,
the point, and the start vector of Lanczos. If a loss cannot be recorded, `NotRecordableError` gives the reason, and the
caller uses an eager oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.batches import Batch
from sanc.autograd.buffers import Buffers
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.randomness import UndoneDraws
from sanc.core.meter import Meter
from sanc.core.oracle import Operator
from sanc.core.space import Floats, Space, Vector
from sanc.core.spectrum.krylov import ColumnSource, Krylov, Lanczos
from sanc.graphs.recording import (
    BatchNotRecordableError,
    Inputs,
    NotRecordableError,
    Recorder,
    Recording,
    reset_gradient_accumulators,
    restored,
)

_GRADIENT_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""The largest relative difference between a recorded and an eager gradient, by the type of the parameters: about √eps,
above the roundoff of sums in another order, and far below the error of a wrong recording."""

_MIN_GRADIENT_NORM = 1e-30
"""A lower bound of the gradient norm in that relative difference, against a division by zero."""


class CapturedOracle(AutogradOracle):
    """An `AutogradOracle` that replays recordings.

    Parameters
    ----------
    leaves : Leaves
        The parameters, in the memory that the recordings use.
    batches : sequence of (Batch or None)
        Batches of gradient, Hessian and objective, with the shapes of all later ones; None: the batch of the gradient.
    krylov_dim, reorthogonalise : int, bool
        Options of Lanczos: its iterations, and whether each vector is orthogonalised against all earlier ones.
    joint : bool
        Whether every step needs products, with Lanczos started at the gradient: both are then one recording.
    hvp, exact
        As in `AutogradOracle`.
    recorder : Recorder
        Records the calls.
    """

    def __init__(
        self,
        leaves: Leaves,
        batches: Sequence[Batch | None],
        *,
        krylov_dim: int,
        reorthogonalise: bool,
        joint: bool,
        hvp: Any,
        exact: bool,
        recorder: Recorder,
    ) -> None:
        super().__init__(leaves, hvp=hvp, exact=exact)
        self._inspected = True  # the eager steps before have inspected the loss
        self._inner = AutogradOracle(leaves, hvp=hvp)  # the oracle whose calls are recorded
        self._inner._inspected = True
        self._inputs = Inputs(batches)
        self._recorder = recorder
        self._krylov_dim, self._joint = krylov_dim, joint
        self._lanczos_options = {"max_dim": krylov_dim, "reorthogonalise": reorthogonalise}
        self._point, self._lanczos_start = self.leaves.read(), self.leaves.read()
        self._layout = _memory_layout(leaves)
        self._value_recordings: dict[Any, Recording] = {}
        self._work_recordings: dict[Any, tuple[Any, Buffers | None, Recording]] = {}  # see `work_at_gradient`
        for name, batch in zip(("closure", "hessian", "objective"), batches, strict=True):
            for tensor in () if batch is None else batch.tensors:
                if tensor.device != leaves.device:
                    raise NotRecordableError(
                        f"{name} holds a tensor on {tensor.device} and the parameters are on {leaves.device}; move the "
                        "batch there before the step"
                    )
        self._build()

    # Recording.

    def _build(self) -> None:
        """Make the recordings, then restore parameters and buffers."""
        leaves = self.leaves
        reset_gradient_accumulators(leaves.tensors)
        before = leaves.read()
        with Buffers() as buffers:
            try:
                with torch.enable_grad():
                    self._inspect_loss()
                    self._record()
            except RuntimeError as error:
                text = str(error).strip().split("\n")[0]
                raise NotRecordableError(f"the loss cannot be recorded ({text})") from error
            finally:
                leaves.write(before)
                buffers.restore()

    def _inspect_loss(self) -> None:
        """Raise `NotRecordableError` if the loss draws random numbers; detect whether values need a graph."""
        inner = self._inner
        inner.bind(*self._inputs.samples)
        with UndoneDraws(self.leaves.device) as undone:
            inner.gradient(self._point)
            inner.evaluate(self._point, inner.samples[2])
        self.loss_differentiates = inner.loss_differentiates
        if undone.draws:
            raise NotRecordableError("the loss draws random numbers (dropout?), which a recording would repeat")

    def _record(self) -> None:
        """Record a gradient, Lanczos, and a value on each sample on which values are evaluated."""
        record = self._recorder.record
        self._gradient_recording = record(self._joint_body if self._joint else self._gradient_body)
        self._check_gradient()
        for sample in {self._inputs.samples[0], self._inputs.samples[2]}:
            self._value_recordings[sample] = record(partial(self._value_body, sample))
        if not self._joint:
            self._lanczos_start.copy_(self._gradient_recording.outputs[1])
            self._lanczos_recording = record(self._lanczos_body)

    def _gradient_body(self, *, products: bool = False) -> list[Tensor]:
        """Evaluate the gradient. Return f, ‖x‖ and ‖g‖ in one tensor; g; and the loss without weight decay."""
        inner = self._inner
        inner.bind(*self._inputs.samples)
        inner.begin(0, products=products)
        value, g = inner.unread_gradient(self._point)
        self._recorded_buffers = inner.trained_buffers  # its tensors are static memory, which each replay fills
        assert inner.raw_loss is not None
        norms = torch.stack([inner.space.unread_norm(self._point), inner.space.unread_norm(g)])
        return [torch.cat([value.reshape(1), norms.double()]), g, inner.raw_loss]

    def _joint_body(self) -> list[Tensor]:
        """Return what `_gradient_body` does, with the columns of T after ‖g‖, and the rows of Q.

        Products reuse the graph of the gradient.
        """
        read, g, raw = self._gradient_body(products=True)
        rows, numbers = self._columns(g)
        return [torch.cat([read, numbers[1:]]), g, raw, rows]

    def _value_body(self, sample: Sample) -> list[Tensor]:
        """Return f and ‖x‖ in one tensor."""
        self.leaves.write(self._point)
        value = self.leaves.penalised(self._inner.forward(sample), self._point)
        return [torch.stack([value, self.space.unread_norm(self._point).double()])]

    def _lanczos_body(self) -> list[Tensor]:
        """Return the rows of Q, then ‖start‖ and the columns of T, for a start vector in static memory."""
        self._inner.bind(*self._inputs.samples)
        return self._columns(self._lanczos_start)

    def _columns(self, lanczos_start: Tensor) -> list[Tensor]:
        """Make all iterations of Lanczos; return the rows of Q, then ‖start‖ and the columns of T in one tensor."""
        operator = self._inner.hessian(self._point)
        lanczos: Any = self._inner.lanczos(operator, lanczos_start, **self._lanczos_options)
        assert isinstance(lanczos, Lanczos)
        for _ in range(self._krylov_dim):
            lanczos.extend()
        operator.release()
        numbers = [lanczos.unread_start_norm, *(number for column in lanczos.columns for number in column)]
        return [lanczos.basis(self._krylov_dim), torch.stack(numbers).double()]

    def _check_gradient(self) -> None:
        """Raise an error if an eager pass over the same batch has another value or gradient."""
        read, g, *_ = self._gradient_recording.replay()
        value, g = float(read[0]), g.clone()
        unread, eager = self._inner.unread_gradient(self._point)
        eager_value = float(unread)
        error = float(
            torch.linalg.vector_norm(eager - g) / torch.linalg.vector_norm(eager).clamp_min(_MIN_GRADIENT_NORM)
        )
        tolerance = max(_GRADIENT_TOLERANCE[leaf.dtype] for leaf in self.leaves.tensors)
        if not (math.isfinite(eager_value) and math.isfinite(error)):
            raise BatchNotRecordableError("the loss or the gradient of the batch to be recorded is not finite")
        if error > tolerance or abs(eager_value - value) > tolerance * max(1.0, abs(eager_value)):
            raise NotRecordableError(
                f"a recorded and an eager pass differ: relative error {error:.1e} of the gradient, "
                f"values {value:.6g} and {eager_value:.6g}"
            )

    # Replaying.

    def fits(self, leaves: Leaves) -> bool:
        """Return whether the recordings use these leaves, with the same memory and weight decays."""
        same = leaves.matches(self.leaves) and leaves.decays == self.leaves.decays
        return same and _memory_layout(leaves) == self._layout

    def fill(self, batches: Sequence[Any], meter: Meter) -> None:
        """Begin a step: copy its batches into static memory, and count evaluations with this meter."""
        self.bind(*self._inputs.samples)
        self._inputs.fill(batches)
        self.meter = meter

    def unbind(self) -> None:
        super().unbind()
        self._last_gradient: tuple[Any, list[float]] = (None, [])  # g, then ‖g‖ and the columns of T
        self._norms: list[tuple[Any, float]] = []  # norms of the points and the gradient of this step

    def _set_point(self, x: Any) -> None:
        """Copy x into static memory, from where each recording writes it into the leaves."""
        self._point.copy_(x)
        self._graph = None
        self._loaded = x
        torch.clear_autocast_cache()

    def unread_gradient(self, x: Any) -> tuple[Any, Tensor]:
        if self.trained_buffers is not None:
            # The training pass of this step was made, and this one must not change buffers.
            return super().unread_gradient(x)
        self._set_point(x)
        read, g, raw, *_ = self._gradient_recording.replay()
        self.raw_loss, self.trained_buffers = raw.clone(), self._recorded_buffers
        self.meter.count_gradient(self.samples[0].size)
        g = g.clone()
        value, x_norm, *numbers = read.tolist()
        self._last_gradient = (g, numbers)
        self._norms += [(x, x_norm), (g, numbers[0])]
        return value, g

    def norm(self, v: Vector) -> float:
        for vector, norm in self._norms:
            if vector is v:
                return norm
        return super().norm(v)

    def evaluate(self, x: Any, sample: Any, *, graph: bool = False) -> float:
        recording = self._value_recordings.get(sample)
        if recording is None:
            return super().evaluate(x, sample, graph=graph)
        self._set_point(x)
        (read,) = recording.replay()
        value, norm = read.tolist()
        self._norms.append((x, norm))
        self.meter.count_value(sample.size)
        return float(value)

    def lanczos(self, operator: Operator, start: Vector, **options: Any) -> ColumnSource:
        compared = {name: value for name, value in options.items() if name not in ("store", "gradient")}
        stores = options.get("store", True) and options.get("gradient") is None
        recorded = stores and compared == self._lanczos_options
        g, numbers = self._last_gradient
        if not recorded or (self._joint and g is not start):
            return super().lanczos(operator, start, **options)
        if self._joint:
            rows = self._gradient_recording.outputs[3]
        else:
            self._set_point(operator.x)  # type: ignore[attr-defined]
            self._lanczos_start.copy_(start)  # type: ignore[arg-type]
            rows, unread = self._lanczos_recording.replay()
            numbers = unread.tolist()
        for _ in range(self._krylov_dim):
            self.meter.count_product(self.samples[1].size)
        return ReplayedLanczos(numbers, rows, self.space)

    def work_at_gradient(self, work: Any, inputs: Any) -> list[Any]:
        if self.trained_buffers is not None:
            return super().work_at_gradient(work, inputs)
        key = (work, *(tensor is None for tensor in inputs))
        if key not in self._work_recordings:
            current = [other for other in self._work_recordings if other[0].preconditioner is work.preconditioner]
            self._work_recordings = {other: self._work_recordings[other] for other in current}  # not of earlier metrics
            self._work_recordings[key] = self._record_work(work, inputs)
        static_inputs, trained, recording = self._work_recordings[key]
        with torch.no_grad():
            for static, new in zip(static_inputs, inputs, strict=True):
                if static is not None:
                    static.copy_(new)
        self._graph, self.trained_buffers = None, trained
        self.meter.count_gradient(self.samples[0].size)
        raw, read, *new_vectors = recording.replay()
        self.raw_loss, *new_vectors = (tensor.clone() for tensor in (raw, *new_vectors))
        self._loaded = new_vectors[0]
        torch.clear_autocast_cache()
        return [read, *new_vectors]

    def _record_work(self, work: Any, inputs: Any) -> tuple[Any, Buffers | None, Recording]:
        """Record a gradient and the vector work of a step, which writes the new point into the leaves.

        The work's inputs are copied into static memory. Everything that it changes in place is restored.
        """
        inner, trained = self._inner, None
        static_inputs = inputs._make(None if tensor is None else tensor.clone() for tensor in inputs)
        point = self.leaves.read()

        def body() -> list[Tensor]:
            nonlocal trained
            inner.bind(*self._inputs.samples)
            inner.begin(0, products=False)
            read, *new_vectors = inner.work_at_gradient(work, static_inputs)
            self.leaves.write(new_vectors[0])
            trained = inner.trained_buffers  # its tensors are static memory, which each replay fills
            assert inner.raw_loss is not None
            return [inner.raw_loss, read, *new_vectors]

        with restored(work.tensors()), Buffers() as buffers:
            try:
                recording = self._recorder.record(body)
            finally:
                buffers.restore()
                self.leaves.write(point)
        return static_inputs, trained, recording


class ReplayedLanczos:
    """The columns of T and the rows of Q that a recording computed; the rows are in its static memory."""

    is_stored = False  # the next replay overwrites the rows

    def __init__(self, numbers: Sequence[float], rows: Tensor, space: Space) -> None:
        self.space, self.max_dim = space, len(rows)
        self.start_norm, *self._columns = numbers
        self._rows = rows

    def column(self, j: int) -> Sequence[float]:
        """Return α_j and β_j."""
        return self._columns[2 * j : 2 * j + 2]

    def combine(self, krylov: Krylov, coefficients: Sequence[Floats]) -> list[Vector]:
        """Return Q u for each coefficient vector u, as new vectors."""
        return [self.space.combine(self._rows[: krylov.dim], c) for c in coefficients]


def _memory_layout(leaves: Leaves) -> list[tuple[int, ...]]:
    """Return address and strides of each leaf."""
    return [(leaf.data_ptr(), *leaf.stride()) for leaf in leaves.tensors]
