"""Time `sanc.minimize` beside other libraries that minimise torch functions: pytorch-minimize, torchzero and SciPy.

    pip install -e '.[peers]'                                   # the libraries compared with
    python -m benchmarks.peers --out peers-output               # all problems, about half an hour
    python -m benchmarks.peers --problems rosenbrock saddle     # some of them
    python -m benchmarks.peers --quick                          # tiny sizes, seconds

The problems, in float64 on one thread of a CPU:

logistic          logistic regression on scikit-learn's breast_cancer, standardised, with the penalty
                  10⁻³ Σ w²/(1 + w²), from w = (1, …, 1)
rosenbrock        the chained Rosenbrock function, n = 100, from (−1.2, 1, −1.2, 1, …)
rosenbrock-large  the same, n = 1000
network           tanh 10-20-1, mean squared error on 1000 generated rows, to ‖g‖₂ ≤ 1e-5
saddle            ¼ Σ (x² − 1)², n = 100, from a point that is exactly a strict saddle: half of the coordinates are 0
factor            ¼‖UUᵀ − M‖² with U of 30 × 3, M of rank 3, from U of size 1e-4, which is near the strict saddle 0

Every method minimises the very same function from the very same start. The clock stops when a method first takes a
gradient with ‖g‖₂ ≤ 1e-6 (network: 1e-5); on saddle and factor, whose minimum is 0, f must also be at most 1e-8. All
endings of the methods' own are switched off as far as they can be; what else they offer is left at its default. A run
that has not got there after 20 seconds, or has taken 200 gradients in a row that are small while f is not, is ended.
It is not repeated, and its seconds are those of one run. The times of the others are medians of runs made in turns. A
method that then fails in some of its runs counts as failed, unless it is fewer than half of them that ran out of time,
which does not change the median. There are no ratios where sanc itself has failed.

Counts: f is how often the function was evaluated, also where its gradient was taken with it, g how many gradients were
taken, Hv how many Hessian products; a dense Hessian counts as n products. They are counted by a hook on the function's
argument, which everybody pays for. Products by differences of gradients, the default of torchzero's NewtonCGSteihaug,
count as gradients. f and ‖g‖ at the end are those that stopped the clock; otherwise, those of the lowest f whose
gradient was taken. The methods may end in different minima: look at f before the seconds.

"sanc" has all its defaults but `tol`. "sanc, certified" is the same call until it returns, in the same 20 seconds, with
the certificate of λ_min, which nobody else has. SciPy gets f, gradient and Hessian products by autograd from one graph
for each of the last two points. Libraries that are not installed are named and left out. --out gets peers.json and
peers.png.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import math
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import sanc
from benchmarks.common import Budget, plain_table
from benchmarks.linear import in_process, run_scipy
from benchmarks.timing import in_turns, machine, write_json

Floats = NDArray[np.float64]
PATIENCE = 200
"""Small gradients in a row, f not small, after which a run is stuck; and steps of torchzero that change nothing."""
LATE = "not reached: out of time"
LARGEST = 2000
"""Variables up to which methods with dense Hessians are run."""

# ---------------------------------------------------------------------- the problems


@dataclass(frozen=True)
class Problem:
    """A torch function, where to start, and what is to be reached.

    Attributes
    ----------
    title : str
        What it is called in tables.
    loss : callable
        The function, of a flat tensor.
    x0 : Tensor
        The start.
    tol : float
        How small the gradient has to be.
    target : float
        How small f has to be.
    """

    title: str
    loss: Callable[[Tensor], Tensor]
    x0: Tensor
    tol: float = 1e-6
    target: float = math.inf


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logistic(quick: bool) -> Problem:
    from sklearn.datasets import load_breast_cancer

    rows, labels = load_breast_cancer(return_X_y=True)
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    kept = slice(100 if quick else None)
    X, y = torch.from_numpy(rows[kept].copy()), torch.from_numpy(labels[kept].astype(np.float64))

    def loss(w: Tensor) -> Tensor:
        square = w * w
        mean = torch.nn.functional.binary_cross_entropy_with_logits(X @ w, y)
        return mean + 1e-3 * (square / (1 + square)).sum()

    return Problem(f"logistic, n = {X.shape[1]}", loss, torch.ones(X.shape[1], dtype=torch.float64))


def rosenbrock(n: int) -> Problem:
    def loss(x: Tensor) -> Tensor:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    return Problem(f"Rosenbrock, n = {n}", loss, torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(n // 2))


def network(quick: bool) -> Problem:
    rows, inputs, width = (100, 3, 4) if quick else (1000, 10, 20)
    X, noise = _normal(0, rows, inputs), _normal(1, rows)
    y = torch.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * noise
    sizes = (inputs * width, width, width, 1)
    scales = (1 / math.sqrt(inputs), 0.0, 1 / math.sqrt(width), 0.0)
    start = torch.cat([scale * _normal(2 + k, size) for k, (size, scale) in enumerate(zip(sizes, scales, strict=True))])

    def loss(x: Tensor) -> Tensor:
        first, bias, second, shift = x.split(sizes)
        hidden = torch.tanh(torch.addmm(bias, X, first.view(inputs, width)))
        return (hidden @ second + shift - y).square().mean()

    return Problem(f"tanh network, n = {len(start)}", loss, start, tol=1e-5)


def saddle(quick: bool) -> Problem:
    n = 10 if quick else 100
    start = torch.zeros(n, dtype=torch.float64)
    start[::2] = 1.0
    return Problem(f"exact saddle, n = {n}", lambda x: 0.25 * ((x * x - 1) ** 2).sum(), start, target=1e-8)


def factor(quick: bool) -> Problem:
    rows, rank = (8, 2) if quick else (30, 3)
    basis = torch.linalg.qr(_normal(0, rows, rank))[0]
    M = basis @ torch.diag(torch.arange(1.0, rank + 1, dtype=torch.float64)) @ basis.T

    def loss(x: Tensor) -> Tensor:
        U = x.view(rows, rank)
        return 0.25 * (U @ U.T - M).square().sum()

    return Problem(f"factors, n = {rows * rank}", loss, 1e-4 * _normal(1, rows * rank), target=1e-8)


PROBLEMS: dict[str, Callable[[bool], Problem]] = {
    "logistic": logistic,
    "rosenbrock": lambda quick: rosenbrock(10 if quick else 100),
    "rosenbrock-large": lambda quick: rosenbrock(20 if quick else 1000),
    "network": network,
    "saddle": saddle,
    "factor": factor,
}


class Watched:
    """A torch function that counts what is asked of it, and that ends a run.

    Parameters
    ----------
    problem : Problem
        The function, and what is to be reached.
    seconds : float
        How long a run may take.
    dense : bool
        Whether the method takes all n products of a Hessian at once, by torch's vmap.
    ends : bool
        Whether a run ends, by `Budget`, where what is to be reached is.

    Attributes
    ----------
    values, gradients, products : int
        Evaluations of each.
    ending : str
        "reached", or why not.
    value, norm : float
        f and ‖g‖ at the end; where the target was not reached, those of the lowest f whose gradient was taken.
    """

    def __init__(self, problem: Problem, seconds: float, *, dense: bool = False, ends: bool = True) -> None:
        self.problem, self.ends = problem, ends
        self.values = self.gradients = self.products = 0
        self.ending = "not reached: ended on its own"
        self.value = self.norm = math.inf
        self._dense, self._small = dense, 0
        self._end = time.perf_counter() + seconds

    def __call__(self, x: Tensor) -> Tensor:
        self.values += 1
        self._check_time()
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.problem.loss(x)
        seen = x.view_as(x)
        value = self.problem.loss(seen)
        seen.register_hook(self._hook(value.detach()))  # type: ignore[no-untyped-call]
        return value

    def _hook(self, value: Tensor) -> Callable[[Tensor], None]:
        """Make a hook that sees the gradient at first, and Hessian products where the gradient is differentiated."""
        first = True

        def saw(g: Tensor) -> None:
            nonlocal first
            if self._dense:
                g = torch._remove_batch_dim(g, 1, 1, 0)  # all that vmap does at once; one where it does not
            if first:
                first = False
                self._saw_gradient(float(value), float(torch.linalg.vector_norm(g.detach())))
            else:
                self.products += len(g) if self._dense else 1
            self._check_time()

        return saw

    def _saw_gradient(self, value: float, norm: float) -> None:
        self.gradients += 1
        small = norm <= self.problem.tol
        reached = small and value <= self.problem.target
        if reached or value <= self.value:
            self.value, self.norm = value, norm
        if not self.ends:
            return
        if reached:
            self.stop("reached")
        self._small = self._small + 1 if small else 0
        if self._small >= PATIENCE:
            self.stop("not reached: stuck")

    def _check_time(self) -> None:
        if time.perf_counter() > self._end:
            self.stop(LATE)

    def stop(self, ending: str) -> NoReturn:
        """End the run."""
        self.ending = ending
        raise Budget


# ---------------------------------------------------------------------- the methods


Run = Callable[[Watched, Tensor], Any]


@dataclass(frozen=True)
class Method:
    """How a method is run, whether it takes dense Hessians, and whether the clock stops at the first good gradient."""

    run: Run
    dense: bool = False
    ends: bool = True


def run_sanc(watched: Watched, x0: Tensor) -> Any:
    """Run sanc with its default options."""
    return sanc.minimize(watched, x0, tol=watched.problem.tol)


def run_certified(watched: Watched, x0: Tensor) -> None:
    """Run sanc until it returns."""
    result = run_sanc(watched, x0)
    watched.value, watched.norm = float(result.fun), float(torch.linalg.vector_norm(result.jac))
    reached = watched.norm <= watched.problem.tol and watched.value <= watched.problem.target
    watched.ending = "reached" if reached else f"not reached: {result.message}"


class Bridge:
    """A torch function as SciPy wants it; the graphs of the last two points are kept.

    Parameters
    ----------
    f : callable
        The function of a tensor.
    second : bool
        Whether gradients will be differentiated.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], second: bool) -> None:
        self.f, self.second = f, second
        self._points: deque[list[Any]] = deque(maxlen=2)  # a trial and the point it started from

    def _at(self, x: Floats) -> list[Any]:
        for known in self._points:
            if np.array_equal(known[0], x):
                return known
        leaf = torch.tensor(x, requires_grad=True)
        self._points.append([x.copy(), leaf, self.f(leaf), None])
        return self._points[-1]

    def _gradient(self, x: Floats) -> tuple[Tensor, Tensor]:
        point = self._at(x)
        if point[3] is None:
            (point[3],) = torch.autograd.grad(point[2], point[1], create_graph=self.second)
        return point[1], point[3]

    def value(self, x: Floats) -> float:
        """f(x)."""
        return float(self._at(x)[2].detach())

    def gradient(self, x: Floats) -> Floats:
        """∇f(x)."""
        return self._gradient(x)[1].detach().numpy()

    def hessp(self, x: Floats, v: Floats) -> Floats:
        """∇²f(x) v."""
        leaf, g = self._gradient(x)
        return torch.autograd.grad(g, leaf, torch.tensor(v), retain_graph=True)[0].numpy()


