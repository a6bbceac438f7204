"""A finite sum of your own, robust regression, sampled by every method of the family.

    python examples/own_finite_sum.py

f(w) = mean of log(1 + (xᵀw − y)²/2): residuals count less the larger they are, so f is not convex.
"""

from collections.abc import Callable

import numpy as np

import sanc


class RobustRegression(sanc.problems.FiniteSum):
    """The mean of log(1 + r²/2) with r = xᵀw − y."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self.X, self.y = X, y
        self.n, self.dim = X.shape
        self.dtype = X.dtype

    def subset(self, rows: np.ndarray) -> "RobustRegression":
        return RobustRegression(self.X[rows], self.y[rows])

    def value(self, w: np.ndarray) -> float:
        return float(np.log1p((self.X @ w - self.y) ** 2 / 2).mean())

    def value_and_gradient(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        r = self.X @ w - self.y
        return self.value(w), self.X.T @ (r / (1 + r**2 / 2)) / self.n

    def hessian(self, w: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        r = self.X @ w - self.y
        bend = (1 - r**2 / 2) / (1 + r**2 / 2) ** 2
        return lambda v: self.X.T @ (bend * (self.X @ v)) / self.n


def main() -> None:
    """Make data with outliers, and fit it."""
    rng = np.random.default_rng(0)
    X, truth = rng.standard_normal((2000, 10)), rng.standard_normal(10)
    y = X @ truth + 0.1 * rng.standard_normal(2000)
    y[:300] = 50 * rng.standard_normal(300)  # nonsense
    problem = RobustRegression(X, y)

    squares = np.linalg.lstsq(X, y, rcond=None)[0]
    print(f"least squares:      error {np.linalg.norm(squares - truth):.3f}")
    whole = sanc.minimize(problem, np.zeros(10))
    print(f"all rows:           error {np.linalg.norm(whole.x - truth):.3f}   {whole.message}")
    for method in ("sanc", "scr", "cr", "ncd", "sgd"):
        run = sanc.minimize(problem, np.zeros(10), method=method, batch_size=100, max_iter=150)
        print(f"{method:5s}, 100 a sample: error {np.linalg.norm(run.x - truth):.3f}   f = {run.fun:.5f}")


if __name__ == "__main__":
    main()
