"""One of two ranks has rows that are not finite, changes parameters or options alone, or makes other calls.

In the first case no rank makes the step, and both continue with equal parameters. In the others both raise an error.
"""

from __future__ import annotations

import re
import shutil
import time

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

import rank_jobs
from rank_processes import run_on_ranks, without_errors

pytestmark = pytest.mark.slow


def test_rows_of_nan_on_one_rank(tally):
    one, other = without_errors(run_on_ranks(2, rank_jobs.rows_of_nan))
    failures = []
    for name, (stayed, end) in one.items():
        also, same = other[name]
        if not (stayed and also and end.isfinite().all() and end.equal(same)):
            failures.append(name)
    tally("rows of NaN on one rank", len(one), failures)


@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.float64, {}),
        (torch.float32, {"curvature": False}),
        (torch.float32, {"preset": "paper"}),
        (torch.float64, {"compare_every": 1}),
    ],
    ids=["default", "averaged", "paper", "compared in full"],
)
def test_changes_on_one_rank_alone(tally, dtype, settings):
    styles = ("loss", "backward") if "preset" in settings else ("loss", "backward", "gradients")
    changes = list(rank_jobs.DRIFTS)
    results = run_on_ranks(2, rank_jobs.drift, changes, (0, 1, 2, 5), styles, dtype, 0, settings)
    one, other = without_errors(results)
    failures = []
    for name, (kind, text, same) in one.items():
        change = getattr(rank_jobs, name.partition(",")[0])
        if (kind, same) != ("RanksError", True) or other[name] != one[name]:
            failures.append(f"{name}: {kind} {text} {same}, {other[name]}")
        elif not re.search(rank_jobs.DRIFTS[change], text):
            failures.append(f"{name}: {text}")
    tally("changes on one rank alone", len(one), failures)


def test_changes_on_one_rank_alone_before_saving(tally, tmp_path):
    results = run_on_ranks(2, rank_jobs.drift_before_saving, tmp_path, list(rank_jobs.DRIFTS))
    one, other = without_errors(results)
    failures = []
    for change, expected in rank_jobs.DRIFTS.items():
        (kind, text), _, files = one[change.__name__]
        if kind != "RanksError" or not re.search(expected, text) or files or other[change.__name__][0] != (kind, text):
            failures.append(f"{change.__name__}: {kind} {text} {files}, {other[change.__name__]}")
    tally("changes on one rank alone before saving", len(one), failures)


shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on a CPU"
)
both = pytest.mark.parametrize("parts", [0, pytest.param(1, marks=shards)], ids=["whole", "sharded"])


@both
def test_options_of_one_rank_alone(tally, parts):
    one, other = without_errors(run_on_ranks(2, rank_jobs.different_options, parts))
    failures = [
        f"{name}: {kind} {text}"
        for name, (kind, text) in one.items()
        if kind != "RanksError" or "one of the settings" not in text or other[name] != (kind, text)
    ]
    tally("options of one rank alone", len(one), failures)


@pytest.mark.parametrize(
    "settings", [{}, {"check": False}, {"curvature": False, "check": False}, {"compare_every": 0}], ids=str
)
def test_styles_of_one_rank_alone(tally, settings):
    one, other = without_errors(run_on_ranks(2, rank_jobs.different_styles, settings))
    failures = []
    for name, (error, same, end) in one.items():
        its_error, its_same, its_end = other[name]
        kinds = {error[0], its_error[0]}
        if not (kinds <= {"ArgumentError", "RanksError"} and same and its_same and torch.equal(end, its_end)):
            failures.append(f"{name}: {error}, {its_error}, {same}, {its_same}")
    tally("styles of one rank alone", len(one), failures)


def test_frozen_parameters_of_all_types(tally):
    one, other = without_errors(run_on_ranks(2, rank_jobs.frozen_parameters))
    failures = []
    for name, (error, changed) in one.items():
        expected = r"^$" if "without" in name else r"parameter extra of shape .* of rank 1 differs from that of rank 0"
        if error != ("", "") or not re.match(expected, changed[1]) or other[name] != (error, changed):
            failures.append(f"{name}: {error}, {changed}, {other[name]}")
    tally("frozen parameters of all types", len(one), failures)


