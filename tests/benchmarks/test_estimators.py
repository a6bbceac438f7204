"""The comparison of estimators: its measure of optimality, and its results files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sklearn.linear_model
import torch
from sklearn.datasets import load_iris
from sklearn.preprocessing import scale

from benchmarks import estimators


@pytest.mark.parametrize("classes", [2, 3])
def test_the_gradient_is_that_of_the_objective(classes):
    X, y = load_iris(return_X_y=True)
    X, y = scale(X)[y < classes], y[y < classes]
    fitted = sklearn.linear_model.LogisticRegression(C=0.3, tol=0.1).fit(X, y)
    W = torch.tensor(fitted.coef_, requires_grad=True)
    b = torch.tensor(fitted.intercept_, requires_grad=True)
    z = torch.from_numpy(X) @ W.T + b
    if classes == 2:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z[:, 0], torch.from_numpy(y).double())
    else:
        loss = torch.nn.functional.cross_entropy(z, torch.from_numpy(y))
    (loss + (W**2).sum() / (2 * 0.3 * len(y))).backward()
    largest = max(W.grad.abs().max().item(), b.grad.abs().max().item())
    assert estimators.largest_gradient(X, y, fitted) == pytest.approx(largest, rel=1e-9)


def test_the_command_writes_a_table_and_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimators, "BUNDLED", ("breast_cancer",))
    monkeypatch.setattr(estimators, "SEARCHED", ("wine",))
    assert estimators.main(["--quick", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "estimators.json").read_text())
    reached = {row["estimator"]: row["largest"] <= row["goal"] for row in document["race"]}
    assert reached.pop("glum", True)  # where it is installed
    assert reached == {"sanc": True, "lbfgs": True, "newton-cg": True, "newton-cholesky": True}
    assert {row["estimator"] for row in document["defaults"]} >= reached.keys()
    assert all(np.isfinite(row["ratio"]) for row in document["race"])
    assert all(row["cpu seconds"] > 0 for row in document["race"] + document["defaults"])
    searches = {row["search"]: row for row in document["searches"]}
    assert searches["gradient"]["loss"] <= searches["grid"]["loss"] and searches["grid"]["values"] == 10
    first = (tmp_path / "estimators.md").read_text()
    assert "## Choosing C" in first and "not above the best of the grid on 1 of 1 sets" in first
    assert estimators.main(["--from", str(tmp_path / "estimators.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "estimators.md").read_text() == first
    assert "| ratio to sanc |" in (tmp_path / "estimators.md").read_text() and "newton-cg" in capsys.readouterr().out


def test_data_sets_without_files_are_reported(tmp_path, capsys):
    assert estimators.main(["--sets", "w1a", "--data-dir", str(tmp_path)]) == 1
    assert "w1a is left out" in capsys.readouterr().out
