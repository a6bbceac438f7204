"""Vector spaces: the operations of the method on NumPy arrays and torch tensors.

Vectors stay on their device; numbers are float64 on the host. Each number that the host reads from a device is a
synchronisation. So inner products may stay there, *unread*, until several are read together.
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
    """The operations used here that one-dimensional NumPy arrays and torch tensors share."""

    def __add__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __len__(self) -> int: ...


ROUNDING_ERRORS = 10.0
"""Rounding errors, in units of eps, that a computed value, gradient or Ritz value may have.

One operation has an error of at most eps/2. Independent errors of a sum of n equal terms add up to about √n eps/2, so
the errors of 400 terms to 10 eps. Libraries add longer sums in blocks or pairs, so that their errors grow more slowly.
"""

NEAR_ZERO, NEAR_INFINITY = 1e-300, 1e300
"""Numbers near the ends of float64, 2e-308 and 2e308: in place of a divisor or norm of zero, and of an infinite one."""
MIN_SAFE_SQUARE, MIN_SAFE_SQUARE_FLOAT32 = 1e-280, 1e-30
"""Sums of squares lose no digits by underflow above these: eps times them is still a normal number of their type."""
_BLOCK_SIZE = 2**20
"""Entries of a block. Longer inner products are sums over blocks in float64: one float32 sum over 10⁹ entries would
lose half its digits."""


class Space:
    """Torch vectors of one dimension, type and device.

    Attributes
    ----------
    dim : int
        Dimension of the vectors.
    dtype, device
        Their type and device.
    eps, max : float
        Machine epsilon and largest number of their type.
    sum_over_ranks : callable or None
        Sums over the ranks that hold the other entries; None if this process holds all entries.
    """

    dim: int
    eps: float
    max: float
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.dtype: Any = dtype
        self.device = device
        self.eps, self.max = float(torch.finfo(dtype).eps), float(torch.finfo(dtype).max)
        self._min_square = MIN_SAFE_SQUARE if dtype == torch.float64 else MIN_SAFE_SQUARE_FLOAT32

    # Numbers.

    def inner(self, u: Any, v: Any) -> Scalar:
        """Return the inner product, unread."""
        if len(u) <= _BLOCK_SIZE:
            return torch.dot(u, v)
        blocks = zip(u.split(_BLOCK_SIZE), v.split(_BLOCK_SIZE), strict=True)
        return torch.stack([torch.dot(a, b) for a, b in blocks]).sum(dtype=torch.float64)

    def unread_norm(self, v: Any) -> Scalar:
        """Return the Euclidean norm, unread."""
        if self.device.type == "cpu":  # BLAS rounds far less than torch's norm, and reading needs no synchronisation
            square = self.inner(v, v)
            if self._min_square < float(square) < 1.0 / self._min_square:
                return square.sqrt()
            if float(square) == 0.0 and len(v):  # the square may underflow where the norm does not
                largest = v.abs().max()
                return torch.linalg.vector_norm(v / largest) * largest if float(largest) > 0.0 else largest
        if len(v) <= _BLOCK_SIZE:
            return torch.linalg.vector_norm(v)
        block_norms = torch.stack([torch.linalg.vector_norm(block) for block in v.split(_BLOCK_SIZE)])
        return torch.linalg.vector_norm(block_norms.double())

    def read(self, numbers: Sequence[Scalar]) -> list[float]:
        """Transfer numbers, and short vectors of numbers, to the host together."""
        tensors = [torch.as_tensor(entry, dtype=torch.float64, device=self.device).reshape(-1) for entry in numbers]
        floats: list[float] = (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).tolist()
        return floats

    def dot(self, u: Vector, v: Vector) -> float:
        """Return the inner product."""
        return float(self.inner(u, v))

    def norm(self, v: Vector) -> float:
        """Return the Euclidean norm; it is not finite if an entry is not finite, or if it overflows."""
        return float(self.unread_norm(v))

    def largest_entry(self, v: Any) -> float:
        """Return the largest absolute entry, which neither overflows nor underflows as a norm may."""
        return float(v.abs().max())

    # Vectors.

    def tensor(self, v: Any) -> torch.Tensor:
        """Return a vector as a tensor on the same memory."""
        return v  # type: ignore[no-any-return]

    def vector(self, tensor: torch.Tensor) -> Vector:
        """Return a tensor as a vector on the same memory: the inverse of `tensor`."""
        return tensor

    def zeros(self) -> Vector:
        """Return a new zero vector."""
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device)

    def normal(self, rng: np.random.Generator) -> Vector:
        """Draw a vector of independent standard normal entries on the host, equal for all devices."""
        return torch.from_numpy(rng.standard_normal(self.dim)).to(self.device, self.dtype)

    def normal_on_device(self, seed: int) -> Vector:
        """Draw a vector of independent standard normal entries on the device: fast in high dimensions."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(self.dim, generator=generator, dtype=self.dtype, device=self.device)

    def subtract(self, v: Any, factor: Scalar, w: Any) -> None:
        """Subtract ``factor * w`` from `v` in place."""
        if isinstance(factor, torch.Tensor):
            v.addcmul_(w, factor.to(self.dtype), value=-1.0)
        elif abs(factor) <= self.max:
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
        """Return the sum of the rows weighted by the coefficients, as a new vector."""
        weights = torch.as_tensor(coefficients, dtype=self.dtype, device="cpu").to(self.device)
        return weights @ rows  # type: ignore[no-any-return]

    def orthogonalise(self, v: Any, rows: Any) -> Any:
        """Subtract the projections on orthonormal rows from `v` in place, and return them, unread."""
        projections = torch.mv(rows, v)
        v.addmv_(rows.t(), projections, alpha=-1.0)
        return projections


