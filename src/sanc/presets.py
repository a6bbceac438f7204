"""The family and the presets by name, and how options change them.

A preset is a `Method`: a composition of pieces with their settings. A member of the family replaces some pieces of a
preset. An option replaces the piece, or the setting of a piece, that has its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Unpack

from sanc.core.acceptance import AcceptAll, Momentum, RatioTest
from sanc.core.dense import DenseModel
from sanc.core.escape import CheckedEscape, GradientStep, Stay
from sanc.core.method import Method, settings_of
from sanc.core.model import SAMPLED_KRYLOV_DIM, CubicModel, KrylovModel, NoModel
from sanc.core.settings import Piece, is_user_defined
from sanc.core.sigma import SigmaUpdate
from sanc.errors import ArgumentError, nearest, one_of, shown
from sanc.minibatch.settings import Minibatch
from sanc.options import MinimizeOptions
from sanc.options.remedies import FOREIGN_OPTIONS, FOREIGN_TO_MINIMIZE, REPLACED_OPTIONS

PRESETS: Mapping[str, Method] = {
    "paper": Method(),
    "robust": Method(
        model=CubicModel(krylov_dim=None, krylov_stop="forcing", first_radius=1.0, max_resolves=12),
        acceptance=RatioTest(eta1=0.1, eta2=0.75, rounding_guard=True),
        escape=CheckedEscape(),
        sigma=SigmaUpdate(sigma0=None, sigma_floor=1e-290, sigma_ceiling=1e290, sigma_rule="interpolate"),
        minibatch=Minibatch(),
    ),
}
"""The presets by name: the method of the paper without changes, and the default, which has no constants to tune.

η1 = 0.1 and η2 = 0.75 are in the range usual for trust-region methods (Conn, Gould and Toint 2000). A `first_radius` of
1 is one length scale. The bounds of σ only prevent overflow and underflow in float64, with a margin of 1e18.
"""


def _with_fixed_sigma(preset: Method, name: str, **pieces: Any) -> Method:
    """Return a member of the family with a fixed σ: it neither re-solves after a rejection nor limits the step norm."""
    model = preset.model
    if isinstance(model, CubicModel):
        model = replace(model, max_resolves=0, first_radius=None)
    return replace(preset, **{"name": name, "model": model, "escape": Stay(), "minibatch": None, **pieces})


def _curvature_only(preset: Method) -> Method:
    """Return negative curvature descent: the Krylov space of the preset, without cubic steps."""
    model = preset.model
    if isinstance(model, CubicModel):
        names = [item.name for item in fields(KrylovModel)]
        model = KrylovModel(**{name: getattr(model, name) for name in names})
    return _with_fixed_sigma(preset, "ncd", model=model, acceptance=AcceptAll(), escape=preset.escape)


def _gradient_only(preset: Method) -> Method:
    """Return gradient descent, with a checked step if the preset checks its escape steps."""
    step = GradientStep(checked=isinstance(preset.escape, CheckedEscape))
    return _with_fixed_sigma(preset, "sgd", model=NoModel(), acceptance=AcceptAll(), escape=step)


METHODS: Mapping[str, Callable[[Method], Method]] = {
    "sanc": lambda preset: preset,
    "scr": lambda preset: replace(preset, name="scr", escape=Stay()),
    "arc": lambda preset: replace(preset, name="arc", escape=Stay(), exact=True),
    "cr": lambda preset: _with_fixed_sigma(preset, "cr", acceptance=AcceptAll()),
    "crm": lambda preset: _with_fixed_sigma(preset, "crm", acceptance=Momentum()),
    "ncd": _curvature_only,
    "sgd": _gradient_only,
}
"""Members of the family by name, each with the function that composes it from a preset."""

_MEMBER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"cr": {"sigma0": 5.0}, "crm": {"sigma0": 5.0}}
"""Settings of a member that replace settings of a preset given by name. σ = 5 is from the paper's experiments."""

_PIECES = ("model", "acceptance", "escape", "sigma", "minibatch", "metric", "step_size", "average")
"""Options that are pieces. They are replaced first, so that the other options are settings of the new pieces."""

_NOT_OPTIONS = {"name", "exact"}
"""Settings of a `Method` that are no options: the member of the family has them."""


def method_for(name: str = "sanc", preset: str | Method = "robust", **settings: Unpack[MinimizeOptions]) -> Method:
    """Return a member of the family with all its settings.

    Parameters
    ----------
    name : {"sanc", "scr", "arc", "cr", "crm", "ncd", "sgd"}
        The member of the family.
    preset : {"robust", "paper"} or Method
        The method whose pieces it is composed from.
    **settings
        Pieces (`model`, `acceptance`, `escape`, `sigma`, `minibatch`, `metric`, `step_size`, `average`) and settings
        of pieces, by name.

    Examples
    --------
    >>> import sanc
    >>> sanc.method_for("cr", "paper").sigma.sigma0
    5.0
    >>> sanc.method_for(metric="diagonal", eta1=0.2).minibatch.metric
    Diagonal(memory=0.95, refresh=50)
    """
    return compose(name, preset, settings)


