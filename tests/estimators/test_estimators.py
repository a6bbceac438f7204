"""The estimators pass scikit-learn's checks and agree with its solvers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
import sklearn.linear_model
import sklearn.metrics
from scipy.special import softmax
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils.estimator_checks import estimator_checks_generator

import sanc
from sanc.sklearn import LogisticRegression, LogisticRegressionCV, NonconvexSVM, logistic_regression_path


def checks():
    by_gradients = LogisticRegressionCV(search="gradient", cv=2)
    for estimator in (LogisticRegression(), LogisticRegressionCV(Cs=2, cv=2), by_gradients, NonconvexSVM()):
        for made, check in estimator_checks_generator(estimator):
            marks = pytest.mark.slow if isinstance(estimator, LogisticRegressionCV) else ()  # five fits for one
            name = "search by gradients" if estimator is by_gradients else type(estimator).__name__
            yield pytest.param(made, check, id=f"{name}-{check.func.__name__}", marks=marks)


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
    assert sanc.certificate(problem, point, tol=1e-7).second_order
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
        (LogisticRegression(penalty="l1"), None, "penalty = 'l1' cannot be used: pass 'l2', since it is not smooth"),
        (LogisticRegression(penalty="l3"), None, "penalty = 'l3' is not known"),
        (LogisticRegression(tol=-1), None, "tol = -1"),
        (LogisticRegression(max_iter=1.5), None, "max_iter = 1.5"),
        (NonconvexSVM(alpha=-1.0), None, "alpha = -1.0"),
        (LogisticRegression(), -np.ones(300), "sample_weight"),
        (LogisticRegression(), np.ones(7), "sample_weight has shape (7,)"),
        (LogisticRegression(class_weight="even"), None, "class_weight"),
        (LogisticRegression(fit_intercept="False"), None, "fit_intercept = 'False' cannot be used: pass True or False"),
        (LogisticRegression(warm_start="no"), None, "warm_start = 'no'"),
        (LogisticRegression(verbose="a"), None, "verbose = 'a'"),
        (LogisticRegressionCV(fit_intercept=0.5), None, "fit_intercept = 0.5"),
        (LogisticRegression(), "balanced", 'weights of classes, such as "balanced", are class_weight'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_invalid_argument(estimator, weights, words, rng):
    X, y = data(2, rng)
    with pytest.raises((ValueError, TypeError)) as error:
        estimator.fit(X, y, weights)
    assert words in str(error.value)
    assert not hasattr(estimator, "coef_")


@pytest.mark.parametrize("kind", ["LogisticRegression", "LogisticRegressionCV"])
def test_every_argument_of_scikit_learn_is_accepted_or_has_a_remedy(kind):
    ours, theirs = getattr(sanc.sklearn, kind), getattr(sklearn.linear_model, kind)
    for name in (*theirs().get_params(), "multi_class"):
        if name in ours().get_params():
            continue
        with pytest.raises(sanc.ArgumentTypeError, match=rf"{name} = 3 is not an argument of {kind}: leave it out"):
            ours(**{name: 3})
    with pytest.raises(sanc.ArgumentTypeError, match=r"max_itr = 5 is not an argument.*did you mean 'max_iter'"):
        ours(max_itr=5)


def test_the_svm_names_the_argument_that_replaces_c():
    with pytest.raises(sanc.ArgumentTypeError, match=r"C = 2.0 is not an argument of NonconvexSVM: pass alpha"):
        NonconvexSVM(C=2.0)


def test_the_number_of_processes_and_the_seed_do_not_change_a_fit(rng):
    X, y = data(2, rng, n=30)
    model = clone(LogisticRegression(n_jobs=-1, random_state=3))
    assert (model.n_jobs, model.random_state) == (-1, 3)
    assert np.array_equal(model.fit(X, y).coef_, LogisticRegression().fit(X, y).coef_)


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
    for values in ("10", True, 5.0, ["a"], None):
        with pytest.raises(sanc.ArgumentError, match=r"Cs = .*: pass an array of positive numbers, or how many"):
            LogisticRegressionCV(values).fit(X, y)
    ordered = np.repeat([0, 1, 2], 10)
    with pytest.raises(sanc.ArgumentError, match="cv leaves out all rows of a class"):
        LogisticRegressionCV(2, cv=KFold(3)).fit(X[:25], ordered[:25])
    with pytest.raises(sanc.ArgumentError, match="cv leaves out all rows of a class"):
        LogisticRegressionCV(2, cv=[(np.arange(10), np.arange(10, 30))]).fit(X, ordered)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("how", [{}, {"fit_intercept": False}, {"class_weight": {"cat": 3.0}}], ids=str)
def test_a_path_has_the_fits_of_scikit_learn(classes, how, rng):
    """Each of them starts from zero; the values of C are not sorted."""
    X, y = data(classes, rng, 120)
    weights, values = rng.uniform(0, 2, len(y)), [1.0, 0.01, 100.0]
    coefs, Cs, n_iter = logistic_regression_path(X, y, values, sample_weight=weights, tol=1e-9, **how)
    assert Cs.tolist() == values and n_iter.shape == (3,) and n_iter.dtype == np.int32 and (n_iter >= 1).all()
    for C, coef in zip(values, coefs, strict=True):
        theirs = sklearn.linear_model.LogisticRegression(C=C, tol=1e-9, max_iter=10_000, solver="newton-cg", **how)
        theirs.fit(X, y, weights)
        truth = np.column_stack([theirs.coef_, theirs.intercept_]) if how.get("fit_intercept", True) else theirs.coef_
        assert coef.shape == truth.shape[2 - coef.ndim :] and np.allclose(coef, truth, atol=2e-6)


def test_a_path_continues_from_one_fit_to_the_next():
    X, y = load_breast_cancer(return_X_y=True)
    X = scale(X)
    coefs, Cs, n_iter = logistic_regression_path(X, y, 20)
    assert coefs.shape == (20, 31) and np.array_equal(Cs, np.logspace(-4, 4, 20))
    alone = [int(LogisticRegression(C=C).fit(X, y).n_iter_[0]) for C in Cs]
    assert n_iter.sum() < 0.7 * sum(alone)
    one, _, _ = logistic_regression_path(scipy.sparse.csr_matrix(X), y, Cs[:1])
    assert np.allclose(one[0], coefs[0], atol=1e-3)


@pytest.mark.parametrize(("options", "words"), [
    ({"Cs": [-1.0, 1.0]}, "Cs = "), ({"tol": 0.0}, "tol = 0.0"), ({"penalty": "l1"}, "penalty = 'l1'.*'saga'"),
    ({"solver": "lbfgs"}, "solver = 'lbfgs' is not an argument of logistic_regression_path"),
    ({"C": 1.0}, "C = 1.0.*pass Cs"),
], ids=str)  # fmt: skip
def test_mistakes_in_a_path_are_named(options, words):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(sanc.SancError, match=words):
        logistic_regression_path(X, y, **options)


def test_a_fit_ends_by_the_test_of_scikit_learn():
    """No entry of the gradient exceeds `tol`, although its norm does: a step fewer, and as precise as lbfgs."""
    X, y = load_digits(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    largest = {}
    for kind in (LogisticRegression, sklearn.linear_model.LogisticRegression):
        fitted = kind().fit(X, y)
        residuals = softmax(X @ fitted.coef_.T + fitted.intercept_, axis=1) - np.eye(10)[y]
        g = np.column_stack([residuals.T @ X / len(y) + fitted.coef_ / len(y), residuals.mean(axis=0)])
        largest[kind] = np.abs(g).max()
        if kind is LogisticRegression:
            assert largest[kind] <= fitted.tol < np.linalg.norm(g)
    assert largest[LogisticRegression] <= largest[sklearn.linear_model.LogisticRegression]


# ------------------------------------------------------------------------------------------- search by gradients


def groups_of_data(classes, seed=0, n=120):
    """Return features in two groups, of which only the second one matters, and labels."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 7))
    scores = X[:, 4:] @ rng.standard_normal((3, classes)) + rng.gumbel(size=(n, classes))
    return X, np.array(["cat", "dog", "eel"])[scores.argmax(1)], np.array(["noise"] * 4 + ["signal"] * 3)


