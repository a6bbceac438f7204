"""The optimisers as `torch.optim.Optimizer`: steps, resuming, parameter groups, faults and bad input."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import pickle
import random
import sys
import warnings
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from composing import composed
from sanc import Branch

FAMILY = [sanc.SANC, sanc.SCR, sanc.ARC, sanc.CR, sanc.CRM, sanc.NCD]
PRESETS = ["paper", "authors", "robust"]


def make(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(60, 5, dtype=dtype), torch.randint(0, 3, (60,))
    return model, x, y


def loss_of(model, x, y):
    return lambda: nn.functional.cross_entropy(model(x), y)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def closures(cls, model, x, y):
    """Return closures on three different samples, or on one for ARC, which is exact."""
    kinds = {"closure": loss_of(model, x[:20], y[:20])}
    if cls is not sanc.ARC:
        kinds["hessian"] = loss_of(model, x[20:40], y[20:40])
        kinds["objective"] = loss_of(model, x[40:], y[40:])
    return kinds


@pytest.mark.parametrize("cls", FAMILY)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_member_lowers_the_loss(cls, preset):
    model, x, y = make()
    opt = cls(model.parameters(), seed=1, **composed(cls, preset, L1=2.0, L2=2.0))
    closure = loss_of(model, x, y)
    first = float(opt.step(closure))
    for _ in range(30):
        last = float(opt.step(closure))
    assert last < 0.9 * first
    assert isinstance(opt, torch.optim.Optimizer)


@pytest.mark.parametrize("sigma", [0.1, 30.0])
def test_a_step_of_the_paper_equals_one_by_dense_linear_algebra(sigma):
    """Krylov space, global minimiser of the cubic model, ratio ρ and σ."""
    model, x, y = make()
    params = list(model.parameters())
    d = sum(p.numel() for p in params)

    def value(vector, rows):
        parts = torch.split(vector, [p.numel() for p in params])
        weights = {n: part.view_as(p) for (n, p), part in zip(model.named_parameters(), parts, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x[rows],)), y[rows])

    w = flat(model)
    g_rows, b_rows, f_rows = slice(0, 20), slice(20, 40), slice(40, 60)
    g = torch.func.grad(value)(w, g_rows).numpy()
    B = torch.func.hessian(value)(w, b_rows).numpy()
    K = np.stack([np.linalg.matrix_power(B, k) @ g for k in range(5)], axis=1)
    Q, _ = np.linalg.qr(K)
    T, c = Q.T @ B @ Q, Q.T @ g
    from scipy.optimize import minimize

    def m(u):
        return c @ u + 0.5 * u @ T @ u + sigma / 3 * np.linalg.norm(u) ** 3

    best = min((minimize(m, s * np.random.default_rng(k).standard_normal(5), tol=1e-14) for k in range(20)
                for s in (0.1, 10.0)), key=lambda r: r.fun)  # fmt: skip
    s = Q @ best.x
    rho = float(value(w, f_rows) - value(w + torch.from_numpy(s), f_rows)) / -best.fun

    opt = sanc.SANC(model.parameters(), preset="paper", sigma0=sigma, eta2=0.5, seed=0)
    returned = opt.step(**closures(sanc.SANC, model, x, y))
    record = opt.record
    assert d == 75
    assert float(returned) == pytest.approx(float(value(w, g_rows)), rel=1e-12)
    assert record.grad_norm == pytest.approx(np.linalg.norm(g), rel=1e-10)
    assert record.ritz_value == pytest.approx(np.linalg.eigvalsh(T)[0], rel=1e-6)
    assert record.model_decrease == pytest.approx(-best.fun, rel=1e-6)
    assert record.rho == pytest.approx(rho, rel=1e-4)
    assert record.value == pytest.approx(float(value(w, f_rows)), rel=1e-12)
    moved = (flat(model) - w).numpy()
    assert record.step_norm == pytest.approx(np.linalg.norm(moved), rel=1e-4)
    if sigma == 0.1:  # rejected, and ‖g‖ is large beside |λ1|, so the escape step is −g/L1
        assert rho < 0.2 and record.branch is Branch.GRADIENT
        assert moved == pytest.approx(-g / 10.0, abs=1e-12)
        assert opt._iteration.state.sigma == 2 * sigma
    else:
        assert rho > 0.5 and record.branch is Branch.VERY_SUCCESSFUL
        assert moved == pytest.approx(s, abs=1e-4 * np.linalg.norm(s))
        assert opt._iteration.state.sigma == max(min(sigma, record.grad_norm), 2.0**-52)


def test_calls_are_counted_by_component():
    model, x, y = make()

    def loss(a, b):
        return nn.functional.cross_entropy(model(a), b)

    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(
        sanc.Batch(loss, x[:10], y[:10]),
        hessian=sanc.Batch(loss, x[:7], y[:7]),
        objective=sanc.Batch(loss, x[:3], y[:3]),
    )
    calls = opt.record.calls
    assert opt.record.branch in (Branch.VERY_SUCCESSFUL, Branch.SUCCESSFUL)
    assert (calls.gradient, calls.product, calls.value) == (10, 5 * 7, 2 * 3)
    assert calls.paper_calls == 10 + 5 * 7
    assert calls.total == 10 + 35 + 6
    opt.step(sanc.Batch(loss, x[:10], y[:10]))
    assert opt.record.calls.paper_calls == calls.paper_calls + 10 + 5 * 10
    assert opt.record.seconds > 0 and opt.record.iteration == 1


# ---------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("cls", FAMILY)
@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_resuming_is_bit_identical(cls, preset, tmp_path):
    """With dropout and random signs of curvature steps, so that the weights alone do not determine the run."""

    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).double()
        return model, cls(model.parameters(), seed=np.int64(11), **composed(cls, preset, L1=2.0, L2=2.0))

    data = torch.utils.data.TensorDataset(*make()[1:])

    on_samples = preset == "robust" and cls in (sanc.SANC, sanc.SCR)
    steps = 40 if on_samples else 6  # 40 steps reach the averaged phase

    def train(model, opt, samples):
        for _ in range(steps):
            g, b, f = samples.draw()
            others = {} if cls is sanc.ARC else {"hessian": loss_of(model, *b), "objective": loss_of(model, *f)}
            if on_samples:
                del others["objective"]
            opt.step(loss_of(model, *g), **others)

    model, opt = build()
    samples = sanc.ThreeSamples(data, 16, seed=np.int64(5))
    train(model, opt, samples)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "samples": samples.state_dict()}, buffer)
    train(model, opt, samples)

    torch.manual_seed(987)  # global random states must not matter
    torch.randn(100), random.random(), np.random.rand()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again, opt2 = build()
    opt2 = cls(again.parameters(), **composed(cls, preset, L1=2.0, L2=2.0))  # the seed comes from the checkpoint
    samples2 = sanc.ThreeSamples(data, 16, seed=0)
    again.load_state_dict(saved["model"])
    opt2.load_state_dict(saved["opt"])
    samples2.load_state_dict(saved["samples"])
    train(again, opt2, samples2)
    assert torch.equal(flat(model), flat(again))
    ours, theirs = asdict(opt2.record), asdict(opt.record)
    for name in ours.keys() - {"seconds"}:
        assert ours[name] == theirs[name] or (ours[name] != ours[name] and theirs[name] != theirs[name]), name


def test_weight_decay_that_overflows_is_an_error():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(sanc.ArgumentError, match=r"weight_decay = 1e\+39 cannot be used with torch.float32"):
        sanc.SANC([p], weight_decay=1e39)


def test_loading_the_state_of_another_optimiser_changes_nothing():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(loss_of(model, x, y))
    before = opt.state_dict()
    for state, word in [
        (torch.optim.SGD(model.parameters(), lr=1.0).state_dict(), "run_state"),
        (sanc.SCR(model.parameters()).state_dict(), "'scr'"),
    ]:
        with pytest.raises(sanc.ArgumentError, match=word):
            opt.load_state_dict(state)
        assert repr(opt.state_dict()) == repr(before)


# ---------------------------------------------------------------------------------------------- parameters and groups


def test_groups_have_weight_decay_or_are_frozen():
    """Weight decay is exact in f, g and Hv: the run equals one with the penalty in the loss."""
    runs = []
    for penalised in (False, True):
        model, x, y = make()
        first, last = model[0], model[2]

        def loss(model=model, x=x, y=y, first=first, last=last, penalised=penalised):
            value = nn.functional.cross_entropy(model(x), y)
            if penalised:
                value = value + 0.05 * sum((p**2).sum() for p in first.parameters()) + 0.15 * (last.weight**2).sum()
            return value

        decays = (0.0, 0.0) if penalised else (0.1, 0.3)
        opt = sanc.SANC(
            [
                {"params": list(first.parameters()), "weight_decay": decays[0]},
                {"params": [last.weight], "weight_decay": decays[1]},
                {"params": [last.bias], "frozen": True},
            ],
            preset="paper",
            seed=0,
        )
        bias = last.bias.detach().clone()
        records = []
        for _ in range(8):
            opt.step(loss)
            records.append(opt.record)
        assert torch.equal(bias, last.bias)
        runs.append((flat(model), records))
    assert runs[0][0].numpy() == pytest.approx(runs[1][0].numpy(), abs=1e-9)
    for ours, reference in zip(runs[0][1], runs[1][1], strict=True):
        assert ours.value == pytest.approx(reference.value, rel=1e-10)
        assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-7)
        assert ours.ritz_value == pytest.approx(reference.ritz_value, rel=1e-5)


def test_frozen_and_unused_parameters_do_not_change():
    model, x, y = make()
    spare = nn.Parameter(torch.ones(4, dtype=torch.float64))
    model[0].weight.requires_grad_(False)
    still = model[0].weight.detach().clone()
    opt = sanc.SANC([*model.parameters(), spare], preset="paper", seed=0)
    with pytest.warns(UserWarning, match=r"does not reach params\[4\]"):
        opt.step(loss_of(model, x, y))
    for _ in range(4):
        opt.step(loss_of(model, x, y))
    assert torch.equal(still, model[0].weight)
    assert torch.equal(spare, torch.ones(4, dtype=torch.float64))
    model[0].weight.requires_grad_(True)  # optimised from here on
    opt.step(loss_of(model, x, y))
    assert not torch.equal(still, model[0].weight)


def test_a_group_added_later_is_optimised():
    model, x, y = make()
    opt = sanc.SANC(model[2].parameters(), preset="paper", seed=0)
    before = model[0].weight.detach().clone()
    opt.step(loss_of(model, x, y))
    assert torch.equal(before, model[0].weight)
    opt.add_param_group({"params": list(model[0].parameters())})
    opt.step(loss_of(model, x, y))
    assert not torch.equal(before, model[0].weight)


def test_grad_is_neither_read_nor_written():
    model, x, y = make()
    loss_of(model, x, y)().backward()  # before the optimiser is constructed; later gradients would be an error
    opt = sanc.SANC(model.parameters(), seed=0)
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads]
    opt.step(loss_of(model, x, y))
    for p, grad, before in zip(model.parameters(), grads, copies, strict=True):
        assert p.grad is grad and torch.equal(grad, before)
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_keep_their_type(dtype):
    model, x, y = make(dtype)
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    start = float(opt.step(loss_of(model, x, y)))
    for _ in range(20):
        end = float(opt.step(loss_of(model, x, y)))
    assert end < 0.8 * start
    assert all(p.dtype == dtype for p in model.parameters())


def test_bf16_autocast_in_the_closure():
    model, x, y = make(torch.float32)

    def closure():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y)

    opt = sanc.SANC(model.parameters(), seed=0)
    start = float(opt.step(closure))
    for _ in range(20):
        end = float(opt.step(closure))
    assert end < 0.8 * start
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---------------------------------------------------------------------------------------------- faults


def snapshot(model, opt):
    return flat(model).clone(), opt._iteration.state, asdict(opt._driver.meter), opt.record


@pytest.mark.parametrize("cls", [sanc.SANC, sanc.SCR, sanc.CR, sanc.CRM, sanc.NCD])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_trial_that_is_not_finite_never_reaches_the_parameters(cls, preset):
    model, x, y = make()
    w = flat(model).clone()
    good = loss_of(model, x, y)

    def cliff():
        """Return a loss that is finite at the start only."""
        value = good()
        return value if torch.equal(flat(model), w) else value * float("nan")

    opt = cls(model.parameters(), seed=0, check=False, **composed(cls, preset, L1=1.0, L2=1.0))
    second_order = getattr(opt._iteration, "second_order", opt._iteration)
    sigma = 0.0  # the first step sets the first σ
    for k in range(3):
        if opt._iteration.averages:  # forms ρ on the gradient sample
            opt.step(cliff, hessian=good)
        else:
            opt.step(good, objective=cliff)
        assert torch.equal(flat(model), w), k
        assert opt.record.branch is Branch.STAYED
        vanished = "below the working precision" in opt.record.note or sigma > 1e20  # such a step shows nothing about f
        assert second_order.state.sigma > sigma or vanished
        sigma = second_order.state.sigma
        assert "finite" in opt.record.note or "lower" in opt.record.note or vanished


@pytest.mark.parametrize("poison", ["loss", "gradient", "objective"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_an_error_at_the_start_and_rejected_later(poison, bad):
    model, x, y = make()
    good = loss_of(model, x, y)

    def loss():
        return good() * bad

    def gradient():  # finite value, infinite derivative: √ at zero
        zero = model[0].weight.sum() - model[0].weight.sum().detach()
        return good() + torch.sqrt(zero if bad == float("inf") else zero**2)  # derivative ∞·1, or ∞·0

    bad_closures = {
        "loss": {"closure": loss},
        "gradient": {"closure": gradient},
        "objective": {"closure": good, "objective": loss},
    }[poison]
    fresh = sanc.SANC(model.parameters(), preset="paper", seed=0, check=False)
    before = snapshot(model, fresh)
    with pytest.raises(sanc.NonFiniteStartError, match="not finite at the starting point"):
        fresh.step(**bad_closures)
    after = snapshot(model, fresh)
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]

    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(good)
    w, sigma = flat(model).clone(), opt._iteration.state.sigma
    opt.step(**bad_closures)
    assert torch.equal(flat(model), w)
    assert opt._iteration.state.sigma == 2 * sigma
    assert opt.record.branch is Branch.STAYED and "not finite" in opt.record.note


def test_after_a_product_that_is_not_finite_there_is_no_cubic_step():
    class Poisoned(torch.autograd.Function):
        """The identity, with a second derivative of NaN."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return PoisonedBackward.apply(g)

    class PoisonedBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g):
            return g.clone()

        @staticmethod
        def backward(ctx, g):
            return g * float("nan")

    model, x, y = make()
    good = loss_of(model, x, y)
    bad = lambda: nn.functional.cross_entropy(Poisoned.apply(model(x)), y)
    with pytest.raises(sanc.NonFiniteStartError, match="Lanczos iteration 1 is not finite"):
        sanc.SANC(model.parameters(), preset="paper", seed=0).step(good, hessian=bad)
    for cls in (sanc.SANC, sanc.SCR):
        model, x, y = make()
        good = loss_of(model, x, y)
        opt = cls(model.parameters(), preset="paper", seed=0)
        opt.step(good)
        w, sigma = flat(model).clone(), opt._iteration.state.sigma
        opt.step(good, hessian=lambda m=model, x=x, y=y: nn.functional.cross_entropy(Poisoned.apply(m(x)), y))
        assert opt._iteration.state.sigma == 2 * sigma
        assert "Hessian product" in opt.record.note and torch.isfinite(flat(model)).all()
        if cls is sanc.SCR:
            assert torch.equal(w, flat(model)) and opt.record.branch is Branch.STAYED
        else:  # there is no Ritz pair, so the escape step is along the gradient
            assert opt.record.branch is Branch.GRADIENT
            g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(good(), list(model.parameters()))])
            assert torch.isfinite(g).all()
            assert opt.record.step_norm == pytest.approx(opt.record.grad_norm / 10.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_rejected_step_leaves_every_parameter_bit_identical(preset):
    model, x, y = make(torch.float32)
    with torch.no_grad():
        model[2].bias[0] = -0.0  # adding and subtracting a step would change the sign
    w = [p.detach().clone() for p in model.parameters()]
    good = loss_of(model, x, y)

    def always_worse():
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), w, strict=True))
        return good() if same else good() + 1e6

    opt = sanc.SCR(model.parameters(), seed=0, **composed(sanc.SCR, preset))
    for _ in range(5):
        if preset == "robust":
            opt.step(always_worse, hessian=good)
        else:
            opt.step(good, objective=always_worse)
        assert opt.record.branch is Branch.STAYED
        for p, q in zip(model.parameters(), w, strict=True):
            assert torch.equal(p.detach().view(torch.int32), q.view(torch.int32))


