"""`minimize`: ways to pass a function, endings, finite sums, resuming, cost and bad input."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import asdict
from itertools import groupby, pairwise

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess, rosen_hess_prod

import sanc
from composing import composed
from sanc import Branch, Status
from sanc.core.record import Note
from sanc.problems import Logistic
from sanc.sums.oracle import Draws

X0 = [-1.2, 1.0, 0.7, -0.3]


def rosen_torch(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@pytest.fixture
def problem(rng):
    X = rng.standard_normal((200, 6))
    y = (X @ np.array([1.0, -2, 0.5, 0, 0, 1]) + 0.5 * rng.standard_normal(200) > 0).astype(int)
    return Logistic(X, y, penalty="nonconvex", strength=0.05)


WAYS = {
    "torch": lambda: dict(fun=rosen_torch, x0=torch.tensor(X0, dtype=torch.float64)),
    "torch function, array start": lambda: dict(fun=rosen_torch, x0=X0),
    "hessp": lambda: dict(fun=rosen, x0=X0, jac=rosen_der, hessp=rosen_hess_prod),
    "hess": lambda: dict(fun=rosen, x0=X0, jac=rosen_der, hess=rosen_hess),
    "sparse hess": lambda: dict(fun=rosen, x0=X0, jac=rosen_der, hess=lambda x: scipy.sparse.csr_matrix(rosen_hess(x))),
    "differences": lambda: dict(fun=rosen, x0=X0, jac=rosen_der),
    "both at once": lambda: dict(fun=lambda x: (rosen(x), rosen_der(x)), x0=X0, jac=True, hessp=rosen_hess_prod),
    "torch, forward": lambda: dict(fun=rosen_torch, x0=X0, hvp="forward-over-reverse"),
    "torch, differences": lambda: dict(fun=rosen_torch, x0=X0, hvp="finite-difference"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_pass_a_function(way):
    given = WAYS[way]()
    res = sanc.minimize(**given)
    assert isinstance(res, scipy.optimize.OptimizeResult)
    assert res.success and res.status is Status.SECOND_ORDER and res.message == Status.SECOND_ORDER.sentence
    assert isinstance(res.x, type(given["x0"]) if isinstance(given["x0"], torch.Tensor) else np.ndarray)
    x = np.asarray(res.x)
    assert np.linalg.norm(rosen_der(x)) <= 1e-7
    assert res.fun == pytest.approx(rosen(x), abs=1e-14)
    assert np.asarray(res.jac) == pytest.approx(rosen_der(x), abs=1e-7)
    assert np.linalg.eigvalsh(rosen_hess(x))[0] > 0
    assert res.nit == len(res.history) > 3
    assert res.nfev > 0 and res.njev > 0 and res.nhev > 0
    assert res.certificate.second_order
    assert all(isinstance(record, sanc.Record) for record in res.history)


def test_counts_are_the_numbers_of_calls():
    counts = {"f": 0, "g": 0, "h": 0}

    def f(x):
        counts["f"] += 1
        return rosen(x)

    def g(x):
        counts["g"] += 1
        return rosen_der(x)

    def h(x, v):
        counts["h"] += 1
        return rosen_hess_prod(x, v)

    res = sanc.minimize(f, X0, jac=g, hessp=h)
    assert res.nfev == counts["f"] and res.njev == counts["g"]
    assert res.nhev == counts["h"] - res.certificate.products
    calls = res.calls
    assert (calls.value, calls.gradient, calls.product) == (res.nfev, res.njev, res.nhev)
    # one value and one gradient at each point
    assert res.njev == 1 + sum(r.branch is not Branch.STAYED for r in res.history)
    assert res.nfev == 1 + sum(r.trials for r in res.history)


def test_the_value_at_a_point_is_never_computed_twice(problem):
    """Even if SCR rejects many steps, f(x) is computed on all rows once for each x."""
    res = sanc.minimize(
        problem, np.ones(6), method="scr", preset="paper", batch_size=20, max_iter=120, certify=False, seed=1
    )
    assert max(len(list(group)) for key, group in groupby(r.branch is Branch.STAYED for r in res.history) if key) > 3
    assert res.nfev == 1 + sum(r.trials for r in res.history)


def test_a_rejected_step_is_solved_again_without_a_product():
    res = sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, sigma0=1e-6)
    resolved = [r for r in res.history if r.trials > 1]
    assert resolved
    assert res.nhev == sum(r.krylov_dim for r in res.history)  # trial steps need no products


def test_paper_preset_evaluates_each_rejection_once():
    res = sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, method="arc", preset="paper",
                        max_iter=300)  # fmt: skip
    assert {r.trials for r in res.history} == {1}
    rejected = [i for i, r in enumerate(res.history[:-1]) if r.branch is Branch.STAYED]
    assert rejected
    for i in rejected:
        assert res.history[i + 1].sigma == 2 * res.history[i].sigma
        assert res.history[i + 1].grad_norm == res.history[i].grad_norm


@pytest.mark.parametrize("method", ["sanc", "scr", "arc", "crm", "cr"])
def test_every_member_finds_the_minimum(method):
    res = sanc.minimize(lambda x: ((x**2 - 1) ** 2).sum() + 0.1 * x.sum(), torch.tensor([0.3, -0.2, 2.0]).double(),
                        method=method, sigma0=5.0)  # fmt: skip
    assert res.success
    roots = np.roots([4.0, 0.0, -4.0, 0.1]).real
    for coordinate in np.asarray(res.x):
        assert np.min(np.abs(roots - coordinate)) < 1e-7


def test_ncd_and_sgd_find_the_minimum_too():
    def f(x):
        return ((x**2 - 1) ** 2).sum()

    for method, options in (("ncd", {"L1": 20.0, "L2": 50.0}), ("sgd", {"lr": 0.02})):
        res = sanc.minimize(f, torch.tensor([0.3, -0.2]).double(), method=method, preset="paper", **options)
        assert res.success, method
        assert np.abs(np.asarray(res.x)) == pytest.approx([1.0, 1.0])


def test_shapes_and_arguments_are_kept():
    target = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    def f(x, scale, shift):
        assert x.shape == (2, 3)
        return scale * ((x - target - shift) ** 2).sum()

    res = sanc.minimize(f, torch.zeros(2, 3, dtype=torch.float64), args=(2.0, 1.0))
    assert res.x.shape == (2, 3) and res.jac.shape == (2, 3)
    assert torch.allclose(res.x, target + 1)
    assert sanc.minimize(lambda x: (x**2).sum(), 3.0).x.shape == ()


def test_float32():
    res = sanc.minimize(rosen_torch, torch.tensor(X0))
    assert res.x.dtype == torch.float32 and res.success
    assert float(res.fun) == pytest.approx(0.0, abs=1e-6) or float(res.fun) == pytest.approx(3.7014, abs=1e-3)


# ---------------------------------------------------------------------------------------------- SciPy's custom method


def test_as_a_method_of_scipy():
    seen = []
    res = scipy.optimize.minimize(
        rosen, X0, jac=rosen_der, hessp=rosen_hess_prod, method=sanc.scipy_method, tol=1e-6, callback=seen.append,
        options={"preset": "paper", "method": "arc", "krylov_dim": 4, "maxiter": 2000},
    )  # fmt: skip
    assert res.success and np.linalg.norm(res.jac) <= 1e-6
    assert len(seen) == res.nit and seen[-1] == pytest.approx(res.x)
    same = scipy.optimize.minimize(
        lambda x: (rosen(x), rosen_der(x)), X0, jac=True, hess=rosen_hess, method=sanc.scipy_method
    )
    assert same.success
    limited = scipy.optimize.minimize(
        rosen, X0, jac=rosen_der, hessp=rosen_hess_prod, method=sanc.scipy_method, options={"maxiter": 2}
    )
    assert limited.nit == 2 and limited.status is Status.ITERATION_LIMIT and not limited.success


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"bounds": [(1, 0)] * 4, "jac": rosen_der}, "bounds"),
        ({"constraints": {"type": "eq", "fun": rosen}, "jac": rosen_der}, "constraints"),
        ({"jac": rosen_der, "options": {"sigma": 1.0}}, "sigma0"),
    ],
)
def test_scipy_misuse(given, word):
    with pytest.raises(sanc.SancError, match=word):
        scipy.optimize.minimize(rosen, X0, method=sanc.scipy_method, **given)


# ---------------------------------------------------------------------------------------------- endings


def test_limits(problem):
    w0 = np.ones(6)
    by_iterations = sanc.minimize(problem, w0, batch_size=20, max_iter=7)
    assert by_iterations.status is Status.ITERATION_LIMIT and by_iterations.nit == 7
    by_calls = sanc.minimize(problem, w0, batch_size=20, preset="paper", max_calls=1000)
    assert by_calls.status is Status.CALL_LIMIT
    assert by_calls.history[-2].calls.paper_calls < 1000 <= by_calls.calls.paper_calls
    by_time = sanc.minimize(problem, w0, batch_size=20, max_time=0.05, max_iter=10**9)
    assert by_time.status is Status.TIME_LIMIT
    for res in (by_iterations, by_calls, by_time):
        assert not res.success and res.message.endswith(".") and len(res.message.split()) > 5
        assert res.fun == pytest.approx(problem.value(res.x))  # on all rows, whatever the samples were
    assert sanc.minimize(problem, w0, max_iter=0).nit == 0


def test_no_limit_on_iterations():
    res = sanc.minimize(lambda x: (x**2).sum(), np.ones(2), max_iter=None)
    assert res.success


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"jac": lambda x: 2 * x + 1j}, "jac returned"),
        ({"jac": lambda x: ["a", "b"]}, "jac returned"),
        ({"jac": lambda x: 2 * x, "hessp": lambda x, v: 2 * v + 1j}, "hessp returned"),
        ({"jac": lambda x: 2 * x, "hess": lambda x: np.eye(2) * (1 + 1j)}, "hess returned|cannot be"),
    ],
)
def test_errors_name_functions_that_return_no_real_numbers(kind, given, word):
    with pytest.raises(sanc.SancError, match=word):
        sanc.minimize(lambda x: float((x**2).sum()), kind([1.0, 2.0]), **given)
    with pytest.raises(sanc.ArgumentTypeError, match="fun returned"):
        sanc.minimize(lambda x: (x**2).sum() + 1j, kind([1.0, 2.0]), jac=lambda x: 2 * x)


def test_certificates_use_the_remaining_time(monkeypatch):
    """Every product takes one second of a simulated clock."""
    seconds = 0.0

    def hessp(x, v):
        nonlocal seconds
        seconds += 1.0
        return weights * v

    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    weights = np.linspace(0.0, 100.0, 500)
    given = {"jac": lambda x: weights * x, "hessp": hessp, "tol": 1e-6}
    res = sanc.minimize(lambda x: 0.5 * weights @ x**2, np.zeros(500), max_time=5.5, **given)
    assert res.certificate.products == 6 and res.status is sanc.Status.TIME_LIMIT and not res.success
    seconds = 0.0
    res = sanc.minimize(lambda x: 0.5 * weights @ x**2, np.ones(500), max_time=0.5, **given)
    assert res.certificate.products == 1 and res.status is sanc.Status.TIME_LIMIT
    seconds = 0.0
    res = sanc.minimize(lambda x: 0.5 * weights @ x**2, np.zeros(500), **given)
    assert res.success and res.certificate.products > 6


def test_callbacks(problem):
    def raises(x):
        raise StopIteration

    for stop in (lambda x: True, raises):
        res = sanc.minimize(problem, np.ones(6), callback=stop)
        assert res.status is Status.CALLBACK and res.nit == 1
    seen = []

    def watch(intermediate_result):
        seen.append(intermediate_result)

    res = sanc.minimize(problem, np.ones(6), callback=watch)
    assert len(seen) == res.nit
    assert seen[-1].record is res.history[-1] and seen[-1].fun == pytest.approx(problem.value(seen[-1].x))


def test_not_finite_at_the_start_is_an_ending():
    for f in (lambda x: torch.log(x).sum(), lambda x: (x * float("nan")).sum()):
        res = sanc.minimize(f, torch.tensor([-1.0, 1.0]))
        assert res.status is Status.NOT_FINITE and not res.success and res.nit == 0
        assert torch.equal(res.x, torch.tensor([-1.0, 1.0]))


def test_a_function_is_minimised_inside_its_domain():
    """A log barrier: f is NaN at trial points outside the domain, which must be rejected."""

    def f(x):
        return x.sum() - torch.log(x).sum() + torch.log(2 - x[0]) * -0.1

    res = sanc.minimize(f, torch.tensor([1.9, 1e-3], dtype=torch.float64), sigma0=1e-6)
    assert res.success and float(res.x[1]) == pytest.approx(1.0, abs=1e-6)


def test_sgd_reports_that_it_stopped_at_a_saddle():
    res = sanc.minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, torch.zeros(2).double(), method="sgd")
    assert res.status is Status.FIRST_ORDER and not res.success
    assert res.certificate.saddle and not res.certificate.second_order


def test_the_paper_ends_if_the_step_is_zero(problem):
    """With samples: g = 0 and s = 0 exactly."""

    class Flat(Logistic):
        def value_and_gradient(self, w):
            return self.value(w), np.zeros(6)

        def hessian(self, w):
            return lambda v: v * 1.0

    flat = Flat(problem.X, problem.y, strength=0.05)
    res = sanc.minimize(flat, np.ones(6), batch_size=10, preset="paper", certify=False)
    assert res.status is Status.STAGNATED is Status.AT_REST and res.nit == 1  # the name in 0.1


def test_a_run_ends_if_roundoff_prevents_the_tolerance():
    """The message explains that the gradient cannot reach the tolerance in this precision."""
    A, b = torch.randn(9, 3), 1e4 * torch.randn(9)
    res = sanc.minimize(lambda x: ((A @ x - b) ** 2).sum(), torch.zeros(3), tol=1e-9)
    assert res.status is Status.STALLED and not res.success and res.nit < 200
    assert torch.allclose(res.x, torch.linalg.lstsq(A, b).solution, rtol=1e-3)


@pytest.mark.parametrize("level", [1.0, 0.0])  # near f = 0 decreases stay above roundoff
@pytest.mark.parametrize(("tol", "ending"), [(0.021, Status.UNCERTIFIED), (1e-3, Status.STALLED)])
def test_a_step_along_a_valley_is_made_if_one_across_it_vanishes_in_roundoff(tol, ending, level):
    """One rounding error of x changes the gradient by 0.06: 0.0205 cannot be lowered, the other component can."""
    least, H = np.array([1 / 3, 0.0]), np.diag([1e15, 1.0])
    linear = np.array([0.0205, 0.0])

    def fun(x):
        d = x - least
        return level + 0.5 * d @ (H @ d) + linear @ d

    res = sanc.minimize(
        fun, np.array([1 / 3, 0.005]), jac=lambda x: H @ (x - least) + linear, hessp=lambda x, v: H @ v, tol=tol
    )
    assert res.status is ending and res.nit < 20 and abs(res.x[1]) < 1e-3
    assert sum(record.branch is Branch.STAYED for record in res.history) <= 10  # a stall is ten of them


@pytest.mark.parametrize("method", ["sanc", "arc"])
@pytest.mark.parametrize("sigma0", [1e-60, 1e20, 1e40, 1e200])
def test_an_extreme_first_sigma_costs_a_few_iterations(method, sigma0):
    """A step below the working precision of x, from a large σ, does not end the run as stalled."""
    given = {"jac": rosen_der, "hessp": rosen_hess_prod, "method": method}
    res = sanc.minimize(rosen, np.array([-1.2, 1.0]), sigma0=sigma0, **given)
    assert res.status is Status.SECOND_ORDER and res.nit < 60
    np.testing.assert_allclose(res.x, 1.0, atol=1e-6)


def test_a_gradient_of_nan_on_the_way_is_not_the_cause_of_the_ending():
    """The step to it is undone and the next one differs; the run ends because of roundoff."""
    least, gap, ys = 1 / 3, [], []

    def fun(x):
        d = x[0] - least
        return 1.0 + 0.5e15 * d * d + 0.0205 * d + np.logaddexp(x[1], -x[1])

    def jac(x):
        missing = any(abs(x[1] - y) < 1e-3 * abs(y) for y in gap)
        return np.full(2, np.nan) if missing else np.array([1e15 * (x[0] - least) + 0.0205, np.tanh(x[1])])

    def run():
        return sanc.minimize(
            fun, np.array([least, 0.9]), jac=jac, hessp=lambda x, v: np.array([1e15 * v[0], v[1] / np.cosh(x[1]) ** 2]),
            tol=1e-3, callback=lambda x: ys.append(x[1]),
        )  # fmt: skip

    run()
    gap.append(next(y for y in ys if 0 < abs(y) < 0.5))
    res = run()
    assert any(record.note == Note.GRADIENT_NOT_FINITE for record in res.history)
    assert res.status is Status.STALLED and abs(res.x[1]) < 1e-3


def test_sigma_falls_further_with_an_exact_objective_than_with_samples():
    """On a quartic, whose curvature decreases, σ falls by its largest factor."""
    weights = torch.linspace(1.0, 9.0, 5, dtype=torch.float64)
    x = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    exact = sanc.minimize(lambda x: weights @ x**4, x.detach(), sigma0=1e-3, max_iter=2).history
    opt, samples = sanc.SANC([x], sigma0=1e-3, minibatch=None), []
    for _ in range(2):
        opt.step(lambda: weights @ x**4)
        samples.append(opt.record)
    falls = [after.sigma / before.sigma for before, after in (exact, samples)]
    assert falls == pytest.approx([1e-6, 1e-3])


def test_too_few_products_leave_a_point_uncertified():
    n = 300
    weights = torch.logspace(-3, 3, n, dtype=torch.float64)
    res = sanc.minimize(lambda x: (weights * x**2).sum(), torch.ones(n).double(), max_products=3)
    assert res.status is Status.UNCERTIFIED and res.success
    assert not res.certificate.second_order and not res.certificate.saddle and "undecided" in str(res.certificate)


# ---------------------------------------------------------------------------------------------- finite sums


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


# ---------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("method", "how"),
    [("scr", "grown")]
    + [
        (method, how)
        for method in ("sanc", "scr", "cr", "crm", "ncd", "sgd")
        for how in ("sampled", "exact", "torch", "callable")
    ],
)
def test_an_interrupted_run_resumes_bit_for_bit(problem, method, how):
    """Stop anywhere, pickle the state, resume: the records are those of a run without a stop."""
    given = {
        "sampled": dict(fun=problem, x0=np.ones(6), batch_size=20),
        "grown": dict(fun=problem, x0=np.ones(6), batch_size=20, grow_samples=True),
        "exact": dict(fun=problem, x0=np.ones(6)),
        "torch": dict(fun=rosen_torch, x0=X0),
        "callable": dict(fun=rosen, x0=X0, jac=rosen_der, hessp=rosen_hess_prod),
    }[how] | dict(method=method, seed=3, certify=False, **composed(method, "paper", L1=1e3, L2=1e3))
    given |= {"lr": 1e-4} if method == "sgd" else {}
    saved = []

    def save(intermediate_result):
        saved.append(pickle.dumps(intermediate_result.state))

    whole = sanc.minimize(**given, max_iter=60, callback=save)
    for cut in {3, 7, 22, 41} & set(range(whole.nit)):
        rest = sanc.minimize(**given, max_iter=60, resume=pickle.loads(saved[cut - 1]))
        assert whole.nit == rest.nit and len(rest.history) == whole.nit - cut
        for ours, theirs in zip(rest.history, whole.history[cut:], strict=True):
            a, b = asdict(ours) | {"seconds": 0}, asdict(theirs) | {"seconds": 0}
            assert repr(a) == repr(b)
        assert np.array_equal(np.asarray(rest.x), np.asarray(whole.x))


def test_a_state_of_another_run_is_an_error(problem):
    states = []

    def save(intermediate_result):
        states.append(intermediate_result.state)

    sanc.minimize(problem, np.ones(6), batch_size=20, max_iter=1, callback=save)
    with pytest.raises(sanc.ArgumentError, match="of method 'sanc', not 'scr'"):
        sanc.minimize(problem, np.ones(6), method="scr", resume=states[0])
    with pytest.raises(sanc.ArgumentError, match="6 variables, not 4"):
        sanc.minimize(rosen_torch, X0, resume=states[0])
    with pytest.raises(sanc.ArgumentError, match=r"resume lacks \['best_grad_norm', "):
        sanc.minimize(rosen_torch, X0, resume={})
    with pytest.raises(sanc.ArgumentError, match="resume = 3"):
        sanc.minimize(rosen_torch, X0, resume=3)


# ---------------------------------------------------------------------------------------------- Krylov choices


def test_a_regenerated_basis_makes_the_same_steps(problem):
    options = {"preset": "paper", "batch_size": 40, "max_iter": 10, "certify": False}
    plain = sanc.minimize(problem, np.ones(6), **options)
    other = sanc.minimize(problem, np.ones(6), lanczos="regenerate", **options)
    assert plain.x == pytest.approx(other.x, abs=1e-8)
    assert plain.calls.paper_calls == other.calls.paper_calls  # the paper does not count the second pass
    assert other.calls.product > plain.calls.product  # the total does


def test_early_stop_needs_both_tests():
    """Lanczos continues while either the model gradient or the Ritz residual is above its tolerance."""
    weights = np.linspace(1.0, 50.0, 30)

    def run(eps, eps_g):
        res = sanc.minimize(
            lambda x: 0.5 * float(x @ (weights * x)), np.ones(30), jac=lambda x: weights * x,
            hessp=lambda x, v: weights * v, preset="paper", krylov_dim=30, epsilon=eps, epsilon_g=eps_g, max_iter=1,
            certify=False, max_products=1,
        )  # fmt: skip
        return res.history[0].krylov_dim

    loose, by_model, by_ritz = run(1e6, 1e6), run(1e6, 1e-3), run(1e-12, 1e6)
    assert loose == 1 and loose < by_model < 30
    assert by_ritz >= 1
    g = np.linalg.norm(weights)
    # the Ritz test at j: β_j|v_j| ≤ max(ε, ‖g‖)/2, checked densely
    Q, _ = np.linalg.qr(np.stack([weights ** (k + 1) for k in range(by_ritz)], axis=1))
    T = Q.T @ (weights[:, None] * Q)
    lam, V = np.linalg.eigh(T)
    ritz = Q @ V[:, 0]
    assert np.linalg.norm(weights * ritz - lam[0] * ritz) <= g / 2 * (1 + 1e-6)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(x0=[np.nan, 1.0]), ["x0 holds NaN"]),
        (dict(x0=[]), ["x0 is empty"]),
        (dict(x0="abc"), ["x0", "real numbers"]),
        (dict(x0=torch.ones(2).half()), ["x0", "float16"]),
        (dict(fun=3), ["fun = 3", "function"]),
        (dict(method="sancc"), ["method = 'sancc'", "did you mean 'sanc'"]),
        (dict(method=3), ["method = 3"]),
        (dict(preset="robst"), ["did you mean 'robust'"]),
        (dict(sigm0=1.0), ["'sigm0'", "did you mean 'sigma0'"]),
        (dict(maxiters=3), ["'maxiters'", "did you mean"]),
        (dict(maxiter=3, max_iter=4), ["'maxiter' is given together with 'max_iter'"]),
        (dict(options={"gtol": 1e-6}, tol=1e-5), ["'gtol' is given in options"]),
        (dict(options={"maxfev": 5}, maxfun=6), ["'maxfev' is given in options"]),
        (dict(maxfev=0), ["max_nfev = 0"]),
        (dict(bounds=[1, 2]), ["bounds", "pairs"]),
        (dict(constraints={"type": "eq", "fun": rosen}), ["constraints"]),
        (dict(jac="4-point"), ["jac = '4-point'", "3-point"]),
        (dict(jac="3-point", hessp=rosen_hess_prod), ["jac = '3-point'", "hessp"]),
        (dict(jac=rosen_der, hess="BFGS"), ["hess = 'BFGS'"]),
        (dict(jac="cs", x0=torch.ones(2)), ["cs", "leave jac out"]),
        (dict(x0={}), ["x0 is empty"]),
        (dict(x0={"a": torch.ones(2), "b": np.ones(2)}), ["x0['b']", "tensors only"]),
        (dict(x0={"a": torch.ones(2), "b": [torch.ones(2).double()]}), ["x0['b'][0]", "one type"]),
        (dict(x0={"a": "text"}), ["x0['a']", "real numbers"]),
        (dict(x0={"a": torch.tensor([math.nan])}), ["x0 holds NaN"]),
        (dict(fun=lambda p: 1.0, jac=lambda p: {"b": 1.0}, x0={"a": 1.0}), ["jac returned a tree", "x0['a']"]),
        (dict(fun=lambda p: 1.0, jac=lambda p: {"a": [1.0]}, x0={"a": 1.0}), ["jac returned a tree"]),
        (dict(fun=lambda p: 1.0, jac=lambda p: {"a": np.ones(2)}, x0={"a": np.ones(3)}), ["shape (2,) for x0['a']"]),
        (dict(options={"sigm0": 1.0}), ["did you mean 'sigma0'"]),
        (dict(options={"sigma0": 1.0}, sigma0=2.0), ["'sigma0' is given in options"]),
        (dict(options={"max_iter": 1}, max_iter=2), ["'max_iter' is given in options"]),
        (dict(eta1=0.5, eta2=0.4), ["eta2 = 0.4"]),
        (dict(krylov_dim=True), ["krylov_dim = True", "an integer"]),
        (dict(krylov_dim=2.5), ["krylov_dim = 2.5", "an integer"]),
        (dict(sigma0=math.nan), ["sigma0 = nan", "a number"]),
        (dict(sigma0=True), ["sigma0 = True", "a number"]),
        (dict(sigma0="1"), ["sigma0 = '1'", "a number"]),
        (dict(sigma0=-1.0), ["sigma0 = -1.0", "positive"]),
        (dict(rounding_guard=1), ["rounding_guard = 1", "True or False"]),
        (dict(sigma_rule="papier"), ["sigma_rule = 'papier'", "paper"]),
        (dict(tol=0.0), ["tol = 0.0"]),
        (dict(tol="x"), ["tol = 'x'"]),
        (dict(max_calls="5"), ["max_calls = '5'"]),
        (dict(options=5), ["options = 5", "mapping"]),
        (dict(options={"tol": 1e-6}, tol=1e-5), ["'tol' is given in options"]),
        (dict(jac=rosen_der, fun=rosen, hess=lambda x: np.ones((3, 3))), ["hess returned", "(3, 3)", "(4, 4)"]),
        (dict(max_iter=-1), ["max_iter = -1"]),
        (dict(max_calls=0), ["max_calls = 0"]),
        (dict(max_products=0), ["max_products = 0"]),
        (dict(seed=1.5), ["seed = 1.5"]),
        (dict(hvp="fast"), ["hvp = 'fast'"]),
        (dict(batch_size=3), ["batch_size = 3", "finite sum"]),
        (dict(hessp=rosen_hess_prod), ["jac is missing"]),
        (dict(jac=3), ["jac = 3"]),
        (dict(jac=rosen_der, hessp=3), ["hessp = 3"]),
        (dict(fun=rosen), ["fun", "write it with torch operations, or pass its gradient as jac"]),
        (dict(fun=lambda x: np.sin(x.numpy()).sum()), ["no torch function", "jac"]),
        (dict(fun=lambda x: x), ["shape (4,)", "mean()"]),
        (dict(fun=lambda x: x, jac=rosen_der), ["fun returned 4 numbers"]),
        (dict(fun=rosen, jac=lambda x: np.ones(3)), ["jac returned 3 numbers", "4 variables"]),
        (dict(fun=rosen, jac=rosen_der, hessp=lambda x, v: 1.0), ["hessp returned 1 numbers"]),
        (dict(grow_samples=True), ["grow_samples = True", "scr"]),
    ],
)
def test_errors_name_the_argument_and_its_value(given, words):
    arguments = {"fun": rosen_torch, "x0": X0} | given
    with pytest.raises(sanc.SancError) as caught:
        sanc.minimize(**arguments)
    for word in words:
        assert word in str(caught.value)


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


def test_progress_lines(capsys, problem):
    sanc.minimize(problem, np.ones(6), disp=True)
    out = capsys.readouterr().out.splitlines()
    assert "successful" in out[0] and "‖g‖" in out[0] and out[-1].startswith(Status.SECOND_ORDER.sentence)


def test_a_sample_of_all_components_is_the_exact_objective(problem):
    res = sanc.minimize(problem, np.ones(6), batch_size=problem.n, preset="robust")
    assert res.status is Status.SECOND_ORDER


def test_a_callback_cannot_change_the_run(problem):
    def overwrite(x):
        x[:] = 100.0
        return x  # only True ends the run

    res = sanc.minimize(problem, np.ones(6), callback=overwrite)
    assert res.success and np.abs(res.x).max() < 50


def test_options_in_a_mapping_as_in_scipy():
    arc = sanc.minimize(rosen_torch, X0, options={"method": "arc", "tol": 1e-3})
    assert arc.success and not any(r.branch is Branch.GRADIENT for r in arc.history)
    res = sanc.minimize(rosen_torch, X0, options={"max_iter": 3, "sigma0": 7.0})
    assert res.nit == 3 and res.history[0].sigma == 7.0


def test_the_start_is_never_changed():
    x0 = np.array(X0)
    sanc.minimize(rosen, x0, jac=rosen_der, hessp=rosen_hess_prod)
    assert np.array_equal(x0, X0)
    t0 = torch.tensor(X0)
    sanc.minimize(rosen_torch, t0)
    assert torch.equal(t0, torch.tensor(X0))


def test_a_torch_function_draws_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    sanc.minimize(rosen_torch, X0)
    sanc.certificate(rosen_torch, X0)
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------- cost of a run


def test_each_evaluation_multiplies_by_the_data_once(rng, wide_problem, readings):
    """Value, gradient and Hessian at one point share its margins."""
    problem = wide_problem(rng, 1.0)
    readings.clear()
    res = sanc.minimize(problem, np.ones(60), certify=False)
    products = res.nhev + res.certificate.products
    assert res.success
    again = sum(record.trials > 1 for record in res.history)  # the margins at x are computed again
    assert 0 <= readings["_times"] - (products + res.nfev + 1) <= again  # the first value comes with the gradient
    assert readings["_transposed_times"] == products + res.njev
    plain = scipy.optimize.minimize(
        problem.value, res.x + 1e-3, jac=lambda w: problem.value_and_gradient(w)[1], method="BFGS", tol=1e-9
    )
    assert res.x == pytest.approx(plain.x, abs=1e-6) and res.fun <= plain.fun + 1e-13


def cauchy(fun, x0):
    """Return the norm ‖g‖²/‖Hg‖ of the Cauchy step at the start, the unit of length."""
    g = torch.autograd.functional.jacobian(fun, x0)
    return float(g.norm() ** 2 / (torch.autograd.functional.hessian(fun, x0) @ g).norm())


def test_no_step_is_much_longer_than_the_last(rng):
    """Steps of positive curvature lower σ; along other curvature the last step norm bounds the next one."""

    def fun(x):
        return (0.5 * x[0] ** 2 + torch.cos(x[1:] * 0.3).sum() * 10 + 1e-3 * (x**4).sum()) / 10

    seen = 0
    for seed in range(20):
        x0 = 5 * torch.from_numpy(np.random.default_rng(seed).standard_normal(8))
        points = [x0.clone()]
        unit = cauchy(fun, x0)
        res = sanc.minimize(fun, x0, callback=lambda x, points=points: points.append(x))
        assert res.success
        last = 0.0
        for record, before, after in zip(res.history, points[:-1], points[1:], strict=True):
            step_norm = float(torch.linalg.norm(after - before))
            longest = max(unit, 0.1 * float(torch.linalg.norm(before)), 3 * last)
            if (last > 0 or record.ritz_value < 0) and step_norm > 1.001 * longest:
                assert record.trials > 1 and record.trial_value < record.value  # shorter steps were tried first
            seen += record.ritz_value < 0
            last = step_norm or last
    assert seen > 20


def test_a_limited_step_is_lengthened_if_f_falls_by_more_than_predicted():
    """Along negative curvature one gradient leads far: each trial step is up to three times as long as the last."""
    calls = []

    def fun(x):
        calls.append(x.detach().clone())
        return (x * x / (1 + x * x)).sum()

    x0 = torch.full((100,), 1.5, dtype=torch.float64)
    res = sanc.minimize(fun, x0, max_iter=1, hvp="double-backward", certify=False, first_radius=0.1)
    (record,) = res.history
    assert record.trials >= 3 and record.krylov_dim == 1 and record.ritz_value < 0
    assert record.step_norm == pytest.approx(float(torch.linalg.norm(res.x - x0)))
    assert record.step_norm > 3 * 0.1 * max(cauchy(fun, x0), 0.1 * float(torch.linalg.norm(x0)))
    exact = float((res.x**2 / (1 + res.x**2)).sum())
    assert record.trial_value == pytest.approx(exact) and exact < record.value
    norms = sorted({round(float(torch.linalg.norm(x - x0)), 6) for x in calls} - {0.0})
    assert all(b / a <= 3.001 for a, b in pairwise(norms))
    assert sanc.minimize(fun, x0, max_iter=1, certify=False, first_radius=None, sigma0=1.0).history[0].trials == 1
    assert sanc.minimize(fun, x0, max_iter=1, certify=False, preset="paper").history[0].trials == 1


@pytest.mark.parametrize("tol", [1e-10, 1e-6, 1e-3])
def test_the_model_is_minimised_as_far_as_the_tolerance_needs(rng, tol):
    """Lanczos ends at the first space that satisfies the stopping rule, by dense linear algebra."""
    d = 40
    Q = np.linalg.qr(rng.standard_normal((d, d)))[0]
    A = Q @ np.diag(np.geomspace(0.05, 1.0, d)) @ Q.T
    x = 1e-3 * rng.standard_normal(d)
    sigma = 0.5
    res = sanc.minimize(
        lambda w: 0.5 * w @ A @ w, x, jac=lambda w: A @ w, hess=lambda w: A, tol=tol, sigma0=sigma, max_iter=1
    )
    if not res.history:
        assert np.linalg.norm(A @ x) <= tol
        return
    g = A @ x
    size = np.linalg.norm(g)
    length_scale = max(size**2 / np.linalg.norm(A @ g), 0.1 * np.linalg.norm(x))
    satisfied = []
    for j in range(1, res.history[0].krylov_dim + 1):
        K = np.linalg.qr(np.column_stack([np.linalg.matrix_power(A, k) @ g for k in range(j)]))[0]

        def model(u, K=K):
            s = K @ u
            return g @ s + 0.5 * s @ A @ s + sigma / 3 * np.linalg.norm(s) ** 3

        def model_gradient(u, K=K):
            s = K @ u
            return K.T @ (g + A @ s + sigma * np.linalg.norm(s) * s)

        scale = 1e6  # SciPy needs numbers near 1
        best = scipy.optimize.minimize(
            lambda u, model=model: model(u / 1e3) * scale,
            np.zeros(j),
            jac=lambda u, gradient=model_gradient: gradient(u / 1e3) * scale / 1e3,
            tol=1e-14,
        )
        s = K @ best.x / 1e3
        residual = np.linalg.norm(g + A @ s + sigma * np.linalg.norm(s) * s)
        allowed = max(min(0.2, np.linalg.norm(s) / length_scale) * size, 0.5 * tol)
        satisfied.append(residual <= allowed * (1 + 1e-3))
    if res.history[0].krylov_dim <= 10:
        assert satisfied == [False] * (len(satisfied) - 1) + [True]
    else:
        assert satisfied[-1]


def test_without_certificate_few_products_test_for_negative_curvature(rng, wide_problem):
    problem = wide_problem(rng, 1e-3)
    whole, short = (sanc.minimize(problem, np.ones(60), certify=certify) for certify in (True, False))
    assert whole.status is Status.SECOND_ORDER and whole.certificate.products > 30
    assert short.status is Status.UNCERTIFIED and short.success and not short.certificate.second_order
    assert short.certificate.products == max(10, short.nhev // 10) < whole.certificate.products
    assert np.array_equal(whole.x, short.x) and whole.nhev == short.nhev
    fewer = sanc.minimize(problem, np.ones(60), certify=False, max_products=4)
    assert fewer.certificate.products == 4


@pytest.mark.parametrize("d", [3, 50, 400])
def test_without_certificate_saddles_are_escaped(d):
    """On the stable manifold of a saddle no gradient has a component along its negative curvature."""
    scale = torch.linspace(0.5, 2.0, d, dtype=torch.float64)

    def fun(x):
        return 0.5 * (scale[1:] * x[1:] ** 2).sum() - 0.5 * x[0] ** 2 + 0.25 * x[0] ** 4

    for start in (0.0, 1.0):
        x0 = torch.full((d,), start, dtype=torch.float64)
        x0[0] = 0.0
        res = sanc.minimize(fun, x0, certify=False)
        assert res.success and float(res.fun) == pytest.approx(-0.25) and abs(float(res.x[0])) == pytest.approx(1.0)


@pytest.mark.parametrize("lanczos", ["store", "regenerate"])
def test_several_longer_steps_from_one_space(lanczos):
    """The first σ is far too large. If the basis is not stored, each trial step needs a second pass at x."""
    A = torch.linspace(0.05, 50, 20, dtype=torch.float64)

    def f(x):
        return 0.5 * (A * x * x).sum() + 0.01 * (x**4).sum() + 1e-3 * x.sum()

    x0 = torch.full((20,), 1e-3, dtype=torch.float64)
    res = sanc.minimize(f, x0, method="arc", lanczos=lanczos, hvp="double-backward", sigma0=1e6, krylov_stop="paper")
    assert res.success and res.history[0].trials >= 3 and res.history[0].krylov_dim >= 2


@pytest.mark.parametrize("broken", range(1, 14))
def test_a_product_that_is_not_finite_in_a_second_pass_costs_one_step(broken):
    """The fourth iteration makes five products, repeats four for the cubic step and four for the escape step."""
    A = np.diag([3.0, -2.0, 1.0, -0.5, 4.0])
    made = []  # products of each iteration

    def hessp(x, v):
        made[-1] += 1
        bad = len(made) == 4 and made[-1] == broken
        return (A @ v + 3 * x**2 * v) * (math.nan if bad else 1.0)

    made.append(0)
    res = sanc.minimize(
        lambda x: 0.5 * x @ A @ x + 0.25 * (x**4).sum(), [1.0, 0.1, 0.5, 0.2, 0.7], jac=lambda x: A @ x + x**3,
        hessp=hessp, preset="paper", lanczos="regenerate", sigma0=1e-3, max_iter=12, certify=False,
        callback=lambda x: made.append(0),
    )  # fmt: skip
    record = res.history[3]
    assert made[3] >= broken and "Hessian product" in record.note and res.nit == 12
    assert record.branch is (sanc.Branch.GRADIENT if broken < 10 else sanc.Branch.STAYED)
    assert np.isfinite(res.x).all() and res.fun < res.history[0].value


def test_a_run_that_stayed_with_several_trials_resumes_bit_for_bit():
    """The margins at its point were updated from earlier ones, and those of the trial points are gone."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((400, 60))
    y = (X @ rng.standard_normal(60) + rng.standard_normal(400) > 0).astype(int)
    for _ in range(4):
        rng.standard_normal(60)
    x0 = 30 * rng.standard_normal(60)
    options = {"method": "arc", "max_iter": 25, "eta1": 0.95, "eta2": 0.975, "resolves": 2, "sigma0": 1e-6}
    states, stayed = [], []

    def keep(intermediate_result):
        states.append(pickle.loads(pickle.dumps(intermediate_result.state)))
        record = intermediate_result.record
        stayed.append(record.branch is sanc.Branch.STAYED and record.trials > 1)

    whole = sanc.minimize(Logistic(X, y, "nonconvex", 1e-2), x0, callback=keep, **options)
    assert any(stayed)
    for state in states[:-1]:
        again = sanc.minimize(Logistic(X, y, "nonconvex", 1e-2), x0, resume=state, **options)
        assert np.array_equal(again.x, whole.x) and again.fun == whole.fun


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_callables_that_change_their_argument_do_not_change_the_run(library):
    def overwrite(x, returned):
        x[...] = 1e3
        return returned

    x0 = np.array(X0) if library == "numpy" else torch.tensor(X0, dtype=torch.float64)
    as_array = np.asarray
    plain = dict(
        fun=lambda x: rosen(as_array(x)),
        jac=lambda x: rosen_der(as_array(x)),
        hessp=lambda x, v: rosen_hess_prod(as_array(x), as_array(v)),
    )
    overwriting = dict(
        fun=lambda x: overwrite(x, rosen(as_array(x).copy())),
        jac=lambda x: overwrite(x, rosen_der(as_array(x).copy())),
        hessp=lambda x, v: overwrite(v, overwrite(x, rosen_hess_prod(as_array(x).copy(), as_array(v).copy()))),
    )
    ours, theirs = sanc.minimize(x0=x0, **overwriting), sanc.minimize(x0=x0, **plain)
    assert ours.success and np.array_equal(np.asarray(ours.x), np.asarray(theirs.x))


