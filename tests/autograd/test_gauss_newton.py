"""hvp="gauss-newton": products JᵀHJv against dense matrices, and the errors for batches without outputs."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, hessian, jacrev

import sanc
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle

functional = torch.nn.functional


def problem(outputs=3, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, outputs)
    return torch.nn.Sequential(*layers).double(), torch.randn(12, 4).double()


def cases():
    classes, values = torch.arange(12) % 3, torch.sin(torch.arange(36.0)).double().reshape(12, 3)
    return {
        "cross-entropy": (lambda z, x, y: functional.cross_entropy(z, y), classes),
        "squares": (lambda z, x, y: (z - y).square().mean(), values),
        "huber": (lambda z, x, y: functional.huber_loss(z, y), values),
        "linear": (lambda z, x, y: (z * y).mean(), values),
    }


def dense(model, loss, x, y):
    """Return JᵀHJ as a matrix, from the whole Jacobian and Hessian."""
    names, tensors = zip(*model.named_parameters(), strict=True)
    z = model(x).detach()
    blocks = jacrev(lambda ps: functional_call(model, dict(zip(names, ps, strict=True)), (x,)))(tensors)
    jacobian = torch.cat([block.reshape(z.numel(), -1) for block in blocks], dim=1).detach()
    curvature = hessian(lambda out: loss(out, x, y))(z).reshape(z.numel(), z.numel())
    return jacobian.T @ curvature @ jacobian


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("microbatch", [None, 5])
def test_products_are_those_of_the_dense_matrix(name, microbatch):
    model, x = problem()
    loss, y = cases()[name]
    expected = dense(model, loss, x, y)
    batch = sanc.Batch(loss, x, y, outputs=lambda x, y: model(x))
    oracle = AutogradOracle(Leaves(list(model.parameters()), [0.0] * 4), hvp="gauss-newton")
    sample = Sample("closure", batch.parts(microbatch), len(batch), None)
    oracle.bind(sample, sample, sample)
    operator = oracle.hessian(oracle.read_point())
    matrix = torch.stack([operator(column) for column in torch.eye(len(expected)).double()])
    assert torch.allclose(matrix, expected, rtol=1e-10, atol=1e-12)
    assert float(torch.linalg.eigvalsh(expected)[0]) > -1e-12
    assert oracle.meter.nhev == len(expected)


def test_weight_decay_is_added_and_dropout_draws_the_same_masks():
    model, x = problem()
    loss, y = cases()["squares"]
    masked = torch.nn.Sequential(model, torch.nn.Dropout(0.5))
    batch = sanc.Batch(loss, x, y, outputs=lambda x, y: masked(x))
    leaves = Leaves(list(model.parameters()), [0.5] * 4)
    oracle = AutogradOracle(leaves, hvp="gauss-newton")
    sample = Sample("closure", batch.parts(None), len(batch), 3)
    oracle.bind(sample, sample, sample)
    point = oracle.read_point()
    v = torch.ones_like(point)
    first = oracle.hessian(point)(v)
    assert torch.equal(first, oracle.hessian(point)(v))
    torch.manual_seed(3)
    mask = (masked[1](torch.ones(12, 3).double())).detach()
    expected = dense(model, lambda z, x, y: loss(z * mask, x, y), x, y) @ v + 0.5 * v
    assert torch.allclose(first, expected)


@pytest.mark.parametrize("optimiser", [sanc.SANC, sanc.ARC])
def test_a_network_is_trained_with_it(optimiser):
    model, x = problem(seed=1)
    loss, y = cases()["cross-entropy"]
    opt = optimiser(model.parameters(), hvp="gauss-newton", seed=0)
    batch = sanc.Batch(loss, x, y, outputs=lambda x, y: model(x))
    losses = [float(opt.step(batch)) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    assert opt.hvp == opt.record.hvp == "gauss-newton"
    opt.load_state_dict(opt.state_dict())
    restored = optimiser(model.parameters(), seed=0)
    restored.load_state_dict(opt.state_dict())
    assert restored.hvp == "gauss-newton"


def test_ritz_values_are_not_negative_where_the_hessian_is_indefinite():
    model, x = problem(outputs=1, seed=2)
    y = 5.0 * torch.randn(12, 1).double()
    loss = lambda z, x, y: (z - y).square().mean()
    values = {}
    for mode in ("auto", "gauss-newton"):
        opt = sanc.SANC(model.parameters(), preset="paper", hvp=mode, krylov_dim=30, epsilon=1e-12, seed=0)
        start = [p.detach().clone() for p in model.parameters()]
        opt.step(sanc.Batch(loss, x, y, outputs=lambda x, y: model(x)))
        values[mode] = opt.record.ritz_value
        with torch.no_grad():
            for p, first in zip(model.parameters(), start, strict=True):
                p.copy_(first)
    assert values["auto"] < -1e-3 and values["gauss-newton"] > -1e-9


def test_missing_outputs_are_named_before_anything_changes():
    model, x = problem()
    loss, y = cases()["squares"]
    before = [p.detach().clone() for p in model.parameters()]
    opt = sanc.SANC(model.parameters(), hvp="gauss-newton")
    for closure in (lambda: loss(model(x), x, y), sanc.Batch(lambda x, y: loss(model(x), x, y), x, y)):
        with pytest.raises(sanc.errors.ArgumentError, match=r"closure is no batch with outputs.*outputs="):
            opt.step(closure)
    with pytest.raises(sanc.errors.ArgumentTypeError, match=r"outputs returned.*one real tensor"):
        opt.step(sanc.Batch(loss, x, y, outputs=lambda x, y: (model(x), x)))
    with pytest.raises(sanc.errors.ArgumentError, match="does not depend on the outputs"):
        opt.step(sanc.Batch(lambda z, x, y: loss(model(x), x, y), x, y, outputs=lambda x, y: model(x)))
    with pytest.raises(sanc.errors.ArgumentTypeError, match="outputs = 3"):
        sanc.Batch(loss, x, y, outputs=3)
    with pytest.raises(sanc.errors.ArgumentError, match="hvp = 'gauss-newton'"):
        sanc.minimize(lambda x: x.square().sum(), torch.ones(2), hvp="gauss-newton")
    assert all(torch.equal(p, first) for p, first in zip(model.parameters(), before, strict=True))
    assert opt.record is None
