"""Scaled variables, in which a run continues that stalled because its variables have different scales.

If second derivatives by single variables differ by more than 1/eps, steps in one variable are below the roundoff of
others. The run then continues in the variables y with x_i = s_i y_i and s_i ≈ |H_ii|^(-1/2), for which these
derivatives are about ±1. They change along the way, so s is measured again every `SCALING_INTERVAL` iterations. Its
entries are powers of two: x and y have the same digits, and a run resumes bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sanc.core.oracle import Oracle
from sanc.core.runs.consistency import (
    MAX_SCALED_VARIABLES,
    extreme_entries,
    have_different_scales,
    hessian_diagonal,
)
from sanc.core.runs.preconditioned import Factor, PreconditionedOracle, PreconditionedVariables
from sanc.core.runs.run import Run
from sanc.core.saved import state_error
from sanc.core.spectrum.krylov import NonFiniteProductError

SCALING_INTERVAL = 20
"""Iterations after which the scales of the variables are measured again."""
_MIN_CHANGE = 4
"""Change of an exponent by which a run gets new scales, a factor of 256 in a second derivative: each change of the
variables resets σ."""
_MAX_EXPONENT = 1000
"""Largest exponent of a scale in a saved state; those of entries in float64 are below 540."""


class ScaledVariablesOracle(PreconditionedOracle):
    """Evaluates f as a function of y, where x_i = 2^exponents[i] · y_i."""

    def __init__(self, inner: Oracle, exponents: Sequence[int]) -> None:
        scales = [math.ldexp(1.0, exponent) for exponent in exponents]
        like = inner.space.tensor(inner.space.zeros())
        matrix = torch.tensor(scales, dtype=like.dtype, device=like.device)
        super().__init__(inner, Factor(matrix, min(scales), max(scales)))
        self.exponents = list(exponents)

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {"scales": self.exponents}


@dataclass(frozen=True, eq=False)
class ScaledVariables(PreconditionedVariables):
    """Variables of a preconditioner of the run, which are scaled anew every `SCALING_INTERVAL` iterations."""

    can_be_scaled: ClassVar[bool] = True
    remark: ClassVar[str] = "The run continued in variables scaled by the diagonal of the Hessian."

    def scaling_is_due(self, iterations: int) -> bool:
        return iterations % SCALING_INTERVAL == 0


def can_scale_variables(run: Run) -> bool:
    """Return whether the run may continue in scaled variables; not with a given σ0."""
    return run.variables.can_be_scaled and run.can_choose_curvature


def continue_in_scaled_variables(run: Run) -> bool:
    """Continue the run in variables with the scales of the current point; return False if it may keep its scales."""
    exponents = _new_exponents(run) if can_scale_variables(run) else None
    if exponents is None:
        return False
    scale_variables(run, exponents)
    return True


def scale_variables(run: Run, exponents: Sequence[int]) -> None:
    """Continue the run in variables with these scales.

    σ, the units, the gradient norms and the vectors of its iteration belong to other variables, so they are reset.
    """
    oracle = ScaledVariablesOracle(run.unscaled_oracle, exponents)
    run.restart_in(ScaledVariables(oracle), oracle, oracle.solve(run.full_x))


def _new_exponents(run: Run) -> list[int] | None:
    """Return the exponents of the scales |H_ii|^(-1/2) at the current point; None if the run may keep its scales.

    An entry of 0 counts as the smallest other one. The first measurement tests how the run ends, and is not counted.
    """
    space, current = run.oracle.space, run.oracle.numbers().get("scales")
    if space.dim > MAX_SCALED_VARIABLES:
        return None
    oracle = run.unscaled_oracle
    try:
        with oracle.uncounted() if current is None else nullcontext():
            entries = hessian_diagonal(oracle, run.full_x)
    except NonFiniteProductError:
        return None
    smallest, largest = extreme_entries(entries)
    if current is None and not have_different_scales(smallest, largest, space.eps):
        return None
    exponents = [-math.frexp(entry or smallest)[1] // 2 for entry in entries]
    changes = [abs(new - old) for new, old in zip(exponents, current or exponents, strict=True)]
    return exponents if current is None or max(changes) >= _MIN_CHANGE else None


def saved_variable_scales(state: Mapping[str, Any], dim: int) -> list[int] | None:
    """Return the exponents in the state of a run in scaled variables; None for other states."""
    numbers = state.get("oracle")
    if not isinstance(numbers, Mapping) or "scales" not in numbers:
        return None
    exponents = numbers["scales"]
    is_valid = isinstance(exponents, list) and len(exponents) == dim and all(map(_is_exponent, exponents))
    if not is_valid:
        raise state_error("resume['oracle']['scales']", exponents, f"{dim} integers")
    return list(exponents)


def _is_exponent(entry: object) -> bool:
    """Return whether an entry is the exponent of a scale |H_ii|^(-1/2)."""
    return type(entry) is int and abs(entry) <= _MAX_EXPONENT
