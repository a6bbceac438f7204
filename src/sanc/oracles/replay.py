"""Evaluations that can be repeated: the same random draws, and module buffers that do not move.

A loss with dropout is a different function in every call unless the random state is put back first; a BatchNorm layer
in training mode moves its running averages in every forward pass. Both would make f(x) and f(x+s) incomparable, or
count trial evaluations as training. This module holds them still.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


class HostDrawsError(Exception):
    """A closure drew from NumPy's or Python's global generator, which had not been seeded for it."""


def _numpy_words() -> Any:
    """Where NumPy's global generator has its words and its place; None where it is of another kind."""
    global _numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if generator is not _numpy[0]:
        usual = type(generator) is np.random.MT19937
        words = (ctypes.c_char * _TWISTER).from_address(generator.ctypes.state_address) if usual else None
        _numpy = generator, words
    return _numpy[1]


def _python_words(generator: Any) -> Any:
    """Where Python's global generator has its place and its words; None unless they are seen to be there."""
    if platform.python_implementation() != "CPython" or type(generator) is not random.Random:
        return None
    if sys.getsizeof(generator) < object.__basicsize__ + _TWISTER:
        return None
    words = (ctypes.c_char * _TWISTER).from_address(id(generator) + object.__basicsize__)
    _, (*expected, place), _ = generator.getstate()
    found = array("I", words.raw)
    return words if found.itemsize == 4 and found.tolist() == [place, *expected] else None


_numpy: tuple[Any, Any] = (None, None)  # the generator that was seen last, and its words
_python: Any = getattr(random.getstate, "__self__", None)  # the global generator
_PYTHON = _python_words(_python)


def host_is_usual() -> bool:
    """Whether `host_state` has an answer."""
    return _PYTHON is not None and _numpy_words() is not None


def host_state() -> tuple[bytes, bytes, float | None] | None:
    """Return the words of NumPy's and of Python's global generator, and the normal number that Python keeps.

    None where these are not the usual generators. To ask them by their own functions, and to seed them, takes so long
    that it is felt in a step of a small network. NumPy, too, may keep a normal number for the next one who asks, which
    is not seen from here.
    """
    words = _numpy_words()
    return None if words is None or _PYTHON is None else (words.raw, _PYTHON.raw, _python.gauss_next)


@contextmanager
def own_randomness(device: torch.device, *, host: bool = True) -> Iterator[None]:
    """Give the global random states of torch, NumPy and Python back as they were when the block ends.

    Where `host` is off nobody seeds the generators of NumPy and Python inside the block. They are put back all the
    same, should somebody draw from them, but for a normal number that NumPy may have kept.
    """
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    before, numpy = host_state(), _numpy  # a closure may put another generator in NumPy's place
    whole = (random.getstate(), np.random.get_state()) if host or before is None else None  # noqa: NPY002
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if whole is not None:
            random.setstate(whole[0])
            np.random.set_state(whole[1])  # noqa: NPY002
        elif before is not None and host_state() != before:
            numpy[1].raw = before[0]
            place, *others = array("I", before[1])
            random.setstate((random.getstate()[0], (*others, place), before[2]))


def seed_all(seed: int, device: torch.device, *, host: bool = True) -> None:
    """Seed everything that a closure may draw from, or with `host` off the generators of torch alone."""
    for generator in _generators(device):
        generator.manual_seed(seed)
    if host:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002


class Buffers:
    """What the buffers of modules held before they ran."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = {}
        self._modules: list[nn.Module] = []

    def remember(self, module: nn.Module, _: object) -> None:
        """Copy the buffers of a module in training mode, the first time it is seen."""
        if not module.training:
            return
        self._modules.append(module)
        for name, buffer in module._buffers.items():
            key = (id(module), name)
            if buffer is not None and key not in self._saved:
                self._saved[key] = (module, name, buffer, buffer.detach().clone())

    @property
    def some(self) -> bool:
        """Whether there were any."""
        return bool(self._saved)

    @property
    def none(self) -> bool:
        """Whether no module that ran has any now, not even such as it made on the way."""
        return not any(module._buffers for module in self._modules)

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
