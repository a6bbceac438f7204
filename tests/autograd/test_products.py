"""Every way of making Hessian products against a dense float64 Hessian, and the operators that have none."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import sanc
from sanc.oracles import choice, products
from sanc.oracles.autograd import HVP_MODES, AutogradOracle
from sanc.oracles.base import Meter
from sanc.oracles.layout import Layout, Sample

TOLERANCE = dict.fromkeys(HVP_MODES, 1e-10) | {"finite-difference": 1e-6}


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(12, 4), torch.randint(0, 3, (12,))


def cnn():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * 9, 3))
    return model, torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))


def relu_cnn():
    model, x, y = cnn()
    model[1] = nn.ReLU()
    return model, x, y


def batch_norm():
    return (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Softplus(), nn.Linear(5, 3)),
        torch.randn(12, 4),
        torch.randint(0, 3, (12,)),
    )


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def gru():
    return LastState(), torch.randn(6, 5, 3), torch.randint(0, 3, (6,))


def oracle_for(model, x, y, hvp, decay=0.0, parts=None):
    params = list(model.parameters())
    closure = lambda: nn.functional.cross_entropy(model(x), y)
    sample = Sample("closure", parts or [(1.0, closure)], len(x), 7)
    other = Sample("hessian", parts or [(1.0, closure)], len(x), 7)
    return AutogradOracle(Layout(params, [decay] * len(params)), sample, other, sample, hvp=hvp, meter=Meter())


def dense_hessian(model, x, y, decay=0.0):
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    sizes = [p.numel() for p in params]

    def value(vector):
        parts = {n: v.view_as(p) for n, v, p in zip(names, vector.split(sizes), params, strict=True)}
        loss = nn.functional.cross_entropy(torch.func.functional_call(model, parts, (x,)), y)
        return loss + decay / 2 * (vector**2).sum()

    w = torch.cat([p.detach().reshape(-1) for p in params])
    return torch.autograd.functional.hessian(value, w), torch.autograd.functional.jacobian(value, w)


@pytest.mark.parametrize("hvp", HVP_MODES)
@pytest.mark.parametrize("build", [mlp, cnn, relu_cnn, batch_norm, gru])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_products_agree_with_the_dense_hessian(hvp, build, decay):
    model, x, y = build()
    model, x = model.double(), x.double()
    H, gradient = dense_hessian(model, x, y, decay)
    oracle = oracle_for(model, x, y, hvp, decay)
    point = oracle.start()
    before = point.clone()
    _, g = oracle.gradient(point)
    assert torch.allclose(g, gradient, atol=1e-12)
    operator = oracle.hessian(point)
    for _ in range(3):
        v = torch.randn(len(point), dtype=torch.float64)
        product = operator(v)
        assert torch.allclose(product, H @ v, atol=TOLERANCE[hvp] * max(1.0, float(H.abs().max())))
    operator.release()
    assert torch.allclose(operator(v), H @ v, atol=TOLERANCE[hvp] * max(1.0, float(H.abs().max())))  # built anew
    assert torch.allclose(operator.gradient(), gradient, atol=1e-12)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), before)
    assert oracle.meter.product == 4 * len(x) and oracle.meter.nhev == 4


@pytest.mark.parametrize("hvp", HVP_MODES)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_product_may_be_written_into_a_vector_that_is_there(hvp, parts):
    model, x, y = mlp()
    whole = sanc.Batch(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    oracle = oracle_for(model, x, y, hvp, 0.3, whole.parts(len(x) // parts))
    point = oracle.start()
    operator = oracle.hessian(point)
    v = torch.randn(len(point))
    right, block = operator(v), torch.full((2, len(point) + 9), 7.0)
    row = block[1, 4:-5]
    product = operator(v, row)
    assert torch.equal(product, right)
    assert not product.is_inference() and not product.requires_grad
    if parts == 1 and hvp in ("auto", "double-backward"):
        assert product.data_ptr() == row.data_ptr()
    assert (block[0] == 7.0).all() and (block[1, :4] == 7.0).all() and (block[1, -5:] == 7.0).all()
    product.add_(1.0)  # taken over by the caller


@pytest.mark.parametrize("shared", [False, True])
def test_activations_that_are_computed_anew_on_the_way_back(shared):
    torch.manual_seed(0)
    first, last, x = nn.Linear(3, 8).double(), nn.Linear(8, 2).double(), torch.randn(20, 3, dtype=torch.float64)
    params = [*first.parameters(), *last.parameters()]

    def plain():
        return last(first(x).tanh().sin()).square().mean()

    def frugal():
        kept = torch.utils.checkpoint.checkpoint(lambda h: h.tanh().sin(), first(x), use_reentrant=False)
        return last(kept).square().mean()

    products = []
    for closure in (plain, frugal):
        sample = Sample("closure", [(1.0, closure)], 20, seed=5)
        oracle = AutogradOracle(Layout(params, [0.0] * 4), sample, sample, sample, hvp="double-backward", meter=Meter())
        point = oracle.start()
        if shared:
            oracle.gradient(point)
        operator = oracle.hessian(point)
        directions = torch.randn(3, len(point), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        products.append(torch.stack([operator(v) for v in directions]))
        assert oracle.inference == (closure is plain)
    assert torch.allclose(*products, rtol=1e-13, atol=1e-15)


def test_hooks_of_parameters_see_every_product():
    model, x, y = mlp()
    seen = []
    handle = next(model.parameters()).register_hook(lambda g: seen.append(g) or 2.0 * g)
    oracle = oracle_for(model, x, y, "double-backward")
    point = oracle.start()
    operator = oracle.hessian(point)
    twice, count = operator(torch.ones_like(point)), len(seen)
    handle.remove()
    once = oracle_for(model, x, y, "double-backward").hessian(point)(torch.ones_like(point))
    assert count == 2 and not torch.allclose(twice, once)
    seen[-1].clone().requires_grad_().sum().backward()  # a copy of it is a tensor like any other


@pytest.mark.parametrize("hvp", HVP_MODES)
def test_products_of_weighted_parts_are_the_product_of_the_whole(hvp):
    model, x, y = mlp()
    model, x = model.double(), x.double()
    H, _ = dense_hessian(model, x, y)
    parts = [
        (5 / 12, lambda: nn.functional.cross_entropy(model(x[:5]), y[:5])),
        (7 / 12, lambda: nn.functional.cross_entropy(model(x[5:]), y[5:])),
    ]
    oracle = oracle_for(model, x, y, hvp, parts=parts)
    point = oracle.start()
    v = torch.randn(len(point), dtype=torch.float64)
    assert torch.allclose(oracle.hessian(point)(v), H @ v, atol=TOLERANCE[hvp])


@pytest.mark.parametrize("hvp", HVP_MODES)
def test_dropout_is_the_same_in_every_product(hvp):
    """Symmetry: ⟨u, Hv⟩ = ⟨v, Hu⟩ holds only if both products see one mask."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    oracle = oracle_for(model, x, y, hvp)
    point = oracle.start()
    operator = oracle.hessian(point)
    u, v = torch.randn(2, len(point), dtype=torch.float64)
    assert float(u @ operator(v)) == pytest.approx(float(v @ operator(u)), rel=1e-6)


