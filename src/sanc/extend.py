"""Protocols, values and base classes for pieces and objectives of a user; docs/extending.md has examples."""

from sanc.core.meter import Meter
from sanc.core.model import KrylovSubspace
from sanc.core.oracle import Operator, Oracle
from sanc.core.pieces import Acceptance, BaseSubspace, Escape, Model, SigmaSettings, Subspace
from sanc.core.ratio import TrialOutcome, Verdict, classify, ratio
from sanc.core.settings import (
    ABOVE_ONE,
    AT_LEAST_ONE,
    BELOW_INFINITY,
    BELOW_ONE,
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Piece,
    Range,
    setting,
)
from sanc.core.sigma import SigmaRule
from sanc.core.space import NumpySpace, Space, Vector
from sanc.core.spectrum.cubic import CubicStep, Spectrum
from sanc.core.spectrum.cubic import solve as solve_cubic
from sanc.core.spectrum.krylov import NonFiniteProductError, StepBasis
from sanc.core.units import Units
from sanc.minibatch.metrics.base import RankReduction
from sanc.minibatch.state import MinibatchState

__all__ = [
    "ABOVE_ONE",
    "AT_LEAST_ONE",
    "BELOW_INFINITY",
    "BELOW_ONE",
    "COUNT",
    "FRACTION",
    "NOT_NEGATIVE",
    "POSITIVE",
    "Acceptance",
    "BaseSubspace",
    "CubicStep",
    "Escape",
    "KrylovSubspace",
    "Meter",
    "MinibatchState",
    "Model",
    "NonFiniteProductError",
    "NumpySpace",
    "Operator",
    "Oracle",
    "Piece",
    "Range",
    "RankReduction",
    "SigmaRule",
    "SigmaSettings",
    "Space",
    "Spectrum",
    "StepBasis",
    "Subspace",
    "TrialOutcome",
    "Units",
    "Vector",
    "Verdict",
    "classify",
    "ratio",
    "setting",
    "solve_cubic",
]
