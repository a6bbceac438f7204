"""Oracle of a step without a closure, which has only the gradients that the caller's ``backward()`` computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sanc.autograd.leaves import Leaves
from sanc.autograd.vector_work import CALLED, VectorWork
from sanc.core.meter import Meter
from sanc.core.oracle import Oracle
from sanc.core.space import Vector


class GradientOnlyOracle(Oracle):
    """Returns the gradient in the leaves at every point; evaluates neither values nor products.

    Attributes
    ----------
    space, meter, parameters
        As in `Oracle`.
    g : Tensor
        The gradient, with weight decay, as a flat vector.
    vector_work : VectorWork
        Does the vector work of averaged steps.
    """

    has_values = False
    vector_work: VectorWork = CALLED

    def __init__(self, leaves: Leaves, point: Tensor, meter: Meter) -> None:
        self.space, self.parameters = leaves.space(), point
        self.meter = meter
        meter.count_gradient(1)
        self._shapes = leaves.shapes
        self.g = leaves.add_decay(leaves.flatten([leaf.grad for leaf in leaves.tensors]), point)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self._shapes

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        return math.nan, self.g

    def work_at_gradient(self, work: Any, inputs: Any) -> list[Any]:
        """Return ``work(f, ∇f, inputs)``; f is unknown, and 0 stands for it."""
        value = self.g.new_zeros((), dtype=torch.float64)
        return self.vector_work.step(work, value, self.g, inputs)

    def value(self, x: Vector) -> NoReturn:
        raise NotImplementedError

    def hessian(self, x: Vector) -> NoReturn:
        raise NotImplementedError