def scipy_methods() -> dict[str, Method]:
    """Collect SciPy's minimisers with Hessian products, and L-BFGS-B."""

    def run(method: str, watched: Watched, x0: Tensor) -> None:
        run_scipy(Bridge(watched, method != "L-BFGS-B"), method, x0.numpy())  # type: ignore[arg-type]

    names = ("trust-krylov", "trust-ncg", "Newton-CG", "L-BFGS-B")
    return {f"SciPy {name}": Method(partial(run, name)) for name in names}


def torchmin_methods() -> dict[str, Method]:
    """Collect the minimisers of pytorch-minimize with second derivatives, BFGS and L-BFGS."""
    minimize = importlib.import_module("torchmin").minimize
    by_gradient, by_step = {"gtol": 0.0}, {"xtol": 0.0}
    by_all = {"gtol": 0.0, "xtol": 0.0, "gtd_tol": 0.0}
    endings = {"newton-cg": by_step, "trust-ncg": by_gradient, "trust-krylov": by_gradient, "l-bfgs": by_all}
    endings |= {"newton-exact": by_step, "trust-exact": by_gradient, "bfgs": by_all}

    def run(method: str, watched: Watched, x0: Tensor) -> None:
        minimize(watched, x0, method, max_iter=10**6, options=dict(endings[method]))

    return {f"pytorch-minimize {name}": Method(partial(run, name), name.endswith("exact")) for name in endings}


