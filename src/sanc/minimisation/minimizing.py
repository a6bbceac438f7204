"""`minimize`, with the interface of SciPy, and a method for `scipy.optimize.minimize`."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import HessianUpdateStrategy, OptimizeWarning

from sanc.autograd.guards import runs_uncompiled
from sanc.autograd.precision import callers_precision
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.protocol import IterationProtocol
from sanc.core.record import Branch
from sanc.core.runs.callbacks import asks_to_stop
from sanc.core.runs.limits import Limits
from sanc.core.runs.loop import run_to_end
from sanc.core.runs.resume import resume_run, save_run
from sanc.core.runs.run import Run
from sanc.core.runs.status import Status
from sanc.core.units import default_tolerance
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    is_number,
    one_of,
    require,
    require_bool,
    require_integer,
    require_positive,
    shown,
    warn,
)
from sanc.functions.differences import SCHEMES
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minimisation.arguments import check_callback, require_call
from sanc.minimisation.bounds import apply_bounds, bounded_entries, bounded_sentence
from sanc.minimisation.objective import Unflatten, build_oracle, is_of_jax, torch_modes
from sanc.minimisation.preconditioners import precondition
from sanc.minimisation.result import PointT, Result, cause_of_start
from sanc.options import MinimizeArguments, MinimizeOptions
from sanc.presets import compose, reject_sample_settings, with_matrices, with_options
from sanc.ranks.compare import compare_call
from sanc.ranks.group import Ranks, find_ranks
from sanc.ranks.sums import SharedSum
from sanc.sums.linear import FiniteSum
from sanc.sums.oracle import SumOracle, require_sum

__all__ = ["Status", "minimize", "scipy_method"]

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

_DIFFERENCE_TOLERANCES = {"2-point": 1e-5, "3-point": 1e-6}
"""Default tolerances for gradients by differences, with errors of about √eps = 1.5e-8 and eps^(2/3) = 4e-11."""


def _accepts_options(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that also accepts its arguments as entries of `options`, and by the names of SciPy."""
    names, call = list(inspect.signature(function).parameters), cast("Callable[..., T]", function)
    positional = names[: names.index("options") + 1]

    @wraps(function)
    def with_options(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = dict(zip(positional, args, strict=False)) | kwargs
        fits = len(arguments) == len(args) + len(kwargs)  # otherwise the call raises an error
        if fits and (arguments.get("options") is not None or _SCIPY_NAMES.keys() & kwargs.keys()):
            return call(**_merge_options(arguments))
        return function(*args, **kwargs)

    return with_options


JacArgument = Callable[..., Any] | bool | str | None
"""`jac` of `minimize`."""


@overload
def minimize(
    fun: Any,
    x0: PointT,
    args: tuple[Any, ...] = ...,
    method: str | Method | None = ...,
    jac: JacArgument = ...,
    **others: Unpack[MinimizeArguments],
) -> Result[PointT]: ...
@overload
def minimize(
    fun: Any,
    x0: float | Sequence[float],
    args: tuple[Any, ...] = ...,
    method: str | Method | None = ...,
    jac: JacArgument = ...,
    **others: Unpack[MinimizeArguments],
) -> Result[NDArray[Any]]: ...
@overload
def minimize(
    fun: Any,
    x0: Any,
    args: tuple[Any, ...] = ...,
    method: str | Method | None = ...,
    jac: JacArgument = ...,
    **others: Unpack[MinimizeArguments],
) -> Result[Any]: ...
@runs_uncompiled
@_accepts_options
def minimize(
    fun: Any,
    x0: Any,
    args: tuple[Any, ...] = (),
    method: str | Method | None = None,
    jac: JacArgument = None,
    hess: Callable[..., Any] | str | None = None,
    hessp: Callable[..., Any] | None = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    preset: str | Method = "robust",
    curvature_tol: float | None = None,
    max_iter: int | None = 10_000,
    max_nfev: int | None = None,
    max_calls: float | None = None,
    max_time: float | None = None,
    batch_size: int | None = None,
    hessian_batch_size: int | None = None,
    objective_batch_size: int | None = None,
    grow_samples: bool = False,
    seed: int = 0,
    hvp: HvpMode = "auto",
    certify: bool = True,
    max_products: int | None = None,
    disp: bool = False,
    resume: Mapping[str, Any] | None = None,
    process_group: Any = None,
    precond: Any = None,
    **settings: Unpack[MinimizeOptions],
) -> Result[Any]:
    """Find a second-order point of a smooth function or a finite sum.

    Parameters
    ----------
    fun : callable or FiniteSum
        A torch function ``fun(x, *args)`` of a tensor that returns a scalar tensor; or, with `jac`, any function that
        returns a number; or a finite sum from `sanc.problems`; or an `Oracle` of `sanc.extend`.
    x0 : array, Tensor or pytree of these
        The starting point, of any shape. It may be a nested dict, list or tuple of tensors. The functions are then
        called with the same structure, and ``res.x`` has it too.
    args : tuple
        Further arguments of `fun`, `jac`, `hess` and `hessp`.
    method : {"sanc", "scr", "arc", "cr", "crm", "ncd", "sgd"} or Method, optional
        Member of the family, composed from `preset`; by default "sanc". Or a composition of pieces, which replaces
        `preset`.
    jac, hess, hessp : callable, optional
        Gradient ``jac(x)`` (or True if `fun` returns both), Hessian ``hess(x)``, product ``hessp(x, v)``. Without `jac`
        torch differentiates `fun`, or JAX if `x0` or the value of `fun` are arrays of JAX. Without `hess` and `hessp`,
        or with the name of a scheme as `hess`, products are differences of `jac`. As `jac`, "2-point", "3-point" and
        "cs" (the complex step) compute the gradient from n, up to 2n and n evaluations of f, for functions that torch
        cannot differentiate. The steps of the first two are relative to max(1, ``|x_k|``), as in SciPy, so rescale
        variables far smaller than 1. Up to 100 variables a secant matrix then replaces the Hessian, except in the
        certificate.
    bounds : optional
        A (lower, upper) pair for each variable, `scipy.optimize.Bounds`, or a pair of arrays, tensors or trees like
        `x0`; None and infinite numbers are no bound, and equal ones fix a variable. A two-dimensional array has a pair
        in each row, as in SciPy. For two variables a pair of arrays or tensors is ambiguous and an error: pass
        ``Bounds(lower, upper)``. Nothing is evaluated outside, also not by differences. An `x0` outside is projected
        with a warning, but a fixed variable has to start at its value. The run ends at a second-order point of the
        bound-constrained problem: `tol` and the certificate refer to the free variables.
    constraints : optional
        Constraints other than bounds are an error.
    tol : float, optional
        Stop if ‖∇f‖₂ ≤ tol and λ_min ≥ −`curvature_tol`. By default 1e-8 in float64 and 1e-4 in float32. With `jac`
        "2-point" the default is 1e-5, with "3-point" 1e-6, and more if f is so large that rounding exceeds this. A run
        that stalls with a gradient within its rounding error has the default raised to that error.
    callback : callable, optional
        Called as ``callback(intermediate_result=...)``, ``callback(x)`` or ``callback(x, intermediate_result)`` after
        each iteration, depending on its arguments. StopIteration, or a return value of True, ends the run. The
        intermediate result has x, fun (on the objective sample; NaN if it was not evaluated), nit, record and state.
    options : mapping, optional
        More of the keyword arguments below, as in SciPy. SciPy's names are accepted here and as keyword arguments:
        maxiter (`max_iter`), maxfev and maxfun (`max_nfev`), gtol (`tol`, always of the 2-norm). Options of SciPy's
        other methods (eps, maxcor, return_all, …) give an `OptimizeWarning` here, and have no effect.
    preset : {"robust", "paper"} or Method
        The method whose pieces the member is composed from. "robust" has no constants to tune.
    curvature_tol : float, optional
        Largest −λ_min of a solution. By default √tol, or √(tol·L2) if f is small, with an estimate of the Lipschitz
        constant L2 of the Hessian at the first point.
    max_iter, max_nfev, max_calls, max_time : number, optional
        Limits on iterations, on evaluations of `fun`, on `paper_calls` and on seconds; None is no limit. They are
        checked between iterations. A certificate uses the remaining time, and at least one product.
    batch_size : int, optional
        Components in the gradient and Hessian samples of a finite sum; by default all.
    hessian_batch_size, objective_batch_size : int, optional
        Sizes of the Hessian sample (default `batch_size`) and of the sample for ρ (default all components). "robust"
        computes ρ on the gradient sample and accepts no `objective_batch_size`.
    grow_samples : bool
        With method "scr": enlarge the samples as steps become shorter.
    seed : int
        Seed of samples, random signs and random start vectors.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference"}
        How Hessian products of torch functions are computed. "auto" differentiates the gradient once more. If an
        operator has no second derivative, it warns and uses differences of gradients.
    certify : bool
        Compute the certificate of the final point, also if the run ended at a limit. Without it, a run whose gradient
        became small tests for negative curvature with 10 products, or a tenth of those it made. That test detects
        saddles unless their curvature is very weak, but it seldom certifies a second-order point.
    max_products : int, optional
        Largest number of Hessian products of one certificate.
    disp : bool
        Print a line for every iteration.
    resume : mapping, optional
        The ``state`` of an intermediate result that a callback received. With the same other arguments, the run
        continues from it bit for bit as the original run. Limits on iterations and calls include the earlier part.
    process_group : ProcessGroup, "default" or None
        The ranks of torch.distributed that hold the rows of a finite sum. Each rank passes the sum over its rows. All
        ranks return the result of one process with the rows of rank 0, then those of rank 1, and so on. "default" is
        the group that was initialised; None: each rank runs independently.
    precond : array, Tensor, sparse matrix, LinearOperator or callable, optional
        A symmetric positive definite preconditioner M, an approximation of the inverse Hessian as in
        `scipy.sparse.linalg.cg`: a matrix, its diagonal, or the product ``precond(v)`` with flat vectors. The steps are
        those of f(Ly) with M = LLᵀ, so that Krylov space, step norm and escape are in the norm √(xᵀM⁻¹x). `tol` and the
        certificate refer to f. Operators and callables are formed as matrices, for 2,000 variables at most. It
        cannot be used with bounds, samples, `resume` and `process_group`.
    **settings
        Pieces (`model`, `acceptance`, `escape`, `sigma`, `minibatch`, `metric`, `step_size`, `average`) and their
        settings by name: sigma0, eta1, eta2, gamma, krylov_dim, lanczos … See `sanc.Method`.

    Returns
    -------
    Result
        A `scipy.optimize.OptimizeResult` that prints in a few lines, with x, fun, jac, success, status (a `Status`),
        message, nit, nfev, njev, nhev, history (list of `Record`), calls, certificate, and hvp (how torch computed the
        products; empty if it did not). With ``certify=False`` the certificate may be undecided, or None if the run
        ended before the test for negative curvature. The counts do not include the certificate. With bounds
        it also has active (−1 at the lower bound, 1 at the upper one, otherwise 0), multipliers (the gradient at active
        bounds, otherwise 0) and weakly_active (whether a variable at a bound has a multiplier of 0 up to `tol`).

    Examples
    --------
    >>> import torch, sanc
    >>> res = sanc.minimize(lambda x: (x[0] ** 2 - 1) ** 2 + x[1] ** 2, torch.zeros(2, dtype=torch.float64))
    >>> res.success, round(abs(float(res.x[0])), 6)
    (True, 1.0)
    >>> bounded = sanc.minimize(lambda x: ((x - 2) ** 2).sum(), torch.zeros(2), bounds=[(0, 1), (None, 3)])
    >>> bounded.x.tolist(), bounded.active.tolist(), bounded.multipliers.tolist()
    ([1.0, 2.0], [1, 0], [-2.0, 0.0])
    """
    _reject_constraints(constraints)
    composed = _compose_method(method, preset, settings)
    _check_choices(hvp, seed, resume, {"disp": disp, "grow_samples": grow_samples})
    fun, ranks = _objective_on_ranks(fun, process_group)
    sizes = _sample_sizes(fun, composed, batch_size, hessian_batch_size, objective_batch_size, grow_samples)
    if "sampling" in settings and not any(sizes):
        sampling = shown(settings["sampling"])
        raise ArgumentError(f"sampling = {sampling} has no effect without samples: pass batch_size, or leave it out.")
    on_samples = composed.on_samples and not grow_samples and any(size is not None for size in sizes)
    if not on_samples:
        reject_sample_settings(composed, settings)
    _reject_objective_sample(objective_batch_size if on_samples else None)
    _check_call(fun, args)
    derivatives: dict[str, Any] = {"jac": jac, "hess": hess, "hessp": hessp, "args": args, "hvp": hvp}
    samples: dict[str, Any] = {"sizes": sizes, "seed": seed, "sampling": composed.sampling, "grow": grow_samples}
    oracle, x, unflatten = build_oracle(fun, x0, **derivatives, **samples)
    composed = with_matrices(composed) if oracle.has_matrix else composed
    box, x, composed = apply_bounds(bounds, x0, oracle, x, composed)
    require_positive("tol", tol, optional=True)
    limits = Limits.of_arguments(
        tol=_default_tol(oracle, jac) if tol is None else tol,
        default_tol=tol is None,
        curvature_tol=curvature_tol,
        max_iter=max_iter,
        max_nfev=max_nfev,
        max_calls=max_calls,
        max_time=max_time,
        certify=certify,
        max_products=max_products,
    )
    if ranks is not None:
        compare_call(ranks, {"arguments": (composed, sizes, seed, limits), "bounds": box and box.as_lists()}, x)
    kind: type[Run] = Run
    if precond is not None:
        others = {"bounds": box, "samples": not oracle.exact or None, "resume": resume, "process_group": ranks}
        oracle, x, kind = precondition(precond, oracle, x, others)
    run = kind(oracle, _build_iteration(composed, oracle, seed, limits.tol, on_samples), limits, x, seed, box)
    if resume is not None:
        run = resume_run(run, resume)
    disp = disp and (ranks is None or ranks.rank == 0)
    run, status = _run_on_ranks(run, ranks, callback, unflatten, disp)
    result = _result(run, status, unflatten, fun)
    if disp:
        print(f"{result.message} f = {result.fun:.6e} after {result.nit} iterations.")
    return result


def _check_choices(hvp: Any, seed: Any, resume: Any, flags: Mapping[str, Any]) -> None:
    """Raise an error for arguments of a wrong type, or that are none of their choices."""
    one_of("hvp", hvp, HVP_MODES)
    for name, flag in flags.items():
        require_bool(name, flag)
    require_integer("seed", seed, 0)
    require(resume is None or isinstance(resume, Mapping), "resume", resume, "pass the state of an intermediate result")


def _reject_objective_sample(objective_batch_size: int | None) -> None:
    """Raise an error for the size of an objective sample where the ratio test has none."""
    if objective_batch_size is not None:
        raise ArgumentError(
            f"objective_batch_size = {objective_batch_size!r} cannot be used: the ratio test is on the gradient "
            'sample. Leave it out, or pass preset="paper".'
        )


def _build_iteration(method: Method, oracle: Oracle, seed: int, tol: float, on_samples: bool) -> IterationProtocol:
    """Return the iteration on samples, or that on whole objectives and on samples of the paper."""
    return (
        MinibatchIteration(method, seed)
        if on_samples
        else Iteration(method, seed, tol, evaluates_next_gradient=oracle.exact)
    )


def _run_on_ranks(
    run: Run, ranks: Ranks | None, callback: Callable[..., Any] | None, unflatten: Unflatten, disp: bool
) -> tuple[Run, Status]:
    """Iterate until the run ends, and return it and how it ended; all ranks make the same decisions."""
    report, clock = _reporter(callback, unflatten, disp), time.perf_counter
    if ranks is not None:  # clocks and callbacks differ between ranks, and the decisions from them must not
        report, clock = ranks.any_of(report) if callback else report, ranks.clock
    with torch_modes(run.unscaled_oracle):
        return run_to_end(run, report, clock)


def _objective_on_ranks(fun: Any, process_group: Any) -> tuple[Any, Ranks | None]:
    """Return the objective and the ranks that hold its rows; None if each rank runs independently."""
    if isinstance(fun, FiniteSum):
        require_sum(fun)
    ranks = find_ranks(process_group)
    if ranks is None:
        return fun, None
    if not isinstance(fun, FiniteSum):
        raise ArgumentError(
            f"process_group = {shown(process_group)} needs a finite sum whose rows lie on the ranks: pass a "
            "sanc.problems.FiniteSum, or process_group=None."
        )
    return SharedSum(fun, ranks), ranks


def _check_call(fun: Any, args: Any) -> None:
    """Raise an error if `fun` cannot be called with x and `args`, or if `args` was meant as another argument."""
    if isinstance(args, str) or callable(args) or (isinstance(args, list) and args and isinstance(args[0], tuple)):
        raise ArgumentTypeError(
            f"args = {shown(args)} is the third argument, a tuple of further arguments of fun: pass method, jac and "
            "bounds by name."
        )
    if isinstance(fun, type) and issubclass(fun, FiniteSum):
        raise ArgumentTypeError(f"fun = {fun.__name__} is a class: pass an object of it, such as {fun.__name__}(X, y).")
    if isinstance(fun, FiniteSum | Oracle) or not callable(fun):
        return
    require_call("fun", fun, "x", args if isinstance(args, tuple) else (args,))


def _default_tol(oracle: Oracle, jac: Any) -> float:
    """Return the default tolerance on the gradient norm, for the precision of the vectors and the scheme of `jac`."""
    return max(default_tolerance(oracle.space.eps), _DIFFERENCE_TOLERANCES.get(str(jac), 0.0))


def _compose_method(method: str | Method | None, preset: str | Method, settings: Mapping[str, Any]) -> Method:
    """Return the method with its settings: a member of the family, or the caller's composition."""
    if not isinstance(method, Method):
        return compose("sanc" if method is None else method, preset, settings, _argument_defaults())
    require(preset == "robust", "preset", preset, "leave it out beside a Method, which has all its pieces")
    return with_options(method, settings, _argument_defaults())


@cache
def _argument_defaults() -> dict[str, Any]:
    """Return names and defaults of the arguments of `minimize`, without `settings`."""
    return {name: p.default for name, p in inspect.signature(minimize).parameters.items() if name != "settings"}


def _merge_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `minimize`, `options` among them, by our names; one given twice is an error."""
    merged, defaults = dict(arguments), _argument_defaults()
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


def _reject_constraints(constraints: Any) -> None:
    """Raise an error for constraints other than bounds."""
    if constraints is not None and np.size(constraints) > 0:
        raise ArgumentError("constraints cannot be used: sanc minimises with bounds at most; leave them out.")


def _sample_sizes(
    fun: Any, method: Method, batch: int | None, hessian: int | None, objective: int | None, grow: bool
) -> tuple[int | None, int | None, int | None]:
    """Return the sizes of the samples of gradient, Hessian and objective; None is the whole sum."""
    arguments = {"batch_size": batch, "hessian_batch_size": hessian, "objective_batch_size": objective}
    if grow and (method.name != "scr" or batch is None):
        raise ArgumentError('grow_samples = True needs samples of method "scr": pass method="scr" and a batch_size.')
    for name, size in arguments.items():
        if size is None:
            continue
        if not isinstance(fun, FiniteSum):
            raise ArgumentError(f"{name} = {size!r} needs a finite sum to sample from: pass a sanc.problems.FiniteSum.")
        if method.exact:
            raise ArgumentError(f'{name} = {size!r} cannot be used with method="arc", which is exact: use "scr".')
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 1 <= size <= fun.n:
            raise ArgumentError(
                f"{name} = {size!r} does not fit the {fun.n} components: pass an integer from 1 to {fun.n}."
            )
    components = fun.n if isinstance(fun, FiniteSum) else None
    sizes = (batch, batch if hessian is None else hessian, objective)
    # A sample of all components is the sum itself.
    gradient_size, hessian_size, objective_size = (None if size == components else size for size in sizes)
    return gradient_size, hessian_size, objective_size


def _reporter(callback: Callable[..., Any] | None, unflatten: Unflatten, disp: bool) -> Callable[[Run], bool]:
    """Return the function that prints a line and calls the callback after an iteration, and returns whether to stop."""
    try:
        parameters = dict(inspect.signature(callback).parameters) if callable(callback) else {}
    except ValueError:  # some functions written in C have no signature
        parameters = {}
    by_name = set(parameters) == {"intermediate_result"}
    required = [p for p in parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    with_state = len(required) == 2  # callback(xk, state), as "trust-constr" calls it
    if not by_name:
        forms = "callback(x), callback(x, intermediate_result) or callback(intermediate_result=…)"
        check_callback(callback, 2 if with_state else 1, f"pass a function that is called as {forms}")

    def report(run: Run) -> bool:
        record = run.history[-1]
        if disp:
            print(
                f"{record.iteration:5d}  f = {record.value: .6e}  ‖g‖ = {record.grad_norm:.2e}  "
                f"λ1 = {record.ritz_value: .2e}  σ = {record.sigma:.1e}  {record.branch}"
            )
        if callback is None:
            return False
        if not (by_name or with_state):
            with callers_precision():
                return asks_to_stop(callback, unflatten(run.point))
        value = record.trial_value if record.branch is not Branch.STAYED else record.value
        if record.branch is Branch.STAYED and record.trials == 0 and not run.oracle.exact:
            value = math.nan  # the objective sample was not evaluated
        result: Result[Any] = Result(
            x=unflatten(run.point), fun=value, nit=run.iterations, record=record, state=save_run(run)
        )
        with callers_precision():
            if with_state:
                return asks_to_stop(callback, result.x, result)
            return asks_to_stop(callback, intermediate_result=result)

    return report


def _result(run: Run, status: Status, unflatten: Unflatten, fun: Any) -> Result[Any]:
    """Return the result of a run, with value, gradient and certificate of the whole objective."""
    oracle, meter = run.unscaled_oracle, run.oracle.meter
    # The counts of the run, without the evaluations below.
    counts = {"nfev": meter.nfev, "njev": meter.njev, "nhev": meter.nhev, "calls": meter.snapshot()}
    exact_oracle = oracle if oracle.exact else SumOracle(fun, (None, None, None), run.seed)
    value, g = exact_oracle.gradient(run.point)
    cause = cause_of_start(status, f=value, gradient=g)
    if run.certificate is None and run.limits.certify and status not in (Status.NOT_FINITE, Status.UNBOUNDED):
        run.certificate, _ = run.compute_certificate(
            run.oracle if oracle.exact else exact_oracle, run.limits.max_products, run.seed
        )
    return Result(
        x=unflatten(run.point),
        fun=value,
        jac=unflatten(g),
        success=status.success,
        status=status,
        message=f"{bounded_sentence(run, status)}{cause} {run.message}".rstrip(),
        nit=run.iterations,
        history=run.history,
        certificate=run.unscaled_certificate,
        hvp=oracle.hvp,
        **bounded_entries(run, unflatten),
        **counts,
    )


def scipy_method(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    jac: Any = None,
    hess: Any = None,
    hessp: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    callback: Callable[..., Any] | None = None,
    scheme: str | None = None,
    **options: Any,
) -> Result[Any]:
    """Run `sanc.minimize` as a custom method of SciPy.

    Pass it as ``scipy.optimize.minimize(fun, x0, jac=jac, hessp=hessp, method=sanc.scipy_method, options={...})``.
    `options` may hold every keyword argument of `sanc.minimize`, also ``method`` for a member of the family, and
    SciPy's names. Without `jac` JAX differentiates its functions, and the gradient of others is computed from
    differences of f.

    Parameters
    ----------
    fun, x0, args, jac, hess, hessp, bounds, constraints, callback
        What `scipy.optimize.minimize` passes on. They mean the same as in `sanc.minimize`. An update strategy as `hess`
        is not used: products are differences of gradients.
    scheme : {"3-point", "2-point", "cs"}, optional
        The differences if `jac` is no function; by default "3-point". SciPy does not pass on a scheme that is given as
        ``jac="2-point"``, so give it as ``options={"scheme": "2-point"}``.
    **options
        The `options` of `scipy.optimize.minimize`.

    Examples
    --------
    >>> import sanc
    >>> from scipy.optimize import minimize, rosen, rosen_der, rosen_hess_prod
    >>> res = minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, method=sanc.scipy_method)
    >>> res.success
    True
    """
    hess = None if isinstance(hess, HessianUpdateStrategy) else hess  # products replace the quasi-Newton update
    if (jac is None or jac is False) and (hess is None or isinstance(hess, str)) and hessp is None:
        is_automatic = scheme is None and hess is None and is_of_jax(fun, x0, args)
        jac = None if is_automatic else one_of("scheme", "3-point" if scheme is None else scheme, SCHEMES)
    derivatives = {"jac": jac, "hess": hess, "hessp": hessp}
    limits = {"bounds": bounds, "constraints": constraints}
    return minimize(fun, x0, args, callback=callback, **derivatives, **limits, options=options)
