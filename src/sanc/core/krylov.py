"""Lanczos: everything that costs Hessian products happens here.

Started at a vector, the process builds an orthonormal Q with Qᵀ B Q = T tridiagonal, one product an iteration. The
recurrence itself (`Lanczos`) decides nothing and reads no number, so that it can run eagerly or as part of a recorded
graph. The Krylov space on the host (`Krylov`) reads T column by column and detects when it is invariant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sanc.core.space import Floats, Scalar, Space, Vector


class NonFiniteProductError(ArithmeticError):
    """A Hessian product held something that is not finite."""


class Columns(Protocol):
    """Source of the columns of T: computed step by step, or all at once by a recording."""

    limit: int

    @property
    def space(self) -> Space: ...
    @property
    def start_norm(self) -> float: ...
    def column(self, j: int) -> Sequence[float]: ...
    def combine(self, krylov: Krylov, coefficients: Sequence[Floats]) -> list[Vector]: ...


class Lanczos:
    """The three-term recurrence β_j q_{j+1} = B q_j − α_j q_j − β_{j−1} q_{j−1}, q_1 = start/‖start‖.

    Parameters
    ----------
    product : callable
        ``v -> B v``; the recurrence changes the returned vector in place.
    limit : int, optional
        Most iterations; by default the dimension of the space.
    store : bool
        Keep Q. Otherwise `combine` runs the recurrence again, which costs its products once more.
    reorthogonalise : bool
        Orthogonalise every new vector against all earlier ones, twice.
    linear : vector, optional
        A vector g whose projections qᵀg are returned beside α and β.
    """

    def __init__(
        self,
        product: Callable[[Vector], Vector],
        start: Vector,
        space: Space,
        *,
        limit: int | None = None,
        store: bool = True,
        reorthogonalise: bool = False,
        linear: Vector | None = None,
    ) -> None:
        self.space = space
        self.limit = min(limit or space.dim, space.dim)
        self.columns: list[list[Scalar]] = []  # (α_j, β_j), and qᵀg with `linear`; unread
        self.unread_start_norm = space.unread_norm(start)
        self.parts: Any = None  # projections of the last product on all vectors, unread, with reorthogonalisation
        self._product = product
        self._start = start
        self._store = store
        self._reorthogonalise = reorthogonalise and store
        self._linear = linear
        self._room = self.limit if limit is not None else min(self.limit, 8)
        self._rows: Any = None
        self._previous: Any = None  # q_{j−1} …
        self._current: Any = None  # … and q_j, where Q is not kept
        self._residual: Any = None  # β_j q_{j+1}

    @property
    def start_norm(self) -> float:
        """‖start‖."""
        return float(self.unread_start_norm)

    def column(self, j: int) -> Sequence[float]:
        """Return α_j, β_j and the projection; compute them if they are the next ones."""
        if j == len(self.columns):
            self.extend()
        return self.space.read(self.columns[j])

    def extend(self) -> None:
        """Make one iteration."""
        space, j = self.space, len(self.columns)
        q, previous = self._advance(j)
        r = self._product(q)
        if self._reorthogonalise:
            rows = self._rows[: j + 1]
            self.parts = space.orthogonalise(r, rows)
            alpha = self.parts[-1]
            space.orthogonalise(r, rows)  # a second time, for what roundoff left
        else:
            if previous is not None:
                space.subtract(r, self.columns[-1][1], previous)
            alpha = space.inner(q, r)
            space.subtract(r, alpha, q)
        self._residual = r
        projection = [] if self._linear is None else [space.inner(q, self._linear)]
        self.columns.append([alpha, space.unread_norm(r), *projection])

    def _advance(self, j: int) -> tuple[Vector, Vector | None]:
        """Return q_j and q_{j−1}: rows of Q, or separate vectors if Q is not kept."""
        v, norm = (self._residual, self.columns[-1][1]) if j else (self._start, self.unread_start_norm)
        self._residual = None
        if not self._store:
            self._previous, self._current = self._current, v / norm
            return self._current, self._previous
        if self._rows is None:
            self._rows = self.space.rows(self._room)
        elif j == len(self._rows):
            rows = self.space.rows(min(2 * j, self.limit))
            rows[:j] = self._rows
            self._rows = rows
        self.space.divide(v, norm, out=self._rows[j])
        return self._rows[j], self._rows[j - 1] if j else None

    def basis(self, dim: int) -> Any:
        """Return Q as a block of rows."""
        return self._rows[:dim]

    def combine(self, krylov: Krylov, coefficients: Sequence[Floats]) -> list[Vector]:
        """Q u for each coefficient vector u, as fresh vectors; a second pass serves all of them at once."""
        if self._store:
            return [self.space.combine(self._rows[: krylov.dim], c) for c in coefficients]
        self.limit = krylov.dim  # the last vectors are not needed any more
        self._previous = self._current = self._residual = None
        q: Vector = self._start / krylov.start_norm
        previous: Vector | None = None
        sums = [q * float(c[0]) for c in coefficients]
        for j, (alpha, beta) in enumerate(zip(krylov.alpha[:-1], krylov.beta[:-1], strict=True)):
            r = self._product(q)
            if previous is not None:
                self.space.subtract(r, krylov.beta[j - 1], previous)
            self.space.subtract(r, alpha, q)
            if not math.isfinite(self.space.norm(r)):
                raise NonFiniteProductError(f"the repeated Hessian product of iteration {j + 1} is not finite")
            self.space.divide(r, beta, out=r)
            previous, q = q, r
            for total, c in zip(sums, coefficients, strict=True):
                self.space.subtract(total, -float(c[j + 1]), q)
        return sums


class Krylov:
    """A growing Krylov space on the host: T, from the columns of a source, and combinations of Q.

    Attributes
    ----------
    start_norm : float
        Norm of the start vector.
    alpha, beta : list of float
        Diagonal of T, and the residuals: β_j is the norm of the part of B q_j outside the space, 0 if it is invariant.
    """

    def __init__(self, source: Columns) -> None:
        self.start_norm = source.start_norm
        if not (self.start_norm > 0.0 and math.isfinite(self.start_norm)):
            raise ValueError(f"a Krylov space needs a start vector of positive finite norm, not {self.start_norm}")
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self._source = source
        self._projections: list[float] = []
        self._scale = 0.0
        self._pivot = 1.0  # the last of T = LDLᵀ, or the first that is not positive

    @property
    def dim(self) -> int:
        """Lanczos iterations made, j."""
        return len(self.alpha)

    @property
    def residual(self) -> float:
        """β_j."""
        return self.beta[-1] if self.beta else math.nan

    @property
    def invariant(self) -> bool:
        """Whether the process broke down: B maps the space into itself."""
        return self.residual == 0.0

    @property
    def definite(self) -> bool:
        """Whether T is positive definite."""
        return self._pivot > 0.0

    @property
    def from_gradient(self) -> bool:
        """Whether the space was started at g itself, so that Qᵀg = ‖g‖ e₁."""
        return not self._projections

    @property
    def linear(self) -> Floats:
        """Qᵀg: the linear term of the cubic model in this basis."""
        if self._projections:
            return np.array(self._projections, np.float64)
        c = np.zeros(self.dim)
        c[0] = self.start_norm
        return c

    def extend(self) -> bool:
        """Make one Lanczos iteration; return False if the space is invariant, full, or has its largest dimension."""
        j, space = self.dim, self._source.space
        if self.invariant or j >= self._source.limit:
            return False
        alpha, beta, *projection = self._source.column(j)
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise NonFiniteProductError(f"the Hessian product of Lanczos iteration {j + 1} is not finite")
        last = self.residual if j else 0.0
        self._scale = max(self._scale, abs(alpha) + beta + last)
        if self.definite:
            self._pivot = alpha - last * (last / self._pivot)
        if beta <= 10.0 * space.eps * self._scale or j + 1 == space.dim:
            beta = 0.0  # roundoff, or the space is full
        self.alpha.append(alpha)
        self.beta.append(beta)
        self._projections += projection
        return True

    def residual_of(self, u: Floats) -> float:
        """β_j |u_j|: ‖∇m‖ where u is the cubic model's minimiser, ‖Bv − λv‖ where it is the vector of a Ritz pair."""
        return self.residual * abs(float(u[-1]))

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Diagonal and off-diagonal of T."""
        return np.array(self.alpha, np.float64), np.array(self.beta[: self.dim - 1], np.float64)

    def model_gradient(self, shift: float) -> float:
        """β_j |u_j| for (T + shift·I) u = −start e₁, from the pivots alone; NaN where they are not all positive.

        That is ‖∇m‖ where `shift` is the μ of the cubic model's minimiser.
        """
        result, pivot, last = self.start_norm, 1.0, 0.0
        for alpha, beta in zip(self.alpha, self.beta, strict=True):
            pivot = alpha + shift - last * (last / pivot)
            if not pivot > 0.0:
                return math.nan
            result *= beta / pivot
            last = beta
        return result

    def least_model_gradient(self, sigma: float) -> float:
        """Bound ‖∇m‖ = β_j |u_j| of the cubic model's minimiser from below, without eigenpairs.

        By Cramer's rule |u_j| = ‖g‖ β_1…β_{j−1} / det(T + μI). Gershgorin's circles bound T, hence μ and the
        determinant. Detecting that the model is not yet minimised well enough costs no extra product.
        """
        reach, bound = self._scale, self.start_norm
        shift = reach + 0.5 * (reach + math.sqrt(reach * reach + 4.0 * sigma * bound))
        if not (self.from_gradient and 0.0 < shift < math.inf):
            return 0.0
        for beta in self.beta:
            bound *= beta / shift
        return bound

    def combine(self, *coefficients: Floats) -> list[Vector]:
        """Q u for each coefficient vector u, as fresh vectors."""
        return self._source.combine(self, coefficients)
