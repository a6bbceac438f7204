"""Recorded steps compared with eager ones. Without a GPU a recording calls its function again on static memory."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import sanc
from preset_options import composed
from sanc.graphs import capture, recording, work
from sanc.graphs.recording import identity, reset_gradient_accumulators
from sanc.lab.authors import AUTHORS
from tensors import flat

FIELDS = ("branch", "krylov_dim", "trials", "note")
NUMBERS = ("rho", "sigma", "grad_norm", "ritz_value", "step_norm", "model_decrease", "value", "trial_value")


@pytest.fixture(autouse=True)
def record_on_all_devices(monkeypatch):
    monkeypatch.setattr(recording, "DEVICES", ("cuda", "cpu"))


def network(kind="mlp", dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12), nn.Tanh()]
    if kind == "norm":
        layers.append(nn.BatchNorm1d(12))
    if kind == "dropout":
        layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers, nn.Linear(12, 3)).to(dtype)


def batches(count, rows=16, dtype=torch.float64):
    torch.manual_seed(1)
    return [(torch.randn(rows, 6, dtype=dtype), torch.randint(0, 3, (rows,))) for _ in range(count)]


def train(model, data, captured, *, cls=sanc.SANC, three=False, **options):
    """Train; return the optimiser, the losses, the records, and for each step whether it was replayed."""

    def loss(x, y):
        return nn.functional.cross_entropy(model(x), y)

    options = {"hvp": "double-backward", **options}
    opt = cls(model.parameters(), seed=3, capture=captured, weight_decay=0.01, **options)
    losses, records, replayed = [], [], []
    for k, (x, y) in enumerate(data):
        more = {}
        if three:
            more = {"hessian": sanc.Batch(loss, *data[k - 1])}
            if options.get("preset") == "paper":
                more["objective"] = sanc.Batch(loss, *data[k - 2])
        losses.append(opt.step(sanc.Batch(loss, x, y), **more))
        replayed.append(not opt.capture_reason)
        records.append(opt.record)
    return opt, [float(value) for value in losses], records, replayed


def same(first, second, rel=1e-9):
    for name in FIELDS:
        assert getattr(first, name) == getattr(second, name), (name, first, second)
    assert replace(first.calls, product=0) == replace(second.calls, product=0)
    assert first.calls.product <= second.calls.product  # a recording always computes J products
    for name in NUMBERS:
        a, b = getattr(first, name), getattr(second, name)
        assert a == pytest.approx(b, rel=rel, abs=1e-12, nan_ok=True), (name, first, second)


@pytest.mark.parametrize(("cls", "three", "L1"), [
    (sanc.SANC, True, 2.0), (sanc.SANC, False, 30.0), (sanc.SCR, True, 30.0), (sanc.SCR, False, 2.0),
])  # fmt: skip
def test_recorded_steps_of_the_paper_equal_eager_ones(cls, three, L1):
    data = batches(15)
    runs = []
    for captured in (False, True):
        model = network()
        runs.append(
            (model, *train(model, data, captured, cls=cls, three=three, sigma0=1e-3, **composed(cls, "paper", L1=L1)))
        )
    (eager, _, losses, records, none), (model, _, again, recorded, replayed) = runs
    assert not any(none)
    assert replayed == [False] + [True] * 14  # the first step checks the closure
    assert again == pytest.approx(losses, rel=1e-10)
    for a, b in zip(records, recorded, strict=True):
        same(a, b)
    assert len({record.branch for record in records}) > 1  # the run contains rejected steps
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [{"preset": AUTHORS}, {"minibatch": None}, {"cls": sanc.CR}, {"cls": sanc.CRM}, {"cls": sanc.ARC}],
    ids=str,
)
def test_recorded_steps_of_the_other_methods_equal_eager_ones(options):
    """The host decides on re-solved, checked and extrapolated steps with the same code for both oracles."""
    data = batches(10)
    (_, losses, records, _), (_, again, recorded, replayed) = (
        train(network(), data, captured, sigma0=1e-3, **options) for captured in (False, True)
    )
    assert replayed == [False] + [True] * 9
    assert again == pytest.approx(losses, rel=1e-8)
    for a, b in zip(records, recorded, strict=True):
        same(a, b, rel=1e-6)


@pytest.mark.parametrize(
    ("three", "metric"), [(False, "kronecker"), (True, "kronecker"), (True, "diagonal"), (False, "none")]
)
def test_recorded_steps_of_robust_equal_eager_ones(three, metric):
    data = batches(35)
    runs = []
    for captured in (False, True):
        model = network()
        runs.append((model, *train(model, data, captured, three=three, metric=metric)))
    (eager, _, losses, records, _), (model, _, again, recorded, replayed) = runs
    assert replayed == [False] + [True] * 34
    assert sum(record.krylov_dim > 0 for record, done in zip(recorded, replayed, strict=True) if done) >= 2
    assert sum(record.branch is sanc.Branch.AVERAGED for record in recorded) >= 25
    assert again == pytest.approx(losses, rel=1e-7)
    for a, b in zip(records, recorded, strict=True):
        same(a, b, rel=1e-5)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-7)


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_a_resumed_recorded_run_continues_bit_for_bit(preset):
    data = batches(40)

    def loss_of(model):
        return lambda x, y: nn.functional.cross_entropy(model(x), y)

    def make_steps(model, opt, rows):
        loss = loss_of(model)
        for x, y in rows:
            opt.step(sanc.Batch(loss, x, y))

    model = network()
    opt = sanc.SANC(model.parameters(), preset=preset, seed=3, capture=True, hvp="double-backward")
    make_steps(model, opt, data[:25])
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    held = opt.state_dict()
    kept = copy.deepcopy(held)
    make_steps(model, opt, data[25:])
    for a, b in zip(held["state"].values(), kept["state"].values(), strict=True):
        for one, other in ((a, b), (a.pop("metric", {}), b.pop("metric", {}))):
            assert all(
                torch.equal(one[name], other[name]) for name in other if name != "metric"
            )  # later steps do not change it
    file.seek(0)
    weights, state = torch.load(file)
    other = network()
    other.load_state_dict(weights)
    again = sanc.SANC(other.parameters(), preset=preset, seed=0, capture=True, hvp="double-backward")
    again.load_state_dict(state)
    make_steps(other, again, data[25:])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("preset", "steps"), [("paper", 12), ("robust", 25)])
def test_buffers_change_once_per_step(preset, steps):
    data = batches(steps)
    statistics = []
    for captured in (False, True):
        model = network("norm")
        _, _, _, replayed = train(model, data, captured, preset=preset)
        assert replayed[-1] is captured
        statistics.append(copy.deepcopy(dict(model.named_buffers())))
    for name, value in statistics[0].items():
        assert torch.allclose(value.double(), statistics[1][name].double(), rtol=1e-6), name
    assert statistics[1]["2.num_batches_tracked"] == steps


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_a_batch_of_another_shape_is_recorded_when_it_occurs_again(preset):
    data = batches(16)
    odd = batches(3, rows=9)
    stream = [*data[:10], odd[0], *data[10:13], odd[1], *data[13:], odd[2]]
    ends = []
    for captured in (False, True):
        model = network()
        _, losses, _, replayed = train(model, stream, captured, preset=preset)
        ends.append(losses)
    assert not replayed[10] and replayed[14] and replayed[-1]
    assert ends[1] == pytest.approx(ends[0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"preset": "paper", "microbatch": 8}, "mlp", "microbatch = 8"),
        ({"preset": "paper", "lanczos": "regenerate"}, "mlp", "regenerate"),
        ({"preset": "paper", "hvp": "finite-difference"}, "mlp", "finite-difference"),
        ({"preset": "paper"}, "dropout", "random numbers"),
        ({}, "dropout", "random numbers"),
    ],
)
def test_steps_that_cannot_be_recorded_are_eager_with_a_warning(options, kind, words):
    data = batches(6)
    model, other = network(kind), network(kind)
    with pytest.warns(RuntimeWarning, match=words) as caught:
        opt, losses, _, replayed = train(model, data, True, **options)
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    assert not any(replayed) and words in opt.capture_reason
    assert losses == train(other, data, False, **options)[1]


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_inspecting_a_loss_leaves_the_global_random_state_unchanged(preset):
    model = network("dropout")
    ((x, y),) = batches(1)
    opt = sanc.SANC(model.parameters(), preset=preset, capture=True, seed=0)
    batch = sanc.Batch(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            opt.step(batch)
    assert "random numbers" in opt.capture_reason
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_a_loss_that_calls_autograd_is_recorded():
    ends = []
    for captured in (False, True):
        model = network()

        def loss(x, y, model=model):
            x = x.detach().requires_grad_()
            out = model(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return nn.functional.cross_entropy(out, y) + 0.1 * grad.square().mean()

        opt = sanc.SANC(model.parameters(), preset="paper", seed=1, capture=captured, hvp="double-backward")
        with torch.no_grad():
            for x, y in batches(8):
                opt.step(sanc.Batch(loss, x, y))
        ends.append(model[0].weight.detach().clone())
    assert not opt.capture_reason
    assert torch.allclose(*ends, rtol=0, atol=1e-10)


def test_a_plain_closure_cannot_be_recorded():
    model = network()
    ((x, y),) = batches(1)
    opt = sanc.SANC(model.parameters(), preset="paper", capture=True, seed=0)
    with pytest.warns(RuntimeWarning, match=r"pass sanc\.Batch"):
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))  # no second warning


def test_a_device_without_graphs_gives_a_warning(monkeypatch):
    monkeypatch.setattr(recording, "DEVICES", ("cuda",))
    model = network()
    with pytest.warns(RuntimeWarning, match="the parameters are on cpu"):
        train(model, batches(2), True, preset="paper")


def test_invalid_arguments_are_named():
    model = network()
    with pytest.raises(sanc.errors.SancError, match="capture = 'yes'"):
        sanc.SANC(model.parameters(), capture="yes")
    opt = sanc.SANC(model.parameters(), capture=True)
    with pytest.raises(TypeError, match="closure = 3 cannot be called"):
        opt.step(3)


def test_replaced_parameters_are_recorded_again():
    data = batches(30)
    ends = []
    for captured in (False, True):
        model = network()

        def loss(x, y, model=model):
            return nn.functional.cross_entropy(model(x), y)

        opt = sanc.SANC(model.parameters(), preset="paper", seed=1, capture=captured, hvp="double-backward")
        for k, (x, y) in enumerate(data):
            if k == 10:
                for p in model.parameters():
                    p.data = p.data.clone() * 0.5  # new memory and new values
            if k == 20:
                opt.param_groups[0]["weight_decay"] = 0.1
            if k == 25:
                model[0].weight.requires_grad_(False)
            opt.step(sanc.Batch(loss, x, y))
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_a_batch_that_is_not_finite_keeps_parameters_finite(preset):
    data = batches(30)
    model = network("norm")
    opt, *_ = train(model, data, True, preset=preset)

    def loss(x, y):
        return nn.functional.cross_entropy(model(x), y)

    before = copy.deepcopy(model.state_dict())
    x, y = data[0]
    with pytest.warns(RuntimeWarning) if opt.capture_reason else warnings.catch_warnings():
        value = opt.step(sanc.Batch(loss, x * math.nan, y))
    assert math.isnan(float(value)) and "not finite" in opt.record.note
    after = model.state_dict()
    if preset == "paper":  # robust restores its last safe point
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_an_optimiser_can_be_copied_during_a_run(preset):
    """Recordings are not copied; the copy makes new ones and the same steps."""
    data = batches(30)
    model = network()
    opt, *_ = train(model, data[:20], True, preset=preset)
    model_copy, opt_copy = copy.deepcopy((model, opt))
    for net, optimiser in ((model, opt), (model_copy, opt_copy)):

        def loss(x, y, net=net):
            return nn.functional.cross_entropy(net(x), y)

        for x, y in data[20:]:
            optimiser.step(sanc.Batch(loss, x, y))
    assert not opt.capture_reason and not opt_copy.capture_reason
    for p, q in zip(model.parameters(), model_copy.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("hvp", ["auto", "forward-over-reverse"])
def test_every_mode_of_exact_products_can_be_recorded(preset, hvp):
    data = batches(20 if preset == "robust" else 10)
    runs = []
    for captured, mode in ((False, "double-backward"), (True, hvp)):
        model = network()
        opt, losses, _, _ = train(model, data, captured, preset=preset, hvp=mode)
        runs.append(losses)
    assert opt.hvp == hvp
    assert not opt.capture_reason
    assert runs[1] == pytest.approx(runs[0], rel=1e-7)


@pytest.mark.parametrize("bad", [1, 20])  # in the second-order phase, and in the averaged phase
def test_a_batch_that_is_not_finite_leaves_the_state_unchanged(bad):
    data = batches(35)
    with_nan = [*data[:bad], (data[bad][0] * math.nan, data[bad][1]), *data[bad:]]
    kinds = ((with_nan, False), (with_nan, True), (data, True))
    runs = [train(network(), rows, captured) for rows, captured in kinds]
    assert runs[1][3][-1]
    for a, b in zip(runs[0][2], runs[1][2], strict=True):
        same(a, b, rel=1e-5)
    assert "not finite" in runs[1][2][bad].note
    assert (runs[0][2][bad - 1].branch is sanc.Branch.AVERAGED) == (bad == 20)
    if bad == 20:
        assert runs[1][1][bad + 1 :] == pytest.approx(runs[2][1][bad:], rel=1e-12)  # as without that batch


def test_kinds_of_batches_beyond_the_limit_are_eager_with_one_warning():
    data = [pair for _ in range(3) for rows in range(8, 8 + capture.MAX_KINDS + 2) for pair in batches(1, rows=rows)]
    ends = []
    for captured in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt, losses, *_ = train(network(), data, captured, preset="paper")
        ends.append(losses)
    assert len(opt._driver.capture._oracles) == capture.MAX_KINDS and "more than 4 kinds" in opt.capture_reason
    assert sum("capture = True" in str(w.message) for w in caught) == 1
    assert ends[1] == pytest.approx(ends[0], rel=1e-8)


def test_a_product_that_is_not_finite_leads_to_a_gradient_step():
    records = []
    for captured in (False, True):
        w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        b = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def loss(x, w=w, b=b):
            return ((x @ w + b) ** 2).mean() + (b.abs() ** 1.5).sum()

        opt = sanc.SANC([w, b], preset="paper", seed=3, capture=captured, hvp="double-backward")
        torch.manual_seed(0)
        for k in range(6):
            if k == 4:
                with torch.no_grad():
                    b.zero_()  # the second derivative is infinite here
            opt.step(sanc.Batch(loss, torch.randn(8, 3, dtype=torch.float64)))
            records.append(opt.record)
    assert records[4].branch is records[10].branch is sanc.Branch.GRADIENT
    for a, b in zip(records[:6], records[6:], strict=True):
        same(a, b)


def test_gradients_of_norm_1e_40_give_the_same_steps():
    """In float64 such norms are far above underflow."""
    records = []
    for captured in (False, True):
        w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

        def loss(x, w=w):
            return 0.5 * (x * w * w).sum()

        opt = sanc.SANC([w], preset="paper", seed=3, capture=captured, hvp="double-backward", epsilon_g=0.0)
        batch = sanc.Batch(loss, torch.tensor([[1.0, 3.0]], dtype=torch.float64))
        for _ in range(3):
            opt.step(batch)
        with torch.no_grad():
            w.copy_(torch.tensor([1e-40, 2e-40], dtype=torch.float64))
        opt.step(batch)
        records.append(opt.record)
    same(*records)
    assert records[1].ritz_value == pytest.approx(1.0)


def test_transposed_parameters_are_recorded_again():
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

        def loss(x, w=w):
            return torch.tanh(x @ w).square().mean()

        opt = sanc.SANC([w], preset="paper", seed=3, capture=captured, hvp="double-backward")
        for k in range(8):
            if k == 5:
                w.data = w.data.t()
            torch.manual_seed(k)
            opt.step(sanc.Batch(loss, torch.randn(5, 4, dtype=torch.float64)))
        ends.append(w.detach().clone())
    assert torch.allclose(*ends, rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", ["value", "gradient", "lanczos"])
def test_an_exception_in_a_recorded_step_leaves_model_and_state_unchanged(where, monkeypatch):
    model = network("norm")
    opt, *_ = train(model, batches(6), True, preset="paper")
    (oracle,) = opt._driver.capture._oracles.values()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())

    def fail(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(oracle), {"value": "evaluate"}.get(where, where), fail)
    batch = sanc.Batch(oracle._inputs.samples[0].parts[0][1].loss, *batches(1)[0])
    with pytest.raises(KeyboardInterrupt):
        opt.step(batch)
    assert not opt.capture_reason
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert repr(opt.state_dict()) == repr(state)


def test_buffers_change_in_a_step_with_a_zero_gradient():
    counts = []
    for captured in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1, bias=False)).double()

        def loss(x, y, model=model):
            return (model(x) * y).mean()

        opt = sanc.SANC(model.parameters(), preset="paper", seed=3, capture=captured, hvp="double-backward")
        for k in range(5):
            torch.manual_seed(k)
            x = torch.randn(6, 3, dtype=torch.float64)
            opt.step(sanc.Batch(loss, x, torch.full((6, 1), float(k != 4), dtype=torch.float64)))
        counts.append(int(model[0].num_batches_tracked))
        assert opt.record.grad_norm == 0.0
    assert counts == [5, 5]


def test_a_recorded_run_escapes_from_an_exact_saddle():
    """At a zero gradient Lanczos starts at random, which is not recorded; this step runs Lanczos eagerly."""
    ends = []
    for captured in (False, True):
        w = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
        bowl = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        saddle = torch.tensor([[1.0, -1.0]], dtype=torch.float64)

        def loss(curvature, w=w):
            return 0.5 * (curvature * w * w).sum() + 0.25 * (w**4).sum()

        opt = sanc.SANC([w], preset="paper", seed=3, capture=captured, hvp="double-backward")
        for _ in range(3):
            opt.step(sanc.Batch(loss, bowl))
        with torch.no_grad():
            w.zero_()
        opt.step(sanc.Batch(loss, saddle))
        assert opt.record.grad_norm == 0.0 and float(loss(saddle).detach()) < -0.01
        for _ in range(25):
            opt.step(sanc.Batch(loss, saddle))
        assert float(loss(saddle).detach()) == pytest.approx(-0.25, abs=1e-6)
        ends.append(w.detach().clone())
    assert not opt.capture_reason and torch.allclose(*ends, rtol=0, atol=1e-9)


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_a_batch_that_is_not_finite_postpones_the_recording(preset):
    data = batches(20)
    first = train(network(), data, True, preset=preset)[3].index(True)
    data[first] = (data[first][0] * math.nan, data[first][1])
    opt, _, records, replayed = train(network(), data, True, preset=preset)
    assert "not finite" in records[first].note
    assert not replayed[first] and replayed[-1] and not opt.capture_reason


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_gradients_of_the_caller_are_kept_and_not_used(preset):
    model = network()
    left = torch.ones_like(model[0].weight)
    model[0].weight.grad = left
    opt, *_ = train(model, batches(20), True, preset=preset)
    assert not opt.capture_reason and model[0].weight.grad is left


def test_a_loss_whose_closure_variables_change_is_not_replayed():
    ends = []
    for captured in (False, True):
        model, weight = network(), 1.0

        def loss(x, y, model=model):
            return weight * nn.functional.cross_entropy(model(x), y)

        opt = sanc.SANC(model.parameters(), preset="paper", seed=1, capture=captured, hvp="double-backward")
        for k, (x, y) in enumerate(batches(12)):
            weight = 1.0 + k // 4
            opt.step(sanc.Batch(loss, x, y))
        ends.append(model[0].weight.detach().clone())
    assert torch.allclose(*ends, rtol=0, atol=1e-10)


def test_an_optimiser_can_be_pickled_during_a_run():
    opt, *_ = train(network(), batches(5), True, preset="paper")
    again = pickle.loads(pickle.dumps(opt))
    assert again.record == opt.record


def test_leaves_get_new_gradient_accumulators_while_an_old_graph_is_kept():
    leaf = torch.ones(3, requires_grad=True)
    kept = (leaf * leaf).sum()
    kept.grad_fn.next_functions[0][0].next_functions[0][0].metadata["old"] = True
    reset_gradient_accumulators([leaf])
    new = (leaf * leaf).sum().grad_fn.next_functions[0][0].next_functions[0][0]
    assert "old" not in new.metadata
    kept.backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach()) and leaf.dtype == torch.float32


def test_functions_are_compared_by_code_and_objects():
    a, b = object(), object()
    made = [(lambda x, a=a: x) for _ in range(2)]
    assert identity(made[0]) == identity(made[1])
    named = [(lambda x, *, a=a: x), (lambda x, *, a=b: x)]
    assert identity(named[0]) != identity(named[1])

    def over(thing):
        return lambda x: (x, thing)

    assert identity(over(a)) == identity(over(a)) != identity(over(b))
    model = network()
    assert identity(model.forward) == identity(model.forward) != identity(network().forward)
    assert identity(model) != identity(network())


def train_without_closures(captured, steps=30, *, frozen_from=None, resumed_at=None, bad=()):
    """Train by ``backward()`` and ``step()``; return the weights, and for each step whether it was replayed."""
    model = network("dropout")
    opt = sanc.SANC(model.parameters(), seed=3, capture=captured, weight_decay=0.01)
    replayed = []
    for k, (x, y) in enumerate(batches(steps)):
        if k == frozen_from:
            model[0].weight.requires_grad_(False)
        if k == resumed_at:
            file = io.BytesIO()
            torch.save((model.state_dict(), opt.state_dict()), file)
            file.seek(0)
            weights, state = torch.load(file)
            model = network("dropout")
            opt = sanc.SANC(model.parameters(), seed=3, capture=captured, weight_decay=0.01)
            model.load_state_dict(weights)
            opt.load_state_dict(state)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * math.nan if k in bad else loss).backward()
        opt.step()
        replayed.append(not opt.capture_reason)
    opt.eval()
    return flat(model), replayed


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("options", [{}, {"frozen_from": 20}, {"resumed_at": 20}, {"bad": (5, 25)}])
def test_recorded_work_of_a_loop_without_closures_equals_eager_work(options):
    """The network has dropout: the passes are the caller's, so only the work of the optimiser is recorded."""
    (eager, _), (recorded, replayed) = (train_without_closures(captured, **options) for captured in (False, True))
    assert torch.equal(eager, recorded)
    assert not replayed[0]  # there is no offset yet
    assert all(replayed[1:])