def test_autocast_around_a_call_holds_in_the_function_alone():
    """The iteration computes in the type of x; autocast holds in the function and in the callback."""
    matrix = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    matrix = matrix @ matrix.T / 30 + torch.eye(30)
    seen = []

    def fun(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return ((x * matrix).sum(1) ** 2).sum() + (x**4).sum() - x.sum()  # autocast changes none of these

    at = torch.ones(30)
    plain, bound = sanc.minimize(fun, at), sanc.certificate(fun, at)
    assert not any(seen)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        cast = sanc.minimize(fun, at, callback=lambda x: seen.append(torch.is_autocast_enabled("cpu")))
        again = sanc.certificate(fun, at)
    assert all(seen) and torch.equal(plain.x, cast.x) and plain.nit == cast.nit
    assert again.lambda_min == bound.lambda_min and again.error_bound == bound.error_bound


@pytest.mark.parametrize(("scheme", "offset"), [("2-point", 1e10), ("2-point", 1e8), ("3-point", 1e11)])
def test_a_differenced_gradient_below_the_roundoff_of_values_is_no_success(scheme, offset):
    res = sanc.minimize(lambda x: offset + (x[0] ** 2 - 1) ** 2 + x[1] ** 2, [0.3, 0.4], jac=scheme)
    assert (
        res.status is Status.STALLED
        and "roundoff in f alone causes" in res.message
        and "subtract a constant" in res.message
    )


@pytest.mark.parametrize("fun", [lambda x: np.sum(np.abs(x - 1) ** 2), lambda x: float(np.sum(np.real(x - 1) ** 2))])
def test_the_complex_step_needs_a_function_of_complex_numbers(fun):
    with pytest.raises(sanc.ArgumentError, match=r'at a complex point.*Pass jac = "3-point"'):
        sanc.minimize(fun, [3.0, 2.0], jac="cs")
    assert sanc.minimize(lambda x: (x - 1) ** 2, [3.0], jac="cs").x == pytest.approx([1.0])


@pytest.mark.parametrize("at", [[3.0, 2.0], [1e3, -4.0]])
def test_a_gradient_of_zeros_that_is_inconsistent_with_f_is_no_minimum(at):
    res = sanc.minimize(rosen, at, jac=np.zeros_like)
    assert res.status is Status.INCONSISTENT and res.nit == 0 and "inconsistent with f" in res.message
    for fun in (lambda x: float(np.sum(x**3)), lambda x: float(np.sum(x**4)) + 1e6, lambda x: 7.0):
        assert sanc.minimize(fun, np.zeros(2), jac=np.zeros_like).status is not Status.INCONSISTENT


def test_sampling_without_samples_is_an_error(problem):
    with pytest.raises(sanc.ArgumentError, match="sampling = 'buffered' has no effect without samples: pass"):
        sanc.minimize(problem, np.ones(6), sampling="buffered")
    sanc.minimize(problem, np.ones(6), sampling="buffered", batch_size=20, max_iter=1)


@pytest.mark.parametrize("true", [np.True_, np.array(True), torch.tensor(True)])
def test_true_of_numpy_or_torch_from_a_callback_ends_the_run(true):
    res = sanc.minimize(rosen, X0, jac=rosen_der, callback=lambda x: true)
    assert res.status is Status.CALLBACK and res.nit == 1
    for other in (np.False_, torch.tensor(False), 1.0, np.ones(2), "yes"):
        assert sanc.minimize(rosen, X0, jac=rosen_der, callback=lambda x, other=other: other).success


@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True), StopIteration])
def test_the_callbacks_of_all_minimisers_ask_to_stop_alike(answer):
    def callback(report):
        if answer is StopIteration:
            raise StopIteration
        return answer

    fit = sanc.least_squares(lambda x: np.array([x[1] - x[0] ** 2, 1.0 - x[0]]), [-1.2, 1.0], callback=callback)
    assert fit.status is Status.CALLBACK and fit.nit == 1
    start = torch.full((2, 3), 2.0, dtype=torch.float64)
    rows = sanc.minimize_many(lambda x: (x**4).sum(), start, callback=callback)
    assert rows.status.tolist() == [Status.CALLBACK] * 2 and rows.rounds == 1
    rows = sanc.minimize_many(lambda x: (x**4).sum(), start, callback=lambda report: 1)  # 1 is not True
    assert rows.success.all()