def test_an_exception_in_a_closure_changes_nothing():
    model, x, y = make()
    good = loss_of(model, x, y)
    opt = sanc.SANC(model.parameters(), preset="robust", minibatch=None, seed=0)
    opt.step(good)
    before, rng = snapshot(model, opt), torch.get_rng_state()
    for fail_at in range(3):
        calls = []

        def failing(fail_at=fail_at, calls=calls):
            calls.append(1)
            if len(calls) > fail_at:
                raise KeyboardInterrupt
            return good() + len(calls) * 1e6  # rejected, so that the escape rule is called too

        with pytest.raises(KeyboardInterrupt):
            opt.step(good, objective=failing)
        after = snapshot(model, opt)
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("cls", [sanc.SANC, sanc.SCR, sanc.ARC, sanc.CR, sanc.CRM, sanc.NCD])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_zero_gradient_at_a_strict_saddle_is_escaped(cls, preset):
    p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    scale = torch.tensor([-1.0, 0.2, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)

    def closure():
        return 0.5 * (scale * p**2).sum() + 0.25 * (p**4).sum()

    opt = cls([p], seed=0, **composed(cls, preset, L1=4.0, L2=4.0))
    for _ in range(40):
        opt.step(closure)
    assert closure().item() == pytest.approx(-0.25, abs=1e-3)  # at p = (±1, 0, …)


def test_at_a_second_order_point_the_parameters_stay():
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = sanc.SANC([p], preset="paper", seed=0)
    opt.step(lambda: (p**2).sum())
    assert opt.record.branch is Branch.STAYED and torch.equal(p.detach(), torch.zeros(3, dtype=torch.float64))
    assert opt._iteration.stopping_test_holds and opt._iteration.state.sigma == 1.0


@pytest.mark.parametrize("hvp", ["double-backward", "forward-over-reverse"])
@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_steps_leak_no_memory(hvp, count):
    """Tensors that stay alive are counted; graphs of 500 steps would need hundreds of megabytes."""
    resource = pytest.importorskip("resource", reason="the peak memory of a process is read with resource, on Unix")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.randn(1024, 5), torch.randint(0, 3, (1024,))
    opt = sanc.SANC(model.parameters(), preset="paper", krylov_dim=2, hvp=hvp, seed=0)

    def live():
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter))

    def steps(count):
        for _ in range(count):
            opt.step(loss_of(model, x, y), hessian=loss_of(model, x[:512], y[:512]))

    steps(20)
    tensors, peak = live(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps(count)
    assert live() <= tensors + 2
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * unit < 50e6


@pytest.mark.slow
def test_sigma_recovers_after_many_rejections():
    """A converged loss, or a thousand batches of NaN, reject every step; afterwards the run converges again."""
    w = nn.Parameter(torch.ones(3))
    opt = sanc.ARC([w], preset="paper", seed=0)
    for _ in range(1500):
        opt.step(lambda: ((w - 2) ** 2).sum() + 0.1 * (w**4).sum() + 0.3)
    assert math.isfinite(opt._iteration.state.sigma)
    for _ in range(60):
        opt.step(lambda: ((w + 5) ** 2).sum())
    assert torch.allclose(w.detach(), torch.full((3,), -5.0), atol=1e-2)
    for _ in range(1100):
        opt.step(lambda: (w * float("nan")).sum())
    assert math.isfinite(opt._iteration.state.sigma)
    for _ in range(400):
        opt.step(lambda: ((w - 5) ** 2).sum())
    assert torch.allclose(w.detach(), torch.full((3,), 5.0), atol=1e-2)


def test_a_point_that_is_not_finite_is_rejected_even_if_its_loss_is_finite():
    for cls, options in ((sanc.CR, {"sigma0": 1e-45}), (sanc.NCD, {"L1": 1e-40})):
        w = nn.Parameter(torch.full((2,), 0.5))
        opt = cls([w], preset="paper", seed=0, **options)
        opt.step(lambda w=w: torch.exp(-w * w).sum())
        assert torch.equal(w.detach(), torch.full((2,), 0.5)) and opt.record.branch is Branch.STAYED
    res = sanc.minimize(lambda x: -torch.exp(x).sum(), torch.ones(1).double(), method="crm", certify=False, max_iter=50)
    assert np.isfinite(res.fun)


@pytest.mark.parametrize("how", ["nan batch", "exception"])
def test_a_rejected_step_does_not_change_the_buffers(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    _, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(loss_of(model, x, y))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if how == "nan batch":
        opt.step(loss_of(model, x * float("nan"), y))
    else:
        with pytest.raises(sanc.ArgumentError, match="objective returned"):
            opt.step(loss_of(model, x, y), objective=lambda: model(x))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_autocast_around_the_step_holds_inside_the_closure():
    """Torch caches the casts of parameters; a trial point must not be evaluated with the casts at x."""
    rhos = []
    for outside in (False, True):
        model, x, y = make(torch.float32)
        opt = sanc.SANC(model.parameters(), preset="paper", sigma0=30.0, seed=0)

        def closure(model=model, x=x, y=y, outside=outside):
            with torch.autocast("cpu", torch.bfloat16, enabled=True) if not outside else contextlib.nullcontext():
                return nn.functional.cross_entropy(model(x), y)

        with torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext():
            opt.step(closure)
        rhos.append((opt.record.rho, opt.record.ritz_value))
    assert rhos[0] == pytest.approx(rhos[1], rel=1e-6) and rhos[0][0] != 0.0


def test_a_loss_with_derivatives_of_the_network():
    """A physics-informed loss: u'' = −u on a grid. An objective that calls backward is still an error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    t = torch.linspace(0, 2, 20, dtype=torch.float64)[:, None]

    def loss():
        s = t.clone().requires_grad_()
        u = net(s)
        (du,) = torch.autograd.grad(u.sum(), s, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), s, create_graph=True)
        return ((ddu + u) ** 2).mean() + (u[0] - 1).square().sum() + du[0].square().sum()

    opt = sanc.SANC(net.parameters(), preset="robust", minibatch=None, krylov_dim=10, seed=0)
    start = float(opt.step(loss))
    for _ in range(30):
        end = float(opt.step(loss))
    assert end < 0.05 * start

    def backward():
        value = loss()
        value.backward()
        return value

    with pytest.raises(sanc.ArgumentError, match=r"objective called backward\(\)"):
        opt.step(loss, objective=backward)


def test_copies_and_pickles_continue_alike():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(loss_of(model, x, y))
    twin, twin_opt = copy.deepcopy((model, opt))
    opt.step(loss_of(model, x, y))
    twin_opt.step(loss_of(twin, x, y))
    assert torch.equal(flat(model), flat(twin)) and twin_opt.record.rho == opt.record.rho
    assert pickle.loads(pickle.dumps(opt)).record == opt.record


def test_loading_with_other_settings_warns():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", eta1=0.1, seed=0)
    opt.step(loss_of(model, x, y))
    other = sanc.SANC(model.parameters(), preset="paper", seed=0)
    with pytest.warns(UserWarning, match=r"eta1 = 0\.1 and this optimiser has 0\.2"):
        other.load_state_dict(opt.state_dict())
    broken = opt.state_dict()
    del broken["run_state"]["numbers"]
    with pytest.raises(sanc.ArgumentError, match="run_state"):
        other.load_state_dict(broken)


def test_sparse_embeddings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    tokens, y = torch.randint(0, 10, (40, 3)), torch.randint(0, 3, (40,))
    opt = sanc.SANC(model.parameters(), preset="paper", hvp="finite-difference", seed=0)
    start = float(opt.step(loss_of(model, tokens, y)))
    for _ in range(10):
        end = float(opt.step(loss_of(model, tokens, y)))
    assert end < start


# ---------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("hvp", ["double-backward", "forward-over-reverse", "finite-difference"])
def test_micro_batches_do_not_change_the_steps(hvp):
    finals = []
    for microbatch in (None, 7):
        model, x, y = make()

        def loss(a, b, model=model):
            return nn.functional.cross_entropy(model(a), b)

        opt = sanc.SANC(model.parameters(), preset="paper", hvp=hvp, microbatch=microbatch, seed=0)
        for _ in range(4):
            opt.step(sanc.Batch(loss, x, y), hessian=sanc.Batch(loss, x[:31], y[:31]))
        finals.append((flat(model), opt.record))
    assert finals[0][0].numpy() == pytest.approx(finals[1][0].numpy(), abs=1e-7)
    assert finals[0][1].calls == finals[1][1].calls


def test_micro_batches_have_at_most_the_given_number_of_rows():
    model, x, y = make()
    rows = []

    def loss(a, b):
        rows.append(len(a))
        return nn.functional.cross_entropy(model(a), b)

    opt = sanc.SANC(model.parameters(), preset="paper", microbatch=16, seed=0)
    opt.step(sanc.Batch(loss, x, y))
    assert max(rows) == 16 and sum(rows[:4]) == 60


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma0": 0.0}, ["sigma0 = 0.0", "positive"]),
        ({"sigma0": -1.0}, ["sigma0 = -1.0"]),
        ({"sigma0": float("nan")}, ["sigma0 = nan"]),
        ({"sigma0": "1"}, ["sigma0 = '1'", "number"]),
        ({"eta1": 0.9, "eta2": 0.5}, ["eta2 = 0.5", "above eta1 = 0.9"]),
        ({"eta1": 0.0}, ["eta1 = 0.0"]),
        ({"eta2": 1.0}, ["eta2 = 1.0"]),
        ({"gamma": 1.0}, ["gamma = 1.0", "above 1"]),
        ({"krylov_dim": 0}, ["krylov_dim = 0", "≥ 1"]),
        ({"krylov_dim": 2.5}, ["krylov_dim = 2.5", "integer"]),
        ({"L1": -1.0}, ["L1 = -1.0"]),
        ({"lanczos": "keep"}, ["lanczos = 'keep'", "store"]),
        ({"reorthogonalise": True}, ["reorthogonalise = True", "krylov_stop"]),
        ({"sigma_0": 1.0}, ["'sigma_0'", "did you mean 'sigma0'"]),
        ({"krylovdim": 3}, ["'krylovdim'", "did you mean 'krylov_dim'"]),
        ({"presets": "paper"}, ["'presets'", "did you mean 'preset'"]),
        ({"preset": "papr"}, ["preset = 'papr'", "did you mean 'paper'"]),
        ({"hvp": "double_backward"}, ["hvp = 'double_backward'", "did you mean 'double-backward'"]),
        ({"microbatch": 0}, ["microbatch = 0"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"weight_decay": -0.1}, ["weight_decay = -0.1", "≥ 0"]),
        ({"momentum": 1.0}, ["momentum = 1.0"]),
        ({"lr": -0.1}, ["lr = -0.1", "≥ 0"]),
        ({"krylov_dim": None}, ["krylov_dim = None"]),
        ({"microbatch": True}, ["microbatch = True"]),
        ({"preset": ["paper"]}, ["preset = ['paper']"]),
        ({"sigma_ceiling": 1e-9, "sigma_floor": 1.0}, ["sigma_ceiling = 1e-09"]),
    ],
)
def test_errors_name_bad_options(options, words):
    model, _, _ = make()
    with pytest.raises(sanc.SancError) as caught:
        sanc.SANC(model.parameters(), **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], ["params is empty"]),
        (5, ["params = 5", "list"]),
        (torch.ones(3), ["params = tensor", "list"]),
        ([nn.Parameter(torch.ones(2), requires_grad=False)], ["nothing to optimise", "free"]),
        ([nn.Parameter(torch.ones(2).to(torch.float8_e5m2))], ["float8", "autocast"]),
        ([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())], ["one type", "float64"]),
        ([{"params": [nn.Parameter(torch.ones(2))], "lr": "fast"}], ["lr = 'fast'", "≥ 0"]),
        ([{"params": [nn.Parameter(torch.ones(2))], "beta": 0.1}], ["'beta'", "not known"]),
        ([{"params": [nn.Parameter(torch.ones(2))], "frozen": 1}], ["frozen = 1"]),
    ],
)
def test_errors_name_bad_parameters(params, words):
    with pytest.raises(sanc.SancError) as caught:
        sanc.SANC(params)
    for word in words:
        assert word in str(caught.value)


def test_errors_name_bad_closures_and_nothing_changes():
    model, x, y = make()
    good = loss_of(model, x, y)
    draws = iter(range(10**6))

    def called_backward():
        loss = good()
        loss.backward()
        return loss

    cases = [
        ({"closure": lambda: nn.functional.cross_entropy(model(x), y, reduction="none")}, ["shape (60,)", "mean"]),
        ({"closure": lambda: good().item()}, ["returned float", "tensor"]),
        ({"closure": lambda: None}, ["returned NoneType"]),
        ({"closure": good, "hessian": called_backward}, ["hessian called backward()", "in all"]),
        ({"closure": called_backward, "hessian": good}, ["hessian did not call backward()", "in all"]),
        ({"closure": lambda: good().detach()}, ["does not depend on the parameters"]),
        ({"closure": lambda: torch.tensor(1)}, ["int64", "floating-point"]),
        ({"closure": lambda: good() * (1 + next(draws))}, ["at the same parameters", "check=False"]),
        ({"closure": good, "hessian": lambda: good().item()}, ["hessian returned float"]),
        ({"closure": good, "objective": lambda: good().repeat(2)}, ["objective returned", "shape (2,)"]),
        ({"closure": None}, ["closure is missing", "SANC with these settings", "function"]),
        ({"closure": None, "hessian": good}, ["closure is missing", "hessian"]),
        ({"closure": good, "hessian": 3}, ["hessian = 3", "function"]),
    ]
    for given, words in cases:
        opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
        before = snapshot(model, opt)
        with pytest.raises(sanc.SancError) as caught:
            opt.step(**given)
        for word in words:
            assert word in str(caught.value), given
        after = snapshot(model, opt)
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert all(p.grad is None for p in model.parameters())


def test_errors_name_options_that_exclude_each_other():
    model, x, y = make()
    good = loss_of(model, x, y)
    with pytest.raises(sanc.SancError, match=r"microbatch = 8 cannot cut: pass sanc\.Batch"):
        sanc.SANC(model.parameters(), microbatch=8).step(good)
    with pytest.raises(sanc.SancError, match="ARC uses one exact objective"):
        sanc.ARC(model.parameters()).step(good, hessian=good)
    for parameters, word in [((3, x), "cannot be called"), ((good,), "empty"), ((good, x, y[:3]), "as many rows")]:
        with pytest.raises(sanc.SancError, match=word):
            sanc.Batch(*parameters)


@pytest.mark.parametrize("factor", [1.0, 300.0, 600.0])
def test_products_in_half_precision_do_not_overflow(factor):
    """The basis vectors of the Krylov space have norm 1, whatever the norm of products."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(16, 1), torch.randn(64, 16) * torch.logspace(0, -1, 16), torch.randn(64, 1)

    def loss():
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        return factor * ((out.float() - y) ** 2).mean()

    opt = sanc.SANC(model.parameters(), preset="paper", seed=0, krylov_dim=5, hvp="double-backward")
    opt.step(loss)
    assert opt.record.branch is Branch.VERY_SUCCESSFUL and opt.record.krylov_dim == 5


@pytest.mark.parametrize("whose", ["this optimiser", "all optimisers"])
def test_hooks_of_a_step_run_around_it(whose):
    """Hooks may be registered after the first step, and do not run after they are removed."""
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    loss, seen = loss_of(model, x, y), []
    opt.step(loss)
    before = flat(model).clone()

    def pre(who, args, kwargs):
        seen.append(("before", who, args[1], torch.equal(flat(model), before)))

    def post(who, args, kwargs):
        seen.append(("after", who, args[1], torch.equal(flat(model), before)))

    if whose == "this optimiser":
        handles = [opt.register_step_pre_hook(pre), opt.register_step_post_hook(post)]
    else:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]
    opt.step(loss)
    for handle in handles:
        handle.remove()
    opt.step(loss)
    assert seen == [("before", opt, loss, True), ("after", opt, loss, False)]


def test_hooks_run_once_around_a_subclass():
    class Mine(sanc.SCR):
        pass

    model, x, y = make()
    opt, seen = Mine(model.parameters(), preset="paper", seed=0), []
    opt.register_step_pre_hook(lambda *given: seen.append("before"))
    opt.register_step_post_hook(lambda *given: seen.append("after"))
    opt.step(loss_of(model, x, y))
    assert seen == ["before", "after"]


def test_a_pre_hook_may_change_the_arguments():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    right, wrong = loss_of(model, x, y), loss_of(model, x[:3], y[:3])
    handle = opt.register_step_pre_hook(lambda who, args, kwargs: ((who, right), kwargs))
    assert float(opt.step(wrong)) == pytest.approx(opt.record.value)
    handle.remove()
    twin, x, y = make()
    other = sanc.SANC(twin.parameters(), preset="paper", seed=0)
    other.step(loss_of(twin, x, y))
    assert torch.equal(flat(model), flat(twin))


def test_the_profiler_lists_a_step_by_name():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(loss_of(model, x, y))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step(loss_of(model, x, y))
    names = [event.key for event in profile.key_averages()]
    assert names.count("Optimizer.step#SANC.step") == 1


def test_hooks_of_parameters_are_called_with_ordinary_tensors():
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    seen = []
    model.weight.register_hook(lambda g: seen.append(g.is_inference()))
    opt = sanc.SANC(model.parameters(), seed=1, preset="paper", hvp="double-backward")
    for _ in range(3):
        opt.step(lambda: torch.tanh(model(x)).square().mean())
    assert len(seen) > 6 and not any(seen)


@pytest.mark.parametrize("cls", [sanc.SANC, sanc.ARC, sanc.CR, sanc.NCD])
def test_a_state_saved_after_a_batch_of_nan_is_loaded(cls):
    """The gradient that was not finite is not saved: the run continues as without saving and loading."""
    ends = []
    for saves in (True, False):
        model, x, y = make()
        opt = cls(model.parameters(), seed=0, **composed(cls, "paper", L1=2.0, L2=2.0))
        good = loss_of(model, x, y)
        opt.step(good)
        opt.step(lambda: good() * math.nan)
        assert opt.record.branch is Branch.STAYED
        if saves:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        for _ in range(3):
            opt.step(good)
        ends.append(flat(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("name, value", [("lr", math.nan), ("lr", -1.0), ("weight_decay", "a"), ("frozen", "no")])
def test_values_that_a_scheduler_writes_into_a_group_are_checked(name, value):
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.step(loss_of(model, x, y))
    before, state = flat(model), copy.deepcopy(opt.state_dict())
    opt.param_groups[0][name], kept = value, opt.param_groups[0][name]
    with pytest.raises(sanc.ArgumentError, match=name):
        opt.step(loss_of(model, x, y))
    opt.param_groups[0][name] = kept
    assert torch.equal(flat(model), before) and str(opt.state_dict()) == str(state)
    opt.step(loss_of(model, x, y))


def test_a_step_inside_its_own_closure_is_an_error():
    model, x, y = make()
    opt, good = sanc.SANC(model.parameters(), seed=0), loss_of(model, x, y)
    before = flat(model)
    with pytest.raises(sanc.ArgumentError, match=r"calls step\(\)"):
        opt.step(lambda: opt.step(good))
    assert torch.equal(flat(model), before)
    opt.step(good)


def test_a_parameter_may_change_its_shape():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    for _ in range(3):
        opt.step(loss_of(model, x, y))
    model[2].weight.data, model[2].bias.data = torch.zeros(4, 8).double(), torch.zeros(4).double()
    first = [float(opt.step(loss_of(model, x, y))) for _ in range(10)]
    assert first[-1] < first[0]


def test_errors_name_parameters_that_cannot_be_optimised():
    with pytest.raises(sanc.ArgumentError, match="nothing to optimise: all are frozen, empty"):
        sanc.SANC([nn.Parameter(torch.zeros(0))])
    with pytest.raises(sanc.ArgumentTypeError, match=r"params\[0\] has entries that share memory"):
        sanc.SANC([nn.Parameter(torch.zeros(1).expand(4))])


def test_the_default_device_does_not_matter():
    ends = []
    for device in ("cpu", "meta"):
        model, x, y = make()
        opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
        with torch.device(device):
            for _ in range(3):
                opt.step(loss_of(model, x, y))
        ends.append(flat(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("rate", [np.float32(0.5), np.int64(1), torch.tensor(0.5)])
def test_schedulers_may_write_numbers_of_other_kinds(rate):
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    opt.param_groups[0]["lr"] = opt.param_groups[0]["weight_decay"] = rate
    first = [float(opt.step(loss_of(model, x, y))) for _ in range(12)]
    assert first[-1] < first[0] and opt._iteration.rates == [float(rate)] * 4


def test_small_rates_of_all_groups_are_warned_of():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"lr = 0.001 is a factor on the step size"):
        sanc.SANC([{"params": [w], "lr": 1e-3} for w in weights])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sanc.SANC([{"params": [weights[0]], "lr": 1e-3}, {"params": [weights[1]]}])
