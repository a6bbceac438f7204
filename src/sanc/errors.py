"""Errors whose messages name the argument, its value and the remedy."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from types import FunctionType
from typing import Any

TERMINAL_WIDTH = 80
"""Characters of a line of printed results, the width of a standard terminal."""
_WIDTH_OF_VALUE = 60
"""Characters of a value in a message, so that the message fits two lines of a terminal."""
_WIDTH_OF_LINE = 160
"""Characters of the message of another library in one of ours: two lines of a terminal."""
_MIN_SIMILARITY = 0.82
"""Ratio of `difflib.SequenceMatcher` from which a name counts as misspelt: one wrong letter in six or more."""

_LIBRARIES = {"sanc", "torch", "scipy", "sklearn", "joblib"}
"""Packages between a caller and a warning."""


class SancError(Exception):
    """Base class of the errors that this package raises."""


class ArgumentError(SancError, ValueError):
    """An argument cannot be used; the message names it, its value and what to pass instead."""


class ArgumentTypeError(SancError, TypeError):
    """An argument is of the wrong type; the message names it, its type and what to pass instead."""


class NonFiniteStartError(SancError, ValueError):
    """The loss, its gradient or a Hessian product is not finite at the starting point."""


class NonFiniteError(SancError, ArithmeticError):
    """The loss or its gradient is not finite for many consecutive batches."""


class NotConvergedError(SancError, RuntimeError):
    """A fit ended without a solution; the message has its ending and the remedy."""


class RanksError(SancError, RuntimeError):
    """The ranks of a process group have diverged, or one of them does not respond."""


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


class SingularMinimumError(SancError, ArithmeticError):
    """A minimum has no reliable derivative.

    The run did not converge, λ_min of the Hessian is not bounded away from zero, or the estimated error is too large.
    """


def shown(value: object) -> str:
    """Return a value as one short line, for a message; a number of NumPy as one of Python."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    text = " ".join(repr(value).split())
    return text if len(text) <= _WIDTH_OF_VALUE else f"{text[: _WIDTH_OF_VALUE - 1]}…"


def without_addresses(text: str) -> str:
    """Return a `repr` without addresses, which objects without `__repr__` have, so that it is equal everywhere."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def nearest(name: str, allowed: Iterable[str], otherwise: str | None = None) -> str:
    """Return the remedy for an unknown `name`, as the end of a message.

    It proposes those of `allowed` that are spelt most alike, or one that begins with `name`. If there is none, it is
    `otherwise`, or the list of `allowed`.
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=3, cutoff=_MIN_SIMILARITY)
    similarity = [difflib.SequenceMatcher(None, other, name).ratio() for other in close]
    close = [other for other, ratio in zip(close, similarity, strict=True) if ratio == similarity[0]]
    if not close and len(name) > 3:
        close = [other for other in names if other.startswith(name)][:1]
    if close:
        return f"did you mean {' or '.join(map(repr, sorted(close)))}?"
    return otherwise or f"choose from {', '.join(names)}."


def one_of(what: str, value: object, allowed: Collection[str]) -> str:
    """Return `value` if it is one of `allowed`; otherwise raise an error that proposes the nearest one."""
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(f"{what} = {shown(value)} is not known: {nearest(str(value), allowed)}")
    return value


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise an error that names the argument, its value and the remedy, unless `holds`."""
    if not holds:
        raise ArgumentError(f"{name} = {shown(value)} cannot be used: {remedy}.")


def is_number(value: Any, kind: type = Real) -> bool:
    """Return whether `value` is a number of this kind and not NaN; booleans do not count."""
    return isinstance(value, kind) and not isinstance(value, bool) and value == value


def require_bool(name: str, value: Any) -> None:
    """Require True or False, of Python or NumPy."""
    require(type(value).__name__ in ("bool", "bool_"), name, value, "pass True or False")


def require_positive(name: str, value: Any, *, optional: bool = False) -> None:
    """Require a positive number; None is accepted too if the argument is optional."""
    fits = optional if value is None else is_number(value) and value > 0
    require(fits, name, value, "pass a positive number")


def require_not_negative(name: str, value: Any) -> None:
    """Require a finite number that is at least 0."""
    require(is_number(value) and 0 <= value < math.inf, name, value, "pass a finite number ≥ 0")


def require_fraction(name: str, value: Any, remedy: str) -> None:
    """Require a number between 0 and 1, without its limits."""
    require(is_number(value) and 0 < value < 1, name, value, remedy)


def require_integer(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Require an integer that is at least `least`; None is accepted too if the argument is optional."""
    fits = optional if value is None else is_number(value, Integral) and value >= least
    require(fits, name, value, f"pass an integer ≥ {least}")


def first_line(error: Exception) -> str:
    """Return the first line of the message of an error of another library, with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_WIDTH_OF_LINE]}" if lines else type(error).__name__


def call_mismatch(function: Any, count: int, keywords: Mapping[str, Any] | None = None) -> str:
    """Return why a function cannot be called with so many positional arguments, and with these keywords.

    The reason is empty if it can, or is not known.
    """
    if isinstance(function, FunctionType) and not keywords:  # its signature takes as long as a step of a small problem
        code = function.__code__
        if code.co_argcount == count and not code.co_kwonlyargcount:
            return ""
    try:
        inspect.signature(function).bind(*range(count), **(keywords or {}))
    except ValueError:  # some functions written in C have no signature
        return ""
    except TypeError as mismatch:
        return str(mismatch)
    return ""


def missing_attribute(owner: object, name: str, replacements: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that other libraries have, with what to use instead."""
    remedy = f": {replacements[name]}." if name in replacements else ""
    return AttributeError(f"{type(owner).__name__} has no attribute {name!r}{remedy}", name=name, obj=owner)


def in_place_error(error: Exception) -> ArgumentError:
    """Return the error for a function that changes x in place, from torch's own."""
    return ArgumentError(
        f"fun changes x in place ({first_line(error)}): use operations that return new tensors, such as x + 1 for "
        "x.add_(1), or change x.clone()."
    )


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller: the innermost one outside this package and the libraries that call it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
