"""The benchmark beside other libraries runs without them, and its numbers are numbers; what they are is not tested."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from benchmarks import peers
from benchmarks.common import Budget

MODULES = {"pytorch-minimize": "torchmin", "torchzero": "torchzero"}


def test_peers_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["logistic", "saddle"]
    assert peers.main(["--quick", "--problems", *names, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    document = json.loads((tmp_path / "peers.json").read_text())
    absent = [library for library, module in MODULES.items() if importlib.util.find_spec(module) is None]
    assert document["missing"] == absent
    assert all(f"{library} is not installed" in said for library in absent)
    assert len({row["problem"] for row in document["rows"]}) == len(names)
    rows = [row for row in document["rows"] if row["method"].startswith(("sanc", "SciPy"))]
    assert len(rows) == 6 * len(names)
    for row in rows:
        assert row["reached"] == (row["ending"] == "reached") and 0 <= row["good_runs"] <= row["runs"]
        numbers = [row[key] for key in ("seconds", "value", "norm", *(["ratio"] if row["ratio"] is not None else []))]
        assert all(isinstance(number, float) and math.isfinite(number) for number in numbers)
        assert row["values"] > 0 and row["gradients"] > 0
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_a_few_late_runs_do_not_change_a_median() -> None:
    def ran(*endings: str) -> dict[str, object]:
        runs = [(peers.Watched(peers.rosenbrock(4), 1.0), 0.1) for _ in endings]
        for (watched, _), ending in zip(runs, endings, strict=True):
            watched.ending = ending
        return peers._row("method", runs, 0.1)

    good = "reached"
    assert ran(good, good, good, good)["reached"] and ran(good, good, peers.LATE, good)["reached"]
    assert not ran(good, peers.LATE, peers.LATE, good)["reached"] and not ran(peers.LATE)["reached"]
    mixed = ran(good, good, "failed: ValueError: no", good)
    assert not mixed["reached"] and mixed["good_runs"] == 3 and mixed["ending"] == "failed: ValueError: no"


def test_the_saddle_is_exact() -> None:
    problem = peers.saddle(True)
    x = problem.x0.clone().requires_grad_()
    problem.loss(x).backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("name", peers.PROBLEMS)
def test_scipy_gets_the_same_function(name: str) -> None:
    problem = peers.PROBLEMS[name](True)
    watched = peers.Watched(problem, math.inf, ends=False)
    bridge = peers.Bridge(watched, True)
    x = problem.x0.numpy() + 0.1
    v = np.linspace(-1, 1, len(x))
    point = torch.from_numpy(x)
    g, product = torch.autograd.functional.hvp(problem.loss, point, torch.from_numpy(v))
    assert bridge.value(x) == pytest.approx(float(g))
    assert bridge.gradient(x) == pytest.approx(torch.autograd.functional.jacobian(problem.loss, point).numpy())
    assert bridge.hessp(x, v) == pytest.approx(product.numpy(), abs=1e-12)
    assert (watched.values, watched.gradients, watched.products) == (1, 1, 1)


def test_products_of_vmap_are_all_counted() -> None:
    problem = peers.rosenbrock(10)
    watched = peers.Watched(problem, math.inf, dense=True, ends=False)
    x = problem.x0.clone().requires_grad_()
    (g,) = torch.autograd.grad(watched(x), x, create_graph=True)
    (hessian,) = torch.autograd.grad(g, x, torch.eye(10, dtype=torch.float64), is_grads_batched=True)
    assert torch.allclose(hessian, torch.autograd.functional.hessian(problem.loss, problem.x0))
    assert (watched.values, watched.gradients, watched.products) == (1, 1, 10)
    assert watched.norm == pytest.approx(float(torch.linalg.vector_norm(g.detach())))


def test_a_run_ends_where_it_is_reached_or_stuck() -> None:
    problem = peers.saddle(True)
    for start, ending, gradients in ((torch.ones_like(problem.x0), "reached", 1), (problem.x0, "stuck", 200)):
        watched = peers.Watched(problem, math.inf)
        x = start.clone().requires_grad_()
        with pytest.raises(Budget):
            repeat(watched, x)
        assert watched.ending.endswith(ending) and watched.gradients == gradients


def repeat(watched: peers.Watched, x: torch.Tensor) -> None:
    while True:
        watched(x).backward()


def test_a_failure_is_told() -> None:
    def fail(watched: peers.Watched, x0: torch.Tensor) -> None:
        raise ValueError("no good\nat all")

    watched, _ = peers.once(peers.rosenbrock(4), peers.Method(fail), 1.0)
    assert watched.ending == "failed: ValueError: no good"
    watched, _ = peers.once(peers.rosenbrock(4), peers.Method(spin), 0.1)
    assert watched.ending == "not reached: out of time"


def spin(watched: peers.Watched, x0: torch.Tensor) -> None:
    while True:  # never evaluates
        pass
