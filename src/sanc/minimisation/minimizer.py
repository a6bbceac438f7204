"""The SciPy-shaped front door: `minimize`, and a method for `scipy.optimize.minimize`."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import Bounds, HessianUpdateStrategy, OptimizeResult

from sanc.autograd.precision import callers_precision
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.record import Branch
from sanc.core.run import Limits, Run, Status
from sanc.errors import ArgumentError, ArgumentTypeError, one_of, require, require_integer, require_number, shown
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minimisation.objective import Restore, build_oracle, own_modes
from sanc.minimisation.result import Result
from sanc.presets import compose, with_options
from sanc.ranks.compare import compare_call
from sanc.ranks.group import find_ranks
from sanc.ranks.sums import SharedSum
from sanc.sums.linear import FiniteSum
from sanc.sums.oracle import SumOracle, require_sum

__all__ = ["Status", "minimize", "scipy_method"]

SCIPY_NAMES = {"maxiter": "max_iter", "maxfev": "max_nfev", "maxfun": "max_nfev", "gtol": "tol"}
"""What SciPy calls some of the arguments of `minimize`."""

_DIFFERENCED = {"2-point": 1e-5, "3-point": 1e-6}
"""Default tolerances where the gradient is made of differences of values."""


def minimize(
    fun: Any,
    x0: Any,
    args: tuple[Any, ...] = (),
    method: str | Method | None = None,
    jac: Callable[..., Any] | bool | str | None = None,
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
    max_calls: float | None = None,
    max_time: float | None = None,
    max_nfev: int | None = None,
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
    **settings: Any,
) -> OptimizeResult:
    """Find a second-order point of a smooth function or a finite sum.

    Parameters
    ----------
    fun : callable or FiniteSum
        A torch function ``fun(x, *args)`` of a tensor that returns a scalar tensor; or, with `jac`, any function that
        returns a number; or a finite sum from `sanc.problems`.
    x0 : array, Tensor or pytree of these
        The starting point, of any shape. A dict, or a list or tuple of tensors, nested as you like, is passed to the
        functions as it is and comes back as ``res.x``.
    args : tuple
        Further arguments of `fun`, `jac`, `hess` and `hessp`.
    method : {"sanc", "scr", "arc", "cr", "crm", "ncd", "sgd"} or Method, optional
        Member of the family, composed from `preset`; by default "sanc". Or a composition of pieces, which is taken as
        it is.
    jac, hess, hessp : callable, optional
        Gradient ``jac(x)`` (or True where `fun` returns both), Hessian ``hess(x)``, product ``hessp(x, v)``. Without
        `jac` torch differentiates `fun`; without either Hessian, or with the name of a scheme as `hess`, `jac` is
        differenced. As `jac`, "2-point", "3-point" and "cs" (the complex step) make the gradient of n, 2n and n values
        of a function that torch cannot differentiate; the first two with steps relative to max(1, ``|x_k|``), as SciPy
        does, so that variables far smaller than 1 should be given in other units.
    bounds, constraints : optional
        Accepted where they do not bind: bounds that are all infinite, no constraints. Others are an error.
    tol : float, optional
        Stop where ‖∇f‖₂ ≤ tol and the curvature is good. By default 1e-8 in float64 and 1e-4 in float32, and what the
        differences allow where `jac` is "2-point" (1e-5, or more where f is large) or "3-point" (1e-6, likewise).
    callback : callable, optional
        ``callback(intermediate_result=...)`` or ``callback(x)`` after each iteration; StopIteration, or a return
        value of True, ends the run. The intermediate result has x, fun (on the objective
        sample; NaN where that was not evaluated), nit, record and state.
    options : mapping, optional
        More of the keyword arguments below, as SciPy takes them. SciPy's names are understood here and as keyword
        arguments: maxiter (`max_iter`), maxfev and maxfun (`max_nfev`), gtol (`tol`, always of the 2-norm).
    preset : {"robust", "paper"} or Method
        What the method is composed from. "robust" has no constants to tune.
    curvature_tol : float, optional
        How negative λ_min may be. By default √tol, and where f is small √(tol·L2) with a guess of the Lipschitz
        constant L2 of the Hessian from the first point.
    max_iter, max_calls, max_time : number, optional
        Limits on iterations, on `paper_calls` and on seconds; None is no limit. An iteration that has begun is
        finished; certificates get the time that is left, and one product at least.
    max_nfev : int, optional
        Limit on values of `fun`; it is looked at between iterations.
    batch_size : int, optional
        Components in the gradient and Hessian samples of a finite sum; by default all.
    hessian_batch_size, objective_batch_size : int, optional
        Other sizes for the Hessian sample (default `batch_size`) and the sample of ρ (default all components). "robust"
        judges on the gradient sample and takes no `objective_batch_size`.
    grow_samples : bool
        With method "scr": let the samples grow as steps shrink.
    seed : int
        Seed of samples, coin and random starts.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference"}
        How torch functions get their Hessian products. "auto" differentiates the gradient once more, and where an
        operator has no second derivative takes differences of gradients, with a warning.
    certify : bool
        Compute the certificate of the final point, also where the run ended at a limit. Without it a run whose gradient
        became small looks for negative curvature with 10 products, or a tenth of those it made: that leads out of a
        saddle, but for very weak curvature, and seldom certifies that there is none.
    max_products : int, optional
        Most Hessian products of one certificate.
    disp : bool
        Print a line for every iteration.
    resume : mapping, optional
        Go on from the ``state`` of an intermediate result that a callback received: the run continues bit for bit as
        it would have without the interruption, given the same other arguments. Limits on iterations and calls count
        from the first start.
    process_group : ProcessGroup, "default" or None
        The ranks of torch.distributed that hold the rows of a finite sum: each passes the sum over its own rows, and
        all get the result of one process that has the rows of rank 0, then those of rank 1, and so on. "default" is
        the group that was initialised; None: each rank for itself.
    **settings
        Pieces (`model`, `acceptance`, `escape`, `sigma`, `minibatch`, `metric`) and their settings by name: sigma0,
        eta1, eta2, gamma, krylov_dim, lanczos … See `sanc.Method`.

    Returns
    -------
    sanc.minimisation.result.Result
        A `scipy.optimize.OptimizeResult` that prints in a few lines, with x, fun, jac, success, status (a `Status`),
        message, nit, nfev, njev, nhev, history (list of `Record`), calls, certificate (undecided where `certify` is off
        and its products did not suffice, None where the run then ended before it looked), and hvp (how torch made the
        products; empty where it did not). The counts leave the certificates out; they have their own.

    Examples
    --------
    >>> import torch, sanc
    >>> res = sanc.minimize(lambda x: (x[0] ** 2 - 1) ** 2 + x[1] ** 2, torch.zeros(2, dtype=torch.float64))
    >>> res.success, round(abs(float(res.x[0])), 6)
    (True, 1.0)
    """
    if options is not None or SCIPY_NAMES.keys() & settings.keys():
        return minimize(fun, x0, **_merged({} if options is None else options, locals()))

    _require_free(bounds, constraints)
    chosen = _composed(method, preset, settings)
    one_of("hvp", hvp, HVP_MODES)
    for name, flag in (("certify", certify), ("disp", disp), ("grow_samples", grow_samples)):
        require(isinstance(flag, bool | np.bool_ | int) and flag in (0, 1), name, flag, "pass True or False")
    require_integer("seed", seed, 0, none=False)
    if isinstance(fun, FiniteSum):
        require_sum(fun)
    ranks = find_ranks(process_group)
    if ranks is not None:
        if not isinstance(fun, FiniteSum):
            raise ArgumentError(
                f"process_group = {shown(process_group)} needs a finite sum whose rows lie on the ranks: pass a "
                "sanc.problems.FiniteSum, or process_group=None."
            )
        fun, disp = SharedSum(fun, ranks), disp and ranks.rank == 0
    sizes = _sizes(fun, chosen, batch_size, hessian_batch_size, objective_batch_size, grow_samples)
    on_samples = chosen.on_samples and not grow_samples and any(size is not None for size in sizes)
    if on_samples and objective_batch_size is not None:
        raise ArgumentError(
            f"objective_batch_size = {objective_batch_size!r} cannot be used: steps are judged on the gradient sample. "
            'Leave it out, or pass preset="paper".'
        )
    oracle, x, restore = build_oracle(
        fun,
        x0,
        jac=jac,
        hess=hess,
        hessp=hessp,
        args=args,
        hvp=hvp,
        sizes=sizes,
        seed=seed,
        sampling=chosen.sampling,
        grow=grow_samples,
    )
    require(resume is None or isinstance(resume, Mapping), "resume", resume, "pass the state of an intermediate result")
    default_tol = tol is None
    if tol is None:
        tol = 1e-8 if oracle.space.eps < 1e-10 else 1e-4
        tol = max(tol, _DIFFERENCED.get(str(jac), 0.0))
    numbers = {"tol": tol, "curvature_tol": curvature_tol, "max_calls": max_calls, "max_time": max_time}
    for name, value in numbers.items():
        require_number(name, value)
    require_integer("max_iter", max_iter, 0)
    require_integer("max_products", max_products, 1)
    require_integer("max_nfev", max_nfev, 1)
    most = {"max_iter": max_iter, "max_calls": max_calls, "max_time": max_time, "max_nfev": max_nfev}
    ends = {name: math.inf if value is None else value for name, value in most.items()}
    limits = Limits(
        tol=tol,
        default_tol=default_tol,
        curvature_tol=curvature_tol,
        certify=certify,
        max_products=max_products,
        **ends,
    )
    iterates = MinibatchIteration(chosen, seed) if on_samples else Iteration(chosen, seed, tol, ahead=oracle.exact)
    run = Run(oracle, iterates, limits, x, seed)
    if ranks is not None:
        compare_call(ranks, {"arguments": (chosen, sizes, seed, limits)}, x)
    if resume is not None:
        run.resume(resume)
    report, clock = _reporter(callback, restore, disp), time.perf_counter
    if ranks is not None:  # time and callbacks are each rank's own, and what follows from them is not
        report, clock = ranks.any_of(report) if callback else report, ranks.clock
    with own_modes(oracle):
        status = run.go(report, clock)
    result = _result(run, status, restore, fun)
    if disp:
        print(f"{result.message} f = {result.fun:.6e} after {result.nit} iterations.")
    return result


def _composed(method: str | Method | None, preset: str | Method, settings: Mapping[str, Any]) -> Method:
    """Return the method with its settings: a member of the family, or the caller's composition."""
    if not isinstance(method, Method):
        return compose("sanc" if method is None else method, preset, settings, _arguments())
    require(preset == "robust", "preset", preset, "leave it out beside a Method, which has all its pieces")
    return with_options(method, settings, _arguments())


