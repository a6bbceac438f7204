"""`sanc.argmin` with method="least_squares": derivatives of the whole cost, losses, bounds and transforms."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from torch import func

import sanc
from sanc.implicit.least_squares import TORCH_LOSSES
from sanc.leastsquares.losses import LOSSES

D = torch.float64
TIMES = torch.linspace(0, 2, 25, dtype=D)
START = torch.tensor([1.5, -1.0, 0.0], dtype=D)
VALUES = 2 * torch.exp(-1.3 * TIMES) + 0.5 * torch.sin(5 * TIMES)


def residuals(x, t):
    return torch.cat([x[0] * torch.exp(x[1] * TIMES) + x[2] - t["y"], t["weight"] * x])


def theta():
    return {"y": VALUES.clone().requires_grad_(), "weight": torch.tensor(0.3, dtype=D, requires_grad=True)}


@pytest.mark.parametrize("loss", TORCH_LOSSES)
def test_derivatives_are_those_of_scipy_fits_to_changed_data(loss):
    """The residuals are large, so that derivatives by the Gauss–Newton matrix would be wrong."""
    t = theta()
    options = {"loss": loss, "f_scale": 0.5}
    x, solution = sanc.argmin(residuals, START, t, method="least_squares", details=True, **options)
    grads = torch.autograd.grad(x @ torch.tensor([1.0, 2.0, -1.0], dtype=D), list(t.values()))

    def fitted(y, weight):
        found = least_squares(
            lambda b: residuals(torch.from_numpy(b), {"y": y, "weight": weight}).numpy(),
            x.detach().numpy(), xtol=1e-15, ftol=1e-15, gtol=1e-14, jac="3-point", x_scale="jac", **options,
        )  # fmt: skip
        return float(found.x @ np.array([1.0, 2.0, -1.0]))

    h, y, weight = 1e-3, VALUES, 0.3
    step = h * (torch.arange(25) == 3)
    by_value = (fitted(y + step, weight) - fitted(y - step, weight)) / (2 * h)
    by_weight = (fitted(y, weight + h) - fitted(y, weight - h)) / (2 * h)
    assert float(grads[0][3]) == pytest.approx(by_value, rel=1e-3, abs=1e-5)
    assert float(grads[1]) == pytest.approx(by_weight, rel=1e-3, abs=1e-5)
    assert isinstance(solution.result, sanc.LeastSquaresResult) and solution.error < 1e-6


def test_every_loss_of_fits_can_be_differentiated_by_torch():
    assert LOSSES.keys() == TORCH_LOSSES.keys()


@pytest.mark.parametrize("loss", TORCH_LOSSES)
def test_losses_of_tensors_are_those_of_arrays(loss):
    z = torch.tensor([0.0, 1e-9, 0.3, 0.999, 1.001, 7.0, 1e6], dtype=D)
    rows = z[None].numpy() if LOSSES[loss] is None else LOSSES[loss](z.numpy())
    assert np.allclose(TORCH_LOSSES[loss](z).numpy(), rows[0], rtol=1e-14)
    if LOSSES[loss] is not None:
        rates = torch.stack([func.grad(TORCH_LOSSES[loss])(entry) for entry in z])
        assert np.allclose(rates.numpy(), rows[1], rtol=1e-12)


def test_the_minimum_is_that_of_the_sum_of_squares():
    t = theta()
    x = sanc.argmin(residuals, torch.ones(3, dtype=D), t, method="least_squares")
    y = sanc.argmin(lambda x, t: 0.5 * residuals(x, t).square().sum(), x.detach(), t)
    assert torch.allclose(x, y, atol=1e-9)
    for first, second in zip(
        torch.autograd.grad(x.sum(), list(t.values())), torch.autograd.grad(y.sum(), list(t.values())), strict=True
    ):
        assert torch.allclose(first, second, rtol=1e-6)


def squares_minimum(t, **options):
    """The minimum of Σ (a² − t)² in a box, in a tree: √t, and no derivative at a bound."""
    x = sanc.argmin(
        lambda p, t: p["a"] ** 2 - t, {"a": torch.ones(3, dtype=D)}, t, method="least_squares",
        bounds=({"a": 0.0}, {"a": 1.2}), **options,
    )  # fmt: skip
    return x["a"]


def test_bounds_trees_and_transforms():
    t = torch.tensor([0.5, 2.0, 1.2], dtype=D)
    rates = torch.tensor([0.5 / 0.5**0.5, 0.0, 0.5 / 1.2**0.5], dtype=D)
    assert torch.allclose(squares_minimum(t), torch.tensor([0.5**0.5, 1.2, 1.2**0.5], dtype=D))
    assert torch.allclose(func.jacrev(squares_minimum)(t), torch.diag(rates), atol=1e-9)
    assert torch.allclose(func.jvp(squares_minimum, (t,), (torch.ones(3, dtype=D),))[1], rates, atol=1e-9)
    assert torch.allclose(func.vmap(squares_minimum)(t[None].repeat(2, 1))[1], squares_minimum(t))
    second = torch.autograd.functional.hessian(lambda t: squares_minimum(t).sum(), t)
    assert float(second[0, 0]) == pytest.approx(-0.25 * 0.5**-1.5, rel=1e-6)


def test_without_residuals_that_determine_x_it_raises():
    t = torch.ones(2, dtype=D, requires_grad=True)
    with pytest.raises(sanc.SingularMinimumError, match="not bounded away from zero"):
        sanc.argmin(lambda x, t: x[:1] - t, torch.zeros(2, dtype=D), t, method="least_squares")
    with pytest.raises(sanc.SingularMinimumError, match=r"did not converge.*λ_min = .* λ_min ≥ .*‖∇f‖ = "):
        sanc.argmin(
            lambda x, t: torch.stack([10 * (x[1] - x[0] ** 2), t[0] - x[0]]), -torch.ones(2, dtype=D), t,
            method="least_squares", max_iter=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "paper"}, "preset = 'paper' is not an argument of least_squares"),
        ({"loss": "hubr"}, "did you mean 'huber'"),
        ({"loss": lambda z: z}, "torch cannot differentiate: pass a name"),
        ({"f_scale": -1.0}, r"f_scale = -1\.0 cannot be used"),
        ({"method": None, "loss": "huber"}, 'pass method = "least_squares" too'),
        ({"fun": lambda x, t: 3.0 * x.sum().item()}, "fun returned float for a torch tensor|no torch function"),
    ],
)
def test_mistakes(arguments, message):
    given = {"fun": lambda x, t: x - t, "x0": torch.zeros(3, dtype=D), "theta": torch.ones(3, dtype=D)}
    given |= {"method": "least_squares"} | arguments
    with pytest.raises(sanc.SancError, match=message):
        sanc.argmin(given.pop("fun"), given.pop("x0"), given.pop("theta"), **given)


def test_float32_and_differences():
    t = torch.tensor([0.5, 2.0, 1.2], requires_grad=True)
    x = sanc.argmin(lambda x, t: x**2 - t, torch.ones(3), t, method="least_squares")
    assert x.dtype == torch.float32
    assert torch.allclose(torch.autograd.grad(x.sum(), t)[0], 0.5 / t.detach().sqrt(), rtol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = sanc.argmin(lambda x, t: x**2 - t, torch.ones(3), t, method="least_squares", hvp="finite-difference")
    assert torch.allclose(torch.autograd.grad(x.sum(), t)[0], 0.5 / t.detach().sqrt(), rtol=1e-2)
