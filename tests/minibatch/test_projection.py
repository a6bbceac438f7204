"""Parameters that the caller projects after every step: clamped, masked, or of bounded norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

import sanc
from sanc.minibatch.projection import find_normals, tangent_for

PROJECTIONS = {
    "clamped": lambda ps: [p.clamp_(-0.2, 0.2) for p in ps],
    "tightly clamped": lambda ps: [p.clamp_(-0.1, 0.1) for p in ps],
    "masked": lambda ps: [p.mul_(torch.arange(p.numel()).reshape(p.shape) % 2 == 0) for p in ps if p.ndim > 1],
    "of bounded norm": lambda ps: [p.copy_(torch.renorm(p, 2, 0, 0.3)) for p in ps if p.ndim > 1],
    "not negative": lambda ps: [p.clamp_(min=0) for p in ps],
    "reflected at 0": lambda ps: [p.abs_() for p in ps],
    "with rows of norm 1": lambda ps: [p.div_(p.norm(dim=1, keepdim=True)) for p in ps if p.ndim > 1],
}


def trained(style, projection, seed=0, steps=400, look=None):
    """Return the loss on all data after training with a projection after every step."""
    torch.manual_seed(seed)
    x = torch.randn(1024, 8)
    y = torch.tanh(x @ torch.randn(8, 1))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    adam = style == "AdamW"
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3) if adam else sanc.SANC(model.parameters(), seed=0)
    for k in range(steps):
        rows = torch.randint(1024, (64,))

        def loss(rows=rows):
            return (model(x[rows]) - y[rows]).square().mean()

        def backward(loss=loss):
            opt.zero_grad()
            value = loss()
            value.backward()
            return value

        if style in ("loss", "backward"):
            with torch.no_grad():
                here = float(loss())
            returned = opt.step(loss if style == "loss" else backward)
            if look is not None:
                look(k, here, float(returned))
        else:
            backward()
            opt.step()
        with torch.no_grad():
            PROJECTIONS[projection](list(model.parameters()))
    if style == "gradients":
        opt.eval()
    with torch.no_grad():
        return float((model(x) - y).square().mean())


@pytest.mark.parametrize(
    ("style", "projection", "seeds"),
    [("loss", "clamped", 1)]
    + [pytest.param(style, projection, 5, marks=pytest.mark.slow)
       for style in ("loss", "backward", "gradients") for projection in PROJECTIONS],
)  # fmt: skip
def test_projected_parameters_train_as_with_adamw(style, projection, seeds):
    """Without regard to the projection the loss stays at its start, about 0.95."""
    steps = 150 if seeds == 1 else 600
    ratios = [trained(style, projection, s, steps) / trained("AdamW", projection, s, steps) for s in range(seeds)]
    assert sorted(ratios)[seeds // 2] < 1.05


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
def test_a_change_of_one_bit_is_detected(style):
    """Beside weights of norm 1e4 it changes no norm; without a change none is reported, also after `eval()`."""
    p, big = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.full((10_000,), 100.0))
    opt, draw = sanc.SANC([p, big], seed=0, curvature=False), torch.Generator().manual_seed(0)

    def step():
        noise = torch.randn(4, generator=draw)

        def closure():
            opt.zero_grad()
            loss = (p - noise).square().sum() + (big - 100.0).square().sum() * 1e-6
            if style != "loss":
                loss.backward()
            return loss

        if style == "gradients":
            closure()
        opt.step() if style == "gradients" else opt.step(closure)

    seen = []
    for k in range(80):
        step()
        if k == 40:
            with torch.no_grad():
                p[0] = torch.nextafter(p[0], torch.tensor(9.0))
        if k % 7 == 0:
            opt.eval()
            opt.train()
        opt._iteration.finish_step()
        seen.append(opt._iteration.state.caller.caller_changed or opt._iteration.state.caller.projection_countdown > 0)
    assert seen.index(True) == 41 and seen[41:].count(True) < 25


def test_the_loss_of_a_step_is_that_of_the_projected_point():
    seen = []
    trained("loss", "clamped", steps=80, look=lambda k, here, returned: seen.append((k, here, returned)))
    assert all(returned == pytest.approx(here, rel=1e-5) for k, here, returned in seen if k >= 60)


def test_one_change_by_the_caller_is_kept_and_averaging_continues():
    torch.manual_seed(0)
    p = nn.Parameter(torch.ones(6))
    opt = sanc.SANC([p], seed=0, curvature=False)
    draw = torch.Generator().manual_seed(1)
    for k in range(150):
        noise = torch.randn(6, generator=draw)
        opt.step(lambda noise=noise: (p - noise).square().sum())
        if k == 60:
            with torch.no_grad():
                p[0] += 3.0
            before = float(p[0].detach())
        if k == 61:
            assert abs(float(p[0].detach()) - before) < 0.5  # it is not undone
            assert opt._iteration.state.caller.projection_countdown > 0
    assert opt._iteration.state.caller.projection_countdown == 0 and opt._iteration.state.caller.last_written_x is None
    assert opt.record.branch is sanc.Branch.AVERAGED and float(p[0].detach()) < before


@pytest.mark.parametrize(("scaled", "dims"), [("rows", 1), ("columns", 0), ("a parameter", (0, 1))])
def test_steps_at_a_bounded_norm_keep_it_to_first_order(scaled, dims):
    """P removes the normal component of slices whose norm would grow, and changes nothing where it would shrink."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(3,), (4, 5)]
    bias = torch.randn(3, generator=draw)
    last, w, step, v = torch.randn(4, 4, 5, generator=draw).unbind()
    last, w = (part / torch.linalg.vector_norm(part, dim=dims, keepdim=True) for part in (last, w))

    def flat(matrix):
        return torch.cat([bias, matrix.reshape(-1)])

    written = w * (1.0 + 0.1 * torch.rand(torch.linalg.vector_norm(w, dim=dims, keepdim=True).shape, generator=draw))
    tangent = tangent_for(find_normals(flat(last), flat(written), flat(w), shapes), flat(step), shapes)
    found = tangent(flat(v))
    expected = torch.where((w * step).sum(dims, keepdim=True) > 0.0, v - w * (w * v).sum(dims, keepdim=True), v)
    assert torch.allclose(found[3:].reshape(4, 5), expected, atol=1e-6) and torch.equal(found[:3], bias)
    unchanged = find_normals(flat(last), flat(w), flat(w), shapes)  # the caller has changed nothing
    assert not any(bool(part.any()) for part in unchanged)


