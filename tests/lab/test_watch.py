"""Logs of the steps of an optimiser: what the targets receive."""

from __future__ import annotations

import io
import math
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import sanc
from sanc.lab.watch import ProgressLine, StepLog, to_tensorboard, to_wandb

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(120) % 3


def trained(*targets, steps=30, every=1):
    """Train a network with a log, and return the log with the numbers and records of all steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    opt = sanc.SANC(model.parameters(), seed=0)
    log, found, records = StepLog(opt, *targets, every=every), [], []
    for k in range(steps):
        rows = slice(12 * (k % 10), 12 * (k % 10) + 12)
        opt.step(lambda rows=rows: nn.functional.cross_entropy(model(X[rows]), Y[rows]))
        found.append(log.update())
        records.append(opt.record)
    return log, found, records


class Writer:
    def __init__(self):
        self.scalars, self.logged = [], []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def log(self, entries):
        self.logged.append(entries)


def test_numbers_are_those_of_the_record():
    _, found, records = trained()
    for numbers, record in zip(found, records, strict=True):
        assert numbers["loss"] == record.value and numbers["step_norm"] == record.step_norm
        assert numbers["calls"] == record.calls.total and numbers["seconds"] == record.seconds
        assert list(sanc.Branch)[int(numbers["branch"])] is record.branch
        assert numbers["curvature"] == (record.branch != "averaged")
    losses = [record.value for record in records]
    assert math.isnan(found[0]["batch_noise"])
    assert found[-1]["batch_noise"] == pytest.approx(np.std(np.diff(losses)) / 2**0.5)
    assert {numbers["curvature"] for numbers in found} == {0.0, 1.0}


def test_targets_are_called_every_so_many_steps_with_finite_numbers():
    board, wandb = Writer(), Writer()
    _, found, _ = trained(to_tensorboard(board), to_wandb(wandb, "run"), every=10)
    losses = [(value, step) for name, value, step in board.scalars if name == "sanc/loss"]
    assert losses == [(found[step]["loss"], step) for step in (0, 10, 20)]
    assert all(math.isfinite(value) for _, value, _ in board.scalars)
    assert [entries["run/iteration"] for entries in wandb.logged] == [0, 10, 20]
    assert wandb.logged[1]["run/step_norm"] == found[10]["step_norm"]
    assert {"sanc/branch", "sanc/batch_noise", "sanc/seconds"} <= {name for name, *_ in board.scalars}


def test_a_line_shows_the_state_of_the_run():
    text = io.StringIO()
    with ProgressLine(30, Console(file=text, width=120, force_terminal=True)) as line:
        _, found, records = trained(line)
    shown = text.getvalue()
    assert f"loss {found[-1]['loss']:.4g}" in shown and str(records[-1].branch) in shown
    assert "30" in shown and "σ" in shown and "‖s‖" in shown


@pytest.mark.parametrize("passes_loss", [True, False])
def test_the_loss_of_a_loop_without_closures_is_that_of_the_caller(passes_loss):
    text, losses = io.StringIO(), []
    model = nn.Linear(4, 3)
    opt = sanc.SANC(model.parameters(), seed=0)
    with ProgressLine(4, Console(file=text, width=120, force_terminal=True)) as line:
        log = StepLog(opt, line)
        for _ in range(4):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(X), Y)
            loss.backward()
            opt.step()
            numbers = log.update(loss if passes_loss else None)
            losses.append(loss.item())
    if passes_loss:
        assert numbers["loss"] == losses[-1] and f"loss {losses[-1]:.4g} ± " in text.getvalue()
        assert numbers["batch_noise"] == pytest.approx(np.std(np.diff(losses)) / 2**0.5)
    else:
        assert math.isnan(numbers["loss"]) and "loss - ± -" in text.getvalue() and "nan" not in text.getvalue()


def test_a_line_names_the_extra_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"ProgressLine needs rich: install the extra, pip install 'sanc\[lab\]'"):
        ProgressLine()


def test_numbers_are_logged_to_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        trained(to_tensorboard(writer), steps=2)
    assert any(path.stat().st_size > 0 for path in tmp_path.iterdir())


def stepped_log(opt):
    p = opt.param_groups[0]["params"][0]
    opt.step(lambda: p.square().sum())
    return StepLog(opt)


def test_mistakes_are_errors():
    adam = torch.optim.Adam([nn.Parameter(X)])
    with pytest.raises(sanc.ArgumentError, match="opt = Adam has no record: pass an optimiser of sanc"):
        StepLog(adam)
    opt = sanc.SANC([nn.Parameter(X)])
    with pytest.raises(sanc.ArgumentError, match="every = 0"):
        StepLog(opt, every=0)
    with pytest.raises(sanc.ArgumentError, match="made no step"):
        StepLog(opt).update()
    for make, match in (
        (lambda: StepLog(opt, 3), r"target = 3 cannot be called as target.*pass .* to_tensorboard\(writer\)"),
        (lambda: StepLog(opt, lambda numbers: 0), r"cannot be called as target\(numbers, iteration\) \(too many"),
        (lambda: to_tensorboard("runs"), r"writer = 'runs' has no add_scalar: pass SummaryWriter"),
        (lambda: to_wandb("project"), r"run = .project. has no log"),
        (lambda: stepped_log(opt).update("a"), "loss = 'a' is no number"),
    ):
        with pytest.raises(sanc.ArgumentTypeError, match=match):
            make()
