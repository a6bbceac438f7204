"""A zoo of smooth test problems: published minimisation problems, and starts that lie exactly on saddle points.

Every objective is a pure torch function of one float64 vector, written from its mathematical definition, so that all
derivatives come from automatic differentiation.

References
----------
MGH: Moré, Garbow and Hillstrom, Testing unconstrained optimization software, ACM TOMS 7 (1981) 17-41.
CUTEst: Gould, Orban and Toint, CUTEst, Comput. Optim. Appl. 60 (2015) 545-557; its problems by their SIF names.
Andrei: An unconstrained optimization test functions collection, Adv. Model. Optim. 10 (2008) 147-161.
JY: Jamil and Yang, A literature survey of benchmark functions for global optimisation problems, IJMMNO 4 (2013).
DS: Dixon and Szegő (eds.), Towards Global Optimisation 2, North-Holland (1978).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Fun = Callable[[Tensor], Tensor]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ZooProblem:
    """A published problem.

    Attributes
    ----------
    name : str
        Unique in the zoo.
    fun : callable
        Objective, a float64 vector to a scalar tensor.
    x0 : array
        The standard start.
    minima : tuple of float
        Values at which a minimiser may end: the global minimum first, then other known local ones. None: anywhere.
    source : str
        Where the problem stands in the literature.
    minimiser : array or None
        A point at which `minima[0]` is attained, where one is known in closed form or to many digits.
    rtol, atol : float
        How far an end value may lie from a listed minimum: the digits published, or what a gradient of 1e-8 leaves
        open where the Hessian is singular.
    gtol : float
        Gradient norm to ask for. 1e-8, but for problems on which the rounding error of the gradient itself is larger.
    """

    name: str
    fun: Fun
    x0: Floats
    minima: tuple[float, ...]
    source: str
    minimiser: Floats | None = None
    rtol: float = 1e-6
    atol: float = 1e-9
    gtol: float = 1e-8

    @property
    def n(self) -> int:
        """Number of variables."""
        return len(self.x0)

    def reached(self, value: float) -> float | None:
        """Give the listed minimum that `value` equals within the tolerances, or None."""
        for known in self.minima:
            if abs(value - known) <= self.atol + self.rtol * abs(known):
                return known
        return None


@dataclass(frozen=True, eq=False)
class SaddleStart:
    """A start on a strict saddle point or a local maximum of a function that is bounded below.

    Attributes
    ----------
    name, fun, x0
        As in `ZooProblem`.
    lambda_min : float
        Left-most eigenvalue of the Hessian at the saddle.
    floor : float
        A lower bound of f.
    saddle : array or None
        The saddle, where it is not `x0` itself: then `x0` lies on its stable manifold, and a method that sees nothing
        but the gradient and its Krylov space is led there.
    L1, L2 : float
        Lipschitz constants of gradient and Hessian that hold, roughly, on the way down from x0.
    """

    name: str
    fun: Fun
    x0: Floats
    lambda_min: float
    floor: float
    saddle: Floats | None = None
    L1: float = 10.0
    L2: float = 10.0

    @property
    def n(self) -> int:
        """Number of variables."""
        return len(self.x0)


# ---------------------------------------------------------------------- derivatives


def tensor(x: ArrayLike) -> Tensor:
    """Copy into a float64 tensor."""
    return torch.tensor(np.asarray(x, dtype=np.float64))


def value_and_gradient(fun: Fun, x: ArrayLike) -> tuple[float, Floats]:
    """f(x) and ∇f(x)."""
    point = tensor(x).requires_grad_()
    value = fun(point)
    (g,) = torch.autograd.grad(value, point)
    return float(value.detach()), np.asarray(g.numpy(), dtype=np.float64)


def hessian_of(fun: Fun, x: ArrayLike) -> Floats:
    """∇²f(x), dense and symmetrised."""
    h = torch.autograd.functional.hessian(fun, tensor(x), vectorize=True).numpy()
    return np.asarray(0.5 * (h + h.T), dtype=np.float64)


def dense_hessian(problem: ZooProblem | SaddleStart, x: ArrayLike) -> Floats:
    """∇²f(x) of a problem, dense, in float64."""
    return hessian_of(problem.fun, x)


def numpy_functions(
    problem: ZooProblem | SaddleStart,
) -> tuple[
    Callable[[ArrayLike], float],
    Callable[[ArrayLike], Floats],
    Callable[[ArrayLike], Floats],
    Callable[[ArrayLike, ArrayLike], Floats],
]:
    """f, gradient, Hessian and Hessian product as NumPy callables, for solvers that know no torch."""
    fun = problem.fun

    def f(x: ArrayLike) -> float:
        with torch.no_grad():
            return float(fun(tensor(x)))

    def jac(x: ArrayLike) -> Floats:
        return value_and_gradient(fun, x)[1]

    def hess(x: ArrayLike) -> Floats:
        return hessian_of(fun, x)

    last: list[Tensor] = []  # the point of the last product, and the gradient there with its graph

    def hessp(x: ArrayLike, v: ArrayLike) -> Floats:
        point = tensor(x).requires_grad_()
        if not (last and torch.equal(last[0], point)):
            last[:] = point, *torch.autograd.grad(fun(point), point, create_graph=True)
        point, g = last
        if not g.requires_grad:  # an affine function
            return np.zeros(len(point))
        (product,) = torch.autograd.grad(g, point, tensor(v), retain_graph=True, allow_unused=True)
        return np.zeros(len(point)) if product is None else np.asarray(product.numpy(), dtype=np.float64)

    return f, jac, hess, hessp


def polish(fun: Fun, x: ArrayLike, iterations: int = 8) -> Floats:
    """Newton's iteration for ∇f = 0 near x, of whatever index the stationary point is."""
    point = np.array(x, dtype=np.float64)
    best, least = point, math.inf
    for _ in range(iterations):
        _, g = value_and_gradient(fun, point)
        norm = float(np.linalg.norm(g))
        if norm < least:
            best, least = point, norm
        if norm == 0.0:
            break
        point = point - np.linalg.solve(hessian_of(fun, point), g)
    return best


# ---------------------------------------------------------------------- the registry

_ZOO: list[ZooProblem] = []
_PEN: list[SaddleStart] = []


def _problem(
    name: str,
    x0: ArrayLike,
    minima: Sequence[float],
    source: str,
    minimiser: ArrayLike | None = None,
    **tolerances: Any,
) -> Callable[[Fun], Fun]:
    def enter(fun: Fun) -> Fun:
        start = np.asarray(x0, dtype=np.float64)
        end = None if minimiser is None else np.asarray(minimiser, dtype=np.float64)
        _ZOO.append(ZooProblem(name, fun, start, tuple(map(float, minima)), source, end, **tolerances))
        return fun

    return enter


def _saddle(name: str, fun: Fun, x0: ArrayLike, lambda_min: float, floor: float, **more: Any) -> None:
    _PEN.append(SaddleStart(name, fun, np.asarray(x0, dtype=np.float64), lambda_min, floor, **more))


def _t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _upto(n: int, first: int = 1) -> Tensor:
    """first, first + 1, …, n."""
    return torch.arange(first, n + 1, dtype=torch.float64)


def _sq(*residuals: Tensor) -> Tensor:
    """Sum of the squares of scalars and vectors."""
    total = residuals[0].square().sum()
    for r in residuals[1:]:
        total = total + r.square().sum()
    return total


