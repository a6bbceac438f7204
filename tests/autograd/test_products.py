"""Hessian products of every mode against a dense float64 Hessian, and operators without second derivatives."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import sanc
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.products import HVP_MODES
from tensors import flat

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


def bound(params, sample, other=None, *, hvp, decay=0.0):
    oracle = AutogradOracle(Leaves(params, [decay] * len(params)), hvp=hvp)
    oracle.bind(sample, other or sample, sample)
    return oracle


def oracle_for(model, x, y, hvp, decay=0.0, parts=None):
    params = list(model.parameters())
    closure = lambda: nn.functional.cross_entropy(model(x), y)
    sample = Sample("closure", parts or [(1.0, closure)], len(x), 7)
    other = Sample("hessian", parts or [(1.0, closure)], len(x), 7)
    return bound(params, sample, other, hvp=hvp, decay=decay)


def dense_hessian(model, x, y, decay=0.0):
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    sizes = [p.numel() for p in params]

    def value(vector):
        parts = {n: v.view_as(p) for n, v, p in zip(names, vector.split(sizes), params, strict=True)}
        loss = nn.functional.cross_entropy(torch.func.functional_call(model, parts, (x,)), y)
        return loss + decay / 2 * (vector**2).sum()

    w = torch.cat([p.detach().reshape(-1) for p in params])
    return torch.autograd.functional.hessian(value, w, vectorize=True), torch.autograd.functional.jacobian(value, w)


@pytest.mark.parametrize("hvp", HVP_MODES)
@pytest.mark.parametrize(
    ("build", "decay"), [(mlp, 0.0), (mlp, 0.3), (cnn, 0.3), (relu_cnn, 0.0), (batch_norm, 0.3), (gru, 0.0)]
)
def test_products_agree_with_the_dense_hessian(hvp, build, decay):
    model, x, y = build()
    model, x = model.double(), x.double()
    H, gradient = dense_hessian(model, x, y, decay)
    oracle = oracle_for(model, x, y, hvp, decay)
    point = oracle.read_point()
    before = point.clone()
    _, g = oracle.gradient(point)
    assert torch.allclose(g, gradient, atol=1e-12)
    operator = oracle.hessian(point)
    for _ in range(3):
        v = torch.randn(len(point), dtype=torch.float64)
        product = operator(v)
        assert torch.allclose(product, H @ v, atol=TOLERANCE[hvp] * max(1.0, float(H.abs().max())))
    operator.release()
    assert torch.allclose(
        operator(v), H @ v, atol=TOLERANCE[hvp] * max(1.0, float(H.abs().max()))
    )  # the graph is built again
    assert torch.allclose(operator.gradient(), gradient, atol=1e-12)
    assert torch.equal(flat(model), before)
    assert oracle.meter.product == 4 * len(x) and oracle.meter.nhev == 4


@pytest.mark.parametrize("shared", [False, True])
def test_activations_may_be_recomputed_in_the_backward_pass(shared):
    torch.manual_seed(0)
    first, last, x = nn.Linear(3, 8).double(), nn.Linear(8, 2).double(), torch.randn(20, 3, dtype=torch.float64)
    params = [*first.parameters(), *last.parameters()]

    def plain():
        return last(first(x).tanh().sin()).square().mean()

    def checkpointed():
        hidden = torch.utils.checkpoint.checkpoint(lambda h: h.tanh().sin(), first(x), use_reentrant=False)
        return last(hidden).square().mean()

    products = []
    for closure in (plain, checkpointed):
        sample = Sample("closure", [(1.0, closure)], 20, seed=5)
        oracle = bound(params, sample, hvp="double-backward")
        point = oracle.read_point()
        if shared:
            oracle.gradient(point)
        operator = oracle.hessian(point)
        directions = torch.randn(3, len(point), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        products.append(torch.stack([operator(v) for v in directions]))
    assert torch.allclose(*products, rtol=1e-13, atol=1e-15)


def test_hooks_of_parameters_run_in_every_product():
    model, x, y = mlp()
    seen = []
    handle = next(model.parameters()).register_hook(lambda g: seen.append(g) or 2.0 * g)
    oracle = oracle_for(model, x, y, "double-backward")
    point = oracle.read_point()
    operator = oracle.hessian(point)
    twice, count = operator(torch.ones_like(point)), len(seen)
    handle.remove()
    once = oracle_for(model, x, y, "double-backward").hessian(point)(torch.ones_like(point))
    assert count == 2 and not torch.allclose(twice, once)
    seen[-1].clone().requires_grad_().sum().backward()  # a copy of a gradient in a hook is an ordinary tensor


@pytest.mark.parametrize("hvp", HVP_MODES)
def test_products_of_weighted_parts_sum_to_the_product_of_the_whole(hvp):
    model, x, y = mlp()
    model, x = model.double(), x.double()
    H, _ = dense_hessian(model, x, y)
    parts = [
        (5 / 12, lambda: nn.functional.cross_entropy(model(x[:5]), y[:5])),
        (7 / 12, lambda: nn.functional.cross_entropy(model(x[5:]), y[5:])),
    ]
    oracle = oracle_for(model, x, y, hvp, parts=parts)
    point = oracle.read_point()
    v = torch.randn(len(point), dtype=torch.float64)
    assert torch.allclose(oracle.hessian(point)(v), H @ v, atol=TOLERANCE[hvp])


@pytest.mark.parametrize("hvp", HVP_MODES)
def test_dropout_is_the_same_in_every_product(hvp):
    """⟨u, Hv⟩ = ⟨v, Hu⟩ holds only if both products use one mask."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    oracle = oracle_for(model, x, y, hvp)
    point = oracle.read_point()
    operator = oracle.hessian(point)
    u, v = torch.randn(2, len(point), dtype=torch.float64)
    assert float(u @ operator(v)) == pytest.approx(float(v @ operator(u)), rel=1e-6)


