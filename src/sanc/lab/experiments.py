"""The panels of the paper's figures, with their settings."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sanc import METHODS, PRESETS, ArgumentError, Method, Minibatch, method_for
from sanc.errors import one_of
from sanc.lab.authors import AUTHORS

CONSTANTS: Mapping[str, tuple[float, float]] = (
    dict.fromkeys(("w1a", "w8a", "a9a"), (10.0, 10.0))
    | dict.fromkeys(("ijcnn1", "covtype", "higgs"), (10.0, 100.0))
    | dict.fromkeys(("segment", "seismic", "mnist"), (100.0, 100.0))
    | {"cifar10": (1000.0, 1000.0)}
)
"""L1 and L2 of the escape step, tuned by the paper for each data set."""

LAB_PRESETS: Mapping[str, str | Method] = {**{name: name for name in PRESETS}, "authors": AUTHORS}
"""The presets of the laboratory: values of the argument `preset`, by name."""

USER_FIGURE = "own"
"""In place of the number of a figure, for experiments of the user."""


@dataclass(frozen=True)
class Variant:
    """A method of a panel with a preset and options of its own.

    Attributes
    ----------
    method, preset : str
        Their names.
    options : mapping
        The options, by name.
    """

    method: str
    preset: str = "robust"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The preset and the options, as arguments of `minimize` and the optimisers."""
        return {"preset": LAB_PRESETS[one_of("preset", self.preset, LAB_PRESETS)], **self.options}

    def composed(self) -> Method:
        """Return the method with all its settings."""
        return method_for(self.method, **self.arguments)


def setting_names(method: str, *presets: str) -> set[str]:
    """Return the names of the settings that a method has in any of these presets, by default in any preset."""
    names: set[str] = set()
    for preset in presets or LAB_PRESETS:
        composed = Variant(method, preset).composed()
        if method in ("sanc", "scr") and composed.minibatch is None:
            composed = replace(composed, minibatch=Minibatch())  # an option can add it
        names |= composed.options().keys()
    return names


@dataclass(frozen=True)
class Panel:
    """One plot of the paper: a problem on a data set, and the methods that solve it.

    Attributes
    ----------
    name, figure : str
        The name of the panel, and the figure that it belongs to.
    problem : str
        One of logistic, svm, softmax, mlp and cnn.
    data : str
        The name of a data set, or the path of a file.
    methods : tuple of str
        Members of the family, to which `options` apply, or keys of `variants`.
    options : mapping
        The options of the methods, by name.
    activation : str
        The activation of a network.
    batch : int or None
        The rows of a sample; None: a twentieth of all.
    calls : int or None
        The budget; None: 20 for each row.
    strength : float
        The factor λ of the penalty.
    variants : mapping
        Methods with options of their own, by name.
    unit : str
        What the budget counts: "paper_calls", or all evaluations if it is "calls".
    widths : tuple of int
        The widths of the hidden layers of an MLP.
    held_out : float
        The fraction of the rows that networks keep for testing.
    penalty : str
        The penalty of logistic: "nonconvex", as in the paper, or "l2".
    standardise : bool
        Whether the columns of a data file get mean 0 and deviation 1.
    label : str or None
        The name of the label column of a data file.
    varied : tuple of str
        The settings whose values differ between the variants.
    """

    name: str
    figure: str
    problem: str
    data: str
    methods: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "tanh"
    batch: int | None = None
    calls: int | None = None
    strength: float = 1.0
    variants: Mapping[str, Variant] = field(default_factory=dict)
    unit: str = "paper_calls"
    widths: tuple[int, int] = (300, 500)
    held_out: float = 0.0
    penalty: Literal["nonconvex", "l2"] = "nonconvex"
    standardise: bool = False
    label: str | None = None
    varied: tuple[str, ...] = ()

    @property
    def network(self) -> bool:
        """Whether the problem is a network."""
        return self.problem in ("mlp", "cnn")

    def budget(self, n: int) -> int:
        """Return the budget of each run."""
        return self.calls if self.calls is not None else 20 * n

    def batch_size(self, n: int, preset: str) -> int:
        """Return `batch`, by default ⌈n/20⌉, or ⌊n/20⌋ with the preset of the authors' program."""
        if self.batch is not None:
            return self.batch
        return n // 20 if preset == "authors" else -(-n // 20)


