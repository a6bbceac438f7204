"""Evaluations that can be repeated: the same random draws, and module buffers that do not move.

A loss with dropout is a different function in every call unless the random state is put back first; a BatchNorm layer
in training mode moves its running averages in every forward pass. Both would make f(x) and f(x+s) incomparable, or
count trial evaluations as training. This module holds them still.

The random generators belong to the process, so steps of several threads take turns. Modules are seen by one hook that
all oracles share and that speaks to those of its own thread only.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


def derive(seed: int, *path: int) -> int:
    """Return a seed of 63 bits that is a fixed function of `seed` and `path`."""
    text = ",".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


_TWISTER = np.random.MT19937(0)
"""NumPy's global generator while a step runs."""
_TURN = threading.RLock()
"""Held by the thread whose step has the global generators."""


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Give the global random states of torch, NumPy and Python back as they were when the block ends.

    Other threads wait for the end of the block before they begin one.
    """
    with _TURN, torch.random.fork_rng([device] if device.type == "cuda" else []):
        python = random.getstate()
        kind, numpy = np.random.get_bit_generator(), np.random.get_state(legacy=False)  # type: ignore[attr-defined]  # noqa: NPY002
        np.random.set_bit_generator(_TWISTER)  # type: ignore[attr-defined]  # the caller's may be of a kind without seeds
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_bit_generator(kind)  # type: ignore[attr-defined]
            np.random.set_state(numpy)  # noqa: NPY002


def seed_all(seed: int, device: torch.device) -> None:
    """Seed everything that a closure may draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


class _Here(threading.local):
    """What watches modules in this thread, innermost last."""

    def __init__(self) -> None:
        self.watching: list[Buffers] = []


_HERE = _Here()


def _before_forward(module: nn.Module, _: object) -> None:
    """Tell whoever watches this thread that a module is about to run; compiled code leaves this out."""
    if not torch.compiler.is_compiling():
        for buffers in _HERE.watching:
            buffers.remember(module)


class _Hook:
    """The hook before the forward pass of modules, as a context.

    It slows small modules down, so it is there only while somebody is inside; but it stays where a model is compiled,
    which would be compiled again for every new hook.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._handle: RemovableHandle | None = None
        self.stays = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._handle is None:
                self._handle = register_module_forward_pre_hook(_before_forward)

    def __exit__(self, *trouble: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and not self.stays and self._handle is not None:
                self._handle.remove()
                self._handle = None


HOOK = _Hook()


class Buffers:
    """What the buffers of modules held before they ran.

    As a context it watches the modules that run inside the block in training mode, with the modules within them, where
    compiled code may run them unseen; and those in `hidden`, which compiled code runs as a whole.

    Attributes
    ----------
    owners : list of Module
        Modules with buffers that were seen, in training mode or not.
    calls : int
        Modules that were about to run; fewer than usual where compiled code runs them.
    """

    def __init__(self, hidden: Iterable[nn.Module] = ()) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}
        self._seen: set[int] = set()
        self._hidden = list(hidden)
        self.owners: list[nn.Module] = []
        self.calls = 0

    def __enter__(self) -> Buffers:
        for module in self._hidden:
            self._copy(module)
        HOOK.__enter__()
        _HERE.watching.append(self)
        return self

    def __exit__(self, *trouble: object) -> None:
        _HERE.watching.remove(self)
        HOOK.__exit__()

    def remember(self, module: nn.Module) -> None:
        """Copy the buffers of a module and of those in it, the first time it is seen."""
        self.calls += 1
        if id(module) not in self._seen:
            for part in module.modules():
                self._seen.add(id(part))
                self._copy(part)

    def _copy(self, module: nn.Module) -> None:
        found = False
        for name, buffer in module.named_buffers(recurse=False):
            found = True
            if module.training and (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())
        if found:
            self.owners.append(module)

    def put_back(self) -> None:
        """Restore everything that was remembered."""
        for module, name, buffer, content in self._saved.values():
            # Written through .data: fused kernels move buffers without raising their version, and a graph that is
            # kept for more products must not take the old content for a change.
            buffer.data.copy_(content)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


class StillBuffers(Buffers):
    """Put the buffers of every module that runs in training mode inside the block back as they were."""

    def __exit__(self, *trouble: object) -> None:
        try:
            self.put_back()
        finally:
            super().__exit__(*trouble)


class InEvaluation(StillBuffers):
    """Put every module that runs inside the block in evaluation mode for so long."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[nn.Module] = []

    def remember(self, module: nn.Module) -> None:
        super().remember(module)
        for part in module.modules():
            if part.training:
                self._trained.append(part)
                part.training = False

    def __exit__(self, *trouble: object) -> None:
        for module in self._trained:
            module.training = True
        super().__exit__(*trouble)
