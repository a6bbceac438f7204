"""How the fault suite counts: every case, and every case that went wrong, for the page docs/results/faults.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def tally(record_property: Callable[[str, Any], None]) -> Callable[[str, int, Sequence[Any]], None]:
    """Note how many cases of a kind were tried and which of them failed, and fail where any did."""

    def note(what: str, cases: int, failures: Sequence[Any]) -> None:
        record_property("faults", [what, cases, len(failures)])
        assert cases > 0
        assert not failures, f"{len(failures)} of {cases}: {list(failures)[:10]}"

    return note
