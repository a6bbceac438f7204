"""Finite sums of losses of a margin: logistic regression, the nonconvex SVM and softmax regression, dense or sparse.

A subset of a sum is again a sum of the same kind, the mean over its own rows with the same penalty; that is all that
sampling needs. What costs time is reading X, so the margins Xw are computed once for value, gradient and Hessian at the
same w, and a large dense X, which may lie in a file, is gone through in blocks of rows that fit the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse

from sanc.errors import ArgumentError, ArgumentTypeError
from sanc.sums.losses import Array, LogisticLoss, Loss, Penalty, PenaltyKind, SoftmaxLoss, TanhLoss

__all__ = ["FiniteSum", "Logistic", "NonconvexSVM", "Softmax"]

_BLOCK = 1 << 22
"""Bytes of a dense X in a block: it stays in the cache while it is read twice."""
_POINTS = 2
"""Points at which a sum remembers its margins: the current one and a trial."""


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


class LinearSum(FiniteSum):
    """The mean of losses of the margins Xw, plus a penalty on w.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels.
    loss : Loss
        Value, slope and bend as functions of the margin.
    penalty : Penalty
        The penalty.
    """

    def __init__(self, X: Any, y: Any, loss: Loss, penalty: Penalty) -> None:
        self.X = _matrix(X)
        self.n, self.features = self.X.shape
        self.dtype = self.X.dtype
        self.loss, self.penalty = loss, penalty
        self.y = loss.labels(_vector(y, self.n), self.dtype)
        self.dim = self.features * loss.columns
        self._points: list[tuple[Array, Array]] = []  # the last w, and their margins

    def subset(self, rows: Array) -> LinearSum:
        rows = np.asarray(rows)
        if rows.size == 0 or rows.min() < 0 or rows.max() >= self.n:
            raise ArgumentError(f"rows = {rows!r:.60} cannot be used: pass row numbers from 0 to {self.n - 1}.")
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__, X=self.X[rows], y=self.y[rows], n=len(rows), _points=[])
        return part

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_points": []}

    def value(self, w: Array) -> float:
        return float(self.loss.value(self._margins(w), self.y).sum()) / self.n + self.penalty.value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        z, g = self._margins(w), np.zeros(self.dim, self.dtype)
        slope = self.loss.slope(z, self.y)
        for rows, X in self._blocks():
            g += self._pull(X, slope[rows])
        g /= self.n
        g += self.penalty.gradient(w)
        return float(self.loss.value(z, self.y).sum()) / self.n + self.penalty.value(w), g

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        bend, curvature = self.loss.bend(self._margins(w), self.y), self.penalty.curvature(w)

        def product(v: Array) -> Array:
            total = np.zeros(self.dim, self.dtype)
            for rows, X in self._blocks():
                total += self._pull(X, self.loss.bent(bend[rows], self._times(X, v)))
            total /= self.n
            total += curvature * v
            return total

        return product

    def _times(self, X: Any, w: Array) -> Array:
        """Xw, or XWᵀ for W with one row a class."""
        z: Array = X @ w if self.loss.columns == 1 else X @ w.reshape(self.loss.columns, self.features).T
        return z

    def _pull(self, X: Any, r: Array) -> Array:
        """Xᵀr, or (Xᵀr)ᵀ flattened."""
        g: Array = X.T @ r if self.loss.columns == 1 else (X.T @ r).T.reshape(-1)
        return g

    def _margins(self, w: Array) -> Array:
        """Return the margins at w as it is now, not as it was before someone changed it in place."""
        for place, (known, z) in enumerate(self._points):
            if known.dtype == w.dtype and np.array_equal(known, w):
                self._points.append(self._points.pop(place))
                return z
        parts = [self._times(X, w) for _, X in self._blocks()]
        z = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._points = [*self._points[1 - _POINTS :], (w.copy(), z)]
        return z

    def _blocks(self) -> Iterator[tuple[slice, Any]]:
        """Go through X: at once where it is sparse or fits the cache."""
        if not isinstance(self.X, np.ndarray) or self.X.nbytes <= _BLOCK:
            yield slice(None), self.X
            return
        size = max(32, _BLOCK // (self.X.itemsize * self.features))
        for begin in range(0, self.n, size):
            rows = slice(begin, min(begin + size, self.n))
            yield rows, self.X[rows]


class Logistic(LinearSum):
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
        super().__init__(X, y, LogisticLoss(), Penalty(penalty, strength))


class NonconvexSVM(LinearSum):
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
        super().__init__(X, y, TanhLoss(), Penalty("l2", 2 * strength))


class Softmax(LinearSum):
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
        super().__init__(X, y, SoftmaxLoss(classes), Penalty(penalty, strength))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.loss.columns


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
