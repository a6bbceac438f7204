"""Losses of the margins z: logistic regression, nonconvex SVM and softmax regression.

Each class defines the loss and its first two derivatives with respect to z.
"""

from __future__ import annotations

from typing import Any, Never

import numpy as np

from sanc.errors import ArgumentError, require_integer, require_not_negative, shown
from sanc.sums.checks import Array, reject_others
from sanc.sums.linear import LinearSum
from sanc.sums.penalty import PenaltyKind

__all__ = ["Logistic", "NonconvexSVM", "Softmax"]

_MAX_CLASSES = 1000
"""Distinct labels up to which they count as classes; the most classes of a common data set, ImageNet."""


class Logistic(LinearSum):
    """Logistic regression: the mean of log(1 + e^z) − y z with z = xᵀw, plus a penalty.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels 0 or 1.
    penalty : {"l2", "nonconvex", "none"}
        "l2" is strength/2 · ‖w‖². "nonconvex" is strength · Σ w²/(1+w²), as in the paper.
    strength : float or array, shape (d,)
        Weight of the penalty, or one weight for each feature.
    weights : array, shape (n,), optional
        Weights of the rows; the mean becomes a weighted mean.
    intercept : bool
        Add an intercept to the margins: one more variable at the end of w, without penalty.

    Examples
    --------
    >>> import numpy as np, sanc
    >>> X = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0]])
    >>> problem = sanc.problems.Logistic(X, [0, 1, 1], penalty="nonconvex", strength=0.1)
    >>> round(problem.value(np.zeros(2)), 6)
    0.693147
    """

    @property
    def convex(self) -> bool:  # type: ignore[override]
        """Whether f is convex: the loss is, and so are all penalties but the nonconvex one."""
        return self.penalty.kind != "nonconvex"

    def labels(self, y: Array) -> Array:
        return _require_labels(y, 0, 1, "(y + 1) / 2 maps −1 and 1 to them").astype(self.dtype)

    def losses(self, z: Array) -> Any:
        """Return log(1 + e^(t z)) with t = 1 − 2y (D6)."""
        t = (1 - 2 * self.y) * z
        return np.log1p(np.exp(-np.abs(t))) + np.maximum(t, 0.0)

    def derivatives(self, z: Array) -> Any:
        """Return t / (1 + e^(−t z))."""
        t = 1 - 2 * self.y
        z = t * z
        e = np.exp(-np.abs(z))
        return t * (np.where(z >= 0, np.ones_like(e), e) / (1 + e))

    def second_derivatives(self, z: Array) -> Any:
        """Return e^−|z| / (1 + e^−|z|)²."""
        e = np.exp(-np.abs(z))
        return e / ((1 + e) * (1 + e))


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
    weights : array, shape (n,), optional
        Weights of the rows; the mean becomes a weighted mean.
    intercept : bool
        Add an intercept to the margins: one more variable at the end of w, without penalty.
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        strength: float = 1e-3,
        *,
        weights: Any = None,
        intercept: bool = False,
        **others: Never,
    ) -> None:
        reject_others(type(self), others)
        require_not_negative("strength", strength)
        super().__init__(X, y, "l2", 2 * strength, weights=weights, intercept=intercept)

    def labels(self, y: Array) -> Array:
        return _require_labels(y, -1, 1, "2 * y − 1 maps 0 and 1 to them").astype(self.dtype)

    def losses(self, z: Array) -> Any:
        return 1 - np.tanh(self.y * z)

    def derivatives(self, z: Array) -> Any:
        """Return −y (1 − tanh²(z))."""
        t = np.tanh(z)
        return self.y * (t * t - 1)

    def second_derivatives(self, z: Array) -> Any:
        """Return 2 tanh(y z) (1 − tanh²(y z))."""
        t = np.tanh(self.y * z)
        return 2 * t * (1 - t * t)


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
    strength : float or array, shape (d,)
        Weight of the penalty, or one weight for each feature.
    weights : array, shape (n,), optional
        Weights of the rows; the mean becomes a weighted mean.
    intercept : bool
        Add an intercept to the margins: one more variable at the end of each row of W, without penalty.

    Attributes
    ----------
    columns : int
        Number of margins of each row: the classes.
    """

    shift_invariant = True

    def __init__(
        self,
        X: Any,
        y: Any,
        classes: int | None = None,
        penalty: PenaltyKind = "l2",
        strength: float | Array = 1e-3,
        *,
        weights: Any = None,
        intercept: bool = False,
        **others: Never,
    ) -> None:
        reject_others(type(self), others)
        require_integer("classes", classes, 2, optional=True)
        self.columns = classes or 0  # 0 until `labels` counts the classes
        super().__init__(X, y, penalty, strength, weights=weights, intercept=intercept)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.columns

    @property
    def convex(self) -> bool:  # type: ignore[override]
        """Whether f is convex: the loss is, and so are all penalties but the nonconvex one."""
        return self.penalty.kind != "nonconvex"

    def labels(self, y: Array) -> Array:
        wrong = (y != np.round(y)) | (y < 0)
        if wrong.any():
            raise ArgumentError(f"y holds {y[wrong][0]}: pass labels 0, 1, 2 …")
        least = int(y.max()) + 1
        if not self.columns and (missing := np.setdiff1d(np.arange(least), y)).size:
            raise ArgumentError(
                f"y holds labels up to {least - 1} but no {missing[0]}: pass labels 0, 1, 2 … without gaps, as "
                f"numpy.unique(y, return_inverse=True)[1], or classes = {least} if that class exists."
            )
        self.columns = self.columns or least
        if self.columns < max(2, least):
            raise ArgumentError(
                f"classes = {self.columns} does not fit labels up to {least - 1}: pass at least {max(2, least)}."
            )
        return y.astype(np.intp)

    def losses(self, z: Array) -> Any:
        z = z - z.max(axis=1, keepdims=True)
        return np.log(np.exp(z).sum(axis=1)) - z[np.arange(self.n), self.y]

    def derivatives(self, z: Array) -> Any:
        """Return softmax(z) − e_y."""
        derivatives = self.second_derivatives(z)
        derivatives[np.arange(self.n), self.y] -= 1
        return derivatives

    def second_derivatives(self, z: Array) -> Any:
        """Return p = softmax(z)."""
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def second_product(self, second: Array, change: Array) -> Any:
        """Return (diag(p) − p pᵀ) times a change of the margins."""
        product = change - np.einsum("ik,ik->i", second, change)[:, None]
        product *= second
        return product


def _require_labels(y: Array, a: int, b: int, remedy: str) -> Array:
    """Return y if every label is a or b, or raise an `ArgumentError` that names the first other one."""
    good = (y == a) | (y == b)
    if not good.all():
        row, classes = int(np.argmin(good)), np.unique(y)
        if 3 <= classes.size <= _MAX_CLASSES:
            raise ArgumentError(
                f"y holds {classes.size} classes ({shown(classes.tolist())}), and this loss is for two: pass labels "
                f"{a} and {b}, such as those of one class against the others, or use sanc.problems.Softmax."
            )
        raise ArgumentError(f"y holds {y[row]} in row {row}: pass labels {a} and {b}; {remedy}.")
    return y
