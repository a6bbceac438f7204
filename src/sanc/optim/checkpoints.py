"""The saved state of an optimiser, as plain numbers and tensors, and the checks of a state before it is restored.

The vectors are saved by parameter, in the entry 'state' of torch's optimisers. All else, the numbers of the run, is the
entry 'run_state'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.leaves import Leaves
from sanc.autograd.masters import LOW_PRECISION
from sanc.autograd.products import OPTIMIZER_HVP_MODES
from sanc.core.meter import Meter
from sanc.core.method import Method
from sanc.core.saved import require_count, require_fields, require_mapping, require_vector, state_error
from sanc.errors import ArgumentError, one_of, shown, warn, without_addresses
from sanc.optim.driving import STYLES, Driver
from sanc.optim.groups import check_group

_RUN_STATE_ENTRIES = {"method", "settings", "numbers", "meter", "hvp", "style", "at_average", "vectors", "sizes"}
"""Required keys of the entry 'run_state', the saved state without its vectors."""


def write_states(driver: Driver, states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Write the vectors of the iteration to the states of their parameters."""
    if driver.last_leaves is None:
        return
    for name, vector in driver.iteration.vectors().items():
        for p, part in zip(driver.last_leaves.tensors, driver.last_leaves.pack(vector), strict=True):
            states[p][name] = part
    for p, tensors in zip(driver.last_leaves.tensors, driver.iteration.tensors(), strict=False):
        states[p]["metric"] = dict(tensors)
    if driver.last_leaves.is_low_precision:
        # The saved model has the values that were changed after the last step.
        for p, part in zip(driver.last_leaves.tensors, driver.last_leaves.pack(driver.last_leaves.read()), strict=True):
            states[p]["master"] = part


def uncast_states(
    states: MutableMapping[Tensor, Any],
    saved: Mapping[Any, Any],
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Replace the states of parameters of low precision by the saved ones, which torch rounds to their type."""
    for saved_group, group in zip(saved_groups, groups, strict=True):
        for number, p in zip(saved_group["params"], group["params"], strict=True):
            if p.dtype in LOW_PRECISION and saved.get(number):
                states[p] = _moved(saved[number], p.device)


def _moved(entry: Any, device: torch.device) -> Any:
    """Return tensors on this device, in the mappings in which they are."""
    if isinstance(entry, Mapping):
        return {name: _moved(value, device) for name, value in entry.items()}
    return entry.to(device) if isinstance(entry, Tensor) else entry


def run_state_of(driver: Driver, *, vectors: int) -> dict[str, Any]:
    """Return the entry 'run_state'; `vectors` is the number of parameters that have vectors in the entry 'state'."""
    leaves = driver.oracle.leaves.tensors
    return {
        "method": driver.method.name,
        "settings": saved_settings(driver.method),
        "numbers": driver.iteration.numbers(),
        "meter": asdict(driver.meter),
        "hvp": driver.oracle.hvp,
        "style": driver.oracle.style,
        "at_average": driver.at_average,
        "vectors": vectors,
        # torch.distributed.checkpoint takes the device from a tensor, and before the first step there is no other.
        "sizes": torch.tensor([leaf.numel() for leaf in leaves], device=leaves[0].device),
    }


def checked_run_state(driver: Driver, run_state: Any, entries: Iterable[Any]) -> dict[str, Any]:
    """Return the entry 'run_state' if this optimiser can restore it; otherwise raise an error.

    `entries` are the names of those that the state has.
    """
    if not isinstance(run_state, dict):
        raise ArgumentError(
            f"state_dict has no entry 'run_state', but {shown(sorted(map(str, entries)))}: pass what state_dict() "
            "of this optimiser returned."
        )
    if not run_state.keys() >= _RUN_STATE_ENTRIES:
        raise ArgumentError(
            f"state_dict['run_state'] has {sorted(run_state)}: pass what state_dict() returned, as a whole."
        )
    where = "state_dict['run_state']"
    if not isinstance(run_state["method"], str) or run_state["method"] != driver.method.name:
        raise ArgumentError(
            f"state_dict is of {run_state['method']!r}, not {driver.method.name!r}: load it into that method."
        )
    for name in ("settings", "numbers", "meter"):
        require_mapping(f"{where}[{name!r}]", run_state[name])
    if differing := set(run_state["numbers"]) ^ set(driver.iteration.numbers()):
        raise ArgumentError(
            f"{where}['numbers'] differ from this optimiser's in {shown(sorted(map(str, differing)))}, so they are of "
            "another iteration or version: construct it with the same preset and minibatch as the saved run."
        )
    require_fields(f"{where}['meter']", run_state["meter"], Meter)
    if run_state["style"] not in list(STYLES):
        raise state_error(f"{where}['style']", run_state["style"], f"one of {list(STYLES)}")
    if not isinstance(run_state["at_average"], bool):
        raise state_error(f"{where}['at_average']", run_state["at_average"], "True or False")
    if not isinstance(run_state["sizes"], Tensor):
        raise state_error(f"{where}['sizes']", run_state["sizes"], "a tensor")
    require_count(f"{where}['vectors']", run_state["vectors"])
    one_of("hvp", run_state["hvp"], OPTIMIZER_HVP_MODES)
    return run_state


def saved_settings(method: Method) -> dict[str, Any]:
    """Return the settings of a method as plain values."""

    def plain(value: Any) -> Any:
        return value if isinstance(value, bool | int | float | str | None) else without_addresses(repr(value))

    return {name: plain(value) for name, value in method.options().items()}


def checked_groups(
    saved: Any, current: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the saved groups, without 'run_state', if they fit the groups of this optimiser."""
    if not isinstance(saved, (list, tuple)) or not all(isinstance(group, Mapping) for group in saved):
        raise state_error("state_dict['param_groups']", saved, "a list of groups")
    groups = [{name: value for name, value in group.items() if name != "run_state"} for group in saved]
    for group in groups:
        numbers = group.get("params")
        if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, int | str) for number in numbers):
            raise state_error("'params' in state_dict['param_groups']", numbers, "a list of numbers")
        check_group(group, defaults, saved=True)
    sizes = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in current]
    if sizes != expected:
        raise ArgumentError(
            f"state_dict['param_groups'] have {sizes} parameters and those of this optimiser {expected}: construct it "
            "with the same groups."
        )
    return groups