def test_a_loss_that_is_linear_in_some_parameters():
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    b = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for hvp in HVP_MODES:
        closure = lambda: (w**2).sum() + 3 * b.sum()
        sample = Sample("closure", [(1.0, closure)], 1, None)
        oracle = AutogradOracle(Layout([w, b], [0.0, 0.0]), sample, sample, sample, hvp=hvp, meter=Meter())
        point = oracle.start()
        oracle.gradient(point)
        product = oracle.hessian(point)(torch.ones(5, dtype=torch.float64))
        assert torch.allclose(product, torch.tensor([2.0, 2, 2, 0, 0], dtype=torch.float64), atol=1e-6)


# ---------------------------------------------------------------------------------------------- no second derivative


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(len(x), 5, 8).mean(1))


@pytest.mark.parametrize("hvp", ["auto", "double-backward", "forward-over-reverse", "linearised"])
def test_fused_attention_is_named(hvp):
    model, x, y = Attention(), torch.randn(6, 5, 8), torch.randint(0, 3, (6,))
    before = [p.detach().clone() for p in model.parameters()]
    opt = sanc.SANC(model.parameters(), hvp=hvp, seed=0)
    with pytest.raises(sanc.SecondDerivativeError) as caught:
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert "attention" in caught.value.operator
    assert caught.value.operator in str(caught.value)
    assert 'hvp="finite-difference"' in str(caught.value) and "SDPBackend.MATH" in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_function_marked_once_differentiable_is_explained():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] ** 2 * g

    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for loss in (lambda: Once.apply(p).sum(), lambda: (Once.apply(p) ** 2).sum()):  # torch answers zero to both
        with pytest.raises(sanc.SecondDerivativeError, match="once_differentiable"):
            sanc.SANC([p], seed=0).step(loss)
        with pytest.raises(sanc.SecondDerivativeError, match=r"autograd\.Function has no forward-mode"):
            sanc.SANC([p], seed=0, hvp="forward-over-reverse").step(loss)


