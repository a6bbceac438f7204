"""The cost of a least-squares problem as an oracle: its value, its gradient Jᵀw and its curvature.

The vectors of the run are z = x/d. Each d_j is a power of two near 1/‖J_j‖, the inverse norm of a column of the
Jacobian, so that scaling changes no digit, and the cubic model measures steps in units in which all variables have
the same effect on the residuals. With a preconditioner M = LLᵀ of the caller they are z = L⁻¹x. The model has the
curvature Jᵀ diag(h) J of Gauss and Newton. The second-order term S = Σ w_i ∇²r_i is added if measurement shows that it
improves the model (`sanc.leastsquares.second_order_term`). Certificates, and steps away from saddles, have the whole
Hessian.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from sanc.core.bounded.bounds import Box
from sanc.core.meter import Meter
from sanc.core.oracle import Eigenbasis, Operator, Oracle, WrappedOracle
from sanc.core.space import ROUNDING_ERRORS, Floats
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.functions.oracle import CallableOracle
from sanc.leastsquares.decompositions import WholeHessian, decompose, whole_eigenbasis
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.evaluation_cache import EvaluationCache
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.residuals import Residuals
from sanc.leastsquares.second_order_term import SecondOrderTerm
from sanc.leastsquares.variables import Variables
from sanc.leastsquares.whole_hessian import WholeOperator

_OFFSET_FACTOR, _MAX_OFFSET = 30.0, 3e-7
"""Tolerance on the offset, relative to that on the gradient norm, and its largest value, relative to ‖w‖.

