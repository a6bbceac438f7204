"""Write the report of a laboratory: one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from sanc.lab import traces
from sanc.lab.traces import AXES, BRANCHES, RunTrace

__all__ = ["write"]

_TITLE = "SANC: the paper’s figures, run again"
_SHORT_AXES = {
    "paper_calls": '<span class="long">Paper’s calls</span><span class="short">Calls</span>',
    "calls": "Evaluations",
    "seconds": "Seconds",
}
_UNITS = {"paper_calls": "calls", "calls": "evaluations", "seconds": "s"}
_NUMBERS = list(BRANCHES)
_VERDICTS = {
    True: ("yes", "✓", "holds"),
    False: ("no", "✗", "does not hold"),
    None: ("open", "–", "cannot be judged"),
}
_DARK_BRANCHES = ("#4E8FD9", "#A9CFF2", "#A78FC9", "#F0663C", "#F2B84B", "#5A5D63")
_NOT_SETTINGS = ("figure", "panel", "title", "subtitle", "method", "seed", "options", "data_note", "f_star")


# ---------------------------------------------------------------------------------------------- numbers and words


def _figure_name(name: str) -> str:
    return f"Figure {name[3:]}" if name.startswith("fig") and name[3:4].isdigit() else name


def _number(value: float, digits: int = 4) -> str:
    """Write a number as a person would."""
    if not math.isfinite(value):
        return "–"
    if value == round(value) and abs(value) < 1e15 and abs(value) >= 1000:
        return f"{value:,.0f}"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        front, power = f"{value:.{digits - 2}e}".split("e")
        return f"{front} · 10<sup>{int(power)}</sup>".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def _whole(value: float) -> str:
    """Write a count or a time: whole numbers where they are large."""
    return f"{value:,.0f}" if math.isfinite(value) and value >= 100 else _number(value, 3)


def _value(value: Any) -> str:
    """Write a setting."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, (int, float)):
        return _number(float(value), 6)
    if isinstance(value, str):
        return escape(value)
    return escape(json.dumps(value, ensure_ascii=False))


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _anchor(panel: str) -> str:
    return "panel-" + "".join(c if c.isalnum() or c in "-_." else f"_{ord(c):x}_" for c in panel)


def _compact(values: Iterable[float], digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]


def _share(part: float, whole: float) -> str:
    percent = 100 * part / whole if whole else 0.0
    if percent == 0:
        return "0 %"
    if abs(percent) < 1:
        return "<1 %" if percent > 0 else "−<1 %"
    return f"{percent:.0f} %".replace("-", "−")


# ---------------------------------------------------------------------------------------------- what the script draws


def _method_data(method: str, runs: Sequence[RunTrace], star: float) -> dict[str, Any]:
    curves: dict[str, Any] = {}
    mixes: dict[str, Any] = {}
    quantities: dict[str, dict[str, Any]] = {"sigma": {}, "rho": {}}
    single = len(traces.earnings(runs)) < 2
    for x in AXES:
        at, mean, low, high = traces.mean_curve(runs, x)
        if len(at):
            band = [_compact(low - star, 4), _compact(high - star, 4)] if np.any(high > low) else [None, None]
            curves[x] = [float(at[-1]), _compact(mean - star, 5), *band]
        places, shares = traces.mix(runs, x)
        if shares and not single:
            rows = [[_NUMBERS.index(branch), _compact(share, 3)] for branch, share in shares.items()]
            mixes[x] = [float(places[-1]), rows]
        for column, found in quantities.items():
            table = traces.quantiles(runs, column, x)
            if len(table[0]):
                found[x] = [_compact(part, 4) for part in table]
    return {"id": method, "curves": curves, "mix": mixes} | quantities


def _panel_data(runs: Sequence[RunTrace], star: float) -> dict[str, Any]:
    eta: list[float] = []
    for run in runs:
        options = run.config.get("options") or {}
        found = [options.get(key) for key in ("eta1", "eta2")]
        if all(isinstance(value, (int, float)) for value in found):
            eta = [float(value) for value in found if value is not None]
            break
    methods = [_method_data(method, own, star) for method, own in traces.by_method(runs).items()]
    return {"title": runs[0].title, "star": star if math.isfinite(star) else 0.0, "eta": eta, "methods": methods}


