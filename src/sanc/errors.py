"""Errors that name the argument, its value and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any


class SancError(Exception):
    """Base of every error that this package raises by itself."""


class ArgumentError(SancError, ValueError):
    """An argument cannot be used; the message names it, its value and what to pass instead."""


class ArgumentTypeError(SancError, TypeError):
    """An argument is of the wrong type; the message names it, its type and what to pass instead."""


class NonFiniteStartError(SancError, ValueError):
    """The loss, its gradient or a Hessian product is not finite at the starting point."""


class RanksError(SancError, RuntimeError):
    """The ranks of a process group do not do the same any more, or one of them does not answer."""


class SecondDerivativeError(SancError, RuntimeError):
    """An operator in the loss has no second derivative, so no exact Hessian product exists.

    Attributes
    ----------
    operator : str
        The name of the operator as the automatic differentiation reports it.
    """

    def __init__(self, message: str, operator: str = "") -> None:
        super().__init__(message)
        self.operator = operator


def shown(value: object) -> str:
    """Return a value as one line of at most 60 characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def nearest(name: str, known: Iterable[str], far: str | None = None) -> str:
    """End a sentence on an unknown `name`: with one of `known` that it is near to or begins, else `far` or all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.82)
    if not close and len(name) > 3:
        close = [other for other in names if other.startswith(name)]
    if close:
        return f"did you mean {close[0]!r}?"
    return far or f"choose from {', '.join(names)}."


def one_of(what: str, value: object, known: Collection[str]) -> str:
    """Return a value that is known, or say which is nearest."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{what} = {shown(value)} is not known: {nearest(str(value), known)}")
    return value


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Name the argument, its value and the remedy in an error, unless this holds."""
    if not holds:
        raise ArgumentError(f"{name} = {shown(value)} cannot be used: {remedy}.")


def is_number(value: Any, kind: type = Real) -> bool:
    """Whether this is a number of the kind, and not NaN; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool) and value == value


def require_number(name: str, value: Any) -> None:
    """Accept None or a positive number."""
    require(value is None or (is_number(value) and value > 0), name, value, "pass a positive number")


def require_not_negative(name: str, value: Any) -> None:
    """Accept a finite number that is at least 0."""
    require(is_number(value) and 0 <= value < math.inf, name, value, "pass a finite number ≥ 0")


def require_integer(name: str, value: Any, least: int, *, none: bool = True) -> None:
    """Accept an integer that is at least `least`, and None where that has a meaning."""
    fits = none if value is None else is_number(value, Integral) and value >= least
    require(fits, name, value, f"pass an integer ≥ {least}")