def test_work_that_cannot_be_recorded_is_done_eagerly_with_one_warning(monkeypatch):
    def fails(self, body):
        body()  # what it changes is restored
        raise RuntimeError("operation not permitted when stream is capturing")

    expected, _ = train_without_closures(False)
    monkeypatch.setattr(recording.Recorder, "record", fails)
    with pytest.warns(RuntimeWarning, match="cannot be recorded .*not permitted") as caught:
        weights, replayed = train_without_closures(True)
    assert len(caught) == 1
    assert torch.equal(weights, expected)
    assert not any(replayed)


def test_by_default_the_work_of_averaged_steps_is_recorded_for_small_networks(monkeypatch):
    """With closures the passes are eager, so that the loss may draw random numbers."""

    def train_with_closures(captured):
        model = network("dropout")
        opt = sanc.SANC(model.parameters(), seed=3, capture=captured, weight_decay=0.01)
        for x, y in batches(25):
            opt.step(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))
        assert opt.record.branch == sanc.Branch.AVERAGED
        return flat(model), opt.capture_reason

    recorded_works = []
    record = recording.Recorder.record
    monkeypatch.setattr(recording.Recorder, "record", lambda *args: recorded_works.append(args) or record(*args))
    (eager, replayed), (eager_closures, _) = train_without_closures(False), train_with_closures(False)
    assert not recorded_works and not any(replayed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, replayed = train_without_closures(None)
        assert torch.equal(weights, eager) and all(replayed[1:])
        weights, reason = train_with_closures(None)
        assert torch.equal(weights, eager_closures) and "capture = True" in reason
        monkeypatch.setattr(work, "MAX_ENTRIES", 10)
        count = len(recorded_works)
        weights, replayed = train_without_closures(None)
    assert count > 4 and len(recorded_works) == count  # two kinds of steps, and refreshes, of both
    assert torch.equal(weights, eager) and not any(replayed)


def test_a_refresh_that_cannot_be_recorded_is_made_eagerly(monkeypatch):
    record = recording.Recorder.record

    def fails(self, body):
        outputs = record(self, body)
        if not outputs.outputs:
            raise RuntimeError("operation not permitted when stream is capturing")
        return outputs

    expected, _ = train_without_closures(False)
    monkeypatch.setattr(recording.Recorder, "record", fails)
    weights, replayed = train_without_closures(None)
    assert torch.equal(weights, expected) and not any(replayed[5:])  # the first refresh is at step 1, 2 or 4


def test_work_is_not_recorded_again_and_again_for_parameters_that_take_turns(monkeypatch):
    monkeypatch.setattr(work, "MAX_METRICS", 2)
    model = network()
    opt = sanc.SANC(model.parameters(), seed=3)
    replayed = []
    for k, (x, y) in enumerate(batches(30)):
        model[0].weight.requires_grad_(k < 20 or k % 2 == 0)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        replayed.append(not opt.capture_reason)
    assert all(replayed[1:20]) and not any(replayed[23:])
    assert "change too often" in opt.capture_reason