def torchzero_methods() -> dict[str, Method]:
    """Put together the modules of torchzero nearest to sanc as its documentation does, and L-BFGS."""
    tz = importlib.import_module("torchzero")
    m = tz.m
    chains: dict[str, tuple[Callable[[], Sequence[Any]], bool]] = {
        "NewtonCG": (lambda: [m.NewtonCG(), m.Backtracking()], False),
        "NewtonCGSteihaug": (lambda: [m.NewtonCGSteihaug()], False),
        "CubicRegularization": (lambda: [m.CubicRegularization(m.Newton())], True),
        "LevenbergMarquardt": (lambda: [m.LevenbergMarquardt(m.Newton())], True),
        "Newton, |λ|": (lambda: [m.Newton(eigval_fn=lambda L: L.abs().clip(min=1e-4)), m.Backtracking()], True),
        "LBFGS": (lambda: [m.LBFGS(100), m.Backtracking()], False),
    }

    def run(chain: Callable[[], Sequence[Any]], watched: Watched, x0: Tensor) -> None:
        x = x0.clone().requires_grad_()
        optimiser = tz.Optimizer([x], *chain())

        def closure(backward: bool = True) -> Tensor:
            loss = watched(x)
            if backward:
                x.grad = None
                loss.backward()  # type: ignore[no-untyped-call]
            return loss

        unchanged = 0
        while unchanged < PATIENCE and not optimiser.should_terminate:
            before = x.detach().clone()
            optimiser.step(closure)
            unchanged = unchanged + 1 if torch.equal(before, x.detach()) else 0

    return {f"torchzero {name}": Method(partial(run, chain), dense) for name, (chain, dense) in chains.items()}