def compose(name: object, preset: object, options: Mapping[str, Any], other_names: Iterable[str] = ()) -> Method:
    """Return a member of the family: the pieces of the preset, those of the member, then its defaults and the options.

    `other_names` are the names of the caller's other arguments, which the error for an unknown option may propose.
    """
    lower_name = name.lower() if isinstance(name, str) else ""
    member = lower_name if lower_name in METHODS else one_of("method", name, METHODS)
    defaults: Mapping[str, Any] = {}
    if isinstance(preset, Method):
        method = METHODS[member](preset)
    elif isinstance(preset, str) and preset in PRESETS:
        method, defaults = METHODS[member](PRESETS[preset]), _MEMBER_DEFAULTS.get(member, {})
    else:
        if preset == "authors":
            raise ArgumentError('preset = "authors" is now an object: pass preset=sanc.lab.authors.AUTHORS.')
        raise ArgumentError(
            f"preset = {shown(preset)} is neither known by name nor a sanc.Method: {nearest(str(preset), PRESETS)}"
        )
    method = with_options(method, {**defaults, **options}, other_names)
    if member in ("ncd", "sgd") and method.model.proposes:
        raise ArgumentError(
            f"model = {shown(method.model)} proposes cubic steps, and {member} makes none: leave it out, pass a model "
            'with proposes = False such as sanc.KrylovModel(), or use method="sanc".'
        )
    return method


def with_options(method: Method, options: Mapping[str, Any], other_names: Iterable[str] = ()) -> Method:
    """Return a method with the options applied; an error may propose an option or one of `other_names`."""
    for name, value in options.items():
        if name in REPLACED_OPTIONS:
            raise ArgumentError(f"{name} = {shown(value)} cannot be used: the option is now {REPLACED_OPTIONS[name]}.")
    settings = dict(options)
    pieces = {name: settings.pop(name) for name in _PIECES if name in settings}
    minibatch = {"minibatch": pieces.pop("minibatch")} if "minibatch" in pieces else {}
    for group in (minibatch, pieces, settings):  # a later group changes the pieces that an earlier one has replaced
        method = _with_checked_options(method, group, other_names) if group else method
    for name in options:
        _reject_without_effect(method, name, options[name])
    return method


def with_matrices(method: Method) -> Method:
    """Return the method with the model of Hessians that are matrices, if it has the cubic model of the default."""
    model = method.model
    if type(model) is not CubicModel or not model.uses_forcing_term:
        return method
    return replace(method, model=DenseModel.of(model))


def with_krylov_limit(method: Method, options: Mapping[str, Any]) -> Method:
    """Return the method with a limit on the dimension of Krylov spaces, if it has none."""
    if not isinstance(method.model, KrylovModel) or method.model.krylov_dim is not None:
        return method
    if "krylov_dim" in options:
        raise ArgumentError(
            "krylov_dim = None cannot be used here: pass the largest number of Lanczos iterations, such as 5."
        )
    return replace(method, model=replace(method.model, krylov_dim=SAMPLED_KRYLOV_DIM))


def changes_from(base: Method, method: Method) -> list[str]:
    """Return ``name=value`` for every setting of a method that differs from another method.

    The settings of a piece of another class are compared with the defaults of that class.
    """
    names = method.options()
    changes = (
        f"{name if name in names else f'{place}.{name}'}={value if name in _PIECES else shown(value)}"
        for place, name, value in _changes("method", base, method)
    )
    return list(dict.fromkeys(changes))  # pieces that share a setting have one entry


