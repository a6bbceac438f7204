"""Checks of a saved state before anything of it is used: names, types and ranges."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from sanc.errors import ArgumentError, shown


def refuse(where: str, value: object, wanted: str) -> ArgumentError:
    """Return the error for an entry of a state."""
    return ArgumentError(
        f"{where} = {shown(value)} cannot be used: {wanted} belongs there. Pass a state as it was saved, or an "
        "earlier one if its file is damaged."
    )


def require_mapping(where: str, value: object) -> Mapping[str, Any]:
    """Accept a mapping."""
    if not isinstance(value, Mapping):
        raise refuse(where, value, "a mapping")
    return value


def require_count(where: str, value: object) -> None:
    """Accept an integer that is not negative."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise refuse(where, value, "an integer ≥ 0")


def require_fields(where: str, found: object, kind: Any, more: Collection[str] = ()) -> None:
    """Accept the numbers of a dataclass, by the types of their defaults.

    Integers are counts, and floats are finite and not negative. A field whose default is NaN may be NaN; one with the
    metadata "signed" may be negative, and one with "positive" may not be 0. `more` names further entries.
    """
    known = require_mapping(where, found)
    items = _numbers(kind)
    names = {item.name for item in items}.union(more)
    if strange := set(known) - names:
        raise refuse(where, sorted(map(str, strange)), f"no more than {sorted(names)}")
    for item in items:
        if item.name not in known:
            raise ArgumentError(f"{where} lacks {item.name!r}: pass a state of this version, as it was saved.")
        _require_field(f"{where}[{item.name!r}]", known[item.name], item)


def _numbers(kind: Any) -> list[Field[Any]]:
    """Return the fields that hold plain numbers; vectors have the default None, and mappings a factory."""
    return [item for item in fields(kind) if item.default is not None and item.default_factory is MISSING]


def require_vector_names(where: str, vectors: Collection[str], kind: Any) -> None:
    """Accept the names of vectors of a dataclass."""
    known = {item.name for item in fields(kind) if item.default is None}
    for name in vectors:
        if name not in known:
            raise ArgumentError(f"{where} comes with a vector {name!r}: pass a state of the same preset.")


def numbers_of(state: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are plain numbers, not vectors."""
    return {item.name: getattr(state, item.name) for item in _numbers(state)}


def vectors_of(state: Any) -> dict[str, Any]:
    """Return the vectors of a dataclass that are not None."""
    found = {item.name: getattr(state, item.name) for item in fields(state) if item.default is None}
    return {name: vector for name, vector in found.items() if vector is not None}


def _require_field(where: str, value: object, item: Field[Any]) -> None:
    default = 0 if item.default is MISSING else item.default
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise refuse(where, value, "True or False")
    elif isinstance(default, int):
        require_count(where, value)
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise refuse(where, value, "a number")
    elif math.isnan(default) or ("signed" in item.metadata and math.isfinite(value)):
        return
    elif not (0.0 < float(value) < math.inf or (value == 0.0 and "positive" not in item.metadata)):
        raise refuse(where, value, "a positive number" if "positive" in item.metadata else "a finite number ≥ 0")


def require_vector(where: str, value: object, shape: tuple[int, ...]) -> None:
    """Accept a finite array or tensor of real numbers of this shape."""
    wanted = f"a finite array of shape {tuple(shape)}"
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value  # of a tensor that is sharded over ranks
        kind, fits = "tensor", value.is_floating_point() and bool(torch.isfinite(local).all())
    elif isinstance(value, np.ndarray):
        kind, fits = "array", value.dtype.kind == "f" and bool(np.isfinite(value).all())
    else:
        raise refuse(where, value, wanted)
    if tuple(value.shape) != tuple(shape) or not fits:
        raise refuse(where, f"{kind} of {value.dtype}, shape {tuple(value.shape)}", wanted)
