"""A minimum that can be differentiated: its curvature, a last Newton step, and linear systems with its Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.bounded.bounds import Box
from sanc.core.oracle import Oracle
from sanc.core.space import Space
from sanc.core.spectrum.curvature import Certificate, explore
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.errors import SingularMinimumError, warn
from sanc.implicit.free import free_oracle, has_weak_bounds
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
_DIFFERENCE_STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
"""Steps of second differences, relative to ‖x‖: around eps^(1/4), and shorter ones for narrow minima."""
_SAME_CURVATURE, _LARGEST_ROUNDING = 0.1, 0.01
"""Relative difference of curvatures that count as equal, and roundoff up to which a second difference is used."""
_LARGEST_ERROR = 1e-2
"""Estimated relative error of a derivative beyond which `on_singular` decides."""
_ONE_SIDED = "a variable is at a bound with a multiplier of zero up to tol, so that the derivative is one-sided"
_BOUND_REMEDY = 'Pass other bounds or leave them out; or pass on_singular="warn" to hold the variables at these bounds.'
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
        self, oracle: Oracle, x: Tensor, theta: tuple[Tensor, ...], box: Box | None, solution: Solution,
        options: SolveOptions,
    ) -> None:  # fmt: skip
        self.theta, self.solution, self.options = theta, solution, options
        self._inner = oracle
        self._face = None if box is None else free_oracle(oracle, box, x, solution.result)
        self._oracle: Oracle = oracle if self._face is None else self._face
        self._x_error = 0.0  # relative error of a derivative because ∇f is not exactly zero
        self.x = x
        with torch_modes(self._inner):
            self._scaling = self._explore()
            if not self.solution.problem and options.on_singular != "pinv":
                self._make_newton_step()
                self._compare_second_differences()
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
        return self._compress(self.x)

    def _compress(self, v: Tensor) -> Any:
        """Return the free entries of a vector."""
        return v if self._face is None else self._face.compress(v)

    def _extend(self, v: Any, base: Tensor) -> Tensor:
        """Return the vector with these free entries, and the entries of `base` for variables at a bound."""
        full: Any = v if self._face is None or self._face.free_indices is None else self._face.embed(v, base)
        return full  # type: ignore[no-any-return]

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
        # A variable whose distance from a bound is δ has a multiplier of at most ‖H‖δ there.
        norm = 0.0 if explored.spectrum is None else explored.spectrum.norm / explored.product_scale
        margin = known.eps_gradient / norm if known is not None and norm > 0.0 else 0.0
        if has_weak_bounds(self.solution.result) or self._reaches_bound(self._point(), margin):
            self.solution.problem = _ONE_SIDED
        return spectral_scaling(explored, self._oracle.space.dim)

    def _make_newton_step(self) -> None:
        """Make a Newton step to lower ‖∇f‖ further, and measure how the Hessian changes along it.

        At a regular minimum the step is short, and the Hessian hardly changes. Otherwise the Hessian at this point is
        no approximation of that at the minimum. Nothing is evaluated outside the bounds: if the step reaches one, the
        variable has a multiplier of zero there.
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
            new_x = x - step
            if self._reaches_bound(new_x):
                self.solution.problem = _ONE_SIDED
                return
            after = oracle.hessian(new_x)
            change, size = space.norm(after(step) - image), space.norm(image)
            after.release()
        except NonFiniteProductError:
            self.solution.problem = "a Hessian product near it is not finite"
            return
        self.solution.hessian_change = change / size if size > 0.0 else 0.0
        _, new_g = oracle.gradient(new_x)
        ratio = space.norm(new_g) / space.norm(g)
        if self.solution.hessian_change > _DEGENERATE_CHANGE or not math.isfinite(ratio):
            self.solution.problem = (
                f"its Hessian changes by {100 * self.solution.hessian_change:.0f} % along the last Newton step, so "
                "that the minimum is degenerate or tol is too large"
            )
        if ratio < 1.0:
            self.x = self._extend(new_x, self.x)
            self.solution.grad_norm *= ratio
        else:
            ratio = 1.0
        self._x_error = 2.0 * self.solution.hessian_change * ratio  # of H and of ∂²f/∂x∂θ

    def _compare_second_differences(self) -> None:
        """Compare the Hessian with second differences of f along a random direction.

        At a kink of f or of its gradient torch returns the derivatives of one side, which do not determine the
        derivative of the minimum. Points at which f is not defined, or beyond bounds, are not compared.
        """
        oracle, x = self._oracle, self._point()
        space = oracle.space
        d: Any = space.normal(np.random.default_rng((self.options.seed, 13)))
        d = d / space.norm(d)
        operator = oracle.hessian(x)
        expected = space.dot(d, operator(d))
        operator.release()
        value, found = oracle.value(x), []
        for step in ((space.norm(x) or 1.0) * fraction for fraction in _DIFFERENCE_STEPS):
            ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
            curvature = ((ahead - value) + (behind - value)) / step**2
            if _is_same(curvature, expected):
                return
            if 4.0 * space.eps * max(map(abs, (value, ahead, behind))) <= _LARGEST_ROUNDING * abs(curvature) * step**2:
                found.append((step, curvature))
        if len(found) < 2:
            return
        (longer, first), (shorter, last) = found[-2:]
        if _is_same(first, last) or _is_same(longer * first, shorter * last):  # of a kink of ∇f, or of f
            self.solution.problem = (
                f"along a random direction its Hessian has a curvature of {expected:.3g}, and differences of f have "
                f"one of {last:.3g}, so that f has a kink there or its second derivatives are wrong"
            )

    def _reaches_bound(self, x: Any, margin: float = 0.0) -> bool:
        """Whether a free variable of x is at a bound, beyond it, or within `margin` of it."""
        box = None if self._face is None else self._face.box
        return box is not None and bool(((x - box.lower <= margin) | (box.upper - x <= margin)).any())

    def check(self) -> None:
        """Raise or warn if the minimum cannot be differentiated."""
        problem = self.solution.problem
        remedy = _BOUND_REMEDY if problem == _ONE_SIDED else _REMEDY
        if self.options.on_singular == "pinv" and problem != _ONE_SIDED:
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
                solution = self._solve_with(self._operator, right, rtol)
        error = solution.error + self._x_error
        self.solution.derivatives.append(Derivative(error, solution.residual, solution.products))
        has_warned = self.options.on_singular == "warn" and bool(self.solution.problem)
        if not error <= _LARGEST_ERROR and not has_warned:
            report_singular(
                f"the estimated relative error of its derivative is {error:.1e} after {solution.products} products "
                f"({self._curvature()})",
                self.options.on_singular,
            )
        return self._extend(solution.v, torch.zeros_like(self.x))

    def _solve_with(self, operator: Any, u: Any, rtol: float) -> LinearSolution:
        """Solve a linear system; its error includes the error of differenced products."""
        lower, space = self.certificate.lower_bound, self._oracle.space
        solution = solve(
            operator, u, space, self._scaling, lower=lower, rtol=rtol, max_products=self.options.max_products
        )
        norm_v = space.norm(solution.v)
        difference_error = operator.error(solution.v, operator(solution.v)) if self.hvp == "finite-difference" else 0.0
        if difference_error > 0.0 and norm_v > 0.0 and lower > 0.0:
            solution = replace(solution, error=solution.error + difference_error / (lower * norm_v))
        return solution


def _is_same(curvature: float, other: float) -> bool:
    """Whether two curvatures are equal up to the error of differences."""
    return abs(curvature - other) <= _SAME_CURVATURE * abs(other)


def report_singular(problem: str, on_singular: str, remedy: str = _REMEDY) -> None:
    """Raise the error of a minimum without a reliable derivative, or warn about it."""
    if on_singular == "warn":
        warn(f"The derivative of the minimum may be wrong: {problem}.", RuntimeWarning)
        return
    raise SingularMinimumError(f"the minimum cannot be differentiated: {problem}. {remedy}")
