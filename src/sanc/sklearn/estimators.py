"""The estimators: logistic regression, also with a search for its penalty, and the nonconvex support vector machine."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import numpy as np
import scipy.special

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import check_scoring
    from sklearn.model_selection import check_cv
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data
except ImportError as missing:
    raise ImportError(
        f"sanc.sklearn needs scikit-learn ≥ 1.7 ({missing}): install the extra, pip install 'sanc[sklearn]'."
    ) from missing

from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    is_number,
    nearest,
    one_of,
    require,
    require_bool,
    require_integer,
    require_not_negative,
    shown,
    warn,
)
from sanc.minimisation import Status, minimize
from sanc.presets import PRESETS, with_matrices
from sanc.problems import Logistic, Softmax
from sanc.problems import NonconvexSVM as SVMSum
from sanc.sklearn.strengths import Choice, HeldOutLoss, choose_strengths
from sanc.sums.linear import LinearSum, checked_weights

_METHOD = with_matrices(PRESETS["robust"])
"""The default, with the Hessian as a matrix where that costs less than products."""

_MISSING_CLASS = "cv leaves out all rows of a class: pass fewer folds, or a splitter that is stratified."
"""The error if a fold of cross-validation lacks a class."""

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

__all__ = ["LogisticRegression", "LogisticRegressionCV", "NonconvexSVM", "logistic_regression_path"]


P = ParamSpec("P")
T = TypeVar("T")


def _names_unknown_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Return a constructor or function that raises an error with a remedy for arguments that it does not have.

    The signature stays as it is, since scikit-learn reads the parameters of an estimator from it.
    """
    known = inspect.signature(function).parameters.keys() - {"self"}
    owner, _, _ = function.__qualname__.partition(".")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            if name not in known:
                remedy = f"{_OTHER_ARGUMENTS[name]}." if name in _OTHER_ARGUMENTS else nearest(name, known)
                if name == "C" and "Cs" in known:
                    remedy = "pass Cs, the values of C, or use LogisticRegression."
                raise ArgumentTypeError(f"{name} = {shown(value)} is not an argument of {owner}: {remedy}")
        return function(*args, **kwargs)

    return checked


