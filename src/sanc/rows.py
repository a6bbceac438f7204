"""Some rows of a matrix, drawn and multiplied without the checks of SciPy's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

try:  # what SciPy's own sparse matrices are made of; it has no public name
    from scipy.sparse import _sparsetools
except ImportError:  # pragma: no cover - samples are then matrices of SciPy
    _sparsetools = None
if not all(hasattr(_sparsetools, name) for name in ("csr_row_index", "csr_matvec", "csc_matvec", "csr_matvecs")):
    _sparsetools = None

Array: TypeAlias = npt.NDArray[Any]

_MANY = 1 << 20
"""Entries of a matrix, about, that are looked at for zeros at first."""
_DENSE = 0.1
"""Share of a matrix that is not zero up to which rows of it are drawn from a sparse copy."""


def available() -> bool:
    """Whether this SciPy has what `Rows` are made of."""
    return _sparsetools is not None


class Rows:
    """Some rows of a sparse matrix, or the transpose of them, for products alone.

    SciPy computes them, to the last bit as in ``X[rows] @ w``; around that it checks what is known to be right, and for
    a few rows the checks take longer than the products.
    """

    __slots__ = ("_entries", "_products", "shape")

    def __init__(self, shape: tuple[int, int], entries: tuple[Array, Array, Array], products: str = "csr") -> None:
        self.shape, self._entries, self._products = shape, entries, products

    @classmethod
    def of(cls, X: Any, rows: Array, lengths: Array) -> Rows:
        """Return ``X[rows]``, where `lengths` says how many entries each row of X has."""
        count, kind = len(rows), X.indptr.dtype
        indptr = np.zeros(count + 1, kind)
        lengths.take(rows).cumsum(out=indptr[1:])
        indices, data = np.empty(indptr[-1], X.indices.dtype), np.empty(indptr[-1], X.data.dtype)
        _sparsetools.csr_row_index(count, rows.astype(kind), X.indptr, X.indices, X.data, indices, data)
        return cls((count, X.shape[1]), (indptr, indices, data))

    @property
    def T(self) -> Rows:  # noqa: N802 - as in NumPy
        """The same numbers, read the other way."""
        return Rows(self.shape[::-1], self._entries, "csc" if self._products == "csr" else "csr")

    def __matmul__(self, other: Array) -> Array:
        (rows, columns), (indptr, indices, data) = self.shape, self._entries
        kind = data.dtype if other.dtype == data.dtype else np.result_type(data, other)
        if other.ndim == 1:
            result = np.zeros(rows, kind)
            one = _sparsetools.csr_matvec if self._products == "csr" else _sparsetools.csc_matvec
            one(rows, columns, indptr, indices, data, other, result)
        else:
            result = np.zeros((rows, other.shape[1]), kind)
            many = _sparsetools.csr_matvecs if self._products == "csr" else _sparsetools.csc_matvecs
            many(rows, columns, other.shape[1], indptr, indices, data, other.ravel(), result.ravel())
        return result


class Copied:
    """Some rows of a dense matrix, for products alone.

    Parameters
    ----------
    X : array
        The rows.
    """

    __slots__ = ("_X",)

    def __init__(self, X: Array) -> None:
        self._X = X

    def __getitem__(self, part: slice) -> Copied:
        """Return a part of them."""
        return Copied(self._X[part])

    def scores(self, w: Array) -> Array:
        """Xw, in an array of its own."""
        z: Array = self._X @ w
        return z

    def pull(self, r: Array, onto: Any) -> Array:
        """Xᵀr + onto, which is taken over."""
        g: Array = self._X.T @ r
        g += onto
        return g

    def curved(self, bend: Array, diagonal: Any) -> Callable[[Array], Array]:
        """Return v ↦ Xᵀ(bend · Xv) + diagonal · v."""

        def product(v: Array) -> Array:
            z = self._X @ v
            z *= bend
            return self.pull(z, diagonal * v)

        return product


class Picked:
    """Some rows of a sparse matrix, for products alone, multiplied where they lie.

    SciPy reads row i from where it begins to where the next begins. Given where each row begins and where it ends, in
    turns, it takes what lies between two of them for a row, too. If the rows are in descending order, nothing does: the
    next begins before this one ends. So every other score is 0.

    Parameters
    ----------
    columns : int
        Of the matrix.
    entries : tuple of two arrays
        Columns and values of all its entries.
    ends : array, shape (2 · rows,)
        Where each row begins and ends among them.
    parts : list of slice
        Which rows are in descending order, part by part; one part is all of them.
    """

    __slots__ = ("_columns", "_ends", "_entries", "_parts")

    def __init__(self, columns: int, entries: tuple[Array, Array], ends: Array, parts: list[slice]) -> None:
        self._columns, self._entries, self._ends, self._parts = columns, entries, ends, parts

    def __getitem__(self, part: slice) -> Picked:
        """Return one of the parts."""
        ends = self._ends[2 * part.start : 2 * part.stop]
        return Picked(self._columns, self._entries, ends, [part])

    def scores(self, w: Array) -> Array:
        """Xw, in an array of its own."""
        (indices, data), ends = self._entries, self._ends
        z = np.zeros(len(ends), data.dtype if w.dtype == data.dtype else np.result_type(data, w))
        if len(self._parts) == 1:
            _sparsetools.csr_matvec(len(ends) - 1, self._columns, ends, indices, data, w, z)
            return z[::2]
        for part in self._parts:
            begin, end = 2 * part.start, 2 * part.stop
            rows = end - begin - 1
            _sparsetools.csr_matvec(rows, self._columns, ends[begin:end], indices, data, w, z[begin:end])
        return z[::2]

    def pull(self, r: Array, onto: Any) -> Array:
        """Xᵀr + onto, which is taken over; only where they are one part."""
        (indices, data), ends = self._entries, self._ends
        spread = np.zeros(len(ends), r.dtype)
        spread[::2] = r
        g: Array = onto
        if not (isinstance(onto, np.ndarray) and onto.dtype == r.dtype == data.dtype):
            g = np.zeros(self._columns, np.result_type(data, r))
        _sparsetools.csc_matvec(self._columns, len(ends) - 1, ends, indices, data, spread, g)
        if g is not onto:
            g += onto
        return g

    def curved(self, bend: Array, diagonal: Any) -> Callable[[Array], Array]:
        """Return v ↦ Xᵀ(bend · Xv) + diagonal · v; only where they are one part."""
        columns, (indices, data), ends, rows = self._columns, self._entries, self._ends, len(self._ends) - 1
        onward, back, kind = _sparsetools.csr_matvec, _sparsetools.csc_matvec, data.dtype
        spread = np.zeros(len(ends), bend.dtype)
        spread[::2] = bend

        def product(v: Array) -> Array:
            result: Array = diagonal * v
            if not kind == spread.dtype == result.dtype:
                return self.pull(bend * self.scores(v), result)
            z = np.zeros(rows + 1, kind)
            onward(rows, columns, ends, indices, data, v, z)
            z *= spread
            back(columns, rows, ends, indices, data, z, result)
            return result

        return product


class Pool:
    """The rows that the samples of a run are drawn from; of a dense X that holds mostly zeros a sparse copy.

    Attributes
    ----------
    size : int
        Entries of X, or where it is sparse those that it stores.
    quick : bool
        Whether `rows` can be had.
    """

    def __init__(self, X: Any) -> None:
        if isinstance(X, np.ndarray) and available():
            X = _without_zeros(X)
        dense = isinstance(X, np.ndarray)
        self._X, self._dense = X, dense
        self.size: int = X.size if dense else X.nnz
        self.quick = dense or available()

    @cached_property
    def _lengths(self) -> Array:
        lengths: Array = np.diff(self._X.indptr)
        return lengths

    @cached_property
    def _entries(self) -> tuple[Array, Array]:
        """Columns and values of all entries, as SciPy reads them without making copies."""
        kind = np.result_type(self._X.indptr, self._X.indices)
        return np.ascontiguousarray(self._X.indices, kind), np.ascontiguousarray(self._X.data)

    @cached_property
    def _ends(self) -> Array:
        """Where each row begins and ends among them."""
        indptr = self._X.indptr.astype(self._entries[0].dtype, copy=False)
        return np.stack([indptr[:-1], indptr[1:]], axis=1)

    def matrix(self, rows: Array) -> Any:
        """Return some rows as a matrix, for products alone."""
        return self._X[rows] if self._dense or not self.quick else Rows.of(self._X, rows, self._lengths)

    def rows(self, order: Array, parts: list[slice]) -> Sequence[Copied | Picked]:
        """Return, for each row of `order`, the rows it names; in each of the parts they are in descending order."""
        if self._dense:
            return [Copied(X) for X in self._X[order]]
        all_ends = self._ends.take(order, axis=0).reshape(len(order), -1)
        return [Picked(self._X.shape[1], self._entries, ends, parts) for ends in all_ends]


def _without_zeros(X: Array) -> Any:
    """Return X as a sparse matrix where it holds mostly zeros, else X itself."""
    for every in sorted({max(1, X.size // _MANY), 1}, reverse=True):  # one of so many rows, before all of them
        kept = X[::every] != 0
        if np.count_nonzero(kept) > _DENSE * kept.size:
            return X
    rows, columns = np.divmod(np.flatnonzero(kept), X.shape[1])
    ends = np.cumsum(np.bincount(rows, minlength=len(X)))
    return scipy.sparse.csr_array((X[rows, columns], columns, np.append(0, ends)), shape=X.shape)