def rosen_torch(x: Tensor) -> Tensor:
    """Return `scipy.optimize.rosen` of a tensor."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def _tile(pattern: Sequence[float], n: int) -> Floats:
    return np.tile(np.asarray(pattern, dtype=np.float64), n // len(pattern))


# ---------------------------------------------------------------------- Moré, Garbow and Hillstrom


@_problem("ROSENBROCK", (-1.2, 1.0), (0,), "MGH 1", (1, 1))
def rosenbrock(x: Tensor) -> Tensor:
    a, b = x
    return 100 * (b - a**2) ** 2 + (1 - a) ** 2


@_problem("FREUDENSTEIN-ROTH", (0.5, -2.0), (0, 48.98425367924), "MGH 2", (5, 4))
def freudenstein_roth(x: Tensor) -> Tensor:
    a, b = x
    return (-13 + a + ((5 - b) * b - 2) * b) ** 2 + (-29 + a + ((b + 1) * b - 14) * b) ** 2


@_problem("POWELL-BADLY-SCALED", (0.0, 1.0), (0,), "MGH 3", atol=1e-8)
def powell_badly_scaled(x: Tensor) -> Tensor:
    a, b = x
    return (1e4 * a * b - 1) ** 2 + (torch.exp(-a) + torch.exp(-b) - 1.0001) ** 2


@_problem("BROWN-BADLY-SCALED", (1.0, 1.0), (0,), "MGH 4", (1e6, 2e-6))
def brown_badly_scaled(x: Tensor) -> Tensor:
    a, b = x
    return (a - 1e6) ** 2 + (b - 2e-6) ** 2 + (a * b - 2) ** 2


@_problem("BEALE", (1.0, 1.0), (0,), "MGH 5", (3, 0.5))
def beale(x: Tensor) -> Tensor:
    a, b = x
    return (1.5 - a * (1 - b)) ** 2 + (2.25 - a * (1 - b**2)) ** 2 + (2.625 - a * (1 - b**3)) ** 2


_TEN = _upto(10)


@_problem("JENNRICH-SAMPSON", (0.3, 0.4), (124.36218235561,), "MGH 6")
def jennrich_sampson(x: Tensor) -> Tensor:
    return _sq(2 + 2 * _TEN - torch.exp(_TEN * x[0]) - torch.exp(_TEN * x[1]))


@_problem("HELICAL-VALLEY", (-1.0, 0.0, 0.0), (0,), "MGH 7", (1, 0, 0))
def helical_valley(x: Tensor) -> Tensor:
    a, b, c = x
    turn = torch.atan2(-a, b) / (2 * math.pi) + 0.25  # θ in (−1/4, 3/4): the cut is the half-line x1 = 0, x2 < 0
    return 100 * ((c - 10 * turn) ** 2 + (torch.sqrt(a**2 + b**2) - 1) ** 2) + c**2


_BARD_Y = _t(0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
_BARD_U = _upto(15)
_BARD_V = 16 - _BARD_U
_BARD_W = torch.minimum(_BARD_U, _BARD_V)


@_problem("BARD", (1.0, 1.0, 1.0), (8.21487e-3, 17.4286), "MGH 8", rtol=1e-5)
def bard(x: Tensor) -> Tensor:
    return _sq(_BARD_Y - (x[0] + _BARD_U / (_BARD_V * x[1] + _BARD_W * x[2])))


_GAUSS_T = (8 - _upto(15)) / 2
_GAUSS_Y = _t(0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989)
_GAUSS_Y = torch.cat([_GAUSS_Y, _GAUSS_Y[:-1].flip(0)])


@_problem("GAUSSIAN", (0.4, 1.0, 0.0), (1.12793e-8,), "MGH 9", rtol=1e-5, atol=1e-14)
def gaussian(x: Tensor) -> Tensor:
    return _sq(x[0] * torch.exp(-x[1] * (_GAUSS_T - x[2]) ** 2 / 2) - _GAUSS_Y)


_MEYER_Y = _t(
    34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872
)  # fmt: skip
_MEYER_T = 45 + 5 * _upto(16)


@_problem("MEYER", (0.02, 4000.0, 250.0), (87.945855,), "MGH 10", rtol=1e-5, gtol=1e-2)
def meyer(x: Tensor) -> Tensor:
    return _sq(x[0] * torch.exp(x[1] / (_MEYER_T + x[2])) - _MEYER_Y)


_GULF_T = _upto(99) / 100
_GULF_Y = 25 + (-50 * torch.log(_GULF_T)) ** (2 / 3)


@_problem("GULF", (5.0, 2.5, 0.15), (0,), "MGH 11", (50, 25, 1.5))
def gulf(x: Tensor) -> Tensor:
    return _sq(torch.exp(-(torch.abs(_GULF_Y - x[1]) ** x[2]) / x[0]) - _GULF_T)


_BOX_T = 0.1 * _TEN
_BOX_C = torch.exp(-_BOX_T) - torch.exp(-10 * _BOX_T)


@_problem("BOX-3D", (0.0, 10.0, 20.0), (0, 0.0755887), "MGH 12", (1, 10, 1))
def box(x: Tensor) -> Tensor:
    return _sq(torch.exp(-_BOX_T * x[0]) - torch.exp(-_BOX_T * x[1]) - x[2] * _BOX_C)


@_problem("WOOD", (-3.0, -1.0, -3.0, -1.0), (0,), "MGH 14", (1, 1, 1, 1))
def wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    return (
        100 * (b - a**2) ** 2 + (1 - a) ** 2 + 90 * (d - c**2) ** 2 + (1 - c) ** 2
        + 10 * (b + d - 2) ** 2 + 0.1 * (b - d) ** 2
    )  # fmt: skip


_KOWALIK_Y = _t(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
_KOWALIK_U = _t(4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)


@_problem("KOWALIK-OSBORNE", (0.25, 0.39, 0.415, 0.39), (3.07505e-4, 1.02734e-3), "MGH 15", rtol=1e-5, atol=1e-12)
def kowalik_osborne(x: Tensor) -> Tensor:
    u = _KOWALIK_U
    return _sq(_KOWALIK_Y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3]))


_BD_T = _upto(20) / 5


@_problem("BROWN-DENNIS", (25.0, 5.0, -5.0, -1.0), (85822.2,), "MGH 16", rtol=1e-6)
def brown_dennis(x: Tensor) -> Tensor:
    a, b, c, d = x
    return _sq((a + _BD_T * b - torch.exp(_BD_T)) ** 2 + (c + d * torch.sin(_BD_T) - torch.cos(_BD_T)) ** 2)


_OSBORNE1_Y = _t(
    0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751, 0.718, 0.685, 0.658, 0.628, 0.603,
    0.580, 0.558, 0.538, 0.522, 0.506, 0.490, 0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424, 0.420, 0.414, 0.411,
    0.406,
)  # fmt: skip
_OSBORNE1_T = 10 * _upto(32, 0)


@_problem("OSBORNE-1", (0.5, 1.5, -1.0, 0.01, 0.02), (5.46489e-5,), "MGH 17", rtol=1e-5, atol=1e-12)
def osborne1(x: Tensor) -> Tensor:
    t = _OSBORNE1_T
    return _sq(_OSBORNE1_Y - (x[0] + x[1] * torch.exp(-t * x[3]) + x[2] * torch.exp(-t * x[4])))


_BIGGS_T = 0.1 * _upto(13)
_BIGGS_Y = torch.exp(-_BIGGS_T) - 5 * torch.exp(-10 * _BIGGS_T) + 3 * torch.exp(-4 * _BIGGS_T)


@_problem("BIGGS-EXP6", (1, 2, 1, 1, 1, 1), (0, 5.65565e-3, 0.30636677), "MGH 18", (1, 10, 1, 5, 4, 3), rtol=1e-5)
def biggs_exp6(x: Tensor) -> Tensor:
    t = _BIGGS_T
    return _sq(
        x[2] * torch.exp(-t * x[0]) - x[3] * torch.exp(-t * x[1]) + x[5] * torch.exp(-t * x[4]) - _BIGGS_Y
    )  # fmt: skip


_OSBORNE2_Y = _t(
    1.366, 1.191, 1.112, 1.013, 0.991, 0.885, 0.831, 0.847, 0.786, 0.725, 0.746, 0.679, 0.608, 0.655, 0.616, 0.606,
    0.602, 0.626, 0.651, 0.724, 0.649, 0.649, 0.694, 0.644, 0.624, 0.661, 0.612, 0.558, 0.533, 0.495, 0.500, 0.423,
    0.395, 0.375, 0.372, 0.391, 0.396, 0.405, 0.428, 0.429, 0.523, 0.562, 0.607, 0.653, 0.672, 0.708, 0.633, 0.668,
    0.645, 0.632, 0.591, 0.559, 0.597, 0.625, 0.739, 0.710, 0.729, 0.720, 0.636, 0.581, 0.428, 0.292, 0.162, 0.098,
    0.054,
)  # fmt: skip
_OSBORNE2_T = _upto(64, 0) / 10


@_problem(
    "OSBORNE-2", (1.3, 0.65, 0.65, 0.7, 0.6, 3, 5, 7, 2, 4.5, 5.5), (4.01377e-2, 1.78981), "MGH 19", rtol=1e-5
)  # fmt: skip
def osborne2(x: Tensor) -> Tensor:
    t = _OSBORNE2_T
    fit = x[0] * torch.exp(-t * x[4])
    for k in range(3):
        fit = fit + x[1 + k] * torch.exp(-((t - x[8 + k]) ** 2) * x[5 + k])
    return _sq(_OSBORNE2_Y - fit)


_WATSON_T = (_upto(29) / 29)[:, None]


@_problem("WATSON", np.zeros(6), (2.28767e-3,), "MGH 20", rtol=1e-5, atol=1e-12)
def watson(x: Tensor) -> Tensor:
    n = len(x)
    powers = _WATSON_T ** torch.arange(n, dtype=torch.float64)
    derivative = powers[:, : n - 1] @ (_upto(n - 1) * x[1:])
    return _sq(derivative - (powers @ x) ** 2 - 1, x[0], x[1] - x[0] ** 2 - 1)


@_problem("SROSENBR", _tile((-1.2, 1), 1000), (0,), "MGH 21, CUTEst SROSENBR", np.ones(1000))
def extended_rosenbrock(x: Tensor) -> Tensor:
    a, b = x[::2], x[1::2]
    return _sq(10 * (b - a**2), 1 - a)


@_problem("POWELL-SINGULAR", (3.0, -1.0, 0.0, 1.0), (0,), "MGH 13", np.zeros(4), atol=1e-8)
@_problem("POWELLSG", _tile((3, -1, 0, 1), 100), (0,), "MGH 22, CUTEst POWELLSG", np.zeros(100), atol=1e-8)
def extended_powell(x: Tensor) -> Tensor:
    a, b, c, d = x[::4], x[1::4], x[2::4], x[3::4]
    return _sq(a + 10 * b) + 5 * _sq(c - d) + _sq((b - 2 * c) ** 2) + 10 * _sq((a - d) ** 2)


@_problem("PENALTY-1", np.arange(1.0, 11.0), (7.08765e-5,), "MGH 23", rtol=1e-5, atol=1e-12)
def penalty1(x: Tensor) -> Tensor:
    return 1e-5 * _sq(x - 1) + (_sq(x) - 0.25) ** 2


@_problem("PENALTY-2", np.full(10, 0.5), (2.93660e-4,), "MGH 24", rtol=1e-5, atol=1e-12)
def penalty2(x: Tensor) -> Tensor:
    n = len(x)
    i = _upto(n, 2)
    y = torch.exp(i / 10) + torch.exp((i - 1) / 10)
    e = torch.exp(x / 10)
    weights = n + 1 - _upto(n)
    return (
        (x[0] - 0.2) ** 2 + 1e-5 * (_sq(e[1:] + e[:-1] - y) + _sq(e[1:] - math.exp(-0.1)))
        + ((weights * x**2).sum() - 1) ** 2
    )  # fmt: skip


@_problem("VARDIM", 1 - np.arange(1, 11) / 10, (0,), "MGH 25, CUTEst VARDIM", np.ones(10))
def variably_dimensioned(x: Tensor) -> Tensor:
    total = (_upto(len(x)) * (x - 1)).sum()
    return _sq(x - 1) + total**2 + total**4


@_problem("TRIGONOMETRIC", np.full(10, 0.1), (0, 2.79506e-5), "MGH 26", np.zeros(10), rtol=1e-5, atol=1e-12)
def trigonometric(x: Tensor) -> Tensor:
    n = len(x)
    c = torch.cos(x)
    return _sq(n - c.sum() + _upto(n) * (1 - c) - torch.sin(x))


@_problem("BROWN-ALMOST-LINEAR", np.full(10, 0.5), (0, 1), "MGH 27", np.ones(10))
def brown_almost_linear(x: Tensor) -> Tensor:
    n = len(x)
    return _sq(x[:-1] + x.sum() - (n + 1), x.prod() - 1)


_H50 = np.arange(1, 51) / 51


@_problem("DISCRETE-BOUNDARY-VALUE", _H50 * (_H50 - 1), (0,), "MGH 28, CUTEst MOREBV")
def discrete_boundary_value(x: Tensor) -> Tensor:
    n = len(x)
    h = 1 / (n + 1)
    edge = x.new_zeros(1)
    left, right = torch.cat([edge, x[:-1]]), torch.cat([x[1:], edge])
    return _sq(2 * x - left - right + h**2 * (x + h * _upto(n) + 1) ** 3 / 2)


@_problem("DISCRETE-INTEGRAL-EQUATION", _H50 * (_H50 - 1), (0,), "MGH 29")
def discrete_integral_equation(x: Tensor) -> Tensor:
    n = len(x)
    h = 1 / (n + 1)
    t = h * _upto(n)
    kernel = torch.minimum(t[:, None], t[None, :]) * (1 - torch.maximum(t[:, None], t[None, :]))
    return _sq(x + h / 2 * (kernel @ (x + t + 1) ** 3))


@_problem("BROYDEN-TRIDIAGONAL", np.full(100, -1.0), (0,), "MGH 30")
def broyden_tridiagonal(x: Tensor) -> Tensor:
    edge = x.new_zeros(1)
    left, right = torch.cat([edge, x[:-1]]), torch.cat([x[1:], edge])
    return _sq((3 - 2 * x) * x - left - 2 * right + 1)


@_problem("BROYDEN-BANDED", np.full(100, -1.0), (0,), "MGH 31, CUTEst BRYBND")
def broyden_banded(x: Tensor) -> Tensor:
    n = len(x)
    w = torch.cat([x.new_zeros(5), x * (1 + x), x.new_zeros(1)])
    near = sum(w[k : k + n] for k in (0, 1, 2, 3, 4, 6))
    return _sq(x * (2 + 5 * x**2) + 1 - near)


@_problem("LINEAR-FULL-RANK", np.ones(10), (10,), "MGH 32 with m = 20, CUTEst ARGLINA", -np.ones(10))
def linear_full_rank(x: Tensor) -> Tensor:
    m = 20
    shift = 2 * x.sum() / m + 1
    return _sq(x - shift) + (m - len(x)) * shift**2


@_problem("LINEAR-RANK-1", np.ones(10), (190 / 41,), "MGH 33 with m = 20, CUTEst ARGLINB")
def linear_rank1(x: Tensor) -> Tensor:
    return _sq(_upto(20) * (_upto(len(x)) * x).sum() - 1)


@_problem("LINEAR-RANK-1-ZEROS", np.ones(10), (454 / 74,), "MGH 34 with m = 20, CUTEst ARGLINC")
def linear_rank1_zeros(x: Tensor) -> Tensor:
    inner = (_upto(len(x) - 1, 2) * x[1:-1]).sum()
    return 2 + _sq(_upto(18) * inner - 1)


@_problem("CHEBYQUAD", np.arange(1, 9) / 9, (3.51687e-3,), "MGH 35 with n = 8", rtol=1e-5)
def chebyquad(x: Tensor) -> Tensor:
    y = 2 * x - 1
    before, now = torch.ones_like(y), y
    total = now.mean() ** 2
    for i in range(2, len(x) + 1):
        before, now = now, 2 * y * now - before
        integral = 0.0 if i % 2 else -1 / (i * i - 1)
        total = total + (now.mean() - integral) ** 2
    return total


# ---------------------------------------------------------------------- CUTEst


@_problem("ARWHEAD", np.ones(1000), (0,), "CUTEst ARWHEAD", [1.0] * 999 + [0.0])
def arwhead(x: Tensor) -> Tensor:
    a, last = x[:-1], x[-1]
    return _sq(a**2 + last**2) + (3 - 4 * a).sum()


@_problem("BDQRTIC", np.ones(100), (378.769,), "CUTEst BDQRTIC", rtol=2e-6)
def bdqrtic(x: Tensor) -> Tensor:
    s = x**2
    return _sq(3 - 4 * x[:-4], s[:-4] + 2 * s[1:-3] + 3 * s[2:-2] + 4 * s[3:-1] + 5 * s[-1])


@_problem("CRAGGLVY", [1.0] + [2.0] * 99, (32.270,), "CUTEst CRAGGLVY", rtol=3e-5)
def cragglvy(x: Tensor) -> Tensor:
    a, b, c, d = x[:-2:2], x[1:-2:2], x[2::2], x[3::2]
    return (
        (torch.exp(a) - b) ** 4 + 100 * (b - c) ** 6 + (torch.tan(c - d) + c - d) ** 4 + a**8 + (d - 1) ** 2
    ).sum()  # fmt: skip


def _dixmaan(alpha: float, beta: float, gamma: float, delta: float, powers: tuple[int, int, int, int]) -> Fun:
    def fun(x: Tensor) -> Tensor:
        n = len(x)
        m = n // 3
        i = _upto(n) / n
        k1, k2, k3, k4 = powers
        total = 1 + alpha * (x**2 * i**k1).sum()
        if beta:
            y = x[1:]
            total = total + beta * (x[:-1] ** 2 * (y + y**2) ** 2 * i[:-1] ** k2).sum()
        total = total + gamma * (x[: 2 * m] ** 2 * x[m:] ** 4 * i[: 2 * m] ** k3).sum()
        return total + delta * (x[:m] * x[2 * m :] * i[:m] ** k4).sum()

    return fun


for _name, _numbers, _powers, _size in (
    ("DIXMAANA", (1, 0, 0.125, 0.125), (0, 0, 0, 0), 300),
    ("DIXMAAND", (1, 0.26, 0.26, 0.26), (0, 0, 0, 0), 300),
    ("DIXMAANH", (1, 0.26, 0.26, 0.26), (1, 0, 0, 1), 90),
    ("DIXMAANL", (1, 0.26, 0.26, 0.26), (2, 0, 0, 2), 90),
):
    _problem(_name, np.full(_size, 2.0), (1,), f"CUTEst {_name}", np.zeros(_size))(_dixmaan(*_numbers, _powers))


@_problem("DQDRTIC", np.full(1000, 3.0), (0,), "CUTEst DQDRTIC", np.zeros(1000))
def dqdrtic(x: Tensor) -> Tensor:
    s = x**2
    return (s[:-2] + 100 * s[1:-1] + 100 * s[2:]).sum()


@_problem("EDENSCH", np.full(36, 8.0), (219.28,), "CUTEst EDENSCH", rtol=3e-5)
def edensch(x: Tensor) -> Tensor:
    a, b = x[:-1], x[1:]
    return 16 + ((a - 2) ** 4 + (a * b - 2 * b) ** 2 + (b + 1) ** 2).sum()


@_problem("ENGVAL1", np.full(100, 2.0), (109.09,), "CUTEst ENGVAL1", rtol=5e-5)
def engval1(x: Tensor) -> Tensor:
    s = x**2
    return _sq(s[:-1] + s[1:]) + (3 - 4 * x[:-1]).sum()


@_problem("ENGVAL2", (1.0, 2.0, 0.0), (0,), "CUTEst ENGVAL2", (0, 0, 1))
def engval2(x: Tensor) -> Tensor:
    a, b, c = x
    return (
        (a**2 + b**2 + c**2 - 1) ** 2 + (a**2 + b**2 + (c - 2) ** 2 - 1) ** 2 + (a + b + c - 1) ** 2
        + (a + b - c + 1) ** 2 + (3 * b**2 + a**3 + (5 * c - a + 1) ** 2 - 36) ** 2
    )  # fmt: skip


@_problem("FLETCHCR", np.zeros(100), (0,), "CUTEst FLETCHCR")
def fletchcr(x: Tensor) -> Tensor:
    a, b = x[:-1], x[1:]
    return 100 * _sq(b - a + 1 - a**2)


@_problem("FREUROTH", (0.5, -2.0) + (0.0,) * 8, (1.01406407e3,), "CUTEst FREUROTH")
def freuroth(x: Tensor) -> Tensor:
    a, b = x[:-1], x[1:]
    return _sq(a - 13 + 5 * b**2 - b**3 - 2 * b, a - 29 + b**3 + b**2 - 14 * b)


@_problem("GENROSE", np.arange(1, 101) / 101, (1,), "CUTEst GENROSE", np.ones(100))
def genrose(x: Tensor) -> Tensor:
    a, b = x[:-1], x[1:]
    return 1 + _sq(10 * (b - a**2), b - 1)


@_problem("LIARWHD", np.full(1000, 4.0), (0,), "CUTEst LIARWHD", np.ones(1000))
def liarwhd(x: Tensor) -> Tensor:
    return _sq(2 * (x**2 - x[0]), x - 1)


@_problem("NONDIA", np.full(100, -1.0), (0,), "CUTEst NONDIA", np.ones(100))
def nondia(x: Tensor) -> Tensor:
    return (x[0] - 1) ** 2 + 100 * _sq(x[0] - x[:-1] ** 2)


@_problem("NONDQUAR", _tile((1, -1), 100), (0,), "CUTEst NONDQUAR", np.zeros(100), atol=1e-6)
def nondquar(x: Tensor) -> Tensor:
    return (x[0] - x[1]) ** 2 + (x[-2] + x[-1]) ** 2 + _sq((x[:-2] + x[1:-1] + x[-1]) ** 2)


@_problem("POWER", np.ones(20), (0,), "CUTEst POWER", np.zeros(20), atol=1e-8)
def power(x: Tensor) -> Tensor:
    return (_upto(len(x)) * x**2).sum() ** 2


@_problem("QUARTC", np.full(100, 2.0), (0,), "CUTEst QUARTC", np.arange(1.0, 101.0), atol=1e-8)
def quartc(x: Tensor) -> Tensor:
    return ((x - _upto(len(x))) ** 4).sum()


@_problem("SINQUAD", np.full(5, 0.1), (0,), "CUTEst SINQUAD", np.ones(5), atol=1e-8)
def sinquad(x: Tensor) -> Tensor:
    first, last, mid = x[0], x[-1], x[1:-1]
    return (first - 1) ** 4 + _sq(torch.sin(mid - last) - first**2 + mid**2) + (last**2 - first**2) ** 2


@_problem("TOINTGSS", np.full(100, 3.0), [(980 + 10 * k) / 102 for k in range(4)], "CUTEst TOINTGSS", np.zeros(100))
def tointgss(x: Tensor) -> Tensor:
    a, b, s = x[:-2], x[1:-1], x[2:] ** 2
    return ((10 / (len(x) + 2) + s) * (2 - torch.exp(-((a - b) ** 2) / (0.1 + s)))).sum()


@_problem("TRIDIA", np.ones(100), (0,), "CUTEst TRIDIA", 0.5 ** np.arange(100))
def tridia(x: Tensor) -> Tensor:
    return (x[0] - 1) ** 2 + (_upto(len(x), 2) * (2 * x[1:] - x[:-1]) ** 2).sum()


@_problem("TQUARTIC", np.full(10, 0.1), (0,), "CUTEst TQUARTIC", np.ones(10))
def tquartic(x: Tensor) -> Tensor:
    return (x[0] - 1) ** 2 + _sq(x[0] ** 2 - x[1:] ** 2)


@_problem("SCHMVETT", np.full(100, 0.5), (-294,), "CUTEst SCHMVETT")
def schmvett(x: Tensor) -> Tensor:
    a, b, c = x[:-2], x[1:-1], x[2:]
    return -(
        1 / (1 + (a - b) ** 2) + torch.sin((math.pi * b + c) / 2) + torch.exp(-(((a + c) / b - 2) ** 2))
    ).sum()  # fmt: skip


@_problem("COSINE", np.ones(100), (-99,), "CUTEst COSINE")
def cosine(x: Tensor) -> Tensor:
    return torch.cos(x[:-1] ** 2 - 0.5 * x[1:]).sum()


_CHAIN = _t(
    1.25, 1.40, 2.40, 1.40, 1.75, 1.20, 2.25, 1.20, 1.00, 1.10, 1.50, 1.60, 1.25, 1.25, 1.20, 1.20, 1.40, 0.50, 0.50,
    1.25, 1.80, 0.75, 1.25, 1.40, 1.60, 2.00, 1.00, 1.60, 1.25, 2.75, 1.25, 1.25, 1.25, 3.00, 1.50, 2.00, 1.25, 1.40,
    1.80, 1.50, 2.20, 1.40, 1.50, 1.25, 2.00, 1.50, 1.25, 1.40, 0.60, 1.50,
)  # fmt: skip


@_problem("CHNROSNB", np.full(50, -1.0), (0,), "CUTEst CHNROSNB", np.ones(50))
def chnrosnb(x: Tensor) -> Tensor:
    return _sq(4 * _CHAIN[1:] * (x[:-1] - x[1:] ** 2), x[1:] - 1)


@_problem("ERRINROS", np.full(50, -1.0), (39.9041,), "CUTEst ERRINROS", rtol=1e-5)
def errinros(x: Tensor) -> Tensor:
    return _sq(x[:-1] - 16 * _CHAIN[1:] ** 2 * x[1:] ** 2, x[1:] - 1)


@_problem("EXTROSNB", np.full(5, -1.0), (0,), "CUTEst EXTROSNB", np.ones(5))
def extrosnb(x: Tensor) -> Tensor:
    return (x[0] - 1) ** 2 + 100 * _sq(x[1:] - x[:-1] ** 2)


@_problem("DIXON3DQ", np.full(100, -1.0), (0,), "CUTEst DIXON3DQ", np.ones(100))
def dixon3dq(x: Tensor) -> Tensor:
    return (x[0] - 1) ** 2 + _sq(x[1:-1] - x[2:]) + (x[-1] - 1) ** 2


@_problem("DENSCHNA", (1.0, 1.0), (0,), "CUTEst DENSCHNA", (0, 0))
def denschna(x: Tensor) -> Tensor:
    a, b = x
    return a**4 + (a + b) ** 2 + (torch.exp(b) - 1) ** 2


@_problem("DENSCHNB", (1.0, 1.0), (0,), "CUTEst DENSCHNB", (2, -1))
def denschnb(x: Tensor) -> Tensor:
    a, b = x
    return (a - 2) ** 2 + ((a - 2) * b) ** 2 + (b + 1) ** 2


@_problem("DENSCHNC", (2.0, 3.0), (0, 0.18336), "CUTEst DENSCHNC", (1, 1), rtol=1e-4)
def denschnc(x: Tensor) -> Tensor:
    a, b = x
    return (a**2 + b**2 - 2) ** 2 + (torch.exp(a - 1) + b**3 - 2) ** 2


@_problem("DENSCHND", (10.0, 10.0, 10.0), (0,), "CUTEst DENSCHND", (0, 0, 0), atol=1e-6)
def denschnd(x: Tensor) -> Tensor:
    a, b, c = x
    return (a**2 + b**3 - c**4) ** 2 + (2 * a * b * c) ** 2 + (2 * a * b - 3 * b * c + a * c) ** 2


@_problem("DENSCHNE", (2.0, 3.0, -8.0), (0, 1), "CUTEst DENSCHNE", (0, 0, 0))
def denschne(x: Tensor) -> Tensor:
    a, b, c = x
    return a**2 + (b + b**2) ** 2 + (torch.exp(c) - 1) ** 2


@_problem("DENSCHNF", (2.0, 0.0), (0,), "CUTEst DENSCHNF", (1, 1))
def denschnf(x: Tensor) -> Tensor:
    a, b = x
    return (2 * (a + b) ** 2 + (a - b) ** 2 - 8) ** 2 + (5 * a**2 + (b - 3) ** 2 - 9) ** 2


@_problem("CLIFF", (0.0, -1.0), (0.199786614,), "CUTEst CLIFF")
def cliff(x: Tensor) -> Tensor:
    a, b = x
    return ((a - 3) / 100) ** 2 - (a - b) + torch.exp(20 * (a - b))


@_problem("CUBE", (-1.2, 1.0), (0,), "CUTEst CUBE", (1, 1))
def cube(x: Tensor) -> Tensor:
    a, b = x
    return 100 * (b - a**3) ** 2 + (1 - a) ** 2


@_problem("HAIRY", (-5.0, -7.0), (20,), "CUTEst HAIRY", (0, 0))
def hairy(x: Tensor) -> Tensor:
    a, b = x
    hair = 30 * torch.sin(7 * a) ** 2 * torch.cos(7 * b) ** 2
    return hair + 100 * torch.sqrt(0.01 + (a - b) ** 2) + 100 * torch.sqrt(0.01 + a**2)


@_problem("HIMMELBG", (0.5, 0.5), (0,), "CUTEst HIMMELBG", (0, 0))
def himmelbg(x: Tensor) -> Tensor:
    a, b = x
    return torch.exp(-a - b) * (2 * a**2 + 3 * b**2)


@_problem("HIMMELBH", (0.0, 2.0), (-1,), "CUTEst HIMMELBH", (1, 1))
def himmelbh(x: Tensor) -> Tensor:
    a, b = x
    return -3 * a - 2 * b + 2 + a**3 + b**2


@_problem("BRKMCC", (2.0, 2.0), (0.16904,), "CUTEst BRKMCC", rtol=5e-5)
def brkmcc(x: Tensor) -> Tensor:
    a, b = x
    return (a - 2) ** 2 + (b - 1) ** 2 + 0.04 / (1 - 0.25 * a**2 - b**2) + 5 * (a - 2 * b + 1) ** 2


@_problem("SISSER", (1.0, 0.1), (0,), "CUTEst SISSER", (0, 0), atol=1e-8)
def sisser(x: Tensor) -> Tensor:
    a, b = x
    return 3 * a**4 - 2 * (a * b) ** 2 + 3 * b**4


_HILBERT = 1 / (_upto(10)[:, None] + _upto(10)[None, :] - 1)


@_problem("HILBERTA", np.ones(10), (0,), "CUTEst HILBERTA", np.zeros(10))
def hilberta(x: Tensor) -> Tensor:
    return x @ _HILBERT @ x


@_problem("ZANGWIL2", (3.0, 8.0), (-18.2,), "CUTEst ZANGWIL2", (4, 9))
def zangwil2(x: Tensor) -> Tensor:
    a, b = x
    return (16 * a**2 + 16 * b**2 - 8 * a * b - 56 * a - 256 * b + 991) / 15


@_problem("MARATOSB", (1.1, 0.1), (-1.00000006,), "CUTEst MARATOSB", rtol=1e-7)
def maratosb(x: Tensor) -> Tensor:
    return x[0] + 1e6 * (_sq(x) - 1) ** 2


@_problem("MEXHAT", (0.86, 0.72), (-0.0401,), "CUTEst MEXHAT")
def mexhat(x: Tensor) -> Tensor:
    a, b = x
    ring = (a - 1) ** 2
    return -2 * ring + 1e4 * (-0.02 + (b - a**2) ** 2 / 1e4 + ring) ** 2


_ROOT = 6
_MSQRT_B = torch.sin(_upto(_ROOT * _ROOT) ** 2).reshape(_ROOT, _ROOT)
_MSQRT_B[2, 0] = 0.0
_MSQRT_A = _MSQRT_B @ _MSQRT_B


@_problem("MSQRTALS", 0.2 * _MSQRT_B.flatten().numpy(), (0,), "CUTEst MSQRTALS", _MSQRT_B.flatten().numpy())
def msqrtals(x: Tensor) -> Tensor:
    root = x.reshape(_ROOT, _ROOT)
    return _sq(root @ root - _MSQRT_A)


_EIGEN = 10
_EIGEN_A = torch.diag(_upto(_EIGEN))


@_problem("EIGENALS", np.r_[np.ones(_EIGEN), np.eye(_EIGEN).ravel()], (0,), "CUTEst EIGENALS",
          np.r_[np.arange(1.0, _EIGEN + 1), np.eye(_EIGEN).ravel()])  # fmt: skip
def eigenals(x: Tensor) -> Tensor:
    d, q = x[:_EIGEN], x[_EIGEN:].reshape(_EIGEN, _EIGEN)
    upper = torch.triu(torch.ones(_EIGEN, _EIGEN, dtype=torch.float64))
    return _sq(upper * (q.T @ (d[:, None] * q) - _EIGEN_A), upper * (q.T @ q - torch.eye(_EIGEN, dtype=torch.float64)))


_SURFACE = 12
_PLANE = 1 + 8 * torch.linspace(0, 1, _SURFACE, dtype=torch.float64)[:, None] \
    + 4 * torch.linspace(0, 1, _SURFACE, dtype=torch.float64)[None, :]  # fmt: skip


@_problem("LMINSURF", np.zeros((_SURFACE - 2) ** 2), (9,), "CUTEst LMINSURF", _PLANE[1:-1, 1:-1].flatten().numpy())
def lminsurf(x: Tensor) -> Tensor:
    inner = x.reshape(_SURFACE - 2, _SURFACE - 2)
    inner = torch.cat([_PLANE[1:-1, :1], inner, _PLANE[1:-1, -1:]], dim=1)
    u = torch.cat([_PLANE[:1], inner, _PLANE[-1:]])
    cells = _SURFACE - 1
    across, along = u[1:, 1:] - u[:-1, :-1], u[1:, :-1] - u[:-1, 1:]
    return torch.sqrt(1 + 0.5 * cells**2 * (across**2 + along**2)).mean()


@_problem("SPARSQUR", np.full(100, 0.5), (0,), "CUTEst SPARSQUR", np.zeros(100), atol=1e-8)
def sparsqur(x: Tensor) -> Tensor:
    n = len(x)
    i = torch.arange(1, n + 1)
    s = x**2
    total = s + sum(s[(k * i - 1) % n] for k in (2, 3, 5, 7, 11))
    return (i * total**2).sum() / 8


# ---------------------------------------------------------------------- Andrei


@_problem("RAYDAN-1", np.ones(100), (505,), "Andrei, Raydan 1", np.zeros(100))
def raydan1(x: Tensor) -> Tensor:
    return (_upto(len(x)) / 10 * (torch.exp(x) - x)).sum()


@_problem("HAGER", np.ones(100), (float((_upto(100).sqrt() * (1 - 0.5 * _upto(100).log())).sum()),), "Andrei, Hager",
          0.5 * np.log(np.arange(1, 101)))  # fmt: skip
def hager(x: Tensor) -> Tensor:
    return (torch.exp(x) - _upto(len(x)).sqrt() * x).sum()


@_problem("TET", np.full(100, 0.1), (100 * math.sqrt(2) * math.exp(-0.1),), "Andrei, extended three exponential terms",
          _tile((-math.log(2) / 2, 0), 100))  # fmt: skip
def tet(x: Tensor) -> Tensor:
    a, b = x[::2], x[1::2]
    return (torch.exp(a + 3 * b - 0.1) + torch.exp(a - 3 * b - 0.1) + torch.exp(-a - 0.1)).sum()


@_problem("PSC1", _tile((3, 0.1), 100), (50 * 0.77319906,), "Andrei, extended PSC1")
def psc1(x: Tensor) -> Tensor:
    a, b = x[::2], x[1::2]
    return _sq(a**2 + b**2 + a * b) + (torch.sin(a) ** 2 + torch.cos(b) ** 2).sum()


_MARATOS = float(np.roots([400, 0, -400, 1]).real.min())  # the root of d/da (a + 100 (a² − 1)²) near −1


@_problem("MARATOS-EXTENDED", _tile((1.1, 0.1), 10), (5 * (_MARATOS + 100 * (_MARATOS**2 - 1) ** 2),),
          "Andrei, extended Maratos with c = 100", _tile((_MARATOS, 0), 10))  # fmt: skip
def maratos(x: Tensor) -> Tensor:
    a, b = x[::2], x[1::2]
    return a.sum() + 100 * _sq(a**2 + b**2 - 1)


# ---------------------------------------------------------------------- global optimisation


def _line_minima(phi: Fun, reach: float, count: int) -> list[float]:
    """Values of the lowest `count` minima of a function of one variable within ±reach, lowest first."""
    grid = torch.linspace(-reach, reach, 4001, dtype=torch.float64)
    values = torch.stack([phi(t) for t in grid])
    inner = (values[1:-1] < values[:-2]) & (values[1:-1] <= values[2:])
    found = {round(value_and_gradient(phi, _polish_line(phi, float(t)))[0], 13) for t in grid[1:-1][inner]}
    return sorted(found)[:count]


def _polish_line(phi: Fun, t: float) -> float:
    """Newton's iteration for φ' = 0 near t."""
    for _ in range(6):
        point = tensor(t).requires_grad_()
        (derivative,) = torch.autograd.grad(phi(point), point, create_graph=True)
        (second,) = torch.autograd.grad(derivative, point)
        t -= float(derivative.detach()) / float(second)
    return t


def _sums(*lines: Sequence[float]) -> list[float]:
    """Minima of a separable function from those of its terms, lowest first."""
    return sorted({round(sum(choice), 12) for choice in itertools.product(*lines)})


@_problem("HIMMELBLAU", (0.0, 0.0), (0,), "JY 65", (3, 2))
def himmelblau(x: Tensor) -> Tensor:
    a, b = x
    return (a**2 + b - 11) ** 2 + (a + b**2 - 7) ** 2


@_problem("CAMEL-3", (2.0, 2.0), (0, 0.298638442237), "JY 29", (0, 0))
def camel3(x: Tensor) -> Tensor:
    a, b = x
    return 2 * a**2 - 1.05 * a**4 + a**6 / 6 + a * b + b**2


@_problem("CAMEL-6", (1.5, 0.5), (-1.0316284534899, -0.2154638243837, 2.1042503103033), "JY 30, DS",
          (0.0898420131003, -0.7126564030207))  # fmt: skip
def camel6(x: Tensor) -> Tensor:
    a, b = x
    return (4 - 2.1 * a**2 + a**4 / 3) * a**2 + a * b + (4 * b**2 - 4) * b**2


_DEEP, _SHALLOW = -39.166165703771, -25.029446504
_ST_DEEP = -2.903534027771


@_problem("STYBLINSKI-TANG", (-1.0, 1.0, 0.5, -0.1, 2.0, 3.0),
          [k * _DEEP + (6 - k) * _SHALLOW for k in range(6, -1, -1)], "JY 144",
          np.full(6, _ST_DEEP))  # fmt: skip
def styblinski_tang(x: Tensor) -> Tensor:
    return (x**4 - 16 * x**2 + 5 * x).sum() / 2


@_problem("MCCORMICK", (0.0, 0.0), [-1.913222954981 - k * math.pi for k in (*range(16), -1, -2, -3)], "JY 75",
          (0.5 - math.pi / 3, -0.5 - math.pi / 3))  # fmt: skip
def mccormick(x: Tensor) -> Tensor:
    a, b = x
    return torch.sin(a + b) + (a - b) ** 2 - 1.5 * a + 2.5 * b + 1


@_problem("BOOTH", (0.0, 0.0), (0,), "JY 17", (1, 3))
def booth(x: Tensor) -> Tensor:
    a, b = x
    return (a + 2 * b - 7) ** 2 + (2 * a + b - 5) ** 2


@_problem("MATYAS", (5.0, -3.0), (0,), "JY 71", (0, 0))
def matyas(x: Tensor) -> Tensor:
    a, b = x
    return 0.26 * (a**2 + b**2) - 0.48 * a * b


@_problem("DIXON-PRICE", np.arange(1.0, 11.0), (0, 2 / 3), "JY 48",
          2.0 ** -(1 - 0.5 ** np.arange(10)))  # fmt: skip
def dixon_price(x: Tensor) -> Tensor:
    return (x[0] - 1) ** 2 + (_upto(len(x), 2) * (2 * x[1:] ** 2 - x[:-1]) ** 2).sum()


@_problem("ZAKHAROV", np.ones(10), (0,), "JY 173", np.zeros(10))
def zakharov(x: Tensor) -> Tensor:
    tilt = (_upto(len(x)) * x).sum() / 2
    return _sq(x) + tilt**2 + tilt**4


_GRIEWANK_MINIMA = (
    0, 0.0073960403341, 0.009864672061, 0.019719489248, 0.027125384395, 0.029584161212, 0.039458688195, 0.046835018588,
    0.059178177055, 0.066564362261,
)  # fmt: skip


@_problem("GRIEWANK", (1.0, -1.0), _GRIEWANK_MINIMA, "JY 59", (0, 0))
def griewank(x: Tensor) -> Tensor:
    return 1 + _sq(x) / 4000 - torch.cos(x / _upto(len(x)).sqrt()).prod()


def _rastrigin_term(t: Tensor) -> Tensor:
    return t**2 - 10 * torch.cos(2 * math.pi * t) + 10


@_problem("RASTRIGIN", (0.2, -0.3, 0.1, 0.25), _sums(*[_line_minima(_rastrigin_term, 5.2, 6)] * 4),
          "Rastrigin (1974)", np.zeros(4))  # fmt: skip
def rastrigin(x: Tensor) -> Tensor:
    return _rastrigin_term(x).sum()


@_problem(
    "LEVY",
    np.zeros(4),
    (0, 0.089528250416, 0.17905650083, 0.45432401859, 0.54385226901),
    "Levy and Montalvo (1985)",
    np.ones(4),
)
def levy(x: Tensor) -> Tensor:
    w = 1 + (x - 1) / 4
    inner, last = w[:-1], w[-1]
    return (
        torch.sin(math.pi * w[0]) ** 2
        + ((inner - 1) ** 2 * (1 + 10 * torch.sin(math.pi * inner + 1) ** 2)).sum()
        + (last - 1) ** 2 * (1 + torch.sin(2 * math.pi * last) ** 2)
    )


@_problem("GOLDSTEIN-PRICE", (1.0, 1.0), (3, 30, 84, 840), "DS", (0, -1))
def goldstein_price(x: Tensor) -> Tensor:
    a, b = x
    one = 1 + (a + b + 1) ** 2 * (19 - 14 * a + 3 * a**2 - 14 * b + 6 * a * b + 3 * b**2)
    two = 30 + (2 * a - 3 * b) ** 2 * (18 - 32 * a + 12 * a**2 + 48 * b - 36 * a * b + 27 * b**2)
    return one * two


@_problem("BRANIN", (2.5, 7.5), (5 / (4 * math.pi),), "DS", (math.pi, 2.275))
def branin(x: Tensor) -> Tensor:
    a, b = x
    second = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return second**2 + 10 * (1 - 1 / (8 * math.pi)) * torch.cos(a) + 10


@_problem("EASOM", (2.5, 3.5), (-1,), "JY 50", (math.pi, math.pi))
def easom(x: Tensor) -> Tensor:
    return -torch.cos(x).prod() * torch.exp(-_sq(x - math.pi))


def _bohachevsky_a(t: Tensor) -> Tensor:
    return t**2 - 0.3 * torch.cos(3 * math.pi * t) + 0.3


def _bohachevsky_b(t: Tensor) -> Tensor:
    return 2 * t**2 - 0.4 * torch.cos(4 * math.pi * t) + 0.4


@_problem("BOHACHEVSKY", (0.7, -0.4), _sums(_line_minima(_bohachevsky_a, 3, 6), _line_minima(_bohachevsky_b, 3, 6)),
          "JY 11", (0, 0))  # fmt: skip
def bohachevsky(x: Tensor) -> Tensor:
    return _bohachevsky_a(x[0]) + _bohachevsky_b(x[1])


@_problem("TRID", np.zeros(20), (-20 * 24 * 19 / 6,), "JY 150", np.arange(1, 21) * (21 - np.arange(1.0, 21)))
def trid(x: Tensor) -> Tensor:
    return _sq(x - 1) - (x[1:] * x[:-1]).sum()


_SHEKEL_A = _t(4, 4, 4, 4, 1, 1, 1, 1, 8, 8, 8, 8, 6, 6, 6, 6, 3, 7, 3, 7).reshape(5, 4)
_SHEKEL_C = _t(0.1, 0.2, 0.2, 0.4, 0.4)


@_problem("SHEKEL-5", (4.5, 3.5, 5.0, 4.2), (-10.1532, -5.10077, -5.05520, -2.68286, -2.63047), "DS", rtol=1e-5)
def shekel5(x: Tensor) -> Tensor:
    return -(1 / (((x - _SHEKEL_A) ** 2).sum(1) + _SHEKEL_C)).sum()


_HARTMAN_C = _t(1, 1.2, 3, 3.2)
_HARTMAN3_A = _t(3, 10, 30, 0.1, 10, 35, 3, 10, 30, 0.1, 10, 35).reshape(4, 3)
_HARTMAN3_P = 1e-4 * _t(3689, 1170, 2673, 4699, 4387, 7470, 1091, 8732, 5547, 381, 5743, 8828).reshape(4, 3)
_HARTMAN6_A = _t(
    10, 3, 17, 3.5, 1.7, 8, 0.05, 10, 17, 0.1, 8, 14, 3, 3.5, 1.7, 10, 17, 8, 17, 8, 0.05, 10, 0.1, 14
).reshape(4, 6)  # fmt: skip
_HARTMAN6_P = 1e-4 * _t(
    1312, 1696, 5569, 124, 8283, 5886, 2329, 4135, 8307, 3736, 1004, 9991,
    2348, 1451, 3522, 2883, 3047, 6650, 4047, 8828, 8732, 5743, 1091, 381,
).reshape(4, 6)  # fmt: skip


@_problem("HARTMAN-3", np.full(3, 0.5), (-3.86278, -3.08976), "DS", rtol=1e-5)
def hartman3(x: Tensor) -> Tensor:
    return -(_HARTMAN_C * torch.exp(-(_HARTMAN3_A * (x - _HARTMAN3_P) ** 2).sum(1))).sum()


@_problem("HARTMAN-6", np.full(6, 0.5), (-3.32237, -3.20316), "DS", rtol=1e-5)
def hartman6(x: Tensor) -> Tensor:
    return -(_HARTMAN_C * torch.exp(-(_HARTMAN6_A * (x - _HARTMAN6_P) ** 2).sum(1))).sum()


@_problem("WAYBURN-SEADER", (2.0, 2.0), (0,), "JY 163", (1, 2))
def wayburn_seader(x: Tensor) -> Tensor:
    a, b = x
    return (a**6 + b**4 - 17) ** 2 + (2 * a + b - 4) ** 2


def _egg_term(t: Tensor) -> Tensor:
    return t**2 + 25 * torch.sin(t) ** 2


@_problem("EGG-CRATE", (1.0, -1.2), _sums(*[_line_minima(_egg_term, 10, 4)] * 2), "JY 52", (0, 0))
def egg_crate(x: Tensor) -> Tensor:
    return _egg_term(x).sum()


@_problem("QING", np.ones(100), (0,), "JY 98", np.sqrt(np.arange(1, 101)))
def qing(x: Tensor) -> Tensor:
    return _sq(x**2 - _upto(len(x)))


@_problem("DECKKERS-AARTS", (1.0, 10.0), (-24776.518342,), "JY 47", rtol=1e-7)
def deckkers_aarts(x: Tensor) -> Tensor:
    a, b = x
    r = a**2 + b**2
    return 1e5 * a**2 + b**2 - r**2 + 1e-5 * r**4


@_problem("EXPONENTIAL", np.full(10, 0.5), (-1,), "JY 54", np.zeros(10))
def exponential(x: Tensor) -> Tensor:
    return -torch.exp(-_sq(x) / 2)


# ---------------------------------------------------------------------- long walks, our own


def _hairs(x: Tensor) -> Tensor:
    """Pairs of variables in a valley with humps all the way; per pair the minimum is 20, at zero."""
    a, b = x[0::2], x[1::2]
    humps = 30 * torch.sin(7 * a) ** 2 * torch.cos(7 * b) ** 2
    return (humps + 100 * torch.sqrt(0.01 + (a - b) ** 2) + 100 * torch.sqrt(0.01 + a**2)).sum()


_problem("HAIRY-CHAIN", _tile((-5.0, -7.0), 10), (100,), "own, after HAIRY", np.zeros(10))(_hairs)
_problem("HAIRY-CHAIN-FAR", _tile((-20.0, 30.0), 10) + np.sin(np.arange(10)), (100,), "own", np.zeros(10))(_hairs)


def _ends(x: Tensor) -> Tensor:
    """Put the boundary values 0 around x."""
    return torch.nn.functional.pad(x, (1, 1))


def _boundary_values(x: Tensor) -> Tensor:
    """Squared residuals of u'' = (u + t + 1)³/2, u(0) = u(1) = 0 (MGH 28), whose minimum is zero."""
    u, h = _ends(x), 1.0 / (len(x) + 1)
    return _sq(2 * x - u[:-2] - u[2:] + h**2 * (x + h * _upto(len(x)) + 1) ** 3 / 2)


_problem("BOUNDARY-VALUES-FAR", np.full(40, 30.0), (0,), "own, after MGH 28", atol=1e-8)(_boundary_values)


def _pendula(x: Tensor) -> Tensor:
    """Energy of a chain ∫ u'²/2 + 10 cos 3u with fixed ends."""
    u, h = _ends(x), 1.0 / (len(x) + 1)
    return _sq(u[1:] - u[:-1]) / (2 * h) + 10 * h * torch.cos(3 * u).sum()


