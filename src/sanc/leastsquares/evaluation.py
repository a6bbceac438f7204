"""The residuals at one point, and what follows from them and their Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.space import Floats
from sanc.leastsquares.losses import LossTerms
from sanc.leastsquares.matrices import JacobianMatrix

_RANDOM_SIGNS = 8
"""Random vectors of signs that estimate the column norms of an operator, to about 1/√(2·8) = 25 %."""


@dataclass(eq=False)
class ResidualEvaluation:
    """Residuals and, once it was needed, the Jacobian at one point.

    Attributes
    ----------
    x : ndarray
        The point, in the variables of the caller.
    r : ndarray
        The residuals.
    terms : LossTerms
        The cost, and the derivatives of the loss.
    jacobian : ndarray, sparse matrix, LinearOperator or None
        The Jacobian; None before it was needed, and after a large one was deleted.
    norms : ndarray or None
        The column norms of the Jacobian, once they were needed.
    scaled_gradient : tuple
        The last variables in which the gradient was needed, and the gradient in them.
    """

    x: Floats
    r: Floats
    terms: LossTerms
    jacobian: Any = None
    norms: Any = None
    scaled_gradient: tuple[Any, Any] = (None, None)
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
        return self._weighted_product(v, self.model_weights())

    def first_order_product(self, v: Floats) -> Floats:
        """Return Jᵀ diag(h) J v with h of both signs: the Hessian product without the second-order term."""
        return self._weighted_product(v, self.terms.weights)

    def _weighted_product(self, v: Floats, weights: Floats | None) -> Floats:
        """Return Jᵀ diag(weights) J v."""
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
                for _ in range(_RANDOM_SIGNS):
                    squares += np.square(self.transposed(rng.choice([-1.0, 1.0], len(self.r)).astype(self.r.dtype)))
                squares /= _RANDOM_SIGNS
            self.norms = np.sqrt(squares)
        norms: Floats = self.norms
        return norms

    def model_weights(self) -> Floats | None:
        """Return h, without negative entries, with which the Gauss–Newton matrix is positive semidefinite."""
        return None if self.terms.weights is None else np.maximum(self.terms.weights, 0.0)
