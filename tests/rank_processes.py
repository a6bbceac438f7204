"""Run a function on several ranks, one process each, with the backend gloo; for the tests of `sanc.ranks`."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver, get_context
from pathlib import Path
from unittest import mock

import pytest
import torch

CONTEXT = get_context("forkserver")  # one process imports torch, the package and the jobs; ranks are forked from it
CONTEXT.set_forkserver_preload([
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.nn.functional",
    "torch._dynamo",  # the first optimiser of a process imports it
    "rank_jobs", "rank_processes", "sanc.minimisation.entry", "sanc.optim.optimizers", "sanc.ranks.saving",
])  # fmt: skip


def run_on_ranks(size, job, *arguments, timeout=60.0, limit=300.0, backend="gloo"):
    """Return the result of ``job(*arguments)`` on each rank: its value, `Raised`, or None if the process died.

    `timeout` is the timeout of the group's collectives. Processes that still run after `limit` seconds are killed.
    """
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # to find the jobs
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, size, folder, timeout, backend, job, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + limit
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process.is_alive() for process in processes]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        found = [Path(folder) / f"{rank}.pt" for rank in range(size)]
        results = Results(torch.load(path, weights_only=False) if path.exists() else None for path in found)
        results.ends = [
            f"was killed after {limit:g} s" if it_was_late else f"died with exit code {process.exitcode}"
            for process, it_was_late in zip(processes, late, strict=True)
        ]
        return results


class Results(list):
    """The results of the ranks.

    Attributes
    ----------
    ends : list of str
        How each process ended.
    """

    ends: list[str]


def without_errors(results):
    """Return the results; fail if a rank raised an exception or died."""
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} {results.ends[rank]}; the ranks: {results.ends}"
        if isinstance(result, Raised):
            raise AssertionError(f"rank {rank}:\n{result.trace}")
    return results


def agree(one, several, rel):
    """Assert that the results of all ranks are bitwise equal, and within `rel` of those of one process."""
    for name, (x, branch, numbers, calls) in one.items():
        for other in several:
            y, its_branch, its_numbers, its_calls = other[name]
            assert torch.equal(y, several[0][name][0]), f"{name}: the ranks differ"
            assert its_branch == branch, name
            assert its_calls == calls, name
            torch.testing.assert_close(y, x, rtol=rel, atol=rel, msg=lambda text, name=name: f"{name}: {text}")
            assert its_numbers == pytest.approx(numbers, rel=1e3 * rel, abs=rel, nan_ok=True), name


class Raised:
    """An exception that a rank raised."""

    def __init__(self, problem):
        self.kind, self.text, self.trace = type(problem).__name__, str(problem), traceback.format_exc()


def _rank(rank, size, folder, timeout, backend, job, arguments):
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
    try:
        torch.distributed.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )  # fmt: skip
        result = job(*arguments)
    except Exception as error:
        result = Raised(error)
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    if not isinstance(result, Raised):
        torch.distributed.destroy_process_group()
    os._exit(0)