_problem("PENDULA-FAR", 100 * np.sin(np.arange(40)), (-1.33224859887411,), "own")(_pendula)


def _stretched(x: Tensor) -> Tensor:
    """Put variables that differ by a factor of e⁶ into the same unit."""
    return x * torch.exp(6 * (_upto(len(x)) - 1) / (len(x) - 1))


def _chained_cosines(x: Tensor) -> Tensor:
    """A chain of cosines, whose minimum is −1 a link; valleys are as bent as they are long."""
    y = _stretched(x)
    return torch.cos(y[:-1] ** 2 - y[1:] / 2).sum()


def _cosine_products(x: Tensor) -> Tensor:
    """Products of the cosines of neighbours in a wide bowl, with many minima."""
    y = _stretched(x)
    return 0.01 * _sq(y) - (torch.cos(y[:-1]) * torch.cos(y[1:])).sum()


def walks(n: int) -> list[ZooProblem]:
    """The same in n variables, from a usual start and from far away; with a gradient of 1e-6, which n leaves open.

    Those without a minimum here have many; any will do.
    """
    one, steps = 1.0 / _stretched(torch.ones(n, dtype=torch.float64)).numpy(), np.arange(n)
    wave, energy = np.sin(steps), {10: -0.750148, 100: -1.47185, 1000: -1.55984}[n]
    chosen = [
        ("HAIRY-CHAIN", _hairs, _tile((-5.0, -7.0), n), 10.0 * n, 1e-6),
        ("HAIRY-CHAIN-FAR", _hairs, _tile((-20.0, 30.0), n) + wave, 10.0 * n, 1e-6),
        ("BOUNDARY-VALUES", _boundary_values, np.ones(n), 0.0, 1e-4),
        ("BOUNDARY-VALUES-FAR", _boundary_values, np.full(n, 30.0), 0.0, 1e-4),
        ("PENDULA", _pendula, wave, energy, 1e-5),
        ("PENDULA-FAR", _pendula, 100 * wave, energy, 1e-5),
        ("CHAINED-COSINES", _chained_cosines, one, None, 0.0),
        ("CHAINED-COSINES-FAR", _chained_cosines, 5 * one, None, 0.0),
        ("COSINE-PRODUCTS", _cosine_products, 2 * np.sin(steps + 1) * one, None, 0.0),
        ("COSINE-PRODUCTS-FAR", _cosine_products, 10 * np.sin(steps + 1) * one, None, 0.0),
    ]
    return [
        ZooProblem(f"{name}-{n}", fun, np.asarray(x0), (end,), "own", atol=atol, gtol=1e-6)
        if end is not None
        else ZooProblem(f"{name}-{n}", fun, np.asarray(x0), (), "own", gtol=1e-5)
        for name, fun, x0, end, atol in chosen
    ]


