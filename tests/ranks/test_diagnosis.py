"""`sanc.diagnose` on two ranks: the numbers of one process on the rows of both."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from rank_processes import run_on_ranks, without_errors

NOISE = {"noise_share", "noise_scale", "batches"}
"""Numbers of batches: those of several ranks are more, and smaller."""


shards = not torch.__version__.startswith("2.6.")  # fully_shard of torch 2.6 does not run on a CPU


def everything():
    return rank_jobs.diagnoses(), rank_jobs.invalid_diagnoses(), rank_jobs.sharded_diagnoses() if shards else None


@pytest.fixture(scope="module")
def two():
    return without_errors(run_on_ranks(2, everything))


@pytest.fixture(scope="module")
def one():
    numbers, _ = rank_jobs.diagnosed("plain", rank_jobs.classes(), max_products=6)
    return numbers


def without(numbers, names):
    return {name: value for name, value in numbers.items() if name not in names}


@pytest.mark.parametrize("name", ["plain", "ddp"])
def test_ranks_report_what_one_process_does(one, two, name):
    (ours, same), (its, also_same) = (found[name] for found, *_ in two)
    assert same and also_same and ours == pytest.approx(its, rel=0, abs=0, nan_ok=True)
    assert without(ours, NOISE) == pytest.approx(without(one, NOISE), rel=1e-4, abs=1e-12, nan_ok=True)
    assert ours["batches"] == 2 * one["batches"] and ours["rows"] == one["rows"] == 8 + 10 + 12 + 14


def test_noise_is_that_of_the_batches_of_all_ranks(two):
    """Two ranks with halves of each batch measure the noise of one process with these halves as batches."""
    halves = [rank_jobs.share(batch, rank, 2) for batch in rank_jobs.classes() for rank in range(2)]
    one, _ = rank_jobs.diagnosed("plain", halves, max_products=1)
    (ours, _) = two[0][0]["plain"]
    for name in NOISE:
        assert ours[name] == pytest.approx(one[name], rel=1e-9), name


def test_differences_between_ranks_raise_errors_on_all(two):
    for rank, (_, errors, _) in enumerate(two):
        assert errors["parameters"][0] == "RanksError" and "parameter 0.weight" in errors["parameters"][1]
        assert errors["seed"][0] == "RanksError" and "one of the arguments" in errors["seed"][1]
        assert errors["batches"][0] == "RanksError" and "the number of batches in data" in errors["batches"][1]
        kind, text = errors["no batch"]
        assert (kind, "data has no batch" in text) == ("ArgumentError", True) if rank else kind == "RanksError"
        kind, text = errors["raises"]
        assert (
            kind == ("KeyError" if rank else "RanksError") and ("row is missing" if rank else "rank 1 failed") in text
        )
    (_, first, _), (_, second, _) = two
    assert first["alone"][0] > second["alone"][0] and first["alone"][1] != second["alone"][1]


@pytest.mark.skipif(not shards, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_sharded_parameters_give_the_numbers_of_whole_ones(two):
    results = [found for *_, found in two]
    one, _ = rank_jobs.diagnosed("fully_shard", rank_jobs.classes(2, -8), max_products=4, hvp="finite-difference")
    for (ours, same), error in results:
        assert same and error[0] == "RanksError" and "the number of rows of a batch" in error[1]
        assert ours == pytest.approx(results[0][0][0], rel=0, abs=0, nan_ok=True)
        loose = {"products", "ritz_error", "lambda_min_bound", "lambda_max_bound", "safe_lr", "epsilon"}
        loose |= {"gradient_decrease"}  # of the step by the bounds
        assert without(ours, loose) == pytest.approx(without(one, loose), rel=1e-4, abs=1e-8, nan_ok=True)
        assert ours["lambda_max_bound"] == pytest.approx(one["lambda_max_bound"], rel=0.02)
