"""The Lanczos process. All Hessian products of a step are computed here.

From a start vector it builds an orthonormal Q with Qᵀ B Q = T tridiagonal, with one product an iteration. The
recurrence (`Lanczos.extend`) makes no decision and transfers no number to the host, so that it can run eagerly or in a
CUDA graph. The Krylov space on the host (`Krylov`) reads T column by column and detects when it is invariant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sanc.core.space import ROUNDING_ERRORS, Floats, Scalar, Space, Vector

INITIAL_CAPACITY = 8
"""Vectors for which a basis without a limit has memory at first; the memory is doubled when it is full."""


class NonFiniteProductError(ArithmeticError):
    """An entry of a Hessian product is not finite."""


class ColumnSource(Protocol):
    """Source of the columns of T: computed one by one, or all at once by a CUDA graph."""

    max_dim: int

    @property
    def space(self) -> Space: ...
    @property
    def start_norm(self) -> float: ...
    @property
    def is_stored(self) -> bool: ...
    def column(self, j: int) -> Sequence[float]: ...
    def combine(self, krylov: Krylov, coefficients: Sequence[Floats]) -> list[Vector]: ...


class Lanczos:
    """The three-term recurrence β_j q_{j+1} = B q_j − α_j q_j − β_{j−1} q_{j−1}, q_1 = start/‖start‖.

    Parameters
    ----------
    product : callable
        ``v -> B v``; the recurrence changes the returned vector in place.
    max_dim : int, optional
        Largest number of iterations; by default the dimension of the space.
    capacity : int, optional
        Vectors for which Q has memory at first; it is doubled when it is full. By default `max_dim`, if that is passed.
    store : bool
        Keep Q. Otherwise `combine` runs the recurrence again, with all its products.
    reorthogonalise : bool
        Orthogonalise every new vector against all earlier ones, twice.
    gradient : vector, optional
        A vector g whose projections qᵀg are returned after α and β.
    redraw : callable, optional
        Returns the start vector again. Then it is not kept either, unless `store`.
    project : bool
        Compute `projections` without reorthogonalisation, too.

    Attributes
    ----------
    space : Space
        The space of the vectors.
    unread_start_norm : scalar
        ‖start‖, unread.
    columns : list of lists
        (α_j, β_j), and qᵀg with `gradient`; unread.
    projections : list
        With `reorthogonalise`, the projections of the last product on all vectors of Q, and otherwise on the last two;
        unread.
    """

    def __init__(
        self,
        product: Callable[[Vector], Vector],
        start: Vector,
        space: Space,
        *,
        max_dim: int | None = None,
        capacity: int | None = None,
        store: bool = True,
        reorthogonalise: bool = False,
        gradient: Vector | None = None,
        redraw: Callable[[], Vector] | None = None,
        project: bool = False,
    ) -> None:
        self.space = space
        self.max_dim = min(max_dim or space.dim, space.dim)
        self.columns: list[list[Scalar]] = []
        self.unread_start_norm = space.unread_norm(start)
        self.projections: list[Any] = []
        self._product = product
        self._start: Vector | None = start
        self._redraw = redraw
        self._project = project
        self._store = store
        self._reorthogonalise = reorthogonalise and store
        self._gradient = gradient
        if capacity is None:
            capacity = INITIAL_CAPACITY if max_dim is None else self.max_dim
        self._first_capacity = min(capacity, self.max_dim)
        self._basis: Any = None  # q_1, q_2, … as rows of a block that grows if needed
        self._previous: Any = None  # q_{j−1}, if Q is not kept
        self._current: Any = None  # q_j, if Q is not kept
        self._residual: Any = None  # β_j q_{j+1}

    @property
    def is_stored(self) -> bool:
        """Whether Q is kept."""
        return self._store

    @property
    def start_norm(self) -> float:
        """‖start‖, the norm of the start vector."""
        return float(self.unread_start_norm)

    def column(self, j: int) -> Sequence[float]:
        """Return α_j, β_j and, with `gradient`, qᵀg; make an iteration if they are the next ones."""
        if j == len(self.columns):
            self.extend()
        return self.space.read(self.columns[j])

    def extend(self) -> None:
        """Make one iteration."""
        space, j = self.space, len(self.columns)
        q, previous = self._next_vectors(j)
        r = self._product(q)
        if self._reorthogonalise:
            basis = self._basis[: j + 1]
            projections = space.orthogonalise(r, basis)
            alpha, self.projections = projections[-1], [projections]
            space.orthogonalise(r, basis)  # again, because of roundoff: "twice is enough" (Kahan; Parlett 1980)
        else:
            has_overlap = self._project and previous is not None
            self.projections = [space.inner(previous, r)] if has_overlap else []
            if previous is not None:
                space.subtract(r, self.columns[-1][1], previous)
            alpha = space.inner(q, r)
            self.projections.append(alpha)
            space.subtract(r, alpha, q)
        self._residual = r
        column = [alpha, space.unread_norm(r)]
        if self._gradient is not None:
            column.append(space.inner(q, self._gradient))
        self.columns.append(column)

    def _next_vectors(self, j: int) -> tuple[Vector, Vector | None]:
        """Normalise the residual, or the start vector, to q_j. Return q_j and, for the recurrence, q_{j−1}.

        They are rows of Q, or separate vectors if Q is not kept.
        """
        v, norm = (self._residual, self.columns[-1][1]) if j else (self._start, self.unread_start_norm)
        self._residual = None
        if not self._store:
            self._previous, self._current = self._current, v / norm
            if self._redraw is not None:
                self._start = None
            return self._current, self._previous
        if self._basis is None:
            self._basis = self.space.rows(self._first_capacity)
        elif j == len(self._basis):
            larger = self.space.rows(min(2 * j, self.max_dim))
            larger[:j] = self._basis
            self._basis = larger
        q = self._basis[j]
        self.space.divide(v, norm, out=q)
        return q, self._basis[j - 1] if j and not self._reorthogonalise else None

    @property
    def residual(self) -> Any:
        """β_j q_{j+1}, after iteration j."""
        return self._residual

    def basis(self, dim: int) -> Any:
        """Return the first `dim` vectors of Q as a block of rows."""
        return self._basis[:dim]

    def combine(self, krylov: Krylov, coefficients: Sequence[Floats]) -> list[Vector]:
        """Return Q u for each coefficient vector u, as new vectors.

        Without Q, one second pass computes all of them and ends the process: no iteration may follow.
        """
        if self._store:
            return [self.space.combine(self._basis[: krylov.dim], c) for c in coefficients]
        self.max_dim = krylov.dim  # no further iteration: its vectors are released
        self._previous = self._current = self._residual = None
        start: Any = self._start if self._redraw is None else self._redraw()
        q: Vector = start / krylov.start_norm
        del start
        previous: Vector | None = None
        combinations = [q * float(c[0]) for c in coefficients]
        for j, (alpha, beta) in enumerate(zip(krylov.alpha[:-1], krylov.beta[:-1], strict=True)):
            r = self._product(q)
            if previous is not None:
                self.space.subtract(r, krylov.beta[j - 1], previous)
            self.space.subtract(r, alpha, q)
            if not math.isfinite(self.space.norm(r)):
                raise NonFiniteProductError(f"the repeated Hessian product of iteration {j + 1} is not finite")
            self.space.divide(r, beta, out=r)
            previous, q = q, r
            for combination, c in zip(combinations, coefficients, strict=True):
                self.space.subtract(combination, -float(c[j + 1]), q)
        return combinations


class StepBasis(Protocol):
    """An orthonormal basis Q of the space in which a model minimises, with T = QᵀBQ; `Krylov` is one.

    Attributes
    ----------
    products : int
        Hessian products computed; n if the Hessian is formed as a matrix.
    projected_gradient : ndarray
        Qᵀg.
    is_stored : bool
        Whether Q is kept.
    basis : array or Tensor
        Q as a block of rows.
    last_beta, next_vector
        β and q for which BQ = QT + βqeᵀ; β = 0 if B maps the space into itself.
    schur_complement : float
        The least curvature of q that keeps T semidefinite; 0 if T is not positive definite.
    """

    @property
    def products(self) -> int: ...
    @property
    def projected_gradient(self) -> Floats: ...
    @property
    def is_stored(self) -> bool: ...
    @property
    def basis(self) -> Any: ...
    @property
    def last_beta(self) -> float: ...
    @property
    def next_vector(self) -> Any: ...
    @property
    def schur_complement(self) -> float: ...

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Return the diagonal and the off-diagonal of T."""
        ...

    def residual_of(self, u: Floats) -> float:
        """Return ‖∇m‖ if u minimises the cubic model, and the residual of a Ritz pair if Qu is its vector."""
        ...

    def combine(self, *coefficients: Floats) -> list[Vector]:
        """Return Q u for each coefficient vector u, as new vectors."""
        ...


