"""The oracle and the flat starting point for the arguments of `minimize` or `certificate`."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import HessianUpdateStrategy
from torch import Tensor

from sanc.autograd.guards import is_imported
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.precision import full_precision
from sanc.autograd.products import HvpMode
from sanc.core.caching import CachedOracle
from sanc.core.oracle import Oracle
from sanc.core.space import NumpySpace, Vector
from sanc.errors import ArgumentError, ArgumentTypeError, first_line, in_place_error, shown
from sanc.functions.differences import SCHEMES, DifferenceOracle
from sanc.functions.oracle import CallableOracle, pair
from sanc.functions.secant import MAX_SECANT_VARIABLES, SecantOracle
from sanc.functions.with_jax import JAX_REMEDY, holds_jax_arrays, is_from_jax, jax_array, jax_derivatives
from sanc.minimisation.arguments import require_call
from sanc.minimisation.trees import Tree, is_tree, map_tree, tree_leaves
from sanc.sums.linear import FiniteSum
from sanc.sums.oracle import SumOracle, require_sum

Unflatten = Callable[[Any], Any]
"""Converts a flat vector to the caller's form: an array or tensor of the same shape."""


def build_oracle(
    fun: Any,
    x0: Any,
    *,
    jac: Callable[..., Any] | bool | str | None,
    hess: Callable[..., Any] | str | None,
    hessp: Callable[..., Any] | None,
    args: tuple[Any, ...],
    hvp: HvpMode = "auto",
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    seed: int = 0,
    sampling: Literal["uniform", "buffered"] = "uniform",
    grow: bool = False,
    name: str = "x0",
) -> tuple[Oracle, Vector, Unflatten]:
    """Return the oracle of `fun`, the flat starting point, and the function that restores the caller's form.

    A `FiniteSum` is sampled. Evaluations of an `Oracle` are cached. A function with `jac` is called with its
    derivatives. A function without `jac` is differentiated by torch. A tree is flattened, and the functions are called
    with trees.
    """
    if not isinstance(args, tuple):
        args = (args,)
    if callable(fun) and not isinstance(fun, FiniteSum | Oracle):
        _check_derivatives(jac, hess, hessp, args)
    if callable(fun) and (jac is None or jac is False) and hess is None and hessp is None:
        if is_of_jax(fun, x0, args):
            x0 = _mapped(jax_array, x0)
        if holds_jax_arrays(x0):
            jac, hessp = jax_derivatives(fun)
    if is_tree(x0) and not isinstance(fun, FiniteSum | Oracle):
        tree = Tree(x0, name)
        value, gradient, matrix, product = _flat_functions(tree, fun, jac, hess, hessp)
        oracle, flat, unflatten_vector = build_oracle(
            value, tree.flat, jac=gradient, hess=matrix, hessp=product, args=args, hvp=hvp, name=name
        )
        return oracle, flat, lambda v: tree.build(unflatten_vector(v))
    if callable(x0) and not isinstance(x0, Tensor) and name == "x0":
        raise ArgumentTypeError(f"x0 = {shown(x0)} is a function: pass the function first, then the starting point.")
    start = checked_point(x0, name)
    unflatten = _unflattener(start)
    derivatives = {"jac": jac, "hess": hess, "hessp": hessp}
    if isinstance(fun, Oracle):
        _check_oracle(fun, start, name, args, derivatives)
        return CachedOracle(fun), _vector_in(fun.space, start), unflatten
    if isinstance(fun, FiniteSum):
        _check_sum_arguments(fun, start, name, args, derivatives)
        array = start.detach().cpu().numpy() if isinstance(start, Tensor) else start
        return SumOracle(fun, sizes, seed, sampling, grow=grow), np.array(array, fun.dtype).reshape(-1), unflatten
    if not callable(fun):
        raise ArgumentTypeError(f"fun = {shown(fun)} cannot be called: pass a function or a sanc.problems.FiniteSum.")
    return *_oracle_of_function(fun, start, derivatives, args, hvp), unflatten


