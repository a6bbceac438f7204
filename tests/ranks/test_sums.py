"""Finite sums whose rows are distributed over several ranks are minimised as by one process."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from rank_processes import run_on_ranks, without_errors


@pytest.fixture(scope="module")
def two():
    return without_errors(run_on_ranks(2, rank_jobs.sums))


def agree(several):
    one = rank_jobs.sums()
    for name, (x, value, iterations, status, calls, curvature) in one.items():
        for found in several:
            assert np.array_equal(found[name][0], several[0][name][0]), f"{name}: the ranks differ"
            np.testing.assert_allclose(found[name][0], x, rtol=1e-7, atol=1e-9, err_msg=name)
            assert found[name][1] == pytest.approx(value, rel=1e-9)
            assert found[name][2:5] == (iterations, status, calls), name
            assert found[name][5] == pytest.approx(curvature, rel=1e-6), name


def test_two_ranks_minimise_as_one_process(two):
    agree(two)


@pytest.mark.slow
def test_four_ranks_minimise_as_one_process():
    agree(without_errors(run_on_ranks(4, rank_jobs.sums)))


def test_arguments_that_differ_between_ranks_raise_an_error(two):
    for found in two:
        assert found["other x0"][0] == "RanksError" and found["other x0"][1].startswith("x0 of rank 1 differs")
        assert found["other penalty"][1].startswith("the kind of sum of rank 1 differs")
        assert found["bounds"][0] == "RanksError" and "of rank 1 differs" in found["bounds"][1]
        assert found["weights"][0] == "ArgumentError" and "weights cannot be used" in found["weights"][1]
        assert found["no sum"][0] == "ArgumentError" and "finite sum" in found["no sum"][1]
    assert two[0]["alone"] != two[1]["alone"]
