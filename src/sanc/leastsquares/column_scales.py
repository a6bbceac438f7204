"""Scales of the variables from the column norms of the Jacobian."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sanc.core.space import ROUNDING_ERRORS, Floats
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.variables import Variables

_MAX_EXPONENT_FRACTION = 0.25
"""Largest exponent of d relative to the largest one of its type: products of squares of d remain finite."""
ROUNDED_EXPONENT = 0.5
"""Largest distance of a binary exponent from its rounded value: a column norm that exceeds 2^exponent by the factor
2^0.5 has a larger exponent."""


def exponent_limit(largest: float) -> float:
    """Return the largest binary exponent of d, given the largest finite number of its type."""
    return _MAX_EXPONENT_FRACTION * math.frexp(largest)[1]


@dataclass(frozen=True, eq=False)
class ColumnScales:
    """The scales d of variables whose columns of the Jacobian have norms near 1.

    Attributes
    ----------
    exponents : ndarray
        The binary exponents of the column norms: d_j = 2^−exponent; −∞ for a column that was always zero, with d_j = 1.
    dtype : dtype
        The type of x.
    is_uniform : bool
        Whether all variables have one scale. The parameters of a network do, and keep their proportions: the exponent
        is that of the largest norm. Separate ones would lengthen steps of parameters that have little effect, as the
        parameters of saturated units.
    """

    exponents: Floats
    dtype: Any
    is_uniform: bool

    @cached_property
    def limits(self) -> Floats:
        """The column norms above which the exponents increase."""
        limits: Floats = np.exp2(self.exponents + ROUNDED_EXPONENT)
        return limits

    def variables(self) -> Variables:
        """Return the variables x/d."""
        limit = exponent_limit(float(np.finfo(self.dtype).max))
        powers = np.clip(np.where(np.isfinite(self.exponents), -self.exponents, 0.0), -limit, limit)
        return Variables(np.exp2(powers).astype(self.dtype))

    def at_least(self, evaluation: ResidualEvaluation) -> ColumnScales:
        """Return scales with the larger exponents, these or those of the columns at a point."""
        return replace(self, exponents=np.maximum(self.exponents, self._exponents_of(evaluation)))

    def at(self, evaluation: ResidualEvaluation) -> ColumnScales:
        """Return the scales of the columns at a point; these remain for variables without an effect."""
        exponents = self._exponents_of(evaluation)
        eps = float(np.finfo(self.dtype).eps)
        threshold = ROUNDING_ERRORS * eps * float(np.linalg.norm(evaluation.terms.weighted))
        effects = evaluation.column_norms() * np.abs(evaluation.x)  # of relative changes of the variables
        has_effect = np.isfinite(exponents) & (effects >= threshold)
        return replace(self, exponents=np.where(has_effect, exponents, self.exponents))

    def _exponents_of(self, evaluation: ResidualEvaluation) -> Floats:
        """Return the binary exponents of the column norms of the Jacobian; −∞ for a zero column."""
        with np.errstate(divide="ignore"):
            norms = evaluation.column_norms()
            if self.is_uniform:
                norms = np.full_like(norms, norms.max())
            return np.where(np.isfinite(norms), np.round(np.log2(norms)), -math.inf)
