"""Write the report of an output directory as one HTML file that needs no network and no other file.

`page.html` is a Jinja template, which escapes all text. plotly's JavaScript, which is part of its Python package, draws
the charts. `page.js` passes it the curves of the selected axes and methods.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from sanc.lab import curves, traces
from sanc.lab.directory import write_atomically
from sanc.lab.style import AXES, BRANCHES, DARK_BRANCHES, LOGARITHMIC, RECORDS, figure_name, style_of, styles_of
from sanc.lab.traces import RunTrace

_NOT_SETTINGS = ("figure", "panel", "title", "subtitle", "method", "seed", "options", "data_note")
"""Keys of a configuration that the page shows elsewhere, not among the settings."""


def _number(value: Any, digits: int = 4) -> str:
    """Format a number for readers, and anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else json.dumps(value, ensure_ascii=False)
    return curves.number(value, digits)


def _anchor(name: str) -> str:
    return re.sub(r"[^\w.-]", lambda match: f"_{ord(match[0]):x}_", name)


def _compact(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in map(float, values)]


def _charts(runs: Sequence[RunTrace], star: float) -> dict[str, Any]:
    """Return the curves of a panel by kind, axis and method. Losses are f − f*."""
    charts: dict[str, Any] = {kind: {x: {} for x in AXES} for kind in ("loss", "mix", *RECORDS)}
    for method, group in traces.by_method(runs).items():
        for x in AXES:
            at, *losses = curves.mean_curve(group, x)
            columns = {"loss": (at, *(loss - star for loss in losses))}
            columns |= {column: curves.quantiles(group, column, x) for column in RECORDS}
            for kind, curve in columns.items():
                if len(curve[0]):
                    charts[kind][x][method] = [_compact(part) for part in curve]
            places, fractions = curves.mix(group, x)
            if len(fractions) > 1:
                rows = {branch: _compact(fraction) for branch, fraction in fractions.items()}
                charts["mix"][x][method] = [_compact(places), rows]
    return charts


def _steps(runs: Sequence[RunTrace]) -> tuple[list[dict[str, Any]], str]:
    """Return a card for every method with several branches, and a sentence on the methods with one."""
    cards: list[dict[str, Any]] = []
    single: dict[str, list[str]] = {}
    for method, group in traces.by_method(runs).items():
        contributions, name = curves.decrease_by_branch(group), style_of(method).name
        if len(contributions) < 2:
            for branch in contributions:
                single.setdefault(branch, []).append(name)
            continue
        count, total = (sum(column) for column in zip(*contributions.values(), strict=True))
        rows = {
            branch: (100 * steps / count, 100 * decrease / (total or 1.0))
            for branch, (steps, decrease) in contributions.items()
        }
        cards.append({"method": method, "name": name, "rows": rows})
    return cards, "; ".join(f"{' and '.join(names)} took {branch} steps only" for branch, names in single.items())


