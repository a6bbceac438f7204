"""`curve_fit`, with the interface of SciPy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import Any, Unpack

import numpy as np
import scipy.linalg
import torch
from scipy.optimize import Bounds, OptimizeWarning
from torch import Tensor

from sanc.autograd.guards import runs_uncompiled
from sanc.core.space import Floats
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotConvergedError,
    call_mismatch,
    first_line,
    require,
    require_bool,
    shown,
    warn,
)
from sanc.leastsquares.entry import least_squares
from sanc.leastsquares.row_data import checked_data, holds_numbers
from sanc.leastsquares.row_fits import fit_rows
from sanc.many.entry import RunOptions
from sanc.minimisation.arguments import reject_arguments
from sanc.minimisation.objective import checked_point
from sanc.options import CurveFitOptions

_DEFAULT_RESTARTS = 3
"""Number of other rows from whose parameters a row is fitted again, by default."""
_SCALAR_ERRORS = ("to Python scalar", "converted to Scalar", "is ambiguous")
"""Words of the errors of NumPy and torch for an array where one number is needed."""


@runs_uncompiled
def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any = None,
    sigma: Any = None,
    absolute_sigma: bool = False,
    check_finite: bool = True,
    bounds: Any = None,
    *,
    jac: Callable[..., Any] | str | None = None,
    full_output: bool = False,
    mask: Any = None,
    restarts: int | None = None,
    **options: Unpack[CurveFitOptions],
) -> tuple[Any, ...]:
    """Fit the parameters of a curve to observations, and return them with their covariance.

    If `ydata` is two-dimensional, each of its rows is fitted separately, and all of them at once. Such fits are scaled,
    regularised and tested as a single one, with the exact second-order term and without a `loss`.

    Parameters
    ----------
    f : callable
        ``f(xdata, *parameters)`` returns the curve at the observations, as an array or tensor like `ydata`.
    xdata : any
        First argument of `f`; a list of numbers becomes an array.
    ydata : array or Tensor
        The observations. If they or `p0` are a tensor, torch differentiates `f`. For rows of observations `f` has to be
        a function of torch, and is called with `xdata` and the parameters of one row; `xdata` of the shape of `ydata`
        has a row for each of them.
    p0 : array or Tensor, optional
        Initial parameters; for rows of observations, the same for all of them, or a row for each. By default ones, as
        many as `f` has arguments, or points between finite bounds.
    sigma : array, optional
        Standard deviations of the observations, or their covariance matrix.
    absolute_sigma : bool
        Whether `sigma` is absolute. If not, the covariance is scaled so that χ² per degree of freedom is 1.
    check_finite : bool
        Raise an error if `xdata` or `ydata` are not finite.
    bounds : optional
        `scipy.optimize.Bounds` or a pair (lower, upper), as for `least_squares`.
    jac : callable or str, optional
        ``jac(xdata, *parameters)`` returns the derivatives of `f`, a row for each observation; or a scheme of
        differences.
    full_output : bool
        Return also the result of `least_squares`, its message and its status; for rows, the `ManyResult`.
    mask : array or Tensor, optional
        For rows of observations: True for those to use, so that values may be missing.
    restarts : int, optional
        For rows of observations: rows that failed, or that explain far less of the variance than the others, are
        fitted again from the parameters of this many other rows; by default 3. The best fit is kept.
    **options
        Further arguments of `least_squares`, such as `loss`, `f_scale` and `max_nfev`. For rows: `tol`, `max_iter`,
        `max_time`, `chunk_size`, `callback`, `progress` and `seed` of `minimize_many`; by default a row of n parameters
        is evaluated at 200(n + 1) points at most.

    Returns
    -------
    popt, pcov : array or Tensor
        Parameters and covariance matrix, or a row and a matrix for each row. The latter is infinite if the Jacobian has
        no full rank, or if there are no degrees of freedom to scale it; for one fit, with a warning.

    Examples
    --------
    >>> import numpy as np, sanc
    >>> x = np.linspace(0, 4, 50)
    >>> popt, pcov = sanc.curve_fit(lambda x, a, b: a * np.exp(-b * x), x, 2.5 * np.exp(-1.3 * x))
    >>> [round(float(p), 6) for p in popt]
    [2.5, 1.3]
    """
    if not callable(f):
        raise ArgumentTypeError(f"f = {shown(f)} cannot be called: pass a function of xdata and the parameters.")
    require_bool("absolute_sigma", absolute_sigma)
    require_bool("full_output", full_output)
    require_bool("check_finite", check_finite)
    try:
        dimensions = np.ndim(ydata)
    except ValueError:  # rows of different lengths
        raise ArgumentTypeError(f"ydata = {shown(ydata)} is not an array of real numbers: pass one.") from None
    require(dimensions <= 2, "ydata", ydata, "pass the observations of one fit, or a row of them for each fit")
    is_rows = dimensions == 2
    passed_on = _checked_options(options, is_rows)
    if is_rows:
        if jac is not None:
            raise ArgumentError(f"jac = {shown(jac)} cannot be used with rows of ydata: leave it out.")
        fitted = fit_rows(
            f,
            checked_data(xdata, ydata, sigma, mask, check_finite),
            p0,
            bounds,
            RunOptions(**passed_on),
            initial_parameters=partial(_initial_parameters, f, None),
            restarts=_DEFAULT_RESTARTS if restarts is None else restarts,
            absolute_sigma=absolute_sigma,
        )
        return fitted if full_output else fitted[:2]
    if mask is not None:
        raise ArgumentError("mask is for rows of ydata: leave observations out of xdata and ydata instead.")
    if restarts is not None:
        raise ArgumentError(f"restarts = {shown(restarts)} is for rows of ydata: leave it out for one fit.")
    if isinstance(xdata, list | tuple) and all(isinstance(entry, Real) for entry in xdata):
        xdata = np.asarray(xdata)
    y = _observations(xdata, ydata, check_finite)
    start = _initial_parameters(f, p0, bounds, y)
    if callable(jac) and (mismatch := call_mismatch(jac, 1 + len(start))):
        raise ArgumentTypeError(
            f"jac cannot be called with xdata and {len(start)} parameters ({mismatch}): pass a function of the "
            "arguments of f."
        )
    curve = _Curve(f, jac, xdata, y, _whitening(sigma, y))
    result = least_squares(curve.residuals, start, curve.jacobian if callable(jac) else jac, bounds, **passed_on)
    if not result.success:
        raise NotConvergedError(
            f"p0 = {shown(p0)} led to no fit: {result.message} Start closer to the solution, or allow more evaluations."
        )
    matrix = result.jac.numpy() if isinstance(result.jac, Tensor) else np.asarray(result.jac)
    covariance = _covariance(matrix, 2.0 * result.cost, absolute_sigma)
    pcov = torch.from_numpy(covariance).to(start) if isinstance(start, Tensor) else covariance
    return (result.x, pcov, result, result.message, int(result.status)) if full_output else (result.x, pcov)


@dataclass(frozen=True)
class _Curve:
    """The curve of the caller as a function of its parameters, compared with the observations.

    Attributes
    ----------
    f : callable
        The curve.
    jac : callable or str or None
        Its derivatives.
    xdata : any
        First argument of both.
    y : array or Tensor
        The observations.
    whiten : callable
        Divides residuals, or rows of a Jacobian, by their standard deviations.
    """

    f: Callable[..., Any]
    jac: Any
    xdata: Any
    y: Any
    whiten: Callable[[Any], Any]

    def residuals(self, p: Any) -> Any:
        """Return the residuals over their standard deviations."""
        curve = self._evaluate(p)
        if curve is None:
            raise ArgumentTypeError("f returned None: return the curve at xdata, one value for each observation.")
        values = (curve if isinstance(curve, Tensor) else np.asarray(curve)).reshape(-1)
        if len(values) not in (1, len(self.y)):
            raise ArgumentError(
                f"f returned {len(values)} values for {len(self.y)} observations: pass xdata and ydata of the same "
                "length, and return one value for each observation."
            )
        return self.whiten(values - self.y)

    def jacobian(self, p: Any) -> Any:
        """Return the derivatives of the residuals, by the function of the caller."""
        matrix = self.jac(self.xdata, *p)
        return self.whiten(matrix.detach() if isinstance(matrix, Tensor) else np.asarray(matrix))

    def _evaluate(self, p: Any) -> Any:
        """Return what f returns; raise errors with a remedy if f cannot be called with all of xdata."""
        try:
            return self.f(self.xdata, *p)
        except (TypeError, ValueError, RuntimeError) as error:
            if any(words in str(error) for words in _SCALAR_ERRORS):
                raise ArgumentTypeError(
                    f"f treats an array as one number ({first_line(error)}), and is called with all of xdata: use "
                    "functions of NumPy or torch, such as numpy.exp for math.exp and numpy.where for if."
                ) from error
            if isinstance(error, RuntimeError) or holds_numbers(self.xdata):
                raise
            raise ArgumentTypeError(
                f"f failed for xdata = {shown(self.xdata)}, which is no array of numbers ({first_line(error)}): pass "
                "numbers, such as numpy.asarray(xdata, float)."
            ) from error


def _checked_options(options: Mapping[str, Any], is_rows: bool) -> dict[str, Any]:
    """Return the options to pass on; raise an error for one that the kind of fit does not have."""
    if not options:
        return {}
    for_one = _keywords(least_squares) - {"args", "kwargs"}
    for_rows = {item.name for item in fields(RunOptions)}
    admitted, others = (for_rows, for_one) if is_rows else (for_one, for_rows)
    for name in options.keys() & (others - admitted):
        option = f"{name} = {shown(options[name])}"
        if is_rows:
            raise ArgumentError(
                f"{option} is for one fit, not for rows of ydata: leave it out, or call curve_fit for each row."
            )
        raise ArgumentError(f"{option} is for rows of ydata: leave it out for one fit.")
    reject_arguments("curve_fit", options, admitted | _keywords(curve_fit))
    return {**options}


def _keywords(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that a function has by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _observations(xdata: Any, ydata: Any, check_finite: bool) -> Any:
    """Return the observations as a flat array or tensor, after checks."""
    try:
        y = ydata.reshape(-1) if isinstance(ydata, Tensor) else np.asarray(ydata, np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"ydata = {shown(ydata)} is not an array of real numbers: pass one.") from None
    if len(y) == 0:
        raise ArgumentError("ydata is empty: pass at least one observation.")
    for name, data in (("xdata", xdata), ("ydata", ydata)):
        if not (check_finite and isinstance(data, Tensor | np.ndarray | list | tuple) and holds_numbers(data)):
            continue
        array = data.detach().cpu().numpy() if isinstance(data, Tensor) else np.asarray(data)
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise ArgumentError(
                f"{name} holds NaN or infinity: leave such observations out, or pass check_finite=False."
            )
    return y


def _initial_parameters(f: Any, p0: Any, bounds: Any, y: Any) -> Any:
    """Return the initial parameters: those given, or ones, or points between finite bounds."""
    if p0 is not None:
        _check_count(f, p0.numel() if isinstance(p0, Tensor) else np.size(p0), p0)
        p0 = checked_point(p0, "p0")
        if isinstance(p0, Tensor) or not isinstance(y, Tensor):
            return p0 if isinstance(p0, Tensor) else np.atleast_1d(np.asarray(p0, np.float64))
        return torch.as_tensor(p0, dtype=y.dtype, device=y.device)
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except ValueError:
        parameters = []
    if len(parameters) < 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ArgumentError("p0 = None cannot be used: the number of parameters of f is not known, so pass p0.")
    start = np.ones(len(parameters) - 1)
    if bounds is not None:
        lower, upper = (bounds.lb, bounds.ub) if isinstance(bounds, Bounds) else bounds
        sides = [np.broadcast_to(np.asarray(side, np.float64), start.shape) for side in (lower, upper)]
        start = np.array([_between(*pair) for pair in zip(*sides, strict=True)])
    return torch.as_tensor(start, dtype=y.dtype, device=y.device) if isinstance(y, Tensor) else start


def _check_count(f: Any, count: int, p0: Any) -> None:
    """Raise an error if `f` cannot be called with xdata and so many parameters."""
    if mismatch := call_mismatch(f, 1 + count):
        raise ArgumentError(
            f"p0 = {shown(p0)} has {count} parameters, but f cannot be called with xdata and {count} more arguments "
            f"({mismatch}): pass one number for each parameter of f."
        )


def _between(lower: float, upper: float) -> float:
    """Return the middle of an interval, a point 1 from its only finite end, or 1: SciPy's rule."""
    if math.isfinite(lower) and math.isfinite(upper):
        return 0.5 * (lower + upper)
    if math.isfinite(lower):
        return lower + 1.0
    return upper - 1.0 if math.isfinite(upper) else 1.0


