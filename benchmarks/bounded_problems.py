"""Test problems with bounds, of 2 to 1,000 variables, written from their published formulas.

Problems alternate between two halves: *development*, with which rules and numbers were chosen, and *unseen*. No problem
needs values of f outside its bounds.

References
----------
HS: Hock and Schittkowski, Test examples for nonlinear programming codes, Springer (1981); its numbers.
CUTEst: Gould, Orban and Toint, CUTEst, Comput. Optim. Appl. 60 (2015) 545-557; its problems by their SIF names.
MT: Moré and Toraldo, On the solution of large quadratic programming problems with bound constraints, SIAM J. Optim. 1
(1991) 93-113; the problems with membranes have their formulas in section 6.
VN: Vandenbussche and Nemhauser, A branch-and-cut algorithm for nonconvex quadratic programs with box constraints, Math.
Program. 102 (2005) 559-575; the distribution of their random problems.
MINPACK-2: Averick, Carter, Moré and Xue, The MINPACK-2 test problem collection, Argonne (1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from benchmarks.common import Floats, zoo

_D = torch.float64
_Fun = Callable[[Tensor], Tensor]
_INF = math.inf


@dataclass(frozen=True, eq=False)
class BoundedProblem:
    """A problem min f(x) subject to lower ≤ x ≤ upper.

    Attributes
    ----------
    name, source : str
        Its name, and where it stands in the literature.
    fun : callable
        f of a float64 tensor.
    x0, lower, upper : array
        The start, which may lie outside the bounds, and the bounds.
    unseen : bool
        Whether it belongs to the unseen half.
    minimum : float or None
        The published value at a solution, where there is one.
    gtol : float
        Tolerance on the reduced gradient.
    """

    name: str
    fun: _Fun
    x0: Floats
    lower: Floats
    upper: Floats
    source: str
    unseen: bool
    minimum: float | None = None
    gtol: float = 1e-6

    @property
    def n(self) -> int:
        """Number of variables."""
        return len(self.x0)

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """The bounds as pairs."""
        return list(zip(self.lower.tolist(), self.upper.tolist(), strict=True))

    @property
    def start(self) -> Floats:
        """The projection of x0 on the bounds."""
        return np.clip(self.x0, self.lower, self.upper)


@cache
def problems() -> tuple[BoundedProblem, ...]:
    """Return all problems; every second one belongs to the unseen half."""
    found: list[BoundedProblem] = []

    def add(
        name: str, fun: _Fun, x0: ArrayLike, lower: ArrayLike, upper: ArrayLike, source: str, **others: Any
    ) -> None:
        start = np.asarray(x0, np.float64)
        low, high = (np.broadcast_to(np.asarray(b, np.float64), start.shape).copy() for b in (lower, upper))
        found.append(BoundedProblem(name, fun, start, low, high, source, len(found) % 2 == 1, **others))

    for family in (_hock_schittkowski, _small, _chains, _membranes, _quadratics, _zoo, _statistics):
        family(add)
    return tuple(found)


def _t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=_D)


def _upto(n: int) -> Tensor:
    return torch.arange(1, n + 1, dtype=_D)


def _inside(x: Tensor, lower: float, upper: float) -> Tensor:
    """Return x; raise an error outside the bounds, as a user's function with logarithms may."""
    if bool(((x < lower) | (x > upper)).any()):
        raise ValueError("evaluated outside the bounds")
    return x


# ---------------------------------------------------------------------- few variables