@cache
def _arguments() -> dict[str, Any]:
    """Names and defaults of the arguments of `minimize` that are no settings."""
    return {name: p.default for name, p in inspect.signature(minimize).parameters.items() if name != "settings"}


def _merged(options: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Join SciPy's options with the arguments beside them, by our names; what stands twice is an error."""
    fits = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    require(fits, "options", options, "pass a mapping of names to values")
    own = {name: default for name, default in _arguments().items() if name not in ("fun", "x0", "options")}
    merged = {name: given[name] for name in own}
    for name, value in [*given["settings"].items(), *options.items()]:
        ours = SCIPY_NAMES.get(name, name)
        if ours != name and value is None:
            continue  # SciPy's way to ask for the default
        if ours in ("fun", "x0", "options") or (ours in merged and (ours not in own or merged[ours] is not own[ours])):
            place = "in options and beside it" if name in options else f"beside {ours!r}"
            raise ArgumentError(f"{name!r} stands {place}: pass it once.")
        merged[ours] = value
    return merged


def _require_free(bounds: Any, constraints: Any) -> None:
    """Accept bounds and constraints that do not bind."""
    if bounds is not None and not (isinstance(bounds, Sequence) and len(bounds) == 0):
        try:
            lower, upper = (bounds.lb, bounds.ub) if isinstance(bounds, Bounds) else zip(*bounds, strict=True)
            low = [-math.inf if bound is None else float(bound) for bound in np.atleast_1d(lower)]
            high = [math.inf if bound is None else float(bound) for bound in np.atleast_1d(upper)]
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"bounds = {shown(bounds)} are no pairs of numbers: leave bounds out.") from None
        if set(low) != {-math.inf} or set(high) != {math.inf}:
            raise ArgumentError(
                f"bounds = {shown(bounds)} cannot be used: sanc minimises without constraints; leave bounds out, or "
                "substitute variables."
            )
    if constraints is not None and np.size(constraints) > 0:
        raise ArgumentError("constraints cannot be used: sanc minimises without constraints; leave them out.")


