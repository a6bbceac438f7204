"""The face of a point, for multipliers of both signs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from points import GivenOracle
from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.runs.faces import current_face, face_without_weak_bounds, weakly_active

LOWER, UPPER = torch.tensor([0.0, 0.0, -1.0, 2.0]).double(), torch.tensor([1.0, 1.0, 1.0, 2.0]).double()


def run_at(x, g, tol=1e-6, box=True):
    """Return the members of a run that faces need, at x with the gradient g. The last variable is fixed at 2."""
    oracle = GivenOracle(len(x), lambda x: 0.0, lambda x: np.array(g))
    for name in ("has_values", "hvp", "has_user_gradient", "differenced_gradient", "convex"):
        setattr(oracle, name, None)
    box = Box(LOWER, UPPER) if box else None
    variables = SimpleNamespace(tolerance=lambda run: tol)
    return SimpleNamespace(box=box, oracle=oracle, full_oracle=oracle, full_x=np.array(x), variables=variables)


def free_of(face):
    """Return the free variables, as a list."""
    return None if face.free_indices is None else face.free_indices.tolist()


def test_without_bounds_there_is_no_face():
    assert current_face(run_at([0.5] * 4, [1.0] * 4, box=False)) is None
    assert face_without_weak_bounds(run_at([0.5] * 4, [1.0] * 4, box=False)) is None


@pytest.mark.parametrize(("g", "free"), [
    ([1.0, 1.0, 1.0, 1.0], [1, 2]),  # at its lower bound f decreases outwards, at its upper one inwards
    ([-1.0, -1.0, 1.0, 1.0], [0, 2]),
    ([1.0, -1.0, 1.0, -1.0], [2]),
    ([-1.0, 1.0, 1.0, 0.0], [0, 1, 2]),
    ([0.0, 0.0, 1.0, 0.0], [2]),  # with a multiplier of zero
])  # fmt: skip
def test_a_variable_at_a_bound_is_free_if_f_decreases_into_the_box(g, free):
    assert free_of(current_face(run_at([0.0, 1.0, 0.5, 2.0], g))) == free


def test_at_a_stationary_point_all_variables_at_bounds_are_held():
    assert free_of(current_face(run_at([0.0, 1.0, 0.5, 2.0], [-1e-8, 1e-8, 1e-8, 5.0]))) == [2]


def test_a_run_remains_on_the_face_of_the_same_variables():
    run = run_at([0.0, 1.0, 0.5, 2.0], [1.0, -1.0, 1.0, 1.0])
    run.oracle = current_face(run)
    assert isinstance(run.oracle, FaceOracle) and current_face(run) is run.oracle
    run.full_oracle.g = lambda x: np.array([-1.0, -1.0, 1.0, 1.0])
    assert current_face(run) is not run.oracle and free_of(current_face(run)) == [0, 2]


def test_weakly_active_variables_have_a_multiplier_of_zero_up_to_the_tolerance():
    run = run_at([0.0, 1.0, 0.5, 2.0], [1e-7, -1.0, 0.0, 0.0])
    assert weakly_active(run).tolist() == [True, False, False, False]  # neither inner nor fixed ones
    assert free_of(face_without_weak_bounds(run)) == [0, 2]
    assert face_without_weak_bounds(run_at([0.0, 1.0, 0.5, 2.0], [1.0, -1.0, 0.0, 0.0])) is None
