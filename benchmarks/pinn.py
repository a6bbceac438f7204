"""Compare `sanc.least_squares` with LBFGS, SOAP and AdamW → LBFGS on physics-informed networks, at equal seconds.

    python -m benchmarks.pinn --out pinn-output            # three equations, four methods, 60 s each
    python -m benchmarks.pinn --device cuda --out pinn-gpu
    python -m benchmarks.pinn --quick                      # one small network, seconds

Equations, all in float64 with tanh networks:

- poisson: −Δu = 2π² sin πx sin πy on the unit square, u = 0 on its boundary; u = sin πx sin πy;
- helmholtz: Δu + k²u = q on the unit square, u = 0 on its boundary, k = 1; u = sin πx sin 4πy determines q;
- burgers: u_t + u u_x = ν u_xx for x in [−1, 1], t in [0, 1], u = −sin πx at t = 0 and u = 0 at x = ±1, ν = 0.1/π; the
  solution is that of Cole and Hopf, an integral.

All methods minimise the same mean squares of the same residuals at the same points, from the same parameters. Points
are drawn once. LBFGS is torch's, with strong Wolfe conditions, on all points. SOAP (of pytorch_optimizer) and AdamW
have the rates 1e-3, 3e-3 and 1e-2, of which the best counts, each with the whole time; "adamw-lbfgs" is AdamW for a
fifth of the time, then LBFGS. The *error* is ‖u − u*‖/‖u*‖ on a grid, where u* is the solution. Seconds on a CPU are
those of the process, on one thread, so that other work on the machine does not count; on a GPU they are those of the
clock. Evaluations of the error are not timed.

--out writes pinn.json and table.md.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, hessian

import sanc
from benchmarks.reporting import command, machine, markdown_table, number, write_results

METHODS = ("sanc", "lbfgs", "soap", "adamw-lbfgs")
RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates of SOAP and AdamW; the best one counts."""
FIRST_PART = 0.2
"""Part of the time in which AdamW → LBFGS uses AdamW."""
VISCOSITY = 0.1 / math.pi


@dataclass(frozen=True)
class Equation:
    """A network, its residuals, and the solution on a grid."""

    name: str
    module: nn.Module
    residuals: sanc.NetworkResiduals
    grid: Tensor
    solution: Tensor

    def error(self, parameters: dict[str, Tensor]) -> float:
        """Return the relative error in L²."""
        with torch.no_grad():
            u = torch.func.functional_call(self.module, parameters, (self.grid,)).reshape(-1)
        return float((u - self.solution).norm() / self.solution.norm())


def network(widths: Sequence[int], seed: int, device: str) -> nn.Module:
    """Return a tanh network of two inputs and one output, with Xavier's initial weights."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in zip((2, *widths), (*widths, 1), strict=True):
        layer = nn.Linear(before, after, dtype=torch.float64)
        nn.init.xavier_normal_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device)


def laplacian(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return Δu at a point."""
    return hessian(u)(x).diagonal().sum()


def on_boundary(count: int, rng: np.random.Generator) -> Tensor:
    """Return points on the four sides of the unit square."""
    t = rng.random(count)
    sides = rng.permuted(np.arange(count) % 4)
    fixed = (sides % 2).astype(float)
    pairs = np.where((sides < 2)[:, None], np.stack([t, fixed], 1), np.stack([fixed, t], 1))
    return torch.from_numpy(pairs)


def unit_grid(side: int = 81) -> Tensor:
    """Return a grid of the unit square."""
    t = torch.linspace(0.0, 1.0, side, dtype=torch.float64)
    return torch.cartesian_prod(t, t)


