"""`sanc.argmin`: derivatives against closed forms and dense references, errors at singular minima, and arguments."""

from __future__ import annotations

import gc
import itertools
import math
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, OptimizeWarning
from torch import func
from torch.utils.checkpoint import checkpoint

import sanc
from benchmarks.implicit_problems import difference, large, large_logistic, problems, reference
from driving import normal
from sanc.autograd.oracle import AutogradOracle
from sanc.core.spectrum.curvature import explore
from sanc.implicit.free import free_variables
from sanc.implicit.linear import RitzSpace, known_space, solve, solve_least_squares
from sanc.minimisation.objective import build_oracle
from sanc.minimisation.result import Result

D = torch.float64
QUICK = {
    "ridge", "ridge, a penalty per feature", "ridge, the data", "logistic regression, 10 penalties",
    "double wells from their saddle", "smoothing, 3,000 variables",
}  # fmt: skip


A, B = normal(20, 3), normal(20, seed=1)
THETA = normal(3, seed=2)


def leaf(value=1.0, size=3):
    return torch.full((size,), value, dtype=D, requires_grad=True)


def ridge(x, t):
    return 0.5 * ((A @ x - B) ** 2).sum() + 0.5 * (t.exp() * x**2).sum()


def ridge_minimum(t):
    """The minimum of `ridge` by cofactors, which torch differentiates to any order in every mode."""
    a, b, c = A.T @ A + torch.diag(t.exp())
    cofactors = [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)]
    return torch.stack(cofactors, 1) @ (A.T @ B) / (a @ torch.linalg.cross(b, c))


def ridge_argmin(t, **options):
    return sanc.argmin(ridge, torch.zeros(3, dtype=D), t, **options)


def check_problem(problem, tolerance=1e-6):
    theta = problem.parameters()
    x, solution = sanc.argmin(problem.fun, problem.x0, theta, details=True)
    grads = torch.autograd.grad((x * problem.weights()).sum(), list(theta.values()))
    error = difference(dict(zip(theta, grads, strict=True)), reference(problem, x.detach()))
    assert error <= tolerance and solution.error <= 1e-2
    assert error <= max(100 * solution.error, 1e-9), (error, solution.error)  # the estimate is of the right order
    assert solution.certificate.lower_bound > 0 and solution.problem == ""
    return solution


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem, marks=[] if problem.name in QUICK else [pytest.mark.slow])
        for problem in problems(large_size=3000)
    ],
    ids=lambda problem: problem.name,
)
def test_the_derivative_is_that_of_a_closed_form_or_of_dense_algebra(problem):
    check_problem(problem)


@pytest.mark.slow
def test_a_hundred_thousand_variables():
    check_problem(large())


def test_there_are_twenty_problems():
    assert len(problems(large_size=10)) >= 20


# ---------------------------------------------------------------------------------------------- modes of torch


def test_gradcheck():
    t = THETA.clone().requires_grad_()
    assert torch.autograd.gradcheck(ridge_argmin, (t,), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(ridge_argmin, (t,), fast_mode=True)


BATCH = torch.stack([THETA, THETA + 1])
MODES = {
    "grad": lambda f: func.grad(f)(THETA),
    "jvp": lambda f: func.jvp(f, (THETA,), (BATCH[1],))[1],
    "hessian": lambda f: func.hessian(f)(THETA),
    "reverse over reverse": lambda f: func.jacrev(func.jacrev(f))(THETA),
    "forward over forward": lambda f: func.jacfwd(func.jacfwd(f))(THETA),
    "reverse over forward": lambda f: func.jacrev(func.jacfwd(f))(THETA),
    "third derivative": lambda f: func.grad(lambda t: func.grad(lambda t: func.grad(f)(t).sum())(t).sum())(THETA),
    "vmap": lambda f: func.vmap(f)(BATCH),
    "vmap along another dimension": lambda f: func.vmap(f, in_dims=1)(BATCH.T),
    "vmap of grad": lambda f: func.vmap(func.grad(f))(BATCH),
    "vmap of hessian": lambda f: func.vmap(func.hessian(f))(BATCH),
    "grad of vmap": lambda f: func.grad(lambda T: func.vmap(f)(T).sum())(BATCH),
    "functional hessian": lambda f: torch.autograd.functional.hessian(f, THETA),
}


@pytest.mark.parametrize("mode", MODES)
def test_transforms_of_torch(mode):
    found = MODES[mode](lambda t: (ridge_argmin(t) ** 2).sum())
    expected = MODES[mode](lambda t: (ridge_minimum(t) ** 2).sum())
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_graph_of_the_second_derivative_of_a_nonquadratic_function():
    def fun(x, t):
        return (torch.cosh(x) - t * x).sum()  # x = asinh(t)

    t = torch.tensor([0.3, -2.0], dtype=D, requires_grad=True)
    x = sanc.argmin(fun, torch.zeros(2, dtype=D), t)
    (first,) = torch.autograd.grad(x.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), t)
    truth = 1 + t.detach() ** 2
    assert torch.allclose(first, truth**-0.5, rtol=1e-9)
    assert torch.allclose(second, -t * truth**-1.5, rtol=1e-9)
    assert torch.allclose(third, truth**-1.5 * (3 * t.detach() ** 2 / truth - 1), rtol=1e-9)