def _hock_schittkowski(add: Callable[..., None]) -> None:
    def rosenbrock(x: Tensor) -> Tensor:
        return 100.0 * (x[1] - x[0] ** 2) ** 2 + (1.0 - x[0]) ** 2

    def wood(x: Tensor) -> Tensor:
        a, b, c, d = x
        first = 100.0 * (b - a**2) ** 2 + (1.0 - a) ** 2 + 90.0 * (d - c**2) ** 2 + (1.0 - c) ** 2
        return first + 10.1 * ((b - 1.0) ** 2 + (d - 1.0) ** 2) + 19.8 * (b - 1.0) * (d - 1.0)

    def hs25(x: Tensor) -> Tensor:
        i = _upto(99)
        u = 25.0 + (-50.0 * torch.log(0.01 * i)) ** (2.0 / 3.0)
        return (torch.exp(-((u - x[1]).clamp(min=0.0) ** x[2]) / x[0]) - 0.01 * i).square().sum()

    def hs110(x: Tensor) -> Tensor:
        x = _inside(x, 2.0, 10.0)
        return (torch.log(x - 2.0) ** 2 + torch.log(10.0 - x) ** 2).sum() - torch.prod(x) ** 0.2

    add("HS1", rosenbrock, [-2.0, 1.0], [-_INF, -1.5], _INF, "HS 1", minimum=0.0)
    add("HS2", rosenbrock, [-2.0, 1.0], [-_INF, 1.5], _INF, "HS 2")
    add("HS3", lambda x: x[1] + 1e-5 * (x[1] - x[0]) ** 2, [10.0, 1.0], [-_INF, 0.0], _INF, "HS 3", minimum=0.0)
    add("HS4", lambda x: (x[0] + 1.0) ** 3 / 3.0 + x[1], [1.125, 0.125], [1.0, 0.0], _INF, "HS 4", minimum=8.0 / 3.0)
    add(
        "HS5",
        lambda x: torch.sin(x[0] + x[1]) + (x[0] - x[1]) ** 2 - 1.5 * x[0] + 2.5 * x[1] + 1.0,
        [0.0, 0.0],
        [-1.5, -3.0],
        [4.0, 3.0],
        "HS 5",
        minimum=-math.sqrt(3.0) / 2.0 - math.pi / 3.0,
    )
    add("HS25", hs25, [100.0, 12.5, 3.0], [0.1, 0.0, 0.0], [100.0, 25.6, 5.0], "HS 25")
    add("HS38", wood, [-3.0, -1.0, -3.0, -1.0], -10.0, 10.0, "HS 38", minimum=0.0)
    add("HS45", lambda x: 2.0 - torch.prod(x) / 120.0, np.full(5, 2.0), 0.0, np.arange(1.0, 6.0), "HS 45", minimum=1.0)
    add("HS110", hs110, np.full(10, 9.0), 2.001, 9.999, "HS 110", minimum=-45.77846971)


