"""A minimum that can be differentiated, and linear systems with its Hessian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sanc.core.bounded.bounds import Box
from sanc.core.oracle import Oracle
from sanc.core.space import Space
from sanc.core.spectrum.curvature import Certificate
from sanc.errors import SingularMinimumError, warn
from sanc.implicit.examination import ONE_SIDED, SolveOptions, examine, solve_with
from sanc.implicit.free import free_oracle
from sanc.implicit.linear import solve_least_squares
from sanc.implicit.solution import Derivative, Solution
from sanc.minimisation.objective import torch_modes

_LARGEST_ERROR = 1e-2
"""Estimated relative error of a derivative beyond which `on_singular` decides."""
_BOUND_REMEDY = 'Pass other bounds or leave them out; or pass on_singular="warn" to hold the variables at these bounds.'
_REMEDY = (
    'Add a quadratic penalty to fun, pass a smaller tol or a larger max_products; or pass on_singular="pinv" for the '
    'pseudo-inverse, or "warn" to use the derivative all the same.'
)


class DifferentiableMinimum:
    """A minimum x of f(·, θ) with all that its derivatives need.

    Attributes
    ----------
    x : Tensor
        The flat point.
    theta : tuple of Tensor
        The parameters, without a graph.
    solution : Solution
        The report, to which every linear system is added.
    """

    def __init__(
        self, oracle: Oracle, x: Tensor, theta: tuple[Tensor, ...], box: Box | None, result: Any, options: SolveOptions
    ) -> None:
        self.theta, self.options = theta, options
        self._inner = oracle
        self._face = None if box is None else free_oracle(oracle, box, x, result)
        self._oracle: Oracle = oracle if self._face is None else self._face
        with torch_modes(self._inner):
            self._examined = examine(self._oracle, self._compress(x), result, options)
            self._operator = self._oracle.hessian(self._examined.x)
        examined = self._examined
        self.x = self._extend(examined.x, x)
        self.solution = Solution(
            result, examined.certificate, examined.grad_norm, examined.hessian_change, examined.problem
        )

    @property
    def space(self) -> Space:
        """The space of the free variables."""
        return self._oracle.space

    @property
    def hvp(self) -> str:
        """How torch computes Hessian products."""
        return self._inner.hvp

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
        return self._examined.certificate

    def matches(self, x: Tensor, theta: tuple[Tensor, ...]) -> bool:
        """Whether this is the minimum at x for these parameters."""
        same = x.shape == self.x.shape and torch.equal(x, self.x)
        return same and all(a is b or torch.equal(a, b) for a, b in zip(theta, self.theta, strict=True))

    def check(self) -> None:
        """Raise or warn if the minimum cannot be differentiated."""
        problem = self.solution.problem
        remedy = _BOUND_REMEDY if problem == ONE_SIDED else _REMEDY
        if self.options.on_singular == "pinv" and problem != ONE_SIDED:
            problem = "it has negative curvature" if self.certificate.saddle else ""
        if problem:
            report_singular(f"{problem} ({self._curvature()})", self.options.on_singular, remedy)

    def _curvature(self) -> str:
        """Return λ_min, its bound and ‖∇f‖ in words."""
        certificate = self.certificate
        return (
            f"λ_min = {certificate.lambda_min:.3e}, and λ_min ≥ {certificate.lower_bound:.3e} with probability "
            f"{certificate.confidence:g} after {certificate.products} products; ‖∇f‖ = {self.solution.grad_norm:.2e}"
        )

    def solve(self, u: Tensor) -> Tensor:
        """Return v with H v = u; zero for variables at a bound."""
        right = self._compress(u.detach())
        rtol = self.options.rtol or math.sqrt(self._oracle.space.eps)
        with torch_modes(self._inner):
            if self.options.on_singular == "pinv":
                solution = solve_least_squares(
                    self._operator, right, self._oracle.space, rtol=rtol, max_products=self.options.max_products
                )
            else:
                solution = solve_with(
                    self._oracle, self._operator, right, self._examined, rtol, self.options.max_products
                )
        error = solution.error + self._examined.x_error
        self.solution.derivatives.append(Derivative(error, solution.residual, solution.products))
        has_warned = self.options.on_singular == "warn" and bool(self.solution.problem)
        if not error <= _LARGEST_ERROR and not has_warned:
            report_singular(
                f"the estimated relative error of its derivative is {error:.1e} after {solution.products} products "
                f"({self._curvature()})",
                self.options.on_singular,
            )
        return self._extend(solution.v, torch.zeros_like(self.x))


def report_singular(problem: str, on_singular: str, remedy: str = _REMEDY) -> None:
    """Raise the error of a minimum without a reliable derivative, or warn about it."""
    if on_singular == "warn":
        warn(f"The derivative of the minimum may be wrong: {problem}.", RuntimeWarning)
        return
    raise SingularMinimumError(f"the minimum cannot be differentiated: {problem}. {remedy}")
