"""Minima without a reliable derivative: singular ones, kinks, parameters without a graph, and large errors."""

from __future__ import annotations

import math
import re

import pytest
import torch

import sanc
from ridge import THETA, leaf, ridge_argmin, ridge_minimum
from tensors import normal

D = torch.float64


SINGULAR = {
    "a valley": lambda x, t: (x[0] + x[1] - t[0]) ** 2 + x[2] ** 2,
    "a free variable": lambda x, t: (x[:2] - t[:2]).square().sum() + 0 * x[2],
    "a degenerate minimum": lambda x, t: ((x - t) ** 4).sum(),
    "degenerate in one direction": lambda x, t: ((x - t)[:2] ** 2).sum() + (x - t)[2] ** 4,
    "degenerate, of order six": lambda x, t: ((x - t) ** 6).sum(),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_minima_raise(name):
    with pytest.raises(sanc.SingularMinimumError, match=r"λ_min = .* λ_min ≥ .* with probability .* ‖∇f‖ = "):
        sanc.argmin(SINGULAR[name], torch.tensor([2.0, -1.0, 3.0], dtype=D), leaf())


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_minima_warn(name):
    with pytest.warns(RuntimeWarning, match="derivative of the minimum may be wrong"):
        x, solution = sanc.argmin(
            SINGULAR[name], torch.tensor([2.0, -1.0, 3.0], dtype=D), leaf(), on_singular="warn", details=True
        )
    assert solution.problem and x.requires_grad


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, t: x.abs().sum() + 0.5 * (x - t + 1).square().sum(),  # the derivative is 0, that of torch 1
        lambda x, t: torch.nn.functional.huber_loss(x, -t, reduction="sum") + 0.5 * (x - 1).square().sum(),
    ],
)
def test_kinks_at_the_minimum_raise(fun):
    """There torch's Hessian is that of one side, of f or of its gradient."""
    with pytest.raises(sanc.SingularMinimumError, match=r"entry \d of ∇f changes at the rate"):
        sanc.argmin(fun, torch.zeros(3, dtype=D), leaf())


@pytest.mark.parametrize("on_singular", ["raise", "pinv"])
@pytest.mark.parametrize("size", [5, 50, 2000])
def test_a_kink_along_one_of_many_variables_raises(size, on_singular):
    """At t = 1 the derivative of x_0 is 1 from the left, and 1/5 from the right."""

    def fun(x, t):
        return 0.5 * ((x - t) ** 2).sum() + 2 * torch.relu(x[0] - 1) ** 2

    for seed in range(3):
        t = torch.tensor(1.0, dtype=D, requires_grad=True)
        with pytest.raises(sanc.SingularMinimumError, match="entry 0 of ∇f changes at the rate"):
            sanc.argmin(fun, torch.zeros(size, dtype=D), t, seed=seed, on_singular=on_singular)
    for value, rate in ((0.9, 1.0), (1.1, 0.2)):
        t = torch.tensor(value, dtype=D, requires_grad=True)
        x = sanc.argmin(fun, torch.zeros(size, dtype=D), t, on_singular=on_singular)
        assert torch.autograd.grad(x[0], t)[0].item() == pytest.approx(rate)


def test_a_kink_along_no_coordinate_raises_in_either_precision():
    for dtype in (D, torch.float32):
        a = normal(40).to(dtype) / 40**0.5
        t = a.clone().requires_grad_()
        shift = (a @ a).detach()
        with pytest.raises(sanc.SingularMinimumError, match="of ∇f changes at the rate"):
            sanc.argmin(
                lambda x, t, a=a, shift=shift: 0.5 * ((x - t) ** 2).sum() + 2 * torch.relu(a @ x - shift) ** 2,
                torch.zeros(40, dtype=dtype), t,
            )  # fmt: skip


def test_smooth_functions_have_no_kink():
    """Large third derivatives, rates that cancel, squared hinges of rows, and a Hessian that is not smooth."""
    X, y = normal(300, 8, seed=1), normal(300, seed=2).sign()
    smooth = {
        "narrow": lambda x, t: (torch.exp(30 * (x - t)) - 30 * x).sum(),
        "cancelling": lambda x, t: (x.sum() - t.sum()) ** 2 + 1e-3 * ((x - t) ** 4).sum() + 1e-6 * (x**2).sum(),
        "hinges": lambda x, t: torch.relu(1 - y * (X @ x)).square().mean() + 0.1 * ((x - t) ** 2).sum(),
        "power": lambda x, t: ((x - t).abs() ** 2.6).sum() + ((x - t) ** 2).sum(),
    }
    for fun in smooth.values():
        t = normal(8, seed=4).requires_grad_()
        sanc.argmin(fun, t.detach() + 0.01, t)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_a_minimum_is_singular_in_any_units(scale):
    regular = sanc.argmin(lambda x, t: scale * (x - t).square().sum(), torch.zeros(3, dtype=D), leaf())
    assert torch.allclose(regular, torch.ones(3, dtype=D), rtol=1e-6)
    with pytest.raises(sanc.SingularMinimumError):
        sanc.argmin(lambda x, t: scale * ((x - t) ** 4).sum(), torch.zeros(3, dtype=D), leaf())


