"""The estimators pass scikit-learn's checks and agree with its solvers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
import sklearn.linear_model
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils.estimator_checks import estimator_checks_generator

import sanc
from sanc.sklearn import LogisticRegression, LogisticRegressionCV, NonconvexSVM


def checks():
    for estimator in (LogisticRegression(), LogisticRegressionCV(Cs=2, cv=2), NonconvexSVM()):
        for made, check in estimator_checks_generator(estimator):
            marks = pytest.mark.slow if isinstance(estimator, LogisticRegressionCV) else ()  # five fits for one
            yield pytest.param(made, check, id=f"{type(estimator).__name__}-{check.func.__name__}", marks=marks)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("estimator, check", list(checks()))
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def data(classes, rng, n=300):
    X = rng.standard_normal((n, 5))
    scores = X @ rng.standard_normal((5, classes)) + rng.standard_normal((n, classes))
    return X, np.array(["cat", "dog", "eel", "fox"])[scores.argmax(1)]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "how",
    [{}, {"C": 0.05}, {"fit_intercept": False}, {"class_weight": "balanced"}, {"class_weight": {"cat": 3.0}}],
    ids=str,
)
def test_coefficients_agree_with_scikit_learn(classes, sparse, how, rng):
    X, y = data(classes, rng)
    # in older versions of scikit-learn, "balanced" ignores the weights of the rows
    weights = None if how.get("class_weight") == "balanced" else rng.uniform(0, 2, len(y))
    A = scipy.sparse.csr_matrix(X) if sparse else X
    ours = LogisticRegression(tol=1e-9, **how).fit(A, y, weights)
    theirs = sklearn.linear_model.LogisticRegression(tol=1e-9, max_iter=10_000, solver="newton-cg", **how)
    theirs.fit(X, y, weights)
    shift = ours.coef_.mean(0) - theirs.coef_.mean(0) if classes > 2 else 0.0  # softmax is invariant to it
    assert ours.coef_ - shift == pytest.approx(theirs.coef_, abs=1e-5)
    assert ours.predict_proba(A) == pytest.approx(theirs.predict_proba(X), abs=1e-6)
    assert ours.predict_log_proba(A) == pytest.approx(np.log(theirs.predict_proba(X)), abs=1e-5)
    assert (ours.predict(A) == theirs.predict(X)).all() and (ours.classes_ == theirs.classes_).all()
    assert ours.coef_.shape == theirs.coef_.shape and ours.intercept_.shape == theirs.intercept_.shape


def test_a_weight_of_two_equals_a_repeated_row_with_balanced_classes(rng):
    X, y = data(3, rng)
    weights = rng.integers(0, 3, len(y))
    how = {"class_weight": "balanced", "tol": 1e-9}
    weighted = LogisticRegression(**how).fit(X, y, weights)
    repeated = LogisticRegression(**how).fit(np.repeat(X, weights, axis=0), np.repeat(y, weights))
    assert weighted.coef_ == pytest.approx(repeated.coef_, abs=1e-6)


@pytest.mark.parametrize("how", [{"penalty": None}, {"C": np.inf}])
def test_fits_without_a_penalty_agree_with_scikit_learn(how, rng):
    X, y = data(2, rng)
    theirs = sklearn.linear_model.LogisticRegression(C=np.inf, tol=1e-9, max_iter=10_000).fit(X, y)
    assert LogisticRegression(tol=1e-9, **how).fit(X, y).coef_ == pytest.approx(theirs.coef_, abs=1e-4)


def test_the_fit_is_stationary_for_the_papers_nonconvex_penalty(rng):
    X, y = data(2, rng)
    fitted = LogisticRegression(C=0.1, penalty="nonconvex", fit_intercept=False, tol=1e-9).fit(X, y)
    problem = sanc.problems.Logistic(X, (y == "dog").astype(int), "nonconvex", 1 / (0.1 * len(y)))
    assert np.linalg.norm(problem.value_and_gradient(fitted.coef_[0])[1]) <= 1e-9


def test_the_svm_ends_at_a_second_order_point(rng):
    X, y = data(2, rng)
    fitted = NonconvexSVM(1e-2, tol=1e-8).fit(X, y)
    problem = sanc.problems.NonconvexSVM(X, np.where(y == "dog", 1, -1), 1e-2, intercept=True)
    point = np.append(fitted.coef_[0], fitted.intercept_)
    assert sanc.certificate(problem, point, eps=1e-7).second_order
    assert problem.value(point) < problem.value(np.zeros(6))


def test_the_svm_is_robust_to_distant_wrong_labels(rng):
    X = rng.standard_normal((300, 2))
    y = X[:, 0] > 0
    far, labels = np.vstack([X, np.abs(rng.normal([[20.0, 0.0]], 1.0, (10, 2)))]), np.append(y, [False] * 10)
    assert NonconvexSVM(1e-2).fit(far, labels).score(X, y) > 0.95
    assert LogisticRegression().fit(far, labels).score(X, y) < 0.9


def test_float32_stays_float32(rng):
    X, y = data(3, rng)
    fitted = LogisticRegression(tol=1e-3).fit(X.astype(np.float32), y)
    assert (
        fitted.coef_.dtype == fitted.intercept_.dtype == fitted.predict_proba(X.astype(np.float32)).dtype == np.float32
    )


def test_a_warm_start_at_the_solution_needs_one_iteration(rng):
    X, y = data(3, rng)
    fitted = LogisticRegression(warm_start=True, tol=1e-8).fit(X, y)
    first, coefficients = fitted.n_iter_[0], fitted.coef_
    fitted.fit(X, y)
    assert first > 3 and fitted.n_iter_[0] == 1 and fitted.coef_ == pytest.approx(coefficients, abs=1e-7)
    cold = LogisticRegression(warm_start=False, tol=1e-8).fit(X, y).fit(X, y)
    assert cold.n_iter_[0] == first
    other, labels = data(2, rng)  # with other classes the fit starts from zero
    assert fitted.fit(other, labels).coef_.shape == (1, 5)


def test_estimators_work_in_a_pipeline_and_a_grid_search():
    X, y = load_breast_cancer(return_X_y=True)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression()), {"logisticregression__C": [1e-3, 1.0]}, cv=3
    ).fit(X, y)
    assert search.best_score_ > 0.97 and search.best_params_ == {"logisticregression__C": 1.0}
    assert (pickle.loads(pickle.dumps(search)).predict(X) == search.predict(X)).all()
    X, y = load_iris(return_X_y=True)
    assert OneVsRestClassifier(NonconvexSVM()).fit(scale(X), y).score(scale(X), y) > 0.85


def test_a_fit_that_does_not_converge_warns():
    X, y = load_breast_cancer(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="max_iter = 1"):
        LogisticRegression(max_iter=1).fit(X, y)


def test_verbose_prints_the_iterations(rng, capsys):
    LogisticRegression(verbose=1).fit(*data(2, rng))
    assert "‖g‖" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("estimator", "weights", "words"),
    [
        (LogisticRegression(C=0), None, "C = 0"),
        (LogisticRegression(penalty="l1"), None, "penalty = 'l1'"),
        (LogisticRegression(tol=-1), None, "tol = -1"),
        (LogisticRegression(max_iter=1.5), None, "max_iter = 1.5"),
        (NonconvexSVM(alpha=-1.0), None, "alpha = -1.0"),
        (LogisticRegression(), -np.ones(300), "sample_weight"),
        (LogisticRegression(), np.ones(7), "sample_weight has shape (7,)"),
        (LogisticRegression(class_weight="even"), None, "class_weight"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_invalid_argument(estimator, weights, words, rng):
    X, y = data(2, rng)
    with pytest.raises(ValueError) as problem:
        estimator.fit(X, y, weights)
    assert words in str(problem.value)
    assert not hasattr(estimator, "coef_")


def test_errors_for_unsupported_numbers_of_classes(rng):
    X, y = data(3, rng)
    with pytest.raises(sanc.ArgumentError, match="OneVsRestClassifier"):
        NonconvexSVM().fit(X, y)
    with pytest.raises(sanc.ArgumentError, match="one class"):
        LogisticRegression().fit(X, ["cat"] * len(y))


# ---------------------------------------------------------------------------------------------- cross-validation


def test_the_chosen_c_and_the_path_are_those_of_scikit_learn():
    """Three classes and two, with weights: scores, C, coefficients along the path and the final ones."""
    X, y = load_iris(return_X_y=True)
    X = StandardScaler().fit_transform(X) + np.random.default_rng(0).normal(0, 1, X.shape)
    weights = np.linspace(0.5, 1.5, len(y))
    values = [0.01, 1.0, 100.0]
    for keep in (y >= 0, y > 0):
        ours = LogisticRegressionCV(values[::-1], cv=3, tol=1e-8).fit(X[keep], y[keep], weights[keep])
        assert list(ours.Cs_) == values and ours.scores_.shape == (3, 3) and ours.n_iter_.shape == (3, 3)
        splits = list(StratifiedKFold(3).split(X[keep], y[keep]))
        for fold, (kept, left) in enumerate(splits):
            for place, C in enumerate(values):
                other = sklearn.linear_model.LogisticRegression(C=C, tol=1e-10, max_iter=10_000)
                other.fit(X[keep][kept], y[keep][kept], weights[keep][kept])
                found = ours.coefs_paths_[fold, place]
                assert np.allclose(found[:, :-1], other.coef_, atol=1e-3 * np.abs(other.coef_).max())
                assert ours.scores_[fold, place] == pytest.approx(other.score(X[keep][left], y[keep][left]))
        assert values[int(np.argmax(ours.scores_.mean(axis=0)))] == ours.C_
        alone = LogisticRegression(ours.C_, tol=1e-8).fit(X[keep], y[keep], weights[keep])
        assert np.allclose(alone.coef_, ours.coef_, atol=1e-5) and np.array_equal(ours.classes_, alone.classes_)
        assert np.allclose(ours.predict_proba(X[keep]), alone.predict_proba(X[keep]), atol=1e-5)


def test_warm_starts_along_the_path_save_iterations():
    X, y = load_breast_cancer(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    values = np.logspace(-1, 1, 9)
    warm = LogisticRegressionCV(values, cv=2, tol=1e-6).fit(X, y).n_iter_.sum()
    folds = StratifiedKFold(2).split(X, y)
    cold = sum(LogisticRegression(C, tol=1e-6).fit(X[kept], y[kept]).n_iter_[0] for kept, _ in folds for C in values)
    assert warm < 0.8 * cold


def test_mistakes_of_the_cross_validation_are_errors():
    X, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 3
    with pytest.raises(sanc.ArgumentError, match=r"Cs = \[1.0, -1.0\]"):
        LogisticRegressionCV([1.0, -1.0]).fit(X, y)
    with pytest.raises(sanc.ArgumentError, match="Cs = 0"):
        LogisticRegressionCV(0).fit(X, y)
    ordered = np.repeat([0, 1, 2], 10)
    with pytest.raises(sanc.ArgumentError, match="cv leaves out all rows of a class"):
        LogisticRegressionCV(2, cv=KFold(3)).fit(X[:25], ordered[:25])
