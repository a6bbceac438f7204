"""Checks of what the estimators are given: arguments, labels and weights of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from sanc.errors import ArgumentError, ArgumentTypeError, nearest, require, shown
from sanc.sums.checks import checked_weights

FEATURE_FORMAT: dict[str, Any] = {"accept_sparse": "csr", "dtype": [np.float64, np.float32]}
"""The forms of X that are used as they are, as options of scikit-learn's checks."""
_OTHER_ARGUMENTS = {
    "solver": "leave it out, since sanc.minimize makes every fit; its minimum is that of scikit-learn's solvers",
    "dual": "leave it out, since the primal problem is solved",
    "l1_ratio": "leave it out, since a penalty with the 1-norm is not smooth; solver='saga' of scikit-learn has it",
    "l1_ratios": "leave it out, since a penalty with the 1-norm is not smooth; solver='saga' of scikit-learn has it",
    "intercept_scaling": "leave it out, since the penalty excludes the intercept",
    "multi_class": "leave it out for softmax regression, or wrap the estimator in OneVsRestClassifier",
    "refit": "leave it out, since the chosen C is fitted to all rows",
    "use_legacy_attributes": "leave it out; the attributes are described in help(sanc.sklearn.LogisticRegressionCV)",
    "warm_start": "leave it out, since every C starts from the coefficients of the one before",
    "random_state": "leave it out, since a fit draws no random numbers",
    "C": "pass alpha, the weight of the penalty",
    "loss": "leave it out, since the loss is 1 − tanh",
    "penalty": "leave it out, since the penalty is alpha ‖w‖²",
}
"""Arguments of scikit-learn's linear classifiers that an estimator may lack, and what to do instead."""

P = ParamSpec("P")
T = TypeVar("T")


def names_unknown_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a constructor or function to raise an error with a remedy for arguments that it does not have.

    The signature stays as it is, since scikit-learn reads the parameters of an estimator from it.
    """
    parameters = inspect.signature(function).parameters.keys() - {"self"}
    owner, _, _ = function.__qualname__.partition(".")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            if name not in parameters:
                remedy = f"{_OTHER_ARGUMENTS[name]}." if name in _OTHER_ARGUMENTS else nearest(name, parameters)
                if name == "C" and "Cs" in parameters:
                    remedy = "pass Cs, the values of C, or use LogisticRegression."
                raise ArgumentTypeError(f"{name} = {shown(value)} is not an argument of {owner}: {remedy}")
        return function(*args, **kwargs)

    return checked


def require_two_classes(classes: Any) -> None:
    """Raise an error for labels of one class."""
    if len(classes) < 2:
        raise ArgumentError(f"y holds only one class, {shown(classes[0])}: pass labels of at least two classes.")


def check_targets(y: Any) -> None:
    """Raise scikit-learn's error for labels that are no classes; integers, truth values and text always are."""
    if y.dtype.kind not in "biuU":
        check_classification_targets(y)


def row_weights(sample_weight: Any, class_weight: Any, classes: Any, codes: Any) -> Any:
    """Return the products of row and class weights; None if both are absent."""
    n = len(codes)
    if sample_weight is not None:
        try:
            sample_weight = np.asarray(sample_weight, np.float64)
        except (TypeError, ValueError):
            remedy = 'pass one number for each row; weights of classes, such as "balanced", are class_weight'
            raise ArgumentTypeError(f"sample_weight = {shown(sample_weight)} cannot be used: {remedy}.") from None
        if sample_weight.ndim == 0:
            sample_weight = np.full(n, sample_weight)
        sample_weight = checked_weights("sample_weight", sample_weight, n)
    if class_weight is None:
        return sample_weight
    rows = np.ones(n) if sample_weight is None else sample_weight
    if isinstance(class_weight, str) and class_weight == "balanced":  # all classes have the same total weight
        totals = np.bincount(codes, rows)
        class_factors = rows.sum() / (len(classes) * np.maximum(totals, np.finfo(float).tiny))
    else:
        class_factors = compute_class_weight(class_weight, classes=classes, y=classes[codes])
        fits = np.isfinite(class_factors).all() and class_factors.min() >= 0 and class_factors.max() > 0
        require(fits, "class_weight", class_weight, "pass finite numbers ≥ 0 that are not all zero")
    return class_factors[codes] * rows


def total_weight(weights: Any, rows: int) -> float:
    """Return the sum of the weights; the number of rows without weights."""
    return float(rows if weights is None else weights.sum())