def _embed(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _colours(methods: Sequence[str]) -> str:
    looks = [traces.look(method) for method in methods]
    light = "".join(f"--m-{k}:{style.colour};" for k, style in enumerate(looks))
    light += "".join(f"--b-{k}:{colour};" for k, colour in enumerate(BRANCHES.values()))
    dark = "".join(f"--m-{k}:{style.dark};" for k, style in enumerate(looks))
    dark += "".join(f"--b-{k}:{colour};" for k, colour in enumerate(_DARK_BRANCHES))
    return (
        f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
    )


# ---------------------------------------------------------------------------------------------- pieces of the page


def _tiles(runs: Sequence[RunTrace], claims: Sequence[Any]) -> str:
    finished = sum(run.done is not None for run in runs)
    panels, methods = len(traces.by_panel(runs)), len(traces.by_method(runs))
    tiles = [("Panels", f"{panels}"), ("Methods", f"{methods}")]
    tiles.append(("Runs finished", f"{finished:,} <small>of {len(runs):,} begun</small>"))
    if claims:
        held = sum(claim.holds is True for claim in claims)
        judged = sum(claim.holds is not None for claim in claims)
        tiles.append(("Claims that hold", f"{held} <small>of {judged} judged</small>"))
    steps = sum(run.steps for run in runs)
    tiles.append(("Steps recorded", f"{steps:,}"))
    body = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{body}</dl>'


def _segment(name: str, legend: str, choices: Mapping[str, str]) -> str:
    labels = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" if k == 0 else ""}>'
        f"<span>{text}</span></label>"
        for k, (value, text) in enumerate(choices.items())
    )
    return f'<fieldset><legend>{legend}</legend><div class="seg">{labels}</div></fieldset>'


def _bar(methods: Sequence[str]) -> str:
    chips = []
    for k, method in enumerate(methods):
        style = traces.look(method)
        dash = f' stroke-dasharray="{" ".join(f"{2 * d:g}" for d in style.dashes)}"' if style.dashes else ""
        sample = (
            f'<svg viewBox="0 0 22 8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" stroke-width="2.4"'
            f' style="stroke:var(--m-{k})"{dash}/></svg>'
        )
        chips.append(
            f'<button type="button" class="chip" aria-pressed="true" data-method="{escape(method)}">'
            f"{sample}{escape(style.name)}</button>"
        )
    return (
        '<div class="bar"><div class="wide">'
        + _segment("x", "over", _SHORT_AXES)
        + _segment("y", "show", {"linear": "f", "log": "log f − f*"})
        + f'<div class="chips" role="group" aria-label="Methods to show">{"".join(chips)}</div>'
        + '<button type="button" class="plain" id="theme"></button></div></div>'
    )


def _contents(figures: Mapping[str, Mapping[str, Sequence[RunTrace]]], claims: bool, gaps: bool) -> str:
    items = ['<li><a href="#claims">Claims</a></li>'] if claims else []
    for figure, panels in figures.items():
        inner = "".join(
            f'<li><a href="#{_anchor(panel)}">{escape(own[0].title)}</a></li>' for panel, own in panels.items()
        )
        items.append(f'<li><a href="#figure-{_anchor(figure)}">{escape(_figure_name(figure))}</a><ol>{inner}</ol></li>')
    if gaps:
        items.append('<li><a href="#gaps">What is missing</a></li>')
    items.append('<li><a href="#environment">Environment</a></li>')
    body = f"<details open><summary>Contents</summary><ol>{''.join(items)}</ol></details>"
    return f'<nav class="contents" aria-label="Contents">{body}</nav>'