def square_equation(
    name: str, solution: Callable[[Tensor], Tensor], k: float, widths: Sequence[int], counts: tuple[int, int],
    seed: int, device: str,
) -> Equation:  # fmt: skip
    """Return Δu + k²u = q on the unit square, with the q of a solution that is zero on the boundary."""
    rng = np.random.default_rng(seed)
    inside, boundary = torch.from_numpy(rng.random((counts[0], 2))).to(device), on_boundary(counts[1], rng).to(device)
    q = torch.func.vmap(lambda x: laplacian(solution, x) + k**2 * solution(x))(inside)

    def interior(u: Callable[[Tensor], Tensor], x: Tensor, value: Tensor) -> Tensor:
        return laplacian(u, x) + k**2 * u(x) - value

    def edge(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return u(x)

    module, grid = network(widths, seed, device), unit_grid().to(device)
    residuals = sanc.NetworkResiduals(module, [(interior, (inside, q)), (edge, boundary, 100.0)])
    return Equation(name, module, residuals, grid, torch.func.vmap(solution)(grid))


def burgers_solution(points: Tensor) -> Tensor:
    """Return the solution of Cole and Hopf, u = −∫ sin(π(x − η)) w dη / ∫ w dη, by the rule of Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    x, t = points[:, :1].cpu().numpy(), np.maximum(points[:, 1:].cpu().numpy(), 1e-12)
    y = x - np.sqrt(4.0 * VISCOSITY * t) * nodes
    exponent = -np.cos(np.pi * y) / (2.0 * np.pi * VISCOSITY)
    w = weights * np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return torch.from_numpy(-(w * np.sin(np.pi * y)).sum(1) / w.sum(1))


def burgers(widths: Sequence[int], counts: tuple[int, int], seed: int, device: str) -> Equation:
    """Return the equation of Burgers."""
    rng = np.random.default_rng(seed)
    inside = torch.from_numpy(rng.random((counts[0], 2)) * [2.0, 1.0] - [1.0, 0.0]).to(device)
    x, t = 2.0 * rng.random(counts[1] // 2) - 1.0, rng.random(counts[1] // 2)
    first = torch.from_numpy(np.stack([x, np.zeros_like(x)], 1)).to(device)
    ends = torch.from_numpy(np.stack([np.sign(rng.random(len(t)) - 0.5), t], 1)).to(device)

    def interior(u: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        gradient = grad(u)(p)
        second = grad(lambda y: grad(u)(y)[0])(p)[0]
        return gradient[1] + u(p) * gradient[0] - VISCOSITY * second

    def initial(u: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        return u(p) + torch.sin(math.pi * p[0])

    def end(u: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        return u(p)

    module, side = network(widths, seed, device), 101
    grid = torch.cartesian_prod(
        torch.linspace(-1.0, 1.0, side, dtype=torch.float64), torch.linspace(0.0, 1.0, side, dtype=torch.float64)
    ).to(device)
    residuals = sanc.NetworkResiduals(module, [(interior, inside), (initial, first, 10.0), (end, ends, 10.0)])
    return Equation("burgers", module, residuals, grid, burgers_solution(grid).to(device))


def equation(name: str, seed: int, device: str, quick: bool = False) -> Equation:
    """Return an equation by name; `quick` has few points and a small network."""
    widths, counts = ((8,), (60, 20)) if quick else ((24, 24), (900, 120))
    if name == "burgers":
        return burgers(widths, counts if quick else (1000, 200), seed, device)

    def product(x: Tensor, a: float, b: float) -> Tensor:
        return torch.sin(a * math.pi * x[0]) * torch.sin(b * math.pi * x[1])

    if name == "poisson":
        return square_equation(name, lambda x: product(x, 1.0, 1.0), 0.0, widths, counts, seed, device)
    return square_equation(name, lambda x: product(x, 1.0, 4.0), 1.0, widths, counts, seed, device)


EQUATIONS = ("poisson", "helmholtz", "burgers")


# ---------------------------------------------------------------------- methods


class Clock:
    """Seconds of the process on a CPU, of the clock on a GPU, without the evaluations of the error."""

    def __init__(self, device: str, limit: float) -> None:
        self._device, self._limit = torch.device(device), limit
        self._paused, self._begin = 0.0, self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._now() - self._begin - self._paused

    def is_up(self, share: float = 1.0) -> bool:
        """Whether a share of the time has passed."""
        return self.seconds() >= share * self._limit

    def untimed(self, function: Callable[[], float]) -> float:
        """Call a function without counting its time."""
        begin = self._now()
        result = function()
        self._paused += self._now() - begin
        return result


class Trace:
    """Errors over time, at most one in each hundredth of the time."""

    def __init__(self, problem: Equation, clock: Clock, limit: float) -> None:
        self._problem, self._clock, self._interval, self._next = problem, clock, limit / 100.0, 0.0
        self.points: list[tuple[float, float]] = []

    def note(self, parameters: dict[str, Tensor], last: bool = False) -> None:
        """Evaluate the error if it is due."""
        seconds = self._clock.seconds()
        if last or seconds >= self._next:
            self.points.append((seconds, self._clock.untimed(lambda: self._problem.error(parameters))))
            self._next = seconds + self._interval


def run_sanc(problem: Equation, clock: Clock, trace: Trace) -> int:
    """Run `sanc.least_squares`, and return its iterations."""

    def callback(parameters: dict[str, Tensor]) -> bool:
        trace.note(parameters)
        return clock.is_up()

    res = sanc.least_squares(
        problem.residuals, problem.residuals.start, max_iter=None, certify=False, callback=callback
    )
    trace.note(res.x, last=True)
    return int(res.nit)


def run_lbfgs(problem: Equation, clock: Clock, trace: Trace, parameters: dict[str, Tensor], done: int = 0) -> int:
    """Run LBFGS until the time is up, or until it stops."""
    tensors = list(parameters.values())
    optimiser = torch.optim.LBFGS(
        tensors, max_iter=20, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = 0.5 * problem.residuals(parameters).square().sum()
        loss.backward()
        return loss

    while not clock.is_up():
        before = [tensor.detach().clone() for tensor in tensors]
        optimiser.step(closure)
        done += 1
        trace.note(parameters)
        if all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)):
            optimiser.state.clear()  # its line search failed: start again from the gradient
            optimiser = torch.optim.LBFGS(
                tensors, max_iter=20, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0.0,
                tolerance_change=0.0,
            )  # fmt: skip
    return done


def run_first_order(
    problem: Equation, clock: Clock, trace: Trace, parameters: dict[str, Tensor], optimiser: Any, share: float
) -> int:
    """Run a first-order optimiser for a share of the time."""
    done = 0
    while not clock.is_up(share):
        optimiser.zero_grad()
        (0.5 * problem.residuals(parameters).square().sum()).backward()
        optimiser.step()
        done += 1
        trace.note(parameters)
    return done


def run(method: str, name: str, seed: int, limit: float, device: str, rate: float, quick: bool) -> dict[str, Any]:
    """Return the run of a method on an equation."""
    problem = equation(name, seed, device, quick)
    problem.residuals(problem.residuals.start)  # the first call loads libraries
    clock = Clock(device, limit)
    trace = Trace(problem, clock, limit)
    parameters = {key: tensor.clone().requires_grad_() for key, tensor in problem.residuals.start.items()}
    if method == "sanc":
        steps = run_sanc(problem, clock, trace)
    elif method == "lbfgs":
        steps = run_lbfgs(problem, clock, trace, parameters)
    elif method == "adamw-lbfgs":
        adamw = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.0)
        steps = run_first_order(problem, clock, trace, parameters, adamw, FIRST_PART)
        steps = run_lbfgs(problem, clock, trace, parameters, steps)
    else:
        from pytorch_optimizer import SOAP

        soap = SOAP(parameters.values(), lr=rate, weight_decay=0.0)
        steps = run_first_order(problem, clock, trace, parameters, soap, 1.0)
    if method != "sanc":
        trace.note(parameters, last=True)
    seconds, error = trace.points[-1]
    return {
        "equation": name, "method": method, "seed": seed, "rate": rate, "steps": steps, "seconds": seconds,
        "error": error, "trace": trace.points, "parameters": sum(p.numel() for p in parameters.values()),
        "residuals": len(problem.residuals(problem.residuals.start)),
    }  # fmt: skip


# ---------------------------------------------------------------------- tables


def best(runs: Sequence[dict[str, Any]], name: str, method: str) -> float:
    """Return the median over seeds of the error, with the best rate; NaN without runs."""
    errors: dict[float, list[float]] = {}
    for item in runs:
        if (item["equation"], item["method"]) == (name, method):
            errors.setdefault(item["rate"], []).append(item["error"] if math.isfinite(item["error"]) else math.inf)
    return min((float(np.median(group)) for group in errors.values()), default=math.nan)


def table_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of errors, with the factor by which the best peer's exceeds that of `sanc`."""
    names = [name for name in EQUATIONS if any(item["equation"] == name for item in runs)]
    methods = [method for method in METHODS if any(item["method"] == method for item in runs)]
    rows = []
    for name in names:
        errors = {method: best(runs, name, method) for method in methods}
        peers = [error for method, error in errors.items() if method != "sanc" and not math.isnan(error)]
        factor = min(peers) / errors["sanc"] if peers and "sanc" in errors else math.nan
        rows.append([name, *(number(error, ".1e") for error in errors.values()), number(factor, ".3g")])
    return markdown_table(["equation", *methods, "best peer / sanc"], rows)


def table_of_steps(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of the iterations of `sanc` and the calls of LBFGS, each of 20 iterations; first seed."""
    steps = {(item["equation"], item["method"]): item["steps"] for item in reversed(runs)}
    names = [name for name in EQUATIONS if {(name, "sanc"), (name, "lbfgs")} <= steps.keys()]
    rows = [[name, steps[name, "sanc"], steps[name, "lbfgs"]] for name in names]
    return markdown_table(["equation", "iterations of sanc", "calls of lbfgs, 20 iterations each"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="one small network, a second each", out="pinn.json and table.md")
    parser.add_argument("--equations", nargs="+", choices=EQUATIONS, default=list(EQUATIONS), help="by default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="by default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs from different parameters and points")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="rates of SOAP and AdamW")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if "soap" in options.methods and importlib.util.find_spec("pytorch_optimizer") is None:
        print("soap is left out: pytorch_optimizer is not installed", flush=True)
        options.methods.remove("soap")
    names, limit = (["poisson"], 1.0) if options.quick else (options.equations, options.seconds)
    runs = []
    for name in names:
        for method in options.methods:
            for rate in options.rates if method in ("soap", "adamw-lbfgs") else (math.nan,):
                for seed in range(options.seeds):
                    runs.append(run(method, name, seed, limit, options.device, rate, options.quick))
                    last = runs[-1]
                    ending = f"error {last['error']:.2e} after {last['seconds']:.1f} s, {last['steps']} steps"
                    print(f"{name} {method} {rate} seed {seed}: {ending}", flush=True)
    text = f"{table_of(runs)}\n\n{table_of_steps(runs)}"
    print(f"\n{text}\n", flush=True)
    document = {"machine": machine(options.device), "seconds": limit, "runs": runs}
    write_results(options.out, {"table.md": text, "pinn.json": document})
    return 0


if __name__ == "__main__":
    sys.exit(main())