class NumpySpace(Space):
    """NumPy vectors, on which the same operations are faster for small dimensions.

    Attributes
    ----------
    dim : int
        Dimension of the vectors.
    dtype : numpy.dtype
        Their type.
    eps, max : float
        Machine epsilon and largest number of their type.
    """

    def __init__(self, dim: int, dtype: npt.DTypeLike) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        limits = np.finfo(self.dtype)
        self.eps, self.max = float(limits.eps), float(limits.max)
        self._nrm2 = get_blas_funcs("nrm2", dtype=self.dtype)  # it neither overflows nor underflows

    def inner(self, u: Any, v: Any) -> Scalar:
        return u.dot(v)

    def unread_norm(self, v: Any) -> Scalar:
        return self._nrm2(v)

    def read(self, numbers: Sequence[Scalar]) -> list[float]:
        floats: list[float] = []
        for number in numbers:
            if isinstance(number, np.ndarray):
                floats.extend(number.tolist())
            else:
                floats.append(float(number))
        return floats

    def largest_entry(self, v: Any) -> float:
        return float(np.abs(v).max())

    def tensor(self, v: Any) -> torch.Tensor:
        return torch.from_numpy(v)

    def vector(self, tensor: torch.Tensor) -> Vector:
        return tensor.numpy()

    def zeros(self) -> Vector:
        return np.zeros(self.dim, self.dtype)

    def normal(self, rng: np.random.Generator) -> Vector:
        return rng.standard_normal(self.dim).astype(self.dtype, copy=False)

    def normal_on_device(self, seed: int) -> Vector:
        return self.normal(np.random.default_rng(seed))

    def subtract(self, v: Any, factor: Scalar, w: Vector) -> None:
        v -= factor * w

    def divide(self, v: Any, divisor: Scalar, out: Any) -> None:
        np.divide(v, divisor, out)

    def rows(self, count: int) -> Any:
        return np.empty((count, self.dim), self.dtype)

    def combine(self, rows: Any, coefficients: Floats) -> Vector:
        return coefficients.astype(self.dtype, copy=False).dot(rows)  # type: ignore[no-any-return]

    def orthogonalise(self, v: Any, rows: Any) -> Any:
        projections = rows.dot(v)
        v -= projections.dot(rows)
        return projections


def host_array(array: Any) -> Floats:
    """Return a vector, or a block of vectors, as a float64 array on the host."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.detach().cpu().numpy(), np.float64)


def difference_step(space: Space, x: Vector, min_scale: float = 1.0, relative_error: float | None = None) -> float:
    """Return the step of a central difference at `x`: ∛eps times the scale of x.

    The cube root balances roundoff against truncation. The scale is the root mean square of the entries of x, at least
    `min_scale`. `relative_error` is that of the differenced function, if it exceeds eps.
    """
    return float((relative_error or space.eps) ** (1 / 3) * max(min_scale, space.norm(x) / space.dim**0.5))