def test_batched_gradients_raise_an_error_with_a_remedy():
    with pytest.raises(sanc.ArgumentError, match=r"vectorize.*torch\.func"):
        torch.autograd.functional.jacobian(ridge_argmin, THETA, vectorize=True)


def test_several_backward_passes_and_accumulated_gradients():
    t = THETA.clone().requires_grad_()
    x, solution = ridge_argmin(t, details=True)
    for entry in x:
        entry.backward(retain_graph=True)
    assert torch.allclose(t.grad, torch.autograd.functional.jacobian(ridge_minimum, THETA).sum(0), rtol=1e-9)
    assert len(solution.derivatives) == 3


def test_checkpoints_compute_the_minimum_again():
    t = torch.tensor([0.3, -0.2, 0.1], dtype=D)
    a, b = t.clone().requires_grad_(), t.clone().requires_grad_()
    found = checkpoint(lambda t: ridge_argmin(t).sin(), a, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(found.sum(), a)[0], torch.autograd.grad(ridge_argmin(b).sin().sum(), b)[0])


def test_the_graph_holds_no_memory_afterwards():
    t = THETA.clone().requires_grad_()
    x, solution = ridge_argmin(t, details=True)
    reference_to = weakref.ref(solution)
    x.sum().backward()
    del x, solution
    gc.collect()
    assert reference_to() is None


