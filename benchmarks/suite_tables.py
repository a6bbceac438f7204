"""Targets, ratios, tables and figures of `benchmarks.networks`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import draw_profile, geometric_mean, median
from benchmarks.reporting import markdown_table, number, write_results
from benchmarks.suite import HALVES, TASKS
from benchmarks.suite_methods import PEERS, VARIANTS, spec_of
from benchmarks.suite_search import (
    AVERAGED,
    Cell,
    Peer,
    Run,
    best_cell,
    cell_of,
    final,
    held_out,
    relative_cost,
    with_averages,
)

UNSOLVED = 2.0
"""Ratio of a task without its target in geometric means."""
LARGE = {
    "sanc": "sanc",
    "loop": "sanc without closures",
    "horizon": "sanc, `horizon`",
    "soap": "soap",
    "muon": "muon",
    "adamw": "adamw",
}
"""Methods on large tasks, and their names in the table."""
DIVERGED = 1e6
"""Mean ratio of final losses from which a table has a word instead of a number."""
FITTED = 1e-3
"""Share of the target below which a task is fitted: there the loss falls by decades until the run ends, and one such
task would decide a mean of final losses, so that means leave it out. Chosen after the losses were known."""

# ---------------------------------------------------------------------- arithmetic


def groups_of(
    runs: Sequence[Run], task: str, criterion: str = "final", target: float = math.nan
) -> dict[str, list[Run]]:
    """Return the runs of a task by method, for the default rate and for the best cell of a criterion."""
    groups: dict[str, list[Run]] = {}
    runs = with_averages(run for run in runs if run["task"] == task)
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == method]
        peer = PEERS.get(method.removesuffix(AVERAGED), Peer())
        if peer.default is None:
            groups[method] = mine
            continue
        cells = {"tuned": best_cell(mine, criterion, target)}
        cells |= {} if method.endswith(AVERAGED) else {"default": Cell(peer.default)}
        for name, cell in cells.items():
            some = [run for run in mine if cell_of(run) == cell]
            if some:
                groups[f"{method} {name}"] = some
    return groups


def target_of(runs: Sequence[Run], task: str) -> float:
    """Return the final loss of the best AdamW, the upper median over the seeds; NaN without AdamW."""
    adamw = [run for run in runs if run["method"] == "adamw"]
    ends = sorted(final(run) for run in groups_of(adamw, task).get("adamw tuned", []))
    return ends[len(ends) // 2] if ends else math.nan


def upper_median(values: Iterable[float]) -> float:
    """Return the middle value, the larger of two."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for each task and method.

    `final` and `ratio`, the evaluations to the target, are those of the cell with the lowest final loss, `fewest` those
    of the cell that was chosen by evaluations. Held-out numbers are those of the cell with the lowest validation loss.
    """
    rows = []
    for task in [name for half in HALVES for name in TASKS if TASKS[name].half == half]:
        target, mine = target_of(runs, task), groups_of(runs, task)
        quickest, tested = (groups_of(runs, task, name, target) for name in ("evaluations", "validation"))
        reference = {run["seed"]: final(run) for run in mine.get("adamw default", [])}
        for name, some in mine.items():
            ends = sorted(final(run) for run in some)
            failed = [end > reference.get(run["seed"], math.inf) or end == math.inf
                      for run, end in ((run, final(run)) for run in some)]  # fmt: skip
            held = [held_out(run) for run in tested[name]]
            rows.append(
                {
                    "half": TASKS[task].half, "task": task, "method": name, "target": target,
                    "cell": cell_of(some[0]), "ratio": upper_median(relative_cost(run, target) for run in some),
                    "fewest": upper_median(relative_cost(run, target) for run in quickest[name]),
                    "final": ends[len(ends) // 2], "lowest": ends[0], "highest": ends[-1],
                    "held": median([one.loss for one in held]), "held_final": median([one.final for one in held]),
                    "accuracy": median([one.accuracy for one in held]),
                    "pace": median([run["pace"] for run in some if "pace" in run]), "failed": sum(failed),
                    "seeds": len(some), "note": next((run["note"] for run in some if run.get("note")), ""),
                }
            )  # fmt: skip
    return rows


def fitted(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tasks of a summary on which the final loss of a method is below `FITTED` of the target."""
    return list(dict.fromkeys(row["task"] for row in rows if row["final"] < FITTED * row["target"]))


