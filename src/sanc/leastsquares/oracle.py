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
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from sanc.core.bounded.bounds import Box
from sanc.core.caching import MAX_CACHED_POINTS, RecentCache
from sanc.core.meter import Meter
from sanc.core.oracle import Eigenbasis, Operator
from sanc.core.space import ROUNDING_ERRORS, Floats
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.functions.oracle import CallableOperator, CallableOracle
from sanc.leastsquares.decompositions import decompose, whole_eigenbasis
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.matrices import JacobianMatrix
from sanc.leastsquares.residuals import Residuals
from sanc.leastsquares.second_order_term import SecondOrderTerm
from sanc.leastsquares.variables import ROUNDED_EXPONENT, Variables, exponent_limit

_OFFSET_FACTOR, _MAX_OFFSET = 30.0, 3e-7
"""Tolerance on the offset, relative to that on the gradient norm, and its largest value, relative to ‖w‖.

The cost then exceeds its minimum by 1e-13, relatively. Of the factors 10, 30 and 100 it is the largest with which the
parameters of the fits of NIST of lower difficulty have six digits.
"""
_MAX_MATRIX_VARIABLES = 10
"""Largest number of variables whose whole Hessian is formed from its columns: a probe makes as many products."""


class ResidualOracle(CallableOracle):
    """Evaluates ½C²Σφ((r/C)²) in scaled variables.

    Attributes
    ----------
    residuals : Residuals
        The functions of the caller.
    loss : Loss
        φ and C.
    tol : float
        Tolerance on ‖∇f‖/‖w‖; see `tolerance`.
    noise : float or None
        Relative error of the Jacobian; None: the machine precision.
    has_user_gradient, hvp
        As in `Oracle`.
    hessp : callable or None
        Returns products with the whole Hessian, if torch differentiates the residuals.
    exponents : ndarray
        Binary exponents: d_j = 2^−exponent; −∞ for a column that was always zero, with d_j = 1.
    variables : Variables
        z, the vectors of the run.
    is_preconditioned : bool
        Whether these are fixed by a preconditioner.
    column_limits : ndarray
        Column norms of the Jacobian above which `exponents` increase.
    term : SecondOrderTerm
        The estimate of S, and whether the model has it.
    uses_whole_hessian : bool
        Whether `hessian` has the whole second-order term, and not the model of it: at stationary points, which may be
        saddles, and in certificates. The run sets it before each iteration.
    """

    def __init__(self, residuals: Residuals, x0: Floats, loss: Loss, tol: float) -> None:
        super().__init__(residuals, x0, jac=residuals)
        self.residuals, self.loss, self.tol = residuals, loss, tol
        self.noise = residuals.noise(self.space.eps)
        self.has_user_gradient = callable(residuals.jac)
        if residuals.is_automatic:
            self.hessp = self._whole_product
            self.hvp = "double-backward"
        self.exponents = np.full(len(x0), -math.inf)
        self.variables = Variables(np.ones(len(x0), x0.dtype))
        self.is_preconditioned = False
        self.column_limits: Any = np.zeros(len(x0))
        self.term = SecondOrderTerm(len(x0), residuals.network is None)
        self.uses_whole_hessian = False
        # By content, for equal points in different vectors; by identity, which takes less time.
        self._by_content: dict[bytes, ResidualEvaluation] = {}
        self._by_vector: RecentCache[ResidualEvaluation] = RecentCache(MAX_CACHED_POINTS)
        self._last_lookup: tuple[Any, Any] = None, None  # the last point of a call, and its evaluation
        self._model_basis: tuple[ResidualEvaluation, Any, Eigenbasis, float] | None = None
        self._second_order_product: tuple[ResidualEvaluation, Any] | None = None
        self._whole_matrix: tuple[ResidualEvaluation, Any, Floats, float] | None = None

    # The counters count calls of the functions of the caller.

    @property
    def meter(self) -> Meter:
        """The counters."""
        return self.residuals.meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        if hasattr(self, "residuals"):
            self.residuals.meter = meter

    # Points.

    @property
    def scale(self) -> Any:
        """The scales d of the variables, if A is diagonal."""
        assert self.variables.is_diagonal
        return self.variables.matrix

    def unscaled(self, z: Any) -> Any:
        """Return the caller's variables x = Az of a point or step z."""
        return self.variables.original(z)

    def scaled(self, x: Any) -> Any:
        """Return the run's variables z = A⁻¹x of a point or step x."""
        return self.variables.from_original(x)

    def evaluation(self, z: Any) -> ResidualEvaluation:
        """Return the residuals at a point, evaluated once."""
        if self._last_lookup[0] is not z:
            self._last_lookup = z, self._by_vector.get(z, self._evaluate_once)
        evaluation: ResidualEvaluation = self._last_lookup[1]
        return evaluation

    def _evaluate_once(self, z: Any) -> ResidualEvaluation:
        """Return the evaluation at an equal point, or a new one."""
        x = self.unscaled(z)
        key = x.tobytes()
        evaluation = self._by_content.pop(key, None) or self._evaluate_residuals(x)
        self._by_content[key] = evaluation
        while len(self._by_content) > MAX_CACHED_POINTS:
            del self._by_content[next(iter(self._by_content))]
        return evaluation

    def _evaluate_residuals(self, x: Floats) -> ResidualEvaluation:
        """Evaluate the residuals and their loss."""
        r = self.residuals(x)
        return ResidualEvaluation(x, r, self.loss(r))

    def with_jacobian(self, z: Any) -> ResidualEvaluation:
        """Return the residuals and the Jacobian at a point."""
        evaluation = self.evaluation(z)
        if evaluation.jacobian is None:
            for other in self._by_content.values():
                if isinstance(other.jacobian, JacobianMatrix):  # a large one; its gradient stays cached
                    other.jacobian = None
            evaluation.jacobian = self.residuals.jacobian(evaluation.x, evaluation.r)
        return evaluation

    # Values, gradients and products in scaled variables.

    def value(self, z: Any) -> float:
        return self.evaluation(z).terms.cost

    def gradient(self, z: Any) -> tuple[float, Any]:
        evaluation = self.with_jacobian(z)
        return evaluation.terms.cost, self._scaled_gradient(evaluation)

    def _scaled_gradient(self, evaluation: ResidualEvaluation) -> Any:
        """Return the gradient, the same object for the same point."""
        variables, g = evaluation.scaled_gradient
        if variables is not self.variables:
            g = self.variables.gradient(evaluation.gradient()).astype(self.space.dtype, copy=False)
            evaluation.scaled_gradient = self.variables, g
        return g

    def is_cached(self, z: Any) -> tuple[bool, bool]:
        if z is not self._last_lookup[0] and z not in self._by_vector:
            return False, False
        return True, self.evaluation(z).jacobian is not None

    def hessian(self, z: Any) -> Operator:
        return _WholeOperator(self, z) if self.uses_whole_hessian else _ModelOperator(self, z)

    @contextmanager
    def whole_hessian(self) -> Iterator[None]:
        """Return a context in which `hessian` has the whole second-order term."""
        before = self.uses_whole_hessian
        self.uses_whole_hessian = True
        try:
            yield
        finally:
            self.uses_whole_hessian = before

    def weighted_columns(self, z: Any, w: Floats) -> Any:
        """Return Jᵀw, in scaled variables, with the Jacobian at a point of a difference, which is not cached."""
        x = self.unscaled(z)
        r = self.residuals(x) if self.residuals.is_differenced else w  # a Jacobian of the caller uses the size alone
        return self.variables.gradient(self.residuals.jacobian(x, r).T @ w)

    def whole_matrix(self, z: Any) -> tuple[Floats, float] | None:
        """Return the whole Hessian and the error of its products; None if there are many variables."""
        evaluation = self.with_jacobian(z)
        if not evaluation.is_dense or len(evaluation.x) > _MAX_MATRIX_VARIABLES:
            return None
        if (
            self._whole_matrix is None
            or self._whole_matrix[0] is not evaluation
            or self._whole_matrix[1] is not self.variables
        ):
            self._whole_matrix = evaluation, self.variables, *_WholeOperator(self, z).columns()
        return self._whole_matrix[2:]

    def eigenbasis(self, z: Any, free_indices: Any = None) -> Eigenbasis | None:
        evaluation = self.with_jacobian(z)
        if not evaluation.is_dense:
            return None
        if self.uses_whole_hessian:
            known = self.whole_matrix(z)
            matrix = None if known is None else known[0]
            return whole_eigenbasis(self.hessian(z), matrix, self._scaled_gradient(evaluation), free_indices)
        return self._model(evaluation, free_indices)[0]

    def _model(self, evaluation: ResidualEvaluation, free_indices: Any) -> tuple[Eigenbasis, float]:
        """Return the eigenbasis of the model at a point, and its offset, computed once."""
        key = None if free_indices is None else free_indices.tobytes()
        if self._model_basis is None or self._model_basis[0] is not evaluation or self._model_basis[1] != key:
            self._model_basis = evaluation, key, *decompose(evaluation, self.variables, self.term, free_indices)
        return self._model_basis[2:]

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
        norm = 2.0 * len(evaluation.x) if self.is_preconditioned else max(float(basis.values[-1]), 0.0)
        return math.sqrt(norm) * largest if offset <= largest else 0.0

    def update_term(self, before: ResidualEvaluation, after: ResidualEvaluation) -> None:
        """Measure the step between two points, and decide whether the next model has the second-order term."""
        self.term.update(before, after, self.variables)
        self._model_basis = None

    def _whole_product(self, z: Any, v: Any) -> Floats:
        """Return the product with the whole Hessian, of automatic differentiation."""
        evaluation = self.with_jacobian(z)
        if self._second_order_product is None or self._second_order_product[0] is not evaluation:
            self._second_order_product = (
                evaluation,
                self.residuals.second_order_product(evaluation.x, evaluation.terms.weighted),
            )
        moved = self.unscaled(v)
        change = evaluation.jacobian @ moved
        weights = evaluation.terms.weights
        product = evaluation.transposed(change if weights is None else weights * change) + self._second_order_product[
            1
        ](moved)
        return self.variables.gradient(product)  # type: ignore[no-any-return]

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

    # Scaling.

    def column_exponents(self, evaluation: ResidualEvaluation) -> Floats:
        """Return the binary exponents of the column norms of the Jacobian; −∞ for a zero column.

        The parameters of a network have one unit, and keep their proportions: the exponent is that of the largest norm.
        Separate ones would lengthen steps of parameters that have little effect, as the parameters of saturated units.
        """
        with np.errstate(divide="ignore"):
            norms = evaluation.column_norms()
            if self.residuals.network is not None:
                norms = np.full_like(norms, norms.max())
            return np.where(np.isfinite(norms), np.round(np.log2(norms)), -math.inf)

    def final_exponents(self, evaluation: ResidualEvaluation) -> Floats:
        """Return the exponents of the columns at a point; for variables without an effect, the largest so far."""
        now = self.column_exponents(evaluation)
        threshold = ROUNDING_ERRORS * self.space.eps * float(np.linalg.norm(evaluation.terms.weighted))
        effects = evaluation.column_norms() * np.abs(evaluation.x)  # of relative changes of the variables
        return np.where(np.isfinite(now) & (effects >= threshold), now, self.exponents)

    def precondition(self, factor: Floats) -> None:
        """Use the variables z = L⁻¹x of a preconditioner LLᵀ from now on; `factor` is L, or its diagonal."""
        self.variables, self.is_preconditioned = Variables(factor), True

    def column_variables(self, evaluation: ResidualEvaluation) -> Variables:
        """Return the variables in which gradient and curvature of a point are tested; the run may have others."""
        return Variables(self._scale_of(self.final_exponents(evaluation)))

    def in_columns(self, z: Any) -> tuple[ResidualOracle, Any]:
        """Return this oracle in the variables of `column_variables` at a point, and the point in them."""
        evaluation, oracle = self.with_jacobian(z), copy(self)
        oracle.variables = self.column_variables(evaluation)
        oracle._by_vector, oracle._last_lookup, oracle._model_basis = (
            RecentCache(MAX_CACHED_POINTS),
            (None, None),
            None,
        )
        if oracle.hessp is not None:
            oracle.hessp = oracle._whole_product
        return oracle, oracle.scaled(evaluation.x)

    def _scale_of(self, exponents: Floats) -> Floats:
        """Return d of binary exponents of column norms."""
        limit = exponent_limit(float(np.finfo(self.space.dtype).max))
        powers = np.clip(np.where(np.isfinite(exponents), -exponents, 0.0), -limit, limit)
        scale: Floats = np.exp2(powers).astype(self.space.dtype)
        return scale

    def rescale(self, exponents: Floats, box: Box | None) -> Box | None:
        """Change d, and return the box of the new variables; cached evaluations stay valid."""
        self.exponents = exponents
        old, self.variables = self.scale, Variables(self._scale_of(exponents))
        self.column_limits = np.exp2(exponents + ROUNDED_EXPONENT)
        self.term.rescale(self.scale / old)
        self._by_vector.clear()
        self._last_lookup = None, None
        self._model_basis = None
        if box is None:
            return None
        ratio = box.lower.new_tensor(old / self.scale)
        self.box = scaled = Box(box.lower * ratio, box.upper * ratio)
        return scaled


