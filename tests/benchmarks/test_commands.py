"""The benchmark of the command line runs and writes its table."""

from __future__ import annotations

import json

from benchmarks import commands


def test_the_command_writes_a_table(tmp_path, monkeypatch, capsys):
    kept = {name: commands.COMMANDS[name] for name in ("python -c pass", "sanc --version")}
    monkeypatch.setattr(commands, "COMMANDS", kept)
    assert commands.main(["--rounds", "1", "--out", str(tmp_path)]) == 0
    seconds = json.loads((tmp_path / "commands.json").read_text())["seconds"]
    assert seconds.keys() == kept.keys() and min(seconds.values()) > 0
    page = (tmp_path / "commands.md").read_text()
    assert "| sanc --version |" in page and ("met" in page or "MISSED" in page) and "seconds" in capsys.readouterr().out
