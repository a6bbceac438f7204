"""Linear systems H v = u in Krylov spaces, scaled by Ritz pairs that are known already.

The Lanczos process started at u gives H Q = Q T + β q_{k+1} e_kᵀ, and v = ‖u‖ Q T⁻¹ e_1 has the residual norm β |y_k|
with y = ‖u‖ T⁻¹ e_1. Without reorthogonalisation this is the conjugate gradient method. Its true residual is the right
side of the next round, until the bound ‖u − Hv‖ / λ of the error of v suffices, where λ is a lower bound of λ_min(H).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg.lapack import dptsv
from torch import Tensor

from sanc.core.space import Floats, Space
from sanc.core.spectrum import cubic
from sanc.core.spectrum.curvature import Exploration
from sanc.core.spectrum.eigenvalue_bounds import affordable_dim
from sanc.core.spectrum.krylov import Krylov, Lanczos

_MAX_ROUNDS = 20
"""Rounds of one solve. Each round at least halves the residual, and most solves need one or two."""
_RESIDUAL_SHARE = 0.5
"""Factor by which the residual of a round is below the one that is needed: the true residual may be larger."""
_CUTOFF_EXPONENT = 0.5
"""Exponent of the machine precision: the pseudo-inverse treats eigenvalues below √eps·‖H‖ as zero."""
_SCALED_PAIRS = (1, 2, 4, 8, 16, 32)
"""Numbers of Ritz pairs that are tried as a scaling in a large space; each costs four inner products per product."""
_RITZ_VECTOR_ENTRIES = 10_000_000
"""Entries of all Ritz vectors up to which every Ritz pair is kept: 80 MB in float64."""
_CONVERGED_RESIDUAL = 0.1
"""Relative residual up to which a Ritz pair of a large space is used."""
_USEFUL_SPREAD = 0.25
"""Reduction of the condition number from which a scaling is worth its cost: the number of iterations is halved."""

_TRUNCATED_TEST_DIVISOR = 5
"""A truncated solution is tested again after a fifth more products: a test decomposes the tridiagonal matrix."""
_RESIDUAL_TEST_DIVISOR = 20
"""The residual is tested again after a twentieth more products, so that at most as many are made in vain."""

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


class SpectralScaling:
    """The symmetric scaling S = I + V (diag(√(τ/θ)) − I) Vᵀ with Ritz vectors V, Ritz values θ > 0 and a level τ.

    If the Ritz pairs are eigenpairs, S H S has the eigenvalues τ in the span of V and those of H elsewhere. With all
    eigenpairs S H S = τ I, and the first Lanczos vector solves the system.

    Attributes
    ----------
    smallest, largest : float
        Bounds on the eigenvalues of S.
    """

    def __init__(self, values: Floats, vectors: Sequence[Any], level: float) -> None:
        roots = np.sqrt(level / values)
        self.smallest, self.largest = min(1.0, float(roots.min(initial=1.0))), max(1.0, float(roots.max(initial=1.0)))
        self._rows: Tensor | None = torch.stack(list(vectors)) if len(vectors) else None
        if self._rows is not None:
            self._excess = torch.as_tensor(roots - 1.0, dtype=self._rows.dtype, device="cpu").to(self._rows.device)

    def __call__(self, v: Any) -> Any:
        """Return S v as a new vector, or v itself if there are no Ritz pairs."""
        if self._rows is None:
            return v
        return torch.addmv(v, self._rows.t(), self._excess * torch.mv(self._rows, v))

    def undo(self, v: Any) -> Any:
        """Return S⁻¹ v as a new vector, or v itself if there are no Ritz pairs."""
        if self._rows is None:
            return v
        inverse = -self._excess / (1.0 + self._excess)
        return torch.addmv(v, self._rows.t(), inverse * torch.mv(self._rows, v))


def spectral_scaling(explored: Exploration, dim: int) -> SpectralScaling:
    """Return the scaling by Ritz pairs of an exploration: all of a small space, else few converged extreme ones.

    In a large space the pairs are used only if without them the remaining Ritz values lie closer together, so that
    half of the iterations suffice.
    """
    level = 1.0

    def choose(values: Floats, residuals: Floats) -> Sequence[int]:
        nonlocal level
        positive = np.flatnonzero(values > 0.0)
        if not len(positive):
            return []
        level = float(np.exp(np.mean(np.log(values[positive]))))
        if residuals.max() == 0.0 and len(positive) * dim <= _RITZ_VECTOR_ENTRIES:
            return list(map(int, positive))
        usable = positive[residuals[positive] <= _CONVERGED_RESIDUAL * values[positive]]
        order = usable[np.argsort(-np.abs(np.log(values[usable] / level)))]
        spread = _spread(values[positive])
        for count in _SCALED_PAIRS:
            chosen = order[:count]
            rest = values[np.setdiff1d(positive, chosen)]
            if len(rest) and _spread(rest) <= _USEFUL_SPREAD * spread:
                level = float(np.exp(np.mean(np.log(rest))))
                return list(map(int, np.sort(chosen)))
        return []

    values, vectors = explored.ritz_pairs(choose)
    return SpectralScaling(values, vectors, level)


def _spread(values: Floats) -> float:
    """Return the ratio of the largest to the smallest value, a condition number."""
    return float(values.max() / values.min())


def solve(
    product: Product,
    u: Tensor,
    space: Space,
    scaling: SpectralScaling,
    *,
    lower: float,
    rtol: float,
    max_products: int | None = None,
) -> LinearSolution:
    """Solve H v = u to a relative error of `rtol`, given a lower bound of the eigenvalues.

    If `lower` is not positive, the residual norm becomes at most rtol·‖u‖, and the error is infinite.
    """
    norm_u = space.norm(u)
    v, residual, products = torch.zeros_like(u), u, 0
    if norm_u == 0.0:
        return LinearSolution(v, 0.0, 0.0, 0)
    limit = math.inf if max_products is None else max_products
    residual_norm, norm_v = norm_u, 0.0

    def needed(norm_v: float) -> float:
        return rtol * (lower * norm_v if lower > 0.0 else norm_u)

    for _ in range(_MAX_ROUNDS):
        room = min(affordable_dim(space.dim), max(1, limit - products))
        lanczos = Lanczos(lambda q: scaling(product(scaling(q))), scaling(residual), space)
        lanczos.max_dim = int(min(room, space.dim))
        krylov, next_test_dim = Krylov(lanczos), 1
        while True:
            krylov.extend()
            products += 1
            if krylov.dim < next_test_dim and not krylov.is_complete:
                continue
            y = _coefficients(krylov)
            solution_norm = max(norm_v, scaling.smallest * float(np.linalg.norm(y)))
            allowed = _RESIDUAL_SHARE * needed(solution_norm)
            scaled_residual = krylov.residual_of(y)
            if krylov.is_complete or scaled_residual <= space.eps * krylov.start_norm:
                break
            # ‖S⁻¹q‖ ≥ 1/‖S‖, so that far from convergence S⁻¹ need not be applied.
            is_possible = scaled_residual <= allowed * scaling.largest
            if is_possible and scaled_residual * space.norm(scaling.undo(krylov.next_vector)) <= allowed:
                break
            next_test_dim = krylov.dim + 1 + krylov.dim // _RESIDUAL_TEST_DIVISOR
        improved = v + scaling(krylov.combine(y)[0])
        new_residual = u - product(improved)
        products += 1
        new_norm = space.norm(new_residual)
        if not new_norm < residual_norm:
            break
        is_slow = new_norm > 0.5 * residual_norm
        v, residual, residual_norm, norm_v = improved, new_residual, new_norm, space.norm(improved)
        if residual_norm <= needed(norm_v) or is_slow or products >= limit:
            break
    error = residual_norm / (lower * norm_v) if lower > 0.0 and norm_v > 0.0 else math.inf
    return LinearSolution(v, residual_norm, error, products)


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
    rest = spectrum.vectors @ np.where(kept, 0.0, projections)
    return y, rest, float(np.abs(spectrum.values[kept]).min(initial=math.inf))


def solve_least_squares(
    product: Product, u: Tensor, space: Space, *, rtol: float, max_products: int | None = None
) -> LinearSolution:
    """Return v = H⁺u, the shortest v with the smallest ‖u − Hv‖, with eigenvalues below √eps·‖H‖ as zero."""
    if space.norm(u) == 0.0:
        return LinearSolution(torch.zeros_like(u), 0.0, 0.0, 0)
    lanczos = Lanczos(product, u, space, reorthogonalise=True)
    lanczos.max_dim = min(space.dim, max_products or affordable_dim(space.dim))
    krylov, cutoff, next_test_dim = Krylov(lanczos), space.eps**_CUTOFF_EXPONENT, 1
    while True:
        krylov.extend()
        if krylov.dim < next_test_dim and not krylov.is_complete:
            continue
        spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
        y, rest, smallest = _truncated(spectrum, krylov.projected_gradient, cutoff)
        norm = float(np.linalg.norm(y))
        missing = krylov.residual_of(y) + krylov.residual_of(rest) / smallest
        error = 0.0 if missing == 0.0 else missing / (smallest * norm) if norm > 0.0 else math.inf
        if krylov.is_complete or error <= rtol:
            break
        next_test_dim = krylov.dim + 1 + krylov.dim // _TRUNCATED_TEST_DIVISOR
    (v,) = krylov.combine(y)
    return LinearSolution(v, space.norm(u - product(v)), error, krylov.dim + 1)  # type: ignore[arg-type]
