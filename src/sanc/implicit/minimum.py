"""A minimum that can be differentiated: its curvature, a last Newton step, and linear systems with its Hessian."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sanc.core.curvature import Certificate, explore
from sanc.core.krylov import NonFiniteProductError
from sanc.core.oracle import Oracle
from sanc.core.space import Space
from sanc.errors import SingularMinimumError
from sanc.implicit.free import FreeOracle
from sanc.implicit.linear import LinearSolution, SpectralScaling, solve, solve_least_squares, spectral_scaling
from sanc.implicit.solution import Derivative, Solution
from sanc.minimisation.objective import torch_modes

_LOWER_BOUND_ERROR = 0.5
"""Relative error of the lower bound of λ_min. The bound only scales the error estimate, so a factor of two suffices."""
_NEWTON_TOL = 1e-2
"""Relative error of the last Newton step, which thus divides the gradient norm by about a hundred."""
_DEGENERATE_CHANGE = 0.1
"""Relative change of the Hessian along the last Newton step from which the minimum counts as degenerate.

At a regular minimum it is of the order of the step. At the minimum of x⁴ it is 5/9 at any distance.
"""
_LARGEST_ERROR = 1e-2
"""Estimated relative error of a derivative beyond which `on_singular` decides."""
_REMEDY = (
    'Add a quadratic penalty to fun, pass a smaller tol or a larger max_products; or pass on_singular="pinv" for the '
    'pseudo-inverse, or "warn" to use the derivative all the same.'
)


@dataclass(frozen=True)
class SolveOptions:
    """Options of `argmin` for derivatives; its docstring describes them."""

    on_singular: str
    rtol: float | None
    confidence: float
    max_products: int | None
    seed: int


class Minimum:
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
        self, oracle: Oracle, x: Tensor, theta: tuple[Tensor, ...], free: Tensor | None, solution: Solution,
        options: SolveOptions,
    ) -> None:  # fmt: skip
        self.theta, self.solution, self.options = theta, solution, options
        self._inner = oracle
        self._free = None if free is None else FreeOracle(oracle, x, free)
        self._oracle: Oracle = self._free or oracle
        self._x_error = 0.0  # relative error of a derivative because ∇f is not exactly zero
        self.x = x
        with torch_modes(self._inner):
            self._scaling = self._explore()
            if not self.solution.problem and options.on_singular != "pinv":
                self._make_newton_step()
            self._operator = self._oracle.hessian(self._point())

    @property
    def space(self) -> Space:
        """The space of the free variables."""
        return self._oracle.space

    @property
    def hvp(self) -> str:
        """How torch computes Hessian products."""
        return self._inner.hvp

    def _point(self) -> Any:
        """Return x in the space of the free variables."""
        return self.x if self._free is None else self._free.restrict(self.x)

    def matches(self, x: Tensor, theta: tuple[Tensor, ...]) -> bool:
        """Whether this is the minimum at x for these parameters."""
        same = x.shape == self.x.shape and torch.equal(x, self.x)
        return same and all(a is b or torch.equal(a, b) for a, b in zip(theta, self.theta, strict=True))

    @property
    def certificate(self) -> Certificate:
        """The bounds on λ_min."""
        assert self.solution.certificate is not None
        return self.solution.certificate

    def _explore(self) -> SpectralScaling:
        """Bound λ_min, and keep the Ritz pairs that were found as a scaling of later linear systems."""
        options, known = self.options, self.solution.result.certificate
        explored = explore(
            self._oracle,
            self._point(),
            eps=math.inf if known is None else known.eps_gradient,
            eps_curvature=0.0,
            confidence=options.confidence,
            max_products=options.max_products,
            seed=options.seed,
            thorough=True,
            relative_error=_LOWER_BOUND_ERROR,
        )
        certificate = self.solution.certificate = explored.certificate
        self.solution.grad_norm = certificate.grad_norm
        if not certificate.lower_bound > 0.0:
            self.solution.problem = "λ_min of its Hessian is not bounded away from zero"
        return spectral_scaling(explored, self._oracle.space.dim)

    def _make_newton_step(self) -> None:
        """Make a Newton step to lower ‖∇f‖ further, and measure how the Hessian changes along it.

        At a regular minimum the step is short, and the Hessian hardly changes. Otherwise neither the Hessian nor its
        inverse at this point tell those of the minimum.
        """
        oracle, x = self._oracle, self._point()
        space = oracle.space
        _, g = oracle.gradient(x)
        if space.norm(g) == 0.0:
            return
        before = oracle.hessian(x)
        try:
            step: Any = self._solve_with(before, g, _NEWTON_TOL).v
            image = before(step)
            before.release()
            after = oracle.hessian(x - step)
            change, size = space.norm(after(step) - image), space.norm(image)
        except NonFiniteProductError:
            self.solution.problem = "a Hessian product near it is not finite"
            return
        self.solution.hessian_change = change / size if size > 0.0 else 0.0
        _, new_g = oracle.gradient(x - step)
        ratio = space.norm(new_g) / space.norm(g)
        if self.solution.hessian_change > _DEGENERATE_CHANGE or not math.isfinite(ratio):
            self.solution.problem = (
                f"its Hessian changes by {100 * self.solution.hessian_change:.0f} % along the last Newton step, so "
                "that the minimum is degenerate or tol is too large"
            )
        if ratio < 1.0 and self._free is None:
            self.x = x - step
            self.solution.grad_norm *= ratio
        else:
            ratio = 1.0
        self._x_error = 2.0 * self.solution.hessian_change * ratio  # of H and of ∂²f/∂x∂θ

    def check(self) -> None:
        """Raise or warn if the minimum cannot be differentiated."""
        problem = self.solution.problem
        if self.options.on_singular == "pinv":
            problem = "it has negative curvature" if self.certificate.saddle else ""
        if problem:
            report_singular(f"{problem} ({self._curvature()})", self.options.on_singular)

    def _curvature(self) -> str:
        """Return λ_min, its bound and ‖∇f‖ in words."""
        certificate = self.certificate
        return (
            f"λ_min = {certificate.lambda_min:.3e}, and λ_min ≥ {certificate.lower_bound:.3e} with probability "
            f"{certificate.confidence:g} after {certificate.products} products; ‖∇f‖ = {self.solution.grad_norm:.2e}"
        )

    def solve(self, u: Tensor) -> Tensor:
        """Return v with H v = u; zero for variables at a bound."""
        right = u.detach() if self._free is None else self._free.restrict(u.detach())
        rtol = self.options.rtol or math.sqrt(self._oracle.space.eps)
        with torch_modes(self._inner):
            if self.options.on_singular == "pinv":
                solution = solve_least_squares(
                    self._operator, right, self._oracle.space, rtol=rtol, max_products=self.options.max_products
                )
            else:
                solution = self._solve_with(self._operator, right, rtol)
        error = solution.error + self._x_error
        self.solution.derivatives.append(Derivative(error, solution.residual, solution.products))
        if not error <= _LARGEST_ERROR and not self.solution.problem:
            report_singular(
                f"the estimated relative error of its derivative is {error:.1e} after {solution.products} products "
                f"({self._curvature()})",
                self.options.on_singular,
            )
        return solution.v if self._free is None else self._free.extend(solution.v)

    def _solve_with(self, operator: Any, u: Any, rtol: float) -> LinearSolution:
        """Solve a linear system; the error of differenced products is added to that of the solution."""
        lower, space = self.certificate.lower_bound, self._oracle.space
        solution = solve(
            operator, u, space, self._scaling, lower=lower, rtol=rtol, max_products=self.options.max_products
        )
        norm_v = space.norm(solution.v)
        difference_error = operator.error(solution.v, operator(solution.v)) if self.hvp == "finite-difference" else 0.0
        if difference_error > 0.0 and norm_v > 0.0 and lower > 0.0:
            solution = replace(solution, error=solution.error + difference_error / (lower * norm_v))
        return solution


def report_singular(problem: str, on_singular: str, remedy: str = _REMEDY) -> None:
    """Raise the error of a minimum without a reliable derivative, or warn about it."""
    if on_singular == "warn":
        warnings.warn(f"The derivative of the minimum may be wrong: {problem}.", RuntimeWarning, stacklevel=2)
        return
    raise SingularMinimumError(f"the minimum cannot be differentiated: {problem}. {remedy}")
