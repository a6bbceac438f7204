"""The benchmarks of `diagnose` at small sizes."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from benchmarks import diagnose, diagnose_large
from benchmarks.memory import peak_and_rest


@pytest.mark.slow
def test_quick_run_reports_networks_and_states(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert diagnose.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "diagnose.json").read_text())
    for row in results["networks"]:
        assert row["network"] in printed and max(row["errors"]) <= 0.02 and row["bounds hold"]
    assert [row["state"] for row in results["states"]] == list(diagnose.STATES[:2])
    assert results["states"][1]["value"] < results["states"][0]["value"]


def test_the_first_iterations_with_both_ends():
    matrix = np.diag([0.0, -1.0, 2.0, 0.5])
    assert diagnose.first_within(matrix, [-1.0, 2.0], 0.01) == 3
    assert diagnose.first_within(matrix, [-1.0, 2.0], 2.0) == 1
    assert diagnose.first_within(matrix, [-3.0, 2.0], 0.01) == math.inf


@pytest.mark.slow
def test_the_large_benchmark_reports_memory_and_time(tmp_path, capsys):
    assert diagnose_large.main(["--quick", "--device", "cpu", "--starts", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "diagnose_large.json").read_text())
    (row,) = results["runs"]
    assert row["hvp"] == "finite-difference" and row["hvp"] in printed and "parameters; with activations" in printed
    assert row["ratio"] == pytest.approx(row["peak"] / results["baseline"]) and row["numbers"]["products"] > 10
    assert results["baseline"] == 4 * results["parameters"] + results["activations"]


@pytest.mark.slow
def test_memory_does_not_grow_with_products_unless_vectors_are_kept():
    model, data = nn.Linear(300, 300), [torch.randn(4, 300)]
    size = sum(p.numel() * p.element_size() for p in model.parameters())

    def peak(lanczos, products):
        def call():
            sanc.diagnose(
                model, lambda model, batch: model(batch).square().square().mean(), data, starts=1, lanczos=lanczos,
                max_products=products, relative_error=1e-6,
            )  # fmt: skip

        return peak_and_rest(call, torch.device("cpu"))[0] / size

    kept, few, many = peak("store", 16), peak("regenerate", 6), peak("regenerate", 16)
    assert many == pytest.approx(few, abs=0.2) and kept > many + 5
