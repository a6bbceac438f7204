"""The benchmark of `argmin` at small sizes: its errors, its searches and its report."""

import json

import pytest

from benchmarks import implicit


@pytest.mark.slow
def test_quick_run_reports_errors_and_searches(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert implicit.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "implicit.json").read_text())
    assert len(results["rows"]) == 2
    for row in results["rows"]:
        assert row["problem"] in printed and row["error"] <= 1e-6 and row["ratio"] > 0
    assert [row["argmin"] for row in results["singular"]] == ["raises"] * len(implicit.SINGULAR)
    (found,) = results["searches"]
    assert found["gradients"]["loss"] < found["gradients"]["first"] - 0.01


def test_minima_without_a_derivative():
    assert implicit.singular("valley, (x₁ + x₂ − θ)²")["argmin"] == "raises"
