"""The command line: entry points, imports, threads, and the content of reports."""

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
    commands = [["--help"], ["run", "--help"], ["datasets", "--help"], ["--version"]]
    code = f"import sys; from sanc.lab.cli import main; [main(c) for c in {commands}]; print(sorted(sys.modules))"
    output, modules = run("-c", code).rsplit("\n", 2)[:2]
    assert output.count("Usage") == 3 and f"sanc {sanc.__version__}" in output
    for heavy in ("torch", "numpy", "scipy", "sklearn", "distributed", "matplotlib"):
        assert f"'{heavy}'" not in modules, heavy


def test_python_m_sanc_is_the_command():
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
def test_thread_variables_of_the_user_are_kept(monkeypatch, given, expected):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    if expected == "auto":
        expected = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "4")
    assert expected.items() <= cluster.threads(2).items()


def test_the_commit_is_recorded_only_if_git_tracks_the_source(monkeypatch, tmp_path):
    untracked = tmp_path / "directory.py"  # as if installed inside another repository
    untracked.touch()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(directory, "__file__", str(untracked))
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


def test_page_and_summary_show_the_same_deviation(decades):
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
    assert text.count("±") - 2 == page.count("<small>±") == 1  # one finished run has no deviation


@pytest.mark.usefixtures("without_figures")
def test_the_terminal_shows_the_results_of_user_panels(decades, capsys):
    study.report(decades, Console(width=80))
    text = capsys.readouterr().out
    for panel in traces.by_panel(traces.read(decades)).values():
        (found,) = curves.results(panel)
        assert " ".join(part for part in found.final if part) in text
    assert "deep" in text and "flat" in text


def test_a_loss_that_falls_over_decades_has_a_logarithmic_axis(decades):
    runs = traces.by_panel(traces.read(decades))
    shapes = {name: curves.falls_over_decades([curves.mean_curve(group)]) for name, group in runs.items()}
    assert shapes == {"deep": True, "flat": False}
    for name, group in runs.items():
        scales = [axes.get_yscale() for axes in figures.draw_panel(group, 0.0).axes]
        assert scales[0] == ("log" if shapes[name] else "linear")
        data = report._panel(name, group, 0.0, {})["data"]
        low, high = data["linear"]
        assert data["decades"] == shapes[name] and low < high
        means = curves.mean_curve(group)[1]
        assert (10**low if shapes[name] else low) < means.min() < np.inf


def test_the_heading_distinguishes_the_papers_panels_from_the_users(decades, tmp_path):
    assert "the paper’s figures" in report.write(decades, traces.read(decades)).read_text()
    out = tmp_path / "own"
    rows = [line(-1, 1.0, 0), line(0, 0.5, 10, branch="successful")]
    write_run(out, "mine", "sanc", 0, rows, figure="own", batch_size=1, budget=10, preset="robust")
    assert "<h1>SANC: your runs</h1>" in report.write(out, traces.read(out)).read_text()


def test_the_page_omits_an_unknown_commit(decades):
    for path in decades.rglob("environment.json"):
        path.write_text('{"sanc": "0.1.0", "commit": "", "started": "2025-01-01"}')
    assert 'scope="row">commit' not in report.write(decades, traces.read(decades)).read_text()
