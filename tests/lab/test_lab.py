"""The laboratory: panels, runs that survive a kill, workers that share a directory, claims, and the command line."""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import sanc
from sanc.lab import bundled, claims, cli, experiments, models, pool, runs
from sanc.lab.experiments import FIGURES, Panel, RunSpec
from sanc.lab.traces import read

OWN = Panel("own-logistic", "own", "logistic", "breast_cancer", ("sanc", "scr", "cr", "ncd", "sgd"), {"sigma0": 1.0})


def lines(folder):
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def timeless(folder):
    """The trace without its times: what must be equal byte for byte."""
    kept = []
    for line in lines(folder):
        line.pop("seconds")
        kept.append(json.dumps(line))
    return kept


@contextmanager
def command(*arguments):
    """Start a process, the head of a group of its own; whatever is left of the group at the end is killed.

    It takes SIGINT even where these tests do not, as in the background of a shell: what is ignored here would be
    ignored there, whereas a handler of ours becomes the default.
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
    """Kill the whole group of a command and return what it said."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=60)[0]


def sanc_command(*arguments):
    return command(sys.executable, "-m", "sanc.lab.cli", *arguments)


def wait_for(process, what, seconds=240):
    """Wait until a command has got so far, or fail with what it said; a slow machine takes a while to import torch."""
    deadline = time.monotonic() + seconds
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the command ended with {process.poll()}, or hung: {kill(process)}")
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- experiments


def test_the_panels_are_the_papers():
    assert {name: [panel.data for panel in panels] for name, panels in FIGURES.items()} == {
        "fig1": ["w1a", "higgs", "ijcnn1", "covtype"],
        "fig2a": ["w1a", "higgs"],
        "fig2b": ["seismic", "segment"],
        "fig2c": ["mnist", "cifar10"],
        "fig3": ["w8a", "a9a", "covtype", "ijcnn1"],
        "fig4": ["w8a", "a9a"],
        "fig5": ["mnist", "cifar10"],
    }
    for name in ("fig1", "fig4"):
        assert all(p.options["sigma0"] == 0.001 and p.methods == ("sanc", "scr") for p in FIGURES[name])
    for name in ("fig2a", "fig3"):
        assert all(
            p.options["sigma0"] == 1.0 and {"sanc", "scr", "cr", "ncd", "sgd"} <= set(p.methods) for p in FIGURES[name]
        )
    for name, kind in (("fig2c", "tanh"), ("fig5", "relu")):
        for p in FIGURES[name]:
            assert (p.activation, p.batch, p.strength, p.methods) == (kind, 128, 0.01, ("sanc", "scr", "ncd", "sgd"))
            assert p.options["eta1"] == 0.1 and p.options["eta2"] == 0.3


def test_settings_of_a_run():
    panel = FIGURES["fig3"][2]  # covtype
    by = {method: RunSpec(panel, method, 0).settings() for method in panel.methods}
    assert by["sanc"] == {"L1": 10.0, "L2": 100.0, "sigma0": 1.0}
    assert by["cr"]["sigma0"] == 5.0 and by["sgd"] == {"lr": 0.01}
    network = FIGURES["fig2c"][1]
    assert RunSpec(network, "sgd", 0).settings() == {"lr": 0.001}
    assert RunSpec(network, "sanc", 0).settings()["L1"] == 1000.0
    assert panel.batch_size(2477, "paper") == 124 and panel.batch_size(2477, "authors") == 123
    assert panel.budget(1000) == 20_000 and network.budget(1000) == 750_000


def test_selecting():
    assert len(experiments.select(["all"])) == sum(len(panels) for panels in FIGURES.values())
    (one,) = experiments.select(["fig3"], data=["a9a"], methods=["sanc"])
    assert one.name == "fig3-a9a" and one.methods == ("sanc",)
    for given, word in [
        ((["fig9"],), "'fig9'"),
        ((["fig1"], ["mnist"]), "'mnist'"),
        ((["fig1"], None, ["adam"]), "'adam'"),
    ]:
        with pytest.raises(sanc.ArgumentError, match=word):
            experiments.select(*given)


