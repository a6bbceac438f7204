"""The variables of a least-squares run, which follow the columns of the Jacobian."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sanc.core.bounded.bounds import FaceOracle
from sanc.core.matrix_curvature import measure_matrix_curvature
from sanc.core.oracle import Oracle
from sanc.core.runs.run import Run
from sanc.core.runs.scaled_objective import scaled_oracle
from sanc.core.runs.variables import PlainVariables, probe_at
from sanc.core.space import Floats, Vector
from sanc.core.spectrum.curvature import Certificate
from sanc.leastsquares.column_scales import ColumnScales
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.oracle import ResidualOracle, WholeHessianOracle, has_whole_hessian

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


@dataclass(frozen=True, eq=False)
class ResidualVariables(PlainVariables):
    """Variables that are scaled by the column norms of the Jacobian.

    The norms are the largest so far, as Moré (1978) proposed. Before the run ends, gradient and curvature are tested in
    variables that are scaled by the norms of the last point.

    Attributes
    ----------
    can_be_scaled, allows_long_differences : bool
        False: they follow the Jacobian, which has the curvature, too.
    oracle : ResidualOracle
        The oracle of the residuals in these variables, with the Hessian of the model.
    scales : ColumnScales
        The scales, or those of the tests if the caller passed a preconditioner.
    last_evaluation : ResidualEvaluation or None
        The last point that was prepared.
    reference_cost : float
        The cost at the start, or at the last point with a cost far below the one before.
    largest_entries : ndarray
        The largest of each |x_i| so far.
    point_test : _PointTest or None
        The test of the last point that was prepared.
    """

    can_be_scaled: ClassVar[bool] = False
    allows_long_differences: ClassVar[bool] = False

    oracle: ResidualOracle
    scales: ColumnScales
    last_evaluation: ResidualEvaluation | None = None
    reference_cost: float = math.nan
    largest_entries: Any = 0.0
    point_test: _PointTest | None = None

    @classmethod
    def of(cls, oracle: ResidualOracle) -> ResidualVariables:
        """Return the variables of an oracle at the start of a run."""
        unknown = np.full(oracle.space.dim, -math.inf)
        return cls(oracle, ColumnScales(unknown, oracle.space.dtype, oracle.residuals.network is not None))

    def tolerance(self, run: Run) -> float:
        """Return the tolerance on the gradient norm in scaled variables, relative to the residuals."""
        point, test = run.full_x, self.point_test
        if test is not None and test.point is point:
            return test.tolerance * run.scale_of_f
        return self.oracle.tolerance(point) * run.scale_of_f

    def curvature_tolerance(self, run: Run) -> float:
        """Return the tolerance on negative curvature in scaled variables, relative to the residuals."""
        return self.oracle.curvature_tolerance(run.full_x) * run.scale_of_f

    def prepare(self, run: Run) -> None:
        """Measure the last step, and scale the variables; where the run may end, use the whole Hessian."""
        entered, test = self, self.point_test
        if test is None or test.point is not run.full_x:
            entered, test = self._enter_point(run)
            run.update_variables(entered)
        is_whole = test.is_stationary or run.stall_monitor.has_stalled
        if is_whole != has_whole_hessian(run.oracle):
            oracle = WholeHessianOracle(entered.oracle) if is_whole else entered.oracle
            run.change_variables(entered, oracle, run.full_x)

    def _enter_point(self, run: Run) -> tuple[ResidualVariables, _PointTest]:
        """Measure the step to the current point, scale the variables there, and test whether it is stationary."""
        entered, evaluation, last = self, self.oracle.with_jacobian(run.full_x), self.last_evaluation
        step, reference_cost = None, self.reference_cost
        if last is None or evaluation.terms.cost < _MIN_COST_RATIO * last.terms.cost:
            reference_cost = evaluation.terms.cost
        if last is not None and evaluation is not last:
            step = evaluation.x - last.x
            self.oracle.update_term(last, evaluation)
        largest_entries = np.maximum(self.largest_entries, np.abs(evaluation.x))
        is_at_root = _is_root(evaluation, step, reference_cost, largest_entries, self.oracle.space.eps)
        is_preconditioned = self.oracle.variables.is_preconditioned
        if is_preconditioned:
            entered = replace(self, scales=self.scales.at_least(evaluation))
        elif (evaluation.column_norms() > self.scales.limits).any():
            entered = self._rescaled(run, self.scales.at_least(evaluation), step)
        test = entered._test_point(run, is_at_root)
        if test.is_stationary and not (is_at_root or is_preconditioned):  # at a root the columns are roundoff, too
            scales = entered.scales.at(evaluation)
            if not np.array_equal(scales.exponents, entered.scales.exponents):
                entered = entered._rescaled(run, scales, step)
                test = entered._test_point(run, is_at_root)
        measured = ResidualVariables(entered.oracle, entered.scales, evaluation, reference_cost, largest_entries, test)
        return measured, test

    def _test_point(self, run: Run, is_at_root: bool) -> _PointTest:
        """Test the gradient of the variables that f can decrease along, unless the residuals vanish."""
        oracle, point = self.oracle, run.full_x
        g, free_indices = oracle.gradient(point)[1], None
        if run.box is not None:
            z, derivatives = oracle.space.tensor(point), oracle.space.tensor(g)
            free = run.box.free(z, derivatives).numpy()
            if not free.all():
                g, free_indices = g * free, np.flatnonzero(free)
        norm, tolerance = self._norm_in_columns(run, g), oracle.tolerance(point)
        if is_at_root:
            tolerance = max(tolerance, norm)
        if tolerance < norm < math.inf:
            tolerance = max(tolerance, oracle.offset_tolerance(point, free_indices))
        return _PointTest(point, tolerance, norm <= tolerance)

    def gradient_norm(self, run: Run, g: Vector) -> float:
        """Return ‖∇f‖ at the current point, with a preconditioner in variables scaled by the columns."""
        if not self.oracle.variables.is_preconditioned:
            return super().gradient_norm(run, g)
        return self._norm_in_columns(run, g) * run.scale_of_f

    def _norm_in_columns(self, run: Run, g: Vector) -> float:
        """Return ‖∇f‖ in variables scaled by the columns of the Jacobian; g belongs to the variables of the run."""
        oracle = self.oracle
        if not oracle.variables.is_preconditioned:
            return oracle.norm(g)
        evaluation = oracle.with_jacobian(run.full_x)
        return oracle.norm(self.scales.at(evaluation).variables().gradient(evaluation.gradient()))

    def _rescaled(self, run: Run, scales: ColumnScales, step: Floats | None) -> ResidualVariables:
        """Continue the run in variables with other scales, and return them.

        σ, step norms and length scales change so that the model of the last step keeps its terms.
        """
        old, point = self.oracle, run.full_x
        x, g = old.unscaled(point), old.gradient(point)[1]
        oracle = old.in_variables(scales.variables())
        rescaled = replace(self, oracle=oracle, scales=scales)
        run.change_variables(rescaled, oracle, oracle.scaled(x))
        state = run.iteration.state
        if not state.first_length_scale:
            return rescaled
        reference = x if step is None or not np.any(step) else step
        step_norm_ratio = _ratio(oracle.scaled(reference), old.scaled(reference))
        grad_norm_ratio = _ratio(g / old.scale * oracle.scale, g)
        run.iteration.replace_numbers(
            sigma=state.sigma / step_norm_ratio**3,
            unit_cubic=state.unit_cubic / step_norm_ratio**3,
            first_length_scale=state.first_length_scale * step_norm_ratio,
            last_step_norm=state.last_step_norm * step_norm_ratio,
            last_grad_norm=state.last_grad_norm * grad_norm_ratio,
        )
        run.scale_progress(grad_norm_ratio)
        return rescaled

    def certificate(self, run: Run, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the whole Hessian, with a preconditioner in variables scaled by the columns."""
        residuals = self.oracle
        if not residuals.variables.is_preconditioned:
            whole = oracle if has_whole_hessian(oracle) else self._with_whole_hessian(run, oracle)
            return _whole_certificate(run, whole, residuals, run.x, max_products, seed)
        evaluation = residuals.with_jacobian(run.full_x)
        changed = residuals.in_variables(self.scales.at(evaluation).variables())
        whole, z = scaled_oracle(WholeHessianOracle(changed), run.exponent), changed.scaled(evaluation.x)
        certificate, v = _whole_certificate(run, whole, changed, z, max_products, seed)
        direction: Any = residuals.scaled(changed.unscaled(v))
        norm = residuals.norm(direction)
        return certificate, direction / norm if 0.0 < norm < math.inf else direction

    def _with_whole_hessian(self, run: Run, oracle: Oracle) -> Oracle:
        """Return the oracle of the run, at its point, with the whole Hessian."""
        whole = scaled_oracle(WholeHessianOracle(self.oracle), run.exponent)
        if run.box is None:
            return whole
        face = FaceOracle(whole, run.box, run.full_x, oracle.free_indices)
        face.keep(run.x, run.full_x)
        return face


