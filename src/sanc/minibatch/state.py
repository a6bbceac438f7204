"""What the iteration on samples carries from one step to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sanc.core.space import Vector


@dataclass(slots=True)
class State:
    """All of it but the metric: numbers, and vectors, which are never changed in place."""

    seed: int
    iteration: int = 0
    seconds: float = 0.0
    noisy: bool = False  # whether batches differ by more than a step gains
    misses: int = 0  # batches in a row that told otherwise of the last judged steps
    idle: int = 0  # judged steps since they last halved the loss …
    level: float = math.nan  # … to this
    entry: float = math.nan  # the loss where judged steps began
    gained: float = math.nan  # by the last judged step, on its own batch …
    reached: float = math.nan  # … and the loss it reached there
    far: bool = False  # whether it led farther than an averaged step would have
    steps: int = 0  # averaged steps
    learnt: int = 0  # those that taught the factors of the metric
    renewed: int = 0  # the one after which the eigenbases were renewed
    weights: float = 0.0  # sum of the weights in the average
    unit: float = 1.0  # norm of the first gradient, in which all are measured
    length: float = 0.0  # a typical weight at the first point, the unit of steps; 0: not yet known
    size: float = 1.0  # mean square of the gradients' norms
    shrink: float = 1.0  # of the scale, after a run went wrong
    broken: int = 0  # steps in a row whose loss or gradient was not finite
    distance: float = 1e-6  # the largest lower bound of the distance to a solution, in the metric and that unit
    path: float = 0.0  # length of the steps that led to z, weighted as in z − x, in the 1-norm …
    beyond: float = 0.0  # … and ‖z − x‖_1
    along: float = 0.0  # what that bound is made of, beside `drift`
    watched: int = 0  # losses in the mean
    mean: float = math.nan  # of the loss …
    variance: float = 0.0  # … and its variance
    best: float = math.nan  # the lowest mean, slowly forgotten
    square: float = math.nan  # ‖x‖² where the last averaged step ended: another says that somebody moved the parameters
    looked: float = math.nan  # the mean when progress was last looked at …
    looks: int = 0  # … and how often it was
    offset: Vector | None = None  # z − x: from the average to where steps are made
    safe: Vector | None = None  # a point to go back to
    start: Vector | None = None  # where averaging began
    drift: Vector | None = None  # weighted sum of the directions
