"""The benchmark of linear models runs, and its numbers are numbers; what they are is not tested."""

from __future__ import annotations

import contextlib
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from sanc.oracles.samples import Draws

from benchmarks import linear
from benchmarks.common import Budget
from sanc.problems import Logistic


def test_linear_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--quick", "--seconds", "0.05", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "ratio to sanc" in said and "share of X @ v" in said and "by hand" in said
    document = json.loads((tmp_path / "linear.json").read_text())
    assert document["missing"] == []
    numbers = [
        row[key]
        for part, keys in (
            ("race", ("seconds", "ratio", "least")),
            ("bandwidth", ("seconds", "bytes_per_second", "share")),
            ("overhead", ("sanc", "by_hand", "ratio", "in_full")),
        )
        for row in document[part]
        for key in keys
    ]
    assert numbers and all(isinstance(number, float) and math.isfinite(number) for number in numbers)
    assert {row["method"] for row in document["race"]} >= {
        "sanc",
        "sanc, uncertified",
        "sanc, certified",
        *linear.PEERS,
    }
    assert all(row["reached"] for row in document["race"] if row["method"].startswith("sanc"))
    assert [row["what"] for row in document["bandwidth"]] == ["X @ v", "value", "gradient", "product"]
    assert all(row["products"] == 5.0 for row in document["overhead"])
    assert (tmp_path / "linear.png").stat().st_size > 1000


def test_one_part_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--quick", "--seconds", "0.05", "--parts", "overhead", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "by hand" in said and "ratio to sanc" not in said and "share of X @ v" not in said
    document = json.loads((tmp_path / "linear.json").read_text())
    assert document["overhead"] and not document["race"] and not document["bandwidth"]
    assert not (tmp_path / "linear.png").exists()


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_the_iteration_that_is_written_out_is_the_same(rng: np.random.Generator, form: Any) -> None:
    X, y = form(rng.standard_normal((60, 7))), rng.integers(0, 2, 60)
    options: dict[str, Any] = {"batch_size": 30, "objective_batch_size": 30, "epsilon_g": 1e-12, "certify": False}
    result = linear.sanc.minimize(
        Logistic(X, y, strength=0.01), np.ones(7), preset="paper", sigma0=3.0, max_iter=1, seed=5, **options
    )
    draws = Draws(5)
    rows = [draws.at(0, role).choice(60, 30, replace=False, shuffle=False) for role in range(3)]
    trial, values = linear.written_out(X, 1.0 - 2.0 * y, rows, np.ones(7), 3.0, 0.01, result.history[0].krylov_dim)
    assert "successful" in str(result.history[0].branch)
    assert trial == pytest.approx(result.x, rel=1e-12)
    assert values == pytest.approx([result.history[0].value, result.history[0].trial_value], rel=1e-12)


@pytest.mark.parametrize("penalty", ["nonconvex", "l2"])
def test_torch_has_the_same_loss(rng: np.random.Generator, penalty: linear.sanc.problems.PenaltyKind) -> None:
    X = scipy.sparse.random(30, 5, 0.5, format="csr", random_state=1)
    problem = Logistic(X, rng.integers(0, 2, 30), penalty=penalty, strength=0.2)
    w = rng.standard_normal(5)
    value, g = problem.value_and_gradient(w)
    for sparse in (False, True):
        variable = torch.from_numpy(w.copy()).requires_grad_()
        assert linear.torch_gradient(linear.torch_loss(problem, sparse), variable).item() == pytest.approx(value)
        assert variable.grad is not None
        assert variable.grad.numpy() == pytest.approx(g)


def test_a_small_gradient_ends_a_run(rng: np.random.Generator) -> None:
    problem = Logistic(rng.standard_normal((30, 3)), rng.integers(0, 2, 30), penalty="l2")
    watched = linear.Watched(problem, math.inf)
    with pytest.raises(Budget):
        linear.run_scipy(watched, "trust-ncg", np.ones(3))
    assert watched.least <= linear.TOLERANCE
    assert watched.values and watched.gradients and watched.products


@pytest.mark.parametrize(("strength", "peers"), [(1.0, ("trust-ncg", "L-BFGS-B")), (1e-3, ("trust-ncg",))])
def test_fewer_data_are_read_than_by_scipy(
    wide_problem: Any, readings: Any, strength: float, peers: tuple[str, ...]
) -> None:
    """Products with X of four runs, to the same gradient."""
    spent = dict.fromkeys(("sanc", *peers), 0)
    for seed, method in product(range(4), spent):
        problem = wide_problem(np.random.default_rng(seed), strength, d=120)
        watched = linear.Watched(problem, 30.0)
        readings.clear()
        with contextlib.suppress(Budget):
            if method == "sanc":
                linear.sanc.minimize(watched, np.ones(120), tol=1e-8)
            else:
                linear.run_scipy(watched, method, np.ones(120))
        assert watched.least <= 1e-8
        spent[method] += readings.total()
    assert all(spent["sanc"] < spent[peer] for peer in peers), spent


def test_generated_rows_are_seeded() -> None:
    (X, y), (again, _) = linear.generated(200_000), linear.generated(200_000)
    assert X.shape == (200_000, 28) and X.dtype == np.float32 and set(np.unique(y)) == {0, 1}
    assert np.array_equal(X, again) and len(np.unique(X[:, 3])) > 100_000