def _is_root(
    evaluation: ResidualEvaluation, step: Floats | None, reference_cost: float, largest_entries: Any, eps: float
) -> bool:
    """Return whether the residuals vanish, or decreased slowly below their own roundoff and hardly change with x.

    At a multiple root where variables are zero, the gradient stays large relative to the residuals, and neither has
    a rounding error: both would decrease, by a constant factor in each step, until they underflow. Where the cost
    decreases faster, it may have been large because of one variable, such as an amplitude, and the run goes on.
    """
    cost = evaluation.terms.cost
    if cost < _MIN_COST or step is None:
        return cost < _MIN_COST
    is_small = cost <= eps * eps * reference_cost
    return is_small and bool((np.abs(step) <= math.sqrt(eps) * largest_entries).all())


def _whole_certificate(
    run: Run, oracle: Oracle, residuals: ResidualOracle, x: Vector, max_products: int | None, seed: int
) -> tuple[Certificate, Vector]:
    """Return the certificate of an oracle with the whole Hessian, from its matrix or by Lanczos."""
    return _dense_certificate(run, oracle, residuals, x) or probe_at(run, oracle, x, max_products, seed)


def _dense_certificate(
    run: Run, oracle: Oracle, residuals: ResidualOracle, x: Vector
) -> tuple[Certificate, Vector] | None:
    """Return the certificate from the eigenvalues of the whole Hessian, and the left-most eigenvector.

    None if there are many variables, or if the matrix is not finite, or asymmetric beyond the error of its
    products, which Lanczos treats with more care. With a differenced Jacobian asymmetry is an error of differences.
    """
    with residuals.uncounted():
        whole = residuals.whole_matrix(oracle.full_point(x)) if oracle.space.dim > 0 else None
    if whole is None or not np.isfinite(whole.matrix).all():
        return None
    matrix, error = whole.matrix * run.scale_of_f, whole.error * run.scale_of_f
    if oracle.free_indices is not None:
        free_indices = oracle.free_indices.numpy()
        matrix = matrix[np.ix_(free_indices, free_indices)]
    measured = measure_matrix_curvature(matrix, oracle.space.eps, error)
    if not (measured.is_symmetric or residuals.residuals.is_differenced):
        return None
    certificate = measured.certificate(
        grad_norm=oracle.space.norm(oracle.gradient(x)[1]),
        gradient_tolerance=run.variables.gradient_tolerance(run),
        curvature_tolerance=run.variables.curvature_tolerance(run),
    )
    return certificate, measured.vectors[:, 0].astype(residuals.space.dtype)


def _ratio(new: Any, old: Any) -> float:
    """Return the ratio of two norms; 1 if it is not a positive finite number."""
    above, below = float(np.linalg.norm(new)), float(np.linalg.norm(old))
    ratio = above / below if below > 0.0 else 1.0
    return ratio if 0.0 < ratio < math.inf else 1.0
