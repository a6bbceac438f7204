"""Runs of the laboratory: their traces, resumed runs, and workers that share a directory."""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from distributed import Client
from rich.console import Console

import made_runs
import sanc
from command_processes import command, kill, lines, wait_for, without_times
from made_runs import LOGISTIC
from sanc.lab import cli, cluster, datasets, experiments, runs
from sanc.lab.directory import BusyError, finished, reserved
from sanc.lab.experiments import Panel, RunSpec, Variant


@pytest.mark.parametrize("method", ["sanc", "scr", "cr", "ncd", "sgd", "crm"])
def test_the_trace_of_a_finite_sum_equals_a_run_of_minimize(tmp_path, method):
    folder = runs.execute(RunSpec(LOGISTIC, method, 0), tmp_path)
    trace = lines(folder)
    loaded = datasets.load("breast_cancer")
    problem = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)
    assert trace[0]["iteration"] == -1 and trace[0]["loss"] == pytest.approx(problem.value(np.ones(30)))
    budget = 20 * problem.n
    assert trace[-1]["paper_calls"] >= budget > trace[-2]["paper_calls"]
    assert [line["iteration"] for line in trace] == list(range(-1, len(trace) - 1))
    done = json.loads((folder / "done.json").read_text())
    assert done["status"] == "call limit" and done["loss"] == pytest.approx(trace[-1]["loss"])
    config = json.loads((folder / "config.json").read_text())
    assert config["batch_size"] == 29 and config["budget"] == budget and config["n"] == problem.n
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["sanc"] == sanc.__version__
    assert not (folder / "checkpoint.pt").exists()
    # the losses of the trace are those of a direct call
    seen = []

    def watch(intermediate_result):
        seen.append(problem.value(intermediate_result.x))

    tested = method in ("sanc", "scr")
    sanc.minimize(
        problem, np.ones(30), method=method, preset="paper", batch_size=29, objective_batch_size=None if tested else 29,
        seed=0, max_calls=budget, callback=watch, certify=False, **RunSpec(LOGISTIC, method, 0).variant.options,
    )  # fmt: skip
    measured = [(line["loss"], value) for line, value in zip(trace[1:], seen, strict=True) if line["loss"] is not None]
    assert len(measured) >= 30
    assert [a for a, _ in measured] == pytest.approx([b for _, b in measured], rel=1e-12)


@pytest.mark.parametrize("method", ["sanc", "sgd"])
def test_a_run_of_a_network_is_a_function_of_its_seed(tmp_path, method):
    panel = Panel("own-mlp", "own", "mlp", "digits", ("sanc",), {"sigma0": 1.0, "eta1": 0.1, "eta2": 0.3, "lr": 0.05},
                  batch=64, calls=3000, strength=0.001, widths=(16, 12))  # fmt: skip
    first = runs.execute(RunSpec(panel, method, 1), tmp_path / "a")
    second = runs.execute(RunSpec(panel, method, 1), tmp_path / "b")
    assert without_times(first) == without_times(second)
    trace = lines(first)
    assert trace[-1]["loss"] < trace[0]["loss"] and trace[-1]["paper_calls"] >= 3000
    other = runs.execute(RunSpec(panel, method, 2), tmp_path / "a")
    assert lines(other)[0]["loss"] != trace[0]["loss"]


def test_the_options_determine_whether_a_run_has_an_objective_sample():
    """The mini-batch iteration computes ρ on the gradient sample, with every way of choosing it."""
    for preset, options, on_samples in (
        ("paper", {}, False),
        ("paper", {"minibatch": sanc.Minibatch()}, True),
        ("robust", {}, True),
        ("robust", {"minibatch": None}, False),
    ):
        spec = RunSpec(replace(LOGISTIC, options=options), "sanc", 0, preset)
        assert spec.on_samples is on_samples
    assert not RunSpec(LOGISTIC, "cr", 0, "robust").on_samples


def test_methods_with_the_same_seed_have_the_same_start_and_samples(tmp_path):
    firsts = {
        lines(runs.execute(RunSpec(LOGISTIC, m, 3), tmp_path))[1]["grad_norm"] for m in ("sanc", "scr", "cr", "ncd")
    }
    assert len(firsts) == 1


class Killed(BaseException):
    pass


RESUMED = [("sanc", "paper"), ("crm", "paper"), ("sgd", "paper"), ("sanc", "robust"), ("scr", "robust")]