class Kept:
    """A tensor that a graph keeps."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_memory_does_not_depend_on_the_number_of_iterations():
    """After the forward pass the graphs of the last point are alive, and none of the iterations."""

    def fun(x, t):
        return (t * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    sizes = []
    for start in (torch.full((3,), 1.01, dtype=D), torch.linspace(-1, 1, 3).to(D)):
        kept = []

        def pack(tensor):
            holder = Kept(tensor)
            kept.append(weakref.ref(holder))
            return holder

        t = torch.tensor(100.0, dtype=D, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
            x, solution = sanc.argmin(fun, start, t, details=True)
        gc.collect()
        alive = sum(holder().tensor.numel() for holder in kept if holder() is not None)
        sizes.append((solution.result.nit, alive))
        assert x.requires_grad
    assert sizes[1][0] > sizes[0][0] + 5 and sizes[0][1] == sizes[1][1]


# ---------------------------------------------------------------------------------------------- forms of x and θ


def test_trees_of_points_and_parameters():
    X, y = normal(40, 2), normal(40, seed=3)

    def fun(p, t):
        loss = ((X @ p["w"] + p["b"] - y) ** 2).mean()
        return loss + t["ridge"][0] * (p["w"] ** 2).sum() + t["power"] * t["ridge"][1] * (p["b"] ** 2) + t["rows"].sum()

    ridges = (torch.tensor(0.1, dtype=D, requires_grad=True), torch.tensor(0.2, dtype=D, requires_grad=True))
    theta = {"ridge": ridges, "power": 2, "rows": torch.arange(3)}
    x = sanc.argmin(fun, {"w": torch.zeros(2, dtype=D), "b": torch.zeros((), dtype=D)}, theta)
    grads = torch.autograd.grad(x["w"].sum() + x["b"], ridges)

    def closed(first, second):
        design = torch.cat([X, torch.ones(40, 1, dtype=D)], 1)
        return torch.linalg.solve(
            design.T @ design / 40 + torch.diag(torch.stack([first, first, 2 * second])), design.T @ y / 40
        )

    expected = torch.autograd.grad(closed(*ridges).sum(), ridges)
    assert x["w"].shape == (2,) and x["b"].shape == ()
    assert torch.allclose(torch.stack(grads), torch.stack(expected), rtol=1e-9)


def test_a_start_of_numpy_gives_a_tensor():
    t = torch.tensor(3.0, dtype=D, requires_grad=True)
    for start in (np.zeros((2, 2)), [[0.0, 1.0]], [1, 2]):
        x = sanc.argmin(lambda x, t: ((x - t) ** 2).sum(), start, t)
        assert isinstance(x, torch.Tensor) and x.dtype == D and x.shape == np.shape(start)
        (g,) = torch.autograd.grad(x.sum(), t)
        assert float(g) == pytest.approx(x.numel())


def test_float32():
    t = torch.tensor([0.5, 2.0], requires_grad=True)
    x, solution = sanc.argmin(lambda x, t: (torch.cosh(x) - t * x).sum(), torch.zeros(2), t, details=True)
    (g,) = torch.autograd.grad(x.sum(), t)
    assert x.dtype == torch.float32 and torch.allclose(g, (1 + t.detach() ** 2) ** -0.5, rtol=1e-3)
    assert solution.error < 1e-2


def test_parameters_that_need_no_gradient_or_do_not_matter():
    t, unused = torch.tensor(1.0, dtype=D, requires_grad=True), torch.ones(4, dtype=D, requires_grad=True)
    constant = torch.tensor(2.0, dtype=D)
    x = sanc.argmin(lambda x, p: ((x - p[0] * p[1]) ** 2).sum(), torch.zeros(2, dtype=D), (t, constant, unused))
    first, second = torch.autograd.grad(x.sum(), (t, unused), allow_unused=True)
    assert float(first) == pytest.approx(4.0) and (second is None or not second.any())
    assert constant.grad is None


def test_without_gradients_it_is_minimize():
    x, solution = ridge_argmin(THETA, details=True)
    result = sanc.minimize(lambda x: ridge(x, THETA), torch.zeros(3, dtype=D))
    assert torch.equal(x, result.x) and not x.requires_grad
    assert solution.certificate == result.certificate and math.isnan(solution.error)
    with torch.no_grad():
        assert not ridge_argmin(THETA.clone().requires_grad_()).requires_grad


def test_the_saddle_between_two_minima_is_left():
    t = torch.tensor(4.0, dtype=D, requires_grad=True)
    x = sanc.argmin(lambda x, t: ((x**2 - t) ** 2).sum(), torch.zeros(1, dtype=D), t)
    (g,) = torch.autograd.grad(x.abs().sum(), t)
    assert float(x.detach().abs()) == pytest.approx(2.0) and float(g) == pytest.approx(0.25)


# ---------------------------------------------------------------------------------------------- singular minima


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
    with pytest.raises(sanc.SingularMinimumError, match=r"entry \d of ∇f changes at the rates"):
        sanc.argmin(fun, torch.zeros(3, dtype=D), leaf())


@pytest.mark.parametrize("on_singular", ["raise", "pinv"])
@pytest.mark.parametrize("size", [5, 50, 2000])
def test_a_kink_along_one_of_many_variables_raises(size, on_singular):
    """At t = 1 the derivative of x_0 is 1 from the left, and 1/5 from the right."""

    def fun(x, t):
        return 0.5 * ((x - t) ** 2).sum() + 2 * torch.relu(x[0] - 1) ** 2

    for seed in range(3):
        t = torch.tensor(1.0, dtype=D, requires_grad=True)
        with pytest.raises(sanc.SingularMinimumError, match="entry 0 of ∇f changes at the rates"):
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
        with pytest.raises(sanc.SingularMinimumError, match="of ∇f changes at the rates"):
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


def test_the_last_newton_step_lowers_the_gradient():
    t = torch.tensor([0.3, -2.0], dtype=D, requires_grad=True)
    x, solution = sanc.argmin(
        lambda x, t: (torch.cosh(x) - t * x).sum(), torch.zeros(2, dtype=D), t, details=True, tol=1e-3
    )
    assert solution.grad_norm < 0.1 * float(torch.linalg.vector_norm(solution.result.jac))
    assert torch.allclose(x, torch.asinh(t), atol=1e-5)


# ---------------------------------------------------------------------------------------------- arguments


def test_a_captured_tensor_that_requires_a_gradient_is_an_error():
    weight = torch.tensor(2.0, dtype=D, requires_grad=True)
    for captured in (weight, weight * 3, torch.nn.Parameter(weight.detach())):
        with pytest.raises(sanc.ArgumentError, match=r"not in theta.*functional_call"):
            sanc.argmin(lambda x, t: ((x - t * captured) ** 2).sum(), torch.zeros(2, dtype=D), leaf(size=2))


def test_a_function_may_differentiate_itself():
    def fun(x, t):
        s = torch.linspace(0, 1, 5, dtype=D).requires_grad_()
        curve = x[0] * s**2 + x[1] * s
        (rate,) = torch.autograd.grad(curve.sum(), s, create_graph=True)
        return ((rate - t) ** 2).sum()

    t = torch.tensor(2.0, dtype=D, requires_grad=True)
    x = sanc.argmin(fun, torch.zeros(2, dtype=D), t)
    (g,) = torch.autograd.grad(x[1], t)
    assert float(g) == pytest.approx(1.0)


class OnceOnly(torch.autograd.Function):
    """x³ without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * u


