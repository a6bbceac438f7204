"""The minimum and linear systems with its Hessian as functions that torch differentiates, to any order.

With g = ∇_x f and H = ∇²_x f, the minimum x(θ) has g(x(θ), θ) = 0. So dx = −H⁻¹ (∂g/∂θ) dθ, and for a cotangent u
of x that of θ is −(∂g/∂θ)ᵀ v with H v = u. The solution v is a function of u, x and θ with dv = H⁻¹ (du − dH v).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sanc.autograd.internals import forward_mode_enabled, without_saving_hooks
from sanc.implicit.derivatives import gradient, gradient_in, pull_back, push_forward


class ParametricFunction(Protocol):
    """The part of `argmin`'s problem that the functions use."""

    transformed: bool

    def value(self, x: Tensor, *theta: Tensor) -> Tensor: ...
    def minimise(self, theta: tuple[Tensor, ...]) -> Tensor: ...
    def require_exact_products(self) -> None: ...
    def solve(self, u: Tensor, x: Tensor, theta: tuple[Tensor, ...]) -> Tensor: ...
    def mixed_product(
        self, v: Tensor, x: Tensor, theta: tuple[Tensor, ...], needed: list[int]
    ) -> list[Tensor] | None: ...
    def report_derivative(self, v: Tensor, needed: list[int], products: Sequence[Tensor]) -> None: ...


class ArgMin(torch.autograd.Function):
    """x(θ), a minimum of f(·, θ)."""

    @staticmethod
    def forward(problem: ParametricFunction, *theta: Tensor) -> Tensor:
        with without_saving_hooks():
            return problem.minimise(theta)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem, *theta = inputs
        ctx.save_for_backward(output, *theta)
        ctx.save_for_forward(output, *theta)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Any, ...]:
        x, *theta = ctx.saved_tensors
        problem, v = ctx.problem, solution_of(ctx.problem, u, x, *theta)
        needed = [index for index in range(len(theta)) if ctx.needs_input_grad[index + 1]]
        products = problem.mixed_product(v, x, tuple(theta), needed)
        if products is None:
            function = gradient_in(problem.value, x, theta, needed, transformed=problem.transformed)
            chosen = [theta[index] for index in needed]
            products = pull_back(function, chosen, (-v,), transformed=problem.transformed)
        problem.report_derivative(v, needed, products)
        grads: list[Any] = [None] * len(theta)
        for index, product in zip(needed, products, strict=True):
            grads[index] = product
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Tensor:
        problem = ctx.problem
        problem.require_exact_products()
        moved = [index for index, tangent in enumerate(tangents) if tangent is not None]
        with forward_mode_enabled():
            x, *theta = _primals(ctx.saved_tensors)
            change = push_forward(
                gradient_in(problem.value, x, theta, moved, transformed=problem.transformed),
                [theta[index] for index in moved],
                [tangents[index] for index in moved],
                like=x,
                transformed=problem.transformed,
            )
            return solution_of(problem, -change, x, *theta)

    @staticmethod
    def vmap(info: Any, in_dims: Any, problem: ParametricFunction, *theta: Tensor) -> tuple[Tensor, int]:
        return _stacked(info.batch_size, in_dims[1:], theta, lambda *parts: minimum_of(problem, *parts))


class Solve(torch.autograd.Function):
    """v(u, x, θ), the solution of ∇²_x f(x, θ) v = u."""

    @staticmethod
    def forward(problem: ParametricFunction, u: Tensor, x: Tensor, *theta: Tensor) -> Tensor:
        with without_saving_hooks():
            return problem.solve(u, x, theta)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem, _, *point = inputs
        ctx.save_for_backward(output, *point)
        ctx.save_for_forward(output, *point)

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Any, ...]:
        v, *point = ctx.saved_tensors
        problem = ctx.problem
        problem.require_exact_products()
        s = solution_of(problem, w, *point)
        grads = pull_back(_product_with(problem, v), point, (-s,), transformed=problem.transformed)
        return None, s, *grads

    @staticmethod
    def jvp(ctx: Any, _: Any, right_tangent: Any, *tangents: Any) -> Tensor:
        problem = ctx.problem
        with forward_mode_enabled():
            v, *point = _primals(ctx.saved_tensors)
            filled = [torch.zeros_like(p) if t is None else t for p, t in zip(point, tangents, strict=True)]
            change = -push_forward(_product_with(problem, v), point, filled, like=v, transformed=problem.transformed)
            right = change if right_tangent is None else right_tangent + change
            return solution_of(problem, right, *point)

    @staticmethod
    def vmap(info: Any, in_dims: Any, problem: ParametricFunction, *tensors: Tensor) -> tuple[Tensor, int]:
        return _stacked(info.batch_size, in_dims[1:], tensors, lambda *parts: solution_of(problem, *parts))


def minimum_of(problem: ParametricFunction, *theta: Tensor) -> Tensor:
    """Return x(θ), with a graph."""
    return ArgMin.apply(problem, *theta)  # type: ignore[no-any-return, no-untyped-call]


def solution_of(problem: ParametricFunction, u: Tensor, x: Tensor, *theta: Tensor) -> Tensor:
    """Return v(u, x, θ), with a graph."""
    return Solve.apply(problem, u, x, *theta)  # type: ignore[no-any-return, no-untyped-call]


def _primals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors without the tangents of the innermost forward mode."""
    return [forward_ad.unpack_dual(tensor).primal for tensor in tensors]  # type: ignore[no-untyped-call]


def _product_with(problem: ParametricFunction, v: Tensor) -> Any:
    """Return the function (x, θ) ↦ ∇²_x f(x, θ) v."""

    def function(x: Tensor, *theta: Tensor) -> Tensor:
        def gradient_at(x: Tensor) -> Tensor:
            return gradient(problem.value, x, theta, transformed=problem.transformed)

        with torch.enable_grad():
            (product,) = pull_back(gradient_at, (x,), (v,), transformed=problem.transformed)
        return product

    return function


def _stacked(size: int, dims: Any, tensors: tuple[Tensor, ...], function: Any) -> tuple[Tensor, int]:
    """Apply a function to each entry of a batch, one after the other."""
    parts = [[tensor] * size if dim is None else tensor.unbind(dim) for tensor, dim in zip(tensors, dims, strict=True)]
    return torch.stack([function(*entry) for entry in zip(*parts, strict=True)]), 0