_ALL = ("sanc", "scr", "cr", "crm", "ncd", "sgd")
_WITHOUT_CRM = ("sanc", "scr", "cr", "ncd", "sgd")
_CNN = ("sanc", "scr", "ncd", "sgd")
_PAIR = ("sanc", "scr")
"""The methods that the paper compares: in most figures, without CRM, on convolutional networks, and in pairs."""


def _logistic(figure: str, methods: tuple[str, ...], sigma0: float, *data: str) -> tuple[Panel, ...]:
    return tuple(Panel(f"{figure}-{name}", figure, "logistic", name, methods, {"sigma0": sigma0}) for name in data)


def _network(
    figure: str, methods: tuple[str, ...], problem: str, kind: str, calls: int, *data: str
) -> tuple[Panel, ...]:
    """Return the panels of a figure of the paper's networks, one for each data set."""
    options = {"sigma0": 1.0, "eta1": 0.1, "eta2": 0.3, "lr": 0.001}
    common = Panel("", figure, problem, "", methods, options, kind, batch=128, calls=calls, strength=0.01)
    return tuple(replace(common, name=f"{figure}-{name}", data=name) for name in data)


FIGURES: Mapping[str, tuple[Panel, ...]] = {
    "fig1": _logistic("fig1", _PAIR, 0.001, "w1a", "higgs", "ijcnn1", "covtype"),
    "fig2a": _logistic("fig2a", _ALL, 1.0, "w1a", "higgs"),
    "fig2b": _network("fig2b", _ALL, "mlp", "tanh", 200_000, "seismic", "segment"),
    "fig2c": _network("fig2c", _CNN, "cnn", "tanh", 750_000, "mnist", "cifar10"),
    "fig3": _logistic("fig3", _WITHOUT_CRM, 1.0, "w8a", "a9a", "covtype", "ijcnn1"),
    "fig4": _logistic("fig4", _PAIR, 0.001, "w8a", "a9a"),
    "fig5": _network("fig5", _CNN, "cnn", "relu", 750_000, "mnist", "cifar10"),
}
"""The panels of every figure of the paper's experiments."""


@dataclass(frozen=True)
class RunSpec:
    """One run of a method on a panel.

    Attributes
    ----------
    panel : Panel
        The panel.
    method, preset : str
        The names of the method and of its preset.
    seed : int
        The seed of the run.
    device : str
        The device of torch.
    """

    panel: Panel
    method: str
    seed: int
    preset: str = "paper"
    device: str = "cpu"

    @property
    def path(self) -> str:
        """The directory of the run, relative to ``runs`` in the output directory."""
        return f"{self.panel.name}/{self.method}/seed-{self.seed}"

    @property
    def variant(self) -> Variant:
        """The method, its preset and its options.

        The options are those of the panel that the method has, the tuned L1 and L2, and σ = 5 for CR and CRM. With the
        preset "robust" the paper's panels keep only σ0 and the learning rate.
        """
        panel, method, preset = self.panel, self.method, self.preset
        if method in panel.variants:
            return panel.variants[method]
        options, published = dict(panel.options), panel.figure != USER_FIGURE
        if preset == "robust" and published:
            options = {name: value for name, value in options.items() if name in ("sigma0", "lr")}
        if method in ("cr", "crm") and published:
            options["sigma0"] = 5.0  # the σ0 of the panels is for methods that adapt σ
        if panel.data in CONSTANTS and preset != "robust":
            options = dict(zip(("L1", "L2"), CONSTANTS[panel.data], strict=True)) | options
        if method in ("cr", "crm"):
            options.setdefault("sigma0", 5.0)
        rate = options.pop("lr", 0.01)
        if method == "sgd":
            options = {"lr": rate}
        elif method in METHODS:
            settings = setting_names(method, preset)
            options = {name: value for name, value in options.items() if name in settings}
        return Variant(method, preset, options)

    @property
    def on_samples(self) -> bool:
        """Whether ρ is computed on the gradient sample, without an objective sample."""
        variant = self.variant
        if variant.method not in METHODS:
            return False
        return variant.composed().on_samples


