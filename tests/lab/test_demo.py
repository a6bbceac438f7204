"""The demonstration: a panel of the laboratory with its table and figure."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from rich.console import Console

from sanc.lab import cli, demo, style, traces

BUDGET = 10_000
NAMES = {"SANC", "SANC, paper", "SCR", "CR", "NCD", "SGD", "Adam"}


@pytest.fixture(scope="module")
def made(tmp_path_factory, scheduler):
    out = tmp_path_factory.mktemp("demo")
    path = out / "printed"
    with path.open("w") as file:
        console = Console(file=file, width=110)
        assert demo.run(out, console, seed=3, budget=BUDGET, scheduler=scheduler) == 0
    return out, path.read_text()


def losses(out):
    return {run.method: list(run.columns["loss"]) for run in traces.read(out)}


def test_the_demonstration_prints_a_row_per_method_and_writes_the_figure(made):
    out, printed = made
    rows = printed[printed.index("evaluations") :]
    for name in NAMES:
        assert any(line.strip().startswith(name + " ") and " %" in line for line in rows.splitlines()), name
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (out / "demo.png").stat().st_size > 50_000
    text = (out / "demo.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 20_000 and "demo.png" in printed


def test_the_demonstration_says_what_the_default_did(made):
    """The sentences and the column agree with the traces."""
    out, printed = made
    runs = {run.method: run for run in traces.read(out)}
    text, target = " ".join(printed.split()), runs["adam"].final_loss
    branches = list(runs["sanc"].columns["branch"][1:])
    averaged = branches.count("averaged")
    steps = "1 step" if len(branches) - averaged == 1 else f"{len(branches) - averaged:,} steps"
    assert f"SANC made {steps} with curvature and {averaged:,} averaged steps." in text
    assert f"had its final loss of {target:.4f}" in text and "to Adam" in text and "untested" not in text
    for run in runs.values():
        losses, seconds = list(run.columns["loss"]), list(run.columns["seconds"])
        places = [s for s, loss in zip(seconds, losses, strict=True) if loss <= target]
        at = demo.seconds_to(run, target)
        assert at == pytest.approx(places[0]) if places else at != at


def test_the_tables_fit_a_terminal_of_80_columns(made):
    found = traces.read(made[0])
    for build, cells in ((demo.table, {f"{run.final_loss:.4f}" for run in found}), (demo.branch_table, set())):
        console = Console(width=80, file=io.StringIO())
        console.print(build(found))
        text = console.file.getvalue()
        assert "…" not in text and all(cell in text for cell in cells | NAMES)


def test_every_method_lowers_the_loss_within_its_budget(made):
    runs = traces.read(made[0])
    assert {style.style_of(run.method).name for run in runs} == NAMES
    assert len({run.columns["loss"][0] for run in runs}) == 1
    for run in runs:
        assert run.final_loss < run.columns["loss"][0], run.method
        assert BUDGET <= run.columns["calls"][-1] < 2 * BUDGET, run.method
        assert run.config["n"] == 1438 and 0.1 < run.done["accuracy"] <= 1.0
        assert all(b >= a for a, b in pairwise(run.columns["seconds"]))


@pytest.mark.slow
def test_a_finished_demonstration_is_shown_again(made, scheduler, capsys):
    """The files of the runs are neither repeated nor removed."""
    out, _ = made
    kept = {path: path.read_bytes() for path in sorted(out.glob("runs/*/*/*/*.json*"))}
    arguments = ["--out", str(out), "--budget", str(BUDGET), "--scheduler", scheduler]
    assert cli.main(["demo", *arguments, "--seed", "3"]) == 0
    assert {path: path.read_bytes() for path in sorted(out.glob("runs/*/*/*/*.json*"))} == kept
    output = capsys.readouterr().out
    assert "Figure:" in output and "were finished before" in output
