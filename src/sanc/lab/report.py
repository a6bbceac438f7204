"""Write the report of a laboratory: one HTML file that needs no network and no other file.

`page.html` is the page as a Jinja template, which escapes whatever it is given; plotly's JavaScript, which comes with
the package from PyPI, draws the charts, and `page.js` says what to draw when a person switches axes or methods.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from sanc.lab import curves, style, traces
from sanc.lab.directory import write_atomically
from sanc.lab.style import AXES, BRANCHES, DARK_BRANCHES, figure_name
from sanc.lab.traces import RunTrace

__all__ = ["write"]

_NOT_SETTINGS = ("figure", "panel", "title", "subtitle", "method", "seed", "options", "data_note", "f_star")


def _number(value: float, digits: int = 4) -> str:
    """Write a number as a person would."""
    if not math.isfinite(value):
        return "–"
    if value == round(value) and 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        front, power = f"{value:.{digits - 2}e}".split("e")
        return Markup(f"{front} · 10<sup>{int(power)}</sup>".replace("-", "−"))
    return f"{value:.{digits}g}".replace("-", "−")


def _whole(value: float) -> str:
    """Write a count or a time: whole numbers where they are large."""
    return f"{value:,.0f}" if math.isfinite(value) and value >= 100 else _number(value, 3)


def _setting(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return _number(float(value), 6)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _share(part: float, whole: float) -> str:
    percent = 100 * part / whole if whole else 0.0
    if 0 < abs(percent) < 1:
        return "<1 %" if percent > 0 else "−<1 %"
    return f"{percent:.0f} %".replace("-", "−")


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else f"_{ord(c):x}_" for c in name)


def _compact(values: Iterable[float], digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]


# ---------------------------------------------------------------------------------------------- what plotly draws


def _charts(runs: Sequence[RunTrace], star: float) -> dict[str, Any]:
    """Return the curves of a panel by kind of chart, axis and method; losses without f*."""
    charts: dict[str, Any] = {kind: {x: {} for x in AXES} for kind in ("loss", "sigma", "rho", "mix")}
    for method, own in traces.by_method(runs).items():
        for x in AXES:
            at, mean, low, high = curves.mean_curve(own, x)
            if len(at):
                band = [_compact(low - star, 4), _compact(high - star, 4)] if np.any(high > low) else []
                charts["loss"][x][method] = [_compact(at, 6), _compact(mean - star, 5), *band]
            for column in ("sigma", "rho"):
                found = curves.quantiles(own, column, x)
                if len(found[0]):
                    charts[column][x][method] = [_compact(part, 4) for part in found]
            places, shares = curves.mix(own, x)
            if len(shares) > 1:
                rows = {branch: _compact(share, 3) for branch, share in shares.items()}
                charts["mix"][x][method] = [_compact(places, 4), rows]
    return charts


def _eta(runs: Sequence[RunTrace]) -> list[float]:
    """Return η1 and η2 of the first run that has them, for the chart of ρ."""
    for run in runs:
        found = [(run.config.get("options") or {}).get(key) for key in ("eta1", "eta2")]
        if all(isinstance(value, int | float) for value in found):
            return [float(value) for value in found if value is not None]
    return []


# ---------------------------------------------------------------------------------------------- what the page says


def _numbers(runs: Sequence[RunTrace], star: float) -> list[dict[str, Any]]:
    """Return the rows of the table of results."""
    rows, means = [], []
    for method, own in traces.by_method(runs).items():
        done = [run for run in own if run.done is not None]
        ended = done or own
        finals = [loss for loss in (run.final_loss for run in ended) if math.isfinite(loss)]
        mean = float(np.mean(finals)) if finals else math.nan
        ends = [np.mean([run.columns[x][-1] if run.steps else math.nan for run in ended]) for x in AXES]
        others = [_number(mean - star, 3), _number(curves.best_loss(own))]
        others += [_whole(float(end)) for end in (*ends, np.mean([run.steps for run in ended]))]
        spread = float(np.std(finals, ddof=1)) if len(finals) > 1 else None
        row = {"method": method, "name": style.look(method).name, "runs": len(own), "finished": len(done)}
        means.append(mean)
        rows.append(row | {"mean": mean, "spread": spread, "others": others})
    best = min((mean for mean in means if math.isfinite(mean)), default=None)
    return [row | {"best": row["mean"] == best} for row in rows]


def _steps(runs: Sequence[RunTrace]) -> tuple[list[dict[str, Any]], str]:
    """Return a card for every method with several branches, and a sentence about the others."""
    cards: list[dict[str, Any]] = []
    alone: dict[str, list[str]] = {}
    for method, own in traces.by_method(runs).items():
        earned, name = curves.earnings(own), style.look(method).name
        if len(earned) < 2:
            for branch in earned:
                alone.setdefault(branch, []).append(name)
            continue
        count, total = (sum(column) for column in zip(*earned.values(), strict=True))
        sign = 1.0 if total >= 0 else -1.0
        bars = {
            "steps": {branch: float(steps) for branch, (steps, _) in earned.items()},
            "decrease": {branch: sign * gain for branch, (_, gain) in earned.items()},
        }
        rows = [(b, _share(steps, count), _share(gain, total), gain * total < 0) for b, (steps, gain) in earned.items()]
        cards.append({"method": method, "name": name, "bars": bars, "rows": rows})
    return cards, "; ".join(f"{' and '.join(names)} took {branch} steps only" for branch, names in alone.items())


def _settings(runs: Sequence[RunTrace]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the settings that all methods share, and the others with a value for each method."""
    groups = traces.by_method(runs)
    found: dict[str, dict[str, list[Any]]] = {}
    for method, own in groups.items():
        for run in own:
            options = run.config.get("options")
            flat = {key: value for key, value in run.config.items() if key not in _NOT_SETTINGS}
            for key, value in (flat | (options if isinstance(options, dict) else {})).items():
                values = found.setdefault(key, {}).setdefault(method, [])
                if value not in values:
                    values.append(value)
    common, own_rows = {}, {}
    for key, by_method in found.items():
        values = [value for values in by_method.values() for value in values]
        if len(by_method) < len(groups) or any(value != values[0] for value in values):
            own_rows[key] = [", ".join(map(_setting, by_method.get(method, ["·"]))) for method in groups]
        elif values[0] not in (None, ""):
            common[key] = _setting(values[0])
    common["seeds"] = ", ".join(map(str, sorted({run.seed for run in runs})))
    return common, own_rows


