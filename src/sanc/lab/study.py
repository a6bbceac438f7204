"""A study: check what is asked for, make the runs, draw them, and say where the result is."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sanc
from sanc.errors import one_of
from sanc.lab import claims, cluster, datasets, experiments, own_files, runs, summary, traces
from sanc.lab.curves import results
from sanc.lab.directory import compare, finished, write_json
from sanc.lab.experiments import Panel

_OF_A_PANEL = ("figure", "problem", "data", "data_note", "n", "dim", "strength", "batch_size", "budget", "unit",
               "held_out", "activation", "widths", "preset")  # fmt: skip
"""What all runs of a panel have in common, so that they can stand in one table."""

PROBLEMS = ("logistic", "svm", "softmax", "mlp", "cnn")


def own_panel(given: dict[str, Any]) -> Panel:
    """Check what a person asked for and make a panel of it."""
    for key, kind in (("problem", str), ("data", str), ("methods", list), ("options", dict)):
        if not isinstance(given[key], kind):
            raise sanc.ArgumentError(f"{key} = {given[key]!r} cannot be used: pass a {kind.__name__}.")
    data = given["data"]
    if own_files.is_file(data):
        data = str(Path(data).expanduser().resolve())
    else:
        one_of("data", data, (*datasets.CATALOGUE, *datasets.BUNDLED))
    problem = one_of("problem", given["problem"], PROBLEMS)
    methods, options = experiments.check_methods(given["methods"]), given["options"]
    known = {method: experiments.settings_of(method) for method in sanc.METHODS}
    for key in options:
        one_of("option", key, set().union(*known.values()))
        if not any(key in known[method] for method in methods):
            raise sanc.ArgumentError(f"option {key!r} has no effect on {', '.join(methods)}: leave it out.")
    network, activation = problem in ("mlp", "cnn"), given["activation"]
    if network and "sampling" in options:
        raise sanc.ArgumentError(f"option 'sampling' has no effect on {problem}: leave it out.")
    if activation is not None and not network:
        raise sanc.ArgumentError(f"--activation {activation!r} has no effect on {problem}: leave it out.")
    called = re.sub(r"[^A-Za-z0-9._-]", "-", Path(data).name)
    usual = {"name": f"own-{problem}-{called}"} | ({"batch": 128, "strength": 0.01} if network else {"strength": 1.0})
    chosen: dict[str, Any] = usual | {key: value for key, value in given.items() if value is not None}
    name = str(chosen["name"])
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise sanc.ArgumentError(f"--name {name!r} cannot be used: letters, digits, '.', '_' and '-' make a name.")
    asked = (problem, data, methods, options, activation or "tanh", chosen.get("batch"))
    return Panel(name, "own", *asked, calls=given["budget"], strength=chosen["strength"])


@dataclass(frozen=True)
class Study:
    """Panels, and how they are to be run."""

    panels: list[Panel]
    runs: int
    preset: str
    workers: int
    device: str
    out: Path
    data_dir: Path | None
    checkpoint_every: float
    scheduler: str | None
    console: Console

    def go(self) -> int:
        """Say what will happen, do it, draw it, and say where the result is; return the exit code."""
        one_of("--preset", self.preset, experiments.LAB_PRESETS)
        one_of("--device", self.device.partition(":")[0], ("cpu", "cuda"))
        if self.device != "cpu" and not torch.cuda.is_available():
            raise sanc.ArgumentError(f"--device {self.device!r} is not there: torch sees no CUDA device; use cpu.")
        self.out.mkdir(parents=True, exist_ok=True)
        present = self._present()
        wanted = experiments.specs(present, self.runs, self.preset, self.device)
        if not wanted:
            self.console.print("[bold red]No panel has its data.[/] See [bold]sanc datasets[/].")
            return 1
        self._announce(present, wanted)
        clock = time.perf_counter()
        outcome = cluster.run_all(
            wanted, self.out, data_dir=self.data_dir, workers=self.workers, console=self.console,
            checkpoint_every=self.checkpoint_every, scheduler=self.scheduler,
        )  # fmt: skip
        took = f"{time.perf_counter() - clock:.0f} s"
        words = f"{outcome.finished} runs finished in {took}, {outcome.known} were finished before"
        words += f", {outcome.elsewhere} are being made by another process" if outcome.elsewhere else ""
        words += f", [bold red]{len(outcome.failed)} failed[/]" if outcome.failed else ""
        self.console.print(f"{words}.", soft_wrap=True)
        for name, text in outcome.failed.items():
            self.console.print(f"  {name}: {text}", soft_wrap=True, markup=False)
        if outcome.finished or outcome.known:
            report(self.out, self.console, {panel.name: dict.fromkeys(panel.methods, self.runs) for panel in present})
        missing = self._missing(wanted)
        if missing:
            names = ", ".join(spec.path for spec in missing[:5]) + (" …" if len(missing) > 5 else "")
            words = f"{len(missing)} runs are not finished ({names}): the same command goes on with them."
            self.console.print(words, soft_wrap=True)
        return int(bool(missing))

    def _missing(self, wanted: list[experiments.RunSpec]) -> list[experiments.RunSpec]:
        return [spec for spec in wanted if not finished(self.out / "runs" / spec.path)]

    def _present(self) -> list[Panel]:
        """Load every data set, check that its panels can run, and note those whose data cannot be had."""
        skipped = traces.skipped(self.out)
        load = cache(partial(runs.load_data, data_dir=self.data_dir))
        present = []
        for panel in self.panels:
            try:
                with self.console.status(f"Reading {panel.data} …"):
                    loaded = load(panel.data, dtype="float32" if panel.network else "float64")
            except sanc.SancError as problem:
                if own_files.is_file(panel.data):
                    raise
                skipped[panel.name] = str(problem)
                self.console.print(f"[yellow]Without {panel.name}[/]: {escape(str(problem))}", soft_wrap=True)
                continue
            skipped.pop(panel.name, None)
            present.append(panel)
            n, dim = runs.describe(panel, loaded, self.preset)
            for spec in experiments.specs([panel], self.runs, self.preset, self.device):
                config = runs.configuration(spec, n, dim, loaded.note)
                compare(self.out / "runs" / spec.path, config)
            for other in (self.out / "runs" / panel.name).glob("*/*/config.json"):
                compare(other.parent, config, _OF_A_PANEL)
        write_json(self.out / "skipped.json", skipped)
        return present

    def _announce(self, panels: list[Panel], wanted: list[experiments.RunSpec]) -> None:
        left = self._missing(wanted)
        # Measured on two cores: a logistic run takes a second or so, covtype several, a network a minute or more.
        seconds = [60.0 if s.panel.network else 8.0 if s.panel.data in ("covtype", "higgs") else 1.5 for s in left]
        minutes = max(1, round(sum(seconds) / self.workers / 60))
        names = ", ".join(panel.name for panel in panels)
        where = f"on {self.scheduler}" if self.scheduler else f"with {self.workers} worker{'s' * (self.workers > 1)}"
        guess = f": about {minutes} min, if this machine is like ours" if left else ""
        panel = f"{len(panels)} panel{'s' * (len(panels) > 1)} ({names})"
        words = f"{len(wanted)} run{'s' * (len(wanted) > 1)} in {panel}, {len(left)} still to make {where}{guess}."
        self.console.print(f"{words} Results go to [bold]{escape(str(self.out))}[/].", soft_wrap=True)


def report(out: Path, console: Console, plan: dict[str, dict[str, int]] | None = None) -> None:
    """Judge the claims, draw the figures, and write the summary and the page of an output directory."""
    from sanc.lab import figures
    from sanc.lab import report as page

    made = traces.read(out)
    if not made:
        raise sanc.ArgumentError(f"directory = {str(out)!r} holds no runs: pass the --out of an earlier command.")
    found = claims.evaluate(made)
    write_json(out / "claims.json", {"claims": [vars(claim) for claim in found]})
    figures.save_all(out, made)
    summary.write(out, made, found)
    path = page.write(out, made, found, plan)
    if found:
        table = Table("panel", "claim", "measured", "holds", title="The paper's claims", title_justify="left")
        for claim in found:
            verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}[claim.holds]
            table.add_row(claim.panel, claim.statement, claim.measured, verdict)
        console.print(table)
    for name, own in ({} if found else traces.by_panel(made)).items():
        table = Table("method", "runs", "final loss", "evaluations", "seconds", title=name, title_justify="left")
        for result in results(own):
            final, spent = " ".join(filter(None, result.final)), result.ends
            cells = result.counted, final, f"{spent['calls']:,.0f}", f"{spent['seconds']:.3g}"
            table.add_row(result.method.upper(), *cells)
        console.print(table)
    places_shown = {"Report": path, "Pictures": out / "figures", "Tables": out / "summary.md"}
    words = (f"{name}: [bold]{escape(str(place))}[/]" for name, place in places_shown.items())
    console.print("   ".join(words), soft_wrap=True)
