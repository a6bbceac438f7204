"""`sanc.diagnose`: eigenvalues against dense Hessians, noise against closed forms, and nothing that changes."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import eigh_tridiagonal
from torch import nn

import sanc
from oracles import diagonal_oracle
from sanc.core.spectrum.extremes import find_extremes, quadrature
from sanc.minimisation.objective import build_oracle

COUNT = itertools.count(1)
"""Numbers that differ in every call."""
D = torch.float64


def network(*, seed=0, dtype=D, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def batches(count=4, rows=20, seed=1, dtype=D):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows + k, 4, generator=generator, dtype=dtype),
            torch.randint(0, 3, (rows + k,), generator=generator),
        )
        for k in range(count)
    ]


def dense(model, loss, data):
    """The Hessian and the gradient of the mean loss over the rows of all batches."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([dict(model.named_parameters())[name].detach().reshape(-1) for name in names])
    total = sum(len(y) for _, y in data)

    def value(flat):
        parts = dict(zip(names, flat.split([shapes[name].numel() for name in names]), strict=True))
        parts = {name: part.reshape(shapes[name]) for name, part in parts.items()}
        return sum(len(y) / total * loss(torch.func.functional_call(model, parts, (x,)), y) for x, y in data)

    return torch.func.hessian(value)(flat), torch.func.grad(value)(flat), value


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_numbers_are_those_of_the_dense_hessian(dtype):
    model, data, held_out = network(dtype=dtype, width=5), batches(2, dtype=dtype), batches(1, seed=5, dtype=dtype)
    report = sanc.diagnose(model, nn.CrossEntropyLoss(), data, held_out=held_out, start_vectors=10)
    H, g, value = dense(model, nn.CrossEntropyLoss(), data)
    eigenvalues = torch.linalg.eigvalsh(H.double())
    low, high = float(eigenvalues[0]), float(eigenvalues[-1])
    slack = report.ritz_error + 1e-5 * high * (dtype == torch.float32)
    assert report.lambda_min_bound - slack <= low <= report.lambda_min + slack
    assert report.lambda_max - slack <= high <= report.lambda_max_bound + slack
    assert abs(report.lambda_max - high) <= 0.02 * high and abs(report.lambda_min - low) <= 0.02 * high
    assert report.complete and report.products < 10 * 8 + len(H)
    assert report.grad_norm == pytest.approx(float(g.norm()), rel=1e-4)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert report.value == pytest.approx(float(value(flat)), rel=1e-5)
    participation = float(eigenvalues.abs().sum() ** 2 / (eigenvalues**2).sum())
    assert abs(report.effective_dimension - participation) <= 2 * report.effective_dimension_error < participation
    assert report.epsilon == pytest.approx(max(report.grad_norm, -report.lambda_min_bound))
    assert report.max_lr == pytest.approx(2 / report.lambda_max) and report.safe_lr <= report.max_lr
    *_, held_out_value = dense(model, nn.CrossEntropyLoss(), held_out)
    before = float(held_out_value(flat))
    norm = max(report.lambda_max, -report.lambda_min)
    assert report.held_out_value == pytest.approx(before, rel=1e-5)
    assert report.gradient_decrease == pytest.approx(before - float(held_out_value(flat - g / norm)), rel=1e-3)


def test_a_saddle_is_found_and_left():
    """A product of two layers with weights of zero is at a saddle: the gradient vanishes, and H has both signs."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)).to(D)
    for p in model.parameters():
        nn.init.zeros_(p)
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    data = [(part, part @ torch.ones(3, 1, dtype=D)) for part in x.split(15)]
    report = sanc.diagnose(model, nn.MSELoss(), data)
    assert report.saddle and report.grad_norm == 0.0 and report.lambda_min == pytest.approx(-report.lambda_max)
    assert report.curvature_decrease > 0.1 * report.held_out_value and report.curvature_step_norm > 0
    assert "At a saddle" in report.interpretation and "escape step" in str(report)


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-2])
def test_a_saddle_is_found_at_small_weights(size):
    """The step that leaves it is as long as the loss and the curvature make it, and not as the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)).to(D)
    for p in model.parameters():
        nn.init.normal_(p, std=size)
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    data = [(part, part @ torch.ones(3, 1, dtype=D)) for part in x.split(15)]
    report = sanc.diagnose(model, nn.MSELoss(), data, start_vectors=1)
    assert "At a saddle" in report.interpretation and report.curvature_decrease > 0.1 * report.held_out_value


