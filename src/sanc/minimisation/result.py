"""The result of `minimize`: SciPy's `OptimizeResult`, printed so that it fits a screen."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult
from torch import Tensor

_LINE_WIDTH = 80
"""Characters of a line, the width of a standard terminal."""
_PRINTED_FIRST = ("message", "success", "status", "fun", "x", "jac")
"""Entries that are printed first, in SciPy's order."""
_NESTED_LINES = 8
"""Lines of a nested point, beyond which only the number of entries is printed: a result then has at most 45 lines."""


class Result(OptimizeResult):  # type: ignore[misc]
    """SciPy's result, whose `repr` abbreviates long vectors and prints the number of records in the history."""

    def __repr__(self) -> str:
        names = [
            *(name for name in _PRINTED_FIRST if name in self),
            *(name for name in self if name not in _PRINTED_FIRST),
        ]
        width = max(map(len, names), default=0)
        lines = []
        for name in names:
            first, *others = _lines(self[name], _LINE_WIDTH - width - 2)
            lines += [f"{name:>{width}}: {first}", *(" " * (width + 2) + line for line in others)]
        return "\n".join(lines)

    __str__ = __repr__


def _lines(value: Any, width: int) -> list[str]:
    """Return a value as a few lines of this width."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        with np.printoptions(threshold=6, edgeitems=2, precision=4):
            entries = " ".join(str(value.reshape(-1)).split()) if value.ndim else str(value)
        text = entries + (f" ({'×'.join(map(str, value.shape))})" if value.size > 6 or value.ndim > 1 else "")
    elif isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_is_array_or_mapping, value))):
        return _nested(value, width)
    elif isinstance(value, list):
        text = f"{len(value)} × {type(value[0]).__name__}" if value else "none"
    elif isinstance(value, IntEnum):
        text = f"{value:d} ({value.name})"
    else:
        text = str(value)
    return textwrap.wrap(text, width) or [""]


def _nested(value: Any, width: int) -> list[str]:
    """Return a nested point as lines, one key after the other."""
    items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
    lines: list[str] = []
    for number, (key, part) in enumerate(items):
        if len(lines) >= _NESTED_LINES:
            return [*lines, f"… and {len(items) - number} more"]
        first, *others = _lines(part, max(20, width - len(str(key)) - 2))
        lines += [f"{key}: {first}", *(" " * (len(str(key)) + 2) + line for line in others)]
    return lines or ["empty"]


def _is_array_or_mapping(part: Any) -> bool:
    """Whether an entry of a list makes it a nested point."""
    return isinstance(part, np.ndarray | Tensor | Mapping)
