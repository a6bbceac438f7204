"""Clocks of the speed benchmarks: everything is timed in turns, in one run, and compared as a ratio."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def synchronise(device: torch.device | str) -> None:
    """Wait until a GPU has done what it was asked to."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def turns(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    device: torch.device | str = "cpu",
    seconds: float = 2.0,
    warm_up: int = 2,
    least: int = 5,
    most: int = 1000,
    before: Callable[[], Any] | None = None,
    in_a_row: int = 1,
) -> dict[str, list[float]]:
    """Time functions in turns, so that whatever slows the machine down slows all of them.

    The order is drawn anew in every round: what comes always after the same other finds the caches as that left them.

    Parameters
    ----------
    candidates : mapping
        What to call, by name.
    device : torch.device or str
        Where the work is done; a GPU is waited for on both sides of the clock.
    seconds : float
        About how long all of it may take.
    warm_up : int
        Calls of each before the clock starts.
    least, most : int
        Rounds, whatever the time says.
    before : callable, optional
        Called before each of them, off the clock.
    in_a_row : int
        Calls of each in a round: a training loop, too, calls the same thing again and again.

    Returns
    -------
    dict
        Median seconds of a call in each round, by name.
    """
    for call in candidates.values():
        for _ in range(warm_up):
            if before is not None:
                before()
            call()
    synchronise(device)
    rounds: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    order, lots = list(candidates), random.Random(0)
    for turn in range(most):
        if turn >= least and time.perf_counter() > end:
            break
        lots.shuffle(order)
        for name in order:
            times = []
            for _ in range(in_a_row):
                if before is not None:
                    before()
                    synchronise(device)
                start = time.perf_counter()
                candidates[name]()
                synchronise(device)
                times.append(time.perf_counter() - start)
            rounds[name].append(statistics.median(times))
    return rounds


def in_turns(candidates: Mapping[str, Callable[[], Any]], **options: Any) -> dict[str, float]:
    """Return the median seconds of a call, by name; the options are those of `turns`."""
    return {name: statistics.median(times) for name, times in turns(candidates, **options).items()}


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of one time ÷ another of the same round, which the machine disturbs least."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def captured(body: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Record a function as one CUDA graph; calling what is returned launches it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = body()
    return lambda kept=kept: graph.replay()


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Say what a measurement was made on."""
    device = torch.device(device)
    said: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        said |= {"gpu": torch.cuda.get_device_name(device), "tf32": torch.backends.cuda.matmul.allow_tf32}
    return said


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON, null for what is not finite, with the command that made it but for its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = ["", *sys.argv[1:]]
    folders = ("--out", "--data-dir")
    command = [word for before, word in itertools.pairwise(words) if word not in folders and before not in folders]
    full = {"command": " ".join(command), **document}
    path.write_text(json.dumps(plain(full), indent=1) + "\n", encoding="utf-8")


def plain(content: Any) -> Any:
    """Return the same with null for what is not finite, which JSON does not know."""
    if isinstance(content, Mapping):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
