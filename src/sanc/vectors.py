"""The few vector operations the engine needs, for NumPy arrays and torch tensors alike.

The engine works on flat vectors and never asks what they are made of; a `Space` answers for it. Scalars come back
as Python floats, so that everything small is done on the host in float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import get_blas_funcs

Vector: TypeAlias = Any
"""A one-dimensional `numpy.ndarray` or `torch.Tensor`; both carry the same arithmetic."""

Floats: TypeAlias = npt.NDArray[np.float64]
"""A small float64 array on the host."""


_LONG = 2**16
"""Length from which on one pass over two vectors is faster than two, whose calls take less time."""


class Space(ABC):
    """Vectors of one length, type and device.

    Attributes
    ----------
    dim : int
        Their length.
    eps : float
        Precision of their type.
    long : bool
        Whether they are so long that `part` is faster where it is given both vectors as one block.
    """

    dim: int
    eps: float
    long: bool = False

    @abstractmethod
    def dot(self, u: Vector, v: Vector) -> float:
        """Inner product."""

    @abstractmethod
    def norm(self, v: Vector) -> float:
        """Euclidean norm, safe from overflow of the squares where the library is."""

    @abstractmethod
    def subtract(self, v: Vector, scale: float, w: Vector) -> None:
        """Subtract ``scale * w`` from `v` in place."""

    @abstractmethod
    def subtract_both(self, v: Vector, scales: tuple[float, float], rows: Any) -> None:
        """Subtract multiples of two rows from `v` in place, in one pass."""

    def part(
        self,
        r: Vector,
        q: Vector,
        previous: Vector | None,
        beta: float,
        length: float = 1.0,
        both: Any = None,
    ) -> tuple[float, float]:
        """Subtract ``beta * previous`` and then ``alpha * q`` from r in place, so that it is orthogonal to q.

        Return α and ‖r‖ / ‖q‖; `length` is ‖q‖. Where `both` holds the two as rows of one block, they are subtracted
        together; α is then what it is before, since the vector before q is orthogonal to it.
        """
        if both is not None:
            alpha = self.dot(q, r) / length**2
            self.subtract_both(r, (beta, alpha), both)
        else:
            if previous is not None:
                self.subtract(r, beta, previous)
            alpha = self.dot(q, r) / length**2
            self.subtract(r, alpha, q)
        return alpha, self.norm(r) / length if math.isfinite(alpha) else alpha

    @abstractmethod
    def divide(self, v: Vector, divisor: float, out: Vector) -> None:
        """Write ``v / divisor`` into `out`, which may be `v` itself."""

    @abstractmethod
    def orthogonalise(self, v: Vector, rows: Any) -> Vector:
        """Take the parts along orthonormal rows out of `v` in place, and return how long they were."""

    @abstractmethod
    def normal(self, rng: np.random.Generator) -> Vector:
        """Draw a vector of independent standard normal entries; the host draws, so every device sees the same."""

    @abstractmethod
    def rows(self, count: int) -> Any:
        """Allocate an uninitialised ``(count, dim)`` block."""

    def each(self, rows: Any) -> Sequence[Vector]:
        """Return the rows of a block one by one."""
        return list(rows)

    @abstractmethod
    def combine(self, rows: Any, coefficients: Floats, onto: Vector | None = None) -> Vector:
        """Sum of the rows weighted by the coefficients, and of `onto` where that is given; a fresh vector."""

    @abstractmethod
    def zeros(self) -> Vector:
        """Return a new zero vector."""

    @abstractmethod
    def blend(self, old: Vector | None, new: Vector, memory: float) -> Vector:
        """Return ``memory * old + (1 − memory) * new``, where there is no old as if it were zero."""

    @abstractmethod
    def extended(self, path: Vector, memory: float, step: Vector) -> Vector:
        """Return ``memory * path + step``."""

    @abstractmethod
    def largest(self, v: Vector) -> float:
        """Largest entry."""

    def step(self, mean: Vector, along: float, rows: Any, within: Floats, scale: Vector | None) -> Vector:
        """Return ``scale * (along * mean + Σ within_i rows_i)``; there may be no rows, and no scale."""
        s = mean * along
        if len(within):
            s += self.combine(rows, within)
        if scale is not None:
            s *= scale
        return s

    # Numbers that stay where they were computed until `read` asks for all of them.

    @abstractmethod
    def inner(self, u: Vector, v: Vector) -> Any:
        """Inner product, not read yet."""

    @abstractmethod
    def length(self, v: Vector) -> Any:
        """Euclidean norm, not read yet."""

    @abstractmethod
    def products(self, rows: Any, v: Vector) -> Any:
        """Inner products of every row with `v`, not read yet."""

    @abstractmethod
    def gather(self, unread: Sequence[Any]) -> Any:
        """Put numbers and short vectors of them beside each other."""

    @abstractmethod
    def read(self, gathered: Any) -> list[float]:
        """Return what was gathered as plain numbers."""

    def finite(self, v: Vector) -> bool:
        """Whether every entry is finite; one reduction, so a norm that overflows counts as not finite."""
        return math.isfinite(self.norm(v))


class NumpySpace(Space):
    """Vectors held by NumPy."""

    def __init__(self, dim: int, dtype: npt.DTypeLike) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.eps = float(np.finfo(self.dtype).eps)
        # They return at once and do not warn of an overflow; on short vectors that is most of the time.
        self._dot, self._axpy, self._gemv = get_blas_funcs(("dot", "axpy", "gemv"), dtype=self.dtype)
        self.long = dim >= _LONG

    def dot(self, u: Vector, v: Vector) -> float:
        return float(self._dot(u, v))

    def norm(self, v: Vector) -> float:
        square = self._dot(v, v)
        if 1e-280 < square < 1e280:
            return math.sqrt(square)
        largest = float(np.max(np.abs(v), initial=0.0))
        if largest == 0.0 or not math.isfinite(largest):
            return largest
        scaled = v / largest
        return largest * math.sqrt(float(scaled @ scaled))

    def subtract(self, v: Vector, scale: float, w: Vector) -> None:
        if v.dtype == self.dtype and v.flags.c_contiguous:
            self._axpy(w, v, a=-scale)
        else:
            v -= scale * w  # a Python float keeps the type of the array

    def subtract_both(self, v: Vector, scales: tuple[float, float], rows: Any) -> None:
        self._gemv(-1.0, rows.T, scales, 1.0, v, overwrite_y=1)

    def part(
        self,
        r: Vector,
        q: Vector,
        previous: Vector | None,
        beta: float,
        length: float = 1.0,
        both: Any = None,
    ) -> tuple[float, float]:
        good = r.dtype == self.dtype and r.flags.c_contiguous
        if both is not None or not good:
            return super().part(r, q, previous, beta, length, both if good else None)
        if previous is not None:
            self._axpy(previous, r, a=-beta)
        alpha = self._dot(q, r) / length**2
        self._axpy(q, r, a=-alpha)
        return alpha, self.norm(r) / length

    def divide(self, v: Vector, divisor: float, out: Vector) -> None:
        np.divide(v, divisor, out)

    def orthogonalise(self, v: Vector, rows: Any) -> Vector:
        parts = rows @ v
        v -= parts @ rows
        return parts

    def normal(self, rng: np.random.Generator) -> Vector:
        return rng.standard_normal(self.dim).astype(self.dtype, copy=False)

    def rows(self, count: int) -> Any:
        return np.empty((count, self.dim), self.dtype)

    def combine(self, rows: Any, coefficients: Floats, onto: Vector | None = None) -> Vector:
        total = coefficients.astype(self.dtype, copy=False) @ rows
        if onto is not None:
            total += onto
        return total

    def zeros(self) -> Vector:
        return np.zeros(self.dim, self.dtype)

    def blend(self, old: Vector | None, new: Vector, memory: float) -> Vector:
        return (1 - memory) * new if old is None else memory * old + (1 - memory) * new

    def extended(self, path: Vector, memory: float, step: Vector) -> Vector:
        return memory * path + step

    def largest(self, v: Vector) -> float:
        return float(v.max())

    def inner(self, u: Vector, v: Vector) -> Any:
        return u @ v

    def length(self, v: Vector) -> Any:
        return self.norm(v)

    def products(self, rows: Any, v: Vector) -> Any:
        return rows @ v

    def gather(self, unread: Sequence[Any]) -> Any:
        return np.hstack([np.asarray(part, np.float64) for part in unread])

    def read(self, gathered: Any) -> list[float]:
        numbers: list[float] = gathered.tolist()
        return numbers


_PIECE = 2**20
"""Longer inner products are summed piece by piece: over 10⁹ entries one float32 sum would lose half its digits."""


_LINE = 16
"""Numbers of four bytes in a line of the cache."""


class TorchSpace(Space):
    """Vectors held by torch, on any device."""

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.dtype = dtype
        self.device = device
        self.eps = float(torch.finfo(dtype).eps)
        self.long = dim >= _LONG and device.type == "cpu"
        self._least = 1e-280 if dtype == torch.float64 else 1e-30

    def dot(self, u: Vector, v: Vector) -> float:
        if self.dim <= _PIECE:
            return float(torch.dot(u, v))
        pieces = zip(u.split(_PIECE), v.split(_PIECE), strict=True)
        return float(torch.stack([torch.dot(a, b) for a, b in pieces]).sum(dtype=torch.float64))

    def norm(self, v: Vector) -> float:
        square = self.dot(v, v)
        if self._least < square < 1.0 / self._least:
            return math.sqrt(square)
        return float(torch.linalg.vector_norm(v))

    def subtract(self, v: Vector, scale: float, w: Vector) -> None:
        v.sub_(w, alpha=scale)

    def subtract_both(self, v: Vector, scales: tuple[float, float], rows: Any) -> None:
        v.addmv_(rows.t(), torch.tensor(scales, dtype=self.dtype, device=self.device), alpha=-1.0)

    def divide(self, v: Vector, divisor: float, out: Vector) -> None:
        if self._least < divisor < 1.0 / self._least:  # then it has a reciprocal, and to multiply is faster
            torch.mul(v, 1.0 / divisor, out=out)
        else:
            torch.div(v, divisor, out=out)

    def orthogonalise(self, v: Vector, rows: Any) -> Vector:
        parts = torch.mv(rows, v)
        v.addmv_(rows.t(), parts, alpha=-1.0)
        return parts

    def normal(self, rng: np.random.Generator) -> Vector:
        return torch.from_numpy(rng.standard_normal(self.dim)).to(self.device, self.dtype)

    def rows(self, count: int) -> Any:
        # Every row begins where a line of the cache does, which is faster to work on.
        return torch.empty((count, -(-self.dim // _LINE) * _LINE), dtype=self.dtype, device=self.device)[:, : self.dim]

    def each(self, rows: Any) -> Sequence[Vector]:
        views: Sequence[Vector] = rows.unbind()
        return views

    def combine(self, rows: Any, coefficients: Floats, onto: Vector | None = None) -> Vector:
        weights = torch.from_numpy(coefficients).to(self.device, self.dtype)
        return weights @ rows if onto is None else torch.addmv(onto, rows.t(), weights)

    def zeros(self) -> Vector:
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device)

    def blend(self, old: Vector | None, new: Vector, memory: float) -> Vector:
        return (1 - memory) * new if old is None else torch.lerp(old, new, 1 - memory)

    def extended(self, path: Vector, memory: float, step: Vector) -> Vector:
        return torch.add(step, path, alpha=memory)

    def largest(self, v: Vector) -> float:
        return float(v.max())

    def inner(self, u: Vector, v: Vector) -> Any:
        return torch.dot(u, v)

    def length(self, v: Vector) -> Any:
        return torch.linalg.vector_norm(v)

    def products(self, rows: Any, v: Vector) -> Any:
        return torch.mv(rows, v)

    def gather(self, unread: Sequence[Any]) -> Any:
        return torch.cat(
            [torch.as_tensor(part, dtype=torch.float64, device=self.device).reshape(-1) for part in unread]
        )

    def read(self, gathered: Any) -> list[float]:
        numbers: list[float] = gathered.tolist()
        return numbers
