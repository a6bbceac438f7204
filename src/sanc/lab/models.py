"""The paper's networks, their initialisation, penalty and training loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sanc.errors import one_of

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
"""The paper's activations by name."""


def mlp(features: int, classes: int, kind: str = "tanh", widths: tuple[int, int] = (300, 500)) -> nn.Sequential:
    """Return a network with two hidden layers, by default of 300 and 500 neurons."""
    act = ACTIVATIONS[one_of("activation", kind, ACTIVATIONS)]
    first, second = widths
    return nn.Sequential(nn.Linear(features, first), act(), nn.Linear(first, second), act(), nn.Linear(second, classes))


def cnn(channels: int, side: int, classes: int, kind: str = "tanh") -> nn.Sequential:
    """Return a network of two 5×5 convolutions with 32 and 64 filters, each pooled by 2, and 1000 neurons."""
    act = ACTIVATIONS[one_of("activation", kind, ACTIVATIONS)]
    filters = [nn.Conv2d(channels, 32, 5, padding=2), act(), nn.MaxPool2d(2)]
    filters += [nn.Conv2d(32, 64, 5, padding=2), act(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*filters, nn.Linear(64 * (side // 4) ** 2, 1000), act(), nn.Linear(1000, classes))


def initialise(model: nn.Module, seed: int) -> None:
    """Set Xavier uniform weights and zero biases, as a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p, generator=generator)
            else:
                p.zero_()


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with the penalty (decay/2)·Σ‖W‖² on weights and none on biases."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def training_loss(model: nn.Module, x: Tensor, y: Tensor, decay: float, chunk: int = 10_000) -> float:
    """Return the cross entropy over the whole training set plus the penalty."""
    total = 0.0
    with torch.no_grad():
        for begin in range(0, len(x), chunk):
            rows = slice(begin, begin + chunk)
            total += float(nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum"))
        penalty = sum(0.5 * decay * float(p.double().square().sum()) for p in model.parameters() if p.ndim > 1)
    return total / len(x) + penalty


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the fraction of rows that are classified correctly."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())
