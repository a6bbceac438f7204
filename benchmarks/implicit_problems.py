"""Problems f(x, θ) with known derivatives of the minimum x(θ), from statistics, control and machine learning.

The derivative of a problem with a closed form is that of the closed form. Otherwise Newton's method with the dense
Hessian finds the minimum to working precision, and dense linear algebra computes the derivative, all in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

D = torch.float64
Theta = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """A function of x and θ, a start, and parameters.

    Attributes
    ----------
    name : str
        Name in the table.
    fun : callable
        ``fun(x, theta)``.
    x0 : Tensor
        The start.
    theta : dict of Tensor
        The parameters.
    closed : callable, optional
        The minimum as a function of θ that torch can differentiate.
    """

    name: str
    fun: Callable[[Tensor, Theta], Tensor]
    x0: Tensor
    theta: Theta
    closed: Callable[[Theta], Tensor] | None = None

    def parameters(self) -> Theta:
        """Return the parameters as new leaves that require a gradient."""
        return {name: tensor.detach().clone().requires_grad_() for name, tensor in self.theta.items()}

    def weights(self) -> Tensor:
        """Return the gradient of the outer loss with respect to x: fixed random numbers."""
        return torch.randn(self.x0.shape, generator=torch.Generator().manual_seed(7), dtype=self.x0.dtype)


def reference(problem: Problem, start: Tensor) -> Theta:
    """Return the gradient of ⟨w, x(θ)⟩ for the weights w of the problem; `start` is close to the minimum."""
    theta, w = problem.parameters(), problem.weights()
    if problem.closed is not None:
        loss = (problem.closed(theta) * w).sum()
        grads = torch.autograd.grad(loss, list(theta.values()))
        return dict(zip(theta, grads, strict=True))
    fixed, x = {name: tensor.detach() for name, tensor in theta.items()}, start.detach().reshape(-1).clone()

    def value(x: Tensor) -> Tensor:
        return problem.fun(x.reshape(problem.x0.shape), fixed)

    hessian = torch.autograd.functional.hessian(value, x)
    for _ in range(4):  # from the start to working precision
        x = x - torch.linalg.solve(hessian, torch.autograd.functional.jacobian(value, x))
        hessian = torch.autograd.functional.hessian(value, x)
    v = torch.linalg.solve(hessian, w.reshape(-1))
    leaf = x.requires_grad_()
    f = problem.fun(leaf.reshape(problem.x0.shape), theta)
    (g,) = torch.autograd.grad(f, leaf, create_graph=True)
    grads = torch.autograd.grad(g, list(theta.values()), -v)
    return dict(zip(theta, grads, strict=True))


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative error over the parameters."""
    errors = []
    for name, truth in expected.items():
        size = float(truth.norm())
        errors.append(float((found[name] - truth).norm()) / (size if size > 0.0 else 1.0))
    return max(errors)


