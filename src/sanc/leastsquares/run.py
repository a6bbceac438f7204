"""A least-squares run: the run of `minimize` in variables that follow the columns of the Jacobian."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sanc.core.bounded.bounds import FaceOracle
from sanc.core.matrix_curvature import measure_matrix_curvature
from sanc.core.oracle import Oracle
from sanc.core.runs.run import Run
from sanc.core.runs.scaled_objective import ScaledObjectiveOracle
from sanc.core.space import Floats, Vector
from sanc.core.spectrum.curvature import Certificate
from sanc.leastsquares.column_scales import ColumnScales
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.oracle import ResidualOracle, WholeHessianOracle, has_whole_hessian, residual_oracle

_MIN_COST = sys.float_info.min / sys.float_info.epsilon
"""Cost below which the residuals count as 0: their products lose digits to underflow."""
_MIN_COST_RATIO = 1e-6
"""Smallest ratio of costs of a step towards a multiple root. Newton's steps there have a ratio of at least 1/16."""


class _PointTest(NamedTuple):
    """The test of the gradient at a point.

    Attributes
    ----------
    point : vector
        The point.
    tolerance : float
        Its tolerance on the gradient norm, in the units of f.
    is_stationary : bool
        Whether the gradient norm is within the tolerance.
    """

    point: Any
    tolerance: float
    is_stationary: bool