PROBLEMS: tuple[ZooProblem, ...] = tuple(_ZOO)
"""The zoo."""

BY_NAME: dict[str, ZooProblem] = {problem.name: problem for problem in PROBLEMS}
"""The zoo by name."""


# ---------------------------------------------------------------------- saddle points


def double_well(x: Tensor) -> Tensor:
    return (x[0] ** 2 - 1) ** 2 + _sq(x[1:])


def mexican_hat(x: Tensor) -> Tensor:
    return (_sq(x) - 1) ** 2


def monkey(x: Tensor) -> Tensor:
    a, b, c = x
    return a**3 - 3 * a * b**2 - 0.25 * c**2 + _sq(x) ** 2


def monkey_flat(x: Tensor) -> Tensor:
    a, b = x
    return a**3 - 3 * a * b**2 - 0.005 * a**2 + _sq(x) ** 2


def _factorise(m: Sequence[float], rank: int) -> Fun:
    target = torch.diag(_t(*m))

    def fun(x: Tensor) -> Tensor:
        u = x.reshape(len(m), rank)
        return 0.5 * _sq(target - u @ u.T)

    return fun


def _deep_linear(m: Sequence[float]) -> Fun:
    k = len(m)
    target = torch.diag(_t(*m))

    def fun(x: Tensor) -> Tensor:
        return 0.5 * _sq(x[k * k :].reshape(k, k) @ x[: k * k].reshape(k, k) - target)

    return fun