def test_a_trained_network_is_at_a_minimum():
    model = nn.Linear(4, 1).to(D)
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(80, 1, generator=torch.Generator().manual_seed(1), dtype=D)
    design = torch.cat([x, torch.ones(80, 1, dtype=D)], 1)
    solution = torch.linalg.lstsq(design, y).solution
    with torch.no_grad():
        model.weight.copy_(solution[:4].T)
        model.bias.copy_(solution[4])
    data = list(zip(x.split(20), y.split(20), strict=True))
    report = sanc.diagnose(model, nn.MSELoss(), data, held_out=data)
    assert not report.saddle and report.epsilon < 1e-12 and report.noise_share == pytest.approx(1.0)
    assert "curves up in all directions" in report.interpretation and math.isnan(report.curvature_decrease)


def test_the_noise_is_that_of_independent_rows():
    """Gradients of batches of b rows vary as those of rows do, divided by b: the noise scale is a property of rows."""
    model = nn.Linear(2, 1, bias=False).to(D)
    nn.init.zeros_(model.weight)
    x = torch.randn(1500, 2, generator=torch.Generator().manual_seed(0), dtype=D)
    y = x @ torch.tensor([[1.0], [0.0]], dtype=D) + torch.randn(
        1500, 1, generator=torch.Generator().manual_seed(1), dtype=D
    )
    per_row = -2 * x * y
    mean = per_row.mean(0)
    truth = float(((per_row - mean) ** 2).sum(1).mean() / mean.square().sum())
    for rows in (50, 75):
        data = list(zip(x.split(rows), y.split(rows), strict=True))
        report = sanc.diagnose(model, nn.MSELoss(), data, held_out=data[:1], start_vectors=1, max_products=2)
        assert report.noise_scale == pytest.approx(truth, rel=0.5)
        assert report.noise_share == pytest.approx(truth / 1500, rel=0.5)


def test_the_noise_of_unequal_batches_weights_rows():
    """The variance of a row is estimated by the squares Σ n_i ‖g_i − ḡ‖² / (k − 1), whatever the sizes of batches."""
    model = network()
    sizes = [90, 40, 20, 8, 2]
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(160, 4, generator=generator, dtype=D), torch.randint(0, 3, (160,), generator=generator)
    data = list(zip(x.split(sizes), y.split(sizes), strict=True))
    report = sanc.diagnose(model, nn.CrossEntropyLoss(), data, held_out=data[:1], start_vectors=1, max_products=1)
    gradients = []
    for inputs, targets in data:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        gradients.append(torch.nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))))
    mean = sum(size / 160 * g for size, g in zip(sizes, gradients, strict=True))
    per_row = sum(size * float((g - mean).square().sum()) for size, g in zip(sizes, gradients, strict=True)) / 4
    square = float(mean.square().sum())
    assert report.noise_share == pytest.approx(per_row / 160 / square)
    assert report.noise_scale == pytest.approx(per_row / (square - per_row / 160))


def test_nothing_changes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    data = batches(dtype=torch.float32)
    first, second = (
        sanc.diagnose(model, nn.CrossEntropyLoss(), data, start_vectors=2, max_products=5) for _ in range(2)
    )
    assert {k: v for k, v in first.as_dict().items() if v == v} == {k: v for k, v in second.as_dict().items() if v == v}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight)) and model[0].weight.grad is None
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert first.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad) and model.training


def test_a_function_of_model_and_batch():
    model, data = network(), batches()
    as_criterion = sanc.diagnose(model, nn.CrossEntropyLoss(), data, seed=3, start_vectors=2)
    named = [{"scale": torch.tensor(1.0), "inputs": x, "labels": y} for x, y in data]
    as_function = sanc.diagnose(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"]),
        named,
        seed=3,
        start_vectors=2,
    )
    assert as_function.as_dict() == pytest.approx(as_criterion.as_dict(), nan_ok=True)
    assert as_criterion.batches == 3 and as_criterion.rows == 63  # the fourth batch is held out


