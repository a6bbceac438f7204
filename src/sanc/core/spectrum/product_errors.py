"""The asymmetry of Hessian products that their errors explain."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sanc.core.space import Space, Vector

ASYMMETRY_FACTOR = 10.0
"""Products are asymmetric if the squared asymmetry exceeds this many times the sum of their squared errors."""
NONLINEARITY_FACTOR = 10.0
"""Asymmetry up to this many times the measured nonlinearity counts as inaccuracy: ten errors, as for differences."""


_LINEARITY_SAMPLES = 3
"""Random pairs of vectors whose largest nonlinearity counts."""


def measure_nonlinearity(product: Callable[[Vector], Vector], space: Space, seed: int = 0) -> float:
    """Return the largest of a few ‖H(au + bv) − aHu − bHv‖ with random unit vectors u, v and au + bv.

    Products that are exact to roundoff are linear to roundoff, even with a wrong or asymmetric Hessian.
    """
    largest = 0.0
    for k in range(_LINEARITY_SAMPLES):
        u, v = (space.normal(np.random.default_rng((seed, k, j))) for j in range(2))
        u, v = u / space.norm(u), v / space.norm(v)
        norm = space.norm(u + v)
        if norm > 0.0:
            of_sum, sum_of_products = product((u + v) / norm), product(u) / norm + product(v) / norm
            largest = max(largest, space.norm(of_sum - sum_of_products))
    return largest
