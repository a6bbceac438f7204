"""A function f(x, θ) with its minima, and their derivatives by the implicit function theorem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from sanc.autograd.internals import nodes
from sanc.core.bounded.bounds import Box
from sanc.core.oracle import Oracle
from sanc.core.space import Space, difference_step
from sanc.errors import ArgumentError, ArgumentTypeError, SecondDerivativeError, shown
from sanc.implicit.derivatives import gradient, is_transformed, norm_of
from sanc.implicit.examination import SolveOptions
from sanc.implicit.free import require_constant
from sanc.implicit.minimum import DifferentiableMinimum, certificate_at, curvature_in_words, report_singular
from sanc.implicit.mixed import MixedProducts, examine_mixed
from sanc.implicit.solution import Derivative, Solution
from sanc.minimisation.bounds import build_box
from sanc.minimisation.entry import minimize
from sanc.minimisation.objective import build_oracle
from sanc.minimisation.trees import Tree, is_tree, rebuild, tree_leaves


class ImplicitProblem:
    """A function of x and θ with the minima that were found so far, and their derivatives.

    Attributes
    ----------
    theta : list of Tensor
        The floating-point tensors of the parameters.
    transformed : bool
        Whether a transform of torch.func is at work.
    solutions : list of Solution
        The report of each minimum: one, or one for each entry of a batch inside vmap.
    """

    def __init__(
        self, fun: Callable[..., Tensor], x0: Any, theta: Any, solve_options: SolveOptions, options: dict[str, Any]
    ) -> None:
        self._fun, self._theta_tree, self._options = fun, theta, options
        self._solve_options = solve_options
        self._x0 = _tensors(x0)
        self._tree = Tree(self._x0, "x0") if is_tree(self._x0) else None
        self._box = self._build_box(options.get("bounds"))
        leaves = [leaf for _, leaf in tree_leaves(theta, "theta")]
        if any(isinstance(leaf, Tensor) and leaf.is_complex() and leaf.requires_grad for leaf in leaves):
            raise ArgumentTypeError(
                "theta holds a complex tensor that requires a gradient: pass torch.view_as_real of it, and call "
                "torch.view_as_complex in fun."
            )
        self.theta = [leaf for leaf in leaves if _is_parameter(leaf)]
        if not self.theta:
            raise ArgumentError(
                f"theta = {shown(theta)} holds no floating-point tensor: pass parameters as tensors, or call "
                "sanc.minimize if there are none."
            )
        self.transformed = is_transformed(self.theta)
        # The indices of the parameters that derivatives are asked for.
        self._differentiated = [
            i for i, tensor in enumerate(self.theta) if self.transformed or _is_differentiated(tensor)
        ]
        self.solutions: list[Solution] = []
        self._minima: list[DifferentiableMinimum] = []
        self._last_solved: tuple[DifferentiableMinimum, Derivative] | None = None
        self._next_index = 0  # index of the minimum that is asked for next, if all are asked for in turn

    def unflatten(self, flat: Tensor) -> Any:
        """Return a flat vector in the form of x0, with its graph."""
        if self._tree is not None:
            return self._tree.build(flat)
        return flat.reshape(self._x0.shape)

    def parameters(self, theta: tuple[Tensor, ...]) -> Any:
        """Return parameters in the form that the caller passed."""
        given: Iterator[Tensor] = iter(theta)
        leaves = (leaf for _, leaf in tree_leaves(self._theta_tree, "theta"))
        return rebuild(self._theta_tree, (next(given) if _is_parameter(leaf) else leaf for leaf in leaves))

    def value(self, x: Tensor, *theta: Tensor) -> Tensor:
        """Return f(x, θ) of a flat x, with its graph."""
        return self._fun(self.unflatten(x), self.parameters(theta)).reshape(())

    # ------------------------------------------------------------------ the minimum

    def minimise(self, theta: tuple[Tensor, ...]) -> Tensor:
        """Return the flat minimum for these parameters; raise or warn if it cannot be differentiated."""
        theta = tuple(tensor.detach() for tensor in theta)
        if self._differentiated:
            self._check_captured(theta)
        result = self._run(self._x0, theta, certify=not self._differentiated)
        if not self._differentiated:
            self.solutions.append(Solution(result, result.certificate, self.gradient_norm(result)))
            return self._flat(result.x)
        minimum = self._minimum(result, theta)
        if minimum.certificate.saddle and minimum.solution.problem:  # the short probe of the run has missed it
            minimum = self._minimum(self._run(result.x, theta, certify=True), theta)
        minimum.check()
        self._check_parameters(minimum, theta)
        self._keep(minimum)
        return minimum.x.clone()

    def _check_parameters(self, minimum: DifferentiableMinimum, theta: tuple[Tensor, ...]) -> None:
        """Raise or warn if f reads a differentiated parameter without its graph."""
        if minimum.differenced_products:
            return
        names = [name for name, leaf in tree_leaves(self._theta_tree, "theta") if _is_parameter(leaf)]
        products = MixedProducts(self.value, minimum.x, theta, self._differentiated)
        minimum.mixed = examine_mixed(products, names, minimum.inverse)
        if reason := minimum.mixed.reason:
            remedy = (
                'Compute with the tensors themselves; or pass on_singular="warn" to use the derivative all the same.'
            )
            report_singular(reason, self._solve_options.on_singular, remedy)

    def _run(self, x0: Any, theta: tuple[Tensor, ...], *, certify: bool) -> Any:
        """Minimise; raise or warn if the run does not converge."""
        result = self.minimise_from(x0, theta, certify=certify)
        if not result.success:
            x = self._flat(result.x)
            certificate = certificate_at(self._oracle(result.x, theta), x, self._box, result, self._solve_options)
            report_singular(
                f"the run did not converge. {result.message} "
                f"({curvature_in_words(certificate, self.gradient_norm(result))})",
                self._solve_options.on_singular,
                'Raise max_iter or tol, or pass another x0; or pass on_singular="warn" to continue from that point.',
            )
        return result

    def minimise_from(self, x0: Any, theta: tuple[Tensor, ...], *, certify: bool) -> Any:
        """Return the result of a run."""
        return minimize(self._fun, x0, (self.parameters(theta),), certify=certify, **self._options)

    def gradient_norm(self, result: Any) -> float:
        """Return ‖∇f‖ of a result; with bounds the norm of its free entries."""
        multipliers = result.get("multipliers")
        if multipliers is None:
            return _norm(result.jac)
        pairs = zip(_leaves(result.jac), _leaves(multipliers), strict=True)
        return _norm([gradient - multiplier for gradient, multiplier in pairs])

    def gradient_tolerance(self, result: Any) -> float:
        """Return the tolerance on ‖∇f‖ of the run; infinite if that is not known."""
        return math.inf if result.certificate is None else float(result.certificate.gradient_tolerance)

    @property
    def hvp(self) -> Any:
        """How Hessian products are computed, by the caller's choice."""
        return self._options.get("hvp", "auto")

    def _minimum(self, result: Any, theta: tuple[Tensor, ...]) -> DifferentiableMinimum:
        """Return the minimum that a run found, with its curvature."""
        return DifferentiableMinimum(
            self._oracle(result.x, theta),
            self._flat(result.x),
            theta=theta,
            gradient=lambda x: gradient(self.value, x, theta, transformed=False),
            box=self._box,
            result=result,
            gradient_tolerance=self.gradient_tolerance(result),
            options=self._solve_options,
        )

    def _oracle(self, x: Any, theta: tuple[Tensor, ...]) -> Oracle:
        """Return the oracle of f(·, θ), which has the point x."""
        oracle, _, _ = build_oracle(
            self._fun, x, jac=None, hess=None, hessp=None, args=(self.parameters(theta),), hvp=self.hvp
        )
        return oracle

    def _keep(self, minimum: DifferentiableMinimum) -> None:
        """Keep a minimum, and its report for the caller."""
        self._minima.append(minimum)
        self.solutions.append(minimum.solution)

    def _flat(self, x: Any) -> Tensor:
        """Return a point as a new flat vector."""
        flat = x.reshape(-1).clone() if self._tree is None else self._tree.flatten(x, "fun")
        assert isinstance(flat, Tensor)
        return flat

    def _check_captured(self, theta: tuple[Tensor, ...]) -> None:
        """Raise an error if f depends on tensors that require a gradient and are not in theta, or is not repeatable.

        Nodes that are in the graphs of two evaluations were there before: they belong to a tensor of the caller. A
        function may also make such tensors itself, for example to compute a derivative as a part of its value.
        """
        with torch.enable_grad():
            first: Any = self._fun(self.unflatten(self._flat_start()), self.parameters(theta))
            if not isinstance(first, Tensor):
                return  # `minimize` reports it
            second = self._fun(self.unflatten(self._flat_start()), self.parameters(theta))
        if first.is_floating_point() and bool(
            (abs(first - second) > math.sqrt(torch.finfo(first.dtype).eps) * abs(first)).any()
        ):
            raise ArgumentError(
                f"fun returned {first.detach().tolist()!r} and then {second.detach().tolist()!r} for the same x and "
                "theta: return the same value for the same arguments."
            )
        if first.requires_grad and set(nodes(first.grad_fn)) & set(nodes(second.grad_fn)):
            raise ArgumentError(
                "fun depends on a tensor that requires a gradient and is not in theta, so that its gradient would be "
                "missing: pass it in theta, or detach it. The parameters of a module can be passed with "
                "torch.func.functional_call."
            )

    def _flat_start(self) -> Tensor:
        """Return the flat starting point, projected on the bounds."""
        start = self._flat(self._x0).detach()
        return start if self._box is None else self._box.project(start)

    def _build_box(self, bounds: Any) -> Box | None:
        """Return the box of the caller's bounds; None if no variable is bounded, or if `minimize` rejects x0."""
        start = self._flat(self._x0).detach()
        if bounds is None or not start.is_floating_point():
            return None
        require_constant(bounds)
        return build_box(bounds, self._x0, Space(len(start), start.dtype, start.device), start)

    # ------------------------------------------------------------------ derivatives

    def solve(self, u: Tensor, x: Tensor, theta: tuple[Tensor, ...]) -> Tensor:
        """Return v with ∇²_x f(x, θ) v = u."""
        try:
            u = u.detach()
        except RuntimeError as error:
            if "atching" not in str(error):
                raise
            raise ArgumentError(
                "is_grads_batched or vectorize = True cannot be used with argmin: call torch.func.vmap or "
                "torch.func.jacrev, or leave it out."
            ) from error
        minimum = self._minimum_at(x, theta)
        v, derivative = minimum.solve(u)
        minimum.solution.derivatives.append(derivative)
        minimum.check_accuracy(derivative)
        self._last_solved = minimum, derivative
        return v

    def report_derivative(self, v: Tensor, needed: list[int], products: Sequence[Tensor]) -> None:
        """Report the error of the products with the parts of M, where `v` is the last solution.

        Inside a transform of torch.func the numbers are not known.
        """
        if not self.transformed and not is_transformed([v, *products]):
            assert self._last_solved is not None
            minimum, solved = self._last_solved
            minimum.include_products(v, needed, products)
            minimum.solution.derivatives[-1] = minimum.reverse_derivative(solved, v, needed, products)

    def _minimum_at(self, x: Tensor, theta: tuple[Tensor, ...]) -> DifferentiableMinimum:
        """Return the minimum at x for these parameters, one of those that were found."""
        x, theta = x.detach(), tuple(tensor.detach() for tensor in theta)
        count = len(self._minima)
        for index in [(self._next_index + shift) % count for shift in range(count)]:
            if self._minima[index].matches(x, theta):
                self._next_index = (index + 1) % count
                return self._minima[index]
        raise ArgumentError(
            "the parameters differ from those of the forward pass: do not change theta in place between the passes, "
            "and call argmin inside the function that torch.func transforms."
        )

    @property
    def _has_differenced_products(self) -> bool:
        return any(minimum.differenced_products for minimum in self._minima)

    def require_exact_products(self) -> None:
        """Raise an error if Hessian products are differences: further derivatives need the exact ones."""
        if self._has_differenced_products:
            raise SecondDerivativeError(
                "derivatives of higher order, in forward mode and by torch.func need exact Hessian products, and hvp "
                'is "finite-difference": write fun with operators that have second derivatives, and leave hvp out.'
            )

    def mixed_product(self, v: Tensor, x: Tensor, theta: tuple[Tensor, ...], needed: list[int]) -> list[Tensor] | None:
        """Return −vᵀ ∂²f/∂x∂θ by differences of ∇_θ f if Hessian products are differences; otherwise None."""
        if not self._has_differenced_products:
            return None
        if self.transformed or torch.is_grad_enabled():
            self.require_exact_products()
        minimum = self._minimum_at(x, theta)
        norm = norm_of(v)
        products = [torch.zeros_like(theta[index]) for index in needed]
        if norm == 0.0:
            return products
        h = 2.0 ** round(math.log2(difference_step(minimum.space, x) / norm))
        x, d = x.detach(), h * v
        points = [(0.5, x + d), (-0.5, x - d)] if self._box is None else self._box.difference_points(x, d)
        for weight, point in points:
            for product, grad in zip(products, self._parameter_gradients(point, theta, needed), strict=True):
                if grad is not None:
                    product.sub_(grad, alpha=weight / h)
        return products

    def _parameter_gradients(
        self, x: Tensor, theta: tuple[Tensor, ...], needed: list[int]
    ) -> tuple[Tensor | None, ...]:
        """Return ∇_θ f for some of the parameters; None for one that f does not read."""
        with torch.enable_grad():
            leaves = [tensor.detach() for tensor in theta]
            chosen = [leaves[index].requires_grad_() for index in needed]
            return torch.autograd.grad(self.value(x, *leaves), chosen, allow_unused=True)