def test_a_weak_penalty_makes_it_regular():
    t = leaf()
    x, solution = sanc.argmin(
        lambda x, t: (x[0] + x[1] - t[0]) ** 2 + x[2] ** 2 + 1e-6 * (x**2).sum(),
        torch.zeros(3, dtype=D),
        t,
        details=True,
    )
    (g,) = torch.autograd.grad(x.sum(), t)
    assert float(g[0]) == pytest.approx(1.0, rel=1e-5)
    assert 0 < solution.certificate.lower_bound <= solution.certificate.lambda_min == pytest.approx(2e-6, rel=1e-6)


def test_the_pseudo_inverse_moves_along_the_normal_of_a_valley():
    t = leaf()
    x, solution = sanc.argmin(SINGULAR["a valley"], torch.zeros(3, dtype=D), t, on_singular="pinv", details=True)
    (g,) = torch.autograd.grad(x @ torch.tensor([1.0, 3.0, 5.0], dtype=D), t)
    assert g.tolist() == pytest.approx([2.0, 0.0, 0.0])  # dx = (1/2, 1/2, 0)
    assert solution.error < 1e-6
    regular = ridge_argmin(THETA.clone().requires_grad_(), on_singular="pinv")
    assert torch.allclose(regular, ridge_minimum(THETA))


def test_the_pseudo_inverse_raises_at_a_degenerate_minimum():
    """x = ∛t has no derivative at t = 0."""
    t = torch.tensor(0.0, dtype=D, requires_grad=True)
    with pytest.raises(sanc.SingularMinimumError, match="Hessian changes by"):
        sanc.argmin(lambda x, t: (x**4 / 4 - t * x).sum(), torch.ones(1, dtype=D), t, on_singular="pinv")


def test_the_pseudo_inverse_accepts_negative_curvature_below_its_cutoff():
    """A run leaves curvature of the order of its gradient along a curved valley, of either sign."""

    def factors(x, t):
        return ((x["a"] @ x["b"] - t * target) ** 2).sum() + 0.1 * ((x["a"] ** 2).sum() + (x["b"] ** 2).sum())

    target = normal(4, 2, seed=1) @ normal(2, 3, seed=2)
    smallest = []
    for seed in range(3):
        start = {"a": normal(4, 2, seed=10 + seed), "b": normal(2, 3, seed=50 + seed)}
        t = torch.tensor(1.0, dtype=D, requires_grad=True)
        x, solution = sanc.argmin(factors, start, t, on_singular="pinv", details=True)
        smallest.append(solution.certificate.lambda_min)
        # The products a·b do not depend on the point of the valley: singular values σ of the target give tσ − 0.1.
        (g,) = torch.autograd.grad((x["a"] @ x["b"]).square().sum() / 2, t)
        values = torch.linalg.svdvals(target)[:2]
        assert float(g) == pytest.approx(float((values * (values - 0.1)).sum()), rel=1e-5)
    assert min(smallest) < 0.0
    with pytest.raises(sanc.SingularMinimumError, match="negative curvature"):
        sanc.argmin(
            lambda x, t: (x[0] - t) ** 2 - 1e-4 * x[1] ** 2, torch.zeros(2, dtype=D), t, on_singular="pinv",
            curvature_tol=1.0,
        )  # fmt: skip


def test_a_minimum_without_a_finite_hessian_raises_at_the_latest_in_the_backward_pass():
    t = torch.tensor(0.1, dtype=D, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="λ_min is unknown, as a Hessian product is not finite"):
        x = sanc.argmin(
            lambda x, t: x.norm() + 0.5 * ((x - t) ** 2).sum(), torch.zeros(3, dtype=D), t, on_singular="warn"
        )
    with pytest.raises(sanc.SingularMinimumError, match="a Hessian product at it is not finite"):
        torch.autograd.grad(x.sum(), t)


