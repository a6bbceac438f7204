"""The benchmark of a step runs, and compares what it says it compares."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import step
from benchmarks.timing import in_turns, ratio, turns

CPU = torch.device("cpu")


def test_step_quick(tmp_path, capsys):
    assert step.main(["--quick", "--seconds", "0.05", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "step.json").read_text())
    assert [(row["model"], row["samples"]) for row in document["paper"]] == [("small", 1), ("small", 3)]
    for row in [*document["paper"], *document["robust"]]:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("bare", "step", "ratio"))
    printed = capsys.readouterr().out
    assert printed.count("| small") == 3 and "step ÷ bare" in printed


@pytest.mark.parametrize("three", [False, True])
def test_a_step_makes_the_calls_that_it_is_compared_with(three, monkeypatch):
    task = step.Task("small", CPU, rows=12)
    opt = task.optimiser(**step.STEADY)
    task.take(opt, three)
    before, forwards = opt.record.calls, []
    plain = task.loss
    monkeypatch.setattr(task, "loss", lambda x, y: forwards.append(1) or plain(x, y))
    for batch in task.samples:
        batch.loss = task.loss
    task.take(opt, three)
    asked = len(forwards)
    made = {name: (getattr(opt.record.calls, name) - getattr(before, name)) / 12 for name in ("value", "product")}
    assert made == {"value": 2 if three else 1, "product": step.J}
    step.Bare(task).step(three)
    assert len(forwards) == 2 * asked  # by hand the network is evaluated as often


def test_goals():
    assert step.goal({"model": "cnn-mnist", "ratio": 1.29}) == "≤ 1.3 met"
    assert step.goal({"model": "mlp", "ratio": 1.31}) == "≤ 1.3 MISSED"
    assert step.goal({"model": "mlp", "ratio": 2.0, "speedup": 5.9}) == "≥ 6 MISSED"
    assert step.goal({"model": "cnn-cifar", "ratio": 2.0, "speedup": 1.0}) == "≥ 1 met"


def test_calls_have_their_price():
    """Of three gradients one is made with the products, in whose price it is."""
    calls = [SimpleNamespace(calls=SimpleNamespace(value=v, gradient=g, product=p)) for v, g, p in
             ((0, 0, 0), (2 * step.BATCH, 3 * step.BATCH, step.J * step.BATCH))]  # fmt: skip
    assert step.worth(*calls, {"value": 1.0, "gradient": 10.0, "products": 100.0}) == 2 + 20 + 100


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
    task = step.Task("small", CPU, rows=12)
    names = [name for name, _ in task.model.named_parameters()]

    def loss(flat):
        parts = flat.split([p.numel() for p in task.leaves])
        values = {n: part.view_as(p) for n, part, p in zip(names, parts, task.leaves, strict=True)}
        return torch.nn.functional.cross_entropy(torch.func.functional_call(task.model, values, (task.x,)), task.y)

    flat = torch.cat([p.detach().reshape(-1) for p in task.leaves])
    bare = step.Bare(task)
    gradient, *products = bare.products()
    assert torch.allclose(gradient, torch.func.grad(loss)(flat), atol=1e-6)
    assert torch.allclose(bare.gradient(), gradient)
    dense = torch.func.hessian(loss)(flat) @ bare.v
    assert len(products) == step.J and all(torch.allclose(product, dense, atol=1e-5) for product in products)
    assert bare.value() == pytest.approx(float(loss(flat)))