def test_products_are_zero_for_parameters_in_which_the_loss_is_linear():
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    b = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for hvp in HVP_MODES:
        closure = lambda: (w**2).sum() + 3 * b.sum()
        sample = Sample("closure", [(1.0, closure)], 1, None)
        oracle = bound([w, b], sample, hvp=hvp)
        point = oracle.read_point()
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


@pytest.mark.parametrize("hvp", ["double-backward", "forward-over-reverse"])
def test_the_error_names_fused_attention(hvp):
    model, x, y = Attention(), torch.randn(6, 5, 8), torch.randint(0, 3, (6,))
    before = [p.detach().clone() for p in model.parameters()]
    opt = sanc.SANC(model.parameters(), hvp=hvp, seed=0)
    with pytest.raises(sanc.SecondDerivativeError) as caught:
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert "attention" in caught.value.operator
    assert caught.value.operator in str(caught.value)
    assert 'hvp="finite-difference"' in str(caught.value) and "SDPBackend.MATH" in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_error_explains_a_function_marked_once_differentiable():
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
    for loss in (lambda: Once.apply(p).sum(), lambda: (Once.apply(p) ** 2).sum()):  # torch computes zero for both
        with pytest.raises(sanc.SecondDerivativeError, match="once_differentiable"):
            sanc.SANC([p], seed=0, hvp="double-backward").step(loss)
        with pytest.raises(sanc.SecondDerivativeError, match=r"autograd\.Function has no forward-mode"):
            sanc.SANC([p], seed=0, hvp="forward-over-reverse").step(loss)


