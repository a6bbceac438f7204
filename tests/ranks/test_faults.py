"""A rank is killed, hangs, raises or stops early: the others end soon with an error, and no file is half-written."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
import sanc
from together import all_well, together

TIMEOUT = 4.0
shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on a CPU"
)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [0, pytest.param(1, marks=shards)], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", ["killed", "hangs", "raises", "fewer steps"])
def test_the_others_end_with_an_error_within_the_timeout(kind, parts):
    first, *_ = together(2, rank_jobs.fault, kind, parts, timeout=TIMEOUT, patience=40.0)
    name, text, seconds, same = first
    assert same and seconds < 3 * TIMEOUT  # noticed by the first or second collective
    if parts:  # the model's own collectives may meet it first
        assert name in ("RanksError", "RuntimeError", "DistBackendError")
    else:
        assert name == "RanksError"
        assert "rank 0 of 2 could not exchange" in text and "as many batches" in text


@pytest.mark.slow
def test_a_rank_killed_while_saving_leaves_the_last_checkpoint(tmp_path):
    first, second = together(2, rank_jobs.killed_while_saving, tmp_path, timeout=TIMEOUT, patience=60.0)
    assert second is None and first[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert "step-00000002" in names and "step-00000004" not in names
    model = rank_jobs.network()
    assert sanc.load_checkpoint(tmp_path, model, sanc.SANC(model.parameters())) == 2


def test_a_rank_that_raises_beside_a_wrapper_does_not_meet_its_exchange():
    """Its own error comes at once; the others, which wait for its gradients, end when it does."""
    first, second = together(2, rank_jobs.raises_beside_a_wrapper, True, timeout=TIMEOUT, patience=40.0)
    assert second == ("ValueError", True) and first is not None and first[1]


def test_equal_batches_are_no_wrapper():
    """Gradients that agree because batches do are not averaged by anybody: the others are told at once."""
    first, second = together(2, rank_jobs.raises_beside_a_wrapper, False, timeout=TIMEOUT, patience=40.0)
    assert second == ("ValueError", True) and first == ("RanksError", True)


def test_one_rank_alone_needs_no_group():
    (found,) = all_well(together(1, alone))
    assert found == "OneProcess"


def alone():
    return type(sanc.SANC(rank_jobs.network().parameters())._driver.mode).__name__
