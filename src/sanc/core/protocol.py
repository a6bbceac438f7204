"""The members of an iteration that runs use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.record import Record
from sanc.core.space import Vector
from sanc.core.units import Units


class IterationProtocol(Protocol):
    """The members of an iteration that runs use. `Iteration` and `MinibatchIteration` have them.

    `numbers`, `vectors` and `tensors` (of a metric) are its saved state, which `check` validates and `restore`
    reads. `replace_numbers` replaces numbers of the state of second-order steps, such as σ and the units, and
    `set_tolerance` the tolerance up to which they minimise the model. `snapshot` and `roll_back` undo an iteration that
    raised. `reset` deletes the vectors of the state. `minibatch/training.py` has the members that only optimisers use.

    Attributes
    ----------
    method : Method
        The composition of pieces.
    state : State
        The state after the last iteration; its `iteration` counts the iterations.
    stopping_test_holds : bool
        Whether the paper's stopping test (2.7) holds.
    units : Units
        Units of the first point of an exact objective.
    grad_norm : float
        ‖g‖ in the last second-order iteration; 0 before the first.
    """

    method: Method
    state: Any
    stopping_test_holds: bool

    @property
    def units(self) -> Units: ...
    @property
    def grad_norm(self) -> float: ...
    def iterate(self, x: Vector, oracle: Oracle, lanczos_start: Vector | None = None) -> tuple[Vector, Record]: ...
    def numbers(self) -> dict[str, Any]: ...
    def vectors(self) -> dict[str, Any]: ...
    def tensors(self) -> Sequence[Mapping[str, Any]]: ...
    def check(
        self, where: str, numbers: Any, vectors: Collection[str], shapes: Any = None, tensors: Any = ()
    ) -> None: ...
    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Any = ()) -> None: ...
    def set_tolerance(self, tol: float) -> None: ...
    def replace_numbers(self, **changes: Any) -> None: ...
    def snapshot(self) -> Any: ...
    def roll_back(self, snapshot: Any) -> None: ...
    def reset(self) -> None: ...
