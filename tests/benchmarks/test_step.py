"""The benchmark of a step: its command, and the oracle calls that it compares."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import step
from benchmarks.paper_networks import Network
from benchmarks.timing import interleaved, median_ratio, medians


def test_step_quick(tmp_path, capsys):
    assert step.main(["--quick", "--seconds", "0.05", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "step.json").read_text())
    assert [(row["model"], row["samples"]) for row in document["paper"]] == [("small", 1), ("small", 3)]
    for row in document["paper"]:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("bare", "step", "ratio"))
    printed = capsys.readouterr().out
    assert printed.count("| small") == 2 and "step ÷ bare" in printed


@pytest.mark.parametrize("three", [False, True])
def test_a_step_makes_the_bare_calls(three, monkeypatch):
    network = Network("small", 12, "cpu")
    steps = step.Steps(network, three)
    steps()
    before, forwards = steps.opt.record.calls, []
    loss = network.loss
    monkeypatch.setattr(network, "loss", lambda x, y: forwards.append(1) or loss(x, y))
    for batch in steps.batches:
        batch.loss = network.loss
    steps()
    passes = len(forwards)
    made = {name: (getattr(steps.opt.record.calls, name) - getattr(before, name)) / 12 for name in ("value", "product")}
    assert made == {"value": 2 if three else 1, "product": step.J}
    step.Bare(network).step(three)
    assert len(forwards) == 2 * passes  # the bare calls evaluate the network as often


def test_goals():
    assert step.goal({"model": "cnn-mnist", "ratio": 1.29}) == "≤ 1.3 met"
    assert step.goal({"model": "mlp", "ratio": 1.31}) == "≤ 1.3 MISSED"
    assert step.goal({"model": "mlp", "ratio": 2.0, "speedup": 5.9}) == "≥ 6 MISSED"
    assert step.goal({"model": "cnn-cifar", "ratio": 2.0, "speedup": 1.0}) == "≥ 1 met"


def test_ratios_compare_times_of_the_same_round():
    """A machine that is slow in some rounds does not change the ratio."""
    slow = [1.0, 7.0, 1.0, 50.0, 1.0]
    assert median_ratio([1.1 * s for s in slow], [1.0 * s for s in slow]) == pytest.approx(1.1)
    with pytest.raises(ValueError):
        median_ratio([1.0], [1.0, 2.0])


def test_rounds_have_random_order_and_every_call_is_timed():
    called, resets = [], []
    candidates = {name: (lambda name=name: called.append(name)) for name in "abc"}
    options = {"seconds": 0.0, "warm_up": 1, "least": 20, "repeats": 2}
    times = interleaved(candidates, **options, setup=lambda: resets.append(len(called)))
    assert {name: len(rounds) for name, rounds in times.items()} == dict.fromkeys("abc", 20)
    assert called[:3] == ["a", "b", "c"] and len(called) == len(resets) == 3 + 20 * 3 * 2
    rounds = [tuple(called[at : at + 6]) for at in range(3, len(called), 6)]
    assert all(names[::2] == names[1::2] and set(names) == set("abc") for names in rounds)
    assert len(set(rounds)) == 6  # all orders occur
    assert set(medians(times)) == set("abc")


def test_bare_calls_agree_with_a_dense_hessian():
    network = Network("small", 12, "cpu")
    names = [name for name, _ in network.model.named_parameters()]

    def loss(flat):
        parts = flat.split([p.numel() for p in network.leaves])
        values = {n: part.view_as(p) for n, part, p in zip(names, parts, network.leaves, strict=True)}
        return torch.nn.functional.cross_entropy(
            torch.func.functional_call(network.model, values, (network.x,)), network.y
        )

    flat = torch.cat([p.detach().reshape(-1) for p in network.leaves])
    bare = step.Bare(network)
    gradient, *products = bare.products()
    assert torch.allclose(gradient, torch.func.grad(loss)(flat), atol=1e-6)
    assert torch.allclose(bare.gradient(), gradient)
    dense = torch.func.hessian(loss)(flat) @ bare.v
    assert len(products) == step.J and all(torch.allclose(product, dense, atol=1e-5) for product in products)
    assert bare.value() == pytest.approx(float(loss(flat)))
