"""`minimize`, with the interface of SciPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from sanc.autograd.guards import runs_uncompiled
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.protocol import IterationProtocol
from sanc.core.runs.limits import Limits
from sanc.core.runs.loop import run_to_end
from sanc.core.runs.reporting import unscaled_certificate
from sanc.core.runs.resume import resume_run
from sanc.core.runs.run import Run, RunVariables
from sanc.core.runs.status import Status
from sanc.core.runs.variables import PlainVariables
from sanc.core.units import default_tolerance
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    one_of,
    require,
    require_bool,
    require_integer,
    require_positive,
    shown,
)
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minimisation.arguments import require_call
from sanc.minimisation.bounds import apply_bounds, bounded_entries
from sanc.minimisation.objective import Unflatten, build_oracle, torch_modes
from sanc.minimisation.preconditioners import precondition
from sanc.minimisation.reporting import certify, ending_message, reporter
from sanc.minimisation.result import PointT, Result, cause_of_start
from sanc.minimisation.samples import objective_on_ranks, reject_objective_sample, sample_sizes
from sanc.minimisation.scipy_names import accepts_options, argument_defaults
from sanc.options import MinimizeArguments, MinimizeOptions
from sanc.presets import compose, reject_sample_settings, with_matrices, with_options
from sanc.ranks.compare import compare_call
from sanc.ranks.group import Ranks
from sanc.sums.linear import FiniteSum
from sanc.sums.oracle import SumOracle

__all__ = ["Status", "minimize"]

_DIFFERENCE_TOLERANCES = {"2-point": 1e-5, "3-point": 1e-6}
"""Default tolerances for gradients by differences, with errors of about √eps = 1.5e-8 and eps^(2/3) = 4e-11."""


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
@accepts_options
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
        A `scipy.optimize.OptimizeResult` that prints in a few lines, with these members:

        - x, fun, jac, success, status (a `Status`) and message.
        - nit, nfev, njev, nhev and calls. The counts do not include the certificate.
        - history: a list of `Record`.
        - certificate. With ``certify=False`` it may be undecided, or None if the run ended before the test for negative
          curvature.
        - hvp: how torch computed the products; empty if it did not.

        With bounds it also has

        - active: −1 at the lower bound, 1 at the upper one, otherwise 0.
        - multipliers: the gradient at active bounds, otherwise 0.
        - weakly_active: whether a variable at a bound has a multiplier of 0 up to `tol`.

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
    fun, ranks = objective_on_ranks(fun, process_group)
    sizes = sample_sizes(fun, composed, batch_size, hessian_batch_size, objective_batch_size, grow_samples)
    if "sampling" in settings and not any(sizes):
        sampling = shown(settings["sampling"])
        raise ArgumentError(f"sampling = {sampling} has no effect without samples: pass batch_size, or leave it out.")
    on_samples = composed.on_samples and not grow_samples and any(size is not None for size in sizes)
    if not on_samples:
        reject_sample_settings(composed, settings)
    reject_objective_sample(objective_batch_size if on_samples else None)
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
    variables: RunVariables = PlainVariables()
    if precond is not None:
        others = {"bounds": box, "samples": not oracle.exact or None, "resume": resume, "process_group": ranks}
        oracle, x, variables = precondition(precond, oracle, x, others)
    iteration = _build_iteration(composed, oracle, seed, variables.model_tolerance(limits), on_samples)
    run = Run(oracle, iteration, limits, x, seed, variables, box)
    if resume is not None:
        resume_run(run, resume)
    disp = disp and (ranks is None or ranks.rank == 0)
    status = _run_on_ranks(run, ranks, callback, unflatten, disp)
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


def _build_iteration(method: Method, oracle: Oracle, seed: int, tol: float, on_samples: bool) -> IterationProtocol:
    """Return the iteration on samples, or that on whole objectives and on samples of the paper."""
    return (
        MinibatchIteration(method, seed)
        if on_samples
        else Iteration(method, seed, tol, evaluates_next_gradient=oracle.exact)
    )


def _run_on_ranks(
    run: Run, ranks: Ranks | None, callback: Callable[..., Any] | None, unflatten: Unflatten, disp: bool
) -> Status:
    """Iterate until the run ends, and return how it ended; all ranks make the same decisions."""
    report, clock = reporter(callback, unflatten, disp), time.perf_counter
    if ranks is not None:  # clocks and callbacks differ between ranks, and the decisions from them must not
        report, clock = ranks.any_of(report) if callback else report, ranks.clock
    with torch_modes(run.unscaled_oracle):
        return run_to_end(run, report, clock)


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
    return argument_defaults(minimize)


def _reject_constraints(constraints: Any) -> None:
    """Raise an error for constraints other than bounds."""
    if constraints is not None and np.size(constraints) > 0:
        raise ArgumentError("constraints cannot be used: sanc minimises with bounds at most; leave them out.")


def _result(run: Run, status: Status, unflatten: Unflatten, fun: Any) -> Result[Any]:
    """Return the result of a run, with value, gradient and certificate of the whole objective."""
    oracle, meter = run.unscaled_oracle, run.oracle.meter
    # The counts of the run, without the evaluations below.
    counts = {"nfev": meter.nfev, "njev": meter.njev, "nhev": meter.nhev, "calls": meter.snapshot()}
    exact_oracle = oracle if oracle.exact else SumOracle(fun, (None, None, None), run.seed)
    value, g = exact_oracle.gradient(run.full_x)
    cause = cause_of_start(status, f=value, gradient=g)
    certify(run, status, run.oracle if oracle.exact else exact_oracle)
    return Result(
        x=unflatten(run.full_x),
        fun=value,
        jac=unflatten(g),
        success=status.success,
        status=status,
        message=ending_message(run, status, cause),
        nit=run.iterations,
        history=run.history,
        certificate=unscaled_certificate(run.findings.certificate, run.exponent),
        hvp=oracle.hvp,
        **bounded_entries(run, unflatten),
        **counts,
    )
