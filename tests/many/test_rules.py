"""The rules for many rows decide, row by row, as those of the core for one problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sanc.core.acceptance import is_within_cancellation, largest_term
from sanc.core.bounded.box_model import _BoxModel, _Quadratic
from sanc.core.escape import choose_branch
from sanc.core.ratio import TrialOutcome, Verdict, classify, ratio
from sanc.core.record import Branch
from sanc.core.runs.noise_estimates import estimate_gradient_rounding
from sanc.core.runs.saddle import _lower_point
from sanc.core.runs.stall import StallMonitor
from sanc.core.spectrum import cubic as core_cubic
from sanc.core.units import Units, measure_units, unbounded_decrease
from sanc.functions.oracle import CallableOracle
from sanc.many import algebra, rules
from sanc.many.box import fit_steps
from sanc.many.cubic import CubicModels
from sanc.many.endings import leave_saddles, rounding_of_gradients
from sanc.many.rows import Group, RowPoints, Rows, Spectra
from sanc.many.rules import ROBUST_RULES
from sanc.many.spectra import decompose
from sanc.presets import PRESETS

VERDICTS = (Verdict.UNSUCCESSFUL, Verdict.SUCCESSFUL, Verdict.VERY_SUCCESSFUL)
RULE = PRESETS["robust"].sigma.rule(2.0**-52, exact=True)
SPECIAL = (0.0, math.nan, math.inf, -math.inf, 1e-310, 1e300)


def draws(count, seed, *, positive=False):
    """Return numbers of many magnitudes, with special ones among them."""
    rng = np.random.default_rng(seed)
    numbers = 10.0 ** rng.uniform(-12, 12, count)
    if not positive:
        numbers *= rng.choice([-1.0, 1.0], count)
        numbers[: len(SPECIAL)] = SPECIAL
        rng.shuffle(numbers)
    return numbers


def each(*arrays):
    """Return the numbers of each row as plain floats."""
    return zip(*(array.tolist() for array in arrays), strict=True)


def same(rows, singles):
    np.testing.assert_allclose(rows.numpy(), np.array(singles, float), rtol=1e-12, equal_nan=True)


def test_decreases_that_cancellation_may_hide():
    value, norm, unit = draws(400, 20), draws(400, 21, positive=True), draws(400, 22, positive=True)
    length = 10.0 ** np.random.default_rng(23).uniform(-3, 3, 400)
    scale = rules.largest_term(*(torch.from_numpy(part) for part in (value, norm, length, unit)))
    same(scale, [largest_term(*numbers) for numbers in each(value, norm, length, unit)])
    size = np.nan_to_num(scale.numpy(), nan=1.0, posinf=1.0)
    factors = 10.0 ** np.random.default_rng(24).uniform(-16, 0, (2, 400))
    actual, predicted = size * factors
    actual[::2] *= -1.0
    hidden = rules.is_within_cancellation(torch.from_numpy(actual), torch.from_numpy(predicted), scale, 2.0**-52)
    expected = [is_within_cancellation(*numbers, 2.0**-52) for numbers in each(actual, predicted, scale)]
    assert hidden.tolist() == expected and 20 < sum(expected) < 380


def test_classes_and_ratios_of_steps():
    actual, predicted = draws(500, 0), draws(500, 1)
    actual[100:] = predicted[100:] * np.random.default_rng(2).uniform(-0.2, 1.2, 400)
    rounding = np.where(np.arange(500) % 2, draws(500, 3, positive=True), 0.0)
    tensors = [torch.from_numpy(part) for part in (actual, predicted, rounding)]
    eta = (ROBUST_RULES.eta1, ROBUST_RULES.eta2)
    verdicts = [VERDICTS.index(classify(a, p, *eta, r)) for a, p, r in each(actual, predicted, rounding)]
    assert ROBUST_RULES.classify(*tensors).tolist() == verdicts
    assert len(set(verdicts)) == 3
    same(rules.ratio(*tensors), [ratio(a, p, r) for a, p, r in each(actual, predicted, rounding)])


@pytest.mark.parametrize("verdict", range(3))
def test_sigma_after_a_trial(verdict):
    sigma, predicted, norm = (draws(400, k, positive=True) for k in (4, 5, 6))
    norm[:5] = (1e-200, 1e200, 1e-120, 1e110, 1e-105)  # σ‖s‖³ underflows or overflows
    actual = predicted * np.random.default_rng(7).uniform(-3, 3, 400)
    actual[5:10] = (math.nan, math.inf, -math.inf, 0.0, 1e300)
    rounding = np.where(np.arange(400) % 3, 0.0, predicted * 2.0)
    arrays = (actual, predicted, norm, rounding)
    tensors = [torch.from_numpy(part) for part in arrays]
    kinds = torch.full((400,), verdict)
    rows = ROBUST_RULES.after_trial(torch.from_numpy(sigma), kinds, tensors[0], tensors[1], tensors[2], tensors[3])
    trials = [TrialOutcome(s, VERDICTS[verdict], a, p, n, 1.0, r) for s, a, p, n, r in each(sigma, *arrays)]
    singles = [RULE.after_trial(trial) for trial in trials]
    same(rows, singles)


def test_sigma_after_derivatives_failures_and_negligible_steps():
    sigma, tried, predicted, norm = (draws(300, k, positive=True) for k in (8, 9, 10, 11))
    end = draws(300, 12)
    parts = [torch.from_numpy(part) for part in (sigma, tried, predicted, norm, end)]
    singles = [RULE.after_derivative(*numbers) for numbers in each(sigma, tried, predicted, norm, end)]
    same(ROBUST_RULES.after_derivative(*parts), singles)
    same(ROBUST_RULES.after_failure(parts[0]), [RULE.after_failure(s) for s in sigma])
    singles = [RULE.after_negligible_step(s, n) for s, n in each(sigma, norm)]
    same(ROBUST_RULES.after_negligible_step(parts[0], parts[3]), singles)


def test_units_and_escape_branches():
    value, grad_norm, product_norm, x_norm = (np.abs(draws(300, k)) for k in (13, 14, 15, 16))
    keep = np.isfinite(value) & np.isfinite(grad_norm) & np.isfinite(product_norm) & np.isfinite(x_norm)
    arrays = [part[keep] for part in (value, grad_norm, product_norm, x_norm)]
    length, unit = rules.measure_units(*map(torch.from_numpy, arrays))
    singles = [measure_units(*numbers) for numbers in each(*arrays)]
    same(length, [one.length_scale for one in singles])
    same(unit, [one.cubic for one in singles])
    ritz, curvature, g, sigma = draws(300, 17)[:280], *(draws(280, k, positive=True) for k in (18, 19, 20))
    ritz = np.nan_to_num(ritz, nan=1.0, posinf=1.0, neginf=-1.0)
    along, size = rules.choose_branch(*map(torch.from_numpy, (ritz, curvature, g, sigma)))
    singles = [choose_branch(r, n, c, 2 * s) for r, c, n, s in each(ritz, curvature, g, sigma)]
    assert along.tolist() == [branch is Branch.CURVATURE for branch, _ in singles]
    same(size, [one for _, one in singles])


def spectra(kind):
    rng = np.random.default_rng(21)
    values = np.sort(rng.standard_normal((200, 5)) * 10.0 ** rng.uniform(-6, 6, (200, 1)), axis=1)
    c = rng.standard_normal((200, 5)) * 10.0 ** rng.uniform(-8, 8, (200, 1))
    if kind == "convex":
        values = np.sort(np.abs(values), axis=1)
    elif kind == "hard":
        c[:, 0] = 0.0
        c *= 1e-8
    elif kind == "nearly hard":
        c[:, 0] *= 1e-12
    elif kind == "zero":
        c[:] = 0.0
        values[:50] = 0.0
    return values, c, 10.0 ** rng.uniform(-8, 8, 200)


@pytest.mark.parametrize("kind", ["indefinite", "convex", "hard", "nearly hard", "zero"])
def test_cubic_steps(kind):
    values, c, sigma = spectra(kind)
    tensors = list(map(torch.from_numpy, (values, c, sigma)))
    steps = CubicModels(*tensors[:2]).solve(tensors[2])
    hard = 0
    for k in range(200):
        one = core_cubic.solve(core_cubic.Spectrum(values[k], np.eye(5)), c[k], sigma[k])
        np.testing.assert_allclose(steps.norm[k], one.norm, rtol=1e-9)
        np.testing.assert_allclose(steps.decrease[k], one.decrease, rtol=1e-9)
        np.testing.assert_allclose(steps.y[k].numpy(), one.u, rtol=1e-6, atol=1e-9 * one.norm)
        assert (steps.hard_case is not None and bool(steps.hard_case[k])) == one.hard_case
        hard += one.hard_case
    assert kind != "hard" or hard > 100


@pytest.mark.parametrize("kind", ["indefinite", "convex", "hard", "nearly hard"])
def test_limited_steps_have_the_sigma_of_the_core(kind):
    values, c, sigma = spectra(kind)
    always = np.arange(200) % 2 == 0
    tensors = list(map(torch.from_numpy, (values, c, sigma)))
    models = CubicModels(*tensors[:2])
    max_norm = models.solve(tensors[2]).norm * torch.from_numpy(10.0 ** np.random.default_rng(3).uniform(-3, 0.3, 200))
    limited = ROBUST_RULES.limited_sigma(models, tensors[2], max_norm, torch.from_numpy(always))
    raised = 0
    for k in range(200):
        spectrum = core_cubic.Spectrum(values[k], np.eye(5))
        one = core_cubic.solve(spectrum, c[k], sigma[k])
        if one.norm > float(max_norm[k]) and (always[k] or values[k, 0] < one.multiplier):
            raised += 1
            bound = core_cubic.sigma_lower_bound(spectrum, c[k], one, float(max_norm[k]))
            one = RULE.limit_step(
                one,
                sigma[k],
                lambda s, spectrum=spectrum, k=k: core_cubic.solve(spectrum, c[k], s),
                float(max_norm[k]),
                bound,
            )
        assert float(limited[k]) == pytest.approx(one.sigma, rel=1e-12)
    assert 50 < raised < 200


def test_iterations_without_progress_are_counted_as_by_the_core():
    rng = np.random.default_rng(9)
    moved, eps = rng.random((40, 12)) < 0.6, 2.0**-52
    new_values, predicted = 1.0 - eps * rng.choice([0.0, 3.0, 20.0], (40, 12)), eps * rng.choice([0.5, 2.0], (40, 12))
    norms = 10.0 ** np.cumsum(rng.uniform(-0.02, 0.02, (40, 12)), 1)
    counts, best = torch.zeros(40, dtype=torch.long), torch.full((40,), math.inf, dtype=torch.float64)
    monitors = [StallMonitor() for _ in range(40)]
    for k in range(12):
        norm, moves, new_value, decrease = (
            torch.from_numpy(part[:, k]) for part in (norms, moved, new_values, predicted)
        )
        decreases = rules.value_decreases(torch.ones_like(new_value), new_value, decrease, eps)
        counts, best = rules.update_stall(counts, best, norm, moves, decreases)
        for row, monitor in enumerate(monitors):
            branch = Branch.SUCCESSFUL if moved[row, k] else Branch.STAYED
            record = SimpleNamespace(
                grad_norm=norms[row, k], branch=branch, value=1.0, note="", trial_value=new_values[row, k],
                model_decrease=predicted[row, k], step_norm=1.0,
            )  # fmt: skip
            monitors[row] = monitor.after(record, eps, rejection_counts=True)
    assert counts.tolist() == [monitor.count for monitor in monitors]
    assert len(set(counts.tolist())) > 2
    same(best, [monitor.best_grad_norm for monitor in monitors])


def test_a_decrease_without_bound_is_that_of_the_core_with_a_unit_of_one_added():
    value, unit = draws(60, 24), draws(60, 25, positive=True)
    singles = [unbounded_decrease(one, added, 2.0**-52) for one, added in each(value, unit + 1.0)]
    same(rules.unbounded_decrease(*map(torch.from_numpy, (value, unit)), 2.0**-52), singles)


def test_the_limit_on_the_step_norm_is_that_of_the_core():
    length, x_norm, last = (draws(50, k, positive=True) for k in (20, 21, 22))
    last[::3] = 0.0
    singles = []
    for unit, norm, step in each(length, x_norm, last):
        here = SimpleNamespace(state=SimpleNamespace(last_step_norm=step), x_norm=norm)
        singles.append(PRESETS["robust"].model.max_step_norm(here, Units(unit, 1.0)))
    same(ROBUST_RULES.max_step_norm(*map(torch.from_numpy, (length, x_norm, last))), singles)


def test_steps_in_a_box_decrease_the_model_no_less_than_the_cauchy_point_of_the_core():
    rng = np.random.default_rng(5)
    matrices = rng.standard_normal((60, 4, 4))
    matrices = matrices + matrices.transpose(0, 2, 1)
    g, x = rng.standard_normal((60, 4)), rng.uniform(-1.0, 1.0, (60, 4))
    lower, upper = x - rng.uniform(0.0, 0.7, (60, 4)), x + rng.uniform(0.0, 0.7, (60, 4))
    values, vectors = torch.linalg.eigh(torch.from_numpy(matrices))
    point = RowPoints(*map(torch.from_numpy, (x, np.zeros(60), g, matrices)))
    rows = Rows.start(torch.arange(60), point, *map(torch.from_numpy, (lower, upper)))
    rows.free, rows.sigma = torch.ones(60, 4, dtype=torch.bool), torch.ones(60, dtype=torch.float64)
    c = (vectors.mT @ point.g[:, :, None])[:, :, 0]
    rows.spectra = Spectra(values, vectors, c, torch.zeros(60))
    steps = CubicModels(values, c).solve(rows.sigma)
    s = (vectors @ steps.y[:, :, None])[:, :, 0]
    rows.trial = replace(
        rows.trial,
        x=point.x + s,
        sigma=rows.sigma,
        norm=steps.norm,
        predicted=steps.decrease,
        multiplier=steps.multiplier,
    )
    found = fit_steps(rows, s)
    assert int(found.truncated.sum()) > 40
    assert ((found.x >= rows.lower) & (found.x <= rows.upper)).all()
    ratios = []
    for k in range(60):
        model = _BoxModel(_Quadratic(g[k], np.eye(4), matrices[k], 0.0), 1.0, lower[k] - x[k], upper[k] - x[k])
        step = found.x[k].numpy() - x[k]
        assert float(found.predicted[k]) == pytest.approx(-model.evaluate(step)[0], rel=1e-9)
        assert float(found.predicted[k]) >= -(1.0 - 1e-9) * model.evaluate(model._cauchy_point())[0]
        ratios.append(float(found.predicted[k]) / model.minimise(np.clip(s[k].numpy(), model.lower, model.upper))[1])
    assert np.median(ratios) > 0.9  # the core makes further steps in the box


def near_maxima(count=30, n=4):
    """Return f, its gradient and Hessian, and points within 1e-9 of a maximum; some f have no gradient far away."""
    rng = np.random.default_rng(6)
    shifts, units = rng.uniform(-3.0, 3.0, (count, n)), 10.0 ** rng.uniform(-3.0, 3.0, count)
    x = shifts + 1e-9 * rng.standard_normal((count, n))
    ends = np.where(np.arange(count) % 3, np.inf, 1e-4)  # of the domain of the gradient

    def value(x, k):
        return units[k] * (10.0 + np.cos(x - shifts[k]).sum(-1))

    def gradient(x, k):
        inside = np.abs(x - shifts[k]).max(-1) < ends[k]
        return np.where(inside[..., None], -units[k][..., None] * np.sin(x - shifts[k]), np.nan)

    hessians = -units[:, None, None] * np.cos(x - shifts)[:, :, None] * np.eye(n)
    return value, gradient, hessians, x


class _NearMaxima:
    """The rows of `near_maxima`, as far as endings need them."""

    eps = 2.0**-52

    def __init__(self):
        self.value, self.gradient, self.hessians, self.x = near_maxima()

    def values(self, x, ids):
        return torch.from_numpy(self.value(x.numpy(), ids.numpy()))

    def gradients(self, x, ids):
        return torch.from_numpy(self.gradient(x.numpy(), ids.numpy()))

    def evaluate(self, x, ids):
        return RowPoints(x, self.values(x, ids), self.gradients(x, ids), torch.from_numpy(self.hessians)[ids])

    def rows(self):
        ids = torch.arange(len(self.x))
        rows = Rows.start(ids, self.evaluate(torch.from_numpy(self.x), ids), None, None)
        rows.x_norm = torch.linalg.vector_norm(rows.point.x, dim=1)
        rows.spectra = decompose(rows.point.matrix, rows, self.eps)
        return rows


def test_rows_leave_maxima_as_the_core_does():
    """The same points along ± the same eigenvector, also if gradients are not finite beyond some of them."""
    problem = _NearMaxima()
    rows = problem.rows()
    points, places = leave_saddles(problem, rows)
    assert places.tolist() == list(range(30))
    for k in range(30):
        value, one = problem.value, np.array(k)
        oracle = CallableOracle(lambda x: value(x, one), problem.x[k], jac=lambda x: problem.gradient(x, one))
        run = SimpleNamespace(oracle=oracle, x=problem.x[k], units=Units())
        lowest, v = SimpleNamespace(lambda_min=float(rows.spectra.ritz_value[k])), rows.spectra.vectors[k, :, 0].numpy()
        np.testing.assert_allclose(points[k].numpy(), _lower_point(run, lowest, v), rtol=1e-12)


def test_rounding_errors_of_gradients_are_of_the_size_that_the_core_estimates():
    """The random vectors differ, so the estimates agree within a factor."""
    problem = _NearMaxima()
    rows = problem.rows()
    found = rounding_of_gradients(problem, rows)
    for k in range(30):
        value, one = problem.value, np.array(k)
        derivatives = {"jac": lambda x: problem.gradient(x, one), "hessp": lambda x, v: problem.hessians[one] @ v}
        oracle = CallableOracle(lambda x: value(x, one), problem.x[k], **derivatives)
        single = estimate_gradient_rounding(oracle, problem.x[k], 1.0)
        assert single / 4.0 < float(found[k]) < 4.0 * single


def test_norms_whose_squares_are_out_of_range():
    vectors = torch.tensor([[3.0, -4.0], [3e-200, 4e-200], [3e200, 4e200], [0.0, 0.0]], dtype=torch.float64)
    assert algebra.norms_of(vectors).tolist() == pytest.approx([5.0, 5e-200, 5e200, 0.0], rel=1e-15)


@pytest.mark.parametrize("has_mkl", [False, True])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_products_of_many_matrices_do_not_depend_on_the_library(monkeypatch, has_mkl, n):
    monkeypatch.setattr(algebra, "_HAS_MKL", has_mkl)
    rng = np.random.default_rng(n)
    rows, long, short = rng.standard_normal((3, n, 40)), rng.standard_normal((3, 40)), rng.standard_normal((3, n))
    matrix = torch.from_numpy(rows)
    same(algebra.gram(matrix), np.einsum("rip,rjp->rij", rows, rows))
    same(algebra.multiply(matrix, torch.from_numpy(long)), np.einsum("rip,rp->ri", rows, long))
    same(algebra.multiply_transposed(matrix, torch.from_numpy(short)), np.einsum("rip,ri->rp", rows, short))


@dataclass(frozen=True)
class Extras(Group):
    norms: torch.Tensor


def test_rows_are_taken_put_joined_and_chosen_with_all_their_parts():
    def rows(first):
        numbers = torch.arange(first, first + 4, dtype=torch.float64)
        matrix = numbers[:, None, None].expand(4, 2, 2)
        point = RowPoints(matrix[:, 0], numbers, matrix[:, 0], matrix, Extras(matrix[:, 0]))
        return Rows.start(numbers.long(), point, matrix[:, 0], None)

    def numbers(group):
        parts = (group.ids, group.lower[:, 1], group.point.value, group.point.matrix[:, 1, 0])
        parts += (group.point.extras.norms[:, 1], group.trial.x[:, 0], group.accepted.trial.x[:, 1])
        assert group.upper is None
        assert len({tuple(part.tolist()) for part in parts}) == 1
        return group.ids.tolist()

    group, others, places = rows(0), rows(10), torch.tensor([3, 1])
    assert numbers(group.take(places)) == [3, 1]
    assert numbers(group.put(places, others.take(torch.tensor([0, 2])))) == [0, 12, 2, 10]
    assert numbers(group.join(others.take(places), others)) == [0, 1, 2, 3, 13, 11, 10, 11, 12, 13]
    assert numbers(group.where(torch.tensor([True, False, False, True]), others)) == [0, 11, 12, 3]
    group.set(places, others.take(places))
    assert numbers(group) == [0, 11, 2, 13]
