"""Some rows of a sparse matrix, drawn and multiplied without the checks of SciPy's own."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

try:  # what SciPy's own sparse matrices are made of; it has no public name
    from scipy.sparse import _sparsetools
except ImportError:  # pragma: no cover - samples are then matrices of SciPy
    _sparsetools = None
if not all(hasattr(_sparsetools, name) for name in ("csr_row_index", "csr_matvec", "csc_matvec", "csr_matvecs")):
    _sparsetools = None

Array: TypeAlias = npt.NDArray[Any]


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

    def __getitem__(self, part: slice) -> Rows:
        """Return a part of them, whose numbers are not copied."""
        indptr, indices, data = self._entries
        return Rows((part.stop - part.start, self.shape[1]), (indptr[part.start : part.stop + 1], indices, data))

    def pull(self, z: Array, onto: Any) -> Array:
        """Return ``self.T @ z + onto`` for a vector z, in the memory of `onto` where that is one of its type."""
        indptr, indices, data = self._entries
        if isinstance(onto, np.ndarray) and data.dtype == z.dtype == onto.dtype:
            _sparsetools.csc_matvec(self.shape[1], self.shape[0], indptr, indices, data, z, onto)
            return onto
        result: Array = self.T @ z
        result += onto
        return result

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
