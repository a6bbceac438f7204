"""Problems of nonlinear least squares: the fits of NIST, and problems of Moré, Garbow and Hillstrom (1981).

The latter are written from the formulas of "Testing unconstrained optimization software", with their standard starts,
and 10 and 100 times those. A problem with bounds has the same residuals, and bounds that cut off the solution: every
third variable must stay a tenth of its value away from it, on the side of the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Floats
from benchmarks.fits import Fit
from benchmarks.long_fits import ALL_FITS

Residual = Callable[[Tensor], Tensor]
_CUT = 0.1
"""Distance of a bound from the solution, relative to the solution."""


@dataclass(frozen=True, eq=False)
class LeastSquaresProblem:
    """Residuals, a start, and the bounds; `family` is the problem without start and bounds."""

    name: str
    family: str
    group: str
    residuals: Residual
    start: Floats
    lower: Floats
    upper: Floats
    floor: float

    @property
    def is_bounded(self) -> bool:
        """Whether there are bounds."""
        return bool(np.isfinite(self.lower).any() or np.isfinite(self.upper).any())

    def fun(self, x: Floats) -> Floats:
        """Residuals at x."""
        return self.residuals(torch.from_numpy(np.array(x, np.float64))).numpy()

    def jac(self, x: Floats) -> Floats:
        """Jacobian at x."""
        matrix: Tensor = torch.func.jacfwd(self.residuals)(torch.from_numpy(np.array(x, np.float64)))
        return matrix.numpy()

    def with_cut(self, solution: Floats) -> LeastSquaresProblem:
        """Return the problem with bounds that cut off a solution, and the start projected on them."""
        lower, upper = np.full_like(solution, -np.inf), np.full_like(solution, np.inf)
        for k in range(0, len(solution), 3):
            distance = _CUT * abs(solution[k]) or _CUT
            if self.start[k] < solution[k]:
                upper[k] = solution[k] - distance
            else:
                lower[k] = solution[k] + distance
        start = np.clip(self.start, lower, upper)
        changed = {"name": f"{self.name}-cut", "group": f"{self.group}, bounds"}
        return replace(self, **changed, start=start, lower=lower, upper=upper)


def _d(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _helical(x: Tensor) -> Tensor:
    theta = torch.atan2(x[1], x[0]) / (2 * math.pi)
    return torch.stack([10 * (x[2] - 10 * theta), 10 * (torch.hypot(x[0], x[1]) - 1), x[2]])


_BARD = _d(0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
_GAUSS = _d(
    0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989, 0.3521, 0.2420, 0.1295, 0.0540, 0.0175,
    0.0044, 0.0009,
)  # fmt: skip
_MEYER = _d(
    34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872
)  # fmt: skip
_KOWALIK_Y = _d(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
_KOWALIK_U = _d(4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)


def _bard(x: Tensor) -> Tensor:
    u = torch.arange(1.0, 16.0, dtype=torch.float64)
    v = 16 - u
    return _BARD - (x[0] + u / (v * x[1] + torch.minimum(u, v) * x[2]))


def _gaussian(x: Tensor) -> Tensor:
    t = (8 - torch.arange(1.0, 16.0, dtype=torch.float64)) / 2
    return x[0] * torch.exp(-x[1] * (t - x[2]) ** 2 / 2) - _GAUSS


def _meyer(x: Tensor) -> Tensor:
    t = 45 + 5 * torch.arange(1.0, 17.0, dtype=torch.float64)
    return x[0] * torch.exp(x[1] / (t + x[2])) - _MEYER


def _box(x: Tensor) -> Tensor:
    t = 0.1 * torch.arange(1.0, 11.0, dtype=torch.float64)
    return torch.exp(-t * x[0]) - torch.exp(-t * x[1]) - x[2] * (torch.exp(-t) - torch.exp(-10 * t))


def _brown_dennis(x: Tensor) -> Tensor:
    t = torch.arange(1.0, 21.0, dtype=torch.float64) / 5
    return (x[0] + t * x[1] - torch.exp(t)) ** 2 + (x[2] + x[3] * torch.sin(t) - torch.cos(t)) ** 2


def _biggs(x: Tensor) -> Tensor:
    t = 0.1 * torch.arange(1.0, 14.0, dtype=torch.float64)
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    return x[2] * torch.exp(-t * x[0]) - x[3] * torch.exp(-t * x[1]) + x[5] * torch.exp(-t * x[4]) - y


def _watson(x: Tensor) -> Tensor:
    t = (torch.arange(1.0, 30.0, dtype=torch.float64) / 29)[:, None]
    j = torch.arange(len(x), dtype=torch.float64)
    derivative = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1)
    r = derivative - (x * t**j).sum(1) ** 2 - 1
    return torch.cat([r, x[:1], (x[1] - x[0] ** 2 - 1)[None]])


def _trigonometric(x: Tensor) -> Tensor:
    n = len(x)
    i = torch.arange(1.0, n + 1.0, dtype=torch.float64)
    return n - torch.cos(x).sum() + i * (1 - torch.cos(x)) - torch.sin(x)


def _discrete_boundary(x: Tensor) -> Tensor:
    n = len(x)
    h = 1 / (n + 1)
    t = torch.arange(1.0, n + 1.0, dtype=torch.float64) * h
    zero = torch.zeros(1, dtype=torch.float64)
    padded = torch.cat([zero, x, zero])
    return 2 * x - padded[:-2] - padded[2:] + h**2 * (x + t + 1) ** 3 / 2


def _discrete_integral(x: Tensor) -> Tensor:
    n = len(x)
    h = 1 / (n + 1)
    t = torch.arange(1.0, n + 1.0, dtype=torch.float64) * h
    cubes = (x + t + 1) ** 3
    lower = torch.tril(torch.ones(n, n, dtype=torch.float64))
    return x + h / 2 * ((1 - t) * (lower @ (t * cubes)) + t * ((1 - lower) @ ((1 - t) * cubes)))


def _broyden_tridiagonal(x: Tensor) -> Tensor:
    zero = torch.zeros(1, dtype=torch.float64)
    padded = torch.cat([zero, x, zero])
    return (3 - 2 * x) * x - padded[:-2] - 2 * padded[2:] + 1


def _broyden_banded(x: Tensor) -> Tensor:
    n = len(x)
    i = torch.arange(n)
    band = ((i[None] != i[:, None]) & (i[None] >= i[:, None] - 5) & (i[None] <= i[:, None] + 1)).double()
    return x * (2 + 5 * x**2) + 1 - band @ (x * (1 + x))


def _variably_dimensioned(x: Tensor) -> Tensor:
    total = (torch.arange(1.0, len(x) + 1.0, dtype=torch.float64) * (x - 1)).sum()
    return torch.cat([x - 1, total[None], (total**2)[None]])


def _almost_linear(x: Tensor) -> Tensor:
    return torch.cat([x[:-1] + x.sum() - (len(x) + 1), (torch.prod(x) - 1)[None]])


def _wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    roots = [10 * (b - a**2), 1 - a, math.sqrt(90) * (d - c**2), 1 - c]
    return torch.stack([*roots, math.sqrt(10) * (b + d - 2), (b - d) / math.sqrt(10)])


def _jennrich(x: Tensor) -> Tensor:
    i = torch.arange(1.0, 11.0, dtype=torch.float64)
    return 2 + 2 * i - (torch.exp(i * x[0]) + torch.exp(i * x[1]))


def _osborne1(x: Tensor) -> Tensor:
    fit = next(fit for fit in ALL_FITS if fit.name == "MGH17")
    return fit.y - (x[0] + x[1] * torch.exp(-fit.x * x[3]) + x[2] * torch.exp(-fit.x * x[4]))


_MGH: tuple[tuple[str, Residual, list[float]], ...] = (
    ("Rosenbrock", lambda x: torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]]), [-1.2, 1.0]),
    ("Freudenstein-Roth", lambda x: torch.stack([-13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1],
        -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1]]), [0.5, -2.0]),
    ("Powell-badly-scaled", lambda x: torch.stack([1e4 * x[0] * x[1] - 1,
        torch.exp(-x[0]) + torch.exp(-x[1]) - 1.0001]), [0.0, 1.0]),
    ("Brown-badly-scaled", lambda x: torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2]), [1.0, 1.0]),
    ("Beale", lambda x: _d(1.5, 2.25, 2.625) - x[0] * (1 - x[1] ** _d(1.0, 2.0, 3.0)), [1.0, 1.0]),
    ("Jennrich-Sampson", _jennrich, [0.3, 0.4]),
    ("Helical-valley", _helical, [-1.0, 0.0, 0.0]),
    ("Bard", _bard, [1.0, 1.0, 1.0]),
    ("Gaussian", _gaussian, [0.4, 1.0, 0.0]),
    ("Meyer", _meyer, [0.02, 4000.0, 250.0]),
    ("Box-3D", _box, [0.0, 10.0, 20.0]),
    ("Powell-singular", lambda x: torch.stack([x[0] + 10 * x[1], math.sqrt(5) * (x[2] - x[3]), (x[1] - 2 * x[2]) ** 2,
        math.sqrt(10) * (x[0] - x[3]) ** 2]), [3.0, -1.0, 0.0, 1.0]),
    ("Wood", _wood, [-3.0, -1.0, -3.0, -1.0]),
    ("Kowalik-Osborne", lambda x: _KOWALIK_Y - x[0] * (_KOWALIK_U**2 + _KOWALIK_U * x[1])
        / (_KOWALIK_U**2 + _KOWALIK_U * x[2] + x[3]), [0.25, 0.39, 0.415, 0.39]),
    ("Brown-Dennis", _brown_dennis, [25.0, 5.0, -5.0, -1.0]),
    ("Osborne-1", _osborne1, [0.5, 1.5, -1.0, 0.01, 0.02]),
    ("Biggs-EXP6", _biggs, [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
    ("Watson-6", _watson, [0.0] * 6),
    ("Watson-9", _watson, [0.0] * 9),
    ("Extended-Rosenbrock", lambda x: torch.cat([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]]), [-1.2, 1.0] * 5),
    ("Variably-dimensioned", _variably_dimensioned, [1 - k / 10 for k in range(1, 11)]),
    ("Trigonometric", _trigonometric, [0.1] * 10),
    ("Brown-almost-linear", _almost_linear, [0.5] * 10),
    ("Discrete-boundary", _discrete_boundary, [k / 11 * (k / 11 - 1) for k in range(1, 11)]),
    ("Discrete-integral", _discrete_integral, [k / 11 * (k / 11 - 1) for k in range(1, 11)]),
    ("Broyden-tridiagonal", _broyden_tridiagonal, [-1.0] * 10),
    ("Broyden-banded", _broyden_banded, [-1.0] * 10),
    ("Penalty-I", lambda x: torch.cat([math.sqrt(1e-5) * (x - 1), (x.square().sum() - 0.25)[None]]),
        [1.0, 2.0, 3.0, 4.0]),
)  # fmt: skip


def _free(n: int) -> tuple[Floats, Floats]:
    return np.full(n, -np.inf), np.full(n, np.inf)


def _fit_residuals(fit: Fit) -> Residual:
    return lambda b: fit.y - fit.model(b, fit.x)


def problems() -> list[LeastSquaresProblem]:
    """Return the problems without bounds whose residuals are finite at the start."""
    found = []
    for fit in ALL_FITS:
        for number, text in enumerate(fit.starts, 1):
            start = np.array([float(entry) for entry in text.split()])
            bounds = _free(len(start))
            name = f"{fit.name}-{number}"
            found.append(LeastSquaresProblem(name, fit.name, "NIST", _fit_residuals(fit), start, *bounds, 1e-18))
    for name, residuals, numbers in _MGH:
        for factor in (1, 10, 100):
            start = factor * np.array(numbers)
            if factor > 1 and not start.any():
                start = np.full(len(start), float(factor))  # ten or a hundred times one, since zero stays zero
            bounds = _free(len(start))
            problem = LeastSquaresProblem(f"{name}-{factor}", name, "MGH", residuals, start, *bounds, 1e-10)
            if np.isfinite(problem.fun(start)).all() and np.isfinite(problem.jac(start)).all():
                found.append(problem)
    return found


def large_problems(n: int) -> list[LeastSquaresProblem]:
    """Return four problems of Moré, Garbow and Hillstrom with n variables, an even number."""
    grid = np.arange(1, n + 1) / (n + 1)
    starts = {
        "Extended-Rosenbrock": np.tile([-1.2, 1.0], n // 2),
        "Trigonometric": np.full(n, 1.0 / n),
        "Discrete-integral": grid * (grid - 1.0),
        "Broyden-tridiagonal": np.full(n, -1.0),
    }
    residuals = {name: function for name, function, _ in _MGH}
    return [
        LeastSquaresProblem(f"{name}, {n}", name, "MGH", residuals[name], start, *_free(n), 1e-10)
        for name, start in starts.items()
    ]
