"""The laboratory: resumed runs, workers that share a directory, and the command line."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import Client
from rich.console import Console
from typer.testing import CliRunner

import made_runs
import sanc
from made_runs import LOGISTIC
from sanc.lab import cli, cluster, datasets, experiments, runs
from sanc.lab.directory import BusyError, finished, reserved
from sanc.lab.experiments import Panel, RunSpec, Variant
from sanc.lab.traces import read


def lines(folder):
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def without_times(folder):
    """Return the lines of the trace without times, which must be equal byte for byte."""
    kept = []
    for line in lines(folder):
        line.pop("seconds")
        kept.append(json.dumps(line))
    return kept


@contextmanager
def command(*arguments):
    """Start a process in a new process group, which is killed at the end.

    The process receives SIGINT even if these tests ignore it, as in the background of a shell. An ignored signal would
    be inherited, whereas a handler becomes the default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        kill(process)


def kill(process):
    """Kill the process group of a command and return its output."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=60)[0]


def sanc_command(*arguments):
    return command(sys.executable, "-m", "sanc", *arguments)


def wait_for(process, condition, seconds=240):
    """Wait until a condition holds, or fail with the output of the command. Importing torch can take minutes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the command ended with {process.poll()}, or hung: {kill(process)}")
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- one run


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
    with reserved(tmp_path / "runs" / spec.path), pytest.raises(BusyError):
        runs.execute(spec, tmp_path)
    runs.execute(spec, tmp_path)


# ---------------------------------------------------------------------------------------------- many runs

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


# ---------------------------------------------------------------------------------------------- whole commands

