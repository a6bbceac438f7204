"""A least-squares run: the run of `minimize` in variables that follow the columns of the Jacobian."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sanc.core.curvature import Certificate
from sanc.core.oracle import Oracle
from sanc.core.run import Run
from sanc.core.space import ROUNDING_ERRORS, Floats, Vector
from sanc.leastsquares.oracle import Evaluation, ResidualOracle


@dataclass
class LeastSquaresRun(Run):
    """A run whose variables are scaled by the column norms of the Jacobian.

    The norms are the largest so far, as Moré (1978) has it. Before the run ends they are those of the last point, in
    which gradient and curvature are tested.

    Attributes
    ----------
    last : Evaluation or None
        The point of the iteration before.
    """

    last: Evaluation | None = None
    _tested: tuple[Any, float] | None = None  # a point, and its tolerance in the units of f

    @property
    def residual_oracle(self) -> ResidualOracle:
        """The oracle of the residuals."""
        oracle = self.objective
        assert isinstance(oracle, ResidualOracle)
        return oracle

    @property
    def tol(self) -> float:
        """Tolerance on the gradient norm in scaled variables, relative to the residuals."""
        point = self.point
        if self._tested is not None and self._tested[0] is point:
            return self._tested[1] * self.factor
        return self.residual_oracle.tolerance(point) * self.factor

    def prepare(self) -> None:
        """Measure the last step, and scale the variables; at a stationary point, prepare the whole Hessian."""
        oracle = self.residual_oracle
        found = oracle.with_jacobian(self.point)
        last, self.last = self.last, found
        step = None
        if last is not None and found is not last:
            step = found.x - last.x
            oracle.update_term(last, found)
        if (found.column_norms() > oracle.column_limits).any():
            self._rescale(np.maximum(oracle.exponents, oracle.column_exponents(found)), step)
        oracle.full = self._is_stationary()
        if not oracle.full:
            return
        now = oracle.column_exponents(found)
        threshold = ROUNDING_ERRORS * oracle.space.eps * float(np.linalg.norm(found.terms.weighted))
        has_effect = found.column_norms() * np.abs(found.x) >= threshold  # of a relative change of the variable
        exponents = np.where(np.isfinite(now) & has_effect, now, oracle.exponents)
        if not np.array_equal(exponents, oracle.exponents):
            self._rescale(exponents, step)
            oracle.full = self._is_stationary()

    def _is_stationary(self) -> bool:
        """Whether the gradient of the variables that f can decrease along is below the tolerance; sets that, too."""
        oracle, point = self.residual_oracle, self.point
        oracle.full = False
        g, places = oracle.gradient(point)[1], None
        if self.box is not None:
            z, derivatives = oracle.space.tensor(point), oracle.space.tensor(g)
            free = self.box.free(z, derivatives).numpy()
            if not free.all():
                g, places = g * free, np.flatnonzero(free)
        norm, tolerance = oracle.norm(g), oracle.tolerance(point)
        if tolerance < norm < math.inf:
            tolerance = max(tolerance, oracle.offset_tolerance(point, places))
        self._tested = point, tolerance
        return norm <= tolerance

    def _rescale(self, exponents: Floats, step: Floats | None) -> None:
        """Continue in other variables. σ and the lengths change so that the model of the last step keeps its terms."""
        oracle, full = self.residual_oracle, self.full_oracle
        x = oracle.unscaled(self.point)
        old = oracle.scale
        g = oracle.gradient(self.point)[1]
        self.box = oracle.rescale(exponents, self.box)
        self.oracle, self.x = full, oracle.scaled(x)
        iteration: Any = self.iteration
        state = iteration.numbers()
        if not state["unit_length"]:
            return
        reference = x if step is None or not np.any(step) else step
        step_norm_ratio = _ratio(reference / oracle.scale, reference / old)
        grad_norm_ratio = _ratio(g / old * oracle.scale, g)
        state["sigma"] /= step_norm_ratio**3
        state["unit_cubic"] /= step_norm_ratio**3
        state["unit_length"] *= step_norm_ratio
        state["last_step_norm"] *= step_norm_ratio
        state["last_grad_norm"] *= grad_norm_ratio
        iteration.restore(state, iteration.vectors(), iteration.tensors())
        self.stall.best_grad_norm *= grad_norm_ratio

    def compute_certificate(self, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the whole Hessian, with which a saddle is left in the next iteration."""
        residuals = self.residual_oracle
        residuals.full = True
        self.limits = replace(self.limits, curvature_tol=residuals.curvature_tolerance(self.point) * self.factor)
        return super().compute_certificate(oracle, max_products, seed)


def _ratio(new: Any, old: Any) -> float:
    """Return the ratio of two norms; 1 if it is not a positive finite number."""
    above, below = float(np.linalg.norm(new)), float(np.linalg.norm(old))
    ratio = above / below if below > 0.0 else 1.0
    return ratio if 0.0 < ratio < math.inf else 1.0
