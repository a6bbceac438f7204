"""The saved form of a state of the iteration on samples, and its checks.

It has the fields of all groups of a state side by side, by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from sanc.core.saved import numbers_of, require_fields, state_error, unknown_vector_error, vectors_of
from sanc.errors import ArgumentError
from sanc.minibatch.distance import INITIAL_DISTANCE
from sanc.minibatch.state import STATE_GROUPS, MinibatchState

_DISTANCE_VECTORS = ("averaging_start", "direction_sum")
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


def saved_numbers(state: MinibatchState) -> dict[str, Any]:
    """Return the numbers of a state and its groups, by name."""
    return _merged(numbers_of, state)


def saved_vectors(state: MinibatchState) -> dict[str, Any]:
    """Return the vectors of a state and its groups that are not None, by name."""
    return _merged(vectors_of, state)


def _merged(entries_of: Callable[[Any], dict[str, Any]], state: MinibatchState) -> dict[str, Any]:
    """Return the entries of a state and its groups."""
    entries = entries_of(state)
    for group in STATE_GROUPS:
        entries |= entries_of(getattr(state, group))
    return entries


def fields_from(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `MinibatchState` from saved numbers and vectors, by name."""
    groups = {
        group: kind(**{item.name: entries[item.name] for item in fields(kind) if item.name in entries})
        for group, kind in STATE_GROUPS.items()
    }
    in_groups = {item.name for kind in STATE_GROUPS.values() for item in fields(kind)}
    return {name: entry for name, entry in entries.items() if name not in in_groups} | groups


def check_state(where: str, numbers: Any, vectors: Collection[str], *, has_metric: bool) -> None:
    """Raise an error unless these are numbers and names of vectors of a saved state, which belong together."""
    kinds = (MinibatchState, *STATE_GROUPS.values())
    names = {item.name for kind in kinds for item in fields(kind)}
    vector_names = {item.name for kind in kinds for item in fields(kind) if item.default is None}
    for kind in kinds:
        require_fields(where, numbers, kind, names - vector_names - STATE_GROUPS.keys() | {"second_order"})
    for name in vectors:
        if name not in vector_names:
            raise unknown_vector_error(where, name)
    if numbers["steps"] and not has_metric:
        raise state_error(f"{where}['steps']", numbers["steps"], "0, since the metric is missing,")
    in_second_order_phase = not numbers["averaged"] and not math.isnan(numbers["last_loss"])
    uses_distance = numbers["distance_bound"] > INITIAL_DISTANCE or any(name in vectors for name in _DISTANCE_VECTORS)
    required = (*(("first_point",) if in_second_order_phase else ()), *(_DISTANCE_VECTORS if uses_distance else ()))
    for name in required:
        if name not in vectors:
            raise ArgumentError(f"{where} comes without the vector {name!r}: pass all that was saved.")
