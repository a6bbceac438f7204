"""Check panels and options, make the runs, and write figures, tables and the report."""

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
from sanc.lab import claims, cluster, datasets, experiments, peers, runs, summary, traces, user_files
from sanc.lab.curves import results
from sanc.lab.directory import finished, require_same_config, write_json
from sanc.lab.experiments import USER_FIGURE, Panel
from sanc.lab.style import style_of

_PANEL_KEYS = ("figure", "problem", "data", "data_note", "n", "dim", "strength", "batch_size", "budget", "unit",
               "held_out", "activation", "widths", "preset", "penalty", "standardise", "label")  # fmt: skip
"""Keys of the configuration that must be equal in all runs of a panel, so that one table can compare them."""

PROBLEMS = ("logistic", "svm", "softmax", "mlp", "cnn")
"""The problems of the command ``sanc run``."""

_NETWORK_SECONDS, _LARGE_SECONDS, _SUM_SECONDS = 60.0, 8.0, 1.5
"""Seconds of a run on a network, on covtype or higgs, and on another finite sum, as measured on two cores."""


def user_panel(given: dict[str, Any]) -> Panel:
    """Check the options of a user and return a panel with them."""
    for key, kind in (("problem", str), ("data", str), ("methods", list), ("options", dict)):
        if not isinstance(given[key], kind):
            raise sanc.ArgumentError(f"{key} = {given[key]!r} cannot be used: pass a {kind.__name__}.")
    data = given["data"]
    if user_files.is_file(data):
        data = str(Path(data).expanduser().resolve())
    else:
        one_of("data", data, (*datasets.CATALOGUE, *datasets.BUNDLED))
    problem = one_of("problem", given["problem"], PROBLEMS)
    methods, options = experiments.check_methods(given["methods"]), given["options"]
    settings = {method: experiments.setting_names(method) for method in sanc.METHODS}
    for key in options:
        one_of("option", key, set().union(*settings.values()))
        if not any(key in settings[method] for method in methods):
            raise sanc.ArgumentError(f"option {key!r} has no effect on {', '.join(methods)}: leave it out.")
    network, activation = problem in ("mlp", "cnn"), given["activation"]
    if network and "sampling" in options:
        raise sanc.ArgumentError(f"option 'sampling' has no effect on {problem}: leave it out.")
    if activation is not None and not network:
        raise sanc.ArgumentError(f"--activation {activation!r} has no effect on {problem}: leave it out.")
    file_name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(data).name)
    defaults: dict[str, Any] = {"name": f"own-{problem}-{file_name}"}
    defaults |= {"batch": 128, "strength": 0.01} if network else {"strength": 1.0}  # as in the paper
    chosen = defaults | {key: value for key, value in given.items() if value is not None}
    name = str(chosen["name"])
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise sanc.ArgumentError(f"--name {name!r} cannot be used: use letters, digits, '.', '_' and '-' only.")
    for key in ("standardise", "label"):
        if given.get(key) and not user_files.is_file(data):
            raise sanc.ArgumentError(f"--{key} cannot be used with the data set {data!r}: it is for a data file.")
    penalty: Any = one_of("--penalty", given.get("penalty") or "nonconvex", ("nonconvex", "l2"))
    if given.get("penalty") and problem != "logistic":
        raise sanc.ArgumentError(f"--penalty {penalty!r} has no effect on {problem}: leave it out.")
    file_options: dict[str, Any] = {"standardise": bool(given.get("standardise")), "label": given.get("label")}
    fields = (problem, data, methods, options, activation or "tanh", chosen.get("batch"))
    return Panel(
        name, USER_FIGURE, *fields, calls=given["budget"], strength=chosen["strength"], penalty=penalty, **file_options
    )


