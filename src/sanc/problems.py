"""Finite sums in closed form: logistic regression, the nonconvex SVM and softmax regression, dense or sparse.

A subset of a sum is again a sum of the same kind, the mean over its own rows with the same penalty; that is all that
sampling needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse
from scipy.special import expit, logsumexp, softmax

from sanc.errors import ArgumentError, ArgumentTypeError, nearest, require_integer

__all__ = ["FiniteSum", "Logistic", "NonconvexSVM", "Softmax"]

Array: TypeAlias = npt.NDArray[Any]
PenaltyKind = Literal["nonconvex", "l2", "none"]


class FiniteSum(ABC):
    """f(w) = (1/n) Σ f_i(w): what `sanc.minimize` samples from. Subclass it for a sum of your own.

    Attributes
    ----------
    n : int
        Components of the sum.
    dim : int
        Variables.
    dtype : numpy.dtype
        Type of the variables.
    """

    n: int
    dim: int
    dtype: np.dtype[Any]

    @abstractmethod
    def subset(self, rows: Array) -> FiniteSum:
        """Return the mean over these components."""

    @abstractmethod
    def value(self, w: Array) -> float:
        """f(w)."""

    @abstractmethod
    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        """f(w) and ∇f(w)."""

    @abstractmethod
    def hessian(self, w: Array) -> Callable[[Array], Array]:
        """Return v ↦ ∇²f(w) v; what depends on w alone is computed once."""


class _Penalty:
    """λ Σ w²/(1+w²) or (λ/2)‖w‖²: value, gradient, and the diagonal of the Hessian."""

    def __init__(self, kind: PenaltyKind, strength: float) -> None:
        kinds = ("nonconvex", "l2", "none")
        if kind not in kinds:
            raise ArgumentError(f"penalty = {kind!r} is not known: {nearest(str(kind), kinds)}.")
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength < np.inf:
            raise ArgumentError(f"strength = {strength!r} cannot be used: pass a finite number ≥ 0.")
        self.kind = kind if strength > 0 else "none"
        self.strength = float(strength)

    def value(self, w: Array) -> float:
        if self.kind == "nonconvex":
            square = w * w
            return self.strength * float(np.sum(square / (1 + square)))
        return 0.5 * self.strength * float(w @ w) if self.kind == "l2" else 0.0

    def gradient(self, w: Array) -> Array | float:
        if self.kind == "nonconvex":
            slope: Array = 2 * self.strength * w / (1 + w * w) ** 2
            return slope
        return self.strength * w if self.kind == "l2" else 0.0

    def curvature(self, w: Array) -> Array | float:
        if self.kind == "nonconvex":
            square = w * w
            bend: Array = 2 * self.strength * (1 - 3 * square) / (1 + square) ** 3
            return bend
        return self.strength if self.kind == "l2" else 0.0


class _Linear(FiniteSum):
    """A loss of the linear scores Xw, in which row i has its own label."""

    X: Any
    y: Array
    penalty: _Penalty

    def __init__(self, X: Any, y: Any, penalty: PenaltyKind, strength: float) -> None:
        self.penalty = _Penalty(penalty, strength)
        self.X = _matrix(X)
        self.n, self.features = self.X.shape
        self.dtype = self.X.dtype
        self.y = self._labels(_vector(y, self.n))
        self.dim = self.features

    @abstractmethod
    def _labels(self, y: Array) -> Array:
        """Check the labels and return them in the form the loss uses."""

    def subset(self, rows: Array) -> _Linear:
        rows = np.asarray(rows)
        if rows.size == 0 or rows.min() < 0 or rows.max() >= self.n:
            raise ArgumentError(f"rows = {rows!r:.60} cannot be used: pass row numbers from 0 to {self.n - 1}.")
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.X, part.y, part.n = self.X[rows], self.y[rows], len(rows)
        return part


class Logistic(_Linear):
    """Logistic regression: the mean of log(1 + e^z) − y z with z = xᵀw, plus a penalty.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels 0 or 1.
    penalty : {"nonconvex", "l2", "none"}
        "nonconvex" is strength · Σ w²/(1+w²), the paper's; "l2" is strength/2 · ‖w‖².
    strength : float
        Weight of the penalty.

    Examples
    --------
    >>> import numpy as np, sanc
    >>> X = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0]])
    >>> problem = sanc.problems.Logistic(X, [0, 1, 1], penalty="nonconvex", strength=0.1)
    >>> round(problem.value(np.zeros(2)), 6)
    0.693147
    """

    def __init__(self, X: Any, y: Any, penalty: PenaltyKind = "nonconvex", strength: float = 1.0) -> None:
        super().__init__(X, y, penalty, strength)

    def _labels(self, y: Array) -> Array:
        return _among(y, (0, 1), "(y + 1) / 2 turns −1 and 1 into them").astype(self.dtype)

    def value(self, w: Array) -> float:
        z = self.X @ w
        return float(np.mean(np.logaddexp(0, z) - self.y * z)) + self.penalty.value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        z = self.X @ w
        value = float(np.mean(np.logaddexp(0, z) - self.y * z)) + self.penalty.value(w)
        return value, self.X.T @ ((expit(z) - self.y) / self.n) + self.penalty.gradient(w)

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        p = expit(self.X @ w)
        return _weighted(self.X, p * (1 - p) / self.n, self.penalty.curvature(w))


class NonconvexSVM(_Linear):
    """The nonconvex support vector machine: the mean of 1 − tanh(y xᵀw), plus strength · ‖w‖².

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels −1 or 1.
    strength : float
        λ of the penalty λ‖w‖².
    """

    def __init__(self, X: Any, y: Any, strength: float = 1e-3) -> None:
        super().__init__(X, y, "l2", 2 * strength)

    def _labels(self, y: Array) -> Array:
        return _among(y, (-1, 1), "2 * y − 1 turns 0 and 1 into them").astype(self.dtype)

    def value(self, w: Array) -> float:
        return 1.0 - float(np.mean(np.tanh(self.y * (self.X @ w)))) + self.penalty.value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        t = np.tanh(self.y * (self.X @ w))
        value = 1.0 - float(np.mean(t)) + self.penalty.value(w)
        return value, self.X.T @ (self.y * (t * t - 1) / self.n) + self.penalty.gradient(w)

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        t = np.tanh(self.y * (self.X @ w))
        return _weighted(self.X, 2 * t * (1 - t * t) / self.n, self.penalty.curvature(w))


class Softmax(_Linear):
    """Softmax regression: mean cross entropy of the scores XWᵀ, plus a penalty on W.

    The variable is W of shape (classes, d), flattened row by row.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels 0 … classes − 1.
    classes : int, optional
        Number of classes; by default the largest label plus one.
    penalty : {"l2", "nonconvex", "none"}
        As in `Logistic`.
    strength : float
        Weight of the penalty.
    """

    def __init__(
        self, X: Any, y: Any, classes: int | None = None, penalty: PenaltyKind = "l2", strength: float = 1e-3
    ) -> None:
        self.classes = classes  # type: ignore[assignment]
        super().__init__(X, y, penalty, strength)
        self.dim = self.classes * self.features

    classes: int

    def _labels(self, y: Array) -> Array:
        if not np.all(np.equal(y, np.round(y))) or y.min() < 0:
            bad = y[(y != np.round(y)) | (y < 0)][0]
            raise ArgumentError(f"y holds {bad!r}: pass labels 0, 1, 2 …")
        require_integer("classes", self.classes, 2)
        if self.classes is None:
            self.classes = int(y.max()) + 1
        if self.classes < 2 or y.max() >= self.classes:
            raise ArgumentError(
                f"classes = {self.classes} does not fit labels up to {int(y.max())}: pass at least "
                f"{max(2, int(y.max()) + 1)}."
            )
        return y.astype(np.intp)

    def _scores(self, w: Array) -> Array:
        scores: Array = self.X @ w.reshape(self.classes, self.features).T
        return scores

    def _loss(self, scores: Array) -> float:
        return float(np.mean(logsumexp(scores, axis=1) - scores[np.arange(self.n), self.y]))

    def value(self, w: Array) -> float:
        return self._loss(self._scores(w)) + self.penalty.value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        scores = self._scores(w)
        residual = softmax(scores, axis=1)
        residual[np.arange(self.n), self.y] -= 1
        g = (self.X.T @ (residual / self.n)).T.reshape(-1) + self.penalty.gradient(w)
        return self._loss(scores) + self.penalty.value(w), g

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        p = softmax(self._scores(w), axis=1)
        curvature = self.penalty.curvature(w)

        def product(v: Array) -> Array:
            r = p * self._scores(v)
            r -= p * r.sum(axis=1, keepdims=True)
            result: Array = (self.X.T @ (r / self.n)).T.reshape(-1) + curvature * v
            return result

        return product


def _weighted(X: Any, weights: Array, curvature: Array | float) -> Callable[[Array], Array]:
    """Return v ↦ Xᵀ diag(weights) X v + curvature · v."""

    def product(v: Array) -> Array:
        result: Array = X.T @ (weights * (X @ v)) + curvature * v
        return result

    return product


def _matrix(X: Any) -> Any:
    if scipy.sparse.issparse(X):
        X = X.tocsr()
        entries = X.data
    else:
        X = np.asarray(X)
        entries = X
    if X.ndim != 2 or 0 in X.shape:
        raise ArgumentError(f"X has shape {X.shape}: pass a matrix with at least one row and one column.")
    if not np.issubdtype(entries.dtype, np.number) or np.iscomplexobj(entries):
        raise ArgumentTypeError(f"X holds {entries.dtype}: pass real numbers.")
    if entries.dtype not in (np.float32, np.float64):
        X = X.astype(np.float64)
        entries = X.data if scipy.sparse.issparse(X) else X
    if not np.all(np.isfinite(entries)):
        bad = int(np.count_nonzero(~np.isfinite(entries)))
        raise ArgumentError(f"X holds {bad} entries that are NaN or infinite: remove or impute them.")
    return X


def _vector(labels: Any, n: int) -> Array:
    y: Array = np.asarray(labels)
    if y.ndim != 1 or len(y) != n:
        raise ArgumentError(f"y has shape {y.shape} and X has {n} rows: pass one label for each row.")
    if not (np.issubdtype(y.dtype, np.number) or y.dtype == bool) or not np.all(np.isfinite(y)):
        raise ArgumentError(f"y holds {y.dtype} labels that are not finite numbers: encode them as numbers.")
    return y


def _among(y: Array, allowed: tuple[int, ...], remedy: str) -> Array:
    good = np.isin(y, allowed)
    if not good.all():
        raise ArgumentError(
            f"y holds {y[~good][0]!r} in row {int(np.argmin(good))}: pass labels {allowed[0]} and {allowed[1]}; "
            f"{remedy}."
        )
    return y
