"""`lr` as a factor on the step size: schedules, groups, and warnings of values that were meant for other optimisers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import sanc
from sanc.optim import lr_warnings
from tensors import flat
from training_styles import batches, drive, network, run


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
    lambda opt: lr_scheduler.StepLR(opt, 5, 0.02), lambda opt: lr_scheduler.CosineAnnealingLR(opt, 15),
    lambda opt: SWALR(opt, swa_lr=2e-4, anneal_epochs=8), lambda opt: lr_scheduler.ExponentialLR(opt, 0.5),
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
    monkeypatch.setattr(lr_warnings, "_MAX_WARM_UP_STEPS", 5)
    monkeypatch.setattr(lr_warnings, "_STEPS_WITHOUT_RISE", 3)
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
    monkeypatch.setattr(lr_warnings, "_STEPS_WITHOUT_RISE", 3)
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