@dataclass(frozen=True, kw_only=True)
class Study:
    """Panels, and the options of their runs.

    Attributes
    ----------
    panels : list of Panel
        The panels.
    runs : int
        The runs of each method, which differ in their seeds.
    preset, device : str
        The preset of the methods, and the device of torch.
    workers : int
        Processes that make runs at the same time.
    out, data_dir : Path or None
        The folders of the output and of the data.
    checkpoint_every : float
        Seconds between two checkpoints of a run.
    scheduler : str or None
        The address of a Dask scheduler; None: the processes of this computer.
    console : Console
        Where progress is printed.
    """

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

    def run(self) -> int:
        """Announce and make the runs, write the report, print its path, and return the exit code."""
        one_of("--preset", self.preset, experiments.LAB_PRESETS)
        one_of("--device", self.device.partition(":")[0], ("cpu", "cuda"))
        if self.device != "cpu" and not torch.cuda.is_available():
            raise sanc.ArgumentError(f"--device {self.device!r} is not available: torch finds no CUDA device; use cpu.")
        self.out.mkdir(parents=True, exist_ok=True)
        present = self._present()
        specs = experiments.specs(present, self.runs, self.preset, self.device)
        if not specs:
            self.console.print("[bold red]No panel has its data.[/] See [bold]sanc datasets[/].")
            return 1
        self._announce(present, specs)
        clock = time.perf_counter()
        outcome = cluster.run_all(
            specs, self.out, data_dir=self.data_dir, workers=self.workers, console=self.console,
            checkpoint_every=self.checkpoint_every, scheduler=self.scheduler,
        )  # fmt: skip
        took = f"{time.perf_counter() - clock:.0f} s"
        text = f"{outcome.finished} runs finished in {took}, {outcome.finished_before} were finished before"
        text += f", {outcome.elsewhere} are being made by another process" if outcome.elsewhere else ""
        text += f", [bold red]{len(outcome.failed)} failed[/]" if outcome.failed else ""
        self.console.print(f"{text}.", soft_wrap=True)
        for name, error in outcome.failed.items():
            self.console.print(f"  {name}: {error}", soft_wrap=True, markup=False)
        if outcome.finished or outcome.finished_before:
            report(self.out, self.console, {panel.name: dict.fromkeys(panel.methods, self.runs) for panel in present})
            self._compare_with_peers(present)
        unfinished = self._unfinished(specs)
        if unfinished:
            names = ", ".join(spec.path for spec in unfinished[:5]) + (" …" if len(unfinished) > 5 else "")
            text = f"{len(unfinished)} runs are not finished ({names}): the same command resumes them."
            self.console.print(text, soft_wrap=True)
        return int(bool(unfinished))

    def _compare_with_peers(self, panels: list[Panel]) -> None:
        """Print the fits of L-BFGS and Adam to the files of the user, with the same objective, start and budget."""
        for panel in panels:
            if panel.network or not user_files.is_file(panel.data):
                continue
            loaded = runs.load_panel(panel, self.data_dir)
            problem = runs.problem_of(panel, loaded)
            batch = panel.batch_size(problem.n, self.preset) or problem.n
            table = Table(
                "method",
                "final loss",
                "evaluations",
                "seconds",
                "accuracy",
                title="For comparison",
                title_justify="left",
            )
            for fit in peers.fit_peers(problem, panel.budget(problem.n), batch):
                accuracy = f"{100 * runs.accuracy_of(panel, loaded, fit.w):.2f} %"
                table.add_row(fit.name, f"{fit.loss:.6g}", f"{fit.evaluations:,}", f"{fit.seconds:.3g}", accuracy)
            self.console.print(table)

    def _unfinished(self, specs: list[experiments.RunSpec]) -> list[experiments.RunSpec]:
        return [spec for spec in specs if not finished(self.out / "runs" / spec.path)]

    def _present(self) -> list[Panel]:
        """Return the panels whose data can be loaded, after a check of each, and record the others."""
        skipped = traces.skipped(self.out)
        load = cache(partial(runs.load_data, data_dir=self.data_dir))  # once for all panels of a data set
        present = []
        for panel in self.panels:
            try:
                with self.console.status(f"Reading {panel.data} …"):
                    options = (
                        {"standardise": panel.standardise, "label": panel.label} if panel.figure == USER_FIGURE else {}
                    )
                    loaded = load(panel.data, dtype="float32" if panel.network else "float64", **options)
            except sanc.SancError as error:
                if user_files.is_file(panel.data):
                    raise
                skipped[panel.name] = str(error)
                self.console.print(f"[yellow]Skipping {panel.name}[/]: {escape(str(error))}", soft_wrap=True)
                continue
            skipped.pop(panel.name, None)
            present.append(panel)
            if panel.figure == USER_FIGURE and user_files.is_file(panel.data):
                for note in filter(None, (user_files.label_note(loaded), user_files.scale_hint(loaded.X))):
                    self.console.print(note, soft_wrap=True, markup=False)
            n, dim = runs.check_panel(panel, loaded, self.preset)
            for spec in experiments.specs([panel], self.runs, self.preset, self.device):
                config = runs.configuration(spec, n, dim, loaded.note)
                require_same_config(self.out / "runs" / spec.path, config)
            for other in (self.out / "runs" / panel.name).glob("*/*/config.json"):
                require_same_config(other.parent, config, _PANEL_KEYS)
        write_json(self.out / "skipped.json", skipped)
        return present

    def _announce(self, panels: list[Panel], specs: list[experiments.RunSpec]) -> None:
        """Print the number of runs, an estimate of the time, and where results go."""
        unfinished = self._unfinished(specs)
        seconds = sum(_estimated_seconds(spec.panel) for spec in unfinished)
        minutes = max(1, round(seconds / self.workers / 60))
        names = ", ".join(panel.name for panel in panels)
        where = f"on {self.scheduler}" if self.scheduler else f"with {self.workers} worker{'s' * (self.workers > 1)}"
        estimate = f": about {minutes} min, as estimated from runs on two cores" if unfinished else ""
        panel = f"{len(panels)} panel{'s' * (len(panels) > 1)} ({names})"
        text = f"{len(specs)} run{'s' * (len(specs) > 1)} in {panel}, {len(unfinished)} to make {where}{estimate}."
        self.console.print(f"{text} Results go to [bold]{escape(str(self.out))}[/].", soft_wrap=True)
        for panel_of_user in (panel for panel in panels if panel.figure == USER_FIGURE):
            self.console.print(f"Objective: {runs.objective(panel_of_user)}.", soft_wrap=True, markup=False)


