"""Data parallel: two and four processes take the steps of one, and nothing goes wrong in silence."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from together import agree, all_well, together


def everything(steps):
    few = rank_jobs.run_cases(steps, rank_jobs.FEW)
    return few, rank_jobs.troubles(), rank_jobs.layers(3), rank_jobs.dropout(3, {"preset": "paper"})


@pytest.fixture(scope="module")
def two():
    return all_well(together(2, everything, 4))


def test_two_ranks_take_the_steps_of_one(two):
    agree(rank_jobs.run_cases(4, rank_jobs.FEW), [result[0] for result in two], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_so_they_do_over_200_steps(size):
    """With batches of 48 rows: with 12, escapes of the paper make of an error of 4e-16 one of 1 within 200 steps."""
    several = all_well(together(size, rank_jobs.run_cases, 200, None, 48, timeout=300, patience=3000))
    agree(rank_jobs.run_cases(200, rows=48), several, 1e-6)


@pytest.mark.parametrize(
    "case, words",
    [
        ("other parameters", r"parameter 0.weight of shape \(6, 4\) of rank 1 differs .* process_group=None"),
        ("other seeds", r"one of the settings \(seed, "),
        ("other settings", r"one of the settings \(seed, "),
        ("other rates", r"one of the settings \(seed, "),
        ("fewer parameters", r"the number of parameters of rank 1 differs"),
        ("moved", r"parameter 2.weight of shape \(2, 6\) of rank 1 differs .* different models"),
    ],
)
def test_a_difference_is_an_error_on_all_ranks(two, case, words):
    for _, found, *_ in two:
        kind, text = found[case]
        assert kind == "RanksError"
        assert re.search(words, text), text


def test_what_cannot_be_done_together_is_refused(two):
    for _, found, *_ in two:
        assert found["capture"][0] == "ArgumentError" and "2 ranks" in found["capture"][1]
        assert found["no group"][0] == "ArgumentTypeError" and "process_group = 'world'" in found["no group"][1]
        assert "a plain function on others" in found["kinds"][1]
        assert found["nan at the start"][0] == "NonFiniteStartError"
        assert found["ddp uneven"][0] == "ArgumentError" and "4, 5 rows on the ranks" in found["ddp uneven"][1]
        assert found["ignored"][0] == "ArgumentError" and "tensors[1] holds -100" in found["ignored"][1]
        assert found["off"]
        assert found["packed"] == ("DataParallel", "DataParallel")


def test_without_a_group_each_trains_for_itself(two):
    a, b = (found["alone"] for _, found, *_ in two)
    assert not torch.allclose(a, b)


def test_a_seed_that_is_drawn_is_that_of_rank_0(two):
    a, b = (found["drawn seed"] for _, found, *_ in two)
    assert a == b


@pytest.mark.parametrize("case", ["paper", "robust", "given"])
def test_one_rank_with_nan_and_all_reject_the_step(two, case):
    for _, found, *_ in two:
        stayed, note, branch = found[f"nan {case}"]
        assert stayed and branch == "stayed"
        assert "not finite" in note


def test_one_rank_that_raises_ends_the_step_of_all(two):
    (_, first, *_), (_, second, *_) = two
    assert second["raises"] == ("KeyError", "'a row is missing'", True)
    kind, text, same = first["raises"]
    assert kind == "RanksError" and same
    assert "rank 1 failed where" in text
    assert torch.equal(first["after"], second["after"])  # the group goes on


def test_layers_that_look_at_other_rows(two):
    agree(rank_jobs.layers(3), [result[2] for result in two], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, 200])
@pytest.mark.parametrize("size", [2, 4])
def test_so_they_do_with_such_layers(size, steps):
    several = all_well(together(size, rank_jobs.layers, steps, size, 240, timeout=300, patience=3000))
    agree(rank_jobs.layers(steps, size, 240), several, 1e-6)


def check_dropout(results):
    (a, *_), (b, *_) = results[:2]
    for step, (mine, other) in enumerate(zip(a, b, strict=True)):
        assert len(mine) == len(other) > 0
        assert all(torch.equal(mask, mine[0]) for mask in mine) and all(torch.equal(mask, other[0]) for mask in other)
        assert not torch.equal(mine[0], other[0]), step
    assert max(map(len, a)) > 3 and not torch.equal(a[0][0], a[1][0])  # at several points, and another in each step
    for _, x, (before, after) in results:
        assert torch.equal(x, results[0][1]) and after < before


def test_each_rank_has_its_own_dropout_and_the_same_at_every_point(two):
    check_dropout([result[3] for result in two])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}], ids=["robust", "paper"])
def test_so_it_has_over_200_steps(settings):
    check_dropout(all_well(together(4, rank_jobs.dropout, 200, settings, timeout=300, patience=3000)))
