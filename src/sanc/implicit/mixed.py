"""A comparison of ∂²f/∂x∂θ with differences of ∇_x f, which finds parameters that f reads without their graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sanc.implicit.derivatives import gradient, pull_back

_PARAMETER_STEPS = (1e-4, 1e-5, 1e-3)
"""Steps of central differences, relative to the size of a parameter: around eps^(1/3), which is 6e-6 in float64 and
5e-3 in float32. If the first agrees with the product, the others are not made."""
_SAME_PRODUCT = 0.1
"""Relative difference of products that count as equal."""
_MOST_GROUPS = 8
"""Groups of parameters, each of which is moved by itself, for two gradients."""


def find_missing_derivative(
    value: Callable[..., Tensor], x: Tensor, theta: Sequence[Tensor], names: Sequence[str], chosen: Sequence[int]
) -> str:
    """Describe a parameter on which ∇_x f depends otherwise than automatic differentiation finds; empty if none.

    Parameters
    ----------
    value : callable
        f(x, *θ).
    x, theta : Tensor, sequence of Tensor
        The point and the parameters, without graphs.
    names, chosen : sequence
        The names of all parameters, and the indices of those that are differentiated.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        is_square = like.ndim > 1 and like.shape[-1] == like.shape[-2]
        return drawn + drawn.mT if is_square and torch.equal(like, like.mT) else drawn  # a symmetric matrix remains one

    u, directions = draw(x), {}
    for index in chosen:
        size = torch.linalg.vector_norm(theta[index]).item() / math.sqrt(max(theta[index].numel(), 1))
        directions[index] = draw(theta[index]) * (size if math.isfinite(size) and size > 0.0 else 1.0)

    def gradient_of(*moved: Tensor) -> Tensor:
        others = list(theta)
        for index, tensor in zip(chosen, moved, strict=True):
            others[index] = tensor
        return gradient(value, x, others, transformed=False)

    with torch.no_grad():
        products = pull_back(gradient_of, [theta[index] for index in chosen], (u,), transformed=False)
        exact = {i: float((p * directions[i]).sum()) for i, p in zip(chosen, products, strict=True)}

        def difference(group: Sequence[int], step: float) -> float:
            def at(sign: float) -> Tensor:
                moved = [theta[i] + sign * step * directions[i] if i in group else theta[i] for i in chosen]
                return gradient_of(*moved).detach()

            return float((u * (at(1.0) - at(-1.0))).sum()) / (2.0 * step)

        for first in range(min(len(chosen), _MOST_GROUPS)):
            group = chosen[first::_MOST_GROUPS]
            expected = sum(exact[index] for index in group)
            found = _contradicting(partial(difference, group), expected)
            if found is not None:
                listed = ", ".join(names[index] for index in group[:3]) + (", …" if len(group) > 3 else "")
                return (
                    f"along a random change of {listed} differences of ∇ₓf show {found:.3g} where automatic "
                    f"differentiation returns {expected:.3g}: fun detaches a parameter, reads its value (item(), "
                    "numpy()) or uses it under no_grad()"
                )
    return ""


def _contradicting(difference: Callable[[float], float], expected: float) -> float | None:
    """Return the difference quotient if those of all steps agree with each other and not with `expected`; else None.

    A function may raise outside its domain, which nearby parameters may leave; nothing is compared then.
    """
    found: list[float] = []
    for step in _PARAMETER_STEPS:
        try:
            found.append(difference(step))
        except Exception:
            return None
        if not math.isfinite(found[-1]) or _is_same(found[-1], expected):
            return None
    return found[0] if all(_is_same(other, found[0]) for other in found[1:]) else None


def _is_same(product: float, other: float) -> bool:
    """Whether two products are equal up to the error of differences."""
    return abs(product - other) <= _SAME_PRODUCT * max(abs(product), abs(other))
