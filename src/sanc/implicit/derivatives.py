"""Products with derivatives of f(x, θ), which can be differentiated again and inside the transforms of torch.func.

Inside such a transform, and only there, the products use torch.func: elsewhere `torch.autograd` also differentiates
functions that torch.func does not, for example custom functions of an older style.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., "Tensor | tuple[Tensor, ...]"]


def is_transformed(tensors: Sequence[Tensor]) -> bool:
    """Return whether a transform of torch.func is at work: one of the tensors is a wrapper that the transform made."""
    return any(torch.func.debug_unwrap(tensor, recurse=False) is not tensor for tensor in tensors)


def pull_back(
    function: Function, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], *, transformed: bool
) -> tuple[Tensor, ...]:
    """Return the product of the cotangents with the Jacobian of `function` with respect to each input.

    The products have a graph if gradients are enabled. An input may depend on another one in the graph outside: the
    products have the partial derivatives, because the function is called with aliases of the inputs.
    """
    if transformed:
        output, pull = torch.func.vjp(function, *inputs)[:2]
        return tuple(pull(tuple(cotangents) if isinstance(output, tuple) else cotangents[0]))
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [_alias(tensor) for tensor in inputs]
        output = function(*aliases)
        outputs = output if isinstance(output, tuple) else (output,)
        terms = [(out, c) for out, c in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if not terms:
            return tuple(torch.zeros_like(tensor) for tensor in inputs)
        outs, weights = zip(*terms, strict=True)
        products = torch.autograd.grad(outs, aliases, weights, create_graph=create_graph, allow_unused=True)
    return tuple(torch.zeros_like(t) if p is None else p for t, p in zip(inputs, products, strict=True))


def push_forward(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor],
    *,
    like: Tensor,
    transformed: bool,
) -> Tensor:
    """Return the product of the Jacobian of `function`, whose values are vectors like `like`, with the tangents.

    The product with the transposed Jacobian is linear in the cotangent, and its transpose is the Jacobian. So no
    forward-mode derivative is needed, which many operators lack.
    """

    def transposed(w: Tensor) -> tuple[Tensor, ...]:
        return pull_back(function, inputs, (w,), transformed=transformed)

    (product,) = pull_back(transposed, (torch.zeros_like(like),), tangents, transformed=transformed)
    return product


def gradient(value: Callable[..., Tensor], x: Tensor, others: Sequence[Tensor], *, transformed: bool) -> Tensor:
    """Return ∇_x f(x, θ) with a graph."""
    if transformed:
        return torch.func.grad(value)(x, *others)  # type: ignore[no-any-return]
    with torch.enable_grad():
        alias = _alias(x)
        (g,) = torch.autograd.grad(value(alias, *others), alias, create_graph=True)
    return g


def gradient_in(
    value: Callable[..., Tensor], x: Tensor, theta: Sequence[Tensor], indices: Sequence[int], *, transformed: bool
) -> Callable[..., Tensor]:
    """Return ∇_x f at a fixed x as a function of the parameters with these indices."""

    def function(*chosen: Tensor) -> Tensor:
        others = list(theta)
        for index, tensor in zip(indices, chosen, strict=True):
            others[index] = tensor
        return gradient(value, x, others, transformed=transformed)

    return function


def norm_of(tensor: Tensor) -> float:
    """Return the Euclidean norm of all entries, computed in float64."""
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that requires a gradient, in the graph of `tensor` if that has one."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
