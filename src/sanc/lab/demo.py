"""Train a network on scikit-learn's digits with the family, SGD and Adam, and draw what happened.

Run it with ``python -m sanc.lab.demo``. Every method starts from the same weights, sees the same gradient samples and
may spend the same number of component evaluations (values, gradients and Hessian products of single images). The
seconds count drawing the samples and stepping; measuring the loss and the display are left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sanc import CR, NCD, SANC, SCR, Batch, Branch, ThreeSamples
from sanc.lab.style import HAIR, QUIET, STYLE, spread

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
    from rich.table import Table
    from rich.text import Text
    from sklearn.datasets import load_digits
except ImportError as problem:
    _message = f"The demonstration needs the module {problem.name!r}: run  pip install 'sanc[lab]'"
    if __name__ == "__main__":
        raise SystemExit(_message) from None
    raise ImportError(_message, name=problem.name) from problem

__all__ = ["METHODS", "Digits", "Options", "Run", "compare", "draw", "load", "main", "table", "train"]

WEIGHT_DECAY = 1e-4
WIDTHS = (64, 48, 32, 10)
MARKS = 160
"""How often the loss on the whole training set is measured during a run."""

BRANCHES: dict[Branch, tuple[str, str]] = {
    Branch.VERY_SUCCESSFUL: ("very successful", "#1B4F8A"),
    Branch.SUCCESSFUL: ("successful", "#7FB2DD"),
    Branch.UNTESTED: ("untested", "#B9A7CF"),
    Branch.CURVATURE: ("curvature", "#C8401B"),
    Branch.GRADIENT: ("gradient", "#F2B84B"),
    Branch.STAYED: ("stayed", "#D3D3D0"),
}
"""Branches in the order of the table and the picture, with their colours."""

SHORT: dict[Branch, str] = {
    Branch.VERY_SUCCESSFUL: "very",
    Branch.SUCCESSFUL: "succ.",
    Branch.UNTESTED: "untested",
    Branch.CURVATURE: "curv.",
    Branch.GRADIENT: "grad.",
    Branch.STAYED: "stayed",
}
"""Their names in the head of the table."""


# ---------------------------------------------------------------------------------------------- data and model


@dataclass(frozen=True)
class Options:
    """What a person may choose.

    Attributes
    ----------
    seed : int
        Seed of the split, the first weights, the samples and the optimisers.
    budget : int
        Component evaluations each method may spend.
    batch : int
        Images in each sample.
    """

    seed: int = 0
    budget: int = 300_000
    batch: int = 128


@dataclass(frozen=True)
class Digits:
    """The digits, split into four fifths for training and one for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(seed: int) -> Digits:
    """Return the digits with pixels in [0, 1], split at random."""
    bunch = load_digits()
    x = torch.tensor(bunch.data / 16.0, dtype=torch.float32)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.from_numpy(np.random.default_rng((seed, 0)).permutation(len(x)))
    test, rest = order[: len(x) // 5], order[len(x) // 5 :]
    return Digits(x[rest], y[rest], x[test], y[test])


def network(seed: int) -> nn.Sequential:
    """Make a tanh network with Xavier weights that are a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(WIDTHS):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def objective(model: nn.Module, digits: Digits) -> float:
    """Return the function that is minimised, on the whole training set: cross entropy and the L2 penalty."""
    with torch.no_grad():
        penalty = sum(float(p.square().sum()) for p in model.parameters())
        loss = float(nn.functional.cross_entropy(model(digits.train_x), digits.train_y))
    return loss + 0.5 * WEIGHT_DECAY * penalty


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of the held-out images that are read correctly."""
    with torch.no_grad():
        return float((model(digits.test_x).argmax(1) == digits.test_y).double().mean())


# ---------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Method:
    """A method with its settings.

    Attributes
    ----------
    name : str
        What it is called in the table and the picture.
    settings : str
        Its settings in words.
    colour : str
        Colour of its line.
    build : callable
        Makes the optimiser of a model; the integer is the seed.
    second_order : bool
        Whether it takes samples for the Hessian too, or one gradient.
    tuned : bool
        Whether it has constants that were tuned, and judges its steps on a sample of their own.
    """

    name: str
    settings: str
    colour: str
    build: Callable[[nn.Module, int], Any]
    second_order: bool = True
    tuned: bool = True


def _family(kind: type[SANC | SCR | CR | NCD], **options: Any) -> Callable[[nn.Module, int], Any]:
    same: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "hvp": "double-backward"}  # so that every run is the same
    return lambda model, seed: kind(model.parameters(), seed=seed, **same, **options)


