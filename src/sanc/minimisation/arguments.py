"""Errors for arguments that a function does not have, with those it has instead, and for callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from sanc.errors import ArgumentError, ArgumentTypeError, nearest, shown

_REPLACEMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("maxiter", "max_steps", "niter", "n_iter", "num_iters"), ("max_iter",)),
    **dict.fromkeys(("maxfev", "maxfun", "max_nfev", "max_eval"), ("max_nfev", "max_iter")),
    **dict.fromkeys(("ftol", "xtol", "gtol", "eps"), ("tol",)),
    **dict.fromkeys(("disp", "verbose", "display"), ("progress", "callback")),
    "Dfun": ("jac",),
    "batch_size": ("chunk_size",),
    **dict.fromkeys(("method", "preset", "x_scale", "diff_step", "tr_solver", "tr_options", "jac_sparsity"), ()),
}
"""Names that other minimisers have, and the arguments that replace them: the first of these that a function has."""


def reject_arguments(function: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise an error for the first of `given` that is not one of the arguments `known` of a function."""
    for name, value in given.items():
        if name in known:
            continue
        replacements = [other for other in _REPLACEMENTS.get(name, ()) if other in known]
        remedy = f"leave it out, or find the argument in help(sanc.{function})."
        if replacements:
            remedy = f"pass {replacements[0]}."
        elif name not in _REPLACEMENTS:
            remedy = nearest(name, known, remedy)
        raise ArgumentError(f"{name} = {shown(value)} is not an argument of {function}: {remedy}")


def call_problem(function: Any, count: int) -> str:
    """Return why a function cannot be called with so many positional arguments; empty if it can, or is not known."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # some functions written in C have no signature
        return ""
    except TypeError as mismatch:
        return str(mismatch)
    return ""


def check_callback(callback: Any, count: int, remedy: str) -> None:
    """Raise an error unless `callback` is None, or can be called with so many arguments."""
    if callback is None:
        return
    problem = "is no function"
    if callable(callback):
        mismatch = call_problem(callback, count)
        if not mismatch:
            return
        problem = f"is called with {count} argument{'s' * (count > 1)} ({mismatch})"
    raise ArgumentTypeError(f"callback = {shown(callback)} {problem}: {remedy}.")
