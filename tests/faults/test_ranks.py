"""One of two ranks has rows that are not finite: no rank makes the step, and both continue with equal parameters."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from together import run_on_ranks, without_errors

pytestmark = pytest.mark.slow


def test_rows_of_nan_on_one_rank(tally):
    one, other = without_errors(run_on_ranks(2, rank_jobs.rows_of_nan))
    failures = []
    for name, (stayed, end) in one.items():
        also, same = other[name]
        if not (stayed and also and end.isfinite().all() and end.equal(same)):
            failures.append(name)
    tally("rows of NaN on one rank", len(one), failures)