def _one_negative(n: int, curvature: float, stiff: float) -> Fun:
    """½ Σ dᵢ yᵢ² − ½ c y₁² + ¼ y₁⁴ with y = Qx for a reflection Q that mixes all coordinates."""
    d = torch.linspace(1.0, stiff, n - 1, dtype=torch.float64)
    mirror = torch.sin(_upto(n))
    mirror = mirror / mirror.norm()

    def fun(x: Tensor) -> Tensor:
        y = x - 2 * (mirror @ x) * mirror
        return 0.5 * (d * y[1:] ** 2).sum() - 0.5 * curvature * y[0] ** 2 + 0.25 * y[0] ** 4

    return fun


def _rayleigh(eigenvalues: Tensor) -> Fun:
    def fun(x: Tensor) -> Tensor:
        return -0.5 * (eigenvalues * x**2).sum() + 0.25 * _sq(x) ** 2

    return fun


def _unit(n: int) -> Floats:
    return np.eye(n)[0]


def bumps(x: Tensor) -> Tensor:
    return torch.cos(x).sum()


def sine_product(x: Tensor) -> Tensor:
    return torch.sin(x[0]) * torch.sin(x[1])


def kuramoto(x: Tensor) -> Tensor:
    return -torch.triu(torch.cos(x[:, None] - x[None, :]), 1).sum()


