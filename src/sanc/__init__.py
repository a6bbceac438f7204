"""Second-order optimisation that does not stop at saddle points.

`SANC` and its family are `torch.optim.Optimizer`s. `minimize` minimises functions and finite sums, and `certificate`
checks whether a point is a second-order point.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sanc._version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports a name at its first use
    from sanc import errors as errors, extend as extend, problems as problems, theory as theory
    from sanc.autograd.batches import Batch as Batch, ThreeSamples as ThreeSamples
    from sanc.core.acceptance import AcceptAll as AcceptAll, Momentum as Momentum, RatioTest as RatioTest
    from sanc.core.escape import (
        CheckedEscape as CheckedEscape,
        GradientStep as GradientStep,
        PaperEscape as PaperEscape,
        Stay as Stay,
    )
    from sanc.core.method import Method as Method
    from sanc.core.model import CubicModel as CubicModel, KrylovModel as KrylovModel, NoModel as NoModel
    from sanc.core.pieces import Decision as Decision
    from sanc.core.point import Point as Point
    from sanc.core.record import Branch as Branch, Calls as Calls, Record as Record
    from sanc.core.sigma import SigmaUpdate as SigmaUpdate
    from sanc.diagnosis import Report as Report, diagnose as diagnose
    from sanc.errors import (
        ArgumentError as ArgumentError,
        ArgumentTypeError as ArgumentTypeError,
        NonFiniteError as NonFiniteError,
        NonFiniteStartError as NonFiniteStartError,
        NotConvergedError as NotConvergedError,
        RanksError as RanksError,
        SancError as SancError,
        SecondDerivativeError as SecondDerivativeError,
        SingularMinimumError as SingularMinimumError,
    )
    from sanc.implicit import Derivative as Derivative, Solution as Solution, argmin as argmin
    from sanc.leastsquares import (
        NetworkResiduals as NetworkResiduals,
        curve_fit as curve_fit,
        least_squares as least_squares,
    )
    from sanc.many.entry import minimize_many as minimize_many
    from sanc.many.result import ManyResult as ManyResult
    from sanc.many.running import Progress as Progress
    from sanc.minibatch.metrics.base import Metric as Metric, Preconditioner as Preconditioner
    from sanc.minibatch.metrics.diagonal import Diagonal as Diagonal
    from sanc.minibatch.metrics.identity import Identity as Identity
    from sanc.minibatch.metrics.kronecker import Kronecker as Kronecker
    from sanc.minibatch.settings import Average as Average, Minibatch as Minibatch
    from sanc.minibatch.step_size import StepSize as StepSize
    from sanc.minimisation import (
        Certificate as Certificate,
        LeastSquaresResult as LeastSquaresResult,
        Result as Result,
        Status as Status,
        certificate as certificate,
        minimize as minimize,
        scipy_method as scipy_method,
    )
    from sanc.optim import ARC as ARC, CR as CR, CRM as CRM, NCD as NCD, SANC as SANC, SCR as SCR
    from sanc.presets import METHODS as METHODS, PRESETS as PRESETS, method_for as method_for
    from sanc.ranks.saving import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint

_MODULES = ("errors", "extend", "problems", "theory")
"""Public modules."""
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
"""Modules and the public names that they define. The imports above are the same for type checkers, to which `as` shows
that a name is public."""

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
    __all__ = sorted(["__version__", *_MODULES, *(name for names in _HOMES.values() for name in names)])

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use.

        Importing torch takes a second, and ``sanc --help`` does not need it.
        """
        if name in _MODULES:
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
