"""The iteration on samples: its steps against a dense computation, its counts, and under noise."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.datasets import load_digits
from torch import nn

import sanc
from oracles import iteration_on
from sanc import Branch
from sanc.core.iteration import Iteration
from sanc.core.model import SAMPLED_KRYLOV_DIM
from sanc.core.spectrum.krylov import Krylov
from sanc.minibatch import batch_losses
from sanc.minibatch.averaging import AveragedStep
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minibatch.outcome import IterationOutcome
from sanc.minibatch.state import BatchComparison
from sanc.sums.oracle import SumOracle


@pytest.fixture(scope="module")
def lowest(problem):
    """f* from SciPy, from several starts."""
    starts = [np.zeros(30), np.ones(30), -np.ones(30)]
    return min(scipy.optimize.minimize(problem.value_and_gradient, w, jac=True, tol=1e-12).fun for w in starts)


def test_on_an_exact_objective_it_is_the_exact_iteration(problem):
    """Every batch is the whole sum: bit for bit the steps of the core, as long as one likes."""
    iteration, oracle = iteration_on(problem, batch=None)
    exact = Iteration(sanc.method_for(krylov_dim=SAMPLED_KRYLOV_DIM), 0)
    other = SumOracle(problem, (None,) * 3, 0)
    x = y = np.ones(problem.dim)
    for _ in range(40):
        x, record = iteration.iterate(x, oracle)
        y, twin = exact.iterate(y, other)
        assert np.array_equal(x, y)
        assert (record.branch, record.sigma, record.krylov_dim) == (twin.branch, twin.sigma, twin.krylov_dim)
    assert not iteration.state.averaged
    assert np.linalg.norm(problem.value_and_gradient(x)[1]) < 1e-6


def test_numbers_of_second_order_steps_are_replaced(problem):
    """`replace_numbers` of both iterations sets the σ of the next cubic step, and leaves the rest of the state."""
    for iteration in (iteration_on(problem)[0], Iteration(sanc.method_for(), 0)):
        before = getattr(iteration, "second_order", iteration).state
        iteration.replace_numbers(sigma=7.0, first_length_scale=2.0)
        assert getattr(iteration, "second_order", iteration).state == replace(before, sigma=7.0, first_length_scale=2.0)
        iteration.set_tolerance(0.5)
        assert getattr(iteration, "second_order", iteration).tol == 0.5


def second_moments_after(V, k, g, memory):
    """V ← V + w(g² − V) with w = max(1 − memory, 1/k), for the k-th gradient in its unit."""
    return V + max(1 - memory, 1 / k) * (g**2 - V)


def refreshes_epsilon(k):
    """ε is refreshed after the steps 1, 2, 4, …, 32, and then after every fiftieth."""
    return k & (k - 1) == 0 if k < 50 else k % 50 == 0


def eta_of(k, settings, d, is_aligned):
    """η = u·max(scale, distance·d), at most 2u·scale unless steps are aligned, with a warm-up and a decay.

    The parameter unit u is 1/15: of a vector nothing else is known.
    """
    limit = math.inf if k - 1 > 2 * settings.warm_up and is_aligned else 2 * settings.scale
    eta = min(max(settings.scale, settings.distance * d), limit) / 15
    eta *= min(1, k / settings.warm_up)
    if settings.horizon:
        return eta * max(1 - (k - 1) / settings.horizon, 1 / settings.horizon)
    return eta / math.sqrt(1 + (k - 1) / settings.slow_down)


def average_weight_of(k, settings, weight_sum):
    """c = k^p / Σ_i i^p, and 1 without averaging; if r steps of the horizon remain, c ≥ (p + 1)/(r + p + 1)."""
    p, horizon = settings.average.weighting, settings.step_size.horizon
    c = k**p / weight_sum if settings.average.averaging else 1.0
    return max(c, (p + 1) / (max(horizon - k + 1, 1) + p + 1)) if horizon else c


def step_norm1_sum_after(step_norm1_sum, c, interval, step_norm1):
    """The 1-norms of the steps that z − x contains: each step of z multiplies those before it by 1 − c."""
    return (1 - c) ** interval * step_norm1_sum + (1 - c) * interval * step_norm1


def distance_bound_after(d, direction_sum, distance_numerator, p, x0_minus_z):
    """d ≥ Σ_i λ_i⟨p_i, x_0 − z_i⟩ / ‖Σ_i λ_i p_i‖_1 / u with λ = 0.002 d²; both sums decay by 0.998."""
    direction_sum = 0.998 * direction_sum + 0.002 * d * d * p
    distance_numerator = 0.998 * distance_numerator + 0.002 * d * d * p @ x0_minus_z
    return max(d, 15 * distance_numerator / np.abs(direction_sum).sum()), direction_sum, distance_numerator


@pytest.mark.parametrize(
    ("averaging", "distance", "horizon"), [(0.9, 2.0, 0), (0.0, 2.0, 0), (0.9, 0.0, 0), (0.0, 0.0, 0), (0.9, 2.0, 80)]
)
def test_averaged_steps_are_those_of_the_equations(problem, averaging, distance, horizon):
    """y, z and x, the scale and the distance, written out again with NumPy in their own variables."""
    settings = {"averaging": averaging, "distance": distance, "metric": "diagonal", "curvature": False, "scale": 1.5e-3}
    settings["horizon"] = horizon
    iteration, oracle = iteration_on(problem, **settings)
    settings = iteration.settings
    point = x0 = x = z = np.ones(problem.dim)
    V, gradient_unit, epsilon, weight_sum = 0.0, None, 0.0, 0.0
    d, direction_sum, distance_numerator, step_norm1_sum, offset_norm1 = 1e-6, np.zeros(problem.dim), 0.0, 0.0, 0.0
    for k in range(1, 91):
        # The gradient at y, and the metric M = unit·(√V + ε).
        oracle.begin(k - 1)
        y = averaging * x + (1 - averaging) * z
        g = oracle.sample(0).value_and_gradient(y)[1]
        gradient_unit = np.linalg.norm(g) if gradient_unit is None else gradient_unit
        V = second_moments_after(V, k, g / gradient_unit, settings.metric.memory)
        epsilon = 1e-6 * np.sqrt(V.max()) if k == 1 else epsilon
        M = gradient_unit * (np.sqrt(V) + epsilon)
        p = g / M

        # The sizes η and c.
        eta = eta_of(k, settings.step_size, d, is_aligned=offset_norm1 > 0.7 * step_norm1_sum)
        weight_sum += k**settings.average.weighting
        c = average_weight_of(k, settings, weight_sum)

        # The step, and the distance bound, which is updated in the first 20 steps and then in every fifth.
        interval = 1 if k <= 20 else 5
        updates_distance = distance and (k - 1) % interval == 0
        if updates_distance:
            step_norm1_sum = step_norm1_sum_after(step_norm1_sum, c, interval, eta * np.abs(p).sum())
            d, direction_sum, distance_numerator = distance_bound_after(d, direction_sum, distance_numerator, p, x0 - z)
        step = -eta * p
        z = z + step
        x = x + c * (z - x)
        offset_norm1 = np.abs(z - x).sum() if updates_distance else offset_norm1
        epsilon = 1e-6 * np.sqrt(V.max()) if refreshes_epsilon(k) else epsilon

        point, record = iteration.iterate(point, oracle)
        assert np.allclose(point, x, rtol=0, atol=1e-10)
        if distance:
            assert iteration.state.distance.distance_bound == pytest.approx(d, rel=1e-6)
        # the step of the model: g + σ‖s‖_M M s = 0, so that it minimises gᵀs + (σ/3)‖s‖³_M
        norm = math.sqrt(step @ (M * step))
        assert np.allclose(g + record.sigma * norm * M * step, 0, atol=1e-9 * np.linalg.norm(g))
        assert record.model_decrease == pytest.approx(-(g @ step + record.sigma / 3 * norm**3))
        assert record.branch is Branch.AVERAGED and record.krylov_dim == 0


@pytest.mark.parametrize("averaging", [0.0, 0.85])
def test_an_iterate_without_weight_moves_the_average_towards_the_point_of_the_gradient(averaging):
    """y = x + (1 − β)(z − x) stays where it is, and z − x is reduced by the weight that the iterate would have had."""
    work = AveragedStep(sanc.Diagonal().create([(1,)], torch.zeros(1)), averaging)
    weight, x, offset = torch.tensor(0.2, dtype=torch.float64), 1.0, 3.0
    for factor, reduced in ((1.0, 0.2), (0.0, 0.0), (0.5, 0.1 / 0.9)):
        a, b = (float(number) for number in work._weights(weight, torch.tensor(factor, dtype=torch.float64)))
        middle, rest = x + reduced * offset, (1 - reduced) * offset  # the usual average, with the reduced weight
        y = middle + (1 - averaging) * rest
        assert x + a * offset + (1 - averaging) * (1 - b) * offset == pytest.approx(y)
        assert (1 - b) * offset == pytest.approx((1 - (0.2 - reduced)) * rest)


def test_products_are_spent_as_long_as_batches_agree(problem):
    batch = 29
    iteration, oracle = iteration_on(problem, batch=batch)
    x, before, spaces = np.ones(problem.dim), sanc.Calls(), []
    for k in range(140):
        x, record = iteration.iterate(x, oracle)
        products = record.calls.product - before.product
        if products:
            spaces.append(k)
        else:
            assert record.calls.paper_calls - before.paper_calls == batch
        before = record.calls
    first = next(k for k in range(140) if k not in spaces)
    assert 1 <= first < 30 and spaces == list(range(first))
    iteration, oracle = iteration_on(problem, curvature=False)
    for _ in range(130):
        x, record = iteration.iterate(x, oracle)
    assert record.calls.product == 0 and iteration.state.steps == 130


def test_noise_neither_raises_sigma_without_bound_nor_stops_the_run(problem, lowest):
    """The gap to f* goes on falling on the noise floor, and no iteration stays."""
    early, late = [], []
    for seed in range(2):
        iteration, oracle = iteration_on(problem, seed=seed)
        x, records, gaps = np.ones(problem.dim), [], []
        for _ in range(250):
            x, record = iteration.iterate(x, oracle)
            records.append(record)
            gaps.append(problem.value(x) - lowest)
        early.append(np.mean(gaps[50:100]))
        late.append(np.mean(gaps[-50:]))
        assert iteration.state.eta_reduction == 1.0
        assert not any(r.branch is Branch.STAYED for r in records[125:])
    assert np.mean(late) < 0.5 * np.mean(early)
    assert np.mean(late) < 2e-3 * lowest


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

    ours = [calls_to(1.001 * lowest, seed=seed) for seed in range(3)]
    theirs = [calls_to(1.001 * lowest, seed=seed, preset="paper", L1=10.0, L2=10.0) for seed in range(3)]
    assert np.median(ours) <= np.median(theirs)


@pytest.mark.parametrize("size", [1e-110, 1e-160, 1.0])
def test_very_small_numbers_are_no_errors(size):
    x = torch.nn.Parameter(torch.tensor([size, 2 * size], dtype=torch.float64))
    opt = sanc.SANC([x], seed=0, check=False)
    for _ in range(20):
        opt.step(lambda: (x * x).sum())
    assert torch.isfinite(x).all()


@pytest.mark.parametrize("cls", [pytest.param(sanc.SANC, marks=pytest.mark.slow), sanc.SCR])
def test_a_network_from_near_zero_is_trained(cls):
    """Everything there is a saddle."""
    X, y = load_digits(return_X_y=True)
    X, y = torch.from_numpy(X / 16.0), torch.from_numpy(y)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.01)
    opt, rng, first = cls(net.parameters(), seed=0), np.random.default_rng(0), None
    for _ in range(200):
        rows = torch.from_numpy(rng.choice(len(X), 128, replace=False))
        value = opt.step(sanc.Batch(lambda a, b: nn.functional.cross_entropy(net(a), b), X[rows], y[rows]))
        first = float(value) if first is None else first
    assert float(value) < 0.3 * first


def test_where_the_gradient_vanishes_the_space_starts_at_random():
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    bend = torch.tensor([-1.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    opt = sanc.SANC([p], seed=3)
    opt.step(lambda: 0.5 * (bend * p**2).sum() + 0.25 * (p**4).sum())
    assert opt.record.curvature_share == 1.0 and opt.record.step_norm > 0.1
    assert opt.record.ritz_value == pytest.approx(-1.0)


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


def test_an_objective_sample_is_rejected(problem):
    with pytest.raises(sanc.ArgumentError, match=r"objective_batch_size = 29 .* preset=\"paper\""):
        sanc.minimize(problem, np.ones(30), batch_size=29, objective_batch_size=29)
    p = torch.nn.Parameter(torch.ones(2))
    opt = sanc.SANC([p])
    with pytest.raises(sanc.ArgumentError, match=r"objective cannot be used.*preset=\"paper\""):
        opt.step(lambda: (p**2).sum(), objective=lambda: (p**2).sum())
    assert torch.equal(p.detach(), torch.ones(2))


def test_other_parameters_start_without_a_state():
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
    opt.param_groups[0]["frozen"] = True
    held = net[0].weight.detach().clone()
    step()
    assert len(opt._iteration.state.offset) == 7 and opt._iteration.state.iteration == 31
    for _ in range(30):
        step()
    assert torch.equal(held, net[0].weight)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)  # only what is not frozen has a state now
    assert len(opt.state_dict()["state"]) == 2


@pytest.mark.parametrize("change", ["freeze", "free", "add"])
def test_a_state_loads_into_the_parameters_it_was_saved_of(change):
    """Saved between a change of the groups and the next step: the resumed run resets what the live one resets."""

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


def test_a_state_of_the_other_iteration_is_rejected_whole():
    p = torch.nn.Parameter(torch.ones(3))
    kinds = [sanc.SANC([p], seed=0), sanc.SANC([p], preset="paper", weight_decay=0.5, seed=0)]
    for opt in kinds:
        opt.step(lambda: (p**2).sum())
    for opt, other in (kinds, kinds[::-1]):
        with pytest.raises(sanc.ArgumentError, match="same preset"):
            opt.load_state_dict(other.state_dict())
    assert kinds[0].param_groups[0]["weight_decay"] == 0.0


def test_a_resumed_minimisation_of_the_other_iteration_is_rejected(problem):
    states = []

    def keep(intermediate_result):
        states.append(intermediate_result.state)

    sanc.minimize(problem, np.ones(30), batch_size=29, max_iter=2, callback=keep, certify=False)
    with pytest.raises(sanc.ArgumentError, match="same preset, minibatch and batch_size"):
        sanc.minimize(problem, np.ones(30), batch_size=29, minibatch=None, resume=states[-1])


def test_an_exception_after_a_change_of_the_parameters_resets_nothing():
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    opt = sanc.SANC(net.parameters(), seed=0, curvature=False)
    for _ in range(20):
        opt.step(lambda: (net(x) ** 2).mean())
    before = opt._iteration.state
    net.bias.requires_grad_(False)

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        opt.step(fails)
    net.bias.requires_grad_(True)
    assert opt._iteration.state is before
    opt.step(lambda: (net(x) ** 2).mean())
    assert opt._iteration.state.steps == before.steps + 1
    net.float()  # another type is another space
    x = x.float()
    opt.step(lambda: (net(x) ** 2).mean())
    assert opt._iteration.state.offset.dtype == torch.float32


@pytest.mark.parametrize(("hvp", "where"), [
    ("double-backward", "between products"), ("forward-over-reverse", "between products"),
    ("forward-over-reverse", "in a product"),
])  # fmt: skip
def test_a_failure_while_a_space_is_built_changes_nothing(hvp, where, monkeypatch):
    # What a step releases to save memory is computed again, and afterwards the run is the one that did not fail.
    extend = Krylov.extend

    def run(fails):
        torch.manual_seed(0)
        model, rows = torch.nn.Linear(6, 6), torch.randn(60, 4, 6)
        opt = sanc.SANC(
            model.parameters(), seed=0, hvp=hvp, noise=1e9, krylov_stop="paper", weight_decay=0.01, check=False
        )
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
        x = rows[0]  # batches that agree, so that there is a space in every step
        for k in range(8):
            failing = fails and k > 0
            if failing:
                calls.clear()
                state, point = opt._iteration.state, [p.detach().clone() for p in model.parameters()]
                vectors = {name: vector.clone() for name, vector in opt._iteration.vectors().items()}
                with pytest.raises(KeyError, match="lost"):
                    opt.step(loss)
                failing, failures = False, failures + 1
                assert opt._iteration.state is state
                assert all(torch.equal(vector, vectors[name]) for name, vector in opt._iteration.vectors().items())
                assert all(torch.equal(p, old) for p, old in zip(model.parameters(), point, strict=True))
            opt.step(loss)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), failures

    (straight, _), (bumpy, failures) = run(False), run(True)
    assert failures > 4
    assert torch.equal(straight, bumpy)


def test_buffers_of_a_discarded_batch_are_restored():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(64, 3)
    opt = sanc.SANC(net.parameters(), seed=0, curvature=False)
    for _ in range(40):
        opt.step(lambda: (net(x) - x.sum(1, keepdim=True)).square().mean())
    held = net[1].running_mean.clone()
    for _ in range(2):
        opt.step(lambda: (net(x + 5.0) * math.nan).mean())
        assert "not finite" in opt.record.note
        assert torch.equal(held, net[1].running_mean)


def test_a_basis_may_be_computed_twice_on_samples():
    p = nn.Parameter(torch.ones(2))
    opt = sanc.SANC([p], lanczos="regenerate")
    opt.step(lambda: (p**2).sum())
    assert opt.record.krylov_dim > 0 and isinstance(opt._iteration, MinibatchIteration)


@pytest.mark.parametrize(
    ("name", "value"),
    [("averaging", 1.0), ("metric", "kroneker"), ("memory", 1.0), ("refresh", 0), ("largest_side", -1), ("scale", 0.0),
     ("distance", -1.0), ("warm_up", 1.5), ("slow_down", -2), ("horizon", -1), ("lower_bound", math.inf),
     ("weighting", -1.0), ("noise", math.inf),
     ("curvature", 1)],
)  # fmt: skip
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(sanc.ArgumentError, match=f"{name} = {value!r}"):
        sanc.SANC([nn.Parameter(torch.ones(2))], **{name: value})


@pytest.mark.parametrize(("reference", "halved"), [(2.0, 0.9), (-2.0, -3.1), (0.0, -1e-3)])
def test_the_loss_has_to_fall_by_half_of_its_size_whatever_its_sign(reference, halved):
    before = BatchComparison(reference_loss=reference, last_loss=reference, last_decrease=10.0, first_loss=reference)
    slower = reference - 0.4 * abs(reference)
    assert batch_losses.compare_batches(before, None, slower, 1.0, 1e-16)[1].steps_since_halving == 1
    assert batch_losses.compare_batches(before, None, halved, 1.0, 1e-16)[1].steps_since_halving == 0


@pytest.mark.parametrize("curvature", [True, False])
def test_a_step_of_a_phase_returns_the_next_state_and_assigns_none(problem, curvature):
    iteration, oracle = iteration_on(problem, curvature=curvature)
    x = np.ones(problem.dim)
    for _ in range(8):
        before, pending = iteration.state, iteration._pending
        outcome = iteration._step_of_phase(before, x, oracle, ())
        assert isinstance(outcome, IterationOutcome) and outcome.state is not before
        assert iteration.state is before and iteration._pending is pending
        iteration.state, x = replace(outcome.state, iteration=before.iteration + 1), outcome.point
    assert iteration.state.averaged is not curvature