class _ModelOperator(Operator):
    """The curvature of the model: Gauss–Newton, with the estimate of S if the model has it."""

    def __init__(self, oracle: ResidualOracle, z: Any) -> None:
        self.oracle, self.z = oracle, z

    def __call__(self, v: Any) -> Any:
        oracle = self.oracle
        oracle.meter.count_product(1)
        evaluation = oracle.with_jacobian(self.z)
        if oracle.term.is_used and not oracle.term.is_estimated:
            return _WholeOperator(oracle, self.z).uncounted_product(v)
        product = oracle.variables.gradient(evaluation.gauss_newton_product(oracle.unscaled(v)))
        if oracle.term.is_used:
            product = product + oracle.term.matrix @ v
        return product.astype(oracle.space.dtype, copy=False)

    def gradient(self) -> Any:
        return self.oracle.gradient(self.z)[1] * 1.0


class _WholeOperator(CallableOperator):
    """The whole Hessian. Without automatic differentiation only the second-order term is differenced."""

    oracle: ResidualOracle

    def uncounted_product(self, v: Any) -> Any:
        known = self.oracle.whole_matrix(self.x)
        if known is None:
            return super().uncounted_product(v)
        return (known[0] @ v).astype(self.oracle.space.dtype, copy=False)

    def difference(self, v: Any, factor: float) -> Any:
        """Return Jᵀ diag(h) J v + Σ w_i ∇²r_i v, the latter by differences."""
        o = self.oracle
        norm = o.space.norm(v)
        if norm == 0.0:
            return o.space.zeros()
        evaluation = o.with_jacobian(self.x)
        change, weights = evaluation.jacobian @ o.unscaled(v), evaluation.terms.weights
        product = o.variables.gradient(evaluation.transposed(change if weights is None else weights * change))
        second = self._second_order(evaluation, v, factor * self.step() / norm)
        return (product + second).astype(o.space.dtype, copy=False)

    def _second_order(self, evaluation: ResidualEvaluation, v: Any, h: float) -> Any:
        """Return Σ w_i ∇²r_i v by the difference of Jᵀw along hv, with the weights at x and points in the bounds."""
        o, w = self.oracle, evaluation.terms.weighted
        if o.box is None:
            return (o.weighted_columns(self.x + h * v, w) - o.weighted_columns(self.x - h * v, w)) * (0.5 / h)
        x, second = o.space.tensor(self.x), o.space.zeros()
        for weight, point in o.box.difference_points(x, o.space.tensor(h * v)):
            at_point = o.gradient(self.x)[1] if point is x else o.weighted_columns(o.space.vector(point), w)
            second = second + at_point * (weight / h)
        return second

    def columns(self) -> tuple[Floats, float]:
        """Return the matrix from its products with unit vectors, and the error of a product."""
        o = self.oracle
        identity = np.eye(o.space.dim, dtype=o.space.dtype)
        if o.hessp is not None:
            return np.array([o.hessp(self.x, e) for e in identity], np.float64).T, 0.0
        evaluation, h = o.with_jacobian(self.x), self.step()
        scaled, weights = o.variables.columns(evaluation.jacobian), evaluation.terms.weights
        first = scaled.T @ (scaled if weights is None else weights[:, None] * scaled)
        second = np.array([self._second_order(evaluation, e, h) for e in identity]).T
        v = np.cos(np.arange(o.space.dim)).astype(o.space.dtype)  # a vector without zeros, and not of equal entries
        v /= o.space.norm(v)
        doubled = self._second_order(evaluation, v, 2.0 * h)
        return (first + second).astype(np.float64), self.estimated_error(v, doubled, second @ v)

    def error(self, v: Any, product: Any) -> float:
        known = self.oracle.whole_matrix(self.x)
        return super().error(v, product) if known is None else known[1] * self.oracle.space.norm(v)
