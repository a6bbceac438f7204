"""The settings of the iteration on samples: metric, average, and when the averaged phase begins.

Those of the step size are in `step_size.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from torch import Tensor

from sanc.core.pieces import SampleSettings, required_members
from sanc.core.settings import BELOW_ONE, NOT_NEGATIVE, Piece, setting
from sanc.errors import ArgumentTypeError, is_number, one_of, require, shown
from sanc.minibatch.metrics.base import Metric
from sanc.minibatch.metrics.diagonal import Diagonal
from sanc.minibatch.metrics.identity import Identity
from sanc.minibatch.metrics.kronecker import Kronecker
from sanc.minibatch.step_size import StepSize

MetricName = Literal["kronecker", "diagonal", "none"]
METRICS: Mapping[str, Callable[[], Metric]] = {"kronecker": Kronecker, "diagonal": Diagonal, "none": Identity}
"""The metrics that have a name; others are passed as objects."""


@dataclass(frozen=True, kw_only=True)
class Average(Piece):
    """The running average of the iterates (schedule-free learning, Defazio et al. 2024).

    A step moves the average x by x ← x + c (z − x) with c = w_k/Σ_{i≤k} w_i, where w_k is the weight of the k-th
    iterate z. A subclass may have other methods `weight`, `late_weights` and `min_weight`.

    Attributes
    ----------
    averaging : float
        β: the gradient is taken at y = x + (1 − β)(z − x), between the average x and the iterate z; 0: no average.
    weighting : float
        The k-th iterate has the weight k to this power.
    """

    averaging: float = setting(0.85, BELOW_ONE)  # schedule-free learning has 0.9; row "no-averaging" has 0
    weighting: float = setting(3.0, NOT_NEGATIVE)  # chosen with `slow_down`; row "even-weights" of the ablation has 0

    def weight(self, k: int) -> float:
        """Return w_k, a positive number; k = 1, 2, ….

        It may depend on k alone: the sum of the weights is kept, and not the weights.
        """
        weight: float = float(k) ** self.weighting
        return weight

    def late_weights(self, earlier: Tensor) -> Tensor:
        """Return c of entries that joined late, given the numbers of iterates since they joined.

        The weight of the k-th iterate of an entry is (p + 1)/(k + p): for large k the same as k^p/Σ_i i^p.
        """
        return (self.weighting + 1.0) / (earlier + (self.weighting + 1.0))

    def min_weight(self, remaining: float) -> float:
        """Return a lower bound of c, given the number of steps that remain until the horizon; ∞: it is not known.

        The average covers as many iterates as steps remain. η falls to zero, so that the last iterates have the least
        noise, and the average need not reach far back.
        """
        return (self.weighting + 1.0) / (remaining + self.weighting + 1.0)


@dataclass(frozen=True, kw_only=True)
class Minibatch(SampleSettings):
    """How steps on samples are made: a second-order phase while batches agree, then an averaged phase in a metric.

    Attributes
    ----------
    metric : Metric
        The norm in which averaged steps are measured, learnt from gradients: `Kronecker`, `Diagonal`, `Identity`, or
        an object of the caller's. The names "kronecker", "diagonal" and "none" are accepted too.
    step_size : StepSize
        The size of averaged steps.
    average : Average
        The average that the parameters hold.
    curvature : bool
        Whether Hessian products are used: in the second-order phase, and if the loss stagnates.
    noise : float
        Two batches agree if their losses at the new point differ by at most `noise` times the decrease of the last
        step.
    """

    metric: Metric = field(default_factory=Kronecker)
    step_size: StepSize = field(default_factory=StepSize)
    average: Average = field(default_factory=Average)
    curvature: bool = True
    noise: float = setting(1.0, NOT_NEGATIVE)  # differences as large as the decrease; docs/constants.md has 0.1 and 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.metric, str):
            object.__setattr__(self, "metric", METRICS[one_of("metric", self.metric, METRICS)]())
        missing = [name for name in required_members(Metric) if not hasattr(self.metric, name)]
        if missing or isinstance(self.metric, type):
            why = f"it has no {', '.join(missing)}" if missing else "it is a class"
            raise ArgumentTypeError(
                f"metric = {shown(self.metric)} cannot be used: {why}. Pass one of {', '.join(map(repr, METRICS))}, or "
                "an object like sanc.Kronecker()."
            )
        memory, refresh = self.metric.memory, self.metric.refresh
        require(is_number(memory) and 0 <= memory < 1, "memory", memory, "give the metric a number in [0, 1)")
        require(is_number(refresh, Integral) and refresh >= 1, "refresh", refresh, "give the metric an integer ≥ 1")
