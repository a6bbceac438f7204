"""Logistic and softmax regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.special

from sanc.errors import is_number, one_of, require
from sanc.problems import Logistic, Softmax
from sanc.sklearn.checks import names_unknown_arguments
from sanc.sklearn.classifier import LinearClassifier
from sanc.sums.linear import LinearSum


class LogisticRegression(LinearClassifier):
    """Logistic regression for two classes, softmax regression for more.

    Minimises C Σ sᵢ ℓᵢ + ½‖w‖², where sᵢ are the weights of the rows. As in scikit-learn, the penalty excludes the
    intercept.

    Parameters
    ----------
    C : float
        Inverse strength of the penalty; infinity means no penalty.
    penalty : {"l2", "nonconvex"} or None
        "nonconvex" replaces ½‖w‖² by Σ w²/(1+w²), as in the paper.
    fit_intercept : bool
        Whether the scores have an intercept.
    class_weight : mapping, "balanced" or None
        Weights of the classes, which multiply the weights of the rows.
    tol : float
        The fit of a convex sum ends when no entry of the gradient of the mean loss exceeds `tol`, as in scikit-learn;
        that of the "nonconvex" penalty ends when the gradient norm does not.
    max_iter : int
        Largest number of iterations, each a Newton step.
    warm_start : bool
        Start from the coefficients of the last fit if the classes and the number of features are the same.
    verbose : int
        Print a line for every iteration.
    n_jobs, random_state : any
        No effect, as with the default solver of scikit-learn: a fit is one process and draws no random numbers.

    Attributes
    ----------
    classes_ : array, shape (classes,)
        The labels.
    coef_ : array, shape (1, d) or (classes, d)
        Coefficients; one row for two classes.
    intercept_ : array, shape (1,) or (classes,)
        Intercepts; zero if `fit_intercept` is False.
    n_iter_ : array, shape (1,)
        Iterations of the last fit.
    n_features_in_ : int
        Features seen by `fit`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sanc.sklearn import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> round(LogisticRegression().fit(X, y).score(X, y), 2)
    0.97
    """

    @names_unknown_arguments
    def __init__(
        self,
        C: float = 1.0,
        *,
        penalty: str | None = "l2",
        fit_intercept: bool = True,
        class_weight: Mapping[Any, float] | str | None = None,
        tol: float = 1e-4,
        max_iter: int = 100,
        warm_start: bool = False,
        verbose: int = 0,
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.C = C
        self.penalty = penalty
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.verbose = verbose
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        """Raise an error for a parameter that cannot be used."""
        super()._check_parameters()
        require(is_number(self.C) and self.C > 0, "C", self.C, "pass a positive number")
        is_smooth = self.penalty not in ("l1", "elasticnet")
        require(is_smooth, "penalty", self.penalty, "pass 'l2', since it is not smooth; scikit-learn's 'saga' has it")
        if self.penalty is not None:
            one_of("penalty", self.penalty, ("l2", "nonconvex"))

    def _sum(self, X: Any, codes: Any, weights: Any, total: float) -> LinearSum:
        """Return the sum to minimise, with the strength that belongs to C."""
        strength = 0.0 if self.penalty is None else 1.0 / (float(self.C) * total)
        return self._plain_sum(X, codes, self.penalty or "none", strength, weights)

    def _plain_sum(self, X: Any, codes: Any, penalty: Any, strength: Any, weights: Any) -> LinearSum:
        """Return the sum of the losses of these rows with this penalty."""
        options: Any = {"penalty": penalty, "strength": strength, "weights": weights, "intercept": self.fit_intercept}
        if len(self.classes_) == 2:
            return Logistic(X, codes, **options)
        return Softmax(X, codes, len(self.classes_), **options)

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities of the classes.

        Parameters
        ----------
        X : array or sparse matrix, shape (n, d)
            Features.

        Returns
        -------
        array, shape (n, classes)
            Rows that add up to 1, in the order of `classes_`.
        """
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithms of `predict_proba`.

        Parameters
        ----------
        X : array or sparse matrix, shape (n, d)
            Features.

        Returns
        -------
        array, shape (n, classes)
            Logarithms of probabilities.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([scipy.special.log_expit(-scores), scipy.special.log_expit(scores)])
        return scipy.special.log_softmax(scores, axis=1)
