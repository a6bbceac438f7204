"""The residuals at one point, and what follows from them and their Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.space import Floats
from sanc.leastsquares.losses import LossTerms
from sanc.leastsquares.matrices import JacobianMatrix

_RANDOM_PROBES = 8
"""Random vectors that estimate the column norms of an operator, to about 1/√(2·8) = 25 %."""


@dataclass
class ResidualEvaluation:
    """Residuals and, once it was needed, the Jacobian at one point."""

    x: Floats
    r: Floats
    terms: LossTerms
    jacobian: Any = None
    norms: Any = None
    scaled_gradient: tuple[Any, Any] = (None, None)  # variables, and the gradient with respect to them
    _gradient: Any = None
    _sizes: tuple[float, float] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the Jacobian is a matrix."""
        return isinstance(self.jacobian, np.ndarray)

    def gradient(self) -> Floats:
        """Return Jᵀw; it is not to be changed."""
        if self._gradient is None:
            self._gradient = self.transposed(self.terms.weighted)
        gradient: Floats = self._gradient
        return gradient

    def sizes(self) -> tuple[float, float]:
        """Return ‖w‖, and the norm of the entries ‖J_j‖|x_j|, the effects of relative changes of the variables."""
        if self._sizes is None:
            effects = self.column_norms() * self.x
            self._sizes = float(np.linalg.norm(self.terms.weighted)), float(np.linalg.norm(effects))
        return self._sizes

    def transposed(self, w: Floats) -> Floats:
        """Return Jᵀw of any w."""
        product: Floats = self.jacobian.T @ w
        return product

    def gauss_newton_form(self, v: Floats) -> float:
        """Return vᵀJᵀ diag(h) J v, with h ≥ 0."""
        weights, change = self.model_weights(), self.jacobian @ v
        return float(change @ (change if weights is None else weights * change))

    def gauss_newton_product(self, v: Floats) -> Floats:
        """Return Jᵀ diag(h) J v, with h ≥ 0."""
        weights = self.model_weights()
        change = self.jacobian @ v
        return self.transposed(change if weights is None else weights * change)

    def column_norms(self) -> Floats:
        """Return the column norms of the Jacobian; for an operator they are estimated."""
        if self.norms is None:
            jacobian = self.jacobian
            if self.is_dense:
                squares = np.einsum("ij,ij->j", jacobian, jacobian, dtype=np.float64)
            elif isinstance(jacobian, JacobianMatrix):
                squares = np.square(jacobian.column_norms())
            elif hasattr(jacobian, "multiply"):
                squares = np.asarray(jacobian.multiply(jacobian).sum(axis=0), np.float64).reshape(-1)
            else:
                rng, squares = np.random.default_rng(0), np.zeros(len(self.x))
                for _ in range(_RANDOM_PROBES):
                    squares += np.square(self.transposed(rng.choice([-1.0, 1.0], len(self.r)).astype(self.r.dtype)))
                squares /= _RANDOM_PROBES
            self.norms = np.sqrt(squares)
        norms: Floats = self.norms
        return norms

    def model_weights(self) -> Floats | None:
        """Return h, without negative entries, with which the Gauss–Newton matrix is positive semidefinite."""
        return None if self.terms.weights is None else np.maximum(self.terms.weights, 0.0)
