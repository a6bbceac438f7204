"""Logistic regression for many values of C: cross-validation on a grid or by gradients, and the path of fits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from sklearn.utils.validation import check_X_y, validate_data

from sanc.errors import ArgumentError, is_number, one_of, require, warn
from sanc.sklearn.checks import (
    FEATURE_FORMAT,
    check_targets,
    names_unknown_arguments,
    require_two_classes,
    row_weights,
    total_weight,
)
from sanc.sklearn.classifier import FIT_METHOD
from sanc.sklearn.logistic import LogisticRegression
from sanc.sklearn.strengths import Choice, HeldOutEvaluation, HeldOutLoss, choose_strengths
from sanc.sums.linear import LinearSum

_MISSING_CLASS = "cv leaves out all rows of a class: pass fewer folds, or a splitter that is stratified."
"""The error if a fold of cross-validation lacks a class."""


class LogisticRegressionCV(LogisticRegression):
    """Logistic regression whose C is chosen by cross-validation.

    With ``search="grid"``, the values of C are fitted in ascending order in every fold, each from the coefficients of
    the one before. The best C on average is then fitted to all rows, along the same path.

    With ``search="gradient"``, `sanc.minimize` minimises the held-out log loss, averaged over the folds, as a function
    of log C. The fits are differentiated as in `sanc.argmin`, in closed form. A few values of C give the start. With
    `groups`, each group of features then gets its own C, and the penalty is ½ Σ ‖w_g‖²/C_g beside the sum of losses.

    Parameters
    ----------
    Cs : int or array
        Values of C, or their number: they are then spaced evenly on a logarithmic scale from 1e-4 to 1e4. A search by
        gradients uses the smallest and the largest value, as limits.
    search : {"grid", "gradient"}
        How C is chosen.
    groups : array, shape (d,), optional
        The group of each feature: numbers or strings. Needs ``search="gradient"``. By default all features share one C.
    cv : int, splitter or None
        Number of folds, or how rows are split, as in scikit-learn. None: 5 folds.
    scoring : str, callable or None
        The score to maximise, as in scikit-learn. None: the accuracy. A search by gradients needs None or
        "neg_log_loss", and maximises the latter.
    penalty, fit_intercept, class_weight, tol, max_iter, verbose, n_jobs, random_state
        As in `LogisticRegression`.

    Attributes
    ----------
    C_ : float or array, shape (groups,)
        The chosen value; with `groups` one for each entry of `groups_`. Of equal scores, the smallest C wins.
    Cs_ : array, shape (values,) or (values, groups)
        The values of C, ascending; in a search by gradients those that were tried, in their order.
    scores_ : array, shape (folds, values)
        The scores on the rows that a fold leaves out.
    coefs_paths_ : array, shape (folds, values, 1 or classes, d + 1)
        The coefficients along each path, the intercepts last.
    n_iter_ : array, shape (folds, values)
        Iterations of each fit.
    groups_ : array, shape (groups,)
        The groups, sorted, if `groups` was passed.
    active_ : int or array, shape (groups,)
        After a search by gradients: −1 if C is the smallest value allowed, 1 if it is the largest, otherwise 0.
    classes_, coef_, intercept_, n_features_in_
        As in `LogisticRegression`, of the fit to all rows.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sanc.sklearn import LogisticRegressionCV
    >>> X, y = load_iris(return_X_y=True)
    >>> LogisticRegressionCV(Cs=5).fit(X, y).scores_.shape
    (5, 5)
    """

    C_: Any

    @names_unknown_arguments
    def __init__(
        self,
        Cs: Any = 10,
        *,
        search: str = "grid",
        groups: Any = None,
        cv: Any = None,
        scoring: Any = None,
        penalty: str | None = "l2",
        fit_intercept: bool = True,
        class_weight: Mapping[Any, float] | str | None = None,
        tol: float = 1e-4,
        max_iter: int = 100,
        verbose: int = 0,
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.Cs = Cs
        self.search = search
        self.groups = groups
        self.cv = cv
        self.scoring = scoring
        self.penalty = penalty
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter
        self.verbose = verbose
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Choose C by cross-validation and fit the coefficients.

        Parameters
        ----------
        X : array or sparse matrix, shape (n, d)
            Features; float32 stays float32.
        y : array, shape (n,)
            Labels of any kind.
        sample_weight : array, shape (n,), optional
            Weights of the rows in the fits, ≥ 0. The scores of a grid do not use them. A search by gradients uses them
            for the held-out loss too.

        Returns
        -------
        self
            The fitted estimator.
        """
        values = self._values()
        self._along_path()._check_parameters()
        X, y = validate_data(self, X, y, **FEATURE_FORMAT)
        check_targets(y)
        weights = row_weights(sample_weight, None, None, y)
        one_of("search", self.search, ("grid", "gradient"))
        if self.search == "gradient":
            return self._search_by_gradients(X, y, weights, values)
        require(self.groups is None, "groups", self.groups, 'pass search="gradient" with it')
        return self._search_grid(X, y, weights, values)

    def _search_grid(self, X: Any, y: Any, weights: Any, values: Any) -> Any:
        """Choose the value of C with the best mean score, and fit all rows along the same path."""
        scorer = check_scoring(self._along_path(), scoring=self.scoring)
        scores, paths, iterations = [], [], []
        for kept, left_out in check_cv(self.cv, y, classifier=True).split(X, y):
            if len(np.unique(y[kept])) < len(np.unique(y)):
                raise ArgumentError(_MISSING_CLASS)
            models = list(self._path(X[kept], y[kept], None if weights is None else weights[kept], values))
            scores.append([scorer(model, X[left_out], y[left_out]) for model in models])
            paths.append([np.column_stack([model.coef_, model.intercept_]) for model in models])
            iterations.append([int(model.n_iter_[0]) for model in models])
        self.Cs_, self.scores_, self.coefs_paths_ = values, np.array(scores), np.array(paths)
        self.n_iter_ = np.array(iterations, np.int32)
        best = int(np.argmax(self.scores_.mean(axis=0)))
        *_, final = self._path(X, y, weights, values[: best + 1])
        self.C_ = float(values[best])
        self.classes_, self.coef_, self.intercept_ = final.classes_, final.coef_, final.intercept_
        return self

    def _search_by_gradients(self, X: Any, y: Any, sample_weight: Any, values: Any) -> Any:
        """Choose one C, or one for each group, by the gradients of the held-out loss, and fit all rows."""
        labels, groups = self._check_search(X.shape[1], values)
        self.classes_, codes = np.unique(y, return_inverse=True)
        require_two_classes(self.classes_)
        folds = self._folds(X, y, codes, sample_weight)
        loss = self._held_out_loss(X, codes, sample_weight, folds)
        lower, upper = np.log(values[[0, -1]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflow at trial points, which are rejected
            choice = choose_strengths(loss, groups, lower, upper, verbose=bool(self.verbose))
        self._keep_trials(loss.evaluations)
        active = (choice.best.t >= upper).astype(int) - (choice.best.t <= lower)
        chosen = np.choose(active + 1, (values[0], np.exp(choice.best.t), values[-1]))
        self._keep_choice(chosen, active, labels)
        self._warn_of_search(choice, values, active, labels)
        problem = self._group_sum(X, codes, sample_weight, 1.0 / chosen[groups])
        start = choice.best.coefficients.mean(axis=0).astype(problem.dtype)
        self._keep(problem, self._minimise(problem, start.reshape(problem.columns, -1)))
        return self

    def _held_out_loss(self, X: Any, codes: Any, sample_weight: Any, folds: Any) -> HeldOutLoss:
        """Return the mean held-out loss of the folds, with one C for all features."""
        wide = X.astype(np.float64, copy=False)

        def build(fold: int, inverse_C: Any) -> tuple[LinearSum, LinearSum]:
            kept, left_out = folds[fold]
            inner = None if sample_weight is None else sample_weight[kept]
            outer = None if sample_weight is None else sample_weight[left_out]
            fitted = self._group_sum(wide[kept], codes[kept], inner, inverse_C)
            return fitted, self._plain_sum(wide[left_out], codes[left_out], "none", 0.0, outer)

        one_group = np.zeros(X.shape[1], np.intp)
        return HeldOutLoss(
            build, len(folds), one_group, tol=float(self.tol), max_iter=int(self.max_iter), method=FIT_METHOD
        )

    def _keep_trials(self, trials: Sequence[HeldOutEvaluation]) -> None:
        """Set the attributes of a search that describe the values of C that were tried."""
        classes = 1 if len(self.classes_) == 2 else len(self.classes_)
        paths = np.stack([trial.coefficients for trial in trials], axis=1)
        paths = paths.reshape((len(paths), len(trials), classes, -1))
        if not self.fit_intercept:
            paths = np.concatenate([paths, np.zeros((*paths.shape[:3], 1))], axis=3)
        self.coefs_paths_, self.scores_ = paths, -np.stack([trial.losses for trial in trials], axis=1)
        self.n_iter_ = np.stack([trial.iterations for trial in trials], axis=1)
        tried = np.exp([trial.t for trial in trials])
        self.Cs_ = tried[:, 0] if self.groups is None else tried

    def _keep_choice(self, chosen: Any, active: Any, labels: Any) -> None:
        """Set the chosen C and its active limits, of all features or by group."""
        if self.groups is None:
            self.C_, self.active_ = float(chosen[0]), int(active[0])
        else:
            self.C_, self.active_, self.groups_ = chosen, active, labels

    def _check_search(self, features: int, values: Any) -> tuple[Any, Any]:
        """Return the labels of the groups and the group of each feature, after checks of the parameters."""
        if self.penalty != "l2":
            raise ArgumentError(f'penalty = {self.penalty!r} has no search by gradients: pass "l2", or search="grid".')
        if not (self.scoring is None or (isinstance(self.scoring, str) and self.scoring == "neg_log_loss")):
            raise ArgumentError(
                f'scoring = {self.scoring!r} has no gradient: pass None or "neg_log_loss", or search="grid".'
            )
        has_range = values[0] < values[-1] < np.inf
        require(bool(has_range), "Cs", self.Cs, "pass at least two different finite values, the limits of the search")
        if self.groups is None:
            return None, np.zeros(features, np.intp)
        given = np.asarray(self.groups)
        if given.shape != (features,):
            raise ArgumentError(
                f"groups has shape {given.shape} and X has {features} columns: pass one group for each column."
            )
        return np.unique(given, return_inverse=True)

    def _folds(self, X: Any, y: Any, codes: Any, sample_weight: Any) -> Any:
        """Return the rows that each fold keeps and leaves out, after checks."""
        folds = list(check_cv(self.cv, y, classifier=True).split(X, y))
        for kept, left_out in folds:
            if len(np.unique(codes[kept])) < len(self.classes_):
                raise ArgumentError(_MISSING_CLASS)
            if sample_weight is not None and not (sample_weight[kept].any() and sample_weight[left_out].any()):
                raise ArgumentError(
                    "sample_weight is zero in all rows that a fold keeps or leaves out: pass fewer folds, or leave "
                    "these rows out."
                )
        return folds

    def _group_sum(self, X: Any, codes: Any, sample_weight: Any, inverse_C: Any) -> LinearSum:
        """Return the sum to minimise with one value of 1/C for each feature, in float64."""
        weights = row_weights(sample_weight, self.class_weight, self.classes_, codes)
        return self._plain_sum(X, codes, "l2", inverse_C / total_weight(weights, len(codes)), weights)

    def _warn_of_search(self, choice: Choice, values: Any, active: Any, labels: Any) -> None:
        """Warn of a search that did not converge, and of limits of C that it reached."""
        report = partial(warn, category=ConvergenceWarning)
        if choice.result is None:
            report(
                f"C was chosen from {self.scores_.shape[1]} values without gradients: a fit did not converge with "
                f"max_iter = {self.max_iter}, or its Hessian is singular. Scale the features, or raise max_iter."
            )
        elif not choice.result.success:
            report(f"The search for C did not converge: {choice.result.message} Pass a narrower range as Cs.")
        if active.any():
            where = "" if labels is None else f" for groups {labels[active != 0].tolist()}"
            report(
                f"The search for C ended at a limit of Cs, {values[0]:g} or {values[-1]:g}{where}: pass a wider range "
                "as Cs, or scale the features. At the limits, the scores hardly depend on C any more in most cases."
            )

    def _values(self) -> Any:
        """Return the values of C in ascending order, after checks."""
        remedy = "pass an array of positive numbers, or how many as an integer"
        if np.ndim(self.Cs) == 0:
            require(is_number(self.Cs, Integral) and self.Cs >= 1, "Cs", self.Cs, remedy)
            return np.logspace(-4, 4, int(self.Cs))
        values = np.sort(np.asarray(self.Cs).reshape(-1))
        is_positive = values.size > 0 and values.dtype.kind in "fiu" and bool((values > 0).all())
        require(is_positive, "Cs", self.Cs, remedy)
        return values.astype(np.float64)

    def _along_path(self) -> LogisticRegression:
        """Return an estimator that starts from its last coefficients."""
        shared = ("penalty", "fit_intercept", "class_weight", "tol", "max_iter", "verbose")
        return LogisticRegression(warm_start=True, **{name: getattr(self, name) for name in shared})

    def _path(self, X: Any, y: Any, weights: Any, values: Any) -> Iterator[LogisticRegression]:
        """Yield the fit of each value of C, started from the one before."""
        last = None
        for C in values:
            model = self._along_path().set_params(C=float(C))
            if last is not None:
                model.classes_, model.coef_, model.intercept_ = last.classes_, last.coef_, last.intercept_
            last = model.fit(X, y, weights)
            yield last


@names_unknown_arguments
def logistic_regression_path(
    X: Any,
    y: Any,
    Cs: Any = 10,
    *,
    penalty: str | None = "l2",
    fit_intercept: bool = True,
    class_weight: Mapping[Any, float] | str | None = None,
    sample_weight: Any = None,
    tol: float = 1e-4,
    max_iter: int = 100,
    verbose: int = 0,
) -> tuple[Any, Any, Any]:
    """Fit a logistic regression to all rows for many values of C, each from the coefficients of the one before.

    The fits are made in ascending order of C. They are the fits of `LogisticRegressionCV`, without folds.

    Parameters
    ----------
    X : array or sparse matrix, shape (n, d)
        Features; float32 stays float32.
    y : array, shape (n,)
        Labels of any kind.
    Cs : int or array
        Values of C, or their number: they are then spaced evenly on a logarithmic scale from 1e-4 to 1e4.
    penalty, fit_intercept, class_weight, tol, max_iter, verbose
        As in `LogisticRegression`.
    sample_weight : array, shape (n,), optional
        Weights of the rows, ≥ 0.

    Returns
    -------
    coefs : array, shape (values, d + 1) or (values, classes, d + 1)
        Coefficients for each value of C, with the intercept in the last column unless `fit_intercept` is False. For two
        classes there is one row of coefficients for each value.
    Cs : array, shape (values,)
        The values of C, in the order given.
    n_iter : array, shape (values,)
        Iterations of each fit.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sanc.sklearn import logistic_regression_path
    >>> coefs, Cs, n_iter = logistic_regression_path(*load_iris(return_X_y=True), Cs=[0.1, 1.0, 10.0])
    >>> coefs.shape, Cs.tolist()
    ((3, 3, 5), [0.1, 1.0, 10.0])
    """
    shared: dict[str, Any] = {"penalty": penalty, "fit_intercept": fit_intercept, "class_weight": class_weight}
    estimator = LogisticRegressionCV(Cs, tol=tol, max_iter=max_iter, verbose=verbose, **shared)
    values = estimator._values()
    X, y = check_X_y(X, y, **FEATURE_FORMAT)
    fits = list(estimator._path(X, y, sample_weight, values))
    rows = [np.column_stack([fit.coef_, fit.intercept_]) if fit_intercept else fit.coef_ for fit in fits]
    coefs = np.array([row[0] if len(row) == 1 else row for row in rows])
    n_iter = np.concatenate([fit.n_iter_ for fit in fits])
    # The places of the values given among the sorted ones.
    places = np.argsort(np.argsort(np.reshape(Cs, -1), kind="stable")) if np.ndim(Cs) else slice(None)
    return coefs[places], values[places], n_iter[places]