def held_out_loss(X, y, weights, Cs):
    """Return the mean of the weighted log losses of three folds, fitted by scikit-learn."""
    losses = []
    scaled = X * np.sqrt(Cs)  # one penalty for scaled features is one penalty per feature
    for kept, left in StratifiedKFold(3).split(X, y):
        other = sklearn.linear_model.LogisticRegression(tol=1e-9, solver="newton-cholesky", max_iter=1000)
        p = other.fit(scaled[kept], y[kept], weights[kept]).predict_proba(scaled[left])
        losses.append(sklearn.metrics.log_loss(y[left], p, sample_weight=weights[left]))
    return np.mean(losses)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_search_by_gradients_finds_the_minimum_of_the_held_out_loss(classes):
    X, y, _ = groups_of_data(classes)
    weights = np.linspace(0.5, 1.5, len(y))
    found = LogisticRegressionCV(search="gradient", cv=3).fit(X, y, weights)
    best = held_out_loss(X, y, weights, found.C_)
    assert -found.scores_.mean(axis=0).max() == pytest.approx(best, rel=1e-4)
    assert all(held_out_loss(X, y, weights, factor * found.C_) > best for factor in (0.01, 0.7, 1.4, 100.0))
    assert found.C_ in found.Cs_
    assert found.scores_.shape == found.n_iter_.shape == (3, len(found.Cs_))
    rows = 1 if classes == 2 else classes
    assert found.coefs_paths_.shape == (3, len(found.Cs_), rows, 8) and found.active_ == 0
    alone = LogisticRegression(found.C_, tol=1e-6).fit(X, y, weights)
    assert found.coef_ == pytest.approx(alone.coef_, abs=2e-3) and found.coef_.shape == (rows, 7)


