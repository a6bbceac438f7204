"""Decisions about rows and their steps in a box, row by row against the rules of the core."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from points import point_with, step_of, subspace_with
from sanc.core.acceptance import LONGER_STEP_RHO
from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.bounded.box_model import BoundedSubspace, BoxStep
from sanc.core.escape import MAX_ESCAPE_HALVINGS, backtrack
from sanc.core.model import CubicModel
from sanc.core.point import Point, State
from sanc.core.record import Branch
from sanc.core.units import Units
from sanc.many.decisions import decide_cubic_steps, decide_escape_steps, decide_longer_steps, halve_escape_steps
from sanc.many.proposals import RowProposals
from sanc.many.rows import CUBIC, ESCAPE, LONGER, PENDING, Accepted, RowPoints, RowProblem, Rows, RowTrials, Spectra
from sanc.many.rules import SUCCESSFUL, VERY_SUCCESSFUL
from sanc.minimisation.objective import build_oracle
from sanc.presets import PRESETS

EPS = 2.0**-52
ROBUST = PRESETS["robust"]
RULE = ROBUST.sigma.rule(EPS, exact=True)
RATIO_TEST = ROBUST.acceptance
COUNT = 400


class GivenRows(RowProblem):
    """Rows whose gradients at trial points are given, and are recorded."""

    eps, default_tol = EPS, False

    def __init__(self, trial_gradients=None):
        self.trial_gradients, self.asked = trial_gradients, []

    def gradients(self, x, ids):
        self.asked += ids.tolist()
        return self.trial_gradients[ids]


def tensor(numbers):
    return torch.as_tensor(np.asarray(numbers, np.float64))


def trials_of(x, mode, sigma, norm, predicted):
    zero = torch.zeros(len(x), dtype=torch.float64)
    return RowTrials(torch.full((len(x),), mode), tensor(x), tensor(sigma), tensor(norm), tensor(predicted), zero,
                     zero.bool())  # fmt: skip


@dataclass
class Draws:
    """Numbers of rows: values, predicted decreases and trial values of many sizes, some below roundoff."""

    value: np.ndarray
    predicted: np.ndarray
    trial_value: np.ndarray
    sigma: np.ndarray
    norm: np.ndarray
    hessian_norm: np.ndarray
    units: np.ndarray
    g: np.ndarray
    trial_g: np.ndarray


def draw(seed):
    rng = np.random.default_rng(seed)
    value = rng.choice([-1.0, 1.0], COUNT) * 10.0 ** rng.uniform(-6, 6, COUNT)
    predicted = np.abs(value) * 10.0 ** rng.uniform(-17, 1, COUNT)
    trial_value = value - predicted * rng.uniform(-0.5, 2.5, COUNT)
    trial_value[:12] = [math.nan, math.inf, -math.inf] * 4
    g = rng.standard_normal((COUNT, 2))
    return Draws(
        value,
        predicted,
        trial_value,
        sigma=10.0 ** rng.uniform(-3, 3, COUNT),
        norm=10.0 ** rng.uniform(-2, 1, COUNT),
        hessian_norm=10.0 ** rng.uniform(-3, 3, COUNT),
        units=10.0 ** rng.uniform(-1, 1, (2, COUNT)),
        g=g,
        trial_g=g * 10.0 ** rng.uniform(-1, 1, (COUNT, 1)),
    )


def rows_of(d, mode=CUBIC):
    """Return the rows of the numbers, all at x = (1, 1), whose trial points are (2, 1)."""
    x = np.ones((COUNT, 2))
    matrices = np.zeros((COUNT, 2, 2))
    rows = Rows.start(torch.arange(COUNT), RowPoints(*map(tensor, (x, d.value, d.g, matrices))), None, None)
    values = np.stack([-0.5 * d.hessian_norm, d.hessian_norm], axis=1)
    rows.spectra = Spectra(tensor(values), tensor(matrices), tensor(d.g), torch.zeros(COUNT))
    rows.trial = trials_of(x + np.eye(2)[0], mode, d.sigma, d.norm, d.predicted)
    rows.sigma, rows.grad_norm, rows.x_norm = tensor(d.sigma), rows.point.g.norm(dim=1), rows.point.x.norm(dim=1)
    rows.first_length_scale, rows.unit_cubic = map(tensor, d.units)
    rows.trial_count = torch.ones(COUNT, dtype=torch.int64)
    return rows


def point_of(d, k, values):
    """Return the point of one row for the core; `values` are those of f at x₀ = 1, 2, 3, …"""
    return point_with(
        lambda x: values[round(x[0]) - 1],
        x=(1.0, 1.0),
        g=d.g[k],
        g_elsewhere=lambda x: d.trial_g[k],
        rule=RULE,
        units=Units(*d.units[:, k]),
    )


class GivenSubspace:
    """A subspace with a longer step, which is asked for at most twice."""

    allows_longer_steps = True

    def __init__(self, hessian_norm, longer=None):
        self.hessian_norm, self.longer, self.asked = hessian_norm, longer, 0

    def longer_step(self, here, sigma, trial_count):
        self.asked += 1
        return self.longer if self.asked == 1 else None

    def trial_point(self, x, step):
        return x + np.array([2.0, 0.0])

    def release(self):
        pass


def test_cubic_steps_are_decided_as_by_the_ratio_test_of_the_core():
    d = draw(0)
    rows, problem = rows_of(d), GivenRows(tensor(d.trial_g))
    rows.sigma_unconfirmed = torch.ones(COUNT, dtype=torch.bool)
    rows.trial = replace(rows.trial, mode=torch.where(torch.arange(COUNT) % 10 == 9, ESCAPE, CUBIC))
    found = decide_cubic_steps(problem, rows, tensor(d.trial_value), None)
    seen, evaluated = set(), []
    for k in range(COUNT):
        if k % 10 == 9:  # an escape step is decided elsewhere
            assert not (found.is_accepted[k] or found.rejected[k] or found.longer[k])
            assert found.sigma[k] == d.sigma[k]
            continue
        here, subspace = point_of(d, k, (d.value[k], d.trial_value[k])), GivenSubspace(d.hessian_norm[k])
        step, trial = step_of(d.norm[k], d.predicted[k], d.sigma[k]), np.array([2.0, 1.0])
        decision = RATIO_TEST(here, subspace, step, trial, 0)
        accepted = decision.point is not None
        assert (bool(found.is_accepted[k]), bool(found.rejected[k])) == (accepted, not accepted)
        sigma = found.accepted.sigma if accepted else found.sigma
        assert float(sigma[k]) == pytest.approx(decision.sigma, rel=1e-12)
        if accepted:
            verdict = VERY_SUCCESSFUL if decision.branch is Branch.VERY_SUCCESSFUL else SUCCESSFUL
            assert int(found.accepted.verdict[k]) == verdict and float(found.accepted.value[k]) == d.trial_value[k]
            assert bool(found.longer[k]) == bool(subspace.asked)
        evaluated += [k] if here.oracle.gradients else []
        seen.add((accepted, decision.branch, bool(subspace.asked), decision.note))
    assert problem.asked == torch.nonzero(found.gradients).reshape(-1).tolist() == evaluated
    assert len(seen) >= 6  # rejected; accepted in both classes, with and without longer steps, by the gradient


def test_only_the_first_trial_is_decided_by_gradients():
    d = draw(1)
    rows, problem = rows_of(d), GivenRows(tensor(d.trial_g))
    rows.trial_count = torch.full((COUNT,), 2)
    assert decide_cubic_steps(problem, rows, tensor(d.trial_value), None).gradients is None and not problem.asked


def test_longer_steps_are_decided_as_by_the_ratio_test_of_the_core():
    """A first step with ρ above 1.2 is accepted; the longer one replaces it if f is lower there, whatever its ρ."""
    d = draw(2)
    first_value = d.value - 1.5 * d.predicted
    rng = np.random.default_rng(3)
    longer_predicted = d.predicted * rng.uniform(1.1, 3.0, COUNT)
    longer_value = first_value - d.predicted * rng.uniform(-1.0, 4.0, COUNT)
    longer_value[:9] = [math.nan, math.inf, -math.inf] * 3
    tested, compared, longer_norm = [], set(), 3.0 * d.norm
    decisions = {}
    for k in range(COUNT):
        here = point_of(d, k, (d.value[k], first_value[k], longer_value[k]))
        step = step_of(d.norm[k], d.predicted[k], d.sigma[k])
        first = RATIO_TEST(here, subspace_with(hessian_norm=1.0), step, np.array([2.0, 1.0]), 0)
        longer = step_of(longer_norm[k], longer_predicted[k], first.sigma)
        subspace = GivenSubspace(d.hessian_norm[k], longer)
        decision = RATIO_TEST(here, subspace, step, np.array([2.0, 1.0]), 0)
        if subspace.asked and first.rho > LONGER_STEP_RHO:
            tested.append(k)
            decisions[k] = first, decision, subspace.asked == 2
    rows, chosen = rows_of(d, LONGER), torch.zeros(COUNT, dtype=torch.bool)
    chosen[tested] = True
    first_sigma = np.array([decisions[k][0].sigma if k in decisions else 1.0 for k in range(COUNT)])
    verdict = torch.full((COUNT,), VERY_SUCCESSFUL)
    rows.accepted = Accepted(rows.trial, tensor(first_value), tensor(first_sigma), verdict)
    rows.trial = trials_of(rows.trial.x.numpy() + np.eye(2)[0], LONGER, first_sigma, longer_norm, longer_predicted)
    found = decide_longer_steps(GivenRows(), rows, tensor(longer_value), chosen)
    assert torch.equal(found.is_accepted, chosen) and len(tested) > 100
    for k in tested:
        _, decision, tries_again = decisions[k]
        assert float(found.accepted.value[k]) == decision.trial_value
        assert float(found.accepted.sigma[k]) == pytest.approx(decision.sigma, rel=1e-12)
        assert float(found.accepted.trial.x[k, 0]) == decision.point[0]
        assert bool(found.longer[k]) == tries_again
        compared.add((decision.point[0], tries_again))
    assert compared == {(2.0, False), (3.0, False), (3.0, True)}
    others = ~chosen
    assert torch.equal(found.accepted.value[others], rows.accepted.value[others]) and not found.longer[others].any()


@pytest.mark.parametrize("lower_from", [0, 1, 5, MAX_ESCAPE_HALVINGS - 1, MAX_ESCAPE_HALVINGS, 100])
def test_escape_steps_are_halved_as_those_of_the_core(lower_from):
    """f falls once the step was halved `lower_from` times."""
    x, d = np.array([1.0]), np.array([2.0**30])
    f = lambda x: -1.0 if x[0] - 1.0 <= 2.0 ** (30 - lower_from) else 5.0
    here = point_with(lambda x: 3.0 if x[0] == 1.0 else f(x), x=x, units=Units(0.0, 0.0), rule=RULE)
    decision = backtrack(here, d, Branch.GRADIENT, 1.0, model_proposes=True)
    point = RowPoints(tensor([x]), tensor([3.0]), tensor([[1.0]]), tensor([[[0.0]]]))
    rows = Rows.start(torch.arange(1), point, None, None)
    rows.x_norm, rows.trial = tensor([1.0]), trials_of([x + d], ESCAPE, [1.0], [2.0**30], [0.0])
    escapes, trials = torch.tensor([True]), 0
    while True:
        trials += 1
        found = decide_escape_steps(rows, tensor([f(rows.trial.x[0])]), escapes)
        if bool(found.is_accepted):
            assert decision.point is not None and float(found.accepted.trial.x[0]) == decision.point[0]
            assert float(found.accepted.value) == -1.0
            break
        halved = halve_escape_steps(GivenRows(), rows, escapes)
        rows.trial, rows.halvings = halved.trial, halved.halvings
        if bool(halved.ended):
            assert decision.point is None
            break
    assert trials == decision.trials


def rows_in_boxes(g, curvature, half_width, sigma, rejected_norm):
    """Return rows of one variable at the centres of boxes, whose last step was truncated and rejected."""
    count = len(g)
    x = np.zeros((count, 1))
    point = RowPoints(tensor(x), tensor(np.zeros(count)), tensor(g[:, None]), tensor(curvature[:, None, None]))
    box = tensor(-half_width[:, None]), tensor(half_width[:, None])
    rows = Rows.start(torch.arange(count), point, *box)
    ones = torch.ones(count, 1, dtype=torch.float64)
    rows.spectra = Spectra(tensor(curvature[:, None]), ones[:, :, None], point.g, torch.zeros(count))
    rows.free, rows.sigma, rows.grad_norm = ones.bool(), tensor(sigma), point.g.abs()[:, 0]
    rows.trial_count = torch.ones(count, dtype=torch.int64)
    trial = trials_of(x, PENDING, sigma / 2.0, rejected_norm, np.ones(count))
    rows.trial = replace(trial, truncated=torch.ones(count, dtype=torch.bool))
    return rows


def core_step(g, curvature, half_width, sigma, rejected_norm):
    """Return the step of the core in the same box after the same rejection."""
    oracle, x, _ = build_oracle(
        lambda x: g * x[0] + 0.5 * curvature * x[0] ** 2,
        np.zeros(1),
        jac=lambda x: np.array([g + curvature * x[0]]),
        hess=None,
        hessp=lambda x, v: curvature * v,
        args=(),
    )
    face = FaceOracle(oracle, Box(tensor([-half_width]), tensor([half_width])), x, None)
    last = step_of(rejected_norm, 1.0, sigma / 2.0)
    rejected = BoxStep(**{name: getattr(last, name) for name in last.__slots__}, truncated=True)
    value, gradient = face.gradient(x)
    here = Point(x=x, g=gradient, value=value, grad_norm=abs(g), oracle=face, sigma_rule=RULE, state=State(seed=0),
                 units=Units(1.0, 1.0), rejected=rejected)  # fmt: skip
    model = CubicModel(krylov_dim=None, krylov_stop="forcing", max_resolves=3)
    return BoundedSubspace(model, model.build(here), here).propose(here, sigma)


def test_sigma_is_raised_after_a_truncated_step_as_in_the_core():
    """A step that bounds do not truncate ends it here whatever its norm; the core raises σ until it is shorter."""
    rng, count = np.random.default_rng(5), 80
    g, curvature = rng.uniform(-2.0, 2.0, count), rng.uniform(-1.0, 1.0, count)
    half_width, sigma = rng.uniform(0.1, 1.0, count), 10.0 ** rng.uniform(-6, 1, count)
    rejected = half_width * rng.choice([1.0, 2.0], count)
    rows = rows_in_boxes(g, curvature, half_width, sigma, rejected)
    RowProposals(GivenRows(), 0).propose_pending(rows)
    same = differing = raised = 0
    for k in range(count):
        step = core_step(g[k], curvature[k], half_width[k], sigma[k], rejected[k])
        if not bool(rows.trial.truncated[k]) and float(rows.trial.norm[k]) > 0.7 * rejected[k]:
            raises = math.log(step.sigma / float(rows.sigma[k]), 4.0)
            assert raises == pytest.approx(round(raises)) and raises > 0.5 and step.norm <= 0.7 * rejected[k]
            differing += 1
            continue
        assert float(rows.sigma[k]) == pytest.approx(step.sigma, rel=1e-12)
        assert float(rows.trial.norm[k]) == pytest.approx(step.norm, rel=1e-8)
        assert float(rows.trial.x[k]) == pytest.approx(float(step.trial_point[0]), rel=1e-8)
        same, raised = same + 1, raised + (step.sigma > sigma[k])
    assert same > 30 and raised > 5 and differing > 5


def test_after_the_last_rejection_rows_escape_as_in_the_core():
    """Rows with an earlier trial propose another cubic step. The curvature is diagonal, so that v is a unit vector."""
    rng, count = np.random.default_rng(9), 40
    values = np.sort(rng.uniform(-1.0, 1.0, (count, 3)), axis=1)
    g, sigma = rng.standard_normal((count, 3)), 10.0 ** rng.uniform(-2, 2, count)
    x = rng.standard_normal((count, 3))
    matrices = np.eye(3) * values[:, :, None]
    rows = Rows.start(torch.arange(count), RowPoints(*map(tensor, (x, np.zeros(count), g, matrices))), None, None)
    vectors = torch.eye(3, dtype=torch.float64).expand(count, 3, 3).clone()
    rows.spectra = Spectra(tensor(values), vectors, tensor(g), torch.zeros(count))
    rows.sigma, rows.grad_norm, rows.x_norm = tensor(sigma), tensor(g).norm(dim=1), tensor(x).norm(dim=1)
    last = ROBUST.model.max_resolves + 1
    rows.trial_count = torch.arange(count) % 2 + last - 1
    RowProposals(GivenRows(), 0).propose_pending(rows)
    assert torch.equal(rows.trial.mode == ESCAPE, rows.trial_count == last)
    branches = set()
    for k in range(1, count, 2):
        here = point_with(lambda y, start=x[k]: -1.0 + (y == start).all(), x=x[k], g=g[k], rule=RULE)
        subspace = subspace_with(
            ritz_value=float(values[k, 0]),
            hessian_norm=float(np.abs(values[k]).max()),
            ritz_vector=lambda: np.eye(3)[0],
        )
        decision = ROBUST.escape(here, subspace, float(sigma[k]), model_proposes=True)
        np.testing.assert_allclose(rows.trial.x[k].numpy(), decision.point, rtol=1e-12)
        assert float(rows.trial.norm[k]) == pytest.approx(decision.step_norm)
        branches.add(decision.branch)
    assert branches == {Branch.CURVATURE, Branch.GRADIENT}
