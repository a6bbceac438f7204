"""Second-order optimisation that does not stop at saddle points.

`SANC` and its family are `torch.optim.Optimizer`s. `minimize` minimises functions and finite sums, and `certificate`
checks whether a point is a second-order point.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sanc._version import __version__

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports a name at its first use
    from sanc import errors, extend, problems, theory
    from sanc.autograd.batches import Batch, ThreeSamples
    from sanc.core.acceptance import AcceptAll, Momentum, RatioTest
    from sanc.core.escape import CheckedEscape, GradientStep, PaperEscape, Stay
    from sanc.core.method import Method
    from sanc.core.model import CubicModel, KrylovModel, NoModel
    from sanc.core.pieces import Decision
    from sanc.core.point import Point
    from sanc.core.record import Branch, Calls, Record
    from sanc.core.sigma import SigmaUpdate
    from sanc.diagnosis import Report, diagnose
    from sanc.errors import (
        ArgumentError,
        ArgumentTypeError,
        NonFiniteError,
        NonFiniteStartError,
        NotConvergedError,
        RanksError,
        SancError,
        SecondDerivativeError,
        SingularMinimumError,
    )
    from sanc.implicit import Derivative, Solution, argmin
    from sanc.leastsquares import NetworkResiduals, curve_fit, least_squares
    from sanc.many.entry import minimize_many
    from sanc.many.result import ManyResult
    from sanc.many.running import Progress
    from sanc.minibatch.metrics.base import Metric, Preconditioner
    from sanc.minibatch.metrics.diagonal import Diagonal
    from sanc.minibatch.metrics.identity import Identity
    from sanc.minibatch.metrics.kronecker import Kronecker
    from sanc.minibatch.settings import Average, Minibatch
    from sanc.minibatch.step_size import StepSize
    from sanc.minimisation import Certificate, LeastSquaresResult, Result, Status, certificate, minimize, scipy_method
    from sanc.optim import ARC, CR, CRM, NCD, SANC, SCR
    from sanc.presets import METHODS, PRESETS, method_for
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
    "AcceptAll",
    "ArgumentError",
    "ArgumentTypeError",
    "Average",
    "Batch",
    "Branch",
    "Calls",
    "Certificate",
    "CheckedEscape",
    "CubicModel",
    "Decision",
    "Derivative",
    "Diagonal",
    "GradientStep",
    "Identity",
    "Kronecker",
    "KrylovModel",
    "LeastSquaresResult",
    "ManyResult",
    "Method",
    "Metric",
    "Minibatch",
    "Momentum",
    "NetworkResiduals",
    "NoModel",
    "NonFiniteError",
    "NonFiniteStartError",
    "NotConvergedError",
    "PaperEscape",
    "Point",
    "Preconditioner",
    "Progress",
    "RanksError",
    "RatioTest",
    "Record",
    "Report",
    "Result",
    "SancError",
    "SecondDerivativeError",
    "SigmaUpdate",
    "SingularMinimumError",
    "Solution",
    "Status",
    "Stay",
    "StepSize",
    "ThreeSamples",
    "__version__",
    "argmin",
    "certificate",
    "curve_fit",
    "diagnose",
    "errors",
    "extend",
    "least_squares",
    "load_checkpoint",
    "method_for",
    "minimize",
    "minimize_many",
    "problems",
    "save_checkpoint",
    "scipy_method",
    "theory",
]

_HOMES = {
    "sanc.autograd.batches": ("Batch", "ThreeSamples"),
    "sanc.core.acceptance": ("AcceptAll", "Momentum", "RatioTest"),
    "sanc.core.escape": ("CheckedEscape", "GradientStep", "PaperEscape", "Stay"),
    "sanc.core.sigma": ("SigmaUpdate",),
    "sanc.core.method": ("Method",),
    "sanc.core.model": ("CubicModel", "KrylovModel", "NoModel"),
    "sanc.core.pieces": ("Decision",),
    "sanc.core.point": ("Point",),
    "sanc.core.record": ("Branch", "Calls", "Record"),
    "sanc.diagnosis": ("Report", "diagnose"),
    "sanc.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "NonFiniteError",
        "NonFiniteStartError",
        "NotConvergedError",
        "RanksError",
        "SancError",
        "SecondDerivativeError",
        "SingularMinimumError",
    ),
    "sanc.implicit": ("Derivative", "Solution", "argmin"),
    "sanc.leastsquares": ("NetworkResiduals", "curve_fit", "least_squares"),
    "sanc.many.entry": ("minimize_many",),
    "sanc.many.result": ("ManyResult",),
    "sanc.many.running": ("Progress",),
    "sanc.minibatch.metrics.base": ("Metric", "Preconditioner"),
    "sanc.minibatch.metrics.diagonal": ("Diagonal",),
    "sanc.minibatch.metrics.identity": ("Identity",),
    "sanc.minibatch.metrics.kronecker": ("Kronecker",),
    "sanc.minibatch.step_size": ("StepSize",),
    "sanc.minibatch.settings": ("Average", "Minibatch"),
    "sanc.minimisation": (
        "Certificate",
        "LeastSquaresResult",
        "Result",
        "Status",
        "certificate",
        "minimize",
        "scipy_method",
    ),
    "sanc.optim": ("ARC", "CR", "CRM", "NCD", "SANC", "SCR"),
    "sanc.presets": ("METHODS", "PRESETS", "method_for"),
    "sanc.ranks.saving": ("load_checkpoint", "save_checkpoint"),
}
"""Modules and the public names that they define."""

_REPLACED_NAMES = {
    "Settings": "sanc.Method, a composition of pieces with their settings",
    "MinibatchSettings": "sanc.Minibatch",
    "settings_for": "sanc.method_for",
    "StepScale": "sanc.StepSize",
}
"""Public names of earlier versions, and the replacement of each."""
_ESTIMATORS = ("LogisticRegression", "LogisticRegressionCV", "NonconvexSVM", "logistic_regression_path")
"""Names of `sanc.sklearn`, which needs scikit-learn."""


if not TYPE_CHECKING:  # with a `__getattr__`, type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use.

        Importing torch takes a second, and ``sanc --help`` does not need it.
        """
        if name in ("errors", "extend", "problems", "theory"):
            return import_module(f"sanc.{name}")
        for home, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(home), name)
                return value
        if name in _REPLACED_NAMES:
            raise AttributeError(f"sanc.{name} is now {_REPLACED_NAMES[name]}")
        if name in _ESTIMATORS:
            raise AttributeError(f"module 'sanc' has no attribute {name!r}: import sanc.sklearn, which has it")
        close = [other for other in __all__ if other.lower() == name.lower()] or get_close_matches(name, __all__, n=1)
        proposal = f": did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
        raise AttributeError(f"module 'sanc' has no attribute {name!r}{proposal}")


def __dir__() -> list[str]:
    """Return the public names, which editors complete."""
    return sorted(__all__)
