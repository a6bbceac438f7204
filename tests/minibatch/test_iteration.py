"""The iteration on samples: its model against a dense computation, its counts, and what noise must not do to it."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.preprocessing import scale

import sanc
from sanc import Branch
from sanc.core.family import METHODS, make_settings
from sanc.core.iterate import Draws
from sanc.core.krylov import Krylov
from sanc.core.record import Record
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minibatch.model import Model, learn_gradient, learn_metric
from sanc.sums.oracle import SumOracle


@pytest.fixture(scope="module")
def problem():
    X, y = load_breast_cancer(return_X_y=True)
    return sanc.problems.Logistic(scale(X), y, penalty="nonconvex", strength=1.0)


@pytest.fixture(scope="module")
def lowest(problem):
    """f* from SciPy, from several starts."""
    starts = [np.zeros(30), np.ones(30), -np.ones(30)]
    return min(scipy.optimize.minimize(problem.value_and_gradient, w, jac=True, tol=1e-12).fun for w in starts)


def engine_on(problem, method="sanc", batch=29, seed=0, **options):
    settings = make_settings(METHODS[method], "robust", options)
    return MinibatchIteration(METHODS[method], settings, seed), SumOracle(problem, (batch,) * 3, seed)


def built_model(engine, oracle, x):
    """Learn from one batch and build a Krylov space at x."""
    value, g = oracle.gradient(x)
    learn_gradient(engine.state, g, engine.own)
    learn_metric(engine.state, engine.own, oracle.space)
    model = Model(engine.state, g, engine.own, oracle.space)
    model.build(x, oracle, engine.settings, Draws(0, 0), Record(0))
    return model, g, value


# ---------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("metric", [0.0, 0.5, 1.0])
def test_the_step_minimises_the_cubic_model_in_the_metric(sigma, fresh, metric):
    """Against a dense problem: B = M^½ (Q T Qᵀ) M^½, none outside; Newton from many starts finds nothing lower."""
    rng = np.random.default_rng(7)
    d = 7
    A = rng.standard_normal((d, d))
    A = A + A.T

    class Quadratic:
        n, dim, dtype = 1, d, np.dtype(np.float64)

        def value(self, x):
            return 0.5 * x @ A @ x + x.sum()

        def value_and_gradient(self, x):
            return self.value(x), A @ x + 1.0

        def hessian(self, x):
            return lambda v: A @ v

        def subset(self, rows):
            return self

    engine, oracle = engine_on(Quadratic(), batch=1, krylov_dim=3, metric=metric, sigma0=sigma)
    x = rng.standard_normal(d)
    oracle.begin(0)
    model_of_step, g, _ = built_model(engine, oracle, x)
    model_of_step.fresh = fresh
    step = model_of_step.solve(model_of_step.spectrum(), Draws(0, 0))
    vector = step.vector

    M = np.abs(g) ** metric if metric else np.ones(d)
    Q = engine.state.basis
    R = np.diag(M**-0.5)
    T = Q @ R @ A @ R @ Q.T
    if not fresh:
        values, vectors = np.linalg.eigh(T)
        T = vectors @ np.diag(np.abs(values)) @ vectors.T
    root = np.diag(np.sqrt(M))
    B = root @ Q.T @ T @ Q @ root

    def model(s):
        return g @ s + 0.5 * s @ B @ s + sigma / 3 * (s @ (M * s)) ** 1.5

    tries = [scipy.optimize.minimize(model, rng.standard_normal(d) * size, tol=1e-10).fun for size in (0.1, 1, 10, 100)]
    assert model(vector) <= min(tries) + 1e-6 * abs(min(tries))
    assert -model(vector) == pytest.approx(step.decrease, rel=1e-5)
    assert math.sqrt(vector @ (M * vector)) == pytest.approx(step.norm, rel=1e-5)


def test_products_are_spent_only_where_a_space_is_built(problem):
    """And judged steps that were solved again cost values, never a product."""
    batch, steps = 29, 140
    engine, oracle = engine_on(problem, batch=batch, refresh=40, sigma0=1e-6)
    x, products, spaces, retries, calls = np.ones(problem.dim), 0, [], 0, 0
    for k in range(steps):
        x, record = engine.iterate(x, oracle)
        assert record.calls.product - products == record.krylov_dim * batch
        assert record.calls.paper_calls - calls == batch + record.krylov_dim * batch
        retries += max(record.trials - 1, 0)
        if record.krylov_dim:
            spaces.append(k)
        products, calls = record.calls.product, record.calls.paper_calls
    assert retries > 0
    settled = engine.state.settled
    late = [k for k in spaces if k > settled]
    assert late == list(range(settled + 1, steps, 40))


# ---------------------------------------------------------------------------------------------- noise


def test_noise_neither_blows_sigma_up_nor_stops_the_run(problem, lowest):
    """The gap to f* goes on falling on the noise floor, σ is bounded, and hardly an iteration is a rejection."""
    early, late = [], []
    for seed in range(3):
        engine, oracle = engine_on(problem, seed=seed)
        x, records, gaps = np.ones(problem.dim), [], []
        for _ in range(400):
            x, record = engine.iterate(x, oracle)
            records.append(record)
            gaps.append(problem.value(x) - lowest)
        early.append(np.mean(gaps[50:100]))
        late.append(np.mean(gaps[-50:]))
        assert 1e-8 <= min(r.sigma for r in records) and max(r.sigma for r in records) <= 1e8
        assert sum(r.branch is Branch.STAYED for r in records[200:]) < 200 / 3
    assert np.mean(late) < 0.5 * np.mean(early)
    assert np.mean(late) < 1e-3 * lowest


@pytest.mark.parametrize("sigma0", [1.0, 0.001])
def test_it_needs_no_more_calls_than_the_tuned_method_of_the_paper(problem, lowest, sigma0):
    def calls_to(level, **options):
        seen = []

        def watch(intermediate_result):
            seen.append((problem.value(intermediate_result.x), intermediate_result.record.calls.paper_calls))
            return seen[-1][0] <= level

        sanc.minimize(
            problem, np.ones(30), batch_size=29, sigma0=sigma0, max_calls=20 * problem.n, max_iter=10**6,
            certify=False, callback=watch, **options,
        )  # fmt: skip
        return seen[-1][1] if seen[-1][0] <= level else math.inf

    ours = [calls_to(1.001 * lowest, seed=seed) for seed in range(5)]
    theirs = [calls_to(1.001 * lowest, seed=seed, preset="paper", L1=10.0, L2=10.0) for seed in range(5)]
    assert np.median(ours) <= np.median(theirs)


def settled_run(problem, steps=60, **options):
    engine, oracle = engine_on(problem, **options)
    x = np.ones(problem.dim)
    for _ in range(steps):
        x, _ = engine.iterate(x, oracle)
    return engine, oracle, x


def test_a_jump_of_the_loss_leads_back_to_a_safe_point(problem):
    engine, oracle, x = settled_run(problem)
    safe, sigma = engine.state.safe, engine.state.sigma
    engine._last = x + 3.0  # as if a step of its own had gone wrong
    point, record = engine.iterate(engine._last, oracle)
    assert point is safe and engine.went_back
    assert "jumped" in record.note and record.branch is Branch.STAYED
    assert engine.state.sigma == pytest.approx(4.0 * sigma)
    engine.iterate(point, oracle)
    assert not engine.went_back


def test_what_somebody_else_did_to_the_parameters_is_not_undone(problem):
    engine, oracle, x = settled_run(problem)
    there = x + 3.0
    point, record = engine.iterate(there, oracle)
    assert "jumped" not in record.note and np.linalg.norm(point - there) < np.linalg.norm(point - x)


def test_rare_rows_are_learnt_from():
    """One row in fifty is positive and the batches have four: a high loss is the batch's, not the step's."""
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.standard_normal((2000, 5)))
    y = torch.from_numpy((rng.random(2000) < 0.02).astype(float))
    w = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    opt, jumps = sanc.SANC([w], seed=0), 0
    for _ in range(1500):
        rows = torch.from_numpy(rng.choice(2000, 4, replace=False))
        opt.step(lambda rows=rows: loss(X[rows] @ w[:5] + w[5], y[rows]))
        jumps += "jumped" in opt.record.note
    assert jumps < 30
    assert float(loss(X @ w[:5] + w[5], y).detach()) < 0.14  # the entropy of the labels is 0.098, a bias of 0 has 0.69


def test_a_loss_that_is_not_finite_later_on_leads_back_too(problem):
    engine, oracle = engine_on(problem)
    x = np.ones(problem.dim)
    for _ in range(40):
        x, _ = engine.iterate(x, oracle)
    point, record = engine.iterate(x * np.nan, oracle)
    assert np.isfinite(point).all() and "finite" in record.note


def test_a_loss_that_changes_for_good_is_no_jump(problem):
    """Where the data change, the safe point is no better, and the run goes on."""
    engine, oracle, x = settled_run(problem)
    sigma = engine.state.sigma
    gradient, trial = oracle.gradient, oracle.trial

    def higher(x):
        value, g = gradient(x)
        return value + 50.0, g

    oracle.gradient, oracle.trial = higher, lambda x: trial(x) + 50.0
    for _ in range(20):
        x, record = engine.iterate(x, oracle)
        assert "jumped" not in record.note
    assert engine.state.sigma < 10 * sigma


@pytest.mark.parametrize("size", [1e-110, 1e-160, 1.0])
def test_very_small_numbers_are_no_errors(size):
    x = torch.nn.Parameter(torch.tensor([size, 2 * size], dtype=torch.float64))
    opt = sanc.SANC([x], seed=0, check=False)
    for _ in range(20):
        opt.step(lambda: (x * x).sum())
    assert torch.isfinite(x).all()


# ---------------------------------------------------------------------------------------------- negative curvature


@pytest.mark.parametrize("cls", [sanc.SANC, sanc.SCR])
def test_steps_along_negative_curvature_never_raise_the_loss_of_their_sample(cls):
    """A network from near zero, where everything is a saddle."""
    X, y = load_digits(return_X_y=True)
    X, y = torch.from_numpy(X / 16.0), torch.from_numpy(y)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(),
                              torch.nn.Linear(8, 10)).double()  # fmt: skip
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.01)
    opt = cls(net.parameters(), seed=0, refresh=10)
    rng, taken, first = np.random.default_rng(0), [], None
    for _ in range(200):
        rows = torch.from_numpy(rng.choice(len(X), 128, replace=False))
        value = opt.step(sanc.Batch(lambda a, b: torch.nn.functional.cross_entropy(net(a), b), X[rows], y[rows]))
        first = float(value) if first is None else first
        if opt.record.branch is Branch.CURVATURE:
            taken.append(opt.record)
    assert taken
    assert all(record.trial_value <= record.value for record in taken)
    assert float(value) < 0.8 * first


def test_the_escape_after_a_rejection_lowers_the_loss_or_stays(problem):
    engine, oracle = engine_on(problem)
    x = np.ones(problem.dim)  # the penalty is concave here
    oracle.begin(0)
    model, g, value = built_model(engine, oracle, x)
    eigen = model.spectrum()
    assert eigen.leftmost < 0.0
    record = Record(0, value=value)
    point = engine._escape(x, g, oracle, 1.0, eigen, record)
    assert record.branch is Branch.CURVATURE
    assert oracle.trial(point) < value
    oracle.trial = lambda x: value + 1.0
    assert engine._escape(x, g, oracle, 1.0, eigen, Record(0, value=value)) is x


def test_where_the_gradient_vanishes_the_space_starts_at_random():
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    bend = torch.tensor([-1.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    opt = sanc.SANC([p], seed=3)
    opt.step(lambda: 0.5 * (bend * p**2).sum() + 0.25 * (p**4).sum())
    assert opt.record.branch is Branch.CURVATURE
    assert opt.record.ritz_value == pytest.approx(-1.0)


# ---------------------------------------------------------------------------------------------- the front doors


def test_an_interrupted_minimisation_resumes_bit_for_bit(problem):
    states = []

    def keep(intermediate_result):
        states.append(intermediate_result.state)

    common = {"batch_size": 29, "seed": 4, "certify": False}
    whole = sanc.minimize(problem, np.ones(30), max_iter=90, callback=keep, **common)
    for at in (3, 25, 60):
        rest = sanc.minimize(problem, np.ones(30), max_iter=90, resume=states[at - 1], **common)
        assert np.array_equal(rest.x, whole.x)
        assert rest.calls == whole.calls
        assert [r.sigma for r in rest.history] == [r.sigma for r in whole.history[at:]]


def test_an_objective_sample_is_refused(problem):
    with pytest.raises(sanc.ArgumentError, match=r"objective_batch_size = 29 .* preset=\"paper\""):
        sanc.minimize(problem, np.ones(30), batch_size=29, objective_batch_size=29)
    p = torch.nn.Parameter(torch.ones(2))
    opt = sanc.SANC([p])
    with pytest.raises(sanc.ArgumentError, match=r"objective cannot be used.*preset=\"paper\""):
        opt.step(lambda: (p**2).sum(), objective=lambda: (p**2).sum())
    assert torch.equal(p.detach(), torch.ones(2))


def test_other_parameters_begin_anew():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    x = torch.randn(200, 4, dtype=torch.float64)
    y = x.prod(dim=1, keepdim=True)
    opt = sanc.SANC([{"params": net[0].parameters()}, {"params": net[2].parameters()}], seed=0)

    def step():
        rows = torch.randint(200, (50,))
        return float(opt.step(lambda: ((net(x[rows]) - y[rows]) ** 2).mean()))

    for _ in range(30):
        step()
    sigma = opt._iterates.state.sigma
    opt.param_groups[0]["frozen"] = True
    held = net[0].weight.detach().clone()
    step()
    assert len(opt._iterates.state.safe) == 7 and opt._iterates.state.iteration == 31
    assert opt.record.sigma == pytest.approx(sigma, rel=10.0)
    for _ in range(30):
        step()
    assert torch.equal(held, net[0].weight)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)  # only what is not frozen has a state now
    assert len(opt.state_dict()["state"]) == 2


def test_a_basis_that_is_not_kept_serves_one_step():
    p = torch.nn.Parameter(torch.ones(2))
    opt = sanc.SANC([p], lanczos="regenerate")
    opt.step(lambda: (p**2).sum())
    assert opt.record.krylov_dim > 0
    with pytest.raises(sanc.ArgumentError, match=r"refresh = 9.*store"):
        sanc.SANC([p], lanczos="regenerate", refresh=9)


@pytest.mark.parametrize("change", ["freeze", "free", "add"])
def test_a_state_loads_into_the_parameters_it_was_saved_of(change):
    """Saved between a change of the groups and the next step: the resumed run forgets what the live one forgets."""

    def build():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        groups = [{"params": net[0].parameters(), "frozen": change == "free"}]
        if change != "add":
            groups.append({"params": net[2].parameters()})
        return net, sanc.SANC(groups, seed=2)

    def alter(net, opt):
        if change == "add":
            opt.add_param_group({"params": net[2].parameters()})
        else:
            opt.param_groups[0]["frozen"] = change == "freeze"

    x = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train(net, opt, steps):
        for k in range(steps):
            rows = torch.arange(20) + 7 * (k % 5)
            opt.step(lambda rows=rows: (net(x[rows]).squeeze() - x[rows].prod(1)).square().mean())

    net, opt = build()
    train(net, opt, 25)
    alter(net, opt)
    buffer = io.BytesIO()
    torch.save((net.state_dict(), opt.state_dict()), buffer)
    train(net, opt, 25)
    again, other = build()
    if change == "add":
        alter(again, other)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    train(again, other, 25)
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_of_the_other_iteration_is_refused_whole():
    p = torch.nn.Parameter(torch.ones(3))
    kinds = [sanc.SANC([p], seed=0), sanc.SANC([p], preset="paper", weight_decay=0.5, seed=0)]
    for opt in kinds:
        opt.step(lambda: (p**2).sum())
    for opt, other in (kinds, kinds[::-1]):
        with pytest.raises(sanc.ArgumentError, match="same preset"):
            opt.load_state_dict(other.state_dict())
    assert kinds[0].param_groups[0]["weight_decay"] == 0.0


def test_a_resumed_minimisation_of_the_other_iteration_is_refused(problem):
    states = []

    def keep(intermediate_result):
        states.append(intermediate_result.state)

    sanc.minimize(problem, np.ones(30), batch_size=29, max_iter=2, callback=keep, certify=False)
    with pytest.raises(sanc.ArgumentError, match="same preset, refresh and batch_size"):
        sanc.minimize(problem, np.ones(30), batch_size=29, refresh=0, resume=states[-1])


def test_an_exception_after_a_change_of_the_parameters_forgets_nothing():
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    opt = sanc.SANC(net.parameters(), seed=0)
    for _ in range(20):
        opt.step(lambda: (net(x) ** 2).mean())
    before = opt._iterates.state
    net.bias.requires_grad_(False)

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        opt.step(fails)
    net.bias.requires_grad_(True)
    assert opt._iterates.state is before
    opt.step(lambda: (net(x) ** 2).mean())
    assert opt._iterates.state.averaged == before.averaged + 1
    net.float()  # another type is another space
    x = x.float()
    opt.step(lambda: (net(x) ** 2).mean())
    assert opt._iterates.state.safe.dtype == torch.float32


@pytest.mark.parametrize(("hvp", "where"), [
    ("double-backward", "between products"), ("forward-over-reverse", "between products"),
    ("forward-over-reverse", "in a product"),
])  # fmt: skip
def test_a_failure_while_a_space_is_built_changes_nothing(hvp, where, monkeypatch):
    # What a step lets go of to save memory comes back, and afterwards the run is the one that did not fail.
    extend = Krylov.extend

    def run(fails):
        torch.manual_seed(0)
        model, rows = torch.nn.Linear(6, 6), torch.randn(60, 4, 6)
        opt = sanc.SANC(model.parameters(), seed=0, hvp=hvp, refresh=10, weight_decay=0.01, check=False)
        calls, failures = [], 0

        def loss():
            calls.append(1)
            if failing and where == "in a product" and len(calls) == 2:
                raise KeyError("lost")
            return torch.cos(3.0 * model(x)).mean()

        def stops(krylov):
            if failing and where == "between products" and krylov.dim == 2:
                raise KeyError("lost")
            return extend(krylov)

        monkeypatch.setattr(Krylov, "extend", stops)
        for k, x in enumerate(rows):  # noqa: B007 - the closure reads x
            failing = fails and k > 0 and opt._iterates._due()
            if failing:
                calls.clear()
                state, point = opt._iterates.state, [p.detach().clone() for p in model.parameters()]
                vectors = {name: vector.clone() for name, vector in opt._iterates.vectors().items()}
                with pytest.raises(KeyError, match="lost"):
                    opt.step(loss)
                failing, failures = False, failures + 1
                assert opt._iterates.state is state
                assert all(torch.equal(vector, vectors[name]) for name, vector in opt._iterates.vectors().items())
                assert all(torch.equal(p, old) for p, old in zip(model.parameters(), point, strict=True))
            opt.step(loss)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), failures

    (straight, _), (bumpy, failures) = run(False), run(True)
    assert failures > 4
    assert torch.equal(straight, bumpy)


def test_buffers_of_a_batch_that_was_not_learnt_are_put_back():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(64, 3)
    opt = sanc.SANC(net.parameters(), seed=0)
    for _ in range(40):
        opt.step(lambda: (net(x) - x.sum(1, keepdim=True)).square().mean())
    with torch.no_grad():
        net[3].weight.add_(50.0)
    opt._iterates._last = torch.cat([p.detach().reshape(-1) for p in net.parameters()])  # as if by a step of its own
    held = net[1].running_mean.clone()
    opt.step(lambda: (net(x + 5.0) - x.sum(1, keepdim=True)).square().mean())
    assert opt._iterates.went_back
    assert torch.equal(held, net[1].running_mean)


@pytest.mark.parametrize(
    ("name", "value"),
    [("refresh", -1), ("averaging", 1.0), ("metric", 1.5), ("margin", -0.1), ("sigma_rate", 2.0), ("check_every", -2),
     ("warm_up", 1.5), ("metric_averaging", 1.0)],
)  # fmt: skip
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(sanc.ArgumentError, match=f"{name} = {value}"):
        sanc.SANC([torch.nn.Parameter(torch.ones(2))], **{name: value})
