"""Parameters that join or leave during the averaged phase: their vectors in the state, and their first gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.space import Space, Vector
from sanc.minibatch.state import MinibatchState

_JOINING_AGE_FRACTION = 0.5
"""When parameters join, the others count as having joined after this fraction of the steps made. Their averages then
leave out the earlier iterates, because their best values change too."""

VectorMap = Callable[[Tensor | None, Tensor], Tensor]
"""Returns a vector of the present parameters. Those that stay have the entries of the first argument, a vector of the
earlier parameters (None: zero). The others have the entries of the second argument."""


def rearranged(state: MinibatchState, vector_map: VectorMap, x: Tensor, *, joins: bool) -> MinibatchState:
    """Return the state for other parameters with the values x; `joins`: some of them are new."""
    zeros = torch.zeros_like(x)

    def mapped(vector: Vector | None, fill: Tensor) -> Vector | None:
        return None if vector is None else vector_map(cast(Tensor, vector), fill)

    joined_at, last_extension = mapped(state.joined_at, zeros + state.steps), state.last_extension
    if joins:
        ages = vector_map(cast("Tensor | None", state.joined_at), zeros + state.steps)
        joined_at, last_extension = ages.clamp(min=_JOINING_AGE_FRACTION * state.steps), state.steps
    distance, caller = state.distance, state.caller
    return replace(
        state,
        last_extension=last_extension,
        offset=mapped(state.offset, zeros),
        joined_at=joined_at,
        comparison=replace(state.comparison, first_point=mapped(state.comparison.first_point, x)),
        losses=replace(state.losses, safe_point=mapped(state.losses.safe_point, x)),
        distance=replace(
            distance,
            averaging_start=mapped(distance.averaging_start, x),
            direction_sum=mapped(distance.direction_sum, zeros),
        ),
        caller=replace(
            caller,
            checksum=math.nan,
            last_x=mapped(caller.last_x, x),
            last_written_x=mapped(caller.last_written_x, x),
        ),
    )


def new_parameters(state: MinibatchState, shapes: Sequence[tuple[int, ...]], space: Space) -> list[bool]:
    """Return which parameters have joined since the last step, so that the metric has no gradient of them."""
    if state.joined_at is None:
        return []
    parts = torch.split_with_sizes(space.tensor(state.joined_at), [math.prod(shape) for shape in shapes])
    counts = torch.stack([(part == state.steps).sum() for part in parts])
    total_counts = counts if space.sum_over_ranks is None else space.sum_over_ranks(counts)
    return [count > 0 for count in total_counts.tolist()]


def gradient_growth(state: MinibatchState, g: Vector, norm: float, oracle: Oracle) -> float:
    """Return the factor by which the entries of new parameters raise ‖g‖², given ‖g‖."""
    assert state.joined_at is not None
    space = oracle.space
    is_new = space.tensor(state.joined_at) == state.steps
    old_norm = oracle.norm(space.vector(space.tensor(g).masked_fill(is_new, 0.0)))
    return (norm / old_norm) ** 2 if old_norm > 0.0 else 1.0
