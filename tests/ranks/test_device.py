"""Ranks with models on a CUDA device: two with the backend gloo, and one with nccl."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from rank_processes import agree, run_on_ranks, without_errors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("nccl", 1)])
def test_ranks_on_a_device_make_the_steps_of_one_process(backend, size):
    several = without_errors(run_on_ranks(size, rank_jobs.run_cases, 8, rank_jobs.FEW, 48, "cuda", backend=backend))
    agree(rank_jobs.run_cases(8, rank_jobs.FEW, 48, "cuda"), several, 1e-9)


def test_sync_batch_norm_makes_the_steps_of_one_process():
    """SyncBatchNorm needs a device. Two ranks with it agree with one process that normalises the whole batch."""
    several = without_errors(run_on_ranks(2, rank_jobs.normalised, "cuda"))
    agree(rank_jobs.normalised("cuda"), several, 1e-7)