def test_the_error_of_a_derivative_contains_cancellation():
    """Heat in a chain: the derivative of a far node is smaller than the error of v, and its relative error is large."""
    size = 150
    t = torch.tensor(1.0, dtype=D, requires_grad=True)

    def fun(x, t):
        return 0.025 * (x**2).sum() + 0.5 * ((x[1:] - x[:-1]) ** 2).sum() - t * x[0]

    x, solution = sanc.argmin(fun, torch.zeros(size, dtype=D), t, details=True, max_products=140)
    H = torch.autograd.functional.hessian(lambda x: fun(x, t.detach()), torch.zeros(size, dtype=D))
    exact = torch.linalg.inv(H)[0]
    for node in (0, 10, 40, 70, 100, 140):
        (g,) = torch.autograd.grad(x[node], t, retain_graph=True)
        found, error = solution.derivatives[-1], abs(float(g - exact[node]))
        assert error <= found.absolute_error <= 1e-5
        assert found.error == (found.absolute_error / abs(float(g)) if g else math.inf)
    assert found.solution_error <= 1e-6 and found.error > 1.0  # of the last node
    torch.autograd.grad(0.0 * x[0], t)
    assert solution.error == 0.0  # the derivative is exactly zero


@pytest.mark.parametrize("rank", [1, 20])
def test_the_norm_of_the_mixed_derivative_is_estimated(rank):
    """‖M‖ of a matrix of low rank is far above the length of its product with most vectors."""
    M, diagonal = normal(40, rank, seed=1) @ normal(rank, 500, seed=2), torch.linspace(1, 30, 40, dtype=D)
    v = normal(40, seed=4) / diagonal

    def last_derivative(**options):
        t = normal(500, seed=3).requires_grad_()
        x, solution = sanc.argmin(
            lambda x, t: 0.5 * (diagonal * x**2).sum() - x @ (M @ t),
            torch.zeros(40, dtype=D), t, details=True, **options,
        )  # fmt: skip
        torch.autograd.grad(x @ normal(40, seed=4), t)
        return solution.derivatives[-1]

    by_products = last_derivative(max_products=39)
    estimate = by_products.absolute_error / (by_products.solution_error * float(v.norm()))
    norm = float(torch.linalg.matrix_norm(M, 2))
    assert 0.7 * norm <= estimate <= norm * (1 + 1e-9)
    by_eigenpairs = last_derivative()  # these give a smaller bound, by ‖H⁻¹M‖
    norm = float(torch.linalg.matrix_norm(M / diagonal[:, None], 2))
    assert 0.5 * norm * by_eigenpairs.residual <= by_eigenpairs.absolute_error
    assert by_eigenpairs.absolute_error <= norm * by_eigenpairs.residual * (1 + 1e-9)


def test_the_error_of_a_derivative_that_weak_directions_dominate():
    """Directions in which θ moves ∇f most are those in which x hardly moves: a bound by ‖M‖ is far too large."""
    rotation, scales = torch.linalg.qr(normal(20, 20, seed=1)).Q, torch.logspace(0, 4, 20, dtype=D)
    t = normal(20, seed=2).requires_grad_()
    x, solution = sanc.argmin(
        lambda x, t: 0.5 * ((scales * (rotation @ (x - t))) ** 2).sum(), torch.zeros(20, dtype=D), t, details=True
    )
    (g,) = torch.autograd.grad(x @ rotation[0], t)
    assert float((g - rotation[0]).norm()) <= 2 * solution.error <= 1e-6


def test_a_run_that_does_not_converge_raises():
    def fun(x, t):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (t[:2] - x[:-1]) ** 2).sum()

    for parameters in (leaf(), leaf().detach()):
        for how in ("raise", "pinv"):
            with pytest.raises(
                sanc.SingularMinimumError, match=r"did not converge.*limit.*λ_min = .* λ_min ≥ .*‖∇f‖ = "
            ):
                sanc.argmin(fun, torch.zeros(3, dtype=D), parameters, max_iter=2, on_singular=how)
    with pytest.warns(RuntimeWarning, match="did not converge|Newton step"):
        sanc.argmin(fun, torch.zeros(3, dtype=D), leaf(), max_iter=2, on_singular="warn")


def test_too_few_products_raise():
    t = torch.tensor(0.0, dtype=D, requires_grad=True)
    scales = torch.logspace(-3, 3, 120, dtype=D)

    def fun(x, t):
        return 0.5 * (scales * x**2).sum() - (1 + t) * x.sum()

    with pytest.raises(sanc.SingularMinimumError, match=r"not bounded away from zero.*after 5 products"):
        sanc.argmin(fun, 1 / scales, t, max_products=5)
    x, solution = sanc.argmin(fun, 1 / scales, t, details=True)
    (g,) = torch.autograd.grad(x[0], t)
    assert float(g) == pytest.approx(1e3, rel=1e-6) and solution.certificate.lower_bound > 0