def _small(add: Callable[..., None]) -> None:
    def hatflda(x: Tensor) -> Tensor:
        return (x[0] - 1.0) ** 2 + (x[:-1] - torch.sqrt(x[1:])).square().sum()

    def hatfldc(x: Tensor) -> Tensor:
        return (x[0] - 1.0) ** 2 + (x[2:] - x[1:-1] ** 2).square().sum() + (x[-1] - 1.0) ** 2

    def allinit(x: Tensor) -> Tensor:
        a, b, c, d = x
        sine, other = torch.sin(c) ** 2, torch.sin(d) ** 2
        quartic = (c**2 + (d + a) ** 2) ** 2 + (a - 4.0 + other + b**2 * c**2) ** 2 + other**2
        squares = a**2 + b**2 + (c + d) ** 2 + 2.0 * sine + a**2 * b**2 + (d - 1.0) ** 2 + b**4
        return c + d - 4.0 + squares + quartic

    def eg1(x: Tensor) -> Tensor:
        return x[0] ** 2 + (x[1] * x[2]) ** 4 + x[0] * x[2] + x[1] * torch.sin(x[0] + x[2]) + x[1]

    def s368(x: Tensor) -> Tensor:
        return (x**3).sum() ** 2 - (x**2).sum() * (x**4).sum()

    def pspdoc(x: Tensor) -> Tensor:
        first = 1.0 + x[0] ** 2 + (x[1] - x[2]) ** 2
        return torch.sqrt(first) + torch.sqrt(1.0 + x[1] ** 2 + (x[2] - x[3]) ** 2)

    def weeds(x: Tensor) -> Tensor:
        y = _t(5.308, 7.24, 9.638, 12.866, 17.069, 23.192, 31.443, 38.558, 50.156, 62.948, 75.995, 91.972)
        return (x[0] / (1.0 + x[1] * torch.exp(-x[2] * _upto(12))) - y).square().sum()

    def logros(x: Tensor) -> Tensor:
        return torch.log(1.0 + 10000.0 * (x[1] - x[0] ** 2) ** 2 + (1.0 - x[0]) ** 2)

    low, high = np.full(4, 1e-7), np.full(4, _INF)
    add("HATFLDA", hatflda, np.full(4, 0.1), low, high, "CUTEst HATFLDA", minimum=0.0)
    add("HATFLDB", hatflda, np.full(4, 0.1), low, [_INF, 0.8, _INF, _INF], "CUTEst HATFLDB", minimum=5.572810e-3)
    add("HATFLDC", hatfldc, np.full(25, 0.9), 0.0, 10.0, "CUTEst HATFLDC", minimum=0.0)
    fixed = [-_INF, 1.0, -_INF, 2.0], [_INF, _INF, 1.0, 2.0]
    add("ALLINIT", allinit, np.zeros(4), *fixed, "CUTEst ALLINIT", minimum=16.7059684)
    add("EG1", eg1, np.zeros(3), [-_INF, -1.0, 1.0], [_INF, 1.0, 2.0], "CUTEst EG1")
    add("MDHOLE", lambda x: 100.0 * (torch.sin(x[0]) - x[1]) ** 2 + x[0], [10.0, 1.0], [0.0, -_INF], _INF,
        "CUTEst MDHOLE", minimum=0.0)  # fmt: skip
    add("S368", s368, 1.0 - 1.0 / np.arange(1, 9), 0.0, 1.0, "CUTEst S368")
    add("PSPDOC", pspdoc, np.full(4, 3.0), -_INF, [-1.0, _INF, _INF, _INF], "CUTEst PSPDOC", minimum=1.0 + math.sqrt(2))
    add("WEEDS", weeds, np.ones(3), [0.0, 0.0, -_INF], [_INF, _INF, 3.0], "CUTEst WEEDS", minimum=2.587277, gtol=1e-5)
    add("LOGROS", logros, [-1.2, 1.0], 0.0, _INF, "CUTEst LOGROS", minimum=0.0)
    add("SADDLE-FACE", lambda x: 0.25 * (x[0] ** 2 - 1.0) ** 2 + x[1] + x[0] ** 2 * x[1], np.zeros(2), [-2.0, 0.0], 2.0,
        "a saddle of the face at the start", minimum=0.0)  # fmt: skip
    add("CONCAVE-CORNERS", lambda x: -(x - 0.1).square().sum() + 0.5 * (x[:-1] * x[1:]).sum(), np.zeros(12), -1.0, 2.0,
        "a concave quadratic: minima at corners")  # fmt: skip
    add("INWARD-CURVATURE", lambda x: -x[0] ** 2 + x[0] ** 4 + (x[1] - 1.0) ** 2, np.zeros(2), 0.0, _INF,
        "zero gradient and negative curvature at a bound", minimum=-0.25)  # fmt: skip


# ---------------------------------------------------------------------- many variables in chains


