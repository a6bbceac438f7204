"""Linear systems H v = u, given Ritz pairs of H that are known already.

The Ritz pairs span a space in which the system is solved at once. On its complement the Lanczos process solves the
system that block elimination leaves. Started at the right side r of that system, it gives S P = P T + β p_{k+1} e_kᵀ,
and ‖r‖ P T⁻¹ e_1 = P y has the residual norm β |y_k|. Without reorthogonalisation this is the conjugate gradient
method. The true residual is the right side of the next round, until the bound ‖u − Hv‖ / λ of the error of v suffices,
where λ is a lower bound of λ_min(H).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg.lapack import dptsv
from torch import Tensor

from sanc.core.space import Floats, Space
from sanc.core.spectrum import cubic
from sanc.core.spectrum.curvature import Exploration
from sanc.core.spectrum.krylov import INITIAL_CAPACITY, Krylov, Lanczos
from sanc.core.spectrum.monitored_lanczos import affordable_dim

_MAX_ROUNDS = 20
"""Rounds of one solve. Each round at least halves the residual, and most solves need one or two."""
_RESIDUAL_FRACTION = 0.9
"""A round aims at this fraction of the required residual, because the true residual may be larger."""
_CHANGE_FRACTION = 0.1
"""A round with known pairs reduces the residual to this fraction of the relative change of H, and not further: the
change along one step exceeds most others."""
CUTOFF_EXPONENT = 0.5
"""Exponent of the machine precision: the pseudo-inverse treats eigenvalues below √eps·‖H‖ as zero."""
_MAX_RITZ_VECTOR_ENTRIES = 10_000_000
"""Largest number of entries of the known vectors: 80 MB in float64."""
_KNOWN_PAIR_TOLERANCE = 0.1
"""Relative residual up to which a Ritz pair of a Krylov space is used."""
_PAIR_COST, _PAIR_COST_DIM = 0.04, 10_000
"""Cost of a known pair relative to the cost of a product in at least so many dimensions: a product with H reads and
writes about 50 vectors, and a pair reads two. In fewer dimensions the calls of a product cost more than its
arithmetic."""
_TRUNCATED_TEST_DIVISOR = 5
"""A truncated solution is tested again after a fifth more products: a test decomposes the tridiagonal matrix."""

Product = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class LinearSolution:
    """A solution of H v = u.

    Attributes
    ----------
    v : Tensor
        The solution.
    residual : float
        ‖u − Hv‖.
    error : float
        Bound on the relative error of v, from the residual and the lower bound of the eigenvalues.
    products : int
        Hessian products.
    """

    v: Tensor
    residual: float
    error: float
    products: int


class RitzSpace:
    """A space W of Ritz vectors of H with H W = W Θ + q cᵀ, where the unit vector q is orthogonal to W.

    Let v = W a + y with y ⟂ W. Block elimination of H v = u leaves the system S y = u − W Wᵀu − (cᵀΘ⁻¹Wᵀu) q on the
    complement of W, with the Schur complement S = (I − WWᵀ)H − (cᵀΘ⁻¹c) q qᵀ; then a = Θ⁻¹(Wᵀu − (qᵀy) c). The
    eigenvalues of S lie between the eigenvalues of H. If W holds the extreme eigenvectors, they lie closer together.

    Attributes
    ----------
    values : ndarray
        θ, positive.
    rows : Tensor or None
        W, one vector in a row; None if nothing is known.
    """

    def __init__(
        self,
        values: Floats,
        rows: Tensor | None = None,
        couplings: Floats | None = None,
        next_vector: Tensor | None = None,
    ) -> None:
        self.values, self.rows = values, rows
        self._couplings = np.zeros(len(values)) if couplings is None else couplings
        self._next_vector = next_vector  # q; None if H maps the space into itself
        self._schur_shift = float(np.sum(self._couplings**2 / values))

    @property
    def dim(self) -> int:
        """Number of Ritz vectors."""
        return len(self.values)

    @property
    def norm(self) -> float:
        """The largest value."""
        return float(self.values.max(initial=0.0))

    def above(self, cutoff: float) -> RitzSpace:
        """Return the pairs with larger values, of an invariant space."""
        kept = self.values > cutoff
        if self.rows is None or bool(kept.all()):
            return self
        return RitzSpace(self.values[kept], self.rows[torch.from_numpy(kept).to(self.rows.device)])

    def eliminate(self, u: Tensor) -> tuple[Floats, Tensor]:
        """Return Wᵀu, and the right side on the complement of W."""
        if self.rows is None:
            return np.empty(0), u
        unread_projections = torch.mv(self.rows, u)
        complement_rhs = torch.addmv(u, self.rows.t(), unread_projections, alpha=-1.0)
        complement_rhs = torch.addmv(
            complement_rhs, self.rows.t(), torch.mv(self.rows, complement_rhs), alpha=-1.0
        )  # again, because of roundoff
        projections: Floats = unread_projections.double().cpu().numpy()
        if self._next_vector is not None:
            complement_rhs = complement_rhs - self._next_vector * float(self._couplings @ (projections / self.values))
        return projections, complement_rhs

    def schur_product(self, product: Product, v: Tensor, along: float) -> Tensor:
        """Return S v for a vector v ⟂ W with qᵀv = `along`."""
        image: Tensor = product(v)
        if self.rows is None:
            return image
        image = torch.addmv(image, self.rows.t(), torch.mv(self.rows, image), alpha=-1.0)
        return image if self._next_vector is None else image.sub_(self._next_vector, alpha=self._schur_shift * along)

    def next_component(self, space: Space, v: Tensor) -> float:
        """Return qᵀv."""
        return 0.0 if self._next_vector is None else space.dot(self._next_vector, v)

    def coefficients(self, projections: Floats, along: float) -> Floats:
        """Return a, given Wᵀu and qᵀy."""
        return (projections - along * self._couplings) / self.values

    def combine(self, coefficients: Floats, y: Tensor) -> Tensor:
        """Return W a + y as a new vector."""
        if self.rows is None:
            return y.clone()
        return torch.addmv(y, self.rows.t(), torch.as_tensor(coefficients, dtype=y.dtype, device="cpu").to(y.device))


def ritz_space_of(explored: Exploration, space: Space) -> RitzSpace:
    """Return the converged Ritz pairs of an exploration that shorten later solves."""
    krylov, spectrum = explored.krylov, explored.spectrum
    if krylov is None or spectrum is None:
        return RitzSpace(np.empty(0))
    values = spectrum.values / explored.product_scale
    couplings = spectrum.vectors[-1] * (krylov.last_beta / explored.product_scale)
    chosen = _useful_pairs(values, np.abs(couplings), space.dim, space.eps * krylov.dim)
    if not len(chosen):
        return RitzSpace(np.empty(0))
    vectors: list[Any] = krylov.combine(*spectrum.vectors[:, chosen].T)
    next_vector = None if krylov.is_invariant else krylov.next_vector
    return RitzSpace(values[chosen], torch.stack(vectors), couplings[chosen], next_vector)


def _useful_pairs(values: Floats, residuals: Floats, dim: int, rounding: float) -> Any:
    """Return the indices of the pairs to keep: those with which a solve is expected to take the least time.

    The number of products grows with the square root of the ratio of the extreme eigenvalues that remain.
    """
    positive = np.flatnonzero(values > rounding * np.abs(values).max())
    usable = positive[residuals[positive] <= _KNOWN_PAIR_TOLERANCE * values[positive]]
    if not len(usable):
        return usable
    level = float(np.exp(np.mean(np.log(values[positive]))))
    order = usable[np.argsort(-np.abs(np.log(values[usable] / level)))][: _MAX_RITZ_VECTOR_ENTRIES // dim]
    pair_cost = _PAIR_COST * min(1.0, dim / _PAIR_COST_DIM)

    def expected_time(count: int) -> float:
        remaining = values[np.setdiff1d(positive, order[:count])]
        spread = float(remaining.max() / remaining.min()) if len(remaining) else 1.0
        return math.sqrt(spread) * (1.0 + pair_cost * count)

    return np.sort(order[: min(range(len(order) + 1), key=expected_time)])


def solve(
    product: Product,
    u: Tensor,
    space: Space,
    ritz_space: RitzSpace,
    *,
    eigenvalue_lower_bound: float,
    rtol: float,
    max_products: int | None = None,
    change: float = 0.0,
) -> LinearSolution:
    """Solve H v = u to a relative error of `rtol`.

    If the lower bound of the eigenvalues is not positive, the residual norm becomes at most rtol·‖u‖, and the error is
    infinite. `change` is the relative difference of H from the matrix that has these Ritz pairs, which limits how far
    one round reduces the residual. If a round does not halve it, the next ones are without the pairs.
    """
    norm_u = space.norm(u)
    v, residual, products = torch.zeros_like(u), u, 0
    if norm_u == 0.0:
        return LinearSolution(v, 0.0, 0.0, 0)
    limit = math.inf if max_products is None else max_products
    residual_norm, norm_v = norm_u, 0.0

    def required_residual(norm_v: float) -> float:
        return rtol * (eigenvalue_lower_bound * norm_v if eigenvalue_lower_bound > 0.0 else norm_u)

    for _ in range(_MAX_ROUNDS):
        max_dim = min(affordable_dim(space.dim), max(1, limit - products), space.dim - ritz_space.dim)
        min_residual = _CHANGE_FRACTION * change * residual_norm if ritz_space.dim else 0.0
        limits = _RoundLimits(max_dim, required_residual, norm_v, min_residual)
        correction, spent = _correction(product, residual, space, ritz_space, limits)
        improved = v + correction
        new_residual = u - product(improved)
        products += spent + 1
        new_norm = space.norm(new_residual)
        is_slow = not new_norm <= 0.5 * residual_norm
        if is_slow and ritz_space.dim and products < limit:
            ritz_space = RitzSpace(np.empty(0))
            continue
        if not new_norm < residual_norm:
            break
        v, residual, residual_norm, norm_v = improved, new_residual, new_norm, space.norm(improved)
        if residual_norm <= required_residual(norm_v) or is_slow or products >= limit:
            break
    is_bounded = eigenvalue_lower_bound > 0.0 and norm_v > 0.0
    error = residual_norm / (eigenvalue_lower_bound * norm_v) if is_bounded else math.inf
    return LinearSolution(v, residual_norm, error, products)


class _RoundLimits(NamedTuple):
    """Where the Lanczos process of one round ends.

    Attributes
    ----------
    max_dim : float
        Largest dimension of its Krylov space.
    required_residual : callable
        Residual norm that suffices, given the norm of the solution.
    norm_v : float
        Norm of the solution so far.
    min_residual : float
        Residual norm below which the process ends in any case.
    """

    max_dim: float
    required_residual: Callable[[float], float]
    norm_v: float
    min_residual: float


def _correction(
    product: Product,
    u: Tensor,
    space: Space,
    ritz_space: RitzSpace,
    limits: _RoundLimits,
) -> tuple[Tensor, int]:
    """Return an approximate solution of H v = u and the products it took: one Lanczos process on the complement."""
    projections, complement_rhs = ritz_space.eliminate(u)
    start_norm = space.norm(complement_rhs)
    if limits.max_dim < 1 or start_norm <= space.eps * space.norm(u):
        return ritz_space.combine(ritz_space.coefficients(projections, 0.0), torch.zeros_like(u)), 0
    components: list[float] = []

    def schur(q: Any) -> Any:
        components.append(ritz_space.next_component(space, q))
        return ritz_space.schur_product(product, q, components[-1])

    krylov = Krylov(Lanczos(schur, complement_rhs, space, max_dim=int(limits.max_dim), capacity=INITIAL_CAPACITY))
    while True:
        krylov.extend()
        y = _coefficients(krylov)
        coefficients = ritz_space.coefficients(projections, float(y @ components))
        norm = max(limits.norm_v, math.hypot(float(np.linalg.norm(y)), float(np.linalg.norm(coefficients))))
        residual = krylov.residual_of(y)
        required = _RESIDUAL_FRACTION * limits.required_residual(norm)
        if krylov.is_complete or residual <= max(space.eps * start_norm, limits.min_residual, required):
            break
    return ritz_space.combine(coefficients, krylov.combine(y)[0]), krylov.dim  # type: ignore[arg-type]


def _coefficients(krylov: Krylov) -> Floats:
    """Return y with T y = ‖start‖ e_1; if T is not positive definite, without its smallest eigenvalues."""
    diagonal, off_diagonal = krylov.tridiagonal()
    right = np.zeros(len(diagonal))
    right[0] = krylov.start_norm
    if krylov.is_definite and len(right) > 1:
        _, _, y, info = dptsv(diagonal, off_diagonal, right)
        if info == 0:
            return np.asarray(y, np.float64).reshape(-1)
    return _truncated(cubic.compute_spectrum(diagonal, off_diagonal), right, np.finfo(np.float64).eps * len(right))[0]


def _truncated(spectrum: cubic.Spectrum, right: Floats, cutoff: float) -> tuple[Floats, Floats, float]:
    """Return T⁺c with eigenvalues below cutoff·‖T‖ as zero, the component of c along them, and the smallest other."""
    kept = np.abs(spectrum.values) > cutoff * spectrum.norm
    projections = spectrum.vectors.T @ right
    inverses = np.where(kept, 1.0 / np.where(kept, spectrum.values, 1.0), 0.0)
    y = spectrum.vectors @ (inverses * projections)
    neglected = spectrum.vectors @ np.where(kept, 0.0, projections)
    return y, neglected, float(np.abs(spectrum.values[kept]).min(initial=math.inf))


def solve_least_squares(
    product: Product,
    u: Tensor,
    space: Space,
    eigenpairs: RitzSpace | None = None,
    *,
    rtol: float,
    max_products: int | None = None,
) -> LinearSolution:
    """Return v = H⁺u, the shortest v with the smallest ‖u − Hv‖, with eigenvalues below √eps·‖H‖ as zero.

    `eigenpairs` are all those of H with larger eigenvalues, if these were computed.
    """
    if space.norm(u) == 0.0:
        return LinearSolution(torch.zeros_like(u), 0.0, 0.0, 0)
    cutoff = space.eps**CUTOFF_EXPONENT
    if eigenpairs is not None:
        return _by_eigenpairs(product, u, space, eigenpairs.above(cutoff * eigenpairs.norm))
    max_dim = max_products or affordable_dim(space.dim)
    lanczos = Lanczos(product, u, space, max_dim=max_dim, capacity=INITIAL_CAPACITY, reorthogonalise=True)
    krylov, next_test_dim = Krylov(lanczos), 1
    while True:
        krylov.extend()
        if krylov.dim < next_test_dim and not krylov.is_complete:
            continue
        spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
        y, neglected, smallest = _truncated(spectrum, krylov.projected_gradient, cutoff)
        norm = float(np.linalg.norm(y))
        missing = krylov.residual_of(y) + krylov.residual_of(neglected) / smallest
        error = 0.0 if missing == 0.0 else missing / (smallest * norm) if norm > 0.0 else math.inf
        if krylov.is_complete or error <= rtol:
            break
        next_test_dim = krylov.dim + 1 + krylov.dim // _TRUNCATED_TEST_DIVISOR
    (v,) = krylov.combine(y)
    return LinearSolution(v, space.norm(u - product(v)), error, krylov.dim + 1)  # type: ignore[arg-type]


def _by_eigenpairs(product: Product, u: Tensor, space: Space, eigenpairs: RitzSpace) -> LinearSolution:
    """Return H⁺u from the eigenpairs that count; its error is that within their span."""
    v = torch.zeros_like(u)
    projections, _ = eigenpairs.eliminate(u)
    v = eigenpairs.combine(eigenpairs.coefficients(projections, 0.0), v)
    residual, norm_v = u - product(v), space.norm(v)
    missing = eigenpairs.eliminate(residual)[0]
    error = float(np.linalg.norm(missing / eigenpairs.values)) / norm_v if norm_v > 0.0 else 0.0
    return LinearSolution(v, space.norm(residual), error, 1)
