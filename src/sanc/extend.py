"""Protocols, values and base classes for pieces and objectives of a user; docs/extending.md has examples."""

from sanc.core.cubic import CubicStep
from sanc.core.oracle import Meter, Operator, Oracle
from sanc.core.pieces import Acceptance, Escape, Model, SigmaSettings, Subspace
from sanc.core.ratio import Trial, Verdict, classify, ratio
from sanc.core.sigma import SigmaRule
from sanc.core.space import NumpySpace, Space

__all__ = [
    "Acceptance",
    "CubicStep",
    "Escape",
    "Meter",
    "Model",
    "NumpySpace",
    "Operator",
    "Oracle",
    "SigmaRule",
    "SigmaSettings",
    "Space",
    "Subspace",
    "Trial",
    "Verdict",
    "classify",
    "ratio",
]
