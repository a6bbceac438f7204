"""Training a small network in one of the three styles of steps."""

from __future__ import annotations

import torch
from torch import nn

import sanc


def drive(style, model, opt, data):
    """Make one step for each batch, in the given style."""
    for a, b in data:

        def loss(a=a, b=b):
            return (model(a) - b).square().mean()

        def conventional(loss=loss):
            opt.zero_grad()
            value = loss()
            value.backward()
            return value

        if style == "gradients":
            opt.train()
            conventional()
            opt.step()
        else:
            opt.step(loss if style == "loss" else conventional)


def network(kind="plain"):
    """Return a small network, perhaps with a layer of dropout or batch normalisation."""
    torch.manual_seed(0)
    middle = [nn.Dropout(0.3)] if kind == "dropout" else [nn.BatchNorm1d(8)] if kind == "norm" else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 1)).double()


def batches(count, size=20):
    """Return batches of a small regression."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, dtype=torch.float64, generator=generator)
    y = x.prod(1, keepdim=True) + 0.1 * torch.randn(400, 1, dtype=torch.float64, generator=generator)
    return [(x[rows], y[rows]) for rows in torch.randint(400, (count, size), generator=generator)]


def run(style, steps=30, kind="plain", **options):
    """Train the network on these batches, and return it with its optimiser."""
    model = network(kind)
    opt = sanc.SANC(model.parameters(), seed=0, **options)
    drive(style, model, opt, batches(steps))
    opt.eval()
    return model, opt
