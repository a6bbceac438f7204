"""Residuals of networks: Jacobians, models and steps against dense matrices, and differential equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, hessian

import sanc
from sanc.leastsquares import matrices, residuals
from sanc.leastsquares.matrices import JacobianMatrix
from sanc.leastsquares.networks import NetworkResiduals
from sanc.minimisation import Status

X = torch.linspace(0.0, 1.0, 15, dtype=torch.float64)[:, None]


def network(width=4, outputs=1, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, outputs)
    return torch.nn.Sequential(*layers).double()


def decay(u, x):
    return grad(u)(x)[0] + 2.0 * u(x)


def start_value(u, x):
    return u(x) - 1.0


def decay_problem(width=4, **options):
    net = network(width)
    return net, NetworkResiduals(net, [(decay, X), (start_value, X[:1], 9.0)], **options)


def by_hand(net, parameters):
    """Return the residuals of `decay_problem` from a loop over points."""
    u = lambda x: functional_call(net, parameters, (x,))[0]
    inner = torch.stack([grad(u)(x)[0] + 2.0 * u(x) for x in X]) / math.sqrt(len(X))
    return torch.cat([inner, 3.0 * (u(X[0]) - 1.0).reshape(1)])


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_residuals_and_jacobian_are_those_of_a_loop_over_points(chunk_size):
    net, fun = decay_problem(chunk_size=chunk_size)
    assert torch.allclose(fun(fun.start), by_hand(net, fun.start))
    flat, names = torch.cat([p.reshape(-1) for p in fun.start.values()]), list(fun.start)
    sizes, shapes = [p.numel() for p in fun.start.values()], [p.shape for p in fun.start.values()]

    def build(x):
        return {n: part.reshape(s) for n, part, s in zip(names, x.split(sizes), shapes, strict=True)}

    expected = torch.autograd.functional.jacobian(lambda x: by_hand(net, build(x)), flat)
    assert torch.allclose(fun.jacobian(fun.start), expected)


def test_vectors_of_residuals_observations_and_frozen_parameters():
    net = network(outputs=2)
    net[0].bias.requires_grad_(False)
    target = torch.cat([torch.sin(X), torch.cos(X)], 1)
    fun = NetworkResiduals(net, [(lambda u, x, y: u(x) - y, (X, target))])
    assert "0.bias" not in fun.start
    assert torch.allclose(fun(fun.start), ((net(X) - target) / math.sqrt(len(X))).reshape(-1))
    jacobian = fun.jacobian(fun.start)
    assert jacobian.shape == (30, sum(p.numel() for p in fun.start.values()))
    v = torch.randn(jacobian.shape[1], dtype=torch.float64)
    step = dict(zip(fun.start, v.split([p.numel() for p in fun.start.values()]), strict=True))
    moved = [{n: p + h * step[n].reshape(p.shape) for n, p in fun.start.items()} for h in (1e-6, -1e-6)]
    assert torch.allclose(jacobian @ v, (fun(moved[0]) - fun(moved[1])) / 2e-6, atol=1e-8)


@pytest.mark.parametrize("rows", [5, 12])  # fewer and more than the seven columns
def test_the_space_of_the_smaller_side_is_that_of_the_dense_matrix(rows):
    rng = np.random.default_rng(rows)
    j, r, scale, weights = (
        rng.standard_normal((rows, 7)),
        rng.standard_normal(rows),
        2.0 ** rng.integers(-2, 3, 7),
        None,
    )
    for weights in (None, rng.random(rows)):
        root = np.ones(rows) if weights is None else np.sqrt(weights)
        a = 2.0 * root[:, None] * j * scale
        space = JacobianMatrix(torch.from_numpy(j)).decompose(scale, None, weights, 4.0)
        basis = space.basis
        assert basis.shape == (min(rows, 7), 7) and np.allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-8)
        assert np.allclose(basis.T @ np.diag(space.values) @ basis, a.T @ a)
        assert np.allclose(basis.T @ space.project(r), a.T @ r)
        assert np.allclose(basis.T @ space.coordinates(a.T @ r), a.T @ r)
        c = rng.standard_normal(len(basis))
        assert np.allclose(space.combine(c)[0], c @ basis)
    places = np.array([1, 4])
    part = JacobianMatrix(torch.from_numpy(j)).decompose(scale, places, None, 1.0)
    assert np.allclose(part.values, np.linalg.eigvalsh((j * scale)[:, places].T @ (j * scale)[:, places]))
    operator = JacobianMatrix(torch.from_numpy(j))
    assert np.allclose(operator @ np.ones(7), j.sum(1)) and np.allclose(operator.T @ r, j.T @ r)
    assert np.allclose(operator.column_norms(), np.linalg.norm(j, axis=0))


@pytest.mark.parametrize("width", [2, 12])  # more and fewer residuals than parameters
def test_an_ordinary_differential_equation_is_solved(width):
    net, fun = decay_problem(width)
    before = [p.detach().clone() for p in net.parameters()]
    res = sanc.least_squares(fun, fun.start, max_iter=25, certify=False)
    assert all(torch.equal(p, first) for p, first in zip(net.parameters(), before, strict=True))
    fun.load(res.x)
    with torch.no_grad():
        error = float((net(X) - torch.exp(-2.0 * X)).abs().max())
    assert res.cost < 1e-4 and error < (1e-3 if width == 12 else 2e-2)
    assert isinstance(res.jac, JacobianMatrix) and res.jac.shape == (16, 3 * width + 1)
    assert torch.allclose(torch.as_tensor(res.grad), res.jac.matrix.T @ res.fun) and res.nhev == 0


def test_a_noisy_fit_ends_at_a_second_order_point_as_scipys_does():
    net = network(2, seed=3)
    y = torch.sin(3.0 * X) + 0.1 * torch.from_numpy(np.random.default_rng(0).standard_normal((15, 1)))
    fun = NetworkResiduals(net, [(lambda u, x, y: u(x) - y[0], (X, y))])
    res = sanc.least_squares(fun, fun.start)
    assert res.status is Status.SECOND_ORDER and res.cost > 1e-3
    plain = sanc.least_squares(lambda p: fun(p), res.x)  # the model without corrections
    assert plain.success and plain.nit <= 2 and np.isclose(plain.cost, res.cost, rtol=1e-9)


def test_the_correction_saves_iterations(monkeypatch):
    from sanc.leastsquares import network_model

    _, fun = decay_problem(8)
    costs = []
    for limit in (0.75, 0.0):
        monkeypatch.setattr(network_model, "MAX_CORRECTION", limit)
        costs.append(sanc.least_squares(fun, fun.start, max_iter=15, certify=False).cost)
    assert costs[0] < 0.1 * costs[1]


def test_the_correction_removes_the_second_order_term():
    """With an invertible J and μ = 0, r(x + s + a) is of third order in s."""
    _, fun = decay_problem(5)
    recorded = []
    from sanc.leastsquares.network_model import NetworkSubspace

    original = NetworkSubspace._correction

    def correction(self, x, s, step):
        u = original(self, x, s, step)
        a = None if u is None else self.krylov.combine(u)[0]
        recorded.append((self, np.array(x), s, a, step.multiplier))
        return u

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkSubspace, "_correction", correction)
        sanc.least_squares(fun, fun.start, max_iter=3, certify=False)
    subspace, x, s, a, mu = next(entry for entry in recorded if entry[3] is not None)
    oracle, j, scale = subspace.oracle, subspace.jacobian.matrix.numpy(), subspace.oracle.scale
    h = 0.1
    second = (oracle.residuals((x + h * s) * scale) - subspace.evaluation.r - h * (j @ (s * scale))) * 2.0 / h**2
    columns = j * scale
    expected = -0.5 * np.linalg.solve(columns.T @ columns + mu * np.eye(len(s)), columns.T @ second)
    assert np.allclose(a, expected, rtol=1e-5, atol=1e-8 * np.linalg.norm(expected))


@pytest.mark.parametrize("options", [{"loss": "soft_l1"}, {"bounds": "box"}])
def test_robust_losses_and_bounds(options):
    _, fun = decay_problem(3)
    if "bounds" in options:
        sides = [{name: torch.full_like(p, end) for name, p in fun.start.items()} for end in (-1.0, 1.0)]
        options = {"bounds": tuple(sides)}
    res = sanc.least_squares(fun, fun.start, max_iter=15, certify=False, **options)
    assert res.cost < 0.1 * 0.5 * float(fun(fun.start).square().sum())
    assert all(float(p.abs().max()) <= 1.0 for p in res.x.values()) or "bounds" not in options


def test_large_jacobians_are_products(monkeypatch):
    _, fun = decay_problem(4)
    stored = sanc.least_squares(fun, fun.start, max_iter=15, certify=False)
    monkeypatch.setattr(residuals, "fits_in_memory", lambda m, n: False)
    monkeypatch.setattr(residuals, "MAX_DENSE_VARIABLES", 0)
    free = sanc.least_squares(fun, fun.start, max_iter=15, certify=False)
    assert not isinstance(free.jac, JacobianMatrix) and free.nhev > 0
    assert free.cost < 1e-2 and stored.cost < 1e-4
    assert matrices.fits_in_memory(10_000, 5_000) and not matrices.fits_in_memory(100_000, 10_000)


def test_bad_arguments_are_named():
    net = network()
    wrong = sanc.errors.ArgumentError
    for arguments, message in (
        ((net, []), "terms = "),
        ((net, [(decay,)]), r"terms\[0\] = .*is no term"),
        ((net, [(decay, torch.zeros(0, 1))]), r"terms\[0\] has the points"),
        ((net, [(decay, (X, X[:3]))]), r"terms\[0\] has the points"),
        ((net, [(decay, X, -1.0)]), r"terms\[0\]\[2\] = -1.0"),
        ((net, [(decay, X)], 0), "chunk_size = 0"),
        ((decay, [(decay, X)]), "module = "),
        ((torch.nn.Tanh(), [(decay, X)]), "module has no parameter"),
    ):
        with pytest.raises((wrong, sanc.errors.ArgumentTypeError), match=message):
            NetworkResiduals(*arguments)
    fun = NetworkResiduals(net, [(decay, X)])
    with pytest.raises(wrong, match=r"x0 = .*residuals\.start"):
        sanc.least_squares(fun, {"a": torch.zeros(3).double()})
    with pytest.raises(wrong, match=r"x0\['0\.bias'\] has shape"):
        fun(fun.start | {"0.bias": torch.zeros(2).double()})
    with pytest.raises(sanc.errors.ArgumentTypeError, match=r"function of terms returned 1\.0"):
        NetworkResiduals(net, [(lambda u, x: 1.0, X)])(fun.start)


@pytest.mark.slow
def test_poissons_equation_is_solved_to_five_digits():
    torch.manual_seed(0)
    layers = torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    net, points = torch.nn.Sequential(*layers).double(), torch.rand(400, 2).double()
    exact = lambda x: torch.sin(math.pi * x[..., 0]) * torch.sin(math.pi * x[..., 1])
    t = torch.rand(20).double()
    sides = [torch.stack(pair, 1) for end in (0 * t, 0 * t + 1) for pair in ((t, end), (end, t))]
    poisson = lambda u, x: hessian(u)(x).trace() + 2.0 * math.pi**2 * exact(x)
    fun = NetworkResiduals(net, [(poisson, points), (lambda u, x: u(x), torch.cat(sides), 100.0)])
    res = sanc.least_squares(fun, fun.start, max_iter=120, certify=False)
    fun.load(res.x)
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 31).double()] * 2)
    assert float((net(grid)[:, 0].detach() - exact(grid)).norm() / exact(grid).norm()) < 1e-5
