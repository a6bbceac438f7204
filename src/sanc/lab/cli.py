"""The command line: ``sanc datasets``, ``reproduce``, ``run``, ``report``, ``diagnose`` and ``demo``.

Each command imports slow modules such as torch itself, so that ``--help`` is fast.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sanc._version import __version__
    from sanc.errors import ArgumentError, SancError, one_of
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"The command line needs {missing.name}: install the extra lab, pip install 'sanc[lab]'."
    ) from None

app = typer.Typer(
    help="Second-order optimisation that does not stop at saddle points: the paper's experiments, and yours.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="List the data sets, and download them.", invoke_without_command=True)
app.add_typer(data_app, name="datasets")
console = Console(highlight=False)


def _number(*flags: str, least: float | None = None, whole: bool = True, **others: Any) -> Any:
    """Return an option for a number that is at least `least`; the error for another value names it."""
    bound = "" if least is None else f" ≥ {least:g}"
    kind = f"{'an integer' if whole else 'a number'}{bound}"

    def parse(value: Any) -> Any:
        try:
            number = int(value) if whole else float(value)
        except ValueError:
            number = math.nan
        if not number >= (-math.inf if least is None else least):
            raise typer.BadParameter(f"{value} cannot be used: pass {kind}.", param_hint=f"'{flags[0]}'")
        return number

    return typer.Option(*flags, parser=parse, metavar=f"{'INTEGER' if whole else 'NUMBER'}{bound}", **others)


DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the data files; by default $SANC_DATA, or else the user's cache."),
]
Out = Annotated[Path, typer.Option("--out", help="Output directory; a second call resumes where the first one ended.")]
Workers = Annotated[int, _number("--workers", least=1, help="Number of parallel processes.")]
Scheduler = Annotated[
    str | None, typer.Option("--scheduler", help="Address of a dask scheduler whose workers make the runs.")
]
Preset = Annotated[str, typer.Option("--preset", help="paper, authors or robust.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda, for networks.")]
Runs = Annotated[int, _number("--runs", least=1, help="Seeds 0, 1, … of each method.")]
Every = Annotated[float, _number("--checkpoint-every", least=0, whole=False, help="Seconds between checkpoints.")]
Label = Annotated[str | None, typer.Option(help="The label column of a CSV file, by its name.")]


def _reject_seed(value: str | None) -> None:
    """Raise an error for a seed, which a command with several runs does not have."""
    if value is not None:
        raise typer.BadParameter(
            f"{value} cannot be used, since each run has its own seed: pass --runs, the number of the seeds 0, 1, …",
            param_hint="'--seed'",
        )


Seed = Annotated[str | None, typer.Option("--seed", hidden=True, callback=_reject_seed)]
Names = Annotated[str | None, typer.Option(help="Comma-separated names to keep.")]
_CPUS = os.cpu_count() or 1
_SET_HELP = "A setting of the methods, as name=value, or a grid, as name=value,value,…; may be repeated."


def _version(requested: bool) -> None:
    """Print the version and exit, if it was requested."""
    if requested:
        typer.echo(f"sanc {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Errors of this package, of imports and of files are printed as one line, with exit code 2.
    """
    try:
        return int(app(arguments, standalone_mode=True) or 0)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except (SancError, OSError, ImportError) as error:
        remedies = {ImportError: ": install the extra lab.", OSError: ": check the path and its permissions."}
        remedy = next((words for kind, words in remedies.items() if isinstance(error, kind)), "")
        _print_error(f"{error}{remedy}")
        return 2


def _print_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(f"[bold red]Error[/]: {escape(message)}", soft_wrap=True)


