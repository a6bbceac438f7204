"""Leaves whose terms are added one by one: the products are right, whatever else looks at the graph."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import sanc
from sanc.oracles import factors
from sanc.oracles.autograd import AutogradOracle
from sanc.oracles.base import Meter
from sanc.oracles.layout import Layout, Sample

ROWS = torch.tensor([0, 2, 2])
USES = {  # the shape of w, what is done with it, and how many uses are known
    "linear": ((5, 5), lambda w, b, x: torch.cos(nn.functional.linear(x, w, b)), 1),
    "linear of sequences": ((5, 5), lambda w, b, x: torch.cos(nn.functional.linear(x[:2].expand(2, 2, 5), w, b)), 1),
    "second": ((5, 5), lambda w, b, x: torch.cos(x @ w + b), 1),
    "first": ((5, 5), lambda w, b, x: torch.cos(w @ x.t() * b[:, None]), 1),
    "first, transposed": ((5, 5), lambda w, b, x: torch.cos(w.t() @ x.t() * b[:, None]), 1),
    "transposed twice": ((5, 5), lambda w, b, x: torch.cos(x @ w.t().t() + b), 1),
    "both": ((5, 5), lambda w, b, x: torch.cos(w @ w.t() * b), 2),
    "shared": ((5, 5), lambda w, b, x: torch.cos(torch.tanh(torch.tanh(x @ w + b) @ w.t()) @ w), 3),
    "linear loss": ((5, 5), lambda w, b, x: x @ w + b**3, 1),
    "a vector": ((5, 5), lambda w, b, x: torch.cos(w @ x[0] + b), 1),
    "a vector, twice": ((5, 5), lambda w, b, x: torch.cos(w @ torch.tanh(w @ x[0] + b)), 2),
    "batches": ((2, 5, 5), lambda w, b, x: torch.cos(torch.bmm(x.expand(2, 3, 5), w) + b), 1),
    "batches, twice": ((2, 5, 5), lambda w, b, x: torch.cos(w @ torch.tanh(w @ x.mT + b[:, None])), 2),
    "einsum": ((5, 2, 5), lambda w, b, x: torch.cos(torch.einsum("bi,ijk->bjk", x, w) + b), 1),
    "convolution": ((5, 3, 2), lambda w, b, x: torch.cos(nn.functional.conv1d(x, w, b, stride=2, padding=1)), 1),
    "groups": ((5, 1, 3), lambda w, b, x: torch.cos(nn.functional.conv1d(x.t(), w, b, groups=5, dilation=1)), 1),
    "turned convolution": ((3, 5, 2), lambda w, b, x: torch.cos(nn.functional.conv_transpose1d(x, w, b)), 1),
    "convolution, twice": (
        (3, 3, 3),
        lambda w, b, x: torch.cos(
            nn.functional.conv1d(torch.tanh(nn.functional.conv1d(x, w, padding=1) + b), w, padding=1)
        ),
        2,
    ),
    "embedding": ((9, 5), lambda w, b, x: torch.cos(nn.functional.embedding(ROWS, w) * b), 1),
    "tied": ((9, 5), lambda w, b, x: torch.cos(torch.tanh(nn.functional.embedding(ROWS, w) + b) @ w.t()), 2),
    "rows": ((9, 5), lambda w, b, x: torch.cos(torch.tanh(w[ROWS] + b) @ w.t()), 2),
    "selected": ((9, 5), lambda w, b, x: torch.cos(torch.tanh(w.index_select(0, ROWS) + b) @ w.t()), 2),
    "scaled": ((5, 5), lambda w, b, x: torch.cos(torch.addmm(b, x, w, alpha=2.0)), 0),
    "elsewhere too": ((5, 5), lambda w, b, x: torch.cos(x @ w + b) + w.pow(3).sum(), 0),
}


@pytest.fixture
def apart(monkeypatch):
    """Add the terms of small leaves one by one, too."""
    monkeypatch.setattr(factors, "SMALL", 0)


EACH_MODE = ("double-backward", "forward-over-reverse", "linearised", "finite-difference")


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("name", USES)
def test_products_of_one_heavy_leaf(name):
    torch.manual_seed(0)
    shape, form, count = USES[name]
    w, b, x = (
        nn.Parameter(torch.randn(shape).double()),
        nn.Parameter(torch.randn(5).double()),
        torch.randn(3, 5).double(),
    )
    closure = lambda: form(w, b, x).sum()
    sample = Sample("closure", [(0.25, closure), (0.5, closure)], 1, None)
    whole = Sample("closure", [(0.75, closure)], 1, None)
    size = w.numel()
    at = torch.cat([w.detach().reshape(-1), b.detach()])
    H = 0.75 * torch.autograd.functional.hessian(lambda at: form(at[:size].view(shape), at[size:], x).sum(), at)
    H[range(size, size + 5), range(size, size + 5)] += 0.1
    v, begin = torch.randn(size + 5).double(), torch.randn(size + 5).double()
    for hvp in EACH_MODE:
        close = 1e-12 if hvp != "finite-difference" else 1e-7
        for samples in (sample, whole):
            oracle = AutogradOracle(Layout([w, b], [0.0, 0.1]), *[samples] * 3, hvp=hvp, meter=Meter())
            at = oracle.start()
            operator, total = oracle.hessian(at), begin.clone()
            operator.add(v, total)  # as where memory is short
            torch.testing.assert_close(total, begin + H @ v, rtol=close, atol=close)
            for u in (v, begin):  # the first, and one that repeats a recording
                torch.testing.assert_close(operator(u), H @ u, rtol=close, atol=close)
            assert torch.equal(oracle.layout.flatten([w, b]), at)
    layout, roots = Layout([w, b], [0.0, 0.0]), [closure().grad_fn]
    assert [place for place, _ in factors.uses_apart(layout, roots, 1.0, always=0.5)] == [0] * count
    assert [place for place, _ in factors.uses_apart(layout, roots, 1.0)] == [0] * (count if count > 1 else 0)
    assert not factors.uses_apart(layout, roots, float(count + 1))
    handle = w.register_hook(lambda g: None)  # somebody's
    assert not factors.uses_apart(layout, roots, 1.0, always=0.5)
    handle.remove()


def whole_oracle(closure, leaves, hvp):
    sample = Sample("closure", [(1.0, closure)], 1, None)
    return AutogradOracle(Layout(leaves, [0.0] * len(leaves)), *[sample] * 3, hvp=hvp, meter=Meter())


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("hvp", EACH_MODE[1:])  # double backward would run the hooks twice, whatever is done here
@pytest.mark.parametrize("where", ["output", "view", "convolution", "embedding"])
def test_hooks_on_the_way_change_products_as_they_change_gradients(where, hvp):
    torch.manual_seed(0)
    halved = lambda tensor: tensor.register_hook(lambda g: 0.5 * g) and tensor
    shapes = {"convolution": (5, 5, 1), "embedding": (9, 5)}
    w, x = nn.Parameter(torch.randn(shapes.get(where, (5, 5))).double()), torch.randn(3, 5).double()

    def closure():
        if where == "output":
            return torch.cos(halved(torch.tanh(halved(x @ w)) @ w)).sum()
        if where == "view":
            turned = halved(w.t())
            return torch.cos(torch.tanh(x @ turned) @ turned).sum()
        if where == "convolution":
            conv = nn.functional.conv1d
            return torch.cos(halved(conv(torch.tanh(halved(conv(x[:, :, None], w))), w))).sum()
        return torch.cos(torch.tanh(halved(nn.functional.embedding(ROWS, w))) @ w.t()).sum()

    oracle = whole_oracle(closure, [w], hvp)
    at, v = oracle.start(), torch.randn(w.numel()).double()
    step, sides = 1e-5, []
    for side in (step, -step):  # what the hooks make of the gradient, differenced
        with torch.no_grad():
            w.copy_((at + side * v).view_as(w))
        sides.append(torch.autograd.grad(closure(), w)[0].reshape(-1))
    with torch.no_grad():
        w.copy_(at.view_as(w))
    right = (sides[0] - sides[1]) / (2 * step)
    operator, total = oracle.hessian(at), torch.zeros_like(v)
    operator.add(v, total)
    for product in (operator(v), operator(v), total):
        torch.testing.assert_close(product, right, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("hvp", EACH_MODE)
def test_a_function_that_keeps_a_leaf_is_not_the_leaf(hvp):
    torch.manual_seed(0)
    w, x = nn.Parameter(torch.randn(5, 5).double()), torch.randn(3, 5).double()

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(h):
            return h.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.variable = w

        @staticmethod
        def backward(ctx, g):
            return g

        @staticmethod
        def jvp(ctx, tangent):
            return tangent.clone()

    form = lambda w, kept: torch.cos(kept(torch.tanh(x @ w)) @ w).sum()
    closure = lambda: form(w, Kept.apply)
    H = torch.autograd.functional.hessian(lambda at: form(at.view(5, 5), lambda h: h), w.detach().reshape(-1))
    oracle, v = whole_oracle(closure, [w], hvp), torch.randn(25).double()
    operator, total = oracle.hessian(oracle.start()), torch.zeros_like(v)
    operator.add(v, total)
    for product in (operator(v), total):
        torch.testing.assert_close(product, H @ v, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("form", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr])
@pytest.mark.parametrize("hvp", ["double-backward", "finite-difference"])  # torch has no forward mode for these
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_data_before_a_heavy_leaf(form, hvp):
    torch.manual_seed(0)
    w, x = nn.Parameter(torch.randn(5, 5).double()), torch.randn(3, 5).double() * torch.tensor([1, 0, 1, 0, 1])
    rows = form(x)
    oracle = whole_oracle(lambda: torch.cos(torch.tanh(rows @ w) @ w).sum(), [w], hvp)
    at, v, total = oracle.start(), torch.randn(25).double(), torch.zeros(25).double()
    H = torch.autograd.functional.hessian(lambda at: torch.cos(torch.tanh(x @ at.view(5, 5)) @ at.view(5, 5)).sum(), at)
    oracle.hessian(at).add(v, total)
    torch.testing.assert_close(total, H @ v, rtol=1e-6, atol=1e-6)


def test_where_terms_are_not_worth_to_be_parted():
    def found(w, x, most=1.0):
        return len(factors.uses_apart(Layout([w], [0.0]), [torch.cos(torch.tanh(x @ w) @ w).sum().grad_fn], most))

    large, small = nn.Parameter(torch.randn(80, 80)), nn.Parameter(torch.randn(30, 30))
    assert found(large, torch.randn(3, 80)) == 2
    assert found(large, torch.randn(100, 80)) == 0  # what arrives at the uses is larger than the leaf
    assert found(small, torch.randn(3, 30)) == 0


@contextmanager
def forward_mode_of_checkpoints(hvp):
    """Skip a test where torch has none: 2.11 does not, 2.13 does."""
    try:
        yield
    except sanc.SecondDerivativeError:
        if hvp not in ("forward-over-reverse", "linearised"):
            raise
        pytest.skip(f"torch {torch.__version__} has no forward mode of checkpoints")


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("hvp", EACH_MODE)
def test_what_was_not_kept_is_computed_again_as_often_as_for_a_gradient(hvp):
    torch.manual_seed(0)
    calls, norm = [], nn.BatchNorm1d(6).double()
    w, x = nn.Parameter(torch.randn(6, 6).double()), torch.randn(4, 6).double()

    def cell(h):
        calls.append(1)
        return torch.tanh(norm(h @ w))

    def closure():
        h = x
        for _ in range(4):
            h = torch.utils.checkpoint.checkpoint(cell, h, use_reentrant=False)
        return torch.cos(h).sum()

    oracle = whole_oracle(closure, [w], hvp)
    operator, v, total = oracle.hessian(oracle.start()), torch.randn(36).double(), torch.zeros(36).double()
    with forward_mode_of_checkpoints(hvp):
        first = operator(v)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    calls.clear()
    operator.add(v, total)
    operator.release()
    # A forward and a backward pass, twice for a difference; the graph of a double backward is there already.
    assert len(calls) == {"double-backward": 4, "finite-difference": 16}.get(hvp, 8)
    torch.testing.assert_close(first, total, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_differences_of_a_constant_gradient_are_zero():
    w, b = nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(3))
    slope = 1e4 * torch.randn(40)
    oracle = whole_oracle(lambda: (slope * w).sum() + (b**2).sum(), [w, b], "finite-difference")
    at, v, total = oracle.start(), torch.randn(43), torch.zeros(43)
    operator = oracle.hessian(at)
    operator.add(v, total)
    for product in (operator(v), total):
        assert (product[:40] == 0).all()
        torch.testing.assert_close(product[40:], 2 * v[40:], rtol=1e-2, atol=1e-2)
