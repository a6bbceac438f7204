"""Vector spaces: the few operations that the method needs, for NumPy arrays and torch tensors alike.

Everything large is a vector, everything small a float64 number on the host. On a device each number that the host reads
makes it wait, so inner products may be left there, *unread*, and be read together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import get_blas_funcs

Floats: TypeAlias = npt.NDArray[np.float64]
"""A small float64 array on the host."""

Scalar: TypeAlias = Any
"""A number that may not have been read yet: a float, or a tensor of no dimensions."""


class Vector(Protocol):
    """What a one-dimensional `numpy.ndarray` and a one-dimensional `torch.Tensor` share, as far as it is used."""

    def __add__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __neg__(self) -> Self: ...
    def __pow__(self, other: Any, /) -> Self: ...
    def __len__(self) -> int: ...


class Space(ABC):
    """Vectors of one length, type and device.

    Attributes
    ----------
    dim : int
        Their length.
    eps : float
        Precision of their type.
    total : callable or None
        Adds up sums over entries where this process holds a part of them only; None: it holds all.
    """

    dim: int
    eps: float
    total: Callable[[torch.Tensor], torch.Tensor] | None = None

    # Numbers.

    @abstractmethod
    def inner(self, u: Vector, v: Vector) -> Scalar:
        """Inner product, unread."""

    @abstractmethod
    def length(self, v: Vector) -> Scalar:
        """Euclidean norm, unread."""

    @abstractmethod
    def read(self, numbers: Sequence[Scalar]) -> list[float]:
        """Read numbers, and short vectors of them, together."""

    def dot(self, u: Vector, v: Vector) -> float:
        """Inner product."""
        return float(self.inner(u, v))

    def norm(self, v: Vector) -> float:
        """Euclidean norm."""
        return float(self.length(v))

    def finite(self, v: Vector) -> bool:
        """Whether every entry is finite; one reduction, so a norm that overflows counts as not finite."""
        return math.isfinite(self.norm(v))

    # Vectors.

    @abstractmethod
    def tensor(self, v: Vector) -> torch.Tensor:
        """Return a vector as a tensor on the same memory."""

    @abstractmethod
    def vector(self, tensor: torch.Tensor) -> Vector:
        """Undo `tensor`."""

    @abstractmethod
    def zeros(self) -> Vector:
        """Return a new zero vector."""

    @abstractmethod
    def normal(self, rng: np.random.Generator) -> Vector:
        """Draw a vector of independent standard normal entries; the host draws, so every device sees the same."""

    @abstractmethod
    def subtract(self, v: Vector, factor: Scalar, w: Vector) -> None:
        """Subtract ``factor * w`` from `v` in place."""

    @abstractmethod
    def divide(self, v: Vector, divisor: Scalar, out: Vector) -> None:
        """Write ``v / divisor`` into `out`."""

    # Blocks of vectors, as rows.

    @abstractmethod
    def rows(self, count: int) -> Any:
        """Allocate an uninitialised ``(count, dim)`` block."""

    @abstractmethod
    def combine(self, rows: Any, coefficients: Floats) -> Vector:
        """Sum of the rows weighted by the coefficients, a fresh vector."""

    @abstractmethod
    def orthogonalise(self, v: Vector, rows: Any) -> Any:
        """Take the parts along orthonormal rows out of `v` in place, and return how long they were, unread."""


class NumpySpace(Space):
    """Vectors held by NumPy."""

    def __init__(self, dim: int, dtype: npt.DTypeLike) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.eps = float(np.finfo(self.dtype).eps)
        self._length = get_blas_funcs("nrm2", dtype=self.dtype)  # which neither overflows nor underflows

    def inner(self, u: Any, v: Any) -> Scalar:
        return u.dot(v)

    def length(self, v: Any) -> Scalar:
        return self._length(v)

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


_PIECE = 2**20
"""Longer inner products are summed piece by piece, in float64: over 10⁹ entries one float32 sum, as BLAS makes it on a
CPU, would lose half its digits."""


class TorchSpace(Space):
    """Vectors held by torch, on any device."""

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.dtype = dtype
        self.device = device
        self.eps, self._most = float(torch.finfo(dtype).eps), float(torch.finfo(dtype).max)
        self._least = 1e-280 if dtype == torch.float64 else 1e-30  # square of which digits are left

    def inner(self, u: Any, v: Any) -> Scalar:
        if len(u) <= _PIECE:
            return torch.dot(u, v)
        pieces = zip(u.split(_PIECE), v.split(_PIECE), strict=True)
        return torch.stack([torch.dot(a, b) for a, b in pieces]).sum(dtype=torch.float64)

    def length(self, v: Any) -> Scalar:
        if self.device.type == "cpu":  # where BLAS rounds far less than torch's norm, and nobody waits for a number
            square = self.inner(v, v)
            if self._least < float(square) < 1.0 / self._least:
                return square.sqrt()
        if len(v) <= _PIECE:
            return torch.linalg.vector_norm(v)
        pieces = torch.stack([torch.linalg.vector_norm(piece) for piece in v.split(_PIECE)])
        return torch.linalg.vector_norm(pieces.double())

    def read(self, numbers: Sequence[Scalar]) -> list[float]:
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self.device).reshape(-1) for part in numbers]
        read: list[float] = (torch.cat(parts) if len(parts) > 1 else parts[0]).tolist()
        return read

    def tensor(self, v: Any) -> torch.Tensor:
        return v  # type: ignore[no-any-return]

    def vector(self, tensor: torch.Tensor) -> Vector:
        return tensor

    def zeros(self) -> Vector:
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device)

    def normal(self, rng: np.random.Generator) -> Vector:
        return torch.from_numpy(rng.standard_normal(self.dim)).to(self.device, self.dtype)

    def subtract(self, v: Any, factor: Scalar, w: Any) -> None:
        if isinstance(factor, torch.Tensor):
            v.addcmul_(w, factor.to(self.dtype), value=-1.0)
        elif abs(factor) <= self._most:
            v.sub_(w, alpha=factor)
        else:  # which torch refuses to take as a number of its type
            v.sub_(w * factor)

    def divide(self, v: Any, divisor: Scalar, out: Any) -> None:
        torch.div(v, divisor, out=out)

    def rows(self, count: int) -> Any:
        return torch.empty((count, self.dim), dtype=self.dtype, device=self.device)

    def combine(self, rows: Any, coefficients: Floats) -> Vector:
        weights = torch.as_tensor(coefficients, dtype=self.dtype).to(self.device)
        return weights @ rows  # type: ignore[no-any-return]

    def orthogonalise(self, v: Any, rows: Any) -> Any:
        parts = torch.mv(rows, v)
        v.addmv_(rows.t(), parts, alpha=-1.0)
        return parts
