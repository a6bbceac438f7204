"""Search for the rates, schedules and options of the peers of `benchmarks.networks`, with seed 0.

Rates are half-decades. The search starts from a few of them, with and without a cosine decay, and adds neighbours until
the best rate of each criterion has a worse rate on either side. Options of a peer are then tried at the best cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Run = Mapping[str, Any]
"""A finished run: its specification, curve and times."""

RATES = tuple(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 3))
"""Rates of the search."""
CRITERIA = ("final", "evaluations", "validation")
"""Criteria of a choice: the final training loss, the evaluations to the target, the lowest validation loss."""


class Cell(NamedTuple):
    """A rate, whether it has a cosine decay, and an option of `suite_methods.OPTIONS`."""

    lr: float | None = None
    cosine: bool = False
    option: str = ""

    def __str__(self) -> str:
        rate = "–" if self.lr is None else f"{self.lr:g}{' cosine' if self.cosine else ''}"
        return f"{rate}, {self.option}" if self.option else rate


@dataclass(frozen=True)
class Peer:
    """A method with rates.

    Attributes
    ----------
    default : float or None
        Rate as published, None of a method without one.
    rates : tuple of float
        First rates of the search.
    cosine : bool
        Whether the search includes a cosine decay.
    package : str
        Package that has the method.
    options : tuple of str
        Options that are tried at the best cell.
    averages : bool
        Whether runs with a constant rate also evaluate exponential moving averages of the weights.
    """

    default: float | None = None
    rates: tuple[float, ...] = ()
    cosine: bool = False
    package: str = "torch"
    options: tuple[str, ...] = ()
    averages: bool = False


def cell_of(run: Run) -> Cell:
    """Return the cell of a run."""
    return Cell(run["lr"], run["cosine"], run.get("option", ""))


# ---------------------------------------------------------------------- arithmetic


def final(run: Run) -> float:
    """Return the final training loss, infinite if there is none."""
    loss = run["curve"]["train"][-1] if "curve" in run else None
    return float(loss) if loss is not None and math.isfinite(loss) else math.inf


def cost(run: Run, target: float) -> float:
    """Return the evaluations to the target, infinite if the run does not reach it."""
    curve = run.get("curve", {"evaluations": [], "train": []})
    pairs = zip(curve["evaluations"], curve["train"], strict=True)
    return next((float(spent) for spent, loss in pairs if loss is not None and loss <= target), math.inf)


def relative_cost(run: Run, target: float) -> float:
    """Return the evaluations to the target, relative to the budget."""
    return cost(run, target) / (run["steps"] * run.get("batch", 1))


def _finite(values: Iterable[float | None]) -> list[float]:
    return [math.inf if value is None or not math.isfinite(value) else value for value in values]


class HeldOut(NamedTuple):
    """Loss and accuracy of the test rows where the validation loss of a run is lowest, and the loss at the end."""

    loss: float = math.nan
    accuracy: float = math.nan
    final: float = math.nan


def held_out(run: Run) -> HeldOut:
    """Return the held-out loss and accuracy of a run; NaN for a run without validation rows."""
    curve = run.get("curve", {})
    if "valid" not in curve:
        return HeldOut()
    valid, tested = _finite(curve["valid"]), _finite(curve["test"])
    stop = valid.index(min(valid))
    accuracy = curve["accuracy"][stop]
    return HeldOut(tested[stop], math.nan if accuracy is None else accuracy, tested[-1])


def score(run: Run, criterion: str, target: float = math.nan) -> tuple[float, ...]:
    """Return what a criterion minimises; equal evaluations are ordered by the final loss."""
    if criterion == "evaluations":
        return cost(run, target), final(run)
    if criterion == "validation":
        return (min(_finite(run["curve"]["valid"])) if "valid" in run.get("curve", {}) else math.inf,)
    return (final(run),)


def best_cell(runs: Iterable[Run], criterion: str, target: float = math.nan) -> Cell | None:
    """Return the cell of the best run of seed 0; None without one."""
    first = [run for run in runs if run["seed"] == 0]
    return cell_of(min(first, key=lambda run: score(run, criterion, target))) if first else None


AVERAGED = "-ema"
"""Suffix of a method whose exponential moving average is evaluated."""


def with_averages(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, and the moving averages of their weights as runs of methods of their own."""
    made: list[Run] = []
    for run in runs:
        made.append(run)
        for decay, curve in run.get("averages", {}).items():
            averaged = {"evaluations": run["curve"]["evaluations"], **curve}
            rest = {key: value for key, value in run.items() if key != "averages"}
            name = {"method": run["method"] + AVERAGED, "option": f"ema={decay}"}
            made.append(rest | name | {"curve": averaged})
    return made


# ---------------------------------------------------------------------- search


def to_try(
    peer: Peer, done: Mapping[Cell, Run], target: float, schedules: Sequence[bool], *, grows: bool = True
) -> tuple[list[Cell], bool]:
    """Return the cells to try so far, and whether the search ends with them."""
    default, rates = Cell(peer.default), set(peer.rates)
    while True:
        grid = [Cell(lr, cosine) for lr in sorted(rates) for cosine in schedules]
        cells = list(dict.fromkeys([default, *grid]))
        if any(cell not in done for cell in cells):
            return cells, False
        if not grid or not grows:
            return cells, True
        chosen = {name: best_cell((done[cell] for cell in grid), name, target) for name in CRITERIA}
        wider = {lr for cell in chosen.values() if cell is not None for lr in _neighbours(cell.lr)} - rates
        if not wider:
            break
        rates |= wider
    for option in peer.options:
        base = chosen["validation" if option.startswith("decay") else "final"] or default
        cells.append(Cell(base.lr, base.cosine or option.startswith("horizon"), option))
    return cells, all(cell in done for cell in cells)


def _neighbours(lr: float | None) -> tuple[float, ...]:
    """Return the next smaller and the next larger rate."""
    if lr not in RATES:
        return ()
    place = RATES.index(lr)
    return RATES[max(place - 1, 0) : place + 2]


def chosen_cells(peer: Peer, done: Sequence[Run], target: float) -> list[Cell]:
    """Return the cells that the other seeds run: the default and the best of each criterion, averages included."""
    every = with_averages(done)
    ordinary, averaged = ([run for run in every if run["method"].endswith(AVERAGED) == kind] for kind in (False, True))
    cells = [Cell(peer.default), *(best_cell(ordinary, name, target) for name in CRITERIA)]
    of_averages = (best_cell(averaged, name, target) for name in CRITERIA)
    cells += [cell._replace(option="") for cell in of_averages if cell is not None]
    return list(dict.fromkeys(cell for cell in cells if cell is not None))