def _torch(kind: type[torch.optim.SGD | torch.optim.Adam], lr: float) -> Callable[[nn.Module, int], Any]:
    return lambda model, seed: kind(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)


_NETWORKS: dict[str, Any] = {"preset": "paper", "eta1": 0.1, "eta2": 0.3}

# The first has no options at all, SCR the paper's η for networks. The other numbers are the best of small grids at the
# default seed and budget:
# L1 = L2 of 1, 3, 10, 100; CR's σ of 1, 2, 5, 10, 20; SGD's step of 0.1, 0.3, 1, 3; Adam's of 0.001, 0.003, 0.01, 0.03.
METHODS: tuple[Method, ...] = (
    Method("SANC", "nothing to tune", "#C8401B", _family(SANC), tuned=False),
    Method("SANC, paper", "η 0.1, 0.3; L1 = L2 = 3", "#E39A3B", _family(SANC, **_NETWORKS, L1=3.0, L2=3.0)),
    Method("SCR", "η 0.1, 0.3", "#0B63A5", _family(SCR, **_NETWORKS)),
    Method("CR", "σ = 2", "#4FB0E3", _family(CR, preset="paper", sigma0=2.0)),
    Method("NCD", "L1 = L2 = 3", "#0A9272", _family(NCD, preset="paper", L1=3.0, L2=3.0)),
    Method("SGD", "step 1", "#8A8A86", _torch(torch.optim.SGD, 1.0), second_order=False),
    Method("Adam", "step 0.003", "#B5679A", _torch(torch.optim.Adam, 0.003), second_order=False),
)
"""The methods, in the order in which they run."""


# ---------------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """What one method did.

    Attributes
    ----------
    method : Method
        Who.
    evaluations, seconds, losses : list
        The curve, measured at marks, from the start on.
    branches : list of (int, Branch)
        For each step of a second-order method, the evaluations after it and its branch.
    sigma : float
        σ of the last step; NaN for a method without σ.
    accuracy : float
        On the held-out images, at the end.
    """

    method: Method
    evaluations: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    branches: list[tuple[int, Branch]] = field(default_factory=list)
    sigma: float = math.nan
    accuracy: float = math.nan

    @property
    def counts(self) -> Counter[Branch]:
        """How many steps took each branch."""
        return Counter(branch for _, branch in self.branches)

    def measure(self, evaluations: int, seconds: float, loss: float) -> None:
        """Add a point to the curve."""
        self.evaluations.append(evaluations)
        self.seconds.append(seconds)
        self.losses.append(loss)


Watcher = Callable[[Run], None]
Step = Callable[[], tuple[int, float, Branch | None]]
"""Makes a step; returns the evaluations so far, σ and the branch."""


def _second_order(optimiser: Any, samples: ThreeSamples, loss: Callable[..., Tensor], *, tuned: bool) -> Step:
    def step() -> tuple[int, float, Branch | None]:
        gradient, hessian, value = samples.draw()
        objective = Batch(loss, *value) if tuned else None  # without constants, the gradient sample judges
        optimiser.step(Batch(loss, *gradient), hessian=Batch(loss, *hessian), objective=objective)
        record = optimiser.record
        return record.calls.total, record.sigma, record.branch

    return step


def _first_order(optimiser: Any, samples: ThreeSamples, loss: Callable[..., Tensor]) -> Step:
    def step() -> tuple[int, float, Branch | None]:
        gradient, _, _ = samples.draw()
        optimiser.zero_grad()
        torch.autograd.backward(loss(*gradient))
        optimiser.step()
        return samples.draws * samples.sizes[0], math.nan, None

    return step


def train(method: Method, digits: Digits, options: Options, watch: Watcher | None = None) -> Run:
    """Train with one method until its budget is spent; `watch` is called at every mark."""
    model = network(options.seed)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    sizes = (options.batch,) * 3 if method.second_order else (options.batch, 1, 1)
    samples = ThreeSamples(TensorDataset(digits.train_x, digits.train_y), sizes, seed=options.seed)
    optimiser = method.build(model, options.seed)
    if method.second_order:
        step = _second_order(optimiser, samples, loss, tuned=method.tuned)
    else:
        step = _first_order(optimiser, samples, loss)
    run = Run(method)
    run.measure(0, 0.0, objective(model, digits))
    spent, seconds, mark = 0, 0.0, 1
    while spent < options.budget:
        clock = time.perf_counter()
        spent, run.sigma, branch = step()
        seconds += time.perf_counter() - clock
        if branch is not None:
            run.branches.append((spent, branch))
        if spent * MARKS >= mark * options.budget:
            mark = spent * MARKS // options.budget + 1
            run.measure(spent, seconds, objective(model, digits))
            if watch is not None:
                watch(run)
    run.accuracy = accuracy(model, digits)
    return run


def compare(options: Options, console: Console, methods: Sequence[Method] = METHODS) -> list[Run]:
    """Train with every method, showing how it goes."""
    digits = load(options.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small to share, and threads that wait make the seconds mean little
    try:
        return _compare(digits, options, console, methods)
    finally:
        torch.set_num_threads(threads)


def _compare(digits: Digits, options: Options, console: Console, methods: Sequence[Method]) -> list[Run]:
    for method in methods:  # the first derivative of a process is slow: keep that out of the seconds
        train(method, digits, Options(options.seed, 1, options.batch))
    with _display(console, options, methods) as watch:
        return [train(method, digits, options, watch) for method in methods]


# ---------------------------------------------------------------------------------------------- display


def _mix(run: Run, width: int = 24) -> Text:
    """Draw the shares of the branches as a bar of coloured blocks."""
    text = Text()
    total, drawn, passed = len(run.branches), 0, 0
    if total:
        for branch, (_, colour) in BRANCHES.items():
            passed += run.counts[branch]
            text.append("━" * (round(width * passed / total) - drawn), style=colour)
            drawn = round(width * passed / total)
    return text


def _sigma(run: Run) -> str:
    return "" if math.isnan(run.sigma) else f"σ {run.sigma:.0e}"


class _MixColumn(TextColumn):
    """The branch mix of a task."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Any) -> Text:
        run = task.fields["run"]
        return Text("") if run is None else _mix(run)


