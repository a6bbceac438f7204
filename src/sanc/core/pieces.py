"""Protocols of the pieces of a method, with their arguments and return values.

A method is composed of a model, an acceptance rule, an escape rule and a rule for σ. Each piece has its settings,
receives everything else as arguments, and returns a value. Only the iteration writes the state and the record. The
numbers 2.1 to 2.7 refer to docs/method.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol, Self

from sanc.core.point import Point
from sanc.core.record import Branch
from sanc.core.settings import Piece
from sanc.core.sigma import SigmaRule
from sanc.core.space import Vector
from sanc.core.spectrum.cubic import CubicStep
from sanc.core.spectrum.krylov import StepBasis
from sanc.core.units import Units


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of an acceptance or escape rule.

    Attributes
    ----------
    sigma : float
        σ for the next trial step, or for the next iteration.
    point : vector or None
        The next point; None if the step is rejected or the run stays.
    branch : Branch
        The kind of step made. If a rule returns a point without a branch, the iteration records SUCCESSFUL for an
        accepted step, and GRADIENT for an escape step.
    rho : float
        Actual over predicted decrease; NaN if no ratio was formed.
    step_norm : float
        Norm of the step made; 0 if the step is rejected or the run stays. If a rule returns a point without a norm, the
        iteration computes the distance from x.
    trial_value : float
        f at the accepted trial point, or at the last one if all were rejected.
    trials : int
        Points at which the rule evaluated f.
    step : CubicStep or None
        The cubic step that was tried; None for an escape step. If an acceptance rule leaves it out, it is the step that
        the rule received.
    note : str
        The reason for the decision, if the branch alone does not show it.
    zero_step : bool
        Whether the rule chose not to move, rather than failing to find a step: d = 0 in 2.7.
    extra_gradients : int
        Further gradients that the rule evaluated, beside the one of the iteration, and that the paper's count includes.
    acceptance_state : mapping or None
        State of the acceptance rule for the next iteration: numbers, and vectors like x. None: unchanged.
    """

    sigma: float
    point: Vector | None = None
    _: KW_ONLY
    branch: Branch = Branch.STAYED
    rho: float = math.nan
    step_norm: float = 0.0
    trial_value: float = math.nan
    trials: int = 0
    step: CubicStep | None = None
    note: str = ""
    zero_step: bool = False
    extra_gradients: int = 0
    acceptance_state: Mapping[str, Any] | None = None


def required_members(protocol: Any) -> tuple[str, ...]:
    """Return the names of the members of a protocol that an object must have."""
    return tuple(name for name in vars(protocol) if name == "__call__" or not name.startswith("_"))


class Subspace(Protocol):
    """A subspace in which a model minimises, and the Hessian in it; `sanc.core.model.KrylovSubspace` is one.

    Attributes
    ----------
    sigma : float
        σ of the first step in it: `here.state.sigma`, unless the model raises it to limit the step
        norm, or measures it with the units.
    allows_longer_steps : bool
        Whether `RatioTest` tries longer steps at once if f decreases by more than predicted. A `CubicModel` with
        `first_radius` allows them if no value of f has confirmed `sigma`: it is the initial one, or was raised to limit
        the step norm.
    units : Units
        Units of the first point. A model may return `here.units`. At the first point these are zero; the iteration then
        measures them with `hessian_norm`, and the initial σ if the rule for σ requires it. A model may also call
        `here.measure_units(‖Bq‖)` and `here.sigma_rule.first_sigma(σ, units)` itself.
    ritz_value : float
        The left-most Ritz value λ1; NaN if no Ritz pair is known.
    hessian_norm : float
        An estimate of ‖B‖; 0 if it is not known.
    products : int
        Hessian products computed; n if the Hessian is formed as a matrix.
    failure : str
        Why no step can be made; empty if steps can be made.
    basis : StepBasis or None
        An orthonormal basis with the Hessian in it, with which steps that bounds truncate need no product; None if it
        is not known.
    """

    @property
    def sigma(self) -> float: ...
    @property
    def allows_longer_steps(self) -> bool: ...
    @property
    def units(self) -> Units: ...
    @property
    def ritz_value(self) -> float: ...
    @property
    def hessian_norm(self) -> float: ...
    @property
    def products(self) -> int: ...
    @property
    def failure(self) -> str: ...
    @property
    def basis(self) -> StepBasis | None: ...

    def ritz_vector(self) -> Vector:
        """Return the vector v of the left-most Ritz pair, with ‖v‖ = 1; called only if `ritz_value` is not NaN."""

    def trial_point(self, x: Vector, step: CubicStep) -> Vector:
        """Return x + s for a step that the model proposed."""

    def longer_step(self, here: Point, sigma: float, trial_count: int) -> CubicStep | None:
        """Return the step of a smaller σ; None if no step is to be tried after `trial_count` trial points."""

    def failed(self, failure: str) -> Subspace:
        """Return the subspace after a product that was not finite, with this `failure` and without Ritz pairs."""

    def release(self) -> None:
        """Release the memory of the products, before f is evaluated; a later product allocates it again."""