class DiagonalBasis(ABC):
    """A basis of eigenvectors of B: T is diagonal, and B maps the space into itself.

    Attributes
    ----------
    values : ndarray
        The eigenvalues, in the order of the vectors.
    projected_gradient : ndarray
        The gradient in this basis.
    """

    last_beta = 0.0
    schur_complement = 0.0
    is_stored = True

    def __init__(self, values: Floats, projected_gradient: Floats) -> None:
        self.values, self.projected_gradient = values, projected_gradient

    @property
    def products(self) -> int:
        """As many products as vectors."""
        return len(self.values)

    @property
    @abstractmethod
    def basis(self) -> Any:
        """The eigenvectors, as a block of rows."""

    @property
    def next_vector(self) -> Any:
        """Raise an error: the space is invariant, so that no vector follows."""
        raise ValueError("the space is invariant, so that no vector follows")

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Return the diagonal and the off-diagonal of T."""
        return np.array(self.values, np.float64), np.zeros(len(self.values) - 1)

    def residual_of(self, u: Floats) -> float:
        """Return 0: the space is invariant."""
        return 0.0

    @abstractmethod
    def combine(self, *coefficients: Floats) -> list[Vector]:
        """Return combinations of the eigenvectors, as new vectors."""


class Krylov:
    """A growing Krylov space on the host: T, from the columns of a source, and combinations of Q.

    Attributes
    ----------
    start_norm : float
        Norm of the start vector.
    dim : int
        Lanczos iterations made, j.
    alpha, beta : list of float
        Diagonal of T, and the norms β_j of the component of B q_j outside the space, 0 if the space is invariant.
    last_beta : float
        β_j; NaN before the first iteration.
    """

    def __init__(self, source: ColumnSource) -> None:
        self.start_norm = source.start_norm
        if not (self.start_norm > 0.0 and math.isfinite(self.start_norm)):
            raise ValueError(f"a Krylov space needs a start vector of positive finite norm, not {self.start_norm}")
        self.dim = 0
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.last_beta = math.nan
        self._source = source
        self._gradient_projections: list[float] = []
        self._norm_bound = 0.0  # of T, by Gershgorin's circles
        self._pivot = 1.0  # the last pivot of T = LDLᵀ, or the first that is not positive

    @property
    def products(self) -> int:
        """Hessian products made, one in each iteration."""
        return self.dim

    @property
    def is_invariant(self) -> bool:
        """Whether the process broke down: B maps the space into itself."""
        return self.last_beta == 0.0

    @property
    def is_definite(self) -> bool:
        """Whether T is positive definite."""
        return self._pivot > 0.0

    @property
    def starts_at_gradient(self) -> bool:
        """Whether the space was started at g itself, so that Qᵀg = ‖g‖ e₁."""
        return not self._gradient_projections

    @property
    def projected_gradient(self) -> Floats:
        """Qᵀg: the linear term of the cubic model in this basis."""
        if self._gradient_projections:
            return np.array(self._gradient_projections, np.float64)
        c = np.zeros(self.dim)
        c[0] = self.start_norm
        return c

    @property
    def is_stored(self) -> bool:
        """Whether the source keeps Q."""
        return self._source.is_stored

    @property
    def basis(self) -> Any:
        """Q as a block of rows, if the source keeps it."""
        source: Any = self._source
        return source.basis(self.dim)

    @property
    def next_vector(self) -> Any:
        """The next Lanczos vector q, for which B Q = Q T + β q eᵀ; the space must not be invariant."""
        source: Any = self._source
        return source.residual / self.last_beta

    @property
    def schur_complement(self) -> float:
        """β_j² over the last pivot of T, the least curvature of the next vector that keeps it semidefinite.

        0 if T is not positive definite.
        """
        return self.last_beta * (self.last_beta / self._pivot) if self.is_definite else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the space is invariant or has its largest dimension, so that it cannot be extended."""
        return self.last_beta == 0.0 or self.dim >= self._source.max_dim

    def extend(self) -> None:
        """Make one Lanczos iteration; the space must not be complete."""
        assert not self.is_complete
        j, space = self.dim, self._source.space
        alpha, beta, *projection = self._source.column(j)
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise NonFiniteProductError(f"the Hessian product of Lanczos iteration {j + 1} is not finite")
        previous_beta = self.last_beta if j else 0.0
        self._norm_bound = max(self._norm_bound, abs(alpha) + beta + previous_beta)
        if self.is_definite:
            self._pivot = alpha - previous_beta * (previous_beta / self._pivot)
        if beta <= ROUNDING_ERRORS * space.eps * self._norm_bound or j + 1 == space.dim:
            beta = 0.0  # roundoff, or the space is full
        self.dim, self.last_beta = j + 1, beta
        self.alpha.append(alpha)
        self.beta.append(beta)
        self._gradient_projections += projection

    def residual_of(self, u: Floats) -> float:
        """Return β_j |u_j|: ‖∇m‖ if u minimises the cubic model, ‖Bv − λv‖ if v = Qu is the vector of a Ritz pair."""
        return self.last_beta * abs(float(u[-1]))

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Return the diagonal and the off-diagonal of T."""
        return np.array(self.alpha, np.float64), np.array(self.beta[: self.dim - 1], np.float64)

    def shifted_norms(self, shift: float) -> tuple[float, float]:
        """Return ‖u‖ and β_j |u_j| for (T + shift·I) u = −‖start‖ e₁ from the pivots; NaN if not all are positive.

        These are ‖s‖ and ‖∇m(s)‖ of the cubic model's minimiser s if `shift` is its μ, and of Newton's step for 0.
        As in conjugate gradients, Qu is the sum of ζ_j w_j with w_j = q_j − l_j w_{j−1}, where the l_j are the entries
        of L in LDLᵀ. The signs of the ζ_j alternate, so that no term of the sum for ‖u‖² is negative.
        """
        residual, factor, previous_beta = self.start_norm, 0.0, 0.0
        square = w_square = projection = 0.0  # ‖u‖², ‖w‖² and |uᵀw|
        for alpha, beta in zip(self.alpha, self.beta, strict=True):
            pivot = alpha + shift - previous_beta * factor
            if not pivot > 0.0:
                return math.nan, math.nan
            zeta = residual / pivot
            w_square = 1.0 + factor * factor * w_square
            new_projection = zeta * w_square
            projection *= factor
            square += zeta * (2.0 * projection + new_projection)
            projection += new_projection
            factor, previous_beta = beta / pivot, beta
            residual *= factor
        return math.sqrt(square), residual

    def model_gradient_lower_bound(self, sigma: float) -> float:
        """Return a lower bound of ‖∇m‖ = β_j |u_j| at the cubic model's minimiser, without eigenpairs.

        By Cramer's rule |u_j| = ‖g‖ β_1…β_{j−1} / det(T + μI). Gershgorin's circles bound T, hence μ and the
        determinant. Most dimensions that are too small are thus detected without an eigendecomposition.
        """
        radius, bound = self._norm_bound, self.start_norm
        shift = radius + 0.5 * (radius + math.sqrt(radius * radius + 4.0 * sigma * bound))
        if not (self.starts_at_gradient and 0.0 < shift < math.inf):
            return 0.0
        for beta in self.beta:
            bound *= beta / shift
        return bound

    def combine(self, *coefficients: Floats) -> list[Vector]:
        """Return Q u for each coefficient vector u, as new vectors."""
        return self._source.combine(self, coefficients)
