"""The settings of the iteration: numbers and rules, checked, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from sanc.errors import ArgumentError, nearest

SigmaRule = Literal["paper", "interpolate"]
KrylovStop = Literal["paper", "forcing"]
Lanczos = Literal["store", "regenerate"]
Sampling = Literal["uniform", "buffered"]


AUTHORS_FLOAT32_FLOOR = 1e-20
"""The authors' program bounds σ by 1e-80 in float64 and, since that is 0 there, by 1e-20 in float32."""


@dataclass(frozen=True, kw_only=True)
class MinibatchSettings:
    """The numbers of the iteration on samples, in which one Krylov space serves many steps.

    Attributes
    ----------
    refresh : int
        Steps that share one Krylov space.
    averaging : float
        Memory of the moving average of gradients, 0 for none.
    metric : float
        The norm is that of a diagonal M, the root of the gradient's mean square to this power: 0 is Euclid's, 1 Adam's.
    metric_averaging : float
        Memory of the mean square.
    margin : float
        Where σ rests between the steps that are best for the next value (0) and the longest that do no harm (1).
    sigma_rate : float
        How fast σ follows the slopes, at most this much of the step's length in one step.
    check_every : int
        How often a step is judged by its value; 0 for only where it has to be.
    warm_up : int
        Most steps of the first phase, in which nothing is averaged and every step is judged; as many steps after it are
        judged too.
    """

    refresh: int = 50
    averaging: float = 0.9
    metric: float = 0.5
    metric_averaging: float = 0.999
    margin: float = 0.1
    sigma_rate: float = 0.1
    check_every: int = 8
    warm_up: int = 10

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("averaging", "metric_averaging"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "pass a number in [0, 1)")
        for name in ("metric", "margin", "sigma_rate"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "pass a number from 0 to 1")
        for name in ("refresh", "check_every", "warm_up"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "pass an integer ≥ 0")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every number and rule of the iteration.

    Attributes
    ----------
    sigma0 : float
        The cubic coefficient σ at the start; for `CR` and `CRM` its fixed value.
    sigma_floor, sigma_ceiling : float or None
        Bounds of σ. A floor of None is the machine precision of the parameters' type. With `minibatch`, σ is
        1e8 at most.
    eta1, eta2 : float
        A step with ρ ≥ η1 is taken; with ρ > η2 it also lowers σ.
    gamma : float
        Factor by which σ grows after a rejected step.
    sigma_rule : {"paper", "interpolate"}
        "paper": σ ← max(min(σ, ‖g‖), floor) after a very successful step, γσ after a rejected one. "interpolate":
        σ follows the cubic coefficient that f showed along the last step, up or down, as far as the step along the same
        direction becomes 0.1 to 0.5 times as long after a rejection and at most 3 times after a very successful step.
    first_radius : float or None
        Where a Krylov space shows negative curvature, σ is at least so large that the step is no longer than this times
        max(1, ‖x‖/10), or than three times the last step. Where that or `sigma0` decided on σ, and f falls by more than
        the model says, longer steps in the same space are tried at once. None: neither. Only for methods that test
        their steps.
    rounding_guard : bool
        Add the rounding error of f to both sides of the ratio, so that it tends to 1 when f barely moves; and where an
        exact f moves less than rounding may hide, take a step that f refuses if it halves the gradient.
    resolves : int
        How often a rejected step is replaced by that of a larger σ in the same Krylov space; no Hessian product.
    krylov_dim : int or None
        Most Lanczos iterations J. None: as many as the problem needs, which only the function front door allows.
    krylov_stop : {"paper", "forcing"}
        "paper": stop when ‖∇m(s)‖ ≤ ε_g and the Ritz residual ≤ max(ε, ‖g‖)/2. "forcing": stop when
        ‖∇m(s)‖ ≤ min(0.2, √‖g‖, ‖s‖)·‖g‖, an inexact Newton condition, or ≤ 0.5 `tol` of `minimize`.
    lanczos : {"store", "regenerate"}
        Keep the basis, or compute it again in a second pass and hold three vectors whatever J is. A basis that is not
        kept serves one step only: `minibatch` is then None unless given, which is an error.
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
        How steps on samples are made: one Krylov space for many of them. None builds one in every step, as the paper
        does. Its fields may be given beside these, and ``refresh=0`` is None.
    momentum : float
        Largest momentum coefficient of `CRM`.
    lr : float
        Step size of `sgd`.
    """

    sigma0: float = 1.0
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
        positive = ("sigma0", "L1", "L2", "epsilon", "lr")
        for name in positive:
            _require(getattr(self, name) > 0 and math.isfinite(getattr(self, name)), name, getattr(self, name),
                     "pass a positive finite number")  # fmt: skip
        _require(self.first_radius is None or 0 < self.first_radius < math.inf, "first_radius", self.first_radius,
                 "pass a positive finite number, or None")  # fmt: skip
        for name in ("epsilon_g", "epsilon_s", "sigma_floor"):
            given = getattr(self, name)
            _require(given is None or 0 <= given < math.inf, name, given, "pass a number ≥ 0")
        _require(0 < self.eta1 < 1, "eta1", self.eta1, "pass a number between 0 and 1")
        _require(self.eta1 < self.eta2 < 1, "eta2", self.eta2, f"pass a number above eta1 = {self.eta1} and below 1")
        _require(1 < self.gamma < math.inf, "gamma", self.gamma, "pass a finite number above 1")
        _require(self.resolves >= 0, "resolves", self.resolves, "pass an integer ≥ 0")
        _require(self.krylov_dim is None or self.krylov_dim >= 1, "krylov_dim", self.krylov_dim,
                 "pass an integer ≥ 1")  # fmt: skip
        _require(self.gradient_tolerance_power in (1, 2), "gradient_tolerance_power", self.gradient_tolerance_power,
                 "pass 1 or 2")  # fmt: skip
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "pass a number in [0, 1)")
        _require(not (self.reorthogonalise and self.lanczos == "regenerate"), "reorthogonalise", True,
                 'use lanczos="store", since a basis that is not kept cannot be orthogonalised against')  # fmt: skip
        if self.minibatch is not None:
            _require(self.lanczos == "store", "refresh", self.minibatch.refresh,
                     'pass 0, or use lanczos="store", since a basis that is not kept serves one step only')  # fmt: skip
        floor = self.sigma_floor or 0.0
        _require(self.sigma_ceiling > floor, "sigma_ceiling", self.sigma_ceiling, f"pass a number above {floor}")

    @property
    def gradient_tolerance(self) -> float:
        """ε_g: the number given, or ε/4."""
        return self.epsilon / 4 if self.epsilon_g is None else self.epsilon_g


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ArgumentError(f"{name} = {value!r} cannot be used: {remedy}.")


def check_fields(settings: Any) -> None:
    """Reject a value of the wrong kind by name, before a comparison fails somewhere else."""
    for name, hint in get_type_hints(type(settings)).items():
        value, parts = getattr(settings, name), get_args(hint)
        choices = [part for part in parts if isinstance(part, str)]
        if choices:
            if value not in choices:
                raise ArgumentError(f"{name} = {value!r} is not a choice: {nearest(str(value), choices)}.")
        elif hint is bool or MinibatchSettings in parts:
            if not isinstance(value, bool if hint is bool else (MinibatchSettings, type(None))):
                called = "True or False" if hint is bool else "a sanc.MinibatchSettings, or None"
                raise ArgumentError(f"{name} = {value!r:.60} cannot be used: pass {called}.")
        elif value is not None or type(None) not in parts:
            kind, called = (Integral, "an integer") if hint is int or int in parts else (Real, "a number")
            if not isinstance(value, kind) or isinstance(value, bool) or value != value:
                raise ArgumentError(f"{name} = {value!r} cannot be used: pass {called}.")