RUN = ["run", "--data", "breast_cancer", "--methods", "sanc,scr", "--runs", "2", "--workers", "2", "--budget", "60000"]
ENDLESS = [*RUN[:-1], "100000000"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    with sanc_command(*RUN, "--out", str(out)) as process:
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return out, text


@pytest.mark.slow
def test_a_command_with_local_processes_writes_a_report(uninterrupted):
    out, text = uninterrupted
    assert "4 runs in 1 panel " in text and "4 runs finished" in text and len(read(out)) == 4
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_a_command_resumes_after_kills_with_the_same_traces(tmp_path, uninterrupted):
    """Kill the whole process group, twice; the final traces equal those of an uninterrupted run."""
    whole, _ = uninterrupted
    rng = random.Random(7)
    again = [*RUN, "--out", str(tmp_path), "--checkpoint-every", "0.05"]

    def written():
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/*/trace.jsonl")}

    def all_done():
        return len(list(tmp_path.glob("runs/*/*/*/done.json"))) == 4

    for _ in range(2):
        seen = written()
        with sanc_command(*again) as process:
            wait_for(process, lambda seen=seen: written() != seen or all_done())  # the imports take seconds
            time.sleep(rng.uniform(0.0, 1.0))
    with sanc_command(*again) as process:
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    for folder in sorted((whole / "runs").glob("*/*/*")):
        assert without_times(tmp_path / "runs" / folder.relative_to(whole / "runs")) == without_times(folder)


@pytest.mark.slow
def test_ctrl_c_prints_how_to_resume(tmp_path):
    """A terminal sends SIGINT to the whole process group; the workers leave it to the command."""
    with sanc_command(*ENDLESS, "--out", str(tmp_path), "--checkpoint-every", "0.1") as process:
        wait_for(process, lambda: list(tmp_path.glob("runs/*/*/*/checkpoint.pt")))
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Checkpoints are kept" in text and "same command" in text and "Traceback" not in text
    assert list(tmp_path.glob("runs/*/*/*/checkpoint.pt"))


@pytest.mark.slow
def test_two_commands_share_one_directory(tmp_path, uninterrupted, scheduler):
    whole, _ = uninterrupted
    again = [*RUN, "--out", str(tmp_path)]
    with sanc_command(*again) as one, sanc_command(*again) as other:
        both = [one, other]
        texts = [process.communicate(timeout=240)[0] for process in both]
    assert 0 in [process.returncode for process in both], texts
    last = CliRunner().invoke(cli.app, [*again, "--scheduler", scheduler])
    assert last.exit_code == 0 and "4 were finished before" in last.output
    for folder in sorted((whole / "runs").glob("*/*/*")):
        assert without_times(tmp_path / "runs" / folder.relative_to(whole / "runs")) == without_times(folder)


def children(process):
    return subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()


needs_pgrep = pytest.mark.skipif(
    shutil.which("pgrep") is None, reason="finds the workers with pgrep, which is not installed"
)


@pytest.mark.slow
@needs_pgrep
def test_another_worker_resumes_the_run_of_a_killed_worker(tmp_path):
    long = [*RUN[:-1], "600000", "--runs", "1", "--out", str(tmp_path), "--checkpoint-every", "0.1"]
    with sanc_command(*long) as process:
        wait_for(process, lambda: list(tmp_path.glob("runs/*/*/*/checkpoint.pt")))
        for worker in children(process):
            if b"spawn_main" in Path(f"/proc/{worker}/cmdline").read_bytes():
                os.kill(int(worker), signal.SIGKILL)
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "2 runs finished" in text, text


@contextmanager
def cluster_of_three(folder):
    """Start a scheduler and three workers, as on separate machines; return its address and the workers."""
    found = folder / "scheduler.json"
    dask = (sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(found), "--no-dashboard")
    with ExitStack() as stack:
        head = (sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard")
        first = stack.enter_context(command(*head, "--host", "127.0.0.1", "--scheduler-file", str(found)))
        wait_for(first, found.exists)
        quiet = ("--no-nanny", "--nthreads", "1", "--local-directory", str(folder / "scratch"))
        workers = [stack.enter_context(command(*dask, *quiet)) for _ in range(3)]
        address = json.loads(found.read_text())["address"]
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(3, timeout=240)
        yield address, workers


@pytest.mark.slow
def test_a_cluster_with_a_killed_worker_makes_the_same_files(tmp_path, uninterrupted):
    whole, _ = uninterrupted
    out = tmp_path / "out"
    with cluster_of_three(tmp_path) as (address, workers):
        again = [*RUN, "--out", str(out), "--scheduler", address, "--checkpoint-every", "0.05"]
        with sanc_command(*again) as process:
            wait_for(process, lambda: list(out.glob("runs/*/*/*/checkpoint.pt")))
            kill(workers[0])
            text, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "4 runs finished" in text, text
    folders = sorted((whole / "runs").glob("*/*/*"))
    assert len(folders) == 4
    for folder in folders:
        other = out / "runs" / folder.relative_to(whole / "runs")
        assert without_times(other) == without_times(folder)
        assert {path.name for path in other.iterdir()} == {path.name for path in folder.iterdir()}


@pytest.mark.slow
@needs_pgrep
def test_workers_exit_with_a_killed_command_even_while_they_start(tmp_path):
    """Kill only the command while its workers import modules. They keep its output open until they exit."""
    with sanc_command(*ENDLESS, "--out", str(tmp_path)) as process:
        wait_for(process, lambda: len(children(process)) >= 3)  # two workers and the resource tracker
        process.kill()
        process.communicate(timeout=120)


def test_the_command_prints_its_runs_and_the_path_of_the_report(tmp_path, scheduler):
    short = [*RUN[:-1], "3000", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, [*short, "--scheduler", scheduler])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "4 runs in 1 panel " in text and "about" in text and "4 runs finished" in text
    assert "report.html" in text and (tmp_path / "report.html").exists()
    assert (tmp_path / "figures" / "own-logistic-breast_cancer.png").exists()
    assert json.loads((tmp_path / "claims.json").read_text()) == {
        "claims": []
    }  # the claims concern the panels of the paper
    summary = (tmp_path / "summary.md").read_text()
    assert "| SANC | 2 |" in summary and f"torch {torch.__version__}" in summary
    assert len(read(tmp_path)) == 4
    for more, word in ((["--preset", "authors"], "preset|batch_size"), (["--set", "sigma0=0.5"], "options")):
        with pytest.raises(sanc.ArgumentError, match=rf"holds a run with ({word})"):
            CliRunner().invoke(cli.app, [*short, *more], catch_exceptions=False)


def test_an_interrupt_prints_how_to_resume(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "load_data", interrupt)
    assert cli.main([*RUN, "--out", str(tmp_path)]) == 130
    assert "Checkpoints are kept" in capsys.readouterr().out


def test_an_iteration_without_a_trial_step_keeps_the_loss(tmp_path):
    """If SANC stays without evaluating f, the loss on all rows is that of the iteration before."""
    panel = Panel("e", "own", "logistic", "breast_cancer", ("sanc",), {"epsilon": 1.0}, calls=100_000)
    trace = lines(runs.execute(RunSpec(panel, "sanc", 0, "authors"), tmp_path))
    stayed = [(a, b) for a, b in pairwise(trace) if b.get("branch") == "stayed"]
    assert any(b["trials"] == 0 for _, b in stayed)
    assert all(a["loss"] == b["loss"] for a, b in stayed)


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.usefixtures("without_figures")
def test_a_grid_of_settings_makes_a_curve_for_each_value(tmp_path, scheduler):
    arguments = ["run", "--data", "breast_cancer", "--methods", "sanc,cr", "--preset", "paper", "--runs", "1"]
    arguments += ["--budget", "3000", "--scheduler", scheduler, "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, [*arguments, "--set", "eta1=0.1,0.4", "--set", "L1=20"])
    assert result.exit_code == 0, result.output
    found = {run.method: run for run in read(tmp_path)}
    assert list(found) == ["sanc-eta1=0.1", "sanc-eta1=0.4", "cr"]
    assert [found[f"sanc-eta1={value}"].config["options"]["eta1"] for value in (0.1, 0.4)] == [0.1, 0.4]
    assert all(found[f"sanc-eta1={value}"].config["options"]["L1"] == 20 for value in (0.1, 0.4))
    single = runs.execute(
        RunSpec(
            replace(LOGISTIC, name="single", methods=("sanc",), options={"eta1": 0.4, "L1": 20}, calls=3000), "sanc", 0
        ),
        tmp_path / "b",
    )
    assert without_times(single) == without_times(tmp_path / "runs" / found["cr"].panel / "sanc-eta1=0.4" / "seed-0")
    assert "SANC, eta1 = 0.4" in (tmp_path / "report.html").read_text()


# ---------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "fig7"], ["'fig7'", "choose from all, fig1"]),
        (["reproduce", "fig1", "--data", "mnist"], ["'mnist'"]),
        (["reproduce", "fig1", "--methods", "adam"], ["'adam'"]),
        (["reproduce", "fig1", "--preset", "papr"], ["'papr'"]),
        (["reproduce", "fig1", "--device", "tpu"], ["'tpu'"]),
        (["reproduce", "fig1", "--set", "eta3=1"], ["--set = 'eta3'", "eta1"]),
        (["reproduce", "fig1", "--set", "eta1=0.1,2"], ["eta1 = 2", "between 0 and 1"]),
        (["reproduce", "fig1", "--set", "krylov_dim=many"], ["krylov_dim = 'many'", "integer"]),
        (["reproduce", "fig1", "--set", "eta1="], ["'eta1='", "name=value"]),
        (["reproduce", "fig1", "--set", "eta1=0.1,,0.2"], ["'eta1=0.1,,0.2'", "name=value"]),
        (["reproduce", "fig1", "--set", "eta1=0.1", "--set", "eta1=0.2"], ["repeats eta1", "eta1=value,value"]),
        (["reproduce", "fig2a", "--methods", "cr,ncd", "--set", "eta1=0.1"], ["eta1 has no effect on cr, ncd"]),
        (["reproduce", "fig2b", "--set", "sampling=buffered"], ["sampling has no effect", "fig2b"]),
        (["run", "--data", "nothing"], ["'nothing'"]),
        (["run", "--set", "sigma_0=1"], ["'sigma_0'", "did you mean 'sigma0'"]),
        (["run", "--set", "sigma0"], ["name=value"]),
        (["run", "--methods", "arc"], ["'arc'"]),
        (["run", "--problem", "svn"], ["'svn'"]),
        (["run", "--from", "none.toml"], ["none.toml"]),
        (["run", "--from", "none.toml", "--data", "iris"], ["--data conflicts with --from"]),
        (["run", "--name", "../evil"], ["--name '../evil'"]),
        (["run", "--data", "iris", "--problem", "logistic"], ["needs two classes", "softmax"]),
        (["run", "--data", "wine", "--problem", "cnn"], ["needs square images", "mlp"]),
        (["run", "--data", "iris", "--problem", "mlp", "--activation", "gelu"], ["'gelu'", "choose from relu, tanh"]),
        (["run", "--data", "breast_cancer", "--activation", "relu"], ["--activation 'relu'", "no effect"]),
        (["run", "--data", "breast_cancer", "--batch", "100000"], ["--batch 100000", "569"]),
        (["run", "--data", "breast_cancer", "--strength", "-1"], ["strength = -1.0"]),
        (["run", "--data", "breast_cancer", "--set", "sigma0=-1"], ["sigma0 = -1"]),
        (["run", "--data", "breast_cancer", "--set", "sigma0=abc"], ["sigma0 = 'abc'"]),
        (["run", "--data", "breast_cancer", "--set", "lr=0.1"], ["'lr'", "no effect"]),
        (["run", "--data", "breast_cancer", "--methods", ""], ["--methods is empty"]),
        (["run", "--data", "breast_cancer", "--out", "/dev/null/x"], ["/dev/null/x", "permissions"]),
        (["reproduce", "fig1", "--methods", "arc"], ["'arc'"]),
        (["datasets", "get", "w1b"], ["'w1b'", "choose from a9a", "w1a"]),
        (["report", "nowhere"], ["nowhere", "no runs"]),
        (["datasets", "get"], ["--all"]),
        (["diagnose", "none.pt", "none.npz"], ["none.pt does not exist", "torch.save(model, path)"]),
        (["demo", "--budget", "0"], ["--budget"]),
        (["demo", "--batch", "5000"], ["--batch 5000", "1438"]),
    ],
)
def test_errors_of_the_command_line_name_the_argument(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    text = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "command", [[], ["reproduce"], ["run"], ["datasets"], ["datasets", "get"], ["report"], ["diagnose"], ["demo"]]
)
def test_every_command_has_help(command):
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.usefixtures("without_figures")
def test_options_are_read_from_a_toml_file(tmp_path, scheduler):
    file = tmp_path / "mine.toml"
    file.write_text('problem = "svm"\ndata = "breast_cancer"\nmethods = ["sanc"]\nbudget = 3000\nstrength = 0.01\n'
                    'name = "mine"\n[options]\nsigma0 = 0.5\n')  # fmt: skip
    out = tmp_path / "out"
    result = CliRunner().invoke(
        cli.app, ["run", "--from", str(file), "--runs", "1", "--scheduler", scheduler, "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    (trace,) = read(out)
    assert trace.config["problem"] == "svm" and trace.config["options"]["sigma0"] == 0.5 and trace.panel == "mine"
    for text, word in (
        ('problm = "svm"', "did you mean 'problem'"),
        ("options = 3", "options = 3"),
        ('methods = "sanc"', "methods = 'sanc'"),
        ('data = "iris"\nproblem = "softmax"\nbudget = 2000.5', r"--budget = 2000\.5"),
    ):
        file.write_text(text)
        with pytest.raises(sanc.ArgumentError, match=word):
            CliRunner().invoke(
                cli.app, ["run", "--from", str(file), "--out", str(tmp_path / "x")], catch_exceptions=False
            )


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(("problem", "data"), [("softmax", "iris"), ("mlp", "wine"), ("cnn", "digits")])
def test_every_problem_on_bundled_data(tmp_path, scheduler, problem, data):
    result = CliRunner().invoke(
        cli.app, ["run", "--problem", problem, "--data", data, "--methods", "sanc,sanc,cr", "--runs", "1",
                  "--scheduler", scheduler, "--budget", "100", "--batch", "20", "--set", "sigma0=2.5", "--out",
                  str(tmp_path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = {trace.method: trace for trace in read(tmp_path)}
    assert set(found) == {"sanc", "cr"}
    assert all(
        trace.config["options"]["sigma0"] == 2.5 and trace.config["batch_size"] == 20 for trace in found.values()
    )


def test_panels_without_data_are_skipped_and_recorded(tmp_path):
    empty = tmp_path / "data"
    empty.mkdir()
    result = CliRunner().invoke(
        cli.app, ["reproduce", "fig4", "--data-dir", str(empty), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 1 and "No panel has its data" in result.output
    skipped = json.loads((tmp_path / "out" / "skipped.json").read_text())
    assert set(skipped) == {"fig4-w8a", "fig4-a9a"} and "w8a" in skipped["fig4-w8a"]
    listed = CliRunner().invoke(cli.app, ["datasets", "--data-dir", str(empty)])
    assert listed.exit_code == 0 and all(name in listed.output for name in datasets.CATALOGUE)


@pytest.mark.parametrize(
    ("missing", "run", "code", "wanted"),
    [
        ("typer", "sanc.__main__.main()", 1, "needs typer: install the extra lab"),
        ("typer", "sys.argv[1:] = ['--version']; sys.exit(sanc.__main__.main())", 0, f"sanc {sanc.__version__}"),
        ("typer", "sys.argv[1:] = ['--help']; sys.exit(sanc.__main__.main())", 0, "pip install 'sanc[lab]'"),
        ("sklearn", "import sanc.sklearn", 1, "pip install 'sanc[sklearn]'"),
    ],
)
def test_the_core_works_without_extras_and_the_error_names_the_missing_one(missing, run, code, wanted):
    program = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['demo']; import sanc.__main__; {run}"
    with command(sys.executable, "-c", program) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == code and wanted in text


# ---------------------------------------------------------------------------------------------- unusual input

SMALL = ["run", "--data", "breast_cancer", "--runs", "1", "--budget", "3000", "--workers", "1"]


@pytest.mark.usefixtures("without_figures")
def test_runs_with_other_settings_cannot_join_a_panel(tmp_path, scheduler, capsys):
    where = ["--out", str(tmp_path), "--scheduler", scheduler]
    assert cli.main([*SMALL, "--methods", "sanc", *where]) == 0
    for more, word in ((["--strength", "0.01"], "strength"), (["--batch", "100"], "batch_size"),
                       (["--preset", "paper"], "preset"), (["--problem", "svm", "--name", "own-logistic-breast_cancer"],
                                                           "problem")):  # fmt: skip
        assert cli.main([*SMALL, "--methods", "scr", *more, *where]) == 2
        assert f"holds a run with {word}" in capsys.readouterr().err
    assert cli.main([*SMALL, "--methods", "scr", *where]) == 0
    assert len(read(tmp_path)) == 2


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


@pytest.mark.usefixtures("without_figures")
def test_a_damaged_list_of_skipped_panels_is_an_error(tmp_path, capsys):
    rows = [made_runs.line(-1, 1.0, 0), made_runs.line(0, 0.5, 9, branch="gradient")]
    made_runs.write_run(tmp_path, "own", "sgd", 0, rows, figure="own")
    (tmp_path / "skipped.json").write_text('{"a":')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "Remove that file" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.usefixtures("without_figures")
def test_output_folders_may_have_brackets_in_their_names(tmp_path, scheduler, capsys):
    out = tmp_path / "out[/]x[a]"
    assert cli.main([*SMALL, "--methods", "sgd", "--out", str(out), "--scheduler", scheduler]) == 0
    assert str(out / "report.html") in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("address", ["foo", "", "tcp:"])
def test_an_invalid_scheduler_address_is_an_error(tmp_path, address, capsys):
    assert cli.main([*SMALL, "--methods", "sgd", "--out", str(tmp_path), "--scheduler", address]) == 2
    assert "is not an address" in capsys.readouterr().err


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


def test_errors_name_unsuitable_options_and_batches(tmp_path, capsys):
    (tmp_path / "few.csv").write_text("".join(f"{k},{k % 2}\n" for k in range(12)))
    for arguments, words in (
        (["run", str(tmp_path / "few.csv"), "--preset", "authors"], "--batch = 0"),
        ([*SMALL, "--problem", "mlp", "--set", "sampling=buffered"], "'sampling' has no effect on mlp"),
    ):
        assert cli.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err


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
