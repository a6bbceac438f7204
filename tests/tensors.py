"""Small functions of tensors and random numbers."""

from __future__ import annotations

import torch


def flat(model):
    """Return the parameters of a model as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def torch_number():
    """Draw a number from the global generator of torch."""
    return float(torch.rand((), dtype=torch.float64))


def normal(*shape, seed=0):
    """Return a float64 tensor of normal random numbers from a generator of its own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
