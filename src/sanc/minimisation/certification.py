"""Is this point a second-order point? ‖g‖, λ_min, and a bound on its error that holds with a stated probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.core.curvature import Certificate, probe
from sanc.errors import is_number, one_of, require, require_integer, require_number
from sanc.minimisation.objective import build_oracle, own_modes

__all__ = ["Certificate", "certificate"]


def certificate(
    fun: Any,
    x: Any,
    *,
    jac: Callable[..., Any] | bool | str | None = None,
    hess: Callable[..., Any] | str | None = None,
    hessp: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    eps: float = 1e-5,
    eps_curvature: float | None = None,
    confidence: float = 0.99,
    max_products: int | None = None,
    seed: int = 0,
    hvp: HvpMode = "auto",
) -> Certificate:
    """Say whether x is an ε-second-order point: ‖∇f(x)‖ ≤ ε and λ_min(∇²f(x)) ≥ −ε.

    Parameters
    ----------
    fun, jac, hess, hessp, args
        The objective, as `minimize` takes it: a torch function, NumPy callables, or a `FiniteSum`.
    x : array, Tensor or pytree of these
        The point.
    eps : float
        Tolerance on the gradient.
    eps_curvature : float, optional
        Tolerance on the curvature; by default `eps`.
    confidence : float
        Probability with which the error bound is to hold.
    max_products : int, optional
        Most Hessian products to spend. By default the dimension, and fewer where that many vectors are too large.
    seed : int
        Seed of the random start vector.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference"}
        How a torch function gets its Hessian products, as in `minimize`.

    Notes
    -----
    Lanczos with full reorthogonalisation is started at a random vector, which has a part of at least t √(π/2d) in the
    eigenvector of λ_min with probability 1 − t. An eigenvalue λ to the left of all Ritz values θ_i leaves a part of at
    most β_1 ⋯ β_k / Π(θ_i − λ) there, and what rounding and the errors of products can hide of it: the bound is the
    smallest λ for which that suffices, however early Lanczos broke down. Only a Krylov space that fills R^d leaves
    nothing but rounding. Products of differences are made with twice the step, too, which shows their error;
    where gradients are themselves differences of values, the rounding of these is added.
    An operator that is not symmetric shows in what Lanczos has to orthogonalise, and certifies nothing.

    Examples
    --------
    >>> import torch, sanc
    >>> print(sanc.certificate(lambda x: x[0] ** 2 - x[1] ** 2, torch.zeros(2)).saddle)
    True
    """
    require(eps is not None, "eps", eps, "pass a positive number")
    require_number("eps", eps)
    require_number("eps_curvature", eps_curvature)
    fits = is_number(confidence) and 0 < confidence < 1
    require(fits, "confidence", confidence, "pass a probability between 0 and 1")
    require_integer("max_products", max_products, 1)
    require_integer("seed", seed, 0, none=False)
    one_of("hvp", hvp, HVP_MODES)
    oracle, point, _ = build_oracle(fun, x, jac=jac, hess=hess, hessp=hessp, args=args, hvp=hvp, name="x")
    with own_modes(oracle):
        found, *_ = probe(
            oracle,
            point,
            eps=eps,
            eps_curvature=eps if eps_curvature is None else eps_curvature,
            confidence=confidence,
            max_products=max_products,
            seed=seed,
            thorough=True,
        )
    return found
