"""Clocks of the speed benchmarks: functions are timed alternately in one process and compared as ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def synchronise(device: torch.device | str) -> None:
    """Wait until a GPU has finished its queue."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    device: torch.device | str = "cpu",
    seconds: float = 2.0,
    warm_up: int = 2,
    least: int = 5,
    most: int = 1000,
    setup: Callable[[], Any] | None = None,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time functions alternately, so that a slow phase of the machine affects all of them.

    Each round draws a new order: with a fixed order, each function would always find the caches of the same other one.

    Parameters
    ----------
    candidates : mapping
        Functions to call, by name.
    device : torch.device or str
        Device of the work; a GPU is synchronised before the clock is read.
    seconds : float
        Approximate time of all rounds.
    warm_up : int
        Calls of each function before the first round.
    least, most : int
        Limits on the number of rounds, which take precedence over `seconds`.
    setup : callable, optional
        Called before each call, outside the measured time.
    repeats : int
        Successive calls of each function in a round, as in a training loop.
    clock : callable
        Clock of a call; `time.process_time` does not include the time in which other programs run.

    Returns
    -------
    dict
        Median seconds of a call in each round, by name.
    """
    for call in candidates.values():
        for _ in range(warm_up):
            if setup is not None:
                setup()
            call()
    synchronise(device)
    rounds: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    order, rng = list(candidates), random.Random(0)
    for count in range(most):
        if count >= least and time.perf_counter() > end:
            break
        rng.shuffle(order)
        for name in order:
            times = []
            for _ in range(repeats):
                if setup is not None:
                    setup()
                    synchronise(device)
                start = clock()
                candidates[name]()
                synchronise(device)
                times.append(clock() - start)
            rounds[name].append(statistics.median(times))
    return rounds


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median over the rounds, by name."""
    return {name: statistics.median(times) for name, times in rounds.items()}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio within a round, which other work on the machine affects least."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def captured(body: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Record a function as one CUDA graph, and return a function that replays it.

    That keeps the function, on whose tensors the graph works.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = body, body()
    return lambda kept=kept: graph.replay()
