"""Checks of a saved state of the iteration on samples, and its vectors when other parameters take part."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from sanc.core.saved import require_fields, require_vector_names, state_error, vectors_of
from sanc.errors import ArgumentError
from sanc.minibatch.state import INITIAL_DISTANCE, State

_AGE_LOSS = 0.5
"""When parameters join, the age of the others in the average is limited to 1 minus this share of all steps, because
their best values change."""

Fit = Callable[[Tensor | None, Tensor], Tensor]
"""Returns a vector of the present parameters: for those that stay, the entries of the first argument, a vector of the
earlier parameters (None: zero); for the others, the entries of the second argument."""

_FOR_DISTANCE = ("averaging_start", "direction_sum")
"""Names of the vectors of the distance bound."""


def check_state(where: str, numbers: Any, vectors: Collection[str], *, has_metric: bool) -> None:
    """Raise an error unless these are numbers and names of vectors of a saved state, which belong together."""
    require_fields(where, numbers, State, ("second_order",))
    require_vector_names(where, vectors, State)
    if numbers["steps"] and not has_metric:
        raise state_error(f"{where}['steps']", numbers["steps"], "0, since the metric is missing,")
    in_second_order_phase = not numbers["averaged"] and not math.isnan(numbers["last_loss"])
    uses_distance = numbers["distance"] > INITIAL_DISTANCE or any(name in vectors for name in _FOR_DISTANCE)
    required = (*(("safe_point",) if in_second_order_phase else ()), *(_FOR_DISTANCE if uses_distance else ()))
    for name in required:
        if name not in vectors:
            raise ArgumentError(f"{where} comes without the vector {name!r}: pass all that was saved.")


def rearranged_vectors(state: State, fitted: Fit, x: Tensor, *, joins: bool) -> dict[str, Any]:
    """Return the fields of the state for other parameters with the values x; `joins`: some of them are new."""
    zeros = torch.zeros_like(x)
    fills = {
        "offset": zeros,
        "last_written_x": x,
        "safe_point": x,
        "averaging_start": x,
        "direction_sum": zeros,
        "joined_at": zeros + state.steps,
    }
    vectors = vectors_of(state)
    changes: dict[str, Any] = {name: fitted(vector, fills[name]) for name, vector in vectors.items()}
    if joins:
        joined_at = fitted(vectors.get("joined_at"), fills["joined_at"]).clamp(min=_AGE_LOSS * state.steps)
        changes |= {"joined_at": joined_at, "last_extension": state.steps}
    return changes
