"""Check the statements of the paper's section on experiments against the measured runs.

Statements that compare SANC with another method are tested on pairs of runs with equal seeds. Such a statement holds if
the hypothesis that it is false is rejected at the level of 5 %, and does not hold if the hypothesis that it is true is
rejected. Otherwise the runs do not decide: that no difference was found is no evidence of equality. "Identical" and
"competitive" have a margin, as in tests of equivalence. Holm's correction accounts for the number of statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sanc.lab import statistics
from sanc.lab.curves import best_loss, decrease_by_branch
from sanc.lab.experiments import FIGURES
from sanc.lab.traces import RunTrace, by_method, by_panel, grouped

_LEVEL_RATIO = 1.05
"""Loss over f* up to which calls are counted. The paper states no level; 5 % above f* is chosen here."""

_MIN_REJECTED_FRACTION = 0.5
"""Fraction of the first five steps that must be rejected for "suffers": more than half. The paper states none."""

_EQUIVALENCE_MARGIN = 0.01
"""Margin of "identical" and "competitive": 1 % of the decrease, chosen here as hardly visible in a plot."""

_MIN_CONTRIBUTING_FRACTION = 0.01
"""Smallest fraction of the decrease for "contribute": 1 %, chosen here. The paper states none."""

_SIGNIFICANCE = 0.05
"""Level of all tests together, the usual 5 %."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in one panel, and whether the runs confirm it.

    Attributes
    ----------
    statement : str
        The statement.
    panel : str
        The name of the panel.
    measured : str
        The measurement, in words.
    spread : str
        Its range over the runs.
    holds : bool or None
        Whether the statement holds; None: the runs do not decide.
    """

    statement: str
    panel: str
    measured: str
    spread: str
    holds: bool | None


@dataclass(frozen=True)
class ClaimTest:
    """The test of a claim without a verdict.

    Attributes
    ----------
    claim : Claim
        The claim.
    p_if_false : float
        The p-value of the hypothesis that the claim is false.
    p_if_true : float
        The p-value of the hypothesis that it is true.
    """

    claim: Claim
    p_if_false: float
    p_if_true: float


def decided(claims: Sequence[Claim | ClaimTest]) -> list[Claim]:
    """Return the claims with the verdicts of their tests, corrected for the number of tests."""
    tests = [claim for claim in claims if isinstance(claim, ClaimTest)]
    p_if_false = statistics.holm([test.p_if_false for test in tests])
    p_if_true = statistics.holm([test.p_if_true for test in tests])
    verdicts = iter(
        (True, p) if p < _SIGNIFICANCE else (False, q) if q < _SIGNIFICANCE else (None, min(p, q))
        for p, q in zip(p_if_false, p_if_true, strict=True)
    )
    with_verdicts: list[Claim] = []
    for claim in claims:
        if isinstance(claim, ClaimTest):
            holds, p = next(verdicts)
            measured = f"{claim.claim.measured}; {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}"
            with_verdicts.append(replace(claim.claim, measured=measured, holds=holds))
        else:
            with_verdicts.append(claim)
    return with_verdicts


def evaluate(traces: Sequence[RunTrace]) -> list[Claim]:
    """Return a claim for every statement and every panel of the paper that has the runs for it.

    Panels with other settings than the paper's are left out.
    """
    traces = [trace for trace in traces if trace.done and trace.steps and trace.config["figure"] in FIGURES]
    best = {objective: best_loss(group) for objective, group in grouped(traces, lambda run: run.objective).items()}
    claims: list[Claim | ClaimTest] = []
    for name, runs in by_panel(traces).items():
        methods, config = by_method(runs), runs[0].config
        if {"sanc", "scr"} <= set(methods):
            small = config["options"].get("sigma0", 1.0) < 0.1
            if config["problem"] == "logistic":
                compared = _small_sigma if small else _identical
                claims += compared(name, methods, best[runs[0].objective])
                claims.append(_indefinite_start(name, methods["sanc"]))
            claims.append(_curvature(name, methods["sanc"], expected=small or config["problem"] != "logistic"))
        if "sanc" in methods and config["problem"] in ("mlp", "cnn"):
            others = [other for other in sorted(methods) if other != "sanc" and _pairs(methods, other)]
            claims += [_competitive(name, methods, other) for other in others]
    return decided(claims)


def calls_to(trace: RunTrace, level: float) -> float:
    """Return the paper_calls at which the loss is first at most `level`; infinity if it never is."""
    reached = np.flatnonzero(trace.columns["loss"] <= level)
    return float(trace.columns["paper_calls"][reached[0]]) if len(reached) else float("inf")


def _number(value: float) -> str:
    """Format a number: no digits after the point from 1000 on, else four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _median_calls(values: Sequence[float]) -> str:
    """Return the median as text, or how many runs reached the level."""
    reached = sum(np.isfinite(values))
    return (
        _number(float(np.median(values))) if reached == len(values) else f"{reached} of {len(values)} runs reached it"
    )