The cost then exceeds its minimum by 1e-13, relatively. Of the factors 10, 30 and 100 it is the largest with which the
parameters of the fits of NIST of lower difficulty have six digits.
"""


class ResidualOracle(CallableOracle):
    """Evaluates ½C²Σφ((r/C)²) in the variables of a run, with the Hessian of the model.

    Attributes
    ----------
    residuals : Residuals
        The functions of the caller.
    tol : float
        Tolerance on ‖∇f‖/‖w‖; see `tolerance`.
    relative_gradient_error : float or None
        Relative error of the Jacobian, and so of gradients; None: the machine precision.
    has_user_gradient, hvp
        As in `Oracle`.
    cache : EvaluationCache
        The evaluations at the last few points, in the variables of the run.
    term : SecondOrderTerm
        The estimate of S, and whether the model has it.
    """

    def __init__(self, residuals: Residuals, x0: Floats, loss: Loss, tol: float) -> None:
        self.residuals, self.tol = residuals, tol  # before the counters, which are those of the residuals
        super().__init__(residuals, x0, jac=residuals, meter=residuals.meter)
        self.relative_gradient_error = residuals.relative_jacobian_error(self.space.eps)
        self.has_user_gradient = callable(residuals.jac)
        if residuals.is_automatic:
            self.hvp = "double-backward"
        self.cache = EvaluationCache(residuals, loss, Variables(np.ones(len(x0), x0.dtype)))
        self.term = SecondOrderTerm.unknown(len(x0), residuals.network is None)

    # The counters count calls of the functions of the caller.

    @property
    def meter(self) -> Meter:
        """The counters."""
        return self.residuals.meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        self.residuals.meter = meter

    @property
    def differenced_products(self) -> bool:
        return not self.residuals.is_automatic

    # Points.

    @property
    def variables(self) -> Variables:
        """The variables z of the run."""
        return self.cache.variables

    @property
    def scale(self) -> Any:
        """The scales d of the variables, if A is diagonal."""
        assert self.variables.is_diagonal
        return self.variables.matrix

    def in_variables(self, variables: Variables) -> ResidualOracle:
        """Return the oracle in other variables, with the evaluations of this one; a box is that of scaled variables."""
        old, other = self.variables, copy(self)
        other.cache = self.cache.in_variables(variables)
        other.term = self.term.in_variables(old, variables)
        if self.box is not None:
            ratio = self.box.lower.new_tensor(self.scale / other.scale)
            other.box = Box(self.box.lower * ratio, self.box.upper * ratio)
        return other

    def unscaled(self, z: Any) -> Any:
        """Return the caller's variables x = Az of a point or step z."""
        return self.variables.original(z)

    def scaled(self, x: Any) -> Any:
        """Return the run's variables z = A⁻¹x of a point or step x."""
        return self.variables.from_original(x)

    def evaluation(self, z: Any) -> ResidualEvaluation:
        """Return the residuals at a point, evaluated once."""
        return self.cache.evaluation(z)

    def with_jacobian(self, z: Any) -> ResidualEvaluation:
        """Return the residuals and the Jacobian at a point."""
        return self.cache.with_jacobian(z)

    def is_cached(self, z: Any) -> tuple[bool, bool]:
        return (True, self.evaluation(z).jacobian is not None) if z in self.cache else (False, False)

    # Values, gradients and products in the variables of the run.

    def value(self, z: Any) -> float:
        return self.evaluation(z).terms.cost

    def gradient(self, z: Any) -> tuple[float, Any]:
        evaluation = self.with_jacobian(z)
        return evaluation.terms.cost, self._gradient(evaluation)

    def _gradient(self, evaluation: ResidualEvaluation) -> Any:
        """Return the gradient, the same object for the same point."""
        variables, g = evaluation.scaled_gradient
        if variables is not self.variables:
            g = self.variables.gradient(evaluation.gradient()).astype(self.space.dtype, copy=False)
            evaluation.scaled_gradient = self.variables, g
        return g

    def hessian(self, z: Any) -> Operator:
        return _ModelOperator(self, z)

    def eigenbasis(self, z: Any, free_indices: Any = None) -> Eigenbasis | None:
        evaluation = self.with_jacobian(z)
        return self._model(evaluation, free_indices)[0] if evaluation.is_dense else None

    def _model(self, evaluation: ResidualEvaluation, free_indices: Any) -> tuple[Eigenbasis, float]:
        """Return the eigenbasis of the model at a point, and its offset, computed once."""
        return self.cache.model.get(
            (evaluation, self.term, None if free_indices is None else free_indices.tobytes()),
            lambda: decompose(evaluation, self.variables, self.term, free_indices),
        )

    def whole_operator(self, z: Any) -> WholeOperator:
        """Return the whole Hessian at a point."""
        return WholeOperator(self, self.cache, z)

    def whole_matrix(self, z: Any) -> WholeHessian | None:
        """Return the whole Hessian as a matrix, and the error of its products; None if there are many variables."""
        return self.whole_operator(z).columns()

    def update_term(self, before: ResidualEvaluation, after: ResidualEvaluation) -> None:
        """Measure the step between two points, and decide whether the next model has the second-order term."""
        self.term = self.term.updated(before, after, self.variables)

    # Tolerances.

    def offset_tolerance(self, z: Any, free_indices: Any) -> float:
        """Return a tolerance on ‖∇f‖ at a point from which the model predicts no worthwhile decrease; elsewhere 0.

        The model predicts a decrease of ½ offset², where the offset is the norm of the projection of the residuals on
        the range of the Jacobian. Its ratio to the residuals is the criterion of Bates and Watts (1981). Unlike the
        gradient norm, it does not depend on how close the columns of the Jacobian are to each other.
        """
        evaluation = self.with_jacobian(z)
        if not evaluation.is_dense:
            return 0.0
        factor = min(_OFFSET_FACTOR, max(1.0, _MAX_OFFSET / self.tol)) if self.tol > 0.0 else 1.0
        largest = factor * self.tolerance(z)
        try:
            basis, offset = self._model(evaluation, free_indices)
        except NonFiniteProductError:
            return 0.0
        # ‖∇f‖ is at most ‖J‖ times the offset; in column variables ‖J‖² is at most 2n.
        norm = 2.0 * len(evaluation.x) if self.variables.is_preconditioned else max(float(basis.values[-1]), 0.0)
        return math.sqrt(norm) * largest if offset <= largest else 0.0

    def tolerance(self, z: Any) -> float:
        """Return the tolerance on ‖∇f‖ in scaled variables: `tol` ‖w‖, or the rounding error if that is larger.

        Columns of unit norm make ‖∇f‖/‖w‖ a root of squared cosines between residuals and columns, as in MINPACK.
        Rounding x by eps changes the residuals by up to eps Σ ‖J_j‖|x_j|.
        """
        weighted, effect = self.with_jacobian(z).sizes()
        rounding = ROUNDING_ERRORS * self.space.eps * effect
        return self.tol * weighted + (rounding if math.isfinite(rounding) else 0.0)

    def curvature_tolerance(self, z: Any) -> float:
        """Return the largest −λ_min of a solution in scaled variables, in which columns of the Jacobian have norm 1.

        Only the second-order term has negative curvature. It is about ‖w‖/‖z‖ if the columns change by their
        norms over a distance ‖z‖. It is tested to √tol of that, or to `tol` if the residuals are small.
        """
        weighted, norm = self.with_jacobian(z).sizes()
        return max(self.tol, math.sqrt(self.tol) * (min(1.0, weighted / norm) if norm > 0.0 else 1.0))


