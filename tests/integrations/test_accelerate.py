"""Accelerate: a prepared optimiser with gradients or closures, accumulated gradients, and saved states."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sanc
from tensors import flat

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


def setting(parts=1):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = sanc.SANC(net.parameters(), seed=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(1))
    rows = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3]), batch_size=40 // parts)
    return accelerator, *accelerator.prepare(net, opt, rows, schedule)


def loss(net, rows):
    x, y = rows.dataset.tensors
    with torch.no_grad():
        return float((net(x) - y).square().mean())


def epoch(accelerator, net, opt, rows, schedule, style="gradients"):
    opt.train()
    for x, y in rows:
        with accelerator.accumulate(net):
            if style == "gradients":
                accelerator.backward((net(x) - y).square().mean())
                opt.step()
                opt.zero_grad()  # accelerate clears them after the last accumulated batch only
            else:
                opt.step(lambda x=x, y=y: (net(x) - y).square().mean())
            schedule.step()
    opt.eval()


@pytest.mark.parametrize("style", ["gradients", "loss"])
@pytest.mark.parametrize("evaluating", [True, False])
def test_training_is_saved_and_resumed(style, evaluating, tmp_path):
    accelerator, net, opt, rows, schedule = setting()
    before = loss(net, rows)
    for _ in range(4):
        epoch(accelerator, net, opt, rows, schedule, style)
    assert opt.optimizer.style == style
    average = flat(net)
    if not evaluating:
        opt.train()
        assert torch.equal(average, flat(net)) is (style == "loss")  # with closures nothing is moved
    accelerator.save_state(str(tmp_path))
    for _ in range(4):
        epoch(accelerator, net, opt, rows, schedule, style)
    assert loss(net, rows) < 0.7 * before
    again = setting()
    again[0].load_state(str(tmp_path))
    again[2].eval()
    assert torch.allclose(average, flat(again[1]), rtol=0, atol=1e-6)
    for _ in range(4):
        epoch(*again, style)
    assert torch.allclose(flat(net), flat(again[1]), rtol=0, atol=1e-6)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    ends = []
    for parts in (1, 4):
        accelerator, net, opt, rows, schedule = setting(parts)
        for _ in range(3):
            epoch(accelerator, net, opt, rows, schedule)
        assert opt.optimizer._iteration.state.iteration == 18
        ends.append(flat(net))
    assert torch.allclose(*ends, rtol=0, atol=1e-4)


def test_closures_are_an_error_while_gradients_are_accumulated():
    with pytest.raises(sanc.ArgumentError, match=r"accumulates over 4 batches.*accelerator.backward\(loss\)"):
        epoch(*setting(4), style="loss")
    setting()


def test_closures_of_an_optimiser_that_was_not_prepared_work_beside_an_accelerator():
    """The accelerator accumulates for its own optimiser: in the same loop the other makes the steps of a plain loop."""
    ends = []
    for parts in (None, 4):
        prepared = None if parts is None else setting(parts)
        weights = torch.tensor([0.3, -1.2, 0.8], requires_grad=True)
        opt = sanc.SANC([weights], seed=0)
        for _ in range(3):
            opt.step(lambda weights=weights: (weights**4 - weights**2).sum())
            if prepared is not None:
                epoch(*prepared)
        ends.append(weights.detach())
    setting()
    assert torch.equal(*ends)


def test_gradients_are_clipped():
    accelerator, net, opt, rows, _ = setting()
    x, y = next(iter(rows))
    accelerator.backward((net(x) - y).square().mean())
    accelerator.clip_grad_norm_(net.parameters(), 1e-3)
    opt.step()
    assert opt.optimizer.record.grad_norm == pytest.approx(1e-3, rel=1e-2)
