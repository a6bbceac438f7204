"""Products with the whole Hessian of a least-squares cost, and its matrix for few variables."""

from __future__ import annotations

from typing import Any

import numpy as np

from sanc.core.space import Floats
from sanc.functions.oracle import CallableOperator, CallableOracle
from sanc.leastsquares.decompositions import WholeHessian
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.evaluation_cache import EvaluationCache

_MAX_MATRIX_VARIABLES = 10
"""Largest number of variables whose whole Hessian is formed from its columns: a probe makes as many products."""


class WholeOperator(CallableOperator):
    """The whole Hessian. Without automatic differentiation only the second-order term is differenced.

    Parameters
    ----------
    oracle : CallableOracle
        Counts the products, and has the bounds and the steps of differences.
    cache : EvaluationCache
        The evaluations of the residuals.
    z : vector
        The point.
    """

    def __init__(self, oracle: CallableOracle, cache: EvaluationCache, z: Any) -> None:
        super().__init__(oracle, z)
        self.cache = cache

    def columns(self) -> WholeHessian | None:
        """Return the matrix, computed once, and the error of its products; None if there are many variables."""
        evaluation = self.cache.with_jacobian(self.x)
        if not evaluation.is_dense or len(evaluation.x) > _MAX_MATRIX_VARIABLES:
            return None
        return self.cache.whole_hessian.get((evaluation,), self._form_columns)

    def _form_columns(self) -> WholeHessian:
        """Form the matrix from its products with the columns of the identity."""
        o, variables = self.oracle, self.cache.variables
        identity = np.eye(o.space.dim, dtype=o.space.dtype)
        if self.cache.residuals.is_automatic:
            return WholeHessian(np.array([self._automatic_product(e) for e in identity], np.float64).T, 0.0)
        evaluation, h = self.cache.with_jacobian(self.x), self.step()
        scaled, weights = variables.columns(evaluation.jacobian), evaluation.terms.weights
        first = scaled.T @ (scaled if weights is None else weights[:, None] * scaled)
        second = np.array([self._second_order(evaluation, e, h) for e in identity]).T
        v = np.cos(np.arange(o.space.dim)).astype(o.space.dtype)  # a vector without zeros, and not of equal entries
        v /= o.space.norm(v)
        doubled = self._second_order(evaluation, v, 2.0 * h)
        return WholeHessian((first + second).astype(np.float64), self.estimated_error(v, doubled, second @ v))

    def uncounted_product(self, v: Any) -> Any:
        whole = self.columns()
        if whole is not None:
            return (whole.matrix @ v).astype(self.oracle.space.dtype, copy=False)
        if self.cache.residuals.is_automatic:
            return self._automatic_product(v).astype(self.oracle.space.dtype, copy=False)
        return self.difference(v, 1.0)

    def _automatic_product(self, v: Any) -> Floats:
        """Return the product of automatic differentiation."""
        cache, evaluation = self.cache, self.cache.with_jacobian(self.x)
        second_order_product = cache.second_order.get(
            (evaluation,), lambda: cache.residuals.second_order_product(evaluation.x, evaluation.terms.weighted)
        )
        step = cache.variables.original(v)
        product: Floats = evaluation.first_order_product(step) + second_order_product(step)
        return cache.variables.gradient(product)  # type: ignore[no-any-return]

    def difference(self, v: Any, factor: float) -> Any:
        """Return Jᵀ diag(h) J v + Σ w_i ∇²r_i v, the latter by differences."""
        o, variables = self.oracle, self.cache.variables
        norm = o.space.norm(v)
        if norm == 0.0:
            return o.space.zeros()
        evaluation = self.cache.with_jacobian(self.x)
        product = variables.gradient(evaluation.first_order_product(variables.original(v)))
        second = self._second_order(evaluation, v, factor * self.step() / norm)
        return (product + second).astype(o.space.dtype, copy=False)

    def _second_order(self, evaluation: ResidualEvaluation, v: Any, h: float) -> Any:
        """Return Σ w_i ∇²r_i v by the difference of Jᵀw along hv, with the weights at x and points in the bounds."""
        o, w = self.oracle, evaluation.terms.weighted
        if o.box is None:
            return (self._weighted_columns(self.x + h * v, w) - self._weighted_columns(self.x - h * v, w)) * (0.5 / h)
        x, second = o.space.tensor(self.x), o.space.zeros()
        for weight, point in o.box.difference_points(x, o.space.tensor(h * v)):
            at_point = o.gradient(self.x)[1] if point is x else self._weighted_columns(o.space.vector(point), w)
            second = second + at_point * (weight / h)
        return second

    def _weighted_columns(self, z: Any, w: Floats) -> Any:
        """Return Jᵀw, in scaled variables, with the Jacobian at a point of a difference, which is not cached."""
        residuals, x = self.cache.residuals, self.cache.variables.original(z)
        r = residuals(x) if residuals.is_differenced else w  # a Jacobian of the caller uses the size alone
        return self.cache.variables.gradient(residuals.jacobian(x, r).T @ w)

    def error(self, v: Any, product: Any) -> float:
        whole = self.columns()
        return super().error(v, product) if whole is None else whole.error * self.oracle.space.norm(v)