def _chains(add: Callable[..., None]) -> None:
    def probpenl(x: Tensor) -> Tensor:
        product = x[:-1] * x[1:]
        return ((x[:-1] + x[1:]) * torch.exp(-product)).sum() / len(x) + 100.0 * (x.sum() - 1.0) ** 2

    def mccormck(x: Tensor) -> Tensor:
        total = x[:-1] + x[1:]
        return (-1.5 * x[:-1] + 2.5 * x[1:] + 1.0 + (x[:-1] - x[1:]) ** 2 + torch.sin(total)).sum()

    def nonscomp(x: Tensor) -> Tensor:
        return (x[0] - 1.0) ** 2 + 4.0 * (x[1:] - x[:-1] ** 2).square().sum()

    def bdexp(x: Tensor) -> Tensor:
        pair = x[:-2] + x[1:-1]
        return (pair * torch.exp(-x[2:] * pair)).sum()

    def biggsb1(x: Tensor) -> Tensor:
        return (x[0] - 1.0) ** 2 + (x[1:] - x[:-1]).square().sum() + (1.0 - x[-1]) ** 2

    def sineali(x: Tensor) -> Tensor:
        return torch.sin(x[0] - 1.0) + 100.0 * torch.sin(x[1:] - x[:-1] ** 2).sum()

    def explin(x: Tensor, scale: float = 1.0) -> Tensor:
        m = 10
        return torch.exp(0.1 * x[:m] * x[1 : m + 1]).sum() - (10.0 * scale * _upto(len(x)) * x).sum()

    def expquad(x: Tensor) -> Tensor:
        m, n = 10, len(x)
        square = 4.0 * x[m:-1] ** 2 + 2.0 * x[-1] ** 2 + x[m:-1] * x[-1]
        return torch.exp(0.1 * _upto(m) * x[:m] * x[1 : m + 1]).sum() + square.sum() - (10.0 * _upto(n) * x).sum()

    def qudlin(x: Tensor) -> Tensor:
        return (x[:10] * x[1:11]).sum() - (10.0 * _upto(len(x)) * x).sum()

    def pentdi(x: Tensor) -> Tensor:
        half = len(x) // 2
        bands = 6.0 * x.square().sum() - 4.0 * (x[1:] * x[:-1]).sum() + (x[2:] * x[:-2]).sum()
        return bands - 3.0 * x[0] + x[1] + x[-2] - 3.0 * x[-1] + 4.0 * x[half] - x[half - 1] - x[half + 1]

    low, high = np.full(500, -100.0), np.full(500, 100.0)
    low[::2] = 1.0
    last = np.full(200, 0.9)
    last[-1] = _INF
    add("PROBPENL", probpenl, np.full(100, 0.5), -0.5, 0.5, "CUTEst PROBPENL")
    add("MCCORMCK-50", mccormck, np.zeros(50), -1.5, 3.0, "CUTEst MCCORMCK")
    add("MCCORMCK-1000", mccormck, np.zeros(1000), -1.5, 3.0, "CUTEst MCCORMCK")
    add("NONSCOMP", nonscomp, np.full(500, 3.0), low, high, "CUTEst NONSCOMP", minimum=0.0)
    add("BDEXP", bdexp, np.ones(100), 0.0, _INF, "CUTEst BDEXP")
    add("BIGGSB1", biggsb1, np.zeros(200), 0.0, last, "CUTEst BIGGSB1", minimum=0.015)
    add("SINEALI-20", sineali, np.zeros(20), -1.5 * math.pi, 1.5 * math.pi, "CUTEst SINEALI")
    add("EXPLIN", explin, np.zeros(120), 0.0, 10.0, "CUTEst EXPLIN")
    add("EXPLIN2", lambda x: explin(x, 1.0 / 120.0), np.zeros(120), 0.0, 10.0, "CUTEst EXPLIN2")
    add("EXPQUAD", expquad, np.zeros(120), 0.0, 10.0, "CUTEst EXPQUAD, with other coefficients")
    add("QUDLIN", qudlin, np.ones(120), 0.0, 10.0, "CUTEst QUDLIN")
    add("PENTDI", pentdi, np.ones(500), 0.0, _INF, "CUTEst PENTDI")
    add("SINEALI-100", sineali, np.zeros(100), -1.5 * math.pi, 1.5 * math.pi, "CUTEst SINEALI")


# ---------------------------------------------------------------------- membranes


def _grid(side: int) -> tuple[Tensor, Tensor, float]:
    """Return the coordinates of the inner points of the unit square, and the distance between them."""
    h = 1.0 / (side + 1)
    line = torch.arange(1, side + 1, dtype=_D) * h
    y, x = torch.meshgrid(line, line, indexing="ij")
    return x, y, h


def _energy(v: Tensor, side: int) -> Tensor:
    """Return ½∫|∇v|² of the grid function with zero values on the boundary."""
    full = torch.nn.functional.pad(v.reshape(side, side), (1, 1, 1, 1))
    return 0.5 * ((full[1:] - full[:-1]).square().sum() + (full[:, 1:] - full[:, :-1]).square().sum())


