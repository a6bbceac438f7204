"""The optimisers as `torch.optim.Optimizer`: steps, resuming, parameter groups, micro-batches and hooks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import random
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from classifier import FAMILY, closures, loss_of, make
from preset_options import PRESETS, composed
from sanc import Branch
from tensors import flat


@pytest.mark.parametrize("cls", FAMILY)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_member_lowers_the_loss(cls, preset):
    model, x, y = make()
    opt = cls(model.parameters(), seed=1, **composed(cls, preset, L1=2.0, L2=2.0))
    closure = loss_of(model, x, y)
    first = float(opt.step(closure))
    for _ in range(30 if cls is sanc.NCD else 12):
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

    best = min((minimize(m, s * np.random.default_rng(k).standard_normal(5), tol=1e-14) for k in range(5)
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
    steps = 15 if on_samples else 6

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


# --------------------------------------------------------------------------------------------- memory and precision


@pytest.mark.parametrize("hvp", ["double-backward", "forward-over-reverse"])
@pytest.mark.parametrize("count", [10, pytest.param(500, marks=pytest.mark.slow)])
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

    steps(5)
    tensors, peak = live(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps(count)
    assert live() <= tensors + 2
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * unit < 50e6


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


# --------------------------------------------------------------------------------------------- hooks and schedules


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


def test_a_parameter_may_change_its_shape():
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    for _ in range(3):
        opt.step(loss_of(model, x, y))
    model[2].weight.data, model[2].bias.data = torch.zeros(4, 8).double(), torch.zeros(4).double()
    first = [float(opt.step(loss_of(model, x, y))) for _ in range(10)]
    assert first[-1] < first[0]


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
    assert first[-1] < first[0] and opt._driver.last_leaves.rates == [float(rate)] * 4
    assert opt._iteration.state.peak_lr == float(rate)
