"""Sharded parameters: the steps of one process, with everything in parts; checkpoints for any number of ranks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
import sanc
from sanc.ranks.metric import deal
from together import all_well, together

shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on a CPU"
)
FEW = ("second-order", "averaged", "backward", "gradients", "no metric", "long sides")


def everything(steps, folder):
    rank_jobs.checkpointed(folder, 0, 4, 1, "gradients", True)
    resumed = rank_jobs.checkpointed(folder, 4, 8, 1, "gradients", False)
    return rank_jobs.sharded(steps, FEW), rank_jobs.sharded_troubles(), resumed, rank_jobs.held()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder):
    return all_well(together(2, everything, 4, folder))


def agree(steps, names, several, rel):
    for name, (x, branch, numbers) in rank_jobs.sharded(steps, names).items():
        for found in several:
            y, its_branch, its_numbers = found[name]
            assert torch.equal(y, several[0][name][0]), name
            assert its_branch == branch, name
            torch.testing.assert_close(y, x, rtol=rel, atol=rel, msg=lambda text, name=name: f"{name}: {text}")
            assert its_numbers == pytest.approx(numbers, rel=1e3 * rel, nan_ok=True), name


@shards
def test_two_ranks_with_half_of_everything_take_the_steps_of_one(two):
    agree(4, FEW, [found[0] for found in two], 1e-8)


@shards
@pytest.mark.slow
def test_so_do_four():
    agree(40, None, all_well(together(4, rank_jobs.sharded, 40, timeout=300, patience=1500)), 1e-6)


@shards
@pytest.mark.parametrize(
    "case, kind, words",
    [
        ("products", "ArgumentError", "hvp = 'double-backward' cannot be used with sharded parameters"),
        ("alone", "ArgumentError", "process_group = None cannot be used"),
        ("mixed", "ArgumentTypeError", "params mix sharded parameters (DTensor) with plain ones"),
        ("capture", "ArgumentError", "capture = True cannot be used"),
        ("seeds", "RanksError", "one of the settings (seed,"),
        ("uneven", "ArgumentError", "4, 5 rows on the ranks"),
    ],
)
def test_what_cannot_be_done_in_parts_is_refused(two, case, kind, words):
    for found in two:
        assert found[1][case][0] == kind
        assert words in found[1][case][1]


@shards
@pytest.mark.parametrize("style", ["gradients", "loss"])
def test_nothing_that_was_gathered_outlives_a_move(two, style):
    for found in two:
        assert abs(found[1][f"stale {style}"]) < 1e-12


@shards
def test_one_rank_with_nan_and_all_reject_the_step(two):
    for found in two:
        assert found[1]["nan"][0] and "not finite" in found[1]["nan"][1]


@shards
def test_a_checkpoint_of_two_ranks_goes_on_as_if_nothing_had_happened(two, folder):
    straight = rank_jobs.checkpointed("", 0, 8, 0, "gradients", False)
    for found in two:
        torch.testing.assert_close(found[2], straight, rtol=1e-10, atol=1e-10)
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [pytest.param(1, marks=shards), 0], ids=["sharded", "whole"])
@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_four_ranks_save_and_two_or_one_go_on(tmp_path, style, parts):
    straight = all_well(together(4, rank_jobs.checkpointed, "", 0, 40, parts, style, False))[0]
    all_well(together(4, rank_jobs.checkpointed, tmp_path, 0, 30, parts, style, True))
    for size in (4, 2, 1):
        found = all_well(together(size, rank_jobs.checkpointed, tmp_path, 30, 40, parts, style, False))
        torch.testing.assert_close(found[0], straight, rtol=1e-7, atol=1e-7)


def test_a_checkpoint_of_one_process_needs_no_group(tmp_path):
    straight = rank_jobs.checkpointed("", 0, 12, 0, "loss", False)
    rank_jobs.checkpointed(tmp_path, 0, 6, 0, "loss", True)
    assert torch.equal(rank_jobs.checkpointed(tmp_path, 6, 12, 0, "loss", False), straight)
    model = rank_jobs.network()
    assert sanc.load_checkpoint(tmp_path / "none", model, sanc.SANC(model.parameters())) == 0
    with pytest.raises(sanc.ArgumentTypeError, match="optimizer = SGD"):
        sanc.save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))


def test_two_checkpoints_stay(tmp_path):
    model = rank_jobs.network()
    opt = sanc.SANC(model.parameters(), seed=0)
    (tmp_path / "step-00000007.part").mkdir()  # of a run that was killed
    for data in rank_jobs.batches(3):
        rank_jobs.train(opt, model, [data])
        sanc.save_checkpoint(tmp_path, model, opt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@shards
@pytest.mark.slow
def test_memory_falls_with_the_ranks():
    one, two, four = (max(all_well(together(size, rank_jobs.held))) for size in (1, 2, 4))
    assert two < 0.52 * one and four < 0.27 * one


@shards
def test_memory_halves_with_two_ranks(two):
    (one,) = all_well(together(1, rank_jobs.held))
    assert max(found[3] for found in two) < 0.52 * one


def test_matrices_are_dealt_out_evenly():
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 1.0]
    owners = deal(costs, 2)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(2)]
    assert sorted(owners) == [0, 0, 0, 1, 1, 1] and max(loads) <= 4 / 3 * sum(costs) / 2
    assert deal([1.0], 4) == [0] and deal([], 4) == []