def test_microbatches_are_batches():
    """Rows in parts give the numbers of the whole batch, and the noise of these parts as batches."""
    model, (batch, held_out) = network(), batches(2)
    loss, options = nn.CrossEntropyLoss(), {"held_out": [held_out], "start_vectors": 1, "max_products": 3}
    whole = sanc.diagnose(model, loss, [batch], **options)
    parts = sanc.diagnose(model, loss, [batch], microbatch=6, **options)
    listed = sanc.diagnose(model, loss, list(zip(*(part.split(6) for part in batch), strict=True)), **options)
    assert parts.batches == 4 and whole.batches == 1 and parts.rows == whole.rows == 20
    assert parts.as_dict() == pytest.approx(listed.as_dict(), rel=1e-12, nan_ok=True) and math.isnan(whole.noise_share)
    names = {"value", "held_out_value", "grad_norm", "lambda_min", "lambda_max", "curvature_decrease"}
    numbers, same = parts.as_dict(), whole.as_dict()
    assert {name: numbers[name] for name in names} == pytest.approx({name: same[name] for name in names}, rel=1e-9)
    named = {"inputs": batch[0], "more": [batch[1]]}
    nested = sanc.diagnose(
        model, lambda m, b: loss(m(b["inputs"]), *b["more"]), [named], microbatch=6, **options | {"held_out": None}
    )
    assert nested.value == pytest.approx(parts.value) and nested.batches == 4
    with pytest.raises(sanc.ArgumentTypeError, match="leave microbatch out"):
        sanc.diagnose(model, lambda m, b: loss(m(b[0]), b[1]), [(*batch, "a note")], microbatch=6)


