"""Errors that name the argument, its value and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real


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

    def __init__(self, message: str, operator: str) -> None:
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


def require_number(name: str, value: object) -> None:
    """Accept None or a positive number that is not NaN."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value <= 0:
        raise ArgumentError(f"{name} = {value!r} cannot be used: pass a positive number.")


def require_integer(name: str, value: object, least: int, *, none: bool = True) -> None:
    """Accept an integer that is at least `least`, and None where that has a meaning."""
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{name} = {value!r} cannot be used: pass an integer ≥ {least}.")