def _claims(claims: Sequence[Any], panels: Iterable[str]) -> str:
    if not claims:
        return ""
    known = set(panels)
    rows = []
    for claim in claims:
        kind, sign, words = _VERDICTS[None if claim.holds is None else bool(claim.holds)]
        where = escape(str(claim.panel))
        if str(claim.panel) in known:
            where = f'<a href="#{_anchor(str(claim.panel))}">{where}</a>'
        rows.append(
            f'<tr><td><span class="verdict {kind}"><span aria-hidden="true">{sign}</span>{words}</span></td>'
            f"<td>{escape(str(claim.statement))}</td>"
            f'<td data-label="Panel:" class="where">{where}</td>'
            f'<td data-label="Measured:">{escape(str(claim.measured))}</td>'
            f'<td data-label="Spread:">{escape(str(claim.spread))}</td></tr>'
        )
    counts = Counter(None if claim.holds is None else bool(claim.holds) for claim in claims)
    held = f"{counts[True]} {'holds' if counts[True] == 1 else 'hold'}"
    failed = f"{counts[False]} {'does' if counts[False] == 1 else 'do'} not hold"
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Verdict", "Claim", "Panel", "Measured", "Spread"))
    return (
        '<section id="claims" aria-labelledby="claims-head"><h2 id="claims-head">What the paper claims</h2>'
        f'<p class="intro">Of {_plural(len(claims), "claim")}, {held}, {failed} and {counts[None]} '
        "cannot be judged.</p>"
        f'<div class="claims"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "</section>"
    )


