"""Run a function on several ranks, in processes of their own that talk by gloo; for the tests of `sanc.ranks`."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

CONTEXT = get_context("forkserver")  # one process imports torch, and the ranks are forked from it
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "sanc"])


def together(size, job, *arguments, timeout=60.0, patience=300.0, backend="gloo"):
    """Return what ``job(*arguments)`` returns on every rank: a value, or the exception.

    `timeout` is that of the group in seconds; whoever has not ended after `patience` is killed, and has None.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, size, folder, timeout, backend, job, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + patience
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        found = [Path(folder) / f"{rank}.pt" for rank in range(size)]
        return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def all_well(results):
    """Return the results where no rank raised or was lost."""
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} was lost"
        if isinstance(result, Trouble):
            raise AssertionError(f"rank {rank}:\n{result.trace}")
    return results


def agree(one, several, rel):
    """Check that the cases of all ranks are those of one process to rounding, and bit for bit those of each other."""
    for name, (x, branch, numbers, calls) in one.items():
        for other in several:
            y, its_branch, its_numbers, its_calls = other[name]
            assert torch.equal(y, several[0][name][0]), f"{name}: the ranks differ"
            assert its_branch == branch, name
            assert its_calls == calls, name
            torch.testing.assert_close(y, x, rtol=rel, atol=rel, msg=lambda text, name=name: f"{name}: {text}")
            assert its_numbers == pytest.approx(numbers, rel=1e3 * rel, abs=rel, nan_ok=True), name


class Trouble:
    """An exception on a rank."""

    def __init__(self, problem):
        self.kind, self.text, self.trace = type(problem).__name__, str(problem), traceback.format_exc()


def _rank(rank, size, folder, timeout, backend, job, arguments):
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        result = job(*arguments)
    except Exception as problem:
        result = Trouble(problem)
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    if not isinstance(result, Trouble):
        torch.distributed.destroy_process_group()
    os._exit(0)
