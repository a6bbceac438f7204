"""Evaluations that can be repeated: the same random draws, and module buffers that do not move.

A loss with dropout is a different function in every call unless the random state is put back first; a BatchNorm layer
in training mode moves its running averages in every forward pass. Both would make f(x) and f(x+s) incomparable, or
count trial evaluations as training. This module holds them still.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


def derive(seed: int, *path: int) -> int:
    """Return a seed of 63 bits that is a fixed function of `seed` and `path`."""
    text = ",".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


_TWISTER = 625 * 4
"""Bytes of a Mersenne twister: 624 words and its place among them."""


class NumpyDrawsError(Exception):
    """A closure drew from NumPy's global generator, which had not been seeded for it."""


def numpy_state() -> bytes | None:
    """Return the words of NumPy's global generator, None where that is not the usual one.

    NumPy's own `get_state` and `set_state` take far longer, which is felt in a step of a small network. What they have
    beyond this is a normal number that may be kept for the next one who asks.
    """
    twister = _twister()
    return None if twister is None else ctypes.string_at(twister.ctypes.state_address, _TWISTER)


def _twister() -> np.random.MT19937 | None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return generator if type(generator) is np.random.MT19937 else None


@contextmanager
def own_randomness(device: torch.device, *, numpy: bool = True) -> Iterator[None]:
    """Give the global random states of torch, NumPy and Python back as they were when the block ends.

    Where `numpy` is off nobody seeds its generator inside the block, and its words alone are put back.
    """
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    python, whole = random.getstate(), np.random.get_state() if numpy else None  # noqa: NPY002 - what closures use
    twister, words = (None, None) if numpy else (_twister(), numpy_state())
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        if whole is not None:
            np.random.set_state(whole)  # noqa: NPY002
        elif twister is not None and words is not None:
            ctypes.memmove(twister.ctypes.state_address, words, _TWISTER)


def seed_all(seed: int, device: torch.device, *, numpy: bool = True) -> None:
    """Seed everything that a closure may draw from."""
    for generator in _generators(device):
        generator.manual_seed(seed)
    random.seed(seed)
    if numpy:
        np.random.seed(seed % 2**32)  # noqa: NPY002


class Buffers:
    """What the buffers of modules held before they ran."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = {}

    def remember(self, module: nn.Module, _: object) -> None:
        """Copy the buffers of a module in training mode, the first time it is seen."""
        if not module.training:
            return
        for name, buffer in module._buffers.items():
            key = (id(module), name)
            if buffer is not None and key not in self._saved:
                self._saved[key] = (module, name, buffer, buffer.detach().clone())

    @property
    def some(self) -> bool:
        """Whether there were any."""
        return bool(self._saved)

    def put_back(self, unless: torch.Tensor | None = None) -> None:
        """Restore everything that was remembered; with `unless`, a truth on the device, only where that is false."""
        for module, name, buffer, content in self._saved.values():
            if unless is not None:
                content = torch.where(unless, buffer, content)
            # Written through .data: fused kernels move buffers without raising their version, and a graph that is
            # kept for more products must not take the old content for a change.
            buffer.data.copy_(content)
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer


class watched_buffers(Buffers):  # noqa: N801 - it is used as a function of no arguments
    """Remember the buffers of every module that runs in training mode inside the block."""

    def __enter__(self) -> Buffers:
        self._handle = register_module_forward_pre_hook(self.remember)
        return self

    def __exit__(self, *trouble: object) -> None:
        self._handle.remove()


class still_buffers(watched_buffers):  # noqa: N801
    """Put the buffers of every module that runs in training mode inside the block back as they were."""

    def __exit__(self, *trouble: object) -> None:
        try:
            self.put_back()
        finally:
            super().__exit__(*trouble)