LIBRARIES: dict[str, Callable[[], dict[str, Method]]] = {
    "scipy": scipy_methods,
    "pytorch-minimize": torchmin_methods,
    "torchzero": torchzero_methods,
}


def methods() -> tuple[dict[str, Method], dict[str, str], list[str]]:
    """Return the methods, the versions of their libraries, and the libraries that are not there."""
    found, versions, missing = {"sanc": Method(run_sanc), "sanc, certified": Method(run_certified, ends=False)}, {}, []
    for library, collect in LIBRARIES.items():
        try:
            found |= collect()
        except ImportError:
            missing.append(library)
            continue
        versions[library] = version(library)
    return found, versions, missing


# ---------------------------------------------------------------------- the race


@contextlib.contextmanager
def alarm(watched: Watched, seconds: float) -> Iterator[None]:
    """Also end a run that does not evaluate the function any more, where the system can."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: watched.stop(LATE))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def once(problem: Problem, method: Method, limit: float) -> tuple[Watched, float]:
    """Run a method, and say what came of it and how long that took."""
    x0 = problem.x0.clone()
    watched = Watched(problem, limit, dense=method.dense, ends=method.ends)
    clock = time.perf_counter()
    try:
        with warnings.catch_warnings(), alarm(watched, limit + 0.5):
            warnings.simplefilter("ignore")
            method.run(watched, x0)
    except Budget:
        pass
    except Exception as trouble:  # whatever it is, the other methods go on
        said = str(trouble).split("\n")[0][:60]
        watched.ending = f"failed: {type(trouble).__name__}: {said}"
    return watched, time.perf_counter() - clock


def race_one(problem: Problem, found: Mapping[str, Method], seconds: float, limit: float) -> list[dict[str, Any]]:
    """Run every method once, and those that got there in turns."""
    able = {name: method for name, method in found.items() if len(problem.x0) <= LARGEST or not method.dense}
    runs = {name: [once(problem, method, limit)] for name, method in able.items()}

    def again(name: str) -> None:
        runs[name].append(once(problem, able[name], limit))

    calls = {name: partial(again, name) for name, (first,) in runs.items() if first[0].ending == "reached"}
    times = in_turns(calls, seconds=seconds, warm_up=0, least=min(3, math.ceil(limit))) if calls else {}
    rows = [_row(name, mine, times.get(name, mine[0][1])) for name, mine in runs.items()]
    known = rows[0]["reached"]  # of sanc
    return [row | {"ratio": row["seconds"] / rows[0]["seconds"] if known and row["reached"] else None} for row in rows]


def _row(name: str, runs: Sequence[tuple[Watched, float]], seconds: float) -> dict[str, Any]:
    """Say what came of the runs of a method; a few that were out of time do not change the median of the others."""
    good = [watched for watched, _ in runs if watched.ending == "reached"]
    bad = [watched for watched, _ in runs if watched.ending != "reached"]
    late = all(watched.ending == LATE for watched in bad)
    reached = bool(good) and (not bad or (late and 2 * len(bad) < len(runs) - 1))
    shown = good[-1] if reached else bad[-1]
    row = {"problem": shown.problem.title, "n": len(shown.problem.x0), "tol": shown.problem.tol, "method": name}
    row |= {"seconds": seconds, "values": shown.values, "gradients": shown.gradients, "products": shown.products}
    row |= {"value": shown.value, "norm": shown.norm, "ending": shown.ending, "reached": reached}
    return row | {"runs": len(runs), "good_runs": len(good)}


def race(names: Sequence[str], quick: bool, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Run all methods on some problems."""
    torch.set_num_threads(1)
    found = methods()[0]
    rows = []
    for name in names:
        clock = time.perf_counter()
        rows += race_one(PROBLEMS[name](quick), found, seconds, limit)
        print(f"{name}: {time.perf_counter() - clock:.0f} s", file=sys.stderr, flush=True)
    return rows