def _membranes(add: Callable[..., None]) -> None:
    def torsion(side: int, c: float) -> tuple[_Fun, Floats]:
        x, y, h = _grid(side)
        distance = torch.minimum(torch.minimum(x, 1 - x), torch.minimum(y, 1 - y)).reshape(-1).numpy()
        return lambda v: _energy(v, side) - c * h * h * v.sum(), distance

    def obstacle(side: int) -> tuple[_Fun, Floats, Floats]:
        x, y, h = _grid(side)
        low = (torch.sin(3.2 * x) * torch.sin(3.3 * y)) ** 3
        high = (torch.sin(9.2 * x) * torch.sin(9.3 * y)) ** 2 + 0.02
        return lambda v: _energy(v, side) - h * h * v.sum(), low.reshape(-1).numpy(), high.reshape(-1).numpy()

    def bearing(side: int, eccentricity: float, width: float) -> tuple[_Fun, Floats]:
        hx, hy = 2.0 * math.pi / (side + 1), 2.0 * width / (side + 1)
        points = torch.arange(0, side + 2, dtype=_D) * hx
        weight = (1.0 + eccentricity * torch.cos(points)) ** 3
        load = eccentricity * torch.sin(points[1:-1])

        def fun(v: Tensor) -> Tensor:
            full = torch.nn.functional.pad(v.reshape(side, side), (1, 1, 1, 1))  # rows along y, columns along x
            mean = 0.5 * (weight[1:] + weight[:-1])
            along = (mean * ((full[:, 1:] - full[:, :-1]) / hx).square()).sum()
            across = (weight * ((full[1:] - full[:-1]) / hy).square()).sum()
            return hx * hy * (0.5 * along + 0.5 * across - (load * v.reshape(side, side)).sum())

        return fun, np.maximum(np.sin(points[1:-1].numpy()), 0.0)[None, :].repeat(side, 0).reshape(-1)

    def surface(side: int) -> tuple[_Fun, Floats, Floats]:
        x, y, h = _grid(side)
        line = torch.linspace(0.0, 1.0, side + 2, dtype=_D)
        edge = 1.0 - (2.0 * line - 1.0) ** 2
        block = ((x - 0.5).abs() <= 0.25) & ((y - 0.5).abs() <= 0.25)

        def fun(v: Tensor) -> Tensor:
            full = torch.nn.functional.pad(v.reshape(side, side), (1, 1, 1, 1))
            full = full + torch.nn.functional.pad(edge[None, :], (0, 0, 0, side + 1))
            full = full + torch.nn.functional.pad(edge[None, :], (0, 0, side + 1, 0))
            down, right = (full[1:, :-1] - full[:-1, :-1]) / h, (full[:-1, 1:] - full[:-1, :-1]) / h
            up, left = (full[1:, 1:] - full[:-1, 1:]) / h, (full[1:, 1:] - full[1:, :-1]) / h
            areas = torch.sqrt(1.0 + down**2 + right**2) + torch.sqrt(1.0 + up**2 + left**2)
            return 0.5 * h * h * areas.sum()

        return fun, torch.where(block, 1.0, 0.0).reshape(-1).numpy(), np.zeros(side * side)

    for side, c in ((10, 5.0), (14, 10.0), (20, 20.0), (31, 5.0)):
        fun, distance = torsion(side, c)
        add(f"TORSION-{side}-{c:g}", fun, distance, -distance, distance, "MT; CUTEst TORSION")
    for side in (12, 25):
        fun, low, high = obstacle(side)
        add(f"OBSTACLE-LOWER-{side}", fun, np.maximum(low, 1.0), low, 2000.0, "MT; CUTEst OBSTCLAE")
        add(f"OBSTACLE-BOTH-{side}", fun, low, low, np.maximum(high, low), "MT; CUTEst OBSTCLBL")
    for side, e in ((12, 0.1), (30, 0.9)):
        fun, start = bearing(side, e, 10.0)
        add(f"BEARING-{side}-{e:g}", fun, start, 0.0, _INF, "MT; CUTEst JNLBRNG")
    fun, low, start = surface(15)
    add("SURFACE-OBSTACLE", fun, start, low, _INF, "MINPACK-2, minimal surface with an obstacle")


# ---------------------------------------------------------------------- quadratics