def detail_table(rows: Sequence[Run]) -> str:
    """Return the table of a half, one row for each task and method."""
    cells = [
        [
            row["task"], row["method"], str(row["cell"]), number(row["target"]), number(row["ratio"], ".2f"),
            number(row["fewest"], ".2f"), number(row["final"]), f"{number(row['lowest'])} … {number(row['highest'])}",
            number(row["held"]), number(row["held_final"]), number(100 * row["accuracy"], ".1f"),
            number(1000 * row["pace"], ".2f"), f"{row['failed']} of {row['seeds']}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ("task", "method", "rate", "target", "evaluations", "fewest", "final loss", "of the seeds", "test",
            "test, at the end", "accuracy, %")  # fmt: skip
    return markdown_table((*head, "ms/step", "failed"), cells, left=3)


def task_table(rows: Sequence[Run]) -> str:
    """Return the table of a half, one row for each task: the default beside tuned AdamW and tuned SOAP."""
    table: dict[str, dict[str, Run]] = {}
    for row in rows:
        table.setdefault(row["task"], {})[row["method"]] = row
    cells = []
    for task, mine in table.items():
        if not {"sanc", "adamw tuned", "soap tuned"} <= mine.keys():
            continue
        ours, adamw, soap = mine["sanc"], mine["adamw tuned"], mine["soap tuned"]
        cells.append(
            [
                task, number(adamw["final"]), str(adamw["cell"]),
                number(soap["final"]), number(ours["final"]), f"{number(ours['lowest'])} … {number(ours['highest'])}",
                number(ours["ratio"], ".2f"), *(number(row["held"]) for row in (adamw, ours, soap)),
            ]
        )  # fmt: skip
    head = ("task", "tuned AdamW", "its rate", "tuned SOAP", "sanc", "of the seeds", "evaluations", "test, AdamW")
    return markdown_table((*head, "test, sanc", "test, SOAP"), cells)


def compare(rows: Sequence[Run], name: str, other: str, key: str) -> list[float]:
    """Return the ratios of two methods on the tasks that both have run."""
    table = {(row["task"], row["method"]): row[key] for row in rows}
    pairs = [(table[task, name], table[task, other]) for task, method in table
             if method == name and (task, other) in table]  # fmt: skip
    return [1.0 if a == b else max(a, 1e-12) / max(b, 1e-12) for a, b in pairs if not math.isnan(a + b)]


def final_ratios(rows: Sequence[Run], name: str, other: str) -> list[float]:
    """Return the ratios of the final losses of two methods on the tasks that are not fitted, if both are finite."""
    without = fitted(rows)
    ratios = compare([row for row in rows if row["task"] not in without], name, other, "final")
    return [ratio for ratio in ratios if 0.0 < ratio < math.inf]


def overview_cells(rows: Sequence[Run], name: str) -> list[str]:
    """Return the tasks of a half that a method solves, its evaluations, its final loss and its failures."""
    mine = [row for row in rows if row["method"] == name]
    solved = sum(math.isfinite(row["ratio"]) for row in mine)
    mean = geometric_mean(final_ratios(rows, name, "adamw tuned"))
    return [
        f"{solved} of {len(mine)}",
        number(geometric_mean([min(row["ratio"], UNSOLVED) for row in mine]), ".3f"),
        "diverges" if mean > DIVERGED else number(mean, ".3f"),
        f"{sum(row['failed'] for row in mine)} of {sum(row['seeds'] for row in mine)}",
    ]


OVERVIEW = ("solved", "evaluations", "final ÷ AdamW's", "failed")
"""Columns of `overview_cells`."""


def overview(rows: Sequence[Run]) -> str:
    """Return the table of a half, one row for each method, and comparisons with sanc."""
    cells = []
    for name in dict.fromkeys(row["method"] for row in rows):
        won = sum(x < 1.0 for x in compare(rows, "sanc", name, "ratio"))
        lower = sum(x < 1.0 for x in compare(rows, "sanc", name, "final"))
        cells.append([name, *overview_cells(rows, name), *(("–", "–") if name == "sanc" else (str(won), str(lower)))])
    head = ("method", *OVERVIEW, "sanc has fewer", "sanc ends lower")
    words = [markdown_table(head, cells), ""]
    if without := fitted(rows):
        words.append(f"* Means of final losses leave out {', '.join(without)}.")
    for other in ("schedulefree default", "prodigy default"):
        ends = compare(rows, "sanc", other, "final")
        words.append(
            f"* Final loss of sanc below that of {other} on {sum(x < 1.0 for x in ends)} of {len(ends)} tasks."
        )
    ours = [name for name in ("sanc", "decaying", "horizon") if any(row["method"] == name for row in rows)]
    for name, other in itertools.product(ours or ["sanc"], ("soap tuned", "muon tuned")):
        ends = final_ratios(rows, name, other)
        ratio = number(geometric_mean(ends), ".3f")
        words.append(f"* Final loss of {name} ÷ {other}: {ratio} in the geometric mean of {len(ends)} tasks.")
    for other in ("adamw tuned", "soap tuned", "muon tuned"):
        held = compare(rows, "sanc", other, "held")
        count = sum(x <= 1.01 for x in held)
        words.append(f"* Test loss of sanc at most 1 % above that of {other}: {count} of {len(held)} tasks.")
    return "\n".join(words)


def lowest_held_out(run: Run) -> float:
    """Return the lowest held-out loss during a run; of one with validation rows, the test loss where that is lowest."""
    losses = [loss for loss in run.get("curve", {}).get("held", ()) if loss is not None and math.isfinite(loss)]
    return min(losses) if losses else held_out(run).loss


def large_table(runs: Sequence[Run]) -> str:
    """Return the table of large tasks: each method with its best rate, and the numbers of its seeds.

    The target is the lowest final loss of AdamW, and the best rate that with the lowest final loss.
    """
    cells = []
    for task in dict.fromkeys(run["task"] for run in runs):
        target = min((final(run) for run in runs if (run["task"], run["method"]) == (task, "adamw")), default=math.nan)
        for method, name in LARGE.items():
            mine = [run for run in runs if (run["task"], run["method"]) == (task, method)]
            lr = min(mine, key=final)["lr"] if mine else None
            chosen = sorted((run for run in mine if run["lr"] == lr), key=lambda run: run["seed"])
            columns = (
                [number(relative_cost(run, target), ".2f") for run in chosen],
                [number(final(run), ".3g") for run in chosen],
                [number(lowest_held_out(run), ".3g") for run in chosen],
            )
            rate = "" if lr is None else f", {lr:g}"
            label = f"{task} ({TASKS[task].half.split('-')[0]})"
            cells += [[label, name + rate, *map(", ".join, columns)]] if mine else []
    head = ("task", "method", "evaluations to AdamW's loss", "final training loss", "lowest held-out")
    return markdown_table(head, cells, left=2)


RAMPS = ("linear, 20 steps", "linear, 100 steps", "linear, 300 steps", "root, 300 steps", "root, width/4",
         "root, width/2", "root, width")  # fmt: skip
"""Growth of the step size at the start in `trials.jsonl.xz`."""


def ramps_table(trials: Sequence[Run]) -> str:
    """Return the table of final training losses by the growth of the step size; with closures, and without, seed 0."""
    chosen = [trial for trial in trials if trial["trial"].get("ramp") in RAMPS and not trial["seed"]]
    ends = {
        (trial["task"], trial["curve"]["steps"][-1], trial["trial"]["ramp"], trial["method"]): final(trial)
        for trial in chosen
    }
    cells = []
    for task, steps in dict.fromkeys(key[:2] for key in ends):
        methods = [method for method in ("sanc", "loop") if any(key[::3] == (task, method) for key in ends)]
        shown = [[ends.get((task, steps, ramp, method), math.nan) for method in methods] for ramp in RAMPS]
        cells.append([f"{task}, {steps:,} steps", *(", ".join(number(end, ".3g") for end in some) for some in shown)])
    return markdown_table(("final training loss", *RAMPS), cells)


def long_table(runs: Sequence[Run]) -> str:
    """Return the table of final training losses of long runs, for the best rate of each method; seed 0."""
    names = {"sanc": "sanc", "loop": "without closures", "horizon": "`horizon`", "soap": "SOAP", "adamw": "AdamW"}
    cells = []
    for task in dict.fromkeys(run["task"] for run in runs):
        lowest = [[final(run) for run in runs if (run["task"], run["method"], run["seed"]) == (task, name, 0)]
                  for name in names]  # fmt: skip
        cells.append([task, *(number(min(ends, default=math.nan), ".3g") for ends in lowest)])
    return markdown_table(("task, final training loss", *names.values()), cells)


def penalty_table(runs: Sequence[Run]) -> str:
    """Return the table of final training losses by penalty, medians over the seeds."""
    names = ("sanc", "no-curvature", "diagonal", "diagonal-no-curvature")
    cells = []
    for task, penalty in sorted({(run["task"], run["decay"]) for run in runs}):
        line = [task, f"{penalty:g}"]
        for name in names:
            key = (task, penalty, name)
            ends = [final(run) for run in runs if (run["task"], run["decay"], run["method"]) == key]
            line.append(number(median(ends), ".3g") + (" (one seed)" if len(ends) == 1 else ""))
        cells.append(line)
    return markdown_table(("task", "penalty", *names), cells)


TIMED = {"soap": "SOAP", "muon": "Muon", "loop": "sanc without closures", "loop captured": "`capture=True`",
         "loop eager": "`capture=False`", "sanc": "sanc with closures", "sanc eager": "`capture=False`"}  # fmt: skip
"""Methods of --timing that are compared with AdamW, and their columns."""


def seconds_to_target(seconds: Mapping[str, Mapping[str, Any]], runs: Sequence[Run]) -> dict[str, float]:
    """Return the seconds of sanc with closures to the final loss of tuned AdamW, over those of AdamW, by task."""
    evaluations = {row["task"]: row["ratio"] for row in summary(runs) if row["method"] == "sanc"}
    return {task: evaluations[task] * times["sanc"] / times["adamw"] for task, times in seconds.items()}


def timing_table(seconds: Mapping[str, Mapping[str, Any]], runs: Sequence[Run]) -> str:
    """Return the table of the times of an evaluation relative to AdamW's, and of the seconds to its final loss.

    A text instead of a time is the reason why there is none.
    """
    to_target, cells = seconds_to_target(seconds, runs), []
    for task, times in seconds.items():
        ms = [f"{1e3 * times[name]:.2f}" for name in ("adamw", "adamw captured")]
        pairs = [*((name, "adamw") for name in TIMED), ("sanc captured", "adamw captured")]
        *eager, captured = (
            f"{times[name] / times[base]:.2f} ×" if isinstance(times.get(name), float) else "–" for name, base in pairs
        )
        cells.append([task, ms[0], *eager, f"{to_target[task]:.2f} ×", ms[1], captured])
    columns = (*TIMED.values(), "seconds to AdamW's loss", "AdamW captured, ms", "sanc captured")
    return markdown_table(("task", "AdamW, ms", *columns), cells)


LEGEND = f"""\
evaluations: until the target, over the budget, the upper median of the seeds; ∞ if most seeds do not reach the \
target, which counts as {UNSOLVED:g} in means. fewest: the same with the rate that needs the fewest. final loss: final \
training loss, the upper median, then the lowest and the highest; means leave out the tasks on which a method ends \
below {FITTED:g} of the target. test, accuracy: median, of the rate with the lowest \
validation loss, where that loss is lowest. failed: the final loss exceeds that of AdamW with its default rate, or is \
not finite. ms/step is comparable only between runs made one at a time. solved: most seeds reach the target."""


def report(runs: Sequence[Run], folder: Path | None) -> str:
    """Write the tables and the figures, and return the tables."""
    budgets: dict[str, set[int]] = {}
    for run in runs:
        budgets.setdefault(run["task"], set()).add(run["steps"])
    mixed = [task for task, steps in budgets.items() if len(steps) > 1]
    if mixed:
        raise SystemExit(f"runs of {', '.join(mixed)} with different numbers of steps: use separate folders.")
    rows, texts = summary(runs), []
    for half in HALVES:
        mine = [row for row in rows if row["half"] == half]
        if mine:
            texts.append(f"## Tasks: {half}\n\n{overview(mine)}\n\n{task_table(mine)}\n\n{detail_table(mine)}")
    notes = sorted({f"{row['task']}: {row['note']}" for row in rows if row["note"]})
    errors = [f"{spec_of(run)}: {run['error']}" for run in runs if "error" in run]
    texts.append("\n".join([LEGEND, *(f"* {line}" for line in [*notes, *errors])]))
    text = "\n\n".join(texts)
    if rows:
        figures = {"profile.png": lambda: draw_profiles(rows), "curves.png": lambda: draw_curves(runs)}
        write_results(folder, {"table.md": text, **figures})
    return text


# ---------------------------------------------------------------------- figures

SHOWN = ("sanc", "adamw tuned", "schedulefree tuned", "prodigy default", "soap tuned", "muon tuned", "sgd tuned",
         "lbfgs", "paper", "adamw default", "schedulefree default")  # fmt: skip


def style(name: str) -> dict[str, Any]:
    """Return the line of a method: sanc black, default rates dashed."""
    if name == "sanc":
        return {"color": "black", "lw": 2.2, "zorder": 5, "label": name}
    order = [*PEERS, *VARIANTS]
    return {"color": f"C{order.index(name.split()[0]) % 10}", "lw": 1.2, "label": name,
            "ls": "--" if name.endswith("default") else "-"}  # fmt: skip


def draw_profiles(rows: Sequence[Run]) -> Any:
    """Draw, for each half, the share of tasks solved within a factor of the fewest evaluations."""
    from matplotlib.figure import Figure

    halves = [half for half in HALVES if any(row["half"] == half for row in rows)]
    figure = Figure(figsize=(5.2 * len(halves), 4.0), layout="constrained")
    for axes, half in zip(figure.subplots(1, len(halves), squeeze=False)[0], halves, strict=True):
        tasks = list(dict.fromkeys(row["task"] for row in rows if row["half"] == half))
        table = {(row["task"], row["method"]): row["ratio"] for row in rows}
        names = [name for name in dict.fromkeys(row["method"] for row in rows) if name in (*SHOWN, *VARIANTS)]
        costs = {name: [1e9 * table.get((task, name), math.inf) for task in tasks] for name in names}
        solved = [i for i in range(len(tasks)) if any(math.isfinite(costs[name][i]) for name in names)]
        if solved:
            draw_profile(axes, {name: [costs[name][i] for i in solved] for name in names}, 10.0, style)
            axes.legend(fontsize=7)
        axes.set(xlabel="τ × fewest evaluations to the target", ylabel="share of tasks")
        axes.set_title(f"{half}: {len(solved)} tasks")
    return figure


def draw_curves(runs: Sequence[Run]) -> Any:
    """Draw the training loss over evaluations, one panel for each task, of the median seed."""
    from matplotlib.figure import Figure

    tasks = [name for half in HALVES for name in TASKS if TASKS[name].half == half]
    tasks = [task for task in tasks if any(run["task"] == task for run in runs)]
    lines = -(-len(tasks) // 4)
    figure = Figure(figsize=(14.0, 2.9 * lines + 0.6), layout="constrained")
    panels, handles = list(figure.subplots(lines, 4, squeeze=False).flat), {}
    for axes, task in zip(panels, tasks, strict=False):
        for name, some in groups_of(runs, task).items():
            run = sorted(some, key=final)[len(some) // 2]
            if name in (*SHOWN[:9], *VARIANTS) and math.isfinite(final(run)):
                (handles[name],) = axes.plot(run["curve"]["evaluations"], run["curve"]["train"], **style(name))
        target = target_of(runs, task)
        if math.isfinite(target):
            axes.axhline(target, color="grey", lw=0.8, ls=":")
        axes.set_yscale("log")
        starts = [run["curve"]["train"][0] for run in runs if run["task"] == task and "curve" in run]
        axes.set_ylim(top=2.0 * max(starts, default=1.0))
        axes.set_title(f"{task} ({TASKS[task].half})", fontsize=9)
        axes.tick_params(labelsize=7)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncol=10, fontsize=8, frameon=False)
    return figure
