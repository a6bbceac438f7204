"""A rank that changes parameters or options alone: all ranks raise an error in that step, which names the change."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from rank_processes import run_on_ranks, without_errors
from sanc.ranks.group import digest, fingerprint, quick_fingerprint, short_digest, size_on_any_rank

shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on a CPU"
)

CHANGES = (rank_jobs.freeze, rank_jobs.clip, rank_jobs.rate, rank_jobs.freeze_all)
"""The changes of the tests that are not marked slow; tests/faults tries all."""


def everything(folder):
    return {
        "drift": rank_jobs.drift(CHANGES, (2,), ("loss",)) | rank_jobs.drift(CHANGES[:1], (2,), ("gradients",)),
        "recover": rank_jobs.recover(),
        "on all ranks": rank_jobs.change_on_all_ranks(),
        "saving": rank_jobs.drift_before_saving(folder, CHANGES[:3]),
        "early": rank_jobs.fail_early(),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return without_errors(run_on_ranks(2, everything, tmp_path_factory.mktemp("empty")))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_on_one_rank_is_an_error_on_all_in_the_same_step(two, change):
    texts = {found["drift"][f"{change.__name__}, loss, step 2"] for found in two}
    assert len(texts) == 1  # the same error on all ranks
    kind, text, same = texts.pop()
    assert kind == "RanksError" and same
    assert re.search(rank_jobs.DRIFTS[change], text), text


def test_a_change_before_a_step_without_a_closure(two):
    for found in two:
        kind, text, same = found["drift"]["freeze, gradients, step 2"]
        assert kind == "RanksError" and same
        assert re.search(rank_jobs.DRIFTS[rank_jobs.freeze], text), text


def test_ranks_continue_when_the_change_is_undone(two):
    for found in two:
        error, expected, end = found["recover"]
        assert error == "RanksError" and torch.equal(end, expected)


def test_the_same_changes_on_all_ranks_are_no_error(two):
    """Two ranks make the steps of one process, and a step sends one collective, also while lr changes."""
    _, expected = rank_jobs.change_on_all_ranks()
    for found in two:
        counts, end = found["on all ranks"]
        torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-9)
        assert min(counts[9:]) == 1, counts


def test_a_checkpoint_of_ranks_that_differ_is_not_written(two):
    for rank, found in enumerate(two):
        for change in CHANGES[:3]:
            (kind, text), kept, files = found["saving"][change.__name__]
            assert kind == "RanksError" and re.search(rank_jobs.DRIFTS[change], text), text
            assert kept == (("", "") if rank == 0 else None)  # rank 0 alone may save its state
            assert files == []


def test_a_rank_that_fails_before_the_first_exchange_ends_the_step_on_all(two):
    (kind, text), end = two[0]["early"]
    (failed_kind, reason), other_end = two[1]["early"]
    assert kind == "RankFailedError" and "rank 1 failed before the first exchange" in text
    assert failed_kind == "ArgumentError" and "closure is missing" in reason
    assert torch.equal(end, other_end)


def everything_sharded(folder):
    found = rank_jobs.drift((rank_jobs.rate, rank_jobs.freeze), (2,), ("loss",), parts=1)
    found |= rank_jobs.drift((rank_jobs.rate,), (2,), ("gradients",), parts=1)
    saving = rank_jobs.drift_before_saving(folder, [rank_jobs.rate, rank_jobs.start_training], 1)
    return found, saving, rank_jobs.two_dimensional_mesh()


@pytest.fixture(scope="module")
def two_sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return without_errors(run_on_ranks(2, everything_sharded, folder))


@shards
@pytest.mark.slow
def test_a_change_on_one_rank_with_sharded_parameters(two_sharded):
    for found, saving, _ in two_sharded:
        for name, (error, message, same) in found.items():
            change = getattr(rank_jobs, name.partition(",")[0])
            assert error == "RanksError" and same, name
            assert re.search(rank_jobs.DRIFTS[change], message), message
        (kind, text), (its_kind, its_text), files = saving["rate"]
        assert kind == its_kind == "RanksError" and files == []
        assert text == its_text and re.search(rank_jobs.DRIFTS[rank_jobs.rate], text), text
        for kind, text in saving["start_training"][:2]:
            assert kind == "RanksError" and "the last call of eval or train of rank 1 differs" in text, text


@shards
@pytest.mark.slow
def test_a_mesh_of_two_dimensions_is_rejected_with_the_remedy(two_sharded):
    for *_, errors in two_sharded:
        for kind, text in errors:
            assert kind == "ArgumentTypeError"
            assert "Replicate" in text and "one mesh of one dimension" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_quick_fingerprints_depend_on_every_entry_and_its_sign(dtype, size):
    x = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    found = quick_fingerprint(x)
    assert found == quick_fingerprint(x.clone()) != quick_fingerprint(-x) and float(found) < 2.0**48
    for index in range(size):
        y = x.clone()
        y[index] = torch.nextafter(y[index], y[index] + 1)
        assert quick_fingerprint(y) != found, index


@pytest.mark.parametrize("extra", list(rank_jobs.EXTRAS.values()), ids=list(rank_jobs.EXTRAS))
def test_fingerprints_of_all_types_depend_on_every_entry(extra):
    found = {tuple(fingerprint(extra).tolist())}
    for index in range(extra.numel()):
        changed = extra.clone()
        changed.view(-1)[index] = 0
        found.add(tuple(fingerprint(changed).tolist()))
    assert len(found) == 1 + extra.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quick_fingerprints_of_an_odd_number_of_half_words(dtype):
    x = torch.ones(35, dtype=dtype)
    assert quick_fingerprint(x) != quick_fingerprint(torch.cat([x[:-1], -x[-1:]]))


def test_ranks_with_a_gpu_each_exchange_vectors_of_the_same_size():
    first, second = ((7, (100, torch.float32, torch.device("cuda", index))) for index in (0, 1))
    assert size_on_any_rank(first) == size_on_any_rank(second)
    others = [(8, first[1]), (7, (99, *first[1][1:])), (7, (100, torch.float64, first[1][2])), (7, None), None]
    others.append((7, (100, torch.float32, torch.device("cpu"))))
    assert len({size_on_any_rank(size) for size in [first, *others]}) == 1 + len(others)


def test_digests_do_not_depend_on_addresses():
    """Two processes hold a piece of a user at different addresses, which the `repr` of `object` contains."""
    pieces = rank_jobs.Elsewhere(), rank_jobs.Elsewhere()
    assert repr(pieces[0]) != repr(pieces[1])
    assert torch.equal(*(digest({"metric": piece}) for piece in pieces))
    assert not torch.equal(digest({"metric": pieces[0]}), digest({"metric": object()}))


def test_short_digests_are_integers_that_a_float_holds():
    found = [short_digest({"value": number, "seconds": number}) for number in range(100)]
    assert len(set(found)) == 100 and all(int(float(part)) == part for part in found)
    assert short_digest({"value": 1, "seconds": 2}) == found[1]
