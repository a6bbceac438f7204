"""A small classifier with its data, and the closures of its loss, for the tests of optimisers."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

import sanc
from tensors import flat

FAMILY = [sanc.SANC, sanc.SCR, sanc.ARC, sanc.CR, sanc.CRM, sanc.NCD]


def make(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(60, 5, dtype=dtype), torch.randint(0, 3, (60,))
    return model, x, y


def loss_of(model, x, y):
    return lambda: nn.functional.cross_entropy(model(x), y)


def closures(cls, model, x, y):
    """Return closures on three different samples, or on one for ARC, which is exact."""
    kinds = {"closure": loss_of(model, x[:20], y[:20])}
    if cls is not sanc.ARC:
        kinds["hessian"] = loss_of(model, x[20:40], y[20:40])
        kinds["objective"] = loss_of(model, x[40:], y[40:])
    return kinds


def snapshot(model, opt):
    return flat(model).clone(), opt._iteration.state, asdict(opt._driver.meter), opt.record
