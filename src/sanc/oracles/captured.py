"""The recordings of an iteration: the host launches a graph instead of a thousand kernels.

A graph repeats the same kernels on the same memory. So everything that changes from step to step lies in static
memory: batches are copied into it, parameters are read from and written to the leaves, and the few numbers that the
host decides are uploaded. What cannot be recorded is said in a `NotRecordableError`, and the caller goes on without.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.data import Batch
from sanc.decisions import Desk, Orders, Outcome, Report
from sanc.lanczos import Recorded, lanczos
from sanc.oracles.autograd import AutogradOracle
from sanc.oracles.base import Meter, Tally
from sanc.oracles.choice import CANDIDATES, REFERENCE, TOLERANCE
from sanc.oracles.layout import Layout
from sanc.oracles.products import HvpMode
from sanc.oracles.recording import (
    Inputs,
    Letter,
    NotNowError,
    NotRecordableError,
    Recorder,
    Recording,
    part_from_old_graphs,
    pointing,
    randomness,
)
from sanc.oracles.replay import Buffers, own_randomness, watched_buffers
from sanc.survey import Look, Memory, Move, Moved, Survey, look_at, survey_of
from sanc.vectors import Vector


class Programs(ABC):
    """What the recordings of one kind of step share: static batches, an oracle on them, and a way to leave no trace.

    Parameters
    ----------
    layout : Layout
        The leaves.
    batches : sequence of (Batch or None)
        Batches like those that will come.
    hvp : str
        How products are made; "auto" measures.
    recorder : Recorder
        Makes the recordings.
    """

    def __init__(self, layout: Layout, batches: Sequence[Batch | None], hvp: str, recorder: Recorder) -> None:
        self.layout = layout
        self.recorder = recorder
        self.inputs = Inputs(batches)
        self.inner = AutogradOracle(layout, *self.inputs.samples, hvp="double-backward", meter=Meter())
        self.inner.inspect = False
        self.space = self.inner.space
        self.candidates: tuple[HvpMode, ...] = (REFERENCE, *CANDIDATES) if hvp == "auto" else (hvp,)  # type: ignore[assignment]
        self._places = _places(layout)
        self.training: Buffers | None = None  # what the recorded gradient pass met; its memory is the recording's
        self._check_inputs()
        self._build()

    @property
    def hvp(self) -> HvpMode:
        """How products are made."""
        return self.inner.hvp

    @abstractmethod
    def make(self) -> None:
        """Make the recordings."""

    def tally(self, meter: Meter) -> Tally:
        """Return what an iteration is charged to."""
        return _Tally(self.inner, meter)

    def undo_training(self) -> None:
        """Put back the buffers that the last replay of the gradient pass moved."""
        if self.training is not None:
            self.training.put_back()

    def takes(self, batches: Sequence[Any]) -> bool:
        """Whether a step on these batches is plainly one of those recorded."""
        return self.inputs.take(batches)

    def fits(self, layout: Layout) -> bool:
        """Whether the recordings still speak of these leaves."""
        same = layout is self.layout or (layout.matches(self.layout) and layout.decays == self.layout.decays)
        return same and _places(layout) == self._places

    def _check_inputs(self) -> None:
        device = self.layout.kind[1]
        for sample in self.inputs.samples:
            for _, batch in sample.parts:
                assert isinstance(batch, Batch)
                for tensor in batch.tensors:
                    if tensor.device != device:
                        raise NotRecordableError(
                            f"{sample.name} holds a tensor on {tensor.device} and the parameters are on {device}; "
                            "move the batch there first"
                        )

    def _build(self) -> None:
        """Make the recordings, and put parameters and buffers back to what they were."""
        part_from_old_graphs(self.layout.leaves)
        before = [leaf.detach().clone() for leaf in self.layout.leaves]
        with watched_buffers() as buffers:
            try:
                with torch.enable_grad():
                    with own_randomness(self.layout.kind[1]):
                        self._look_at_loss()
                    self.make()
            except (RuntimeError, NotImplementedError) as problem:
                if isinstance(problem, NotRecordableError):
                    raise
                text = str(problem).strip().split("\n")[0]
                raise NotRecordableError(f"the loss cannot be recorded ({text})") from problem
            finally:
                with torch.no_grad():
                    torch._foreach_copy_([leaf.detach() for leaf in self.layout.leaves], before)
                buffers.put_back()

    def _look_at_loss(self) -> None:
        """Find out what the loss does beside being a number: draw, move buffers, differentiate."""
        before = randomness(self.layout.kind[1])
        x = self.start()
        self.gradient(x, graph=False)
        self.inner.evaluate(x, self.inner._samples[0])
        if self.inner.moves_buffers:
            self.recorder.parallel = False  # passes that put buffers back must not meet
        if randomness(self.layout.kind[1]) != before:
            raise NotRecordableError("the loss draws random numbers (dropout?), which a recording would repeat")

    def start(self) -> Vector:
        """Gather the leaves; the first line of a recording."""
        self.inner.raw_loss = None
        return self.inner.start()

    def gradient(self, x: Vector, *, graph: bool) -> tuple[Tensor, Vector]:
        """Evaluate f and ∇f on the gradient sample; not read. `graph`: products on that sample will follow."""
        self.inner.begin(0, products=graph)
        return self.inner._unread_gradient(x)

    def value(self, x: Vector, role: int) -> Tensor:
        """Evaluate f on a sample at any point; not read."""
        with pointing(self.layout.leaves, self.layout.split(x)):
            loss = self.inner._evaluate(self.inner._samples[role], self.inner.differentiates)
        return self.layout.penalised(loss, x)

    def compare(self, value: Tensor, g: Tensor) -> None:
        """Make sure that a recorded (f, ∇f) is what an eager pass over the same batch gives."""
        eager, slope = self.gradient(self.start(), graph=False)
        tolerance = TOLERANCE[self.layout.kind[0]]
        off = float(torch.linalg.vector_norm(slope - g) / torch.linalg.vector_norm(slope).clamp_min(1e-30))
        far = abs(float(eager) - float(value)) > tolerance * max(1.0, abs(float(eager)))
        if not (math.isfinite(float(eager)) and math.isfinite(off)):
            raise NotNowError("the batch on which it was to be recorded is not finite")
        if not off <= tolerance or far:
            raise NotRecordableError(f"the recorded gradient is off by {off:.1e} of its length from the eager one")

    def fastest(self, record: Callable[[], Recording], numbers: Callable[[Recording], Tensor]) -> Recording:
        """Record with each way to make products, and keep the fastest of those that agree with the first."""
        kept: dict[HvpMode, Recording] = {}
        training: dict[HvpMode, Buffers | None] = {}
        reference: Tensor | None = None
        trouble: Exception | None = None
        for mode in self.candidates:
            self.inner.hvp = mode
            try:
                recording = record()
            except (RuntimeError, NotImplementedError) as problem:
                trouble = trouble or problem
                continue
            recording.replay()
            seen = numbers(recording).clone()
            reference = seen if reference is None else reference
            if torch.allclose(seen, reference, rtol=TOLERANCE[self.layout.kind[0]], atol=1e-6, equal_nan=True):
                kept[mode] = recording
                training[mode] = self.training
        if not kept:
            assert trouble is not None
            raise trouble
        self.inner.hvp = self._time(kept) if len(kept) > 1 else next(iter(kept))
        self.training = training[self.inner.hvp]
        return kept[self.inner.hvp]

    def _time(self, recordings: dict[HvpMode, Recording]) -> HvpMode:
        best = dict.fromkeys(recordings, float("inf"))
        for _ in range(5):
            for mode, recording in recordings.items():
                self.recorder.synchronise()
                clock = time.perf_counter()
                recording.replay()
                self.recorder.synchronise()
                best[mode] = min(best[mode], time.perf_counter() - clock)
        return min(best, key=best.__getitem__)


def _places(layout: Layout) -> list[tuple[int, ...]]:
    """Return where and in which order the leaves lie."""
    return [(leaf.data_ptr(), *leaf.stride()) for leaf in layout.leaves]


class _Tally(Tally):
    """Knows the sizes of the samples and counts."""

    def __init__(self, like: AutogradOracle, meter: Meter) -> None:
        self.space, self.meter, self.hvp, self._sizes = like.space, meter, like.hvp, like.sizes

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self._sizes


class SurveyPrograms(Programs):
    """The recordings of the mini-batch iteration: a look at a batch, a step, a value, and a Krylov space.

    Parameters
    ----------
    memory : Memory
        What the iteration remembers; its vectors are copied into static memory.
    limit : int
        Dimension of a Krylov space.
    """

    def __init__(
        self,
        layout: Layout,
        batches: Sequence[Batch | None],
        hvp: str,
        recorder: Recorder,
        memory: Memory,
        limit: int,
    ) -> None:
        assert memory.project
        assert memory.momentum is not None
        blank = torch.zeros_like(memory.momentum)
        basis = blank.new_zeros((limit, len(blank)))
        square, scale = (None if v is None else v.clone() for v in (memory.square, memory.scale))
        self.memory = replace(
            memory, momentum=memory.momentum.clone(), square=square, scale=scale, path=blank, basis=basis
        )
        self.tried, self.first = torch.zeros_like(blank), torch.zeros_like(blank)
        # Not results of a recording, whose memory an earlier one may use while it runs.
        self.point, self.length = torch.zeros_like(blank), blank.new_zeros(())
        self.orders = Letter(1 + limit, blank.device)
        self.numbers = Letter(5 + limit, blank.device)
        super().__init__(layout, batches, hvp, recorder)

    def make(self) -> None:
        record = self.recorder.record
        self.look_recording = record(self._look)
        self.x, self.raw, g, momentum, square, mean, numbers = self.look_recording.replay()
        self.look = Look(g, momentum, None if self.memory.square is None else square, mean)
        self.compare(numbers[0], g)
        self.move_recording = record(self._move)
        self.trial_recording = record(lambda: [self.value(self.tried, 0)])
        self.first.copy_(self.look.gradient)
        self.lanczos_recording = self.fastest(lambda: record(self._lanczos), lambda made: made.outputs[1])
        self.rows, self.coefficients = self.lanczos_recording.outputs

    def _look(self) -> list[Tensor]:
        x = self.start()
        value, g = self.gradient(x, graph=False)
        self.training = self.inner._training
        look, numbers = look_at(self.space, value, g, self.memory)
        self.numbers.up(numbers)
        assert self.inner.raw_loss is not None
        square = g if look.square is None else look.square
        return [x, self.inner.raw_loss, g, look.momentum, square, look.mean, numbers]

    def _move(self) -> list[Tensor]:
        memory, look, orders = self.memory, self.look, self.orders.down().to(self.layout.kind[0])
        assert memory.averaging is not None
        assert memory.path is not None
        assert look.mean is not None
        s = torch.addmv(look.mean * orders[0], memory.basis.T, orders[1:])
        if memory.scale is not None:
            s *= memory.scale
        torch.add(self.x, s, out=self.point)
        torch.add(s, memory.path, alpha=memory.averaging, out=memory.path)
        memory.momentum.copy_(look.momentum)  # type: ignore[union-attr]
        if memory.square is not None:
            memory.square.copy_(look.square)
        self.layout.write(self.point)
        self.length.copy_(torch.linalg.vector_norm(s))
        return []

    def _lanczos(self) -> list[Tensor]:
        self.inner._loaded = self.x
        self.inner._graph = None
        operator, scale = self.inner.hessian(self.x), self.memory.scale
        rows = torch.empty_like(self.memory.basis)

        def product(v: Tensor) -> Tensor:
            image: Tensor = operator(v) if scale is None else operator(v * scale) * scale
            return image

        coefficients = lanczos(product, self.first, rows, reorthogonalise=True)
        operator.release()
        return [rows, coefficients]

    def adopt(self, given: Memory) -> None:
        """Take over the vectors of the iteration, unless they lie here already."""
        own = self.memory
        for name in ("momentum", "square", "scale"):
            theirs, mine = getattr(given, name), getattr(own, name)
            if theirs is not mine:
                mine.copy_(theirs)
        if given.path is None:
            own.path.zero_()  # type: ignore[union-attr]
        elif given.path is not own.path:
            own.path.copy_(given.path)  # type: ignore[union-attr]
        if given.basis is not self._basis:
            own.basis[: len(given.basis)].copy_(given.basis)
            own.basis[len(given.basis) :].zero_()
            self._basis = given.basis

    _basis: Any = None


class CapturedOracle(AutogradOracle):
    """An `AutogradOracle` that replays recordings where it has them."""

    def __init__(self, programs: SurveyPrograms, batches: Sequence[Batch | None], meter: Meter) -> None:
        super().__init__(programs.layout, *programs.inputs.samples, hvp=programs.hvp, meter=meter)
        self.programs = programs
        self.inspect = False
        self.differentiates = programs.inner.differentiates
        self._batches = batches

    def start(self) -> Vector:
        self._loaded = self.programs.x
        return self.programs.x

    def survey(self, x: Vector, memory: Memory) -> Survey:
        p = self.programs
        p.adopt(memory)
        p.inputs.fill(self._batches, (0,))
        p.look_recording.replay()
        p.numbers.sent()
        self.raw_loss = p.raw.clone()
        seen = survey_of(p.look, p.numbers.read(), p.memory)
        self.meter.count_gradient(self._samples[0].size)
        self._remember(x, seen.value, p.look.gradient)
        used = 0 if memory.basis is None else len(memory.basis)
        look = p.look if memory.project else replace(p.look, mean=None)
        return replace(seen, look=look, inside=seen.inside[:used])

    def advance(self, x: Vector, move: Move) -> Moved:
        p = self.programs
        if move.mean is not p.look.mean:
            return super().advance(x, move)
        p.orders.write(np.concatenate([[move.along], move.within]))
        p.move_recording.replay()
        torch.clear_autocast_cache()
        self._loaded = p.point
        return Moved(p.point, p.memory.path, p.length, p.memory.momentum, p.memory.square)

    def keep(self, x: Vector) -> Vector:
        p = self.programs
        changing = (p.x, p.look.gradient, p.look.momentum, p.look.square, p.look.mean)  # by the next replay
        return x.clone() if any(x is vector for vector in changing) else x

    def trial(self, x: Vector) -> float:
        p = self.programs
        p.tried.copy_(x)
        (value,) = p.trial_recording.replay()
        self.meter.count_value(self._samples[0].size)
        return float(value)

    def lanczos(self, x: Vector, start: Vector, scale: Vector | None, limit: int) -> Recorded | None:
        p = self.programs
        self.load(x)
        if scale is not None:
            p.memory.scale.copy_(scale)  # type: ignore[union-attr]
        p.first.copy_(start)
        p.inputs.fill(self._batches, (1,))
        rows, coefficients = p.lanczos_recording.replay()
        for _ in range(limit):
            self.meter.count_product(self._samples[1].size)
        return Recorded(self.space.read(coefficients), rows, self.space)

    def undo_training(self) -> None:
        self.programs.undo_training()


class StepPrograms(Programs):
    """The recording of a whole iteration with a Krylov space of its own, decisions included.

    Parameters
    ----------
    desk : Desk
        Decides on the device.
    """

    def __init__(
        self, layout: Layout, batches: Sequence[Batch | None], hvp: str, recorder: Recorder, desk: Desk
    ) -> None:
        self.desk = desk
        self.shares_values = batches[2] is None  # the objective is the gradient's sample
        self._shares_graph = batches[1] is None
        super().__init__(layout, batches, hvp, recorder)

    def make(self) -> None:
        """Record; the desk is frozen until it gets its first orders, so that nothing moves here."""
        self.whole = self.fastest(lambda: self.recorder.record(self._step), lambda made: made.outputs[-1])
        value, self.raw, g, _ = self.whole.replay()
        self.compare(value, g)

    def launch(self, orders: Orders) -> None:
        """Make a step."""
        self.desk.exchange(orders)
        self.whole.replay()
        torch.clear_autocast_cache()  # it may hold casts of the old parameters

    def _step(self) -> list[Tensor]:
        x, inner, desk = self.start(), self.inner, self.desk
        before = None if self.shares_values else self.recorder.aside(lambda: self.value(x, 2))
        if self._shares_graph:
            value, g = self.gradient(x, graph=True)
            operator = inner.hessian(x)
        else:
            gradient = self.recorder.aside(lambda: self.gradient(x, graph=False))
            torch.clear_autocast_cache()  # casts of the other stream may not be there yet
            operator = inner.hessian(x)
            operator.prepare()
            value, g = gradient()
        raw, training = inner.raw_loss, inner._training
        assert raw is not None
        assert training is not None
        x_norm = desk.norm(x)
        rows = g.new_empty((desk.limit, len(g)))
        coefficients = desk.lanczos(operator, g, rows, desk.engine.settings.reorthogonalise)
        operator.release()
        inner.close()
        desk.decide(value, value if before is None else before(), x_norm, coefficients)
        trial, other = desk.combine(x, g, rows)
        there = self.recorder.aside(lambda: self.value(other, 2)) if desk.escapes else None
        reached = self.value(trial, 2)
        desk.conclude(x, trial, other, reached, reached if there is None else there())
        inner._loaded = None
        if training.some:
            training.put_back(unless=desk.report[Report._fields.index("outcome")] <= Outcome.VANISHED)
        return [value, raw, g, coefficients]
