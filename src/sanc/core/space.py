"""Vector spaces: the few operations that the method needs, for NumPy arrays and torch tensors.

Everything large is a vector, everything small a float64 number on the host. On a device each number that the host reads
is a synchronisation, so inner products may stay there, *unread*, and be read together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import get_blas_funcs

Floats: TypeAlias = npt.NDArray[np.float64]
"""A small float64 array on the host."""

Scalar: TypeAlias = Any
"""A number that may be unread: a float, or a zero-dimensional tensor."""


class Vector(Protocol):
    """The operations that one-dimensional NumPy arrays and torch tensors share, as far as they are used."""

    def __add__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __neg__(self) -> Self: ...
    def __pow__(self, other: Any, /) -> Self: ...
    def __len__(self) -> int: ...


_PIECE = 2**20
"""Longer inner products are summed in blocks, in float64: one float32 sum over 10⁹ entries would lose half its
digits."""


class Space:
    """Torch vectors of one dimension, type and device.

    Attributes
    ----------
    dim : int
        Their dimension.
    eps : float
        Precision of their type.
    total : callable or None
        Sums over the ranks that hold the other entries; None: this process holds all.
    """

    dim: int
    eps: float
    total: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.dtype: Any = dtype
        self.device = device
        self.eps, self._most = float(torch.finfo(dtype).eps), float(torch.finfo(dtype).max)
        self._least = 1e-280 if dtype == torch.float64 else 1e-30  # squares below it underflow

    # Numbers.

    def inner(self, u: Any, v: Any) -> Scalar:
        """Inner product, unread."""
        if len(u) <= _PIECE:
            return torch.dot(u, v)
        pieces = zip(u.split(_PIECE), v.split(_PIECE), strict=True)
        return torch.stack([torch.dot(a, b) for a, b in pieces]).sum(dtype=torch.float64)

    def unread_norm(self, v: Any) -> Scalar:
        """Euclidean norm, unread."""
        if self.device.type == "cpu":  # BLAS rounds far less than torch's norm, and reading costs nothing
            square = self.inner(v, v)
            if self._least < float(square) < 1.0 / self._least:
                return square.sqrt()
            if float(square) == 0.0 and len(v):  # the square may underflow where the norm does not
                largest = v.abs().max()
                return torch.linalg.vector_norm(v / largest) * largest if float(largest) > 0.0 else largest
        if len(v) <= _PIECE:
            return torch.linalg.vector_norm(v)
        pieces = torch.stack([torch.linalg.vector_norm(piece) for piece in v.split(_PIECE)])
        return torch.linalg.vector_norm(pieces.double())

    def read(self, numbers: Sequence[Scalar]) -> list[float]:
        """Read numbers, and short vectors of them, together."""
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self.device).reshape(-1) for part in numbers]
        read: list[float] = (torch.cat(parts) if len(parts) > 1 else parts[0]).tolist()
        return read

    def dot(self, u: Vector, v: Vector) -> float:
        """Inner product."""
        return float(self.inner(u, v))

    def norm(self, v: Vector) -> float:
        """Euclidean norm; not finite where an entry is not, or where it overflows."""
        return float(self.unread_norm(v))

    # Vectors.

    def tensor(self, v: Any) -> torch.Tensor:
        """Return a vector as a tensor on the same memory."""
        return v  # type: ignore[no-any-return]

    def vector(self, tensor: torch.Tensor) -> Vector:
        """Undo `tensor`."""
        return tensor

    def zeros(self) -> Vector:
        """Return a new zero vector."""
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device)

    def normal(self, rng: np.random.Generator) -> Vector:
        """Draw a vector of independent standard normal entries, on the host, so that every device gets the same."""
        return torch.from_numpy(rng.standard_normal(self.dim)).to(self.device, self.dtype)

    def subtract(self, v: Any, factor: Scalar, w: Any) -> None:
        """Subtract ``factor * w`` from `v` in place."""
        if isinstance(factor, torch.Tensor):
            v.addcmul_(w, factor.to(self.dtype), value=-1.0)
        elif abs(factor) <= self._most:
            v.sub_(w, alpha=factor)
        else:  # torch rejects a scalar beyond the range of the type
            v.sub_(w * factor)

    def divide(self, v: Any, divisor: Scalar, out: Any) -> None:
        """Write ``v / divisor`` into `out`."""
        torch.div(v, divisor, out=out)

    # Blocks of vectors, as rows.

    def rows(self, count: int) -> Any:
        """Allocate an uninitialised ``(count, dim)`` block."""
        return torch.empty((count, self.dim), dtype=self.dtype, device=self.device)

    def combine(self, rows: Any, coefficients: Floats) -> Vector:
        """Sum of the rows weighted by the coefficients, a fresh vector."""
        weights = torch.as_tensor(coefficients, dtype=self.dtype, device="cpu").to(self.device)
        return weights @ rows  # type: ignore[no-any-return]

    def orthogonalise(self, v: Any, rows: Any) -> Any:
        """Subtract the projections on orthonormal rows from `v` in place, and return them, unread."""
        parts = torch.mv(rows, v)
        v.addmv_(rows.t(), parts, alpha=-1.0)
        return parts


class NumpySpace(Space):
    """NumPy vectors, on which the same operations are faster for small dimensions."""

    def __init__(self, dim: int, dtype: npt.DTypeLike) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.eps = float(np.finfo(self.dtype).eps)
        self._nrm2 = get_blas_funcs("nrm2", dtype=self.dtype)  # it neither overflows nor underflows

    def inner(self, u: Any, v: Any) -> Scalar:
        return u.dot(v)

    def unread_norm(self, v: Any) -> Scalar:
        return self._nrm2(v)

    def read(self, numbers: Sequence[Scalar]) -> list[float]:
        read: list[float] = []
        for number in numbers:
            read.extend(number.tolist() if isinstance(number, np.ndarray) else (float(number),))
        return read

    def tensor(self, v: Any) -> torch.Tensor:
        return torch.from_numpy(v)

    def vector(self, tensor: torch.Tensor) -> Vector:
        return tensor.numpy()

    def zeros(self) -> Vector:
        return np.zeros(self.dim, self.dtype)

    def normal(self, rng: np.random.Generator) -> Vector:
        return rng.standard_normal(self.dim).astype(self.dtype, copy=False)

    def subtract(self, v: Any, factor: Scalar, w: Vector) -> None:
        v -= factor * w

    def divide(self, v: Any, divisor: Scalar, out: Any) -> None:
        np.divide(v, divisor, out=out)

    def rows(self, count: int) -> Any:
        return np.empty((count, self.dim), self.dtype)

    def combine(self, rows: Any, coefficients: Floats) -> Vector:
        return coefficients.astype(self.dtype, copy=False).dot(rows)  # type: ignore[no-any-return]

    def orthogonalise(self, v: Any, rows: Any) -> Any:
        parts = rows.dot(v)
        v -= parts.dot(rows)
        return parts
