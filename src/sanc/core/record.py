"""What happened in one iteration: written by the iteration as it goes, and handed to the user as it is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import EnumType, StrEnum
from typing import Any


class _Renamed(EnumType):
    def __getattr__(cls, name: str) -> Any:
        if name == "UNTESTED":
            raise AttributeError("Branch.UNTESTED is now Branch.AVERAGED, and Branch.UNCONDITIONAL for CR and CRM")
        raise AttributeError(f"{cls.__name__} has no member {name!r}")


class Branch(StrEnum, metaclass=_Renamed):
    """Which kind of step an iteration took."""

    VERY_SUCCESSFUL = "very successful"  # ρ > η2
    SUCCESSFUL = "successful"  # ρ ≥ η1
    UNCONDITIONAL = "unconditional"  # a cubic step accepted without a test
    AVERAGED = "averaged"  # a step of the averaged phase
    CURVATURE = "curvature"
    GRADIENT = "gradient"
    STAYED = "stayed"


class Note(StrEnum):
    """Remarks of the iteration that a run or a test acts on."""

    VANISHES = "the cubic step is below the working precision of x"
    NO_GRADIENT = "the gradient is not finite where f is lower"
    TRIAL_NOT_FINITE = "the trial value is not finite"
    GRADIENT_DECIDED = "the change of f is below working precision, and the gradient norm decided"
    AT_MINIMUM = "the model has its minimum here"
    MOMENTUM = "momentum"


@dataclass(frozen=True, slots=True)
class Calls:
    """Component evaluations since the start: values f_i, gradients ∇f_i and products ∇²f_i·v.

    Attributes
    ----------
    value, gradient, product : int
        How many components of each kind were evaluated, trial points and second Lanczos passes included.
    paper_calls : int
        The x-axis of the paper's figures: |S_g| + J·|S_B| per second-order step; values are free. Where the length of
        the Krylov space follows need (preset "robust"), J is the length it had; CRM's second gradient is another |S_g|.
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
        The kind of step taken.
    rho : float
        Actual over predicted decrease of the last trial, on the objective sample (of preset "robust" with samples, and
        below, the gradient sample); NaN where no ratio was formed.
    sigma : float
        The cubic coefficient of the last trial; NaN for a method without a model.
    grad_norm : float
        Norm of the gradient on its sample.
    ritz_value : float
        Left-most Ritz value of the Hessian in the Krylov space; NaN where none was built.
    step_norm : float
        Length of the step that was taken, 0 where the iteration stayed; where it went back to an earlier point (branch
        "stayed", with a note) the distance to that.
    model_decrease : float
        Decrease that the cubic model predicted for its last trial; NaN where there was no model.
    value : float
        f(x) at the start of the iteration: on the objective sample where that was asked, else on the gradient sample;
        where steps are averaged, f where the gradient was taken.
    trial_value : float
        f at the point the iteration ended at, on the objective sample.
    krylov_dim : int
        Dimension of the Krylov space.
    trials : int
        Points at which the objective was tried.
    calls : Calls
        Component evaluations since the start.
    seconds : float
        Time spent in iterations since the start.
    curvature_share : float
        Share of the model's decrease (without its cubic term) that the last trial was to earn along negative curvature,
        1 for a step of branch "curvature"; NaN where there was no model or it promised nothing.
    note : str
        Why the iteration went as it did, where that is not plain from the branch.
    hvp : str
        How torch makes the Hessian products; empty where they are given.
    style : str
        What drives an optimiser: closures that return the "loss", closures that call "backward", or "gradients" alone.
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

    def as_dict(self) -> dict[str, float]:
        """Return the numbers, side by side, for a logger: ``for k, v in record.as_dict().items(): …``.

        Those of `calls` are there as ``calls.gradient`` and so on. With the strings, for JSON, it is
        ``dataclasses.asdict(record)``.
        """
        plain = {name: value for name, value in asdict(self).items() if isinstance(value, (int, float))}
        return plain | {f"calls.{name}": value for name, value in asdict(self.calls).items()}
