"""What the iteration on samples carries from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sanc.core.space import Floats, Vector


@dataclass(slots=True)
class State:
    """All of it: numbers, and vectors, which are never changed in place."""

    seed: int
    iteration: int = 0
    sigma: float = 1.0
    seconds: float = 0.0
    settled: int = -1  # iteration at which noise took over; −1 before
    averaged: int = 0  # gradients in the mean
    squared: int = 0  # gradients in the mean square
    refreshed: int = -1  # iteration of the last Krylov space; −1 before the first
    worth: bool = False  # whether that space earned its products
    gained: float = math.nan  # decrease of the last step on its own batch …
    reached: float = math.nan  # … and the loss it reached there
    missed: float = 0.0  # how often the next batch said otherwise
    slope: float = 0.0
    slope_square: float = 0.0
    slopes: int = 0
    lean: float = 0.0  # from −1, steps should be longer, to 1, they should be shorter
    curvature: float = math.nan  # along recent steps, as values showed it
    loss: float = math.nan
    loss_variance: float = 0.0
    best: float = math.nan  # lowest mean loss, slowly forgotten
    momentum: Vector | None = None  # moving average of the gradients, before its bias is taken out
    square: Vector | None = None  # the same of their squares
    scale: Vector | None = None  # M^(−1/2)
    path: Vector | None = None  # the last steps, weighted like the gradients in the mean
    safe: Vector | None = None  # a point to go back to
    basis: Any = None  # Q of the last Krylov space, in the coordinates of the metric
    ritz: Floats | None = None
    ritz_vectors: Floats | None = None

    @property
    def first_phase(self) -> bool:
        """Whether steps still gain more than two batches differ."""
        return self.settled < 0

    def numbers(self) -> dict[str, Any]:
        """Return the part that is plain numbers."""
        plain = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in VECTORS}
        return plain | {name: None if plain[name] is None else plain[name].tolist() for name in _SMALL}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors, and the basis as a block of rows."""
        return {name: getattr(self, name) for name in VECTORS if getattr(self, name) is not None}

    @classmethod
    def of(cls, numbers: Mapping[str, Any], vectors: Mapping[str, Any]) -> State:
        """Put together what `numbers` and `vectors` returned."""
        small = {name: None if numbers[name] is None else np.array(numbers[name], np.float64) for name in _SMALL}
        return cls(**{**numbers, **small, **vectors})


VECTORS = ("momentum", "square", "scale", "path", "safe", "basis")
_SMALL = ("ritz", "ritz_vectors")
