"""What a closure may do in a step, and errors for what it may not: gradients, scaling, autograd and losses."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sanc
from tensors import flat
from training_styles import batches, drive, network


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
    assert len(seen) == 1 and seen[0].filename.endswith("training_styles.py")  # the file that calls step()
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
