"""Options, data sets, tables and results files of the benchmarks."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import lzma
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sanc

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
"""Folder of the results pages and of the committed runs."""
COMMIT_NOTE = "[The overview](README.md#runs-and-commits) names the commit of these runs."
"""A sentence of the pages in docs/results that benchmarks write; update the table of the overview with the page."""

# ---------------------------------------------------------------------- command line and data


def command(doc: str | None, *, quick: str = "", out: str = "", data: bool = False) -> argparse.ArgumentParser:
    """Return a parser with a benchmark's docstring as its help, and with the options that benchmarks share.

    Parameters
    ----------
    doc : str
        Docstring of the benchmark.
    quick, out : str
        Help of --quick, and the files that --out writes; an empty string leaves the option out.
    data : bool
        Whether the benchmark reads data files, from the folder --data-dir.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if out:
        parser.add_argument("--out", type=Path, help=f"folder for {out}")
    if data:
        where = "folder of the data files; by default SANC_DATA or the cache of `sanc.lab`"
        parser.add_argument("--data-dir", type=Path, help=where)
    return parser


def load_sets(names: Sequence[str], data_dir: Path | None, dtype: str = "float64") -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each data set; report a set without files, and skip it."""
    from sanc.lab.runs import load_data

    for name in names:
        try:
            loaded = load_data(name, data_dir, dtype)
        except (sanc.SancError, OSError) as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        yield name, loaded


# ---------------------------------------------------------------------- tables


def number(value: float, form: str = ".4g") -> str:
    """Format a number; – for NaN and ∞ for an infinite value."""
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else format(value, form)


def verdict(value: float, *, most: float | None = None, least: float | None = None) -> str:
    """Return a goal and whether `value` meets it, as in "≤ 1.3 met"."""
    sign, goal, met = ("≤", most, value <= most) if most is not None else ("≥", least, value >= (least or 0.0))
    return f"{sign} {goal:g} {'met' if met else 'MISSED'}"


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], form: Callable[[Any], str] = str, left: int = 1
) -> str:
    """Write a Markdown table; the first `left` columns are aligned left, the others right."""
    cells = [list(head), *[[form(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(padded)} |")
    rule = "|" + "|".join("-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def table_of_methods(head: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a table with one row for each method; `head` has the heading of each key, and a missing cell is NaN."""

    def form(cell: Any) -> str:
        if not isinstance(cell, float):
            return str(cell)
        return number(cell, ".0f" if cell.is_integer() else ".2f" if cell < 10 else ".1f")

    return markdown_table(list(head.values()), [[row.get(key, math.nan) for key in head] for row in rows], form)


def table_of_failures(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the problems that each method does not solve."""
    unsolved: dict[str, list[str]] = {}
    for run in runs:
        unsolved.setdefault(run["method"], []).extend([] if run["solved"] else [run["problem"]])
    cells = [[method, ", ".join(names) or "–"] for method, names in unsolved.items()]
    return markdown_table(("method", "not solved"), cells, left=2)


# ---------------------------------------------------------------------- results files


def machine(device: Any = "cpu") -> dict[str, Any]:
    """Return versions, threads and device of a measurement."""
    import torch  # not above: `benchmarks.higgs` measures the memory of a process without torch

    device = torch.device(device)
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(device), "tf32": torch.backends.cuda.matmul.allow_tf32}
    return about


def json_ready(content: Any) -> Any:
    """Return the content with null for values that are not finite, which JSON cannot represent."""
    if isinstance(content, Mapping):
        return {str(key): json_ready(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [json_ready(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_text(path: Path) -> str:
    """Return the text of a file, which is compressed if its name ends with .xz."""
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")


def read_document(name: str) -> dict[str, Any]:
    """Return the content of a JSON file of docs/results."""
    found: dict[str, Any] = json.loads(read_text(RESULTS / name))
    return found


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file with one JSON line for each."""
    return [json.loads(line) for line in read_text(path).splitlines()]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file of comma-separated values; numbers and truth values are those of Python."""

    def parsed(cell: str) -> Any:
        if cell in ("True", "False"):
            return cell == "True"
        for kind in (int, float):
            try:
                return kind(cell)
            except ValueError:
                continue
        return cell

    return [{name: parsed(cell) for name, cell in row.items()} for row in csv.DictReader(read_text(path).splitlines())]


def write_results(folder: Path | None, files: Mapping[str, Any]) -> None:
    """Write files into a folder; do nothing without a folder.

    Parameters
    ----------
    folder : Path or None
        Folder, created if it does not exist.
    files : mapping
        Content by file name: a string is written as text, a list of runs as one JSON line for each, a mapping as JSON
        with the options of the command (without folders), and a function is called and the figure that it returns is
        saved. A file whose name ends with .xz is compressed.
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    words, folders = ["", *sys.argv[1:]], ("--out", "--data-dir")
    options = [word for before, word in itertools.pairwise(words) if word not in folders and before not in folders]
    for name, content in files.items():
        path = folder / name
        if callable(content):
            content().savefig(path, dpi=110)
        else:
            if isinstance(content, list):
                content = "\n".join(json.dumps(json_ready(run)) for run in content)
            elif not isinstance(content, str):
                content = json.dumps(json_ready({"command": " ".join(options), **content}), indent=1)
            encoded = (content.rstrip("\n") + "\n").encode()
            scratch = path.with_name(f"{name}.tmp")
            scratch.write_bytes(lzma.compress(encoded, preset=9) if path.suffix == ".xz" else encoded)
            scratch.replace(path)  # an interrupted run leaves no partial file