def test_the_search_finds_one_strength_for_each_group():
    X, y, groups = groups_of_data(2, seed=4, n=60)
    A = scipy.sparse.csr_matrix(X)
    with pytest.warns(ConvergenceWarning, match=r"for groups \['noise'\]"):  # that group is switched off
        found = LogisticRegressionCV([1e-2, 1e2], search="gradient", groups=groups, cv=3, tol=1e-6).fit(A, y)
    assert found.groups_.tolist() == ["noise", "signal"] and found.C_.shape == (2,)
    assert found.active_.tolist() == [-1, 0] and found.C_[0] == 1e-2 and found.Cs_.shape == (found.scores_.shape[1], 2)
    ones = np.ones(len(y))
    Cs = np.where(groups == "noise", found.C_[0], found.C_[1])
    assert -found.scores_.mean(axis=0).max() == pytest.approx(held_out_loss(X, y, ones, Cs), rel=1e-4)
    one = LogisticRegressionCV(search="gradient", cv=3).fit(A, y).scores_.mean(axis=0).max()
    assert found.scores_.mean(axis=0).max() > one + 1e-3
    for factor in (0.8, 1.25):
        others = np.where(groups == "noise", found.C_[0], factor * found.C_[1])
        assert held_out_loss(X, y, ones, others) > held_out_loss(X, y, ones, Cs)
    scaled = X * np.sqrt(Cs)
    theirs = sklearn.linear_model.LogisticRegression(tol=1e-9, solver="newton-cholesky").fit(scaled, y)
    assert found.coef_ == pytest.approx(theirs.coef_ * np.sqrt(Cs), abs=1e-4)


def test_a_search_that_ends_at_a_limit_warns(rng):
    X = rng.standard_normal((60, 3))
    for y, active, C in ((np.arange(60) // 2 % 2, -1, 0.1), (X[:, 0] > 0, 1, 100.0)):  # no signal, and separable
        with pytest.warns(ConvergenceWarning, match="ended at a limit of Cs, 0.1 or 100"):
            found = LogisticRegressionCV([0.1, 100.0], search="gradient", cv=3).fit(X, y)
        assert found.active_ == active and found.C_ == C


def test_a_search_without_derivatives_keeps_the_best_of_its_first_values(rng):
    X, y = data(3, rng)
    with pytest.warns(ConvergenceWarning) as warned:
        found = LogisticRegressionCV(search="gradient", cv=3, max_iter=1).fit(X, y)
    assert any("without gradients" in str(warning.message) for warning in warned)
    assert found.scores_.shape == (3, 4) and found.C_ == found.Cs_[found.scores_.mean(axis=0).argmax()]


def test_the_search_uses_constant_columns_single_precision_and_balanced_classes(rng):
    X, y = data(3, rng, n=90)
    X[:, 0] = 1.0
    how = {"search": "gradient", "cv": 3, "class_weight": "balanced"}
    wide, narrow = LogisticRegressionCV(**how).fit(X, y), LogisticRegressionCV(**how).fit(X.astype(np.float32), y)
    assert narrow.coef_.dtype == np.float32 and narrow.C_ == pytest.approx(wide.C_, rel=1e-2)
    repeated = LogisticRegressionCV(**how, fit_intercept=False).fit(X, y)
    assert not repeated.intercept_.any() and not repeated.coefs_paths_[..., -1].any()
    zero = np.where(np.arange(90) < 60, 1.0, 0.0)  # rows of weight zero change nothing
    folds = [(np.arange(20, 90), np.arange(20)), (np.r_[0:20, 40:90], np.arange(20, 40))]
    how |= {"cv": folds}
    shorter = [(kept[kept < 60], left) for kept, left in folds]
    whole = LogisticRegressionCV(**how).fit(X, y, zero)
    part = LogisticRegressionCV(**how | {"cv": shorter}).fit(X[:60], y[:60])
    assert whole.C_ == pytest.approx(part.C_, rel=1e-4) and whole.scores_ == pytest.approx(part.scores_, rel=1e-4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"search": "random"}, "search = 'random'"),
        ({"search": "grid", "groups": [0, 0]}, "groups = [0, 0]"),
        ({"groups": [0, 0, 1]}, "groups has shape (3,) and X has 2 columns"),
        ({"penalty": "nonconvex"}, "penalty = 'nonconvex'"),
        ({"scoring": "accuracy"}, "scoring = 'accuracy'"),
        ({"Cs": [1.0, 1.0]}, "Cs = [1.0, 1.0]"),
        ({"tol": -1.0}, "tol = -1.0"),
        ({"cv": KFold(3)}, "cv leaves out all rows of a class"),
    ],
    ids=str,
)
def test_mistakes_of_the_search_are_errors(how, words, rng):
    X, y = rng.normal(size=(30, 2)), np.repeat([0, 1, 2], 10)
    with pytest.raises(ValueError) as error:
        LogisticRegressionCV(**{"search": "gradient"} | how).fit(X, y)
    assert words in str(error.value)
    with pytest.raises(sanc.ArgumentError, match="sample_weight is zero in all rows that a fold"):
        LogisticRegressionCV(search="gradient", cv=KFold(3, shuffle=True)).fit(X, y, np.eye(30)[0])
