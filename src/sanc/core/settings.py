"""Pieces with settings: frozen dataclasses that check their fields by type and range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple, get_args, get_type_hints

from sanc.errors import ArgumentTypeError, is_number, one_of, require, require_bool, shown


class Range(NamedTuple):
    """The values that a setting may have.

    Attributes
    ----------
    contains : callable
        Returns whether a value is allowed.
    remedy : str
        What to pass instead of another value, for the error.
    """

    contains: Callable[[Any], bool]
    remedy: str


POSITIVE = Range(lambda v: 0 < v < math.inf, "pass a positive finite number")
NOT_NEGATIVE = Range(lambda v: 0 <= v < math.inf, "pass a finite number ≥ 0")
FRACTION = Range(lambda v: 0 < v < 1, "pass a number between 0 and 1")
BELOW_ONE = Range(lambda v: 0 <= v < 1, "pass a number in [0, 1)")
ABOVE_ONE = Range(lambda v: 1 < v < math.inf, "pass a finite number above 1")
BELOW_INFINITY = Range(lambda v: v < math.inf, "pass a number below infinity")
COUNT = Range(lambda v: v >= 0, "pass an integer ≥ 0")
AT_LEAST_ONE = Range(lambda v: v >= 1, "pass an integer ≥ 1")


def setting(default: Any, allowed: Range) -> Any:
    """Return a dataclass field with a default and a range."""
    return field(default=default, metadata={"range": allowed})


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A frozen dataclass whose fields are checked: numbers by type and range, booleans, and choices of a `Literal`.

    The pieces of `sanc` derive from it; pieces of a caller need not.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _type_hints(cls)
        for item in fields(self):
            _check(item.name, getattr(self, item.name), hints[item.name], item.metadata.get("range"))

    def without_effect(self) -> Mapping[str, str]:
        """Return the settings that have no effect beside the others of this piece, each with the remedy."""
        return {}


def resolved_epsilon_g(epsilon: float, epsilon_g: float | None) -> float:
    """Return the setting ε_g of models and escape rules: the number given, or ε/4 as in the authors' program."""
    return epsilon / 4 if epsilon_g is None else epsilon_g


def is_user_defined(piece: object) -> bool:
    """Return whether the class of a piece is not of this package."""
    return not type(piece).__module__.startswith("sanc.")


@cache
def _type_hints(cls: Any) -> dict[str, Any]:
    """Return the types of the fields; resolving them takes longer than solving a small problem."""
    return get_type_hints(cls)


def _check(name: str, value: Any, hint: Any, allowed: Range | None) -> None:
    """Raise an error if a value has the wrong type or is out of its range."""
    alternatives = get_args(hint)
    optional = type(None) in alternatives
    choices = [choice for choice in alternatives if isinstance(choice, str)]
    if choices:
        one_of(name, value, choices)
    elif isinstance(hint, type) and issubclass(hint, Piece):
        if not isinstance(value, hint):
            names = ", ".join(item.name for item in fields(hint))
            remedy = f"pass sanc.{hint.__name__}(…), whose settings are {names}"
            raise ArgumentTypeError(f"{name} = {shown(value)} cannot be used: {remedy}.")
    elif hint is bool:
        require_bool(name, value)
    elif {int, float}.intersection((hint, *alternatives)) and not (optional and value is None):
        is_integer = hint is int or int in alternatives
        number_type, remedy = (Integral, "pass an integer") if is_integer else (Real, "pass a number")
        require(is_number(value, number_type), name, value, remedy)
        if allowed is not None:
            require(allowed.contains(value), name, value, allowed.remedy + (", or None" if optional else ""))
