"""Derivatives of functions that are written with JAX, which is not a requirement of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from traceback import walk_tb
from typing import Any

import numpy as np

from sanc.errors import ArgumentTypeError, first_line

JAX_REMEDY = (
    "return the array of JAX, without float(), .item() or numpy.asarray(), so that JAX differentiates fun; or pass "
    "its gradient as jac"
)
"""What to do about a function that computes with JAX, and returns something else."""


def holds_jax_arrays(x0: Any) -> bool:
    """Return whether a point is an array of JAX, or a nested dict, list or tuple with one."""
    if isinstance(x0, Mapping):
        return any(map(holds_jax_arrays, x0.values()))
    if isinstance(x0, list | tuple):
        return any(map(holds_jax_arrays, x0))
    return type(x0).__module__.partition(".")[0] in ("jax", "jaxlib")


def jax_array(x: Any) -> Any:
    """Return numbers as an array of JAX, in its precision: float32 unless ``jax_enable_x64`` is set."""
    return import_module("jax.numpy").asarray(1.0 * np.asarray(x))


def is_from_jax(error: Exception) -> bool:
    """Return whether JAX raised an exception: a frame is one of its modules, or, from compiled code, the text names it.

    Its functions raise one for tensors of torch.
    """
    names = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "jax" for name in names) or "jax" in str(error)


def jax_derivatives(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the gradient and the Hessian product of a function by automatic differentiation of JAX.

    A product is ∂/∂t ∇f(x + tv) at t = 0, forward over reverse. Nothing is compiled: pass ``jax.jit(fun)`` for that.
    """
    jax = import_module("jax")
    differentiated = jax.grad(fun)

    @wraps(fun)
    def gradient(x: Any, *args: Any) -> Any:
        try:
            return differentiated(x, *args)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            reason = f"fun converts an array of JAX to another type ({first_line(error)})"
            raise ArgumentTypeError(f"{reason}: {JAX_REMEDY}.") from error

    def product(x: Any, v: Any, *args: Any) -> Any:
        point, direction = (jax.tree_util.tree_map(jax.numpy.asarray, tree) for tree in (x, v))
        return jax.jvp(lambda p: gradient(p, *args), (point,), (direction,))[1]

    return gradient, product
