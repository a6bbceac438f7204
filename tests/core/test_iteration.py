"""The branches of one iteration, with pieces that follow a script."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from points import step_of
from sanc.core.escape import stay
from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.pieces import BaseSubspace, Decision
from sanc.core.record import Branch, Note
from sanc.core.sigma import SigmaUpdate
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.core.units import Units
from sanc.errors import NonFiniteStartError
from sanc.minimisation.objective import build_oracle

SIGMA, GAMMA = 3.0, 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script(BaseSubspace):
    """A subspace, and the model that builds it: its trial points are at the norm of the step, along the first axis."""

    decreases: tuple = ()
    norm: float = 1.0
    multiplier: float = 0.0
    raises: str = ""  # the method that raises an error of a product
    calls: list = dataclasses.field(default_factory=list)
    max_resolves: int = 0
    sigma: float = SIGMA
    ritz_value: float = 0.5

    proposes = needs_products = True
    units, hessian_norm, products = Units(1.0, 1.0), 2.0, 4

    def build(self, here):
        if self.raises == "build":
            raise NonFiniteProductError("no product")
        return self

    def propose(self, here, subspace, sigma):
        count = sum(name == "propose" for name, *_ in self.calls)
        self.calls.append(("propose", sigma, here.rejected))
        if count == len(self.decreases):
            return None
        return dataclasses.replace(step_of(self.norm, self.decreases[count], sigma), multiplier=self.multiplier)

    def trial_point(self, x, step):
        if self.raises == "trial_point":
            raise NonFiniteProductError("no product")
        return x + step.norm * np.eye(len(x))[0]

    def ritz_vector(self):
        return np.eye(1)[0]

    def paper_products(self, here, products):
        return products


@dataclasses.dataclass(frozen=True)
class ScriptedTest:
    """An acceptance rule that accepts by a list, and doubles σ after a rejection."""

    accepts: tuple
    calls: list
    reads_objective: bool = False

    def __call__(self, here, subspace, step, trial, trial_count):
        self.calls.append(("accept", step.sigma, trial_count))
        value = here.objective if self.reads_objective else 0.0
        if self.accepts[trial_count]:
            return Decision(step.sigma / 2.0, trial, trial_value=value, trials=1)
        return Decision(2.0 * step.sigma, trials=1, rho=-1.0, note="rejected")


@dataclasses.dataclass(frozen=True)
class ScriptedEscape:
    """An escape rule that stays, or moves by a step."""

    calls: list
    step: float = 0.0
    needs_products = True

    def __call__(self, here, subspace, sigma, *, model_proposes):
        self.calls.append(("escape", sigma, "" if subspace is None else subspace.failure))
        return Decision(sigma, here.x + self.step, trials=1) if self.step else stay(sigma)


def run(
    script=None,
    accepts=(),
    *,
    first=False,
    x=1.0,
    escape=0.0,
    value=None,
    f=lambda x: 2.0,
    g=lambda x: np.array([1.0]),
):
    """Make one iteration at x. Return the point, the record, the iteration and the calls of its pieces.

    `value` is f on the sample of ρ, which the acceptance rule reads, if it is not the value beside the gradient.
    """
    calls = []
    script = dataclasses.replace(script or Script(), calls=calls)
    method = Method(
        model=script,
        acceptance=ScriptedTest(accepts, calls, value is not None),
        escape=ScriptedEscape(calls, escape),
        sigma=SigmaUpdate(sigma0=SIGMA, gamma=GAMMA, sigma_floor=1e-30),
    )
    oracle, start, _ = build_oracle(f, np.array([x]), jac=g, hess=None, hessp=lambda x, v: np.array(v), args=())
    if value is not None:
        oracle.gradient, oracle.value = (lambda x: (f(x), g(x))), (lambda x: value)
    iteration = Iteration(method, seed=0)
    iteration.state = dataclasses.replace(iteration.state, iteration=0 if first else 7)
    point, record = iteration.iterate(start, oracle)
    return float(point[0]), record, iteration, calls


def test_an_accepted_step_needs_no_escape():
    point, record, iteration, calls = run(Script(decreases=(0.5,)), (True,))
    assert calls == [("propose", SIGMA, None), ("accept", SIGMA, 0)]
    assert (point, iteration.state.sigma, record.branch) == (2.0, SIGMA / 2.0, Branch.SUCCESSFUL)
    assert (record.trials, record.krylov_dim, record.step_norm) == (1, 4, 1.0)
    assert (iteration.state.iteration, iteration.state.last_step_norm) == (8, 1.0)


def test_rejected_steps_are_solved_again_until_the_resolves_are_exhausted():
    script = Script(decreases=(0.5, 0.4, 0.3, 0.2), max_resolves=2)
    point, record, iteration, calls = run(script, (False,) * 4)
    proposals, tests = calls[:-1:2], calls[1:-1:2]
    assert [(sigma, None if step is None else step.decrease) for _, sigma, step in proposals] == [
        (SIGMA, None), (2.0 * SIGMA, 0.5), (4.0 * SIGMA, 0.4)
    ]  # fmt: skip
    assert tests == [("accept", SIGMA * 2.0**k, k) for k in range(3)]
    assert calls[-1] == ("escape", 8.0 * SIGMA, "")
    assert (point, record.trials, iteration.state.sigma) == (1.0, 3, 8.0 * SIGMA)
    assert (record.note, record.rho, record.sigma) == ("rejected", -1.0, 4.0 * SIGMA)


def test_a_later_step_may_be_accepted():
    point, record, iteration, calls = run(Script(decreases=(0.5, 0.4, 0.3), max_resolves=2), (False, True))
    assert [name for name, *_ in calls] == ["propose", "accept"] * 2
    assert (point, record.trials, iteration.state.sigma, record.note) == (2.0, 2, SIGMA, "rejected")


def test_without_a_proposal_the_escape_rule_decides():
    point, record, iteration, calls = run(Script(), escape=-0.25)
    assert calls == [("propose", SIGMA, None), ("escape", SIGMA, "")]
    assert (point, record.branch, record.step_norm, record.trials) == (0.75, Branch.GRADIENT, 0.25, 1)
    assert not iteration.stopping_test_holds


@pytest.mark.parametrize(("norm", "holds"), [(1e-9, True), (1e-7, False)])
def test_a_step_without_predicted_decrease_is_not_tried(norm, holds):
    """The stopping test 2.7 holds if the run stays and the step is at most ε_s."""
    point, record, iteration, calls = run(Script(decreases=(0.0,), norm=norm, max_resolves=3))
    assert calls == [("propose", SIGMA, None), ("escape", SIGMA, "")]
    assert (point, record.note, record.trials) == (1.0, Note.AT_MINIMUM, 0)
    assert iteration.state.sigma == SIGMA and iteration.stopping_test_holds is holds


@pytest.mark.parametrize(
    ("multiplier", "factor"),
    [(1.0, GAMMA**-2), (3.0, (1e-17 / 2.0**-26) ** 2)],  # below and above ‖B‖ = 2; √eps·‖x‖ = 2⁻²⁶
)
def test_a_step_below_precision_lowers_sigma_without_an_evaluation(multiplier, factor):
    """If σ limits the step norm, it falls so far that the next step has the norm √eps·‖x‖."""
    script = Script(decreases=(1e-20,), norm=1e-17, multiplier=multiplier, max_resolves=3)
    point, record, iteration, calls = run(script)
    assert [name for name, *_ in calls] == ["propose", "escape"]
    assert (point, record.note, record.trials) == (1.0, Note.BELOW_PRECISION, 0)
    assert iteration.state.sigma == calls[1][1] == pytest.approx(SIGMA * factor, rel=1e-12)


def test_a_failed_product_of_the_trial_point_raises_sigma_and_leads_to_an_escape():
    _, record, iteration, calls = run(Script(decreases=(0.5,), raises="trial_point", max_resolves=3))
    assert calls == [("propose", SIGMA, None), ("escape", GAMMA * SIGMA, "no product")]
    assert (record.note, iteration.state.sigma, record.model_decrease) == ("no product", GAMMA * SIGMA, 0.5)


def test_a_subspace_without_products_proposes_no_step():
    _, record, iteration, calls = run(Script(decreases=(0.5,), failure="broken"))
    assert calls == [("escape", GAMMA * SIGMA, "broken")]
    assert (record.note, iteration.state.sigma) == ("broken", GAMMA * SIGMA)


def test_a_model_that_fails_ends_the_iteration():
    point, record, iteration, calls = run(Script(raises="build"), escape=1.0)
    assert (calls, point, record.branch) == ([], 1.0, Branch.STAYED)
    assert (record.note, iteration.state.sigma) == ("no product", GAMMA * SIGMA)
    assert not iteration.stopping_test_holds


def test_a_value_that_is_not_finite_at_x_skips_the_escape():
    """The value beside the gradient is finite, since it is that of another sample."""
    script = Script(decreases=(0.5,), max_resolves=3)
    point, record, iteration, calls = run(script, (True,), escape=1.0, value=math.inf)
    assert [name for name, *_ in calls] == ["propose", "accept"]
    assert (point, record.value, iteration.state.sigma) == (1.0, math.inf, GAMMA * SIGMA)
    assert "loss" in record.note and "finite" in record.note


@pytest.mark.parametrize("number", ["loss", "gradient"])
def test_a_gradient_sample_that_is_not_finite_ends_the_iteration(number):
    f, g = (math.nan, 1.0) if number == "loss" else (2.0, math.inf)
    _, record, iteration, calls = run(f=lambda x: f, g=lambda x: np.array([g]), escape=1.0)
    assert calls == [] and number in record.note
    assert iteration.state.sigma == GAMMA * SIGMA and iteration.state.last_grad_norm == (
        1.0 if number == "loss" else 0.0
    )


@pytest.mark.parametrize(
    "script", [Script(raises="build"), Script(decreases=(0.5,), raises="trial_point"), Script(failure="broken")]
)
def test_a_failure_at_the_start_is_an_error_with_loss_and_gradient(script):
    with pytest.raises(NonFiniteStartError, match=r"at the starting point \(loss 2.0, gradient norm 1.0\)"):
        run(script, first=True)