def allen_cahn(x: Tensor) -> Tensor:
    return 0.25 * _sq(x**2 - 1) + 2 * _sq(x[1:] - x[:-1])


def tensor_decomposition(x: Tensor) -> Tensor:
    """½‖T − x⊗x⊗x⊗x‖² for T = Σ eᵢ⊗eᵢ⊗eᵢ⊗eᵢ."""
    return 0.5 * (len(x) - 2 * (x**4).sum() + _sq(x) ** 4)


def geman_mcclure(x: Tensor) -> Tensor:
    s = x**2
    return ((s - 1) ** 2 / (1 + s)).sum()


_DRAWS = np.random.default_rng(1902)
_PHASE_A = tensor(_DRAWS.standard_normal((40, 5)))
_PHASE_Y = (_PHASE_A @ _t(1, -1, 0.5, 2, 0)) ** 2
_NET_X = tensor(_DRAWS.standard_normal((30, 3)))
_NET_Y = torch.tanh(_NET_X @ _t(1, -2, 0.5))


def phase_retrieval(x: Tensor) -> Tensor:
    return ((_PHASE_A @ x) ** 2 - _PHASE_Y).square().mean() / 4


def two_layer_net(x: Tensor) -> Tensor:
    out = torch.tanh(_NET_X @ x[:12].reshape(3, 4)) @ x[12:]
    return 0.5 * (out - _NET_Y).square().mean() + 0.005 * _sq(x)