def test_finite_differences_train_where_there_is_no_second_derivative():
    torch.manual_seed(1)
    model, x, y = Attention().double(), torch.randn(30, 5, 8).double(), torch.randint(0, 3, (30,))
    opt = sanc.SANC(model.parameters(), hvp="finite-difference", seed=0)
    closure = lambda: nn.functional.cross_entropy(model(x), y)
    start = float(opt.step(closure))
    for _ in range(15):
        end = float(opt.step(closure))
    assert end < 0.7 * start


def test_a_fused_loss_without_forward_mode_is_explained():
    model = nn.Linear(4, 1)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    loss = lambda: nn.functional.mse_loss(model(x), y)
    with pytest.raises(sanc.SecondDerivativeError, match='Pass hvp="double-backward"'):
        sanc.SANC(model.parameters(), hvp="forward-over-reverse", seed=0).step(loss)
    sanc.SANC(model.parameters(), seed=0).step(loss)


def test_a_wrapped_backward_is_not_once_differentiable():
    class Cubed(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] ** 2 * g

    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = sanc.SANC([p], preset="paper", seed=0)
    opt.step(lambda: Cubed.apply(p).sum() + (p**4).sum())
    assert opt.record.ritz_value == pytest.approx(6.0 + 12.0)


def test_an_error_of_the_users_own_passes_through():
    p = nn.Parameter(torch.ones(2))

    def closure():
        if len(calls) > 2:
            raise RuntimeError("the disk is full")
        calls.append(1)
        return (p**4).sum()

    calls = []
    with pytest.raises(RuntimeError, match="the disk is full"):
        sanc.SANC([p], seed=0, hvp="forward-over-reverse").step(closure)


# ---------------------------------------------------------------------------------------------- the linearised mode


def counted(closure):
    def wrapped():
        wrapped.calls += 1
        return closure()

    wrapped.calls = 0
    return wrapped


def compare(closure, params, *, calls=None, tolerance=1e-12):
    """Products of the recording against double backward; and how often the closure ran for three of them."""
    answers = {}
    for hvp in ("double-backward", "linearised"):
        run = counted(closure)
        sample = Sample("closure", [(1.0, run)], 1, 3)
        oracle = AutogradOracle(Layout(params, [0.0] * len(params)), sample, sample, sample, hvp=hvp, meter=Meter())
        point = oracle.start()
        operator = oracle.hessian(point)
        rng = torch.Generator().manual_seed(0)
        directions = [torch.randn(len(point), generator=rng, dtype=torch.float64).to(point.dtype) for _ in range(3)]
        answers[hvp] = [operator(v) for v in directions]
    if calls is not None:
        assert run.calls == calls
    for a, b in zip(*answers.values(), strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.parametrize("build", [mlp, cnn, relu_cnn, batch_norm, gru])
def test_the_closure_runs_once_for_all_products(build):
    model, x, y = build()
    model, x = model.double(), x.double()
    compare(lambda: nn.functional.cross_entropy(model(x), y), list(model.parameters()), calls=1)


def test_operations_in_place_are_replayed():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.LeakyReLU(inplace=True),
        nn.Dropout(0.5), nn.Linear(5, 3),
    ).double()  # fmt: skip
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    compare(lambda: nn.functional.cross_entropy(model(x), y), list(model.parameters()), calls=1)


