"""The choice between recorded and eager steps, and the warning if steps cannot be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Leaves
from sanc.core.method import Method
from sanc.core.model import KrylovModel
from sanc.errors import warn
from sanc.graphs.oracle import CapturedOracle
from sanc.graphs.recording import (
    BatchNotRecordableError,
    NotRecordableError,
    Recorder,
    device_obstacle,
    signature,
)

MAX_KINDS = 4
"""The most kinds of batches (shapes, losses) that are recorded, since each needs its own memory. Four are enough for
full and shorter last batches of two loss functions."""

_MAX_COUNTED_KINDS = 100
"""The most kinds of batches that are counted: far above `MAX_KINDS`, and few enough to keep."""


class Capture:
    """Holds the recordings of an optimiser and decides which steps replay them.

    Attributes
    ----------
    reason : str
        Why the last step was eager; empty if it was replayed.
    """

    def __init__(self, method: Method) -> None:
        self.reason = "no step was made yet"
        self._method, model = method, method.model
        self._unsupported = ""  # why no step can be recorded
        if not (model.proposes and isinstance(model, KrylovModel)):
            self._unsupported = f"method {method.name!r} has no cubic model"
        elif model.lanczos == "regenerate":
            self._unsupported = 'lanczos = "regenerate" computes its basis twice'
        self._oracles: dict[tuple[Any, ...], CapturedOracle] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorder: Recorder | None = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the recordings, which belong to this process and its device."""
        return self.__dict__ | {"_oracles": {}, "_recorder": None, "_seen": Counter()}

    def reset(self) -> None:
        """Delete all recordings, since their parameters were replaced."""
        self._oracles.clear()

    def oracle(
        self, batches: Sequence[Any], leaves: Leaves, hvp: str, microbatch: int | None, *, first: bool
    ) -> CapturedOracle | None:
        """Choose between a recorded and an eager step on these samples, and record their calls if they are new.

        Return the recorded oracle, or None for an eager step; `reason` is then why.
        """
        self.reason = self._unsupported or self._obstacle(batches, leaves, hvp, microbatch)
        if self.reason:
            self._warn()
            return None
        if first:
            self.reason = "the first step is eager"
            return None
        key = signature(batches)
        recorded = self._oracles.get(key)
        if recorded is not None and not recorded.fits(leaves):
            self.reset()  # parameters were replaced or frozen, or their memory changed
            recorded = None
        return recorded or self._record(key, batches, leaves, hvp)

    def _obstacle(self, batches: Sequence[Any], leaves: Leaves, hvp: str, microbatch: int | None) -> str:
        """Return why this step cannot be recorded; empty if it can."""
        if obstacle := device_obstacle(leaves.device):
            return obstacle
        if hvp == "finite-difference":
            return 'hvp = "finite-difference" chooses its step on the host'
        if hvp == "gauss-newton":
            return 'hvp = "gauss-newton" is not recorded'
        for name, batch in zip(("closure", "hessian", "objective"), batches, strict=True):
            if batch is not None and not isinstance(batch, Batch):
                return f"{name} is a plain function whose data cannot be replaced; pass sanc.Batch(loss, *tensors)"
            if batch is not None and microbatch is not None and microbatch < len(batch):
                return f"microbatch = {microbatch} splits {name} into parts"
        return ""

    def _record(
        self, key: tuple[Any, ...], batches: Sequence[Batch | None], leaves: Leaves, hvp: str
    ) -> CapturedOracle | None:
        """Record the calls for batches of this kind and return their oracle; None if the step is eager."""
        self.reason = self._reason_to_wait(key)
        if self.reason:
            return None
        try:
            self._oracles[key] = recorded = self._new_oracle(batches, leaves, hvp)
        except BatchNotRecordableError as error:
            self.reason = str(error)
            return None
        except NotRecordableError as error:
            self.reason = self._unsupported = str(error)
            self._warn()
            return None
        return recorded

    def _reason_to_wait(self, key: tuple[Any, ...]) -> str:
        """Count a kind of batches, and return why it is not recorded now; empty if it is."""
        if len(self._seen) > _MAX_COUNTED_KINDS:  # with a new loss function in every step no kind recurs
            self._seen.clear()
        self._seen[key] += 1
        if self._oracles and self._seen[key] < 2:
            return "a batch of this kind is recorded when it occurs again"
        if len(self._oracles) < MAX_KINDS:
            return ""
        self.reason = f"there are more than {MAX_KINDS} kinds of batches; use one shape and one loss function"
        self._warn()
        return self.reason

    def _new_oracle(self, batches: Sequence[Batch | None], leaves: Leaves, hvp: str) -> CapturedOracle:
        """Return an oracle with recordings for batches of these shapes."""
        model = self._method.model
        assert isinstance(model, KrylovModel)
        assert model.krylov_dim is not None
        return CapturedOracle(
            leaves,
            batches,
            krylov_dim=min(model.krylov_dim, leaves.dim),
            reorthogonalise=model.reorthogonalise,
            joint=not self._method.on_samples,
            hvp=hvp,
            exact=self._method.exact,
            recorder=self._recorder_on(leaves.device),
        )

    def _recorder_on(self, device: torch.device) -> Recorder:
        """Return the recorder of all recordings."""
        if self._recorder is None:
            self._recorder = Recorder(device)
        return self._recorder

    def _warn(self) -> None:
        """Warn once that steps are eager."""
        if not self._warned:
            self._warned = True
            warn(f"capture = True has no effect: {self.reason}.", RuntimeWarning)
