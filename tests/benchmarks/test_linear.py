"""The benchmark of linear models runs, and counts what it compares; how long it takes is not tested."""

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

pytest.importorskip("sklearn")


from benchmarks import linear
from benchmarks.common import Budget
from sanc.problems import Logistic


def test_linear_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--quick", "--seconds", "0.05", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "ratio to sanc" in said and "share of X @ v" in said and "µs, by hand" in said
    document = json.loads((tmp_path / "linear.json").read_text())
    assert document["missing"] == []
    parts = {"race": ("seconds", "ratio", "least"), "bandwidth": ("seconds", "share"), "overhead": ("sanc", "ratio")}
    numbers = [row[key] for part, keys in parts.items() for row in document[part] for key in keys]
    assert numbers and all(isinstance(number, float) and math.isfinite(number) for number in numbers)
    assert {row["method"] for row in document["race"]} == {"sanc", "sanc, certified", *linear.PEERS}
    assert all(row["reached"] for row in document["race"] if row["method"].startswith("sanc"))
    assert [row["what"] for row in document["bandwidth"]] == ["X @ v", "value", "gradient", "product"]
    rows = [(row["form"], row["strength"]) for row in document["overhead"]]
    assert rows == [("dense", 1.0), ("CSR", 1.0), ("dense", 1e-3), ("CSR", 1e-3)]


def test_one_part_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"set": "w1a", "form": "dense", "strength": 1.0, "batch": 9, "products": 14.0, "sanc": 3e-4, "by_hand": 1e-4}
    monkeypatch.setattr(linear, "overhead", lambda *_: [row | {"ratio": 3.0}, row | {"ratio": 3.1, "form": "CSR"}])
    assert linear.main(["--quick", "--parts", "overhead", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "≤ 3 met" in said and "≤ 3 MISSED" in said and "ratio to sanc" not in said and "share of X @ v" not in said
    document = json.loads((tmp_path / "linear.json").read_text())
    assert document["overhead"] and not document["race"] and not document["bandwidth"]


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_an_iteration_reads_its_samples_as_often_as_by_hand(
    rng: np.random.Generator, form: Any, readings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Logistic(form(rng.standard_normal((200, 7))), rng.integers(0, 2, 200), strength=0.01)
    taken: list[int] = []
    plain = Logistic.subset
    monkeypatch.setattr(Logistic, "subset", lambda self, rows: taken.append(len(rows)) or plain(self, rows))
    readings.clear()
    result = linear.on_samples(problem, 4)
    done = [(record.krylov_dim, record.trials + 1) for record in result.history]
    assert taken == 3 * 4 * [10] and all(products == 5 for products, _ in done)
    final = 2  # f and ∇f of the answer on all rows
    hessians = 4  # the margins at x on the Hessian sample, which are not counted by hand
    assert readings.total() - final - hessians == linear.by_hand(problem.X, 10, done)


def test_a_small_gradient_ends_a_run(rng: np.random.Generator) -> None:
    problem = Logistic(rng.standard_normal((30, 3)), rng.integers(0, 2, 30), penalty="l2")
    watched = linear.Watched(problem, math.inf)
    with pytest.raises(Budget):
        linear.run_scipy(watched, "trust-ncg", np.ones(3))
    assert watched.least <= linear.TOLERANCE
    assert watched.values and watched.gradients and watched.products


@pytest.mark.parametrize("strength", [1.0, 1e-3])
def test_fewer_data_are_read_than_by_scipy(wide_problem: Any, readings: Any, strength: float) -> None:
    """Products with X of four runs, to the same gradient."""
    spent = {"sanc": 0, "trust-ncg": 0}
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
    assert spent["sanc"] < spent["trust-ncg"]


def test_generated_rows_are_seeded() -> None:
    (X, y), (again, _) = linear.generated(2000), linear.generated(2000)
    assert X.shape == (2000, 28) and X.dtype == np.float32 and set(np.unique(y)) == {0, 1}
    assert np.array_equal(X, again)
