"""Data parallel: two and four ranks make the steps of one process, and every difference raises an error."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from rank_processes import agree, run_on_ranks, without_errors


def everything(steps):
    few = rank_jobs.run_cases(steps, rank_jobs.FEW)
    return few, rank_jobs.invalid_uses(), rank_jobs.layers(3), rank_jobs.dropout(3, {"preset": "paper"})


@pytest.fixture(scope="module")
def two():
    return without_errors(run_on_ranks(2, everything, 4))


def test_two_ranks_make_the_steps_of_one_process(two):
    agree(rank_jobs.run_cases(4, rank_jobs.FEW), [result[0] for result in two], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_make_the_steps_of_one_process_over_200_steps(size):
    """Batches have 48 rows: with 12, the paper's escapes amplify a difference of 4e-16 to 1 within 200 steps."""
    several = without_errors(run_on_ranks(size, rank_jobs.run_cases, 200, None, 48, timeout=300, limit=3000))
    agree(rank_jobs.run_cases(200, rows=48), several, 1e-6)


@pytest.mark.parametrize(
    "case, words",
    [
        ("other parameters", r"parameter 0.weight of shape \(6, 4\) of rank 1 differs .* process_group=None"),
        pytest.param("other seeds", r"one of the settings \(seed, ", marks=pytest.mark.slow),
        pytest.param("other settings", r"one of the settings \(seed, ", marks=pytest.mark.slow),
        ("other rates", r"one of the settings \(seed, "),
        ("fewer parameters", r"the number of parameters of rank 1 differs"),
        ("changed on one rank", r"parameter 2.weight of shape \(2, 6\) of rank 1 differs .* different models"),
    ],
)
def test_a_difference_raises_an_error_on_all_ranks(two, case, words):
    for _, found, *_ in two:
        kind, text = found[case]
        assert kind == "RanksError"
        assert re.search(words, text), text


def test_invalid_uses_raise_errors_that_name_the_argument(two):
    for _, found, *_ in two:
        assert found["capture"][0] == "ArgumentError" and "2 ranks" in found["capture"][1]
        kind, text = found["invalid group"]
        assert kind == "ArgumentTypeError" and "process_group = 'world'" in text
        assert "a plain function on others" in found["kinds"][1]
        assert found["nan at the start"][0] == "NonFiniteStartError"
        assert found["ddp uneven"][0] == "ArgumentError" and "4, 5 rows on the ranks" in found["ddp uneven"][1]
        assert found["ignored"][0] == "ArgumentError" and "tensors[1] holds -100" in found["ignored"][1]
        assert found["never compared"]
        assert found["pickled and copied"] == ("DataParallel", "DataParallel")


def test_without_a_group_ranks_train_independently(two):
    a, b = (found["alone"] for _, found, *_ in two)
    assert not torch.allclose(a, b)


def test_a_drawn_seed_is_that_of_rank_0(two):
    a, b = (found["drawn seed"] for _, found, *_ in two)
    assert a == b


@pytest.mark.parametrize("case", ["paper", "robust", "given"])
def test_nan_on_one_rank_makes_all_reject_the_step(two, case):
    for _, found, *_ in two:
        stayed, note, branch = found[f"nan {case}"]
        assert stayed and branch == "stayed"
        assert "not finite" in note


def test_an_exception_on_one_rank_ends_the_step_on_all(two):
    (_, first, *_), (_, second, *_) = two
    assert second["raises"] == ("KeyError", "'a row is missing'", True)
    kind, text, same = first["raises"]
    assert kind == "RanksError" and same
    assert "rank 1 failed to compute" in text
    assert torch.equal(first["after"], second["after"])  # and the group can still be used


def test_layers_that_depend_on_other_rows(two):
    agree(rank_jobs.layers(3), [result[2] for result in two], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, 200])
@pytest.mark.parametrize("size", [2, 4])
def test_layers_that_depend_on_other_rows_over_many_steps(size, steps):
    several = without_errors(run_on_ranks(size, rank_jobs.layers, steps, size, 240, timeout=300, limit=3000))
    agree(rank_jobs.layers(steps, size, 240), several, 1e-6)


def check_dropout(results):
    (a, *_), (b, *_) = results[:2]
    for step, (one, other) in enumerate(zip(a, b, strict=True)):
        assert len(one) == len(other) > 0
        assert all(torch.equal(mask, one[0]) for mask in one) and all(torch.equal(mask, other[0]) for mask in other)
        assert not torch.equal(one[0], other[0]), step
    assert max(map(len, a)) > 3  # a step evaluates the loss at several points
    assert not torch.equal(a[0][0], a[1][0])  # masks differ between steps
    for _, x, (before, after) in results:
        assert torch.equal(x, results[0][1]) and after < before


def test_dropout_masks_differ_between_ranks_but_not_between_points(two):
    check_dropout([result[3] for result in two])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}], ids=["robust", "paper"])
def test_dropout_masks_over_200_steps(settings):
    check_dropout(without_errors(run_on_ranks(4, rank_jobs.dropout, 200, settings, timeout=300, limit=3000)))
