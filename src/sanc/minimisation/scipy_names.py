"""SciPy's names of arguments and options of `minimize`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from scipy.optimize import OptimizeWarning

from sanc.errors import ArgumentError, is_number, require, warn

P = ParamSpec("P")
T = TypeVar("T")

_SCIPY_NAMES = {"maxiter": "max_iter", "maxfev": "max_nfev", "maxfun": "max_nfev", "gtol": "tol"}
"""SciPy's names of some arguments of `minimize`."""
_IGNORED_OPTIONS = {
    "accuracy", "adaptive", "barrier_tol", "c1", "c2", "catol", "direc", "eps", "eta", "f_target",
    "factorization_method", "fatol", "feasibility_tol", "final_tr_radius", "finite_diff_rel_step", "ftol",
    "hess_inv0", "history_size", "inexact", "initial_barrier_parameter", "initial_barrier_tolerance",
    "initial_constr_penalty", "initial_simplex", "initial_tr_radius", "initial_trust_radius", "iprint", "maxCGit",
    "max_trust_radius", "maxcor", "maxls", "mesg_num", "minfev", "norm", "offset", "rescale", "return_all",
    "rhobeg", "simplex", "sparse_jacobian", "stepmx", "subproblem_maxiter", "verbose", "workers", "xatol", "xrtol",
    "xtol",
}  # fmt: skip
"""Entries of `options` for SciPy's other methods. As in SciPy they give a warning, so that `method` can be changed."""


def argument_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return names and defaults of the arguments of a function, without `settings`."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "settings"}


def accepts_options(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that also accepts its arguments as entries of `options`, and by the names of SciPy."""
    call, defaults = cast("Callable[..., T]", function), argument_defaults(function)
    names = list(defaults)
    positional = names[: names.index("options") + 1]

    @wraps(function)
    def with_options(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = dict(zip(positional, args, strict=False)) | kwargs
        fits = len(arguments) == len(args) + len(kwargs)  # otherwise the call raises an error
        if fits and (arguments.get("options") is not None or _SCIPY_NAMES.keys() & kwargs.keys()):
            return call(**_merge_options(arguments, defaults))
        return function(*args, **kwargs)

    return with_options


def _merge_options(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, `options` among them, by our names; one given twice is an error."""
    merged = dict(arguments)
    settings = {name: merged.pop(name) for name in arguments if name not in defaults}
    options = merged.pop("options", None)
    options = {} if options is None else options
    fits = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    require(fits, "options", options, "pass a mapping of names to values")
    scale = options.get("scale")
    foreign = _IGNORED_OPTIONS if scale is None or is_number(scale) else _IGNORED_OPTIONS | {"scale"}
    if ignored := sorted(foreign & options.keys()):
        warn(f"Unknown solver options: {', '.join(ignored)}", OptimizeWarning)
    options = {name: value for name, value in options.items() if name not in ignored}
    if is_number(options.get("disp")):
        options["disp"] = options["disp"] > 0  # in SciPy a number is a level
    for name, value in [*settings.items(), *options.items()]:
        ours = _SCIPY_NAMES.get(name, name)
        if value is None and (ours != name or name in ("disp", "scale")):
            continue  # in SciPy None is the default
        if ours != name and ours != "tol" and isinstance(value, float):  # SciPy accepts 1e3 and inf
            value = None if value == math.inf else int(value) if value.is_integer() else value
        given_twice = ours in merged and (ours not in defaults or merged[ours] is not defaults[ours])
        if given_twice or ours in ("fun", "x0", "options"):
            place = "in options and as an argument" if name in options else f"together with {ours!r}"
            raise ArgumentError(f"{name!r} is given {place}: pass it once.")
        merged[ours] = value
    return merged