@pytest.mark.parametrize(("problem", "method", "preset"), [
    *(("logistic", *run) for run in RESUMED), ("mlp", "sanc", "robust"),
    *(pytest.param("mlp", *run, marks=pytest.mark.slow) for run in RESUMED if run != ("sanc", "robust")),
])  # fmt: skip
def test_a_run_resumes_after_any_iteration(tmp_path, problem, method, preset):
    """A run is stopped after random iterations, with checkpoints at other times; its trace is that of a whole run."""
    calls = 2000 if preset == "robust" or method == "sgd" else 4500  # about forty iterations
    panel = replace(LOGISTIC, calls=calls)
    if problem == "mlp":
        panel = Panel("own-mlp", "own", "mlp", "digits", (method,), {"eta1": 0.1, "eta2": 0.3, "lr": 0.05}, batch=32,
                      calls=calls, strength=0.001, widths=(16, 12))  # fmt: skip
    spec = RunSpec(panel, method, 0, preset)
    whole = without_times(runs.execute(spec, tmp_path / "whole"))
    rng = random.Random(method + problem)
    cuts = 0
    while not finished(tmp_path / "cut" / "runs" / spec.path):
        stop = rng.randrange(3, 10)
        made = []

        def tick(share, loss, branch, sigma, made=made, stop=stop):
            made.append(share)
            if len(made) == stop and cuts < 4:
                raise Killed

        every = rng.choice([0.0, 0.0, 0.01])
        try:
            runs.execute(spec, tmp_path / "cut", tick=tick, checkpoint_every=every)
        except Killed:
            cuts += 1
            trace = tmp_path / "cut" / "runs" / spec.path / "trace.jsonl"
            with open(trace, "ab") as file:  # a line that a kill has truncated
                file.write(b'{"iteration": 99, "lo')
    assert cuts == 4
    assert without_times(tmp_path / "cut" / "runs" / spec.path) == whole


def test_a_finished_run_is_not_repeated_and_another_configuration_is_an_error(tmp_path):
    spec = RunSpec(LOGISTIC, "sanc", 0)
    folder = runs.execute(spec, tmp_path)
    stamp = (folder / "trace.jsonl").stat().st_mtime_ns
    runs.execute(spec, tmp_path)
    assert (folder / "trace.jsonl").stat().st_mtime_ns == stamp
    (folder / "done.json").unlink()
    changed = RunSpec(replace(LOGISTIC, options={"sigma0": 0.5}), "sanc", 0)
    with pytest.raises(sanc.ArgumentError, match="holds a run with options"):
        runs.execute(changed, tmp_path)


def test_two_processes_never_share_a_run(tmp_path):
    spec = RunSpec(LOGISTIC, "sanc", 0)
    with reserved(tmp_path / "runs" / spec.path), pytest.raises(BusyError, match="wait until it ends") as error:
        runs.execute(spec, tmp_path)
    assert isinstance(error.value, sanc.SancError)
    runs.execute(spec, tmp_path)


ALONE = """
import sys
from pathlib import Path
from sanc.lab import runs
from sanc.lab.experiments import Panel, RunSpec
panel = Panel("own-logistic", "own", "logistic", "breast_cancer", ("sanc",), {"sigma0": 1.0}, calls=int(sys.argv[2]))
runs.execute(RunSpec(panel, "sanc", 0), Path(sys.argv[1]), checkpoint_every=0.05)
"""


@pytest.mark.slow
def test_a_run_resumes_after_a_kill_with_the_same_trace(tmp_path):
    """A process is killed at a random time after its first checkpoint, and the run is resumed in this process."""
    calls = 200_000
    with command(sys.executable, "-c", ALONE, str(tmp_path / "cut"), str(calls)) as process:
        wait_for(process, lambda: list(tmp_path.glob("cut/runs/*/*/*/checkpoint.pt")))
        time.sleep(random.Random(7).uniform(0.0, 0.2))
        kill(process)
    spec = RunSpec(replace(LOGISTIC, calls=calls), "sanc", 0)
    assert not finished(tmp_path / "cut" / "runs" / spec.path)
    first, second = (runs.execute(spec, tmp_path / name) for name in ("cut", "whole"))
    assert without_times(first) == without_times(second)


def run_all(specs, out, scheduler, **more):
    return cluster.run_all(
        specs, out, data_dir=out / "data", workers=2, console=Console(quiet=True), scheduler=scheduler, **more
    )


