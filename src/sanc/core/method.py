"""A method of the family: a composition of pieces, each with its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from sanc.core.acceptance import RatioTest
from sanc.core.escape import PaperEscape
from sanc.core.model import CubicModel
from sanc.core.pieces import Acceptance, Escape, Model, SampleSettings, SigmaSettings, required_members
from sanc.core.settings import NOT_NEGATIVE, Piece, is_user_defined, setting
from sanc.core.sigma import SigmaRule, SigmaUpdate
from sanc.errors import ArgumentTypeError, call_mismatch, shown

_REQUIRED = {
    "model": (required_members(Model), "sanc.CubicModel()"),
    "acceptance": (required_members(Acceptance), "sanc.RatioTest()"),
    "escape": (required_members(Escape), "sanc.CheckedEscape() or sanc.PaperEscape()"),
    "sigma": (required_members(SigmaSettings), "sanc.SigmaUpdate(), or set the option sigma0"),
}
"""The members that each piece must have, and an example for the message."""
_CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "acceptance": (("here", "subspace", "step", "trial", "trial_count"), ()),
    "escape": (("here", "subspace", "sigma"), ("model_proposes",)),
}
"""Arguments by position and by name of the pieces that are called."""


@dataclass(frozen=True, kw_only=True)
class Method(Piece):
    """The pieces of an iteration. The defaults are the method of the paper.

    Attributes
    ----------
    name : str
        The name of the method, for messages and saved states.
    model : Model
        Builds the Krylov space and proposes steps in it.
    acceptance : Acceptance
        Accepts or rejects a trial point.
    escape : Escape
        Ends an iteration whose cubic steps were rejected.
    sigma : SigmaSettings
        The initial σ, and the rule by which it changes.
    minibatch : Minibatch or None
        How steps on samples are made once batches disagree. None: every sample is treated as the objective, and every
        step builds a Krylov space, as in the paper.
    exact : bool
        Whether it is for one exact objective only.
    epsilon_s : float
        ε_s of the paper: the stopping test 2.7 holds if the iteration stays and the cubic step norm is at most this. On
        samples, it holds only if the gradient is zero. 1e-8 is about the square root of the precision of float64.
    sampling : {"uniform", "buffered"}
        How `minimize` draws from a finite sum: each sample from all rows, or in the order of the rows with a shuffle
        buffer of one batch, as the authors' program does.
    """

    name: str = "sanc"
    model: Model = field(default_factory=CubicModel)
    acceptance: Acceptance = field(default_factory=RatioTest)
    escape: Escape = field(default_factory=PaperEscape)
    sigma: SigmaSettings = field(default_factory=SigmaUpdate)
    minibatch: SampleSettings | None = None
    exact: bool = False
    epsilon_s: float = setting(1e-8, NOT_NEGATIVE)
    sampling: Literal["uniform", "buffered"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (required, example) in _REQUIRED.items():
            piece = getattr(self, name)
            if isinstance(piece, type):
                prefix = "sanc." if piece.__module__.startswith("sanc.") else ""
                remedy = f"pass an object of it, such as {prefix}{piece.__name__}()"
                raise ArgumentTypeError(f"{name} = {shown(piece)} cannot be used, since it is a class: {remedy}.")
            missing = [member for member in required if not hasattr(piece, member)]
            if missing:
                is_of_caller = is_user_defined(piece) and type(piece).__module__ != "builtins"
                remedy = f"add that to {type(piece).__name__}, or pass {example}" if is_of_caller else f"pass {example}"
                raise ArgumentTypeError(
                    f"{name} = {shown(piece)} cannot be used, since it has no {missing[0]}: {remedy}."
                )
            positional, keywords = _CALLS.get(name, ((), ()))
            if positional and (mismatch := call_mismatch(piece, len(positional), dict.fromkeys(keywords, True))):
                call = ", ".join([*positional, *(f"{keyword}=…" for keyword in keywords)])
                raise ArgumentTypeError(
                    f"{name} = {shown(piece)} cannot be called as {name}({call}) ({mismatch}): pass {example}."
                )

        if not (self.minibatch is None or isinstance(self.minibatch, SampleSettings)):
            raise ArgumentTypeError(
                f"minibatch = {shown(self.minibatch)} cannot be used: pass a sanc.Minibatch, whose metric, step size "
                "and average may be objects of your own, or None."
            )

    @property
    def needs_products(self) -> bool:
        """Whether an iteration needs Hessian products."""
        return self.model.needs_products and (self.model.proposes or self.escape.needs_products)

    @property
    def initial_sigma_rule(self) -> SigmaRule:
        """The rule for σ before the precision of vectors is known: only its settings are used, not its lower bound."""
        return self.sigma.rule(0.0)

    @property
    def on_samples(self) -> bool:
        """Whether steps on samples are made as `minibatch` describes."""
        return self.minibatch is not None and not self.exact

    def options(self) -> dict[str, Any]:
        """Return all settings side by side, by their names.

        A setting that several pieces have with different values has the name of the piece before it: "model.epsilon".
        """
        values: dict[str, dict[str, Any]] = {}
        for place, name, value in settings_of("method", self):
            values.setdefault(name, {})[place] = value
        options: dict[str, Any] = {}
        for name, by_place in values.items():
            first, *others = by_place.values()
            if all(other == first for other in others):
                options[name] = first
            else:
                options |= {f"{place}.{name}": value for place, value in by_place.items()}
        return options


def settings_of(place: str, piece: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and value of the settings of a piece, and of the pieces it is composed of."""
    for item in fields(piece):
        value = getattr(piece, item.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield place, item.name, type(value).__name__
            yield from settings_of(item.name, value)
        else:
            yield place, item.name, value
