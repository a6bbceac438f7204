"""The benchmark of `diagnose` at small sizes."""

import json

import pytest

from benchmarks import diagnose


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
