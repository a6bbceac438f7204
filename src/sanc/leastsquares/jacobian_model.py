"""The cubic model of a least-squares problem with a dense Jacobian, in the whole space of its free variables."""

from __future__ import annotations

from dataclasses import dataclass

from sanc.core.dense import DenseModel
from sanc.core.model import KrylovSubspace
from sanc.core.point import Point
from sanc.core.ratio import TrialOutcome, Verdict
from sanc.core.sigma import SigmaRule, SigmaUpdate
from sanc.core.units import FIRST_SIGMA, Units
from sanc.leastsquares.accelerated import accelerated

MAX_STEP_GROWTH = 2.0
"""Largest growth of the step norm, as in trust-region methods; docs/constants.md has 1.5 and 3."""
GAUSS_NEWTON_SIGMA_RATIO = 1e-12
"""The initial σ relative to the one of `minimize`: so small that the first step is a Gauss–Newton step."""


@dataclass(frozen=True, slots=True)
class GaussNewtonRule(SigmaRule):
    """The rule for σ with which steps are Gauss–Newton steps as long as they succeed.

    In ill-conditioned fits a step has components along strong and weak singular vectors. The model error of the strong
    ones determines the cubic coefficient κ along the step, and with that σ the weak ones would hardly move. So after a
    very successful step σ does not limit the next one, as in trust-region methods, and only the norm of the last step
    does.
    """

    def after_trial(self, outcome: TrialOutcome) -> float:
        """Return σ after a trial step: after a very successful one, the smallest that one step allows."""
        if outcome.verdict is Verdict.VERY_SUCCESSFUL:
            return self.bounded(self.min_factor * outcome.sigma)
        return SigmaRule.after_trial(self, outcome)


@dataclass(frozen=True, kw_only=True)
class GaussNewtonSigma(SigmaUpdate):
    """The rule for σ of least squares, with the settings of `SigmaUpdate`."""

    rule_class = GaussNewtonRule


@dataclass(frozen=True, kw_only=True)
class JacobianModel(DenseModel):
    """Minimises the cubic model in the whole space if the oracle knows its eigenbasis; otherwise in a Krylov space."""

    first_sigma_in_units = GAUSS_NEWTON_SIGMA_RATIO * FIRST_SIGMA
    tries_longer_steps = False
    limits_newton_steps = True

    def max_step_norm(self, here: Point, first_units: Units) -> float:
        """Return the limit on the step norm: ‖z‖ at the first point, then twice the last step."""
        if here.state.last_step_norm == 0.0:
            return here.x_norm or first_units.length_scale
        return MAX_STEP_GROWTH * here.state.last_step_norm

    def build(self, here: Point) -> KrylovSubspace:
        """Return the whole space, with the minimiser of the model in it."""
        basis = here.oracle.eigenbasis(here.x)
        if basis is None:
            return super().build(here)
        operator = here.oracle.hessian(here.x)
        return accelerated(here, self.whole_space(here, operator, basis.values, basis.rows, basis.projections))