def nearly_flat(x: Tensor) -> Tensor:
    return -1e-3 * x[0] ** 2 + x[0] ** 4 + _sq(x[1:])


def ill_conditioned(x: Tensor) -> Tensor:
    return 5e3 * x[0] ** 2 - 0.005 * x[1] ** 2 + 0.25 * x[1] ** 4


def quarter_himmelblau(x: Tensor) -> Tensor:
    return himmelblau(x) / 4


def small_wood(x: Tensor) -> Tensor:
    return wood(x) / 16


def bent_valley(x: Tensor) -> Tensor:
    a, b = x
    return 0.25 * (b**2 - a) ** 2 + (a - 1) ** 2


_saddle("double well", double_well, (0, 0), -4, 0, L1=8, L2=24)
_saddle("double well, tiny orthogonal gradient", double_well, (0, 2e-15), -4, 0, L1=8, L2=24)
_saddle("double well in 20 dimensions", double_well, np.zeros(20), -4, 0, L1=8, L2=24)
_saddle("mexican hat", mexican_hat, np.zeros(10), -4, 0, L1=8, L2=24)
_saddle("monkey saddle and a negative direction", monkey, np.zeros(3), -0.5, -0.3, L1=10, L2=10)
_saddle("monkey saddle, tilted", monkey_flat, np.zeros(2), -0.01, -0.2, L1=10, L2=10)
_saddle("factorisation at zero", _factorise((3, 2, 1, 0.5), 2), np.zeros(8), -6, 0, L1=20, L2=20)
_saddle("factorisation at rank one", _factorise((4, 2, 1, 0.5), 2), (2, 0, 0, 0, 0, 0, 0, 0), -4, 0, L1=30, L2=30)
_saddle("factorisation, wrong vector", _factorise((4, 1, 0.5), 1), (0, 1, 0), -6, 0, L1=30, L2=30)
_saddle("deep linear network at zero", _deep_linear((3, 2, 1)), np.zeros(18), -3, 0, L1=10, L2=10)
_saddle("deep linear network at rank one", _deep_linear((4, 1, 0.5)), np.r_[2 * np.eye(9)[0], 2 * np.eye(9)[0]], -1, 0,
        L1=10, L2=10)  # fmt: skip