def test_what_cannot_be_recorded_is_computed_anew():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return 2 * g

        @staticmethod
        def jvp(ctx, t):
            return torch.empty(t.shape, dtype=t.dtype).copy_(2 * t)  # memory that the recording does not know

    p = nn.Parameter(torch.randn(4, dtype=torch.float64))
    compare(lambda: Doubled.apply(p.sin()).exp().sum(), [p], calls=3)


def test_fused_losses_and_indices_are_recorded():
    model, x, y = mlp()
    model, x = model.double(), x.double()
    target = torch.randn(12, 3).double()
    params = list(model.parameters())
    compare(lambda: nn.functional.mse_loss(model(x), target), params, calls=1)
    compare(lambda: model(x)[torch.arange(12), y].exp().mean(), params, calls=1)


def test_a_recording_under_autocast():
    model, x, y = mlp()

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y)

    compare(loss, list(model.parameters()), calls=1, tolerance=0.05)


def test_a_recording_is_void_where_the_parameters_changed():
    model, x, y = mlp()
    model, x = model.double(), x.double()
    H, _ = dense_hessian(model, x, y)
    oracle = oracle_for(model, x, y, "linearised")
    point = oracle.start()
    operator = oracle.hessian(point)
    v = torch.randn(len(point), dtype=torch.float64)
    first = operator(v)
    oracle.trial(point + 1.0)
    assert torch.equal(operator(v), first) and torch.allclose(first, H @ v, atol=1e-12)
    assert torch.equal(v, v.clone()) and torch.allclose(operator(2 * v), 2 * first, atol=1e-12)


# ---------------------------------------------------------------------------------------------- the choice


@pytest.fixture
def measuring(monkeypatch):
    """Measure however small the loss is, and remember nothing."""
    monkeypatch.setattr(choice, "SMALL", 0)
    monkeypatch.setattr(choice, "_chosen", {})
    return monkeypatch


class Clock:
    """Stands still but for what the operators say they cost."""

    def __init__(self, patch, **costs):
        self.now = 0.0
        self.measured = []
        patch.setattr(choice, "_clock", lambda: self.now)
        for name, (first, later) in costs.items():
            mode = name.replace("_", "-")
            patch.setitem(products.OPERATORS, mode, self.priced(mode, products.OPERATORS[mode], first, later))

    def priced(self, mode, kind, first, later):
        clock = self

        class Priced(kind):
            fresh = True

            def product(self, v, into=None):
                clock.measured.append(mode)
                clock.now += first if self.fresh else later
                self.fresh = False
                return super().product(v, into)

        return Priced


COSTS = {"double_backward": (3.0, 3.0), "linearised": (3.0, 2.0), "forward_over_reverse": (2.5, 2.5)}


@pytest.mark.parametrize("build", [mlp, cnn, relu_cnn, batch_norm, gru])
@pytest.mark.parametrize("winner", ["double_backward", "linearised", "forward_over_reverse"])
def test_auto_agrees_with_the_dense_hessian_whatever_it_takes(measuring, build, winner):
    Clock(measuring, **{**dict.fromkeys(COSTS, (9.0, 9.0)), winner: (1.0, 1.0)})
    model, x, y = build()
    model, x = model.double(), x.double()
    H, _ = dense_hessian(model, x, y, 0.3)
    oracle = oracle_for(model, x, y, "auto", 0.3)
    point = oracle.start()
    operator = oracle.hessian(point)
    assert oracle.hvp == winner.replace("_", "-")
    for _ in range(3):
        v = torch.randn(len(point), dtype=torch.float64)
        assert torch.allclose(operator(v), H @ v, atol=1e-10 * max(1.0, float(H.abs().max())))


def test_the_measurement_leaves_no_trace(measuring):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    oracle = oracle_for(model, x, y, "auto")
    point, meter = oracle.start(), oracle.meter
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    oracle.hessian(point)
    assert oracle.hvp != "auto"
    assert oracle.meter is meter and meter == Meter()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert all(p.grad is None for p in model.parameters())


