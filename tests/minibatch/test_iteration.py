"""The iteration on samples: its steps against a dense computation, its counts, and what noise must not do to it."""

from __future__ import annotations

import io
import math
import types
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.preprocessing import scale
from torch import nn

import sanc
from sanc import Branch
from sanc.core.iteration import Iteration
from sanc.core.model import SAMPLED_KRYLOV_DIM
from sanc.core.spectrum.krylov import Krylov
from sanc.minibatch import watch
from sanc.minibatch.averaging import CHECKSUM_MODULUS, AveragedStep, checksum
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minibatch.state import MinibatchState
from sanc.minibatch.step_size import parameter_unit, typical_matrix
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


def iteration_on(problem, method="sanc", batch=29, seed=0, **options):
    return MinibatchIteration(sanc.method_for(method, **options), seed), SumOracle(problem, (batch,) * 3, seed)


# ---------------------------------------------------------------------------------------------- the steps


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
        iteration.replace_numbers(sigma=7.0, unit_length=2.0)
        assert getattr(iteration, "second_order", iteration).state == replace(before, sigma=7.0, unit_length=2.0)
        iteration.set_tolerance(0.5)
        assert getattr(iteration, "second_order", iteration).tol == 0.5


@pytest.mark.parametrize(
    ("averaging", "distance", "horizon"), [(0.9, 2.0, 0), (0.0, 2.0, 0), (0.9, 0.0, 0), (0.0, 0.0, 0), (0.9, 2.0, 80)]
)
def test_averaged_steps_are_those_of_the_equations(problem, averaging, distance, horizon):
    """y, z and x, the scale and the distance, written out again with NumPy in their own variables."""
    settings = {"averaging": averaging, "distance": distance, "metric": "diagonal", "curvature": False, "scale": 1.5e-3}
    settings["horizon"] = horizon
    iteration, oracle = iteration_on(problem, **settings)
    settings = iteration.settings
    x0 = x = z = average = np.ones(problem.dim)
    V, total, r, drift, d, unit, path, beyond = 0.0, 0.0, 0.0, np.zeros(problem.dim), 1e-6, None, 0.0, 0.0
    floor = 0.0
    for k in range(90):
        oracle.begin(k)
        g = oracle.sample(0).value_and_gradient(averaging * average + (1 - averaging) * z)[1]
        unit = np.linalg.norm(g) if unit is None else unit
        V = V + max(1 - settings.metric.memory, 1 / (k + 1)) * ((g / unit) ** 2 - V)
        floor = 1e-6 * np.sqrt(V.max()) if k == 0 else floor
        p = g / unit / (np.sqrt(V) + floor)
        s, aligned = settings.step_size, beyond > 0.7 * path
        eta = min(max(s.scale, distance * d), math.inf if k > 2 * s.warm_up and aligned else 2 * s.scale)
        eta *= min(1, (k + 1) / s.warm_up) / 15  # of a vector nothing else is known
        eta *= max(1 - k / horizon, 1 / horizon) if horizon else 1 / math.sqrt(1 + k / s.slow_down)
        step, M = -eta * p, unit * (np.sqrt(V) + floor)
        late = (k + 1) ** settings.average.weighting
        total += late
        share = late / total if averaging else 1.0
        share = max(share, 4 / (max(horizon - k, 1) + 4)) if horizon else share
        if distance and (k < 20 or k % 5 == 0):
            drift = 0.998 * drift + 0.002 * d * d * p
            r = 0.998 * r + 0.002 * d * d * p @ (x0 - z)
            many = 1 if k < 20 else 5
            path = (1 - share) ** many * path + (1 - share) * many * eta * np.abs(p).sum()
            d = max(d, 15 * r / np.abs(drift).sum())
        z = z + step
        average = average + share * (z - average)
        if distance and (k < 20 or k % 5 == 0):
            beyond = np.abs(z - average).sum()
        if (k + 1) & k == 0 if k + 1 < 50 else (k + 1) % 50 == 0:  # when ε is refreshed
            floor = 1e-6 * np.sqrt(V.max())
        x, record = iteration.iterate(x, oracle)
        assert np.allclose(x, average, rtol=0, atol=1e-10)
        if distance:
            assert iteration.state.distance_bound == pytest.approx(d, rel=1e-6)
        # the step of the model: g + σ‖s‖_M M s = 0, so that it minimises gᵀs + (σ/3)‖s‖³_M
        norm = math.sqrt(step @ (M * step))
        assert np.allclose(g + record.sigma * norm * M * step, 0, atol=1e-9 * np.linalg.norm(g))
        assert record.model_decrease == pytest.approx(-(g @ step + record.sigma / 3 * norm**3))
        assert record.branch is Branch.AVERAGED and record.krylov_dim == 0


