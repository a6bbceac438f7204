"""Steps as recordings: which of them can be, when they are made, and what is said where they cannot."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sanc.amortised import AmortisedEngine
from sanc.data import Batch
from sanc.deferred import Deferred, unsupported
from sanc.engine import Engine
from sanc.kernels import desk_on
from sanc.oracles.captured import Programs, StepPrograms, SurveyPrograms
from sanc.oracles.layout import Layout
from sanc.oracles.products import HvpMode
from sanc.oracles.recording import NotNowError, NotRecordableError, Recorder, signature
from sanc.record import Record

DEVICES = ("cuda",)
"""Devices whose steps are recorded. Elsewhere a recording runs eagerly, which is good for tests only."""

KINDS = 4
"""Kinds of batches (shapes, losses) that are recorded; each takes memory of its own."""


class Capture:
    """Decides for an optimiser whether a step is replayed, and keeps the recordings.

    Parameters
    ----------
    engine : Engine or AmortisedEngine
        The iteration.
    hvp : str
        How products are made; "auto" measures.

    Attributes
    ----------
    reason : str
        Why the last step was not replayed; empty where it was.
    """

    def __init__(self, engine: Engine | AmortisedEngine, hvp: str) -> None:
        self.engine = engine
        self.hvp = hvp
        self.reason = "no step was made yet"
        self.deferred = Deferred(engine) if isinstance(engine, Engine) else None
        self._refused = ""
        self._programs: dict[tuple[Any, ...], Programs] = {}
        self._last: Programs | None = None
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorder: Recorder | None = None
        self._warned = False
        if isinstance(engine, Engine):
            self._refused = unsupported(engine.method, engine.settings)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recordings behind: they are of this process and its device."""
        return self.__dict__ | {"_programs": {}, "_last": None, "_recorder": None, "_seen": Counter()}

    def settle(self) -> Record | None:
        """Bring the engine up to date with what the device decided; return the record of that step, once."""
        return None if self.deferred is None else self.deferred.settle()

    @property
    def vanished(self) -> bool:
        """Whether the next step is the host's, because the gradient of the last one vanished."""
        return self.deferred is not None and self.deferred.vanished

    @vanished.setter
    def vanished(self, value: bool) -> None:
        if self.deferred is not None:
            self.deferred.vanished = value

    @property
    def hvp_mode(self) -> HvpMode | None:
        """How the products of the last step were made, if it was replayed."""
        return None if self.reason or self._last is None else self._last.hvp

    def forget(self) -> None:
        """Drop all recordings; the state they speak of is another now."""
        if self.deferred is not None:
            self.deferred.catch_up()
        self._programs.clear()
        self._last = None

    def programs(self, given: Sequence[Any], layout: Layout, microbatch: int | None) -> Programs | None:
        """Return the recordings for a step on these samples; None where it is to be made eagerly."""
        last = self._last
        if last is not None and last.takes(given) and microbatch is None and last.fits(layout):
            self.reason = ""
            return last
        self.reason = self._refused or self._obstacle(given, layout, microbatch)
        if self.reason:
            self._warn()
            return None
        if not self._ready():
            self.reason = "the first steps are made eagerly"
            return None
        key = signature(given)
        made = self._programs.get(key)
        if made is not None and not made.fits(layout):
            self.forget()  # parameters were replaced, frozen or moved
            made = None
        if made is None:
            made = self._record(key, given, layout)
        self._last = made
        return made

    def _obstacle(self, given: Sequence[Any], layout: Layout, microbatch: int | None) -> str:
        device = layout.kind[1]
        if device.type not in DEVICES:
            return f"the parameters are on {device}, and only {', '.join(DEVICES)} has graphs"
        for name, batch in zip(("closure", "hessian", "objective"), given, strict=True):
            if batch is not None and not isinstance(batch, Batch):
                return f"{name} is a plain function whose data cannot be exchanged; pass sanc.Batch(loss, *tensors)"
            if batch is not None and microbatch is not None and microbatch < len(batch):
                return f"microbatch = {microbatch} cuts {name} into parts"
        return ""

    def _ready(self) -> bool:
        """Whether the iteration is past its beginning: the first steps look at more than a recording can."""
        if isinstance(self.engine, Engine):
            return self.engine.state.iteration > 0
        state = self.engine.state
        s = self.engine.settings
        if state.settled < 0 or state.momentum is None or state.basis is None:
            return False
        return (state.scale is not None or not s.metric) and len(state.basis) <= (s.krylov_dim or 0)

    def _record(self, key: tuple[Any, ...], given: Sequence[Batch | None], layout: Layout) -> Programs | None:
        if len(self._seen) > 100:  # a loss function of its own for every step: nothing is ever seen twice
            self._seen.clear()
        self._seen[key] += 1
        if self._programs and self._seen[key] < 2:
            self.reason = "a batch of this kind was not seen before"
            return None
        if len(self._programs) >= KINDS:
            self.reason = f"there are more than {KINDS} kinds of batches; make all of one shape, with one loss function"
            self._warn()
            return None
        if self._recorder is None:
            self._recorder = Recorder(layout.kind[1])
        try:
            made = self._make(given, layout, self._recorder)
        except NotNowError as problem:
            self.reason = str(problem)
            return None
        except NotRecordableError as problem:
            self.reason = self._refused = str(problem)
            self._warn()
            return None
        self._programs[key] = made
        return made

    def _make(self, given: Sequence[Batch | None], layout: Layout, recorder: Recorder) -> Programs:
        engine, s = self.engine, self.engine.settings
        assert s.krylov_dim is not None
        limit = min(s.krylov_dim, layout.dim)
        if isinstance(engine, AmortisedEngine):
            return SurveyPrograms(layout, given, self.hvp, recorder, engine.memory(project=True), limit)
        desk = desk_on(layout.kind[1])(engine, layout, limit, engine.method.on_rejection == "escape")
        return StepPrograms(layout, given, self.hvp, recorder, desk)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"capture = True has no effect: {self.reason}.", RuntimeWarning, stacklevel=5)


def as_batches(closure: Any, hessian: Any, objective: Any) -> tuple[Any, Any, Any]:
    """Return the three samples with None for those that are the gradient's."""
    return closure, None if hessian is closure else hessian, None if objective is closure else objective