# ---------------------------------------------------------------------- what came out


def _outcome(row: Mapping[str, Any]) -> str:
    some = "" if row["good_runs"] in (0, row["runs"]) else f" ({row['good_runs']} of {row['runs']} runs)"
    if not row["reached"]:
        return row["ending"] + some
    return ("reached" if row["ratio"] is None else f"{row['ratio']:.2f}") + some


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the rows."""
    head = ("problem", "method", "seconds", "ratio to sanc", "f", "g", "Hv", "final f", "final ‖g‖")
    cells = [
        (
            row["problem"],
            row["method"],
            f"{row['seconds']:.3f}",
            _outcome(row),
            row["values"],
            row["gradients"],
            row["products"],
            f"{row['value']:.6g}",
            f"{row['norm']:.1e}",
        )
        for row in rows
    ]
    return plain_table(head, cells, left=2)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw, for every problem, the times of those that got there as ratios to sanc."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    groups = [(title, list(mine)) for title, mine in itertools.groupby(rows, key=lambda row: row["problem"])]
    names = list(dict.fromkeys(row["method"] for row in rows))
    across = min(3, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(3 + 3.6 * across, 1 + 0.24 * len(names) * down))
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flat
    for panel, (title, mine) in zip(panels, groups, strict=False):
        for row in mine:
            place = names.index(row["method"])
            if row["ratio"] is not None:
                colour = "#C0392B" if place < 2 else "#4C6A8C"
                panel.barh(place, row["ratio"] - 1, 0.7, left=1, color=colour)
                panel.plot(row["ratio"], place, "o", ms=3, color=colour)
            else:
                panel.text(1.1, place, _outcome(row).split(":")[0], fontsize=6, va="center", color="grey")
        panel.axvline(1.0, color="black", lw=0.8)
        panel.set_xscale("log")
        panel.set_xlim(min([0.1, *ratios]) / 1.3, max([10.0, *ratios]) * 1.3)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(title, fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_xlabel("time / time of sanc", fontsize=8)
    for panel in panels:
        panel.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, seconds")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="by default all")
    parser.add_argument("--seconds", type=float, help="about how long each comparison may take; by default 10")
    parser.add_argument("--limit", type=float, help="seconds that a run may take; by default 20")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the picture")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (0.05 if options.quick else 10.0)
    limit = options.limit or (0.2 if options.quick else 20.0)
    if min(seconds, limit) <= 0:
        parser.error("--seconds and --limit must be positive")
    _, versions, missing = methods()
    for library in missing:
        print(f"{library} is not installed and left out", flush=True)
    work = (list(dict.fromkeys(options.problems)), options.quick, seconds, limit)
    rows = race(*work) if options.quick else in_process(1, race, *work)
    print(f"\n{table(rows)}")
    if options.out is not None:
        document = {"sanc": sanc.__version__, "machine": machine() | {"threads": 1}, "versions": versions}
        write_json(options.out / "peers.json", document | {"missing": missing, "limit": limit, "rows": rows})
        picture(rows, options.out / "peers.png")
        print(f"\nwritten to {options.out}: peers.json, peers.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
