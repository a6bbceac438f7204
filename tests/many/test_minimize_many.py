"""`minimize_many` reaches, in every row, what `minimize` reaches on that row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds

import sanc
import zoo

SMALL = [problem for problem in zoo.PROBLEMS if problem.n <= 6]
SLOW_VALLEYS = {"MARATOSB", "MEYER"}
"""Hundreds of iterations: along a valley of curvature 1e6, and to a minimum at which f has lost all digits."""

OTHER_MINIMUM = {"ERRINROS"}
"""It has several minima, and steps in the whole space lead to another one than those in a Krylov space."""


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def points(rows, dim, seed=0, dtype=torch.float64):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("problem", [p for p in SMALL if p.name not in SLOW_VALLEYS][::7], ids=lambda p: p.name)
def test_rows_end_at_the_known_minima(problem):
    x0 = torch.as_tensor(problem.x0).expand(2, -1).clone()
    res = sanc.minimize_many(problem.fun, x0)
    assert res.success.all()
    assert all(problem.reached(float(value)) is not None for value in res.fun)
    one = sanc.minimize(problem.fun, x0[0])
    assert float(res.fun[0]) == pytest.approx(one.fun, rel=1e-6, abs=1e-9)


def test_rows_with_settings_are_those_of_minimize():
    """Each setting changes the number of iterations, and rows make as many as `minimize` in the whole space."""
    model = sanc.CubicModel(krylov_dim=4, max_resolves=12, first_radius=sanc.method_for().model.first_radius)
    x0 = points(3, 4, seed=1)
    default = sanc.minimize_many(rosenbrock, x0)
    for settings in ({"eta1": 0.6, "eta2": 0.95}, {"sigma_floor": 50.0}):
        res = sanc.minimize_many(rosenbrock, x0, **settings)
        assert res.success.all() and not torch.equal(res.nit, default.nit), settings
        for k, start in enumerate(x0):
            one = sanc.minimize(rosenbrock, start, model=model, **settings)
            assert int(res.nit[k]) == one.nit and torch.allclose(res.x[k], one.x, atol=1e-8), settings


@pytest.mark.slow
@pytest.mark.parametrize("problem", [p for p in zoo.PROBLEMS if p.n <= 60], ids=lambda p: p.name)
def test_rows_agree_with_single_runs_on_the_zoo(problem):
    x0 = torch.as_tensor(problem.x0).expand(2, -1).clone()
    res, one = sanc.minimize_many(problem.fun, x0), sanc.minimize(problem.fun, x0[0])
    reached = problem.reached(float(res.fun[0]))
    assert bool(res.success[0]) >= one.success
    if problem.name in OTHER_MINIMUM:
        values = np.linalg.eigvalsh(zoo.hessian_of(problem.fun, res.x[0].numpy()))
        assert values[0] > 0.0
    else:
        assert reached is not None or problem.reached(one.fun) is None


@pytest.mark.parametrize("exponent", [-545, -500, 300])
def test_rows_are_not_stationary_because_squares_underflow(exponent):
    c = 2.0**exponent
    tolerances = {"tol": 1e-8 * c, "curvature_tol": 1e-4 * c}
    start = torch.full((1, 2), 3.0, dtype=torch.float64)
    res = sanc.minimize_many(lambda x: c * (((x**2 - 1) ** 2).sum() + 0.1 * x[0]), start, **tolerances)
    plain = sanc.minimize_many(lambda x: ((x**2 - 1) ** 2).sum() + 0.1 * x[0], start)
    assert bool(res.success) and torch.allclose(res.x, plain.x, rtol=1e-6)


@pytest.mark.parametrize("saddle", [s for s in zoo.SADDLES if s.n <= 12][::2], ids=lambda s: s.name)
def test_rows_leave_saddles(saddle):
    res = sanc.minimize_many(saddle.fun, torch.as_tensor(saddle.x0).expand(2, -1).clone())
    assert res.success.all()
    for row in range(2):
        matrix = zoo.hessian_of(saddle.fun, res.x[row].numpy())
        assert np.linalg.eigvalsh(matrix)[0] >= -1e-3 * max(1.0, np.abs(matrix).max())


def test_certificates_are_those_of_the_dense_hessian():
    res = sanc.minimize_many(rosenbrock, points(5, 3))
    for row in range(5):
        values = np.linalg.eigvalsh(zoo.hessian_of(rosenbrock, res.x[row].numpy()))
        certificate = res[row].certificate
        assert certificate.second_order
        assert certificate.lambda_min == pytest.approx(values[0], rel=1e-6)
        gradient = zoo.value_and_gradient(rosenbrock, res.x[row].numpy())[1]
        assert certificate.grad_norm == pytest.approx(np.linalg.norm(gradient), abs=1e-12)
        assert res[row].success
        assert res[row].nit == int(res.nit[row])


def test_rows_have_their_own_arguments():
    centres = points(6, 2, seed=1)
    shift = torch.tensor([1.0, -1.0], dtype=torch.float64)
    args = (centres.float(), shift.float(), 1.0)
    res = sanc.minimize_many(
        lambda x, c, s, power: ((x - c - s) ** 2).sum() ** power, torch.zeros(6, 2), args, in_dims=(0, None, None)
    )
    assert res.success.all()
    torch.testing.assert_close(res.x, (centres + shift).float(), atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_others():
    x0 = points(8, 2, seed=2)
    whole = sanc.minimize_many(rosenbrock, x0)
    for chosen in ([3, 7], [5]):
        part = sanc.minimize_many(rosenbrock, x0[chosen])
        torch.testing.assert_close(part.x, whole.x[chosen], rtol=1e-9, atol=1e-9)
        assert part.nit.tolist() == whole.nit[chosen].tolist()
    chunks = sanc.minimize_many(rosenbrock, x0, chunk_size=3)
    torch.testing.assert_close(chunks.x, whole.x, rtol=1e-9, atol=1e-9)
    assert chunks.nit.tolist() == whole.nit.tolist()


def test_a_failed_row_touches_no_other():
    def fun(x, kind):
        bad = torch.where(kind == 1, torch.nan, 0.0) + torch.where(kind == 2, -(x**3).sum(), 0.0)
        return rosenbrock(x) * (kind != 2) + bad

    x0, kind = points(6, 2, seed=3), torch.tensor([0, 1, 0, 2, 0, 0])
    res = sanc.minimize_many(fun, x0, (kind,))
    alone = sanc.minimize_many(rosenbrock, x0)
    assert res.status.tolist()[1] == sanc.Status.NOT_FINITE
    assert res.status.tolist()[3] == sanc.Status.UNBOUNDED
    healthy = [0, 2, 4, 5]
    assert res.success[healthy].all()
    torch.testing.assert_close(res.x[healthy], alone.x[healthy])
    assert "not finite" in repr(res)


def test_functions_of_all_rows():
    centres = points(7, 3, seed=4)

    def all_rows(x, c):
        return ((x**2 - 1) ** 2).sum(1) + 0.1 * ((x - c) ** 2).sum(1)

    res = sanc.minimize_many(all_rows, centres, (centres,), vectorized=True)
    single = sanc.minimize_many(lambda x, c: ((x**2 - 1) ** 2).sum() + 0.1 * ((x - c) ** 2).sum(), centres, (centres,))
    torch.testing.assert_close(res.x, single.x)
    assert res.nit.tolist() == single.nit.tolist()


def test_trees_shapes_and_arrays():
    x0 = {"a": points(4, 2), "b": [points(4, 6, seed=5).reshape(4, 2, 3)]}

    def fun(x):
        return ((x["a"] - 1) ** 2).sum() + ((x["b"][0] - 2) ** 4).sum() + ((x["b"][0] - 2) ** 2).sum()

    res = sanc.minimize_many(fun, x0)
    assert res.success.all()
    torch.testing.assert_close(res.x["a"], torch.ones(4, 2, dtype=torch.float64))
    torch.testing.assert_close(res.x["b"][0], torch.full((4, 2, 3), 2.0, dtype=torch.float64))
    assert res[1].x["b"][0].shape == (2, 3)
    arrays = sanc.minimize_many(lambda x: ((x - 3) ** 2).sum(), np.zeros((3, 2, 2)))
    assert isinstance(arrays.x, np.ndarray)
    np.testing.assert_allclose(arrays.x, 3.0)
    assert isinstance(arrays.fun, np.ndarray)


def test_float32_rows_end_successfully():
    res = sanc.minimize_many(rosenbrock, points(50, 4, seed=6, dtype=torch.float32))
    assert res.success.all()
    assert res.x.dtype == torch.float32


def test_bounds_as_in_minimize():
    bounds = Bounds([-1.5, -0.5, -1.5], [0.8, 0.5, 0.8])
    x0 = points(8, 3, seed=7).clamp(torch.tensor(bounds.lb), torch.tensor(bounds.ub))
    res = sanc.minimize_many(rosenbrock, x0, bounds=bounds)
    assert res.success.all()
    lower, upper = torch.tensor(bounds.lb), torch.tensor(bounds.ub)
    assert ((res.x >= lower) & (res.x <= upper)).all()
    for row in range(8):
        one = sanc.minimize(rosenbrock, x0[row], bounds=bounds)
        assert float(res.fun[row]) == pytest.approx(one.fun, rel=1e-6)
        assert res.active[row].tolist() == one.active.tolist()
        torch.testing.assert_close(res.multipliers[row], one.multipliers, atol=1e-5, rtol=1e-5)
    shifted = sanc.minimize_many(lambda x: ((x - 5) ** 2).sum(), x0, bounds=(x0 - 1.0, x0 + 1.0))
    torch.testing.assert_close(shifted.x, x0 + 1.0)


def test_bounds_are_never_left():
    def fun(x):
        inside = ((x >= 0.0) & (x <= 1.0)).all()
        return torch.where(inside, ((x - torch.tensor([5.0, -1.0, 0.3])) ** 2).sum() + (x**3).sum(), -1e6)

    res = sanc.minimize_many(fun, torch.rand(30, 3, dtype=torch.float64), bounds=[(0, 1)] * 3)
    assert res.success.all()
    assert (res.fun > -1.0).all()
    assert (res.x[:, 0] == 1.0).all()
    assert (res.x[:, 1] == 0.0).all()


def test_indefinite_quadratics_on_boxes_end_at_second_order_points():
    generator = torch.Generator().manual_seed(8)
    matrices = torch.randn(40, 5, 5, generator=generator, dtype=torch.float64)
    matrices = matrices + matrices.mT
    linear = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    res = sanc.minimize_many(
        lambda x, a, b: 0.5 * x @ a @ x + b @ x, torch.zeros(40, 5, dtype=torch.float64), (matrices, linear),
        bounds=[(-1, 1)] * 5,
    )  # fmt: skip
    assert res.success.all()
    for row in range(40):
        x, a = res.x[row], matrices[row]
        g = a @ x + linear[row]
        free = (x > -1) & (x < 1)
        assert (g[free].abs() <= 1e-6).all()
        assert (g[x == -1] >= -1e-7).all()
        assert (g[x == 1] <= 1e-7).all()
        if free.any():
            assert torch.linalg.eigvalsh(a[free][:, free])[0] >= -1e-6


def test_many_starts_find_the_minima_of_one_problem():
    def himmelblau(x):
        return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2

    res = sanc.minimize_many(himmelblau, starts=64, bounds=[(-5, 5), (-5, 5)])
    known = [(3, 2), (-2.805118, 3.131312), (-3.779310, -3.283186), (3.584428, -1.848126)]
    minima = res.minima()
    assert len(minima) == 4
    for minimum in minima:
        assert min(np.hypot(*(minimum.x.numpy() - point)) for point in np.array(known)) < 1e-5
        assert minimum.certificate.second_order
        assert int(minimum.rows[0]) in range(64)
    assert sum(len(minimum.rows) for minimum in minima) == 64
    assert res.best.fun == pytest.approx(0.0, abs=1e-12)
    given = sanc.minimize_many(himmelblau, starts=torch.tensor([[3.0, 2.5], [-3.0, 3.0]], dtype=torch.float64))
    assert len(given.minima()) == 2


def test_limits_callbacks_and_progress(capsys):
    x0 = points(30, 4, seed=9)
    limited = sanc.minimize_many(rosenbrock, x0, max_iter=3)
    assert (limited.status == sanc.Status.ITERATION_LIMIT).all()
    assert (limited.nit == 3).all()
    seen = []
    full = sanc.minimize_many(rosenbrock, x0, callback=seen.append, chunk_size=10, progress=True)
    assert full.success.all()
    assert seen[0].pending == 20
    assert seen[-1].ended + seen[-1].active == 30
    assert max(report.active for report in seen) <= 10
    assert "30 of 30 rows ended" in capsys.readouterr().err
    stopped = sanc.minimize_many(rosenbrock, x0, callback=lambda report: report.round >= 2, chunk_size=10)
    assert (stopped.status == sanc.Status.CALLBACK).all()
    torch.testing.assert_close(stopped.x[15:], x0[15:])
    timed = sanc.minimize_many(rosenbrock, x0, max_time=1e-9)
    assert (timed.status == sanc.Status.TIME_LIMIT).all()
    expected = torch.stack([rosenbrock(x) for x in x0])
    torch.testing.assert_close(timed.fun, expected)


def branches(x):
    return x.sum() if x[0] > 0 else (x**2).sum()


BAD = {
    "fun = 3": (3, torch.zeros(2, 2), {}),
    "x0 has shape (2,)": (rosenbrock, torch.zeros(2), {}),
    "rows of different length": (rosenbrock, [[1.0, 2.0], [1.0]], {}),
    "NaN or infinity": (rosenbrock, torch.tensor([[1.0, torch.nan]]), {}),
    "x0 is empty": (rosenbrock, torch.zeros(0, 2), {}),
    "cannot be mapped over rows": (branches, torch.zeros(2, 2), {}),
    "a scalar for each row": (lambda x: x, torch.zeros(2, 2), {}),
    "fun mixes rows": (lambda x: x.sum(1) ** 2 + x.mean() ** 2, torch.ones(3, 2), {"vectorized": True}),
    "args[0] has shape (5,)": (lambda x, a: (x**2).sum() * a, torch.zeros(3, 2), {"args": (torch.ones(5),)}),
    "in_dims has 2": (rosenbrock, torch.zeros(3, 2), {"args": (1.0,), "in_dims": (0, None)}),
    "in_dims[0] = 1": (rosenbrock, torch.zeros(3, 2), {"args": (torch.ones(3),), "in_dims": 1}),
    "tol = -1": (rosenbrock, torch.zeros(3, 2), {"tol": -1}),
    "max_iter = -2": (rosenbrock, torch.zeros(3, 2), {"max_iter": -2}),
    "max_time = 0": (rosenbrock, torch.zeros(3, 2), {"max_time": 0}),
    "chunk_size = 0": (rosenbrock, torch.zeros(3, 2), {"chunk_size": 0}),
    "callback = 1": (rosenbrock, torch.zeros(3, 2), {"callback": 1}),
    "callback(progress)": (rosenbrock, torch.zeros(3, 2), {"callback": lambda: 0}),
    "bounds[0]": (rosenbrock, torch.zeros(3, 2), {"bounds": [(1, 0), (0, 1)]}),
    "bounds of row 1": (rosenbrock, torch.zeros(3, 2), {"bounds": (2 * torch.eye(3, 2).roll(1, 0), torch.ones(3, 2))}),
    "x0 and starts": (rosenbrock, torch.zeros(3, 2), {"starts": 4}),
    "needs finite bounds": (rosenbrock, None, {"starts": 4}),
    "starts = 0": (rosenbrock, None, {"starts": 0, "bounds": [(0, 1)]}),
    "x0 = None": (rosenbrock, None, {}),
    "maxiter = 3 is not an argument of minimize_many: pass max_iter": (rosenbrock, torch.zeros(3, 2), {"maxiter": 3}),
    "max_nfev = 3 is not an argument of minimize_many: pass max_iter": (rosenbrock, torch.zeros(3, 2), {"max_nfev": 3}),
    "etta1 = 0.2 is not an argument of minimize_many: did you mean 'eta1'": (
        rosenbrock, torch.zeros(3, 2), {"etta1": 0.2}
    ),
    "eta1 = 2.0": (rosenbrock, torch.zeros(3, 2), {"eta1": 2.0}),
    "vectorized = 2": (rosenbrock, torch.zeros(3, 2), {"vectorized": 2}),
    "cannot be differentiated twice": (lambda x: torch.special.zeta(x.sum() + 2, x.sum() + 3), torch.ones(2, 2), {}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named_with_a_remedy(message):
    fun, x0, options = BAD[message]
    with pytest.raises((sanc.ArgumentError, sanc.ArgumentTypeError)) as error:
        sanc.minimize_many(fun, x0, **options)
    assert message in str(error.value)
    assert ":" in str(error.value)


def test_vectorized_functions_in_float32_are_not_mistaken_for_ones_that_mix_rows():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a, x = (torch.randn(size, generator=generator) for size in ((8, 40), (6, 8)))
        res = sanc.minimize_many(lambda x, a=a: torch.tanh(x @ a).sum(1), x, vectorized=True, max_iter=1)
        assert len(res) == 6
