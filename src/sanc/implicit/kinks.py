"""A comparison of the Hessian with differences of ∇f to both sides, which finds kinks of f and of its gradient.

At a kink torch returns the derivatives of one side, which do not determine the derivative of the minimum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.space import Vector

_FIRST_STEP_EXPONENT, _STEP_RATIO, _MAX_DIFFERENCES = 0.25, 8.0, 4
"""The first step relative to x is eps^(1/4), 1e-4 in float64, and each further one an eighth. Usually one suffices."""
_EQUAL_RATE_TOLERANCE = 0.01
"""Relative difference of rates of change of an entry of ∇f that count as equal. A kink that is smaller changes the
derivative of the minimum by about as little."""
_SMOOTH_SHRINK_FACTOR = 0.5
"""Factor by which a difference shrinks at least with the step at a smooth point, where it shrinks by `_STEP_RATIO`."""
_GRADIENT_ROUNDING_ERRORS, _MAX_RATE_ROUNDOFF = 100.0, 0.05
"""Roundoff of an entry of ∇f, in units of eps ‖H‖ ‖x‖/√n, and that of a rate up to which a step is used."""
_MIN_MOVE_RATIO = 1e-3
"""Smallest scale of a variable relative to the root mean square of x."""
_DIRECTION_SEED = 13
"""Seed of the signs with which variables move, beside the seed of the caller."""


def find_kink(oracle: Oracle, x: Vector, norm: float, seed: int) -> str:
    """Describe a kink of f or of its gradient at x, given ‖H‖; empty if there is none.

    All variables move at once, by random signs: d. At a smooth point each entry of ∇f changes at the rate (Hd)_i on
    both sides, up to a difference that is proportional to the step. At a kink it does not shrink with the step. Entries
    are compared one by one, so that a kink along one of many variables counts as much as along all of them.
    Points beyond bounds, and points at which f is not defined, are not compared.
    """
    space, point = oracle.space, oracle.space.tensor(x)
    if space.dim == 0:  # with bounds, if no variable is free
        return ""
    typical_entry = space.norm(x) / space.dim**0.5 or 1.0
    first_step = space.eps**_FIRST_STEP_EXPONENT
    direction = _direction(oracle, point, typical_entry, first_step, seed)
    operator = oracle.hessian(x)
    expected = space.tensor(operator(space.vector(direction)))
    operator.release()
    oracle.begin(0, products=False)  # the other gradients need no graph
    try:
        g = space.tensor(oracle.gradient(x)[1])
        suspects: Any = None
        compared, last = 0, torch.zeros_like(g)
        for step in (first_step / _STEP_RATIO**exponent for exponent in range(_MAX_DIFFERENCES)):
            if _GRADIENT_ROUNDING_ERRORS * space.eps / step > _MAX_RATE_ROUNDOFF:
                break
            sides = [space.tensor(oracle.gradient(space.vector(point + h * direction))[1]) for h in (step, -step)]
            ahead, behind = (sides[0] - g) / step, (g - sides[1]) / step
            if not bool((ahead + behind).isfinite().all()):
                continue
            difference = torch.maximum((ahead - expected).abs(), (behind - expected).abs())
            largest = torch.maximum(torch.maximum(ahead.abs(), behind.abs()), expected.abs())
            roundoff = _GRADIENT_ROUNDING_ERRORS * space.eps / step * norm * typical_entry
            allowed = _EQUAL_RATE_TOLERANCE * largest + roundoff
            persistent = difference > torch.maximum(allowed, _SMOOTH_SHRINK_FACTOR * last)
            suspects = persistent if suspects is None else suspects & persistent
            if not bool(suspects.any()):
                return ""
            compared, last = compared + 1, difference
    finally:
        oracle.begin(0)
    return _description(oracle, torch.where(suspects, last, 0.0), ahead, behind, expected) if compared > 1 else ""


def _direction(oracle: Oracle, point: Tensor, typical_entry: float, first_step: float, seed: int) -> Tensor:
    """Return a change of all variables by random signs; of none that the first step would move beyond a bound."""
    signs = np.sign(np.random.default_rng((seed, _DIRECTION_SEED)).random(oracle.space.dim) - 0.5)
    direction = torch.from_numpy(signs).to(point) * point.abs().clamp(min=_MIN_MOVE_RATIO * typical_entry)
    if oracle.box is None:
        return direction
    room = torch.minimum(oracle.box.upper - point, point - oracle.box.lower)
    return torch.where(room > first_step * direction.abs(), direction, 0.0)


def _description(oracle: Oracle, differences: Tensor, *rates: Tensor) -> str:
    """Describe the entry of ∇f with the largest difference."""
    position = int(differences.argmax())
    ahead, behind, expected = (float(rate[position]) for rate in rates)
    index = position if oracle.free_indices is None else int(oracle.free_indices[position])
    return (
        f"along a change of all variables entry {index} of ∇f changes at the rate {behind:.3g} on one side and "
        f"{ahead:.3g} on the other; its Hessian predicts {expected:.3g}, so that f has a kink there or its second "
        "derivatives are wrong"
    )
