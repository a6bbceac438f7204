"""Counts of cases and failures of the fault suite, for the page docs/results/faults.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def tally(record_property: Callable[[str, Any], None]) -> Callable[[str, int, Sequence[Any]], None]:
    """Return a function that records the cases and failures of a kind, and fails if there is any failure."""

    def record(what: str, cases: int, failures: Sequence[Any]) -> None:
        record_property("faults", [what, cases, len(failures)])
        assert cases > 0
        assert not failures, f"{len(failures)} of {cases}: {list(failures)[:10]}"

    return record
