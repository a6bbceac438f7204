"""Checks of a saved state before it is used: names, types and ranges of its entries."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from sanc.errors import ArgumentError, shown


def state_error(where: str, value: object, expected: str) -> ArgumentError:
    """Return the error for an entry of a saved state that is not as `expected`."""
    return ArgumentError(
        f"{where} = {shown(value)} cannot be used: expected {expected}. Pass a state as it was saved, or an earlier "
        "one if its file is damaged."
    )


def require_mapping(where: str, value: object) -> Mapping[str, Any]:
    """Return `value` if it is a mapping."""
    if not isinstance(value, Mapping):
        raise state_error(where, value, "a mapping")
    return value


def require_count(where: str, value: object) -> None:
    """Raise an error unless `value` is an integer ≥ 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise state_error(where, value, "an integer ≥ 0")


def require_fields(where: str, saved: object, cls: Any, other_names: Collection[str] = ()) -> None:
    """Raise an error unless `saved` has the numbers of a dataclass; their defaults determine the types.

    Integers are counts, and floats are finite and not negative. A field whose default is infinite may be infinite. One
    whose default is NaN may be any number, also infinite or negative; one with the metadata "signed" may be negative,
    and one with "positive" may not be 0.
    `other_names` are names of further entries that may be present.
    """
    entries = require_mapping(where, saved)
    number_fields = _number_fields(cls)
    names = {item.name for item in number_fields}.union(other_names)
    if unknown := set(entries) - names:
        raise state_error(where, sorted(map(str, unknown)), f"no more than {sorted(names)}")
    for item in number_fields:
        if item.name not in entries:
            raise ArgumentError(f"{where} lacks {item.name!r}: pass a state of this version, as it was saved.")
        _require_field(f"{where}[{item.name!r}]", entries[item.name], item)


def _number_fields(cls: Any) -> list[Field[Any]]:
    """Return the fields of plain numbers. Vectors have the default None, and mappings a factory.

    A field with the metadata "local" differs between ranks, and is neither compared nor saved.
    """
    return [
        item
        for item in fields(cls)
        if item.default is not None and item.default_factory is MISSING and "local" not in item.metadata
    ]


def unknown_vector_error(where: str, name: str) -> ArgumentError:
    """Return the error for a vector that the iteration does not have."""
    return ArgumentError(f"{where} comes with a vector {name!r}: pass a state of the same preset.")


def numbers_of(state: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are plain numbers, not vectors."""
    return {item.name: getattr(state, item.name) for item in _number_fields(state)}


def vectors_of(state: Any) -> dict[str, Any]:
    """Return the vectors of a dataclass that are not None."""
    vectors = {item.name: getattr(state, item.name) for item in fields(state) if item.default is None}
    return {name: vector for name, vector in vectors.items() if vector is not None}


def _require_field(where: str, value: object, item: Field[Any]) -> None:
    """Raise an error unless `value` has the type and range of a field."""
    default = 0 if item.default is MISSING else item.default
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise state_error(where, value, "True or False")
    elif isinstance(default, int):
        require_count(where, value)
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise state_error(where, value, "a number")
    elif math.isnan(default) or ("signed" in item.metadata and math.isfinite(value)) or value == default == math.inf:
        return
    elif not (0.0 < float(value) < math.inf or (value == 0.0 and "positive" not in item.metadata)):
        raise state_error(where, value, "a positive number" if "positive" in item.metadata else "a finite number ≥ 0")


def require_vector(where: str, value: object, shape: tuple[int, ...]) -> None:
    """Raise an error unless `value` is a finite array or tensor of real numbers of this shape."""
    expected = f"a finite array of shape {tuple(shape)}"
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value  # the local shard of a DTensor
        kind, is_valid = "tensor", value.is_floating_point() and bool(torch.isfinite(local).all())
    elif isinstance(value, np.ndarray):
        kind, is_valid = "array", value.dtype.kind == "f" and bool(np.isfinite(value).all())
    else:
        raise state_error(where, value, expected)
    if tuple(value.shape) != tuple(shape) or not is_valid:
        raise state_error(where, f"{kind} of {value.dtype}, shape {tuple(value.shape)}", expected)