@contextmanager
def _display(console: Console, options: Options, methods: Sequence[Method]) -> Iterator[Watcher]:
    """Show bars on a terminal, and plain lines elsewhere."""
    if not console.is_terminal:

        def say(run: Run) -> None:
            quarter, before = (4 * spent // options.budget for spent in (run.evaluations[-1], run.evaluations[-2]))
            if quarter > before:
                counts = ", ".join(f"{BRANCHES[b][0]} {run.counts[b]}" for b in BRANCHES if run.counts[b])
                parts = (f"{min(quarter, 4) * 25:3d} %", f"loss {run.losses[-1]:.4f}", _sigma(run), counts)
                console.print(f"{run.method.name:<11}" + "  ".join(part for part in parts if part), soft_wrap=True)

        yield say
        return

    key = Text("  ").join(Text(f"━━ {name}", style=colour) for name, colour in BRANCHES.values())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20, complete_style="grey62", finished_style="grey62"),
        TaskProgressColumn(),
        TextColumn("{task.fields[loss]}", justify="right"),
        TextColumn("{task.fields[sigma]}", style="dim"),
        _MixColumn(),
    )
    # the bars are drawn at the marks, by this thread, so that drawing them costs no method any seconds
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        tasks: dict[str, TaskID] = {
            method.name: progress.add_task(
                f"[{method.colour}]{method.name}", total=options.budget, loss="", sigma="", run=None
            )
            for method in methods
        }

        def watch(run: Run) -> None:
            progress.update(
                tasks[run.method.name],
                completed=min(run.evaluations[-1], options.budget),
                loss=f"loss {run.losses[-1]:.4f}",
                sigma=_sigma(run),
                run=run,
            )
            progress.refresh()

        yield watch
    console.print(key)