def test_networks_are_the_papers():
    cnn = models.cnn(1, 28, 10)
    shapes = [tuple(p.shape) for p in cnn.parameters() if p.ndim > 1]
    assert shapes == [(32, 1, 5, 5), (64, 32, 5, 5), (1000, 3136), (10, 1000)]
    models.initialise(cnn, 0)
    x, y = torch.rand(20, 1, 28, 28), torch.randint(0, 10, (20,))
    assert models.training_loss(cnn, x, y, 0.01) == pytest.approx(10.4, abs=0.4)  # where the paper's curve starts
    mlp = models.mlp(19, 7)
    assert [tuple(p.shape) for p in mlp.parameters() if p.ndim > 1] == [(300, 19), (500, 300), (7, 500)]
    twin = models.mlp(19, 7)
    models.initialise(mlp, 3), models.initialise(twin, 3)
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))
    decays = models.groups(mlp, 0.01)
    assert [len(g["params"]) for g in decays] == [3, 3] and [g["weight_decay"] for g in decays] == [0.01, 0.0]
    by_hand = torch.nn.functional.cross_entropy(mlp(torch.ones(5, 19)), torch.zeros(5, dtype=torch.long))
    by_hand = by_hand + 0.005 * sum((p**2).sum() for p in mlp.parameters() if p.ndim > 1)
    ours = models.training_loss(mlp, torch.ones(5, 19), torch.zeros(5, dtype=torch.long), 0.01, chunk=2)
    assert ours == pytest.approx(by_hand.item(), rel=1e-5)
    with pytest.raises(sanc.ArgumentError, match="'gelu'"):
        models.mlp(3, 2, "gelu")


# ---------------------------------------------------------------------------------------------- one run


@pytest.mark.parametrize("method", ["sanc", "scr", "cr", "ncd", "sgd", "crm"])
def test_a_run_of_a_finite_sum(tmp_path, method):
    folder = runs.execute(RunSpec(OWN, method, 0), tmp_path)
    trace = lines(folder)
    loaded = bundled.load("breast_cancer")
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
    # the loss of the trace is that of a run through the front door
    seen = []

    def watch(intermediate_result):
        seen.append(problem.value(intermediate_result.x))

    judged = sanc.METHODS[method].acceptance == "ratio"
    sanc.minimize(
        problem, np.ones(30), method=method, preset="paper", batch_size=29, objective_batch_size=None if judged else 29,
        seed=0, max_calls=budget, callback=watch, certify=False, **RunSpec(OWN, method, 0).settings(),
    )  # fmt: skip
    known = [(line["loss"], value) for line, value in zip(trace[1:], seen, strict=True) if line["loss"] is not None]
    assert len(known) >= 30
    assert [a for a, _ in known] == pytest.approx([b for _, b in known], rel=1e-12)


@pytest.mark.parametrize("method", ["sanc", "sgd"])
def test_a_run_of_a_network(tmp_path, method):
    panel = Panel("own-mlp", "own", "mlp", "digits", ("sanc",), {"sigma0": 1.0, "eta1": 0.1, "eta2": 0.3, "lr": 0.05},
                  batch=64, calls=6000, strength=0.001)  # fmt: skip
    first = runs.execute(RunSpec(panel, method, 1), tmp_path / "a")
    second = runs.execute(RunSpec(panel, method, 1), tmp_path / "b")
    assert timeless(first) == timeless(second)
    trace = lines(first)
    assert trace[-1]["loss"] < trace[0]["loss"] and trace[-1]["paper_calls"] >= 6000
    other = runs.execute(RunSpec(panel, method, 2), tmp_path / "a")
    assert lines(other)[0]["loss"] != trace[0]["loss"]


def test_which_runs_have_an_objective_sample_is_decided_by_their_options():
    """One Krylov space for many steps judges on the gradient sample, whichever way it was asked for."""
    for preset, options, amortised in (
        ("paper", {}, False),
        ("paper", {"refresh": 50}, True),
        ("robust", {}, True),
        ("robust", {"refresh": 0}, False),
    ):
        spec = RunSpec(replace(OWN, options=options), "sanc", 0, preset)
        assert spec.amortised is amortised
    assert not RunSpec(OWN, "cr", 0, "robust").amortised


def test_every_method_of_a_seed_has_the_same_start_and_samples(tmp_path):
    firsts = {lines(runs.execute(RunSpec(OWN, m, 3), tmp_path))[1]["grad_norm"] for m in ("sanc", "scr", "cr", "ncd")}
    assert len(firsts) == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("problem", ["logistic", "mlp"])