def _whitening(sigma: Any, y: Any) -> Callable[[Any], Any]:
    """Return the function that divides residuals, or rows of a Jacobian, by their standard deviations."""
    if sigma is None:
        return lambda r: r
    array = np.asarray(sigma.detach().cpu() if isinstance(sigma, Tensor) else sigma, np.float64)
    if array.ndim == 1 or array.size == 1:
        if array.size not in (1, len(y)):
            raise ArgumentError(f"sigma has {array.size} numbers for {len(y)} observations: pass one for each.")
        require(bool(np.all(array > 0.0)), "sigma", sigma, "pass positive standard deviations")
        inverse = 1.0 / np.broadcast_to(array.reshape(-1), len(y))
        return lambda r: _scaled_rows(r, inverse)
    if array.shape != (len(y), len(y)):
        raise ArgumentError(f"sigma has shape {array.shape} for {len(y)} observations: pass ({len(y)},) or a matrix.")
    try:
        factor = np.linalg.inv(scipy.linalg.cholesky(array, lower=True))
    except np.linalg.LinAlgError:
        raise ArgumentError("sigma is not positive definite: pass the covariance matrix of the observations.") from None
    return lambda r: (torch.as_tensor(factor).to(r) if isinstance(r, Tensor) else factor) @ r


def _scaled_rows(r: Any, weights: Floats) -> Any:
    """Return the rows times weights."""
    w = torch.from_numpy(weights.copy()).to(r) if isinstance(r, Tensor) else weights
    return r * (w if r.ndim == 1 else w[:, None])


def _covariance(jacobian: Floats, squares: float, absolute_sigma: bool) -> Floats:
    """Return (JᵀJ)⁻¹, scaled by χ² per degree of freedom unless `absolute_sigma`; infinite if it is not determined."""
    m, n = jacobian.shape
    _, singular, rows = np.linalg.svd(jacobian, full_matrices=False)
    is_full = len(singular) == n and singular[-1] > np.finfo(jacobian.dtype).eps * max(m, n) * singular[0]
    if is_full and (absolute_sigma or m > n):
        scaled = rows / singular[:, None]
        covariance: Floats = scaled.T @ scaled
        return covariance if absolute_sigma else covariance * (squares / (m - n))
    warn("The covariance of the parameters could not be estimated.", OptimizeWarning)
    return np.full((n, n), np.inf)
