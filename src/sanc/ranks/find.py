"""Which mode fits the group and the parameters of an optimiser."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from sanc.errors import ArgumentError, shown
from sanc.ranks.group import DEFAULT, Ranks, find_ranks
from sanc.ranks.modes import DataParallel, OneProcess


def find_mode(
    process_group: object, compare_every: int, params: Sequence[Tensor], *, capture: bool = False
) -> OneProcess:
    """Choose the mode that fits a process group and the parameters."""
    mode: OneProcess = OneProcess()
    if dist.is_available() and dist.is_initialized():
        from sanc.ranks.sharded import is_sharded

        if any(is_sharded(p) for p in params):
            mode = _sharded(process_group, compare_every, params)
    if type(mode) is OneProcess:
        ranks = find_ranks(process_group)
        mode = mode if ranks is None else DataParallel(ranks, compare_every)
    if capture and isinstance(mode, DataParallel):
        raise ArgumentError(
            f"capture = True cannot be used with the {mode.ranks.size} ranks of process_group: leave it out, or pass "
            "process_group=None where each rank is to train for itself."
        )
    return mode


def _sharded(process_group: object, compare_every: int, params: Sequence[Tensor]) -> OneProcess:
    """Return the mode for sharded parameters, whose mesh has its group already."""
    from sanc.ranks.dealt import Sharded
    from sanc.ranks.sharded import require_shards

    group = require_shards(params)
    if process_group is None or (process_group != DEFAULT and process_group != group):
        raise ArgumentError(
            f"process_group = {shown(process_group)} cannot be used: the parameters are sharded over the group of "
            "their mesh. Leave it out."
        )
    return Sharded(Ranks(group), compare_every)
