"""`argmin`: a minimum as a differentiable function of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from numpy.typing import NDArray
from torch import Tensor

from sanc.autograd.guards import runs_uncompiled
from sanc.core.spectrum.curvature import DEFAULT_CONFIDENCE
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    call_mismatch,
    one_of,
    require,
    require_bool,
    require_fraction,
    require_integer,
    require_positive,
    shown,
)
from sanc.implicit.autograd_functions import minimum_of
from sanc.implicit.examination import SolveOptions
from sanc.implicit.least_squares import METHOD, LeastSquaresProblem
from sanc.implicit.problem import ImplicitProblem
from sanc.implicit.solution import Solution
from sanc.options import ArgminArguments, ArgminOptions
from sanc.sums.linear import FiniteSum

ON_SINGULAR = ("raise", "warn", "pinv")
"""What to do if a minimum has no reliable derivative."""
_REJECTED_ARGUMENTS = {
    "args": "theta holds the further arguments",
    "jac": "torch differentiates fun",
    "hess": "torch differentiates fun",
    "hessp": "torch differentiates fun",
    "certify": "the curvature is certified if a derivative is asked for",
    "batch_size": "samples have no exact minimum",
    "hessian_batch_size": "samples have no exact minimum",
    "objective_batch_size": "samples have no exact minimum",
    "grow_samples": "samples have no exact minimum",
    "process_group": "every rank differentiates its own function",
    "resume": "call sanc.minimize to resume a run, and pass its x as x0",
}
"""Arguments of `minimize` that `argmin` does not accept, and the reason."""


Function = Callable[..., Tensor]
"""f(x, θ)."""


@overload
def argmin(
    fun: Function,
    x0: Tensor | NDArray[Any],
    theta: Any,
    *,
    details: Literal[False] = ...,
    **options: Unpack[ArgminArguments],
) -> Tensor: ...
@overload
def argmin(
    fun: Function,
    x0: Tensor | NDArray[Any],
    theta: Any,
    *,
    details: Literal[True],
    **options: Unpack[ArgminArguments],
) -> tuple[Tensor, Solution]: ...
@overload
def argmin(fun: Function, x0: Any, theta: Any, *, details: bool = ..., **options: Unpack[ArgminArguments]) -> Any: ...
@runs_uncompiled
def argmin(
    fun: Function,
    x0: Any,
    theta: Any,
    *,
    bounds: Any = None,
    loss: str = "linear",
    f_scale: float = 1.0,
    on_singular: str = "raise",
    rtol: float | None = None,
    confidence: float = DEFAULT_CONFIDENCE,
    max_products: int | None = None,
    details: bool = False,
    **options: Unpack[ArgminOptions],
) -> Any:
    """Minimise f(x, θ) over x, and return the minimum x(θ) with its derivatives with respect to θ.

    Parameters
    ----------
    fun : callable
        A torch function ``fun(x, theta)`` that returns a scalar tensor, or with ``method="least_squares"`` a tensor of
        residuals.
    x0 : Tensor, array or pytree of these
        The starting point, as in `minimize`. The minimum does not depend on it, so it receives no gradient.
    theta : Tensor or pytree
        The parameters. Every floating-point tensor in it receives gradients; other entries are passed on as they are.
    bounds : optional
        Bounds of x, as in `minimize`, which do not depend on theta. Variables at a bound have the derivative zero.
        Derivatives, curvature and errors refer to the free variables. Nothing is evaluated outside.
    loss, f_scale : optional
        With ``method="least_squares"``: the loss of the residuals by name, and its scale, as in `least_squares`.
    on_singular : {"raise", "warn", "pinv"}
        What to do if the minimum has no reliable derivative. By default `SingularMinimumError` is raised. There is no
        reliable derivative if one of these holds:

        - The run did not converge.
        - λ_min of the Hessian is not bounded away from zero.
        - The Hessian changes strongly within the uncertainty of x.
        - Differences of ∇f contradict the Hessian (a kink).
        - `fun` reads a parameter without its graph (detached, for example).
        - The estimated error of a linear system exceeds 1 %.
        - A variable is at a bound with a multiplier of zero, where derivatives are one-sided.

        "warn" warns and continues. "pinv" uses the pseudo-inverse of the Hessian: minima that form a valley move along
        its normal. Eigenvalues below √eps ‖H‖ count as zero. It still raises in all other cases, and at negative
        curvature.
    rtol : float, optional
        Relative error of the linear systems, by their bound. By default 3e-7 in float64 and 3.5e-4 in float32; if all
        eigenpairs of the Hessian are known, √eps.
    confidence : float
        Probability with which the lower bound of λ_min holds.
    max_products : int, optional
        Largest number of Hessian products of the bound of λ_min, and of each linear system.
    details : bool
        Return ``(x, solution)``. The `Solution` has the result of `minimize`, the certificate, and an estimate of the
        error of every derivative that was computed.
    **options
        Further arguments of `minimize`: tol, max_iter, hvp, preset, method and others. ``method="least_squares"``
        minimises the sum of squares ½ Σ r_i², or a loss of them, by `least_squares`, and accepts its tol, max_iter,
        max_nfev, max_time, seed, callback and precond. Derivatives are those of the whole sum, with its exact Hessian.

    Returns
    -------
    Tensor or pytree
        The minimum, in the form of `x0`. It has a graph to the tensors in `theta` that require a gradient.

    Notes
    -----
    ∇_x f(x(θ), θ) = 0 gives dx/dθ = −H⁻¹ ∂²f/∂x∂θ with H = ∇²_x f. For a gradient u = ∂L/∂x the backward pass solves
    H v = u in a Krylov space, to a relative error of `rtol`, and returns −vᵀ ∂²f/∂x∂θ. No iteration of the minimiser is
    differentiated, so memory does not depend on their number. If a derivative is needed, the forward pass bounds λ_min
    and makes a last Newton step. The Ritz pairs that bound λ_min shorten all later linear systems. The whole Hessian is
    formed for n ≤ 100, and up to n = 1000 if n is at most four times the number of products of the run.

    Derivatives of any order work (``create_graph=True``), as do forward-mode derivatives and torch.func's grad, vmap
    and jvp; vmap minimises one entry of the batch after the other.

    Examples
    --------
    >>> import torch, sanc
    >>> theta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    >>> x = sanc.argmin(lambda x, t: (x**2).sum() - t * x.sum(), torch.zeros(3, dtype=torch.float64), theta)
    >>> (gradient,) = torch.autograd.grad(x.sum(), theta)
    >>> round(float(gradient), 6)
    1.5
    """
    one_of("on_singular", on_singular, ON_SINGULAR)
    require_positive("rtol", rtol, optional=True)
    require_fraction("confidence", confidence, "pass a probability between 0 and 1")
    require_integer("max_products", max_products, 1, optional=True)
    require_bool("details", details)
    _check_function(fun)
    for name, value in options.items():
        if name in _REJECTED_ARGUMENTS:
            raise ArgumentError(f"{name} = {shown(value)} cannot be used: {_REJECTED_ARGUMENTS[name]}; leave it out.")
    passed_on: dict[str, Any] = {**options} if bounds is None else {**options, "bounds": bounds}
    solve_options = SolveOptions(on_singular, rtol, confidence, max_products, options.get("seed", 0))
    problem: ImplicitProblem
    if passed_on.get("method") == METHOD:
        del passed_on["method"]
        passed_on |= {"loss": loss, "f_scale": f_scale}
        problem = LeastSquaresProblem(fun, x0, theta, solve_options, passed_on)
    else:
        for name, value, default in (("loss", loss, "linear"), ("f_scale", f_scale, 1.0)):
            require(value == default, name, value, f'pass method = "{METHOD}" too')
        problem = ImplicitProblem(fun, x0, theta, solve_options, passed_on)
    flat = minimum_of(problem, *problem.theta)
    x = problem.unflatten(flat)
    return (x, problem.solutions[-1]) if details else x


def _check_function(fun: Any) -> None:
    """Raise an error if `fun` cannot be called as fun(x, theta)."""
    if isinstance(fun, FiniteSum) or not callable(fun):
        raise ArgumentTypeError(f"fun = {shown(fun)} is no function of x and theta: pass a torch function.")
    if mismatch := call_mismatch(fun, 2):
        raise ArgumentTypeError(
            f"fun cannot be called as fun(x, theta) ({mismatch}): pass a function of both, and several parameters as a "
            "tuple or dict."
        )
