"""What decreases f after a rejection of SANC: the gradient step, negative curvature, or larger samples?

    python -m benchmarks.rejections --runs docs/results/rejections.jsonl.xz            # runs that are missing, tables
    python -m benchmarks.rejections --runs docs/results/rejections.jsonl.xz --tables   # tables alone
    python -m benchmarks.rejections --quick                                            # one set, two seeds

The variants differ in what follows a rejected cubic step, and are composed of the package's pieces with preset "paper":

sanc         negative curvature or the step −g/L1, whichever predicts the larger decrease
scr          stays
gradient     always −g/L1: SCR with a gradient step, or SANC without its branch of negative curvature, which is the same
checked      −g/L1, halved until f decreases
curvature    always along negative curvature; stays if the left-most Ritz value is not negative
growing      scr whose samples grow as steps become shorter
robust       the package's default instead of preset "paper", on the autoencoder alone

The problems are logistic regressions with σ0 = 1 and σ0 = 0.001 (figures 1 to 4 of the paper), the MLP of figure 2b
with tanh and with ReLU, a tenth of its hidden neurons and half its budget, and an autoencoder of scikit-learn's digits
with 16 hidden neurons (tanh). The autoencoder has three starts: Xavier weights, the same weights times 0.001, which is
close to a saddle, and the saddle itself (zero weights, the mean image as the output's bias). The tables have the
difference of the final loss to that of SANC in percent of f*, or of SANC's mean on networks, with its 95 % interval
over pairs of equal seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sanc
from benchmarks.common import set_threads
from benchmarks.paper_runs import (
    LEVEL,
    MARGIN,
    Run,
    calls,
    chosen,
    constants_of,
    differences,
    digits,
    least,
    make,
    minimum,
    percent,
    problem_of,
    read,
    run_sum,
)
from benchmarks.reporting import markdown_table
from sanc.lab import models
from sanc.lab.runs import load_data
from sanc.lab.statistics import equivalent, holm

SETS = ("w1a", "a9a", "breast_cancer")
SIGMAS = (1.0, 0.001)
SEEDS, NETWORK_SEEDS = 10, 5
VARIANTS = ("sanc", "scr", "gradient", "checked", "curvature", "growing")
STARTS: Mapping[str, float] = {"Xavier": 1.0, "near a saddle": 1e-3, "saddle": 0.0}
"""Starts of the autoencoder: factors of Xavier weights."""
NETWORKS: Mapping[str, str] = {
    **{f"autoencoder, {start}": "digits" for start in STARTS}, "mlp tanh": "segment", "mlp relu": "segment",
}  # fmt: skip
"""Networks, with their data sets."""
WIDTHS = (30, 50)
"""Hidden neurons of the MLP, a tenth of the paper's."""
BUDGETS = {"segment": 100_000, "digits": 60_000}
"""Budgets on networks in `paper_calls`; that of segment is half the paper's."""
MEASUREMENTS = 100
"""Points of the budget at which the loss on all rows is measured."""


@dataclass(frozen=True, kw_only=True)
class CurvatureAlone(sanc.PaperEscape):
    """Steps along negative curvature wherever there is any, and stays elsewhere."""

    def choose(self, ritz_value: float, grad_norm: float, *, model_proposes: bool) -> tuple[sanc.Branch, float]:
        """Return the branch and its step size."""
        if ritz_value < 0:
            return sanc.Branch.CURVATURE, -2 * ritz_value / self.L2
        return sanc.Branch.STAYED, 0.0


def arguments_of(variant: str, L1: float, L2: float) -> dict[str, Any]:
    """Return the pieces of a variant, as arguments of `minimize` and the optimisers."""
    if variant in ("scr", "growing"):
        return {"escape": sanc.Stay()}
    if variant in ("gradient", "checked"):
        return {"escape": sanc.GradientStep(lr=1 / L1, checked=variant == "checked")}
    return {"escape": (CurvatureAlone if variant == "curvature" else sanc.PaperEscape)(L1=L1, L2=L2)}


# ---------------------------------------------------------------------- runs