def test_few_products_of_a_wide_network_are_not_measured(measuring):
    clock = Clock(measuring, **COSTS)
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
    for rows, expected, measured in ((2, 3, False), (2, 4, True), (200, 3, True)):
        oracle = oracle_for(model, torch.randn(rows, 30), torch.randint(0, 3, (rows,)), "auto")
        oracle.expected = expected
        clock.measured.clear()
        oracle.hessian(oracle.start())
        assert bool(clock.measured) is measured
        assert oracle.hvp == ("linearised" if measured else "double-backward")


def test_nothing_is_measured_where_memory_is_short(measuring):
    clock = Clock(measuring, **COSTS)
    model, x, y = mlp()
    opt = sanc.SANC(model.parameters(), preset="paper", lanczos="regenerate", seed=0)
    opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert opt.hvp == "double-backward" and set(clock.measured) == {"double-backward"} and not choice._chosen


def test_building_is_shared_by_the_products_of_a_point(measuring):
    Clock(measuring, double_backward=(3.0, 3.0), linearised=(9.0, 1.0), forward_over_reverse=(5.0, 5.0))
    model, x, y = mlp()
    for expected, mode in ((2, "double-backward"), (20, "linearised")):
        oracle = oracle_for(model, x, y, "auto")
        oracle.expected = expected
        oracle.hessian(oracle.start())
        assert oracle.hvp == mode


def test_a_machine_that_slows_down_does_not_mislead(measuring):
    """Every turn is slower than the one before by more than the modes differ; one of them is disturbed besides."""
    clock = Clock(measuring, double_backward=(3.0, 3.0), linearised=(3.0, 2.5), forward_over_reverse=(4.0, 4.0))
    plain = choice._Stand.products
    turns = []

    def slowing(self, mode, count=2):
        turns.append(mode)
        turn = turns.count(choice.REFERENCE)
        factor = 1.3**turn * (5.0 if turn == 3 and mode == "linearised" else 1.0)
        before = clock.now
        answer = plain(self, mode, count)
        known = self.times[mode]
        self.times[mode] = choice._Times(factor * known.first, factor * known.later)
        clock.now = before + factor * (clock.now - before)
        return answer

    measuring.setattr(choice._Stand, "products", slowing)
    oracle = oracle_for(*mlp(), "auto")
    oracle.hessian(oracle.start())
    assert oracle.hvp == "linearised" and turns.count("linearised") == 1 + choice._LEAST


def test_turns_that_disagree_ask_for_more(measuring):
    assert choice._settled([0.9] * 5) and choice._settled([1.1] * 5) and choice._settled([0.9] * 4 + [1.1])
    assert not choice._settled([0.9, 0.9, 0.9, 1.1, 1.1])
    clock = Clock(measuring, double_backward=(3.0, 3.0), linearised=(3.0, 2.5), forward_over_reverse=(9.0, 9.0))
    plain, turns = choice._Stand.products, []

    def disturbed(self, mode, count=2):
        turns.append(mode)
        answer = plain(self, mode, count)
        if mode == "linearised" and 2 <= turns.count(mode) <= 4:  # three of the first five turns
            self.times[mode] = choice._Times(9.0, 9.0)
        return answer

    measuring.setattr(choice._Stand, "products", disturbed)
    oracle = oracle_for(*mlp(), "auto")
    oracle.hessian(oracle.start())
    assert oracle.hvp == "linearised" and turns.count("linearised") == 1 + choice._ROUNDS and clock.now > 0.0


def test_near_ties_stay_with_double_backward(measuring):
    Clock(measuring, double_backward=(3.0, 3.0), linearised=(2.95, 2.95), forward_over_reverse=(2.95, 2.95))
    oracle = oracle_for(*mlp(), "auto")
    oracle.hessian(oracle.start())
    assert oracle.hvp == "double-backward"


