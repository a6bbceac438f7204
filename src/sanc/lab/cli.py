"""The command line: ``sanc datasets``, ``reproduce``, ``run``, ``report`` and ``demo``."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as missing:  # pragma: no cover - depends on what is installed
    raise SystemExit(f"The command line needs {missing.name}: pip install 'sanc[lab]'.") from None

import sanc
from sanc.lab import bundled, claims, datasets, experiments, pool, runs, summary, traces

app = typer.Typer(
    help="Second-order optimisation that does not stop at saddle points: the paper's experiments, and your own.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The data sets: what is here, and how to get the rest.", invoke_without_command=True)
app.add_typer(data_app, name="datasets")
console = Console(highlight=False)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the data files; otherwise $SANC_DATA, otherwise a cache of yours."),
]
Out = Annotated[Path, typer.Option("--out", help="Output directory; a second call goes on where the first ended.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Processes that run at the same time.")]
Preset = Annotated[str, typer.Option("--preset", help="paper, authors or robust.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda, for networks.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Seeds 0, 1, … of each method.")]
Every = Annotated[float, typer.Option("--checkpoint-every", min=0.0, help="Seconds between checkpoints.")]
Names = Annotated[str | None, typer.Option(help="Comma-separated names to keep.")]
_CPUS = os.cpu_count() or 1


def main() -> None:
    """Run the command line; errors of ours and of the disk are one line and exit code 2."""
    errors = Console(stderr=True, highlight=False)
    try:
        app(standalone_mode=True)
    except sanc.SancError as problem:
        errors.print(f"[bold red]Error[/]: {escape(str(problem))}", soft_wrap=True)
        sys.exit(2)
    except OSError as problem:
        remedy = "check the path, its permissions and the space on the disk"
        errors.print(f"[bold red]Error[/]: {escape(str(problem))}: {remedy}.", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print(_RESUME)
        sys.exit(130)


_RESUME = "[bold]Interrupted.[/] Nothing is lost: the same command goes on from the last checkpoints."


@contextmanager
def _resumable() -> Iterator[None]:
    """Say how to go on after an interrupt at any moment, also while data are read or pictures drawn."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"\n{_RESUME}")
        raise typer.Exit(130) from None


# ---------------------------------------------------------------------------------------------- data sets


@data_app.callback()
def list_datasets(context: typer.Context, data_dir: DataDir = None) -> None:
    """Show every data set: its size, whether it is here, and where it would come from."""
    if context.invoked_subcommand is not None:
        return
    table = Table(title="Data sets", title_justify="left")
    for column in ("name", "rows", "features", "classes", "download", "here", "where"):
        numeric = column in ("rows", "features", "classes", "download")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in datasets.available(data_dir):
        size = f"{row['size'] / 1e6:,.1f} MB" if row.get("size") else "?"
        here = "[green]yes[/]" if row["present"] else "[dim]no[/]"
        note = f"\n[dim]{row['note']}[/]" if row.get("note") else ""
        numbers = (f"{row['rows']:,}", f"{row['features']:,}", str(row["classes"]))
        table.add_row(row["name"], *numbers, size, here, f"{row['where']}{note}")
    console.print(table)
    console.print(
        f"With scikit-learn come {', '.join(bundled.NAMES)}. Get others with [bold]sanc datasets get NAME[/]."
    )