def test_functions_without_second_derivatives_use_differences():
    def fun(x, t):
        return (OnceOnly.apply(x.abs() + 1) + (x - t) ** 2).sum()

    def exact(x, t):
        return ((x.abs() + 1) ** 3 + (x - t) ** 2).sum()

    grads = []
    for f in (fun, exact):
        t = torch.tensor([8.0, 9.0], dtype=D, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, solution = sanc.argmin(f, torch.ones(2, dtype=D), t, details=True)
        grads.append(torch.autograd.grad(x.sum(), t, retain_graph=True)[0])
    assert torch.allclose(grads[0], grads[1], rtol=1e-6) and 0 < solution.error < 1e-6


def test_differences_cannot_be_differentiated_further():
    t = THETA.clone().requires_grad_()
    x, solution = ridge_argmin(t, hvp="finite-difference", details=True)
    (g,) = torch.autograd.grad(x.sum(), t, retain_graph=True)
    (truth,) = torch.autograd.grad(ridge_minimum(t).sum(), t)
    assert torch.allclose(g, truth, rtol=1e-6) and solution.error < 1e-5
    with pytest.raises(sanc.SecondDerivativeError, match=r"finite-difference.*leave hvp out"):
        torch.autograd.grad(x.sum(), t, create_graph=True)


def test_parameters_changed_in_place_are_an_error():
    t = THETA.clone().requires_grad_()
    x = ridge_argmin(t)
    with torch.no_grad():
        t += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_singular": "ignore"}, "on_singular = 'ignore' is not known"),
        ({"rtol": -1.0}, r"rtol = -1\.0 cannot be used"),
        ({"confidence": 1.5}, r"confidence = 1\.5 cannot be used: pass a probability"),
        ({"max_products": 0}, "max_products = 0 cannot be used"),
        ({"details": "yes"}, "details = 'yes' cannot be used"),
        ({"theta": [1.0, 2.0]}, r"theta = \[1\.0, 2\.0\] holds no floating-point tensor"),
        ({"fun": 3}, "fun = 3 is no function of x and theta"),
        ({"fun": lambda x, t: ridge(x, t) * (2 + torch.rand(())), "theta": leaf()}, "for the same x and theta"),
        ({"theta": [THETA, torch.ones(3, dtype=torch.complex128, requires_grad=True)]}, r"torch\.view_as_real"),
        ({"fun": lambda x, t: 3.0, "theta": leaf()}, "fun returned float for a torch tensor"),
        ({"x0": "start"}, "x0 = 'start' is not an array of real numbers"),
        ({"jac": True}, "jac = True cannot be used: torch differentiates fun; leave it out"),
        ({"batch_size": 3}, "batch_size = 3 cannot be used"),
        ({"certify": False}, "certify = False cannot be used"),
        ({"args": (1,)}, r"args = \(1,\) cannot be used: theta holds"),
        ({"sigma_0": 1.0}, "did you mean 'sigma0'"),
    ],
)
def test_mistakes(arguments, message):
    given = {"fun": ridge, "x0": torch.zeros(3, dtype=D), "theta": THETA} | arguments
    with pytest.raises(sanc.SancError, match=message):
        sanc.argmin(given.pop("fun"), given.pop("x0"), given.pop("theta"), **given)