def _sizes(
    fun: Any, method: Method, batch: int | None, hessian: int | None, objective: int | None, grow: bool
) -> tuple[int | None, int | None, int | None]:
    named = {"batch_size": batch, "hessian_batch_size": hessian, "objective_batch_size": objective}
    given = {name: size for name, size in named.items() if size is not None}
    if grow and (method.name != "scr" or batch is None):
        raise ArgumentError('grow_samples = True goes with method="scr" and a batch_size to start from.')
    for name, size in given.items():
        if not isinstance(fun, FiniteSum):
            raise ArgumentError(f"{name} = {size!r} needs a finite sum to sample from: pass a sanc.problems.FiniteSum.")
        if method.exact:
            raise ArgumentError(f'{name} = {size!r} cannot go with method="arc", which is exact: use "scr".')
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 1 <= size <= fun.n:
            raise ArgumentError(
                f"{name} = {size!r} does not fit the {fun.n} components: pass an integer from 1 to {fun.n}."
            )
    whole = fun.n if isinstance(fun, FiniteSum) else None
    sizes = (batch, batch if hessian is None else hessian, objective)
    g, h, f = (None if size == whole else size for size in sizes)  # a sample of everything is no sample
    return g, h, f


def _reporter(callback: Callable[..., Any] | None, restore: Restore, disp: bool) -> Callable[[Run], bool]:
    """Print a line and call the caller back; true means stop."""
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(f"callback = {shown(callback)} cannot be called: pass a function of the point.")
    try:
        by_name = callback is not None and set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except ValueError:  # some functions of C have none
        by_name = False

    def report(run: Run) -> bool:
        record = run.history[-1]
        if disp:
            print(
                f"{record.iteration:5d}  f = {record.value: .6e}  ‖g‖ = {record.grad_norm:.2e}  "
                f"λ1 = {record.ritz_value: .2e}  σ = {record.sigma:.1e}  {record.branch}"
            )
        if callback is None:
            return False
        try:
            if by_name:
                known = record.trial_value if record.branch is not Branch.STAYED else record.value
                if record.branch is Branch.STAYED and record.trials == 0 and not run.oracle.exact:
                    known = math.nan  # the objective sample was not asked
                result = Result(x=restore(run.x), fun=known, nit=run.iteration, record=record, state=run.state())
                with callers_precision():
                    return _says_stop(callback(intermediate_result=result))
            with callers_precision():
                return _says_stop(callback(restore(run.x)))
        except StopIteration:
            return True

    return report


