"""The data of many rows that the caller passed to `curve_fit`, as tensors, after checks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.space import NEAR_ZERO
from sanc.errors import ArgumentError, ArgumentTypeError, require, shown
from sanc.many.entry import TOLERANCES


@dataclass(frozen=True)
class RowData:
    """The data of all rows as tensors.

    Attributes
    ----------
    x : any
        First argument of the model.
    y : Tensor
        Observations.
    weights : Tensor or None
        Inverse standard deviations, 0 where a value is missing; None if all are 1.
    x_dim : int or None
        0 if `x` has an entry for each row.
    is_numpy : bool
        Whether the caller passed arrays.
    """

    x: Any
    y: Tensor
    weights: Tensor | None
    x_dim: int | None
    is_numpy: bool

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: Tensor) -> RowData:
        """Return the data of some rows."""
        x = self.x if self.x_dim is None else self.x.index_select(0, rows)
        weights = None if self.weights is None else self.weights.index_select(0, rows)
        return RowData(x, self.y.index_select(0, rows), weights, self.x_dim, self.is_numpy)

    def weighted(self, values: Tensor) -> Tensor:
        """Return values of all observations, or of their derivatives, times the weights."""
        if self.weights is None:
            return values
        return values * (self.weights if values.ndim == 2 else self.weights[:, None, :])

    @property
    def observations(self) -> Tensor:
        """The number of observations of each row."""
        if self.weights is None:
            return torch.full((len(self.y),), self.y.shape[1], device=self.y.device)
        return (self.weights > 0.0).sum(1)

    @functools.cached_property
    def variation(self) -> Tensor:
        """The weighted sum of squared differences between observations and their mean, for each row."""
        y = self.y.double()
        if self.weights is None:
            return y.shape[1] * y.var(1, correction=0)
        weights = self.weights.double().square()
        mean = (weights * y).sum(1) / weights.sum(1).clamp(min=NEAR_ZERO)
        return (weights * (y - mean[:, None]).square()).sum(1)


def holds_numbers(xdata: Any) -> bool:
    """Return whether `xdata` may be numbers: other objects, such as tables, may have any form that f reads."""
    if isinstance(xdata, np.ndarray | list | tuple):
        try:
            return np.asarray(xdata).dtype.kind in "fciub"
        except ValueError:  # lists of unequal lengths
            return False
    return not (xdata is None or isinstance(xdata, str | bytes))


def checked_data(xdata: Any, ydata: Any, sigma: Any, mask: Any, check_finite: bool) -> RowData:
    """Return the data as tensors, after checks."""
    is_numpy = not isinstance(ydata, Tensor)
    y = torch.as_tensor(np.asarray(ydata, np.float64) if is_numpy else ydata).detach()
    y = y if y.dtype in TOLERANCES else y.double()
    if y.numel() == 0:
        raise ArgumentError("ydata is empty: pass at least one row with one observation.")
    used = _used_observations(mask, y)
    bad = used & ~y.isfinite()
    if check_finite and bool(bad.any()):
        row = int(torch.nonzero(bad)[0, 0])
        raise ArgumentError(f"ydata holds NaN or infinity, first in row {row}: pass mask=np.isfinite(ydata).")
    weights = _weights(sigma, y, used, is_masked=mask is not None)
    x, x_dim = _abscissae(xdata, y, used, check_finite)
    return RowData(x, y if mask is None else torch.where(used, y, 0.0), weights, x_dim, is_numpy)


def _used_observations(mask: Any, y: Tensor) -> Tensor:
    """Return which observations are used, for all rows."""
    if mask is None:
        return torch.ones(y.shape, dtype=torch.bool, device=y.device)
    used = torch.as_tensor(np.asarray(mask) if not isinstance(mask, Tensor) else mask, device=y.device)
    if used.dtype != torch.bool or used.shape not in (y.shape, y.shape[1:]):
        raise ArgumentError(
            f"mask has shape {tuple(used.shape)} and {used.dtype} for ydata of {tuple(y.shape)}: pass booleans of "
            "the same shape, True for the observations to use."
        )
    return used.expand(y.shape)


def _weights(sigma: Any, y: Tensor, used: Tensor, *, is_masked: bool) -> Tensor | None:
    """Return the inverse standard deviations, 0 where an observation is not used; None if all are 1."""
    if sigma is None:
        return used.to(y.dtype) if is_masked else None
    deviations = torch.as_tensor(np.asarray(sigma) if not isinstance(sigma, Tensor) else sigma).to(y)
    if deviations.shape not in ((), y.shape, y.shape[1:]):
        raise ArgumentError(
            f"sigma has shape {tuple(deviations.shape)} for ydata of {tuple(y.shape)}: pass standard deviations "
            "for one row or for all. Covariance matrices are for one fit."
        )
    valid = (deviations > 0.0) & deviations.isfinite()
    require(bool((valid.expand(y.shape) | ~used).all()), "sigma", sigma, "pass positive standard deviations")
    return torch.where(used, 1.0 / deviations, 0.0).to(y.dtype)


def _abscissae(xdata: Any, y: Tensor, used: Tensor, check_finite: bool) -> tuple[Any, int | None]:
    """Return the first argument of the model, and 0 if it has an entry for each row."""
    x = xdata
    if isinstance(xdata, np.ndarray | list | tuple):
        if not holds_numbers(xdata):
            raise ArgumentTypeError(f"xdata = {shown(xdata)} is no array of numbers: pass one.")
        array = np.asarray(xdata)
        x = torch.from_numpy(array.astype(np.float64) if array.dtype.kind in "iub" else array).to(y)
    if not isinstance(x, Tensor):
        return x, None
    of_rows = x.shape == y.shape
    if check_finite and x.is_floating_point():
        finite = x.isfinite() | ~used if of_rows else x.isfinite()
        if not bool(finite.all()):
            raise ArgumentError("xdata holds NaN or infinity: leave such observations out, or pass a mask.")
    return (torch.where(used, x, 1.0), 0) if of_rows else (x, None)
