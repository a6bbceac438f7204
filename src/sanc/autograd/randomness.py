"""Repeatable evaluations: the same random draws, and module buffers that keep their values.

A loss with dropout is a different function in every call, unless the random state is restored before the call. A
BatchNorm layer in training mode updates its running averages in every forward pass. Without this module f(x) and
f(x + s) would be values of two functions, and trial evaluations would count as training.

The random generators belong to the process, so only one thread at a time makes a step. All oracles share one hook
before the forward pass of modules; it notifies the `Buffers` of the thread that runs the module.
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
from torch.utils.hooks import RemovableHandle

from sanc.autograd.guards import before_forward, is_traced


def derive(seed: int, *path: int) -> int:
    """Return a 63-bit seed that is a fixed function of `seed` and `path`."""
    text = ",".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


_STEP_GENERATOR = np.random.MT19937(0)
"""NumPy's global generator during a step; `seed_all` seeds it before each evaluation."""
_GENERATORS_LOCK = threading.RLock()
"""Held by the thread whose step uses the global generators."""


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore the global random states of torch, NumPy and Python at the end of the block.

    Other threads wait for its end before they enter such a block.
    """
    with _GENERATORS_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        python = random.getstate()
        generator, numpy = np.random.get_bit_generator(), np.random.get_state(legacy=False)  # type: ignore[attr-defined]  # noqa: NPY002
        np.random.set_bit_generator(_STEP_GENERATOR)  # type: ignore[attr-defined]  # np.random.seed needs MT19937
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
            np.random.set_state(numpy)  # noqa: NPY002


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


class _ActiveBuffers(threading.local):
    """The `Buffers` whose blocks this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Buffers] = []


_ACTIVE = _ActiveBuffers()


def _before_forward(module: nn.Module, _: object) -> None:
    """Notify the `Buffers` of this thread that a module is about to run; compiled code skips this."""
    if not is_traced():
        for buffers in _ACTIVE.stack:
            buffers.save(module)


class _Hook:
    """Context in which a hook runs before the forward pass of every module.

    The hook slows small modules down, so the last block that ends removes it. If `stays` is set, it remains: torch
    would recompile a compiled model for every new hook.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._handle: RemovableHandle | None = None
        self.stays = False

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._handle is None:
                self._handle = before_forward(_before_forward)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and not self.stays and self._handle is not None:
                self._handle.remove()
                self._handle = None


HOOK = _Hook()


class Buffers:
    """Context that copies the buffers of modules in training mode before they run.

    It copies the buffers of each module that the hook reports, and of its submodules, which compiled code may run
    without the hook. It also copies those of the modules in `known`, which compiled code may run as a whole.

    Attributes
    ----------
    owners : list of Module
        Modules with buffers, in training mode or not.
    calls : int
        Number of calls of modules that the hook reported. It is smaller than usual if compiled code runs some of them.
    """

    def __init__(self, known: Iterable[nn.Module] = ()) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}
        self._seen: set[int] = set()
        self._known = list(known)
        self.owners: list[nn.Module] = []
        self.calls = 0

    def __enter__(self) -> Buffers:
        for module in self._known:
            self._copy(module)
        HOOK.__enter__()
        _ACTIVE.stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _ACTIVE.stack.remove(self)
        HOOK.__exit__()

    def save(self, module: nn.Module) -> None:
        """Copy the buffers of a module and its submodules before its first call."""
        self.calls += 1
        if id(module) not in self._seen:
            for part in module.modules():
                self._seen.add(id(part))
                self._copy(part)

    def _copy(self, module: nn.Module) -> None:
        has_buffers = False
        for name, buffer in module.named_buffers(recurse=False):
            has_buffers = True
            if module.training and (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())
        if has_buffers:
            self.owners.append(module)

    def put_back(self) -> None:
        """Restore the values of all copied buffers."""
        for module, name, buffer, values in self._saved.values():
            # .data does not raise the version of the buffer, so autograd accepts a graph that is kept for more
            # products. Fused kernels update buffers without a new version, too.
            buffer.data.copy_(values)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


class StillBuffers(Buffers):
    """Restores the buffers of modules in training mode at the end of the block."""

    def __exit__(self, *exception: object) -> None:
        try:
            self.put_back()
        finally:
            super().__exit__(*exception)


class InEvaluation(StillBuffers):
    """Switches every module that runs inside the block to evaluation mode until its end."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[nn.Module] = []

    def save(self, module: nn.Module) -> None:
        super().save(module)
        for part in module.modules():
            if part.training:
                self._trained.append(part)
                part.training = False

    def __exit__(self, *exception: object) -> None:
        for module in self._trained:
            module.training = True
        super().__exit__(*exception)