def _quadratics(add: Callable[..., None]) -> None:
    def bqp(n: int, positive: float) -> _Fun:
        i = np.arange(1, n + 1)
        second, third = torch.tensor((2 * i - 1) % n), torch.tensor((3 * i - 1) % n)
        weights = torch.where(_upto(n) <= positive * n, 1.0, -1.0) * _upto(n)
        return lambda x: 0.5 * (weights * (x + x[second] + x[third]).square()).sum()

    def spar(n: int, density: float, seed: int) -> _Fun:
        rng = np.random.default_rng(seed)
        q = np.triu(rng.integers(-50, 51, (n, n)) * (rng.random((n, n)) < density)).astype(float)
        c = rng.integers(-50, 51, n).astype(float)
        matrix, linear = torch.tensor(0.5 * (q + q.T)), torch.tensor(c)
        return lambda x: 0.5 * x @ (matrix @ x) + linear @ x

    def more_toraldo(n: int, digits: float, degeneracy: float, active: float, seed: int) -> tuple[_Fun, Floats]:
        rng = np.random.default_rng(seed)
        y = rng.uniform(-1.0, 1.0, (3, n))
        d = torch.tensor(10.0 ** (np.arange(n) / (n - 1) * digits))
        reflections = [torch.tensor(v / np.linalg.norm(v)) for v in y]

        def rotate(x: Tensor, order: list[Tensor]) -> Tensor:
            for v in order:
                x = x - 2.0 * v * (v @ x)
            return x

        solution = torch.tensor(np.where(rng.random(n) < active, 0.0, rng.uniform(0.1, 1.0, n)))
        multipliers = torch.where(solution == 0.0, torch.tensor(10.0 ** (-rng.random(n) * degeneracy)), 0.0)
        product = rotate(d * rotate(solution, reflections), reflections[::-1])
        linear = multipliers - product
        start = rng.uniform(0.0, 1.0, n)
        return lambda x: 0.5 * x @ rotate(d * rotate(x, reflections), reflections[::-1]) + linear @ x, start

    for name, positive in (("CVXBQP1", 1.0), ("NCVXBQP1", 0.75), ("NCVXBQP2", 0.5), ("NCVXBQP3", 0.25)):
        for n in (50, 300):
            add(f"{name}-{n}", bqp(n, positive), np.full(n, 0.5), 0.1, 10.0, f"CUTEst {name}", gtol=1e-5)
    for n, density in ((20, 1.0), (50, 0.4), (100, 0.25)):
        add(f"SPAR-{n}", spar(n, density, n), np.full(n, 0.5), 0.0, 1.0, "VN")
    for n, digits, degeneracy, active in ((60, 3.0, 1.0, 0.5), (200, 4.0, 6.0, 0.5), (400, 2.0, 3.0, 0.9)):
        fun, start = more_toraldo(n, digits, degeneracy, active, n)
        add(f"MORE-TORALDO-{n}", fun, start, 0.0, _INF, "MT, section 6")


# ---------------------------------------------------------------------- the zoo with bounds that cut off its minima

_CUTS = {
    "BEALE": (3.0, 0.5), "HELICAL-VALLEY": (1.0, 0.0, 0.0), "POWELL-BADLY-SCALED": (1.098e-5, 9.106),
    "WOOD": (1.0, 1.0, 1.0, 1.0), "CHEBYQUAD": (0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9), "GENROSE": (1.0,) * 100,
    "DIXON3DQ": (1.0,) * 100, "TRIDIA": tuple(2.0 ** -np.arange(100.0)), "CAMEL-6": (0.0898, -0.7126),
    "STYBLINSKI-TANG": (-2.9035,) * 6, "BROWN-ALMOST-LINEAR": (1.0,) * 10, "VARDIM": (1.0,) * 10,
    "HIMMELBLAU": (3.0, 2.0), "SROSENBR": (1.0,) * 1000, "ENGVAL1": (0.9,) * 100, "COSINE": (0.8,) * 100,
    "MSQRTALS": (0.5,) * 36, "BIGGS-EXP6": (1.0, 10.0, 1.0, 5.0, 4.0, 3.0), "LEVY": (1.0,) * 4,
    "BARD": (0.0824, 1.133, 2.344), "KOWALIK-OSBORNE": (0.1928, 0.1913, 0.1231, 0.1361),
}  # fmt: skip
"""Problems of tests/zoo.py and points at or near their minima, which the bounds exclude."""