def _tensors(x0: Any) -> Any:
    """Return a point with tensors in place of arrays and numbers."""
    if is_tree(x0):
        leaves = [leaf for _, leaf in tree_leaves(x0, "x0")]
        return rebuild(x0, iter([_tensor(leaf) for leaf in leaves]))
    return _tensor(x0)


def _tensor(leaf: Any) -> Tensor:
    """Return a leaf of x0 as a detached tensor of real numbers; float64 unless it has a floating-point type."""
    if isinstance(leaf, Tensor):
        point: Tensor = leaf.detach()
        return point if point.is_floating_point() or point.is_complex() else point.double()
    try:
        array = np.array(leaf)
        return torch.from_numpy(array if array.dtype == np.float32 else array.astype(np.float64))
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"x0 = {shown(leaf)} is not an array of real numbers: pass one.") from None


def _is_parameter(leaf: Any) -> bool:
    """Return whether a leaf of theta can have a gradient."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_differentiated(tensor: Tensor) -> bool:
    """Return whether a derivative by a parameter is asked for: a gradient, or a tangent of the forward mode."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _leaves(v: Any) -> list[Any]:
    """Return the tensors of a point."""
    return [leaf for _, leaf in tree_leaves(v, "v")] if is_tree(v) else [v]


def _norm(v: Any) -> float:
    """Return the Euclidean norm of a tensor or of all leaves of a tree."""
    return math.hypot(*map(norm_of, _leaves(v)))
