import importlib
import sys
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from rich.console import Console

from sanc import Branch
from sanc.lab import demo, style

BUDGET = 12_000
NAMES = {"SANC", "SANC, paper", "SCR", "CR", "NCD", "SGD", "Adam"}


@pytest.fixture(scope="module")
def runs():
    return demo.compare(demo.Options(seed=3, budget=BUDGET), Console(quiet=True))


def test_main_prints_a_row_per_method_and_writes_the_picture(tmp_path, capsys):
    assert demo.main(["--out", str(tmp_path), "--budget", str(BUDGET), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    rows = printed[printed.index("evaluations") :]
    for name in NAMES:
        assert any(line.strip().startswith(name + " ") and " %" in line for line in rows.splitlines()), name
    png, svg = tmp_path / "demo.png", tmp_path / "demo.svg"
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert png.stat().st_size > 50_000
    text = svg.read_text()
    assert text.startswith("<?xml")
    assert len(text) > 20_000
    assert "demo.png" in printed


def test_every_method_lowers_the_loss_within_its_budget(runs):
    assert {run.method.name for run in runs} == NAMES
    starts = {run.losses[0] for run in runs}
    assert len(starts) == 1
    for run in runs:
        assert run.losses[-1] < run.losses[0], run.method.name
        assert BUDGET <= run.evaluations[-1] < 2 * BUDGET, run.method.name
        assert run.evaluations == sorted(run.evaluations)
        assert run.seconds == sorted(run.seconds)
        assert bool(run.branches) is run.method.second_order


def test_the_same_seed_gives_the_same_losses_and_another_seed_gives_others(runs):
    again = demo.compare(demo.Options(seed=3, budget=BUDGET), Console(quiet=True))
    assert [run.losses for run in again] == [run.losses for run in runs]
    assert [run.accuracy for run in again] == [run.accuracy for run in runs]
    other = demo.compare(demo.Options(seed=4, budget=BUDGET), Console(quiet=True), demo.METHODS[-1:])
    assert other[0].losses != runs[-1].losses


def test_the_bars_of_a_terminal_show_every_method(tmp_path):
    path = tmp_path / "screen"
    with path.open("w") as screen:
        console = Console(file=screen, force_terminal=True, width=130)
        demo.compare(demo.Options(budget=2000), console)
    for name in NAMES:
        assert name in path.read_text()


def test_the_branch_mix_adds_up_to_one(runs):
    _, shares = demo.mix(runs[0], BUDGET)
    total = sum(shares.values())
    assert abs(total - 1).max() < 1e-12
    assert set(shares) == set(Branch)


@pytest.mark.parametrize("wanted", [[0.5] * 5, [0.0, 0.01, 0.9, 0.91, 1.0], [1.0, 0.0], []])
def test_labels_are_spread_in_order_and_inside(wanted):
    places = style.spread(wanted, 0.1, 0.0, 1.0)
    ordered = [places[i] for i in sorted(range(len(wanted)), key=lambda i: wanted[i])]
    assert all(b - a > 0.1 - 1e-9 for a, b in pairwise(ordered))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "sanc.lab.demo")
    monkeypatch.setitem(sys.modules, "rich.box", None)
    with pytest.raises(ImportError, match=r"pip install 'sanc\[lab\]'"):
        importlib.import_module("sanc.lab.demo")


def test_nonsense_on_the_command_line_is_refused(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--budget", "0"])
    assert "≥ 1" in capsys.readouterr().err
