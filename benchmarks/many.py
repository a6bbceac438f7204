"""Fit many rows of data at once, beside a loop of SciPy's `curve_fit` and Levenberg–Marquardt in batches.

    python -m benchmarks.many --out many-output            # four families, with and without bounds, about ten minutes
    python -m benchmarks.many --quick                      # 200 fits each, seconds
    python -m benchmarks.many --families peak --fits 10000
    python -m benchmarks.many --device cuda --fits 100000 --methods sanc

Families: exponential decay with offset (3 parameters), Gaussian peak on a line (5), Michaelis–Menten (2) and the sum of
two exponentials (4), each with 100 points and noise. "Rough" is the Gaussian peak from one start for all rows, and
"minima" are 1,000 starts of multimodal functions beside a loop of `sanc.minimize`.

Peers: `curve_fit` of SciPy in a loop over at most --loop rows, whose rate is extrapolated; "lm", a batched
Levenberg–Marquardt method in 60 lines of torch, which accepts each row by itself and ends when all rows have ended,
with bounds by projection; and optimistix's Levenberg–Marquardt method under `vmap` where it is installed (no bounds).
All of them get the same data and starts. Repetitions are interleaved, and the fastest of each counts.

A fit is *right* if its cost is at most 1e-6, relatively, above the lowest one that any method found for the row, or
that follows from the true parameters. *Wrong* counts rows that are called converged although an independent check in
float64 finds a gradient (cosine with a column of the Jacobian above 1e-4, of free parameters) or negative curvature.

--out writes many.json and table.md.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, vmap

import sanc
from benchmarks.reporting import command, machine, markdown_table, number, write_results
from sanc.many.algebra import eigenpairs

POINTS = 100
NOISE = 0.05
RIGHT = 1e-6
WRONG_COSINE = 1e-4
LM_ITERATIONS = 200


@dataclass
class Family:
    """Rows of data of one model: starts, bounds and the model for torch and for NumPy."""

    name: str
    model: Callable[..., Any]
    numpy_model: Callable[..., Any]
    x: Tensor
    true: Tensor
    start: Tensor
    lower: Tensor
    upper: Tensor
    y: Tensor

    def cost(self, p: Tensor) -> Tensor:
        """Return the cost of all rows."""
        curves = vmap(lambda q: self.model(self.x, *q))(p)
        return 0.5 * (curves - self.y).square().sum(1)


def decay(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * torch.exp(-b * x) + c


def peak(x: Any, a: Any, centre: Any, width: Any, c: Any, d: Any) -> Any:
    return a * torch.exp(-0.5 * ((x - centre) / width) ** 2) + c + d * x


def michaelis(x: Any, v: Any, k: Any) -> Any:
    return v * x / (k + x)


def two_decays(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return a * torch.exp(-b * x) + c * torch.exp(-d * x)


NUMPY = {
    "decay": lambda x, a, b, c: a * np.exp(-b * x) + c,
    "peak": lambda x, a, m, w, c, d: a * np.exp(-0.5 * ((x - m) / w) ** 2) + c + d * x,
    "michaelis": lambda x, v, k: v * x / (k + x),
    "two decays": lambda x, a, b, c, d: a * np.exp(-b * x) + c * np.exp(-d * x),
}
MODELS = {"decay": decay, "peak": peak, "michaelis": michaelis, "two decays": two_decays}
RANGES = {
    "decay": [(1, 5), (0.2, 2), (0, 1)],
    "peak": [(1, 5), (2, 8), (0.3, 1.5), (0, 1), (-0.1, 0.1)],
    "michaelis": [(1, 5), (0.3, 3)],
    "two decays": [(1, 3), (1.5, 4), (1, 3), (0.1, 0.5)],
}
ROUGH_START = (1.0, 5.0, 1.0, 0.0, 0.0)


def family(name: str, fits: int, device: str, *, rough: bool = False, seed: int = 0) -> Family:
    """Return rows of data; starts are within about 30 % of the truth, or one for all rows if `rough`."""
    generator = torch.Generator().manual_seed(seed)
    ranges = torch.tensor(RANGES[name], dtype=torch.float64)
    span = ranges[:, 1] - ranges[:, 0]
    true = ranges[:, 0] + span * torch.rand(fits, len(ranges), generator=generator, dtype=torch.float64)
    noise = torch.randn(true.shape, generator=generator, dtype=torch.float64)
    start = true + 0.15 * span * noise.clamp(-2, 2)
    if rough:
        start = torch.tensor(ROUGH_START, dtype=torch.float64).expand_as(true).clone()
    lower, upper = ranges[:, 0] - 0.25 * span, ranges[:, 1] + 0.25 * span
    lower = torch.where(ranges[:, 0] > 0, torch.maximum(lower, 0.05 * ranges[:, 0]), lower)
    x = torch.linspace(0.1, 10.0, POINTS, dtype=torch.float64)
    model = MODELS[name]
    y = vmap(lambda q: model(x, *q))(true)
    y = y + NOISE * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    start = start.clamp(lower, upper)
    tensors = (part.to(device) for part in (x, true, start, lower, upper, y))
    return Family("rough" if rough else name, model, NUMPY[name], *tensors)


# ---------------------------------------------------------------------- methods: parameters, converged, seconds


Fitted = tuple[Tensor, Tensor]


def fit_sanc(data: Family, bounded: bool) -> Fitted:
    bounds = (data.lower, data.upper) if bounded else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p, _, result = sanc.curve_fit(data.model, data.x, data.y, data.start, bounds=bounds, full_output=True)
    return p, result.success


def fit_scipy(data: Family, bounded: bool, rows: int) -> Fitted:
    x, y, start = (part.cpu().numpy() for part in (data.x, data.y, data.start))
    bounds = (data.lower.cpu().numpy(), data.upper.cpu().numpy()) if bounded else (-np.inf, np.inf)
    p, converged = np.full((rows, start.shape[1]), np.nan), np.zeros(rows, bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(rows):
            try:
                p[k], _ = scipy.optimize.curve_fit(data.numpy_model, x, y[k], start[k], bounds=bounds)
                converged[k] = True
            except RuntimeError:
                p[k] = start[k]
    return torch.from_numpy(p), torch.from_numpy(converged)


def fit_lm(data: Family, bounded: bool) -> Fitted:
    """Levenberg–Marquardt in batches: damping scaled by the diagonal, a decision for each row, no compaction."""
    p, y = data.start.clone(), data.y

    def residuals(q: Tensor, target: Tensor) -> Tensor:
        return data.model(data.x, *q) - target  # type: ignore[no-any-return]

    jacobian = vmap(jacfwd(residuals))
    r = vmap(residuals)(p, y)
    cost, damping = 0.5 * r.square().sum(1), torch.full_like(p[:, 0], 1e-3)
    ended = torch.zeros_like(damping, dtype=torch.bool)
    converged = ended
    for _ in range(LM_ITERATIONS):
        jac = jacobian(p, y)
        matrix, g = jac.mT @ jac, (jac.mT @ r[:, :, None])[:, :, 0]
        free = torch.ones_like(g, dtype=torch.bool)
        if bounded:
            free = ~(((p <= data.lower) & (g > 0)) | ((p >= data.upper) & (g < 0)))
        diagonal = torch.diagonal(matrix, dim1=1, dim2=2).clamp(min=1e-12)
        damped = matrix + torch.diag_embed(damping[:, None] * diagonal)
        damped = torch.where(free[:, :, None] & free[:, None, :], damped, torch.diag_embed((~free).double()))
        step, _ = torch.linalg.solve_ex(damped, -(g * free)[:, :, None])
        trial = p + step[:, :, 0]
        trial = trial.clamp(data.lower, data.upper) if bounded else trial
        trial_r = vmap(residuals)(trial, y)
        trial_cost = 0.5 * trial_r.square().sum(1)
        better = (trial_cost < cost) & ~ended
        small = (step[:, :, 0].abs() <= 1e-8 * (1e-8 + p.abs())).all(1)
        flat = (better & (cost - trial_cost <= 1e-8 * cost)) | (-(g * step[:, :, 0]).sum(1) <= 1e-12 * cost)
        p = torch.where(better[:, None], trial, p)
        r = torch.where(better[:, None], trial_r, r)
        cost = torch.where(better, trial_cost, cost)
        damping = torch.where(better, damping / 3.0, damping * 4.0).clamp(1e-12, 1e12)
        converged = converged | small | flat
        ended = converged | (damping >= 1e12)
        if bool(ended.all()):
            break
    return p, converged


def fit_optimistix(data: Family, bounded: bool) -> Fitted:
    """Optimistix's Levenberg–Marquardt method under `vmap`."""
    import jax
    import jax.numpy as jnp
    import optimistix

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")  # the data are on the host
    models = {
        "decay": lambda x, a, b, c: a * jnp.exp(-b * x) + c,
        "peak": lambda x, a, m, w, c, d: a * jnp.exp(-0.5 * ((x - m) / w) ** 2) + c + d * x,
        "michaelis": lambda x, v, k: v * x / (k + x),
        "two decays": lambda x, a, b, c, d: a * jnp.exp(-b * x) + c * jnp.exp(-d * x),
    }
    model, x = models["peak" if data.name == "rough" else data.name], jnp.asarray(data.x.numpy())
    solver = optimistix.LevenbergMarquardt(rtol=1e-8, atol=1e-8)

    def fit(start: Any, y: Any) -> Any:
        found = optimistix.least_squares(
            lambda p, target: model(x, *p) - target, solver, start, args=y, max_steps=LM_ITERATIONS, throw=False
        )
        return found.value, found.result == optimistix.RESULTS.successful

    compiled = _COMPILED.setdefault((data.name, len(data.y)), jax.jit(jax.vmap(fit)))
    p, converged = compiled(jnp.asarray(data.start.numpy()), jnp.asarray(data.y.numpy()))
    return torch.from_numpy(np.array(p)), torch.from_numpy(np.array(converged))


