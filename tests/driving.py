"""Training in one of the three styles of closures, for the tests that compare them."""

from __future__ import annotations

import torch


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


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
