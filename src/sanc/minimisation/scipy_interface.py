"""A method for `scipy.optimize.minimize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scipy.optimize import HessianUpdateStrategy

from sanc.errors import one_of
from sanc.functions.differences import SCHEMES
from sanc.minimisation.entry import minimize
from sanc.minimisation.objective import is_of_jax
from sanc.minimisation.result import Result

__all__ = ["scipy_method"]


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