def test_the_pseudo_inverse_reports_a_derivative_with_a_large_error():
    """Three products do not solve a singular system with a spectrum from 1 to 1e4."""
    values = torch.cat([torch.zeros(1, dtype=D), torch.logspace(0, 4, 39, dtype=D)])
    t = normal(40, seed=7)
    t[0] = 0.0
    t = t.requires_grad_()
    x = sanc.argmin(
        lambda x, t: 0.5 * (values * x**2).sum() - t @ x,
        torch.zeros(40, dtype=D),
        t,
        on_singular="pinv",
        max_products=3,
    )
    with pytest.raises(sanc.SingularMinimumError, match="estimated relative error"):
        torch.autograd.grad(x.sum(), t)


LOST_GRAPHS = {
    "detached": lambda x, t: ((x - t.detach()) ** 2).sum(),
    "its value": lambda x, t: ((x - t.item()) ** 2).sum(),
    "an array": lambda x, t: ((x - torch.from_numpy(t.detach().numpy())) ** 2).sum(),
    "one of two": lambda x, t: ((x - t) * (x - t.detach())).sum(),
    "a twentieth": lambda x, t: ((x - 0.05 * t.detach() - t) ** 2).sum(),
    "a thousandth": lambda x, t: ((x - 0.001 * t.detach() - t) ** 2).sum(),
}


@pytest.mark.parametrize("name", LOST_GRAPHS)
def test_a_parameter_without_its_graph_raises(name):
    """The derivative would be 0 or half of the true one, without an error."""
    t = torch.tensor(1.5, dtype=D, requires_grad=True)
    with pytest.raises(sanc.errors.SingularMinimumError, match=r"random change of theta differences of ∇ₓf show"):
        sanc.argmin(LOST_GRAPHS[name], torch.zeros(2, dtype=D), t)
    with pytest.warns(RuntimeWarning, match="no_grad"):
        sanc.argmin(LOST_GRAPHS[name], torch.zeros(2, dtype=D), t, on_singular="warn")


def test_the_parameter_without_its_graph_is_named():
    theta = {"a": normal(3).requires_grad_(), "b": [torch.ones(3, dtype=D).requires_grad_()]}
    f = lambda x, t: ((x - t["a"] - t["b"][0].detach()) ** 2).sum()
    with pytest.raises(sanc.errors.SingularMinimumError, match=re.escape("change of theta['b'][0] differences")):
        sanc.argmin(f, torch.zeros(3, dtype=D), theta)


def test_a_part_without_its_graph_is_found_in_float32():
    f = lambda x, t: ((x - 0.1 * t.detach() - t) ** 2).sum()
    with pytest.raises(sanc.errors.SingularMinimumError, match="differences of ∇ₓf show"):
        sanc.argmin(f, torch.zeros(2), torch.tensor(1.5, requires_grad=True))


def test_parameters_with_large_third_derivatives_are_accepted():
    """The error of differences depends on the step, and that of a missing derivative does not."""
    for dtype in (D, torch.float32):
        t = torch.tensor([0.5, -0.5], dtype=dtype, requires_grad=True)
        f = lambda x, t: ((x - torch.sin(40 * t)) ** 2).sum() + ((x * torch.exp(-8 * t)) ** 2).sum()
        x = sanc.argmin(f, torch.zeros(2, dtype=dtype), t)
        assert x.requires_grad


def test_parameters_that_may_only_be_moved_in_some_directions_are_accepted():
    """Derivatives of a symmetric matrix are symmetric, and a function may raise outside its domain."""
    A = normal(4, 4)
    A = (A @ A.T + torch.eye(4, dtype=D)).requires_grad_()
    f = lambda x, t: (
        x @ torch.linalg.eigh(t).eigenvectors @ torch.linalg.eigh(t).eigenvectors.T @ x - x.sum() + x @ t @ x
    )
    x = sanc.argmin(f, torch.zeros(4, dtype=D), A)
    assert torch.allclose(x, torch.linalg.solve(A + torch.eye(4, dtype=D), torch.full((4,), 0.5, dtype=D)))

    def picky(x, t):
        if float(t.detach()) != 2.0:
            raise ValueError("only 2 is allowed")
        return ((x - t) ** 2).sum()

    t = torch.tensor(2.0, dtype=D, requires_grad=True)
    (gradient,) = torch.autograd.grad(sanc.argmin(picky, torch.zeros(2, dtype=D), t).sum(), t)
    assert gradient == pytest.approx(2.0)
