"""`sanc.argmin`: derivatives against closed forms and dense references, errors at singular minima, and arguments."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import func
from torch.utils.checkpoint import checkpoint

import sanc
from benchmarks.implicit_problems import difference, large, large_logistic, problems, reference
from ridge import THETA, leaf, ridge, ridge_argmin, ridge_minimum
from sanc.autograd.oracle import AutogradOracle
from tensors import normal

D = torch.float64


QUICK = {
    "ridge", "ridge, a penalty per feature", "ridge, the data", "logistic regression, 10 penalties",
    "double wells from their saddle", "smoothing, 3,000 variables",
}  # fmt: skip


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


def test_the_last_newton_step_lowers_the_gradient():
    t = torch.tensor([0.3, -2.0], dtype=D, requires_grad=True)
    x, solution = sanc.argmin(
        lambda x, t: (torch.cosh(x) - t * x).sum(), torch.zeros(2, dtype=D), t, details=True, tol=1e-3
    )
    assert solution.grad_norm < 0.1 * float(torch.linalg.vector_norm(solution.result.jac))
    assert torch.allclose(x, torch.asinh(t), atol=1e-5)


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


def test_the_graphs_of_the_last_newton_step_are_released(monkeypatch):
    operators, hessian = [], AutogradOracle.hessian

    def collected(self, x):
        operators.append(hessian(self, x))
        return operators[-1]

    monkeypatch.setattr(AutogradOracle, "hessian", collected)
    ridge_argmin(leaf())
    assert len(operators) > 2 and all(operator._graph is None for operator in operators)


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