@both
def test_calls_of_one_rank_alone(tally, parts):
    """The other rank raises an error at once, not after the timeout, and both can continue."""
    timeout = 20.0
    results = run_on_ranks(2, rank_jobs.fail_alone, parts, (1, 2, 5), timeout=timeout, limit=100.0)
    one, other = without_errors(results)
    failures = []
    for name, (error, seconds, end) in one.items():
        its_error, _, its_end = other[name]
        kinds = [("RankFailedError", "ArgumentError")]
        if name.startswith("load"):
            kinds = [("RanksError", "RanksError")]
        elif name.startswith("eval") and not parts:  # the average may be the point of gradients
            kinds.append(("RanksError", "RanksError"))
        if (error[0], its_error[0]) not in kinds or seconds > timeout / 2 or not torch.equal(end, its_end):
            failures.append(f"{name}: {error}, {its_error}, {seconds}")
    tally("calls of one rank alone", len(one), failures)


STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the losses of a run on four ranks, and its seconds."""
    begun = time.monotonic()
    results = run_on_ranks(4, rank_jobs.resumable, tmp_path_factory.mktemp("uninterrupted"), STEPS)
    losses, *others = without_errors(results)
    assert all(other == losses for other in others) and len(losses) == STEPS
    return losses, time.monotonic() - begun


def require_resumed(folders, uninterrupted, tally, what):
    """Continue runs on two ranks and on four. On four the losses are those of an uninterrupted run, bit for bit."""
    names, failures = list(folders), []
    for size in (2, 4):
        copies = [shutil.copytree(folder, folder.with_name(f"{folder.name}-{size}")) for folder in folders.values()]
        results = without_errors(run_on_ranks(size, rank_jobs.resumed, copies, STEPS, limit=600.0))
        for name, folder, losses in zip(names, copies, results[0], strict=True):
            expected = {step: uninterrupted[step] for step in losses}
            if size == 4 and losses != expected:
                failures.append(f"{name}, 4 ranks: {losses}")
            if losses != pytest.approx(expected, rel=1e-9) or not (losses and max(losses) == STEPS):
                failures.append(f"{name}, {size} ranks: {losses}")
            left = {path.name for path in folder.iterdir()}
            if left != {f"step-{STEPS - 2:08d}", f"step-{STEPS:08d}"}:
                failures.append(f"{name}, {size} ranks: {left}")
    tally(what, 2 * len(names), failures)


@shards
def test_runs_killed_at_any_moment_continue_from_the_last_checkpoint(tally, tmp_path, uninterrupted):
    folders = {}
    for number, kill in enumerate(rank_jobs.moments()):
        for twice in (False, True) if "name" in kill or "deleted" in kill else (False,):
            folder = tmp_path / f"{number} {twice}"
            folder.mkdir()
            at = 5 if "deleted" in kill and not twice else 3
            results = run_on_ranks(4, rank_jobs.resumable, folder, STEPS, twice, kill, at, timeout=10.0, limit=60.0)
            assert None in results and not any(isinstance(result, dict) for result in results), kill
            folders[f"{kill}, twice = {twice}"] = folder
    require_resumed(folders, uninterrupted[0], tally, "runs killed at a moment")


@shards
def test_runs_killed_again_and_again(tally, tmp_path, uninterrupted):
    losses, seconds = uninterrupted
    folders = {}
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_on_ranks(4, rank_jobs.resumable, folder, STEPS - 2, True, limit=seconds * (0.5 + 0.1 * number))
        folders[f"after {number} tenths"] = folder
    require_resumed(folders, losses, tally, "runs killed at a time")


@shards
def test_damaged_checkpoints_are_rejected_by_all_ranks(tally, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    without_errors(run_on_ranks(4, rank_jobs.resumable, folder, 4))
    newest, failures = folder / "step-00000004", []
    kept = {path.name: path.read_bytes() for path in newest.iterdir()}
    damages = {"empty": lambda data: b"", "half": lambda data: data[: len(data) // 2], "missing": None}
    for name, data in kept.items():
        for damage, changed in damages.items():
            (newest / name).unlink()
            if changed is not None:
                (newest / name).write_bytes(changed(data))
            for error, same in without_errors(run_on_ranks(2, rank_jobs.load_damaged, folder, 1)):
                if error[0] != "ArgumentError" or "step-00000004 cannot be read" not in error[1] or not same:
                    failures.append(f"{name} {damage}: {error} {same}")
            (newest / name).write_bytes(data)
    shutil.rmtree(newest)
    require_resumed({"without the newest": folder}, uninterrupted[0], tally, "runs without the newest checkpoint")
    tally("damaged checkpoints", len(kept) * len(damages), failures)