def _range(values: Sequence[float], unit: str = "") -> str:
    """Return the smallest and the largest value, and the number of runs, as text."""
    span = " to ".join(dict.fromkeys((_number(np.min(values)), _number(np.max(values)))))
    return f"{span}{unit} over {len(values)} run{'s' * (len(values) > 1)}"


def _small_sigma(panel: str, methods: dict[str, list[RunTrace]], star: float) -> list[Claim | ClaimTest]:
    """Return the claims on σ0 = 0.001: fewer calls of SANC, and rejected first steps of SCR."""
    level = _LEVEL_RATIO * star
    ours = [calls_to(trace, level) for trace in methods["sanc"]]
    theirs = [calls_to(trace, level) for trace in methods["scr"]]
    stays = [float(np.mean(trace.columns["branch"][1:6] == "stayed")) for trace in methods["scr"]]
    pairs = [(calls_to(a, level), calls_to(b, level)) for a, b in _pairs(methods, "scr")]
    calls = Claim(
        "With σ0 = 0.001 SANC needs fewer calls than SCR to reach f ≤ 1.05 f*.",
        panel,
        f"median calls: SANC {_median_calls(ours)}, SCR {_median_calls(theirs)}",
        f"SANC {_range(ours)}; SCR {_range(theirs)}",
        None,
    )
    rejected = Claim(
        "With σ0 = 0.001 SCR suffers from unsuccessful iterations at the start.",
        panel,
        f"{100 * np.mean(stays):.0f} % of its first five steps were rejected",
        _range([100 * fraction for fraction in stays], " %"),
        bool(np.mean(stays) > _MIN_REJECTED_FRACTION),
    )
    return [_fewer(calls, pairs), rejected]


def _fewer(claim: Claim, pairs: Sequence[tuple[float, float]]) -> ClaimTest:
    """Test the logarithms of the ratios; only the signs if a run did not reach the level."""
    if np.isfinite(pairs).all():
        logs = [float(np.log(ours / theirs)) for ours, theirs in pairs]
        return ClaimTest(claim, statistics.below(logs, 0.0), statistics.above(logs, 0.0))
    wins, losses = (sum(a < b for a, b in pairs), sum(a > b for a, b in pairs))
    return ClaimTest(claim, statistics.sign_test(wins, losses), statistics.sign_test(losses, wins))


def _identical(panel: str, methods: dict[str, list[RunTrace]], star: float) -> list[ClaimTest]:
    """Return the claim that SANC and SCR are identical with σ0 = 1; nothing without pairs of runs."""
    gaps = [_largest_gap(ours, theirs, star) for ours, theirs in _pairs(methods, "scr")]
    if not gaps:
        return []
    claim = Claim(
        "With σ0 = 1 SANC and SCR are identical on logistic regression.",
        panel,
        f"largest difference of f − f* over a run: {100 * float(np.median(gaps)):.2f} % of its start (median), "
        f"with a margin of {100 * _EQUIVALENCE_MARGIN:g} %",
        _range([100 * gap for gap in gaps], " %"),
        None,
    )
    return [ClaimTest(claim, statistics.below(gaps, _EQUIVALENCE_MARGIN), statistics.above(gaps, _EQUIVALENCE_MARGIN))]


