"""Optimisers after losses, gradients and products that are not finite, exceptions, rejections and at saddles."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from classifier import loss_of, make, snapshot
from preset_options import PRESETS, composed
from sanc import Branch
from tensors import flat


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
        if opt._iteration.has_averaged_phase:  # forms ρ on the gradient sample
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


def test_after_an_exception_at_any_call_of_a_loss_steps_are_those_without_it():
    """In the first averaged steps the loss is evaluated once more after the gradient has updated the metric."""

    def train(fail_at):
        model, x, y = make()
        opt, calls = sanc.SANC(model.parameters(), seed=0), 0
        draw = torch.Generator().manual_seed(0)
        for _ in range(8):
            rows = torch.randint(len(x), (1,), generator=draw)

            def loss(rows=rows):
                nonlocal calls
                calls += 1
                if calls == fail_at + 1:
                    raise KeyboardInterrupt
                return loss_of(model, x[rows], y[rows])()

            try:
                opt.step(loss)
            except KeyboardInterrupt:
                opt.step(loss)
        assert opt.record.branch is Branch.AVERAGED
        return snapshot(model, opt)[0], calls

    whole, calls = train(-1)
    assert all(torch.equal(train(at)[0], whole) for at in range(calls))


@pytest.mark.parametrize("cls", [sanc.SANC, sanc.SCR, sanc.ARC, sanc.CR, sanc.CRM, sanc.NCD])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_zero_gradient_at_a_strict_saddle_is_escaped(cls, preset):
    p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    scale = torch.tensor([-1.0, 0.2, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)

    def closure():
        return 0.5 * (scale * p**2).sum() + 0.25 * (p**4).sum()

    opt = cls([p], seed=0, **composed(cls, preset, L1=4.0, L2=4.0))
    for _ in range(20):
        opt.step(closure)
    assert closure().item() == pytest.approx(-0.25, abs=1e-3)  # at p = (±1, 0, …)


def test_at_a_second_order_point_the_parameters_stay():
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = sanc.SANC([p], preset="paper", seed=0)
    opt.step(lambda: (p**2).sum())
    assert opt.record.branch is Branch.STAYED and torch.equal(p.detach(), torch.zeros(3, dtype=torch.float64))
    assert opt._iteration.stopping_test_holds and opt._iteration.state.sigma == 1.0


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