def _exit_with(work: Callable[[], int]) -> NoReturn:
    """Call `work` and exit with its code. After an interrupt, print how to resume.

    SIGHUP (a closed terminal) and SIGTERM count as interrupts, unless the user ignores them, as with nohup.
    """
    caught = [signal.SIGINT]

    def interrupt(number: int, _: object) -> NoReturn:
        caught[0] = signal.Signals(number)
        raise KeyboardInterrupt

    handled = [number for number in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        code = work()
    except KeyboardInterrupt:
        code = 128 + caught[0]
        with suppress(OSError):  # the terminal may be gone
            console.print("\n[bold]Interrupted.[/] Checkpoints are kept: the same command resumes from the last ones.")
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
    raise typer.Exit(code)


@data_app.callback()
def list_datasets(context: typer.Context, data_dir: DataDir = None) -> None:
    """List every data set: its size, whether it is present, and its path or source."""
    if context.invoked_subcommand is not None:
        return
    from sanc.lab import datasets

    table = Table(title="Data sets", title_justify="left")
    for column in ("name", "rows", "features", "classes", "download", "present", "where"):
        table.add_column(column, justify="left" if column in ("name", "present", "where") else "right", overflow="fold")
    for row in datasets.available(data_dir):
        size = f"{row['size'] / 1e6:,.1f} MB" if row["size"] else "?"
        present = "[green]yes[/]" if row["present"] else "[dim]no[/]"
        note = f"\n[dim]{row['note']}[/]" if row["note"] else ""
        numbers = (f"{row['rows']:,}", f"{row['features']:,}", str(row["classes"]))
        table.add_row(row["name"], *numbers, size, present, f"{row['where']}{note}")
    console.print(table)
    console.print(f"scikit-learn provides {', '.join(datasets.BUNDLED)}. Others: [bold]sanc datasets get NAME[/].")


@data_app.command("get")
def get_datasets(
    names: Annotated[list[str] | None, typer.Argument(help="Names of data sets.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Download data sets and verify their checksums; an interrupted download is resumed."""
    from sanc.lab import datasets

    requested = list(datasets.CATALOGUE) if every else list(names or [])
    if not requested:
        raise ArgumentError("names is empty: pass names of data sets, or --all.")
    failed = False
    for name in [one_of("data set", name, datasets.CATALOGUE) for name in requested]:
        console.print(f"Downloading {name} …")
        try:
            datasets.fetch([name], data_dir)
        except SancError as error:
            failed = True
            _print_error(str(error))
    raise typer.Exit(int(failed))


@app.command()
def reproduce(
    figure: Annotated[str, typer.Argument(help="fig1, fig2a, fig2b, fig2c, fig3, fig4, fig5, or all.")],
    data: Names = None,
    methods: Names = None,
    n_runs: Runs = 10,
    preset: Preset = "paper",
    workers: Workers = _CPUS,
    scheduler: Scheduler = None,
    device: Device = "cpu",
    out: Out = Path("sanc-results"),
    data_dir: DataDir = None,
    budget: Annotated[int | None, _number("--budget", least=1, help="paper_calls of each run.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    checkpoint_every: Every = 5.0,
    seed: Seed = None,
) -> None:
    """Reproduce a figure of the paper: runs, plots, and a report that checks the paper's claims.

    With --set its methods run with other settings, each value as a curve of its own.
    """
    from sanc.lab import experiments, study

    one_of("--preset", preset, experiments.LAB_PRESETS)
    panels = experiments.select(figure.split(","), _split(data), _split(methods))
    panels = experiments.by_settings(panels, _parse_settings(settings or []), preset)
    if budget is not None:
        panels = [replace(panel, calls=budget) for panel in panels]
    made = study.Study(
        panels=panels, runs=n_runs, preset=preset, workers=workers, device=device, out=out, data_dir=data_dir,
        checkpoint_every=checkpoint_every, scheduler=scheduler, console=console,
    )  # fmt: skip
    _exit_with(made.run)


@app.command()
def run(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="A data file: LIBSVM (.svm, .libsvm, .txt), .csv or .npz.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--from", help="A TOML file with these options.")] = None,
    problem: Annotated[str, typer.Option(help="logistic, svm, softmax, mlp or cnn.")] = "logistic",
    data: Annotated[str, typer.Option(help="A data set.")] = "a9a",
    methods: Annotated[str, typer.Option(help="Comma-separated members of the family.")] = "sanc,scr",
    options: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    batch: Annotated[int | None, _number("--batch", least=1, help="Rows of each sample; by default n/20.")] = None,
    budget: Annotated[
        int | None, _number("--budget", least=1, help="paper_calls of each run; by default 20 per row.")
    ] = None,
    strength: Annotated[float | None, _number("--strength", whole=False, help="Weight of the penalty.")] = None,
    penalty: Annotated[str | None, typer.Option(help="Of logistic: nonconvex, as in the paper, or l2.")] = None,
    standardise: Annotated[bool, typer.Option("--standardise", help="Scale the columns of the file.")] = False,
    label: Label = None,
    activation: Annotated[str | None, typer.Option(help="tanh or relu, of a network.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the panel.")] = None,
    n_runs: Runs = 3,
    preset: Preset = "robust",
    workers: Workers = _CPUS,
    scheduler: Scheduler = None,
    device: Device = "cpu",
    out: Out = Path("sanc-results"),
    data_dir: DataDir = None,
    checkpoint_every: Every = 5.0,
    seed: Seed = None,
) -> None:
    """Run any combination of problem, data set or data file, methods and options, also from a TOML file."""
    from sanc.lab import experiments, study, user_files

    if file is not None:
        if not user_files.is_file(str(file)):
            raise ArgumentError(
                f"file = {str(file)!r} is not a data file: pass one that ends in {', '.join(user_files.SUFFIXES)}, or "
                "a data set by its name with --data."
            )
        if str(context.get_parameter_source("data")).endswith("COMMANDLINE") or config is not None:
            raise ArgumentError(f"{file} conflicts with --data or --from: name the data once.")
        data = str(file)
    parsed = _parse_settings(options or [])
    single = {name: values[0] for name, values in parsed.items() if len(values) == 1}
    grids = {name: values for name, values in parsed.items() if len(values) > 1}
    given: dict[str, Any] = {
        "problem": problem, "data": data, "methods": _split(methods), "options": single,
        "batch": batch, "budget": budget, "strength": strength, "activation": activation, "name": name,
        "penalty": penalty, "standardise": standardise or None, "label": label,
    }  # fmt: skip
    if config is not None:
        for key in given:
            if str(context.get_parameter_source(key)).endswith("COMMANDLINE"):
                flag = "--set" if key == "options" else f"--{key}"
                raise ArgumentError(f"{flag} conflicts with --from {config}: write it into the file.")
        given |= _read_toml(config, set(given))
    one_of("--preset", preset, experiments.LAB_PRESETS)
    panels = experiments.by_settings([study.user_panel(given)], grids, preset)
    made = study.Study(
        panels=panels, runs=n_runs, preset=preset, workers=workers, device=device, out=out, data_dir=data_dir,
        checkpoint_every=checkpoint_every, scheduler=scheduler, console=console,
    )  # fmt: skip
    _exit_with(made.run)


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _parse_settings(pairs: list[str]) -> dict[str, list[Any]]:
    """Return the values of every setting, without duplicates."""
    settings: dict[str, list[Any]] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        name, values = name.strip(), [part.strip() for part in text.split(",")]
        if not all(values):
            raise ArgumentError(f"--set {pair!r} has no value: write it as name=value, or name=value,value,….")
        if name in settings:
            raise ArgumentError(f"--set {pair!r} repeats {name}: write all its values as {name}=value,value,….")
        settings[name] = list(dict.fromkeys(map(_parse_value, values)))
    return settings


def _parse_value(text: str) -> Any:
    """Return a number, true, false or null as JSON reads it, and anything else as text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return text if isinstance(value, list | dict) else value


def _read_toml(path: Path, keys: set[str]) -> dict[str, Any]:
    """Return the options in a TOML file; raise an error for a key that is no option."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(
            f'--from {path} cannot be read ({reason}): pass a TOML file with lines such as problem = "logistic".'
        ) from None
    for key in content:
        one_of(f"--from {path}: key", key, keys)
    return content


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="An output directory.")]) -> None:
    """Draw the figures of an output directory, and write its report.html and its claims."""
    from sanc.lab import study

    study.report(directory, console)


