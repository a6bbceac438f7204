"""Evaluations that can be repeated: the same random draws, and module buffers that do not move.

A loss with dropout is a different function in every call unless the random state is put back first; a BatchNorm layer
in training mode moves its running averages in every forward pass. Both would make f(x) and f(x+s) incomparable, or
count trial evaluations as training. This module holds them still.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
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


_TWISTER = np.random.MT19937(0)
"""NumPy's global generator while a step runs."""


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Give the global random states of torch, NumPy and Python back as they were when the block ends."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    python = random.getstate()
    kind, numpy = np.random.get_bit_generator(), np.random.get_state(legacy=False)  # type: ignore[attr-defined]  # noqa: NPY002
    np.random.set_bit_generator(_TWISTER)  # type: ignore[attr-defined]  # the caller's may be of a kind without seeds
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_bit_generator(kind)  # type: ignore[attr-defined]
        np.random.set_state(numpy)  # noqa: NPY002


def seed_all(seed: int, device: torch.device) -> None:
    """Seed everything that a closure may draw from."""
    for generator in _generators(device):
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


class Buffers:
    """What the buffers of modules held before they ran, seen from a hook that is called before every module.

    As a context it watches the modules that run inside the block in training mode.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}

    def __enter__(self) -> Buffers:
        self._handle = register_module_forward_pre_hook(self._remember)
        return self

    def __exit__(self, *trouble: object) -> None:
        self._handle.remove()

    def _remember(self, module: nn.Module, _: object) -> None:
        """Copy the buffers of a module, the first time it is seen."""
        if not module.training:
            return
        for name, buffer in module.named_buffers(recurse=False):
            if (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())

    def put_back(self) -> None:
        """Restore everything that was remembered."""
        for module, name, buffer, content in self._saved.values():
            # Written through .data: fused kernels move buffers without raising their version, and a graph that is
            # kept for more products must not take the old content for a change.
            buffer.data.copy_(content)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


class still_buffers(Buffers):  # noqa: N801 - it is used as a function of no arguments
    """Put the buffers of every module that runs in training mode inside the block back as they were."""

    def __exit__(self, *trouble: object) -> None:
        try:
            self.put_back()
        finally:
            super().__exit__(*trouble)
