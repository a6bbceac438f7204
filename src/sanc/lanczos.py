"""Lanczos without the host: all iterations at once on the device, then read together.

Nothing here decides anything before the end, so the whole process can be part of a recorded graph. Where a Krylov space
turns out invariant, what comes after is zero, and the host, which reads the coefficients, cuts it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sanc.krylov import NonFiniteProductError
from sanc.vectors import Floats, Space, Vector

_TINY = 1e-30
"""What a vector without length is divided by: it stays zero."""


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, rows: Tensor, *, reorthogonalise: bool) -> Tensor:
    """Fill `rows` with an orthonormal basis of the Krylov space of `start`.

    Parameters
    ----------
    product : callable
        ``v -> B v``; the tensor it returns is taken over and changed in place.
    start : Tensor
        First direction.
    rows : Tensor, shape (J, d)
        Where the basis is written.
    reorthogonalise : bool
        Orthogonalise every new vector against all earlier ones, twice.

    Returns
    -------
    Tensor
        ‖start‖, the diagonal α_1 … α_J and the residuals β_1 … β_J, in float64 and not read yet.
    """
    count = len(rows)
    length = torch.linalg.vector_norm(start)
    torch.div(start, length.clamp_min(_TINY), out=rows[0])
    diagonal: list[Tensor] = []
    residuals: list[Tensor] = []
    for j in range(count):
        r = product(rows[j])
        # Against the last two vectors, or all: what is not there by theory is taken out all the same.
        earlier = rows[: j + 1] if reorthogonalise else rows[max(j - 1, 0) : j + 1]
        parts = torch.mv(earlier, r)
        r.addmv_(earlier.T, parts, alpha=-1)
        if reorthogonalise:
            r.addmv_(earlier.T, torch.mv(earlier, r), alpha=-1)
        beta = torch.linalg.vector_norm(r)
        if j + 1 < count:
            torch.div(r, beta.clamp_min(_TINY), out=rows[j + 1])
        diagonal.append(parts[-1])
        residuals.append(beta)
    return torch.stack([length, *diagonal, *residuals]).double()


class Recorded:
    """A Krylov space that was built at once; it grows as `Krylov` does, but knows the answers already.

    Parameters
    ----------
    numbers : sequence of float
        What `lanczos` returned.
    rows : block of rows
        The basis.
    space : Space
        The vectors' arithmetic.
    """

    from_gradient = True

    def __init__(self, numbers: Sequence[float], rows: Vector, space: Space) -> None:
        count = (len(numbers) - 1) // 2
        self.start_norm = numbers[0]
        self._all_alpha, self._all_beta = list(numbers[1 : count + 1]), list(numbers[count + 1 :])
        self._rows = rows
        self._space = space
        self._scale = 0.0
        self.dim = 0
        self._beta: list[float] = []

    @property
    def residual(self) -> float:
        """β_j: the part of B q_j that left the space; 0 when the space is invariant."""
        return self._beta[-1] if self._beta else math.nan

    @property
    def invariant(self) -> bool:
        """Whether nothing can be added."""
        return bool(self._beta) and self._beta[-1] == 0.0

    @property
    def linear(self) -> Floats:
        """Qᵀ·start."""
        c = np.zeros(self.dim)
        c[0] = self.start_norm
        return c

    @property
    def everything(self) -> tuple[list[float], list[float]]:
        """All α and all β, also those that are not made known yet."""
        return self._all_alpha, self._all_beta

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Diagonal and off-diagonal of T."""
        alpha, beta = self._all_alpha[: self.dim], self._beta[: self.dim - 1]
        return np.array(alpha, np.float64), np.array(beta, np.float64)

    def extend(self) -> bool:
        """Make the next iteration known; False where there is none."""
        j = self.dim
        if self.invariant or j >= len(self._all_alpha):
            return False
        alpha, beta = self._all_alpha[j], self._all_beta[j]
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise NonFiniteProductError(f"the Hessian product of Lanczos iteration {j + 1} is not finite")
        self._scale = max(self._scale, abs(alpha) + beta + (self._beta[-1] if self._beta else 0.0))
        self.dim = j + 1
        last = beta <= 10.0 * self._space.eps * self._scale or self.dim == self._space.dim
        self._beta.append(0.0 if last else beta)
        return True

    def basis(self) -> Vector:
        """Return Q as a block of rows of its own."""
        return self._rows[: self.dim].clone()