@pytest.mark.parametrize(
    ("method", "preset"), [("sanc", "paper"), ("crm", "paper"), ("sgd", "paper"), ("sanc", "robust"), ("scr", "robust")]
)
def test_a_run_resumes_wherever_it_is_cut(tmp_path, problem, method, preset):
    """Stopped after any iteration, with checkpoints at other moments: the trace is that of a run never stopped."""
    panel = OWN
    if problem == "mlp":
        panel = Panel("own-mlp", "own", "mlp", "digits", (method,), {"eta1": 0.1, "eta2": 0.3, "lr": 0.05}, batch=32,
                      calls=12000, strength=0.001)  # fmt: skip
    spec = RunSpec(panel, method, 0, preset)
    whole = timeless(runs.execute(spec, tmp_path / "whole"))
    rng = random.Random(method + problem)
    cuts = 0
    while not runs.finished(tmp_path / "cut" / "runs" / spec.path):
        stop = rng.randrange(3, 15)
        made = []

        def tick(share, loss, record, made=made, stop=stop):
            made.append(share)
            if len(made) == stop and cuts < 6:
                raise Killed

        every = rng.choice([0.0, 0.0, 0.01])
        try:
            runs.execute(spec, tmp_path / "cut", tick=tick, checkpoint_every=every)
        except Killed:
            cuts += 1
            trace = tmp_path / "cut" / "runs" / spec.path / "trace.jsonl"
            with open(trace, "ab") as file:  # a line that was being written when the lights went out
                file.write(b'{"iteration": 99, "lo')
    assert cuts == 6
    assert timeless(tmp_path / "cut" / "runs" / spec.path) == whole


def test_a_finished_run_is_not_repeated_and_another_configuration_is_refused(tmp_path):
    spec = RunSpec(OWN, "sanc", 0)
    folder = runs.execute(spec, tmp_path)
    stamp = (folder / "trace.jsonl").stat().st_mtime_ns
    runs.execute(spec, tmp_path)
    assert (folder / "trace.jsonl").stat().st_mtime_ns == stamp
    (folder / "done.json").unlink()
    changed = RunSpec(replace(OWN, options={"sigma0": 0.5}), "sanc", 0)
    with pytest.raises(sanc.ArgumentError, match=r"holds a run with (options|subtitle)"):
        runs.execute(changed, tmp_path)


def test_two_processes_never_share_a_run(tmp_path):
    spec = RunSpec(OWN, "sanc", 0)
    with runs.claim(tmp_path / "runs" / spec.path), pytest.raises(runs.BusyError):
        runs.execute(spec, tmp_path)
    runs.execute(spec, tmp_path)


# ---------------------------------------------------------------------------------------------- many runs