def _data(n: int, d: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Return features, regression targets and a generator."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=D)
    y = X @ torch.randn(d, generator=generator, dtype=D) + 0.5 * torch.randn(n, generator=generator, dtype=D)
    return X, y, generator


def _ridge() -> Iterator[Problem]:
    X, y, generator = _data(80, 20, 0)

    def fun(x: Tensor, t: Theta) -> Tensor:
        return 0.5 * ((X @ x - y) ** 2).mean() + 0.5 * (t["penalty"].exp() * x**2).sum()

    def closed(t: Theta) -> Tensor:
        return torch.linalg.solve(X.T @ X / len(y) + torch.diag(t["penalty"].exp().expand(20)), X.T @ y / len(y))

    zeros = torch.zeros(20, dtype=D)
    yield Problem("ridge", fun, zeros, {"penalty": torch.tensor(-2.0, dtype=D)}, closed)
    one_each = torch.randn(20, generator=generator, dtype=D) - 2
    yield Problem("ridge, a penalty per feature", fun, zeros, {"penalty": one_each}, closed)

    def on_data(x: Tensor, t: Theta) -> Tensor:
        return 0.5 * ((t["X"] @ x - t["y"]) ** 2).mean() + 0.05 * (x**2).sum()

    def closed_on_data(t: Theta) -> Tensor:
        gram = t["X"].T @ t["X"] / len(y) + 0.1 * torch.eye(20, dtype=D)
        return torch.linalg.solve(gram, t["X"].T @ t["y"] / len(y))

    yield Problem("ridge, the data", on_data, zeros, {"X": X, "y": y}, closed_on_data)

    points = torch.linspace(0, 1, 120, dtype=D)
    target = torch.sin(9 * points) + 0.1 * torch.randn(120, generator=generator, dtype=D)

    def kernel(t: Theta) -> Tensor:
        return torch.exp(-0.5 * ((points[:, None] - points) / t["length"].exp()) ** 2)

    def kernel_ridge(x: Tensor, t: Theta) -> Tensor:
        z = kernel(t) @ x
        return 0.5 * ((z - target) ** 2).sum() + 0.5 * t["noise"].exp() * (x**2).sum()

    def closed_kernel(t: Theta) -> Tensor:
        K = kernel(t)
        return torch.linalg.solve(K.T @ K + t["noise"].exp() * torch.eye(120, dtype=D), K.T @ target)

    settings = {"length": torch.tensor(-2.0, dtype=D), "noise": torch.tensor(-1.0, dtype=D)}
    yield Problem("kernel regression", kernel_ridge, torch.zeros(120, dtype=D), settings, closed_kernel)


def _classifiers() -> Iterator[Problem]:
    X, score, generator = _data(200, 30, 1)
    y = (score > 0).to(D)
    signs, zeros = 2 * y - 1, torch.zeros(30, dtype=D)
    groups = torch.arange(30) % 10

    def logistic(x: Tensor, t: Theta) -> Tensor:
        return functional.softplus(-signs * (X @ x)).mean() + 0.5 * (t["penalty"].exp()[groups] * x**2).sum()

    yield Problem("logistic regression, 10 penalties", logistic, zeros, {"penalty": torch.linspace(-6, -2, 10).to(D)})

    def weighted(x: Tensor, t: Theta) -> Tensor:
        return (t["weights"] * functional.softplus(-signs * (X @ x))).mean() + 0.05 * (x**2).sum()

    yield Problem("logistic regression, row weights", weighted, zeros, {"weights": torch.ones(200, dtype=D)})

    def soft_margin(x: Tensor, t: Theta) -> Tensor:
        return 0.5 * (x**2).sum() + t["C"].exp() * (functional.relu(t["margin"] - signs * (X @ x)) ** 2).sum()

    settings = {"C": torch.tensor(-3.0, dtype=D), "margin": torch.ones(200, dtype=D)}
    yield Problem("squared-hinge margins", soft_margin, zeros, settings)

    def smooth_hinge(x: Tensor, t: Theta) -> Tensor:
        width = t["width"].exp()
        return 0.05 * (x**2).sum() + (width * functional.softplus((1 - signs * (X @ x)) / width)).mean()

    yield Problem("smoothed hinge", smooth_hinge, zeros, {"width": torch.tensor(-1.0, dtype=D)})

    classes = torch.randint(0, 4, (200,), generator=generator)

    def softmax(x: Tensor, t: Theta) -> Tensor:
        logits = X @ x / t["temperature"].exp()
        return functional.cross_entropy(logits, classes, label_smoothing=0.1) + 0.5 * t["penalty"].exp() * (x**2).sum()

    settings = {"temperature": torch.tensor(0.3, dtype=D), "penalty": torch.tensor(-4.0, dtype=D)}
    yield Problem("softmax regression", softmax, torch.zeros(30, 4, dtype=D), settings)


def _regressions() -> Iterator[Problem]:
    X, y, generator = _data(150, 12, 2)
    counts = torch.poisson(torch.exp(0.3 * X @ torch.ones(12, dtype=D) / 3), generator=generator)

    def poisson(x: Tensor, t: Theta) -> Tensor:
        z = X @ x + t["offset"]
        return (z.exp() - counts * z).mean() + 0.5 * t["penalty"].exp() * (x**2).sum()

    settings = {"offset": torch.tensor(0.1, dtype=D), "penalty": torch.tensor(-4.0, dtype=D)}
    yield Problem("Poisson regression", poisson, torch.zeros(12, dtype=D), settings)

    def robust(x: Tensor, t: Theta) -> Tensor:
        scale = t["scale"].exp()
        return (scale**2 * (torch.sqrt(1 + ((X @ x - y) / scale) ** 2) - 1)).mean()

    yield Problem("pseudo-Huber regression", robust, torch.zeros(12, dtype=D), {"scale": torch.tensor(-0.5, dtype=D)})

    def normal(x: Tensor, t: Theta) -> Tensor:
        residuals = X @ x[:12] - y
        return (t["weights"] * (0.5 * torch.exp(-2 * x[12]) * residuals**2 + x[12])).sum()

    weights = torch.ones(150, dtype=D) / 150
    yield Problem("normal likelihood, influence", normal, torch.zeros(13, dtype=D), {"weights": weights})


def _matrices() -> Iterator[Problem]:
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(6, 40, generator=generator, dtype=D)
    lower = torch.tril_indices(6, 6)

    def covariance(x: Tensor, t: Theta) -> Tensor:
        factor = torch.zeros(6, 6, dtype=D).index_put((lower[0], lower[1]), x)
        S = t["root"] @ t["root"].T / 40 + 0.1 * torch.eye(6, dtype=D)
        return torch.trace(S @ factor @ factor.T) - 2 * torch.log(torch.abs(torch.diagonal(factor))).sum()

    def precision_factor(t: Theta) -> Tensor:
        S = t["root"] @ t["root"].T / 40 + 0.1 * torch.eye(6, dtype=D)
        return torch.linalg.cholesky(torch.linalg.inv(S))[lower[0], lower[1]]

    start = torch.eye(6, dtype=D)[lower[0], lower[1]]
    yield Problem("precision matrix, its factor", covariance, start, {"root": root}, precision_factor)

    def energy(x: Tensor, t: Theta) -> Tensor:
        z = (t["W"] + t["W"].T) / 2 @ x + t["U"] @ t["input"]
        return 0.5 * (x**2).sum() - 0.4 * torch.logaddexp(z, -z).sum()

    settings = {
        "W": torch.randn(60, 60, generator=generator, dtype=D) / 12,
        "U": torch.randn(60, 8, generator=generator, dtype=D),
        "input": torch.randn(8, generator=generator, dtype=D),
    }
    yield Problem("deep equilibrium, an energy", energy, torch.zeros(60, dtype=D), settings)

    def equilibrium(x: Tensor, t: Theta) -> Tensor:
        return 0.5 * ((x - torch.tanh(t["W"] @ x + t["U"] @ t["input"])) ** 2).sum()

    yield Problem("deep equilibrium, its residual", equilibrium, torch.zeros(60, dtype=D), settings)


def _control() -> Iterator[Problem]:
    steps = 30

    def linear(x: Tensor, t: Theta) -> Tensor:
        state, cost = t["start"], torch.zeros((), dtype=D)
        for control in x.reshape(steps, 2):
            state = t["A"] @ state + t["B"] @ control
            cost = cost + (state**2).sum() + 0.1 * (control**2).sum()
        return cost

    generator = torch.Generator().manual_seed(4)
    settings = {
        "A": 0.9 * torch.eye(4, dtype=D) + 0.1 * torch.randn(4, 4, generator=generator, dtype=D),
        "B": torch.randn(4, 2, generator=generator, dtype=D),
        "start": torch.ones(4, dtype=D),
    }
    yield Problem("linear optimal control", linear, torch.zeros(2 * steps, dtype=D), settings)

    def pendulum(x: Tensor, t: Theta) -> Tensor:
        angle, speed, cost = t["start"][0], t["start"][1], torch.zeros((), dtype=D)
        for torque in x:
            speed = speed + 0.1 * (-t["gravity"] * torch.sin(angle) - 0.2 * speed + torque)
            angle = angle + 0.1 * speed
            cost = cost + 0.1 * ((angle - 1) ** 2 + 0.1 * speed**2 + 0.05 * torque**2)
        return cost

    settings = {"gravity": torch.tensor(2.0, dtype=D), "start": torch.tensor([0.1, 0.0], dtype=D)}
    yield Problem("control of a pendulum", pendulum, torch.zeros(steps, dtype=D), settings)


def _networks() -> Iterator[Problem]:
    X, _, generator = _data(40, 3, 5)
    y = torch.sin(X[:, 0]) * X[:, 1]

    def network(x: Tensor) -> Tensor:
        hidden = torch.tanh(X @ x[:24].reshape(3, 8) + x[24:32])
        return hidden @ x[32:40] + x[40]

    def proximal(x: Tensor, t: Theta) -> Tensor:
        return ((network(x) - y) ** 2).mean() + 0.5 * t["strength"].exp() * ((x - t["start"]) ** 2).sum()

    start = 0.5 * torch.randn(41, generator=generator, dtype=D)
    settings = {"strength": torch.tensor(-1.0, dtype=D), "start": start}
    yield Problem("network near initial weights", proximal, start.clone(), settings)


def _nonconvex() -> Iterator[Problem]:
    def wells(x: Tensor, t: Theta) -> Tensor:
        return ((x**2 - t["a"]) ** 2).sum() + 0.1 * (x[1:] * x[:-1]).sum() + (t["tilt"] * x).sum()

    settings = {"a": torch.linspace(0.5, 2, 10).to(D), "tilt": 0.01 * torch.ones(10, dtype=D)}
    yield Problem("double wells from their saddle", wells, torch.zeros(10, dtype=D), settings)

    def valley(x: Tensor, t: Theta) -> Tensor:
        return (t["b"] * (x[1:] - x[:-1] ** 2) ** 2 + (t["a"] - x[:-1]) ** 2).sum()

    settings = {"a": torch.tensor(1.0, dtype=D), "b": torch.tensor(100.0, dtype=D)}
    yield Problem("Rosenbrock's valley", valley, torch.zeros(8, dtype=D), settings)


def large(size: int = 100_000) -> Problem:
    """Return the smoothing of a signal by a quadratic penalty, whose minimum Fourier transforms give."""
    generator = torch.Generator().manual_seed(6)
    grid = torch.arange(size, dtype=D)
    signal = torch.sin(2 * math.pi * grid / 500) + 0.3 * torch.randn(size, generator=generator, dtype=D)
    frequencies = 2 - 2 * torch.cos(2 * math.pi * grid / size)

    def fun(x: Tensor, t: Theta) -> Tensor:
        differences = x - torch.roll(x, 1)
        return 0.5 * ((x - t["shift"] - signal) ** 2).sum() + 0.5 * t["penalty"].exp() * (differences**2).sum()

    def closed(t: Theta) -> Tensor:
        transform = torch.fft.fft(signal + t["shift"])
        return torch.fft.ifft(transform / (1 + t["penalty"].exp() * frequencies)).real

    settings = {"penalty": torch.tensor(2.0, dtype=D), "shift": torch.tensor(0.5, dtype=D)}
    return Problem(f"smoothing, {size:,} variables", fun, torch.zeros(size, dtype=D), settings, closed)


def large_logistic(size: int = 100_000, rows: int = 2000) -> Problem:
    """Return a logistic regression with as many coefficients as `size`, ten per row, and one penalty per group."""
    generator = torch.Generator().manual_seed(8)
    columns = torch.randint(0, size, (rows, 50), generator=generator)
    values = torch.randn(rows, 50, generator=generator, dtype=D)
    signs = 2.0 * torch.randint(0, 2, (rows,), generator=generator).to(D) - 1
    groups = torch.arange(size) % 10

    def fun(x: Tensor, t: Theta) -> Tensor:
        scores = (values * x[columns]).sum(1)
        return functional.softplus(-signs * scores).sum() + 0.5 * (t["penalty"].exp()[groups] * x**2).sum()

    return Problem(
        f"logistic, {size:,} variables", fun, torch.zeros(size, dtype=D), {"penalty": torch.zeros(10, dtype=D)}
    )


def problems(large_size: int = 100_000) -> list[Problem]:
    """Return all problems, the large one last."""
    made: list[Any] = [_ridge, _classifiers, _regressions, _matrices, _control, _networks, _nonconvex]
    return [problem for make in made for problem in make()] + [large(large_size)]
