"""Work that is shared out among as many threads as torch may use."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def each(work: Callable[[int], Result], count: int) -> list[Result]:
    """[work(0), work(1), …], by as many threads as torch may use."""
    helpers = min(torch.get_num_threads(), count) - 1 if count > 1 else 0
    if helpers == 0:
        return [work(k) for k in range(count)]
    results: dict[int, Result] = {}
    left = deque(range(count))

    def drain() -> None:
        while left:
            try:
                k = left.popleft()
            except IndexError:  # another thread was faster
                return
            results[k] = work(k)

    pool = _threads(helpers)
    others = [pool.submit(copy_context().run, drain) for _ in range(helpers)]
    try:
        drain()
    finally:
        left.clear()
    for other in others:
        other.result()
    return [results[k] for k in range(count)]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="sanc")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
