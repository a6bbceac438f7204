"""The variables of a run in the norm of a preconditioner M = LLᵀ: y with x = Ly.

Krylov space, cubic model, step norm and escape belong to f(Ly), so that norms are √(xᵀM⁻¹x). Tolerances and the
certificate refer to f in the variables x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sanc.core.caching import MAX_CACHED_POINTS, RecentCache
from sanc.core.oracle import Eigenbasis, Operator, Oracle, WrappedOracle
from sanc.core.runs.limits import Limits
from sanc.core.runs.run import Run
from sanc.core.runs.scaled_objective import scaled_oracle
from sanc.core.runs.variables import PlainVariables, probe_at
from sanc.core.space import Vector
from sanc.core.spectrum.curvature import Certificate


@dataclass(frozen=True, eq=False)
class Factor:
    """The factor L of M = LLᵀ.

    Attributes
    ----------
    matrix : Tensor
        L, lower triangular, of the type and on the device of x; or its diagonal, if M is diagonal.
    smallest, largest : float
        Extreme singular values of L.
    """

    matrix: Tensor
    smallest: float
    largest: float

    def multiply(self, v: Tensor) -> Tensor:
        """Return Lv."""
        return self.matrix * v if self.matrix.ndim == 1 else self.matrix @ v

    def multiply_transposed(self, v: Tensor) -> Tensor:
        """Return Lᵀv."""
        return self.matrix * v if self.matrix.ndim == 1 else self.matrix.T @ v

    def bound(self, errors: Tensor) -> Tensor:
        """Return bounds of the entries of Lᵀe, given bounds of the entries of e."""
        return self.matrix.abs() * errors if self.matrix.ndim == 1 else self.matrix.abs().T @ errors

    def solve(self, v: Tensor) -> Tensor:
        """Return L⁻¹v."""
        if self.matrix.ndim == 1:
            return v / self.matrix
        solution: Tensor = torch.linalg.solve_triangular(self.matrix, v[:, None], upper=False)
        return solution[:, 0]


class PreconditionedOracle(WrappedOracle):
    """Evaluates f(Ly) as a function of y, where `inner` is the oracle of f and counts the evaluations."""

    def __init__(self, inner: Oracle, lower_factor: Factor) -> None:
        super().__init__(inner, inner.space)
        self.lower_factor = lower_factor
        self._points: RecentCache[Vector] = RecentCache(MAX_CACHED_POINTS)
        self._gradients: RecentCache[Vector] = RecentCache(2)

    def original(self, y: Vector) -> Vector:
        """Return x = Ly, the same object for the same y."""
        return self._points.get(y, self.multiply)

    def multiply(self, v: Vector) -> Vector:
        """Return Lv."""
        return self.space.vector(self.lower_factor.multiply(self.space.tensor(v)))

    def multiply_transposed(self, v: Vector) -> Vector:
        """Return Lᵀv."""
        return self.space.vector(self.lower_factor.multiply_transposed(self.space.tensor(v)))

    def solve(self, v: Vector) -> Vector:
        """Return L⁻¹v."""
        return self.space.vector(self.lower_factor.solve(self.space.tensor(v)))

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        return self.inner.is_cached(self.original(x))

    def value(self, x: Vector) -> float:
        return self.inner.value(self.original(x))

    def gradient_sample_value(self, x: Vector) -> float:
        return self.inner.gradient_sample_value(self.original(x))

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        value, g = self.inner.gradient(self.original(x))
        return value, self._gradients.get(x, lambda _: self.multiply_transposed(g))

    def gradient_error(self, x: Vector) -> float:
        return self.inner.gradient_error(self.original(x))

    def truncation_error(self, x: Vector) -> Vector | None:
        errors = self.inner.truncation_error(self.original(x))
        return None if errors is None else self.space.vector(self.lower_factor.bound(self.space.tensor(errors)))

    def hessian(self, x: Vector) -> Operator:
        return _PreconditionedOperator(self, self.inner.hessian(self.original(x)))

    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        """Return None: the eigenvectors of H are not eigenvectors of LᵀHL."""
        return None


class _PreconditionedOperator(Operator):
    """The matrix LᵀHL of the Hessian `inner`."""

    def __init__(self, oracle: PreconditionedOracle, inner: Operator) -> None:
        self.oracle, self.inner = oracle, inner
        self._products: RecentCache[tuple[Vector, Vector]] = RecentCache(2)

    def __call__(self, v: Vector) -> Vector:
        _, product = self._products.put(v, self._multiply(v))
        return self.oracle.multiply_transposed(product)

    def _multiply(self, v: Vector) -> tuple[Vector, Vector]:
        """Return Lv and HLv."""
        image_of_v = self.oracle.multiply(v)
        return image_of_v, self.inner(image_of_v)

    def gradient(self) -> Vector:
        return self.oracle.multiply_transposed(self.inner.gradient())

    def error(self, v: Vector, product: Vector) -> float:
        """Estimate the error of the product, at most ‖L‖ times the error of the product with H."""
        return self.inner.error(*self._products.get(v, self._multiply)) * self.oracle.lower_factor.largest

    def release(self) -> None:
        self.inner.release()


@dataclass(frozen=True, eq=False)
class PreconditionedVariables(PlainVariables):
    """The variables y: convergence and curvature are tested in the variables x.

    Attributes
    ----------
    can_be_scaled : bool
        False: the caller has chosen the norm.
    oracle : PreconditionedOracle
        The oracle of f(Ly).
    """

    can_be_scaled: ClassVar[bool] = False

    oracle: PreconditionedOracle

    def objective(self, oracle: Oracle) -> Oracle:
        return self.oracle.inner

    def original(self, x: Vector) -> Vector:
        return self.oracle.original(x)

    def from_original(self, x: Vector) -> Vector:
        return self.oracle.solve(x)

    def gradient_norm(self, run: Run, g: Vector) -> float:
        """Return ‖∇f(x)‖ at the current point."""
        original = self.oracle.inner
        return original.space.norm(original.gradient(run.full_x)[1]) * run.scale_of_f

    def gradient_tolerance(self, run: Run) -> float:
        """Return the tolerance, or ‖∇f(x)‖ if the gradient of f(Ly) is roundoff."""
        return max(self.tolerance(run), self.gradient_norm(run, run.x) if run.findings.gradient_rounding else 0.0)

    def unit_cubic(self, run: Run) -> float:
        """Return the unit of σ in the variables x: norms of the current point convert it."""
        above, below = run.oracle.space.norm(run.x), self.oracle.inner.space.norm(run.full_x)
        ratio = above / below if above > 0.0 and below > 0.0 else 1.0
        return run.units.cubic * ratio**3

    def model_tolerance(self, limits: Limits) -> float:
        """Return a tolerance on ‖Lᵀ∇f(x)‖: ‖∇f(x)‖ ≤ ‖Lᵀ∇f(x)‖ / σ_min(L)."""
        return limits.tol * self.oracle.lower_factor.smallest

    def certificate(self, run: Run, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of f at x, and the left-most Ritz vector in the variables y."""
        original = scaled_oracle(self.oracle.inner, run.exponent)
        certificate, v = probe_at(run, original, run.full_x, max_products, seed)
        direction: Any = self.oracle.solve(v)
        norm = run.oracle.space.norm(direction)
        return certificate, direction / norm if 0.0 < norm < math.inf else direction