def smallest_in_ball(a, b, radius):
    """Return argmin ½wᵀAw − bᵀw with ‖w‖ ≤ r, from the root of its secular equation."""
    values, vectors = np.linalg.eigh(a)
    b = vectors.T @ b

    def excess(shift):
        return np.linalg.norm(b / (values + shift)) - radius

    shift = 0.0 if excess(0.0) <= 0.0 else brentq(excess, 0.0, np.linalg.norm(b) / radius)
    return vectors @ (b / (values + shift))


@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_rows_in_a_ball_reach_the_constrained_minimum(style):
    """A metric that is not a multiple of the identity has another fixed point, unless the normal is removed."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(512, 6)) * [1.0, 0.5, 2.0, 1.0, 0.2, 1.0]
    y = x @ draw.normal(size=(6, 3)) + 0.1 * draw.normal(size=(512, 3))
    best = np.stack([smallest_in_ball(x.T @ x, x.T @ column, 0.7) for column in y.T])
    torch.manual_seed(0)
    data, targets = torch.tensor(x).float(), torch.tensor(y).float()
    model = nn.Linear(6, 3, bias=False)
    opt = sanc.SANC(model.parameters(), seed=0)
    for _ in range(300):
        rows = torch.randint(512, (64,))

        def loss(rows=rows):
            return (model(data[rows]) - targets[rows]).square().mean()

        if style == "loss":
            opt.step(loss)
        else:
            opt.zero_grad()
            loss().backward()
            opt.step()
        with torch.no_grad():
            model.weight.copy_(torch.renorm(model.weight, 2, 0, 0.7))
    lowest, reached = (np.square(x @ w.T - y).mean() for w in (best, model.weight.detach().numpy()))
    assert reached == pytest.approx(lowest, rel=5e-3)
