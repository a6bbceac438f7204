"""Vectors that a step holds, memory that micro-batches save, and the commands that report them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import sanc
from benchmarks import memory
from tensors import flat

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models():
    small = [nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 300), nn.Tanh()]
    made = memory.networks(200, 8, CPU)
    made["CNN"] = nn.Sequential(*small, nn.Linear(300, 10)), torch.randn(2, 1, 14, 14)
    return made


def test_peak_and_rest_count_live_tensors():
    def call():
        a = torch.ones(1000, dtype=torch.float64)
        b = a + 1
        del a
        return b * 2

    assert memory.peak_and_rest(call, CPU) == pytest.approx((16_000, 8_000), abs=64)
    assert memory.peak_and_rest(lambda: float(call()[0]), CPU) == pytest.approx((16_000, 0), abs=64)


@pytest.mark.parametrize("dim", [5, 10])
@pytest.mark.parametrize("name", ["MLP, 2 layers", "MLP, 4 layers", "CNN"])
def test_a_stored_basis_takes_at_most_j_plus_8_vectors(models, name, dim):
    options = {"preset": "paper", "hvp": "double-backward", "krylov_dim": dim, "epsilon": 1e-12}
    model, x = models[name]
    accepted = memory.run_memory(model, x, **options, **memory.ACCEPTED)
    assert accepted["branches"] == ["very successful"]
    rejected = memory.run_memory(model, x, **options, **memory.REJECTED)
    assert rejected["branches"] == ["curvature"]
    for measured in (accepted, rejected):
        assert dim < measured["peak"] <= dim + memory.EXTRA + 2 * memory.SLACK
        assert measured["rest"] == pytest.approx(0, abs=1e-2)


def test_without_a_basis_the_vectors_do_not_grow_with_j(models):
    options = {"preset": "paper", "hvp": "double-backward", "lanczos": "regenerate", "epsilon": 1e-12}
    peaks = [memory.run_memory(*models["MLP, 2 layers"], krylov_dim=dim, **options, **memory.REJECTED)["peak"]
             for dim in (5, 15)]  # fmt: skip
    assert peaks[1] == pytest.approx(peaks[0], abs=memory.SLACK)
    assert peaks[1] < 15


def test_microbatches_bound_the_activations():
    small = [nn.Conv2d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 8, 5, padding=2), nn.Tanh(), nn.AvgPool2d(8)]
    model = nn.Sequential(*small, nn.Flatten(), nn.Linear(8 * 4, 10))
    x, y = torch.randn(64, 1, 16, 16), torch.randint(0, 10, (64,))

    def held(rows, cut):
        batch = sanc.Batch(lambda x, y: nn.functional.cross_entropy(model(x), y), x[:rows], y[:rows])
        options = {"preset": "paper", "krylov_dim": 2, "check": False, "seed": 0, "microbatch": cut}
        return memory.peak_and_rest(lambda: sanc.SANC(model.parameters(), **options).step(batch), CPU)[0]

    one = held(1, 1)
    assert 0 < held(64, 8) - one <= 0.2 * (held(64, 64) - one)  # an eighth of the rows, and the batch itself


def test_a_step_without_a_basis_repeats_the_step_with_one():
    finals = []
    for lanczos in ("store", "regenerate"):
        torch.manual_seed(0)
        model = memory.mlp(2, 12, CPU).double()
        x = torch.randn(6, 12, dtype=torch.float64)
        options = {"preset": "paper", "lanczos": lanczos, "microbatch": 4, "weight_decay": 0.1}
        optimizer = sanc.SANC(model.parameters(), seed=1, **options)
        batch = sanc.Batch(lambda x, model=model: torch.cos(2.0 * model(x)).mean(), x)
        for _ in range(5):
            optimizer.step(batch)
        finals.append(flat(model))
    torch.testing.assert_close(finals[0], finals[1], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    assert memory.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "memory.json").read_text())
    rows = [(row["model"], row["products"]) for row in document["steps"]]
    assert rows == [(name, hvp) for name in ("MLP, 2 layers", "CNN") for hvp in memory.MODES]
    assert all({"store 2", "regenerate 2"} <= row.keys() for row in document["steps"])
    assert "regenerate, J = 2" in printed and "between steps" in printed


def test_the_command_for_a_large_network(tmp_path, capsys):
    assert memory.main(["--billion", "--width", "100", "--out", str(tmp_path)]) == 0
    large = json.loads((tmp_path / "memory.json").read_text())["large"]
    assert large["parameters"] == 4 * (100 * 100 + 100)
    assert len(large["losses"]) == 3 and large["losses"][-1] < large["losses"][0]
    assert "40,400" in capsys.readouterr().out
