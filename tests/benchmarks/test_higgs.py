"""The generated file has the format of LIBSVM's HIGGS, and the command parses it and trains on it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pooch")

from benchmarks import higgs


def test_the_generated_file_has_the_format_of_higgs(tmp_path):
    path = tmp_path / "HIGGS"
    higgs.generate(path, 300)
    lines = path.read_text().splitlines()
    number = r"[+-]\d\.\d{18}e[+-]\d\d"
    assert all(re.fullmatch(rf"[01]( \d+:{number}){{28}}", line) for line in lines)
    values = np.array([[float(cell.split(":")[1]) for cell in line.split()[1:]] for line in lines])
    assert values.shape == (300, 28) and 0.1 <= np.abs(values).min() and np.abs(values).max() < 10
    assert {line[0] for line in lines} == {"0", "1"}


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SANC_CACHE", str(tmp_path / "cache"))
    assert higgs.main(["--rows", "300", "--iterations", "3", "--dir", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["iterations"] == 3 and result["loss_after"] < result["loss_before"] == pytest.approx(np.log(2))
    assert result["text_bytes"] == (tmp_path / "HIGGS").stat().st_size
    assert 0 < result["peak_bytes"] <= result["limit_bytes"]