_COMPILED: dict[Any, Any] = {}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds_of(fit: Callable[[], Fitted], device: str, clock: Callable[[], float]) -> tuple[float, Fitted]:
    """Return the time of one call, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    fitted = fit()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start, fitted


# ---------------------------------------------------------------------- quality


def wrong_endings(data: Family, p: Tensor, converged: Tensor, bounded: bool) -> int:
    """Count rows that are called converged and are not at a minimum, by dense derivatives in float64."""
    rows = len(p)
    p, y = p.to(data.y), data.y[:rows]

    def cost(q: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (data.model(data.x, *q) - target).square().sum()

    jac = vmap(lambda q: jacfwd(lambda z: data.model(data.x, *z))(q))(p)
    r = vmap(lambda q: data.model(data.x, *q))(p) - y
    norms = torch.linalg.vector_norm(jac, dim=1).clamp(min=1e-300)
    g = (jac.mT @ r[:, :, None])[:, :, 0]
    cosine = g / norms / torch.linalg.vector_norm(r, dim=1)[:, None]
    free = torch.ones_like(g, dtype=torch.bool)
    if bounded:
        low, high = p <= data.lower + 1e-9, p >= data.upper - 1e-9
        free = ~((low & (g > 0)) | (high & (g < 0)))
    stationary = (cosine.abs() * free).amax(1) <= WRONG_COSINE
    scaled = vmap(hessian(cost))(p, y) / norms[:, :, None] / norms[:, None, :]
    scaled = torch.where(free[:, :, None] & free[:, None, :], scaled, torch.diag_embed((~free).double()))
    finite = scaled.isfinite().flatten(1).all(1)
    curved = eigenpairs(torch.where(finite[:, None, None], scaled, 0.0))[0][:, 0] >= -1e-4
    return int((converged.to(p.device) & ~(stationary & curved & finite)).sum())


def measure(
    data: Family,
    bounded: bool,
    methods: Sequence[str],
    loop: int,
    device: str,
    repeats: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Fit the rows with all methods, and return a row of results for each."""
    fits = len(data.y)
    looped = min(fits, loop)
    calls: dict[str, Callable[[], Fitted]] = {
        "sanc": lambda: fit_sanc(data, bounded),
        "lm": lambda: fit_lm(data, bounded),
        "curve_fit": lambda: fit_scipy(data, bounded, looped),
        "optimistix": lambda: fit_optimistix(data, bounded),
    }
    chosen = [name for name in methods if not (bounded and name == "optimistix")]
    times: dict[str, list[float]] = {name: [] for name in chosen}
    fitted: dict[str, Fitted] = {}
    for repeat in range(repeats + 1):  # the first one, with compilations and allocations, does not count
        for name in chosen:
            seconds, fitted[name] = seconds_of(calls[name], device, clock)
            if repeat:
                times[name].append(seconds)
    best = data.cost(data.true)
    if bounded:
        best = data.cost(data.true.clamp(data.lower, data.upper))
    for p, _ in fitted.values():
        rows = len(p)
        cost = 0.5 * (vmap(lambda q: data.model(data.x, *q))(p.to(data.y)) - data.y[:rows]).square().sum(1)
        inside = ((p.to(data.y) >= data.lower) & (p.to(data.y) <= data.upper)).all(1) if bounded else cost.isfinite()
        best[:rows] = torch.minimum(best[:rows], torch.where(cost.isfinite() & inside, cost, torch.inf))
    results = []
    for name in chosen:
        p, converged = fitted[name]
        rows = len(p)
        cost = 0.5 * (vmap(lambda q: data.model(data.x, *q))(p.to(data.y)) - data.y[:rows]).square().sum(1)
        right = cost <= best[:rows] * (1.0 + RIGHT)
        results.append(
            {
                "family": data.name + (", bounds" if bounded else ""),
                "fits": fits,
                "method": name,
                "rate": rows / min(times[name]),
                "right": float(right.double().mean()),
                "converged": float(converged.double().mean()),
                "wrong": wrong_endings(data, p, converged, bounded) / rows,
            }
        )
        line = results[-1]
        print(
            f"{line['family']:22s} {fits:7d} {name:10s} {line['rate']:10.0f}/s  right {line['right']:.4f}  "
            f"converged {line['converged']:.4f}  wrong {line['wrong']:.5f}",
            flush=True,
        )
    return results


