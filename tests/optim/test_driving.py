"""The three styles of steps: closures that return the loss, closures that call backward(), and no closures."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from contextlib import nullcontext
from dataclasses import fields
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.checkpoint import checkpoint

import sanc
from driving import drive, flat
from sanc.lab.authors import AUTHORS
from sanc.optim import optimizers


def network(kind="plain"):
    torch.manual_seed(0)
    middle = [nn.Dropout(0.3)] if kind == "dropout" else [nn.BatchNorm1d(8)] if kind == "norm" else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 1)).double()


def batches(count, size=20):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, dtype=torch.float64, generator=generator)
    y = x.prod(1, keepdim=True) + 0.1 * torch.randn(400, 1, dtype=torch.float64, generator=generator)
    return [(x[rows], y[rows]) for rows in torch.randint(400, (count, size), generator=generator)]


def run(style, steps=30, kind="plain", **options):
    model = network(kind)
    opt = sanc.SANC(model.parameters(), seed=0, **options)
    drive(style, model, opt, batches(steps))
    opt.eval()
    return model, opt


@pytest.mark.parametrize("style", ["backward", "gradients"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01}, {"metric": "diagonal"}, {"averaging": 0.0}], ids=str)
def test_averaged_steps_are_the_same_in_all_styles(style, options):
    model, opt = run("loss", curvature=False, **options)
    other, twin = run(style, curvature=False, **options)
    assert torch.allclose(flat(model), flat(other), rtol=0, atol=1e-10)
    assert (opt.record.style, twin.record.style) == ("loss", style)
    assert twin.record.sigma == pytest.approx(opt.record.sigma, rel=1e-6)


@pytest.mark.parametrize("kind", ["plain", "dropout", "norm"])
def test_products_of_a_closure_with_backward_are_differences_of_gradients(kind):
    """On one batch, second-order steps reach nearly the loss of exact products; masks and buffers are held fixed."""
    ends = []
    for style in ("loss", "backward"):
        model = network(kind)
        opt = sanc.SANC(model.parameters(), seed=0, check=kind != "dropout")
        data = batches(1, size=200) * 12
        drive(style, model, opt, data)
        a, b = data[0]
        ends.append(float((model.eval()(a) - b).square().mean().detach()))
    assert opt.record.hvp == "finite-difference" and opt.record.calls.product > 0
    assert ends[1] == pytest.approx(ends[0], rel=0.05)
    if kind == "norm":
        assert int(model[1].num_batches_tracked) == 12


def test_gradients_may_be_clipped_in_a_closure():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    for a, b in batches(3):

        def closure(a=a, b=b):
            opt.zero_grad()
            loss = (model(a) - b).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            return loss

        opt.step(closure)
        assert opt.record.grad_norm == pytest.approx(1e-3, rel=1e-3)


def test_train_and_eval_move_between_the_two_points():
    model, opt = run("gradients")
    average = flat(model)
    state = opt._iteration.state
    opt.train()
    assert torch.allclose(
        flat(model), average + (1 - opt._iteration.settings.average.averaging) * state.offset, rtol=0, atol=1e-12
    )
    opt.train()
    opt.eval()
    assert torch.allclose(flat(model), average, rtol=0, atol=1e-12)
    a, b = batches(1)[0]
    (model(a) - b).square().mean().backward()
    with pytest.raises(sanc.ArgumentError, match=r"eval\(\): call train\(\)"):
        opt.step()
    model, opt = run("loss")
    held = flat(model)
    opt.train()
    assert torch.equal(held, flat(model))  # with closures nothing is moved
    new = sanc.SANC(model.parameters(), seed=0)
    new.eval()
    new.step(lambda: (model(a) - b).square().mean())  # and a step needs neither call


def test_a_gradient_that_is_not_finite_is_skipped():
    model, opt = run("gradients", steps=30)
    opt.train()
    held = flat(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    opt.step()
    assert torch.equal(held, flat(model)) and "not finite" in opt.record.note
    assert math.isnan(opt.record.value)


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_run_resumes_bit_for_bit(style, evaluating):
    data = batches(45)
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    drive(style, model, opt, data[:25])
    if evaluating:
        opt.eval()
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = network()
    other.load_state_dict(weights)
    twin = sanc.SANC(other.parameters(), seed=1)
    twin.load_state_dict(state)
    assert twin.style == style
    for net, mine in ((model, opt), (other, twin)):
        drive(style, net, mine, data[25:])
        mine.eval()
    assert torch.equal(flat(model), flat(other))
    assert copy.deepcopy(twin).style == style


@pytest.mark.parametrize(("first", "second", "words"), [
    ("loss", "backward", "called backward.*do one of the two"),
    ("loss", "gradients", "closure is missing: earlier steps"),
    ("backward", "loss", "did not call backward"), ("backward", "gradients", "closure is missing: earlier steps"),
    ("gradients", "loss", "closure cannot be used: earlier steps had none"),
])  # fmt: skip
def test_styles_cannot_be_mixed(first, second, words):
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    drive(first, model, opt, batches(3))
    with pytest.raises(sanc.ArgumentError, match=words):
        drive(second, model, opt, batches(1))
    opt.zero_grad()
    drive(first, model, opt, batches(3))  # the failed step changed nothing
    assert opt._iteration.state.iteration == 6


@pytest.mark.parametrize(("cls", "options"), [
    (sanc.SANC, {"preset": "paper"}), (sanc.SANC, {"preset": AUTHORS}), (sanc.ARC, {}), (sanc.CR, {}),
    (sanc.SANC, {"minibatch": None}),
])  # fmt: skip
def test_methods_without_an_averaged_phase_need_a_closure(cls, options):
    model = network()
    opt = cls(model.parameters(), seed=0, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(sanc.ArgumentError, match=r"closure is missing.*needs values and Hessian products"):
        opt.step()


def test_a_step_without_closure_and_gradients_is_an_error():
    opt = sanc.SANC(network().parameters(), seed=0)
    with pytest.raises(sanc.ArgumentError, match=r"no parameter has a gradient: call loss.backward\(\)"):
        opt.step()
    assert opt.style == ""


def test_an_empty_closure_counts_as_none():
    """Frameworks pass one if the user passed none; changes that it makes to the gradients are kept."""
    ends = []
    for closure in (None, lambda: None):
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0)
        for a, b in batches(5):
            opt.train()
            opt.zero_grad()
            (model(a) - b).square().mean().backward()
            opt.step(closure)
        ends.append(flat(model))
    assert torch.equal(*ends) and opt.style == "gradients"
    opt.step(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3) and None)
    assert opt.record.grad_norm <= 1.01e-3
    with pytest.raises(sanc.ArgumentError, match="earlier steps had none"):
        opt.step(lambda: model(a).mean())


def test_a_closure_may_clear_gradients_from_before_the_step():
    """As for LBFGS; for example in a GAN, where the backward pass of the other network leaves gradients."""
    model, other = network(), network()
    opt, twin = (sanc.SANC(net.parameters(), seed=0) for net in (model, other))
    for data in batches(3):
        other(torch.ones(3, 4).double()).sum().backward()
        held = [p.grad.clone() for p in other.parameters()]
        drive("backward", model, opt, [data])
        drive("backward", other, twin, [data])
        assert all(torch.equal(a, p.grad) for a, p in zip(held, other.parameters(), strict=True))
    assert torch.equal(flat(model), flat(other)) and twin.style == "backward"


def test_gradients_of_an_earlier_loop_do_not_change():
    model = network()
    first = torch.optim.Adam(model.parameters())
    (model(batches(1)[0][0])).sum().backward()
    first.step()
    held = [p.grad for p in model.parameters()]
    opt = sanc.SANC(model.parameters(), seed=0)
    drive("loss", model, opt, batches(2))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))


@pytest.mark.parametrize("style", ["loss", "backward", "batch"])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_a_closure_would_not_use_are_an_error(style, first):
    """Gradients may have been clipped, or accumulated over batches, before the step evaluates its closure again."""
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    (a, b), (c, d) = batches(2)

    def loss(a=a, b=b):
        return (model(a) - b).square().mean()

    def backward():
        value = loss()
        value.backward()
        return value

    closure = {"loss": loss, "backward": backward, "batch": sanc.Batch(loss, a, b)}[style]
    if not first:
        opt.step(closure)
        opt.zero_grad()
    loss(c, d).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    at, held = flat(model), [p.grad.clone() for p in model.parameters()]
    with pytest.raises(sanc.ArgumentError, match=r"hold gradients from before.*clip_grad_norm_\(\) inside the closure"):
        opt.step(closure)
    assert torch.equal(at, flat(model)) and all(map(torch.equal, held, (p.grad for p in model.parameters())))
    opt.zero_grad(set_to_none=False)  # zero gradients are accepted
    opt.step(closure)


# ---------------------------------------------------------------------------------------------- scaled gradients


def test_scaled_gradients_without_a_closure():
    """A GradScaler divides them by its scale before the step, and skips steps if they are not finite."""
    ends = []
    for scaled in (False, True):
        model = network().float()
        opt, scaler = sanc.SANC(model.parameters(), seed=0), torch.amp.GradScaler("cpu", enabled=scaled)
        for k, (a, b) in enumerate(batches(20)):
            opt.zero_grad()
            scaler.scale((model(a.float()) - b.float()).square().mean()).backward()
            if scaled and k == 10:
                model[0].weight.grad[0, 0] = math.inf
            if scaled or k != 10:
                scaler.step(opt)
            scaler.update()
        assert opt._driver.iteration.state.iteration == 19
        ends.append(flat(model))
    assert torch.allclose(*ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_scaled_gradients_in_a_closure_are_an_error(check):
    """The returned loss is not the loss that was differentiated."""
    model, scaler = network().float(), torch.amp.GradScaler("cpu")
    opt = sanc.SANC(model.parameters(), seed=0, check=check)
    a, b = (t.float() for t in batches(1)[0])

    def closure():
        opt.zero_grad()
        loss = (model(a) - b).square().mean()
        scaler.scale(loss).backward()
        return loss

    if not check:
        opt.step(closure)
        return
    at = flat(model)
    with pytest.raises(sanc.ArgumentError, match=r"called backward.. on .* and returned .*scaler.step\(opt\)"):
        opt.step(closure)
    assert torch.equal(at, flat(model)) and opt.style == ""
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(opt, closure=closure)


@pytest.mark.parametrize(("scale", "clip"), [(2.0**16, None), (2.0**16, 0.1), (2.0**127, None)])
def test_a_closure_may_scale_gradients_and_divide_them_again(scale, clip):
    """The steps are those without a scaler; a scale that overflows is lowered before the first step."""
    ends = []
    for scaled in (False, True):
        model = network().float()
        opt = sanc.SANC(model.parameters(), seed=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scaled)
        for a, b in ((a.float(), b.float()) for a, b in batches(20)):

            def closure(a=a, b=b, model=model, opt=opt, scaler=scaler):
                opt.zero_grad()
                loss = 100.0 * (model(a) - b).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                if scaler.is_enabled():
                    scaler.update()
                return loss

            opt.step(closure)
        assert opt.style == "backward" and math.isfinite(opt.record.grad_norm)
        ends.append(flat(model))
    assert scaler.get_scale() <= 2.0**126
    assert torch.allclose(*ends, rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["a part of the loss", "clipped to 1000", "clipped to 1", "clipped to 0.01"])
def test_gradients_of_another_norm_in_a_closure_are_an_error(how):
    """The gradients are not divided by the factor on the loss."""
    model = network().float()
    opt = sanc.SANC(model.parameters(), seed=0)
    a, b = (t.float() for t in batches(1)[0])

    def closure():
        opt.zero_grad()
        loss = (model(a) - b).square().mean()
        if how == "a part of the loss":
            (loss / 4).backward()
        else:
            (65536.0 * loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), float(how.split()[-1]))
        return loss

    with pytest.raises(sanc.ArgumentError, match=r"called backward.. on .*unscale_\(opt\) and scaler.update\(\)"):
        opt.step(closure)


def test_a_loss_of_nan_is_an_error_after_few_calls():
    model = network().float()
    opt, calls = sanc.SANC(model.parameters(), seed=0), []

    def closure():
        opt.zero_grad()
        calls.append(0)
        loss = (model(batches(1)[0][0].float())).square().mean() * math.nan
        loss.backward()
        return loss

    for _ in range(9):  # a later batch may be finite
        opt.step(closure)
    with pytest.raises(sanc.NonFiniteStartError, match="each of 10 batches"):
        opt.step(closure)
    assert len(calls) < 40


@pytest.mark.parametrize("how", ["parts", "weighted", "near zero", "function"])
def test_a_closure_may_differentiate_its_loss_in_parts(how):
    """Only a loss of another value is an error: not one near zero in low precision, nor one in parts."""
    model = network().float()
    opt = sanc.SANC(model.parameters(), seed=0)
    a, b = (t.float() for t in batches(1)[0])

    def closure():
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "near zero"):
            loss = (model(a) - b).square().mean()
            if how == "near zero":  # as of a critic, whose value is mostly roundoff
                loss = 100.0 * (loss - loss.detach())
        if how == "parts":
            halves = loss / 2, loss / 2
            halves[0].backward(retain_graph=True)
            halves[1].backward()
        elif how == "weighted":
            (2.0 * loss).backward(gradient=torch.tensor(0.5))
        elif how == "function":
            torch.autograd.backward(loss)
        else:
            loss.backward()
        return loss.detach()

    opt.step(closure)
    assert opt.style == "backward"


# ---------------------------------------------------------------------------------------------- unused parameters


class Branches(nn.Module):
    """A network whose loss depends on some of its layers only."""

    def __init__(self):
        super().__init__()
        self.used, self.spare, self.fixed = (nn.Linear(4, 1).double() for _ in range(3))
        self.fixed.requires_grad_(False)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.parametrize("named", [True, False])
def test_a_warning_names_parameters_that_the_loss_does_not_reach_once(style, named):
    model = Branches()
    opt = sanc.SANC(model.named_parameters() if named else [{"params": model.parameters()}], seed=0)
    with pytest.warns(UserWarning, match="does not reach") as seen:
        drive(style, model, opt, batches(3))
    assert len(seen) == 1 and seen[0].filename.endswith("driving.py")  # the file that calls step()
    text = str(seen[0].message)
    places = ["'spare.weight'", "'spare.bias'"] if named else ["2", "3"]
    assert f"params[{places[0]}] of shape (1, 4), params[{places[1]}] of shape (1,): check" in text
    assert "used" not in text and "fixed" not in text


def test_no_warning_names_frozen_parameters(recwarn):
    model = Branches()
    model.spare.requires_grad_(False)
    opt = sanc.SANC(model.parameters(), seed=0)
    drive("loss", model, opt, batches(2))
    model.spare.requires_grad_(True)
    groups = [{"params": model.used.parameters()}, {"params": model.spare.parameters(), "frozen": True}]
    drive("backward", model, sanc.SANC(groups, seed=0), batches(2))
    assert not [w for w in recwarn if "reach" in str(w.message)]


def test_a_closure_that_returns_no_loss_is_an_error():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    model(torch.ones(3, 4).double()).sum().backward()

    def closure():
        opt.zero_grad()
        model(torch.ones(3, 4).double()).sum().backward()

    with pytest.raises(sanc.ArgumentTypeError, match="closure returned NoneType"):
        opt.step(closure)


def test_a_step_of_zeros_changes_nothing():
    """torch.distributed.checkpoint makes such a step if it finds no states, with lr = 0."""
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    assert opt.style == "" and opt.record is None


def test_a_state_without_its_vectors_is_an_error():
    model, opt = run("gradients", steps=5)
    state = opt.state_dict()
    state["state"] = {}
    with pytest.raises(sanc.ArgumentError, match=r"\['state'\] has 0 parameters instead of 4"):
        sanc.SANC(model.parameters()).load_state_dict(state)


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
def test_autocast_around_a_step_holds_in_the_closure_alone(style):
    """Averaged steps, whose metric multiplies matrices, are the same as with autocast around the loss only."""
    ends = []
    for around in (True, False):
        model = network().float()
        opt = sanc.SANC(model.parameters(), seed=0)

        def forward(x, model=model, around=around):
            assert torch.is_autocast_enabled("cpu") is around or style == "gradients"
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        with torch.autocast("cpu", torch.bfloat16) if around else nullcontext():
            drive(style, forward, opt, [(a.float(), b.float()) for a, b in batches(12)])
        assert opt._iteration.state.averaged  # steps are averaged
        ends.append(flat(model))
    assert torch.allclose(*ends, rtol=0, atol=1e-6)


def test_groups_may_have_entries_of_frameworks():
    model = network()
    groups = [{"params": list(model.named_parameters()), "name": "all", "initial_lr": 1.0}]
    opt = sanc.SANC(groups, seed=0)
    lr_scheduler.StepLR(opt, 10, last_epoch=5)
    lr_scheduler.OneCycleLR(opt, 1.0, total_steps=60, cycle_momentum=False)
    SWALR(opt, swa_lr=0.5)
    other = sanc.SANC(network().parameters())
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["name"] == "all" and "run_state" not in other.param_groups[0]
    with pytest.raises(sanc.ArgumentError, match="group option 'betas'"):
        sanc.SANC([{"params": model.parameters(), "betas": (0.9, 0.99)}])


def test_exact_products_need_a_closure_without_backward():
    model = network()
    opt = sanc.SANC(model.parameters(), hvp="double-backward", seed=0)
    with pytest.raises(sanc.ArgumentError, match="hvp = 'double-backward' cannot be used"):
        drive("backward", model, opt, batches(1))
    drive("loss", model, opt, batches(2))  # the failed step did not fix the style
    assert opt.style == "loss"


def test_repr_and_record_show_the_style():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    assert "not driven yet" in repr(opt)
    drive("backward", model, opt, batches(1))
    assert "call backward()" in repr(opt) and opt.record.style == opt.style == "backward"


# ---------------------------------------------------------------------------------------------- lr


def test_lr_is_a_factor_on_the_scale():
    model, _ = run("loss", curvature=False, distance=0.0, scale=0.004)
    other, _ = run("loss", curvature=False, distance=0.0, scale=0.008, lr=0.5)
    assert torch.allclose(flat(model), flat(other), rtol=0, atol=1e-12)
    with pytest.warns(UserWarning, match=r"lr = 0.001 is a factor.*leave it at 1"):
        sanc.SANC(network().parameters(), lr=1e-3)


def test_schedulers_attach():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    for a, b in batches(40):
        opt.step(lambda a=a, b=b: (model(a) - b).square().mean())
        schedule.step()
    before = flat(model)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    z = before + opt._iteration.state.offset
    drive("loss", model, opt, batches(1))
    assert torch.allclose(flat(model) + opt._iteration.state.offset, z, rtol=0, atol=1e-12)  # z does not move


@pytest.mark.parametrize("style", ["loss", "gradients"])
@pytest.mark.parametrize("schedule", [
    lambda opt: lr_scheduler.StepLR(opt, 5, 0.2), lambda opt: lr_scheduler.CosineAnnealingLR(opt, 15),
    lambda opt: SWALR(opt, swa_lr=0.02, anneal_epochs=8), lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    lambda opt: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=24, cycle_momentum=False),
], ids=["step", "cosine", "swa", "exponential", "one cycle"])  # fmt: skip
def test_the_lr_of_schedulers_is_a_factor_on_the_step_size(schedule, style):
    """The rates are those of another optimiser with lr = 1, and steps are the same as with rates set by hand."""
    model, other = network(), network()
    opt, twin = (sanc.SANC(net.parameters(), seed=0, curvature=False) for net in (model, other))
    reference = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    mine, theirs = schedule(opt), schedule(reference)
    for data in batches(16):
        twin.param_groups[0]["lr"] = reference.param_groups[0]["lr"]
        assert opt.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
        drive(style, model, opt, [data])
        drive(style, other, twin, [data])
        reference.step()
        mine.step()
        theirs.step()
    assert torch.equal(flat(model), flat(other))
    plain, _ = run(style, 16, curvature=False)
    opt.eval()
    assert not torch.allclose(flat(plain), flat(model))  # the rates have an effect


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.parametrize(("factors", "warned_at"), [
    ([0.0004, 0.001, 0.001, 0.0008, 0.0001], 4), ([0.25] * 6, 5), ([0.001, 0.1, 0.3, 0.6, 0.1, 0.1], None),
    ([1.0, 0.1, 0.01], None), ([0.001] * 5, 4), ([0.001, 0.01, 0.01, 0.01, 0.6], None), ([0.3] * 4 + [0.6], None),
], ids=["one cycle", "constant", "warm-up", "decay", "constant of Adam", "stairs", "high stairs"])  # fmt: skip
def test_a_schedule_whose_peak_is_small_is_warned_of_once(factors, warned_at, style, monkeypatch, recwarn):
    """Constant rates of Adam are detected before the end of the longest warm-up, unless the rate rises before."""
    monkeypatch.setattr(optimizers, "_MAX_WARM_UP_STEPS", 5)
    monkeypatch.setattr(optimizers, "_STEPS_WITHOUT_RISE", 3)
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    warned = []
    for step, (factor, data) in enumerate(zip(factors, batches(len(factors)), strict=True), 1):
        opt.param_groups[0]["lr"] = factor
        drive(style, model, opt, [data])
        warned += [step] if recwarn else []
        for warning in recwarn.list:
            text = f"lr was at most {max(factors):g} in {step} steps.*Let the schedule rise to 1"
            assert re.match(text, str(warning.message)) and warning.filename == drive.__code__.co_filename
        recwarn.clear()
    assert warned == ([] if warned_at is None else [warned_at])


@pytest.mark.parametrize(("final", "is_warned"), [(1.0, False), (0.05, True)])
def test_a_warm_up_that_rises_once_an_epoch_is_not_warned_of(final, is_warned, monkeypatch, recwarn):
    monkeypatch.setattr(optimizers, "_STEPS_WITHOUT_RISE", 3)
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    opt.param_groups[0]["lr"] = final
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: (epoch + 1) / 20)
    for _ in range(2):
        drive("loss", model, opt, batches(5))
        schedule.step()
    assert [str(w.message)[:20] for w in recwarn] == (["lr was at most 0.002"] if is_warned else [])


@pytest.mark.parametrize(("lr", "is_warned"), [(1e-8, True), (0.0, False), (1e-4, False)])
@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_the_first_step_of_a_search_for_a_learning_rate_is_warned_of(style, lr, is_warned, recwarn):
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    opt.param_groups[0] |= {"lr": lr, "initial_lr": lr}
    for k, data in enumerate(batches(20)):
        drive(style, model, opt, [data])
        opt.param_groups[0]["lr"] = (1e-8 + lr) * 3.0**k
    words = "lr = 1e-08 in the first step, as in a search.*such as lr_find: leave the search out"
    assert [bool(re.match(words, str(warning.message))) for warning in recwarn] == [True] * is_warned


def test_each_group_has_its_factor():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    opt = sanc.SANC(groups, seed=0, curvature=False)
    held = model[0].weight.detach().clone()
    drive("loss", model, opt, batches(30))
    assert torch.equal(held, model[0].weight) and not torch.equal(network()[2].weight, model[2].weight)


# ---------------------------------------------------------------------------------------------- mistakes and logs


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
def test_a_loss_of_another_model_is_an_error(style):
    model, other = network(), network()
    opt = sanc.SANC(model.parameters(), seed=0)
    held = flat(model)
    with pytest.raises(
        sanc.ArgumentError, match=r"reaches none of|did not call backward|no parameter has a gradient|depend"
    ):
        drive(style, other, opt, batches(1))
    assert torch.equal(held, flat(model)) and opt.style == ""
    drive(style, model, opt, batches(2))
    assert opt.style == style


def reentrant(model, x):
    """Run all layers but the last in a reentrant checkpoint, which cuts the graph to their weights."""
    return model[-1](checkpoint(model[:-1], x, use_reentrant=True))


@pytest.mark.parametrize("style", ["backward", "gradients"])
def test_reentrant_checkpoints_need_ordinary_backward_passes(style):
    ends = []
    for within in (False, True):
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0)
        forward = partial(reentrant, model) if within else model
        drive(style, lambda x, forward=forward: forward(x.requires_grad_()), opt, batches(8))
        ends.append(flat(model))
    assert torch.allclose(*ends, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("needs", [True, False])
def test_a_reentrant_checkpoint_cuts_the_graph_of_a_returned_loss(needs):
    """A warning names the hidden parameters; if all are hidden, the first step is an error."""
    model = network()
    (x, y), *_ = batches(1)
    x.requires_grad_(needs)
    with pytest.raises(sanc.ArgumentError, match=r"reaches none of .*a reentrant checkpoint"):
        sanc.SANC(model[:-1].parameters()).step(lambda: (reentrant(model, x) - y).square().mean())
    with pytest.warns(UserWarning, match=r"does not reach params\[0\] .*, params\[1\] of shape \(8,\): check"):
        sanc.SANC(model.parameters()).step(lambda: (reentrant(model, x) - y).square().mean())


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.filterwarnings("ignore:the loss of the first step does not reach")  # the last bias
def test_torch_func_inside_a_loss(style):
    """A derivative with respect to the input, as in physics-informed networks: by `torch.func` and by `autograd`."""
    ends = []
    for by_func in (True, False):
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0)

        def derivative(x, model=model, by_func=by_func):
            if by_func:
                return torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x).sum(1, keepdim=True)
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum(1, keepdim=True)

        drive(style, derivative, opt, batches(8))
        ends.append(flat(model))
    assert torch.allclose(*ends, rtol=0, atol=1e-10 if style != "backward" else 1e-5)


def test_as_dict_of_a_record_has_numbers_only():
    _, opt = run("loss", steps=3)
    numbers = opt.record.as_dict()
    assert all(type(value) in (int, float) for value in numbers.values())
    left = {field.name for field in fields(opt.record)} - set(numbers)
    assert left == {"branch", "calls", "note", "hvp", "style"}
    assert numbers["sigma"] == opt.record.sigma and numbers["calls.gradient"] == opt.record.calls.gradient


@pytest.mark.filterwarnings("ignore:the optimiser was pickled or copied in train mode")
@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_a_pickled_optimiser_continues_as_the_original(style):
    """Parts of the metric that share memory still share it; the bases are refreshed several times here."""
    given = batches(60)
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    drive(style, model, opt, given[:20])
    twin, other = pickle.loads(pickle.dumps((model, opt)))
    drive(style, model, opt, given[20:])
    drive(style, twin, other, given[20:])
    assert torch.equal(flat(model), flat(twin))


def test_parameters_frozen_between_steps_stay_at_the_average():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    drive("gradients", model, opt, batches(40))
    opt.eval()
    average = model[0].weight.detach().clone()
    opt.train()
    assert not torch.equal(model[0].weight, average)
    model[0].requires_grad_(False)
    drive("gradients", model, opt, batches(1))
    opt.eval()
    assert torch.allclose(model[0].weight, average, rtol=0, atol=1e-14)


def test_every_gradient_without_a_closure_is_counted_once():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    drive("gradients", model, opt, batches(5))
    assert opt.record.calls == sanc.Calls(gradient=5, paper_calls=5)


def test_a_parameter_may_change_its_shape_without_closures():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    drive("gradients", model, opt, batches(12))
    model[0].weight.data = torch.ones(8, 3).double()
    drive("gradients", model, opt, [(a[:, :3], b) for a, b in batches(12)])
    assert opt.record.iteration == 23


def test_an_exception_in_a_step_without_closures_changes_nothing(monkeypatch):
    """The set of parameters has changed, so that the step moves them to the average before it fails."""
    model, twin = network(), network()
    opt, other = sanc.SANC(model.parameters(), seed=0), sanc.SANC(twin.parameters(), seed=0)
    given = batches(20)
    drive("gradients", model, opt, given[:15])
    drive("gradients", twin, other, given[:15])
    before = flat(model).clone()
    model[0].requires_grad_(False)

    def fails(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(opt._iteration, "_averaged_step", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            drive("gradients", model, opt, given[15:16])
    assert torch.equal(flat(model), before)
    model[0].requires_grad_(True)
    drive("gradients", model, opt, given[15:])
    drive("gradients", twin, other, given[15:])
    assert torch.equal(flat(model), flat(twin))


def test_a_closure_may_keep_its_losses_and_use_graphs_of_other_modules():
    """Only graphs of the parameters of this optimiser have to be new in every call."""
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    fake, kept = generator(torch.randn(8, 3)), []
    opt = sanc.SANC(critic.parameters(), seed=0)

    def closure():
        kept.append(critic(fake).square().mean() + critic.weight.square().sum())
        return kept[-1]

    for _ in range(3):
        opt.step(closure)
    assert len(kept) > 3 and kept[-1] < kept[0]
