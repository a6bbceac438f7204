"""Run a function on several ranks, in processes of their own that talk by gloo; for the tests of `sanc.ranks`."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from multiprocessing import get_context
from pathlib import Path

import torch

CONTEXT = get_context("forkserver")  # one process imports torch, and the ranks are forked from it
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "sanc"])


def together(size, job, *arguments, timeout=60.0, patience=300.0):
    """Return what ``job(*arguments)`` returns on every rank: a value, or the exception.

    `timeout` is that of the group in seconds; whoever has not ended after `patience` is killed, and has None.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, size, folder, timeout, job, arguments), daemon=True)
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


class Trouble:
    """An exception on a rank."""

    def __init__(self, problem):
        self.kind, self.text, self.trace = type(problem).__name__, str(problem), traceback.format_exc()


def _rank(rank, size, folder, timeout, job, arguments):
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
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