@dataclass
class LeastSquaresRun(Run):
    """A run whose variables are scaled by the column norms of the Jacobian.

    The norms are the largest so far, as Moré (1978) proposed. Before the run ends, gradient and curvature are tested in
    variables that are scaled by the norms of the last point.

    Attributes
    ----------
    residual_oracle : ResidualOracle
        The oracle of the residuals in the variables of the run, with the Hessian of the model.
    last_evaluation : ResidualEvaluation or None
        The point of the iteration before.
    """

    residual_oracle: ResidualOracle = field(init=False)
    last_evaluation: ResidualEvaluation | None = None
    _scales: ColumnScales = field(init=False)
    _reference_cost: float = math.nan  # at the start, or at the last point with a cost far below the one before
    _largest_entries: Any = 0.0  # of each |x_i| so far
    _is_at_root: bool = False  # whether the residuals vanish at the point
    _point_test: _PointTest | None = None  # of the last point that was prepared

    def __post_init__(self) -> None:
        oracle = self.residual_oracle = residual_oracle(self.oracle)
        unknown = np.full(oracle.space.dim, -math.inf)
        self._scales = ColumnScales(unknown, oracle.space.dtype, oracle.residuals.network is not None)

    @property
    def can_scale_variables(self) -> bool:
        return False

    @property
    def can_use_long_differences(self) -> bool:
        return False

    @property
    def tol(self) -> float:
        """Tolerance on the gradient norm in scaled variables, relative to the residuals."""
        point, test = self.full_x, self._point_test
        if test is not None and test.point is point:
            return test.tolerance * self.scale_of_f
        return self.residual_oracle.tolerance(point) * self.scale_of_f

    @property
    def curvature_tolerance(self) -> float:
        """Tolerance on negative curvature in scaled variables, relative to the residuals."""
        return self.residual_oracle.curvature_tolerance(self.full_x) * self.scale_of_f

    def before_iteration(self) -> None:
        """Measure the last step, and scale the variables; where the run may end, use the whole Hessian."""
        if self._point_test is None or self._point_test.point is not self.full_x:
            self._point_test = self._enter_point()
        oracle = self.residual_oracle
        is_whole = self._point_test.is_stationary or self.stall_monitor.has_stalled
        if is_whole != has_whole_hessian(self.oracle):
            self._continue_with(WholeHessianOracle(oracle) if is_whole else oracle, self.full_x)

    def _continue_with(self, oracle: Oracle, x: Vector) -> None:
        """Continue with another oracle of f, at its point x of all variables; the factor of f remains."""
        self.oracle, self.x = _with_exponent(oracle, self.full_oracle.exponent), x

    def _enter_point(self) -> _PointTest:
        """Measure the step to the current point, scale the variables there, and test whether it is stationary."""
        oracle = self.residual_oracle
        evaluation = oracle.with_jacobian(self.full_x)
        last, self.last_evaluation = self.last_evaluation, evaluation
        step = None
        if last is None or evaluation.terms.cost < _MIN_COST_RATIO * last.terms.cost:
            self._reference_cost = evaluation.terms.cost
        if last is not None and evaluation is not last:
            step = evaluation.x - last.x
            oracle.update_term(last, evaluation)
        self._largest_entries = np.maximum(self._largest_entries, np.abs(evaluation.x))
        self._is_at_root = self._is_root(evaluation, step)
        if oracle.variables.is_preconditioned:
            self._scales = self._scales.at_least(evaluation)
            return self._test_point()
        if (evaluation.column_norms() > self._scales.limits).any():
            self._rescale(self._scales.at_least(evaluation), step)
        test = self._test_point()
        if not test.is_stationary or self._is_at_root:  # where residuals are roundoff, so are the columns
            return test
        scales = self._scales.at(evaluation)
        if np.array_equal(scales.exponents, self._scales.exponents):
            return test
        self._rescale(scales, step)
        return self._test_point()

    def _is_root(self, evaluation: ResidualEvaluation, step: Floats | None) -> bool:
        """Return whether the residuals vanish, or decreased slowly below their own roundoff and hardly change with x.

        At a multiple root where variables are zero, the gradient stays large relative to the residuals, and neither has
        a rounding error: both would decrease, by a constant factor in each step, until they underflow. Where the cost
        decreases faster, it may have been large because of one variable, such as an amplitude, and the run goes on.
        """
        cost, eps = evaluation.terms.cost, self.residual_oracle.space.eps
        if cost < _MIN_COST or step is None:
            return cost < _MIN_COST
        is_small = cost <= eps * eps * self._reference_cost
        return is_small and bool((np.abs(step) <= math.sqrt(eps) * self._largest_entries).all())

    def _test_point(self) -> _PointTest:
        """Test the gradient of the variables that f can decrease along, unless the residuals vanish."""
        oracle, point = self.residual_oracle, self.full_x
        g, free_indices = oracle.gradient(point)[1], None
        if self.box is not None:
            z, derivatives = oracle.space.tensor(point), oracle.space.tensor(g)
            free = self.box.free(z, derivatives).numpy()
            if not free.all():
                g, free_indices = g * free, np.flatnonzero(free)
        norm, tolerance = self._norm_in_columns(g), oracle.tolerance(point)
        if self._is_at_root:
            tolerance = max(tolerance, norm)
        if tolerance < norm < math.inf:
            tolerance = max(tolerance, oracle.offset_tolerance(point, free_indices))
        return _PointTest(point, tolerance, norm <= tolerance)

    def gradient_norm(self, g: Vector) -> float:
        """Return ‖∇f‖ at the current point, with a preconditioner in variables scaled by the columns."""
        return (
            self._norm_in_columns(g) * self.scale_of_f
            if self.residual_oracle.variables.is_preconditioned
            else super().gradient_norm(g)
        )

    def _norm_in_columns(self, g: Vector) -> float:
        """Return ‖∇f‖ in variables scaled by the columns of the Jacobian; g belongs to the variables of the run."""
        oracle = self.residual_oracle
        if not oracle.variables.is_preconditioned:
            return oracle.norm(g)
        evaluation = oracle.with_jacobian(self.full_x)
        return oracle.norm(self._scales.at(evaluation).variables().gradient(evaluation.gradient()))

    def _rescale(self, scales: ColumnScales, step: Floats | None) -> None:
        """Continue in other variables.

        σ, step norms and length scales change so that the model of the last step keeps its terms.
        """
        old, point = self.residual_oracle, self.full_x
        x, g = old.unscaled(point), old.gradient(point)[1]
        oracle = old.in_variables(scales.variables())
        self._scales, self.residual_oracle, self.box = scales, oracle, oracle.box
        self._continue_with(oracle, oracle.scaled(x))
        state = self.iteration.state
        if not state.first_length_scale:
            return
        reference = x if step is None or not np.any(step) else step
        step_norm_ratio = _ratio(oracle.scaled(reference), old.scaled(reference))
        grad_norm_ratio = _ratio(g / old.scale * oracle.scale, g)
        self.iteration.replace_numbers(
            sigma=state.sigma / step_norm_ratio**3,
            unit_cubic=state.unit_cubic / step_norm_ratio**3,
            first_length_scale=state.first_length_scale * step_norm_ratio,
            last_step_norm=state.last_step_norm * step_norm_ratio,
            last_grad_norm=state.last_grad_norm * grad_norm_ratio,
        )
        self.stall_monitor = self.stall_monitor.with_scaled_gradients(grad_norm_ratio)

    def compute_certificate(self, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the whole Hessian, with a preconditioner in variables scaled by the columns."""
        residuals, exponent = self.residual_oracle, self.full_oracle.exponent
        if not residuals.variables.is_preconditioned:
            whole = oracle if has_whole_hessian(oracle) else self._with_whole_hessian(oracle)
            return self._whole_certificate(whole, residuals, self.x, max_products, seed)
        evaluation = residuals.with_jacobian(self.full_x)
        changed = residuals.in_variables(self._scales.at(evaluation).variables())
        whole, z = _with_exponent(WholeHessianOracle(changed), exponent), changed.scaled(evaluation.x)
        certificate, v = self._whole_certificate(whole, changed, z, max_products, seed)
        direction: Any = residuals.scaled(changed.unscaled(v))
        norm = residuals.norm(direction)
        return certificate, direction / norm if 0.0 < norm < math.inf else direction

    def _with_whole_hessian(self, oracle: Oracle) -> Oracle:
        """Return the oracle of the run, at its point, with the whole Hessian."""
        whole = _with_exponent(WholeHessianOracle(self.residual_oracle), self.full_oracle.exponent)
        if self.box is None:
            return whole
        face = FaceOracle(whole, self.box, self.full_x, oracle.free_indices)
        face.keep(self.x, self.full_x)
        return face

    def _whole_certificate(
        self, oracle: Oracle, residuals: ResidualOracle, x: Vector, max_products: int | None, seed: int
    ) -> tuple[Certificate, Vector]:
        """Return the certificate of an oracle with the whole Hessian, from its matrix or by Lanczos."""
        return self._dense_certificate(oracle, residuals, x) or self._probe(oracle, x, max_products, seed)

    def _dense_certificate(
        self, oracle: Oracle, residuals: ResidualOracle, x: Vector
    ) -> tuple[Certificate, Vector] | None:
        """Return the certificate from the eigenvalues of the whole Hessian, and the left-most eigenvector.

        None if there are many variables, or if the matrix is not finite, or asymmetric beyond the error of its
        products, which Lanczos treats with more care. With a differenced Jacobian asymmetry is an error of differences.
        """
        with residuals.uncounted():
            whole = residuals.whole_matrix(oracle.full_point(x)) if oracle.space.dim > 0 else None
        if whole is None or not np.isfinite(whole.matrix).all():
            return None
        matrix, error = whole.matrix * self.scale_of_f, whole.error * self.scale_of_f
        if oracle.free_indices is not None:
            free_indices = oracle.free_indices.numpy()
            matrix = matrix[np.ix_(free_indices, free_indices)]
        measured = measure_matrix_curvature(matrix, oracle.space.eps, error)
        if not (measured.is_symmetric or residuals.residuals.is_differenced):
            return None
        certificate = measured.certificate(
            grad_norm=oracle.space.norm(oracle.gradient(x)[1]),
            gradient_tolerance=self.gradient_tolerance,
            curvature_tolerance=self.curvature_tolerance,
        )
        return certificate, measured.vectors[:, 0].astype(residuals.space.dtype)


def _with_exponent(oracle: Oracle, exponent: int) -> Oracle:
    """Return the oracle of 2^exponent · f."""
    return ScaledObjectiveOracle(oracle, exponent) if exponent else oracle


def _ratio(new: Any, old: Any) -> float:
    """Return the ratio of two norms; 1 if it is not a positive finite number."""
    above, below = float(np.linalg.norm(new)), float(np.linalg.norm(old))
    ratio = above / below if below > 0.0 else 1.0
    return ratio if 0.0 < ratio < math.inf else 1.0