@data_app.command("get")
def get_datasets(
    names: Annotated[list[str] | None, typer.Argument(help="Names of data sets.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Download data sets, checked against their checksums; a broken download is resumed."""
    wanted = list(datasets.CATALOGUE) if every else list(names or [])
    if not wanted:
        raise sanc.ArgumentError("names is empty: name data sets, or pass --all.")
    for name in wanted:
        if name not in datasets.CATALOGUE:
            raise sanc.ArgumentError(
                f"data set {name!r} is not known: {sanc.errors.nearest(name, datasets.CATALOGUE)}."
            )
    failed = False
    for name in wanted:
        console.print(f"Getting {name} …")
        try:
            datasets.fetch([name], data_dir)
        except sanc.SancError as problem:
            failed = True
            Console(stderr=True, highlight=False).print(f"[bold red]Error[/]: {escape(str(problem))}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------- runs


@app.command()
def reproduce(
    figure: Annotated[str, typer.Argument(help="fig1, fig2a, fig2b, fig2c, fig3, fig4, fig5, or all.")],
    data: Names = None,
    methods: Names = None,
    n_runs: Runs = 10,
    preset: Preset = "paper",
    workers: Workers = _CPUS,
    device: Device = "cpu",
    out: Out = Path("sanc-results"),
    data_dir: DataDir = None,
    budget: Annotated[int | None, typer.Option("--budget", min=1, help="paper_calls of each run.")] = None,
    checkpoint_every: Every = 5.0,
) -> None:
    """Make a figure of the paper: runs, pictures, and a report with the paper's claims checked."""
    panels = experiments.select(figure.split(","), _split(data), _split(methods))
    if budget is not None:
        panels = [replace(panel, calls=budget) for panel in panels]
    with _resumable():
        _go(panels, n_runs, preset, workers, device, out, data_dir, checkpoint_every)


@app.command()
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--from", help="A TOML file that says what to run.")] = None,
    problem: Annotated[str, typer.Option(help="logistic, svm, softmax, mlp or cnn.")] = "logistic",
    data: Annotated[str, typer.Option(help="A data set.")] = "a9a",
    methods: Annotated[str, typer.Option(help="Comma-separated members of the family.")] = "sanc,scr",
    options: Annotated[list[str] | None, typer.Option("--set", help="An option of the methods, as name=value.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of each sample; by default a twentieth.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="paper_calls of each run; by default 20 per row.")] = None,
    strength: Annotated[float | None, typer.Option(help="Weight of the penalty.")] = None,
    activation: Annotated[str | None, typer.Option(help="tanh or relu, of a network.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the panel.")] = None,
    n_runs: Runs = 3,
    preset: Preset = "robust",
    workers: Workers = _CPUS,
    device: Device = "cpu",
    out: Out = Path("sanc-results"),
    data_dir: DataDir = None,
    checkpoint_every: Every = 5.0,
) -> None:
    """Run a combination of your own: problem, data, methods, any option; also from a TOML file."""
    given: dict[str, Any] = {
        "problem": problem, "data": data, "methods": _split(methods), "options": _options(options or []),
        "batch": batch, "budget": budget, "strength": strength, "activation": activation, "name": name,
    }  # fmt: skip
    if config is not None:
        for key in given:
            if str(context.get_parameter_source(key)).endswith("COMMANDLINE"):
                flag = "--set" if key == "options" else f"--{key}"
                raise sanc.ArgumentError(
                    f"{flag} stands beside --from {config}: write it into the file, or leave it out."
                )
        given |= _read_toml(config, set(given))
    with _resumable():
        _go([_own_panel(given)], n_runs, preset, workers, device, out, data_dir, checkpoint_every)


def _own_panel(given: dict[str, Any]) -> experiments.Panel:
    """Check what a person asked for and make a panel of it."""
    for key, kind in (("problem", str), ("data", str), ("methods", list), ("options", dict)):
        if not isinstance(given[key], kind):
            raise sanc.ArgumentError(f"{key} = {given[key]!r} cannot be used: pass a {kind.__name__}.")
    sets = (*datasets.CATALOGUE, *bundled.NAMES)
    problems = ("logistic", "svm", "softmax", "mlp", "cnn")
    for key, known in (("data", sets), ("problem", problems)):
        if given[key] not in known:
            raise sanc.ArgumentError(f"{key} = {given[key]!r} is not known: {sanc.errors.nearest(given[key], known)}.")
    methods = experiments.check_methods(given["methods"])
    options = set(sanc.Settings.__dataclass_fields__)
    for key in given["options"]:
        if key not in options:
            raise sanc.ArgumentError(f"option {key!r} is not known: {sanc.errors.nearest(key, options)}.")
        user = {"lr": {"sgd"}, "momentum": {"crm"}}.get(key, set(methods) - {"sgd"})
        if not user & set(methods):
            raise sanc.ArgumentError(f"option {key!r} has no effect on {', '.join(methods)}: leave it out.")
    network = given["problem"] in ("mlp", "cnn")
    if given["activation"] is not None and not network:
        raise sanc.ArgumentError(
            f"--activation {given['activation']!r} has no effect on {given['problem']}: leave it out."
        )
    name = given["name"] if given["name"] is not None else f"own-{given['problem']}-{given['data']}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise sanc.ArgumentError(f"--name {name!r} cannot be used: letters, digits, '.', '_' and '-' make a name.")
    strength = given["strength"]
    return experiments.Panel(
        name=name,
        figure="own",
        problem=given["problem"],
        data=given["data"],
        methods=methods,
        options=given["options"],
        activation=given["activation"] or "tanh",
        batch=given["batch"] if given["batch"] is not None else (128 if network else None),
        calls=given["budget"],
        strength=strength if strength is not None else (0.01 if network else 1.0),
    )


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise sanc.ArgumentError(f"--set {pair!r} has no value: write it as name=value.")
        try:
            options[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            options[name.strip()] = value
    return options


def _read_toml(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise sanc.ArgumentError(f"--from {path}: {problem}.") from None
    for key in content:
        if key not in known:
            raise sanc.ArgumentError(f"--from {path}: {key!r} is not known: {sanc.errors.nearest(key, known)}.")
    return content


def _go(
    panels: list[experiments.Panel],
    n_runs: int,
    preset: str,
    workers: int,
    device: str,
    out: Path,
    data_dir: Path | None,
    checkpoint_every: float,
) -> None:
    """Say what will happen, do it, draw it, and say where the result is."""
    if preset not in sanc.PRESETS:
        raise sanc.ArgumentError(f"--preset {preset!r} is not known: choose from {', '.join(sanc.PRESETS)}.")
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise sanc.ArgumentError(f"--device {device!r} is not there: torch sees no CUDA device; use cpu.")
    elif device != "cpu":
        raise sanc.ArgumentError(f"--device {device!r} is not known: use cpu or cuda.")
    out.mkdir(parents=True, exist_ok=True)
    present = _present(panels, preset, n_runs, device, data_dir, out)
    wanted = experiments.specs(present, n_runs, preset, device)
    if not wanted:
        console.print("[bold red]No panel has its data.[/] See [bold]sanc datasets[/].")
        raise typer.Exit(1)
    _announce(present, wanted, workers, out)
    clock = time.perf_counter()
    outcome = pool.run_all(
        wanted, out, data_dir=data_dir, workers=workers, console=console, checkpoint_every=checkpoint_every
    )
    if outcome.interrupted:
        raise KeyboardInterrupt
    took = time.perf_counter() - clock
    console.print(
        f"{outcome.finished} runs finished in {took:.0f} s, {outcome.known} were finished before"
        + (f", {outcome.elsewhere} are being made by another process" if outcome.elsewhere else "")
        + (f", [bold red]{len(outcome.failed)} failed[/]" if outcome.failed else "")
        + "."
    )
    for name, text in outcome.failed.items():
        console.print(f"  {name}: {text}", soft_wrap=True)
    missing = [spec for spec in wanted if not runs.finished(out / "runs" / spec.path)]
    if outcome.finished or outcome.known:
        plan = {panel.name: dict.fromkeys(panel.methods, n_runs) for panel in present}
        _report(out, plan)
    if missing:
        names = ", ".join(spec.path for spec in missing[:5]) + (" …" if len(missing) > 5 else "")
        console.print(
            f"{len(missing)} runs are not finished ({names}): the same command goes on with them.", soft_wrap=True
        )
        raise typer.Exit(1)


def _present(
    panels: list[experiments.Panel], preset: str, n_runs: int, device: str, data_dir: Path | None, out: Path
) -> list[experiments.Panel]:
    """Load every data set, check that its panels can run, and note those whose data cannot be had."""
    skipped = traces.skipped(out)
    found: dict[str, datasets.Loaded | str] = {}
    present = []
    for panel in panels:
        if panel.data not in found:
            try:
                if console.is_terminal:
                    console.print(f"Reading {panel.data} …", end="\r")
                found[panel.data] = runs.load_data(panel.data, data_dir)
            except sanc.SancError as problem:
                found[panel.data] = str(problem)
        loaded = found[panel.data]
        if isinstance(loaded, str):
            skipped[panel.name] = loaded
            console.print(f"[yellow]Without {panel.name}[/]: {escape(loaded)}", soft_wrap=True)
            continue
        skipped.pop(panel.name, None)
        present.append(panel)
        n, dim = runs.describe(panel, loaded, preset)
        for spec in experiments.specs([panel], n_runs, preset, device):
            runs.compare(out / "runs" / spec.path, runs.configuration(spec, n, dim, loaded.note))
    runs.write_json(out / "skipped.json", skipped)
    return present


def _announce(panels: list[experiments.Panel], wanted: list[experiments.RunSpec], workers: int, out: Path) -> None:
    left = [spec for spec in wanted if not runs.finished(out / "runs" / spec.path)]
    heavy = sum(spec.panel.network for spec in left)
    # Measured on two cores: a logistic run takes a second or so, covtype several, a network a minute or more.
    light = sum(1.5 if spec.panel.data not in ("covtype", "higgs") else 8.0 for spec in left if not spec.panel.network)
    minutes = (light + 60.0 * heavy) / workers / 60
    time_left = f": about {max(1, round(minutes))} min, if this machine is like ours" if left else ""
    console.print(
        f"{len(wanted)} runs in {len(panels)} panels ({', '.join(panel.name for panel in panels)}), "
        f"{len(left)} still to make with {workers} worker{'s' if workers > 1 else ''}{time_left}. "
        f"Results go to [bold]{out}[/].",
        soft_wrap=True,
    )


# ---------------------------------------------------------------------------------------------- report and demo


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="An output directory.")]) -> None:
    """Draw the figures of an output directory and write its report.html and its claims."""
    if not (directory / "runs").is_dir():
        raise sanc.ArgumentError(f"directory = {str(directory)!r} holds no runs: pass the --out of an earlier command.")
    _report(directory)


def _report(out: Path, plan: dict[str, dict[str, int]] | None = None) -> None:
    from sanc.lab import figures
    from sanc.lab import report as page

    found_runs = traces.read(out)
    if not found_runs:
        raise sanc.ArgumentError(f"directory = {str(out)!r} holds no runs: pass the --out of an earlier command.")
    order = [panel.name for panels in experiments.FIGURES.values() for panel in panels]
    places = {name: place for place, name in enumerate(order)}
    known = sorted(
        {trace.panel for trace in found_runs} | set(plan or {}), key=lambda name: (places.get(name, 99), name)
    )
    wanted: dict[str, dict[str, int]] = {name: dict((plan or {}).get(name, {})) for name in known}
    for trace in found_runs:
        methods = wanted[trace.panel]
        methods[trace.method] = max(methods.get(trace.method, 0), trace.seed + 1)
    found = sorted(claims.evaluate(found_runs), key=lambda claim: known.index(claim.panel))
    runs.write_json(out / "claims.json", {"claims": [vars(claim) for claim in found]})
    figures.save_all(out, order=order)
    summary.write(out, found_runs, found, order)
    path = page.write(out, found, plan=wanted)
    if found:
        table = Table(title="The paper's claims", title_justify="left")
        for column in ("panel", "claim", "measured", "holds"):
            table.add_column(column)
        for claim in found:
            verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}[claim.holds]
            table.add_row(claim.panel, claim.statement, claim.measured, verdict)
        console.print(table)
    console.print(
        f"Report: [bold]{path}[/]   Pictures: [bold]{out / 'figures'}[/]   Tables: [bold]{out / 'summary.md'}[/]",
        soft_wrap=True,
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Train a small network on scikit-learn's digits with every method; a table and a picture in half a minute."""
    from sanc.lab import demo as module

    raise typer.Exit(module.main(context.args))


if __name__ == "__main__":
    main()
