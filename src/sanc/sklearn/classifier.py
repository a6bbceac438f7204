"""The base class of the estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from sanc.errors import is_number, require, require_bool, require_integer, warn
from sanc.minimisation import Status, minimize
from sanc.presets import PRESETS, with_matrices
from sanc.sklearn.checks import FEATURE_FORMAT, check_targets, require_two_classes, row_weights, total_weight
from sanc.sums.linear import LinearSum

FIT_METHOD = with_matrices(PRESETS["robust"])
"""The default, with the Hessian as a matrix where that costs less than products."""


class LinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base class of the estimators. It checks arguments, minimises a sum, and returns scores Xw + b and labels."""

    fit_intercept: bool
    class_weight: Mapping[Any, float] | str | None
    tol: float
    max_iter: int
    warm_start: bool
    verbose: int
    classes_: Any
    coef_: Any
    intercept_: Any
    n_iter_: Any

    def _sum(self, X: Any, codes: Any, weights: Any, total: float) -> LinearSum:
        """Return the finite sum to minimise; `total` is the sum of the weights as given."""
        raise NotImplementedError

    def _check_parameters(self) -> None:
        """Raise an error for parameters that are out of range."""
        require(is_number(self.tol) and self.tol > 0, "tol", self.tol, "pass a positive number")
        require_integer("max_iter", self.max_iter, 1)
        require_bool("fit_intercept", self.fit_intercept)
        require_bool("warm_start", self.warm_start)
        if not isinstance(self.verbose, bool):
            require_integer("verbose", self.verbose, 0)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit the coefficients.

        Parameters
        ----------
        X : array or sparse matrix, shape (n, d)
            Features; float32 stays float32.
        y : array, shape (n,)
            Labels of any kind.
        sample_weight : array, shape (n,), optional
            Weights of the rows, ≥ 0.

        Returns
        -------
        self
            The fitted estimator.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, **FEATURE_FORMAT)
        check_targets(y)
        last_classes = getattr(self, "classes_", None)
        self.classes_, codes = np.unique(y, return_inverse=True)
        require_two_classes(self.classes_)
        weights = row_weights(sample_weight, self.class_weight, self.classes_, codes)
        problem = self._sum(X, codes, weights, total_weight(weights, len(codes)))
        has_same_classes = last_classes is not None and np.array_equal(last_classes, self.classes_)
        result = self._minimise(problem, self._start(problem, self.warm_start and has_same_classes))
        self._keep(problem, result)
        self.n_iter_ = np.array([max(result.nit, 1)], np.int32)
        return self

    def _start(self, problem: LinearSum, is_warm: bool) -> Any:
        """Return the coefficients of the last fit if they are asked for and have the same shape; otherwise zero."""
        zero = np.zeros((problem.columns, problem.dim // problem.columns), problem.dtype)
        if not is_warm:
            return zero
        last = np.column_stack([self.coef_, self.intercept_])[:, : zero.shape[1]]
        return last.astype(problem.dtype) if last.shape == zero.shape else zero

    def _minimise(self, problem: LinearSum, start: Any) -> Any:
        """Minimise the sum, and warn if that does not converge.

        `minimize` tests the gradient norm, so that a convex sum usually ends before, by scikit-learn's test.
        """

        def is_stationary(x: Any) -> bool:
            """Return whether the largest entry of the gradient, which the sum has stored, is at most `tol`."""
            return bool(problem.convex and np.abs(problem.value_and_gradient(x.reshape(-1))[1]).max() <= self.tol)

        result = minimize(
            problem, start, tol=self.tol, max_iter=self.max_iter, certify=False, disp=bool(self.verbose),
            method=FIT_METHOD, callback=is_stationary,
        )  # fmt: skip
        if not (result.success or result.status is Status.CALLBACK):
            warn(
                f"The fit did not converge to tol = {self.tol:g} ({result.message} ‖g‖ = "
                f"{np.linalg.norm(result.jac):.1e}): scale the features, raise max_iter = {self.max_iter} or raise "
                "tol.",
                ConvergenceWarning,
            )
        return result

    def _keep(self, problem: LinearSum, result: Any) -> None:
        """Set the coefficients and the intercept of a result."""
        features = problem.features
        self.coef_ = result.x[:, :features].copy()
        self.intercept_ = (
            result.x[:, features].copy() if self.fit_intercept else np.zeros(problem.columns, problem.dtype)
        )

    def decision_function(self, X: Any) -> Any:
        """Return the scores Xw + b: one per row for two classes, otherwise one per row and class.

        Parameters
        ----------
        X : array or sparse matrix, shape (n, d)
            Features.

        Returns
        -------
        array
            Of shape (n,) or (n, classes).
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, **FEATURE_FORMAT)
        scores = np.asarray(X @ self.coef_.T) + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Any:
        """Return the most likely class of each row.

        Parameters
        ----------
        X : array or sparse matrix, shape (n, d)
            Features.

        Returns
        -------
        array, shape (n,)
            Labels.
        """
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
