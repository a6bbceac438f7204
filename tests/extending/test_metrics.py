"""Metrics, step sizes and averages of the caller: those of the page, their states, and what they may not return."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import sanc
from sanc.core.space import Space
from sanc.minibatch import step_numbers
from tensors import flat


@pytest.mark.parametrize("returned", [None, 1])
def test_a_metric_without_the_state_of_every_parameter_is_named_at_the_first_step(returned):
    class Sign(sanc.Preconditioner):
        def update(self, g, weight):
            return g.sign()

        if returned is not None:

            def state(self):
                return [{"v": torch.zeros(1)}] * returned

    @dataclass(frozen=True)
    class SignMetric:
        memory: float = 0.9
        refresh: int = 10

        def couples(self, shape):
            return False

        def create(self, shapes, like, reduce=None):
            return Sign()

    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    opt = sanc.SANC(weights, metric=SignMetric(), curvature=False)
    match = "Sign has no state" if returned is None else r"state of 1 parameter.*has 2"
    with pytest.raises(sanc.ArgumentTypeError, match=match):
        opt.step(lambda: sum(w.square().sum() for w in weights))
    assert all(bool((w == 1.0).all()) for w in weights)


SIZES = [(3, 2), (4,), (1,)]


def learnt(pieces, shapes, gs):
    """The metric after these gradients, and its last direction."""
    metric = pieces.LowRank(rank=2).create(shapes, torch.zeros(1, dtype=torch.float64))
    for k, g in enumerate(gs):
        direction = metric.update(torch.from_numpy(g), max(0.05, 1 / (k + 1)))
        if k % 5 == 0:
            metric.refresh()
    return metric, direction.numpy()


@pytest.fixture(scope="module")
def gradients():
    rng = np.random.default_rng(0)
    return rng.standard_normal((30, 11)) + np.outer(rng.standard_normal(30), np.arange(11.0))


def test_each_block_of_the_metric_is_a_diagonal_plus_a_matrix_of_low_rank(pieces, gradients):
    """M = D^½ (I + Q(√(I + C) − I)Qᵀ) D^½ as a dense matrix, with the diagonal D that is defined by running means."""
    metric, direction = learnt(pieces, SIZES, gradients)
    square = np.zeros(11)
    for k, g in enumerate(gradients):
        square += max(0.05, 1 / (k + 1)) * (g**2 - square)
    for rows, (_, basis, image) in zip((slice(0, 6), slice(6, 10), slice(10, 11)), metric.blocks, strict=True):
        Q, rank = basis.numpy(), basis.shape[1]
        C = np.diag((basis * image).sum(0).clamp(min=0).numpy())
        half = np.sqrt(np.sqrt(square[rows]) + 1e-6 * np.sqrt(square[rows].max()))
        assert Q.T @ Q == pytest.approx(np.eye(rank), abs=1e-6)
        M = half[:, None] * (np.eye(len(half)) + Q @ (np.sqrt(np.eye(rank) + C) - np.eye(rank)) @ Q.T) * half
        assert M @ direction[rows] == pytest.approx(gradients[-1][rows], rel=1e-6, abs=1e-6)
        assert np.linalg.eigvalsh(M).min() > 0 and C[0, 0] > len(half) / 3  # the gradients are almost parallel


def test_the_metric_depends_neither_on_units_nor_on_who_holds_the_other_parameters(pieces, gradients):
    _, direction = learnt(pieces, SIZES, gradients)
    for shapes, rows in (([SIZES[0]], slice(0, 6)), (SIZES[1:], slice(6, 11))):
        assert np.array_equal(learnt(pieces, shapes, gradients[:, rows])[1], direction[rows])
    assert np.array_equal(learnt(pieces, SIZES, 2.0**-60 * gradients)[1], direction)
    assert np.array_equal(learnt(pieces, SIZES, 0.0 * gradients)[1], np.zeros(11))


@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_a_metric_trains_and_resumes_bit_for_bit(pieces, style, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 10)
    y = x[:, :3].argmax(1)

    def build():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        return model, sanc.SANC(model.parameters(), metric=pieces.LowRank(rank=3), seed=0)

    def train(model, opt, first, last):
        for k in range(first, last):
            loss = lambda k=k: torch.nn.functional.cross_entropy(
                model(x[40 * (k % 10) :][:40]), y[40 * (k % 10) :][:40]
            )
            if style == "loss":
                value = opt.step(loss)
            else:
                opt.zero_grad()
                value = loss()
                value.backward()
                opt.step()
        return float(value.detach()), flat(model)

    model, opt = build()
    start, _ = train(model, opt, 0, 1)
    train(model, opt, 1, 60)
    torch.save((model.state_dict(), opt.state_dict()), tmp_path / "state.pt")
    last, whole = train(model, opt, 60, 120)
    again, resumed = build()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert torch.equal(train(again, resumed, 60, 120)[1], whole)
    assert last < 0.9 * start and math.isfinite(last)


def test_a_state_of_another_metric_is_rejected(pieces):
    torch.manual_seed(0)
    states = {}
    for name, metric in (("ours", sanc.Diagonal()), ("theirs", pieces.LowRank())):
        p = torch.nn.Parameter(torch.ones(3, 2))
        opt = sanc.SANC([p], metric=metric, seed=0)
        for _ in range(3):
            p.grad = torch.randn(3, 2)
            opt.step()
        states[name] = opt.state_dict()
    with pytest.raises(sanc.ArgumentError, match=r"metric of parameter 0 has the tensors .* another metric. Construct"):
        opt.load_state_dict(states["ours"])


@pytest.mark.parametrize(
    ("method", "returned", "match"),
    [
        ("create", None, r"create\(\) returned None. Return an object of a subclass of sanc.Preconditioner"),
        ("update", torch.zeros(3), r"update\(\) of its preconditioner returned \(3,\) for a gradient of shape \(6,\)"),
        ("update", 1.0, r"returned 1.0 for a gradient of shape \(6,\). Return M⁻¹g"),
    ],
)
@pytest.mark.parametrize("style", ["gradients", "closures"])
def test_what_a_metric_may_not_return_is_named_and_changes_nothing(monkeypatch, method, returned, match, style):
    owner = sanc.Diagonal if method == "create" else type(sanc.Diagonal().create([(2, 3)], torch.zeros(6)))
    monkeypatch.setattr(owner, method, lambda *arguments: returned)
    weights = torch.nn.Parameter(torch.ones(2, 3))
    opt = sanc.SANC([weights], metric=sanc.Diagonal(), curvature=False)
    closures = [lambda: weights.square().sum()] if style == "closures" else []
    if not closures:
        weights.square().sum().backward()
    with pytest.raises(sanc.ArgumentTypeError, match=match):
        opt.step(*closures)
    assert torch.equal(weights, torch.ones(2, 3))


class SignPreconditioner(sanc.Preconditioner):
    """The sign of the gradient, without `apply`, which no step calls."""

    def update(self, g, weight):
        return g.sign()

    def state(self):
        return [{}]


class SignMetric(sanc.Identity):
    def create(self, shapes, like, reduce=None):
        return SignPreconditioner()


def test_a_metric_need_not_apply_without_an_update():
    """Steps of η in each coordinate, without an average and a warm-up."""
    weights = torch.nn.Parameter(torch.ones(3))
    options = {"curvature": False, "averaging": 0.0, "step_size": ConstantSize(scale=0.3), "seed": 0}
    opt = sanc.SANC([weights], metric=SignMetric(), **options)
    for _ in range(3):
        opt.step(lambda: weights.square().sum())
    torch.testing.assert_close(weights.detach(), torch.full((3,), 1.0 - 3 * 0.3 / 15))
    with pytest.raises(sanc.ArgumentTypeError, match=r"SignPreconditioner has no apply\(\): return"):
        SignPreconditioner().apply(torch.ones(3))


@dataclass(frozen=True, kw_only=True)
class ConstantSize(sanc.StepSize):
    """Steps of one size, in parameter units."""

    def size(self, state):
        return state.parameter_unit * self.scale


def test_a_step_size_of_the_caller_replaces_ours():
    """It is that of settings without growth, decay and distance bound."""
    runs = []
    for step in (ConstantSize(scale=0.02), sanc.StepSize(scale=0.02, warm_up=0, slow_down=0, distance=0.0)):
        torch.manual_seed(0)
        weights, opt_batches = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(30, 8, 4)
        opt = sanc.SANC([weights], step_size=step, curvature=False, seed=0)
        for batch in opt_batches:
            opt.step(lambda batch=batch: (batch @ weights).square().mean())
        runs.append(weights.detach().clone())
    assert torch.equal(*runs)


def test_a_step_size_of_the_page_follows_its_closed_form(pieces):
    """From one restart to the next η falls from its largest value to nearly zero."""
    scale = pieces.Cosine(scale=0.1, period=8)
    state = sanc.extend.MinibatchState(0, parameter_unit=1.0)
    found = [scale.size(replace(state, steps=k)) for k in range(17)]
    assert found == pytest.approx([0.1 * math.cos(math.pi * (k % 8) / 16) ** 2 for k in range(17)], rel=1e-12)
    assert sanc.SANC([torch.nn.Parameter(torch.ones(2))], step_size=scale, period=4).param_groups


@pytest.mark.parametrize("horizon", [0, 45])
def test_an_average_of_the_page_has_its_weights(pieces, horizon):
    """x ← x + c (z − x), where c falls as 1/k to 1/20, or to one over the remaining steps."""
    weights, data = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64)), torch.randn(40, 8, 4).double()
    opt = sanc.SANC([weights], average=pieces.Window(window=20), curvature=False, seed=0, horizon=horizon)
    for k, batch in enumerate(data):
        before = weights.detach().clone()
        opt.step(lambda batch=batch: (batch @ weights).square().mean())
        z = weights.detach() + opt._iteration.state.offset.view(4, 3)
        c = max(1 / (k + 1), 1 / 20, 1 / (horizon - k) if horizon else 0.0)
        torch.testing.assert_close(weights.detach(), before + c * (z - before), rtol=1e-9, atol=1e-12)


def test_an_average_of_the_caller_has_its_weights_for_late_entries(pieces):
    joined_at = torch.tensor([0.0, 95.0, 40.0])
    state = sanc.extend.MinibatchState(0, steps=100, weight_sum=100.0, joined_at=joined_at)
    settings = sanc.Minibatch(average=pieces.Window(window=20))
    weights = step_numbers.average_weights(state, settings, 0.3, Space(3, torch.float32, joined_at.device))
    assert weights.tolist() == pytest.approx([0.3, 1 / 6, 1 / 20])


@dataclass(frozen=True, kw_only=True)
class BadAverage(sanc.Average):
    text: str = "nan"

    def weight(self, k):
        return 1.0 if k < 30 or self.text == "-1" else float(self.text)

    def min_weight(self, remaining):
        return float(self.text) if self.text == "-1" else 0.0


def test_a_lower_bound_of_weights_that_is_no_weight_is_named():
    weights = torch.nn.Parameter(torch.ones(3, 2))
    opt = sanc.SANC([weights], curvature=False, seed=0, average=BadAverage(text="-1"))
    with pytest.raises(sanc.ArgumentError, match=r"average = .* min_weight\(\) returned -1.0. Return a number in"):
        opt.step(lambda: weights.square().sum())
    assert torch.equal(weights, torch.ones(3, 2))


class PlainMetric:
    """A metric that is no dataclass, so that its `repr` contains its address."""

    memory, refresh = 0.9, 10

    def couples(self, shape):
        return False

    def create(self, shapes, like, reduce=None):
        return sanc.Diagonal().create(shapes, like, reduce)


def test_a_metric_without_repr_resumes_without_a_warning(recwarn):
    def build():
        weights = torch.nn.Parameter(torch.ones(3))
        return sanc.SANC([weights], metric=PlainMetric(), curvature=False, seed=0), weights

    (opt, weights), (resumed, _) = build(), build()
    opt.step(lambda: weights.square().sum())
    recwarn.clear()
    resumed.load_state_dict(opt.state_dict())
    assert not recwarn.list


def test_a_setting_of_our_metric_beside_one_of_the_caller_names_the_metric():
    with pytest.raises(
        sanc.ArgumentError, match=r"memory = 0.9 is a setting of Kronecker, and sanc has PlainMetric as"
    ):
        sanc.method_for(metric=PlainMetric(), memory=0.9)


@dataclass(frozen=True, kw_only=True)
class BadSize(sanc.StepSize):
    text: str = "nan"

    def size(self, state):
        return 0.01 if state.steps < 30 else float(self.text)


class BadDirection(sanc.Diagonal):
    """A metric whose direction becomes `value` after some steps."""

    def create(self, shapes, like, reduce=None):
        inner = super().create(shapes, like, reduce)
        plain, calls = inner.update, []
        inner.update = lambda g, weight: calls.append(0) or plain(g, weight) * (math.nan if len(calls) > 30 else 1.0)
        inner.always_finite = False
        return inner


BadDirection.__module__ = "elsewhere"


@pytest.mark.parametrize("style", ["closures", "gradients"])
@pytest.mark.parametrize(
    ("options", "match"),
    [({"metric": BadDirection()}, "direction that is not finite"),
     *(({"step_size": BadSize(text=text)}, r"size\(\) returned") for text in ("nan", "inf", "-1")),
     ({"average": BadAverage()}, r"average = .* weight\(\) returned nan. Return a positive finite number")],
)  # fmt: skip
def test_pieces_of_averaged_steps_that_return_no_usable_number_leave_the_parameters(options, match, style):
    weights = torch.nn.Parameter(torch.ones(3, 2))
    opt = sanc.SANC([weights], curvature=False, seed=0, **options)
    seen = []

    def train():
        for batch in torch.randn(60, 4, 3, generator=torch.Generator().manual_seed(0)):
            opt._driver.iteration.finish_step()
            seen[:] = weights.detach().clone(), opt._driver.iteration.state.steps
            opt.zero_grad()
            loss = (batch @ weights).square().mean()
            if style == "gradients":
                loss.backward()
            opt.step(*([] if style == "gradients" else [lambda batch=batch: (batch @ weights).square().mean()]))

    with pytest.raises(sanc.ArgumentError, match=match):
        train()
    before, state = seen
    assert torch.equal(weights, before) and state >= 29 and opt._driver.iteration.state.steps == state


@dataclass(frozen=True)
class ReadsValues:
    """A metric that reads a number from the device in `create`."""

    memory: float = 0.9
    refresh: int = 10

    def couples(self, shape):
        return False

    def create(self, shapes, like, reduce=None):
        like.new_ones(1).item()
        return sanc.Diagonal().create(shapes, like, reduce)


def test_a_metric_that_reads_values_when_it_is_created_is_named():
    weights = torch.nn.Parameter(torch.ones(3))
    opt = sanc.SANC([weights], metric=ReadsValues(), curvature=False)
    opt.step(lambda: weights.square().sum())
    with pytest.raises(sanc.ArgumentError, match=r'metric = ReadsValues.* its create\(\) failed on the device "meta"'):
        opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(("numbers", "match"), [({"refresh": 0}, "refresh = 0"), ({"memory": 2.0}, "memory = 2.0")])
def test_numbers_of_a_metric_are_checked(numbers, match):
    with pytest.raises(sanc.ArgumentError, match=f"{match} cannot be used: give the metric"):
        sanc.method_for(metric=ReadsValues(**numbers))


@pytest.mark.parametrize("metric", [sanc.Kronecker, object(), 3, "shampoo"])
def test_what_is_no_metric_is_rejected(metric):
    with pytest.raises(sanc.SancError, match="metric = "):
        sanc.SANC([torch.zeros(2, requires_grad=True)], metric=metric)
