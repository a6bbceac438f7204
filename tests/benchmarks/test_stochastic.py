"""The benchmarks of the mini-batch methods run, and count and choose as they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from benchmarks import networks, stochastic

# ---------------------------------------------------------------------- logistic regression


@pytest.mark.slow
def test_stochastic_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stochastic.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "breast_cancer" in capsys.readouterr().out
    document = json.loads((tmp_path / "stochastic.json").read_text())
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
    stochastic.main(["--plot", str(tmp_path / "stochastic.json"), "--out", str(again)])
    assert (again / "table.md").read_text() == (tmp_path / "table.md").read_text()
    assert (again / "stochastic.png").exists()


def made(method: str, sigma0: float | None, losses: list[float], **more: Any) -> dict[str, Any]:
    calls = [10 * k for k in range(len(losses))]
    return {
        "set": "w1a", "n": 10, "method": method, "sigma0": sigma0, "seed": 0, "final": losses[-1], "sigma_min": 0.1,
        "sigma_max": 1.0, "stayed_late": 0.0,
        "trace": {"calls": calls, "total": [2 * count for count in calls], "loss": losses},
    } | more  # fmt: skip


def test_stochastic_verdicts() -> None:
    document = {
        "references": [{"set": "w1a", "reference": 1.2}],
        "runs": [
            made("robust", 1.0, [5.0, 1.0005, 1.0]),
            made("paper", 1.0, [5.0, 2.0, 1.0009]),
            made("sgd", None, [5.0, 4.0, 3.0]),
        ],
    }
    (row,) = stochastic.summary(document)
    assert row["star"] == 1.0  # the lowest seen, not the reference
    assert (row["calls_robust"], row["calls_paper"], row["total_robust"]) == (1.0, 2.0, 2.0)
    assert all(row[check] for check in stochastic.CHECKS)
    document["runs"][0] = made("robust", 1.0, [5.0, 4.0, 3.5], stayed_late=0.9, sigma_max=1e12)
    (row,) = stochastic.summary(document)
    assert math.isinf(row["calls_robust"])
    assert not any(row[check] for check in stochastic.CHECKS)
    assert stochastic.table_of([row]).count("fail") == len(stochastic.CHECKS)


def test_stochastic_names_missing_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANC_CACHE", str(tmp_path / "cache"))
    assert stochastic.main(["--sets", "w1a", "--data-dir", str(tmp_path)]) == 1
    assert "w1a is left out" in capsys.readouterr().out


# ---------------------------------------------------------------------- networks


@pytest.mark.slow
def test_networks_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert networks.main(["--quick", "--steps", "30", "--out", str(tmp_path)]) == 0
    assert "| digits | robust" in capsys.readouterr().out
    document = json.loads((tmp_path / "networks.json").read_text())
    runs = document["runs"]
    methods = list(dict.fromkeys(run["method"] for run in runs))
    assert methods == [m for m in networks.METHODS if m != "muon"]
    adam = [run for run in runs if run["method"] == "adam"]
    assert len(adam) == 2 + 1
    assert adam[0]["trace"]["evaluations"][-1] == 30 * 128
    starts = {run["trace"]["loss"][0] for run in runs if run["seed"] == 0}
    assert max(starts) - min(starts) < 1e-6  # the same weights for everyone
    rows = {row["method"]: row for row in networks.summary(runs)}
    assert rows["adam"]["reached"] == 2 and rows["adam"]["evaluations_ratio"] <= 1.0
    assert rows["robust"]["seeds"] == 2 and rows["paper"]["seeds"] == 1
    assert rows["robust"]["final"] < next(iter(starts))
    for name in ("table.md", "networks.png"):
        (tmp_path / name).unlink()
    assert networks.main(["--plot", str(tmp_path / "networks.json")]) == 0
    assert (tmp_path / "networks.png").stat().st_size > 1000
    assert (tmp_path / "table.md").exists()


def test_networks_skip_what_there_is_no_time_for(tmp_path: Path) -> None:
    arguments = ["--quick", "--methods", "adam", "robust", "--minutes", "0", "--out", str(tmp_path)]
    assert networks.main(arguments) == 1
    document = json.loads((tmp_path / "networks.json").read_text())
    assert document["runs"] == []
    assert "digits/adam/0.001/seed 0" in document["skipped"] and "digits/robust/seed 0" in document["skipped"]


def test_networks_take_npz(tmp_path: Path, rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (160, 64), dtype=np.uint8)
    labels = np.arange(160) % 10
    np.savez(tmp_path / "mnist-0.npz", x=pixels[:100].reshape(100, 8, 8), y=labels[:100])
    np.savez(tmp_path / "mnist-1.npz", x=pixels[100:].reshape(60, 8, 8), y=labels[100:])
    task = networks.load("mnist", tmp_path, torch.device("cpu"))
    assert task.x.shape == (160, 1, 8, 8) and task.classes == 10
    assert torch.equal(task.x.view(160, -1), torch.from_numpy(np.divide(pixels, 255, dtype=np.float32)))
    run = networks.train("robust", task, None, 0, networks.Limits(2, 1))
    assert run["trace"]["step"] == [0, 1, 2]
    assert run["trace"]["loss"][-1] < run["trace"]["loss"][0]
    networks.export(["mnist"], tmp_path, tmp_path / "out")
    with np.load(tmp_path / "out" / "mnist.npz") as written:
        assert np.array_equal(written["x"], pixels) and np.array_equal(written["y"], labels)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_networks_train_with_muon(tmp_path: Path) -> None:
    """On tiny matrices: many a CPU emulates its bfloat16, and takes minutes for large ones."""
    task = networks.load("digits", tmp_path, torch.device("cpu"))
    run = networks.train("muon", task, 1e-2, 0, networks.Limits(3, 3))
    assert run["trace"]["evaluations"] == [0, 3 * networks.BATCH]
    assert run["trace"]["loss"][-1] < run["trace"]["loss"][0]


def trained(method: str, lr: float | None, seed: int, losses: list[float]) -> dict[str, Any]:
    steps = [25 * k for k in range(len(losses))]
    trace = {"step": steps, "evaluations": [128 * k for k in steps], "seconds": [0.001 * k for k in steps]}
    return {"task": "t", "method": method, "lr": lr, "seed": seed, "ended": "steps", "trace": trace | {"loss": losses}}


def test_networks_choose_rates_and_targets() -> None:
    runs = [
        trained("adam", 0.1, 0, [3.0, 0.5, 0.9]),  # best at the end counts, not on the way
        trained("adam", 0.01, 0, [3.0, 2.0, 0.8]),
        trained("adam", 0.01, 1, [3.0, 2.0, 1.0]),
        trained("sgd", 0.1, 0, [3.0, 0.9, 0.95]),  # at the target first
        trained("sgd", 0.01, 0, [3.0, 2.0, 0.7]),
        trained("lbfgs", None, 0, [3.0, math.nan, math.nan]) | {"ended": "diverged"},
    ]
    assert networks.target_of(runs, "t") == 1.0
    rows = {row["method"]: row for row in networks.summary(runs)}
    assert (rows["adam"]["lr"], rows["sgd"]["lr"]) == (0.01, 0.1)
    assert rows["sgd"]["evaluations"] == 25 * 128 and rows["sgd"]["evaluations_ratio"] == 0.5
    assert rows["lbfgs"]["reached"] == 0 and math.isinf(rows["lbfgs"]["final"])
    assert "∞" in networks.table_of(list(rows.values()))
    json.dumps(networks.plain(runs), allow_nan=False)


def test_networks_merge(tmp_path: Path) -> None:
    """Of other methods or seeds, but of the same steps; what one file skipped and another has is no longer skipped."""
    for name, steps in (("a", 60), ("b", 60), ("c", 61)):
        run = {"task": "mnist", "method": name, "lr": 0.1 if name == "a" else None, "seed": 0}
        skipped = ["mnist/b/seed 0", "mnist/b/seed 1"] if name == "a" else []
        content = {"options": {"steps": steps, "seeds": len(skipped)}, "runs": [run], "skipped": skipped, "missing": []}
        (tmp_path / name).write_text(json.dumps(content))
    document = networks.merged([tmp_path / "a", tmp_path / "b"])
    assert [run["method"] for run in document["runs"]] == ["a", "b"]
    assert document["skipped"] == ["mnist/b/seed 1"]
    with pytest.raises(SystemExit, match="other options"):
        networks.merged([tmp_path / "a", tmp_path / "c"])
