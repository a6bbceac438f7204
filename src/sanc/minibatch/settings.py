"""The settings of the iteration on samples: metric, step scale, average, and when the averaged phase begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from sanc.core.pieces import required_members
from sanc.core.settings import BELOW_INFINITY, BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, Piece, setting
from sanc.errors import ArgumentTypeError, one_of, shown
from sanc.minibatch.metrics.base import Metric
from sanc.minibatch.metrics.diagonal import Diagonal
from sanc.minibatch.metrics.identity import Identity
from sanc.minibatch.metrics.kronecker import Kronecker

METRICS = {"kronecker": Kronecker, "diagonal": Diagonal, "none": Identity}
"""The metrics that have a name; others are passed as objects."""


@dataclass(frozen=True, kw_only=True)
class StepScale(Piece):
    """The size η of an averaged step s = −η M⁻¹g.

    Attributes
    ----------
    scale : float
        η, about the change of each coordinate, in units of a typical weight: the root mean square of a matrix's
        entries at the first point, or 1/15 if they are zero.
    distance : float
        η = max(scale, distance·d), at most 2·scale unless the last steps are aligned, with d a lower bound of the
        distance to a solution. 0: the bound is not used, and a reduced η does not grow back.
    warm_up : int
        Number of steps over which η grows to its value. Over the first n steps η grows at most as √(steps/n), with n
        the typical smaller side of a matrix of parameters; 0: it does not grow.
    slow_down : int
        η falls as 1/√(1 + steps/slow_down); 0: it does not fall.
    horizon : int
        Number of averaged steps of the run, if it is known: η falls linearly to zero over them, in place of
        `slow_down`, and the average is one over fewer and fewer of the last iterates. 0: the number is not known.
    lower_bound : float
        A number that no loss is below. A step is shortened if to first order it would reduce the loss of its batch
        below that. After a lower loss the bound is not used; −inf: there is none.
    """

    # docs/results/networks.md has the tasks on which these numbers were chosen, and an ablation.
    scale: float = setting(0.15, POSITIVE)  # chosen on the development half; docs/constants.md has 0.05 and 0.4
    distance: float = setting(2.0, NOT_NEGATIVE)  # row "fixed-scale" of the ablation has 0
    warm_up: int = setting(20, COUNT)  # the means of the metric are over 1/(1 − 0.95) = 20 gradients
    slow_down: int = setting(300, COUNT)  # chosen with `weighting` among five pairs; row "no-slow-down" has 0
    horizon: int = setting(0, COUNT)
    lower_bound: float = setting(0.0, BELOW_INFINITY)


@dataclass(frozen=True, kw_only=True)
class Average(Piece):
    """The running average of the iterates (schedule-free learning, Defazio et al. 2024).

    Attributes
    ----------
    averaging : float
        β: the gradient is taken at y = x + (1 − β)(z − x), between the average x and the iterate z; 0: no average.
    weighting : float
        The k-th iterate has the weight k to this power.
    """

    averaging: float = setting(0.85, BELOW_ONE)  # schedule-free learning has 0.9; row "no-averaging" has 0
    weighting: float = setting(3.0, NOT_NEGATIVE)  # chosen with `slow_down`; row "even-weights" of the ablation has 0


@dataclass(frozen=True, kw_only=True)
class Minibatch(Piece):
    """How steps on samples are made: a second-order phase while batches agree, then an averaged phase in a metric.

    Attributes
    ----------
    metric : Metric
        The norm in which averaged steps are measured, learnt from gradients: `Kronecker`, `Diagonal`, `Identity`, or
        an object of the caller's. The names "kronecker", "diagonal" and "none" are accepted too.
    step : StepScale
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
    step: StepScale = field(default_factory=StepScale)
    average: Average = field(default_factory=Average)
    curvature: bool = True
    noise: float = setting(1.0, NOT_NEGATIVE)

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
