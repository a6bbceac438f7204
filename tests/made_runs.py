"""A small panel, and output directories with simulated runs, in the format of the laboratory."""

from __future__ import annotations

import json

import numpy as np

from sanc.lab.experiments import Panel
from sanc.lab.style import BRANCHES

ALL = ("sanc", "scr", "cr", "crm", "ncd", "sgd")
LOGISTIC = Panel(
    "own-logistic", "own", "logistic", "breast_cancer", ("sanc", "scr", "cr", "ncd", "sgd"), {"sigma0": 1.0}
)
SPEED = {"sanc": 7.0, "scr": 5.0, "cr": 4.0, "crm": 4.4, "ncd": 2.6, "sgd": 2.0}


def line(iteration, loss, calls, **more):
    counts = {"paper_calls": calls, "value": calls, "gradient": 2 * calls, "product": 3 * calls, "seconds": calls / 10}
    return {"iteration": iteration, "loss": loss} | counts | more


def write_run(out, panel, method, seed, rows, done=True, **config):
    folder = out / "runs" / panel / method / f"seed-{seed}"
    folder.mkdir(parents=True)
    base = {"figure": "fig1", "panel": panel, "title": panel, "subtitle": "", "problem": "logistic", "data": "w1a",
            "method": method, "seed": seed, "options": {}, "batch_size": 1, "budget": 1, "preset": "paper"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(base | config, ensure_ascii=False), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"sanc": "0.1.0", "started": f"2025-01-0{seed % 9 + 1}"}))
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if done:
        (folder / "done.json").write_text(json.dumps({"status": "call limit", "loss": rows[-1]["loss"]}))
    return folder


def simulate(method, seed, start=1.0, floor=0.05, budget=50_000, steps=240, speed=1.0):
    """Return the lines of a simulated run with a plateau at a saddle, varying branches and a decreasing σ."""
    rng = np.random.default_rng((seed, len(method), ord(method[0])))
    seconds_per_call = {"sgd": 0.7e-5, "ncd": 3.2e-5}.get(method, 2e-5) * rng.uniform(0.9, 1.1)
    rows = [line(-1, start, 0)]
    loss, sigma, rate, saddle = start, 1.0, SPEED[method] * speed, floor + 0.32 * (start - floor)
    for k in range(steps):
        calls = round((k + 1) * budget / steps)
        progress = (k + 1) / steps
        at_saddle = abs(loss - saddle) < 0.05 * (start - floor) and progress < {"sanc": 0.16, "ncd": 0.3}.get(
            method, 0.45
        )
        decrease = (loss - floor) * rate / steps * rng.uniform(0.4, 1.7) * (0.05 if at_saddle else 1.0)
        if method in ("cr", "crm"):
            branch = "unconditional"
        elif method == "sgd":
            branch, decrease = "gradient", decrease + rng.normal() * 0.004 * (start - floor)
        elif method == "ncd":
            branch = "curvature" if rng.random() < 0.45 else "gradient"
        else:
            odds = [0.7 - 0.4 * progress, 0.15, 0, 0, 0.1 * (1 - progress), 0.05 + 0.1 * progress, 0.3 * progress]
            if method == "scr":
                odds = [odds[0], odds[1], 0, 0, 0, 0, odds[6] + odds[4] + odds[5]]
            branch = str(rng.choice(list(BRANCHES), p=np.array(odds) / sum(odds)))
            if branch == "stayed":
                decrease = 0.0
            elif branch == "curvature":
                decrease *= 2.2
        ratio = rng.normal(0.9 - 0.5 * progress, 0.35) if method in ("sanc", "scr") else None
        sigma = max(sigma * (0.9 if branch == "very successful" else 1.35 if branch == "stayed" else 1.0), 1e-8)
        loss -= decrease
        model = None if method in ("sgd", "ncd") else 5.0 if method in ("cr", "crm") else sigma
        row = line(k, loss if method != "sgd" or k % 3 == 2 else None, calls, branch=branch, rho=ratio, sigma=model,
                   grad_norm=abs(loss), step_norm=0.1, krylov_dim=5, trials=1, note="")  # fmt: skip
        if method in ("sgd", "ncd"):
            row |= {"value": 0, "product": 0 if method == "sgd" else 4 * calls // 5}
        rows.append(row | {"seconds": calls * seconds_per_call})
    return rows


PANELS = {
    "fig2a-w1a": dict(figure="fig2a", title="w1a", subtitle="logistic regression, σ0 = 1 (n = 2,477, d = 300)",
                      problem="logistic", data="w1a", batch_size=124, budget=49_540),
    "fig2a-higgs": dict(figure="fig2a", title="higgs", subtitle="logistic regression, σ0 = 1 (n = 11,000,000, d = 28)",
                        problem="logistic", data="higgs", batch_size=550_000, budget=220_000_000),
    "fig2b-segment": dict(figure="fig2b", title="segment", subtitle="MLP, tanh, σ0 = 1 (n = 2,310, d = 12,007)",
                          problem="mlp", data="segment", batch_size=128, budget=200_000),
}  # fmt: skip


def write_lab(out, seeds=5, steps=240, panels=PANELS, methods=ALL):
    """Write an output directory with all runs of the panels except for two gaps."""
    for index, (panel, config) in enumerate(panels.items()):
        for method in methods:
            if panel == "fig2b-segment" and method == "crm":
                continue
            options = {"lr": 0.01} if method == "sgd" else {"sigma0": 5.0 if method in ("cr", "crm") else 1.0}
            if method in ("sanc", "ncd"):
                options |= {"L1": 10.0, "L2": 10.0}
            if method in ("sanc", "scr"):
                options |= {"eta1": 0.2, "eta2": 0.8}
            for seed in range(seeds):
                rows = simulate(method, seed, (0.72, 0.9, 1.95)[index % 3], (0.11, 0.62, 0.18)[index % 3],
                                config["budget"], steps, (1.0, 0.8, 0.7)[index % 3])  # fmt: skip
                cut = panel == "fig2a-higgs" and method == "ncd" and seed == seeds - 1
                rows = rows[: len(rows) // 2] if cut else rows
                more = {"preset": "paper", "options": options, "data_note": "", "activation": None, "strength": 1.0}
                write_run(out, panel, method, seed, rows, not cut, **(config | more))
    (out / "skipped.json").write_text(json.dumps({"fig3-covtype": "covtype.libsvm.binary is not in the data folder"}))
    return out
