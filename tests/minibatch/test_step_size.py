"""The size of averaged steps: its units, its growth with the width of a network, and its bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from sanc.minibatch import step_numbers
from sanc.minibatch.state import BatchComparison, MinibatchState
from sanc.minibatch.step_size import first_reduction, parameter_unit, typical_matrix, typical_step_norm


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
        assert opt._iteration.state.losses.below_bound == (float(loss(points[0])) < 0.0)


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
    "entry_rms, value, grad_norm1, unit",
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
def test_parameter_unit(entry_rms, value, grad_norm1, unit):
    assert parameter_unit(entry_rms, value, grad_norm1) == pytest.approx(unit)


def test_typical_matrix():
    """Geometric means, over the entries of matrices, of their root mean squares and of their smaller sides."""
    rng = np.random.default_rng(0)
    arrays = [0.02 * rng.standard_normal((30, 20)), rng.standard_normal(30), np.zeros((5, 5)),
              3.0 * rng.standard_normal((4, 2, 3))]  # fmt: skip
    flat, shapes = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays])), [a.shape for a in arrays]
    roots = [np.sqrt((arrays[i] ** 2).mean()) for i in (0, 3)]
    entry_rms, width = typical_matrix(flat, shapes, None)
    assert entry_rms == pytest.approx(roots[0] ** (600 / 624) * roots[1] ** (24 / 624), rel=1e-12)
    assert width == pytest.approx(20 ** (600 / 649) * 5 ** (25 / 649) * 4 ** (24 / 649), rel=1e-12)
    assert typical_matrix(flat[600:655], shapes[1:3], None) == (0.0, pytest.approx(5.0))  # a vector, and only zeros
    assert typical_matrix(flat[600:631], [(30,), ()], None) == (0.0, 0.0)  # no matrices
    large = [0.1 * rng.standard_normal((5, 4)), rng.standard_normal((90, 4)), 0.2 * rng.standard_normal((4, 2))]
    joined = torch.from_numpy(np.concatenate([a.reshape(-1) for a in large]))  # with an embedding, say
    middle = np.sqrt((large[2] ** 2).mean())
    assert typical_matrix(joined, [a.shape for a in large], None).entry_rms == pytest.approx(1.5 * middle, rel=1e-12)
    stack = torch.ones(2 * 40 * 50)
    assert typical_matrix(stack, [(2, 40, 50)], None).width == pytest.approx(40.0)  # two experts


def test_typical_matrix_of_entries_on_several_ranks():
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
    distance = opt._iteration.state.distance
    assert distance.step_norm1_sum == pytest.approx(distance.offset_norm1, rel=1e-9) and distance.step_norm1_sum > 0.0


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


@dataclass(frozen=True, kw_only=True)
class Halved(sanc.StepSize):
    """Half of the step size of the library."""

    def size(self, state):
        return 0.5 * super().size(state)


@dataclass(frozen=True, kw_only=True)
class Cosine(sanc.StepSize):
    """A schedule with restarts, which does not depend on reductions."""

    def size(self, state):
        return 0.1 * (1.5 + math.cos(2.0 * math.pi * state.steps / 50))


@dataclass(frozen=True, kw_only=True)
class Constant(sanc.StepSize):
    """Steps of one size, or of none."""

    def size(self, state):
        return self.scale if self.scale > 0.1 else 0.0


JOINED_AT = 3000.0 - torch.tensor([3000.0] * 4 + [1500.5] * 3 + [0.0] * 2 + [10.0, 20.0, 50.0], dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"horizon": 3200}, {"slow_down": 0}, {"warm_up": 0}], ids=repr)
def test_entries_that_joined_late_have_the_step_size_of_their_age(options):
    state = MinibatchState(0, steps=3000, parameter_unit=0.5, width=16.0)
    ages = (3000.0 - JOINED_AT).tolist()
    schedule, now = Cosine(**options), 1.5 + math.cos(2.0 * math.pi * 3000 / 50)
    expected = [(1.5 + math.cos(2.0 * math.pi * int(age) / 50)) / now for age in ages]
    assert schedule.age_factors(state, JOINED_AT).tolist() == pytest.approx(expected, rel=1e-12)
    for scale in (0.2, 0.1):  # no steps have no other age
        assert Constant(scale=scale, **options).age_factors(state, JOINED_AT).tolist() == [1.0] * len(ages)
    # With the schedule of the library and ages in whole steps both forms agree.
    joined_at = JOINED_AT.ceil()
    ours, halved = (kind(**options).age_factors(state, joined_at) for kind in (sanc.StepSize, Halved))
    torch.testing.assert_close(ours, halved, rtol=1e-12, atol=0.0)


def test_a_layer_that_joins_moves_by_a_schedule_of_the_caller():
    """Both layers have the same gradients; the ratio of their steps is that of the sizes at their ages."""
    early, late = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    late.requires_grad_(False)
    options = {"curvature": False, "metric": "none", "averaging": 0.0, "lower_bound": -math.inf}
    opt = sanc.SANC([early, late], seed=0, step_size=Cosine(distance=0.0), **options)
    for _ in range(25):
        opt.step(lambda: early.sum())
    late.requires_grad_(True)
    for k in range(3):
        before = [p.detach().clone() for p in (early, late)]
        opt.step(lambda: early.sum() + late.sum())
        moves = [float((p.detach() - start)[0]) for p, start in zip((early, late), before, strict=True)]
        # `early` counts as having joined after half of the 25 steps.
        sizes = [1.5 + math.cos(2.0 * math.pi * int(age) / 50) for age in (12.5 + k, k)]
        assert moves[1] / moves[0] == pytest.approx(sizes[1] / sizes[0], rel=1e-9)


@dataclass(frozen=True, kw_only=True)
class Reduced(sanc.StepSize):
    """A size with the reduction in it, as subclasses of earlier versions have."""

    def size(self, state):
        return 0.15 * state.eta_reduction


@pytest.mark.parametrize(("settings", "size"), [(Cosine(), 0.25), (Reduced(), 0.15), (sanc.StepSize(), 0.015 / 20)])
def test_eta_is_reduced_once_whatever_a_subclass_returns(settings, size):
    state = MinibatchState(0, parameter_unit=0.1, eta_reduction=0.25)
    scalars = step_numbers.step_scalars(state, sanc.Minibatch(step_size=settings), 0.5)
    assert scalars.eta == pytest.approx(0.5 * 0.25 * size, rel=1e-12)


@dataclass(frozen=True, kw_only=True)
class Declared(Reduced):
    """Steps that are not measured by `scale`."""

    def typical_size(self, state):
        return 1e-3


def test_second_order_steps_are_measured_by_the_typical_size():
    """Their norm is compared with η√n, after a phase that has converged also by its ratio."""
    state = MinibatchState(0, parameter_unit=1 / 15, comparison=BatchComparison(first_loss=1.0))
    for settings, typical in ((sanc.StepSize(), 0.02), (Declared(), 2e-3)):
        assert typical_step_norm(state, settings, 4) == pytest.approx(typical, rel=1e-12)
        for ratio, expected in ((1e-3, 1e-3), (0.1, 1.0)):
            reduction = first_reduction(state, settings, 1e-3, ratio * typical, 4)
            assert reduction == pytest.approx(expected, rel=1e-12)