def checked_state(state: Any, groups: Sequence[Mapping[str, Any]], run_state: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the saved vectors by parameter number, if all parameters that had vectors still have them."""
    require_mapping("state_dict['state']", state)
    for number, entry in state.items():
        require_mapping(f"state_dict['state'][{number!r}]", entry)
    if unknown := set(state) - {number for group in groups for number in group["params"]}:
        raise state_error("state_dict['state']", sorted(map(str, unknown)), "entries of the parameters alone")
    count = sum(map(bool, state.values()))
    if run_state["vectors"] != count:
        remedy = (
            " torch.distributed.checkpoint.load fills only existing entries, and an optimiser that has made no step "
            "has no vectors: use sanc.save_checkpoint and sanc.load_checkpoint. To use an existing checkpoint, convert "
            "it with torch.distributed.checkpoint.format_utils.dcp_to_torch_save and load it with torch.load."
        )
        raise ArgumentError(
            f"state_dict['state'] has {count} parameters instead of {run_state['vectors']!r}: pass what state_dict() "
            f"returned, as a whole.{'' if count else remedy}"
        )
    return state  # type: ignore[no-any-return]


def checked_vectors(
    driver: Driver, run_state: Mapping[str, Any], parameters: Sequence[Tensor], states: Any
) -> tuple[Leaves | None, dict[str, Any], list[Any], Tensor | None]:
    """Return the leaves that have vectors, the vectors, the tensors of the metric, and the master values.

    `states` is by parameter.
    """
    saved = [p for p in parameters if states.get(p)]
    leaves = driver.leaves(saved, [0.0] * len(saved)) if saved else None
    entries = [dict(states[p]) for p in saved]
    tensors = [entry.pop("metric", {}) for entry in entries]
    masters = [entry.pop("master", None) for entry in entries]
    for number, (p, master) in enumerate(zip(saved, masters, strict=True)):
        if master is not None:
            require_vector(f"'master' of parameter {number}", master, tuple(p.shape))
    for number, (p, entry) in enumerate(zip(saved, entries, strict=True)):
        if set(entry) != set(entries[0]):
            raise state_error(
                f"state of parameter {number}", sorted(entry), f"vectors of the names {sorted(entries[0])}"
            )
        for name, part in entry.items():
            if isinstance(part, Tensor) and part.shape != p.shape and run_state["sizes"].numel() == len(saved):
                raise ArgumentError(
                    f"state_dict is of a model with other sizes: its parameter {number} has the shape "
                    f"{tuple(part.shape)} instead of {tuple(p.shape)}. Construct the model as it was when it was saved."
                )
            require_vector(f"{name!r} of parameter {number}", part, tuple(p.shape))
    vectors = {} if leaves is None else {n: leaves.flatten([entry[n] for entry in entries]) for n in entries[0]}
    shapes = [tuple(p.shape) for p in saved]
    driver.iteration.check("state_dict['run_state']['numbers']", run_state["numbers"], vectors, shapes, tensors)
    complete = leaves is not None and leaves.is_low_precision and all(master is not None for master in masters)
    return leaves, vectors, tensors, leaves.flatten(masters) if leaves is not None and complete else None


def warn_of_changes(driver: Driver, run_state: Mapping[str, Any]) -> None:
    """Warn of settings that differ from the settings of the saved run."""
    for name, value in run_state["settings"].items():
        current = saved_settings(driver.method).get(name)
        if current != value:
            text = f"the state was saved with {name} = {value!r} and this optimiser has {current!r}"
            warn(f"{text}: the run continues, with steps that differ from those of the saved run.")
    if driver.hvp != "auto" and run_state["hvp"] not in ("auto", driver.hvp):
        text = f"the state was saved with hvp = {run_state['hvp']!r} and this optimiser has {driver.hvp!r}"
        warn(f"{text}: the run continues, with steps that differ in the last bits.")


def restore(
    driver: Driver,
    run_state: Mapping[str, Any],
    leaves: Leaves | None,
    vectors: Mapping[str, Any],
    tensors: Sequence[Any],
    masters: Tensor | None,
) -> None:
    """Restore a state that was checked."""
    if driver.hvp == "auto":
        driver.oracle.hvp = run_state["hvp"]
    if driver.capture is not None:
        driver.capture.reset()
    driver.vector_work.reset()
    driver.last_leaves = leaves
    driver.masters.keep_only([])
    if leaves is not None and masters is not None:
        leaves.keep_masters(masters)
    driver.iteration.restore(run_state["numbers"], vectors, tensors)
    driver.meter = Meter(**run_state["meter"])
    driver.oracle.style, driver.at_average = run_state["style"], run_state["at_average"]
    driver.clear_record()
    driver.mode.after_loading()