def _pairs(methods: dict[str, list[RunTrace]], other: str) -> list[tuple[RunTrace, RunTrace]]:
    """Return pairs of a run of SANC and one of another method with the same seed."""
    theirs = {trace.seed: trace for trace in methods[other]}
    return [(trace, theirs[trace.seed]) for trace in methods["sanc"] if trace.seed in theirs]


def _largest_gap(a: RunTrace, b: RunTrace, star: float) -> float:
    """Return the largest difference of two losses at equal calls, divided by f − f* at the start."""
    grid = np.linspace(0, min(a.columns["paper_calls"][-1], b.columns["paper_calls"][-1]), 100)
    ours, theirs = (
        losses[np.searchsorted(calls, grid, side="right") - 1]
        for calls, losses in (trace.measured("paper_calls") for trace in (a, b))
    )
    return float(np.max(np.abs(ours - theirs)) / max(abs(theirs[0] - star), 1e-300))


def _indefinite_start(panel: str, runs: Sequence[RunTrace]) -> Claim:
    """Return the claim that the first Hessians are indefinite."""
    first = [float(trace.columns["ritz_value"][1]) for trace in runs if len(trace.columns["ritz_value"]) > 1]
    return Claim(
        "The first iterates have indefinite Hessians, because of the nonconvex penalty.",
        panel,
        f"left-most Ritz value at the start: {np.median(first):.3g} (median)",
        _range(first),
        bool(np.max(first) < 0),
    )


def _curvature(panel: str, runs: Sequence[RunTrace], *, expected: bool) -> Claim:
    """Return the claim that steps along negative curvature contribute; unless `expected`, that there are none."""
    counts = [float(np.sum(trace.columns["branch"] == "curvature")) for trace in runs]
    steps = np.mean([trace.steps for trace in runs])
    decreases = {branch: decrease for branch, (_, decrease) in decrease_by_branch(runs).items()}
    total = sum(decreases.values())
    fraction = decreases.get("curvature", 0.0) / total if total > 0 else 0.0
    measured = f"{np.mean(counts):.1f} curvature steps of {steps:.0f} in a run, {100 * fraction:.1f} % of the decrease"
    if expected:
        statement = "Steps along negative curvature after unsuccessful iterations contribute to the decrease of SANC."
        return Claim(statement, panel, measured, _range(counts), fraction >= _MIN_CONTRIBUTING_FRACTION)
    statement = "With σ0 = 1 SANC makes no step along negative curvature on logistic regression."
    return Claim(statement, panel, measured, _range(counts), sum(counts) == 0)


def _competitive(panel: str, methods: dict[str, list[RunTrace]], other: str) -> ClaimTest:
    """Test that SANC's final loss exceeds another method's by less than the margin of that method's decrease."""
    pairs = _pairs(methods, other)
    ours, theirs = ([pair[k].final_loss for pair in pairs] for k in range(2))
    decrease = float(np.mean([float(their.columns["loss"][0]) - their.final_loss for _, their in pairs]))
    fractions = [(a - b) / max(abs(decrease), 1e-300) for a, b in zip(ours, theirs, strict=True)]
    mean, low, high = (100 * value for value in statistics.mean_interval(fractions))
    between = f" [{low:+.2f}, {high:+.2f}]" if len(pairs) > 1 else ""
    claim = Claim(
        f"SANC's loss is competitive with that of {other.upper()} on the same budget of calls.",
        panel,
        f"median final loss: SANC {np.median(ours):.4g}, {other.upper()} {np.median(theirs):.4g}; mean difference "
        f"{mean:+.2f}{between} % of the decrease, with a margin of {100 * _EQUIVALENCE_MARGIN:g} %",
        f"SANC {_range(ours)}; {other.upper()} {_range(theirs)}",
        None,
    )
    return ClaimTest(
        claim, statistics.below(fractions, _EQUIVALENCE_MARGIN), statistics.above(fractions, _EQUIVALENCE_MARGIN)
    )