def _panel(name: str, runs: Sequence[RunTrace], star: float, gaps: Sequence[str]) -> dict[str, Any]:
    charts = _charts(runs, star)
    counts = sorted({len(own) for own in traces.by_method(runs).values()})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    several = f"Mean of {number} runs; band: ± one standard deviation, within the range of the runs."
    numbers = _numbers(runs, star)
    ends = ", ".join(f"{row['name']} {_number(row['mean'])}" for row in numbers)
    cards, alone = _steps(runs)
    common, own = _settings(runs)
    notes = dict.fromkeys(str(run.config.get("data_note") or "") for run in runs)
    return {
        "name": name,
        "anchor": f"panel-{_anchor(name)}",
        "title": runs[0].title,
        "subtitle": runs[0].subtitle,
        "flags": [*filter(None, notes), *([f"Incomplete: {'; '.join(gaps)}"] if gaps else [])],
        "told": "One run of each method." if counts == [1] else several,
        "spoken": f"{runs[0].title}: training loss over {AXES['paper_calls']}. At the end: {ends}.",
        "drawn": any(charts["loss"].values()),
        "traces": [kind for kind in ("sigma", "rho") if any(charts[kind].values())],
        "numbers": numbers,
        "cards": cards,
        "alone": alone,
        "common": common,
        "own": own,
        "data": {"charts": charts, "star": star if math.isfinite(star) else 0.0, "eta": _eta(runs)},
    }


def _environment(runs: Sequence[RunTrace]) -> dict[str, list[str]]:
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        for key, value in run.environment.items():
            if key != "started":
                counts.setdefault(key, Counter())[str(value)] += 1
    told = {key: list(values) for key, values in counts.items()}
    for key, values in counts.items():
        if len(values) > 1:
            told[key] = [f"{value} ({count} run{'s' * (count > 1)})" for value, count in values.most_common()]
    started = sorted(str(run.environment["started"]) for run in runs if run.environment.get("started"))
    if started:
        told["started"] = [" to ".join(dict.fromkeys((started[0], started[-1])))]
    return told


def write(out: Path, claims: Sequence[Any] = (), plan: Mapping[str, Mapping[str, int]] | None = None) -> Path:
    """Write ``OUT/report.html`` and return where it is.

    `claims` are objects with the attributes ``statement``, ``panel``, ``measured``, ``spread`` (text) and ``holds``
    (bool, or None where it cannot be judged). `plan` is that of `sanc.lab.traces.plan_gaps`; its order is that of the
    panels.
    """
    out = Path(out)
    runs = traces.read(out)
    stars, left_out = curves.f_stars(runs), traces.skipped(out)
    gaps = {panel: said for panel, said in traces.plan_gaps(runs, plan).items() if panel not in left_out}
    figures = {
        figure: [_panel(panel, own, stars[own[0].objective], gaps.get(panel, ())) for panel, own in group.items()]
        for figure, group in traces.by_figure(runs, tuple(plan or ())).items()
    }
    panels = [panel for group in figures.values() for panel in group]
    methods = {method: style.look(method) for method in traces.by_method(runs)}
    verdicts = Counter(claim.holds for claim in claims)
    finished = sum(run.done is not None for run in runs)
    tiles = [("Panels", len(panels), ""), ("Methods", len(methods), "")]
    tiles += [("Runs finished", finished, f"of {len(runs):,} begun")]
    if claims:
        tiles += [("Claims that hold", verdicts[True], f"of {verdicts[True] + verdicts[False]} judged")]
    embedded = {
        "axes": AXES,
        "methods": {method: vars(style) for method, style in methods.items()},
        "branches": {branch: [colour, DARK_BRANCHES[branch]] for branch, colour in BRANCHES.items()},
        "panels": [panel.pop("data") for panel in panels],
    }
    page = Environment(loader=PackageLoader("sanc.lab", ""), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    page.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}  # keys keep their order
    page.filters |= {"number": _number, "anchor": _anchor, "figure_name": figure_name, "share": _share}
    text = page.get_template("page.html").render(
        plotly=Markup(get_plotlyjs()),
        embedded=embedded,
        methods=methods,
        branches=BRANCHES,
        dark=DARK_BRANCHES,
        tiles=[*tiles, ("Steps recorded", sum(run.steps for run in runs), "")],
        claims=claims,
        verdicts=verdicts,
        figures=figures,
        anchors={panel["name"]: panel["anchor"] for panel in panels},
        gaps=gaps,
        left_out=left_out,
        environment=_environment(runs),
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    write_atomically(path, text.encode())
    return path
