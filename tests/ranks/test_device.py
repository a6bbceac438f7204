"""Ranks whose models live on a CUDA device: two that talk by gloo, and one that talks by nccl."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from together import agree, all_well, together

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("nccl", 1)])
def test_ranks_on_a_device_take_the_steps_of_one_process(backend, size):
    several = all_well(together(size, rank_jobs.run_cases, 8, rank_jobs.FEW, 48, "cuda", backend=backend))
    agree(rank_jobs.run_cases(8, rank_jobs.FEW, 48, "cuda"), several, 1e-9)


def test_synchronised_normalisation():
    """Of torch's SyncBatchNorm, which needs a device: two ranks are one process that normalises the whole batch."""
    several = all_well(together(2, rank_jobs.normalised, "cuda"))
    agree(rank_jobs.normalised("cuda"), several, 1e-7)
