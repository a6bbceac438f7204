"""A minimum that can be differentiated, and linear systems with its Hessian."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sanc.core.bounded.bounds import Box
from sanc.core.oracle import Oracle
from sanc.core.space import Space
from sanc.core.spectrum.curvature import Certificate, probe
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.errors import SingularMinimumError, warn
from sanc.implicit.derivatives import norm_of
from sanc.implicit.examination import NOT_FINITE_REASON, ONE_SIDED_REASON, SolveOptions, examine, solve_with
from sanc.implicit.free import free_oracle
from sanc.implicit.mixed import MixedDerivative
from sanc.implicit.smallest_eigenvalue import GradientOf
from sanc.implicit.solution import Derivative, Solution
from sanc.minimisation.objective import torch_modes

_MAX_DERIVATIVE_ERROR = 1e-2
"""Estimated relative error of a derivative beyond which `on_singular` decides."""
_DEFAULT_RTOL = 3e-7
"""Default bound on the relative error of a linear system that is solved by products, unless √eps is larger."""
_BOUND_REMEDY = 'Pass other bounds or leave them out; or pass on_singular="warn" to hold the variables at these bounds.'
"""What to do about a multiplier of zero."""
_REMEDY = (
    'Add a quadratic penalty to fun, pass a smaller tol or a larger max_products; or pass on_singular="pinv" for the '
    'pseudo-inverse, or "warn" to use the derivative all the same.'
)
"""What to do about another minimum that cannot be differentiated reliably."""


class DifferentiableMinimum:
    """A minimum x of f(·, θ) with all that its derivatives need.

    Attributes
    ----------
    x : Tensor
        The flat point.
    theta : tuple of Tensor
        The parameters, without a graph.
    options : SolveOptions
        Options of `argmin` for derivatives.
    solution : Solution
        The report, to which the problem adds every derivative.
    mixed : MixedDerivative
        Norms of ∂²f/∂x∂θ.
    """

    def __init__(
        self,
        oracle: Oracle,
        x: Tensor,
        *,
        theta: tuple[Tensor, ...],
        gradient: GradientOf,
        box: Box | None,
        result: Any,
        gradient_tolerance: float,
        options: SolveOptions,
    ) -> None:
        self.mixed = MixedDerivative()
        self.theta, self.options = theta, options
        self._inner = oracle
        self._face = None if box is None else free_oracle(oracle, box, x, result)
        self._oracle: Oracle = oracle if self._face is None else self._face
        with torch_modes(self._inner):
            self._examined = examine(self._oracle, self._compress(x), gradient, result, gradient_tolerance, options)
            self._operator = self._oracle.hessian(self._examined.x)
        examined = self._examined
        self.x = self._extend(examined.x, x)
        self.solution = Solution(
            result, examined.curvature.certificate, examined.grad_norm, examined.hessian_change, examined.reason
        )

    @property
    def space(self) -> Space:
        """The space of the free variables."""
        return self._oracle.space

    @property
    def differenced_products(self) -> bool:
        """Whether Hessian products are differences of gradients."""
        return self._inner.differenced_products

    def _compress(self, v: Tensor) -> Any:
        """Return the free entries of a vector."""
        return v if self._face is None else self._face.compress(v)

    def _extend(self, v: Any, base: Tensor) -> Tensor:
        """Return the vector with these free entries, and the entries of `base` for variables at a bound."""
        full: Any = v if self._face is None or self._face.free_indices is None else self._face.embed(v, base)
        return full  # type: ignore[no-any-return]

    @property
    def certificate(self) -> Certificate:
        """The bounds on λ_min."""
        return self._examined.curvature.certificate

    def matches(self, x: Tensor, theta: tuple[Tensor, ...]) -> bool:
        """Return whether this is the minimum at x for these parameters."""
        same = x.shape == self.x.shape and torch.equal(x, self.x)
        return same and all(a is b or torch.equal(a, b) for a, b in zip(theta, self.theta, strict=True))

    @property
    def inverse(self) -> Callable[[Tensor], Tensor] | None:
        """The product with H⁻¹ if all eigenpairs are known; None otherwise, and if some eigenvalues count as zero."""
        eigenpairs = self._examined.curvature.eigenpairs
        if eigenpairs is None or eigenpairs.dim < self.space.dim or self.options.pinv:
            return None

        def product(w: Tensor) -> Tensor:
            projections, complement_rhs = eigenpairs.eliminate(self._compress(w))
            coefficients = eigenpairs.coefficients(projections, 0.0)
            return self._extend(eigenpairs.combine(coefficients, 0.0 * complement_rhs), torch.zeros_like(self.x))

        return product

    def check(self) -> None:
        """Raise or warn if the minimum cannot be differentiated."""
        reason = self.solution.problem
        if reason:
            remedy = _BOUND_REMEDY if reason == ONE_SIDED_REASON else _REMEDY
            report_singular(f"{reason} ({self._curvature()})", self.options.on_singular, remedy)

    def _curvature(self) -> str:
        """Return λ_min, its bound and ‖∇f‖ in words."""
        return curvature_in_words(self.certificate, self.solution.grad_norm)

    def solve(self, u: Tensor) -> tuple[Tensor, Derivative]:
        """Return v with H v = u, zero for variables at a bound, and its error as that of a derivative."""
        examined, right = self._examined, self._compress(u.detach())
        rtol = self.options.rtol or math.sqrt(self.space.eps)
        if self.options.rtol is None and not examined.curvature.is_formed:
            rtol = max(rtol, _DEFAULT_RTOL)
        with torch_modes(self._inner):
            try:
                solution = solve_with(
                    self._oracle, self._operator, right, examined.curvature, rtol, self.options, examined.hessian_change
                )
            except NonFiniteProductError as error:
                raise SingularMinimumError(
                    f"the minimum cannot be differentiated: {NOT_FINITE_REASON}. Pass another x0, or a function "
                    "with a finite Hessian."
                ) from error
        relative, norm_v = solution.error + examined.x_error, self.space.norm(solution.v)
        absolute = relative * norm_v if norm_v > 0.0 else 0.0
        derivative = Derivative(relative, absolute, relative, solution.residual, solution.products)
        return self._extend(solution.v, torch.zeros_like(self.x)), derivative

    def check_accuracy(self, derivative: Derivative) -> None:
        """Raise or warn if the error of a solution is too large for a derivative."""
        has_warned = self.options.on_singular == "warn" and bool(self.solution.problem)
        if not derivative.solution_error <= _MAX_DERIVATIVE_ERROR and not has_warned:
            report_singular(
                f"the estimated relative error of its derivative is {derivative.solution_error:.1e} after "
                f"{derivative.products} products ({self._curvature()})",
                self.options.on_singular,
            )

    def include_products(self, v: Tensor, indices: list[int], products: Sequence[Tensor]) -> None:
        """Include the norms of the parts of Mᵀv for the parameters with these indices in the estimates of ‖M‖."""
        seen = dict(zip(indices, map(norm_of, products), strict=True))
        self.mixed = replace(self.mixed, norms=self.mixed.norms.including(seen, norm_of(v)))

    def reverse_derivative(
        self, solved: Derivative, v: Tensor, indices: list[int], products: Sequence[Tensor]
    ) -> Derivative:
        """Return Mᵀv as a derivative, given v as one, and the parts of Mᵀv for the parameters with these indices.

        With an error δ of v the error of Mᵀv is at most ‖M‖ δ, and with a residual r at most ‖MᵀH⁻¹‖ ‖r‖.
        """
        norm_v, norm, absolute = norm_of(v), math.hypot(*map(norm_of, products)), 0.0
        if norm_v > 0.0:
            norm_m = self.mixed.norms.combined(indices)
            x_error = norm_m * norm_v * self._examined.x_error
            absolute = min(
                norm_m * norm_v * solved.solution_error,
                self.mixed.inverse_norms.combined(indices) * solved.residual + x_error,
            )
        relative = absolute / norm if norm > 0.0 else math.inf if absolute > 0.0 else 0.0
        return replace(solved, error=relative, absolute_error=absolute)


def certificate_at(oracle: Oracle, x: Tensor, box: Box | None, result: Any, options: SolveOptions) -> Certificate:
    """Return the bounds on λ_min of the free variables at any point."""
    face = oracle if box is None else free_oracle(oracle, box, x, result)
    with torch_modes(oracle):
        certificate, _ = probe(
            face,
            face.compress(x),
            gradient_tolerance=math.inf,
            curvature_tolerance=0.0,
            confidence=options.confidence,
            max_products=options.max_products,
            seed=options.seed,
            thorough=True,
        )
    return certificate


def curvature_in_words(certificate: Certificate, grad_norm: float) -> str:
    """Return λ_min, its bound and ‖∇f‖ in words."""
    if math.isnan(certificate.lambda_min):
        return f"λ_min is unknown, as a Hessian product is not finite; ‖∇f‖ = {grad_norm:.2e}"
    return (
        f"λ_min = {certificate.lambda_min:.3e}, and λ_min ≥ {certificate.lower_bound:.3e} with probability "
        f"{certificate.confidence:g} after {certificate.products} products; ‖∇f‖ = {grad_norm:.2e}"
    )


def report_singular(reason: str, on_singular: str, remedy: str = _REMEDY) -> None:
    """Raise the error of a minimum without a reliable derivative, or warn about it."""
    if on_singular == "warn":
        warn(f"The derivative of the minimum may be wrong: {reason}.", RuntimeWarning)
        return
    raise SingularMinimumError(f"the minimum cannot be differentiated: {reason}. {remedy}")
