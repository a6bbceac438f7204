"""The commands of the laboratory: their processes, interrupts, options and errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed import Client
from typer.testing import CliRunner

import made_runs
import sanc
from command_processes import command, kill, sanc_command, wait_for, without_times
from made_runs import LOGISTIC
from sanc.lab import cli, datasets, runs
from sanc.lab.experiments import RunSpec
from sanc.lab.traces import read

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


@pytest.mark.usefixtures("unrendered")
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


def test_errors_name_unsuitable_options_and_batches(tmp_path, capsys):
    (tmp_path / "few.csv").write_text("".join(f"{k},{k % 2}\n" for k in range(12)))
    for arguments, words in (
        (["run", str(tmp_path / "few.csv"), "--preset", "authors"], "--batch = 0"),
        ([*SMALL, "--problem", "mlp", "--set", "sampling=buffered"], "'sampling' has no effect on mlp"),
    ):
        assert cli.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
