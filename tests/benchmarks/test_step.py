"""The benchmark of a step runs, and compares what it says it compares."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import step
from benchmarks.timing import in_turns, ratio, turns


def test_step_quick(tmp_path, capsys):
    assert step.main(["--quick", "--seconds", "0.2", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "step.json").read_text())
    assert [row["samples"] for row in document["paper"]] == [1, 3]
    for row in document["paper"]:
        assert 0.2 < row["ratio"] * row["bare"] / row["step"] < 5.0 and math.isfinite(row["ratio"])
        (bare,) = (value for name, value in row["times"].items() if name.startswith("bare"))
        assert row["bare"] == bare and row["step"] == row["times"]["step"]
    assert "| small" in capsys.readouterr().out
    assert (tmp_path / "step.png").stat().st_size > 5_000


@pytest.mark.parametrize("three", [False, True])
def test_a_step_makes_the_calls_that_it_is_compared_with(three):
    task = step.Task("small", torch.device("cpu"), rows=12)
    opt = step.optimiser(task, preset="paper", sigma0=100.0, sigma_floor=100.0, epsilon_g=1e-30)
    step.prepare(opt, task, three)
    before = opt.record.calls
    task.reset()
    step.take(opt, task, three)
    made = {name: (getattr(opt.record.calls, name) - getattr(before, name)) / 12 for name in ("value", "product")}
    assert made == {"value": 2 if three else 1, "product": step.J}


def test_ratios_are_of_times_in_one_round():
    """A machine that is slow in half of the rounds, by whatever factor, changes nothing."""
    slow = [1.0, 7.0, 1.0, 50.0, 1.0]
    assert ratio([1.1 * s for s in slow], [1.0 * s for s in slow]) == pytest.approx(1.1)
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


def test_turns_are_drawn_and_every_call_is_timed():
    seen, resets = [], []
    candidates = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    options = {"seconds": 0.0, "warm_up": 1, "least": 20, "in_a_row": 2}
    times = turns(candidates, **options, before=lambda: resets.append(len(seen)))
    assert {name: len(rounds) for name, rounds in times.items()} == dict.fromkeys("abc", 20)
    assert seen[:3] == ["a", "b", "c"] and len(seen) == len(resets) == 3 + 20 * 3 * 2
    made = [tuple(seen[at : at + 6]) for at in range(3, len(seen), 6)]
    assert all(turn[::2] == turn[1::2] and set(turn) == set("abc") for turn in made)
    assert len(set(made)) == 6  # all orders come
    assert set(in_turns(candidates, **options)) == set("abc")


def test_bare_calls_are_those_of_a_dense_hessian():
    task = step.Task("small", torch.device("cpu"), rows=12)
    x, y = task.batches[0]
    names = [name for name, _ in task.model.named_parameters()]

    def loss(flat):
        parts = flat.split([p.numel() for p in task.model.parameters()])
        values = {n: part.view_as(p) for n, part, p in zip(names, parts, task.model.parameters(), strict=True)}
        return torch.nn.functional.cross_entropy(torch.func.functional_call(task.model, values, (x,)), y)

    flat = torch.cat([p.detach().reshape(-1) for p in task.model.parameters()])
    dense = torch.func.hessian(loss)(flat)
    for mode in ("double-backward", "forward-over-reverse"):
        bare = step.Bare(task, mode)
        gradient, product, *_ = bare.products(x, y)
        assert torch.allclose(gradient, torch.func.grad(loss)(flat), atol=1e-6)
        assert torch.allclose(product, dense @ bare.v, atol=1e-5)
    assert len(bare.step(three=False)) == 1 + step.J + 1
    assert len(bare.step(three=True)) == 1 + (1 + step.J) + 2
