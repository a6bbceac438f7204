"""Lanczos: everything that costs Hessian products happens here.

Started at a vector, the process builds an orthonormal Q with Qᵀ B Q = T tridiagonal, one product an iteration. The
basis is stored, or thrown away and generated again in a second pass when a combination of its vectors is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sanc.vectors import Floats, Space, Vector


class NonFiniteProductError(ArithmeticError):
    """A Hessian product held something that is not finite."""


class Krylov:
    """A growing Krylov space of a symmetric operator.

    Parameters
    ----------
    product : callable
        ``v -> B v``; the vector it returns is taken over and changed in place.
    start : vector
        First direction, not zero.
    space : Space
        The vectors' arithmetic.
    store : bool
        Keep Q. Otherwise `combine` runs the recurrence again, which costs its products once more.
    reorthogonalise : bool
        Orthogonalise every new vector against all earlier ones, twice.
    linear : vector, optional
        A vector g whose projections Qᵀg are wanted; by default g is `start` and they are ‖g‖ e₁.

    Attributes
    ----------
    dim : int
        Lanczos iterations made, j.
    residual : float
        β_j: the part of B q_j that left the space. 0 when the space is invariant.
    invariant : bool
        Whether the process broke down: B maps the space into itself and nothing can be added.
    """

    def __init__(
        self,
        product: Callable[[Vector], Vector],
        start: Vector,
        space: Space,
        *,
        store: bool = True,
        reorthogonalise: bool = False,
        linear: Vector | None = None,
    ) -> None:
        self._product = product
        self._start = start
        self._space = space
        self._reorthogonalise = reorthogonalise
        self._linear = linear
        self.start_norm = space.norm(start)
        if not (self.start_norm > 0.0 and math.isfinite(self.start_norm)):
            raise ValueError(f"a Krylov space needs a start of positive finite length, not {self.start_norm}")
        self._alpha: list[float] = []
        self._beta: list[float] = []
        self._projections: list[float] = []
        self._rows: Any = space.rows(6) if store else None
        self._current: Vector = start / self.start_norm
        self._previous: Vector | None = None
        self._scale = 0.0

    @property
    def dim(self) -> int:
        return len(self._alpha)

    @property
    def residual(self) -> float:
        return self._beta[-1] if self._beta else math.nan

    @property
    def invariant(self) -> bool:
        return bool(self._beta) and self._beta[-1] == 0.0

    @property
    def linear(self) -> Floats:
        """Qᵀg: the linear term of the cubic model in this basis."""
        if self._linear is not None:
            return np.array(self._projections, np.float64)
        c = np.zeros(self.dim)
        c[0] = self.start_norm
        return c

    @property
    def from_gradient(self) -> bool:
        """Whether the space was started at g itself, so that Qᵀg = ‖g‖ e₁."""
        return self._linear is None

    @property
    def coefficients(self) -> tuple[list[float], list[float]]:
        """The entries of T as plain numbers."""
        return self._alpha, self._beta[: self.dim - 1]

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Diagonal and off-diagonal of T."""
        return np.array(self._alpha, np.float64), np.array(self._beta[: self.dim - 1], np.float64)

    def extend(self) -> bool:
        """Make one Lanczos iteration; False where the space is invariant or fills everything."""
        space = self._space
        if self.invariant or self.dim >= space.dim:
            return False
        q = self._current
        j = self.dim
        r = self._product(q)
        alpha = space.dot(q, r)
        if not math.isfinite(alpha):
            raise NonFiniteProductError(f"the Hessian product of Lanczos iteration {j + 1} is not finite")
        if self._rows is not None:
            if j == len(self._rows):
                grown = space.rows(2 * j)
                grown[:j] = self._rows
                self._rows = grown
            self._rows[j] = q
        space.subtract(r, alpha, q)
        if self._previous is not None:
            space.subtract(r, self._beta[-1], self._previous)
        if self._reorthogonalise and self._rows is not None:
            kept = self._rows[: j + 1]
            for _ in range(2):
                r -= space.combine(kept, space.project(kept, r))
        beta = space.norm(r)
        if not math.isfinite(beta):
            raise NonFiniteProductError(f"the Hessian product of Lanczos iteration {j + 1} is not finite")
        if self._linear is not None:
            self._projections.append(space.dot(q, self._linear))
        self._alpha.append(alpha)
        self._scale = max(self._scale, abs(alpha) + beta + (self._beta[-1] if self._beta else 0.0))
        if beta <= 10.0 * space.eps * self._scale or self.dim == space.dim:
            beta = 0.0
        self._beta.append(beta)
        if beta > 0.0:
            self._previous, self._current = q, r / beta
        return True

    def basis(self) -> Any:
        """Return Q as a block of rows of its own; only where it is stored."""
        rows = self._space.rows(self.dim)
        rows[:] = self._rows[: self.dim]
        return rows

    def combine(self, *coefficients: Floats) -> Sequence[Vector]:
        """Q u for each coefficient vector u; a second pass serves all of them at once."""
        if self._rows is not None:
            kept = self._rows[: self.dim]
            return [self._space.combine(kept, c) for c in coefficients]
        return self._second_pass(coefficients)

    def _second_pass(self, coefficients: Sequence[Floats]) -> Sequence[Vector]:
        q: Vector = self._start / self.start_norm
        previous: Vector | None = None
        sums = [q * float(c[0]) for c in coefficients]
        for j in range(self.dim - 1):
            r = self._product(q)
            if not self._space.finite(r):
                raise NonFiniteProductError(
                    f"the Hessian product of Lanczos iteration {j + 1}, repeated, is not finite"
                )
            self._space.subtract(r, self._alpha[j], q)
            if previous is not None:
                self._space.subtract(r, self._beta[j - 1], previous)
            previous, q = q, r / self._beta[j]
            for total, c in zip(sums, coefficients, strict=True):
                self._space.subtract(total, -float(c[j + 1]), q)
        return sums
