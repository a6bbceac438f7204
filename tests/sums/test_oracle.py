"""The samples of an iteration: drawn as NumPy draws, and the same sums as subsets of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

import sanc
from sanc.oracles import samples
from sanc.oracles.finite_sum import FiniteSumOracle
from sanc.oracles.samples import GRADIENT, HESSIAN, OBJECTIVE, Draws, Sample, Samples, buffered_order
from sanc.problems import Logistic, NonconvexSVM, Softmax
from sanc.rows import Pool

N, D = 60, 9


def matrix(rng, form, dtype=np.float64):
    """A matrix in one of four forms, and the same as a plain array."""
    X = rng.standard_normal((N, D)).astype(dtype)
    if form != "dense":
        X[rng.random((N, D)) < (0.95 if form == "mostly zero" else 0.6)] = 0.0
        X[[0, 7, N - 1]] = 0.0
    return (getattr(scipy.sparse, form)(X) if form.startswith("csr") else X), X


FORMS = ["dense", "mostly zero", "csr_matrix", "csr_array"]


@pytest.mark.parametrize("n", [2, 3, 25, 900, 10_000, 10_001, 70_000])
def test_many_streams_draw_what_numpy_draws(n, rng):
    for size in sorted({1, 2, min(5, n), min(31, n), min(124, n), min(n - 1, 400), min(n, 400), min(n // 20 + 1, 600)}):
        seed = int(rng.integers(1000))
        streams = [(int(rng.integers(10**6)), int(rng.integers(3))) for _ in range(40)]
        drawn = Draws(seed).choices(n, size, streams)
        one = Draws(seed)
        expected = [one.at(*stream).choice(n, size, replace=False, shuffle=False) for stream in streams]
        assert drawn.dtype == np.intp and np.array_equal(drawn, expected)


def test_a_second_try_for_random_bits_is_numpys(monkeypatch):
    """Where NumPy may throw random bits away it is asked itself: that is once in a million times."""
    streams, asked = [(k, 0) for k in range(4000)], []
    choice = Draws.choice
    monkeypatch.setattr(Draws, "choice", lambda self, *given: asked.append(given[2]) or choice(self, *given))
    n, size = 10_000, 400
    drawn = Draws(1).choices(n, size, streams)
    words = np.array([Draws(1).at(*stream).bit_generator.random_raw(size // 2) for stream in streams])
    low = words.view(np.uint32).astype(np.uint64) * np.arange(n - size + 1, n + 1, dtype=np.uint64) % 2**32
    small = np.nonzero((low < n).any(axis=1))[0].tolist()
    assert small and set(small) <= set(asked)
    for k in small:
        assert np.array_equal(drawn[k], Draws(1).at(k, 0).choice(n, size, replace=False, shuffle=False))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sampling", ["uniform", "buffered"])
def test_samples_are_the_subsets_of_the_rows_that_were_drawn(form, dtype, sampling, rng):
    X, plain = matrix(rng, form, dtype)
    y, rel = rng.integers(0, 2, N), 1e-12 if dtype == np.float64 else 2e-5
    problems = [
        (Logistic(X, y, strength=0.2), Logistic(plain, y, strength=0.2)),
        (Logistic(X, y, penalty="l2", strength=0.2), Logistic(plain, y, penalty="l2", strength=0.2)),
        (Logistic(X, y, penalty="none"), Logistic(plain, y, penalty="none")),
        (NonconvexSVM(X, 2 * y - 1), NonconvexSVM(plain, 2 * y - 1)),
    ]
    sizes = [12, 12, 8]
    for problem, reference in problems:
        drawn = Samples(problem, list(sizes), 5, sampling)
        generator = Draws(5)
        for k in range(40):
            assert drawn.begin(k, products=True) and not drawn.begin(k, products=True)
            x, other, v = (rng.standard_normal(D).astype(dtype) for _ in range(3))
            for role in rng.permutation(3).tolist():
                if sampling == "uniform":
                    rows = generator.at(k, role).choice(N, sizes[role], replace=False, shuffle=False)
                else:
                    epoch, batch = divmod(k, N // sizes[role])
                    order = buffered_order(N, sizes[role], np.random.default_rng((5, epoch, role)))
                    rows = order[batch * sizes[role] :][: sizes[role]]
                sample, subset = drawn[role], reference.subset(rows)
                assert isinstance(sample, Sample) and sample is drawn[role] and sample.n == sizes[role]
                for w in (x, other, x):
                    value, g = sample.value_and_gradient(w)
                    expected, slope = subset.value_and_gradient(w)
                    assert value == pytest.approx(expected, rel=rel) == sample.value(w)
                    assert g == pytest.approx(slope, rel=rel, abs=rel) and g.dtype == dtype
                    product = sample.hessian(w)(v)
                    assert product == pytest.approx(subset.hessian(w)(v), rel=rel, abs=rel) and product.dtype == dtype


@pytest.mark.parametrize("form", ["dense", "csr_matrix"])
@pytest.mark.parametrize("types", [(np.float32, np.float64), (np.float64, np.float32)])
def test_a_point_of_another_type(form, types, rng):
    X, plain = matrix(rng, form, types[0])
    y = rng.integers(0, 2, N)
    drawn = Samples(Logistic(X, y, penalty="l2"), [12, 12, 12], 0, "uniform")
    drawn.begin(0, products=True)
    subset = Logistic(plain, y, penalty="l2").subset(Draws(0).at(0, 1).choice(N, 12, replace=False, shuffle=False))
    w, v = rng.standard_normal(D).astype(types[1]), rng.standard_normal(D).astype(types[1])
    for _ in range(2):
        assert drawn[HESSIAN].value(w) == pytest.approx(subset.value(w), rel=1e-6)
        g, product = drawn[HESSIAN].value_and_gradient(w)[1], drawn[HESSIAN].hessian(w)(v)
        assert g.dtype == product.dtype == np.float64
        assert g == pytest.approx(subset.value_and_gradient(w)[1], abs=1e-6)
        assert product == pytest.approx(subset.hessian(w)(v), abs=1e-6)
        w = w + np.ones_like(w)


def test_what_is_gathered_together(rng, monkeypatch):
    X, _ = matrix(rng, "csr_matrix")
    y = rng.integers(0, 2, N)

    class Mine(Logistic):
        pass

    def made(problem, sizes, products=True):
        drawn = Samples(problem, sizes, 0, "uniform")
        drawn.begin(0, products)
        return [type(drawn[role]) for role in range(3)]

    assert made(Logistic(X, y), [12, 9, 8]) == [Sample] * 3
    assert made(Logistic(X, y), [12, 9, None]) == [Sample, Sample, Logistic]
    assert made(Logistic(X, y), [12, 9, 8], products=False) == [Sample, Logistic, Sample]
    assert made(Softmax(X, y), [12, 9, 8]) == [Softmax] * 3
    assert made(Mine(X, y), [12, 9, 8]) == [Mine] * 3  # which may measure its rows otherwise
    monkeypatch.setattr(samples, "_TOGETHER", 1 + X.nnz // 3)  # as many as in 20 rows
    assert made(Logistic(X, y), [12, 9, 8]) == [Logistic] * 3
    assert made(Logistic(X, y), [8, 6, 6]) == [Sample] * 3
    monkeypatch.setattr("sanc.rows._sparsetools", None)
    assert made(Logistic(X, y), [8, 6, 6]) == [Logistic] * 3


def test_a_dense_matrix_of_few_zeros_is_not_copied(rng, monkeypatch):
    dense, zeros = matrix(rng, "dense")[0], matrix(rng, "mostly zero")[0]
    assert Pool(dense)._X is dense and Pool(dense).size == N * D
    assert scipy.sparse.issparse(Pool(zeros)._X) and Pool(zeros).size == np.count_nonzero(zeros)
    half = np.where(rng.random((N, D)) < 0.5, dense, 0.0)
    assert Pool(half)._X is half
    monkeypatch.setattr("sanc.rows._MANY", D)  # entries of one row: whatever that holds, all are counted
    dense[::N] = 0.0
    assert Pool(dense)._X is dense


def test_a_matrix_that_is_changed_between_runs(rng):
    X, y = matrix(rng, "mostly zero")[0], rng.integers(0, 2, N)
    problem = Logistic(X.copy(), y, strength=0.1)
    options = {"preset": "paper", "batch_size": 15, "max_iter": 20, "certify": False}
    before = sanc.minimize(problem, np.ones(D), **options).x
    problem.X *= 2
    after = sanc.minimize(problem, np.ones(D), **options).x
    assert not np.allclose(before, after)
    assert np.array_equal(after, sanc.minimize(Logistic(2 * X, y, strength=0.1), np.ones(D), **options).x)


@pytest.mark.parametrize("widths", [(np.int32, np.int64), (np.int64, np.int32), (np.int64, np.int64)])
def test_index_arrays_of_any_width_and_entries_in_any_order(widths, rng):
    _, plain = matrix(rng, "csr_matrix")
    rows, columns = np.nonzero(plain)
    rows, columns, data = (np.concatenate([part, part]) for part in (rows, columns, plain[rows, columns] / 2))
    order = np.lexsort((rng.random(len(rows)), rows))  # unsorted, and every entry in two halves
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=N))])
    X = scipy.sparse.csr_matrix((data[order], columns[order], indptr), shape=(N, D))
    X.indptr, X.indices = X.indptr.astype(widths[0]), X.indices.astype(widths[1])
    y, w, v = rng.integers(0, 2, N), rng.standard_normal(D), rng.standard_normal(D)
    drawn = Samples(Logistic(X, y), [12, 12, 12], 0, "uniform")
    drawn.begin(0, products=True)
    subset = Logistic(plain, y).subset(Draws(0).at(0, 1).choice(N, 12, replace=False, shuffle=False))
    assert drawn[HESSIAN].value_and_gradient(w)[1] == pytest.approx(subset.value_and_gradient(w)[1], abs=1e-13)
    assert drawn[HESSIAN].hessian(w)(v) == pytest.approx(subset.hessian(w)(v), abs=1e-13)


def test_rows_in_descending_order_leave_nothing_between_them(rng):
    X, plain = matrix(rng, "csr_matrix")
    order = np.sort(np.append(rng.choice(N, 20, replace=False), [0, 0, N - 1]))[None, ::-1]
    (picked,) = Pool(X).rows(order, [slice(0, 23)])
    w = rng.standard_normal(D)
    scores = picked.scores(w)
    assert scores == pytest.approx(plain[order[0]] @ w, abs=1e-13)
    assert not scores.base[1::2].any()  # what SciPy takes for rows between those


def test_samples_that_are_not_gathered_are_let_go_and_drawn_again(rng, monkeypatch):
    problem = Logistic(matrix(rng, "dense")[0], rng.integers(0, 2, N))
    for together in (samples._TOGETHER, 0):
        monkeypatch.setattr(samples, "_TOGETHER", together)
        drawn = Samples(problem, [12, 9, 8], 0, "uniform")
        drawn.begin(3, products=True)
        sample, value = drawn[GRADIENT], drawn[GRADIENT].value(np.ones(D))
        drawn.dismiss(GRADIENT)
        assert (drawn[GRADIENT] is sample) == (together > 0)  # the memory of the others is kept anyway
        assert drawn[GRADIENT].value(np.ones(D)) == pytest.approx(value, rel=1e-14)


def test_an_iteration_without_products_draws_no_hessian_sample(rng, monkeypatch):
    problem = Logistic(matrix(rng, "csr_matrix")[0], rng.integers(0, 2, N))
    asked = []
    draw = Samples._draw
    monkeypatch.setattr(Samples, "_draw", lambda self, k, sizes: asked.extend(sizes) or draw(self, k, sizes))
    options = {"preset": "paper", "batch_size": 12, "objective_batch_size": 8, "max_iter": 20, "certify": False}
    sanc.minimize(problem, np.ones(D), method="sgd", **options)
    assert set(asked) == {GRADIENT, OBJECTIVE}
    asked.clear()
    sanc.minimize(problem, np.ones(D), method="ncd", **options)
    assert set(asked) == {GRADIENT, HESSIAN, OBJECTIVE}
    asked.clear()
    drawn = Samples(problem, [12, 9, 8], 0, "uniform")
    for k, products in enumerate([False, True, False]):
        drawn.begin(k, products)
        assert (drawn[GRADIENT].n, drawn[OBJECTIVE].n) == (12, 8)
    assert asked == [GRADIENT, OBJECTIVE, GRADIENT, HESSIAN, OBJECTIVE, GRADIENT, OBJECTIVE]


def test_draws_of_the_iterations_to_come_grow_with_the_run_and_end_with_a_change(rng, monkeypatch):
    X, _ = matrix(rng, "csr_matrix")
    drawn = Samples(Logistic(X, rng.integers(0, 2, N)), [6, 6, 6], 0, "uniform")
    counts = []
    gather = samples.Gatherer.__call__
    monkeypatch.setattr(
        samples.Gatherer, "__call__", lambda self, rows: counts.append(len(rows[0])) or gather(self, rows)
    )
    for k in range(300):
        drawn.begin(k, products=True)
        assert drawn[GRADIENT].n == 6
    assert counts[:12] == [1] * 12 and counts[-1] == 32 and counts == sorted(counts)
    counts.clear()
    drawn.wanted[0] = 9
    for k in (300, 301, 400, 401, 17):
        drawn.begin(k, products=True)
        assert drawn[GRADIENT].n == 9
    assert counts == [1, 32, 1, 32, 1]  # 300 begins anew, as do 400 and 17, which follow none


@pytest.mark.parametrize("form", ["dense", "mostly zero", "csr_matrix"])
@pytest.mark.parametrize("method", ["sanc", "scr", "crm", "ncd", "sgd"])
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_runs_are_the_same_with_samples_made_one_by_one(form, method, preset, rng, monkeypatch):
    problem = Logistic(matrix(rng, form)[0], rng.integers(0, 2, N), strength=0.1)

    def run():
        return sanc.minimize(problem, np.ones(D), method=method, preset=preset, batch_size=12, hessian_batch_size=10,
                             objective_batch_size=8, max_iter=25, certify=False)  # fmt: skip

    together = run()
    monkeypatch.setattr(samples, "_TOGETHER", 0)
    apart = run()
    assert together.calls == apart.calls and together.nfev == apart.nfev
    assert together.x == pytest.approx(apart.x, rel=1e-9, abs=1e-11)
    for one, other in zip(together.history, apart.history, strict=True):
        assert (one.branch, one.krylov_dim, one.trials, one.calls) == (
            other.branch, other.krylov_dim, other.trials, other.calls)  # fmt: skip
        assert one.value == pytest.approx(other.value, rel=1e-9)


def test_the_whole_sum_is_not_drawn_from(rng):
    problem = Logistic(matrix(rng, "mostly zero")[0], rng.integers(0, 2, N))
    oracle = FiniteSumOracle(problem, (None, None, None), 0)
    oracle.begin(0)
    oracle.value(np.ones(D))
    assert oracle.samples[OBJECTIVE] is problem and oracle.samples._pool is None
