"""The table of results of README.md, recomputed from the committed runs.

`ROWS` has a function for each page of docs/results to which rows link. It returns these rows as the table has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from benchmarks.reporting import RESULTS, read_document, read_rows, read_runs

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def row(label: str, target: str, peer: str, result: str) -> str:
    """Return a row of the table; `target` is a page of docs/results, with or without an anchor."""
    return f"| [{label}](docs/results/{target}) | {peer} | {result} |"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Return the smallest and the largest value as text."""
    found = list(values)
    return f"{min(found):{form}} to {max(found):{form}}"


def networks() -> list[str]:
    """Return the rows on evaluations, test loss and seconds on networks."""
    from benchmarks import intervals, suite_tables
    from benchmarks.networks import read

    runs = read([RESULTS / "networks"])
    unseen = [line for line in suite_tables.summary(runs) if line["half"] == "unseen"]
    tasks = sum(line["method"] == "sanc" for line in unseen)
    seconds = read_document("networks/timing.json")["seconds"]
    to_target = suite_tables.seconds_to_target(seconds, [*runs, *read_runs(RESULTS / "networks" / "large.jsonl.xz")])

    def ratio(peer: str, key: str) -> str:
        return intervals.shown(intervals.ratios(unseen, peer, key))

    def tested(key: str) -> str:
        p = intervals.p_value(intervals.ratios(unseen, "soap tuned", key))
        outcome = "significant" if p < intervals.LEVEL else "not significant"
        return f"{ratio('soap tuned', key)}, {outcome} by Wilcoxon's test (p = {p:.3f})"

    return [
        row(f"{tasks} unseen networks, evaluations", "networks.md", "AdamW, tuned", ratio("adamw tuned", "ratio")),
        row("the same, evaluations", "networks.md#intervals", "SOAP, tuned", tested("ratio")),
        row("the same, test loss", "networks.md#intervals", "SOAP, tuned", tested("held")),
        row(f"{WORDS[len(seconds)]} networks, seconds", "networks.md#time", "AdamW, tuned, not captured",
            span(to_target.values())),
    ]  # fmt: skip


def deterministic() -> list[str]:
    """Return the rows on saddles and test functions."""
    from benchmarks import deterministic as minimisers

    runs = read_runs(RESULTS / "deterministic.jsonl.xz")
    stuck, (size, ours, best) = minimisers.stuck(runs), minimisers.solved(runs, "zoo")
    further, ours_further, best_further = minimisers.solved(runs, "unseen")
    return [
        row(f"{stuck.exact} saddles and {stuck.hidden} starts that lead to one", "deterministic.md", "SciPy's methods",
            f"{stuck.ours} and {min(stuck.peers)} to {max(stuck.peers)} stuck"),
        row(f"{size} test functions", "deterministic.md", "best of SciPy", f"{ours} and {best} solved"),
        row(f"{further} unseen problems", "deterministic.md#on-problems-that-no-choice-was-made-with", "best of SciPy",
            f"{ours_further} and {best_further} solved"),
    ]  # fmt: skip


def bounded() -> list[str]:
    """Return the row on problems with bounds."""
    from benchmarks import bounded as bounds

    runs = read_rows(RESULTS / "bounded.csv")
    solved = {line["method"]: line["solved"] for line in bounds.summary(runs)}
    problems = len({run["problem"] for run in runs})
    return [row(f"{problems} problems with bounds", "bounded.md", "L-BFGS-B",
                f"{solved['sanc']} and {solved['L-BFGS-B']} solved")]  # fmt: skip


def robust() -> list[str]:
    """Return the row on the paper's logistic regressions."""
    from benchmarks import stochastic

    lines = stochastic.summary(read_document("stochastic.json.xz"))
    shares = span((100 * line["calls_robust"] / line["calls_paper"] for line in lines), ".0f")
    return [row("logistic regressions, calls", "robust.md", "the paper's SANC, tuned", f"{shares} %")]


def estimators() -> list[str]:
    """Return the rows on scikit-learn's solvers, with defaults on all sets, and to equal gradients."""
    document = read_document("estimators.json")
    defaults, race = document["defaults"], document["race"]
    lbfgs = [line["cpu ratio"] for line in defaults if line["estimator"] == "lbfgs"]
    others = [line["cpu ratio"] for line in race if line["estimator"] != "sanc" and "ratio" in line]
    sets = ", ".join(dict.fromkeys(line["set"] for line in race))
    return [
        row(f"{WORDS[len(lbfgs)]} data sets, processor time", "estimators.md", "scikit-learn's default `lbfgs`",
            f"{span(lbfgs)} × as fast"),
        row(f"{sets}, to equal gradients", "estimators.md#at-equal-optimality", "scikit-learn's solvers, glum",
            f"{span(others)} × as fast"),
    ]  # fmt: skip


def speed() -> list[str]:
    """Return the row on the time of a step."""
    ratios = (line["ratio"] for line in read_document("step.json")["paper"])
    return [row("a step on a CPU, time", "speed.md", "its oracle calls", span(ratios))]


ROWS: Mapping[str, Callable[[], list[str]]] = {
    "networks.md": networks,
    "deterministic.md": deterministic,
    "bounded.md": bounded,
    "robust.md": robust,
    "estimators.md": estimators,
    "speed.md": speed,
}
"""Function of each page that returns the rows that link to it."""
