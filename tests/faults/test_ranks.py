"""One of two ranks has rows that are not finite, or changes parameters or options alone.

In the first case no rank makes the step, and both continue with equal parameters. In the second both raise an error.
"""

from __future__ import annotations

import re

import pytest
import torch

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


@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.float64, {}),
        (torch.float32, {"curvature": False}),
        (torch.float32, {"preset": "paper"}),
        (torch.float64, {"compare_every": 1}),
    ],
    ids=["default", "averaged", "paper", "compared in full"],
)
def test_changes_on_one_rank_alone(tally, dtype, settings):
    styles = ("loss", "backward") if "preset" in settings else ("loss", "backward", "gradients")
    changes = list(rank_jobs.DRIFTS)
    results = run_on_ranks(2, rank_jobs.drift, changes, (0, 1, 2, 5), styles, dtype, 0, settings)
    one, other = without_errors(results)
    failures = []
    for name, (kind, text, same) in one.items():
        change = getattr(rank_jobs, name.partition(",")[0])
        if (kind, same) != ("RanksError", True) or other[name] != one[name]:
            failures.append(f"{name}: {kind} {text} {same}, {other[name]}")
        elif not re.search(rank_jobs.DRIFTS[change], text):
            failures.append(f"{name}: {text}")
    tally("changes on one rank alone", len(one), failures)
