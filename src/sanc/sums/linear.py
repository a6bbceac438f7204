"""The interface of finite sums, and sums of losses of the margins Xw with a dense or sparse X.

A subset of a sum is a sum of the same class: the mean over its rows, with the same penalty. Sampling needs no more than
that. Reading X dominates the cost. Value, gradient and Hessian at the same w therefore share the margins Xw. A large
dense X, which may be a memory map, is read in blocks of rows that fit the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

from sanc.errors import ArgumentError, shown
from sanc.sums.checks import Array, checked_labels, checked_matrix, checked_weights, reject_others
from sanc.sums.penalty import Penalty, PenaltyKind

_CACHE_BLOCK = 1 << 22
"""Bytes of a block of a dense X: 4 MiB fit the second- or third-level cache, since a Hessian product reads each block
twice."""
_PRODUCT_ROWS = 1024
"""Rows of a dense X that a product RᵀX sums at a time. With 1,797 × 64 entries and ten columns of R, OpenBLAS needs
95 µs, and 136 µs for all rows at once; other sizes take as long as before, or up to a third less."""
_MAX_STORED_POINTS = 2
"""Points whose margins are stored: the current iterate and a trial point."""
_MIN_BLOCK_ROWS = 32
"""Rows of a block of a very wide X, so that the overhead per block remains small."""

_MATRIX_SPEED = 10.0
"""Speed of the multiplications in a matrix product, relative to a product with a vector.

