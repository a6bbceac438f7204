"""Checkpoints that any number of ranks can read, written atomically by torch.distributed.checkpoint.

A checkpoint is a folder ``step-…``. It gets this name only after all ranks have written their parts, and loses it
before files are deleted. A process may end at any moment: what it leaves has another name, which `_tidy` resolves.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sanc.errors import ArgumentError, ArgumentTypeError, shown

_KEPT_CHECKPOINTS = 2
"""Checkpoints that are kept: the newest, and the one before it, which remains while the newest is replaced."""

_PART, _REPLACED = ".part", ".replaced"
"""Suffixes of folders that are incomplete, and of a complete checkpoint while another of the same step replaces it."""


def save_checkpoint(folder: str | Path, model: nn.Module, optimizer: Any) -> Path:
    """Save model and optimiser as the checkpoint of the current step; all ranks must call this function.

    Parameters, options and decisions are compared first, unless ``compare_every`` is 0. If they differ between the
    ranks, nothing is written and all ranks raise `RanksError`, which names the parameter or option.

    Parameters
    ----------
    folder : path
        Folder of the run's checkpoints, of which the last two are kept.
    model : Module
        The model: plain, wrapped by DistributedDataParallel, or sharded by fully_shard.
    optimizer : SANC, SCR, …
        An optimiser of this package.

    Returns
    -------
    Path
        Folder of the new checkpoint.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = _folder(folder)
    _check_model(model)
    step = _steps(optimizer)
    optimizer.compare_ranks()
    _check_pair(model, optimizer)  # after the comparison: a parameter of one rank alone is an error on all of them
    target = folder / f"step-{step:08d}"
    part = target.with_suffix(_PART)
    if _is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
    _barrier()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with _without_group_warning():
        save(state, checkpoint_id=part)
    if _is_first_rank():
        if target.exists():
            target.rename(target.with_suffix(_REPLACED))
        part.rename(target)
        for old in _checkpoints(folder)[:-_KEPT_CHECKPOINTS]:
            old.rename(old.with_suffix(_PART))
        _tidy(folder)
    _barrier()
    return target


def load_checkpoint(folder: str | Path, model: nn.Module, optimizer: Any) -> int:
    """Restore model and optimiser from the newest checkpoint of a folder; all ranks must call this function.

    The run may have another number of ranks than the one that saved the checkpoint. If a file of it is damaged or
    missing, or the checkpoint belongs to another model or optimiser, an error is raised and nothing is changed.

    Parameters
    ----------
    folder : str or Path
        The folder that `save_checkpoint` wrote to.
    model : Module
        The model, of the same parameters as the saved one.
    optimizer : Optimizer
        An optimiser of this package over the parameters of the model.

    Returns
    -------
    int
        Steps made before the checkpoint; 0 if there is none.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load

    path = _folder(folder)
    _check_model(model)
    _steps(optimizer)
    _check_pair(model, optimizer)
    if _is_first_rank():
        _tidy(path)
    _barrier()
    checkpoints = _checkpoints(path)
    if not checkpoints:
        return 0
    weights = get_model_state_dict(model)
    try:
        state = _empty_state(FileSystemReader(checkpoints[-1]).read_metadata(), weights)
        state["model"] = {
            name: torch.empty_like(held) if isinstance(held, Tensor) else held for name, held in weights.items()
        }
        with _without_group_warning():
            load(state, checkpoint_id=checkpoints[-1])
    except (Exception, CheckpointException) as error:
        raise ArgumentError(
            f"folder = {str(folder)!r}: the checkpoint {checkpoints[-1].name} cannot be read ({_reason(error)}). If "
            "its files are damaged, delete it to continue from the one before; otherwise construct the saved model."
        ) from error
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    set_model_state_dict(model, state["model"])
    return _steps(optimizer)


def _empty_state(metadata: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return empty tensors in the structure of the saved state, for `torch.distributed.checkpoint` to fill."""
    root: dict[Any, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        path = metadata.planner_data[key]
        if path[0] == "model":
            continue
        parent = root
        for name in path[:-1]:
            parent = parent.setdefault(name, {})
        size = getattr(entry, "size", None)
        like = weights.get(path[2]) if path[1] == "state" else None
        parent[path[-1]] = None if size is None else _empty_tensor(size, entry.properties.dtype, like)
    root["optimizer"].setdefault("state", {})  # torch saves no empty mappings
    return _lists(root)  # type: ignore[no-any-return]


def _empty_tensor(size: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    """Return an empty tensor for a parameter's state, sharded if the parameter `like` is sharded."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or not size:
        return torch.empty(size, dtype=dtype, device=None if like is None else like.device)
    from torch.distributed.tensor import Shard, empty

    placements = like.placements if like is not None and size == like.shape else [Shard(0)]  # type: ignore[attr-defined]
    return empty(size, dtype=dtype, device_mesh=mesh, placements=placements)


def _lists(entry: Any) -> Any:
    """Replace mappings with the keys 0, 1, … by lists."""
    if not isinstance(entry, dict):
        return entry
    if entry and all(isinstance(name, int) for name in entry):
        return [_lists(entry[name]) for name in sorted(entry)]
    return {name: _lists(value) for name, value in entry.items()}


def _steps(optimizer: Any) -> int:
    """Return the number of steps that an optimiser made; raise an error for one of another library."""
    if not hasattr(optimizer, "compare_ranks"):
        raise ArgumentTypeError(
            f"optimizer = {type(optimizer).__name__} cannot be used: pass an optimiser of sanc, such as sanc.SANC."
        )
    return int(optimizer.steps_made)


def _check_pair(model: nn.Module, optimizer: Any) -> None:
    """Raise an error if the optimiser has a parameter that the model does not have."""
    held = set(map(id, model.parameters()))
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
    if others:
        raise ArgumentError(
            f"optimizer has {len(others)} parameters that model does not have, such as one of shape "
            f"{tuple(others[0].shape)}: pass the model whose parameters it optimises."
        )


def _check_model(model: object) -> None:
    """Raise an error for something else than a module."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model = {shown(model)} is no module: pass the folder, then the model and the optimiser."
        )


def _folder(folder: str | Path) -> Path:
    """Return the folder as a path; raise an error if it is a file."""
    if not isinstance(folder, str | PathLike):
        raise ArgumentTypeError(
            f"folder = {shown(folder)} is no path: pass the folder, then the model and the optimiser."
        )
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"folder = {str(folder)!r} is a file: pass a folder for the checkpoints of the run.")
    return path


def _checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    by_step = {int(path.name[5:]): path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)}
    return [by_step[step] for step in sorted(by_step)]


def _tidy(folder: Path) -> None:
    """Delete what an ended process left, and give a checkpoint its name back if the one to replace it is incomplete."""
    for replaced in folder.glob(f"step-*{_REPLACED}"):
        if replaced.with_suffix("").exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(replaced.with_suffix(""))
    for unfinished in folder.glob(f"step-*{_PART}"):
        shutil.rmtree(unfinished)


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of torch.distributed.checkpoint, that of the first rank that failed."""
    for failure, _ in getattr(error, "failures", {}).values():
        return _reason(failure)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextmanager
def _without_group_warning() -> Iterator[None]:
    """Suppress torch's warning that no process group is initialised, which one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
        yield


def _is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()
