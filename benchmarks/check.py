"""Recompute the tables of docs/results and of two other pages from the committed runs, and compare them.

    python -m benchmarks.check                          # all pages, a minute
    python -m benchmarks.check deterministic.md robust.md

The functions that make the tables of a benchmark also make those of the check. A table of a page agrees if each of its
rows is a row of a recomputed table; a page may leave out rows and columns. A recomputed sentence has to occur on the
page as it is. Each number in the first paragraph of a page has to occur in what was recomputed for it, or in a table
without runs. The rows of the table of results of README.md have to be those of `benchmarks.readme`.
`WITHOUT_RUNS` lists the tables that have no committed runs.

A line is printed for each page, and one for each table that differs. The exit code is 1 if any does.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import readme
from benchmarks.reporting import RESULTS, read_document, read_rows, read_runs

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"(?<![\w.])\d+(?:[.,]\d+)*(?!\w)"

# ---------------------------------------------------------------------- tables of Markdown


@dataclass(frozen=True)
class Table:
    """A table of a Markdown text, and the heading above it."""

    heading: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def columns(self, head: Sequence[str]) -> list[tuple[str, ...]] | None:
        """Return the rows with the columns that `head` names, in its order; None if a column is missing."""
        places: list[int] = []
        for name in head:
            free = [place for place, head in enumerate(self.head) if head == name and place not in places]
            if not free:
                return None
            places.append(free[0])
        return [tuple(row[place] for place in places) for row in self.rows]


def tables_of(text: str) -> list[Table]:
    """Return the tables of a Markdown text."""
    tables: list[Table] = []
    heading, lines = "", list[tuple[str, ...]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            lines.append(tuple(cell.strip() for cell in line.strip().strip("|").split("|")))
        elif lines:
            tables.append(Table(heading, lines[0], tuple(lines[2:])))
            lines = []
    return tables


def missing_rows(table: Table, recomputed: Sequence[Table]) -> list[str] | None:
    """Return the rows of a table that the closest recomputed one does not have, or has less often.

    None: no recomputed table has the columns of this one.
    """
    found = [other.columns(table.head) for other in recomputed]
    missing = [list((Counter(table.rows) - Counter(known)).elements()) for known in found if known is not None]
    lowest = min(missing, key=len, default=None)
    return None if lowest is None else [" | ".join(row) for row in lowest]


# ---------------------------------------------------------------------- what follows from the runs


def _bounded() -> list[str]:
    from benchmarks import bounded

    runs = read_rows(RESULTS / "bounded.csv")
    return [bounded.report(runs), bounded.in_words(runs)]


def _commands() -> list[str]:
    from benchmarks import commands

    document = read_document("commands.json")
    return [commands.table(document["seconds"], document["cpu_seconds"])]


def _deterministic() -> list[str]:
    from benchmarks import deterministic, noise

    runs, noisy = read_runs(RESULTS / "deterministic.jsonl.xz"), read_document("noise.json.xz")["rows"]
    own_time = deterministic.own_time_summary(read_document("own-time.json")["rows"])
    texts = [deterministic.report(runs), deterministic.in_words(runs), deterministic.stuck_in_words(runs), own_time]
    return [*texts, *(noise.table(noisy, exact=exact) for exact in noise.METHODS)]


def _driving() -> list[str]:
    from benchmarks import driving

    return driving.tables(read_document("driving.json"))


def _estimators() -> list[str]:
    from benchmarks import estimators

    return estimators.page(read_document("estimators.json")).split("\n\n")


def _least_squares() -> list[str]:
    from benchmarks import least_squares

    rows = read_rows(RESULTS / "least-squares.csv")  # without seconds, and with ; for the commas in names
    runs = [{"seconds": math.nan, **row, "group": row["group"].replace(";", ",")} for row in rows]
    nist = [run for run in runs if run["group"].startswith("NIST")]
    return [least_squares.table_of(least_squares.summary(some)) for some in (runs, nist)]


def _paper_runs(name: str) -> list[str]:
    """Return the summary of an archive of runs of `sanc reproduce`."""
    from sanc.lab import claims, summary, traces

    with tempfile.TemporaryDirectory() as folder, tarfile.open(RESULTS / name) as archive:
        archive.extractall(folder, filter="data")
        runs = traces.read(Path(folder))
        return [summary.write(Path(folder), runs, claims.evaluate(runs)).read_text(encoding="utf-8")]


def _many() -> list[str]:
    from benchmarks import many

    runs = read_document("many.json")["runs"]
    fits = many.fastest([line for run in runs for line in run["fits"]])
    tables = many.tables(fits, [line for run in runs for line in run["starts"]])
    two_cores = [line for run in read_document("many-two-cores.json")["runs"] for line in run["fits"]]
    others = (read_document("many-gpu.json")["fits"], many.fastest(two_cores))
    return [tables, many.in_words(fits), *(many.tables(some, []) for some in others)]


@cache
def _networks_table() -> str:
    from benchmarks import networks, suite_tables

    return suite_tables.report(networks.read([RESULTS / "networks"]), None)


@cache
def _networks() -> list[str]:
    from benchmarks import intervals, networks, suite_tables

    folder = RESULTS / "networks"
    runs, large = networks.read([folder]), read_runs(folder / "large.jsonl.xz")
    parts = networks.read([folder, folder / "parts.jsonl.xz"])
    return [
        _networks_table(),
        intervals.in_words(runs),
        *intervals.relatives_in_words(runs),
        intervals.peers_table(runs),
        intervals.p_table(runs),
        suite_tables.large_table(large),
        suite_tables.ramps_table(read_runs(folder / "trials.jsonl.xz")),
        suite_tables.timing_table(read_document("networks/timing.json")["seconds"], [*runs, *large]),
        suite_tables.long_table(read_runs(folder / "long-4.jsonl.xz")),
        suite_tables.penalty_table(read_runs(folder / "decay.jsonl.xz")),
        intervals.parts_table(parts),
        intervals.fitted_table(parts),
    ]


def _pinn() -> list[str]:
    from benchmarks import pinn

    groups = [read_document(name)["runs"] for name in ("pinn.json", "pinn-gpu.json")]
    return [table(runs) for table in (pinn.table_of, pinn.table_of_steps) for runs in groups]


def _ranks() -> list[str]:
    from benchmarks import ranks

    return ranks.page(read_document("ranks.json")).split("\n\n")


def _report() -> list[str]:
    return [text for function in (_deterministic, _bounded, _networks) for text in function() if tables_of(text)]


def _robust() -> list[str]:
    from benchmarks import ablation, deterministic, saddles, stochastic

    document = read_document("saddles.json.xz")
    regressions = stochastic.summary(read_document("stochastic.json.xz"))
    return [
        stochastic.table_of(regressions),
        stochastic.in_words(regressions),
        deterministic.stuck_in_words(read_runs(RESULTS / "deterministic.jsonl.xz")),
        ablation.report(read_runs(RESULTS / "ablation.jsonl.xz")),
        *(part for name, entry in document["problems"].items() for part in saddles.table(name, entry).split("\n\n")),
    ]


def _sensitivity() -> list[str]:
    from benchmarks import first_order, rejections, sensitivity

    settings, variants, peers = (
        read_runs(RESULTS / f"{name}.jsonl.xz") for name in ("sensitivity", "rejections", "first-order")
    )
    return [
        *(sensitivity.table(settings, sigma0) for sigma0 in sensitivity.SIGMAS),
        *(rejections.logistic_table(variants, sigma0) for sigma0 in rejections.SIGMAS),
        rejections.network_table(variants),
        first_order.table(peers, first_order.SEEDS),
    ]


def _speed() -> list[str]:
    from benchmarks import linear, memory, step

    vectors = read_document("memory.json")
    return [
        step.table(read_document("step.json")["paper"]),
        memory.step_table(vectors["steps"]),
        memory.robust_table(vectors["robust"]),
        linear.table(read_document("linear.json")["rows"]),
    ]


PAGES: Mapping[str, Callable[[], list[str]]] = {
    "bounded.md": _bounded,
    "cnn.md": lambda: _paper_runs("cnn.tar.xz"),
    "commands.md": _commands,
    "deterministic.md": _deterministic,
    "../integrations.md": _driving,
    "estimators.md": _estimators,
    "least-squares.md": _least_squares,
    "logistic-and-mlp.md": lambda: _paper_runs("logistic-and-mlp.tar.xz"),
    "many.md": _many,
    "networks.md": _networks,
    "networks/table.md": lambda: [_networks_table()],
    "pinn.md": _pinn,
    "ranks.md": _ranks,
    "../report.md": _report,
    "robust.md": _robust,
    "sensitivity.md": _sensitivity,
    "speed.md": _speed,
}
"""Function of each page that returns the Markdown of its tables, and its sentences, from the committed runs."""
WITHOUT_RUNS: Mapping[str, Mapping[str, str]] = {
    "../integrations.md": {"`opt.style`": "describes the ways to drive a step"},
    "faults.md": {"fault": "the tests count"},
    "networks.md": {"decay of the scale in the last third": "runs on a CPU that were not kept"},
    "../report.md": {"figures": "words on the paper's panels"},
    "sensitivity.md": {"after a rejected cubic step": "describes the variants"},
    "speed.md": {"captured, ms": "measured on a GPU", "gradient, ms": "measured on a GPU"},
}
"""Headings and columns by which tables without committed runs are recognised, and the reason."""

# ---------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Comparison:
    """Numbers of tables, sentences or rows that agree, of tables without runs, and what differs."""

    agree: int
    without: int
    wrong: tuple[str, ...]


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without those in formulas."""
    return re.findall(NUMBER, re.sub(r"\$[^$]+\$", "", text))


