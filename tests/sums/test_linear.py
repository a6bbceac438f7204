"""Closed forms compared with automatic differentiation in float64, and the errors raised for invalid data."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch

import sanc
from sanc.problems import FiniteSum, Logistic, NonconvexSVM, Softmax
from sanc.sums import linear

N, D, C = 40, 7, 4


@pytest.fixture
def X(rng):
    X = rng.standard_normal((N, D))
    X[rng.random((N, D)) < 0.5] = 0.0
    return X


def penalty(kind, strength, w):
    if kind == "nonconvex":
        return strength * (w**2 / (1 + w**2)).sum()
    return strength / 2 * (w**2).sum() if kind == "l2" else torch.zeros(())


def cases(X, rng):
    y = rng.integers(0, 2, N)
    classes = rng.integers(0, C, N)
    XT, yT = torch.from_numpy(X), torch.from_numpy(y).double()
    for kind in ("nonconvex", "l2", "none"):
        yield (
            lambda A, kind=kind: Logistic(A, y, penalty=kind, strength=0.3),
            lambda w, kind=kind: (
                torch.nn.functional.binary_cross_entropy_with_logits(XT @ w, yT) + penalty(kind, 0.3, w)
            ),
            D,
        )
        yield (
            lambda A, kind=kind: Softmax(A, classes, penalty=kind, strength=0.3),
            lambda w, kind=kind: (
                torch.nn.functional.cross_entropy(XT @ w.view(C, D).T, torch.from_numpy(classes))
                + penalty(kind, 0.3, w)
            ),
            C * D,
        )
    yield (
        lambda A: NonconvexSVM(A, 2 * y - 1, strength=0.3),
        lambda w: (1 - torch.tanh((2 * yT - 1) * (XT @ w))).mean() + 0.3 * (w**2).sum(),
        D,
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_closed_forms_agree_with_autograd(X, rng, sparse):
    for make, reference, dim in cases(X, rng):
        problem = make(scipy.sparse.csr_matrix(X) if sparse else X)
        assert (problem.n, problem.dim) == (N, dim)
        w, v = rng.standard_normal(dim), rng.standard_normal(dim)
        wT = torch.from_numpy(w).requires_grad_()
        value = reference(wT)
        (gradient,) = torch.autograd.grad(value, wT)
        hessian = torch.autograd.functional.hessian(reference, wT).numpy()
        ours, g = problem.value_and_gradient(w)
        assert problem.value(w) == pytest.approx(value.item(), rel=1e-12)
        assert ours == problem.value(w)
        assert g == pytest.approx(gradient.numpy(), abs=1e-12)
        product = problem.hessian(w)
        assert product(v) == pytest.approx(hessian @ v, abs=1e-12)
        assert product(g) == pytest.approx(hessian @ g, abs=1e-12)
        assert sparse or problem.hessian_matrix(w) == pytest.approx(hessian, abs=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_subset_is_the_mean_over_its_rows(X, rng, sparse):
    y = rng.integers(0, 2, N)
    problem = Logistic(scipy.sparse.csr_matrix(X) if sparse else X, y, "nonconvex", 0.2)
    rows = rng.choice(N, 9, replace=False)
    part, alone = problem.subset(rows), Logistic(X[rows], y[rows], "nonconvex", 0.2)
    w = rng.standard_normal(D)
    assert part.n == 9
    assert part.value(w) == pytest.approx(alone.value(w), rel=1e-13)
    assert part.value_and_gradient(w)[1] == pytest.approx(alone.value_and_gradient(w)[1], abs=1e-14)
    # the mean over a partition is the whole
    halves = [problem.subset(np.arange(N)[k::2]).value_and_gradient(w)[1] for k in (0, 1)]
    assert np.mean(halves, axis=0) == pytest.approx(problem.value_and_gradient(w)[1], abs=1e-13)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_subset_of_a_subset_is_the_mean_over_its_rows(X, rng, sparse):
    y, w = rng.integers(0, 2, N), rng.standard_normal(D)
    problem = Logistic(scipy.sparse.csr_matrix(X) if sparse else X, y)
    again = problem.subset(np.arange(9)).subset(np.arange(9)[::-1])
    assert again.value_and_gradient(w)[1] == pytest.approx(Logistic(X[:9], y[:9]).value_and_gradient(w)[1], abs=1e-13)


def one_of_each(X, rng, rows=N):
    """Return one problem of each class."""
    y = rng.integers(0, 2, rows)
    return [Logistic(X, y, "nonconvex", 0.2), NonconvexSVM(X, 2 * y - 1), Softmax(X, rng.integers(0, C, rows), C)]


def evaluated(problem, w, v):
    """Return value, gradient and Hessian product, each from a separate call, as one vector."""
    parts = [problem.value(w)], problem.value_and_gradient(w)[1], problem.hessian(w)(v)
    return np.concatenate(parts)


def evaluated_by_a_copy(problem, w, v):
    """Return the same from a copy without stored margins."""
    return evaluated(copy.copy(problem), w, v)


@pytest.mark.parametrize("sparse", [False, True])
def test_changing_a_point_in_place_invalidates_stored_margins(X, rng, sparse):
    for problem in one_of_each(scipy.sparse.csr_matrix(X) if sparse else X, rng):
        w, v = rng.standard_normal(problem.dim), rng.standard_normal(problem.dim)
        before = evaluated(problem, w, v)
        product = problem.hessian(w)
        value = problem.value(w)
        w[-1] += 0.5
        after = evaluated(problem, w, v)
        assert not np.allclose(before, after)
        assert after == pytest.approx(evaluated_by_a_copy(problem, w, v), rel=1e-13)
        for evaluate in (
            lambda p, w, v: p.value(w),
            lambda p, w, v: p.value_and_gradient(w)[1],
            lambda p, w, v: p.hessian(w)(v),
        ):
            w *= 0.9
            assert evaluate(problem, w, v) == pytest.approx(evaluate(copy.copy(problem), w, v), rel=1e-12)
        w[:] = before[0]  # earlier results still belong to the point they were computed at
        assert product(v) == pytest.approx(before[-problem.dim :], rel=1e-13) and value == before[0]


def test_returned_arrays_may_be_changed(X, rng):
    for problem in one_of_each(X, rng):
        w, v = rng.standard_normal(problem.dim), rng.standard_normal(problem.dim)
        expected = evaluated_by_a_copy(problem, w, v)
        product = problem.hessian(w)
        for _ in range(2):
            for array in (problem.value_and_gradient(w)[1], product(v), problem.hessian(w)(v)):
                array[:] = np.nan
        assert evaluated(problem, w, v) == pytest.approx(expected, rel=1e-13)


def test_stored_margins_belong_to_one_problem_and_one_point(X, rng):
    points = [rng.standard_normal(D) for _ in range(4)]
    first, second = (Logistic(X, rng.integers(0, 2, N), "nonconvex", 0.2) for _ in range(2))
    part = first.subset(np.arange(9))
    expected = {(p, k): evaluated_by_a_copy(p, w, w) for p in (first, second, part) for k, w in enumerate(points)}
    for k in (0, 1, 0, 2, 3, 0, 1, 2):
        for problem in (first, second, part):
            assert evaluated(problem, points[k], points[k]) == pytest.approx(expected[problem, k], rel=1e-13)
            later = evaluated(problem.subset(np.arange(5)), points[k], points[k])  # after the whole sum was evaluated
            alone = Logistic(problem.X[:5], problem.y[:5], "nonconvex", 0.2)
            assert later == pytest.approx(evaluated(alone, points[k], points[k]), rel=1e-12)
    assert not np.allclose(expected[first, 0], expected[part, 0])


def test_pickles_do_not_contain_stored_margins(X, rng):
    problem = Logistic(scipy.sparse.csr_matrix(X), rng.integers(0, 2, N))
    bare = len(pickle.dumps(problem))
    w = rng.standard_normal(D)
    expected = evaluated(problem, w, w)
    assert len(pickle.dumps(problem)) == bare
    assert np.array_equal(evaluated(pickle.loads(pickle.dumps(problem)), w, w), expected)


def test_small_residuals_keep_their_digits():
    """If all rows are classified well, the derivatives are tiny but not rounded to zero."""
    problem = Logistic(np.array([[50.0], [-60.0]]), [1, 0], strength=0.0)
    value, g = problem.value_and_gradient(np.ones(1))
    assert value == pytest.approx((np.exp(-50.0) + np.exp(-60.0)) / 2, rel=1e-12)
    assert g == pytest.approx([-(50 * np.exp(-50.0) + 60 * np.exp(-60.0)) / 2], rel=1e-12, abs=0.0)
    assert problem.hessian(np.ones(1))(np.ones(1)) == pytest.approx(
        [(2500 * np.exp(-50.0) + 3600 * np.exp(-60.0)) / 2], rel=1e-12, abs=0.0
    )


def test_float32_stays_float32(X, rng):
    problem = Logistic(X.astype(np.float32), rng.integers(0, 2, N))
    w = rng.standard_normal(D).astype(np.float32)
    assert problem.value_and_gradient(w)[1].dtype == np.float32
    assert problem.hessian(w)(w).dtype == np.float32
    res = sanc.minimize(problem, w, max_iter=3)
    assert res.x.dtype == np.float32


def test_large_scores_do_not_overflow():
    problem = Logistic(np.array([[1000.0], [-1000.0]]), [0, 1], strength=0.0)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        value, g = problem.value_and_gradient(np.ones(1))
    assert value == pytest.approx(1000.0)
    assert g == pytest.approx([1000.0])


def test_a_user_can_implement_a_finite_sum(rng):
    """A subclass of `FiniteSum`: least squares of a sine."""

    class Sine(FiniteSum):
        def __init__(self, t, y):
            self.t, self.y, self.n, self.dim, self.dtype = t, y, len(t), 2, np.dtype(float)

        def subset(self, rows):
            return Sine(self.t[rows], self.y[rows])

        def residual(self, w):
            return w[0] * np.sin(w[1] * self.t) - self.y

        def value(self, w):
            return float(np.mean(self.residual(w) ** 2))

        def value_and_gradient(self, w):
            r, s, c = self.residual(w), np.sin(w[1] * self.t), np.cos(w[1] * self.t)
            return float(np.mean(r**2)), 2 * np.array([np.mean(r * s), np.mean(r * w[0] * self.t * c)])

        def hessian(self, w):
            r, s, c = self.residual(w), np.sin(w[1] * self.t), np.cos(w[1] * self.t)
            J = np.stack([s, w[0] * self.t * c])
            mixed, second = np.mean(r * self.t * c), -np.mean(r * w[0] * self.t**2 * s)
            H = 2 * (J @ J.T / self.n + np.array([[0.0, mixed], [mixed, second]]))
            return lambda v: H @ v

    t = np.linspace(0, 3, 50)
    res = sanc.minimize(Sine(t, 2 * np.sin(1.3 * t)), [1.5, 1.1])
    assert res.success
    assert res.x == pytest.approx([2.0, 1.3], abs=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda X, y: Logistic(X, np.where(y == 0, -1, 1)), ["y holds", "-1", "(y + 1) / 2"]),
        (lambda X, y: Logistic(X, y[:-1]), ["y has shape (39,)", "40 rows"]),
        (lambda X, y: Logistic(X[:, 0], y), ["X has shape (40,)", "matrix"]),
        (lambda X, y: Logistic(np.where(X == X[0, 0], np.nan, X), y), ["X holds", "NaN", "impute"]),
        (lambda X, y: Logistic(scipy.sparse.csr_matrix(X * np.inf), y), ["X holds", "infinite"]),
        (lambda X, y: Logistic(X, y, penalty="nonconvx"), ["penalty = 'nonconvx'", "did you mean 'nonconvex'"]),
        (lambda X, y: Logistic(X, y, strength=-1.0), ["strength = -1.0", "≥ 0"]),
        (lambda X, y: Logistic(X, y, strength=[1.0] * 6 + [-1.0]), ["strength", "≥ 0"]),
        (lambda X, y: Logistic(X, y, strength=np.ones(3)), ["strength has shape (3,)", "7 columns"]),
        (lambda X, y: Logistic(X[:0], y[:0]), ["X has shape (0, 7)", "at least one row"]),
        (lambda X, y: Logistic(X.astype(str), y), ["X holds", "real numbers"]),
        (lambda X, y: Logistic(X, y.astype(float) * np.nan), ["y holds", "finite"]),
        (lambda X, y: NonconvexSVM(X, y), ["y holds", "2 * y − 1"]),
        (lambda X, y: Softmax(X, y - 1), ["y holds", "0, 1, 2"]),
        (lambda X, y: Softmax(X, y + 0.5), ["y holds", "0, 1, 2"]),
        (lambda X, y: Softmax(X, y, classes=1), ["classes = 1", "integer ≥ 2"]),
        (lambda X, y: Logistic(X, y).subset(np.array([40])), ["rows", "0 to 39"]),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_errors_name_the_invalid_data(X, rng, make, words):
    with pytest.raises(sanc.SancError) as caught:
        make(X, rng.integers(0, 2, N))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_value_equals_the_value_returned_with_the_gradient(X, rng, dtype):
    for problem in one_of_each(X, rng):
        for _ in range(40):
            w = (3 * rng.standard_normal(problem.dim)).astype(dtype)
            assert copy.copy(problem).value(w) == problem.value_and_gradient(w)[0]


def test_margins_and_gradients_are_computed_once_per_point(X, rng, monkeypatch):
    for problem in one_of_each(X, rng):
        counts = {"_times": 0, "_transposed_times": 0}
        for name in counts:
            method = getattr(problem, name)

            def counted(*arguments, name=name, method=method, counts=counts):
                counts[name] += 1
                return method(*arguments)

            monkeypatch.setattr(problem, name, counted)
        w, v = rng.standard_normal(problem.dim), rng.standard_normal(problem.dim)
        evaluated(problem, w, v)
        evaluated(problem, w.copy(), v)
        assert counts == {"_times": 1 + 2, "_transposed_times": 1 + 2}  # each product multiplies by X once


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F", "mapped"])
def test_blocks_do_not_change_the_result(rng, monkeypatch, tmp_path, dtype, order):
    """A large dense X is read in blocks, also from a file; none of them is a copy."""
    rows = 1003
    X = np.asarray(rng.standard_normal((rows, D)), dtype, order="F" if order == "F" else "C")
    if order == "mapped":
        np.save(tmp_path / "X.npy", X)
        X = np.load(tmp_path / "X.npy", mmap_mode="r")
    for problem in one_of_each(X, rng, rows):
        w, v = (rng.standard_normal(problem.dim).astype(dtype) for _ in range(2))
        whole = evaluated(copy.copy(problem), w, v)
        monkeypatch.setattr(linear, "_CACHE_BLOCK", 40 * D * X.itemsize)
        blocks = list(problem._blocks())
        assert len(blocks) == -(-rows // 40) and all(np.shares_memory(block, X) for _, block in blocks)
        part = copy.copy(problem)
        assert evaluated(part, w, v) == pytest.approx(whole, rel=1e-12 if dtype == np.float64 else 1e-4, abs=1e-6)
        assert part.value_and_gradient(w)[1].dtype == part.hessian(w)(v).dtype == dtype
        monkeypatch.undo()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", ["l2", "nonconvex"])
def test_weights_and_intercept_agree_with_autograd(X, rng, sparse, kind):
    A, y, classes = (scipy.sparse.csr_matrix(X) if sparse else X), rng.integers(0, 2, N), rng.integers(0, C, N)
    s = rng.uniform(0, 3, N)
    ones = torch.from_numpy(np.column_stack([X, np.ones(N)]))
    sT = torch.from_numpy(s / s.sum())
    how = {"weights": s, "intercept": True}

    def logistic(w):
        target = torch.from_numpy(y).double()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(ones @ w, target, reduction="none")
        return (sT * losses).sum() + penalty(kind, 0.3, w[:-1])

    def softmax(w):
        W = w.view(C, D + 1)
        losses = torch.nn.functional.cross_entropy(ones @ W.T, torch.from_numpy(classes), reduction="none")
        return (sT * losses).sum() + penalty(kind, 0.3, W[:, :-1])

    def svm(w):
        return (sT * (1 - torch.tanh(torch.from_numpy(2 * y - 1) * (ones @ w)))).sum() + 0.3 * (w[:-1] ** 2).sum()

    for problem, reference in (
        (Logistic(A, y, kind, 0.3, **how), logistic),
        (Softmax(A, classes, C, kind, 0.3, **how), softmax),
        (NonconvexSVM(A, 2 * y - 1, 0.3, **how), svm),
    ):
        w, v = rng.standard_normal(problem.dim), rng.standard_normal(problem.dim)
        wT = torch.from_numpy(w).requires_grad_()
        (gradient,) = torch.autograd.grad(reference(wT), wT)
        hessian = torch.autograd.functional.hessian(reference, wT).numpy()
        value, g = problem.value_and_gradient(w)
        assert value == pytest.approx(reference(wT).item(), rel=1e-12)
        assert g == pytest.approx(gradient.numpy(), abs=1e-12)
        assert problem.hessian(w)(v) == pytest.approx(hessian @ v, abs=1e-12)
        if not scipy.sparse.issparse(problem.X) and problem.columns == 1:
            assert problem.hessian_matrix(w) == pytest.approx(hessian, abs=1e-12)
        halves = [problem.subset(np.arange(N)[k::2]).value_and_gradient(w)[1] for k in (0, 1)]
        assert np.mean(halves, axis=0) == pytest.approx(g, abs=1e-13)


def test_blocks_do_not_change_weighted_sums(X, rng, monkeypatch):
    y, s = rng.integers(0, C, N), rng.uniform(0, 3, N)
    problem = Softmax(X, y, C, weights=s, intercept=True)
    w, v = rng.standard_normal(problem.dim), rng.standard_normal(problem.dim)
    whole = evaluated(problem, w, v)
    monkeypatch.setattr(linear, "_CACHE_BLOCK", 1)
    assert evaluated_by_a_copy(problem, w, v) == pytest.approx(whole, abs=1e-13)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.ones(3), "weights has shape (3,)"),
        (-np.ones(N), "≥ 0"),
        (np.zeros(N), "not all zero"),
        (np.full(N, np.nan), "finite"),
    ],
)
def test_errors_name_invalid_weights(X, rng, weights, words):
    with pytest.raises(sanc.ArgumentError) as error:
        Logistic(X, rng.integers(0, 2, N), weights=weights)
    assert words in str(error.value)


def test_the_default_penalty_is_l2(X, rng):
    y, w = rng.integers(0, 2, N), rng.standard_normal(D)
    assert Logistic(X, y).value(w) == Logistic(X, y, "l2", 1e-3).value(w)


@pytest.mark.parametrize(
    ("n", "d", "classes", "formed"), [(4000, 60, 2, True), (400, 300, 2, False), (90, 40, 9, False)]
)
def test_the_hessian_is_a_matrix_where_that_costs_less_than_products(n, d, classes, formed, rng):
    X, y = rng.standard_normal((n, d)), np.arange(n) % classes
    make = sanc.problems.Logistic if classes == 2 else sanc.problems.Softmax
    problem = make(X, y)
    assert (problem.hessian_matrix(np.zeros(problem.dim)) is not None) is formed
    assert make(scipy.sparse.csr_matrix(X), y).hessian_matrix(np.zeros(problem.dim)) is None


def test_a_large_hessian_is_summed_over_blocks(rng, monkeypatch):
    X, weights = rng.standard_normal((200, 5)), rng.uniform(0, 2, 200)
    make = lambda: sanc.problems.Logistic(X, np.arange(200) % 2, weights=weights, intercept=True)
    w, whole = rng.standard_normal(6), make()
    expected = whole.hessian_matrix(w)
    monkeypatch.setattr(sanc.sums.linear, "_CACHE_BLOCK", 1500)
    assert make().hessian_matrix(w) == pytest.approx(expected, abs=1e-14)
    assert expected @ w == pytest.approx(whole.hessian(w)(w), abs=1e-14)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("classes", [2, C])
@pytest.mark.parametrize("kind", ["l2", "nonconvex"])
def test_one_strength_for_each_feature_agrees_with_autograd(X, rng, kind, classes, intercept):
    strengths, y = np.linspace(0.0, 1.0, D), np.arange(N) % classes
    make = Logistic if classes == 2 else Softmax
    problem = make(X, y, penalty=kind, strength=strengths, intercept=intercept)
    plain = make(X, y, penalty="none", intercept=intercept)
    rows = problem.columns
    w, v = rng.standard_normal(problem.dim), rng.standard_normal(problem.dim)

    def penalties(w):
        square = w.reshape(rows, -1)[:, :D] ** 2
        terms = square / 2 if kind == "l2" else square / (1 + square)
        return (torch.from_numpy(strengths) * terms).sum()

    value, gradient = penalties(torch.from_numpy(w)), torch.autograd.functional.jacobian(penalties, torch.from_numpy(w))
    hessian = torch.autograd.functional.hessian(penalties, torch.from_numpy(w)).numpy()
    assert problem.value(w) == pytest.approx(plain.value(w) + value.item(), rel=1e-12)
    expected = plain.value_and_gradient(w)[1] + gradient.numpy()
    assert problem.value_and_gradient(w)[1] == pytest.approx(expected, abs=1e-12)
    assert problem.hessian(w)(v) == pytest.approx(plain.hessian(w)(v) + hessian @ v, abs=1e-12)
    assert problem.form_hessian(w) @ v == pytest.approx(problem.hessian(w)(v), abs=1e-12)


def test_the_matrix_of_a_softmax_with_intercepts_is_regular(rng):
    X, y = rng.standard_normal((60, 4)), np.arange(60) % 3
    problem = Softmax(X, y, strength=0.1, intercept=True)
    w, v = rng.standard_normal(problem.dim), rng.standard_normal((3, 5))
    v[:, -1] -= v[:, -1].mean()  # equal changes of all intercepts change nothing
    matrix = problem.hessian_matrix(w)
    assert matrix @ v.reshape(-1) == pytest.approx(problem.hessian(w)(v.reshape(-1)), abs=1e-12)
    assert np.linalg.eigvalsh(matrix)[0] > 1e-3 > np.abs(np.linalg.eigvalsh(problem.form_hessian(w))).min()