class _ModelOperator(Operator):
    """The curvature of the model: Gauss–Newton, with the estimate of S if the model has it."""

    def __init__(self, oracle: ResidualOracle, z: Any) -> None:
        self.oracle, self.z = oracle, z

    def __call__(self, v: Any) -> Any:
        oracle = self.oracle
        oracle.meter.count_product(1)
        evaluation = oracle.with_jacobian(self.z)
        if oracle.term.is_used and not oracle.term.is_estimated:
            return oracle.whole_operator(self.z).uncounted_product(v)
        product = oracle.variables.gradient(evaluation.gauss_newton_product(oracle.unscaled(v)))
        if oracle.term.is_used:
            product = product + oracle.term.matrix @ v
        return product.astype(oracle.space.dtype, copy=False)

    def gradient(self) -> Any:
        return self.oracle.gradient(self.z)[1] * 1.0


class WholeHessianOracle(WrappedOracle):
    """The cost of `inner` with its whole Hessian: at stationary points, which may be saddles, and in certificates."""

    inner: ResidualOracle

    def __init__(self, inner: ResidualOracle) -> None:
        super().__init__(inner, inner.space)
        self.box = inner.box

    def hessian(self, z: Any) -> Operator:
        return self.inner.whole_operator(z)

    def eigenbasis(self, z: Any, free_indices: Any = None) -> Eigenbasis | None:
        if not self.inner.with_jacobian(z).is_dense:
            return None
        operator = self.inner.whole_operator(z)
        return whole_eigenbasis(operator, operator.columns(), self.inner.gradient(z)[1], free_indices)

    def value(self, z: Any) -> float:
        return self.inner.value(z)

    def gradient_sample_value(self, z: Any) -> float:
        return self.inner.gradient_sample_value(z)

    def gradient(self, z: Any) -> tuple[float, Any]:
        return self.inner.gradient(z)

    def is_cached(self, z: Any) -> tuple[bool, bool]:
        return self.inner.is_cached(z)

    def gradient_error(self, z: Any) -> float:
        return self.inner.gradient_error(z)

    def truncation_error(self, z: Any) -> Any:
        return self.inner.truncation_error(z)


def residual_oracle(oracle: Oracle) -> ResidualOracle:
    """Return the oracle of the residuals, given the oracle of a run."""
    objective = oracle.full_oracle.unscaled_oracle
    objective = objective.inner if isinstance(objective, WholeHessianOracle) else objective
    assert isinstance(objective, ResidualOracle)
    return objective


def has_whole_hessian(oracle: Oracle) -> bool:
    """Return whether the oracle of a run has the whole Hessian."""
    return isinstance(oracle.full_oracle.unscaled_oracle, WholeHessianOracle)
