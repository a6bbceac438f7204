"""Ratios with intervals over tasks: the bootstrap, pairs of equal seeds, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import intervals


def run(task: str, method: str, seed: int, at: int, lr: float | None = None) -> dict[str, Any]:
    """A run of ten steps that reaches the loss 0 after `at` steps."""
    train = [1.0] * at + [0.0] * (11 - at)
    curve = {"evaluations": list(range(11)), "train": train, "held": [2.0] * 11}
    return {"task": task, "method": method, "lr": lr, "cosine": False, "seed": seed, "steps": 10, "curve": curve}


def runs() -> list[dict[str, Any]]:
    """The default needs 2 and 4 steps, its part 4 and 8; seed 2 of the default has no partner and is left out."""
    listed = []
    for task in ("vit", "rnn"):
        listed += [run(task, "adamw", seed, 10, 0.001) for seed in (0, 1)]
        listed += [run(task, "sanc", 0, 2), run(task, "sanc", 1, 4), run(task, "sanc", 2, 9)]
        listed += [run(task, "diagonal", 0, 4), run(task, "diagonal", 1, 8)]
        listed += [run(task, "no-escape", 0, 2), run(task, "no-escape", 1, 2)]
    return listed


def test_the_interval_is_that_of_scipys_bootstrap() -> None:
    logs = np.random.default_rng(1).normal(-1.0, 0.5, 19)
    mean, low, high = intervals.interval(logs)
    theirs = stats.bootstrap((logs,), np.mean, n_resamples=10_000, method="percentile")
    assert mean == pytest.approx(stats.gmean(np.exp(logs)), rel=1e-12)
    assert np.log([low, high]) == pytest.approx(theirs.confidence_interval, abs=0.02)


def test_no_task_gives_no_number() -> None:
    assert all(math.isnan(value) for value in intervals.interval([]))


def test_pairs_are_runs_of_one_task_and_one_seed() -> None:
    logs, finals, equal, pairs = intervals.paired(runs(), "diagonal")
    assert logs == pytest.approx([math.log(2.0)] * 2) and finals == [] and (equal, pairs) == (0, 4)
    logs, finals, equal, pairs = intervals.paired(runs(), "no-escape", "unseen")
    assert logs == pytest.approx([math.log(0.5) / 2] * 2) and (equal, pairs) == (2, 4)


def test_final_losses_are_compared_without_those_of_zero() -> None:
    listed = runs()
    for one in listed:
        if one["seed"] == 0 and one["method"] in ("sanc", "diagonal"):
            one["curve"]["train"][-1] = {"sanc": 0.25, "diagonal": 1.0}[one["method"]]
    assert intervals.paired(listed, "diagonal").finals == pytest.approx([math.log(4.0)] * 2)


def test_the_command_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(map(json.dumps, runs())))
    assert intervals.main([str(path), "--parts"]) == 0
    assert "2.00 [2.00, 2.00]" in capsys.readouterr().out
    assert intervals.main([str(path)]) == 0
    assert "0.40 [0.40, 0.40]" in capsys.readouterr().out