@dataclass(frozen=True, kw_only=True)
class BaseSubspace:
    """A base class for subspaces, with the members that most of them need not have.

    Such a subspace has no basis for steps that bounds truncate, allows no longer steps, and holds no products.

    Attributes
    ----------
    failure : str
        As in `Subspace`.
    """

    failure: str = ""

    allows_longer_steps = False
    basis = None

    def longer_step(self, here: Point, sigma: float, trial_count: int) -> CubicStep | None:
        """Return None: no longer step is tried."""
        return None

    def failed(self, failure: str) -> Self:
        """Return the subspace with this `failure`."""
        return replace(self, failure=failure)

    def release(self) -> None:
        """Do nothing."""


class Model(Protocol):
    """2.2 to 2.4: builds a subspace and proposes steps in it.

    A model may also have the method of the function `paper_products`.

    Attributes
    ----------
    proposes : bool
        Whether it proposes steps. If not, it may still build a subspace for the escape rule.
    needs_products : bool
        Whether it needs Hessian products.
    max_resolves : int
        How many further steps may be proposed in the same subspace after a rejection, with the σ that the acceptance
        rule returned.
    """

    @property
    def proposes(self) -> bool: ...
    @property
    def needs_products(self) -> bool: ...
    @property
    def max_resolves(self) -> int: ...

    def build(self, here: Point) -> Subspace | None:
        """Return the subspace at a point; None: no step is proposed there."""

    def propose(self, here: Point, subspace: Any, sigma: float) -> CubicStep | None:
        """Return the cubic step of `sigma` in a subspace that `build` returned; None if there is none.

        After a rejection `here.rejected` is the rejected step.
        """


def paper_products(model: Model, here: Point, products: int) -> int:
    """Return the products to count in `paper_calls` (D4) for a subspace that took so many.

    All count, unless the model has a method `paper_products`, which receives the same arguments and returns the count.
    """
    count = getattr(model, "paper_products", None)
    return products if count is None else int(count(here, products))


class Acceptance(Protocol):
    """2.5 and 2.6: decides whether a trial point is accepted, and returns the next σ.

    `trial_count` counts the earlier trial points of this iteration.
    """

    def __call__(
        self, here: Point, subspace: Subspace, step: CubicStep, trial: Vector, trial_count: int
    ) -> Decision: ...


class Escape(Protocol):
    """2.6 and 2.7: ends an iteration whose cubic steps were rejected, or that had none.

    If `model_proposes` is False, this rule makes the step of the method, and moves unless its step is zero. σ is then a
    counter: it grows by γ with every value of f that is not finite.

    Attributes
    ----------
    needs_products : bool
        Whether the rule uses negative curvature of the model's subspace.
    """

    @property
    def needs_products(self) -> bool: ...
    def __call__(self, here: Point, subspace: Subspace | None, sigma: float, *, model_proposes: bool) -> Decision: ...


class SampleSettings(Piece):
    """The base class of `sanc.Minibatch`: how steps on samples are made once batches disagree.

    The core only asks whether a method has one; the iteration on samples reads it.

    Attributes
    ----------
    curvature : bool
        Whether Hessian products are used.
    """

    curvature: bool


class SigmaSettings(Protocol):
    """2.6: the initial σ, and the rule by which it changes; `sanc.SigmaUpdate` is one."""

    def rule(self, eps: float, *, exact: bool = False) -> SigmaRule:
        """Return the rule for vectors of precision `eps`; `exact`: f is the objective itself and not a sample of it.

        Every iteration calls it, so that it should return the same object for the same arguments.
        """