@pytest.mark.parametrize("start", [[0.0, 0.0], [1e-10, 0.0]])
def test_a_start_at_the_saddle_of_a_small_function_is_escaped(start):
    """λ_min is −4e-20, and the tolerance on the curvature is relative to the size of f."""

    def fun(x):
        return 1e-20 * ((x[0] ** 2 - 1) ** 2 + x[0] * x[1] + x[1] ** 2)

    res = sanc.minimize(fun, torch.tensor(start, dtype=torch.float64), tol=1e-28)
    assert res.success and res.fun == pytest.approx(-2.656e-21, rel=1e-3, abs=0)


def test_a_function_may_minimise_another():
    def outer(x):
        inner = sanc.minimize(lambda y: ((y - 1) ** 2).sum(), torch.zeros(2, dtype=torch.float64))
        return ((x - inner.x) ** 2).sum()

    assert torch.allclose(sanc.minimize(outer, torch.full((2,), 3.0).double()).x, torch.ones(2).double())
    with torch.no_grad():
        assert sanc.minimize(rosen_torch, torch.tensor(X0, dtype=torch.float64)).success


HESSIANS = {
    "sparse": lambda x: scipy.sparse.csr_array(rosen_hess(x)),
    "operator": lambda x: scipy.sparse.linalg.aslinearoperator(rosen_hess(x)),
    "list": lambda x: rosen_hess(x).tolist(),
    "tensor": lambda x: torch.from_numpy(rosen_hess(x)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", HESSIANS)
@pytest.mark.parametrize("make", [np.array, lambda x: torch.tensor(x, dtype=torch.float64)])
def test_a_hessian_comes_in_many_forms(kind, make):
    def given(function):
        return lambda x: function(np.asarray(x))

    plain = sanc.minimize(rosen, X0, jac=rosen_der, hess=rosen_hess)
    res = sanc.minimize(given(rosen), make(X0), jac=given(rosen_der), hess=given(HESSIANS[kind]))
    assert res.success and res.nit == plain.nit and np.allclose(np.asarray(res.x), plain.x)


def test_the_hessian_of_one_variable_may_be_a_number():
    res = sanc.minimize(lambda x: float(x[0] ** 2), [3.0], jac=lambda x: 2 * x, hess=lambda x: 2.0)
    assert res.success and res.x == pytest.approx([0.0], abs=1e-8)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_saved_state_is_a_copy(problem, sampled):
    def overwrite(intermediate_result):
        state = intermediate_result.state
        for vector in (state["x"], *state["vectors"].values()):
            vector.fill(7.0)

    given = {"batch_size": 20, "max_iter": 40} if sampled else {}
    ends = [sanc.minimize(problem, np.ones(6), callback=callback, **given) for callback in (None, overwrite)]
    assert np.array_equal(ends[0].x, ends[1].x)


def test_points_are_returned_in_the_form_of_the_start(problem):
    Pair = namedtuple("Pair", "a b")
    found = sanc.minimize(lambda p: float((p.a**2).sum() + (p.b - 1) ** 2), Pair(np.ones(2), 3.0), jac="3-point").x
    assert type(found) is Pair and np.allclose(found.a, 0, atol=1e-5) and found.b == pytest.approx(1, abs=1e-5)
    tree = OrderedDict(a=torch.ones(2), b=torch.tensor(3.0))
    found = sanc.minimize(lambda p: (p["a"] ** 2).sum() + (p["b"] - 1) ** 2, tree).x
    assert type(found) is OrderedDict and torch.equal(tree["a"], torch.ones(2))
    assert isinstance(sanc.minimize(problem, torch.ones(6)).x, torch.Tensor)


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


def test_arguments_of_scipy_are_passed_on():
    given = {"fun": rosen, "x0": X0, "method": sanc.scipy_method}
    with pytest.raises(sanc.ArgumentError, match="jac is missing although hess"):
        scipy.optimize.minimize(**given, hess=rosen_hess)
    with pytest.raises(sanc.ArgumentTypeError, match="hess = 3"):
        scipy.optimize.minimize(**given, jac=rosen_der, hess=3)
    assert scipy.optimize.minimize(**given, jac=rosen_der, hess=scipy.optimize.BFGS()).success


def test_errors_of_second_derivatives_can_be_pickled():
    error = pickle.loads(pickle.dumps(sanc.SecondDerivativeError("no second derivative", "flash")))
    assert (str(error), error.operator) == ("no second derivative", "flash")


def brown_and_dennis(x):
    t = np.arange(1, 21) / 5
    return float(np.sum(((x[0] + t * x[1] - np.exp(t)) ** 2 + (x[2] + x[3] * np.sin(t) - np.cos(t)) ** 2) ** 2))


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize(("fun", "x0", "value"), [
    (brown_and_dennis, [25.0, 5, -5, -1], 85822.2016),
    (lambda x: 1e5 + float(np.sum((x - np.arange(4)) ** 2)), np.zeros(4), 1e5),
])  # fmt: skip
def test_differences_of_large_values_reach_the_tolerance_of_roundoff(fun, x0, value, scheme):
    res = sanc.minimize(fun, x0, jac=scheme)
    assert res.success and res.fun == pytest.approx(value, rel=1e-8)
    again = sanc.minimize(fun, res.x, jac=scheme)  # here the gradient is roundoff, but the curvature is not
    assert again.success and again.fun == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize("scheme", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("fun", [lambda x: 1 + (x**2).sum(), lambda x: 1 + (x**4).sum(), lambda x: 1e5 + (x**2).sum()])
def test_a_start_at_a_minimum_is_a_success_with_differences(fun, scheme):
    res = sanc.minimize(fun, np.zeros(3), jac=scheme)
    assert res.success and res.nit <= 1


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_differences_escape_a_saddle_of_large_values(scheme):
    """uuᵀ is fitted to a matrix from u = 0, where f = 2e7 and its gradient is 0."""
    matrix = np.outer(np.arange(1, 31), np.arange(1, 31)) * 1.0
    res = sanc.minimize(lambda u: 0.25 * float(np.sum((np.outer(u, u) - matrix) ** 2)), np.zeros(30), jac=scheme)
    assert res.success and res.fun < 1e-3


@pytest.mark.parametrize("width", [1.0, 1e-3, 1e-6])
def test_a_start_at_a_sharp_minimum_is_not_inconsistent(width):
    def fun(x):
        return float(width * np.sum(3 * np.logaddexp(0, x / width) + np.logaddexp(0, -x / width)))

    def jac(x):
        return 3 / (1 + np.exp(-x / width)) - 1 / (1 + np.exp(x / width))

    at = np.full(3, -width * math.log(3))
    assert sanc.minimize(fun, at, jac=jac).status is Status.SECOND_ORDER
    positive = {"fun": lambda x: float(x[0] - width * math.log(x[0])), "jac": lambda x: 1 - width / x}
    assert sanc.minimize(x0=[width], **positive).status is Status.SECOND_ORDER  # f is not evaluated outside its domain


def test_a_user_defined_mapping_does_not_change():
    class Named(MutableMapping):
        def __init__(self, **entries):
            self.entries = entries

        def __getitem__(self, key):
            return self.entries[key]

        def __setitem__(self, key, value):
            self.entries[key] = value

        def __delitem__(self, key):
            del self.entries[key]

        def __iter__(self):
            return iter(self.entries)

        def __len__(self):
            return len(self.entries)

    given = Named(a=torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert torch.allclose(sanc.minimize(lambda q: (q["a"] ** 2).sum(), given).x["a"], torch.zeros(2).double())
    assert given["a"].tolist() == [3.0, 4.0]


def test_options_that_scipy_accepts_are_accepted(capsys):
    for hess in (scipy.optimize.BFGS(), "2-point"):
        assert scipy.optimize.minimize(rosen, X0, method=sanc.scipy_method, hess=hess).success
    assert sanc.minimize(rosen, X0, jac=rosen_der, options={"disp": 0}, certify=1).success
    assert capsys.readouterr().out == ""
    assert sanc.minimize(rosen, X0, jac=rosen_der, callback=lambda x: x > 0).success  # an array of four is no True


def test_a_hessian_may_be_anything_with_a_product():
    class Times:
        def __init__(self, matrix):
            self.matrix, self.shape = matrix, matrix.shape

        def __matmul__(self, v):
            return self.matrix @ v

    assert sanc.minimize(rosen, X0, jac=rosen_der, hess=lambda x: Times(rosen_hess(x))).success


@pytest.mark.parametrize("n", [101, 1000])
def test_beside_a_maximum_whose_curvature_is_below_the_roundoff_of_f(n):
    """The first steps change Σ cos x by less than its roundoff; a longer one along the curvature does not."""
    result = sanc.minimize(lambda x: torch.cos(x).sum(), torch.full((n,), 1e-9, dtype=torch.float64))
    assert result.status is Status.SECOND_ORDER and float(result.fun) == pytest.approx(-n)


@pytest.mark.parametrize(
    ("dtype", "start", "constant"),
    [(torch.float64, 1e-8, 1e2), (torch.float32, 1e-4, 1e2), (torch.float32, 1e-3, 1e4), (torch.float32, 1e-2, 1e6)],
)
def test_a_constant_does_not_hide_a_saddle(dtype, start, constant):
    def f(x):
        return x[0] ** 2 - x[1] ** 2 + 0.25 * x[1] ** 4 + constant

    result = sanc.minimize(f, torch.full((2,), start, dtype=dtype))
    assert result.success and abs(float(result.x[1])) == pytest.approx(math.sqrt(2.0), rel=1e-3)


def test_a_resumed_run_leaves_a_saddle_as_the_original_does():
    states = []

    def keep(intermediate_result):
        states.append(intermediate_result.state)

    x0, f = torch.full((101,), 1e-9, dtype=torch.float64), lambda x: torch.cos(x).sum()
    whole = sanc.minimize(f, x0, callback=keep)
    for state in states[9:13]:
        part = sanc.minimize(f, x0, resume=state)
        assert torch.equal(part.x, whole.x) and part.nit == whole.nit and part.nfev == whole.nfev


def saddle_with(constant):
    """A saddle at 0 with λ_min = −4; the minima are at about (±1, ∓0.05)."""
    return lambda x: (x[0] ** 2 - 1) ** 2 + x[1] ** 2 + 0.1 * x[0] * x[1] + constant


def forward_differences(f, h=1.5e-8):
    return lambda x: np.array([(f(x + h * e) - f(x)) / h for e in np.eye(len(x))])


@pytest.mark.parametrize("constant", [0.0, 1e2, 1e4, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("start", [(0.0, 0.0), (1e-3, 0.0)])
@pytest.mark.parametrize("scheme", ["2-point", "3-point", "own"])
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_no_success_on_a_saddle_that_roundoff_hides_from_differences(scheme, tol, start, constant):
    f = saddle_with(constant)
    jac = forward_differences(f) if scheme == "own" else scheme
    result = sanc.minimize(f, np.array(start), jac=jac, tol=tol)
    if result.success:
        assert abs(result.x[0]) == pytest.approx(1.0, abs=0.1)
    else:
        assert "error of" in result.message and "subtract a constant from f" in result.message
    assert result.success or constant >= 1e4


@pytest.mark.parametrize("scale", [1e-308, 1e-300, 1e-280, 1e100, 1e155, 1e200, 1e290])
@pytest.mark.parametrize("n", [3, 10, 200])
def test_the_certificate_of_a_function_whose_squares_leave_the_range(n, scale):
    """The eigenvalues of scale·diag(1 … 2) are known; relative to them the bounds are those of scale = 1."""
    d = np.linspace(1.0, 2.0, n)
    result = sanc.certificate(
        lambda x: 0.5 * float((scale * d * x) @ x), np.zeros(n), jac=lambda x: scale * d * x,
        hessp=lambda x, v: scale * d * v, eps=1e-3 * scale,
    )  # fmt: skip
    assert result.second_order and not result.saddle
    assert result.lower_bound <= scale <= (result.lambda_min + result.rounding) * (1 + 1e-3)


@pytest.mark.parametrize("size", [1e8, 1e10, 1e12])
def test_a_minimum_exact_to_roundoff_is_a_success(size):
    """The gradient of a large sum of squares stays above the default tolerance; a tolerance of the caller holds."""
    rng = np.random.default_rng(1)
    A, y = rng.standard_normal((50, 5)), size * rng.standard_normal(50)
    expected = np.linalg.lstsq(A, y)[0]
    A, y = torch.from_numpy(A), torch.from_numpy(y)

    def f(x):
        return (A @ x - y).square().sum()

    found = sanc.minimize(f, np.zeros(5))
    assert found.status is Status.SECOND_ORDER and found.certificate.second_order
    assert np.linalg.norm(found.x - expected) <= 1e-13 * np.linalg.norm(expected)
    strict = sanc.minimize(f, np.zeros(5), tol=1e-9)
    assert strict.status is Status.STALLED and "Roundoff alone may cause a gradient" in strict.message


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize(("f", "x0"), [(rosen, [-1.2, 1.0]), (lambda x: [1.0, 30.0, 1e3] @ (x - 1) ** 2, [0.0] * 3)])
def test_a_minimum_exact_to_the_error_of_differences_is_a_success(scheme, f, x0):
    """The differenced gradient of 1e10·f stays above the default tolerance; a tolerance of the caller holds."""
    found = sanc.minimize(lambda x: 1e10 * f(x), x0, jac=scheme)
    assert found.status is Status.SECOND_ORDER and np.allclose(found.x, 1.0, rtol=0, atol=1e-5)
    assert found.certificate.grad_norm <= found.certificate.eps_gradient
    strict = sanc.minimize(lambda x: 1e10 * f(x), x0, jac=scheme, tol=1e-9)
    assert strict.success or "alone may cause a gradient" in strict.message


def test_no_success_where_differences_hide_a_decrease():
    """High frequencies, and a valley in which the truncation error across it exceeds the gradient along it."""
    noisy = lambda x: (x - 1) @ (x - 1) + 1e-4 * np.sin(1e9 * x).sum()
    assert not sanc.minimize(noisy, np.zeros(3), jac="3-point").success
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    valley = lambda x: (x - 1) @ (Q * np.geomspace(1.0, 1e10, 4)) @ Q.T @ (x - 1)
    res = sanc.minimize(valley, np.zeros(4), jac="2-point")
    assert not res.success and "Differences cause an error of" in res.message and valley(res.x) > 0.1