_saddle("one negative direction of 100", _one_negative(100, 1e-2, 10), np.zeros(100), -1e-2, -2.5e-5, L1=10, L2=1)
_saddle("one negative direction of 1000", _one_negative(1000, 1e-2, 10), np.zeros(1000), -1e-2, -2.5e-5, L1=10, L2=1)
_saddle("Rayleigh at the wrong vector", _rayleigh(_upto(4)), _unit(4), -3, -4, L1=10, L2=10)
_saddle("Rayleigh with close eigenvalues", _rayleigh(torch.linspace(1, 1.02, 50, dtype=torch.float64)), _unit(50),
        -0.02, -0.25 * 1.02**2, L1=5, L2=10)  # fmt: skip
_saddle("cosine bumps at the top", bumps, np.zeros(6), -1, -6, L1=1, L2=1)
_saddle("cosine bumps between", bumps, (0, math.pi, 0, math.pi), -1, -4, L1=1, L2=1)
_saddle("product of sines", sine_product, (0, 0), -1, -1, L1=2, L2=2)
_saddle("four oscillators in opposition", kuramoto, (0, 0, math.pi, math.pi), -4, -6, L1=4, L2=4)
_saddle("Allen-Cahn chain at zero", allen_cahn, np.zeros(50), -1, 0, L1=20, L2=6)
_saddle("tensor decomposition", tensor_decomposition, np.full(4, 0.125**0.5), -1, 1.5, L1=30, L2=30)
_saddle("Geman-McClure", geman_mcclure, np.zeros(3), -6, 0, L1=6, L2=30)
_EGG_TOP = _polish_line(_egg_term, 1.5)
_saddle("EGG-CRATE, one coordinate on a crest", egg_crate, (_EGG_TOP, 0), 2 + 50 * math.cos(2 * _EGG_TOP), 0, L1=52,
        L2=100)  # fmt: skip
_saddle("EGG-CRATE, both on a crest", egg_crate, (_EGG_TOP, -_EGG_TOP), 2 + 50 * math.cos(2 * _EGG_TOP), 0, L1=52,
        L2=100)  # fmt: skip
_saddle("phase retrieval at zero", phase_retrieval, np.zeros(5),
        -float(torch.linalg.eigvalsh(_PHASE_A.T @ (_PHASE_Y[:, None] * _PHASE_A) / 40)[-1]), 0, L1=100,
        L2=100)  # fmt: skip
_saddle("two-layer network at zero", two_layer_net, np.zeros(16),
        0.01 - float((_NET_X.T @ _NET_Y / 30).norm()), 0, L1=5, L2=5)  # fmt: skip
_saddle("nearly flat", nearly_flat, (0, 0), -2e-3, -2.5e-7, L1=2, L2=1)
_saddle("ill-conditioned", ill_conditioned, (0, 0), -1e-2, -2.5e-5, L1=1e4, L2=1)
_saddle("Styblinski-Tang at its top", styblinski_tang, polish(styblinski_tang, np.full(3, 0.157)), -15.8526119,
        3 * _DEEP, L1=50, L2=50)  # fmt: skip
_saddle("Styblinski-Tang between", styblinski_tang, polish(styblinski_tang, (0.157, _ST_DEEP)), -15.8526119, 2 * _DEEP,
        L1=50, L2=50)  # fmt: skip
for _at, _eigenvalue in (
    ((0, 0), -math.sqrt(65)),
    ((-1.63807, -0.22867), -5.54577502),
    ((1.29607, 0.60508), -6.17718213),
    ((1.10921, -0.76827), -7.90261912),
    ((1.23023, 0.16233), -8.01490716),
):
    _saddle(f"CAMEL-6 at {_at}", camel6, polish(camel6, _at), _eigenvalue, -1.0316284535, L1=50, L2=100)
_saddle("CAMEL-3", camel3, polish(camel3, (1.07054, -0.53527)), -4.03868817, 0, L1=20, L2=30)
for _at, _eigenvalue in (
    ((-3.07303, -0.08135), -39.65149626),
    ((-0.27084, -0.92304), -45.60522929),
    ((-0.12796, -1.95371), -50.61023932),
    ((0.08668, 2.88425), -31.70662236),
    ((3.38515, 0.07385), -14.13517849),
):
    _saddle(f"HIMMELBLAU at {_at}", quarter_himmelblau, polish(quarter_himmelblau, _at), _eigenvalue / 4, 0, L1=30,
            L2=30)  # fmt: skip
_saddle("WOOD near −1", small_wood, polish(small_wood, (-0.968, 0.947, -0.97, 0.951)), -0.119548658 / 16, 0, L1=80,
        L2=150)  # fmt: skip

SADDLES: tuple[SaddleStart, ...] = tuple(_PEN)
"""Starts on strict saddle points and local maxima."""

_PEN.clear()
_saddle("double well from its ridge", double_well, (0, 2), -4, 0, saddle=np.zeros(2), L1=8, L2=24)
_saddle("bent valley from its ridge", bent_valley, (3, 0), -0.8, 0, saddle=np.array([0.8, 0.0]), L1=10, L2=10)
_saddle("factorisation with an empty column", _factorise((4, 2, 1), 2), (1, 0, 0.5, 0, -0.5, 0), -4, 0,
        saddle=np.array([2.0, 0, 0, 0, 0, 0]), L1=30, L2=30)  # fmt: skip

HIDDEN: tuple[SaddleStart, ...] = tuple(_PEN)
"""Starts away from a saddle whose negative curvature the gradient never shows, by symmetry, on the way there."""