def _oracle_of_function(
    fun: Callable[..., Any], start: Any, derivatives: Mapping[str, Any], args: tuple[Any, ...], hvp: HvpMode
) -> tuple[Oracle, Vector]:
    """Return the oracle of a function, which differentiates it if `jac` is missing, and the start as a flat vector."""
    jac, hess = derivatives["jac"], derivatives["hess"]
    if jac is None or jac is False:
        leaf = start if isinstance(start, Tensor) else torch.from_numpy(np.array(start))
        array = None if isinstance(start, Tensor) else start
        torch_oracle = _torch_oracle(_with_remedies(fun, array), leaf, args, hvp)
        return torch_oracle, torch_oracle.read_point()
    flat = start.detach().clone().reshape(-1) if isinstance(start, Tensor) else np.array(start).reshape(-1)
    if isinstance(jac, str):
        scheme = _require_scheme("jac", jac)
        kind = SecantOracle if scheme != "cs" and len(flat) <= MAX_SECANT_VARIABLES else DifferenceOracle
        return kind(fun, start, scheme=scheme, args=args), flat
    matrix = None if isinstance(hess, str) else hess  # products are differences of gradients
    return CallableOracle(fun, start, jac=jac, hess=matrix, hessp=derivatives["hessp"], args=args), flat


def _vector_in(space: Any, point: Any) -> Vector:
    """Return a new flat vector of a space with the entries of a point."""
    tensor = point.detach() if isinstance(point, Tensor) else torch.from_numpy(np.array(point))
    if isinstance(space, NumpySpace):
        return np.array(tensor.cpu().numpy(), space.dtype).reshape(-1)
    return tensor.to(space.device, space.dtype, copy=True).reshape(-1)


