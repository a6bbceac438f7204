"""The members of an iteration that runs and optimisers use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.record import Record
from sanc.core.space import Vector
from sanc.core.units import Units


class IterationProtocol(Protocol):
    """The members of an iteration that runs and optimisers use. `Iteration` and `MinibatchIteration` have them.

    `numbers`, `vectors` and `tensors` are its saved state, which `check` validates and `restore` reads.
    `replace_numbers` replaces numbers of the state of second-order steps, such as σ and the units, and `set_tolerance`
    the tolerance up to which they minimise the model. `snapshot` and `roll_back` undo an iteration that raised.
    `rearrange` adapts vectors of the state after parameters have joined or left; `reset` deletes them. `read_record`
    returns the complete record of the last iteration if `iterate` returned before the results of its step were known;
    otherwise None. `average` and `gradient_point` convert between the two points of the averaged phase.

    Attributes
    ----------
    method : Method
        The composition of pieces.
    state : State
        That of the last iteration; its `iteration` counts the iterations.
    stopping_test_holds : bool
        Whether the paper's stopping test (2.7) holds.
    averages : bool
        Whether it has an averaged phase, which needs gradients only.
    rates : sequence of float
        Factors of the step size, one for each parameter.
    has_returned : bool
        Whether the last iteration returned to an earlier point.
    units : Units
        Units of the first point of an exact objective.
    grad_norm : float
        ‖g‖ in the last second-order iteration; 0 before the first.
    """

    method: Method
    state: Any
    stopping_test_holds: bool
    averages: bool
    rates: Sequence[float]
    has_returned: bool

    @property
    def units(self) -> Units: ...
    @property
    def grad_norm(self) -> float: ...
    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]: ...
    def read_record(self) -> Record | None: ...
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
    def rearrange(self, places: Sequence[int | None], rearrange: Any, x: Any, shapes: Any) -> None: ...
    def reset(self) -> None: ...
    def average(self, y: Vector) -> Vector: ...
    def gradient_point(self, x: Vector) -> Vector: ...
