"""The demonstration: a panel of the laboratory, with a table and a picture of its own."""

from __future__ import annotations

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


def test_it_prints_a_row_per_method_and_writes_the_picture(made):
    out, printed = made
    rows = printed[printed.index("evaluations") :]
    for name in NAMES:
        assert any(line.strip().startswith(name + " ") and " %" in line for line in rows.splitlines()), name
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (out / "demo.png").stat().st_size > 50_000
    text = (out / "demo.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 20_000 and "demo.png" in printed


def test_every_method_lowers_the_loss_within_its_budget(made):
    runs = traces.read(made[0])
    assert {style.look(run.method).name for run in runs} == NAMES
    assert len({run.columns["loss"][0] for run in runs}) == 1
    for run in runs:
        assert run.final_loss < run.columns["loss"][0], run.method
        assert BUDGET <= run.columns["calls"][-1] < 2 * BUDGET, run.method
        assert run.config["n"] == 1438 and 0.1 < run.done["accuracy"] <= 1.0
        assert all(b >= a for a, b in pairwise(run.columns["seconds"]))


@pytest.mark.slow
def test_one_that_was_finished_is_shown_again(made, scheduler, capsys):
    """Nothing is made anew, and nothing is removed that an interrupt could cost."""
    out, _ = made
    kept = {path: path.read_bytes() for path in sorted(out.glob("runs/*/*/*/*.json*"))}
    arguments = ["--out", str(out), "--budget", str(BUDGET), "--scheduler", scheduler]
    assert cli.main(["demo", *arguments, "--seed", "3"]) == 0
    assert {path: path.read_bytes() for path in sorted(out.glob("runs/*/*/*/*.json*"))} == kept
    said = capsys.readouterr().out
    assert "Picture:" in said and "were finished before" in said
