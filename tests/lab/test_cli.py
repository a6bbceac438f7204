"""The command itself: its doors, what it costs to ask for help, and the settings of the user that it keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

import sanc
from made_runs import line, write_run
from sanc.lab import cluster, curves, directory, figures, report, study, summary, traces


def run(*arguments, **environ):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environ, check=True
    ).stdout


def test_help_and_version_import_no_torch():
    for asked in ("--help", "--version", "run --help", "datasets --help"):
        code = f"import sys; from sanc.lab.cli import main; main({asked.split()}); print(sorted(sys.modules))"
        said, modules = run("-c", code).rsplit("\n", 2)[:2]
        assert "Usage" in said or f"sanc {sanc.__version__}" in said
        for heavy in ("torch", "numpy", "scipy", "sklearn", "distributed", "matplotlib"):
            assert f"'{heavy}'" not in modules, (asked, heavy)


def test_python_m_sanc():
    assert run("-m", "sanc", "--version").strip() == f"sanc {sanc.__version__}"
    assert "sanc run" in run("-m", "sanc", "run", "--help") and "MYFILE" not in run("-m", "sanc", "--help")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "auto"),
        ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}),
        ({"MKL_NUM_THREADS": "5", "OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "5"}),
    ],
)
def test_the_threads_of_the_user_are_kept(monkeypatch, given, expected):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    if expected == "auto":
        expected = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "4")
    assert expected.items() <= cluster.threads(2).items()


def test_the_commit_is_that_of_this_source_or_left_out(monkeypatch, tmp_path):
    stranger = tmp_path / "directory.py"  # as if installed in a folder that lies in somebody's repository
    stranger.touch()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(directory, "__file__", str(stranger))
    assert "commit" not in directory.environment("cpu")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert directory.environment("cpu")["commit"] == head


@pytest.fixture
def decades(tmp_path):
    for seed in range(3):
        rows = [line(k - 1, (1 + 0.1 * seed) * 10.0 ** (-k / 10), 10 * k, branch="successful") for k in range(41)]
        write_run(tmp_path, "deep", "sanc", seed, rows, done=seed < 1, batch_size=1, budget=400, preset="robust")
        rows = [line(k - 1, 2 - k / 40 + 0.01 * seed, 10 * k, branch="successful") for k in range(41)]
        write_run(tmp_path, "flat", "sanc", seed, rows, batch_size=1, budget=400, preset="robust")
    return tmp_path


def test_page_and_summary_say_the_same_deviation(decades):
    runs = traces.read(decades)
    page = report.write(decades, runs).read_text()
    text = summary.write(decades, runs, []).read_text()
    for panel in traces.by_panel(runs).values():
        (found,) = curves.results(panel)
        mean, deviation = found.final
        assert f"| {mean}{' ' + deviation if deviation else ''} |" in text
        assert (
            f"{mean} <small>{deviation}</small>" in page if deviation else f'<td class="num loss">{mean}</td>' in page
        )
    assert text.count("±") - 2 == page.count("<small>±") == 1  # of one run that finished there is no deviation


def test_the_terminal_says_what_runs_of_your_own_came_to(decades, capsys):
    study.report(decades, Console(width=80))
    text = capsys.readouterr().out
    for panel in traces.by_panel(traces.read(decades)).values():
        (found,) = curves.results(panel)
        assert " ".join(part for part in found.final if part) in text
    assert "deep" in text and "flat" in text


def test_a_loss_that_falls_over_decades_has_a_logarithmic_axis(decades):
    runs = traces.by_panel(traces.read(decades))
    shapes = {name: curves.falls_over_decades([curves.mean_curve(own)]) for name, own in runs.items()}
    assert shapes == {"deep": True, "flat": False}
    for name, own in runs.items():
        scales = [axes.get_yscale() for axes in figures.draw_panel(own, 0.0).axes]
        assert scales[0] == ("log" if shapes[name] else "linear")
        data = report._panel(name, own, 0.0, {})["data"]
        low, high = data["linear"]
        assert data["decades"] == shapes[name] and low < high
        means = curves.mean_curve(own)[1]
        assert (10**low if shapes[name] else low) < means.min() < np.inf


def test_the_heading_says_whose_runs_they_are(decades, tmp_path):
    assert "the paper’s figures" in report.write(decades, traces.read(decades)).read_text()
    own = tmp_path / "own"
    rows = [line(-1, 1.0, 0), line(0, 0.5, 10, branch="successful")]
    write_run(own, "mine", "sanc", 0, rows, figure="own", batch_size=1, budget=10, preset="robust")
    assert "<h1>SANC: runs of your own</h1>" in report.write(own, traces.read(own)).read_text()


def test_without_a_commit_the_page_has_no_such_line(decades):
    for path in decades.rglob("environment.json"):
        path.write_text('{"sanc": "0.1.0", "commit": "", "started": "2025-01-01"}')
    assert 'scope="row">commit' not in report.write(decades, traces.read(decades)).read_text()
