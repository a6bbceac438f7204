"""The settings of the iteration, the presets that fix them, and the methods of the family: all of it data.

A method is a choice of three things (model, acceptance, what to do on rejection); a preset is a set of numbers and
rules for them. No other file knows a preset by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from sanc.errors import ArgumentError, nearest

SigmaRule = Literal["paper", "interpolate"]
KrylovStop = Literal["paper", "forcing"]
Lanczos = Literal["store", "regenerate"]
Sampling = Literal["uniform", "buffered"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every number and rule of the iteration.

    Attributes
    ----------
    sigma0 : float
        The cubic coefficient σ at the start; for `CR` and `CRM` its fixed value.
    sigma_floor, sigma_ceiling : float or None
        Bounds of σ. A floor of None is the machine precision of the parameters' type. With `refresh` σ is 1e8 at most.
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
        kept serves one step only: `refresh` is then 0 unless given, which is an error.
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
    refresh : int
        With samples: steps that share one Krylov space. 0 builds one in every step, as the paper does.
    averaging : float
        With `refresh`: memory of the moving average of gradients, 0 for none.
    metric : float
        With `refresh`: the norm is that of a diagonal M, the root of the gradient's mean square to this power: 0 is
        Euclid's, 1 Adam's.
    metric_averaging : float
        With `refresh`: memory of the mean square.
    margin : float
        With `refresh`: where σ rests between the steps that are best for the next value (0) and the longest that do no
        harm (1).
    sigma_rate : float
        With `refresh`: how fast σ follows the slopes, at most this much of the step's length in one step.
    check_every : int
        With `refresh`: how often a step is judged by its value; 0 for only where it has to be.
    warm_up : int
        With `refresh`: most steps of the first phase, in which nothing is averaged and every step is judged; as many
        steps after it are judged too.
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
    refresh: int = 0
    averaging: float = 0.9
    metric: float = 0.5
    metric_averaging: float = 0.999
    margin: float = 0.1
    sigma_rate: float = 0.1
    check_every: int = 8
    warm_up: int = 10
    momentum: float = 0.9
    lr: float = 0.01

    def __post_init__(self) -> None:
        _check_types(self)
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
        for name in ("momentum", "averaging", "metric_averaging"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "pass a number in [0, 1)")
        for name in ("metric", "margin", "sigma_rate"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "pass a number from 0 to 1")
        for name in ("refresh", "check_every", "warm_up"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "pass an integer ≥ 0")
        _require(not (self.reorthogonalise and self.lanczos == "regenerate"), "reorthogonalise", True,
                 'use lanczos="store", since a basis that is not kept cannot be orthogonalised against')  # fmt: skip
        _require(not (self.refresh and self.lanczos == "regenerate"), "refresh", self.refresh,
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


@cache
def _kinds() -> list[tuple[str, tuple[str, ...], bool, Any, str]]:
    """Name of each field, its choices, whether it may be None, and else its type and how that is called."""
    kinds = []
    for name, hint in get_type_hints(Settings).items():
        parts = get_args(hint)
        kind: Any = Real
        called = "a number"
        if hint is bool:
            kind, called = bool, "True or False"
        elif hint is int or int in parts:
            kind, called = Integral, "an integer"
        kinds.append((name, tuple(c for c in parts if isinstance(c, str)), type(None) in parts, kind, called))
    return kinds


def _check_types(settings: Settings) -> None:
    """Reject a value of the wrong kind by name, before a comparison fails somewhere else."""
    for name, choices, may_be_none, kind, called in _kinds():
        value = getattr(settings, name)
        if choices:
            if value not in choices:
                raise ArgumentError(f"{name} = {value!r} is not a choice: {nearest(str(value), choices)}.")
        elif value is None and may_be_none:
            continue
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or value != value:
            raise ArgumentError(f"{name} = {value!r} cannot be used: pass {called}.")


@dataclass(frozen=True)
class Method:
    """A member of the family: three choices, and the settings in which it differs from the preset."""

    name: str
    model: Literal["adaptive", "fixed", "none"]
    acceptance: Literal["ratio", "always"]
    on_rejection: Literal["escape", "stay", "gradient"]
    momentum: bool = False
    exact: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uses_krylov(self) -> bool:
        """Whether the method asks for Hessian products at all."""
        return self.model != "none" or self.on_rejection == "escape"

    def amortises(self, settings: Settings) -> bool:
        """Whether, with samples, one Krylov space is to serve many steps."""
        return settings.refresh > 0 and self.model == "adaptive" and not self.exact


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("sanc", "adaptive", "ratio", "escape"),
        Method("scr", "adaptive", "ratio", "stay"),
        Method("arc", "adaptive", "ratio", "stay", exact=True),
        Method("cr", "fixed", "always", "stay", defaults={"sigma0": 5.0}),
        Method("crm", "fixed", "always", "stay", momentum=True, defaults={"sigma0": 5.0}),
        Method("ncd", "none", "always", "escape"),
        Method("sgd", "none", "always", "gradient"),
    )
}
"""The family by name."""

PRESETS: Mapping[str, Settings] = {
    "paper": Settings(),
    "authors": Settings(
        curvature_guard="epsilon",
        otherwise="stay",
        gradient_tolerance_power=1,
        fallback_sample="hessian",
        sigma_floor=1e-80,
        sampling="buffered",
    ),
    "robust": Settings(
        eta1=0.1,
        eta2=0.75,
        sigma_floor=1e-8,
        sigma_ceiling=1e12,
        sigma_rule="interpolate",
        first_radius=1.0,
        rounding_guard=True,
        resolves=12,
        krylov_dim=None,
        krylov_stop="forcing",
        reorthogonalise=True,
        estimate_constants=True,
        sign="descent",
        escape_check="decrease",
        refresh=50,
    ),
}
"""The presets by name: the paper to the letter, the authors' program, and the default, with nothing to tune."""

AUTHORS_FLOAT32_FLOOR = 1e-20
"""The authors' program bounds σ by 1e-80 in float64 and, since that is 0 there, by 1e-20 in float32."""


def find_method(name: object) -> Method:
    """Look a method up by name, with the nearest name in the error."""
    if not isinstance(name, str) or name.lower() not in METHODS:
        raise ArgumentError(f"method = {name!r} is not known: {nearest(str(name), METHODS)}.")
    return METHODS[name.lower()]


def make_settings(method: Method, preset: object, options: Mapping[str, Any], also: Iterable[str] = ()) -> Settings:
    """Preset, then the method's own defaults, then the caller's options; `also` are names the caller takes itself."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ArgumentError(f"preset = {preset!r} is not known: {nearest(str(preset), PRESETS)}.")
    known = {item.name for item in fields(Settings)}
    for name, value in options.items():
        if name not in known:
            raise ArgumentError(f"option {name!r} (= {value!r:.60}) is not known: {nearest(name, known | set(also))}.")
    merged = {**method.defaults, **options}
    if merged.get("lanczos") == "regenerate":
        merged.setdefault("reorthogonalise", False)
        merged.setdefault("refresh", 0)
    return replace(PRESETS[preset], **merged)
