"""`minimize` on finite sums: samples, and sums that a user defines."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from scipy.optimize import rosen_der

import sanc
from sanc import Status
from sanc.problems import Logistic
from sanc.sums.oracle import Draws


def test_samples_depend_on_the_seed_and_not_on_the_method(problem):
    w0 = np.ones(6)
    first = {}
    for method in ("sanc", "scr", "cr", "ncd", "sgd"):
        res = sanc.minimize(
            problem, w0, method=method, preset="paper", batch_size=30, seed=4, max_iter=1, certify=False
        )
        first[method] = res.history[0].grad_norm
    assert len(set(first.values())) == 1
    runs = [sanc.minimize(problem, w0, batch_size=30, seed=s, max_iter=20, certify=False).x for s in (4, 4, 5)]
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])


def test_samples_have_the_given_sizes(problem):
    res = sanc.minimize(
        problem, np.ones(6), preset="paper", batch_size=30, hessian_batch_size=20, objective_batch_size=10,
        max_iter=1, certify=False,
    )  # fmt: skip
    calls, record = res.calls, res.history[0]
    assert calls.gradient == 30 and calls.product == 20 * record.krylov_dim and calls.value == 10 * (1 + record.trials)
    assert calls.paper_calls == 30 + 5 * 20


def test_all_components_are_the_exact_objective(problem):
    res = sanc.minimize(problem, np.ones(6))
    assert res.status is Status.SECOND_ORDER
    assert np.linalg.norm(problem.value_and_gradient(res.x)[1]) <= 1e-8
    reference = scipy.optimize.minimize(
        problem.value, res.x + 0.01, jac=lambda w: problem.value_and_gradient(w)[1], tol=1e-12
    )
    assert res.fun == pytest.approx(reference.fun, rel=1e-10)


def test_draws_depend_on_seed_iteration_and_role_only():
    places = [(iteration, role) for iteration in range(40) for role in range(3)]
    one, other = Draws(50, 4, "uniform"), Draws(50, 4, "uniform")
    drawn = {place: one.rows(*place, 10).tolist() for place in places}
    assert all(other.rows(*place, 10).tolist() == drawn[place] for place in reversed(places))
    assert len({tuple(sorted(draw)) for draw in drawn.values()}) == len(places)
    assert Draws(50, 5, "uniform").rows(0, 0, 10).tolist() != drawn[0, 0]
    counts = np.bincount(np.concatenate(list(drawn.values())), minlength=50)
    assert all(len(set(draw)) == 10 for draw in drawn.values()) and counts.min() > 5 and counts.max() < 45


def test_growing_samples_of_scr(problem):
    res = sanc.minimize(
        problem, np.ones(6), method="scr", preset="paper", batch_size=10, grow_samples=True, max_iter=40, certify=False
    )
    sizes = np.diff([0] + [r.calls.gradient for r in res.history])
    assert sizes[0] == 10 and 10 < sizes.max() <= problem.n
    constant = sanc.minimize(
        problem, np.ones(6), method="scr", preset="paper", batch_size=10, max_iter=40, certify=False
    )
    assert set(np.diff([0] + [r.calls.gradient for r in constant.history])) == {10}


def test_sparse_and_dense_data_give_the_same_run(problem):
    sparse = Logistic(scipy.sparse.csr_matrix(problem.X), problem.y.astype(int), penalty="nonconvex", strength=0.05)
    runs = [sanc.minimize(p, np.ones(6), batch_size=40, max_iter=15, certify=False) for p in (problem, sparse)]
    assert runs[0].x == pytest.approx(runs[1].x, abs=1e-9)


def test_errors_name_bad_batch_sizes(problem):
    for given, words in [
        (dict(batch_size=201), ["batch_size = 201", "200 components"]),
        (dict(batch_size=0), ["batch_size = 0"]),
        (dict(batch_size=2.5), ["batch_size = 2.5"]),
        (dict(batch_size=10, hessian_batch_size=500), ["hessian_batch_size = 500"]),
        (dict(batch_size=10, method="arc"), ["arc", "exact"]),
        (dict(jac=rosen_der), ["jac is given", "leave it out"]),
    ]:
        with pytest.raises(sanc.ArgumentError) as caught:
            sanc.minimize(problem, np.ones(6), **given)
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(sanc.ArgumentError, match="5 entries and the problem 6 variables"):
        sanc.minimize(problem, np.ones(5))


def test_a_sample_of_all_components_is_the_exact_objective(problem):
    res = sanc.minimize(problem, np.ones(6), batch_size=problem.n, preset="robust")
    assert res.status is Status.SECOND_ORDER


def test_sampling_without_samples_is_an_error(problem):
    with pytest.raises(sanc.ArgumentError, match="sampling = 'buffered' has no effect without samples: pass"):
        sanc.minimize(problem, np.ones(6), sampling="buffered")
    sanc.minimize(problem, np.ones(6), sampling="buffered", batch_size=20, max_iter=1)


class UserSum(sanc.problems.FiniteSum):
    """½‖w‖², with entries replaced."""

    n, dim, dtype = 4, 3, np.dtype(float)

    def __init__(self, **entries):
        self.__dict__.update(entries)

    def subset(self, rows):
        return self

    def value(self, w):
        return 0.5 * w @ w

    def value_and_gradient(self, w):
        return 0.5 * w @ w, self.__dict__.get("g", w * 1.0)

    def hessian(self, w):
        return self.__dict__.get("product", lambda v: v * 1.0)


@pytest.mark.parametrize(("entries", "words"), [
    ({"n": None}, r"UserSum\.n = None"),
    ({"dim": 2.5}, r"UserSum\.dim = 2\.5"),
    ({"dtype": np.dtype(int)}, r"UserSum\.dtype"),
    ({"g": np.ones(2)}, r"value_and_gradient returned .* shape \(3,\)"),
    ({"g": [1.0, 2.0, 3.0]}, "value_and_gradient returned"),
    ({"product": np.eye(3)}, "hessian returned .* return a function of v"),
    ({"product": lambda v: v[:2]}, r"the function that hessian returned returned .* shape \(3,\)"),
])  # fmt: skip
def test_errors_name_mistakes_in_a_user_defined_sum(entries, words):
    assert sanc.minimize(UserSum(), np.ones(3)).success
    with pytest.raises(sanc.SancError, match=words):
        sanc.minimize(UserSum(**entries), np.ones(3))