def first_step(closure, **options):
    """Return the change of two parameters, of which the second has half the rate, by the first averaged step."""
    parameters = [nn.Parameter(torch.tensor(values, dtype=torch.float64)) for values in ([3.0, -1.0], [2.0])]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.5}]
    before = torch.cat([p.detach().clone() for p in parameters])
    opt = sanc.SANC(groups, seed=0, curvature=False, metric="diagonal", **options)
    opt.step(lambda: closure(torch.cat(parameters)))
    return torch.cat([p.detach() for p in parameters]) - before, opt


@pytest.mark.parametrize("averaging", [0.0, 0.85])
@pytest.mark.parametrize("lower_bound", [0.0, -2.5])
def test_a_step_reduces_the_loss_to_its_lower_bound_at_most(averaging, lower_bound):
    """M⁻¹g has entries ±1 in the first step; 1 − β of it may reduce f by f − b to first order."""
    w, factors = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    options = {"averaging": averaging, "scale": 1e5, "warm_up": 0}
    change, opt = first_step(lambda p: p.square().sum(), lower_bound=lower_bound, **options)
    excess, derivative = 14.0 - lower_bound, (2.0 * w.abs() * factors).sum()
    expected = -excess / ((1.0 - averaging) * derivative) * factors * w.sign()
    torch.testing.assert_close(change, expected, rtol=1e-5, atol=0.0)
    size = expected.abs().max()  # η after the reduction: the record has the decrease of the model with it
    assert opt.record.model_decrease == pytest.approx(2 / 3 * float(size * 2.0 * w.abs().sum()), rel=1e-5)
    free, _ = first_step(lambda p: p.square().sum(), lower_bound=-math.inf, **options)
    assert (free.abs() > 10.0 * change.abs()).all()


