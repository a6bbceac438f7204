"""The participation ratio (Σ|λ|)² / Σλ² of a Hessian, and its spectral density, by known eigenpairs and quadrature.

Few large eigenvalues dominate Σλ². Random vectors have random components along their eigenvectors, so that an estimate
from random vectors alone varies by tens of per cent. So the sums over the eigenvalues whose Ritz pairs have converged
are computed from these, and the traces of |H| and H² on the complement by stochastic Lanczos quadrature. R. A. Meyer
and others (2021) do this for the trace of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.oracle import Oracle
from sanc.core.space import Floats, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.extremes import Extremes, quadrature

_RITZ_PAIR_TOLERANCE = 0.05
"""Relative residual up to which a Ritz pair counts as an eigenpair: the error of its value is about its square."""
_MAX_EIGENVECTOR_ENTRIES = 2**27
"""Entries of all eigenvectors that are kept: 0.5 GB in float32."""
_MIN_QUADRATURE_STEPS, _MAX_QUADRATURE_STEPS = 8, 32
"""Lanczos iterations of a random start. They end in between when the quadrature error is below the standard error, or
the error of products above both."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """The participation ratio with its error, and the spectral density.

    Attributes
    ----------
    value, error : float
        The ratio, and its error: the standard error over the random starts, the quadrature error and the effect of the
        error of products together.
    limited_by_product_error : bool
        Whether the error of products is the largest part.
    values, weights : array
        Nodes of the spectral density and their weights, which add up to 1.
    products : int
        Hessian products.
    """

    value: float
    error: float
    limited_by_product_error: bool
    values: Floats
    weights: Floats
    products: int


@dataclass(frozen=True, slots=True)
class _Quadrature:
    """Quadrature of the spectrum of a random start.

    Attributes
    ----------
    values, weights : ndarray
        The nodes with their weights.
    mean_abs, mean_abs_error : float
        ∫|λ|, and its error.
    mean_square : float
        ∫λ².
    """

    values: Floats
    weights: Floats
    mean_abs: float
    mean_abs_error: float
    mean_square: float


def converged_pairs(extremes: Extremes, dim: int, *, keeps_basis: bool) -> list[int]:
    """Return the indices of the Ritz pairs that count as eigenpairs, as many as fit; without a basis only the ends."""
    indices = np.flatnonzero(extremes.relative_residuals <= _RITZ_PAIR_TOLERANCE)
    ends = (0, len(extremes.values) - 1)
    if not keeps_basis:
        return [int(k) for k in indices if k in ends]
    largest = indices[np.argsort(-np.abs(extremes.values[indices]), kind="stable")]
    return sorted(map(int, largest[: max(2, _MAX_EIGENVECTOR_ENTRIES // dim)]))


def measure_dimension(
    oracle: Oracle,
    x: Vector,
    extremes: Extremes,
    eigenvectors: Mapping[int, Vector],
    seeds: Iterable[int],
    *,
    count: int,
    store: bool,
    time_is_up: Callable[[], bool],
) -> Dimension:
    """Return the participation ratio of the Hessian at x.

    Parameters
    ----------
    oracle, x : Oracle, vector
        Evaluates the Hessian, and the point.
    extremes : Extremes
        The bounds on the extreme eigenvalues, whose Ritz pairs are used again.
    eigenvectors : mapping
        Orthonormal eigenvectors by the index of their Ritz pair.
    seeds, count : iterable, int
        Seeds of the random starts, and how many there are. Fewer are used where the error of products is the largest.
    store : bool
        Keep the Lanczos vectors, and reorthogonalise them.
    time_is_up : callable
        Returns whether the time limit has passed.
    """
    dim, complement_dim = oracle.space.dim, oracle.space.dim - len(eigenvectors)
    quadratures: list[_Quadrature] = []
    dimension: Dimension | None = None
    products = 0

    def suffices(alpha: Floats, beta: Floats) -> bool:
        if time_is_up():
            return True
        current = _quadrature(alpha, beta, complement_dim)
        return len(alpha) >= _MIN_QUADRATURE_STEPS and (
            complement_dim * current.mean_abs_error <= _standard_error_of_trace(current, complement_dim, count)
            or _participation_ratio(
                extremes, dim, [*eigenvectors], [*quadratures, current], products
            ).limited_by_product_error
        )

    for seed in seeds if complement_dim else ():
        if time_is_up():
            break
        alpha, beta = quadrature(
            oracle,
            x,
            seed,
            max_dim=_MAX_QUADRATURE_STEPS,
            suffices=suffices,
            store=store,
            without=[*eigenvectors.values()],
        )
        quadratures.append(_quadrature(alpha, beta, complement_dim))
        products += len(alpha)
        dimension = _participation_ratio(extremes, dim, [*eigenvectors], quadratures, products)
        if dimension.limited_by_product_error:  # more starts do not reduce the error of products
            break
    if dimension is not None:
        return dimension
    krylov, scale = extremes.krylov, extremes.product_scale
    indices = [] if complement_dim else [*eigenvectors]  # the start of the bounds is the only one
    quadratures = [_quadrature(np.array(krylov.alpha) / scale, np.array(krylov.beta) / scale, dim)]
    return _participation_ratio(extremes, dim, indices, quadratures, products)


def _participation_ratio(
    extremes: Extremes, dim: int, indices: list[int], quadratures: list[_Quadrature], products: int
) -> Dimension:
    """Return the participation ratio by the eigenpairs of these indices, and quadratures on their complement."""
    complement_dim = dim - len(indices)
    eigenvalues = extremes.values[indices]
    weights = [
        np.full(len(indices), 1.0 / dim),
        *(quadrature.weights * (complement_dim / dim / len(quadratures)) for quadrature in quadratures),
    ]
    density = np.concatenate([eigenvalues, *(quadrature.values for quadrature in quadratures)]), np.concatenate(weights)
    first = np.abs(eigenvalues).sum() + complement_dim * np.array([quadrature.mean_abs for quadrature in quadratures])
    second = (eigenvalues**2).sum() + complement_dim * np.array([quadrature.mean_square for quadrature in quadratures])
    if not second.mean() > 0.0:
        return Dimension(0.0, 0.0, False, *density, products)
    ratio = float(first.mean() ** 2 / second.mean())
    # Few starts may all miss an eigenvalue that another Ritz value shows, and then they agree too well.
    missed = np.delete(extremes.values, indices)
    square = max(
        complement_dim * float(np.mean([quadrature.mean_square for quadrature in quadratures])),
        float((missed**2).sum()) if complement_dim else 0.0,
    )
    derivative = 2.0 * ratio / float(first.mean())  # of the ratio by the mean of Σ|λ|, which enters as a square
    standard_error = max(derivative * math.sqrt(2.0 * square / len(quadratures)), _jackknife(first, second))
    quadrature_error = (
        derivative * complement_dim * float(np.mean([quadrature.mean_abs_error for quadrature in quadratures]))
    )
    product_error = derivative * dim * extremes.ritz_error / math.sqrt(extremes.krylov.dim)
    sampling = math.hypot(standard_error, quadrature_error)
    return Dimension(ratio, math.hypot(sampling, product_error), product_error > sampling, *density, products)


def _standard_error_of_trace(quadrature: _Quadrature, dim: int, count: int) -> float:
    """Return the standard error of the trace of |H| over the starts: a normal start has twice the trace of H²."""
    return math.sqrt(2.0 * dim * quadrature.mean_square / count)


def _quadrature(alpha: Floats, beta: Floats, dim: int) -> _Quadrature:
    """Return the quadrature by k Lanczos iterations, with ∫|λ| by the averaged quadrature.

    The anti-Gauss rule of k nodes has β_{k−1} √2 in place of β_{k−1} (Laurie 1996). Its error is the negative of that
    of the Gauss rule of k − 1 nodes, for polynomials of two degrees more. So their mean is better, and their half
    difference estimates its error. ∫λ² = ‖Hz‖² needs no quadrature.
    """
    steps, second = len(alpha), float(alpha[0] ** 2 + beta[0] ** 2)
    values, weights = _gauss(alpha, beta[: steps - 1])
    first = float(weights @ np.abs(values))
    if beta[-1] == 0.0 or steps == dim:
        return _Quadrature(values, weights, first, 0.0, second)
    if steps == 1:
        return _Quadrature(values, weights, first, math.sqrt(second) - first, second)  # ∫|λ| ≤ √∫λ²
    changed = beta[: steps - 1] * np.append(np.ones(steps - 2), math.sqrt(2.0))
    ends = [float(w @ np.abs(v)) for v, w in (_gauss(alpha[:-1], beta[: steps - 2]), _gauss(alpha, changed))]
    return _Quadrature(values, weights, 0.5 * (ends[0] + ends[1]), 0.5 * abs(ends[1] - ends[0]), second)


def _gauss(diagonal: Floats, off_diagonal: Any) -> tuple[Floats, Floats]:
    """Return nodes and weights of the Gauss quadrature of a tridiagonal matrix."""
    spectrum = cubic.compute_spectrum(diagonal, off_diagonal)
    return spectrum.values, spectrum.vectors[0] ** 2


def _jackknife(first: Floats, second: Floats) -> float:
    """Return the standard error of mean(first)² / mean(second) over the starts; 0 for one."""
    count = len(first)
    if count == 1:
        return 0.0
    left_out = [np.delete(first, k).mean() ** 2 / np.delete(second, k).mean() for k in range(count)]
    deviations = np.array(left_out) - first.mean() ** 2 / second.mean()
    return math.sqrt((count - 1) / count * float((deviations**2).sum()))
