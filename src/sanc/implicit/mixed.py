"""Products with ∂²f/∂x∂θ, compared with differences of ∇_x f. They find parameters that f reads without their graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sanc.implicit.derivatives import gradient_in, norm_of, pull_back

_STEP_EXPONENT, _STEP_FACTORS = 1 / 3, (8.0, 1.0, 1 / 8)
"""Steps of central differences, relative to the size of a parameter: eps^(1/3), which balances truncation and roundoff,
and an eighth and eight times that. If the first difference agrees with the product, the others are not made."""
_EQUAL_PRODUCTS_EXPONENT = 0.25
"""Products count as equal up to the relative difference eps^(1/4), 1e-4 in float64. The first step has a truncation
error of 64 eps^(2/3), 2e-9."""
_MAX_SPREAD_FRACTION = 0.1
"""The differences contradict a product if their spread is at most this fraction of their smallest distance from it:
errors of differences depend on the step, and the error of a missing derivative does not."""
_MAX_GROUPS = 8
"""Groups of parameters, each of which is moved by itself, for two gradients."""


@dataclass(frozen=True)
class Norms:
    """Estimates of the norms of matrices A_j: the largest ‖A_jᵀv‖/‖v‖ and ‖A_j d‖/‖d‖ that were seen.

    Attributes
    ----------
    largest : dict
        The estimates, by the index j.
    """

    largest: Mapping[int, float] = field(default_factory=dict)

    def including(self, norms: Mapping[int, float], size: float) -> Norms:
        """Return the estimates after products of these norms, by index, with a vector of norm `size`."""
        ratios = {index: norm / size for index, norm in norms.items() if size > 0.0}
        seen = {index: max(self.largest.get(index, 0.0), r) for index, r in ratios.items() if math.isfinite(r)}
        return Norms({**self.largest, **seen})

    def combined(self, indices: Sequence[int]) -> float:
        """Return the estimate for some of the matrices side by side; infinite if one of them has no estimate."""
        return math.hypot(*(self.largest.get(index, math.inf) for index in indices))


@dataclass(frozen=True)
class MixedDerivative:
    """What is known about M = ∂²f/∂x∂θ.

    Attributes
    ----------
    reason : str
        Which parameter f reads without its graph; empty if none.
    norms, inverse_norms : Norms
        Estimates of ‖M_j‖ and ‖H⁻¹M_j‖ for the part M_j of each parameter; without entries where none were made.
    """

    reason: str = ""
    norms: Norms = field(default_factory=Norms)
    inverse_norms: Norms = field(default_factory=Norms)


@dataclass(frozen=True)
class MixedProducts:
    """Products with M, exact and by differences.

    Attributes
    ----------
    value : callable
        f(x, *θ).
    x, theta : Tensor, sequence of Tensor
        The point and the parameters, without graphs.
    chosen : sequence of int
        The indices of the parameters that are differentiated.
    """

    value: Callable[..., Tensor]
    x: Tensor
    theta: Sequence[Tensor]
    chosen: Sequence[int]

    def transposed(self, v: Tensor) -> dict[int, Tensor]:
        """Return Mᵀv by parameter."""
        function = gradient_in(self.value, self.x, self.theta, self.chosen, transformed=False)
        parts = pull_back(function, [self.theta[index] for index in self.chosen], (v,), transformed=False)
        return dict(zip(self.chosen, parts, strict=True))

    def difference(self, direction: Mapping[int, Tensor], step: float) -> Tensor:
        """Return M d by a central difference, for a change d of some of the parameters."""
        function = gradient_in(self.value, self.x, self.theta, self.chosen, transformed=False)

        def gradient_at(h: float) -> Tensor:
            theta = self.theta
            return function(
                *(theta[i] + h * direction[i] if i in direction else theta[i] for i in self.chosen)
            ).detach()

        return (gradient_at(step) - gradient_at(-step)) / (2.0 * step)


def examine_mixed(
    products: MixedProducts, names: Sequence[str], inverse: Callable[[Tensor], Tensor] | None
) -> MixedDerivative:
    """Compare M with differences of ∇_x f along random directions, and estimate the norms of M and H⁻¹M.

    Parameters
    ----------
    products : MixedProducts
        The products at a minimum.
    names : sequence
        The names of all parameters.
    inverse : callable or None
        The product with H⁻¹, if it costs little.
    """
    generator, chosen = torch.Generator().manual_seed(0), products.chosen
    u = _draw(products.x, generator)
    directions = {index: _draw_change(products.theta[index], generator) for index in chosen}
    with torch.no_grad():
        exact = products.transposed(u)
        norms = Norms().including(_norms_of(exact), norm_of(u))
        reason, images = "", torch.zeros_like(products.x)
        for first in range(min(len(chosen), _MAX_GROUPS)):
            group = {index: directions[index] for index in chosen[first::_MAX_GROUPS]}
            expected = float(sum((exact[index] * direction).sum() for index, direction in group.items()))
            compared = _compare(partial(products.difference, group), u, expected)
            if compared.contradicts:
                reason = _contradiction([names[index] for index in group], compared.measured[0], expected)
                break
            if compared.image is not None:
                image_norm, size = norm_of(compared.image), math.hypot(*map(norm_of, group.values()))
                norms = norms.including(dict.fromkeys(group, image_norm), size)
                images += compared.image
        return _with_power_step(MixedDerivative(reason, norms), products, images, inverse)


def _with_power_step(
    mixed: MixedDerivative, products: MixedProducts, image: Tensor, inverse: Callable[[Tensor], Tensor] | None
) -> MixedDerivative:
    """Return better estimates by a step of the power method: M has stretched `image` already."""
    if not bool(image.any()):
        return mixed
    mixed = replace(mixed, norms=mixed.norms.including(_norms_of(products.transposed(image)), norm_of(image)))
    if inverse is None:
        return mixed
    response = inverse(image)
    stretched = _norms_of(products.transposed(inverse(response)))
    return replace(mixed, inverse_norms=mixed.inverse_norms.including(stretched, norm_of(response)))


def _contradiction(names: Sequence[str], measured: float, expected: float) -> str:
    """Describe that differences along a change of these parameters contradict the derivatives."""
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return (
        f"along a random change of {listed} differences of ∇ₓf show {measured:.6g} where automatic differentiation "
        f"returns {expected:.6g}: fun detaches a parameter, reads its value (item(), numpy()) or uses it under "
        "no_grad()"
    )


def _draw(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal random numbers; a symmetric matrix for a symmetric matrix."""
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    is_square = like.ndim > 1 and like.shape[-1] == like.shape[-2]
    return drawn + drawn.mT if is_square and torch.equal(like, like.mT) else drawn


