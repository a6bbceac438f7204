"""`curve_fit` for rows of data makes, in every row, the fit of SciPy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, OptimizeWarning
from scipy.optimize import curve_fit as scipy_fit

import sanc
from sanc.leastsquares import row_fits
from sanc.leastsquares import rows as fit_problems
from sanc.leastsquares.row_data import RowData
from sanc.leastsquares.row_models import MappedModel, PointwiseModel, is_pointwise
from sanc.leastsquares.rows import FitProblem
from sanc.many.algebra import eigenpairs
from sanc.many.running import RowRun, RunLimits

X = np.linspace(0.1, 8.0, 60)


def decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def numpy_decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def peak(x, a, centre, width):
    return a * torch.exp(-0.5 * ((x - centre) / width) ** 2)


def data(rows, seed=0, noise=0.05):
    rng = np.random.default_rng(seed)
    true = np.column_stack([rng.uniform(1, 5, rows), rng.uniform(0.3, 2, rows), rng.uniform(0, 1, rows)])
    curves = np.stack([numpy_decay(X, *p) for p in true])
    return true, curves + noise * rng.standard_normal(curves.shape)


def assert_as_scipy(popt, pcov, row, **options):
    p, covariance = scipy_fit(numpy_decay, options.pop("x", X), options.pop("y"), options.pop("p0"), **options)
    np.testing.assert_allclose(popt[row], p, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(pcov[row], covariance, rtol=1e-3, atol=1e-9)


def test_parameters_and_covariances_are_those_of_scipy():
    true, y = data(20)
    popt, pcov, res = sanc.curve_fit(decay, X, y, true * 1.3, full_output=True)
    assert isinstance(popt, np.ndarray)
    assert res.success.all()
    for row in range(20):
        assert_as_scipy(popt, pcov, row, y=y[row], p0=true[row])
        assert res[row].certificate.second_order
    tensors = sanc.curve_fit(decay, torch.tensor(X), torch.tensor(y), torch.tensor([2.0, 1.0, 0.5]))
    assert isinstance(tensors[0], torch.Tensor)
    np.testing.assert_allclose(tensors[0], popt, rtol=1e-6, atol=1e-8)


def test_rows_agree_with_single_fits():
    true, y = data(4, seed=1)
    popt, pcov = sanc.curve_fit(decay, torch.tensor(X), torch.tensor(y), torch.tensor(true * 0.8))
    for row in range(4):
        p, covariance = sanc.curve_fit(decay, torch.tensor(X), torch.tensor(y[row]), torch.tensor(true[row] * 0.8))
        torch.testing.assert_close(popt[row], p, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(pcov[row], covariance, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("absolute", [False, True])
def test_weights(absolute):
    true, y = data(3, seed=2)
    sigma = 0.02 + 0.05 * X / 8
    popt, pcov = sanc.curve_fit(decay, X, y, true, sigma=sigma, absolute_sigma=absolute)
    for row in range(3):
        assert_as_scipy(popt, pcov, row, y=y[row], p0=true[row], sigma=sigma, absolute_sigma=absolute)
    each = sanc.curve_fit(decay, X, y, true, sigma=np.tile(sigma, (3, 1)), absolute_sigma=absolute)
    np.testing.assert_allclose(each[0], popt)


def test_missing_values_are_left_out():
    true, y = data(4, seed=3)
    used = np.random.default_rng(4).random(y.shape) > 0.3
    holes = np.where(used, y, np.nan)
    popt, pcov = sanc.curve_fit(decay, X, holes, true, mask=used)
    for row in range(4):
        assert_as_scipy(popt, pcov, row, x=X[used[row]], y=y[row][used[row]], p0=true[row])
    with pytest.raises(sanc.ArgumentError, match=r"row 0: pass mask=np.isfinite"):
        sanc.curve_fit(decay, X, holes, true)


def test_each_row_may_have_its_own_abscissae():
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(0.1, 8.0, (3, 60)), axis=1)
    true = np.array([[2.0, 1.0, 0.5], [3.0, 0.5, 0.1], [1.5, 1.5, 0.3]])
    y = np.stack([numpy_decay(x[k], *true[k]) for k in range(3)]) + 0.02 * rng.standard_normal((3, 60))
    popt, pcov = sanc.curve_fit(decay, x, y, true * 1.2)
    for row in range(3):
        assert_as_scipy(popt, pcov, row, x=x[row], y=y[row], p0=true[row])


def test_bounds_that_cut():
    _, y = data(10, seed=6)
    bounds = ([0.0, 0.5, 0.2], [4.0, 1.2, 0.8])
    for form in (bounds, Bounds(*bounds), tuple(np.tile(side, (10, 1)) for side in bounds)):
        popt, _, res = sanc.curve_fit(decay, X, y, bounds=form, full_output=True)
        assert res.success.all()
        for row in range(10):
            p, _ = scipy_fit(numpy_decay, X, y[row], bounds=bounds)
            cost = [0.5 * np.sum((numpy_decay(X, *q) - y[row]) ** 2) for q in (p, popt[row])]
            assert cost[1] <= cost[0] * (1 + 1e-8)
            assert (popt[row] >= bounds[0]).all()
            assert (popt[row] <= bounds[1]).all()
    assert (res.active != 0).any()


def test_rows_in_a_wrong_minimum_are_fitted_again():
    rng = np.random.default_rng(7)
    true = np.column_stack([rng.uniform(2, 5, 200), rng.uniform(1.5, 7, 200), rng.uniform(0.3, 0.8, 200)])
    y = np.stack([a * np.exp(-0.5 * ((X - m) / w) ** 2) for a, m, w in true]) + 0.05 * rng.standard_normal((200, 60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)
        once, again = (sanc.curve_fit(peak, X, y, [1.0, 4.0, 0.5], restarts=k, max_iter=30)[0] for k in (0, 3))
    found = [(np.abs(p[:, 1] - true[:, 1]) < 0.1).mean() for p in (once, again)]
    assert found[0] < 0.92
    assert found[1] > 0.98


def test_a_row_that_cannot_be_fitted_has_its_own_status():
    _, y = data(5, seed=8)

    def cut(x, a, b, c):
        return torch.where(c > 0.9, torch.nan, decay(x, a, b, c))

    start = np.tile([2.0, 1.0, 0.5], (5, 1))
    start[2, 2] = 0.95
    with pytest.warns(OptimizeWarning, match="1 of 5 rows led to no fit"):
        popt, _, res = sanc.curve_fit(cut, X, np.minimum(y, 8), start, full_output=True, restarts=0)
    assert res.status.tolist()[2] == sanc.Status.NOT_FINITE
    assert np.isfinite(popt[[0, 1, 3, 4]]).all()


def test_undetermined_covariances_are_infinite():
    true, y = data(2, seed=9)
    _, pcov = sanc.curve_fit(lambda x, a, b, c: decay(x, a, b, 0.0 * c), X, y, true)
    assert np.isinf(pcov).all()
    few = sanc.curve_fit(decay, X[:3], y[:, :3], true)[1]
    assert np.isinf(few).all()


@pytest.mark.filterwarnings("ignore::scipy.optimize.OptimizeWarning")
def test_covariances_of_ill_conditioned_rows_and_of_rows_that_never_began():
    offsets = np.array([0.0, 1e3, 1e7])[:, None]
    y = 2.0 + 0.5 * X + 0.05 * np.random.default_rng(5).standard_normal((3, len(X)))
    p0 = np.column_stack([2.0 - 0.5 * offsets[:, 0], np.full(3, 0.5)])
    for options in ({}, {"max_time": 1e-9}):
        p, pcov, res = sanc.curve_fit(
            lambda x, a, b: a + b * x, X + offsets, y, p0, restarts=0, full_output=True, **options
        )
        assert res.success.all() != bool(options)
        for row in range(3):
            J = np.column_stack([np.ones_like(X), X + offsets[row]])
            R = np.linalg.inv(np.linalg.qr(J)[1])
            r = y[row] - J @ p[row]
            np.testing.assert_allclose(pcov[row], R @ R.T * (r @ r) / (len(X) - 2), rtol=1e-6)


BAD = {
    "sigma has shape": {"sigma": np.ones(7)},
    "sigma = array": {"sigma": -np.ones(60)},
    "mask has shape": {"mask": np.ones((2, 3), bool)},
    "p0 has 4 rows": {"p0": np.ones((4, 3))},
    "p0 holds NaN": {"p0": [1.0, np.nan, 1.0]},
    "jac = ": {"jac": "2-point"},
    "restarts = -1": {"restarts": -1},
    "tol = 2": {"tol": 2.0},
    "loss = 'huber' is for one fit, not for rows": {"loss": "huber"},
    "maxfev = 9 is not an argument of curve_fit: pass max_iter": {"maxfev": 9},
    "bounds[0]": {"bounds": ([1, 0, 0], [0, 1, 1])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named_with_a_remedy(message):
    true, y = data(2)
    with pytest.raises(sanc.ArgumentError) as error:
        sanc.curve_fit(decay, X, y, **({"p0": true} | BAD[message]))
    assert message in str(error.value)


def test_a_tolerance_may_have_any_type_of_numbers():
    true, y = data(2)
    tol = np.float32(1e-6)
    (popt, _), (expected, _) = (sanc.curve_fit(decay, X, y, true, tol=number) for number in (tol, float(tol)))
    assert np.array_equal(popt, expected)


def test_functions_of_numpy_are_named_as_the_cause():
    true, y = data(2)
    with pytest.raises(sanc.ArgumentError, match="functions of torch"):
        sanc.curve_fit(numpy_decay, X, y, true)
    with pytest.raises(sanc.ArgumentError, match="a row of 60 observations"):
        sanc.curve_fit(lambda x, a, b, c: decay(x, a, b, c)[:5], X, y, true)
    with pytest.raises(sanc.ArgumentError, match="mask is for rows"):
        sanc.curve_fit(numpy_decay, X, y[0], true[0], mask=np.ones(60, bool))


def test_float32_rows():
    true, y = data(6, seed=10)
    tensors = [torch.tensor(part, dtype=torch.float32) for part in (X, y, true * 1.2)]
    popt, pcov, res = sanc.curve_fit(decay, *tensors, full_output=True)
    assert popt.dtype == pcov.dtype == torch.float32
    assert res.success.all()
    exact = sanc.curve_fit(decay, X, y, true)[0]
    np.testing.assert_allclose(popt, exact, rtol=1e-3, atol=1e-3)


def test_many_matrices_are_decomposed_in_parts(monkeypatch):
    monkeypatch.setattr("sanc.many.algebra._largest_batch", lambda matrices: 3)
    matrices = torch.randn(8, 4, 4, dtype=torch.float64)
    matrices = matrices + matrices.mT
    values, vectors = eigenpairs(matrices)
    torch.testing.assert_close((vectors * values[:, None, :]) @ vectors.mT, matrices)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_matrices_are_decomposed_by_rotations(n, monkeypatch):
    monkeypatch.setattr("sanc.many.algebra._MIN_JACOBI_ROWS", {n: 1})
    monkeypatch.setattr("torch.linalg.eigh", None)
    special = torch.zeros(9, n, n, dtype=torch.float64)
    pairs = [[0, 0, 0], [1, 0, 1], [1, 1, 1], [2, 0, 1], [0, 1, 0], [1, 1e-200, 1], [1, 1e-9, 1e-16], [-3, 1e-3, 2]]
    special[:8, :2, :2] = torch.tensor(pairs, dtype=torch.float64)[:, [0, 1, 1, 2]].reshape(8, 2, 2)
    special[8] = 1.0
    columns = torch.randn(50, n + 2, n, dtype=torch.float64) * 10.0 ** torch.randn(50, 1, n, dtype=torch.float64)
    random = torch.randn(50, n, n, dtype=torch.float64)
    numbers = torch.cat([special, random + random.mT, columns.mT @ columns])
    size = numbers.abs().amax((1, 2), keepdim=True).clamp(min=1.0)
    for scale in (1.0, 1e-150, 1e150):
        values, vectors = eigenpairs(scale * numbers)
        product = (vectors * (values / scale)[:, None, :]) @ vectors.mT
        torch.testing.assert_close(product / size, numbers / size, rtol=0.0, atol=1e-14)
        torch.testing.assert_close(values[:, None] / scale / size, torch.linalg.eigvalsh(numbers)[:, None] / size,
                                   rtol=0.0, atol=1e-14)  # fmt: skip
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(n, dtype=torch.float64).expand_as(numbers))
    others = eigenpairs(numbers)[0][1:]
    numbers[0, 0, 0] = torch.nan
    assert torch.equal(eigenpairs(numbers)[0][1:], others)


def test_no_matrices_have_no_eigenpairs():
    assert eigenpairs(torch.zeros(0, 2, 2, dtype=torch.float64))[1].shape == (0, 2, 2)


def cumulated(x, a, b, c):
    return torch.cumsum(decay(x, a, b, c), -1) / len(x)


def normalised(x, a, b, c):
    return a * torch.softmax(-b * x, 0) + c


def with_branch(x, a, b, c):
    return decay(x, a, b, c) + (b - 1.6).clamp(min=0.0) ** 2 * torch.cumsum(torch.exp(-b * x), -1)


def of_two_abscissae(x, a, b, c):
    return a * torch.exp(-b * x[0]) + c * x[1]


PAIR = torch.stack([torch.tensor(X), torch.sin(torch.tensor(X))])
MODELS = {"decay": decay, "pair": of_two_abscissae, "cumulated": cumulated, "normalised": normalised}
POINTWISE = ("decay", "pair")


@pytest.mark.parametrize("name", MODELS)
def test_pointwise_models_are_recognised_and_have_the_derivatives_of_the_mapped_model(name):
    f = MODELS[name]
    rng = np.random.default_rng(4)
    p = torch.tensor(rng.uniform(0.5, 2.0, (5, 3)))
    y, weights = (torch.tensor(rng.uniform(0.0, 1.0, (5, len(X)))) for _ in range(2))
    x = PAIR if name == "pair" else torch.tensor(X)
    rows = RowData(x, y, weights, None, False)
    mapped, pointwise = MappedModel(f), PointwiseModel(f)
    assert is_pointwise(f, p, rows, mapped.linearised(p, rows)) == (name in POINTWISE)
    if name in POINTWISE:
        torch.testing.assert_close(pointwise.residuals(p, rows), mapped.residuals(p, rows))
        torch.testing.assert_close(pointwise.linearised(p, rows), mapped.linearised(p, rows))
        torch.testing.assert_close(pointwise.hessians(p, rows), mapped.hessians(p, rows))


@pytest.mark.parametrize("f", [cumulated, normalised, with_branch])
def test_models_that_are_not_pointwise_everywhere_are_fitted_as_single_ones(f):
    rng = np.random.default_rng(6)
    true = torch.tensor(np.column_stack([rng.uniform(2, 4, 2), rng.uniform(1.8, 2.2, 2), rng.uniform(0.5, 1, 2)]))
    y = torch.stack([f(torch.tensor(X), *p) for p in true]) + 0.01 * torch.tensor(rng.standard_normal((2, len(X))))
    start = true.clone()
    start[:, 1] = 1.5 if f is with_branch else 1.7  # the branch is another one at the start
    popt, pcov = sanc.curve_fit(f, torch.tensor(X), y, start, restarts=0)
    for row in range(2):
        p, covariance = sanc.curve_fit(f, torch.tensor(X), y[row], popt[row])
        torch.testing.assert_close(popt[row], p, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pcov[row], covariance, rtol=1e-3, atol=1e-9)


def test_rows_that_converge_slowly_end_at_the_limit_of_evaluations(monkeypatch):
    y = np.zeros((2, len(X)))  # steps of Gauss and Newton multiply b by 3/4
    monkeypatch.setattr(row_fits, "_TRIALS_PER_PARAMETER", 10)
    with pytest.warns(OptimizeWarning, match="2 of 2 rows led to no fit"):
        _, _, res = sanc.curve_fit(lambda x, b: x * b**4, X, y, [1.0], full_output=True, restarts=0)
    assert (res.status == 5).all()
    assert (res.nfev == 21).all()
    with pytest.warns(OptimizeWarning):
        _, _, res = sanc.curve_fit(lambda x, b: x * b**4, X, y, [1.0], full_output=True, max_iter=7)
    assert (res.nit == 7).all()


def test_rows_that_wait_at_a_saddle_end_at_the_limit_of_iterations():
    y = np.stack([X, 2.0 * X])
    with pytest.warns(OptimizeWarning, match="2 of 2 rows led to no fit"):
        _, _, res = sanc.curve_fit(lambda x, b: x * b**2, X, y, [0.0], full_output=True, restarts=0, max_iter=0)
    assert (res.status == sanc.Status.ITERATION_LIMIT).all()
    assert (res.nit == 0).all()


def decay_run(true, y):
    problem = FitProblem(
        PointwiseModel(decay), RowData(torch.tensor(X), torch.tensor(y), None, None, True), 2e-16, 1e-8
    )
    return RowRun(
        problem, RunLimits(max_iter=np.inf, max_time=np.inf, chunk_size=100, callback=None, progress=False, seed=0)
    ), torch.tensor(true * 1.4)


def test_a_run_that_was_limited_goes_on_as_if_it_had_not_been():
    true, y = data(12, seed=11)
    whole, start = decay_run(true, y)
    whole.run(start, None, None)
    limited, start = decay_run(true, y)
    limited.run(start, None, None, max_trials=3)
    assert (limited.outputs["status"] == sanc.Status.ITERATION_LIMIT).any()
    limited.run(start[:0], None, None, max_trials=4, resumed=torch.arange(12))
    limited.run(start[:0], None, None, resumed=torch.arange(11))
    assert limited.outputs["status"][11] == sanc.Status.ITERATION_LIMIT  # dropped
    for name, numbers in whole.outputs.items():
        torch.testing.assert_close(limited.outputs[name][:11], numbers[:11], rtol=1e-10, atol=1e-10)


def test_further_fits_of_a_row_end_when_one_of_them_fits_well():
    true, y = data(4, seed=12)
    run, start = decay_run(true, y)
    run.run(start, None, None)
    best = run.outputs["value"].clone()
    run.problem.repeat_rows(torch.tensor([0, 0, 1]))
    starts = torch.tensor(np.stack([true[0] * [20.0, 0.05, -5.0], true[0], true[1] * [20.0, 0.05, -5.0]]))
    run.run(starts, None, None, superseded=row_fits._Superseded(run.problem, 1.1 * best))
    assert run.outputs["status"].tolist()[4:] == [5, 0, 0]
    assert run.outputs["nfev"][4] <= run.outputs["nfev"][5] < run.outputs["nfev"][6]
    torch.testing.assert_close(run.outputs["value"][[5, 6]], best[[0, 1]])


@pytest.mark.parametrize("model", [MappedModel, PointwiseModel])
def test_rows_are_evaluated_in_parts(model, monkeypatch):
    true, y = data(5, seed=6)
    p, ids = torch.tensor(true * 1.1)[[4, 0, 3, 1]], torch.tensor([4, 0, 3, 1])
    weights = torch.linspace(0.0, 2.0, y.size, dtype=torch.float64).reshape(y.shape)
    problem = FitProblem(model(decay), RowData(torch.tensor(X), torch.tensor(y), weights, None, False), 2e-16, 1e-8)
    whole, hessians = problem.evaluate(p, ids), problem.prepare_certificate(problem.evaluate(p, ids), ids).matrix
    for k, row in enumerate(ids):
        curve = torch.func.vmap(lambda *q: decay(torch.tensor(X), *q))(*p[k : k + 1].T)[0]
        r = weights[row] * (curve - torch.tensor(y)[row])
        torch.testing.assert_close(whole.value[k], 0.5 * r @ r)
    monkeypatch.setattr(fit_problems, "_MAX_PART_ENTRIES", 1)
    monkeypatch.setattr(fit_problems, "_MIN_PART_ROWS", 3)
    parts = problem.evaluate(p, ids)
    for name in ("value", "g", "matrix"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(problem.prepare_certificate(parts, ids).matrix, hessians, rtol=1e-12, atol=1e-12)
    p[1, 2] = torch.inf
    value, trials = problem.evaluate_trials(p, ids)
    assert value.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(value[[0, 2, 3]], problem.values(p, ids)[[0, 2, 3]], rtol=0.0, atol=0.0)
    torch.testing.assert_close(trials.value[0], whole.value[0])