Measured with 100,000 × 54 entries on one core: XᵀDX takes 32 ms, and XᵀDXv 6.4 ms. A matrix of d columns therefore
costs as much as d/10 products.
"""
_ITERATION_PRODUCTS = 12.0
"""Hessian products of an iteration in a Krylov space: 10 on a9a and 13 on covtype. d³ multiplications for eigenpairs
take as long as a product with d³ entries of X."""
_SMALL_MATRIX_DIM, _MAX_MATRIX_DIM = 50, 500
"""Dimensions up to which eigenpairs take less than a millisecond, and above which no matrix is formed."""


class FiniteSum(ABC):
    """f(w) = (1/n) Σ f_i(w), from which `sanc.minimize` can sample. Subclass it to define another sum.

    Attributes
    ----------
    n : int
        Number of components.
    dim : int
        Number of variables.
    dtype : numpy.dtype
        Type of the variables.
    convex : bool
        Whether f is known to be convex, so that a run need not search for negative curvature.
    """

    n: int
    dim: int
    dtype: np.dtype[Any]
    convex: bool = False

    @abstractmethod
    def subset(self, rows: Array) -> FiniteSum:
        """Return the mean over these components."""

    @abstractmethod
    def value(self, w: Array) -> float:
        """Return f(w)."""

    @abstractmethod
    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        """Return f(w) and ∇f(w)."""

    @abstractmethod
    def hessian(self, w: Array) -> Callable[[Array], Array]:
        """Return v ↦ ∇²f(w) v. Terms that depend only on w are computed once."""

    def hessian_matrix(self, w: Array) -> Array | None:
        """Return ∇²f(w) as a float64 matrix if it costs less than the products of an iteration; None otherwise."""
        return None


class LinearSum(FiniteSum):
    """The mean of losses of the margins z = Xw, plus a penalty on w.

    Subclass it to define another loss. `losses`, `derivatives` and `second_derivatives` are functions of the margins
    and may use the labels ``self.y``, which `labels` checks and converts. There is one margin per row of X. With
    `columns` > 1 the margins are z = XWᵀ with `columns` rows in W, and the derivatives have as many columns. An
    intercept is the last entry of w, or of each row of W, and is not penalised. `weights` make the mean a weighted one.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels.
    penalty : {"l2", "nonconvex", "none"}
        "l2" is strength/2 · ‖w‖². "nonconvex" is strength · Σ w²/(1+w²), as in the paper.
    strength : float or array, shape (d,)
        Weight of the penalty, or one weight for each feature.
    weights : array, shape (n,), optional
        Weights of the rows.
    intercept : bool
        Add an intercept to the margins: one more variable at the end of w, without penalty.

    Attributes
    ----------
    n, dim, dtype
        As in `FiniteSum`.
    features : int
        Number of features, the columns of X.
    columns : int
        Number of margins of each row.
    """

    columns = 1
    shift_invariant = False
    """Whether equal changes of all margins of a row do not change its loss."""

    def labels(self, y: Array) -> Array:
        """Check the labels, and return them in the type that the losses use."""
        return y.astype(self.dtype)

    @abstractmethod
    def losses(self, z: Array) -> Any:
        """Return one loss per row."""

    @abstractmethod
    def derivatives(self, z: Array) -> Any:
        """Return the first derivatives of the losses."""

    @abstractmethod
    def second_derivatives(self, z: Array) -> Any:
        """Return the second derivatives of the losses, in the form that `second_product` takes."""

    def second_product(self, second: Array, change: Array) -> Any:
        """Return the second derivatives times a change of the margins."""
        return second * change

    def __init__(
        self,
        X: Any,
        y: Any,
        penalty: PenaltyKind = "l2",
        strength: float | Array = 1e-3,
        *,
        weights: Any = None,
        intercept: bool = False,
        **others: Never,
    ) -> None:
        reject_others(type(self), others)
        self.X = checked_matrix(X)
        self.n, self.features = self.X.shape
        self.penalty = Penalty(penalty, strength, self.features)
        self.dtype = self.X.dtype
        self.y = self.labels(checked_labels(y, self.n))
        self.weights = None
        if weights is not None:  # scaled to mean 1, so that a subset can use its weights unchanged
            weights = checked_weights("weights", weights, self.n)
            self.weights = (weights * (self.n / float(weights.sum()))).astype(self.dtype)
        self.intercept = bool(intercept)
        self.dim = (self.features + self.intercept) * self.columns
        self._points: list[_Point] = []  # the most recent last

    def subset(self, rows: Array) -> LinearSum:
        rows = np.asarray(rows)
        if rows.size == 0 or rows.min() < 0 or rows.max() >= self.n:
            raise ArgumentError(f"rows = {shown(rows)} cannot be used: pass row numbers from 0 to {self.n - 1}.")
        part = object.__new__(type(self))
        weights = None if self.weights is None else self.weights[rows]
        part.__dict__.update(self.__dict__, X=self.X[rows], y=self.y[rows], weights=weights, n=len(rows), _points=[])
        return part

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_points": []}

    def value(self, w: Array) -> float:
        point = self._point(w)
        if point.value is None:
            losses = self._weighted(self._by_row("losses", self.losses(point.margins), (self.n,)))
            point.value = float(losses.sum()) / self.n + self.penalty.value(self._coefficients(w))
        return point.value

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        point = self._point(w)
        if point.gradient is None:
            margins, g = point.margins, np.zeros(self.dim, self.dtype)
            derivatives = self._weighted(self._by_row("derivatives", self.derivatives(margins), margins.shape))
            for rows, X in self._blocks():
                g += self._transposed_times(X, derivatives[rows])
            g /= self.n
            penalised = self._coefficients(g)
            penalised += self.penalty.gradient(self._coefficients(w))
            point.gradient = g
        return self.value(w), point.gradient.copy()

    def _by_row(self, name: str, values: Any, shape: tuple[int, ...]) -> Any:
        """Return what a function of the margins returned; raise an error if it has another shape."""
        if np.shape(values) != shape:
            raise ArgumentError(
                f"{type(self).__name__}.{name} returned an array of shape {np.shape(values)}: return one of shape "
                f"{shape}, with an entry for each margin."
            )
        return values

    def _second(self, w: Array) -> Any:
        """Return the second derivatives at w, which have an entry or a row for each row of X."""
        second = self.second_derivatives(self._margins(w))
        return self._by_row("second_derivatives", second, (self.n, *np.shape(second)[1:]))

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        second, curvature = self._second(w), self.penalty.second_derivatives(self._coefficients(w))
        blocks = [(rows, X, second[rows]) for rows, X in self._blocks()]

        def product(v: Array) -> Array:
            total = np.zeros(self.dim, self.dtype)
            for rows, X, part in blocks:
                total += self._transposed_times(X, self._weighted(self.second_product(part, self._times(X, v)), rows))
            total /= self.n
            penalised = self._coefficients(total)
            penalised += curvature * self._coefficients(v)
            return total

        return product

    def hessian_matrix(self, w: Array) -> Array | None:
        """Return ∇²f(w), formed by matrix products of blocks of rows; None if products with vectors cost less.

        If equal changes of all intercepts change no loss, a multiple of the projection on that direction is added.
        Steps do not change: the gradient has no part along it, and without the multiple the matrix would be singular.
        """
        if not self._matrix_pays():
            return None
        return self.regular_hessian(w)

    def regular_hessian(self, w: Array) -> Array:
        """Return ∇²f(w), plus the projection of `hessian_matrix` if there is one, whatever that costs."""
        matrix = self.form_hessian(w)
        if self.columns > 1 and self.intercept and self.shift_invariant:
            width = self.dim // self.columns
            matrix[width - 1 :: width, width - 1 :: width] += np.trace(matrix) / self.dim
        return matrix

    def form_hessian(self, w: Array) -> Array:
        """Return ∇²f(w) as a float64 matrix, whatever it costs; X must be dense."""
        second, width = self._second(w), self.dim // self.columns
        total = np.zeros((self.dim, self.dim))
        for rows, X in self._blocks():
            for k, weights in enumerate(self._second_columns(second[rows])):
                weights = self._weighted(weights, rows)
                for j in range(k + 1):
                    block = total[j * width : (j + 1) * width, k * width : (k + 1) * width]
                    block += self._gram(X, weights[:, j] if self.columns > 1 else weights)
        total /= self.n
        if self.columns > 1:
            total = np.triu(total) + np.triu(total, 1).T
        penalised = self._coefficients(total.reshape(-1)[:: self.dim + 1])
        penalised += self.penalty.second_derivatives(self._coefficients(w))
        return total

    def _matrix_pays(self) -> bool:
        """Return whether the Hessian as a matrix, with its eigenpairs, costs less than the products of an iteration."""
        if not isinstance(self.X, np.ndarray) or self.dim > _MAX_MATRIX_DIM:
            return False
        gram = 0.5 * (self.columns + 1) * self.features / _MATRIX_SPEED
        return self.dim <= _SMALL_MATRIX_DIM or gram + self.dim**3 / (self.X.size * self.columns) <= _ITERATION_PRODUCTS

    def _second_columns(self, second: Array) -> Iterator[Any]:
        """Yield the second derivatives times each unit change of the margins."""
        if self.columns == 1:
            yield self.second_product(second, np.ones(len(second), self.dtype))
            return
        for k in range(self.columns):
            change = np.zeros((len(second), self.columns), self.dtype, order="F")  # as the margins
            change[:, k] = 1.0
            yield self.second_product(second, change)

    def _gram(self, X: Array, weights: Array) -> Any:
        """Return XᵀDX with the weights on the diagonal of D, where X has a column of ones for an intercept."""
        is_definite = weights.min() >= 0.0
        roots = np.sqrt(weights) if is_definite else weights
        scaled, right = roots[:, None] * X, roots if is_definite else np.ones_like(weights)
        gram = scaled.T @ (scaled if is_definite else X)
        if not self.intercept:
            return gram
        whole, sums = np.empty((self.features + 1, self.features + 1), self.dtype), scaled.T @ right
        whole[:-1, :-1], whole[:-1, -1], whole[-1, :-1], whole[-1, -1] = gram, sums, sums, roots @ right
        return whole

    def _weighted(self, per_row: Any, rows: slice = slice(None)) -> Any:
        """Multiply each row by its weight."""
        if self.weights is None:
            return per_row
        return (per_row.T * self.weights[rows]).T

    def _coefficients(self, w: Array) -> Any:
        """Return a view of w without its intercepts; with one strength for each feature, one column for each."""
        if self.intercept or self.penalty.varies:
            return w.reshape(self.columns, -1)[:, : self.features]
        return w

    def _times(self, X: Any, w: Array) -> Any:
        """Return Xw, or XWᵀ, plus the intercepts.

        For a dense X the margins of a class are contiguous, so that sums over classes are sums of long vectors.
        """
        if self.columns == 1:
            z = X @ w[: self.features]
            return z + w[self.features :] if self.intercept else z
        W = w.reshape(self.columns, -1)
        coefficients = W[:, : self.features]
        rows = coefficients @ X.T if isinstance(X, np.ndarray) else (X @ coefficients.T).T
        if self.intercept:
            rows += W[:, self.features :]
        return rows.T

    def _transposed_times(self, X: Any, r: Array) -> Any:
        """Return Xᵀr, or (Xᵀr)ᵀ flattened. The entries of the intercepts are the column sums of r."""
        if self.columns == 1:
            product = X.T @ r
            if not self.intercept:
                return product
            whole = np.empty(self.dim, product.dtype)
            whole[:-1], whole[-1] = product, r.sum()
            return whole
        if isinstance(X, np.ndarray):
            cuts = range(0, len(X), _PRODUCT_ROWS)
            product = sum(r[begin : begin + _PRODUCT_ROWS].T @ X[begin : begin + _PRODUCT_ROWS] for begin in cuts)
        else:
            product = (X.T @ r).T
        if not self.intercept:
            return product.reshape(-1)
        whole = np.empty((self.columns, self.features + 1), product.dtype)
        whole[:, :-1], whole[:, -1] = product, r.sum(axis=0)
        return whole.reshape(-1)

    def margins(self, w: Array) -> Array:
        """Return the margins Xw, or XWᵀ, plus the intercepts."""
        z: Array = self._times(self.X, w)
        return z

    def _margins(self, w: Array) -> Array:
        """Return the margins at w, stored or computed."""
        return self._point(w).margins

    def _point(self, w: Array) -> _Point:
        """Return w with its margins, stored or computed.

        Points are compared by value, since the caller may change w in place.
        """
        for point in reversed(self._points):
            if point.w.dtype == w.dtype and (point.w == w).all():
                if point is not self._points[-1]:
                    self._points.remove(point)
                    self._points.append(point)
                return point
        parts = [self._times(X, w) for _, X in self._blocks()]
        point = _Point(w.copy(), parts[0] if len(parts) == 1 else np.concatenate(parts))
        self._points = [*self._points[1 - _MAX_STORED_POINTS :], point]
        return point

    def _blocks(self) -> Iterator[tuple[slice, Any]]:
        """Yield blocks of rows of X, or X as a whole if it is sparse or fits the cache."""
        if not isinstance(self.X, np.ndarray) or self.X.nbytes <= _CACHE_BLOCK:
            yield slice(None), self.X
            return
        size = max(_MIN_BLOCK_ROWS, _CACHE_BLOCK // (self.X.itemsize * self.features))
        for begin in range(0, self.n, size):
            rows = slice(begin, begin + size)
            yield rows, self.X[rows]


@dataclass(slots=True, eq=False)
class _Point:
    """A point with its margins.

    Attributes
    ----------
    w : array
        The point.
    margins : array
        Xw.
    value, gradient : float or None, array or None
        f(w) and ∇f(w), once they were computed.
    """

    w: Array
    margins: Array
    value: float | None = None
    gradient: Array | None = None