def test_finite_differences_train_a_model_without_second_derivatives():
    torch.manual_seed(1)
    model, x, y = Attention().double(), torch.randn(30, 5, 8).double(), torch.randint(0, 3, (30,))
    opt = sanc.SANC(model.parameters(), hvp="finite-difference", seed=0)
    closure = lambda: nn.functional.cross_entropy(model(x), y)
    start = float(opt.step(closure))
    for _ in range(15):
        end = float(opt.step(closure))
    assert end < 0.7 * start


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_auto_falls_back_to_differences_with_one_warning(preset):
    """The run equals that of hvp="finite-difference", and its checkpoint keeps this mode."""

    def run(hvp, steps=6, state=None):
        torch.manual_seed(1)
        model, x, y = Attention().double(), torch.randn(30, 5, 8).double(), torch.randint(0, 3, (30,))
        opt = sanc.SANC(model.parameters(), preset=preset, hvp=hvp, seed=0)
        for _ in range(steps):
            opt.step(lambda: nn.functional.cross_entropy(model(x), y))
        return flat(model), opt

    with pytest.warns(RuntimeWarning, match="attention.*differences of gradients") as caught:
        automatic, opt = run("auto")
    assert len([w for w in caught if "differences of gradients" in str(w.message)]) == 1
    assert opt.hvp == opt.record.hvp == "finite-difference"
    differences, _ = run("finite-difference")
    assert torch.equal(automatic, differences)
    other = sanc.SANC([nn.Parameter(p.detach().clone()) for p in opt.param_groups[0]["params"]], preset=preset)
    other.load_state_dict(opt.state_dict())
    assert other.hvp == "finite-difference" and pickle.loads(pickle.dumps(other)).hvp == "finite-difference"


def test_auto_uses_differences_for_a_function_marked_once_differentiable():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] ** 2 * g

    with pytest.warns(RuntimeWarning, match="once_differentiable"):
        res = sanc.certificate(lambda x: (Once.apply(x) ** 2).sum(), torch.ones(2, dtype=torch.float64))
    assert res.lambda_min == pytest.approx(30.0, rel=1e-6)  # of x⁶


def test_the_error_explains_a_fused_loss_without_forward_mode():
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


def test_an_error_in_the_closure_propagates():
    p = nn.Parameter(torch.ones(2))

    def closure():
        if len(calls) > 2:
            raise RuntimeError("the disk is full")
        calls.append(1)
        return (p**4).sum()

    calls = []
    with pytest.raises(RuntimeError, match="the disk is full"):
        sanc.SANC([p], seed=0, hvp="forward-over-reverse").step(closure)


def test_the_error_for_an_unknown_mode_lists_the_known_ones():
    for call in (
        lambda: sanc.SANC([nn.Parameter(torch.ones(2))], hvp="quick"),
        lambda: sanc.minimize(lambda x: x @ x, torch.ones(2), hvp="quick"),
        lambda: sanc.certificate(lambda x: x @ x, torch.ones(2), hvp="quick"),
    ):
        with pytest.raises(sanc.ArgumentError, match="hvp = 'quick'") as caught:
            call()
        assert all(mode in str(caught.value) for mode in HVP_MODES)


@pytest.mark.parametrize("mode", ["auto", "double-backward", "forward-over-reverse"])
def test_no_graph_outlives_a_step(mode):
    """A live graph keeps the nodes of the leaves, and a CUDA graph recorded on another stream would reuse them."""
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
def test_the_record_holds_the_mode_of_the_products(preset):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(8, 4)
    for hvp in HVP_MODES:
        opt = sanc.SANC(model.parameters(), preset=preset, seed=0, hvp=hvp)
        opt.step(lambda: model(x).square().mean())
        assert opt.record.hvp == opt.hvp == hvp
    res = sanc.minimize(lambda w: (w**4).sum() - w.sum(), torch.zeros(3, dtype=torch.float64))
    assert res.history[-1].hvp == res.hvp == "auto"
    closed = sanc.minimize(
        lambda w: (w**4).sum(), np.ones(3), jac=lambda w: 4 * w**3, hessp=lambda w, v: 12 * w * w * v
    )
    assert closed.history[-1].hvp == closed.hvp == ""


def test_a_state_saved_with_another_mode_is_loaded_with_a_warning():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(8, 4)
    opt = sanc.SANC(model.parameters(), hvp="forward-over-reverse", seed=0)
    opt.step(lambda: model(x).square().mean())
    state = opt.state_dict()
    fixed = sanc.SANC(model.parameters(), hvp="double-backward", seed=0)
    with pytest.warns(UserWarning, match="saved with hvp = 'forward-over-reverse'"):
        fixed.load_state_dict(state)
    assert fixed.hvp == "double-backward"
    for bad in ("fast", "linearised"):
        state["run_state"]["hvp"] = bad
        with pytest.raises(sanc.ArgumentError, match=f"hvp = '{bad}'"):
            sanc.SANC(model.parameters(), seed=0).load_state_dict(state)