@app.command()
def diagnose(
    module: Annotated[Path, typer.Argument(help="A file of torch.save(model, path). Loading it executes its code.")],
    data: Annotated[Path, typer.Argument(help="A data file: LIBSVM (.svm, .libsvm, .txt), .csv or .npz.")],
    batch: Annotated[
        int | None, _number("--batch", least=1, help="Rows of a batch; by default 256, or fewer for eight batches.")
    ] = None,
    label: Label = None,
    max_products: Annotated[
        int | None, _number("--max-products", least=1, help="Limit on Hessian products of the bounds.")
    ] = None,
    max_time: Annotated[float | None, _number("--max-time", least=0, whole=False, help="Limit on seconds.")] = None,
    seed: Annotated[int, _number("--seed", least=0, help="Seed of the order of rows and of start vectors.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Picture of the spectrum and of loss profiles.")] = None,
    numbers: Annotated[Path | None, typer.Option("--json", help="File for all numbers.")] = None,
) -> None:
    """Measure whether a saved classifier is trained, stuck or at a saddle, in evaluation mode, on rows of a file."""
    from sanc.lab import user_files
    from sanc.lab.saved_module import diagnose_file, load_module

    options = {"max_products": max_products, "max_time": max_time, "seed": seed, "progress": console.is_terminal}
    network = load_module(module)
    loaded = user_files.load(str(data), label=label)
    if note := user_files.label_note(loaded):
        console.print(note, soft_wrap=True, markup=False)
    report = diagnose_file(network, module, loaded, batch=batch, **options)
    console.print(str(report), markup=False)
    if plot is not None:
        report.plot().savefig(plot)
    if numbers is not None:
        finite = {name: value if math.isfinite(value) else None for name, value in report.as_dict().items()}
        numbers.write_text(json.dumps(finite, allow_nan=False))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs and the plot.")] = Path("demo-output"),
    seed: Annotated[int, _number("--seed", least=0, help="Seed of everything random.")] = 0,
    budget: Annotated[int, _number("--budget", least=1, help="Evaluations per method.")] = 300_000,
    batch: Annotated[int, _number("--batch", least=1, help="Images in a sample.")] = 128,
    workers: Workers = _CPUS,
    scheduler: Scheduler = None,
) -> None:
    """Train a small network on scikit-learn's digits with every method: a table and a plot in a minute or two."""
    from sanc.lab import demo as module

    shown = console if console.is_terminal else Console(highlight=False, width=80)
    options = {"seed": seed, "budget": budget, "batch": batch, "workers": workers, "scheduler": scheduler}
    _exit_with(lambda: module.run(out, shown, **options))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
