"""`sanc.argmin` with bounds: derivatives of the free variables, and errors where they are one-sided."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, OptimizeWarning
from torch import func

import sanc
from ridge import leaf
from sanc.implicit.free import free_variables
from sanc.minimisation.result import Result
from tensors import normal

D = torch.float64


def test_the_free_variables_of_a_result():
    assert free_variables(Result(x=torch.zeros(2))) is None
    assert free_variables(Result(active=torch.zeros(2, dtype=torch.bool))) is None
    assert free_variables(Result(active=np.array([0, -1, 1]))).tolist() == [True, False, False]
    tree = {"a": torch.tensor([True, False]), "b": torch.tensor(True)}
    assert free_variables(Result(active=tree)).tolist() == [False, True, False]


HESSIAN = normal(4, 4) @ normal(4, 4).T + torch.eye(4, dtype=D)


LOWER, UPPER = torch.tensor([-0.5, 0.2, -9.0, -math.inf], dtype=D), torch.tensor([math.inf, 0.5, 9.0, 0.4], dtype=D)


WEIGHTS = torch.arange(1.0, 5.0, dtype=D)


def inside(x):
    return bool(((x >= LOWER) & (x <= UPPER)).all())


def bounded_quadratic(x, t):
    """½xᵀHx − tᵀx, which raises an error outside the bounds."""
    if not inside(x):
        raise ValueError(f"outside: {x}")
    return 0.5 * x @ HESSIAN @ x - t @ x


def bounded_minimum(t):
    """The minimum of `bounded_quadratic` and the mask of its free variables, by enumeration of the faces."""
    best, found = math.inf, None
    for sides in itertools.product((-1, 0, 1), repeat=4):
        active = torch.tensor(sides)
        free = active == 0
        x = torch.where(active < 0, LOWER, UPPER)
        if not bool(x[~free].isfinite().all()):
            continue
        x[free] = torch.linalg.solve(HESSIAN[free][:, free], t[free] - HESSIAN[free][:, ~free] @ x[~free])
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
    expected[free] = torch.linalg.solve(HESSIAN[free][:, free], WEIGHTS[free])
    assert torch.allclose(x, expected_x, atol=1e-9) and torch.equal(x[~free], expected_x[~free])
    assert torch.allclose(g, expected, rtol=1e-6, atol=1e-9) and torch.equal(g[~free], expected[~free])
    assert (solution.result.active == 0).tolist() == free.tolist() and solution.grad_norm < 1e-7
    if hvp == "auto":
        smallest = float(torch.linalg.eigvalsh(HESSIAN[free][:, free])[0])
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