@pytest.mark.parametrize("loss", [lambda p: p.square().sum() - 1e3, lambda p: (p - p.detach()).sum()])
def test_losses_at_or_below_the_bound_show_that_it_is_none(loss):
    """A negative loss, and one that is 0 although its gradient is not, as surrogates in reinforcement learning are."""
    options = {"averaging": 0.85, "scale": 0.1, "distance": 0.0}
    opts, points = [], []
    for lower_bound in (0.0, -math.inf):
        p = nn.Parameter(torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64))
        opts.append(sanc.SANC([p], seed=0, curvature=False, metric="diagonal", lower_bound=lower_bound, **options))
        for _ in range(20):
            opts[-1].step(lambda p=p: loss(p))
        points.append(p.detach())
    start = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    assert (points[0] - start).norm() > 0.9 * (points[1] - start).norm() > 0.05
    twin = sanc.SANC([nn.Parameter(points[0].clone())], seed=0, curvature=False, metric="diagonal", **options)
    twin.load_state_dict(opts[0].state_dict())
    for opt in (opts[0], twin):
        assert opt._iteration.state.below_bound == (float(loss(points[0])) < 0.0)


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


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_a_loss_in_other_units_takes_the_same_path(size):
    ends = []
    for factor in (1.0, size):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        x = torch.randn(200, 4, dtype=torch.float64)
        opt = sanc.SANC(net.parameters(), seed=0, curvature=False)
        for k in range(30):
            rows = torch.arange(20) + 10 * (k % 18)
            opt.step(lambda rows=rows, factor=factor: factor * (net(x[rows])[:, 0] - x[rows].prod(1)).square().mean())
        ends.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    assert torch.allclose(*ends, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("curvature", [True, False])
@pytest.mark.parametrize("size", [2.0**-20, 2.0**20])
def test_weights_in_other_units_take_the_same_path(size, curvature):
    """The network of w/size from size·w, whose steps are as many times as long; the units are powers of two."""
    ends = []
    for unit in (1.0, size):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        x = torch.randn(200, 4, dtype=torch.float64)
        weights = {name: nn.Parameter(unit * p.detach()) for name, p in net.named_parameters()}
        opt = sanc.SANC([{"params": weights.values(), "weight_decay": 1e-3 / unit**2}], seed=0, curvature=curvature)
        for k in range(30):
            rows = torch.arange(20) + 10 * (k % 18)

            def closure(rows=rows, unit=unit, weights=weights):
                given = {name: w / unit for name, w in weights.items()}
                return (torch.func.functional_call(net, given, x[rows])[:, 0] - x[rows].prod(1)).square().mean()

            opt.step(closure)
        ends.append(torch.cat([w.detach().reshape(-1) / unit for w in weights.values()]))
    assert torch.allclose(*ends, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "weight, value, gradient_sum, unit",
    [
        (0.05, 2.0, 10.0, 0.05),
        (0.001, 2.0, 10.0, 0.02),  # moving all by 0.02 changes the loss by a tenth
        (0.001, 2e6, 10.0, 1 / 15),  # a loss with an offset
        (0.0, 2.0, 10.0, 1 / 15),
        (0.05, 2.0, 0.0, 1 / 15),  # an exact saddle
        (0.08, 2.0, 0.0, 0.08),
        (0.05, math.nan, math.nan, 0.05),
        (0.05, -2.0, math.inf, 0.05),
    ],
)
def test_the_unit_of_length(weight, value, gradient_sum, unit):
    assert parameter_unit(weight, value, gradient_sum) == pytest.approx(unit)


def test_a_typical_matrix():
    """Geometric means, over the entries of matrices, of their root mean squares and of their smaller sides."""
    rng = np.random.default_rng(0)
    arrays = [0.02 * rng.standard_normal((30, 20)), rng.standard_normal(30), np.zeros((5, 5)),
              3.0 * rng.standard_normal((4, 2, 3))]  # fmt: skip
    flat, shapes = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays])), [a.shape for a in arrays]
    roots = [np.sqrt((arrays[i] ** 2).mean()) for i in (0, 3)]
    weight, width = typical_matrix(flat, shapes, None)
    assert weight == pytest.approx(roots[0] ** (600 / 624) * roots[1] ** (24 / 624), rel=1e-12)
    assert width == pytest.approx(20 ** (600 / 649) * 5 ** (25 / 649) * 4 ** (24 / 649), rel=1e-12)
    assert typical_matrix(flat[600:655], shapes[1:3], None) == (0.0, pytest.approx(5.0))  # a vector, and only zeros
    assert typical_matrix(flat[600:631], [(30,), ()], None) == (0.0, 0.0)  # no matrices
    large = [0.1 * rng.standard_normal((5, 4)), rng.standard_normal((90, 4)), 0.2 * rng.standard_normal((4, 2))]
    joined = torch.from_numpy(np.concatenate([a.reshape(-1) for a in large]))  # with an embedding, say
    middle = np.sqrt((large[2] ** 2).mean())
    assert typical_matrix(joined, [a.shape for a in large], None).weight == pytest.approx(1.5 * middle, rel=1e-12)
    stack = torch.ones(2 * 40 * 50)
    assert typical_matrix(stack, [(2, 40, 50)], None).width == pytest.approx(40.0)  # two experts