def table(runs: Sequence[Run], options: Options) -> Table:
    """Return the results as a table."""
    caption = (
        f"Loss: cross entropy + {WEIGHT_DECAY:g}/2·‖w‖² on all training images. Test: accuracy on the held-out fifth. "
        f"Evaluations: values, gradients and products of single images; batch {options.batch}, seed {options.seed}. "
        "SANC is the default with nothing set, SCR has the paper's settings; the numbers of the others were the best "
        "of four or five at seed 0. "
        "Right: steps by branch, from very successful to stayed."
    )
    result = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", collapse_padding=True, pad_edge=False)
    result.add_column("method", min_width=10)
    for name in ("loss", "test", "evaluations", "seconds"):
        result.add_column(name, justify="right", no_wrap=True)
    used = [branch for branch in BRANCHES if any(run.counts[branch] for run in runs)]
    for branch in used:
        result.add_column(SHORT[branch], justify="right", no_wrap=True)
    best = min(run.losses[-1] for run in runs)
    for run in runs:
        loss = f"{run.losses[-1]:.4f}"
        cells = [
            Text.assemble((run.method.name, run.method.colour), "\n", (run.method.settings, "dim")),
            Text(loss, style="bold") if run.losses[-1] == best else loss,
            f"{100 * run.accuracy:.1f} %",
            f"{run.evaluations[-1]:,}",
            f"{run.seconds[-1]:.1f}",
            *(str(run.counts[branch] or "·") for branch in used),
        ]
        result.add_row(*cells)
    return result


# ---------------------------------------------------------------------------------------------- picture


def _head(axes: Axes, title: str, subtitle: str) -> None:
    axes.annotate(title, (0, 1), (0, 18), xycoords="axes fraction", textcoords="offset points", fontsize=10,
                  fontweight="bold", va="bottom")  # fmt: skip
    axes.annotate(subtitle, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", color=QUIET,
                  va="bottom")  # fmt: skip


def _thousands(value: float, _: object = None) -> str:
    return f"{value / 1000:g}k" if value else "0"


