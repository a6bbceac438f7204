"""The choice of a mode: one process, data parallel, or sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sanc.errors import ArgumentError, shown
from sanc.ranks.group import DEFAULT, Ranks, find_ranks
from sanc.ranks.modes import DataParallel, Mode, OneProcess


def find_mode(process_group: object, compare_every: int, params: Sequence[Tensor], *, capture: bool = False) -> Mode:
    """Return the mode for a process group and the parameters of an optimiser."""
    kind: type[DataParallel] = DataParallel
    if any(hasattr(p, "device_mesh") for p in params):  # DTensors: their mesh determines the group
        from sanc.ranks.metric import Sharded
        from sanc.ranks.sharded import require_shards

        kind, group = Sharded, require_shards(params)
        if process_group not in (DEFAULT, group):
            raise ArgumentError(
                f"process_group = {shown(process_group)} cannot be used: the parameters are sharded over the group of "
                "their mesh. Leave process_group out."
            )
        ranks: Ranks | None = Ranks(group)
    else:
        ranks = find_ranks(process_group)
    if capture and ranks is not None:
        raise ArgumentError(
            f"capture = True cannot be used with the {ranks.size} ranks of process_group: leave it out, or pass "
            "process_group=None to train each rank on its own."
        )
    return OneProcess() if ranks is None else kind(ranks, compare_every)