def test_a_typical_matrix_whose_entries_others_hold():
    """Two ranks, of which one has no entry of the first matrix."""
    rng = np.random.default_rng(1)
    first, second = torch.from_numpy(rng.standard_normal((1, 3))), torch.from_numpy(0.1 * rng.standard_normal((5, 4)))
    whole = typical_matrix(torch.cat([first.reshape(-1), second.reshape(-1)]), [(1, 3), (5, 4)], None)
    parts = [(torch.cat([first.reshape(-1), second[:3].reshape(-1)]), [(1, 3), (3, 4)]),
             (second[3:].reshape(-1), [(0, 3), (2, 4)])]  # fmt: skip
    sent = []
    for x, shapes in parts:
        typical_matrix(x, shapes, lambda sums: sent.append(sums) or sums)
    for x, shapes in parts:
        assert typical_matrix(x, shapes, lambda sums: sent[0] + sent[1]) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("width", "warm_up", "expected"),
    [
        (0.0, 20, [0.05, 0.5, 1.0, 1.0]),  # no matrices
        (4.0, 20, [0.05, 0.5, 1.0, 1.0]),
        (400.0, 20, [0.05, math.sqrt(10 / 400), 0.5, 1.0]),
        (400.0, 0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_steps_of_wide_networks_grow_with_the_root_of_their_number(width, warm_up, expected):
    settings = sanc.StepSize(warm_up=warm_up, slow_down=0, scale=1.0)
    sizes = [
        settings.size(MinibatchState(0, parameter_unit=1.0, width=width, steps=steps)) for steps in (0, 9, 99, 399)
    ]
    assert sizes == pytest.approx(expected, rel=1e-12)


def test_the_path_is_that_of_the_steps_where_groups_have_rates_of_their_own():
    """After two steps z − x is a share of the second step alone, so that the path is as long as the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    groups = [{"params": net[0].parameters(), "lr": 0.25}, {"params": net[2].parameters(), "lr": 1.0}]
    opt = sanc.SANC(groups, seed=0, curvature=False)
    x = torch.randn(50, 4, dtype=torch.float64)
    for _ in range(2):
        opt.step(lambda: (net(x)[:, 0] - x.prod(1)).square().mean())
    state = opt._driver.iteration.state
    assert state.step_norm1_sum == pytest.approx(state.offset_norm1, rel=1e-9) and state.step_norm1_sum > 0.0


# ---------------------------------------------------------------------------------------------- noise


def test_noise_neither_blows_sigma_up_nor_stops_the_run(problem, lowest):
    """The gap to f* goes on falling on the noise floor, and no iteration stays."""
    early, late = [], []
    for seed in range(2):
        iteration, oracle = iteration_on(problem, seed=seed)
        x, records, gaps = np.ones(problem.dim), [], []
        for _ in range(400):
            x, record = iteration.iterate(x, oracle)
            records.append(record)
            gaps.append(problem.value(x) - lowest)
        early.append(np.mean(gaps[50:100]))
        late.append(np.mean(gaps[-50:]))
        assert iteration.state.eta_reduction == 1.0
        assert not any(r.branch is Branch.STAYED for r in records[200:])
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


def settled_run(problem, steps=60, **options):
    iteration, oracle = iteration_on(problem, **options)
    x = np.ones(problem.dim)
    for _ in range(steps):
        x, _ = iteration.iterate(x, oracle)
    assert iteration.state.averaged
    return iteration, oracle, x


def test_a_loss_that_rises_for_long_leads_back_to_a_safe_point(problem):
    """As if the steps themselves had gone wrong: the averaged point moves away a little in every iteration."""
    iteration, oracle, x = settled_run(problem)
    good, k = problem.value(x), 0
    while not iteration.has_returned:
        k += 1
        assert k < 100
        x = x + 0.1
        iteration.state = replace(
            iteration.state, checksum=float(checksum(torch.from_numpy(x))) % CHECKSUM_MODULUS
        )  # as the iteration does
        before = oracle.meter.paper_calls
        x, record = iteration.iterate(x, oracle)
        assert record.calls.paper_calls - before == oracle.sizes[0]  # a step that goes back took a gradient, too
    assert "rose" in record.note and record.branch is Branch.STAYED and k > 5
    assert problem.value(x) < 1.1 * good and iteration.state.eta_reduction == 0.5
    safe_point = iteration.state.safe_point
    iteration.iterate(x, oracle)
    assert not iteration.has_returned
    # The return is not taken for a change by the caller: averaging goes on, and the point is not dropped.
    assert iteration.state.projection_countdown == 0 and iteration.state.safe_point is not None and safe_point is x


def test_a_change_of_the_parameters_by_the_caller_is_not_undone(problem):
    iteration, oracle, x = settled_run(problem)
    point, _ = iteration.iterate(x + 3.0, oracle)
    assert np.linalg.norm(point - x - 3.0) < 0.1
    for _ in range(60):
        point, record = iteration.iterate(point, oracle)
        assert "back" not in record.note


def test_second_order_steps_that_fitted_the_wrong_batches_are_undone():
    """Ten batches without a positive row drive the bias to −∞; the first with one is better off where that began."""
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = sanc.SANC([w], seed=0)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    X = torch.tensor([[1.0, 0.3], [1.0, -0.2], [1.0, 0.1], [1.0, 0.4]], dtype=torch.float64)
    negative, mixed = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    for _ in range(10):
        opt.step(lambda: loss(X @ w, negative))
    assert float(w[0].detach()) < -5.0 and opt.record.branch != "averaged"
    opt.step(lambda: loss(X @ w, mixed))
    assert opt.record.branch == "averaged" and float(w.detach().abs().max()) < 0.1
    assert opt.record.value == pytest.approx(math.log(2.0)) and "returned to the initial point" in opt.record.note


@pytest.mark.parametrize(
    ("value", "entry", "before", "back"),
    [(0.5, 1.0, 0.1, False), (2.0, 1.0, 3.0, False), (2.0, 1.0, 1.5, True), (math.nan, 1.0, 1.5, True),
     (math.nan, 1.0, math.nan, False)],
)  # fmt: skip
def test_a_batch_that_was_worse_off_before_undoes_nothing(value, entry, before, back):
    iteration = MinibatchIteration(sanc.method_for(), seed=0)
    x, start = np.ones(2), np.zeros(2)
    iteration.state = replace(iteration.state, first_point=start, first_loss=entry)
    oracle = types.SimpleNamespace(gradient_sample_value=lambda point: before if point is start else None)
    assert iteration._start_of_averaging(x, value, oracle) is (start if back else x)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_rare_rows_are_learnt_from(seed):
    """One row in fifty is positive and the batches have four: a high loss is the batch's, not the step's."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((2000, 5)))
    y = torch.from_numpy((rng.random(2000) < 0.02).astype(float))
    w = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    opt, jumps = sanc.SANC([w], seed=0), 0
    for _ in range(800):
        rows = torch.from_numpy(rng.choice(2000, 4, replace=False))
        opt.step(lambda rows=rows: loss(X[rows] @ w[:5] + w[5], y[rows]))
        jumps += "safe point" in opt.record.note
    assert jumps == 0
    assert float(loss(X @ w[:5] + w[5], y).detach()) < 0.14  # the entropy of the labels is 0.098, a bias of 0 has 0.69


def test_a_loss_that_is_not_finite_twice_leads_back(problem):
    iteration, oracle, x = settled_run(problem)
    bad = x * np.nan
    point, record = iteration.iterate(bad, oracle)
    assert (
        point is bad and "finite" in record.note and iteration.state.eta_reduction == 1.0
    )  # the batch may be to blame
    point, record = iteration.iterate(bad, oracle)
    assert np.isfinite(point).all() and "back to the last safe point" in record.note
    assert iteration.state.eta_reduction == 0.5


def test_a_loss_that_changes_for_good_does_not_lead_back(problem):
    """Where the data change, the safe point is no better, and the run goes on."""
    iteration, oracle, x = settled_run(problem)
    gradient, trial = oracle.gradient, oracle.gradient_sample_value

    def higher(x):
        value, g = gradient(x)
        return value + 50.0, g

    oracle.gradient, oracle.gradient_sample_value = higher, lambda x: trial(x) + 50.0
    for _ in range(150):
        x, record = iteration.iterate(x, oracle)
        assert "back" not in record.note
    assert iteration.state.eta_reduction == 1.0


def test_one_outlier_batch_does_not_ruin_a_run():
    """Targets of one batch a thousand times too large; undisturbed and disturbed end alike."""
    ends = []
    for factor in (1.0, 1000.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        x = torch.randn(1000, 8)
        y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(1000, 1)
        opt = sanc.SANC(net.parameters(), seed=0)
        for k in range(200):
            rows = torch.randint(1000, (32,))
            target = y[rows] * (factor if k == 100 else 1.0)
            opt.step(lambda rows=rows, target=target: (net(x[rows]) - target).square().mean())
            assert k != 100 or factor == 1.0 or "outlier" in opt.record.note
        with torch.no_grad():
            ends.append(float((net(x) - y).square().mean()))
    assert ends[0] < 0.15 and ends[1] < 1.2 * ends[0]


@pytest.mark.parametrize("size", [1e-110, 1e-160, 1.0])
def test_very_small_numbers_are_no_errors(size):
    x = torch.nn.Parameter(torch.tensor([size, 2 * size], dtype=torch.float64))
    opt = sanc.SANC([x], seed=0, check=False)
    for _ in range(20):
        opt.step(lambda: (x * x).sum())
    assert torch.isfinite(x).all()


# ---------------------------------------------------------------------------------------------- negative curvature


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
    for _ in range(300):
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


def test_an_objective_sample_is_rejected(problem):
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


def test_buffers_of_a_batch_that_was_not_learnt_are_put_back():
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


def test_a_basis_that_is_computed_twice_serves_samples_too():
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


def nearly_consistent(steps, shift=0, **options):
    """A regression whose batches agree up to a noise of 1e-7, and whose targets change after `shift` steps."""
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.standard_normal((400, 6)))
    w = torch.from_numpy(rng.standard_normal(6))
    noise = 1e-7 * torch.from_numpy(rng.standard_normal(400))
    p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    opt, losses = sanc.SANC([p], seed=0, **options), []
    for k in range(steps):
        rows = torch.from_numpy(rng.choice(400, 40, replace=False))
        target = X @ (w if not shift or k < shift else -w) + noise
        opt.step(lambda rows=rows, target=target: (X[rows] @ p - target[rows]).square().mean())
        losses.append(float((X @ p.detach() - target).square().mean()))
    return losses, opt


def test_averaged_steps_do_not_leave_a_solution_that_second_order_steps_found():
    """Steps of the usual size would be a tenth of the weights, and the loss a millionth of them at the switch."""
    losses, opt = nearly_consistent(200)
    assert opt._iteration.state.averaged and min(losses) < 1e-10
    assert losses[-1] < 1e-10


@pytest.mark.parametrize(("options", "reduction"), [({}, 1e-2), ({"weighting": 2.0, "slow_down": 150}, 1e-6)])
def test_a_reduced_step_size_grows_back_if_the_objective_changes(options, reduction):
    """With the second settings y reaches a solution between x and z, and x has to follow."""
    losses, _ = nearly_consistent(600, shift=100, **options)
    assert losses[99] < 1e-10 < 1.0 < losses[101] and losses[-1] < reduction * losses[101]


@pytest.mark.parametrize(("reference", "halved"), [(2.0, 0.9), (-2.0, -3.1), (0.0, -1e-3)])
def test_the_loss_has_to_fall_by_half_of_its_size_whatever_its_sign(reference, halved):
    state = replace(
        MinibatchState(0), reference_loss=reference, last_loss=reference, last_decrease=10.0, first_loss=reference
    )
    slower = reference - 0.4 * abs(reference)
    assert watch.compare_batches(state, None, slower, 1.0, 1e-16)[1]["steps_since_halving"] == 1
    assert watch.compare_batches(state, None, halved, 1.0, 1e-16)[1]["steps_since_halving"] == 0