def select(
    figures: Sequence[str], data: Sequence[str] | None = None, methods: Iterable[str] | None = None
) -> list[Panel]:
    """Return the panels of these figures, restricted to `data` and `methods` unless these are None.

    Raises
    ------
    ArgumentError
        If a figure, data set or method is unknown.
    """
    names = FIGURES if "all" in figures else [one_of("figure", name, (*FIGURES, "all")) for name in figures]
    panels = [panel for name in names for panel in FIGURES[name]]
    selected = [one_of("--data", name, {panel.data for panel in panels}) for name in data or ()]
    kept = None if methods is None else check_methods(methods)
    return [replace(panel, methods=kept or panel.methods) for panel in panels if data is None or panel.data in selected]


def by_settings(panels: Iterable[Panel], values: Mapping[str, Sequence[Any]], preset: str) -> list[Panel]:
    """Return the panels with a variant of each method for every combination of these values of its settings.

    A method without any of the settings is kept as it is. A panel ``fig2a-w1a`` becomes ``fig2a-w1a-by-eta1``, with
    methods such as ``sanc-eta1=0.2``.

    Raises
    ------
    ArgumentError
        If a setting is unknown, has a value that its piece does not allow, or is a setting of none of the methods.
    """
    all_settings = set().union(*(setting_names(method) for method in METHODS)) - {"name", "exact"}
    for name in values:
        one_of("--set", name, all_settings)
    return [_by_settings(panel, values, preset) for panel in panels] if values else list(panels)


def _by_settings(panel: Panel, values: Mapping[str, Sequence[Any]], preset: str) -> Panel:
    """Return the panel with a curve for each combination of values of settings."""
    settings = {method: _settings_on(panel, method, preset) for method in panel.methods}
    for name in values:
        if not any(name in names for names in settings.values()):
            raise ArgumentError(
                f"--set {name} has no effect on {', '.join(panel.methods)} of {panel.name} with preset {preset!r}: "
                "leave it out, or choose other methods or another preset."
            )
    methods, variants = [], dict(panel.variants)
    for method in panel.methods:
        names = [name for name in values if name in settings[method]]
        base = RunSpec(panel, method, 0, preset).variant
        for point in itertools.product(*(values[name] for name in names)):
            chosen = dict(zip(names, point, strict=True))
            key = "-".join([method, *(f"{name}={_plain(value)}" for name, value in chosen.items())])
            if chosen:
                variants[key] = replace(base, options={**base.options, **chosen})
                variants[key].composed()  # raises an error for a value that is not allowed
            methods.append(key)
    suffix = f"-by-{'-'.join(values)}"
    figure = panel.figure if panel.figure == USER_FIGURE else panel.figure + suffix
    fields: dict[str, Any] = {"methods": tuple(dict.fromkeys(methods)), "variants": variants, "varied": tuple(values)}
    return replace(panel, name=panel.name + suffix, figure=figure, **fields)


def _settings_on(panel: Panel, method: str, preset: str) -> set[str]:
    """Return the names of the settings that a method has on a panel: on networks SGD is torch's, and has a rate."""
    if not panel.network:
        return setting_names(method, preset)
    return {"lr"} if method == "sgd" else setting_names(method, preset) - {"sampling"}


def _plain(value: Any) -> str:
    """Return a value as a part of the name of a folder."""
    return re.sub(r"[^\w.+-]", "_", value if isinstance(value, str) else json.dumps(value))


def check_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Return the methods without duplicates. ARC is excluded, since it does not sample."""
    allowed = set(METHODS) - {"arc"}
    kept = tuple(dict.fromkeys(one_of("--methods", name, allowed) for name in names))
    if not kept:
        raise ArgumentError(f"--methods is empty: pass some of {', '.join(sorted(allowed))}.")
    return kept


def specs(panels: Iterable[Panel], runs: int, preset: str, device: str) -> list[RunSpec]:
    """Return all runs of these panels. Methods vary fastest, so that partial results cover every method."""
    return [
        RunSpec(panel, method, seed, preset, device)
        for panel in panels
        for seed in range(runs)
        for method in panel.methods
    ]
