"""Second-order optimisation that does not stop at saddle points.

`SANC` and its family as `torch.optim.Optimizer`, `minimize` for functions and finite sums, `certificate` for points.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sanc._version import __version__

if TYPE_CHECKING:  # for readers and type checkers; at run time `__getattr__` imports these when they are first used
    from sanc import errors, problems, theory
    from sanc.autograd.batches import Batch, ThreeSamples
    from sanc.certification import Certificate, certificate
    from sanc.core.family import METHODS, PRESETS, settings_for
    from sanc.core.record import Branch, Calls, Record
    from sanc.core.settings import MinibatchSettings, Settings
    from sanc.errors import (
        ArgumentError,
        ArgumentTypeError,
        NonFiniteStartError,
        RanksError,
        SancError,
        SecondDerivativeError,
    )
    from sanc.minimisation import Status, minimize, scipy_method
    from sanc.optim import ARC, CR, CRM, NCD, SANC, SCR
    from sanc.ranks.saving import load_checkpoint, save_checkpoint

__all__ = [
    "ARC",
    "CR",
    "CRM",
    "METHODS",
    "NCD",
    "PRESETS",
    "SANC",
    "SCR",
    "ArgumentError",
    "ArgumentTypeError",
    "Batch",
    "Branch",
    "Calls",
    "Certificate",
    "MinibatchSettings",
    "NonFiniteStartError",
    "RanksError",
    "Record",
    "SancError",
    "SecondDerivativeError",
    "Settings",
    "Status",
    "ThreeSamples",
    "__version__",
    "certificate",
    "errors",
    "load_checkpoint",
    "minimize",
    "problems",
    "save_checkpoint",
    "scipy_method",
    "settings_for",
    "theory",
]

_HOMES = {
    "sanc.autograd.batches": ("Batch", "ThreeSamples"),
    "sanc.certification": ("Certificate", "certificate"),
    "sanc.core.family": ("METHODS", "PRESETS", "settings_for"),
    "sanc.core.record": ("Branch", "Calls", "Record"),
    "sanc.core.settings": ("MinibatchSettings", "Settings"),
    "sanc.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "NonFiniteStartError",
        "RanksError",
        "SancError",
        "SecondDerivativeError",
    ),
    "sanc.minimisation": ("Status", "minimize", "scipy_method"),
    "sanc.optim": ("ARC", "CR", "CRM", "NCD", "SANC", "SCR"),
    "sanc.ranks.saving": ("load_checkpoint", "save_checkpoint"),
}
"""Modules and the public names that live there."""


def __getattr__(name: str) -> Any:
    """Import what is first used now: torch takes a second, which ``sanc --help`` does not have."""
    if name in ("errors", "problems", "theory"):
        return import_module(f"sanc.{name}")
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'sanc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