class _LinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base class of the estimators: argument checks, weights, minimisation, and scores Xw + b."""

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
        require_integer("max_iter", self.max_iter, 1, none=False)
        require_bool("fit_intercept", self.fit_intercept)
        require_bool("warm_start", self.warm_start)
        if not isinstance(self.verbose, bool):
            require_integer("verbose", self.verbose, 0, none=False)

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
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], accept_large_sparse=True, order=None
        )
        _check_targets(y)
        last_classes = getattr(self, "classes_", None)
        self.classes_, codes = np.unique(y, return_inverse=True)
        _require_two(self.classes_)
        weights = _weights(sample_weight, self.class_weight, self.classes_, codes)
        total = float(len(codes) if weights is None else weights.sum())
        problem = self._sum(X, codes, weights, total)
        start = np.zeros((problem.columns, problem.dim // problem.columns), problem.dtype)
        if self.warm_start and last_classes is not None and np.array_equal(last_classes, self.classes_):
            last = np.column_stack([self.coef_, self.intercept_])[:, : start.shape[1]]
            start = last.astype(problem.dtype) if last.shape == start.shape else start
        result = self._minimise(problem, start)
        self._keep(problem, result)
        self.n_iter_ = np.array([max(result.nit, 1)], np.int32)
        return self

    def _minimise(self, problem: LinearSum, start: Any) -> Any:
        """Minimise the sum, and warn if that does not converge.

        `minimize` tests the gradient norm, so that a convex sum usually ends before, by scikit-learn's test.
        """

        def is_stationary(x: Any) -> bool:
            """Return whether the largest entry of the gradient, which the sum has stored, is at most `tol`."""
            return bool(problem.convex and np.abs(problem.value_and_gradient(x.reshape(-1))[1]).max() <= self.tol)

        result = minimize(
            problem, start, tol=self.tol, max_iter=self.max_iter, certify=False, disp=bool(self.verbose),
            method=_METHOD, callback=is_stationary,
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
        """Set the coefficients of a result."""
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
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
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


class LogisticRegression(_LinearClassifier):
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
        Weights of the classes, which multiply those of the rows.
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

    @_names_unknown_arguments
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
        super()._check_parameters()
        require(is_number(self.C) and self.C > 0, "C", self.C, "pass a positive number")
        is_smooth = self.penalty not in ("l1", "elasticnet")
        require(is_smooth, "penalty", self.penalty, "pass 'l2', since it is not smooth; scikit-learn's 'saga' has it")
        if self.penalty is not None:
            one_of("penalty", self.penalty, ("l2", "nonconvex"))

    def _sum(self, X: Any, codes: Any, weights: Any, total: float) -> LinearSum:
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

    @_names_unknown_arguments
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
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], accept_large_sparse=True)
        _check_targets(y)
        weights = _weights(sample_weight, None, None, y)
        one_of("search", self.search, ("grid", "gradient"))
        if self.search == "gradient":
            return self._search_by_gradients(X, y, weights, values)
        require(self.groups is None, "groups", self.groups, 'pass search="gradient" with it')
        scorer = check_scoring(self._along_path(), scoring=self.scoring)
        scores, paths, iterations = [], [], []
        for kept, left_out in check_cv(self.cv, y, classifier=True).split(X, y):
            if len(np.unique(y[kept])) < len(np.unique(y)):
                raise ArgumentError(_MISSING_CLASS)
            path = self._path(X[kept], y[kept], None if weights is None else weights[kept], values)
            models = list(path)
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
        _require_two(self.classes_)
        folds = self._folds(X, y, codes, sample_weight)

        wide = X.astype(np.float64, copy=False)

        def build(fold: int, strengths: Any) -> tuple[LinearSum, LinearSum]:
            kept, left_out = folds[fold]
            weights = None if sample_weight is None else (sample_weight[kept], sample_weight[left_out])
            inner, outer = (None, None) if weights is None else weights
            fitted = self._group_sum(wide[kept], codes[kept], inner, strengths)
            return fitted, self._plain_sum(wide[left_out], codes[left_out], "none", 0.0, outer)

        loss = HeldOutLoss(
            build, len(folds), np.zeros_like(groups), tol=float(self.tol), max_iter=int(self.max_iter), method=_METHOD
        )
        lower, upper = np.log(values[[0, -1]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflow at trial points, which are rejected
            found = choose_strengths(loss, groups, lower, upper, verbose=bool(self.verbose))
        made = loss.evaluations
        shape = (len(folds), len(made), 1 if len(self.classes_) == 2 else len(self.classes_), -1)
        paths = np.stack([point.coefficients for point in made], axis=1).reshape(shape)
        if not self.fit_intercept:
            paths = np.concatenate([paths, np.zeros((*paths.shape[:3], 1))], axis=3)
        self.coefs_paths_, self.scores_ = paths, -np.stack([point.losses for point in made], axis=1)
        self.n_iter_ = np.stack([point.iterations for point in made], axis=1)
        tried = np.exp([point.t for point in made])
        active = (found.best.t >= upper).astype(int) - (found.best.t <= lower)
        chosen = np.choose(active + 1, (values[0], np.exp(found.best.t), values[-1]))
        one = self.groups is None
        self.C_ = float(chosen[0]) if one else chosen
        self.Cs_ = tried[:, 0] if one else tried
        self.active_ = int(active[0]) if one else active
        if not one:
            self.groups_ = labels
        self._warn_of_search(found, values, active, labels)
        problem = self._group_sum(X, codes, sample_weight, 1.0 / chosen[groups])
        start = found.best.coefficients.mean(axis=0).astype(problem.dtype)
        self._keep(problem, self._minimise(problem, start.reshape(problem.columns, -1)))
        return self

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

    def _group_sum(self, X: Any, codes: Any, sample_weight: Any, strengths: Any) -> LinearSum:
        """Return the sum to minimise with one strength for each feature, in float64."""
        weights = _weights(sample_weight, self.class_weight, self.classes_, codes)
        total = float(len(codes) if weights is None else weights.sum())
        return self._plain_sum(X, codes, "l2", strengths / total, weights)

    def _warn_of_search(self, found: Choice, values: Any, active: Any, labels: Any) -> None:
        """Warn of a search that did not converge, and of limits of C that it reached."""
        report = partial(warn, category=ConvergenceWarning)
        if found.result is None:
            report(
                f"C was chosen from {self.scores_.shape[1]} values without gradients: a fit did not converge with "
                f"max_iter = {self.max_iter}, or its Hessian is singular. Scale the features, or raise max_iter."
            )
        elif not found.result.success:
            report(f"The search for C did not converge: {found.result.message} Pass a narrower range as Cs.")
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


@_names_unknown_arguments
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

    The fits are made in ascending order of C. They are those of `LogisticRegressionCV`, without folds.

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
    X, y = check_X_y(X, y, accept_sparse="csr", dtype=[np.float64, np.float32], accept_large_sparse=True)
    fits = list(estimator._path(X, y, sample_weight, values))
    rows = [np.column_stack([fit.coef_, fit.intercept_]) if fit_intercept else fit.coef_ for fit in fits]
    coefs = np.array([row[0] if len(row) == 1 else row for row in rows])
    n_iter = np.concatenate([fit.n_iter_ for fit in fits])
    # The places of the values given among the sorted ones.
    places = np.argsort(np.argsort(np.reshape(Cs, -1), kind="stable")) if np.ndim(Cs) else slice(None)
    return coefs[places], values[places], n_iter[places]


class NonconvexSVM(_LinearClassifier):
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
        Weights of the classes, which multiply those of the rows.
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

    @_names_unknown_arguments
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
        super()._check_parameters()
        require_not_negative("alpha", self.alpha)

    def _sum(self, X: Any, codes: Any, weights: Any, total: float) -> LinearSum:
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


def _require_two(classes: Any) -> None:
    """Raise an error for labels of one class."""
    if len(classes) < 2:
        raise ArgumentError(f"y holds only one class, {shown(classes[0])}: pass labels of at least two classes.")


def _check_targets(y: Any) -> None:
    """Raise scikit-learn's error for labels that are no classes; integers, truth values and text always are."""
    if y.dtype.kind not in "biuU":
        check_classification_targets(y)


def _weights(sample_weight: Any, class_weight: Any, classes: Any, codes: Any) -> Any:
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