def is_of_jax(fun: Any, x0: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function of an array of NumPy, or a tree of them, returns an array of JAX.

    If nothing has imported JAX, or the point holds tensors, the function is not called.
    """
    if not is_imported("jax") or any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(x0, "")):
        return False
    try:
        return holds_jax_arrays(fun(_mapped(np.array, x0), *args))
    except Exception:  # torch functions reject arrays of NumPy
        return False


def _mapped(function: Callable[[Any], Any], x0: Any) -> Any:
    """Return a function of an array, or the tree with the function of each leaf."""
    return map_tree(function, x0) if is_tree(x0) else function(x0)


def _unflattener(start: Any) -> Unflatten:
    """Return the function that converts a flat vector to the shape and kind of the starting point."""
    is_tensor = isinstance(start, Tensor)

    def unflatten(v: Any) -> Any:
        if isinstance(v, np.ndarray):
            array = v.reshape(start.shape).copy()
            return torch.from_numpy(array).to(start.device) if is_tensor else array
        tensor = v.detach().reshape(start.shape).clone()
        return tensor if is_tensor else tensor.cpu().numpy()

    return unflatten


def _check_sum_arguments(
    fun: FiniteSum, start: Any, name: str, args: tuple[Any, ...], derivatives: Mapping[str, Any]
) -> None:
    """Raise an error for arguments that do not fit a finite sum; the starting point has this `name`."""
    require_sum(fun)
    _check_fit(fun, fun.dim, start, name, args, derivatives)


def _check_oracle(fun: Oracle, start: Any, name: str, args: tuple[Any, ...], derivatives: Mapping[str, Any]) -> None:
    """Raise an error for an oracle of the caller that lacks something, and for arguments that do not fit it."""
    missing = [member for member in ("space", "meter") if not hasattr(fun, member)]
    if missing:
        raise ArgumentTypeError(
            f"fun = {shown(fun)} has no {' and no '.join(missing)}: set self.space = sanc.extend.NumpySpace(n, dtype), "
            "or Space(n, dtype, device), and self.meter = sanc.extend.Meter() in its constructor."
        )
    if not fun.exact:
        raise ArgumentError(
            f"fun = {shown(fun)} draws samples: set exact = True if it evaluates the whole objective, or pass a "
            "sanc.problems.FiniteSum."
        )
    _check_fit(fun, fun.space.dim, start, name, args, derivatives)


def _check_fit(
    fun: Any, dim: int, start: Any, name: str, args: tuple[Any, ...], derivatives: Mapping[str, Any]
) -> None:
    """Raise an error for derivatives and arguments beside an objective that has its own, or for another dimension."""
    for label, derivative in derivatives.items():
        if derivative is not None:
            raise ArgumentError(f"{label} is given although {type(fun).__name__} computes it: leave it out.")
    if args:
        raise ArgumentError(f"args = {shown(args)} cannot be used with {type(fun).__name__}: leave it out.")
    size = math.prod(start.shape)
    if size != dim:
        raise ArgumentError(f"{name} has {size} entries and the problem {dim} variables: pass one entry per variable.")


def _check_derivatives(jac: Any, hess: Any, hessp: Any, args: tuple[Any, ...]) -> None:
    """Raise an error for derivatives of a function that cannot be called or combined."""
    if isinstance(hess, str):
        _require_scheme("hess", hess)
        hess = None
    if isinstance(hess, HessianUpdateStrategy):
        raise ArgumentTypeError(
            f"hess = {type(hess).__name__}() is an update of SciPy's methods: leave it out, since products are then "
            "differences of gradients, or pass the Hessian as a function."
        )
    for label, derivative in (("hess", hess), ("hessp", hessp)):
        if derivative is not None and not callable(derivative):
            raise ArgumentTypeError(f"{label} = {shown(derivative)} cannot be called: pass a function.")
    has_second = hess is not None or hessp is not None
    if jac is None or jac is False:
        if has_second:
            raise ArgumentError("jac is missing although hess or hessp is given: pass the gradient as jac too.")
    elif isinstance(jac, str):
        _require_scheme("jac", jac)
        if has_second:
            raise ArgumentError(
                f"jac = {jac!r} cannot be combined with hess or hessp: pass the gradient as a function too."
            )
    elif jac is not True and not callable(jac):
        raise ArgumentTypeError(f"jac = {shown(jac)} cannot be called: pass a function, or True if fun returns (f, g).")
    for label, derivative, vectors in (("jac", jac, "x"), ("hess", hess, "x"), ("hessp", hessp, "x, v")):
        if callable(derivative):
            require_call(label, derivative, vectors, args)


@contextmanager
def torch_modes(oracle: Oracle) -> Iterator[None]:
    """Run the iteration without autocast and with gradients enabled, whatever the modes around the call.

    Inside a torch function the caller's autocast holds. Gradients are enabled because a function may itself minimise
    another one while its value is computed without a graph.
    """
    if not isinstance(oracle, AutogradOracle):
        yield
        return
    with full_precision(oracle.leaves.device), torch.enable_grad():
        yield


def _require_scheme(name: str, scheme: str) -> Any:
    """Return a finite-difference scheme; raise an error if it is not known."""
    if scheme not in SCHEMES:
        raise ArgumentError(f"{name} = {scheme!r} is not known: pass a function, or one of {', '.join(SCHEMES)}.")
    return scheme


def _flat_functions(tree: Tree, fun: Any, jac: Any, hess: Any, hessp: Any) -> Iterator[Any]:
    """Yield functions of a flat vector for functions of a tree; a Hessian is in the order of the flat vector."""

    def value(x: Any, *args: Any) -> Any:
        returned = fun(tree.build(x), *args)
        if jac is True:
            f, g = pair(returned)
            return f, tree.flatten(g, "fun")
        return returned

    def gradient(x: Any, *args: Any) -> Any:
        return tree.flatten(jac(tree.build(x), *args), "jac")

    def matrix(x: Any, *args: Any) -> Any:
        return hess(tree.build(x), *args)

    def product(x: Any, v: Any, *args: Any) -> Any:
        return tree.flatten(hessp(tree.build(x), tree.build(v), *args), "hessp")

    for function, flat in ((fun, value), (jac, gradient), (hess, matrix), (hessp, product)):
        yield flat if callable(function) else function


def _torch_oracle(fun: Callable[..., Tensor], x0: Tensor, args: tuple[Any, ...], hvp: HvpMode) -> AutogradOracle:
    """Return the oracle that differentiates a torch function of one tensor automatically."""
    leaf = x0.detach().clone().requires_grad_()
    oracle = AutogradOracle(Leaves([leaf], [0.0]), hvp=hvp, exact=True)
    sample = Sample("fun", [(1.0, lambda: fun(leaf, *args))], 1, seed=None)
    oracle.bind(sample, sample, sample)
    return oracle


def _with_remedies(fun: Callable[..., Any], array: Any) -> Callable[..., Tensor]:
    """Wrap `fun` so that errors of functions that torch cannot differentiate have a remedy.

    `array` is the starting point, or None if that is a tensor.
    """

    def wrapped(x: Tensor, *args: Any) -> Tensor:
        remedy = 'write it with torch operations, or pass its gradient as jac, or jac="3-point" for differences'
        try:
            value = fun(x, *args)
        except (RuntimeError, TypeError) as error:
            if is_from_jax(error):
                raise _jax_error(fun, array, args) from error
            if "in-place" in str(error):
                raise in_place_error(error) from error
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            if "numpy" in str(error).lower() or frames[-1].f_globals.get("__name__", "").startswith("numpy."):
                raise ArgumentTypeError(f"fun is no torch function ({error}): {remedy}.") from error
            if any(word in str(error) for word in ("same dtype", "scalar type")):
                error.add_note(f"x0 is {x.dtype}: convert it, or the data of fun, so that both have the same type.")
            raise
        if isinstance(value, tuple | list | dict) or value is None:
            raise ArgumentTypeError(
                f"fun returned {shown(value)}, of type {type(value).__name__}: return the value alone, as a tensor of "
                "one entry; jac=True means that fun returns the pair of value and gradient."
            )
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"fun returned {type(value).__name__} for a torch tensor, so it cannot be differentiated: {remedy}."
            )
        return value

    return wrapped


def _jax_error(fun: Callable[..., Any], array: Any, args: tuple[Any, ...]) -> ArgumentTypeError:
    """Return the error for a function of JAX that JAX cannot differentiate; `array` is None if x0 is a tensor."""
    if array is None:
        return ArgumentTypeError(
            "fun is a function of JAX, and x0 is a tensor: pass jax.numpy.asarray(x0), so that JAX differentiates fun, "
            "or its gradient as jac."
        )
    try:
        returned = fun(array.copy(), *args)
    except Exception as error:
        return ArgumentTypeError(
            f"fun is a function of JAX, and fails for an array of NumPy ({first_line(error)}): compute with "
            "jax.numpy, or pass the gradient as jac."
        )
    return ArgumentTypeError(f"fun returned {shown(returned)}, of type {type(returned).__name__}: {JAX_REMEDY}.")


def checked_point(x0: Any, name: str) -> Any:
    """Return the point as a tensor or array of float32 or float64, after checks."""
    if isinstance(x0, Tensor):
        if x0.dtype not in (torch.float32, torch.float64):
            if x0.is_complex() or x0.is_floating_point():
                raise ArgumentTypeError(f"{name} is of {x0.dtype}: pass float32 or float64.")
            x0 = x0.double()
        if x0.layout != torch.strided or x0.device.type == "meta":
            raise ArgumentTypeError(f"{name} is a tensor of {x0.layout} on {x0.device}: pass a dense one with values.")
        finite, size = bool(torch.isfinite(x0).all()), x0.numel()
    else:
        try:
            array = np.asarray(x0)
            if array.dtype == object:
                numbers = [float(entry + 0) for entry in array.flat]  # text does not add to a number
                array = np.array(numbers).reshape(array.shape)
            if array.dtype.kind not in "fiub" or np.ma.is_masked(x0):
                raise TypeError("not real numbers, or masked")
            x0 = array if array.dtype == np.float32 else array.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ArgumentTypeError(f"{name} = {shown(x0)} is not an array of real numbers: pass one.") from None
        finite, size = bool(np.isfinite(x0).all()), x0.size
    if size == 0:
        raise ArgumentError(f"{name} is empty: pass at least one variable.")
    if not finite:
        raise ArgumentError(f"{name} holds NaN or infinity: pass finite numbers.")
    return x0
