"""Learning-rate schedules, the schedule of refreshes, and results that are read late."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import sanc
from sanc.minibatch.averaged_phase import AveragedPhase
from sanc.minibatch.averaging import HostCopy
from sanc.minibatch.metrics.base import due_parts
from sanc.minibatch.step_size import rate_factor
from tensors import flat


def trained(steps, rate=lambda k: 1.0, *, closures=False, read=lambda opt, k: None):
    """Train a small network with `lr` = rate(k) in step k, and return its average and the optimiser."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    rng = torch.Generator().manual_seed(1)
    for k in range(steps):
        x = torch.randn(16, 5, generator=rng, dtype=torch.float64)
        opt.param_groups[0]["lr"] = rate(k)

        def loss(x=x):
            return (model(x) - x[:, :2].sin()).square().mean()

        if closures:
            opt.step(loss)
        else:
            opt.zero_grad()
            loss().backward()
            opt.step()
        read(opt, k)
    opt.eval()
    return flat(model), opt


@pytest.mark.parametrize("closures", [False, True])
def test_a_decay_acts_only_near_zero(closures):
    constant, _ = trained(60, closures=closures)
    to_a_hundredth, _ = trained(60, lambda k: 1.0 - 0.99 * k / 60, closures=closures)
    to_zero, _ = trained(60, lambda k: 0.5 * (1.0 + math.cos(math.pi * k / 59)), closures=closures)
    assert torch.equal(to_a_hundredth, constant)
    assert not torch.equal(to_zero, constant)


def test_a_peak_is_restored_with_the_state():
    _, opt = trained(40)
    saved = opt.state_dict()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    other = sanc.SANC(model.parameters(), seed=0, curvature=False)
    other.load_state_dict(saved)
    assert other._iteration.state.peak_lr == 1.0


def test_the_factor_of_a_rate_follows_a_warm_up_and_the_end_of_a_decay():
    assert rate_factor(0.2, 0.2) == 0.2  # the rate has not been larger so far
    assert rate_factor(0.5, 2.0) == 2.0
    assert rate_factor(0.0015, 1.0) == pytest.approx(0.5)
    assert rate_factor(0.0, 1.0) == 0.0


def test_each_part_is_refreshed_once_in_an_interval():
    assert [k for k in range(1, 10) if due_parts(k, 10, 3)] == [1, 2, 4, 8]
    assert due_parts(4, 10, 3) == [0, 1, 2]
    for begin, interval in ((10, 10), (990, 10), (1000, 20), (2000, 40), (4000, 80)):
        steps = range(begin, begin + interval)
        refreshed = [part for k in steps for part in due_parts(k, 10, 3)]
        assert sorted(refreshed) == [0, 1, 2]
        assert max(len(due_parts(k, 10, 3)) for k in steps) == 1
    assert sorted(part for k in range(20, 30) for part in due_parts(k, 10, 25)) == list(range(25))


@pytest.mark.parametrize("changes", [False, True])
def test_results_that_are_read_late_change_no_step(monkeypatch, changes):
    """Against the same loop that reads them at once, also if a state is saved in between."""
    records = []

    def read(opt, k):
        if k == 30 and changes:
            opt.state_dict()  # reads the results, too
        if k in (29, 49):
            records.append((opt.record.grad_norm, opt.record.sigma, opt.record.step_norm, opt.record.calls.gradient))

    late, _ = trained(50, read=read)
    monkeypatch.setattr(AveragedPhase, "_can_read_later", lambda self, state, oracle: False)
    at_once, _ = trained(50, read=read)
    assert torch.equal(late, at_once)
    assert records[:2] == records[2:] and records[0] != records[1]


def test_a_step_without_closures_does_not_read_its_results(monkeypatch):
    """On a GPU the host would wait for the device; they are read in the next step."""
    p = nn.Parameter(torch.randn(6, 4))
    opt, events = sanc.SANC([p], seed=0), []
    read, written = HostCopy.read, HostCopy.__init__
    monkeypatch.setattr(HostCopy, "read", lambda self: events.append("read") or read(self))
    monkeypatch.setattr(HostCopy, "__init__", lambda self, t: events.append("copy") or written(self, t))
    for k in range(40):
        p.grad = torch.randn(6, 4)
        opt.step()
        assert k < 30 or events[-1] == "copy"
    assert events[-6:] == ["read", "copy"] * 3


def test_a_gradient_that_is_not_finite_changes_nothing_if_it_is_read_late():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    opt = sanc.SANC([p], seed=0)
    for _ in range(30):
        p.grad = p.detach() + 0.1 * torch.randn(6, 4, dtype=torch.float64)
        opt.step()
    before = p.detach().clone()
    p.grad = torch.full_like(p, math.nan)
    opt.step()
    assert torch.allclose(p, before, rtol=1e-14)
    assert opt.record.branch == "stayed" and "not finite" in opt.record.note
    p.grad = p.detach().clone()
    opt.step()
    assert opt.record.branch == "averaged" and not torch.allclose(p, before, rtol=1e-6)


def test_a_full_batch_without_losses_is_minimised_steadily():
    """Steps are aligned there, and a bound of the distance far above the scale must not lengthen them without limit."""
    torch.manual_seed(0)
    x = torch.randn(200, 16)
    y = (x[:, :4].sin() @ torch.randn(4, 5)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
    opt, losses = sanc.SANC(model.parameters(), seed=0), []
    for _ in range(200):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 and all(b < 1.05 * a for a, b in pairwise(losses[20:]))
