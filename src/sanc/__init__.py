"""Second-order optimisation that does not stop at saddle points.

`SANC` and its family as `torch.optim.Optimizer`, `minimize` for functions and finite sums, `certificate` for points.
"""

from sanc import errors, problems, theory
from sanc._version import __version__
from sanc.autograd.batches import Batch, ThreeSamples
from sanc.certificate import Certificate, certificate
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
from sanc.minimize import Status, minimize, scipy_method
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
