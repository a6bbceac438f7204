"""What a resumed run of an optimiser needs, as plain numbers and tensors, and the checks of what is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.products import require_mode
from sanc.core.oracle import Meter
from sanc.driving import Driver
from sanc.errors import ArgumentError
from sanc.minibatch.iteration import MinibatchIteration

_ENTRIES = {"method", "settings", "numbers", "meter", "hvp", "style", "at_average", "vectors", "sizes"}


def write_states(driver: Driver, states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Write the vectors of the iteration to the parameters they belong to."""
    if driver.known is None:
        return
    for name, vector in driver.iterates.vectors().items():
        for p, part in zip(driver.known.tensors, driver.known.pack(vector), strict=True):
            states[p][name] = part
    if isinstance(driver.iterates, MinibatchIteration):
        for p, factors in zip(driver.known.tensors, driver.iterates.factors(), strict=False):
            states[p]["factors"] = factors


def engine_of(driver: Driver, *, vectors: bool) -> dict[str, Any]:
    """Return all but the vectors."""
    leaves, numbers = driver.oracle.leaves.tensors, driver.iterates.numbers()
    # torch.distributed.checkpoint can only merge containers of the same length.
    lists = {name: torch.tensor(held, dtype=torch.float64) for name, held in numbers.items() if isinstance(held, list)}
    return {
        "method": driver.method.name,
        "settings": asdict(driver.settings),
        "numbers": numbers | lists,
        "meter": asdict(driver.meter),
        "hvp": driver.oracle.hvp,
        "style": driver.style,
        "at_average": driver.at_average,
        "vectors": vectors,
        # The only tensor before the first step: torch.distributed.checkpoint learns the device from one.
        "sizes": torch.tensor([leaf.numel() for leaf in leaves], device=leaves[0].device),
    }


def checked_engine(driver: Driver, engine: Any, states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `engine` where this optimiser can go on from it."""
    if not isinstance(engine, dict):
        raise ArgumentError("state_dict has no entry 'engine': pass what state_dict() of this optimiser returned.")
    if not engine.keys() >= _ENTRIES or set(engine["meter"]) != set(Meter.__slots__):
        raise ArgumentError(f"state_dict['engine'] has {sorted(engine)}: pass what state_dict() returned.")
    if engine["method"] != driver.method.name:
        raise ArgumentError(
            f"state_dict is of {engine['method']!r}, not {driver.method.name!r}: load it into that method."
        )
    if set(engine["numbers"]) != set(driver.iterates.numbers()):
        raise ArgumentError(
            "state_dict is of another iteration than this optimiser's, or of another version: construct it with "
            "the same preset and the same minibatch as in the run that was saved."
        )
    if engine["vectors"] and not any(states.values()):
        raise ArgumentError("state_dict has lost its entry 'state': pass what state_dict() returned, as a whole.")
    require_mode(engine["hvp"])
    return engine


def warn_of_changes(driver: Driver, engine: Mapping[str, Any]) -> None:
    """Say what differs from the run that was saved."""
    for name, value in engine["settings"].items():
        mine = asdict(driver.settings).get(name)
        if mine != value:
            text = f"the state was saved with {name} = {value!r} and this optimiser has {mine!r}"
            warnings.warn(f"{text}: the run goes on, but not as the saved one would have.", stacklevel=3)
    if driver.hvp != "auto" and engine["hvp"] not in ("auto", driver.hvp):
        text = f"the state was saved with hvp = {engine['hvp']!r} and this optimiser has {driver.hvp!r}"
        warnings.warn(f"{text}: the run goes on, but not to the last bit as the saved one.", stacklevel=3)


def restore(driver: Driver, engine: Mapping[str, Any], parameters: Sequence[Tensor], states: Any) -> None:
    """Go on from a state; `states` are the vectors by parameter."""
    if driver.hvp == "auto":
        driver.oracle.hvp = engine["hvp"]
    if driver.capture is not None:
        driver.capture.forget()
    saved = [p for p in parameters if states.get(p)]
    driver.known = driver.mode.leaves(saved, [0.0] * len(saved)) if saved else None
    vectors, factors = {}, [states[p].pop("factors", {}) for p in saved]  # a checkpoint may have lost empty ones
    if driver.known is not None:
        names = set.intersection(*(set(states[p]) for p in saved))
        vectors = {name: driver.known.unpack([states[p][name] for p in saved]) for name in names}
    numbers = {name: held.tolist() if isinstance(held, Tensor) else held for name, held in engine["numbers"].items()}
    if isinstance(driver.iterates, MinibatchIteration):
        driver.iterates.restore(numbers, vectors, factors)
    else:
        driver.iterates.restore(numbers, vectors)
    driver.meter = Meter(**engine["meter"])
    driver.style, driver.at_average = engine["style"], engine["at_average"]
    driver.record = None
    driver.mode.loaded()