def _limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Bounds of the loss axis; a run that blew up may leave the picture at the top."""
    finite = [loss for run in runs for loss in run.losses if math.isfinite(loss) and loss > 0]
    top = max(run.losses[0] for run in runs)
    return 0.8 * min(finite), 1.35 * top


def _curves(axes: Axes, runs: Sequence[Run], over: str, end: float) -> None:
    """Draw the losses against the attribute `over`, each line with its name at the right edge."""
    low, high = _limits(runs)
    axes.set(yscale="log", ylim=(low, high), xlim=(0, end))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.grid(axis="y", color=HAIR, linewidth=0.6)
    axes.set_axisbelow(True)
    heights = [math.log(min(max(run.losses[-1], low), high) / low) / math.log(high / low) for run in runs]
    places = spread(heights, 0.062, 0.0, 1.0)
    for rank, (run, height, place) in enumerate(zip(runs, heights, places, strict=True)):
        x, lead, colour = getattr(run, over), rank == 0, run.method.colour
        axes.plot(x, run.losses, color=colour, linewidth=2.4 if lead else 1.3, zorder=10 - rank,
                  solid_capstyle="round", solid_joinstyle="round")  # fmt: skip
        final = (x[-1], min(run.losses[-1], high))
        if x[-1] < 0.97 * end:
            axes.plot([x[-1], end], [final[1]] * 2, color=colour, linewidth=0.6, alpha=0.55, dashes=(1, 2.5), zorder=2)
        axes.plot(*final, "o", color=colour, markersize=4.6 if lead else 3.4, markeredgecolor="white",
                  markeredgewidth=0.7, clip_on=False, zorder=20 - rank)  # fmt: skip
        axes.annotate("", (1.008, height), (1.05, place), xycoords="axes fraction", textcoords="axes fraction",
                      arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.7,
                                  "shrinkA": 0, "shrinkB": 2})  # fmt: skip
        axes.annotate(run.method.name, (1.062, place), xycoords="axes fraction", color=colour, va="center",
                      fontweight="bold" if lead else "normal", annotation_clip=False)  # fmt: skip


def mix(run: Run, budget: int, points: int = 240) -> tuple[NDArray[np.float64], dict[Branch, NDArray[np.float64]]]:
    """Return the shares of the branches over the evaluations, smoothed by a Gaussian of 2.5 % of the budget."""
    at = np.linspace(0.0, budget, points)
    spent = np.array([count for count, _ in run.branches], dtype=np.float64)
    logs = -0.5 * ((at[:, None] - spent[None, :]) / (0.025 * budget)) ** 2
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    kinds = [branch for _, branch in run.branches]
    return at, {branch: weights @ np.array([kind is branch for kind in kinds], dtype=np.float64) for branch in BRANCHES}


def _stack(axes: Axes, run: Run, budget: int) -> None:
    """Draw the branch mix of a run, each band with its name at the right edge."""
    at, shares = mix(run, budget)
    present = [branch for branch in reversed(BRANCHES) if run.counts[branch]]
    axes.set(xlim=(0, budget), ylim=(0, 1))
    axes.stackplot(at, *(shares[branch] for branch in present), colors=[BRANCHES[branch][1] for branch in present],
                   edgecolor="white", linewidth=0.5)  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    ends = np.cumsum([shares[branch][-1] for branch in present])
    middles = [float(end - shares[branch][-1] / 2) for end, branch in zip(ends, present, strict=True)]
    places = spread(middles, 0.125, 0.03, 0.97)
    for branch, place in zip(present, places, strict=True):
        name, colour = BRANCHES[branch]
        share = 100 * run.counts[branch] / len(run.branches)
        percent = f"{share:.0f} %" if share >= 1 else "<1 %"
        write = partial(axes.annotate, xycoords="axes fraction", va="center", annotation_clip=False)
        write("■", (1.03, place), color=colour)
        write(percent, (1.18, place), color=QUIET, ha="right")
        write(name, (1.2, place))


def draw(runs: Sequence[Run], options: Options) -> Figure:
    """Return the picture: the losses over evaluations and seconds, and the branch mixes of SANC and SCR."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.8, 7.6), facecolor="white")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 2, height_ratios=(1.8, 1), left=0.062, right=0.85, top=0.815, bottom=0.07,
                                   wspace=0.5, hspace=0.48)  # fmt: skip
        figure.text(0.062, 0.957, "Learning to read digits on a budget", fontsize=16, fontweight="bold")
        count = sum(a * b + b for a, b in pairwise(WIDTHS))
        story = (
            f"A tanh network of {count:,} weights on 1,438 images of 8×8 pixels. Same first weights for all; "
            f"{options.budget:,} evaluations each, batches of {options.batch}."
        )
        figure.text(0.062, 0.925, story, color=QUIET, fontsize=9)
        left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        _curves(left, runs, "evaluations", float(options.budget))
        left.xaxis.set_major_formatter(FuncFormatter(_thousands))
        left.set_xlabel("evaluations of values, gradients and Hessian products")
        _head(left, "Training loss over work", "whole training set, logarithmic")
        _curves(right, runs, "seconds", 1.02 * max(run.seconds[-1] for run in runs))
        right.set_xlabel("seconds")
        _head(right, "Training loss over time", "the same runs, by the clock")
        stacked = [run for run in runs if run.method.name in ("SANC", "SCR")]
        for column, run in enumerate(stacked):
            axes = figure.add_subplot(grid[1, column])
            _stack(axes, run, options.budget)
            axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
            axes.set_xlabel("evaluations")
            axes.tick_params(axis="y", labelleft=column == 0)
            _head(axes, f"What {run.method.name} did", "share of steps by branch, smoothed; totals at the right")
    return figure


def save(figure: Figure, out: Path) -> list[Path]:
    """Write the picture as PNG and SVG and return where."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "demo.png", out / "demo.svg"]
    with mpl.rc_context(STYLE):
        figure.savefig(paths[0], dpi=300)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


# ---------------------------------------------------------------------------------------------- command line


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer ≥ 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not an integer ≥ 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(prog="python -m sanc.lab.demo", description=(__doc__ or "").split("\n")[0])
    default = Options()
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the picture (%(default)s)")
    parser.add_argument("--seed", type=_seed, default=default.seed, help="seed of everything random (%(default)s)")
    parser.add_argument("--budget", type=_count, default=default.budget, help="evaluations per method (%(default)s)")
    parser.add_argument("--batch", type=_count, default=default.batch, help="images in a sample (%(default)s)")
    given = parser.parse_args(argv)
    options = Options(given.seed, given.budget, given.batch)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    runs = compare(options, console)
    console.print(table(runs, options))
    for path in save(draw(runs, options), given.out):
        console.print(f"Picture: {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
