"""What the laboratory's modules share in checking what a person asked for."""

from __future__ import annotations

from collections.abc import Collection

from sanc import ArgumentError, errors


def one_of(what: str, value: str, known: Collection[str]) -> str:
    """Return a value that is known, or say in an `ArgumentError` which is nearest."""
    if value not in known:
        raise ArgumentError(f"{what} = {value!r} is not known: {errors.nearest(str(value), known)}")
    return value
