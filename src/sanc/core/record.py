"""The record of one iteration, as the user receives it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import EnumType, StrEnum
from typing import TYPE_CHECKING, Any

from sanc.errors import missing_attribute

_RECORD_REMEDIES = {
    "fun": "use value",
    "grad": "use grad_norm, or the grad of the parameters",
    "loss": "use value; in loops without closures the optimiser does not know the loss",
    "lr": "use param_groups[0]['lr'] of the optimiser; step_norm is the norm of the step",
    "nit": "use iteration",
    "step": "use iteration, or step_norm",
    "x": "the point is in the parameters",
}
"""What to use in place of attributes that records of other optimisers have."""


class _RenamedMembers(EnumType):
    """Names the successors of a removed member in the error."""

    def __getattr__(cls, name: str) -> Any:
        if name == "UNTESTED":
            raise AttributeError("Branch.UNTESTED is now Branch.AVERAGED, and Branch.UNCONDITIONAL for CR and CRM")
        raise AttributeError(f"{cls.__name__} has no member {name!r}")


class Branch(StrEnum, metaclass=_RenamedMembers):
    """The kind of step that an iteration made."""

    VERY_SUCCESSFUL = "very successful"  # ρ > η2
    SUCCESSFUL = "successful"  # ρ ≥ η1, or a longer step with a lower f after a very successful one
    UNCONDITIONAL = "unconditional"  # a cubic step accepted without a test
    AVERAGED = "averaged"  # a step of the averaged phase
    CURVATURE = "curvature"  # an escape step along negative curvature
    GRADIENT = "gradient"  # an escape step along the negative gradient
    STAYED = "stayed"  # no step, or a return to an earlier point


class Note(StrEnum):
    """Remarks of the iteration that a run or a test compares with; other notes are free text of a piece."""

    BELOW_PRECISION = "the cubic step is below the working precision of x"
    GRADIENT_NOT_FINITE = "the gradient is not finite where f is lower"
    TRIAL_NOT_FINITE = "the trial value is not finite"
    GRADIENT_DECIDED = "the change of f is below working precision, and the gradient norm decided"
    AT_MINIMUM = "the model has its minimum here"
    MOMENTUM = "momentum"
    LONG_DIFFERENCES = "f has ripples: products are differences of gradients over the length of a step"


@dataclass(frozen=True, slots=True)
class Calls:
    """Component evaluations since the start: values f_i, gradients ∇f_i and products ∇²f_i·v.

    Attributes
    ----------
    value, gradient, product : int
        Components of each kind that were evaluated, including trial points and second Lanczos passes.
    paper_calls : int
        The x-axis of the paper's figures: |S_g| + J·|S_B| per second-order step; values are not counted. If the
        stopping rule determines the dimension of the Krylov space (preset "robust"), J is the dimension reached. CRM's
        second gradient is another |S_g|.
    """

    value: int = 0
    gradient: int = 0
    product: int = 0
    paper_calls: int = 0

    @property
    def total(self) -> int:
        """All component evaluations together."""
        return self.value + self.gradient + self.product


@dataclass(frozen=True, slots=True)
class Record:
    """One iteration.

    Attributes
    ----------
    iteration : int
        Number of the iteration, from 0.
    branch : Branch
        The kind of step.
    rho : float
        Actual over predicted decrease of the accepted trial, or of the last one if all were rejected, on the objective
        sample (with preset "robust" on samples: the gradient sample); NaN if no ratio was formed.
    sigma : float
        The cubic coefficient of that trial; NaN for a method without a model.
    grad_norm : float
        Norm of the gradient on its sample.
    ritz_value : float
        Left-most Ritz value of the Hessian in the Krylov space; NaN if no space was built.
    step_norm : float
        Norm of the step, 0 if the iteration stayed. If it returned to an earlier point (branch "stayed", with a note),
        the distance to that point.
    model_decrease : float
        Predicted decrease of that trial; NaN without a model.
    value : float
        f(x) at the start of the iteration: on the objective sample if it was evaluated there, otherwise on the gradient
        sample. In the averaged phase it is f at the point of the gradient.
    trial_value : float
        f at the point of that trial, on the sample of ρ.
    krylov_dim : int
        Dimension of the Krylov space; n if the model has the Hessian as a matrix.
    trials : int
        Trial points at which f was evaluated.
    calls : Calls
        Component evaluations since the start.
    seconds : float
        Time spent in iterations since the start.
    curvature_share : float
        Fraction of the predicted decrease (without the cubic term) along negative curvature in the last trial, 1 for a
        step of branch "curvature"; NaN without a model or a predicted decrease.
    note : str
        The reason for the outcome, if the branch alone does not show it.
    hvp : str
        How torch computes the Hessian products; empty if the caller supplies them.
    style : str
        How the optimiser is driven: closures that return the "loss", closures that call "backward", or "gradients".
    """

    iteration: int
    branch: Branch = Branch.STAYED
    rho: float = math.nan
    sigma: float = math.nan
    grad_norm: float = math.nan
    ritz_value: float = math.nan
    step_norm: float = 0.0
    model_decrease: float = math.nan
    value: float = math.nan
    trial_value: float = math.nan
    krylov_dim: int = 0
    trials: int = 0
    calls: Calls = field(default_factory=Calls)
    seconds: float = 0.0
    curvature_share: float = math.nan
    note: str = ""
    hvp: str = ""
    style: str = ""

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, _RECORD_REMEDIES)

    def as_dict(self) -> dict[str, float]:
        """Return the numbers in one dictionary, for a logger.

        The numbers of `calls` have names like ``calls.gradient``. ``dataclasses.asdict(record)`` also has the strings.
        """
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, (int, float))}
        return numbers | {f"calls.{name}": value for name, value in asdict(self.calls).items()}
