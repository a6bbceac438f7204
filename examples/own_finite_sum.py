"""A finite sum of your own, robust regression, on all rows and on samples.

python examples/own_finite_sum.py
"""

from collections.abc import Callable

import numpy as np

import sanc


class RobustRegression(sanc.problems.FiniteSum):
    """The mean of log(1 + r²/2) with r = xᵀw − y: outliers count little, and f is not convex."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self.X, self.y, self.dtype = X, y, X.dtype
        self.n, self.dim = X.shape

    def subset(self, rows: np.ndarray) -> "RobustRegression":
        return RobustRegression(self.X[rows], self.y[rows])

    def value(self, w: np.ndarray) -> float:
        return float(np.log1p((self.X @ w - self.y) ** 2 / 2).mean())

    def value_and_gradient(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        r = self.X @ w - self.y
        return self.value(w), self.X.T @ (r / (1 + r**2 / 2)) / self.n

    def hessian(self, w: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        half = (self.X @ w - self.y) ** 2 / 2
        return lambda v: self.X.T @ ((1 - half) / (1 + half) ** 2 * (self.X @ v)) / self.n


rng = np.random.default_rng(0)
X, truth, noise = rng.standard_normal((2000, 10)), rng.standard_normal(10), rng.standard_normal(2000)
noise[:300] *= 5000.0  # outliers
for options in ({}, {"batch_size": 100, "max_iter": 150}):
    run = sanc.minimize(RobustRegression(X, X @ truth + 0.1 * noise), np.zeros(10), **options)
    print(f"{options}: error {np.linalg.norm(run.x - truth):.3f}   {run.message}")
