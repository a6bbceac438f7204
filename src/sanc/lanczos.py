"""Lanczos without the host: all iterations at once on the device, then read together.

Nothing here decides anything before the end, so the whole process can be part of a recorded graph. Where a Krylov space
turns out invariant, what comes after is zero, and the host, which reads the coefficients, cuts it off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sanc.krylov import Tridiagonal
from sanc.vectors import Space, Vector


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
    count, tiny = len(rows), torch.finfo(start.dtype).tiny  # a vector without length stays zero
    length = torch.linalg.vector_norm(start)
    torch.div(start, length.clamp_min(tiny), out=rows[0])
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
            torch.div(r, beta.clamp_min(tiny), out=rows[j + 1])
        diagonal.append(parts[-1])
        residuals.append(beta)
    return torch.stack([length, *diagonal, *residuals]).double()


class Recorded(Tridiagonal):
    """A Krylov space that was built at once; it grows as `Krylov` does, but knows the answers already.

    Parameters
    ----------
    numbers : sequence of float
        What `lanczos` returned.
    rows : block of rows
        The basis.
    space : Space
        The vectors' arithmetic.

    Attributes
    ----------
    everything : tuple of two lists
        All α and all β, also those that are not made known yet.
    """

    from_gradient = True

    def __init__(self, numbers: Sequence[float], rows: Vector, space: Space) -> None:
        super().__init__(numbers[0], space)
        count = (len(numbers) - 1) // 2
        self.everything = list(numbers[1 : count + 1]), list(numbers[count + 1 :])
        self._rows = rows

    def extend(self) -> bool:
        """Make the next iteration known; False where there is none."""
        alpha, beta = self.everything
        if self.invariant or self.dim >= len(alpha):
            return False
        self._append(alpha[self.dim], beta[self.dim])
        return True

    def basis(self) -> Vector:
        """Return Q as a block of rows of its own."""
        return self._rows[: self.dim].clone()