def _zoo(add: Callable[..., None]) -> None:
    for name, minimiser in _CUTS.items():
        problem, near = zoo.BY_NAME[name], np.asarray(minimiser)
        k, width = np.arange(problem.n), 0.1 * np.maximum(np.abs(near), 0.5)
        low, high = near - 100.0 * width, near + 100.0 * width
        low, high = np.where(k % 3 == 1, near + width, low), np.where(k % 3 == 0, near - width, high)
        add(f"CUT-{name}", problem.fun, problem.x0, low, high, f"{problem.source}; bounds of this file")


# ---------------------------------------------------------------------- fits and likelihoods


def _statistics(add: Callable[..., None]) -> None:
    rng = np.random.default_rng(35)

    def least_squares(rows: int, n: int) -> _Fun:
        a, b = torch.tensor(rng.standard_normal((rows, n))), torch.tensor(rng.standard_normal(rows))
        return lambda x: 0.5 * (a @ x - b).square().sum()

    def factorisation(rows: int, columns: int, rank: int) -> _Fun:
        v = torch.tensor(rng.random((rows, rank)) @ rng.random((rank, columns)) + 0.05 * rng.random((rows, columns)))

        def fun(x: Tensor) -> Tensor:
            w, h = x[: rows * rank].reshape(rows, rank), x[rows * rank :].reshape(rank, columns)
            return 0.5 * (w @ h - v).square().sum()

        return fun

    samples = torch.tensor(rng.gamma(0.7, 2.0, 200))

    def gamma_likelihood(x: Tensor) -> Tensor:
        shape, rate = _inside(x, 1e-8, _INF)
        terms = shape * torch.log(rate) - torch.lgamma(shape) + (shape - 1.0) * torch.log(samples) - rate * samples
        return -terms.mean()

    times = torch.tensor(np.linspace(0.0, 4.0, 40))
    decay = 2.0 * torch.exp(-0.5 * times) + 0.7 * torch.exp(-2.5 * times)
    decay = decay + 0.02 * torch.tensor(rng.standard_normal(40))

    def exponentials(x: Tensor) -> Tensor:
        model = x[0] * torch.exp(-x[1] * times) + x[2] * torch.exp(-x[3] * times)
        return 0.5 * (model - decay).square().sum()

    rates = torch.tensor(rng.random((60, 30)) * (rng.random((60, 30)) < 0.3))
    counts = torch.tensor(rng.poisson((rates @ torch.tensor(rng.gamma(0.5, 5.0, 30))).numpy() + 0.5).astype(float))

    def poisson(x: Tensor) -> Tensor:
        mean = rates @ _inside(x, 0.0, _INF) + 0.5
        return (mean - counts * torch.log(mean)).sum()

    def entropy(x: Tensor) -> Tensor:
        x = _inside(x, 1e-12, 1.0)
        rewards = torch.linspace(0.0, 3.0, len(x), dtype=_D)
        return (x * torch.log(x)).sum() + 50.0 * (x.sum() - 1.0) ** 2 - rewards @ x

    add("NONNEGATIVE-50", least_squares(80, 50), np.ones(50), 0.0, _INF, "nonnegative least squares")
    add("NONNEGATIVE-300", least_squares(200, 300), np.ones(300), 0.0, _INF, "singular nonnegative least squares")
    add("BOX-LEAST-SQUARES", least_squares(120, 100), np.zeros(100), -0.05, 0.05, "least squares in a box")
    add("FACTORISATION-12", factorisation(12, 10, 3), rng.random(66), 0.0, _INF, "nonnegative matrix factorisation")
    add("FACTORISATION-30", factorisation(30, 25, 4), rng.random(220), 0.0, 1.5, "nonnegative matrix factorisation")
    add("GAMMA-LIKELIHOOD", gamma_likelihood, [3.0, 3.0], 1e-8, [_INF, 0.4], "likelihood of a gamma distribution")
    add("EXPONENTIALS", exponentials, [1.0, 1.0, 1.0, 4.0], 0.0, [_INF, _INF, _INF, 2.0], "two decays, a bounded rate")
    add("POISSON-TOMOGRAPHY", poisson, np.ones(30), 0.0, _INF, "likelihood of Poisson counts")
    add("ENTROPY", entropy, np.full(40, 0.5), 1e-12, 1.0, "entropy with a penalty, logarithms inside the bounds")
