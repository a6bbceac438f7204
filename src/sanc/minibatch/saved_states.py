"""Checks of a saved state of the iteration on samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from sanc.core.saved import require_fields, require_vector_names, state_error
from sanc.errors import ArgumentError
from sanc.minibatch.state import INITIAL_DISTANCE, MinibatchState

_FOR_DISTANCE = ("averaging_start", "direction_sum")
"""Names of the vectors of the distance bound."""


_PREFIX = "second_order."
"""Prefix of the names of vectors in the state of second-order steps."""


def prefixed(vectors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vectors of second-order steps by the names that they have in a saved state."""
    return {_PREFIX + name: vector for name, vector in vectors.items()}


def split(vectors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the vectors of second-order steps, by their names there, and the other vectors."""
    items = vectors.items()
    second_order = {name.removeprefix(_PREFIX): vector for name, vector in items if name.startswith(_PREFIX)}
    return second_order, {name: vector for name, vector in items if not name.startswith(_PREFIX)}


def check_state(where: str, numbers: Any, vectors: Collection[str], *, has_metric: bool) -> None:
    """Raise an error unless these are numbers and names of vectors of a saved state, which belong together."""
    require_fields(where, numbers, MinibatchState, ("second_order",))
    require_vector_names(where, vectors, MinibatchState)
    if numbers["steps"] and not has_metric:
        raise state_error(f"{where}['steps']", numbers["steps"], "0, since the metric is missing,")
    in_second_order_phase = not numbers["averaged"] and not math.isnan(numbers["last_loss"])
    uses_distance = numbers["distance_bound"] > INITIAL_DISTANCE or any(name in vectors for name in _FOR_DISTANCE)
    required = (*(("first_point",) if in_second_order_phase else ()), *(_FOR_DISTANCE if uses_distance else ()))
    for name in required:
        if name not in vectors:
            raise ArgumentError(f"{where} comes without the vector {name!r}: pass all that was saved.")
