"""The limits and tolerances of a run, from the arguments of a minimiser."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sanc.errors import require_bool, require_integer, require_positive


def iteration_limit(max_iter: int | None) -> float:
    """Return the limit on iterations after a check; None is no limit."""
    require_integer("max_iter", max_iter, 0, optional=True)
    return _or_infinite(max_iter)


def time_limit(max_time: float | None) -> float:
    """Return the limit on seconds after a check; None is no limit."""
    require_positive("max_time", max_time, optional=True)
    return _or_infinite(max_time)


def _or_infinite(limit: float | None) -> float:
    return math.inf if limit is None else limit


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a run, and the tolerances of its certificate.

    Attributes
    ----------
    tol, curvature_tol : float
        Tolerances on ‖g‖ and on negative curvature; a `curvature_tol` of None follows from `tol` and the units.
    default_tol : bool
        Whether `tol` is the default and not a number of the caller.
    max_iter, max_nfev, max_calls, max_time : float
        Limits on iterations, values, calls as the paper counts them, and seconds.
    certify : bool
        Whether a certificate is required, and not only a short probe for negative curvature.
    max_products : int or None
        Limit on the products of a certificate.
    """

    tol: float
    default_tol: bool
    curvature_tol: float | None
    max_iter: float
    max_nfev: float
    max_calls: float
    max_time: float
    certify: bool
    max_products: int | None

    @classmethod
    def of_arguments(
        cls,
        *,
        tol: float,
        default_tol: bool = False,
        curvature_tol: float | None = None,
        max_iter: int | None,
        max_nfev: int | None,
        max_calls: float | None = None,
        max_time: float | None,
        certify: bool,
        max_products: int | None = None,
    ) -> Limits:
        """Return the limits after checks of the arguments, except `tol`; None is no limit."""
        require_positive("curvature_tol", curvature_tol, optional=True)
        require_positive("max_calls", max_calls, optional=True)
        require_integer("max_nfev", max_nfev, 1, optional=True)
        require_integer("max_products", max_products, 1, optional=True)
        require_bool("certify", certify)
        return cls(
            tol=tol,
            default_tol=default_tol,
            curvature_tol=curvature_tol,
            max_iter=iteration_limit(max_iter),
            max_nfev=_or_infinite(max_nfev),
            max_calls=_or_infinite(max_calls),
            max_time=time_limit(max_time),
            certify=bool(certify),
            max_products=max_products,
        )

    def with_scaled_objective(self, factor: float) -> Limits:
        """Return the limits of a run on factor · f."""
        curvature_tol = None if self.curvature_tol is None else self.curvature_tol * factor
        return replace(self, tol=self.tol * factor, curvature_tol=curvature_tol)
