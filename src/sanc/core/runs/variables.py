"""The variables of a run without a preconditioner: those of its objective.

`RunVariables` in `run.py` has the members of all kinds. `preconditioned.py` and `scaled_variables.py` have others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sanc.core.oracle import Oracle
from sanc.core.runs.limits import Limits
from sanc.core.runs.run import Run
from sanc.core.space import Vector
from sanc.core.spectrum.curvature import Certificate, probe

_MIN_UNSCALED_ITERATIONS = 256
"""Iterations after which a run that has not stalled measures the scales of its variables, a power of two."""


@dataclass(frozen=True, eq=False)
class PlainVariables:
    """The variables of the objective; the other kinds override what differs."""

    can_be_scaled: ClassVar[bool] = True
    allows_long_differences: ClassVar[bool] = True
    remark: ClassVar[str] = ""

    def objective(self, oracle: Oracle) -> Oracle:
        return oracle

    def original(self, x: Vector) -> Vector:
        return x

    def from_original(self, x: Vector) -> Vector:
        return x

    def gradient_norm(self, run: Run, g: Vector) -> float:
        return run.oracle.space.norm(g)

    def tolerance(self, run: Run) -> float:
        """Return the tolerance on ‖g‖: the default is raised to the error of differenced gradients."""
        return max(run.limits.tol, run.oracle.gradient_error(run.x) if run.limits.default_tol else 0.0)

    def gradient_tolerance(self, run: Run) -> float:
        return max(self.tolerance(run), run.findings.gradient_rounding)

    def curvature_tolerance(self, run: Run) -> float:
        """Return the tolerance on negative curvature: by default √(L2 ε) with the estimate of L2, at most √ε.

        ε is `limits.tol` and not `tol`, which may have been raised to the error of differenced gradients: that error
        would then raise the tolerance with which it is compared.
        """
        if run.limits.curvature_tol is not None:
            return run.limits.curvature_tol
        unit = run.scale_of_f  # an L2 of 1, scaled as f
        return math.sqrt(run.limits.tol) * math.sqrt(min(unit, self.unit_cubic(run) or unit))

    def unit_cubic(self, run: Run) -> float:
        """Return the unit of σ, an estimate of the Lipschitz constant of the Hessian; 0 if it is not known."""
        return run.units.cubic

    def model_tolerance(self, limits: Limits) -> float:
        return limits.tol

    def scaling_is_due(self, iterations: int) -> bool:
        """Return whether a long run measures the scales of its variables: when the iterations have doubled."""
        return iterations >= _MIN_UNSCALED_ITERATIONS and iterations & (iterations - 1) == 0

    def prepare(self, run: Run) -> None:
        pass

    def certificate(self, run: Run, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        return probe_at(run, oracle, run.x, max_products, seed)


def probe_at(run: Run, oracle: Oracle, x: Vector, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
    """Return the certificate of a point of an oracle by Lanczos, to the tolerances of the run, and the Ritz vector."""
    return probe(
        oracle,
        x,
        gradient_tolerance=run.variables.gradient_tolerance(run),
        curvature_tolerance=run.variables.curvature_tolerance(run),
        max_products=max_products,
        seed=seed,
        time_is_up=run.time_is_up,
    )