# ---------------------------------------------------------------------------------------------- linear systems


NOTHING = RitzSpace(np.empty(0))


def operator(matrix):
    oracle, x, _ = build_oracle(
        lambda x: 0.5 * x @ matrix @ x, torch.zeros(len(matrix), dtype=D), jac=None, hess=None, hessp=None, args=()
    )
    return oracle, x


@pytest.mark.parametrize("condition", [10.0, 1e4, 1e8])
@pytest.mark.parametrize("size", [30, 400])
def test_linear_systems(condition, size):
    Q = torch.linalg.qr(normal(size, size)).Q
    eigenvalues = torch.cat([torch.logspace(-math.log10(condition), 0, 8, dtype=D), torch.ones(size - 8, dtype=D)])
    H = Q * eigenvalues @ Q.T
    H = (H + H.T) / 2
    oracle, x = operator(H)
    explored = explore(oracle, x, eps_gradient=1.0, eps_curvature=0.0, thorough=True, relative_error=0.5)
    u = normal(size, seed=4)
    for known in (known_space(explored, oracle.space), NOTHING):
        found = solve(oracle.hessian(x), u, oracle.space, known, lower=explored.certificate.lower_bound, rtol=1e-10)
        truth = torch.linalg.solve(H, u)
        error = float((found.v - truth).norm() / truth.norm())
        assert error <= max(1e-9, 1e-14 * condition)
        assert float((u - H @ found.v).norm()) == pytest.approx(found.residual, rel=0.5, abs=1e-12)
        assert found.error == pytest.approx(found.residual / explored.certificate.lower_bound / float(found.v.norm()))


def test_all_ritz_pairs_of_a_small_space_solve_at_once():
    size = 60
    H = normal(size, size)
    H = H @ H.T + 1e-3 * torch.eye(size, dtype=D)
    oracle, x = operator(H)
    explored = explore(oracle, x, eps_gradient=1.0, eps_curvature=0.0, thorough=True)
    found = solve(
        oracle.hessian(x), normal(size), oracle.space, known_space(explored, oracle.space),
        lower=explored.certificate.lower_bound, rtol=1e-8,
    )  # fmt: skip
    assert found.products <= 6 and found.error <= 1e-8


def graded(size=300, smallest=1e-2):
    """A matrix with a few small eigenvalues and the others from 1 to 2."""
    Q = torch.linalg.qr(normal(size, size)).Q
    H = Q * torch.cat([torch.logspace(math.log10(smallest), 0, 12, dtype=D), torch.linspace(1, 2, size - 12).to(D)])
    H = H @ Q.T
    return (H + H.T) / 2


