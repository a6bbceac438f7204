"""Pieces with settings: frozen dataclasses that check their fields by type and range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple, get_args, get_type_hints

from sanc.errors import is_number, one_of, require


class Range(NamedTuple):
    """The values that a setting may have, and what an error recommends."""

    holds: Callable[[Any], bool]
    remedy: str


POSITIVE = Range(lambda v: 0 < v < math.inf, "pass a positive finite number")
NOT_NEGATIVE = Range(lambda v: 0 <= v < math.inf, "pass a finite number ≥ 0")
FRACTION = Range(lambda v: 0 < v < 1, "pass a number between 0 and 1")
BELOW_ONE = Range(lambda v: 0 <= v < 1, "pass a number in [0, 1)")
ABOVE_ONE = Range(lambda v: 1 < v < math.inf, "pass a finite number above 1")
COUNT = Range(lambda v: v >= 0, "pass an integer ≥ 0")
AT_LEAST_ONE = Range(lambda v: v >= 1, "pass an integer ≥ 1")


def setting(default: Any, allowed: Range) -> Any:
    """Return a dataclass field with a default and a range."""
    return field(default=default, metadata={"range": allowed})


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A frozen set of settings that checks itself; the pieces of `sanc` derive from it, others need not."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        hints = _hints(kind)
        for item in fields(self):
            _check(item.name, getattr(self, item.name), hints[item.name], item.metadata.get("range"))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields; finding them takes longer than solving a small problem."""
    return get_type_hints(kind)


def _check(name: str, value: Any, hint: Any, allowed: Range | None) -> None:
    """Reject a value of the wrong type, or out of its range."""
    parts = get_args(hint)
    choices = [part for part in parts if isinstance(part, str)]
    if choices:
        one_of(name, value, choices)
    elif hint is bool:
        require(isinstance(value, bool), name, value, "pass True or False")
    elif allowed is not None and (value is not None or type(None) not in parts):
        kind, called = (Integral, "an integer") if hint is int or int in parts else (Real, "a number")
        require(is_number(value, kind), name, value, f"pass {called}")
        remedy = allowed.remedy + (", or None" if type(None) in parts else "")
        require(allowed.holds(value), name, value, remedy)
