"""`least_squares`, with the interface of SciPy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, Never, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from sanc.autograd.guards import runs_uncompiled
from sanc.core.acceptance import RatioTest
from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.runs.callbacks import asks_to_stop
from sanc.core.runs.limits import Limits
from sanc.core.runs.loop import run_to_end
from sanc.core.runs.reporting import unscaled_certificate
from sanc.core.runs.run import Run
from sanc.core.runs.status import Status
from sanc.core.sigma import SigmaUpdate
from sanc.core.space import Floats
from sanc.core.units import default_tolerance
from sanc.errors import ArgumentError, ArgumentTypeError, is_number, require, require_integer, require_positive, shown
from sanc.functions.differences import SCHEMES
from sanc.leastsquares.accelerated import CountingRatioTest
from sanc.leastsquares.jacobian_model import GaussNewtonSigma, JacobianModel
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.network_model import NetworkModel
from sanc.leastsquares.oracle import ResidualOracle, residual_oracle
from sanc.leastsquares.residual_variables import ResidualVariables
from sanc.leastsquares.residuals import Residuals
from sanc.leastsquares.variables import Variables
from sanc.minimisation.arguments import check_callback, reject_arguments, require_call
from sanc.minimisation.bounds import apply_bounds, bounded_entries
from sanc.minimisation.objective import checked_point
from sanc.minimisation.preconditioners import build_factor
from sanc.minimisation.reporting import certify, ending_message
from sanc.minimisation.result import LeastSquaresResult, PointT, cause_of_start
from sanc.minimisation.trees import Tree, is_tree
from sanc.options import LeastSquaresArguments
from sanc.presets import PRESETS

_DIFFERENCE_TOLERANCE = 1e-6
"""Default tolerance for Jacobians by differences, whose relative error is 1.5e-8 ("2-point") or 4e-11 ("3-point")."""


Jacobian = Callable[..., Any] | str | None
"""`jac` of `least_squares`."""


@overload
def least_squares(
    fun: Callable[..., Any],
    x0: PointT,
    jac: Jacobian = ...,
    bounds: Any = ...,
    **others: Unpack[LeastSquaresArguments],
) -> LeastSquaresResult[PointT]: ...
@overload
def least_squares(
    fun: Callable[..., Any],
    x0: float | Sequence[float],
    jac: Jacobian = ...,
    bounds: Any = ...,
    **others: Unpack[LeastSquaresArguments],
) -> LeastSquaresResult[NDArray[Any]]: ...
@overload
def least_squares(
    fun: Callable[..., Any], x0: Any, jac: Jacobian = ..., bounds: Any = ..., **others: Unpack[LeastSquaresArguments]
) -> LeastSquaresResult[Any]: ...
@runs_uncompiled
def least_squares(
    fun: Callable[..., Any],
    x0: Any,
    jac: Jacobian = None,
    bounds: Any = None,
    *,
    loss: str | Callable[..., Any] = "linear",
    f_scale: float = 1.0,
    tol: float | None = None,
    max_iter: int | None = 10_000,
    max_nfev: int | None = None,
    max_time: float | None = None,
    certify: bool = True,
    seed: int = 0,
    callback: Callable[..., Any] | None = None,
    precond: Any = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    **others: Never,
) -> LeastSquaresResult[Any]:
    """Minimise the sum of squares of residuals, or a robust loss of them, to a second-order point.

    The cost is ½ Σ r_i(x)², or ½ C² Σ φ((r_i/C)²) with C = `f_scale`. The run is that of `minimize`, in variables
    scaled by the column norms of the Jacobian.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` returns the residuals, an array or tensor of any shape.
    x0 : array, Tensor or pytree of these
        The starting point. If it is a tensor or a tree of tensors, torch differentiates `fun`.
    jac : callable or {"2-point", "3-point", "cs"}, optional
        The Jacobian ``jac(x, *args)``: a matrix, a sparse matrix or a `scipy.sparse.linalg.LinearOperator`, with a row
        for each residual; or a scheme of differences. By default automatic differentiation for tensors and "3-point"
        for arrays.
    bounds : optional
        `scipy.optimize.Bounds`, or a pair (lower, upper) of arrays, numbers or trees like `x0`. `fun` and `jac` are not
        evaluated outside.
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        φ, by SciPy's definitions. A callable gets the array z = (r/C)² and returns φ, φ' and φ'' as three rows.
    f_scale : float
        C, the residual from which an observation is an outlier. It has no effect on "linear".
    tol : float, optional
        Tolerance on the cosine between residuals and columns of the Jacobian: stop if ‖g‖ ≤ tol ‖φ'r‖ in scaled
        variables, and λ_min ≥ −√tol there. The run stops, too, if the model predicts a relative decrease of the cost
        below (30 tol)², and 1e-13 at most. By default 1e-8, 1e-4 in float32, and 1e-6 for differences.
    max_iter, max_nfev, max_time : number, optional
        Limits on iterations, calls of `fun` and seconds, checked between iterations.
    certify : bool
        Compute the certificate of the final point; see `minimize`.
    seed : int
        Seed of the random start of certificates.
    callback : callable, optional
        Called as ``callback(x)`` after each iteration; True or StopIteration ends the run.
    precond : array, Tensor, sparse matrix, LinearOperator or callable, optional
        A symmetric positive definite preconditioner M, an approximation of the inverse Hessian: a matrix, its diagonal,
        or the product ``precond(v)`` with flat vectors. The steps are those of r(Lz) with M = LLᵀ, instead of those in
        scaled variables, so that Krylov space, step norm and escape are in the norm √(xᵀM⁻¹x). SciPy's `x_scale` is
        ``precond=x_scale**2``. `tol` and the certificate do not change. It cannot be used with bounds; the parameters
        of a network need its diagonal.
    args, kwargs
        Further arguments of `fun` and `jac`.

    Returns
    -------
    LeastSquaresResult
        SciPy's entries: x, cost, fun (residuals), jac (Jacobian), grad, optimality, active_mask, nfev, njev, status (a
        `Status`), message, success. Also nit, nhev, history, certificate (in scaled variables) and second_order
        (whether the last model had the second-order term); with bounds active, multipliers and weakly_active. Calls of
        `fun` for differences count in nfev; those of the certificate do not count.

    Notes
    -----
    The solution has no graph: tensors that `fun` reads get no gradient. ``sanc.argmin(fun, x0, theta,
    method="least_squares")`` returns it with derivatives with respect to `theta`.

    Examples
    --------
    >>> import torch, sanc
    >>> t = torch.linspace(0, 1, 20, dtype=torch.float64)
    >>> res = sanc.least_squares(lambda b: b[0] * torch.exp(b[1] * t) - 3 * torch.exp(-2 * t), torch.ones(2).double())
    >>> res.success, [round(b, 6) for b in res.x.tolist()]
    (True, [3.0, -2.0])
    """
    if others:
        reject_arguments("least_squares", others, inspect.signature(least_squares).parameters)
    if not callable(fun):
        raise ArgumentTypeError(f"fun = {shown(fun)} cannot be called: pass a function.")
    check_callback(callback, 1, "pass a function of the point, called as callback(x)")
    if jac is not None and not callable(jac) and not (isinstance(jac, str) and jac in SCHEMES):
        raise ArgumentError(f"jac = {shown(jac)} is not known: pass a function, or one of {', '.join(SCHEMES)}.")
    require_positive("tol", tol, optional=True)
    require_integer("seed", seed, 0)
    limits = Limits.of_arguments(tol=0.0, max_iter=max_iter, max_nfev=max_nfev, max_time=max_time, certify=certify)
    measure = Loss(loss, f_scale)
    points = _Points(x0)
    args = args if isinstance(args, tuple) else (args,)
    function, jacobian = _with_keywords(fun, jac, args, kwargs)
    residuals = Residuals(function, points.build, points.is_torch, jacobian, args)
    if residuals.jac == "cs" and points.is_torch:
        raise ArgumentError('jac = "cs" cannot be used with tensors: leave jac out, and torch differentiates fun.')
    oracle = ResidualOracle(residuals, points.flat, measure, _tolerance(tol, points.flat, residuals))
    method = _method(JacobianModel if residuals.network is None else NetworkModel)
    box, x, method = apply_bounds(_scipy_bounds(bounds, x0, points.flat), x0, oracle, points.flat, method)
    residuals.box = box
    if precond is not None:
        oracle = oracle.in_variables(Variables(_factor(precond, oracle, points, box), is_preconditioned=True))
        x = oracle.scaled(x)
    iteration = Iteration(method, seed, evaluates_next_gradient=True)
    run = Run(oracle, iteration, limits, x, seed, ResidualVariables.of(oracle), box)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        status = _run(run, _reporter(callback, points))
        return _result(run, status, points)


def _run(run: Run, report: Callable[[Run], bool]) -> Status:
    """Iterate until the run ends; a start whose residuals or Jacobian are not finite is an ending, too."""
    evaluation = residual_oracle(run.oracle).evaluation(run.full_x)
    if not math.isfinite(evaluation.terms.cost):
        return Status.NOT_FINITE
    run.variables.prepare(run)
    return run_to_end(run, report)


class _Points:
    """The form of the caller's points: arrays, tensors or trees, and their flat vectors."""

    def __init__(self, x0: Any) -> None:
        self._tree = Tree(x0, "x0") if is_tree(x0) else None
        start = checked_point(x0 if self._tree is None else self._tree.flat, "x0")
        self.is_torch = isinstance(start, Tensor)
        self._device = start.device if isinstance(start, Tensor) else None
        self._shape = tuple(start.shape)
        array = start.detach().cpu().numpy() if isinstance(start, Tensor) else start
        self.flat: Floats = np.array(array).reshape(-1)

    def tensor(self, flat: Floats) -> Tensor:
        """Return a flat array as a tensor on the device of x0."""
        return torch.from_numpy(flat.copy()).to(self._device)

    def build(self, flat: Any) -> Any:
        """Return a flat array or tensor in the form of x0."""
        if self.is_torch:
            flat = self.tensor(flat) if isinstance(flat, np.ndarray) else flat.to(self._device)
        else:
            flat = flat.copy()
        shaped = flat.reshape(self._shape)
        return shaped if self._tree is None else self._tree.build(shaped)


def _with_keywords(fun: Any, jac: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Return the functions with their keyword arguments, after checks that they can be called with all arguments."""
    if kwargs:
        require(isinstance(kwargs, Mapping), "kwargs", kwargs, "pass a mapping of names to values")
    for name, function in (("fun", fun), ("jac", jac)):
        if callable(function):
            require_call(name, function, "x", args, kwargs)
    if not kwargs:
        return fun, jac
    keywords = dict(kwargs)

    def bound(function: Any) -> Any:
        return lambda x, *args: function(x, *args, **keywords)

    return bound(fun), bound(jac) if callable(jac) else jac


def _tolerance(tol: float | None, x: Floats, residuals: Residuals) -> float:
    """Return the tolerance given, or the default for the precision of x and the kind of Jacobian."""
    if tol is not None:
        require(is_number(tol) and tol < 1.0, "tol", tol, "pass a number below 1, the cosine of an angle")
        return float(tol)
    default = default_tolerance(float(np.finfo(x.dtype).eps))
    return max(default, _DIFFERENCE_TOLERANCE if residuals.is_differenced and residuals.jac != "cs" else 0.0)


@cache
def _method(kind: type[JacobianModel]) -> Method:
    """Return the default method with a model of dense Jacobians."""
    robust = PRESETS["robust"]
    model = kind.of(robust.model)
    sigma = GaussNewtonSigma(**{item.name: getattr(robust.sigma, item.name) for item in fields(SigmaUpdate)})
    acceptance: Any = robust.acceptance
    if kind is JacobianModel:
        acceptance = CountingRatioTest(**{item.name: getattr(acceptance, item.name) for item in fields(RatioTest)})
    return replace(robust, model=model, minibatch=None, sigma=sigma, acceptance=acceptance)


def _factor(precond: Any, oracle: ResidualOracle, points: _Points, box: Any) -> Floats:
    """Return the factor L of a preconditioner, or its diagonal."""
    if box is not None:
        raise ArgumentError("precond cannot be used with bounds: leave one of them out.")
    if points.is_torch and callable(precond) and not isinstance(precond, LinearOperator | Tensor):
        product, precond = precond, lambda v: product(points.tensor(v))
    factor: Floats = build_factor(precond, oracle.space).matrix.numpy()
    if factor.ndim > 1 and oracle.residuals.network is not None:
        raise ArgumentError(
            "precond is a matrix, and fun are the residuals of a network: pass the diagonal of precond."
        )
    return factor


def _scipy_bounds(bounds: Any, x0: Any, flat: Floats) -> Any:
    """Return bounds in the form of `minimize`: a pair is one lower and one upper side, as in SciPy's least_squares."""
    if bounds is None or isinstance(bounds, Bounds) or is_tree(x0):
        return bounds
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ArgumentError(
            f"bounds = {shown(bounds)} is no pair: pass (lower, upper), each a number or an array like x0, or "
            "scipy.optimize.Bounds."
        )
    sides = []
    for side, unbounded in zip(bounds, (-np.inf, np.inf), strict=True):
        array = side.detach().cpu().numpy() if isinstance(side, Tensor) else side
        array = np.asarray(unbounded if array is None else array)
        if array.dtype == object:
            array = np.array([unbounded if entry is None else entry for entry in array.reshape(-1)])
        if array.size not in (1, flat.size) or array.dtype.kind not in "fiub":
            raise ArgumentError(
                f"bounds has {array.size} entries on one side for {flat.size} variables: pass (lower, upper), each a "
                "number or an array like x0."
            )
        sides.append(np.broadcast_to(array.reshape(-1), flat.size).astype(np.float64))
    if flat.size == 2 and any(sides[0] == sides[1]):
        raise ArgumentError(
            f"bounds = {shown(bounds)} would fix a variable as (lower, upper), the form of SciPy's least_squares: pass "
            "scipy.optimize.Bounds(lower, upper), so that two variables are not mistaken for two sides."
        )
    return Bounds(*sides)


def _reporter(callback: Callable[..., Any] | None, points: _Points) -> Callable[[Run], bool]:
    """Return the function that calls the callback after an iteration, and returns whether to stop."""

    def report(run: Run) -> bool:
        if callback is None:
            return False
        return asks_to_stop(callback, points.build(residual_oracle(run.oracle).unscaled(run.full_x)))

    return report


def _result(run: Run, status: Status, points: _Points) -> LeastSquaresResult[Any]:
    """Return the result of a run, in the caller's variables."""
    oracle, z = residual_oracle(run.oracle), run.full_x
    meter = oracle.meter
    counts = {"nfev": meter.nfev, "njev": meter.njev, "nhev": meter.nhev, "calls": meter.snapshot()}
    evaluation = oracle.evaluation(z) if status is Status.NOT_FINITE else oracle.with_jacobian(z)
    certify(run, status, run.oracle)
    cause = cause_of_start(status, residuals=evaluation.r, cost=evaluation.terms.cost, Jacobian=evaluation.jacobian)
    g = np.full_like(evaluation.x, np.nan) if evaluation.jacobian is None else evaluation.gradient()
    active = np.zeros(len(g), int)
    if run.box is not None:
        space = oracle.space
        active = run.box.active(space.tensor(z), space.tensor(g)).numpy().astype(int)
    held = ((active == -1) & (g >= 0.0)) | ((active == 1) & (g <= 0.0))
    result: LeastSquaresResult[Any] = LeastSquaresResult(
        x=points.build(evaluation.x),
        cost=evaluation.terms.cost,
        fun=_like(evaluation.r, points),
        jac=_like(evaluation.jacobian, points),
        grad=_like(g, points),
        optimality=float(np.max(np.where(held, 0.0, np.abs(g)))),
        active_mask=active,
        success=status.success,
        status=status,
        message=ending_message(run, status, cause),
        nit=run.iterations,
        history=run.history,
        certificate=unscaled_certificate(run.findings.certificate, run.exponent),
        second_order=oracle.term.is_used,
        **counts,
    )
    if run.box is not None:
        entries = bounded_entries(run, lambda v: points.build(v))
        entries["multipliers"] = points.build(np.where(active != 0, g, 0.0))
        result.update(entries)
    return result


def _like(array: Any, points: _Points) -> Any:
    """Return an array as a tensor if the points are tensors."""
    return torch.from_numpy(np.array(array)) if points.is_torch and isinstance(array, np.ndarray) else array