def test_buffers_and_masks_are_those_of_a_step():
    """BatchNorm normalises by the rows of a batch, dropout draws one mask for all evaluations, as in `step`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(D)
    data = batches(2)
    report = sanc.diagnose(model, nn.CrossEntropyLoss(), data, held_out=data[:1], start_vectors=1, max_products=30)
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    H, g, _ = dense(copied, nn.CrossEntropyLoss(), data)
    assert report.grad_norm == pytest.approx(float(g.norm()), rel=1e-9)
    assert report.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=0.02)
    dropout = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(D)
    masked = sanc.diagnose(dropout, nn.CrossEntropyLoss(), data, held_out=data, start_vectors=1, max_products=2, seed=4)
    assert masked.value == masked.held_out_value  # the same masks
    assert (
        masked.value
        != sanc.diagnose(dropout, nn.CrossEntropyLoss(), data, start_vectors=1, max_products=2, seed=5).value
    )


def test_vectors_that_are_not_kept_give_the_same_numbers():
    """Three Lanczos vectors give the same Ritz values and eigenvectors, with a second pass of products."""
    model, data = network(), batches(2)
    kept, again = (
        sanc.diagnose(model, nn.CrossEntropyLoss(), data, start_vectors=2, max_products=12, lanczos=lanczos)
        for lanczos in ("store", "regenerate")
    )
    assert again.products == kept.products + 11
    names = {"lambda_min", "lambda_max", "curvature_decrease"}
    numbers, same = again.as_dict(), kept.as_dict()
    assert {name: numbers[name] for name in names} == pytest.approx({name: same[name] for name in names}, rel=1e-6)
    # Fewer eigenvectors are known, and the bounds are wider, which the gradient step uses.
    assert again.effective_dimension == pytest.approx(kept.effective_dimension, rel=0.1)
    assert again.gradient_decrease == pytest.approx(kept.gradient_decrease, rel=1e-2)
    assert again.profiles["lambda_min"][1] == pytest.approx(kept.profiles["lambda_min"][1], rel=1e-6)


def test_low_precision_widens_the_bounds():
    """Under autocast one more product measures the roundoff, which the bounds then contain."""
    model, data = network(dtype=torch.float32), batches(2, dtype=torch.float32)
    exact = sanc.diagnose(model, nn.CrossEntropyLoss(), data, start_vectors=1, max_products=8)
    with torch.autocast("cpu", torch.bfloat16):
        low = sanc.diagnose(model, nn.CrossEntropyLoss(), data, start_vectors=1, max_products=8)
    assert low.value != exact.value and low.lambda_max == pytest.approx(exact.lambda_max, rel=0.1)
    assert low.products == exact.products + 1 and low.ritz_error > 30 * exact.ritz_error
    assert low.lambda_max_bound > exact.lambda_max_bound


def test_limits():
    model, data = network(width=30), batches()
    report = sanc.diagnose(model, nn.CrossEntropyLoss(), data, max_products=3, start_vectors=1)
    assert report.products == 3 and not report.complete and "bounds limited by" in str(report)
    report = sanc.diagnose(model, nn.CrossEntropyLoss(), data, max_time=1e-9)
    assert report.products == 1 and report.limit == "products or time"
    assert all(len(losses) == 0 for _, losses in report.profiles.values()) and math.isnan(report.gradient_decrease)
    wide = network(width=100_000, dtype=torch.float32)  # roundoff would limit it, too
    report = sanc.diagnose(
        wide, nn.CrossEntropyLoss(), batches(2, dtype=torch.float32), max_products=1, start_vectors=1
    )
    assert report.limit == "products or time" and "up to roundoff" not in str(report)
    short = sanc.diagnose(model, nn.CrossEntropyLoss(), data, max_products=1, start_vectors=1)
    assert short.lambda_max_bound > 10 * short.lambda_max
    assert abs(short.gradient_decrease) < 1.01 * short.grad_norm**2 / short.lambda_max_bound  # a short step
    assert sanc.diagnose(model, nn.CrossEntropyLoss(), iter(data * 3), batches=2, max_products=2).batches == 1
    with pytest.warns(RuntimeWarning, match="batches = 100, and data has only 4: all of them are used"):
        assert sanc.diagnose(model, nn.CrossEntropyLoss(), iter(data), batches=100, max_products=2).batches == 3


def test_all_products_are_counted():
    """Of differences of gradients the errors of the first four are measured, for a product each."""
    model, data = nn.Linear(4, 3).to(D), batches(1)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    counts, products = [], []
    for limit in (1, 3, 6):
        calls.clear()
        options = {"max_products": limit, "start_vectors": 1, "hvp": "finite-difference"}
        products.append(sanc.diagnose(model, nn.CrossEntropyLoss(), data, **options).products)
        counts.append(len(calls))
    assert products == [2, 6, 10]
    # A product is two gradients of one batch; everything else is the same, as the loss is convex.
    assert [count - counts[0] for count in counts] == [0, 8, 16]


def test_interpretations():
    """The words follow from the decreases of the held-out loss, for the same curvature."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)).to(D)
    for p in model.parameters():
        nn.init.zeros_(p)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    data = [(part, part.sum(1, keepdim=True)) for part in x.split(10)]
    saddle = sanc.diagnose(model, nn.MSELoss(), data, start_vectors=1)
    whole = sanc.diagnose(model, nn.MSELoss(), [(x, x.sum(1, keepdim=True))], start_vectors=1)
    assert math.isnan(whole.curvature_decrease) and whole.curvature_step_norm > 0.0  # measured on the data themselves
    assert "no step along it was tested" in whole.interpretation
    words = {
        (0.0, 0.0): "Negative curvature exists",
        (0.0, 1.0): "At a saddle",
        (0.5, 1.0): "too, more than the gradient step",
        (1.0, 0.5): "too, less than the gradient step",
    }
    for (gradient, curvature), text in words.items():
        report = replace(saddle, noise_share=0.1, gradient_decrease=gradient, curvature_decrease=curvature)
        assert text in report.interpretation
        assert ("Not trained to the end" in report.interpretation) == (gradient > 0)
    untested = replace(saddle, noise_share=0.1, gradient_decrease=math.nan, curvature_decrease=math.nan)
    assert "no step along it was tested" in untested.interpretation and "does not lower" not in untested.interpretation
    assert "Batch noise dominates" in replace(saddle, noise_share=0.9).interpretation
    up = replace(saddle, lambda_min=1.0, lambda_min_bound=0.9, noise_share=0.0)
    assert "curves up" in up.interpretation and "No negative" in replace(up, lambda_min_bound=-1.0).interpretation
    assert "is flat in some" in replace(up, lambda_min=0.0, lambda_min_bound=0.0).interpretation
    nothing = sanc.diagnose(model, lambda model, batch: 0.0 * model(batch[0]).mean(), data, start_vectors=1)
    assert nothing.noise_share == 0.0 and "is flat in some" in nothing.interpretation


