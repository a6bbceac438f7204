"""A ridge regression as a function of its penalties, and its minimum in closed form."""

from __future__ import annotations

import torch

import sanc
from tensors import normal

D = torch.float64
A, B = normal(20, 3), normal(20, seed=1)
THETA = normal(3, seed=2)


def leaf(value=1.0, size=3):
    """Return a vector of equal entries that requires a gradient."""
    return torch.full((size,), value, dtype=D, requires_grad=True)


def ridge(x, t):
    """Return the cost of a ridge regression with the penalties exp(t)."""
    return 0.5 * ((A @ x - B) ** 2).sum() + 0.5 * (t.exp() * x**2).sum()


def ridge_minimum(t):
    """Return the minimum of `ridge` by cofactors, which torch differentiates to any order in every mode."""
    a, b, c = A.T @ A + torch.diag(t.exp())
    cofactors = [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)]
    return torch.stack(cofactors, 1) @ (A.T @ B) / (a @ torch.linalg.cross(b, c))


def ridge_argmin(t, **options):
    """Return the minimum of `ridge` by `sanc.argmin`."""
    return sanc.argmin(ridge, torch.zeros(3, dtype=D), t, **options)
