"""The paper's networks with random rows of the shape of its data, for `benchmarks.step` and `benchmarks.hvp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import sanc
from sanc.lab import models

Build = tuple[Callable[[], nn.Module], tuple[int, ...], int]
NETWORKS: Mapping[str, Build] = {
    "logistic": (lambda: nn.Linear(123, 2), (123,), 2),
    "mlp": (lambda: models.mlp(19, 7), (19,), 7),
    "cnn-mnist": (lambda: models.cnn(1, 28, 10), (1, 28, 28), 10),
    "cnn-cifar": (lambda: models.cnn(3, 32, 10), (3, 32, 32), 10),
    "small-logistic": (lambda: nn.Linear(8, 2), (8,), 2),
    "small": (lambda: models.mlp(10, 3, widths=(30, 50)), (10,), 3),
}
"""Constructor, shape of a row and number of classes; the small ones are for --quick."""


class Network:
    """A network with random rows and labels on a device."""

    def __init__(self, name: str, rows: int, device: torch.device | str) -> None:
        build, shape, classes = NETWORKS[name]
        generator = torch.Generator().manual_seed(0)
        self.name, self.device = name, torch.device(device)
        self.model = build()
        models.initialise(self.model, 0)
        self.model.to(device)
        self.leaves = list(self.model.parameters())
        self.size = sum(p.numel() for p in self.leaves)
        self.x = torch.randn(rows, *shape, generator=generator).to(device)
        self.y = torch.randint(classes, (rows,), generator=generator).to(device)
        self._start = [p.detach().clone() for p in self.leaves]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        return nn.functional.cross_entropy(self.model(x), y)

    def batch(self) -> sanc.Batch:
        """Return all rows as one batch."""
        return sanc.Batch(self.loss, self.x, self.y)

    def reset(self) -> None:
        """Restore the initial parameters."""
        with torch.no_grad():
            for p, start in zip(self.leaves, self._start, strict=True):
                p.copy_(start)