def _scroll(label: str, table: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def _middle(values: Sequence[float]) -> str:
    """Mean and standard deviation of what is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "–"
    mean = float(np.mean(finite))
    if len(finite) == 1:
        return _number(mean)
    return f"{_number(mean)} <small>± {_number(float(np.std(finite, ddof=1)), 2)}</small>"


def _last(run: RunTrace, column: str) -> float:
    values = run.columns[column]
    return float(values[-1]) if len(values) else math.nan


def _numbers(runs: Sequence[RunTrace], star: float) -> str:
    groups = traces.by_method(runs)
    enders = {method: [run for run in own if run.done is not None] or own for method, own in groups.items()}
    finals = {method: [run.final_loss for run in ended] for method, ended in enders.items()}
    means = {method: float(np.mean(v)) for method, values in finals.items() if (v := [f for f in values if f == f])}
    best = min(means, key=lambda method: means[method]) if means else None
    rows = []
    for method, own in groups.items():
        ended, finished = enders[method], sum(run.done is not None for run in own)
        count = f"{len(own)}" if finished == len(own) else f"{len(own)} <small>({finished} finished)</small>"
        gap = means.get(method, math.nan) - star
        cells = [
            f'<td class="num">{count}</td>',
            f'<td class="num loss">{_middle(finals[method])}</td>',
            f'<td class="num">{_number(gap, 3)}</td>',
            f'<td class="num">{_number(traces.best_loss(own))}</td>',
            *(f'<td class="num">{_whole(float(np.mean([_last(run, x) for run in ended])))}</td>' for x in AXES),
            f'<td class="num">{_whole(float(np.mean([run.steps for run in ended])))}</td>',
        ]
        mark = ' class="best"' if method == best else ""
        name = escape(traces.look(method).name)
        rows.append(f'<tr{mark} data-row="{escape(method)}"><th scope="row">{name}</th>{"".join(cells)}</tr>')
    names = ("runs", "final loss", "final f − f*", "best loss", "paper’s calls", "evaluations", "seconds", "steps")
    head = '<th scope="col">method</th>' + "".join(f'<th scope="col" class="num">{name}</th>' for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _scroll(f"Results of {runs[0].title}", table)


def _stack(name: str, parts: Mapping[str, float]) -> str:
    total = sum(part for part in parts.values() if part > 0)
    shown = "".join(
        f'<i style="width:{100 * part / total:.2f}%;background:var(--b-{_NUMBERS.index(branch)})"></i>'
        for branch, part in parts.items()
        if part > 0 and total > 0
    )
    told = ", ".join(f"{branch} {_share(part, total)}" for branch, part in parts.items())
    return f'<span aria-hidden="true">{name}</span><div role="img" aria-label="{name}: {told}">{shown}</div>'


def _steps(index: int, runs: Sequence[RunTrace], is_open: bool) -> str:
    cards: list[str] = []
    alone: dict[str, list[str]] = {}
    for method, own in traces.by_method(runs).items():
        earned = traces.earnings(own)
        name = escape(traces.look(method).name)
        if len(earned) < 2:
            for branch in earned:
                alone.setdefault(branch, []).append(name)
            continue
        count = sum(steps for steps, _ in earned.values())
        total = sum(gain for _, gain in earned.values())
        rows = "".join(
            f'<tr><th scope="row"><span class="swatch" style="background:var(--b-{_NUMBERS.index(branch)})"></span>'
            f'{branch}</th><td class="num">{_share(steps, count)}</td>'
            f'<td class="num{" less" if gain * total < 0 else ""}">{_share(gain, total)}</td></tr>'
            for branch, (steps, gain) in earned.items()
        )
        sign = 1.0 if total >= 0 else -1.0
        cards.append(
            f'<div class="card" data-row="{escape(method)}"><h4>{name}</h4><div class="stack">'
            + _stack("steps", {branch: float(steps) for branch, (steps, _) in earned.items()})
            + _stack("decrease", {branch: sign * gain for branch, (_, gain) in earned.items()})
            + f'</div><div class="chart" data-panel="{index}" data-kind="mix" data-method="{escape(method)}" role="img"'
            + f' aria-label="{name}: share of the steps by branch over the run"></div>'
            + '<table><thead><tr><th scope="col">branch</th><th scope="col" class="num">steps</th>'
            + f'<th scope="col" class="num">decrease</th></tr></thead><tbody>{rows}</tbody></table></div>'
        )
    if not cards and not alone:
        return ""
    told = "; ".join(f"{' and '.join(names)} took {branch} steps only" for branch, names in alone.items())
    note = (
        "The upper bars compare how often a branch was taken with what it earned, all runs together; below, how the "
        "mix of the steps changed over the run. Where the loss was not measured at every step, a decrease is split "
        "evenly over the steps that moved since the last measurement. A negative share is a branch that raised the "
        "loss."
    )
    return (
        f"<details{' open' if is_open else ''}><summary>Which steps earned the decrease</summary>"
        + (f'<div class="cards">{"".join(cards)}</div>' if cards else "")
        + f'<p class="note">{note if cards else ""}{" " if cards and told else ""}{told + "." if told else ""}</p>'
        + "</details>"
    )


def _sigma_rho(index: int, runs: Sequence[RunTrace], data: Mapping[str, Any]) -> str:
    title = escape(runs[0].title)
    charts = [
        f'<div class="chart" data-panel="{index}" data-kind="{kind}" role="img" aria-label="{title}: {name}"></div>'
        for kind, name in (("sigma", "σ over the run"), ("rho", "ρ over the run"))
        if any(method[kind] for method in data["methods"])
    ]
    if not charts:
        return ""
    note = "Median of the steps of all runs in each fiftieth of the range; the band holds the middle 80 %."
    return (
        "<details><summary>σ and ρ <span>as the run went on</span></summary>"
        f'<div class="pair">{"".join(charts)}</div><p class="note">{note}</p></details>'
    )


def _settings(runs: Sequence[RunTrace]) -> str:
    groups = traces.by_method(runs)
    found: dict[str, dict[str, list[Any]]] = {}
    for method, own in groups.items():
        for run in own:
            options = run.config.get("options")
            flat = {key: value for key, value in run.config.items() if key not in _NOT_SETTINGS}
            flat |= options if isinstance(options, dict) else {}
            for key, value in flat.items():
                values = found.setdefault(key, {}).setdefault(method, [])
                if value not in values:
                    values.append(value)
    common, own_rows = [], []
    for key, by_method in found.items():
        values = [value for values in by_method.values() for value in values]
        if len(by_method) == len(groups) and all(value == values[0] for value in values):
            if values[0] not in (None, ""):
                common.append(f"<div><dt>{escape(key)}</dt><dd>{_value(values[0])}</dd></div>")
            continue
        cells = "".join(
            f'<td class="num">{", ".join(_value(value) for value in by_method.get(method, ["·"]))}</td>'
            for method in groups
        )
        own_rows.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    common.append(f"<div><dt>seeds</dt><dd>{seeds}</dd></div>")
    head = "".join(f'<th scope="col" class="num">{escape(traces.look(method).name)}</th>' for method in groups)
    table = ""
    if own_rows:
        table = _scroll(
            f"Settings of {runs[0].title} by method",
            f'<table><thead><tr><th scope="col">option</th>{head}</tr></thead>'
            f"<tbody>{''.join(own_rows)}</tbody></table>",
        )
    return f'<details><summary>Settings</summary><div><dl class="common">{"".join(common)}</dl>{table}</div></details>'


def _panel(index: int, panel: str, runs: Sequence[RunTrace], data: Mapping[str, Any], gaps: Sequence[str],
           is_open: bool) -> str:  # fmt: skip
    anchor, title = _anchor(panel), escape(runs[0].title)
    flags = [f'<p class="flag">{escape(note)}</p>' for note in dict.fromkeys(str(r.config.get("data_note") or "")
             for r in runs) if note]  # fmt: skip
    if gaps:
        flags.append(f'<p class="flag">Incomplete: {escape("; ".join(gaps))}</p>')
    counts = {len(own) for own in traces.by_method(runs).values()}
    if counts == {1}:
        told = "One run of each method."
    else:
        number = f"{max(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        told = f"Mean of {number} runs; band: ± one standard deviation, within the range of the runs."
    drawn = any(method["curves"] for method in data["methods"])
    chart = '<p class="none">No loss has been measured yet.</p>'
    if drawn:
        chart = (
            f'<figure><div class="chart" data-panel="{index}" data-kind="loss" tabindex="0" role="img"'
            f' aria-label="{title}: loss of every method; the table below has the numbers"></div>'
            f'<figcaption><span>{told}</span><span class="mouse">Drag to zoom, double-click to reset.</span>'
            "</figcaption></figure>"
        )
    return (
        f'<article class="panel" id="{anchor}" aria-labelledby="{anchor}-head"><header>'
        f'<h3 id="{anchor}-head">{title}</h3><p>{escape(runs[0].subtitle)}</p>{"".join(flags)}</header>'
        f"{chart}{_numbers(runs, data['star'])}{_steps(index, runs, is_open)}{_sigma_rho(index, runs, data)}"
        f"{_settings(runs)}</article>"
    )


def _gaps(gaps: Mapping[str, Sequence[str]], left_out: Mapping[str, str], titles: Mapping[str, str]) -> str:
    if not gaps and not left_out:
        return ""
    items = [f"<li><b>{escape(panel)}</b> was skipped: {escape(reason)}</li>" for panel, reason in left_out.items()]
    for panel, said in gaps.items():
        name = escape(panel)
        if panel in titles:
            name = f'<a href="#{_anchor(panel)}">{name}</a>'
        items.append(f"<li><b>{name}</b>: {escape('; '.join(said))}</li>")
    return (
        '<section id="gaps" aria-labelledby="gaps-head"><h2 id="gaps-head">What is missing</h2>'
        f'<ul class="gaps">{"".join(items)}</ul></section>'
    )


def _environment(runs: Sequence[RunTrace]) -> str:
    counts: dict[str, Counter[str]] = {}
    started = sorted(str(run.environment["started"]) for run in runs if run.environment.get("started"))
    for run in runs:
        for key, value in run.environment.items():
            if key != "started":
                counts.setdefault(key, Counter())[str(value)] += 1
    rows = []
    for key, values in counts.items():
        told = escape(next(iter(values)))
        if len(values) > 1:
            told = "<br>".join(f"{escape(value)} ({_plural(count, 'run')})" for value, count in values.most_common())
        rows.append(f'<tr><th scope="row">{escape(key)}</th><td>{told}</td></tr>')
    if started:
        told = escape(started[0]) + (f" to {escape(started[-1])}" if started[-1] != started[0] else "")
        rows.append(f'<tr><th scope="row">started</th><td>{told}</td></tr>')
    body = _scroll("Environment of the runs", f"<table><tbody>{''.join(rows)}</tbody></table>")
    if not rows:
        body = "<p>No run says what it ran on.</p>"
    head = '<h2 id="environment-head">Environment</h2>'
    return f'<section id="environment" aria-labelledby="environment-head">{head}{body}</section>'


# ---------------------------------------------------------------------------------------------- the page


def write(out: Path, claims: Sequence[Any] = (), plan: Mapping[str, Mapping[str, int]] | None = None) -> Path:
    """Write ``OUT/report.html`` and return where it is.

    Parameters
    ----------
    out : Path
        Folder of the laboratory.
    claims : sequence
        What the paper claims: objects with the attributes ``statement``, ``panel``, ``measured``, ``spread`` (text)
        and ``holds`` (bool, or None where it cannot be judged).
    plan : mapping, optional
        For each panel, how many runs each method should have; see `sanc.lab.traces.plan_gaps`. Its order is that of
        the panels.
    """
    out = Path(out)
    runs = traces.read(out)
    figures, stars = traces.by_figure(runs, tuple(plan or ())), traces.f_stars(runs)
    methods = list(traces.by_method(runs))
    left_out = traces.skipped(out)
    gaps = {panel: said for panel, said in traces.plan_gaps(runs, plan).items() if panel not in left_out}
    panels = {panel: own for group in figures.values() for panel, own in group.items()}
    data = {panel: _panel_data(own, stars[own[0].objective]) for panel, own in panels.items()}
    order = {panel: index for index, panel in enumerate(panels)}
    sections = []
    for figure, group in figures.items():
        name = f"figure-{_anchor(figure)}"
        articles = "".join(
            _panel(order[panel], panel, own, data[panel], gaps.get(panel, ()), len(panels) <= 6)
            for panel, own in group.items()
        )
        head = f'<h2 id="{name}-head">{escape(_figure_name(figure))}</h2>'
        sections.append(f'<section id="{name}" aria-labelledby="{name}-head">{head}{articles}</section>')
    if not runs:
        sections.append('<p class="none">No run has begun.</p>')
    styles = [traces.look(method) for method in methods]
    embedded = {
        "axes": AXES,
        "units": _UNITS,
        "branches": _NUMBERS,
        "methods": [{"id": m, "name": s.name, "dashes": s.dashes} for m, s in zip(methods, styles, strict=True)],
        "panels": list(data.values()),
    }
    source = files("sanc.lab")
    css, script = (source.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    titles = {panel: own[0].title for panel, own in panels.items()}
    lede = (
        "Second-order optimisers on the problems of the paper: the training loss over the calls that the paper counts, "
        "over all evaluations of single components, and over time."
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{_TITLE}</title>
<style>
{css}{_colours(methods)}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<div class="error" id="error" role="alert" hidden></div>
<header class="top"><div class="wide"><h1>{_TITLE}</h1><p class="lede">{lede}</p>{_tiles(runs, claims)}</div></header>
{_bar(methods)}
<div class="wide layout">
{_contents(figures, bool(claims), bool(gaps or left_out))}
<main id="main" tabindex="-1">
<noscript><p class="flag">The charts need JavaScript; the tables do not.</p></noscript>
{_claims(claims, panels)}
{"".join(sections)}
{_gaps(gaps, left_out, titles)}
{_environment(runs)}
</main>
</div>
<footer><div class="wide">f* lies a little below the best loss that any run on the same objective reached, unless it
is given: by a twentieth of the distance from that loss to the median of the final losses. Chosen axes, scale and
methods are kept in the page’s address.</div></footer>
<div class="sr" id="live" aria-live="polite"></div>
<script type="application/json" id="data">{_embed(embedded)}</script>
<script>
{script}</script>
</body>
</html>
"""
    path = out / "report.html"
    out.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".report.html.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path