def test_the_report(capsys):
    report = sanc.diagnose(network(), nn.CrossEntropyLoss(), batches(2), progress=True, start_vectors=2)
    assert "Hessian products" in capsys.readouterr().err
    lines = str(report).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    for word in ("loss:", "gradient:", "λ_max:", "λ_min:", "second order: to ε", "dimension:", "confidence 0.99"):
        assert word in str(report) or word == "confidence 0.99"
    numbers = report.as_dict()
    assert all(isinstance(value, float) for value in numbers.values()) and numbers["safe_lr"] == report.safe_lr
    values, weights = report.density
    assert len(values) == len(weights) and weights.sum() == pytest.approx(1.0)
    _, losses = report.profiles["lambda_max"]
    assert losses[len(losses) // 2] == pytest.approx(report.value) and losses[-1] > report.value


@pytest.mark.slow
def test_the_picture():
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    figure = sanc.diagnose(network(), nn.CrossEntropyLoss(), batches(2), start_vectors=2).plot()
    assert len(figure.axes) == 2 and len(figure.axes[1].lines) == 2
    none = sanc.diagnose(network(), nn.CrossEntropyLoss(), batches(2), max_time=1e-9).plot()
    assert len(none.axes) == 2 and not len(none.axes[1].lines[0].get_xdata())


class Fused(torch.autograd.Function):
    """A sum of squares without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**2).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u):
        (x,) = ctx.saved_tensors
        return 2 * u * x


def test_a_loss_without_second_derivatives_uses_differences():
    model, data = network(), batches()
    with pytest.warns(RuntimeWarning, match="differences of gradients"):
        report = sanc.diagnose(
            model, lambda model, batch: Fused.apply(model(batch[0])) / len(batch[0]), data[:2], start_vectors=1
        )
    exact = sanc.diagnose(
        model, lambda model, batch: (model(batch[0]) ** 2).sum() / len(batch[0]), data[:2], start_vectors=1
    )
    assert report.hvp == "finite-difference" and report.lambda_max == pytest.approx(exact.lambda_max, rel=1e-4)
    assert "finite-difference" in str(report)


class Wrong(torch.autograd.Function):
    """x₀ x₁ with a Hessian that lacks one of its two entries, as of a fused operator with an error."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x[0] * x[1]

    @staticmethod
    def backward(ctx, u):
        (x,) = ctx.saved_tensors
        return u * torch.stack([x[1].detach(), x[0]])


def test_asymmetry_within_the_error_of_differences_is_roundoff(monkeypatch):
    """As where a network fits all rows: differences of gradients would be no better, and no operator is wrong."""

    def find(*args, **options):
        return replace(find_extremes(*args, **options), ritz_error=math.inf)

    monkeypatch.setattr("sanc.diagnosis.curvature.find_extremes", find)
    torch.manual_seed(0)
    model, data = (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        [(torch.randn(32, 6), torch.arange(32) % 3)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = sanc.diagnose(model, nn.CrossEntropyLoss(), data, hvp="double-backward")
    assert report.hvp == "double-backward" and "roundoff" in str(report)


@pytest.mark.parametrize("lanczos", ["store", "regenerate"])
def test_asymmetric_products_are_replaced_by_differences(lanczos):
    torch.manual_seed(0)
    model, data = nn.Linear(4, 2).to(D), batches(2)
    data = [(x[:, :4], y) for x, y in data]

    def loss(model, batch):
        out = model(batch[0])
        return (out**2).mean() + 3 * Wrong.apply(out.mean(0))

    with pytest.warns(RuntimeWarning, match="not symmetric.*differences of gradients"):
        report = sanc.diagnose(model, loss, data, start_vectors=1, lanczos=lanczos)

    def right_loss(model, batch):
        out = model(batch[0])
        return (out**2).mean() + 3 * out.mean(0).prod()

    right = sanc.diagnose(model, right_loss, data, start_vectors=1, lanczos=lanczos)
    assert report.hvp == "finite-difference" and report.lambda_max_bound < math.inf
    assert report.lambda_min == pytest.approx(right.lambda_min, rel=1e-4)
    assert report.lambda_max == pytest.approx(right.lambda_max, rel=1e-4)
    assert report.products > right.products + 4  # those of the first attempt, too
    with pytest.raises(sanc.SecondDerivativeError, match=r"not symmetric.*hvp=\"finite-difference\""):
        sanc.diagnose(model, loss, data, start_vectors=1, hvp="double-backward", lanczos=lanczos)


def test_a_linear_loss_has_no_curvature():
    report = sanc.diagnose(network().to(D)[0], lambda model, batch: model(batch[0]).mean(), batches())
    assert report.lambda_max == report.lambda_max_bound == report.effective_dimension_error == 0.0
    assert "steps of any length" in str(report) and "nan" not in str(report)


def test_a_function_of_torch_is_a_criterion():
    how = {"label_smoothing": 0.1}
    reports = [
        sanc.diagnose(network(), loss, batches(2), start_vectors=1)
        for loss in (nn.CrossEntropyLoss(**how), partial(nn.functional.cross_entropy, **how))
    ]
    assert str(reports[0]) == str(reports[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, sanc.ArgumentTypeError, "model = 3 is no nn.Module"),
        ({"model": None}, sanc.ArgumentTypeError, "model = None is no nn.Module: pass the network"),
        (
            {"loss": lambda outputs, targets: outputs.sum()},
            sanc.ArgumentTypeError,
            r"loss = .*pass lambda model, batch",
        ),
        ({"data": None}, sanc.ArgumentTypeError, "data = None is no iterable of batches"),
        (
            {"data": [*batches(2), (torch.zeros(0, 4, dtype=D), torch.zeros(0).long())]},
            sanc.ArgumentError,
            "data has no row in batch 2: leave this batch out",
        ),
        (
            {"held_out": [(torch.zeros(0, 4, dtype=D), torch.zeros(0).long())]},
            sanc.ArgumentError,
            "held_out has no row in batch 0",
        ),
        ({"model": nn.Tanh()}, sanc.ArgumentError, "no parameter that requires a gradient"),
        ({"model": nn.Linear(4, 3).half()}, sanc.ArgumentTypeError, "parameters of torch.float16"),
        ({"loss": 3}, sanc.ArgumentTypeError, "loss = 3 cannot be called"),
        (
            {"loss": lambda model, batch: torch.ones(())},
            sanc.ArgumentError,
            "loss returned a loss that does not depend",
        ),
        ({"loss": lambda model, batch: model(batch[0])}, sanc.ArgumentError, "loss returned a tensor of shape"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, sanc.ArgumentError, "returns a sum"),
        (
            {"loss": lambda model, batch: next(COUNT) * model(batch[0]).mean()},
            sanc.ArgumentError,
            "at the same parameters",
        ),
        (
            {"held_out": [(torch.full((2, 4), math.nan, dtype=D), torch.zeros(2).long())]},
            sanc.NonFiniteError,
            "on held_out",
        ),
        ({"data": []}, sanc.ArgumentError, "data has no batch"),
        ({"data": iter(())}, sanc.ArgumentError, "data has no batch"),
        ({"data": torch.ones(3)}, sanc.ArgumentTypeError, "no iterable of batches"),
        ({"data": [torch.ones(3, 4, dtype=D)]}, sanc.ArgumentTypeError, r"pass batches \(inputs, targets\)"),
        ({"held_out": []}, sanc.ArgumentError, "held_out has no batch"),
        (
            {"data": [(torch.full((2, 4), math.nan, dtype=D), torch.zeros(2).long())]},
            sanc.NonFiniteError,
            "loss is nan",
        ),
        ({"confidence": 2}, sanc.ArgumentError, "confidence = 2"),
        ({"relative_error": 0.0}, sanc.ArgumentError, r"relative_error = 0\.0"),
        ({"start_vectors": 0}, sanc.ArgumentError, "start_vectors = 0"),
        ({"starts": 0}, sanc.ArgumentError, "start_vectors = 0"),  # its former name
        ({"max_products": 0}, sanc.ArgumentError, "max_products = 0"),
        ({"batches": 0}, sanc.ArgumentError, "batches = 0"),
        ({"hvp": "exact"}, sanc.ArgumentError, "hvp = 'exact' is not known"),
        ({"lanczos": "keep"}, sanc.ArgumentError, "lanczos = 'keep' is not known"),
        ({"microbatch": 0}, sanc.ArgumentError, "microbatch = 0"),
        ({"process_group": 3}, sanc.ArgumentTypeError, "process_group = 3"),
    ],
)
def test_mistakes(arguments, error, message):
    given = {"model": network(), "loss": nn.CrossEntropyLoss(), "data": batches()} | arguments
    with pytest.raises(error, match=message):
        sanc.diagnose(given.pop("model"), given.pop("loss"), given.pop("data"), **given)


# ---------------------------------------------------------------------------------------------- the bounds


def spectra(rng, count):
    """Spectra of the kinds that Lanczos finds easy and hard."""
    for number in range(count):
        n = int(rng.integers(20, 400))
        bulk = {
            0: rng.standard_normal(n),
            1: rng.exponential(1.0, n),
            2: np.concatenate([np.full(n - 2, 1.0), [-0.5, 3.0]]),
            3: np.linspace(-1, 1, n) ** 3,
            4: np.concatenate([1e-3 * rng.standard_normal(n - 5), 10.0 ** np.arange(5)]),
        }[number % 5]
        yield bulk


def count_failures(count, confidence, products, store=True):
    rng, failures = np.random.default_rng(0), 0
    limits = {"relative_error": 0.02, "confidence": confidence, "max_products": products, "store": store}
    for number, values in enumerate(spectra(rng, count)):
        oracle, x = diagonal_oracle(values)
        found = find_extremes(oracle, x, seed=number, **limits)
        slack = found.ritz_error
        assert found.lambda_min >= values.min() - slack and found.lambda_max <= values.max() + slack
        failures += found.lower_bound > values.min() + slack or found.upper_bound < values.max() - slack
    return failures


def test_bounds_hold_with_the_stated_confidence():
    assert count_failures(25, 0.8, 12) <= 0.2 * 25


@pytest.mark.slow
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(("confidence", "products"), [(0.8, 8), (0.8, None), (0.95, None), (0.99, 15)])
def test_bounds_hold_on_a_thousand_operators(confidence, products, store):
    allowed = (1 - confidence) * 1000
    assert count_failures(1000, confidence, products, store) <= allowed + 3 * math.sqrt(allowed)


def test_a_sharp_bound_is_the_christoffel_function():
    """Without roundoff the excluded shifts are those at which 1/√Σ p_j² is below the component of the start."""
    values = np.sort(np.random.default_rng(3).standard_normal(300))
    oracle, x = diagonal_oracle(values)
    found = find_extremes(oracle, x, relative_error=1e-9, confidence=0.9, max_products=12)
    alpha, beta = found.krylov.alpha, found.krylov.beta
    target = 0.05 * math.sqrt(math.pi / 600)

    def weight(point):
        polynomials = [1.0, (point - alpha[0]) / beta[0]]
        for j in range(1, 12):
            polynomials.append(((point - alpha[j]) * polynomials[-1] - beta[j - 1] * polynomials[-2]) / beta[j])
        return 1.0 / math.sqrt(sum(p * p for p in polynomials))

    below, above = found.lambda_min - 10.0, found.lambda_min
    for _ in range(60):
        middle = 0.5 * (below + above)
        below, above = (middle, above) if weight(middle) < target else (below, middle)
    assert found.lower_bound == pytest.approx(below, abs=0.02 * (found.lambda_min - below))


def test_the_bounds_are_tight():
    oracle, x = diagonal_oracle(np.linspace(-1.0, 4.0, 500))
    found = find_extremes(oracle, x, relative_error=0.02)
    assert found.lambda_max - found.upper_bound >= -0.08 and found.lambda_min - found.lower_bound <= 0.08
    assert abs(found.lambda_max - 4.0) <= 0.08 and abs(found.lambda_min + 1.0) <= 0.08 and found.products < 120


@pytest.mark.slow
def test_roundoff_limits_the_bounds_but_not_the_values():
    """In float32 and 200,000 dimensions no useful bound holds with 99.99 %, yet the Ritz values converge."""
    values = torch.linspace(-1.0, 2.0, 200_000)
    values[-1] = 5.0
    oracle, x, _ = build_oracle(
        lambda x: 0.5 * (values * x * x).sum(), torch.zeros(200_000), jac=None, hess=None, hessp=None, args=()
    )
    found = find_extremes(oracle, x, relative_error=0.02, confidence=0.9999)
    assert found.limited_by_roundoff and found.upper_bound > 5.5
    assert found.lambda_max == pytest.approx(5.0, rel=1e-3) and abs(found.lambda_min + 1.0) <= 0.1


def test_quadrature_integrates_the_spectrum():
    values = np.linspace(-1.0, 4.0, 500)
    oracle, x = diagonal_oracle(values)
    sums = []
    for seed in range(10):
        alpha, beta = quadrature(oracle, x, seed, max_dim=8, suffices=lambda a, b: False)
        nodes, vectors = eigh_tridiagonal(alpha, beta[:-1])
        assert len(nodes) == 8 and alpha[0] ** 2 + beta[0] ** 2 == pytest.approx(vectors[0] ** 2 @ nodes**2)
        sums.append(500 * vectors[0] ** 2 @ nodes**2)
    assert np.mean(sums) == pytest.approx((values**2).sum(), rel=0.1)