def test_ritz_pairs_of_a_random_start_save_products_of_another_right_side():
    """Block elimination leaves the Schur complement, whose inverse is a block of H⁻¹."""
    H = graded()
    oracle, x = operator(H)
    explored = explore(oracle, x, eps_gradient=1.0, eps_curvature=0.0, thorough=True, relative_error=0.5)
    known, u, lower = known_space(explored, oracle.space), normal(300, seed=6), explored.certificate.lower_bound
    assert 0 < known.dim < 100
    W = known.rows.T
    outside = torch.linalg.qr(torch.cat([W, normal(300, 300)], 1)).Q[:, known.dim : 300]
    q = known._next_vector
    columns = [known.schur_product(lambda v: H @ v, column, float(q @ column)) for column in outside.T]
    S = outside.T @ torch.stack(columns, 1)
    assert torch.allclose(torch.linalg.inv(S), outside.T @ torch.linalg.inv(H) @ outside, atol=1e-8)
    counts = []
    for pairs in (known, NOTHING):
        found = solve(oracle.hessian(x), u, oracle.space, pairs, lower=lower, rtol=1e-6)
        truth = torch.linalg.solve(H, u)
        assert float((found.v - truth).norm() / truth.norm()) <= found.error <= 1e-6
        counts.append(found.products)
    assert counts[0] < 0.7 * counts[1]


def test_ritz_pairs_of_another_matrix_are_left_out():
    """Pairs of a matrix that differs by half are no help, and those of one that differs by a thousandth are."""
    H, u = graded(60), normal(60)
    values, vectors = torch.linalg.eigh(H)
    known = RitzSpace(values.numpy(), vectors.T.contiguous())
    counts = []
    for change in (1e-3, 0.5):
        E = normal(60, 60, seed=3)
        E = E @ E.T
        other = H + change * 0.01 * E / torch.linalg.matrix_norm(E, 2)
        oracle, x = operator(other)
        lower = float(torch.linalg.eigvalsh(other)[0])
        found = solve(oracle.hessian(x), u, oracle.space, known, lower=lower, rtol=1e-8, change=change)
        truth = torch.linalg.solve(other, u)
        assert float((found.v - truth).norm() / truth.norm()) <= found.error <= 1e-8
        counts.append(found.products)
    assert counts[0] <= 5 < counts[1]


def test_least_squares_is_the_pseudo_inverse():
    Q = torch.linalg.qr(normal(40, 40)).Q
    eigenvalues = torch.cat([torch.zeros(5, dtype=D), torch.linspace(1, 3, 35, dtype=D)])
    H = Q * eigenvalues @ Q.T
    oracle, x = operator((H + H.T) / 2)
    u = normal(40, seed=5)
    found = solve_least_squares(oracle.hessian(x), u, oracle.space, rtol=1e-10)
    assert torch.allclose(found.v, torch.linalg.pinv(H, rtol=1e-8) @ u, atol=1e-9)


def test_a_zero_right_side():
    oracle, x = operator(torch.eye(4, dtype=D))
    zero = torch.zeros(4, dtype=D)
    assert not solve(oracle.hessian(x), zero, oracle.space, NOTHING, lower=1.0, rtol=1e-8).v.any()
    assert not solve_least_squares(oracle.hessian(x), zero, oracle.space, rtol=1e-8).v.any()


# ---------------------------------------------------------------------------------------------- free variables


def test_the_free_variables_of_a_result():
    assert free_variables(Result(x=torch.zeros(2))) is None
    assert free_variables(Result(active=torch.zeros(2, dtype=torch.bool))) is None
    assert free_variables(Result(active=np.array([0, -1, 1]))).tolist() == [True, False, False]
    tree = {"a": torch.tensor([True, False]), "b": torch.tensor(True)}
    assert free_variables(Result(active=tree)).tolist() == [False, True, False]


H = normal(4, 4)
H = H @ H.T + torch.eye(4, dtype=D)
LOWER, UPPER = torch.tensor([-0.5, 0.2, -9.0, -math.inf], dtype=D), torch.tensor([math.inf, 0.5, 9.0, 0.4], dtype=D)
WEIGHTS = torch.arange(1.0, 5.0, dtype=D)


def inside(x):
    return bool(((x >= LOWER) & (x <= UPPER)).all())


def bounded_quadratic(x, t):
    """½xᵀHx − tᵀx, which raises an error outside the bounds."""
    if not inside(x):
        raise ValueError(f"outside: {x}")
    return 0.5 * x @ H @ x - t @ x


