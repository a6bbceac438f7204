"""Test for second-order points: ‖g‖, λ_min, and a bound on the error of λ_min that holds with a stated probability."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Never

from sanc.autograd.guards import runs_uncompiled
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.core.spectrum.curvature import DEFAULT_CONFIDENCE, Certificate, probe
from sanc.errors import one_of, require_fraction, require_integer, require_positive
from sanc.minimisation.arguments import reject_arguments
from sanc.minimisation.objective import build_oracle, torch_modes

__all__ = ["Certificate", "certificate"]


@runs_uncompiled
def certificate(
    fun: Any,
    x: Any,
    *,
    jac: Callable[..., Any] | bool | str | None = None,
    hess: Callable[..., Any] | str | None = None,
    hessp: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    tol: float = 1e-5,
    curvature_tol: float | None = None,
    confidence: float = DEFAULT_CONFIDENCE,
    max_products: int | None = None,
    seed: int = 0,
    hvp: HvpMode = "auto",
    **others: Never,
) -> Certificate:
    """Return the certificate of x: whether it is a second-order point, ‖∇f‖ ≤ tol and λ_min(∇²f) ≥ −curvature_tol.

    Parameters
    ----------
    fun, jac, hess, hessp, args
        The objective, as in `minimize`: a torch function, NumPy callables, a `FiniteSum` or an `Oracle`.
    x : array, Tensor or pytree of these
        The point.
    tol : float
        Tolerance on the gradient norm.
    curvature_tol : float, optional
        Tolerance on −λ_min; by default `tol`.
    confidence : float
        Probability with which the error bound holds, over the random start vector.
    max_products : int, optional
        Largest number of Hessian products. By default the dimension, or fewer if so many vectors need too much memory.
    seed : int
        Seed of the random start vector.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference"}
        How Hessian products of a torch function are computed, as in `minimize`.

    Notes
    -----
    Lanczos with full reorthogonalisation starts at a random unit vector. Its component along the eigenvector of λ_min
    is at least t √(π/2d) with probability 1 − t. For an eigenvalue λ to the left of all Ritz values θ_i, this component
    is at most β_1 ⋯ β_k / Π(θ_i − λ), plus a term for rounding and for the errors of products. The lower bound is the
    smallest λ for which both hold; it is valid also if Lanczos broke down early. If the Krylov space is all of R^d,
    only the rounding term is left.

    Products by differences of gradients are repeated with twice the step, which gives an estimate of their error. If
    the gradients are differences of f themselves, the rounding error of the values is added. If the operator is
    not symmetric, the orthogonalisation in Lanczos detects it, and the point is not certified.

    Examples
    --------
    >>> import torch, sanc
    >>> print(sanc.certificate(lambda x: x[0] ** 2 - x[1] ** 2, torch.zeros(2)).saddle)
    True
    """
    if others:
        reject_arguments("certificate", others, inspect.signature(certificate).parameters)
    require_positive("tol", tol)
    require_positive("curvature_tol", curvature_tol, optional=True)
    require_fraction("confidence", confidence, "pass a probability between 0 and 1")
    require_integer("max_products", max_products, 1, optional=True)
    require_integer("seed", seed, 0)
    one_of("hvp", hvp, HVP_MODES)
    oracle, point, _ = build_oracle(fun, x, jac=jac, hess=hess, hessp=hessp, args=args, hvp=hvp, name="x")
    with torch_modes(oracle):
        result, _ = probe(
            oracle,
            point,
            gradient_tolerance=tol,
            curvature_tolerance=tol if curvature_tol is None else curvature_tol,
            confidence=confidence,
            max_products=max_products,
            seed=seed,
            thorough=True,
        )
    return result
