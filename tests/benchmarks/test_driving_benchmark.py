"""The benchmark of the ways to drive a step runs and writes its numbers."""

from __future__ import annotations

import json

from benchmarks import driving


def test_the_command_trains_in_all_ways_and_writes_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(driving, "LENGTHS", ((600, 1),))
    chosen = ["none, or a constant one", "`lr = 0.001` in all steps"]
    monkeypatch.setattr(driving, "SCHEDULES", {name: driving.SCHEDULES[name] for name in chosen})
    assert driving.main(["--quick", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "driving.json").read_text())
    assert all(document["ways"][0][style][0]["loss"] < 2.31 for style in driving.STYLES)
    usual, small = (document["schedules"][name][0]["loss"] for name in chosen)
    assert usual < 0.5 < small
    assert "\n\n".join(driving.tables(document)) in capsys.readouterr().out