def bounded_minimum(t):
    """The minimum of `bounded_quadratic` and the mask of its free variables, by enumeration of the faces."""
    best, found = math.inf, None
    for sides in itertools.product((-1, 0, 1), repeat=4):
        active = torch.tensor(sides)
        free = active == 0
        x = torch.where(active < 0, LOWER, UPPER)
        if not bool(x[~free].isfinite().all()):
            continue
        x[free] = torch.linalg.solve(H[free][:, free], t[free] - H[free][:, ~free] @ x[~free])
        if inside(x) and float(bounded_quadratic(x, t)) < best:
            best, found = float(bounded_quadratic(x, t)), (x, free)
    return found


@pytest.mark.parametrize("hvp", ["auto", "finite-difference"])
@pytest.mark.parametrize("seed", [1, 3, 6])
def test_derivatives_at_active_bounds_are_those_of_the_free_variables(seed, hvp):
    t = (3.0 * normal(4, seed=seed)).requires_grad_()
    expected_x, free = bounded_minimum(t.detach())
    assert not free.all()
    x0 = torch.tensor([0.0, 0.3, 0.0, 0.0], dtype=D)
    x, solution = sanc.argmin(bounded_quadratic, x0, t, bounds=Bounds(LOWER, UPPER), hvp=hvp, details=True)
    (g,) = torch.autograd.grad(x @ WEIGHTS, t)
    expected = torch.zeros(4, dtype=D)
    expected[free] = torch.linalg.solve(H[free][:, free], WEIGHTS[free])
    assert torch.allclose(x, expected_x, atol=1e-9) and torch.equal(x[~free], expected_x[~free])
    assert torch.allclose(g, expected, rtol=1e-6, atol=1e-9) and torch.equal(g[~free], expected[~free])
    assert (solution.result.active == 0).tolist() == free.tolist() and solution.grad_norm < 1e-7
    if hvp == "auto":
        smallest = float(torch.linalg.eigvalsh(H[free][:, free])[0])
        assert solution.certificate.lambda_min == pytest.approx(smallest)


def test_bounds_of_trees_forward_mode_and_second_derivatives():
    """min Σ x³/3 − t²x over [0, 1.5] has x = t if t < 1.5, and x = 1.5 with the derivative zero otherwise."""

    def cubic(x, t):
        assert all(bool(((leaf >= 0.0) & (leaf <= 1.5)).all()) for leaf in x.values())
        return (x["a"] ** 3 / 3 - t**2 * x["a"]).sum()

    def minimum(t):
        return sanc.argmin(cubic, {"a": torch.full((3,), 0.7, dtype=D)}, t, bounds=({"a": 0.0}, {"a": 1.5}))["a"]

    t = torch.tensor([0.5, 2.0, 1.25], dtype=D)
    assert torch.allclose(minimum(t), torch.tensor([0.5, 1.5, 1.25], dtype=D))
    expected = torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=D))
    assert torch.allclose(func.jacrev(minimum)(t), expected, atol=1e-9)
    assert torch.allclose(func.jvp(minimum, (t,), (torch.ones_like(t),))[1], expected.diag(), atol=1e-9)
    second = torch.autograd.functional.hessian(lambda t: (minimum(t) ** 2).sum(), t)
    assert torch.allclose(second, 2.0 * expected, atol=1e-7)


def test_all_variables_at_bounds_have_the_derivative_zero():
    t = leaf(5.0)
    for on_singular in ("raise", "pinv"):
        x = sanc.argmin(ridge_to, torch.zeros(3, dtype=D), t, bounds=[(0.0, 1.0)] * 3, on_singular=on_singular)
        (g,) = torch.autograd.grad(x.sum(), t)
        assert x.tolist() == [1.0] * 3 and g.tolist() == [0.0] * 3


def ridge_to(x, t):
    return 0.5 * ((x - t) ** 2).sum()


