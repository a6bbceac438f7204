"""The state of the iteration on samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sanc.core.space import Vector


@dataclass(frozen=True, slots=True)
class State:
    """All of it except the metric: numbers, and vectors, which are never changed in place.

    Only the iteration writes it. Unknown losses are NaN.
    """

    seed: int
    iteration: int = 0
    seconds: float = 0.0
    averaged: bool = False  # whether the averaged phase has begun
    # The second-order phase.
    disagreements: int = 0  # consecutive batches that disagreed with the last step
    slow_steps: int = 0  # steps since the loss was last halved …
    level: float = math.nan  # … to this
    first_loss: float = math.nan  # the loss where the phase began
    decrease: float = math.nan  # of the last step, on its own batch …
    last_loss: float = math.nan  # … and the loss it reached there
    long_step: bool = False  # whether that step was longer than an averaged one
    # The averaged phase.
    steps: int = 0
    factor_updates: int = 0  # steps that updated the factors of the metric
    refreshed: int = 0  # the step after which the metric was last refreshed …
    extended: int = 0  # … and at which parameters last joined it
    weight_sum: float = 0.0  # of the weights in the average
    gradient_unit: float = field(default=1.0, metadata={"positive": True})  # norm of the first gradient
    weight_unit: float = 0.0  # a typical weight at the first point, the unit of η; 0: not known yet
    mean_square: float = 1.0  # of the gradient norms, in that unit …
    largest_norm: float = 1.0  # … and the largest of the first ones
    reduction: float = 1.0  # factor of η, after the loss rose
    nonfinite: int = 0  # consecutive steps whose loss or gradient was not finite
    distance: float = field(default=1e-6, metadata={"positive": True})  # lower bound of the distance to a solution
    path: float = 0.0  # 1-norm of the steps that led to z, weighted as in z − x …
    offset_norm: float = 0.0  # … and ‖z − x‖_1
    alignment: float = field(default=0.0, metadata={"signed": True})  # numerator of the distance bound
    observed: int = 0  # losses in the mean
    mean: float = math.nan  # of the loss …
    variance: float = 0.0  # … and its variance
    best: float = math.nan  # the lowest mean
    square_norm: float = (
        math.nan
    )  # ‖x‖² after the last averaged step (NaN: unknown); another value: the caller changed x
    projected: int = 0  # steps for which the caller is taken to project x, since it changed x after a step
    probed_mean: float = math.nan  # the mean when stagnation was last checked …
    probes: int = 0  # … and how often it was
    offset: Vector | None = None  # z − x
    written: Vector | None = None  # x after the last step, while the caller projects it
    safe: Vector | None = None  # a point to return to
    start: Vector | None = None  # where averaging began
    drift: Vector | None = None  # weighted sum of the directions
    joined: Vector | None = None  # the step at which each entry joined the average; None: all at the first