def _draw_change(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random change of a parameter, of its root mean square."""
    drawn = _draw(parameter, generator)
    rms = norm_of(parameter) / math.sqrt(max(parameter.numel(), 1))
    return drawn * (rms if math.isfinite(rms) and rms > 0.0 else 1.0)


def _norms_of(parts: Mapping[int, Tensor]) -> dict[int, float]:
    return {index: norm_of(part) for index, part in parts.items()}


@dataclass(frozen=True)
class _Comparison:
    """Differences M d with several steps, compared with an expected value of uᵀM d.

    Attributes
    ----------
    image : Tensor or None
        The first difference; None if it is not finite.
    measured : sequence of float
        uᵀM d for each step.
    contradicts : bool
        Whether all agree with each other and not with the expected value.
    """

    image: Tensor | None = None
    measured: Sequence[float] = ()
    contradicts: bool = False


def _compare(difference: Callable[[float], Tensor], u: Tensor, expected: float) -> _Comparison:
    """Compare differences with an expected value, until one agrees or cannot be computed."""
    eps, compared = float(torch.finfo(u.dtype).eps), _Comparison()
    for factor in _STEP_FACTORS:
        try:
            image = difference(factor * eps**_STEP_EXPONENT)
        except Exception:  # a function may raise outside its domain, which nearby parameters may leave
            return compared
        product = float((u * image).sum())
        if not math.isfinite(product):
            return compared
        compared = _Comparison(image if compared.image is None else compared.image, [*compared.measured, product])
        if abs(product - expected) <= eps**_EQUAL_PRODUCTS_EXPONENT * max(abs(product), abs(expected)):
            return compared
    spread = max(compared.measured) - min(compared.measured)
    distance = min(abs(product - expected) for product in compared.measured)
    return replace(compared, contradicts=spread <= _MAX_SPREAD_FRACTION * distance)
