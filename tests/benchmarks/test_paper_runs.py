"""Runs on the paper's problems: variants after a rejection, pairs of seeds, files, and the tables on the pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("typer")

import sanc
from benchmarks import first_order, paper_runs, rejections, sensitivity


def run(final: float, losses: list[float] | None = None, **key: Any) -> paper_runs.Run:
    losses = losses or [5.0, final]
    calls = [10 * k for k in range(len(losses))]
    return {
        "key": key,
        "n": 10,
        "calls": calls,
        "loss": losses,
        "final": final,
        "branches": {"gradient": 1, "stayed": 3},
    }


# ---------------------------------------------------------------------------------------------- variants


@dataclass(frozen=True, kw_only=True)
class WithoutCurvature(sanc.PaperEscape):
    """The rule of the paper without its branch of negative curvature."""

    def choose(self, ritz_value: float, grad_norm: float, *, model_proposes: bool) -> tuple[sanc.Branch, float]:
        return sanc.Branch.GRADIENT, 1.0 / self.L1


def test_scr_with_a_gradient_step_is_sanc_without_negative_curvature() -> None:
    problem = paper_runs.problem_of("breast_cancer")
    options = {"preset": "paper", "sigma0": 0.001}
    scr = paper_runs.run_sum(problem, 1, method="scr", **options, **rejections.arguments_of("gradient", 10.0, 10.0))
    without = paper_runs.run_sum(problem, 1, **options, escape=WithoutCurvature(L1=10.0, L2=10.0))
    del scr["seconds"], without["seconds"]
    assert scr == without and scr["branches"]["gradient"] > 10


def test_the_variants_differ_in_what_follows_a_rejection() -> None:
    made = {name: rejections.run_logistic("breast_cancer", None, 0.001, name, 0) for name in rejections.VARIANTS}
    after = {name: run["branches"].keys() - {"successful", "very successful"} for name, run in made.items()}
    assert after == {
        "sanc": {"gradient"}, "scr": {"stayed"}, "gradient": {"gradient"}, "checked": {"gradient", "stayed"},
        "curvature": {"curvature", "stayed"}, "growing": {"stayed"},
    }  # fmt: skip
    assert made["growing"]["calls"][-1] - made["growing"]["calls"][-2] > made["scr"]["calls"][1]


def test_curvature_alone_steps_wherever_the_ritz_value_is_negative() -> None:
    escape = rejections.CurvatureAlone(L1=10.0, L2=4.0)
    assert escape.choose(-0.5, 100.0, model_proposes=True) == (sanc.Branch.CURVATURE, 0.25)
    assert escape.choose(0.0, 100.0, model_proposes=True)[0] is sanc.Branch.STAYED


def test_no_step_of_the_paper_leaves_the_saddle_of_the_autoencoder() -> None:
    """At zero weights the gradient is in the biases, and so is every vector of its Krylov space."""
    x, y = rejections.tensors("digits", None)
    model, loss_of, _ = rejections.network_of("autoencoder, saddle", x, y, 0)
    loss_of(x[:50], y[:50]).backward()
    sizes = [float(p.grad.norm()) for p in model.parameters()]
    assert sizes[:3] == [0.0, 0.0, 0.0] and sizes[3] > 0.01


# ---------------------------------------------------------------------------------------------- numbers


def test_numbers_by_hand() -> None:
    ours = paper_runs.chosen(
        [run(1.0, seed=0, data="a"), run(2.0, seed=1, data="a"), run(9.0, seed=1, data="b")], data="a"
    )
    theirs = paper_runs.chosen([run(1.5, seed=1), run(1.2, seed=0), run(7.0, seed=2)])
    assert paper_runs.differences(ours, theirs, 2.0) == pytest.approx([-0.1, 0.25])
    assert paper_runs.least([run(3.0, [5.0, 1.0, 3.0], data="a"), run(0.1, data="b")], "a") == 1.0
    assert paper_runs.calls_to(run(1.0, [5.0, 2.0, 1.0]), 2.5) == 1.0 and paper_runs.calls_to(ours[0], 0.5) == math.inf
    assert paper_runs.percent([0.01, 0.01]) == "+1.00 [+1.00, +1.00]"
    assert paper_runs.calls([run(1.0, [5.0, 1.0]), run(3.0)], 0.5) == "∞"
    assert rejections.branches_of([run(1.0), run(2.0)], "gradient") == "25"


def test_the_best_rate_is_chosen_by_the_mean_final_loss_of_half_the_seeds() -> None:
    runs = []
    for place, rate in enumerate(first_order.RATES["sgd"]):
        for schedule in first_order.SCHEDULES:
            for seed in range(2):
                final = 1.0 + abs(place - 2) + (schedule == "linear") * 0.1 - 5 * (rate == 3.0 and seed == 1)
                key = {"data": "a", "peer": "sgd", "rate": rate, "schedule": schedule, "seed": seed}
                runs.append(run(final, **key))
    assert first_order.best_of(runs, "a", "sgd", 2) == (first_order.RATES["sgd"][2], "constant")


def test_a_file_of_runs_is_resumed_and_does_not_depend_on_the_order(tmp_path: Path) -> None:
    made = []

    def job(seed: int) -> Any:
        def work() -> paper_runs.Run:
            made.append(seed)
            return {"final": float(seed)}

        return {"seed": seed}, work

    first, second = tmp_path / "a.xz", tmp_path / "b.xz"
    paper_runs.make(first, [job(1)])
    runs = paper_runs.make(first, [job(1), job(0)])
    paper_runs.make(second, [job(0), job(1)])
    assert made == [1, 0, 0, 1] and first.read_bytes() == second.read_bytes()
    assert paper_runs.read(first) == runs == [{"key": {"seed": k}, "final": float(k)} for k in (0, 1)]
    assert paper_runs.read(tmp_path / "none.xz") == []


# ---------------------------------------------------------------------------------------------- commands


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [sensitivity, rejections, first_order])
def test_quick_commands(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl.xz"
    more = ["--figure", str(tmp_path)] if benchmark is sensitivity else []
    assert benchmark.main(["--quick", "--runs", str(path), *more]) == 0
    assert "breast_cancer" in capsys.readouterr().out and paper_runs.read(path)
    assert not more or (tmp_path / "sensitivity.png").stat().st_size > 10_000
