"""The command `sanc diagnose`: a saved module and a data file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from sanc.autograd import randomness
from sanc.lab import cli, user_files
from sanc.lab.saved_module import diagnose_file, load_module


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((80, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", X=X, y=(X[:, 0] > 0).astype(int))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 2))
    torch.save(model, tmp_path / "model.pt")
    return tmp_path, model


@pytest.fixture(autouse=True)
def without_threads(monkeypatch):
    """The threads of the cluster of other tests draw nothing, and need not be watched for draws."""
    monkeypatch.setattr(randomness, "_has_other_threads", lambda: False)


def test_the_command_prints_and_writes_the_report(files, capsys):
    folder, model = files
    arguments = [
        str(folder / "model.pt"),
        str(folder / "data.npz"),
        "--batch",
        "20",
        "--json",
        str(folder / "out.json"),
    ]
    assert cli.main(["diagnose", *arguments]) == 0
    printed = capsys.readouterr().out
    numbers = json.loads((folder / "out.json").read_text())
    path = folder / "model.pt"
    report = diagnose_file(load_module(path), path, user_files.load(str(folder / "data.npz")), batch=20, seed=0)
    assert printed.split() == str(report).split() and numbers["lambda_max"] == report.lambda_max
    data = np.load(folder / "data.npz")
    order = np.random.default_rng(0).permutation(80)
    inputs, targets = torch.as_tensor(data["X"][order]), torch.as_tensor(data["y"][order])
    batches = list(zip(inputs.split(20), targets.split(20), strict=True))
    assert sanc.diagnose(model.eval(), nn.CrossEntropyLoss(), batches).value == report.value


def test_few_rows_have_eight_batches(files):
    folder, _ = files
    path = folder / "model.pt"
    report = diagnose_file(load_module(path), path, user_files.load(str(folder / "data.npz")), batch=None, seed=0)
    assert report.batches == 6 and report.rows == 60  # two are held out


def test_numbers_that_json_lacks_are_null(files, capsys, monkeypatch):
    folder, _ = files
    numbers = {"noise_scale": float("inf"), "noise_share": float("nan"), "lambda_max": 2.0}
    monkeypatch.setattr(sanc.Report, "as_dict", lambda self: numbers)
    arguments = [str(folder / "model.pt"), str(folder / "data.npz"), "--json", str(folder / "out.json")]
    assert cli.main(["diagnose", *arguments]) == 0
    assert (folder / "out.json").read_text() == '{"noise_scale": null, "noise_share": null, "lambda_max": 2.0}'


def test_other_files_are_errors(files, capsys):
    folder, model = files
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(nn.Linear(5, 2), folder / "wide.pt")
    torch.save(nn.Linear(4, 3), folder / "classes.pt")
    (folder / "text.pt").write_text("no module")
    words = {
        "state.pt": "not its state_dict()",
        "wide.pt": "cannot be applied to rows of 4 features",
        "classes.pt": "2 classes",
        "text.pt": "cannot be loaded",
    }
    for name, word in words.items():
        assert cli.main(["diagnose", str(folder / name), str(folder / "data.npz")]) == 2
        assert word in " ".join(capsys.readouterr().err.split())
    assert cli.main(["diagnose", str(folder / "model.pt"), str(folder / "none.npz")]) == 2