RUN = ["run", "--data", "breast_cancer", "--methods", "sanc,scr", "--runs", "2", "--workers", "2", "--budget", "60000"]
ENDLESS = [*RUN[:-1], "100000000"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    with sanc_command(*RUN, "--out", str(out)) as process:
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return out, text


def test_the_command_says_what_it_does_and_where_the_result_is(uninterrupted):
    out, text = uninterrupted
    assert "4 runs in 1 panels" in text and "about" in text and "4 runs finished" in text
    assert "report.html" in text and (out / "report.html").exists()
    assert (out / "figures" / "own-logistic-breast_cancer.png").exists()
    assert json.loads((out / "claims.json").read_text()) == {"claims": []}  # those of the paper are of its panels
    summary = (out / "summary.md").read_text()
    assert "| SANC | 2 |" in summary and f"torch {torch.__version__}" in summary
    assert len(read(out)) == 4


def test_kill_9_at_random_moments(tmp_path, uninterrupted):
    """Kill the whole process group, twice; the final traces equal those of an uninterrupted run."""
    whole, _ = uninterrupted
    length = min(json.loads(path.read_text())["seconds"] for path in whole.glob("runs/*/*/*/done.json"))
    rng = random.Random(7)
    again = [*RUN, "--out", str(tmp_path), "--checkpoint-every", "0.05"]

    def written():
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/*/trace.jsonl")}

    def through():
        return len(list(tmp_path.glob("runs/*/*/*/done.json"))) == 4

    for _ in range(2):
        seen = written()
        with sanc_command(*again) as process:
            wait_for(process, lambda seen=seen: written() != seen or through())  # the imports take seconds
            time.sleep(rng.uniform(0.0, 0.8 * length))
    with sanc_command(*again) as process:
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    for folder in sorted((whole / "runs").glob("*/*/*")):
        assert timeless(tmp_path / "runs" / folder.relative_to(whole / "runs")) == timeless(folder)


def test_ctrl_c_says_how_to_resume(tmp_path):
    with sanc_command(*ENDLESS, "--out", str(tmp_path), "--checkpoint-every", "0.1") as process:
        wait_for(process, lambda: list(tmp_path.glob("runs/*/*/*/checkpoint.pt")))
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Nothing is lost" in text and "same command" in text
    assert list(tmp_path.glob("runs/*/*/*/checkpoint.pt"))


@pytest.fixture
def sigint():
    """Set what SIGINT does, for the time of a test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def test_a_command_takes_ctrl_c_where_the_tests_ignore_it(sigint):
    sigint(signal.SIG_IGN)
    asked = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    with command(sys.executable, "-c", asked) as process:
        assert process.wait(60) == 1
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_two_commands_on_one_directory(tmp_path, uninterrupted):
    whole, _ = uninterrupted
    again = [*RUN, "--out", str(tmp_path)]
    with sanc_command(*again) as one, sanc_command(*again) as other:
        both = [one, other]
        texts = [process.communicate(timeout=240)[0] for process in both]
    assert 0 in [process.returncode for process in both], texts
    last = CliRunner().invoke(cli.app, again)
    assert last.exit_code == 0 and "4 were finished before" in last.output
    for folder in sorted((whole / "runs").glob("*/*/*")):
        assert timeless(tmp_path / "runs" / folder.relative_to(whole / "runs")) == timeless(folder)


def children(process):
    return subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()


needs_pgrep = pytest.mark.skipif(
    shutil.which("pgrep") is None, reason="finds the workers with pgrep, which is not installed"
)


@needs_pgrep
def test_a_killed_worker_is_not_passed_over(tmp_path):
    with sanc_command(*ENDLESS, "--out", str(tmp_path)) as process:
        wait_for(process, lambda: len(list(tmp_path.glob("runs/*/*/*/trace.jsonl"))) == 2)
        for worker in children(process):
            os.kill(int(worker), signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "4 runs are not finished" in text and "same command" in text


@needs_pgrep
def test_workers_leave_with_the_command_even_before_they_began(tmp_path):
    """Kill the command alone while its workers still import: they hold its output open for as long as they live."""
    with sanc_command(*ENDLESS, "--out", str(tmp_path)) as process:
        wait_for(process, lambda: len(children(process)) >= 3)  # two workers, and what keeps track of semaphores
        time.sleep(0.2)  # what they are to do has been sent to them
        process.kill()
        process.communicate(timeout=120)


class Finished:
    """A worker that has ended: the last it said arrives while it is found dead."""

    def __init__(self, messages, last):
        self._messages, self._last = messages, last

    def is_alive(self):
        for message in self._last:
            self._messages.put(message)
        self._last = []
        return False


def test_the_last_words_of_a_worker_are_heard():
    messages, outcome = queue.Queue(), pool.Outcome()
    worker = Finished(messages, [("start", "a"), ("done", "a"), ("end",)])
    pool._follow([worker], messages, 1, outcome, Console(quiet=True))
    assert outcome.finished == 1
    pool._follow([worker], messages, 1, outcome, Console(quiet=True))  # it says nothing any more, and that ends it too
    assert outcome.finished == 1


def test_ctrl_c_while_workers_start_is_put_off(sigint):
    sigint(signal.default_int_handler)
    asked = "import signal, sys; sys.exit(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    codes = []

    def start():
        with pool._interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            codes.append(subprocess.run([sys.executable, "-c", asked]).returncode)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert codes == [1]  # the block was gone through, and what was started in it hears no interrupt
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPTED = """
import sys
from pathlib import Path
from rich.console import Console
from sanc.lab import experiments, pool

def interrupt(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    pool._follow = interrupt
    specs = experiments.specs(experiments.select(["all"]), 10, "paper", "cpu")
    outcome = pool.run_all(specs, Path(sys.argv[1]), data_dir=Path(sys.argv[1]), workers=1, console=Console())
    sys.exit(not outcome.interrupted)
"""


def test_an_interrupt_does_not_wait_for_runs_nobody_will_take(tmp_path):
    """Hundreds of runs do not fit into the pipe to the workers; when those are gone, the rest is dropped."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    with command(sys.executable, str(script), str(tmp_path)) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text


def test_an_interrupt_outside_the_runs_says_how_to_go_on_too(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "load_data", interrupt)
    result = CliRunner().invoke(cli.app, [*RUN, "--out", str(tmp_path)])
    assert result.exit_code == 130 and "Nothing is lost" in result.output


def test_a_finished_directory_of_other_settings_is_refused(tmp_path):
    first = ["run", "--data", "breast_cancer", "--methods", "sanc", "--runs", "1", "--workers", "1", "--budget", "3000",
             "--out", str(tmp_path)]  # fmt: skip
    assert CliRunner().invoke(cli.app, first).exit_code == 0
    for more, word in ((["--preset", "authors"], "preset|batch_size"), (["--set", "sigma0=0.5"], "subtitle|options")):
        with pytest.raises(sanc.ArgumentError, match=rf"holds a run with ({word})"):
            CliRunner().invoke(cli.app, [*first, *more], catch_exceptions=False)


def test_the_loss_of_an_iteration_without_a_trial_is_not_the_samples(tmp_path):
    """Where SANC stays before it tries anything, the loss on all rows is the one it had."""
    panel = Panel("e", "own", "logistic", "breast_cancer", ("sanc",), {"epsilon": 1.0}, calls=100_000)
    trace = lines(runs.execute(RunSpec(panel, "sanc", 0, "authors"), tmp_path))
    stayed = [(a, b) for a, b in pairwise(trace) if b.get("branch") == "stayed"]
    assert any(b["trials"] == 0 for _, b in stayed)
    assert all(a["loss"] == b["loss"] for a, b in stayed)


# ---------------------------------------------------------------------------------------------- claims


def test_claims_on_a_tiny_configuration(tmp_path):
    panels = [
        replace(OWN, name="fig1-tiny", figure="fig1", methods=("sanc", "scr"), options={"sigma0": 1e-3}),
        replace(OWN, name="fig3-tiny", figure="fig3", methods=("sanc", "scr")),
    ]
    for spec in experiments.specs(panels, 2, "paper", "cpu"):
        runs.execute(spec, tmp_path)
    found = claims.evaluate(read(tmp_path))
    by = {(claim.panel, claim.statement.split(".")[0][:38]): claim for claim in found}
    faster = next(c for c in found if "needs fewer calls" in c.statement)
    traces = {(t.panel, t.method, t.seed): t for t in read(tmp_path)}
    star = min(float(np.nanmin(t.columns["loss"])) for t in traces.values())
    ours, theirs = (
        np.median([claims.calls_to(traces["fig1-tiny", method, seed], 1.05 * star) for seed in (0, 1)])
        for method in ("sanc", "scr")
    )
    assert faster.holds is bool(ours < theirs) and (
        f"{ours:,.0f}" in faster.measured or f"{ours:.4g}" in faster.measured
    )
    identical = next(c for c in found if "identical" in c.statement)
    assert identical.panel == "fig3-tiny" and "2 runs" in identical.spread
    rejected = next(c for c in found if "unsuccessful iterations at the start" in c.statement)
    assert rejected.panel == "fig1-tiny"
    assert len({c.panel for c in found}) == 2 and len(by) >= 5
    assert all(claim.holds in (True, False, None) for claim in found)


# ---------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "fig7"], ["'fig7'", "fig2a"]),
        (["reproduce", "fig1", "--data", "mnist"], ["'mnist'"]),
        (["reproduce", "fig1", "--methods", "adam"], ["'adam'"]),
        (["reproduce", "fig1", "--preset", "papr"], ["'papr'"]),
        (["reproduce", "fig1", "--device", "tpu"], ["'tpu'"]),
        (["run", "--data", "nothing"], ["'nothing'"]),
        (["run", "--set", "sigma_0=1"], ["'sigma_0'", "did you mean 'sigma0'"]),
        (["run", "--set", "sigma0"], ["name=value"]),
        (["run", "--methods", "arc"], ["'arc'"]),
        (["run", "--problem", "svn"], ["'svn'"]),
        (["run", "--from", "none.toml"], ["none.toml"]),
        (["run", "--from", "none.toml", "--data", "iris"], ["--data stands beside --from"]),
        (["run", "--name", "../evil"], ["--name '../evil'"]),
        (["run", "--data", "iris", "--problem", "logistic"], ["needs two classes", "softmax"]),
        (["run", "--data", "wine", "--problem", "cnn"], ["needs square images", "mlp"]),
        (["run", "--data", "iris", "--problem", "mlp", "--activation", "gelu"], ["'gelu'", "tanh"]),
        (["run", "--data", "breast_cancer", "--activation", "relu"], ["--activation 'relu'", "no effect"]),
        (["run", "--data", "breast_cancer", "--batch", "100000"], ["--batch 100000", "569"]),
        (["run", "--data", "breast_cancer", "--strength", "-1"], ["strength = -1.0"]),
        (["run", "--data", "breast_cancer", "--set", "sigma0=-1"], ["sigma0 = -1"]),
        (["run", "--data", "breast_cancer", "--set", "sigma0=abc"], ["sigma0 = 'abc'"]),
        (["run", "--data", "breast_cancer", "--set", "lr=0.1"], ["'lr'", "no effect"]),
        (["run", "--data", "breast_cancer", "--methods", ""], ["--methods is empty"]),
        (["run", "--data", "breast_cancer", "--out", "/dev/null/x"], ["/dev/null/x", "permissions"]),
        (["reproduce", "fig1", "--methods", "arc"], ["'arc'"]),
        (["datasets", "get", "w1b"], ["'w1b'", "did you mean 'w1a'"]),
        (["report", "nowhere"], ["nowhere", "no runs"]),
        (["datasets", "get"], ["--all"]),
    ],
)
def test_bad_commands_are_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sanc", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    text = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "command", [[], ["reproduce"], ["run"], ["datasets"], ["datasets", "get"], ["report"], ["demo"]]
)
def test_help_reads_well(command):
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


def test_from_toml(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('problem = "svm"\ndata = "breast_cancer"\nmethods = ["sanc"]\nbudget = 3000\nstrength = 0.01\n'
                    'name = "mine"\n[options]\nsigma0 = 0.5\n')  # fmt: skip
    out = tmp_path / "out"
    result = CliRunner().invoke(
        cli.app, ["run", "--from", str(file), "--runs", "1", "--workers", "1", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    (trace,) = read(out)
    assert trace.config["problem"] == "svm" and trace.config["options"]["sigma0"] == 0.5 and trace.panel == "mine"
    for text, word in (
        ('problm = "svm"', "did you mean 'problem'"),
        ("options = 3", "options = 3"),
        ("name = 5", "--name 5"),
        ('methods = "sanc"', "methods = 'sanc'"),
        ('data = "iris"\nproblem = "softmax"\nbudget = 2000.5', r"--budget = 2000\.5"),
    ):
        file.write_text(text)
        with pytest.raises(sanc.ArgumentError, match=word):
            CliRunner().invoke(
                cli.app, ["run", "--from", str(file), "--out", str(tmp_path / "x")], catch_exceptions=False
            )


@pytest.mark.parametrize(("problem", "data"), [("softmax", "iris"), ("mlp", "wine"), ("cnn", "digits")])
def test_every_problem_on_bundled_data(tmp_path, problem, data):
    result = CliRunner().invoke(
        cli.app, ["run", "--problem", problem, "--data", data, "--methods", "sanc,sanc,cr", "--runs", "1",
                  "--workers", "1", "--budget", "800", "--batch", "20", "--set", "sigma0=2.5", "--out", str(tmp_path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = {trace.method: trace for trace in read(tmp_path)}
    assert set(found) == {"sanc", "cr"}
    assert all(
        trace.config["options"]["sigma0"] == 2.5 and trace.config["batch_size"] == 20 for trace in found.values()
    )


def test_panels_without_data_are_left_out_and_said(tmp_path):
    empty = tmp_path / "data"
    empty.mkdir()
    result = CliRunner().invoke(
        cli.app, ["reproduce", "fig4", "--data-dir", str(empty), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 1 and "No panel has its data" in result.output
    skipped = json.loads((tmp_path / "out" / "skipped.json").read_text())
    assert set(skipped) == {"fig4-w8a", "fig4-a9a"} and "w8a" in skipped["fig4-w8a"]


def test_workers_are_used(tmp_path):
    specs = experiments.specs([replace(OWN, methods=("sanc", "scr"))], 2, "paper", "cpu")
    outcome = pool.run_all(specs, tmp_path, data_dir=None, workers=2, console=Console(quiet=True))
    assert outcome.finished == 4 and not outcome.failed
    again = pool.run_all(specs, tmp_path, data_dir=None, workers=2, console=Console(quiet=True))
    assert again.known == 4 and again.finished == 0
