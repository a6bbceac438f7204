"""The comparison on samples: runs, calls to the target, and missing data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from benchmarks import stochastic
from benchmarks.reporting import read_text


@pytest.mark.slow
def test_stochastic_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stochastic.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "breast_cancer" in capsys.readouterr().out
    document = json.loads(read_text(tmp_path / "stochastic.json.xz"))
    assert len(document["runs"]) == 2 * 5
    for run in document["runs"]:
        trace = run["trace"]
        assert trace["calls"][-1] >= 8 * run["n"] or run["ended"] != "call limit"
        assert trace["calls"] == sorted(trace["calls"])
        assert trace["loss"][-1] == pytest.approx(run["final"], rel=1e-9)
        assert (run["sigma0"] is None) == (run["method"] == "sgd")
    rows = stochastic.summary(document)
    assert [row["sigma0"] for row in rows] == [1.0, 0.001]
    assert all(row[f"gap_{method}"] >= 0 for row in rows for method in ("robust", "paper", "sgd"))
    assert (tmp_path / "stochastic.png").stat().st_size > 1000

    again = tmp_path / "again"
    again.mkdir()
    stochastic.main(["--from", str(tmp_path / "stochastic.json.xz"), "--out", str(again)])
    assert (again / "table.md").read_text() == (tmp_path / "table.md").read_text()
    assert (again / "stochastic.png").exists()


def made(method: str, sigma0: float | None, losses: list[float], **more: Any) -> dict[str, Any]:
    calls = [10 * k for k in range(len(losses))]
    return {
        "set": "w1a", "n": 10, "method": method, "sigma0": sigma0, "seed": 0, "final": losses[-1], "sigma_min": 0.1,
        "sigma_max": 1.0, "stayed_late": 0.0,
        "trace": {"calls": calls, "total": [2 * count for count in calls], "loss": losses},
    } | more  # fmt: skip


def test_calls_to_the_target_and_gaps() -> None:
    document = {
        "references": [{"set": "w1a", "reference": 1.2}],
        "runs": [
            made("robust", 1.0, [5.0, 1.0005, 1.0]),
            made("paper", 1.0, [5.0, 2.0, 1.0009]),
            made("sgd", None, [5.0, 4.0, 3.0]),
        ],
    }
    (row,) = stochastic.summary(document)
    assert row["star"] == 1.0  # the lowest value of any run, not the reference
    assert (row["calls_robust"], row["calls_paper"], row["total_robust"]) == (1.0, 2.0, 2.0)
    assert row["gap_sgd"] == 2.0
    document["runs"][0] = made("robust", 1.0, [5.0, 4.0, 3.5])
    (row,) = stochastic.summary(document)
    assert math.isinf(row["calls_robust"]) and "∞" in stochastic.table_of([row])


def test_the_comparison_in_words() -> None:
    rows = [
        {"calls_robust": 1.0, "calls_paper": 8.0, "gap_robust": 1e-3, "gap_paper": 2e-3, "gap_sgd": 5e-4},
        {"calls_robust": 3.0, "calls_paper": 4.0, "gap_robust": 3e-3, "gap_paper": 4e-3, "gap_sgd": 5e-3},
    ]
    rows = [row | about for row, about in zip(rows, ({"set": "a", "n": 9}, {"set": "b", "n": 8}), strict=True)]
    words = stochastic.in_words(rows)
    assert "in 12 to 75 % of the calls" in words and "in 2 of 2 rows, and lower than SGD in 1." in words
    assert "in 75 % on b, the smallest set, and in at most 12 % on the others." in words


def test_missing_data_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANC_CACHE", str(tmp_path / "cache"))
    assert stochastic.main(["--sets", "w1a", "--data-dir", str(tmp_path)]) == 1
    assert "w1a is left out" in capsys.readouterr().out