def run_logistic(data: str, data_dir: Path | None, sigma0: float, variant: str, seed: int) -> Run:
    """Make one run on a logistic regression."""
    grow = {"method": "scr", "grow_samples": True} if variant == "growing" else {}
    pieces = grow or arguments_of(variant, **constants_of(data))
    return run_sum(problem_of(data, data_dir), seed, preset="paper", sigma0=sigma0, **pieces)


@cache
def tensors(data: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """Return rows and labels of a data set."""
    loaded = load_data(data, data_dir, "float32")
    return torch.from_numpy(np.array(loaded.X)), torch.from_numpy(np.array(loaded.y))


def network_of(name: str, x: Tensor, y: Tensor, seed: int) -> tuple[torch.nn.Sequential, Callable[..., Tensor], float]:
    """Return a network at its start, its loss of rows and labels, and the weight of its penalty."""
    if name.startswith("mlp"):
        model = models.mlp(x.shape[1], int(y.max()) + 1, name.split()[1], WIDTHS)
        models.initialise(model, seed)
        return model, lambda a, b: torch.nn.functional.cross_entropy(model(a), b), 0.01
    features = x.shape[1]
    model = torch.nn.Sequential(torch.nn.Linear(features, 16), torch.nn.Tanh(), torch.nn.Linear(16, features))
    models.initialise(model, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(STARTS[name.split(", ")[1]])
        if name.endswith(", saddle"):
            model[2].bias.copy_(x.mean(0))
    return model, lambda a, b: (model(a) - a).square().sum(1).mean(), 0.0


def run_network(name: str, data_dir: Path | None, variant: str, seed: int, budget: int) -> Run:
    """Make one run on a network, with the settings of figure 2b."""
    x, y = tensors(NETWORKS[name], data_dir)
    model, loss_of, decay = network_of(name, x, y, seed)
    options: dict[str, Any] = {}
    if variant != "robust":
        options = {"preset": "paper", "sigma0": 1.0, "eta1": 0.1, "eta2": 0.3, "hvp": "double-backward"}
        options |= arguments_of(variant, 100.0, 100.0)
    optimiser = sanc.SANC(models.groups(model, decay), seed=seed, **options)
    samples = sanc.ThreeSamples(torch.utils.data.TensorDataset(x, y), 128, seed=seed)
    trace: dict[str, list[float]] = {"calls": [], "loss": []}
    branches: Counter[str] = Counter()

    def measure(spent: int) -> None:
        with torch.no_grad():
            penalty = 0.5 * decay * sum(float(p.square().sum()) for p in model.parameters() if p.ndim > 1)
            trace["calls"].append(spent)
            trace["loss"].append(digits(float(loss_of(x, y)) + penalty))

    measure(0)
    spent, reference, clock = 0, 0.0, time.perf_counter()
    while spent < budget:
        g, b, f = samples.draw()
        if variant == "robust":
            optimiser.step(sanc.Batch(loss_of, *g))
        else:
            batches = {"hessian": sanc.Batch(loss_of, *b), "objective": sanc.Batch(loss_of, *f)}
            optimiser.step(sanc.Batch(loss_of, *g), **batches)
        record = optimiser.record
        branches[str(record.branch)] += 1
        if variant == "growing" and record.step_norm > 0:
            reference = reference or record.step_norm
            sizes = sanc.theory.growing_sample_sizes(record.step_norm, reference, (128, 128), len(x))
            samples.sizes = (*sizes, 128)
        before, spent = spent, record.calls.paper_calls
        if spent * MEASUREMENTS // budget > before * MEASUREMENTS // budget or spent >= budget:
            optimiser.eval()
            measure(spent)
            optimiser.train()
    more = {"evaluations": record.calls.total, "branches": dict(branches)}
    return {"n": len(x), **trace, "final": trace["loss"][-1], **more, "seconds": round(time.perf_counter() - clock, 3)}


def jobs(quick: bool, data_dir: Path | None) -> Iterator[tuple[dict[str, Any], Callable[[], Run]]]:
    """Yield the description and the function of every run."""
    for data in SETS[-1:] if quick else SETS:
        yield {"problem": "minimum", "data": data, "seed": 0}, partial(_minimum, data, data_dir)
        for sigma0 in SIGMAS:
            for seed in range(2 if quick else SEEDS):
                for variant in VARIANTS:
                    about = {"problem": "logistic", "data": data, "sigma0": sigma0, "variant": variant, "seed": seed}
                    yield about, partial(run_logistic, data, data_dir, sigma0, variant, seed)
    for name, data in NETWORKS.items():
        if quick and name != "autoencoder, saddle":
            continue
        budget = 6_000 if quick else BUDGETS[data]
        for seed in range(2 if quick else NETWORK_SEEDS):
            for variant in variants_of(name):
                about = {"problem": name, "data": data, "variant": variant, "seed": seed}
                yield about, partial(run_network, name, data_dir, variant, seed, budget)


def _minimum(data: str, data_dir: Path | None) -> Run:
    return minimum(problem_of(data, data_dir))


def variants_of(name: str) -> tuple[str, ...]:
    """Return the variants of a network."""
    return (*VARIANTS, "robust") if name.startswith("autoencoder") else VARIANTS


# ---------------------------------------------------------------------- tables


def branches_of(runs: Sequence[Run], *names: str) -> str:
    """Return the mean share of steps of these branches, in percent."""
    shares = [sum(run["branches"].get(name, 0) for name in names) / sum(run["branches"].values()) for run in runs]
    return f"{100 * float(np.mean(shares)):.0f}"


def logistic_table(runs: Sequence[Run], sigma0: float) -> str:
    """Return the table of the logistic regressions with one σ0."""
    sets = [data for data in SETS if chosen(runs, problem="logistic", data=data)]
    lines, tests = [], []
    for variant in VARIANTS:
        line: list[str] = [variant]
        for data in sets:
            star = least(runs, data)
            found, ours = (chosen(runs, data=data, sigma0=sigma0, variant=name) for name in (variant, "sanc"))
            gaps = differences(found, ours, star)
            line += [calls(found.values(), LEVEL * star), percent(gaps) if variant != "sanc" else ""]
            if variant != "sanc":
                tests.append(equivalent(gaps, MARGIN))
        steps = [run for data in sets for run in chosen(runs, data=data, sigma0=sigma0, variant=variant).values()]
        lines.append([*line, branches_of(steps, "gradient"), branches_of(steps, "curvature")])
    adjusted = iter(holm(tests))
    for line in lines:
        passed = [next(adjusted) < 0.05 for _ in sets] if line[0] != "sanc" else []
        line.append("" if line[0] == "sanc" else "yes" if all(passed) else f"{sum(passed)} of {len(passed)}")
    head = ["variant", *(word for data in sets for word in (f"{data}: calls/n", "final, %"))]
    return markdown_table([*head, "gradient steps, %", "curvature steps, %", "equivalent"], lines)


def network_table(runs: Sequence[Run]) -> str:
    """Return the table of the networks: the mean final loss, and its difference to that of SANC."""
    lines = []
    for name in NETWORKS:
        ours = chosen(runs, problem=name, variant="sanc")
        for variant in variants_of(name) if ours else ():
            found = chosen(runs, problem=name, variant=variant)
            scale = float(np.mean([run["final"] for run in ours.values()]))
            finals = [run["final"] for run in found.values()]
            steps = list(found.values())
            line = [name, variant, f"{np.mean(finals):.4g}", percent(differences(found, ours, scale))]
            line[3] = "" if variant == "sanc" else line[3]
            lines.append([*line, branches_of(steps, "gradient"), branches_of(steps, "curvature")])
    head = ["network", "variant", "final loss", "difference to SANC, %", "gradient steps, %", "curvature steps, %"]
    return markdown_table(head, lines, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="file of the runs; those that it has are not repeated")
    parser.add_argument("--quick", action="store_true", help="breast_cancer and one network, two seeds")
    parser.add_argument("--tables", action="store_true", help="make no runs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files; by default SANC_DATA")
    options = parser.parse_args(arguments)
    set_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.runs or Path(folder) / "runs.jsonl.xz"
        runs = read(path) if options.tables else make(path, jobs(options.quick, options.data_dir))
    for sigma0 in SIGMAS:
        print(f"\nσ0 = {sigma0:g}\n\n{logistic_table(runs, sigma0)}")
    print(f"\n{network_table(runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
