"""The three styles of steps: closures that return the loss, closures that call backward(), and no closures."""

from __future__ import annotations

import copy
import io
import math
import pickle
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import sanc
from sanc.lab.authors import AUTHORS
from tensors import flat
from training_styles import batches, drive, network, run


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
        patch.setattr(opt._iteration.averaged_phase, "_step", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            drive("gradients", model, opt, given[15:16])
    assert torch.equal(flat(model), before)
    model[0].requires_grad_(True)
    drive("gradients", model, opt, given[15:])
    drive("gradients", twin, other, given[15:])
    assert torch.equal(flat(model), flat(twin))
