"""The settings of the iteration: numbers and rules, checked, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from sanc.errors import is_number, one_of, require

SigmaRule = Literal["paper", "interpolate"]
KrylovStop = Literal["paper", "forcing"]
Lanczos = Literal["store", "regenerate"]
Sampling = Literal["uniform", "buffered"]

_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("sigma0 first_radius L1 L2 epsilon lr scale", lambda v: 0 < v < math.inf, "pass a positive finite number"),
    (
        "epsilon_g epsilon_s sigma_floor distance weighting noise",
        lambda v: 0 <= v < math.inf,
        "pass a finite number ≥ 0",
    ),
    ("eta1", lambda v: 0 < v < 1, "pass a number between 0 and 1"),
    ("momentum memory averaging", lambda v: 0 <= v < 1, "pass a number in [0, 1)"),
    ("gamma", lambda v: 1 < v < math.inf, "pass a finite number above 1"),
    ("resolves warm_up slow_down largest_side", lambda v: v >= 0, "pass an integer ≥ 0"),
    ("krylov_dim renew", lambda v: v >= 1, "pass an integer ≥ 1"),
    ("gradient_tolerance_power", lambda v: v in (1, 2), "pass 1 or 2"),
)
_RANGES = {name: (holds, remedy) for names, holds, remedy in _KINDS for name in names.split()}
"""What fields of these names may be, where they are not None."""

AUTHORS_FLOAT32_FLOOR = 1e-20
"""The authors' program bounds σ by 1e-80 in float64 and, since that is 0 there, by 1e-20 in float32."""


