"""The state of the iteration on samples: its saved form, its restart, and its vectors for other parameters."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

import sanc
from sanc.core.space import Space
from sanc.minibatch import joining, saved_states
from sanc.minibatch.averaged_phase import after_move, with_total_checksum
from sanc.minibatch.averaging import CHECKSUM_MODULUS, checksum
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minibatch.state import PARTS, CallerChanges, MinibatchState

NUMBERS = {
    *("averaged", "below_bound", "caller_changed", "checksum", "disagreements", "distance_bound"),
    *("distance_numerator", "eta_reduction", "far_larger_gradients", "far_smaller_gradients", "first_loss"),
    *(
        "grad_norm_mean_square",
        "gradient_unit",
        "iteration",
        "largest_grad_norm",
        "last_decrease",
        "last_extension",
    ),
    *("last_grad_norm", "last_loss", "last_step_was_long", "loss_count", "loss_mean", "loss_variance"),
    *("lowest_loss_mean", "nonfinite_batches", "offset_norm1", "parameter_unit", "peak_lr", "projection_countdown"),
    *("reference_loss", "seconds", "seed", "smallest_grad_norm", "stagnation_tests", "step_norm1_sum", "steps"),
    *("steps_since_halving", "tested_loss_mean", "weight_sum", "width"),
}
VECTORS = {
    *("averaging_start", "direction_sum", "first_point", "joined_at", "last_written_x", "last_x", "offset"),
    "safe_point",
}


def state_with_vectors():
    """Return a state in which every vector has other entries, and some numbers have other values."""
    parts = {
        part: kind(**{item.name: torch.full((2,), float(k)) for k, item in enumerate(fields(kind))
                      if item.default is None})
        for part, kind in PARTS.items()
    }  # fmt: skip
    state = MinibatchState(3, steps=7, offset=torch.full((2,), 8.0), joined_at=torch.full((2,), 2.0), **parts)
    return replace(state, losses=replace(state.losses, loss_mean=0.5), norms=replace(state.norms, last_grad_norm=2.0))


def test_checkpoints_have_the_names_of_version_0_2():
    """They load only as long as no name changes."""
    state = state_with_vectors()
    assert set(saved_states.saved_numbers(state)) == NUMBERS and set(saved_states.saved_vectors(state)) == VECTORS
    assert set(MinibatchIteration(sanc.method_for(), seed=0).numbers()) == NUMBERS | {"second_order"}


def test_a_state_is_the_one_that_was_saved():
    state = state_with_vectors()
    entries = saved_states.saved_numbers(state) | saved_states.saved_vectors(state)
    again = MinibatchState(**saved_states.fields_from(entries))
    assert repr(again) == repr(state) and again.losses.safe_point is state.losses.safe_point


def test_when_averaging_starts_again_the_losses_so_far_and_the_units_are_kept():
    state = replace(state_with_vectors(), parameter_unit=0.1, eta_reduction=0.5, nonfinite_batches=1)
    after = state.restarted()
    assert (after.steps, after.weight_sum, after.nonfinite_batches, after.offset, after.joined_at) == (
        0,
        0,
        0,
        None,
        None,
    )
    assert after.norms == PARTS["norms"]() and after.distance == PARTS["distance"]()
    assert math.isnan(after.losses.loss_mean) and after.losses.safe_point is state.losses.safe_point
    assert (after.parameter_unit, after.eta_reduction, after.seed) == (0.1, 0.5, 3)


def test_every_vector_is_rearranged_for_other_parameters():
    state, x = state_with_vectors(), torch.zeros(3)
    for joins in (False, True):
        after = joining.rearranged(state, lambda vector, fill: torch.cat([vector, fill[2:]]), x, joins=joins)
        assert {name: v.shape for name, v in saved_states.saved_vectors(after).items()} == dict.fromkeys(VECTORS, (3,))
        assert math.isnan(after.caller.checksum) and after.last_extension == (7 if joins else 0)


def test_moves_are_summed_over_ranks_with_the_next_step_or_before_saving():
    """Two ranks that hold a half each: nothing is exchanged in a move, and the sums are those of one process."""
    x, y = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).unbind()
    whole = Space(6, torch.float32, torch.device("cpu"))
    state = MinibatchState(0, caller=CallerChanges(checksum=float(checksum(x)) % CHECKSUM_MODULUS))
    moved = after_move(after_move(after_move(state, x, y, whole), y, x, whole), x, y, whole)
    assert moved.caller.checksum == float(checksum(y)) % CHECKSUM_MODULUS and moved.caller.unsummed_checksum == 0.0
    halves = Space(6, torch.float32, torch.device("cpu"))
    exchanged = []
    halves.sum_over_ranks = lambda part: exchanged.append(float(part)) or part
    states = [after_move(state, *parts, halves) for parts in zip(x.split(3), y.split(3), strict=True)]
    assert not exchanged and all(saved_states.saved_numbers(s) == saved_states.saved_numbers(state) for s in states)
    unsummed = [s.caller.unsummed_checksum for s in states]
    assert sum(unsummed) % CHECKSUM_MODULUS == (moved.caller.checksum - state.caller.checksum) % CHECKSUM_MODULUS
    halves.sum_over_ranks = lambda part: part + unsummed[1]
    assert with_total_checksum(states[0], halves).caller == moved.caller


def test_a_name_of_a_part_is_in_the_error():
    with pytest.raises(AttributeError, match=r"has no attribute 'loss_mean': use losses\.loss_mean"):
        _ = MinibatchState(0).loss_mean
