"""Test problems that no rule of `sanc.minimize` was chosen with; they were written after the rules.

Half of them resemble problems of the published collections that tests/zoo.py lacks. They have the known form of these
problems, but constants may differ from the published ones. The other half are current applications: factorisations,
phase retrieval, clusters of atoms, spins, mixtures and small networks. Most have two sizes. No minimum is listed: any
second-order point with a small gradient counts as solved.

A rule or a number that is chosen with these problems requires new ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from benchmarks.common import Floats, zoo

_D = torch.float64
_Fun = Callable[[Tensor], Tensor]


def _upto(n: int) -> Tensor:
    return torch.arange(1, n + 1, dtype=_D)


def _t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=_D)


def _sq(residuals: Tensor) -> Tensor:
    return residuals.square().sum()


def _padded(x: Tensor) -> Tensor:
    zero = torch.zeros(1, dtype=x.dtype)
    return torch.cat([zero, x, zero])


def problems() -> list[zoo.ZooProblem]:
    """Return all problems, each with a gradient tolerance above its roundoff."""
    found: list[zoo.ZooProblem] = []

    def add(name: str, fun: _Fun, x0: ArrayLike, gtol: float = 1e-6) -> None:
        start: Floats = np.asarray(x0, dtype=np.float64)
        found.append(zoo.ZooProblem(name, fun, start, (), "benchmarks/unseen.py", gtol=gtol))

    for n in (10, 100):
        _classical(n, add)
        _modern(n, add)
    _small(add)
    return found


# ---------------------------------------------------------------------- problems like those of the collections


def _sums(x: Tensor, width: int) -> Tensor:
    """Return the sum of each variable and the next `width` ones."""
    sums = torch.cat([torch.zeros(1, dtype=x.dtype), torch.cumsum(x, 0)])
    ends = torch.clamp(torch.arange(len(x)) + width + 1, max=len(x))
    return sums[ends] - sums[: len(x)]


def _curly(x: Tensor) -> Tensor:
    q = _sums(x, 5)
    return (q * (q * (q * q - 20.0) - 0.1)).sum()


def _hairs(a: Tensor, b: Tensor) -> Tensor:
    waves = 30.0 * torch.sin(7.0 * a) ** 2 * torch.cos(7.0 * b) ** 2
    return waves + 100.0 * torch.sqrt((a - b) ** 2 + 0.01) + 100.0 * (torch.sqrt(0.01 + a * a) - 0.1)


def _classical(n: int, add: Callable[..., None]) -> None:
    i, upto, grid = np.arange(1, n + 1), _upto(n), np.linspace(0.0, 1.0, n)

    add(
        f"INDEFINITE-{n}",
        lambda x: 100.0 * torch.sin(0.01 * x).sum() + torch.cos(2.0 * x[1:-1] - x[-1] - x[0]).sum(),
        i / (n + 1),
    )
    for name, (one, other) in {"A": ((2, 1), (3, 1)), "B": ((3, 2), (7, 3))}.items():
        places = [torch.tensor((k * i - less) % n) for k, less in (one, other)]

        def wavy(x: Tensor, places: list[Tensor] = places) -> Tensor:
            y = x + x[places[0]] + x[places[1]]
            return (y * y + 4.0 * torch.cos(y)).sum()

        add(f"WAVY-SUMS-{name}-{n}", wavy, i)

    strides = [torch.tensor((k * i - 1) % n) for k in (1, 2, 3, 5, 7, 11)]
    add(
        f"SPARSE-SINES-{n}",
        lambda x: 0.5 * (upto * sum(torch.sin(x[stride]) for stride in strides) ** 2).sum(),
        np.full(n, 0.5),
    )
    add(f"CURLY-{n}", _curly, 1e-4 * i / (n + 1))
    wide = torch.tensor(np.exp(12.0 * grid))
    add(f"CURLY-SCALED-{n}", lambda x: _curly(wide * x), 1e-4 * i * np.exp(-12.0 * grid) / (n + 1), 1e-4)
    h = 1.0 / (n + 1)
    add(
        f"BOUNDARY-COSINE-{n}",
        lambda x: 0.5 * _sq(_padded(x).diff()) - h * h * (2.0 * x + torch.cos(x)).sum() - x[-1],
        i * h,
    )

    def chained_wood(x: Tensor) -> Tensor:
        a, b, c, d = x[:-3:2], x[1:-2:2], x[2:-1:2], x[3::2]
        steep = 100.0 * (b - a * a) ** 2 + 90.0 * (d - c * c) ** 2
        return 1.0 + (steep + (1.0 - a) ** 2 + (1.0 - c) ** 2 + 10.0 * (b + d - 2.0) ** 2 + 0.1 * (b - d) ** 2).sum()

    add(f"CHAINED-WOOD-{n}", chained_wood, [-3, -1, -3, -1] + [-2, 0] * ((n - 4) // 2))
    m = math.isqrt(n)

    def doubly(z: Tensor) -> Tensor:
        x, y, u = z[: m * m].reshape(m, m), z[m * m : m * m + m], z[m * m + m :]
        s = torch.sinc(x / math.pi)
        middle = _sq(x**3 - 10.0 * x**2 - (y[:, None] + u) * (x * torch.cos(x) - torch.sin(x)))
        return middle + _sq(s.sum(1) - 1.0) + _sq(s.sum(0) - 1.0)

    add(f"DOUBLE-SINCS-{n}", doubly, [6.0] * (m * m) + [0.0] * (2 * m))

    def beale(x: Tensor) -> Tensor:
        a, b = x[::2], x[1::2]
        parts = [_sq(c - a * (1.0 - b**k)) for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))]
        return parts[0] + parts[1] + parts[2] + _sq(6.0 * b[:-1] - a[1:]) / 50.0

    add(f"CHAINED-BEALE-{n}", beale, np.ones(n))
    width = min(20, n // 2) - 1
    add(
        f"BOUNDED-SUMS-{n}",
        lambda x: (
            (10.0 / upto * (s := _sums(x / (1.0 + x * x), width)) ** 2 - 0.2 * s).sum() + (100.0 * x**4 + 2.0).sum()
        ),
        np.zeros(n),
    )
    add(
        f"BROYDEN-7/3-{n}",
        lambda x: (
            ((3.0 - 2.0 * x) * x - (y := _padded(x))[:-2] - 2.0 * y[2:] + 1.0).abs().pow(7 / 3).sum()
            + (x[: n // 2] + x[n // 2 :]).abs().pow(7 / 3).sum()
        ),
        np.ones(n),
    )
    k = (n + 2) // 3

    def band(x: Tensor) -> Tensor:
        below = torch.diag(x[2 * k - 1 : 3 * k - 2], -1)
        return torch.diag(x[:k]) + torch.diag(x[k : 2 * k - 1], 1) + below

    root = band(torch.sin(_upto(3 * k - 2) ** 2))
    add(f"SQUARE-ROOT-{n}", lambda x: _sq(band(x) @ band(x) - root @ root), 0.2 * np.sin(np.arange(1, 3 * k - 1) ** 2))
    add(
        f"TRIGONOMETRIC-SUMS-{n}",
        lambda x: _sq(n - torch.cos(x).sum() + upto * (1.0 - torch.cos(x)) - torch.sin(x)),
        np.full(n, 1.0 / n),
    )
    j = upto[:-1]
    matrix = torch.sin(j[:, None] * j) * torch.exp(-((j[:, None] - j) ** 2) / 25.0)
    add(f"EIGENPAIR-{n}", lambda z: _sq(matrix @ z[:-1] - z[-1] * z[:-1]) + (z[:-1] @ z[:-1] - 1.0) ** 2, np.ones(n))

    def penalty(x: Tensor) -> Tensor:
        r = _sq(x[:-2] + 2.0 * x[1:-1] + 10.0 * x[2:] - 1.0)
        s = _sq(2.0 * x[:-2] + x[1:-1] - 3.0)
        heights = 1.0 + torch.exp(x[-1]) * r + r * s + torch.exp(x[-2]) * s
        return 1e-3 * heights + (x * x - n).sum() ** 2 + _sq(x[: n // 2] - 1.0)

    add(f"PENALTY-EXP-{n}", penalty, i / (n + 1))
    add(
        f"STRETCHED-V-{n}",
        lambda x: ((q := x[:-1] ** 2 + x[1:] ** 2) ** 0.25 * (1.0 + torch.sin(50.0 * q**0.1) ** 2)).sum(),
        np.ones(n),
    )
    add(
        f"SINES-OF-SQUARES-{n}",
        lambda x: torch.sin(x[0] + x[:-1] ** 2 - 1.0).sum() + 0.5 * torch.sin(x[-1] ** 2),
        np.zeros(n),
    )
    add(
        f"SENSORS-{n}",
        lambda x: -_sq(torch.sin(x)[:, None] * torch.sin(x) * torch.sin(x[:, None] - x)),
        i / n,
    )

    def mancino(x: Tensor) -> Tensor:
        v = torch.sqrt(x[:, None] ** 2 + upto[:, None] / upto)
        terms = v * (torch.sin(torch.log(v)) ** 5 + torch.cos(torch.log(v)) ** 5)
        return _sq(terms.sum(0) - terms.diagonal() + 14.0 * n * x + (upto - 50.0) ** 3)

    add(f"MANCINO-{n}", mancino, np.full(n, -8.710996e-4 * n))
    add(
        f"LOG-HAIRY-CHAIN-{n}",
        lambda x: torch.log((1.0 + _hairs(x[:-1], x[1:])) / 100.0).sum(),
        np.linspace(-5.0, -7.0, n),
    )
    add(f"STEEP-ROSENBROCK-{n}", lambda x: (1e4 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2).sum(),
        np.tile([-3.6, 3.0], n // 2))  # fmt: skip
    sizes = 10.0 ** torch.linspace(-4, 4, n, dtype=_D)
    add(
        f"QUARTIC-WELLS-{n}",
        lambda x: (sizes * x**4 / 4.0 - sizes.sqrt() * x**2 / 2.0).sum() + 0.5 * x.sum() ** 2,
        np.ones(n),
    )


# ---------------------------------------------------------------------- applications


def _pairs(x: Tensor) -> Tensor:
    """Return the squared distances between points in three dimensions."""
    points = x.reshape(-1, 3)
    a, b = torch.triu_indices(len(points), len(points), 1)
    return (points[a] - points[b]).square().sum(1)


def _modern(n: int, add: Callable[..., None]) -> None:
    rng = np.random.default_rng(n)

    def normal(*shape: int) -> Tensor:
        return torch.tensor(rng.standard_normal(shape))

    m = math.isqrt(n)
    rank, atoms, hidden, parts, small = max(2, m // 2), n // 3 + 1, max(2, n // 6), max(2, n // 5), min(n, 40)

    target = normal(2 * m, rank)
    add(
        f"FACTORS-{n}",
        lambda x: 0.25 * _sq((X := x.reshape(2 * m, rank)) @ X.T - target @ target.T),
        0.01 * rng.standard_normal(2 * m * rank),
    )
    rays = normal(5 * m, 2 * m)
    measured = (rays @ normal(2 * m)) ** 2
    add(f"PHASES-{n}", lambda x: ((rays @ x) ** 2 - measured).square().mean(), 0.1 * rng.standard_normal(2 * m))

    def lennard_jones(x: Tensor) -> Tensor:
        s = _pairs(x) ** -3
        return 4.0 * (s * s - s).sum()

    add(f"LENNARD-JONES-{n}", lennard_jones, 1.3 * rng.uniform(-1, 1, 3 * atoms) * atoms ** (1 / 3))

    def thomson(x: Tensor) -> Tensor:
        square = x.reshape(-1, 3).square().sum(1)
        on_sphere = x.reshape(-1, 3) / square.sqrt()[:, None]
        return _pairs(on_sphere).rsqrt().sum() + _sq(square - 1.0)

    add(f"THOMSON-{n}", thomson, rng.standard_normal(3 * atoms))
    bonds = normal(n, n)
    add(f"SPINS-{n}", lambda x: -(bonds * torch.cos(x[:, None] - x)).sum() / 2.0, rng.uniform(-3, 3, n))

    rows, signs = normal(60, 4), torch.tensor(np.sign(rng.standard_normal(60)))

    def network(x: Tensor) -> Tensor:
        W, b, v, c = x.split([4 * hidden, hidden, hidden, 1])
        score = torch.tanh(rows @ W.reshape(4, hidden) + b) @ v + c
        return torch.nn.functional.softplus(-signs * score).mean() + 1e-3 * _sq(x)

    add(f"NETWORK-{n}", network, 0.3 * rng.standard_normal(6 * hidden + 1), 1e-5)
    draws = torch.tensor(3.0 * rng.standard_normal((200, 1)) + 5.0 * rng.integers(-3, 4, (200, 1)))

    def mixture(x: Tensor) -> Tensor:
        w, mean, size = x.reshape(3, parts)
        logs = torch.log_softmax(w, 0) - size - 0.5 * ((draws - mean) / torch.exp(size)) ** 2
        return -torch.logsumexp(logs, 1).mean() + 1e-4 * _sq(x)

    means = 5.0 * rng.standard_normal(parts)
    add(f"MIXTURE-{n}", mixture, np.concatenate([np.zeros(parts), means, np.zeros(parts)]), 1e-5)
    places = 3.0 * normal(m + 2, 2)
    distances = torch.cdist(places, places).square()
    add(
        f"DISTANCES-{n}",
        lambda x: _sq(((p := x.reshape(-1, 2))[:, None] - p).square().sum(-1) - distances),
        rng.standard_normal(2 * (m + 2)),
    )
    design, answers = normal(200, small), torch.tensor(3.0 * rng.standard_t(1, 200) + 3.0)
    add(f"STUDENT-{n}", lambda x: torch.log1p((design @ x - answers) ** 2).mean(), np.zeros(small))
    h = 1.0 / (n + 1)
    add(
        f"ALLEN-CAHN-{n}",
        lambda x: 5e-4 * _sq((y := _padded(x)).diff()) / h + 0.25 * h * _sq(y * y - 1.0),
        0.1 * rng.standard_normal(n),
    )
    add(
        f"BRATU-{n}",
        lambda x: (
            0.5 * _sq((y := _padded(x)).diff()) / h - 3.4 * h * torch.exp(y).sum() + 1e-3 * h * torch.exp(2.0 * y).sum()
        ),
        np.zeros(n),
    )


# ---------------------------------------------------------------------- problems in a few variables


def _heart(first: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    """Return the residuals of the dipole equations: powers 1 to 3 of t + iv, weighted by a + ic and summed."""
    z, w = torch.complex(weights[:2], weights[2:]), torch.complex(first[:2], first[2:])
    powers = torch.stack([(w * z**k).sum() for k in (1, 2, 3)])
    return torch.view_as_real(powers).flatten() - targets


def _small(add: Callable[..., None]) -> None:
    add(
        "HUMPS",
        lambda x: 0.05 * _sq(x) + (torch.sin(20.0 * x[0]) * torch.sin(20.0 * x[1])) ** 2,
        (-506.0, -506.2),
    )
    add("LOG-HAIRY", lambda x: torch.log1p(_hairs(x[0], x[1]) / 100.0), (-500.0, -700.0))

    def snail(x: Tensor) -> Tensor:
        square = x @ x
        r, wave = square.sqrt(), torch.cos(square.sqrt() - torch.atan2(x[1], x[0]))
        return square / (1.0 + square) * (1.0 + r * (1.5 + 0.5 * wave) - r * wave)

    add("SNAIL", snail, (10.0, 10.0))
    add("SINE-VALLEY", lambda x: 1e4 * (x[1] - torch.sin(x[0])) ** 2 + 0.25 * x[0] ** 2, (4.712389, -1.0))
    add(
        "SINE-QUARTIC",
        lambda x: (x[0] ** 2 + x[0] * x[1] + x[1] ** 2) ** 2 + torch.sin(x[0]) ** 2 + torch.cos(x[1]) ** 2,
        (3.0, 0.1),
    )
    add("LOG-ROSENBROCK", lambda x: torch.log1p(1e4 * (x[1] - x[0] ** 2) ** 2 + (1.0 - x[0]) ** 2), (-1.2, 1.0))

    def dipole(z: Tensor, free: bool) -> Tensor:
        targets = (
            _t(-1.57, -1.31, -2.65, 2.0, -12.6, 9.48) if free else _t(-1.826, -0.754, -4.839, -3.259, -14.023, 15.467)
        )
        if free:
            return _sq(_heart(z[:4], z[4:], targets)) + (z[0] + z[1] + 0.69) ** 2 + (z[2] + z[3] + 0.044) ** 2
        first = torch.stack([z[0], -0.816 - z[0], z[1], -0.017 - z[1]])
        return _sq(_heart(first, z[2:], targets))

    add("DIPOLES-6", lambda z: dipole(z, False), (0, 0, 1, 1, 1, 1), 1e-5)
    add("DIPOLES-8", lambda z: dipole(z, True), (0, 0, 0, 0, 1, 1, 1, 1), 1e-5)
    times = 0.05 * _upto(21) + 0.25
    falling = 0.9 * torch.exp(-0.4 * times) + 1.3 * torch.exp(-1.7 * times)
    add(
        "TWO-EXPONENTIALS",
        lambda x: _sq(torch.exp(-times * x[0]) - x[1] * torch.exp(-times * x[2]) - falling),
        (1, -1, 0),
    )
    quarters = 0.25 * _upto(10)
    add("EXPONENTIAL-LINE", lambda x: _sq(x[0] * torch.exp(quarters * x[1]) - quarters), (0, 0))
    ages = _t(8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 25)
    heights = ages + 0.01 * ages**2 + 0.3 * torch.sin(ages)
    add("GROWTH", lambda x: _sq(x[0] * ages ** (x[1] + torch.log(ages) * x[2]) - heights), (100, 0, 0))
    along = 5.0 * _upto(30) / 3.0
    shape = torch.stack([along**k / 10.0**k for k in range(4)])
    moved = 3.0 * torch.sin(along / 5.0) + 0.04 * along
    angles = shape * _t(1, 10, 1, 1)[:, None]
    add("BEAM", lambda x: _sq((x[:4] @ shape) * torch.cos(x[4:] @ angles) - moved),
        (-3.5, 1, 0, 0, 1.7, 0.01, 0, 0), 1e-4)  # fmt: skip
    add("SINE-PRODUCT", lambda x: _sq(x) + 100.0 * (torch.sin(3.0 * x[0] + 2.0) - x[1] * x[2]) ** 2, (0, 0, 0))

    def wall(x: Tensor) -> Tensor:
        outside = torch.nn.functional.softplus(100.0 - _sq(x - 5.0))
        return (x[0] - 10.0) ** 3 + (x[1] - 20.0) ** 3 + 50.0 * outside + 0.01 * (x @ x) ** 2

    add("WALL", wall, (15.0, 6.0))
    add(
        "BENT-RIDGE",
        lambda x: (
            100.0 * torch.sqrt((x[1] - 0.01 * x[0] ** 2) ** 2 + 1e-6) + 0.01 * torch.sqrt((x[0] + 10.0) ** 2 + 1e-6)
        ),
        (-10.0, 3.0),
    )
    add(
        "ACKLEY",
        lambda x: (
            -20.0 * torch.exp(-0.2 * torch.sqrt((x * x).mean() + 1e-8)) - torch.exp(torch.cos(2.0 * math.pi * x).mean())
        ),
        (2.7, -3.1, 1.9, 4.2),
    )
    centres, weights = torch.stack([_t(3, 5, 2, 1, 7), _t(5, 2, 1, 4, 9)], 1), _t(1, 2, 5, 2, 3)

    def langermann(x: Tensor) -> Tensor:
        r = (x - centres).square().sum(1)
        return (weights * torch.exp(-r / math.pi) * torch.cos(math.pi * r)).sum()

    add("LANGERMANN", langermann, (3.0, 6.0))
    add("FLAT-VALLEY", lambda x: torch.sqrt(1.0 + 1e3 * (x[1] - torch.sin(x[0])) ** 2) + 1e-3 * x[0] ** 2, (5.0, 5.0))
    tenths = 0.1 * _upto(10)
    add(
        "EXPONENTIAL-BOX",
        lambda x: _sq(
            torch.exp(-tenths * x[0])
            - torch.exp(-tenths * x[1])
            - x[2] * (torch.exp(-tenths) - torch.exp(-10.0 * tenths))
        ),
        (1.1, 9.5, 1.2),
    )
