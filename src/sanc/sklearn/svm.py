"""The nonconvex support vector machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sanc.errors import ArgumentError, require_not_negative
from sanc.problems import NonconvexSVM as SVMSum
from sanc.sklearn.checks import names_unknown_arguments
from sanc.sklearn.classifier import LinearClassifier
from sanc.sums.linear import LinearSum


class NonconvexSVM(LinearClassifier):
    """The nonconvex support vector machine for two classes.

    Minimises the mean of sᵢ (1 − tanh(yᵢ (xᵢᵀw + b))), plus alpha ‖w‖². The loss is bounded, which limits the influence
    of outliers such as wrong labels. For more classes wrap the estimator in scikit-learn's OneVsRestClassifier.

    Parameters
    ----------
    alpha : float
        Weight of the penalty.
    fit_intercept : bool
        Whether the scores have an intercept.
    class_weight : mapping, "balanced" or None
        Weights of the classes, which multiply the weights of the rows.
    tol : float
        The fit ends when the gradient norm is at most `tol` and no negative curvature is found.
    max_iter : int
        Largest number of iterations.
    warm_start : bool
        Start from the coefficients of the last fit if the classes and the number of features are the same.
    verbose : int
        Print a line for every iteration.

    Attributes
    ----------
    classes_ : array, shape (2,)
        The labels.
    coef_ : array, shape (1, d)
        Coefficients.
    intercept_ : array, shape (1,)
        Intercept; zero if `fit_intercept` is False.
    n_iter_ : array, shape (1,)
        Iterations of the last fit.
    n_features_in_ : int
        Features seen by `fit`.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from sanc.sklearn import NonconvexSVM
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> make_pipeline(StandardScaler(), NonconvexSVM()).fit(X, y).score(X, y) > 0.97
    True
    """

    @names_unknown_arguments
    def __init__(
        self,
        alpha: float = 1e-3,
        *,
        fit_intercept: bool = True,
        class_weight: Mapping[Any, float] | str | None = None,
        tol: float = 1e-4,
        max_iter: int = 200,
        warm_start: bool = False,
        verbose: int = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.verbose = verbose

    def _check_parameters(self) -> None:
        """Raise an error for a parameter that cannot be used."""
        super()._check_parameters()
        require_not_negative("alpha", self.alpha)

    def _sum(self, X: Any, codes: Any, weights: Any, total: float) -> LinearSum:
        """Return the sum to minimise; raise an error unless there are two classes."""
        if len(self.classes_) != 2:
            raise ArgumentError(
                f"Only binary classification is supported: y holds {len(self.classes_)} classes. Wrap the estimator "
                "in sklearn.multiclass.OneVsRestClassifier."
            )
        return SVMSum(X, 2 * codes - 1, float(self.alpha), weights=weights, intercept=self.fit_intercept)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