@pytest.mark.parametrize("shift", [0.0, 1e-13, -1e-13])
@pytest.mark.parametrize("x0", [0.5, 0.0])
def test_weakly_active_bounds_have_no_derivative(shift, x0):
    """x = max(t, 0) has a kink at t = 0; beyond the tolerance it is differentiable on both sides."""
    t, start = torch.tensor([shift, 2.0], dtype=D, requires_grad=True), torch.full((2,), x0, dtype=D)
    given = {"bounds": [(0.0, None)] * 2}
    for on_singular in ("raise", "pinv"):
        with pytest.raises(sanc.SingularMinimumError, match=r"one-sided.*Pass other bounds"):
            sanc.argmin(ridge_to, start, t, on_singular=on_singular, **given)
    with pytest.warns(RuntimeWarning, match="one-sided"):
        sanc.argmin(ridge_to, start, t, on_singular="warn", **given)
    for side in (1e-3, -1e-3):
        t = torch.tensor([side, 2.0], dtype=D, requires_grad=True)
        (g,) = torch.autograd.grad(sanc.argmin(ridge_to, start, t, **given).sum(), t)
        assert g.tolist() == pytest.approx([float(side > 0.0), 1.0])


def test_the_last_newton_step_stays_within_the_bounds():
    """The run ends with a gradient below a large tol, and the Newton step of the first variable crosses its bound."""
    evaluated = []

    def fun(x, t):
        evaluated.append(float(x[0].detach()))
        return 0.5 * (torch.tensor([1e-3, 10.0], dtype=D) * (x - t) ** 2).sum()

    t = torch.tensor([1.05, 0.3], dtype=D, requires_grad=True)
    with pytest.raises(sanc.SingularMinimumError, match="one-sided"):
        sanc.argmin(fun, torch.tensor([0.999, 0.3], dtype=D), t, bounds=[(0.0, 1.0)] * 2, tol=1e-4)
    assert max(evaluated) <= 1.0


def test_the_graphs_of_the_last_newton_step_are_released(monkeypatch):
    operators, hessian = [], AutogradOracle.hessian

    def collected(self, x):
        operators.append(hessian(self, x))
        return operators[-1]

    monkeypatch.setattr(AutogradOracle, "hessian", collected)
    ridge_argmin(leaf())
    assert len(operators) > 2 and all(operator._graph is None for operator in operators)


def test_a_start_outside_the_bounds_is_projected_before_the_first_evaluation():
    t = (3.0 * normal(4, seed=1)).requires_grad_()
    with pytest.warns(OptimizeWarning, match="projected"):
        x = sanc.argmin(bounded_quadratic, torch.full((4,), 20.0, dtype=D), t, bounds=Bounds(LOWER, UPPER))
    assert torch.allclose(x, bounded_minimum(t.detach())[0], atol=1e-9)


def test_bounds_that_require_a_gradient_raise_an_error():
    t, lower = leaf(), leaf(0.0)
    with pytest.raises(sanc.ArgumentError, match="bounds depend on a tensor that requires a gradient"):
        sanc.argmin(ridge_to, torch.ones(3, dtype=D), t, bounds=(lower, torch.full((3,), 2.0)))
    with pytest.raises(sanc.ArgumentError, match="bounds depend on a tensor"):
        func.grad(lambda u: sanc.argmin(ridge_to, torch.ones(3, dtype=D), t, bounds=(None, u)).sum())(
            leaf(2.0).detach()
        )


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


@pytest.mark.slow
def test_a_large_logistic_regression_against_differences():
    problem = large_logistic()
    theta = problem.parameters()
    x = sanc.argmin(problem.fun, problem.x0, theta, rtol=1e-9)  # one entry is compared, and errors are those of vectors
    (g,) = torch.autograd.grad((x * problem.weights()).sum(), list(theta.values()))
    ends = []
    for side in (1e-4, -1e-4):
        moved = {"penalty": problem.theta["penalty"] + side * torch.eye(10, dtype=D)[3]}
        ends.append(float((sanc.argmin(problem.fun, x.detach(), moved, tol=1e-11) * problem.weights()).sum()))
    assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(float(g[3]), rel=1e-6)


# ---------------------------------------------------------------------- parameters without a graph

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


def test_parameters_that_may_not_be_moved_anyhow_are_accepted():
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