# ---------------------------------------------------------------------- many starts


def rastrigin(x: Tensor) -> Tensor:
    return 10.0 * len(x) + (x * x - 10.0 * torch.cos(2.0 * torch.pi * x)).sum()


def ackley(x: Tensor) -> Tensor:
    first = -20.0 * torch.exp(-0.2 * ((x * x).mean() + 1e-12).sqrt())
    return first - torch.exp(torch.cos(2.0 * torch.pi * x).mean()) + 20.0 + torch.e


def himmelblau(x: Tensor) -> Tensor:
    return (x[0] ** 2 + x[1] - 11.0) ** 2 + (x[0] + x[1] ** 2 - 7.0) ** 2


def styblinski(x: Tensor) -> Tensor:
    return 0.5 * (x**4 - 16.0 * x**2 + 5.0 * x).sum()


MULTIMODAL = {
    "rastrigin": (rastrigin, 4),
    "ackley": (ackley, 4),
    "himmelblau": (himmelblau, 2),
    "styblinski": (styblinski, 5),
}


def measure_starts(starts: int, loop: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Compare many starts of multimodal functions with a loop of `minimize`."""
    results = []
    for name, (fun, dim) in MULTIMODAL.items():
        bounds = [(-4.0, 4.0)] * dim
        points = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(starts, dtype=torch.float64) * 8.0 - 4.0
        sanc.minimize_many(fun, starts=points[:10], bounds=bounds)
        start = clock()
        many = sanc.minimize_many(fun, starts=points, bounds=bounds)
        seconds = clock() - start
        rows = min(loop, starts)
        start = clock()
        singles = [sanc.minimize(fun, point, bounds=bounds) for point in points[:rows]]
        per_row = (clock() - start) / rows
        same = np.mean(
            [abs(float(many.fun[k]) - one.fun) <= 1e-6 * (1.0 + abs(one.fun)) for k, one in enumerate(singles)]
        )
        results.append(
            {
                "function": name,
                "starts": starts,
                "seconds": seconds,
                "ratio": per_row * starts / seconds,
                "success": float(many.success.double().mean()),
                "same minimum": float(same),
                "minima": len(many.minima()),
                "lowest": many.best.fun,
            }
        )
        line = results[-1]
        print(f"{name:12s} {starts} starts: {line['ratio']:.1f} times as fast as a loop, success {line['success']:.4f}")
    return results


def fastest(fits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of several runs with the highest rates, for each family, number of fits and method."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in sorted(fits, key=lambda line: float(line["rate"])):
        found[line["family"], line["fits"], line["method"]] = line
    return list(found.values())


def tables(fits: Sequence[dict[str, Any]], starts: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    head = ("family", "fits", "method", "fits a second", "right", "converged", "wrong")
    rows = [
        (
            r["family"],
            r["fits"],
            r["method"],
            f"{r['rate']:.0f}",
            *(f"{100 * r[k]:.2f} %" for k in ("right", "converged", "wrong")),
        )
        for r in fits
    ]
    text = markdown_table(head, rows, left=3)
    if starts:
        head = ("function", "starts", "seconds", "loop of minimize", "success", "same minimum", "minima")
        rows = [
            (
                r["function"],
                r["starts"],
                number(r["seconds"], ".2f"),
                f"{r['ratio']:.1f} ×",
                f"{100 * r['success']:.1f} %",
                f"{100 * r['same minimum']:.1f} %",
                r["minima"],
            )
            for r in starts
        ]
        text += "\n\n" + markdown_table(head, rows)
    return text


def in_words(fits: Sequence[dict[str, Any]]) -> str:
    """Return the rates of sanc relative to its peers, and how many fits are right, from results for both sizes."""

    def factors(peer: str, size: int, bounded: bool | None = None) -> list[float]:
        rates = {(line["family"], line["method"]): line["rate"] for line in fits if line["fits"] == size}
        families = [family for family, method in rates if method == peer]
        return [rates[family, "sanc"] / rates[family, peer] for family in families
                if bounded in (None, family.endswith("bounds"))]  # fmt: skip

    def span(peer: str, size: int, bounded: bool) -> str:
        found = factors(peer, size, bounded)
        return f"{min(found):.1f} to {max(found):.1f}"

    def slower(size: int) -> str:
        found = factors("lm", size)
        return f"{sum(factor < 1 for factor in found)} of {len(found)} families at {size:,} fits"

    lm = [factor for size in (1000, 10_000) for factor in factors("lm", size)]
    ours, theirs = ([line for line in fits if (line["method"] == "sanc") is kind] for kind in (True, False))
    right, wrong = ([f"{100 * pick(line[key] for line in some):.2f} %" for some in (ours, theirs)]
                    for key, pick in (("right", min), ("wrong", max)))  # fmt: skip
    loop = {(size, bounded): span("curve_fit", size, bounded) for size in (1000, 10_000) for bounded in (False, True)}
    return (
        f"On one core, `sanc.curve_fit` makes 10,000 fits {loop[10_000, False]} times as fast as a loop of SciPy's "
        f"`curve_fit`, and with bounds {loop[10_000, True]} times. At 1,000 fits these factors are {loop[1000, False]} "
        f"and {loop[1000, True]}. A batched Levenberg–Marquardt method is faster than `sanc.curve_fit` in "
        f"{slower(1000)} and in {slower(10_000)}, by at most {1 / min(lm):.1f} times; elsewhere `sanc.curve_fit` is up "
        f"to {max(lm):.0f} times as fast. In every family at least {right[0]} of its fits are right, of the peers' "
        f"fits {right[1]}; at most {wrong[0]} of its rows are called converged that are not at a minimum, of the "
        f"peers' rows {wrong[1]}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="200 fits and 100 starts each, seconds", out="many.json and table.md")
    parser.add_argument("--families", nargs="+", choices=[*MODELS, "rough", "minima"], help="by default all")
    parser.add_argument(
        "--methods", nargs="+", choices=("sanc", "lm", "curve_fit", "optimistix"), help="by default those installed"
    )
    parser.add_argument("--fits", nargs="+", type=int, default=[1000, 10_000], help="rows of data")
    parser.add_argument("--loop", type=int, default=300, help="most rows for methods without batches")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each method, after one that is not")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch on a CPU")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for one thread beside other programs"
    )
    options = parser.parse_args(arguments)
    if options.clock == "cpu" and (options.threads != 1 or options.device != "cpu"):
        parser.error("--clock cpu adds up threads and leaves out a GPU: pass --threads 1 --device cpu")
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    sizes, loop, starts = options.fits, options.loop, 1000
    if options.quick:
        sizes, loop, starts = [200], 20, 100
    methods = options.methods
    if methods is None:
        methods = ["sanc", "lm", "curve_fit"]
        try:
            import optimistix  # noqa: F401

            methods.append("optimistix")
        except ImportError:
            print("optimistix is not installed, and is left out", flush=True)
    names = options.families or [*MODELS, "rough", "minima"]
    results: list[dict[str, Any]] = []
    for fits in sizes:
        for name in names:
            if name == "minima":
                continue
            data = family("peak" if name == "rough" else name, fits, options.device, rough=name == "rough")
            for bounded in (False,) if name == "rough" else (False, True):
                results += measure(data, bounded, methods, loop, options.device, options.repeats, clock)
    found = measure_starts(starts, min(loop, 100), clock) if "minima" in names and options.device == "cpu" else []
    text = tables(results, found)
    print(f"\n{text}\n", flush=True)
    write_results(
        options.out,
        {
            "table.md": text,
            "many.json": {
                "machine": machine(options.device) | {"clock": options.clock},
                "fits": results,
                "starts": found,
            },
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
