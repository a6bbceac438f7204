"""The benchmark of iterations on samples: its command, and the products that it counts."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

pytest.importorskip("sklearn")

import sanc
from benchmarks import linear
from sanc.problems import Logistic


def test_linear_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--quick", "--seconds", "0.05", "--out", str(tmp_path)]) == 0
    assert "µs, by hand" in capsys.readouterr().out
    rows = json.loads((tmp_path / "linear.json").read_text())["rows"]
    assert all(math.isfinite(row[key]) and row[key] > 0 for row in rows for key in ("sanc", "by_hand", "ratio"))
    forms = [(row["form"], row["strength"]) for row in rows]
    assert forms == [("dense", 1.0), ("CSR", 1.0), ("dense", 1e-3), ("CSR", 1e-3)]


def test_missing_data_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--data-dir", str(tmp_path)]) == 1
    assert "w1a is left out" in capsys.readouterr().out


def test_the_table_shows_the_goal() -> None:
    row = {"set": "w1a", "form": "dense", "strength": 1.0, "batch": 9, "products": 14.0, "sanc": 3e-4, "by_hand": 1e-4}
    text = linear.table([row | {"ratio": 3.0}, row | {"ratio": 3.1, "form": "CSR"}])
    assert "≤ 3 met" in text and "≤ 3 MISSED" in text


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_an_iteration_reads_its_samples_as_often_as_by_hand(
    rng: np.random.Generator, form: Any, readings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Logistic(form(rng.standard_normal((200, 7))), rng.integers(0, 2, 200), strength=0.01)
    sizes: list[int] = []
    subset = Logistic.subset
    monkeypatch.setattr(Logistic, "subset", lambda self, rows: sizes.append(len(rows)) or subset(self, rows))
    readings.clear()
    result = linear.on_samples(problem, 4)
    counts = [(record.krylov_dim, record.trials + 1) for record in result.history]
    assert sizes == 3 * 4 * [10] and all(products == 5 for products, _ in counts)
    final = 2  # f and ∇f of the result on all rows
    hessians = 4  # the margins at x on the Hessian sample, which `by_hand` does not count
    assert readings.total() - final - hessians == linear.by_hand(problem.X, 10, counts)


@pytest.mark.parametrize("strength", [1.0, 1e-3])
def test_sanc_reads_the_data_less_often_than_scipy(wide_problem: Any, readings: Any, strength: float) -> None:
    """Products with X of four runs to the same gradient norm."""
    counts = {"sanc": 0, "trust-ncg": 0}
    for seed, method in product(range(4), counts):
        problem = wide_problem(np.random.default_rng(seed), strength, d=120)
        start = np.ones(120)
        readings.clear()
        if method == "sanc":
            result = sanc.minimize(problem, start, tol=1e-8, certify=False)
        else:
            result = scipy.optimize.minimize(
                problem.value, start, method=method, jac=lambda w, p=problem: p.value_and_gradient(w)[1],
                hessp=lambda w, v, p=problem: p.hessian(w)(v), options={"gtol": 1e-8},
            )  # fmt: skip
        assert np.linalg.norm(result.jac) <= 1e-8
        counts[method] += readings.total()
    assert counts["sanc"] < counts["trust-ncg"]
