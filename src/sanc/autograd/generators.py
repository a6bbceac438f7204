"""The global random generators of torch, NumPy and Python, and seeds for them."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

_STEP_GENERATOR = np.random.MT19937(0)
"""NumPy's global generator while closures draw from it; it is seeded before each evaluation."""


def derive_seed(seed: int, *path: int) -> int:
    """Return a 63-bit seed that is a fixed function of `seed` and `path`."""
    text = ",".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class TorchGenerator:
    """A generator of torch."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self.name = generator, f"torch {generator.device}"

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def state(self) -> Tensor:
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        self._generator.set_state(state)

    @staticmethod
    def is_same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b)


class NumpyGenerator:
    """NumPy's global generator: the object and its state."""

    name = "numpy"

    def seed(self, seed: int) -> None:
        np.random.set_bit_generator(_STEP_GENERATOR)  # type: ignore[attr-defined]  # np.random.seed needs MT19937
        np.random.seed(seed % 2**32)  # noqa: NPY002

    def state(self) -> Any:
        return np.random.get_bit_generator(), np.random.get_state(legacy=False)  # type: ignore[attr-defined]  # noqa: NPY002

    def restore(self, state: Any) -> None:
        np.random.set_bit_generator(state[0])  # type: ignore[attr-defined]
        np.random.set_state(state[1])  # noqa: NPY002

    @staticmethod
    def is_same(a: Any, b: Any) -> bool:
        return a[0] is b[0] and _equal_states(a[1], b[1])


class PythonGenerator:
    """The generator of Python's `random`."""

    name = "python"

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    @staticmethod
    def is_same(a: Any, b: Any) -> bool:
        return bool(a == b)


Generator = TorchGenerator | NumpyGenerator | PythonGenerator
States = dict[Generator, Any]


def _equal_states(a: Any, b: Any) -> bool:
    """Return whether two states of NumPy are equal: nested dicts of numbers and arrays."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal_states(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def global_generators(device: torch.device) -> list[Generator]:
    """Return the global generators that a closure on this device may draw from."""
    torch_generators = [torch.default_generator]
    if device.type == "cuda":
        torch_generators.append(torch.cuda.default_generators[device.index])
    return [*map(TorchGenerator, torch_generators), PythonGenerator(), NumpyGenerator()]


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    for generator in global_generators(device):
        generator.seed(seed)