def _estimated_seconds(panel: Panel) -> float:
    """Return about how long a run of a panel takes."""
    if panel.network:
        return _NETWORK_SECONDS
    return _LARGE_SECONDS if panel.data in ("covtype", "higgs") else _SUM_SECONDS


def report(out: Path, console: Console, plan: dict[str, dict[str, int]] | None = None) -> None:
    """Check the claims, draw the figures, and write the summary and the page of an output directory."""
    from sanc.lab import figures
    from sanc.lab import report as page

    found_runs = traces.read(out)
    if not found_runs:
        raise sanc.ArgumentError(f"directory = {str(out)!r} holds no runs: pass the --out of an earlier command.")
    checked = claims.evaluate(found_runs)
    write_json(out / "claims.json", {"claims": [vars(claim) for claim in checked]})
    figures.save_all(out, found_runs)
    summary.write(out, found_runs, checked)
    path = page.write(out, found_runs, checked, plan)
    if checked:
        table = Table("panel", "claim", "measured", "holds", title="The paper's claims", title_justify="left")
        for claim in checked:
            verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}[claim.holds]
            table.add_row(claim.panel, claim.statement, claim.measured, verdict)
        console.print(table)
    for name, group in ({} if checked else traces.by_panel(found_runs)).items():
        accuracies = _accuracies(group)
        extra_columns = ["accuracy"] if accuracies else []
        table = Table(
            "method", "runs", "final loss", "evaluations", "seconds", *extra_columns, title=name, title_justify="left"
        )
        for result in results(group):
            final, spent = " ".join(filter(None, result.final)), result.ends
            cells = result.counted, final, f"{spent['calls']:,.0f}", f"{spent['seconds']:.3g}"
            shown = [accuracies.get(result.method, "–")] if accuracies else []
            table.add_row(style_of(result.method).name, *cells, *shown)
        console.print(table)
    written = {"Report": path, "Figures": out / "figures", "Tables": out / "summary.md"}
    console.print("   ".join(f"{name}: [bold]{escape(str(to))}[/]" for name, to in written.items()), soft_wrap=True)


def _accuracies(group: list[traces.RunTrace]) -> dict[str, str]:
    """Return the mean accuracy on all rows by method, where the runs recorded it."""
    accuracies: dict[str, list[float]] = {}
    for run in group:
        if run.done and "training_accuracy" in run.done:
            accuracies.setdefault(run.method, []).append(run.done["training_accuracy"])
    return {method: f"{100 * sum(values) / len(values):.2f} %" for method, values in accuracies.items()}
