"""Sharded parameters make the steps of one process; any number of ranks can read a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
import sanc
from rank_processes import run_on_ranks, without_errors
from sanc.ranks.metric import assign_owners

shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on a CPU"
)
FEW = ("second-order", "averaged", "backward", "gradients", "no metric", "long sides")


def everything(steps, folder):
    rank_jobs.checkpointed(folder, 0, 4, 1, "gradients", True)
    resumed = rank_jobs.checkpointed(folder, 4, 8, 1, "gradients", False)
    return rank_jobs.sharded(steps, FEW), rank_jobs.invalid_sharded_uses(), resumed, rank_jobs.bytes_held()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder):
    return without_errors(run_on_ranks(2, everything, 4, folder))


def agree(steps, names, several, rel):
    for name, (x, branch, numbers) in rank_jobs.sharded(steps, names).items():
        for found in several:
            y, its_branch, its_numbers = found[name]
            assert torch.equal(y, several[0][name][0]), name
            assert its_branch == branch, name
            torch.testing.assert_close(y, x, rtol=rel, atol=rel, msg=lambda text, name=name: f"{name}: {text}")
            assert its_numbers == pytest.approx(numbers, rel=1e3 * rel, nan_ok=True), name


@shards
def test_two_ranks_with_sharded_parameters_make_the_steps_of_one_process(two):
    agree(4, FEW, [found[0] for found in two], 1e-8)


@shards
@pytest.mark.slow
def test_changes_between_moves_of_sharded_parameters_are_detected_as_in_one_process():
    """`eval` and `train` exchange nothing: the next step sums what they have changed."""
    expected, x = rank_jobs.move_and_project(12)
    assert [countdown > 0 for countdown in expected].index(True) == 7
    for seen, y in without_errors(run_on_ranks(2, rank_jobs.move_and_project, 12)):
        assert seen == expected
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6)


@shards
@pytest.mark.slow
def test_four_ranks_with_sharded_parameters_make_the_steps_of_one_process():
    agree(40, None, without_errors(run_on_ranks(4, rank_jobs.sharded, 40, timeout=300, limit=1500)), 1e-6)


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
def test_invalid_uses_of_sharded_parameters_raise_errors(two, case, kind, words):
    for found in two:
        assert found[1][case][0] == kind
        assert words in found[1][case][1]


@shards
@pytest.mark.parametrize("style", ["gradients", "loss"])
def test_gathered_parameters_are_freed_when_the_optimiser_changes_them(two, style):
    for found in two:
        assert abs(found[1][f"stale {style}"]) < 1e-12


@shards
def test_nan_on_one_rank_makes_all_reject_the_step(two):
    for found in two:
        assert found[1]["nan"][0] and "not finite" in found[1]["nan"][1]


@shards
def test_a_run_restored_from_a_checkpoint_equals_an_uninterrupted_one(two, folder):
    uninterrupted = rank_jobs.checkpointed("", 0, 8, 0, "gradients", False)
    for found in two:
        torch.testing.assert_close(found[2], uninterrupted, rtol=1e-10, atol=1e-10)
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [pytest.param(1, marks=shards), 0], ids=["sharded", "whole"])
@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_two_ranks_or_one_restore_a_checkpoint_of_four(tmp_path, style, parts):
    uninterrupted = without_errors(run_on_ranks(4, rank_jobs.checkpointed, "", 0, 40, parts, style, False))[0]
    without_errors(run_on_ranks(4, rank_jobs.checkpointed, tmp_path, 0, 30, parts, style, True))
    for size in (4, 2, 1):
        found = without_errors(run_on_ranks(size, rank_jobs.checkpointed, tmp_path, 30, 40, parts, style, False))
        torch.testing.assert_close(found[0], uninterrupted, rtol=1e-7, atol=1e-7)


def test_a_checkpoint_of_one_process_needs_no_group(tmp_path):
    uninterrupted = rank_jobs.checkpointed("", 0, 12, 0, "loss", False)
    rank_jobs.checkpointed(tmp_path, 0, 6, 0, "loss", True)
    assert torch.equal(rank_jobs.checkpointed(tmp_path, 6, 12, 0, "loss", False), uninterrupted)
    model = rank_jobs.network()
    assert sanc.load_checkpoint(tmp_path / "none", model, sanc.SANC(model.parameters())) == 0
    with pytest.raises(sanc.ArgumentTypeError, match="optimizer = SGD"):
        sanc.save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))


def test_the_last_two_checkpoints_are_kept(tmp_path):
    model = rank_jobs.network()
    opt = sanc.SANC(model.parameters(), seed=0)
    (tmp_path / "step-00000007.part").mkdir()  # an incomplete checkpoint of a run that was killed
    for data in rank_jobs.batches(3):
        rank_jobs.train(opt, model, [data])
        sanc.save_checkpoint(tmp_path, model, opt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def saved_run(folder, steps=2):
    """Make steps on one process with a checkpoint after each; return model and optimiser."""
    model = rank_jobs.network()
    opt = sanc.SANC(model.parameters(), seed=0)
    for data in rank_jobs.batches(steps):
        rank_jobs.train(opt, model, [data])
        sanc.save_checkpoint(folder, model, opt)
    return model, opt


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_checkpoint_remains_if_the_process_ends_while_it_is_replaced(tmp_path, monkeypatch, renamed):
    model, opt = saved_run(tmp_path, 1)
    rename, calls = Path.rename, []

    def ends(path, target):
        if path.is_dir():  # torch changes the names of files
            if len(calls) == renamed:
                raise OSError("the process ends")
            calls.append(path)
        rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError) if renamed < 2 else nullcontext():
        patch.setattr(Path, "rename", ends)
        sanc.save_checkpoint(tmp_path, model, opt)
    assert len(calls) == renamed
    other = rank_jobs.network(1)
    assert sanc.load_checkpoint(tmp_path, other, sanc.SANC(other.parameters(), seed=0)) == 1
    assert torch.equal(rank_jobs.flat(other), rank_jobs.flat(model))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_newest_checkpoint_has_the_largest_number(tmp_path):
    saved_run(tmp_path)
    (tmp_path / "step-00000001").rename(tmp_path / "step-99999999")
    (tmp_path / "step-00000002").rename(tmp_path / "step-100000000")
    model = rank_jobs.network()
    assert sanc.load_checkpoint(tmp_path, model, sanc.SANC(model.parameters(), seed=0)) == 2


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half"])
def test_a_damaged_checkpoint_is_rejected_and_nothing_is_changed(tmp_path, name, damage):
    saved_run(tmp_path)
    path = tmp_path / "step-00000002" / name
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[: len(data) // 2] if damage == "half" else b"")
    model = rank_jobs.network(1)
    opt = sanc.SANC(model.parameters(), seed=0)
    before = rank_jobs.flat(model)
    with pytest.raises(sanc.ArgumentError, match=r"step-00000002 cannot be read .* delete it to continue"):
        sanc.load_checkpoint(tmp_path, model, opt)
    assert torch.equal(rank_jobs.flat(model), before) and opt._iteration.state.iteration == 0


def test_a_checkpoint_of_another_method_leaves_the_model_unchanged(tmp_path):
    saved_run(tmp_path)
    model = rank_jobs.network(1)
    opt = sanc.SCR(model.parameters(), seed=0)
    before = rank_jobs.flat(model)
    with pytest.raises(sanc.ArgumentError):
        sanc.load_checkpoint(tmp_path, model, opt)
    assert torch.equal(rank_jobs.flat(model), before)


@shards
@pytest.mark.slow
def test_memory_per_rank_is_inverse_to_the_number_of_ranks():
    one, two, four = (max(without_errors(run_on_ranks(size, rank_jobs.bytes_held))) for size in (1, 2, 4))
    assert two < 0.52 * one and four < 0.27 * one


@shards
def test_two_ranks_need_half_the_memory_each(two):
    (one,) = without_errors(run_on_ranks(1, rank_jobs.bytes_held))
    assert max(found[3] for found in two) < 0.52 * one


def test_owners_have_balanced_loads():
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 1.0]
    owners = assign_owners(costs, 2)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(2)]
    assert sorted(owners) == [0, 0, 0, 1, 1, 1] and max(loads) <= 4 / 3 * sum(costs) / 2
    assert assign_owners([1.0], 4) == [0] and assign_owners([], 4) == []


@pytest.mark.slow
@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_sharded_parameters_that_leave_and_join_make_the_steps_of_one_process(style):
    one, other = without_errors(run_on_ranks(2, rank_jobs.pausing_layers, 2, style))
    whole = rank_jobs.pausing_layers(0, style)
    for k, (ours, its, single) in enumerate(zip(one, other, whole, strict=True)):
        assert torch.equal(ours, its), k
        torch.testing.assert_close(ours, single, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn:UserWarning")
@pytest.mark.parametrize("parts", [pytest.param(1, marks=shards), 0], ids=["sharded", "whole"])
@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_ranks_with_parameters_of_low_precision_make_the_steps_of_one_process(tmp_path, style, parts):
    (alone,) = rank_jobs.low_precision(None, 0, style)
    for ends in without_errors(run_on_ranks(2, rank_jobs.low_precision, tmp_path, parts, style)):
        for parameters, masters in ends:
            assert parameters.dtype == torch.bfloat16 and torch.equal(parameters, masters.bfloat16())
            assert torch.equal(masters, ends[0][1])  # resumed bit for bit
            # Roundoff decides to which of two neighbours a parameter is rounded: below 1 they differ by 4e-3 at most.
            torch.testing.assert_close(masters, alone[1], rtol=0.0, atol=4e-3)