@dataclass(frozen=True, kw_only=True)
class MinibatchSettings:
    """The numbers of the iteration on samples: metric, average, scale of a step, and when curvature is used.

    Attributes
    ----------
    metric : {"kronecker", "diagonal", "none"}
        The norm in which steps are measured, learnt from gradients: in the eigenbases of a matrix's Kronecker factors,
        per coordinate, or by one number.
    memory : float
        Memory of the means that the metric is made of.
    renew : int
        Steps after which the eigenbases are renewed; more often at first, more rarely in a long run.
    largest_side : int
        A longer side of a matrix keeps its coordinates, which saves memory and time.
    scale : float
        Length of a step in the metric, about the change of each coordinate, in units of a typical weight: the root mean
        square of a matrix's entries at the first point, or 1/15 where they are zero.
    distance : float
        The scale is this times a lower bound of the distance to a solution where that is larger, at most twice
        `scale`; 0: not.
    warm_up : int
        Steps over which the scale grows to its value.
    slow_down : int
        The scale falls as 1/√(1 + steps/slow_down); 0: not.
    averaging : float
        The gradient is taken this much nearer to the average than to the last point; 0: nothing is averaged.
    weighting : float
        The k-th point has the weight k to this power in the average.
    curvature : bool
        Whether Hessian products are used: in judged steps as long as batches agree, and where the loss stands still.
    noise : float
        Batches agree as long as they tell the last step's gain apart by no more than this share of it.
    """

    metric: Literal["kronecker", "diagonal", "none"] = "kronecker"
    memory: float = 0.95
    renew: int = 50
    largest_side: int = 1024
    scale: float = 0.15
    distance: float = 2.0
    warm_up: int = 20
    slow_down: int = 150
    averaging: float = 0.85
    weighting: float = 2.0
    curvature: bool = True
    noise: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every number and rule of the iteration.

    Attributes
    ----------
    sigma0 : float or None
        The cubic coefficient σ at the start; for `CR` and `CRM` its fixed value. None: 1e-4 ‖g‖ over the square of
        the unit of lengths (see `first_radius`) at the first point, which has the units of σ.
    sigma_floor, sigma_ceiling : float or None
        Bounds of σ. A floor of None is the machine precision of the parameters' type.
    eta1, eta2 : float
        A step with ρ ≥ η1 is taken; with ρ > η2 it also lowers σ.
    gamma : float
        Factor by which σ grows after a rejected step.
    sigma_rule : {"paper", "interpolate"}
        "paper": σ ← max(min(σ, ‖g‖), floor) after a very successful step, γσ after a rejected one. "interpolate":
        σ follows the cubic coefficient that f showed along the last step, up or down, as far as the step along the same
        direction becomes 0.1 to 0.5 times as long after a rejection and at most 3 times after a very successful step.
        Where an exact f still falls at the end of a step that was just successful, σ falls too.
    first_radius : float or None
        σ is at least so large that a step is no longer than this times the unit of lengths, or than three times the
        last step; the first step of all, only where its Krylov space shows so little curvature, or negative one, that σ
        decides how long it is. The unit is the larger of ‖x‖/10 and the first Cauchy step ‖g‖²/‖Bg‖, as far as |f|/‖g‖
        and ‖x‖/10 of the first point allow. Where that or `sigma0` decided on σ, and f falls by more than the model
        says, longer steps in the same space are tried at once. None: neither. Only for methods that test their steps.
    rounding_guard : bool
        Add the rounding error of f to both sides of the ratio, so that it tends to 1 when f barely moves; and where an
        exact f moves less than rounding may hide, take a step that f refuses if it halves the gradient.
    resolves : int
        How often a rejected step is replaced by that of a larger σ in the same Krylov space; no Hessian product.
    krylov_dim : int or None
        Most Lanczos iterations J. None: as many as the problem needs, which only the function front door allows.
    krylov_stop : {"paper", "forcing"}
        "paper": stop when ‖∇m(s)‖ ≤ ε_g and the Ritz residual ≤ max(ε, ‖g‖)/2. "forcing": stop when
        ‖∇m(s)‖ ≤ min(0.2, r, ‖s‖/ℓ)·‖g‖, an inexact Newton condition, or ≤ 0.5 `tol` of `minimize`: r is ‖g‖ over
        that of the iteration before, and ℓ the unit of lengths (see `first_radius`). With an exact f it also stops at
        the first negative curvature.
    lanczos : {"store", "regenerate"}
        Keep the basis, or compute it again in a second pass and hold three vectors whatever J is.
    reorthogonalise : bool
        Orthogonalise each new Lanczos vector against all earlier ones; needs lanczos="store".
    L1, L2 : float
        Lipschitz constants of the gradient and the Hessian, used by the escape step.
    estimate_constants : bool
        Estimate L1 and L2 from the Krylov space and the last trial instead of using the numbers given.
    epsilon, epsilon_g, epsilon_s : float
        ε, ε_g and ε_s of the paper; an ε_g of None is ε/4.
    curvature_guard : {"negative", "epsilon"}
        Follow negative curvature only if λ1 < 0, or only if λ1 < −ε.
    otherwise : {"gradient", "stay"}
        What a rejected step does where the guard finds no curvature.
    gradient_tolerance_power : int
        The gradient side of the escape rule is ‖g‖²/(4 L1) − ε_g^power/L1: 2 in the paper, 1 in its program.
    fallback_sample : {"gradient", "hessian"}
        The sample whose gradient the escape step −g/L1 uses.
    sign : {"random", "descent"}
        Sign of the curvature direction: a coin toss, or downhill.
    escape_check : {"finite", "decrease"}
        Keep an escape step if f is finite there, or only if it is lower there; the step is halved until it is.
    sampling : {"uniform", "buffered"}
        How `minimize` draws from a finite sum: each sample from all rows, or in the order of the rows with a shuffle
        buffer of one batch, as the authors' program does. The latter keeps what stands together in the file together
        in a sample, which is a source of noise of its own.
    minibatch : MinibatchSettings or None
        How steps on samples are made once batches differ by more than a step gains. None takes every sample for the
        objective and builds a Krylov space in every step, as the paper does. Its fields may be given beside these.
    momentum : float
        Largest momentum coefficient of `CRM`.
    lr : float
        Step size of `sgd`.
    """

    sigma0: float | None = 1.0
    sigma_floor: float | None = None
    sigma_ceiling: float = 1e100
    eta1: float = 0.2
    eta2: float = 0.8
    gamma: float = 2.0
    sigma_rule: SigmaRule = "paper"
    first_radius: float | None = None
    rounding_guard: bool = False
    resolves: int = 0
    krylov_dim: int | None = 5
    krylov_stop: KrylovStop = "paper"
    lanczos: Lanczos = "store"
    reorthogonalise: bool = False
    L1: float = 10.0
    L2: float = 10.0
    estimate_constants: bool = False
    epsilon: float = 1e-4
    epsilon_g: float | None = None
    epsilon_s: float = 1e-8
    curvature_guard: Literal["negative", "epsilon"] = "negative"
    otherwise: Literal["gradient", "stay"] = "gradient"
    gradient_tolerance_power: int = 2
    fallback_sample: Literal["gradient", "hessian"] = "gradient"
    sign: Literal["random", "descent"] = "random"
    escape_check: Literal["finite", "decrease"] = "finite"
    sampling: Sampling = "uniform"
    minibatch: MinibatchSettings | None = None
    momentum: float = 0.9
    lr: float = 0.01

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.eta1 < self.eta2 < 1, "eta2", self.eta2, f"pass a number above eta1 = {self.eta1} and below 1")
        require(not (self.reorthogonalise and self.lanczos == "regenerate"), "reorthogonalise", True,
                 'use lanczos="store", since a basis that is not kept cannot be orthogonalised against')  # fmt: skip
        floor = self.sigma_floor or 0.0
        require(self.sigma_ceiling > floor, "sigma_ceiling", self.sigma_ceiling, f"pass a number above {floor}")

    @property
    def first_sigma(self) -> float:
        """σ before anything is known of f."""
        return 1.0 if self.sigma0 is None else self.sigma0

    @property
    def gradient_tolerance(self) -> float:
        """ε_g: the number given, or ε/4."""
        return self.epsilon / 4 if self.epsilon_g is None else self.epsilon_g


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields, which take longer to find out than a small problem takes to solve."""
    return get_type_hints(kind)


def check_fields(settings: Any) -> None:
    """Reject a value of the wrong kind, or out of its range, by name."""
    kind: Any = type(settings)
    for name, hint in _hints(kind).items():
        value, parts = getattr(settings, name), get_args(hint)
        choices = [part for part in parts if isinstance(part, str)]
        if choices:
            one_of(name, value, choices)
        elif hint is bool or MinibatchSettings in parts:
            kinds = bool if hint is bool else (MinibatchSettings, type(None))
            called = "True or False" if hint is bool else "a sanc.MinibatchSettings, or None"
            require(isinstance(value, kinds), name, value, f"pass {called}")
        elif value is not None or type(None) not in parts:
            kind, called = (Integral, "an integer") if hint is int or int in parts else (Real, "a number")
            require(is_number(value, kind), name, value, f"pass {called}")
            if name in _RANGES:
                holds, remedy = _RANGES[name]
                require(holds(value), name, value, remedy + (", or None" if type(None) in parts else ""))