def _settings(runs: Sequence[RunTrace]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the settings that are equal for all methods, and the others with one value per method."""
    by_method = {}
    for method, group in traces.by_method(runs).items():
        config = group[0].config
        flat = {key: value for key, value in config.items() if key not in _NOT_SETTINGS} | config["options"]
        by_method[method] = {key: _number(value, 6) for key, value in flat.items() if value not in (None, "")}
    common: dict[str, str] = {}
    differing: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for settings in by_method.values() for key in settings):
        values = [settings.get(key, "·") for settings in by_method.values()]
        if len(set(values)) == 1:
            common[key] = values[0]
        else:
            differing[key] = values
    return common | {"seeds": ", ".join(map(str, sorted({run.seed for run in runs})))}, differing


def _panel(name: str, runs: Sequence[RunTrace], star: float, gaps: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables of the template for a panel; ``data`` is for the charts."""
    charts, config = _charts(runs, star), runs[0].config
    results, drawn = curves.results(runs), any(charts["loss"].values())
    cards, single_branch = _steps(runs)
    common, differing = _settings(runs)
    means = [curves.mean_curve(group) for group in traces.by_method(runs).values()] if drawn else []
    decades = curves.falls_over_decades(means)
    plain: Any = curves.bounds(means, 0.0, decades) if drawn else None
    notes = {str(run.config["data_note"]) for run in runs if run.config.get("data_note")}
    return {
        "name": name,
        "anchor": f"panel-{_anchor(name)}",
        "title": config["title"],
        "subtitle": config["subtitle"],
        "flags": [*notes, *([f"Incomplete: {gaps[name]}"] if name in gaps else [])],
        "caption": curves.run_counts([runs]),
        "final_losses": ", ".join(f"{style_of(row.method).name} {_number(row.mean)}" for row in results),
        "drawn": drawn,
        "traces": [kind for kind in RECORDS if any(charts[kind].values())],
        "results": results,
        "star": star,
        "best": min((row.mean for row in results if math.isfinite(row.mean)), default=None),
        "cards": cards,
        "single_branch": single_branch,
        "common": common,
        "methods": [style_of(method).name for method in traces.by_method(runs)],
        "differing": differing,
        "data": {
            "charts": charts,
            "star": star if drawn else 0.0,
            "eta": [config["options"][key] for key in ("eta1", "eta2") if key in config["options"]],
            "decades": decades,
            "linear": (np.log10(plain).tolist() if decades else plain) if drawn else None,
            "log": np.log10(curves.bounds(means, star, True)).tolist() if drawn else None,
        },
    }


def write(
    out: Path, runs: Sequence[RunTrace], claims: Sequence[Any] = (), plan: Mapping[str, Mapping[str, int]] | None = None
) -> Path:
    """Write ``OUT/report.html`` and return its path.

    `claims` are those of `sanc.lab.claims`. `plan` is that of `sanc.lab.traces.gaps`.
    """
    stars, skipped = curves.f_stars(runs), traces.skipped(out)
    gaps = {panel: gap for panel, gap in traces.gaps(runs, plan or {}).items() if panel not in skipped}
    figures = {
        figure: [_panel(panel, group, stars[group[0].objective], gaps) for panel, group in panels.items()]
        for figure, panels in traces.by_figure(runs).items()
    }
    all_panels = [panel for panels in figures.values() for panel in panels]
    environment: dict[str, set[str]] = {}
    for key, value in (item for run in runs for item in run.environment.items() if item[1] not in (None, "")):
        environment.setdefault(key, set()).add(str(value)[:10] if key == "started" else str(value))
    methods = styles_of(traces.by_method(runs))
    embedded = {
        "axes": AXES,
        "records": {column: [title, column in LOGARITHMIC] for column, title in RECORDS.items()},
        "methods": {method: vars(style) for method, style in methods.items()},
        "branches": {branch: [colour, DARK_BRANCHES[branch]] for branch, colour in BRANCHES.items()},
        "panels": [panel.pop("data") for panel in all_panels],
    }
    page = Environment(loader=PackageLoader("sanc.lab", ""), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    page.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}  # keys keep their order
    page.filters |= {"number": _number, "anchor": _anchor, "figure_name": figure_name}
    published = any(figure.startswith("fig") for figure in figures)
    text = page.get_template("page.html").render(
        heading="SANC: the paper’s figures, reproduced" if published else "SANC: your runs",
        published=published,
        plotly=Markup(get_plotlyjs()),
        embedded=embedded,
        axes=AXES,
        records=RECORDS,
        methods=methods,
        branches={branch: f"light-dark({colour}, {DARK_BRANCHES[branch]})" for branch, colour in BRANCHES.items()},
        claims=claims,
        verdicts=Counter(claim.holds for claim in claims),
        figures=figures,
        anchors={panel["name"]: panel["anchor"] for panel in all_panels},
        finished=sum(run.done is not None for run in runs),
        runs=runs,
        gaps=gaps,
        skipped=skipped,
        environment=environment,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    write_atomically(path, text.encode())
    return path