def first_paragraph(page: str) -> str:
    """Return the first paragraph of a page; an empty text if it begins with a table."""
    blocks = (block for block in page.split("\n\n") if block.strip() and not block.startswith("#"))
    first = next(blocks, "")
    return "" if first.startswith("|") else first


def compare(page: str, recomputed: Sequence[str], without: Sequence[str] = ()) -> Comparison:
    """Compare a page with the tables and sentences that follow from the runs.

    Parameters
    ----------
    page : str
        Markdown of the page.
    recomputed : sequence of str
        Markdown with tables, of which the page may have any, and sentences, which it must have.
    without : sequence of str
        Headings and columns by which tables without runs are recognised.
    """
    known = [table for text in recomputed for table in tables_of(text)]
    sentences = [text for text in recomputed if not tables_of(text)]
    wrong = [f"not on the page: {text}" for text in sentences if text not in page]
    agree, exempt, founded = len(sentences) - len(wrong), 0, list(recomputed)
    for table in tables_of(page):
        missing = missing_rows(table, known)
        if missing == []:
            agree += 1
        elif {table.heading, *table.head} & set(without):
            exempt += 1
            founded += [" | ".join(row) for row in table.rows]
        else:
            wrong += ["no recomputed table has the columns " + ", ".join(table.head)] if missing is None else missing
    allowed = set(numbers("\n".join(founded)))
    if unfounded := [number for number in numbers(first_paragraph(page)) if number not in allowed]:
        wrong.append(f"in the first paragraph, from no run: {', '.join(unfounded)}")
    return Comparison(agree, exempt, tuple(wrong))


