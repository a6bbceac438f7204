"""The benchmark of Hessian products at its tiny sizes: that it runs, reports and draws, not who wins."""

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks import hvp


def test_quick_run_reports_and_draws(tmp_path, capsys):
    out = tmp_path / "new"
    assert hvp.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((out / "hvp.json").read_text())["rows"]
    assert [row["model"] for row in rows] == list(hvp.QUICK)
    for row in rows:
        assert row["chosen"] in hvp.EXACT and f"| {row['model']}" in printed
        assert set(row["ratios"]) == {*hvp.FIXED, "auto"}
        best = min(hvp.EXACT, key=row["milliseconds"].__getitem__)
        assert row["ratios"][best] == 1.0
        assert all(value > 0 for value in row["milliseconds"].values())
    assert (out / "hvp.png").read_bytes().startswith(b"\x89PNG")