def _changes(place: str, base: Any, piece: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and value of the settings of a piece that another piece, or the class, has otherwise."""
    for item in fields(piece):
        value = getattr(piece, item.name)
        if type(piece) is type(base):
            usual = getattr(base, item.name)
        else:
            usual = item.default if item.default_factory is MISSING else item.default_factory()
        if is_dataclass(value) and not isinstance(value, type):
            if type(value) is not type(usual):
                yield place, item.name, type(value).__name__
            yield from _changes(item.name, usual, value)
        elif value != usual:
            yield place, item.name, value


def _with_checked_options(method: Method, options: Mapping[str, Any], other_names: Iterable[str]) -> Method:
    """Return the method with these options; raise an error for one that is no piece or setting of it."""
    if not method.on_samples:
        _reject_minibatch_options(method, options)
    for name in sorted(options.keys() - (_setting_names(method) - _NOT_OPTIONS)):
        raise _unknown_option_error(method, name, options[name], other_names)
    for name in options:
        _reject_ambiguous(method, name, options[name])
    new_method: Method = _with_settings(method, options)
    return new_method


def _reject_minibatch_options(method: Method, options: Mapping[str, Any]) -> None:
    """Raise an error for a setting of the averaged phase beside a method that has none, such as preset "paper"."""
    for name in sorted(_setting_names(Minibatch()) & options.keys()):
        setting = f"{name} = {shown(options[name])}"
        if method.name in METHODS and method.name not in ("sanc", "scr"):
            raise ArgumentError(f"{setting} is used by sanc and scr alone, not by {method.name}: leave it out.")
        raise ArgumentError(
            f"{setting} is a setting of the averaged phase, which this method does not have: leave it out, or pass "
            "minibatch=sanc.Minibatch() too."
        )


def reject_sample_settings(method: Method, options: Mapping[str, Any]) -> None:
    """Raise an error for a setting of the averaged phase in a run that has no averaged phase."""
    if not options:
        return
    inside = set() if method.minibatch is None else {id(piece) for _, piece in _pieces_in("", method.minibatch)}
    for name, value in options.items():
        owners = _owners(method, name)
        if owners and all(id(piece) in inside for _, piece in owners):
            raise ArgumentError(
                f"{name} = {shown(value)} has no effect on this objective, since it is a setting of the averaged phase "
                "on samples: leave it out, or pass batch_size."
            )


def _reject_ambiguous(method: Method, name: str, value: object) -> None:
    """Raise an error for an option that is a setting of a piece of the caller and of another piece.

    Pieces of this package have settings in common, such as `epsilon`, which one option sets in all of them.
    """
    owners = _owners(method, name)
    of_caller = [place for place, piece in owners if is_user_defined(piece)]
    if len(owners) > 1 and of_caller:
        kinds = " and ".join(type(piece).__name__ for _, piece in owners)
        kind = next(type(piece).__name__ for place, piece in owners if place == of_caller[0])
        raise ArgumentError(
            f"{name} = {shown(value)} is a setting of {kinds}: set it in the piece, as "
            f"{of_caller[0]}={kind}({name}={shown(value)})."
        )


def _owners(method: Method, name: str) -> list[tuple[str, Any]]:
    """Return the pieces of a method that have a setting of this name, each after the name of its place."""
    places = _pieces_in("method", method)
    return [(place, piece) for place, piece in places if any(item.name == name for item in fields(piece))]


def _reject_without_effect(method: Method, name: str, value: object) -> None:
    """Raise an error for an option that no piece with a setting of this name uses."""
    owners = _owners(method, name)
    remedies = [piece.without_effect().get(name) if isinstance(piece, Piece) else None for _, piece in owners]
    if remedies and all(remedies):
        raise ArgumentError(f"{name} = {shown(value)} has no effect on this method: {remedies[0]}.")


def _pieces_in(place: str, piece: Any) -> Iterator[tuple[str, Any]]:
    """Yield a piece after the name of its place, then the pieces inside it."""
    yield place, piece
    for item in fields(piece):
        value = getattr(piece, item.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _pieces_in(item.name, value)


def _with_settings(piece: Any, options: Mapping[str, Any]) -> Any:
    """Return the piece with these options applied to its settings, and to the pieces inside it."""
    changes = {}
    for item in fields(piece):
        value = getattr(piece, item.name)
        if item.name in options:
            changes[item.name] = options[item.name]
        elif is_dataclass(value) and _setting_names(value) & options.keys():
            changes[item.name] = _with_settings(value, options)
    return replace(piece, **changes) if changes else piece


def _setting_names(piece: Any) -> set[str]:
    """Return the names of the settings of a piece, and of the pieces inside it."""
    return {name for _, name, _ in settings_of("", piece)}


def _unknown_option_error(method: Method, name: str, value: object, other_names: Iterable[str]) -> ArgumentError:
    """Return the error for an option that no piece of this method has."""
    composed = [compose_from(preset) for compose_from in METHODS.values() for preset in PRESETS.values()]
    all_names = set(other_names).union(_setting_names(method), *map(_setting_names, composed)) - _NOT_OPTIONS
    pieces = [piece for _, piece in _pieces_in("method", method)]
    places = {item.name: getattr(piece, item.name) for piece in pieces for item in fields(piece)}
    for place, piece in (owner for other in composed for owner in _owners(other, name) if owner[0] in places):
        current = type(places[place]).__name__
        return ArgumentError(
            f"{name} = {shown(value)} is a setting of {type(piece).__name__}, and {method.name} has {current} as its "
            f"{place}: leave it out, or pass {place}=sanc.{type(piece).__name__}(…)."
        )
    foreign = FOREIGN_OPTIONS | (FOREIGN_TO_MINIMIZE if "x0" in other_names else {})
    if name in foreign:
        return ArgumentError(f"{name} = {shown(value)} is not an option here: {foreign[name]}.")
    remedy = "leave it out, or find the option in help(sanc.Method) and help(sanc.Minibatch)."
    return ArgumentError(f"option {name!r} (= {shown(value)}) is not known: {nearest(name, all_names, remedy)}")