def check_page(name: str, recomputed: Sequence[str]) -> Comparison:
    """Compare a page of docs/results with what follows from its runs."""
    return compare((RESULTS / name).read_text(encoding="utf-8"), recomputed, tuple(WITHOUT_RUNS.get(name, ())))


def check_readme(text: str, rows: Mapping[str, Sequence[str]]) -> Comparison:
    """Compare the table of results of README.md with its rows made from the runs, by the page that they link to."""
    listed = re.findall(r"^\| \[.+\]\(docs/results/.+$", text, re.M)
    wrong, agree = list[str](), 0
    for page, expected in rows.items():
        found = [row for row in listed if re.search(rf"\(docs/results/{re.escape(page)}[#)]", row)]
        wrong += [f"not in the table: {row}" for row in expected if row not in found]
        wrong += [f"from no run: {row}" for row in found if row not in expected]
        agree += sum(row in found for row in expected)
    return Comparison(agree, 0, tuple(wrong))


def line(name: str, found: Comparison) -> str:
    """Return the line that is printed for a page."""
    words = [f"{found.agree} agree", f"{found.without} without runs", f"{len(found.wrong)} differ"]
    return "\n  ".join([f"{name}: {', '.join(words)}", *found.wrong])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({*PAGES, *WITHOUT_RUNS})
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"by default all: {', '.join(names)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.pages if name not in names]
    if unknown:
        parser.error(f"{' '.join(unknown)}: not a page with tables")
    found = {name: check_page(name, PAGES[name]() if name in PAGES else ()) for name in options.pages or names}
    rows = {name: function() for name, function in readme.ROWS.items() if name in found}
    found["README.md"] = check_readme((ROOT / "README.md").read_text(encoding="utf-8"), rows)
    for name, comparison in found.items():
        print(line(name, comparison), flush=True)
    return int(any(comparison.wrong for comparison in found.values()))


if __name__ == "__main__":
    sys.exit(main())
