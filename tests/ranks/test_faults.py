"""A rank is killed, hangs, raises or stops early: the others raise an error, and no checkpoint is incomplete."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
import sanc
from rank_processes import run_on_ranks, without_errors

TIMEOUT = 4.0  # seconds, of a collective
shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on a CPU"
)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [0, pytest.param(1, marks=shards)], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", ["killed", "hangs", "raises", "fewer steps"])
def test_the_other_ranks_raise_an_error_within_the_timeout(kind, parts):
    first, *_ = run_on_ranks(2, rank_jobs.fault, kind, parts, timeout=TIMEOUT, limit=40.0)
    name, text, seconds, same = first
    assert same and seconds < 3 * TIMEOUT  # the first or second collective fails
    if parts:  # a collective of the model may fail first
        assert name in ("RanksError", "RuntimeError", "DistBackendError")
    else:
        assert name == "RanksError"
        assert "rank 0 of 2 could not exchange" in text and "the same number of batches" in text


@pytest.mark.slow
def test_the_last_checkpoint_remains_if_a_rank_is_killed_while_saving(tmp_path):
    first, second = run_on_ranks(2, rank_jobs.kill_while_saving, tmp_path, timeout=TIMEOUT, limit=60.0)
    assert second is None and first[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert "step-00000002" in names and "step-00000004" not in names
    model = rank_jobs.network()
    assert sanc.load_checkpoint(tmp_path, model, sanc.SANC(model.parameters())) == 2


def test_a_rank_that_raises_under_a_wrapper_raises_its_error_at_once():
    """The other ranks wait for its gradients in a collective of the wrapper, which fails when the process ends."""
    first, second = run_on_ranks(2, rank_jobs.raise_under_a_wrapper, True, timeout=TIMEOUT, limit=40.0)
    assert second == ("ValueError", True) and first is not None and first[1]


def test_equal_batches_are_not_mistaken_for_a_wrapper():
    """Gradients of equal batches agree without a wrapper: the other ranks raise `RanksError` at once."""
    first, second = run_on_ranks(2, rank_jobs.raise_under_a_wrapper, False, timeout=TIMEOUT, limit=40.0)
    assert second == ("ValueError", True) and first == ("RanksError", True)


def test_a_group_of_one_rank_is_one_process():
    (found,) = without_errors(run_on_ranks(1, name_of_mode))
    assert found == "OneProcess"


def name_of_mode():
    return type(sanc.SANC(rank_jobs.network().parameters())._driver.mode).__name__
