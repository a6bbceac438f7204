"""Errors for arguments that a function does not have, with those it has instead, and for callbacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sanc.errors import ArgumentError, ArgumentTypeError, call_mismatch, nearest, shown

_REPLACEMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("maxiter", "max_steps", "niter", "n_iter", "num_iters"), ("max_iter",)),
    **dict.fromkeys(("maxfev", "maxfun", "max_nfev", "max_eval"), ("max_nfev", "max_iter")),
    **dict.fromkeys(("ftol", "xtol", "gtol", "eps"), ("tol",)),
    **dict.fromkeys(("disp", "verbose", "display"), ("progress", "callback")),
    "eps_curvature": ("curvature_tol",),
    "Dfun": ("jac",),
    "batch_size": ("chunk_size",),
    **dict.fromkeys(("method", "preset", "x_scale", "diff_step", "tr_solver", "tr_options", "jac_sparsity"), ()),
}
"""Names that other minimisers have, and the arguments that replace them: the first of these that a function has."""


def reject_arguments(function: str, given: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Raise an error for the first of `given` that is not one of the `parameters` of a function."""
    for name, value in given.items():
        if name in parameters:
            continue
        replacements = [other for other in _REPLACEMENTS.get(name, ()) if other in parameters]
        remedy = f"leave it out, or find the argument in help(sanc.{function})."
        if replacements:
            remedy = f"pass {replacements[0]}."
        elif name not in _REPLACEMENTS:
            remedy = nearest(name, parameters, remedy)
        raise ArgumentError(f"{name} = {shown(value)} is not an argument of {function}: {remedy}")


def require_call(
    name: str, function: Any, vectors: str, args: tuple[Any, ...], keywords: Mapping[str, Any] | None = None
) -> None:
    """Raise an error unless a function of the caller can be called with these vectors, and then with `args`."""
    mismatch = call_mismatch(function, len(vectors.split(", ")) + len(args), keywords)
    if mismatch:
        call = f"{name}({vectors}, *args) with {len(args)} in args" if args else f"{name}({vectors})"
        raise ArgumentTypeError(
            f"{name} cannot be called as {call} ({mismatch}): pass a function of {vectors}, and what else it needs as "
            "args=(…,)."
        )


def check_callback(callback: Any, count: int, remedy: str) -> None:
    """Raise an error unless `callback` is None, or can be called with so many arguments."""
    if callback is None:
        return
    reason = "is no function"
    if callable(callback):
        mismatch = call_mismatch(callback, count)
        if not mismatch:
            return
        reason = f"is called with {count} argument{'s' * (count > 1)} ({mismatch})"
    raise ArgumentTypeError(f"callback = {shown(callback)} {reason}: {remedy}.")
