"""The command ``sanc diagnose``: a saved module on the rows of a data file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sanc
from sanc.errors import ArgumentError, ArgumentTypeError
from sanc.lab.datasets import Loaded

_MAX_BATCH_ROWS, _MIN_BATCHES = 256, 8
"""Default rows of a batch, and how many batches there are at least by default."""


def load_module(path: Path) -> nn.Module:
    """Load a module that ``torch.save(model, path)`` saved. This executes code in the file."""
    if not path.is_file():
        raise ArgumentError(f"{path} does not exist: pass a file that torch.save(model, path) wrote.")
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)
    except (pickle.UnpicklingError, AttributeError, EOFError, ModuleNotFoundError, RuntimeError) as error:
        raise ArgumentError(
            f"{path} cannot be loaded ({error}): pass a file that torch.save(model, path) wrote, and start the "
            "command where the class of the model can be imported."
        ) from error
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"{path} holds {type(module).__name__} and no module: save the whole model, torch.save(model, path), and "
            "not its state_dict()."
        )
    return module


def diagnose_file(module: nn.Module, path: Path, loaded: Loaded, *, batch: int | None, **options: Any) -> sanc.Report:
    """Diagnose a classifier saved at `path` with the cross-entropy of the rows of a data file, in random order."""
    parameter = next(module.parameters(), torch.zeros(()))
    X = loaded.X.toarray() if hasattr(loaded.X, "toarray") else loaded.X
    order = np.random.default_rng(options["seed"]).permutation(len(loaded.y))
    inputs = torch.as_tensor(np.asarray(X)[order], dtype=parameter.dtype)
    targets = torch.as_tensor(loaded.y[order])
    try:
        with torch.no_grad():
            outputs = module.eval()(inputs[:2])
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"the module of {path} cannot be applied to rows of {inputs.shape[1]} features of {loaded.name}: {error}"
        ) from error
    if outputs.shape != (2, loaded.classes):
        raise ArgumentError(
            f"the module of {path} returns shape {tuple(outputs.shape)} for two rows, and {loaded.name} has "
            f"{loaded.classes} classes: pass a classifier with one output per class."
        )
    # One batch would leave none to hold out, and show no noise.
    batch = batch or max(1, min(_MAX_BATCH_ROWS, len(targets) // _MIN_BATCHES))
    starts = range(0, len(targets), batch)
    batches = [(inputs[begin : begin + batch], targets[begin : begin + batch]) for begin in starts]
    return sanc.diagnose(module, nn.CrossEntropyLoss(), batches, **options)
