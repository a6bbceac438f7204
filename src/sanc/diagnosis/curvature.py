"""The curvature of the loss: bounds of the extreme eigenvalues, their eigenvectors, and the effective dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sanc.autograd.products import FiniteDifference
from sanc.core.space import Vector
from sanc.core.spectrum.extremes import Extremes, find_extremes
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.diagnosis.dimension import Dimension, converged_pairs, measure_dimension
from sanc.diagnosis.gradients import NetworkLoss
from sanc.errors import NonFiniteError, SecondDerivativeError, require_fraction, require_integer

_CONTRADICTING_ERRORS = 10.0
"""Differences of gradients contradict a product if they differ from it by more than this many times their error."""
_ASYMMETRY_WARNING = (
    "Hessian products are not symmetric: an operator in the loss has wrong second derivatives. Pass "
    'hvp="finite-difference", which needs first derivatives only.'
)
"""The warning if differences of gradients contradict asymmetric products."""


@dataclass(frozen=True)
class CurvatureSettings:
    """Options of `diagnose` for the spectrum of the Hessian.

    Attributes
    ----------
    relative_error : float
        Relative error of the bounds of the extreme eigenvalues at which Lanczos stops.
    confidence : float
        Probability with which the bounds hold.
    max_products : int or None
        The most products of each Lanczos process.
    seed : int
        Seed of random start vectors.
    start_vectors : int
        The start vector of the bounds, and those of the quadrature.
    """

    relative_error: float
    confidence: float
    max_products: int | None
    seed: int
    start_vectors: int

    def __post_init__(self) -> None:
        require_fraction("confidence", self.confidence, "pass a probability between 0 and 1")
        require_fraction("relative_error", self.relative_error, "pass a number between 0 and 1")
        require_integer("max_products", self.max_products, 1, optional=True)
        require_integer("start_vectors", self.start_vectors, 1)
        require_integer("seed", self.seed, 0)


@dataclass(frozen=True)
class CurvatureMeasurement:
    """Extreme eigenvalues with their bounds, and the spectrum in between.

    Attributes
    ----------
    extremes : Extremes
        The bounds, with the Krylov space they come from.
    leftmost, rightmost : vector
        Unit vectors of the extreme Ritz pairs.
    dimension : Dimension
        The effective dimension and the spectral density.
    products : int
        All Hessian products.
    """

    extremes: Extremes
    leftmost: Vector
    rightmost: Vector
    dimension: Dimension
    products: int


def measure_curvature(
    network: NetworkLoss, settings: CurvatureSettings, show: Callable[[int], None]
) -> CurvatureMeasurement:
    """Bound the extreme eigenvalues and estimate the spectral density.

    `show` receives the number of products while the eigenvalues are bounded.
    """
    try:
        extremes, discarded_products = _find_extremes(network, settings, show)
        converged = converged_pairs(extremes, network.oracle.space.dim, keeps_basis=network.keeps_basis)
        vectors = _eigenvectors(extremes, converged)
        dimension = measure_dimension(
            network.oracle,
            network.x,
            extremes,
            {k: vectors[k] for k in converged},
            range(settings.seed + 1, settings.seed + settings.start_vectors),
            count=settings.start_vectors - 1,
            store=network.keeps_basis,
            time_is_up=network.time_is_up,
        )
    except NonFiniteProductError as error:
        raise NonFiniteError(f"{error}: check the data and the parameters for extreme values.") from error
    second_pass = 0 if network.keeps_basis else extremes.krylov.dim - 1
    return CurvatureMeasurement(
        extremes,
        leftmost=vectors[0],
        rightmost=vectors[len(extremes.values) - 1],
        dimension=dimension,
        products=discarded_products + extremes.products + dimension.products + second_pass,
    )


def _find_extremes(
    network: NetworkLoss, settings: CurvatureSettings, show: Callable[[int], None]
) -> tuple[Extremes, int]:
    """Return the bounds and the number of discarded products.

    If differences of gradients contradict asymmetric products, the oracle uses the differences from then on.
    """

    def find() -> Extremes:
        return find_extremes(
            network.oracle,
            network.x,
            relative_error=settings.relative_error,
            confidence=settings.confidence,
            max_products=settings.max_products,
            seed=settings.seed,
            store=network.keeps_basis,
            rough=network.is_rough,
            time_is_up=network.time_is_up,
            report=show,
        )

    extremes = find()
    if extremes.ritz_error != math.inf or not _differences_contradict(network, extremes, settings.seed):
        return extremes, 0
    network.oracle.fall_back(SecondDerivativeError(_ASYMMETRY_WARNING))
    extremes.operator.release()
    return find(), extremes.products


def _differences_contradict(network: NetworkLoss, extremes: Extremes, seed: int) -> bool:
    """Return whether a product differs from a difference of gradients by more than the error of that difference.

    Otherwise the asymmetry is roundoff, as where a network fits all rows and its Hessian is almost zero.
    """
    oracle = network.oracle
    if oracle.differenced_products:
        return False
    space, differences = oracle.space, FiniteDifference(oracle, network.x, network.data)
    v = space.normal(np.random.default_rng(seed))
    v = v / space.norm(v)
    product, difference = 1.0 * extremes.operator(v), differences(v)
    return space.norm(product - difference) > _CONTRADICTING_ERRORS * differences.error(v, difference)


def _eigenvectors(extremes: Extremes, converged: Iterable[int]) -> dict[int, Vector]:
    """Return the vectors of both ends and of the converged Ritz pairs in between, by the index of the pair."""
    last = len(extremes.values) - 1
    inner = [k for k in converged if 0 < k < last]
    leftmost, rightmost, *others = extremes.vectors(inner)
    return {0: leftmost, last: rightmost, **dict(zip(inner, others, strict=True))}
