"""The family: a method is three objects, a preset a set of numbers and rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sanc.core.acceptance import Acceptance, always, by_ratio, with_momentum
from sanc.core.escape import OnRejection, escape, gradient_step, stay
from sanc.core.model import Model, cubic_steps, no_steps
from sanc.core.settings import MinibatchSettings, Settings
from sanc.errors import ArgumentError, nearest, one_of, shown


@dataclass(frozen=True)
class Method:
    """A member of the family: its three choices, and the settings in which it differs from the preset.

    Attributes
    ----------
    name : str
        Its name.
    model : callable
        Proposes cubic steps in the Krylov space, or none.
    acceptance : callable
        Judges a trial point.
    on_rejection : callable
        Ends an iteration whose step failed.
    exact : bool
        Whether it is for one exact objective only.
    defaults : mapping
        Its own settings.
    """

    name: str
    model: Model
    acceptance: Acceptance
    on_rejection: OnRejection
    exact: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_model(self) -> bool:
        """Whether it takes cubic steps."""
        return self.model is not no_steps

    @property
    def tested(self) -> bool:
        """Whether its steps are judged by the ratio ρ."""
        return self.acceptance is by_ratio

    @property
    def escapes(self) -> bool:
        """Whether it moves on where its cubic step was rejected."""
        return self.on_rejection is escape

    @property
    def uses_krylov(self) -> bool:
        """Whether it asks for Hessian products at all."""
        return self.has_model or self.escapes

    def on_samples(self, settings: Settings) -> bool:
        """Whether, with samples, steps are made as `Settings.minibatch` says."""
        return settings.minibatch is not None and self.tested and not self.exact


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("sanc", cubic_steps, by_ratio, escape),
        Method("scr", cubic_steps, by_ratio, stay),
        Method("arc", cubic_steps, by_ratio, stay, exact=True),
        Method("cr", cubic_steps, always, stay, defaults={"sigma0": 5.0}),
        Method("crm", cubic_steps, with_momentum, stay, defaults={"sigma0": 5.0}),
        Method("ncd", no_steps, always, escape),
        Method("sgd", no_steps, always, gradient_step),
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
        sigma0=None,
        sigma_floor=1e-290,
        sigma_ceiling=1e290,
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
        minibatch=MinibatchSettings(),
    ),
}
"""The presets by name: the paper to the letter, the authors' program, and the default, with nothing to tune."""


_USERS = {"momentum": "crm"}
"""Settings of one method alone."""


def find_method(name: object) -> Method:
    """Look a method up by name, with the nearest name in the error."""
    lower = name.lower() if isinstance(name, str) else ""
    return METHODS[lower if lower in METHODS else one_of("method", name, METHODS)]


def settings_for(method: str, preset: str | Settings = "robust", **options: Any) -> Settings:
    """Return the settings that a method runs with: the preset, the method's own defaults, then the options.

    Parameters
    ----------
    method : str
        Name of a member of the family.
    preset : {"robust", "paper", "authors"} or Settings
        What to start from.
    **options
        Any field of `sanc.Settings` or `sanc.MinibatchSettings`.

    Examples
    --------
    >>> import sanc
    >>> sanc.settings_for("cr", "paper").sigma0
    5.0
    """
    return make_settings(find_method(method), preset, options)


def make_settings(method: Method, preset: object, options: Mapping[str, Any], also: Iterable[str] = ()) -> Settings:
    """Preset, then the method's own defaults, then the caller's options; `also` are names the caller takes itself."""
    if isinstance(preset, Settings):
        base, merged = preset, dict(options)
    elif isinstance(preset, str) and preset in PRESETS:
        base, merged = PRESETS[preset], {**method.defaults, **options}
    else:
        raise ArgumentError(
            f"preset = {shown(preset)} is neither known by name nor a sanc.Settings: {nearest(str(preset), PRESETS)}"
        )
    known = {item.name for item in fields(Settings)}
    on_samples = {item.name for item in fields(MinibatchSettings)}
    for name, value in options.items():
        if name not in known | on_samples:
            far = "leave it out, or look for its name in help(sanc.Settings) and help(sanc.MinibatchSettings)."
            hint = nearest(name, known | on_samples | set(also), far)
            raise ArgumentError(f"option {name!r} (= {shown(value)}) is not known: {hint}")
        user = _USERS.get(name, method.name)
        if user != method.name:
            raise ArgumentError(f"{name} = {shown(value)} is used by {user} alone, not by {method.name}: leave it out.")
    if merged.get("lanczos") == "regenerate":
        merged.setdefault("reorthogonalise", False)
    mine = {name: merged.pop(name) for name in on_samples & merged.keys()}
    if mine:
        given = merged.get("minibatch", base.minibatch)
        merged["minibatch"] = replace(given or MinibatchSettings(), **mine)
    return replace(base, **merged) if merged else base
