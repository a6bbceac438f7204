"""The cost of a least-squares problem as an oracle: its value, its gradient Jᵀw and its curvature.

The vectors of the run are z = x/d. Each d_j is a power of two near 1/‖J_j‖, the inverse norm of a column of the
Jacobian, so that scaling changes no digit, and the cubic model measures steps in units in which all variables have
the same effect on the residuals. The model has the curvature Jᵀ diag(h) J of Gauss and Newton. The second-order term
S = Σ w_i ∇²r_i is added if measurement shows that it improves the model (`sanc.leastsquares.secant`). Certificates,
and steps away from saddles, have the whole Hessian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.bounds import Box
from sanc.core.oracle import Meter, Operator
from sanc.core.space import ROUNDING_ERRORS, Floats
from sanc.functions.oracle import CallableOracle
from sanc.leastsquares.losses import Loss, LossTerms
from sanc.leastsquares.matrices import JacobianMatrix
from sanc.leastsquares.residuals import Residuals
from sanc.leastsquares.secant import SecondOrderTerm

_CACHED_POINTS = 4
"""Points whose residuals are kept: x, the trial point, an escape point, and one more."""
_PROBES = 8
"""Random vectors that estimate the column norms of an operator, to about 1/√(2·8) = 25 %."""


@dataclass
class Evaluation:
    """Residuals and, once it was needed, the Jacobian at one point."""

    x: Floats
    r: Floats
    terms: LossTerms
    jacobian: Any = None
    norms: Any = None
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

    def curvature(self, v: Floats) -> Floats:
        """Return Jᵀ diag(h) J v, with h ≥ 0."""
        weights = self.model_weights()
        change = self.jacobian @ v
        return self.transposed(change if weights is None else weights * change)

    def column_norms(self) -> Floats:
        """Return the column norms of the Jacobian; those of an operator are estimated."""
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
                for _ in range(_PROBES):
                    squares += np.square(self.transposed(rng.choice([-1.0, 1.0], len(self.r)).astype(self.r.dtype)))
                squares /= _PROBES
            self.norms = np.sqrt(squares)
        norms: Floats = self.norms
        return norms

    def model_weights(self) -> Floats | None:
        """Return h, without negative entries, with which the Gauss–Newton matrix is positive semidefinite."""
        return None if self.terms.weights is None else np.maximum(self.terms.weights, 0.0)


class ResidualOracle(CallableOracle):
    """Evaluates ½C²Σρ((r/C)²) in scaled variables.

    Attributes
    ----------
    residuals : Residuals
        The functions of the caller.
    exponents : ndarray
        d_j = 2^−exponent; −∞ as long as column j was zero, whose d_j is 1.
    scale : ndarray
        d.
    term : SecondOrderTerm
        The estimate of S, and whether the model has it.
    full : bool
        Whether `hessian` has the whole second-order term: in certificates, and after one that found a saddle.
    """

    def __init__(self, residuals: Residuals, x0: Floats, loss: Loss, tol: float) -> None:
        super().__init__(residuals, x0, jac=residuals)
        self.residuals, self.loss, self.tol = residuals, loss, tol
        self.noise = residuals.noise(self.space.eps)
        self.gradient_of_caller = callable(residuals.jac)
        self.differenced_products = not residuals.is_automatic
        if residuals.is_automatic:
            self.hessp = self._full_product
            self.hvp = "double-backward"
        self.exponents = np.full(len(x0), -math.inf)
        self.scale: Any = np.ones(len(x0), x0.dtype)
        self.term = SecondOrderTerm(len(x0), residuals.network is None)
        self.full = False
        self._evaluations: dict[bytes, Evaluation] = {}
        self._second: tuple[Evaluation, Any] | None = None

    # Counters are those of the functions of the caller.

    @property
    def meter(self) -> Meter:
        """The counters."""
        return self.residuals.meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        if hasattr(self, "residuals"):
            self.residuals.meter = meter

    # Points.

    def unscaled(self, z: Any) -> Any:
        """Return x."""
        return z * self.scale

    def scaled(self, x: Any) -> Any:
        """Return z."""
        return x / self.scale

    def evaluation(self, z: Any) -> Evaluation:
        """Return the residuals at a point, evaluated once."""
        x = self.unscaled(z)
        key = x.tobytes()
        found = self._evaluations.pop(key, None)
        if found is None:
            r = self.residuals(x)
            found = Evaluation(x, r, self.loss(r))
        self._evaluations[key] = found
        while len(self._evaluations) > _CACHED_POINTS:
            del self._evaluations[next(iter(self._evaluations))]
        return found

    def with_jacobian(self, z: Any) -> Evaluation:
        """Return the residuals and the Jacobian at a point."""
        found = self.evaluation(z)
        if found.jacobian is None:
            for other in self._evaluations.values():
                if isinstance(other.jacobian, JacobianMatrix):  # a large one; its gradient stays cached
                    other.jacobian = None
            found.jacobian = self.residuals.jacobian(found.x, found.r)
        return found

    # Values, gradients and products in scaled variables.

    def _evaluate(self, z: Any) -> float:
        return self.evaluation(z).terms.cost

    def evaluate_gradient(self, z: Any) -> Any:
        found = self.with_jacobian(z)
        return (found.gradient() * self.scale).astype(self.space.dtype, copy=False)

    def hessian(self, z: Any) -> Operator:
        return super().hessian(z) if self.full else _ModelOperator(self, z)

    def _full_product(self, z: Any, v: Any) -> Floats:
        """Return the product with the whole Hessian, of automatic differentiation."""
        found = self.with_jacobian(z)
        if self._second is None or self._second[0] is not found:
            self._second = found, self.residuals.second_order_product(found.x, found.terms.weighted)
        moved = v * self.scale
        change = found.jacobian @ moved
        weights = found.terms.weights
        product = found.transposed(change if weights is None else weights * change) + self._second[1](moved)
        return product * self.scale  # type: ignore[no-any-return]

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

        Negative curvature is due to the second-order term alone, which is about ‖w‖/‖z‖ if the columns change by their
        norms over a distance ‖z‖. It is tested to √tol of that, or to `tol` if the residuals are small.
        """
        weighted, norm = self.with_jacobian(z).sizes()
        return max(self.tol, math.sqrt(self.tol) * (min(1.0, weighted / norm) if norm > 0.0 else 1.0))

    # Scaling.

    def column_exponents(self, found: Evaluation) -> Floats:
        """Return the binary exponents of the column norms of the Jacobian; −∞ for a zero column.

        The parameters of a network have one unit, and keep their proportions: the exponent is that of the largest norm.
        Separate ones would lengthen steps of parameters that have little effect, as those of saturated units.
        """
        with np.errstate(divide="ignore"):
            norms = found.column_norms()
            if self.residuals.network is not None:
                norms = np.full_like(norms, norms.max())
            return np.where(np.isfinite(norms), np.round(np.log2(norms)), -math.inf)

    def rescale(self, exponents: Floats, box: Box | None) -> Box | None:
        """Change d, and return the box of the new variables; cached evaluations stay valid."""
        limit = 0.25 * math.frexp(float(np.finfo(self.space.dtype).max))[1]  # squares of d stay finite
        self.exponents = exponents
        powers = np.clip(np.where(np.isfinite(exponents), -exponents, 0.0), -limit, limit)
        old, self.scale = self.scale, np.exp2(powers).astype(self.space.dtype)
        self._values.clear()
        self._gradients.clear()
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
        found = oracle.with_jacobian(self.z)
        if oracle.term.is_used and not oracle.term.is_estimated:
            return _full_operator(oracle, self.z)(v)
        moved = v * oracle.scale
        product = found.curvature(moved)
        if oracle.term.is_used:
            product = product + oracle.term.matrix @ moved
        return (product * oracle.scale).astype(oracle.space.dtype, copy=False)

    def gradient(self) -> Any:
        return self.oracle.gradient(self.z)[1] * 1.0


def _full_operator(oracle: ResidualOracle, z: Any) -> Operator:
    """Return the product with the whole Hessian, counted once by the caller."""
    oracle.meter.nhev -= 1
    oracle.meter.product -= 1
    return CallableOracle.hessian(oracle, z)
