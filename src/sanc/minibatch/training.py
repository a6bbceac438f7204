"""The members of an iteration that optimisers use, and the iteration of a method without an averaged phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sanc.core.iteration import Iteration
from sanc.core.oracle import Oracle
from sanc.core.protocol import IterationProtocol
from sanc.core.record import Record
from sanc.core.space import Space, Vector
from sanc.minibatch.joining import VectorMap


class TrainingIteration(IterationProtocol, Protocol):
    """The members of an iteration that optimisers use, beyond those that runs use.

    `MinibatchIteration` and `SecondOrderTraining` have them. `iterate` also receives the factors of the step size, one
    for each parameter; without any, all are 1. `rearrange` adapts the state after parameters have joined
    or left. `read_record` returns the complete record of the last iteration if `iterate` returned before the results of
    its step were known; otherwise None. `average` and `gradient_point` convert between the two points of the averaged
    phase, and `on_move` is called with the parameters before and after they are moved from one to the other, on one
    rank alone or on all. All ranks that share the parameters call `before_saving` before `numbers` are saved.
    `pop_gradient_point` is called once, after an iteration without a closure, with the point that it returned.

    Attributes
    ----------
    averages : bool
        Whether it has an averaged phase, which needs gradients only.
    has_returned : bool
        Whether the last iteration returned to an earlier point.
    """

    averages: bool
    has_returned: bool

    def iterate(
        self, x: Vector, oracle: Oracle, lanczos_start: Vector | None = None, rates: Sequence[float] = ()
    ) -> tuple[Vector, Record]: ...
    def read_record(self) -> Record | None: ...
    def rearrange(
        self, earlier_indices: Sequence[int | None], vector_map: VectorMap, x: Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> None: ...
    def average(self, y: Vector) -> Vector: ...
    def gradient_point(self, x: Vector) -> Vector: ...
    def pop_gradient_point(self, x: Vector) -> Vector: ...
    def on_move(self, current: Tensor, target: Tensor, space: Space) -> None: ...
    def before_saving(self, space: Space) -> None: ...


class SecondOrderTraining(Iteration):
    """The iteration of the core as an optimiser uses it: it has no averaged phase."""

    averages = False
    has_returned = False

    def iterate(
        self, x: Vector, oracle: Oracle, lanczos_start: Vector | None = None, rates: Sequence[float] = ()
    ) -> tuple[Vector, Record]:
        """Make one iteration from `x`, and return the next point and the record; σ determines the step, not `rates`."""
        return super().iterate(x, oracle, lanczos_start)

    def read_record(self) -> None:
        """Return None: `iterate` returns a complete record."""

    def rearrange(
        self, earlier_indices: Sequence[int | None], vector_map: VectorMap, x: Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Continue with other parameters, without the vectors of the acceptance rule."""
        self.reset()

    def average(self, y: Vector) -> Vector:
        """Return y: this iteration averages nothing."""
        return y

    def gradient_point(self, x: Vector) -> Vector:
        """Return the point at which gradients are evaluated: x."""
        return x

    pop_gradient_point = gradient_point

    def on_move(self, current: Tensor, target: Tensor, space: Space) -> None:
        """Do nothing: both points of the averaged phase are x."""

    def before_saving(self, space: Space) -> None:
        """Do nothing: all ranks have the same numbers."""
