"""Products with ∂²f/∂x∂θ, compared with differences of ∇_x f. They find parameters that f reads without their graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sanc.implicit.derivatives import gradient, pull_back

_STEP_EXPONENT, _STEP_FACTORS = 1 / 3, (8.0, 1.0, 1 / 8)
"""Steps of central differences, relative to the size of a parameter: eps^(1/3), which balances truncation and roundoff,
and an eighth and eight times that. If the first difference agrees with the product, the others are not made."""
_EQUAL_PRODUCTS_EXPONENT = 0.25
"""Products count as equal up to the relative difference eps^(1/4), 1e-4 in float64. The first step has a truncation
error of 64 eps^(2/3), 2e-9."""
_MAX_SPREAD_FRACTION = 0.1
"""The differences contradict a product if their spread is at most this fraction of their smallest distance from it:
errors of differences depend on the step, and that of a missing derivative does not."""
_MAX_GROUPS = 8
"""Groups of parameters, each of which is moved by itself, for two gradients."""


@dataclass
class MixedDerivative:
    """What is known about M = ∂²f/∂x∂θ.

    Attributes
    ----------
    problem : str
        Which parameter f reads without its graph; empty if none.
    norms, inverse_norms : Norms
        Estimates of ‖M_j‖ and ‖H⁻¹M_j‖ for the part M_j of each parameter; without entries where none were made.
    """

    problem: str = ""
    norms: Norms = field(default_factory=lambda: Norms())
    inverse_norms: Norms = field(default_factory=lambda: Norms())


class Norms:
    """Estimates of the norms of matrices A_j: the largest ‖A_jᵀv‖/‖v‖ and ‖A_j d‖/‖d‖ that were seen."""

    def __init__(self) -> None:
        self._largest: dict[int, float] = {}

    def update(self, index: int, stretched: float, size: float) -> None:
        """Update the estimate with the norms of A_jᵀv and v, or of A_j d and d."""
        if size > 0.0 and math.isfinite(stretched / size):
            self._largest[index] = max(self._largest.get(index, 0.0), stretched / size)

    def combined(self, indices: Sequence[int]) -> float:
        """Return the estimate for some of the matrices side by side; infinite without one of theirs."""
        return math.hypot(*(self._largest.get(index, math.inf) for index in indices))


def examine_mixed(
    value: Callable[..., Tensor],
    x: Tensor,
    theta: Sequence[Tensor],
    names: Sequence[str],
    chosen: Sequence[int],
    inverse: Callable[[Tensor], Tensor] | None,
) -> MixedDerivative:
    """Compare M with differences of ∇_x f along random directions, and estimate its norm and that of H⁻¹M.

    Parameters
    ----------
    value : callable
        f(x, *θ).
    x, theta : Tensor, sequence of Tensor
        The point and the parameters, without graphs.
    names, chosen : sequence
        The names of all parameters, and the indices of those that are differentiated.
    inverse : callable or None
        The product with H⁻¹, if it costs little.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        is_square = like.ndim > 1 and like.shape[-1] == like.shape[-2]
        return drawn + drawn.mT if is_square and torch.equal(like, like.mT) else drawn  # a symmetric matrix remains one

    u, directions = draw(x), {}
    for index in chosen:
        rms = _norm(theta[index]) / math.sqrt(max(theta[index].numel(), 1))
        directions[index] = draw(theta[index]) * (rms if math.isfinite(rms) and rms > 0.0 else 1.0)

    def gradient_of(*moved: Tensor) -> Tensor:
        others = list(theta)
        for index, tensor in zip(chosen, moved, strict=True):
            others[index] = tensor
        return gradient(value, x, others, transformed=False)

    def products(v: Tensor) -> dict[int, Tensor]:
        """Return Mᵀv by parameter."""
        parts = pull_back(gradient_of, [theta[index] for index in chosen], (v,), transformed=False)
        return dict(zip(chosen, parts, strict=True))

    def update_norms(norms: Norms, w: Tensor, v: Tensor) -> None:
        """Note the sizes of Mᵀv for v = w or v = H⁻¹w."""
        for index, part in products(v).items():
            norms.update(index, _norm(part), _norm(w))

    def difference(group: Sequence[int], step: float) -> Tensor:
        """Return M d for the directions of a group by a central difference."""

        def at(sign: float) -> Tensor:
            moved = [theta[i] + sign * step * directions[i] if i in group else theta[i] for i in chosen]
            return gradient_of(*moved).detach()

        return (at(1.0) - at(-1.0)) / (2.0 * step)

    mixed = MixedDerivative()
    with torch.no_grad():
        exact = products(u)
        for index, part in exact.items():
            mixed.norms.update(index, _norm(part), _norm(u))
        image = torch.zeros_like(x)
        for first in range(min(len(chosen), _MAX_GROUPS)):
            group = chosen[first::_MAX_GROUPS]
            expected = float(sum((exact[index] * directions[index]).sum() for index in group))
            differences = _Differences(partial(difference, group), u, expected)
            if differences.contradict:
                listed = ", ".join(names[index] for index in group[:3]) + (", …" if len(group) > 3 else "")
                mixed.problem = (
                    f"along a random change of {listed} differences of ∇ₓf show {differences.found[0]:.6g} where "
                    f"automatic differentiation returns {expected:.6g}: fun detaches a parameter, reads its value "
                    "(item(), numpy()) or uses it under no_grad()"
                )
                break
            if differences.first is not None:
                norm = math.hypot(*(_norm(directions[index]) for index in group))
                for index in group:
                    mixed.norms.update(index, _norm(differences.first), norm)
                image += differences.first
        if bool(image.any()):
            update_norms(mixed.norms, image, image)  # a step of the power method: M has stretched `image` already
            if inverse is not None:
                response = inverse(image)
                update_norms(mixed.inverse_norms, response, inverse(response))
    return mixed


class _Differences:
    """Differences M d with several steps, compared with an expected value of uᵀM d.

    Attributes
    ----------
    first : Tensor or None
        The first difference; None if it is not finite.
    found : list of float
        uᵀM d for each step.
    contradict : bool
        Whether all agree with each other and not with the expected value.
    """

    def __init__(self, difference: Callable[[float], Tensor], u: Tensor, expected: float) -> None:
        self.first: Tensor | None = None
        self.found: list[float] = []
        self.contradict = False
        eps = float(torch.finfo(u.dtype).eps)
        for factor in _STEP_FACTORS:
            try:
                image = difference(factor * eps**_STEP_EXPONENT)
            except Exception:  # a function may raise outside its domain, which nearby parameters may leave
                return
            found = float((u * image).sum())
            if not math.isfinite(found):
                return
            self.first = image if self.first is None else self.first
            self.found.append(found)
            if abs(found - expected) <= eps**_EQUAL_PRODUCTS_EXPONENT * max(abs(found), abs(expected)):
                return
        spread = max(self.found) - min(self.found)
        self.contradict = spread <= _MAX_SPREAD_FRACTION * min(abs(found - expected) for found in self.found)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