def test_every_run_is_made_once_and_errors_are_reported(tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr(cluster, "TIMEOUT", 0.5)
    specs = experiments.specs([replace(LOGISTIC, methods=("sanc", "scr"))], 2, "paper", "cpu")
    missing = RunSpec(replace(LOGISTIC, name="missing", data="w1a"), "sanc", 0)
    busy = tmp_path / "runs" / specs[0].path
    with reserved(busy):
        outcome = run_all([*specs, missing], tmp_path, scheduler)
    assert (outcome.finished, outcome.finished_before, outcome.elsewhere) == (3, 0, 1)
    assert "w1a is not in" in outcome.failed["missing/sanc/seed-0"]
    again = run_all(specs, tmp_path, scheduler)
    assert (again.finished, again.finished_before, again.elsewhere, again.failed) == (1, 3, 0, {})
    with pytest.raises(sanc.ArgumentError, match=r"--scheduler '127.0.0.1:9' cannot be reached"):
        run_all([missing], tmp_path, "127.0.0.1:9")


def test_a_cancelled_run_releases_its_directory(tmp_path, scheduler):
    """The command is interrupted or killed, while the workers of the cluster continue."""
    spec = RunSpec(replace(LOGISTIC, calls=10**9), "sanc", 0)
    folder = tmp_path / "runs" / spec.path
    with Client(scheduler, set_as_default=False) as client:
        future = client.submit(cluster._run, spec, "topic", tmp_path, None, 0.0)
        deadline = time.monotonic() + 60
        while not (folder / "checkpoint.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        future.cancel()
    held = True
    while held and time.monotonic() < deadline:
        with suppress(BusyError), reserved(folder):
            held = False
        time.sleep(0.05)
    assert not held and not finished(folder)


def test_progress_bars_show_loss_sigma_and_branches(tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr(cluster, "PAUSE", 0.0)
    path = tmp_path / "screen"
    with path.open("w") as screen:
        specs = [RunSpec(replace(LOGISTIC, calls=30_000), "sanc", 0)]
        console = Console(file=screen, force_terminal=True, width=150)
        outcome = cluster.run_all(specs, tmp_path, data_dir=None, workers=1, console=console, scheduler=scheduler)
    shown = path.read_text()
    assert outcome.finished == 1 and "all 1 runs" in shown
    for word in ("own-logistic/sanc/seed-0", "loss", "σ", "━"):
        assert word in shown


def test_an_iteration_without_a_trial_step_keeps_the_loss(tmp_path):
    """If SANC stays without evaluating f, the loss on all rows is that of the iteration before."""
    panel = Panel("e", "own", "logistic", "breast_cancer", ("sanc",), {"epsilon": 1.0}, calls=100_000)
    trace = lines(runs.execute(RunSpec(panel, "sanc", 0, "authors"), tmp_path))
    stayed = [(a, b) for a, b in pairwise(trace) if b.get("branch") == "stayed"]
    assert any(b["trials"] == 0 for _, b in stayed)
    assert all(a["loss"] == b["loss"] for a, b in stayed)


@pytest.mark.parametrize(("preset", "options", "words"), [
    ("robust", {}, ""), ("robust", {"sigma0": None}, ""), ("robust", {"sigma0": 0.3}, ", σ0 = 0.3"),
    ("paper", {}, ", σ0 = 1"),
])  # fmt: skip
def test_the_subtitle_shows_the_sigma0_of_the_run(preset, options, words):
    spec = RunSpec(replace(LOGISTIC, options=options), "sanc", 0, preset)
    subtitle = runs.configuration(spec, 569, 30, "")["subtitle"]
    assert subtitle == f"logistic regression{words} (n = 569, d = 30)"


@pytest.mark.usefixtures("without_figures")
def test_tables_count_finished_runs(tmp_path):
    rows = [made_runs.line(-1, 1.0, 0), made_runs.line(0, 0.5, 9, branch="stayed")]
    for seed in range(3):
        made_runs.write_run(tmp_path, "own", "sanc", seed, rows, done=seed == 0, figure="own")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "| SANC | 1 of 3 |" in (tmp_path / "summary.md").read_text()
    assert ">1 of 3<" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("without_figures")
def test_methods_with_different_seeds_are_not_compared(tmp_path):
    for method, seed in (("sanc", 0), ("sgd", 1)):
        rows = [made_runs.line(-1, 1.0, 0), made_runs.line(0, 0.5, 9, branch="gradient")]
        made_runs.write_run(tmp_path, "fig2b-segment", method, seed, rows, figure="fig2b", problem="mlp")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "claims.json").read_text()) == {"claims": []}


def test_a_finite_sum_uses_the_variant_and_the_unit_of_its_panel(tmp_path):
    """The unit "calls" counts all evaluations."""
    variants = {"mine": Variant("scr", "paper", {"sigma0": 0.5})}
    panel = replace(
        LOGISTIC, name="counted", methods=("mine",), variants=variants, calls=3000, unit="calls", options={}
    )
    folder = runs.execute(RunSpec(panel, "mine", 0, "robust"), tmp_path)
    *_, before, last = lines(folder)
    spent = [sum(line[name] for name in ("value", "gradient", "product")) for line in (before, last)]
    assert spent[0] < 3000 <= spent[1] and json.loads((folder / "done.json").read_text())["status"] == "call limit"
    assert lines(folder)[1]["sigma"] == 0.5 and json.loads((folder / "config.json").read_text())["preset"] == "paper"
    for changes, word in (({"problem": "foo"}, "problem = 'foo'"), ({"unit": "foo"}, "unit = 'foo'")):
        with pytest.raises(sanc.ArgumentError, match=word):
            runs.execute(RunSpec(replace(panel, name=word[:4], **changes), "mine", 0), tmp_path)


@pytest.mark.parametrize("unit", ["paper_calls", "calls"])
def test_a_run_killed_after_its_last_step_makes_no_further_step(tmp_path, monkeypatch, unit):
    spec = RunSpec(replace(LOGISTIC, name="end", calls=3000, unit=unit), "sanc", 0, "paper")
    whole = without_times(runs.execute(spec, tmp_path / "whole"))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs.Journal, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runs.execute(spec, tmp_path / "cut", checkpoint_every=0.0)
    assert without_times(runs.execute(spec, tmp_path / "cut")) == whole
