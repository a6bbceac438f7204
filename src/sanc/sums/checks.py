"""Checks of the arguments of linear sums: features, labels, weights and strengths of the penalty."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

from sanc.errors import ArgumentError, ArgumentTypeError, nearest, require, shown

Array: TypeAlias = npt.NDArray[Any]

_SUM_REMEDIES = {
    "C": "pass strength = 1 / (C · n) for n rows, or use sanc.sklearn.",
    **dict.fromkeys(("alpha", "lam", "lambda_", "l2", "reg"), "pass strength."),
    "fit_intercept": "pass intercept.",
    "sample_weight": "pass weights.",
}
"""Arguments of other libraries, and what to pass instead."""


def checked_strengths(strength: Any, features: int) -> Array:
    """Return one strength for each feature, after checks."""
    values: Array = np.asarray(strength, np.float64)
    if values.shape != (features,):
        raise ArgumentError(
            f"strength has shape {values.shape} and X has {features} columns: pass a number, or one for each column."
        )
    is_valid = bool(np.isfinite(values).all()) and values.min() >= 0
    require(is_valid, "strength", strength, "pass finite numbers ≥ 0")
    return values


def checked_matrix(X: Any) -> Any:
    """Return X as a dense or CSR matrix of float32 or float64, after checks."""
    X = X.tocsr() if scipy.sparse.issparse(X) else np.asarray(X)
    if X.ndim != 2 or 0 in X.shape:
        raise ArgumentError(f"X has shape {X.shape}: pass a matrix with at least one row and one column.")
    if not np.issubdtype(X.dtype, np.number) or np.iscomplexobj(X):
        raise ArgumentTypeError(f"X holds {X.dtype}: pass real numbers.")
    if X.dtype not in (np.float32, np.float64):
        X = X.astype(np.float64)
    entries = X.data if scipy.sparse.issparse(X) else X
    bad = entries.size - np.count_nonzero(np.isfinite(entries))
    if bad:
        raise ArgumentError(f"X holds {bad} entries that are NaN or infinite: remove or impute them.")
    return X


def checked_labels(labels: Any, n: int) -> Array:
    """Return the labels as a vector of n numbers, after checks."""
    y: Array = np.asarray(labels)
    if y.ndim != 1 or len(y) != n:
        raise ArgumentError(f"y has shape {y.shape} and X has {n} rows: pass one label for each row.")
    if not (np.issubdtype(y.dtype, np.number) or y.dtype == bool) or not np.all(np.isfinite(y)):
        raise ArgumentError(f"y holds {y.dtype} labels that are not finite numbers: encode them as numbers.")
    return y


def reject_others(problem: type, others: Mapping[str, Any]) -> None:
    """Raise an error, with a remedy, for the first of the arguments that a sum does not have."""
    for name, value in others.items():
        parameters = inspect.signature(problem).parameters.keys() - {"others"}
        remedy = _SUM_REMEDIES.get(name) or nearest(name, parameters)
        raise ArgumentTypeError(f"{name} = {shown(value)} is not an argument of {problem.__name__}: {remedy}")


def checked_weights(name: str, weights: Any, n: int) -> Array:
    """Return the weights of n rows as float64, or raise an `ArgumentError` that names the argument `name`."""
    s: Array = np.asarray(weights, np.float64)
    if s.shape != (n,):
        raise ArgumentError(f"{name} has shape {s.shape} and X has {n} rows: pass one weight for each row.")
    fits = bool(np.isfinite(s).all()) and s.min() >= 0 and s.max() > 0
    require(fits, name, weights, "pass finite numbers ≥ 0 that are not all zero")
    return s