def _says_stop(answer: Any) -> bool:
    """Whether a callback returned True: Python's, NumPy's or torch's. Other values, such as a loss, mean nothing."""
    kind, many = str(getattr(answer, "dtype", type(answer).__name__)), math.prod(getattr(answer, "shape", ()))
    return kind in ("bool", "torch.bool") and many == 1 and bool(answer)


def _result(run: Run, status: Status, restore: Restore, fun: Any) -> OptimizeResult:
    oracle, meter = run.oracle, run.oracle.meter
    counts = {"nfev": meter.nfev, "njev": meter.njev, "nhev": meter.nhev, "calls": meter.snapshot()}  # as they are now
    whole = oracle if oracle.exact else SumOracle(fun, (None, None, None), run.seed)
    value, g = whole.gradient(run.x)
    if run.certificate is None and run.limits.certify and status not in (Status.NOT_FINITE, Status.UNBOUNDED):
        run.certificate, _ = run.probe(whole, run.limits.max_products, run.seed)
    return Result(
        x=restore(run.x),
        fun=value,
        jac=restore(g),
        success=status.success,
        status=status,
        message=f"{status.sentence} {run.cause}".rstrip(),
        nit=run.iteration,
        history=run.history,
        certificate=run.certificate,
        hvp=oracle.hvp,
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
    **options: Any,
) -> OptimizeResult:
    """Run `sanc.minimize` as a custom method of SciPy.

    Pass it as ``scipy.optimize.minimize(fun, x0, jac=jac, hessp=hessp, method=sanc.scipy_method, options={...})``;
    `options` takes every keyword argument of `sanc.minimize`, ``method`` for a member of the family among them, and
    SciPy's names. Without `jac` the gradient is made of differences of values, "3-point".

    Examples
    --------
    >>> import sanc
    >>> from scipy.optimize import minimize, rosen, rosen_der, rosen_hess_prod
    >>> res = minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, method=sanc.scipy_method)
    >>> res.success
    True
    """
    hess = None if isinstance(hess, HessianUpdateStrategy) else hess  # the products are exact, or differences
    if (jac is None or jac is False) and (hess is None or isinstance(hess, str)) and hessp is None:
        jac = "3-point"
    free = {"bounds": bounds, "constraints": constraints}
    return minimize(fun, x0, args, jac=jac, hess=hess, hessp=hessp, callback=callback, **free, **options)
