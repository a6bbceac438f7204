"""What the pieces of a method are, what they are given, and what they return.

A method is composed of a model, an acceptance rule, an escape rule and a rule for σ. Each piece owns its numbers, takes
what it needs as arguments, and returns what it decided. Only the iteration writes the state and the record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sanc.core.cubic import CubicStep
from sanc.core.point import Point
from sanc.core.record import Branch
from sanc.core.space import Vector
from sanc.core.units import Units


@dataclass(frozen=True, slots=True)
class Decision:
    """What an acceptance or escape rule decided.

    Attributes
    ----------
    sigma : float
        σ for the next trial step, or for the next iteration.
    point : vector or None
        Where the run continues; None where the step is rejected or the run stays.
    branch : Branch
        The kind of step taken.
    rho : float
        Actual over predicted decrease; NaN where no ratio was formed.
    step_norm : float
        Norm of the step taken.
    trial_value : float
        f at the last trial point.
    trials : int
        Points at which the rule evaluated f.
    step : CubicStep or None
        The cubic step that the numbers above belong to.
    note : str
        Why the rule decided so, where the branch does not show it.
    at_rest : bool
        Whether the rule chose not to move, rather than failing to find a step: d = 0 in 2.7.
    memory : mapping
        What the rule wants back in the next iteration: floats, and vectors of the length of x. None keeps the last one.
    """

    sigma: float
    point: Vector | None = None
    branch: Branch = Branch.STAYED
    rho: float = math.nan
    step_norm: float = 0.0
    trial_value: float = math.nan
    trials: int = 0
    step: CubicStep | None = None
    note: str = ""
    at_rest: bool = False
    memory: Mapping[str, Any] | None = None


class Subspace(Protocol):
    """What a model found out about the Hessian at a point; `sanc.core.model.KrylovSubspace` is one.

    Attributes
    ----------
    sigma : float
        σ, set at the first point, or raised while the space grew.
    units : Units
        Units of the first point.
    ritz_value : float
        The left-most Ritz value; NaN where it is not known.
    curvature : float
        An estimate of ‖B‖.
    dim : int
        Hessian products spent.
    problem : str
        Why no step can be made; empty where steps can be made.
    """

    @property
    def sigma(self) -> float: ...
    @property
    def units(self) -> Units: ...
    @property
    def ritz_value(self) -> float: ...
    @property
    def curvature(self) -> float: ...
    @property
    def dim(self) -> int: ...
    @property
    def problem(self) -> str: ...
    def ritz_vector(self) -> Vector: ...
    def trial_point(self, x: Vector, step: CubicStep) -> Vector: ...
    def failed(self, problem: str) -> Subspace: ...
    def release(self) -> None: ...


class Model(Protocol):
    """2.2 to 2.4: builds a subspace and proposes steps in it.

    Attributes
    ----------
    proposes : bool
        Whether it proposes steps. A model that does not may still build a subspace for the escape rule.
    needs_products : bool
        Whether it needs Hessian products.
    resolves : int
        How often a rejected step may be solved again with the σ that the acceptance rule returned.
    """

    @property
    def proposes(self) -> bool: ...
    @property
    def needs_products(self) -> bool: ...
    @property
    def resolves(self) -> int: ...
    def build(self, here: Point) -> Any: ...
    def propose(self, here: Point, subspace: Any, sigma: float) -> CubicStep | None: ...
    def charge(self, here: Point, dim: int) -> int: ...


class Acceptance(Protocol):
    """2.5 and 2.6: decides whether a trial point is accepted, and what σ becomes.

    `trials` counts the points of this iteration at which f was evaluated before.
    """

    def __call__(self, here: Point, subspace: Any, step: CubicStep, trial: Vector, trials: int) -> Decision: ...


class Escape(Protocol):
    """2.6 and 2.7: ends an iteration whose cubic step was rejected, or that had none.

    `without_model` says that the model proposes no steps, so that this is the step of the method: the rule should move
    unless its step is zero, and σ counts how often the objective was not finite.

    Attributes
    ----------
    needs_products : bool
        Whether the rule uses negative curvature of the model's subspace.
    """

    @property
    def needs_products(self) -> bool: ...
    def __call__(self, here: Point, subspace: Any, sigma: float, *, without_model: bool) -> Decision: ...
