"""Saving a run, and resuming it bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from sanc.core.meter import Meter
from sanc.core.runs.ripples import RippleMonitor
from sanc.core.runs.run import Run
from sanc.core.runs.scaled_objective import require_objective_exponent
from sanc.core.runs.scaled_variables import can_scale_variables, saved_variable_scales, scale_variables
from sanc.core.runs.stall import StallMonitor
from sanc.core.runs.step_checks import StepMonitor
from sanc.core.saved import numbers_of, require_fields, require_mapping, require_vector, state_error
from sanc.errors import ArgumentError

_MONITORS: dict[str, Any] = {
    "stall_monitor": StallMonitor,
    "step_monitor": StepMonitor,
    "ripple_monitor": RippleMonitor,
}
"""The monitors of a run, by their names in it and in a saved state."""


def save_run(run: Run) -> dict[str, Any]:
    """Return the state from which `resume_run` continues bit for bit: plain numbers, vectors and tensors."""
    return {
        "method": run.iteration.method.name,
        "x": run.full_x * 1.0,  # copies, so that a caller cannot change the run through them
        "numbers": run.iteration.numbers(),
        "vectors": {name: vector * 1.0 for name, vector in run.full_vectors().items()},
        "tensors": [dict(tensors) for tensors in run.iteration.tensors()],
        "meter": asdict(run.oracle.meter),
        "cached": run.oracle.is_cached(run.x),
        **{name: numbers_of(getattr(run, name)) for name in _MONITORS},
        "first_value": run.findings.first_value,
        "oracle": run.oracle.numbers(),
    }


def resume_run(run: Run, state: Mapping[str, Any]) -> None:
    """Continue from a state that an earlier run passed to its callback, in the variables of that run.

    The whole state is checked before the point, the iteration and the counters are restored.
    """
    exponents = saved_variable_scales(state, run.oracle.space.dim)
    if exponents is not None:
        if not can_scale_variables(run):
            raise ArgumentError(
                "resume is of a run that continued in scaled variables, without bounds and sigma0: leave them out, or "
                "start a new run from its x."
            )
        scale_variables(run, exponents)
    tensors = _check_iteration_state(run, state)
    _check_progress(state)
    oracle_numbers, exponent = _check_oracle_state(run, state["oracle"])
    run.oracle.restore(oracle_numbers)
    run.scale_objective(exponent)
    run.iteration.restore(state["numbers"], state["vectors"], tensors)
    monitors = {name: kind(**state[name]) for name, kind in _MONITORS.items()}
    run.restore_progress(state["x"], **monitors, first_value=state["first_value"])
    value_is_cached, gradient_is_cached = state["cached"]
    if value_is_cached:  # evaluate again; the saved counters include it already
        run.oracle.value(run.x)
    if gradient_is_cached:
        run.oracle.gradient(run.x)
    run.oracle.meter = Meter(**state["meter"])


def _check_oracle_state(run: Run, saved: Any) -> tuple[dict[str, Any], int]:
    """Raise an error unless saved numbers belong to this oracle; return them, and the exponent that scales f."""
    names, numbers = run.oracle.numbers().keys(), require_mapping("resume['oracle']", saved)
    if set(numbers) - {"exponent"} != set(names):
        raise state_error("resume['oracle']", sorted(map(str, numbers)), f"{sorted(names)}")
    exponent = require_objective_exponent(run.oracle, numbers)
    return {name: numbers[name] for name in names}, exponent


def _check_iteration_state(run: Run, state: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Raise an error unless a state belongs to this problem and iteration; return its tensors."""
    missing = save_run(run).keys() - state.keys()
    if missing:
        raise ArgumentError(
            f"resume lacks {sorted(missing)}: pass the state of an intermediate result of this version."
        )
    method = run.iteration.method
    if not isinstance(state["method"], str) or state["method"] != method.name:
        raise ArgumentError(f"resume is of method {state['method']!r}, not {method.name!r}: use that one.")
    dim = run.oracle.space.dim
    if getattr(state["x"], "ndim", None) == 1 and len(state["x"]) != dim:
        raise ArgumentError(f"resume has {len(state['x'])} variables, not {dim}: use its problem.")
    numbers, vectors = state["numbers"], require_mapping("resume['vectors']", state["vectors"])
    if set(require_mapping("resume['numbers']", numbers)) != set(run.iteration.numbers()):
        raise ArgumentError(
            "resume is of another iteration than this one: pass the same preset, minibatch and batch_size as in "
            "the run that was interrupted, and a state of this version."
        )
    tensors = _as_tensors(state["tensors"], run.oracle.space.tensor(run.x).dtype)
    run.iteration.check("resume['numbers']", numbers, vectors, run.oracle.shapes, tensors)
    for name, vector in {"x": state["x"], **vectors}.items():
        where = f"resume[{name!r}]"
        require_vector(where, vector, (dim,))
        if type(vector) is not type(run.x) or vector.dtype != run.x.dtype:  # type: ignore[attr-defined]
            raise state_error(where, f"{type(vector).__name__} of {vector.dtype}", "one of the type of x0")
    return tensors


def _check_progress(state: Mapping[str, Any]) -> None:
    """Raise an error unless the numbers of a saved run have their types and ranges."""
    for name, kind in {"meter": Meter, **_MONITORS}.items():
        require_fields(f"resume[{name!r}]", state[name], kind)
    cached, first_value = state["cached"], state["first_value"]
    if _types_of(cached) != [bool, bool]:
        raise state_error("resume['cached']", cached, "two of True and False")
    if not isinstance(first_value, float):
        raise state_error("resume['first_value']", first_value, "a number")


def _types_of(entries: Any) -> list[type]:
    """Return the types of the entries of a list or tuple; an empty list for anything else."""
    return [type(entry) for entry in entries] if isinstance(entries, (tuple, list)) else []


def _as_tensors(saved: Any, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return saved tensors of the iteration, of the type of x; a file may have them as arrays."""
    if not isinstance(saved, (list, tuple)):
        raise state_error("resume['tensors']", saved, "a list of mappings")
    result = []
    for entry in saved:
        items = require_mapping("an entry of resume['tensors']", entry).items()
        if not all(isinstance(array, np.ndarray | torch.Tensor) for _, array in items):
            raise state_error("an entry of resume['tensors']", entry, "tensors by name")
        tensors = {name: torch.as_tensor(array) for name, array in items}
        for name, tensor in tensors.items():
            if tensor.dtype != dtype:
                raise state_error(f"{name!r} in resume['tensors']", f"a tensor of {tensor.dtype}", f"one of {dtype}")
        result.append(tensors)
    return result