def test_wrong_and_failing_candidates_are_not_taken(measuring):
    Clock(measuring, double_backward=(9.0, 9.0))

    class Wrong(products.ForwardOverReverse):
        def product(self, v, into=None):
            return 1.01 * super().product(v, into)

    class Failing(products.ForwardOverReverse):
        def product(self, v, into=None):
            raise NotImplementedError("no derivative")

    measuring.setitem(products.OPERATORS, "linearised", Wrong)
    measuring.setitem(products.OPERATORS, "forward-over-reverse", Failing)
    oracle = oracle_for(*mlp(), "auto")
    oracle.hessian(oracle.start())
    assert oracle.hvp == "double-backward"


def test_a_loss_without_forward_mode_gets_double_backward(measuring):
    model = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.SiLU(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert opt.hvp == "double-backward"


def test_nothing_is_chosen_where_products_are_not_finite(measuring):
    p = nn.Parameter(torch.zeros(2))
    sample = Sample("closure", [(1.0, lambda: p.abs().pow(1.5).sum())], 1, None)
    oracle = AutogradOracle(Layout([p], [0.0]), sample, sample, sample, hvp="auto", meter=Meter())
    point = oracle.start()
    assert not torch.isfinite(oracle.hessian(point)(torch.ones(2))).all()
    assert oracle.hvp == "auto"


def test_a_loss_is_measured_once(measuring):
    clock = Clock(measuring, **COSTS)
    model, x, y = mlp()
    loss = lambda: nn.functional.cross_entropy(model(x), y)
    first = sanc.SANC(model.parameters(), seed=0)
    first.step(loss)
    assert first.hvp == "linearised" and clock.measured.count("forward-over-reverse") > 0
    clock.measured.clear()
    again = sanc.SANC(model.parameters(), seed=1)
    again.step(loss)
    first.step(loss)
    assert again.hvp == "linearised" and clock.measured.count("forward-over-reverse") == 0
    for other in (lambda: loss().exp(), lambda: nn.functional.cross_entropy(model(x[:6]), y[:6])):
        clock.measured.clear()
        sanc.SANC(model.parameters(), seed=1).step(other)
        assert clock.measured.count("forward-over-reverse") > 0


def trained(opt, model, data, steps):
    for rows in data[:steps]:
        opt.step(sanc.Batch(lambda x, y: nn.functional.cross_entropy(model(x), y), *rows))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def batches(count):
    return [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(count)]


@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_a_run_is_the_run_of_the_chosen_mode(measuring, preset):
    Clock(measuring, **COSTS)
    data, start = batches(6), mlp()[0].state_dict()
    ends = {}
    for hvp in ("auto", "linearised"):
        model = mlp()[0]
        model.load_state_dict(start)
        opt = sanc.SANC(model.parameters(), preset=preset, hvp=hvp, seed=0)
        ends[hvp] = trained(opt, model, data, 6)
        assert opt.hvp == "linearised"
    assert torch.allclose(ends["auto"], ends["linearised"], atol=1e-5)


@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_a_resumed_run_keeps_the_mode(measuring, preset):
    Clock(measuring, **COSTS)
    data, model = batches(8), mlp()[0]
    opt = sanc.SANC(model.parameters(), preset=preset, seed=0)
    trained(opt, model, data, 4)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    whole = trained(opt, model, data[4:], 4)
    choice._chosen.clear()
    Clock(measuring, forward_over_reverse=(0.1, 0.1))
    other = mlp()[0]
    other.load_state_dict(saved[0])
    resumed = sanc.SANC(other.parameters(), preset=preset, seed=9)
    resumed.load_state_dict(saved[1])
    assert torch.equal(trained(resumed, other, data[4:], 4), whole)
    assert resumed.hvp == "linearised" and not choice._chosen
    assert pickle.loads(pickle.dumps(resumed)).hvp == "linearised"


def test_states_of_other_modes_and_of_none():
    model, data = mlp()[0], batches(2)
    opt = sanc.SANC(model.parameters(), hvp="linearised", seed=0)
    trained(opt, model, data, 2)
    state = opt.state_dict()
    fixed = sanc.SANC(model.parameters(), hvp="double-backward", seed=0)
    with pytest.warns(UserWarning, match="saved with hvp = 'linearised'"):
        fixed.load_state_dict(state)
    assert fixed.hvp == "double-backward"
    del state["engine"]["hvp"]
    old = sanc.SANC(model.parameters(), seed=0)
    old.load_state_dict(state)
    assert old.hvp == "auto"
    trained(old, model, data, 1)
    state["engine"]["hvp"] = "fast"
    with pytest.raises(sanc.ArgumentError, match="hvp = 'fast'"):
        old.load_state_dict(state)


def test_a_step_that_fails_chooses_nothing(measuring):
    p = nn.Parameter(torch.full((2,), torch.inf))
    opt = sanc.SANC([p], preset="paper", seed=0)
    with pytest.raises(sanc.NonFiniteStartError):
        opt.step(lambda: (p**2).sum())
    assert opt.hvp == "auto"


def test_small_functions_are_not_measured(monkeypatch):
    monkeypatch.setattr(choice, "_measured", None)  # it would be called
    result = sanc.minimize(lambda x: ((x**2 - 1) ** 2).sum(), torch.full((5,), 0.3, dtype=torch.float64))
    assert result.success and result.hvp == "double-backward"
    assert sanc.minimize(lambda x: x @ x, np.ones(3), jac=lambda x: 2 * x).hvp == ""


def test_a_large_function_is_measured_and_resumed(measuring):
    Clock(measuring, **COSTS)
    fun, x0 = lambda x: ((x**2 - 1) ** 2).sum() + x[0] * x[1] + x[2].sin(), torch.linspace(0.2, 2.0, 6).double()
    states = []
    whole = sanc.minimize(fun, x0, callback=lambda intermediate_result: states.append(intermediate_result.state))
    assert whole.success and whole.hvp == "linearised" and len(states) > 3
    choice._chosen.clear()
    Clock(measuring, forward_over_reverse=(0.1, 0.1))
    rest = sanc.minimize(fun, x0, resume=states[2])
    assert rest.hvp == "linearised" and torch.equal(rest.x, whole.x) and not choice._chosen


def test_an_unknown_mode_is_answered_with_the_known_ones():
    for call in (
        lambda: sanc.SANC([nn.Parameter(torch.ones(2))], hvp="quick"),
        lambda: sanc.minimize(lambda x: x @ x, torch.ones(2), hvp="quick"),
        lambda: sanc.certificate(lambda x: x @ x, torch.ones(2), hvp="quick"),
    ):
        with pytest.raises(sanc.ArgumentError, match="hvp = 'quick'") as caught:
            call()
        assert all(mode in str(caught.value) for mode in HVP_MODES)


@pytest.mark.parametrize("mode", ["auto", "double-backward", "forward-over-reverse", "linearised"])
def test_no_graph_outlives_a_step(measuring, mode):
    """A graph that is alive keeps the nodes of the leaves, which a later recording on another stream would meet."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(20, 6), torch.randint(3, (20,))

    def node():
        return model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]

    def closure():
        loss = nn.functional.cross_entropy(model(x), y)
        if torch.is_grad_enabled():
            node().metadata["seen"] = True
        return loss

    opt = sanc.SANC(model.parameters(), preset="paper", hvp=mode, seed=0)
    for _ in range(2):
        opt.step(closure)
    assert "seen" not in node().metadata


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_the_record_tells_how_products_are_made(preset):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(8, 4)
    opt = sanc.SANC(model.parameters(), preset=preset, seed=0)
    for _ in range(25):
        opt.step(lambda: model(x).square().mean())
    assert opt.record.hvp == opt.hvp != "auto"
    given = sanc.SANC(model.parameters(), preset=preset, seed=0, hvp="linearised")
    given.step(lambda: model(x).square().mean())
    assert given.record.hvp == "linearised"
    res = sanc.minimize(lambda w: (w**4).sum() - w.sum(), torch.zeros(3, dtype=torch.float64))
    assert res.history[-1].hvp == res.hvp == "double-backward"
    closed = sanc.minimize(
        lambda w: (w**4).sum(), np.ones(3), jac=lambda w: 4 * w**3, hessp=lambda w, v: 12 * w * w * v
    )
    assert closed.history[-1].hvp == closed.hvp == ""
