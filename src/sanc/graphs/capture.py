"""Which steps are made by recordings, when these are made, and what is said where they cannot be."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Leaves
from sanc.core.method import Method
from sanc.core.model import KrylovModel
from sanc.graphs.oracle import CapturedOracle
from sanc.graphs.recording import NotNowError, NotRecordableError, Recorder, signature

DEVICES = ("cuda",)
"""Devices whose calls are recorded. Elsewhere a recording runs eagerly, which is good for tests only."""

KINDS = 4
"""Kinds of batches (shapes, losses) that are recorded; each takes memory of its own."""


class Capture:
    """Decides for an optimiser whether a step is made by recordings, and keeps them."""

    def __init__(self, method: Method) -> None:
        self.reason = "no step was made yet"  # why the last step was not replayed; empty where it was
        self._method, model = method, method.model
        self._refused = ""
        if not (model.proposes and isinstance(model, KrylovModel)):
            self._refused = f"method {method.name!r} has no cubic model"
        elif model.lanczos == "regenerate":
            self._refused = 'lanczos = "regenerate" computes its basis twice'
        self._oracles: dict[tuple[Any, ...], CapturedOracle] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorder: Recorder | None = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recordings behind: they are of this process and its device."""
        return self.__dict__ | {"_oracles": {}, "_recorder": None, "_seen": Counter()}

    def forget(self) -> None:
        """Drop all recordings: the parameters they speak of are others now."""
        self._oracles.clear()

    def oracle(
        self, given: Sequence[Any], leaves: Leaves, hvp: str, microbatch: int | None, *, first: bool
    ) -> CapturedOracle | None:
        """Return the oracle for a step on these samples; None where it is to be made eagerly."""
        self.reason = self._refused or self._obstacle(given, leaves, hvp, microbatch)
        if self.reason:
            self._warn()
            return None
        if first:
            self.reason = "the first step is made eagerly"
            return None
        key = signature(given)
        made = self._oracles.get(key)
        if made is not None and not made.fits(leaves):
            self.forget()  # parameters were replaced, frozen or moved
            made = None
        return made or self._record(key, given, leaves, hvp)

    def _obstacle(self, given: Sequence[Any], leaves: Leaves, hvp: str, microbatch: int | None) -> str:
        if leaves.device.type not in DEVICES:
            return f"the parameters are on {leaves.device}, and only {', '.join(DEVICES)} has graphs"
        if hvp == "finite-difference":
            return 'hvp = "finite-difference" chooses its step on the host'
        for name, batch in zip(("closure", "hessian", "objective"), given, strict=True):
            if batch is not None and not isinstance(batch, Batch):
                return f"{name} is a plain function whose data cannot be exchanged; pass sanc.Batch(loss, *tensors)"
            if batch is not None and microbatch is not None and microbatch < len(batch):
                return f"microbatch = {microbatch} cuts {name} into parts"
        return ""

    def _record(
        self, key: tuple[Any, ...], given: Sequence[Batch | None], leaves: Leaves, hvp: str
    ) -> CapturedOracle | None:
        if len(self._seen) > 100:  # a loss function of its own for every step: nothing is ever seen twice
            self._seen.clear()
        self._seen[key] += 1
        if self._oracles and self._seen[key] < 2:
            self.reason = "a batch of this kind was not seen before"
            return None
        if len(self._oracles) >= KINDS:
            self.reason = f"there are more than {KINDS} kinds of batches; make all of one shape, with one loss function"
            self._warn()
            return None
        if self._recorder is None:
            self._recorder = Recorder(leaves.device)
        model = self._method.model
        assert isinstance(model, KrylovModel)
        assert model.krylov_dim is not None
        try:
            self._oracles[key] = made = CapturedOracle(
                leaves,
                given,
                limit=min(model.krylov_dim, leaves.dim),
                reorthogonalise=model.reorthogonalise,
                joint=not self._method.on_samples,
                hvp=hvp,
                exact=self._method.exact,
                recorder=self._recorder,
            )
        except NotNowError as problem:
            self.reason = str(problem)
            return None
        except NotRecordableError as problem:
            self.reason = self._refused = str(problem)
            self._warn()
            return None
        return made

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"capture = True has no effect: {self.reason}.", RuntimeWarning, stacklevel=4)
