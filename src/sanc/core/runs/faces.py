"""The faces of a run with bounds: which variables are free at the current point.

`sanc.core.bounded.bounds` has the box and the objective on a face.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sanc.core.bounded.bounds import FaceOracle
from sanc.core.runs.run import Run


def enter_face(run: Run) -> None:
    """Continue on the face of the current point: the run's oracle and vectors then have only its free variables.

    Variables at a bound are released if f decreases from it into the box. If the gradient of all free variables is then
    below the tolerance, x is stationary; all variables at bounds are held, and the curvature between them is tested.
    """
    if run.box is None:
        return
    oracle, point = run.full_oracle, run.full_x
    space = oracle.space
    x = space.tensor(point)
    if run.box.is_interior(x):
        _change_face(run, None)
        return
    g = space.tensor(oracle.gradient(point)[1])
    free = run.box.free(x, g)
    if oracle.norm(space.vector(torch.where(free, g, 0.0))) <= run.tol:
        free = run.box.between(x)
    _change_face(run, free)


def _change_face(run: Run, free: Tensor | None) -> None:
    """Continue with these free variables, None: all; vectors in the state of the acceptance rule follow."""
    assert run.box is not None
    old, point = run.oracle, run.full_x
    free_indices = None if free is None or bool(free.all()) else torch.nonzero(free).reshape(-1)
    if isinstance(old, FaceOracle) and _is_same(old.free_indices, free_indices):
        old.keep(run.x, point)
        return
    face = FaceOracle(run.full_oracle, run.box, point, free_indices)
    vectors = run.full_vectors()
    run.oracle, run.x = face, face.compress(point)
    face.keep(run.x, point)
    if vectors:
        iteration = run.iteration
        compressed = {name: face.compress(vector) for name, vector in vectors.items()}
        iteration.restore(iteration.numbers(), compressed, iteration.tensors())


def _is_same(free_indices: Tensor | None, others: Tensor | None) -> bool:
    """Return whether two sets of indices are the same."""
    if free_indices is None or others is None:
        return free_indices is others
    return torch.equal(free_indices, others)


def weakly_active(run: Run) -> Tensor:
    """Return the mask of the variables at a bound whose multiplier is zero up to the tolerance; fixed ones are not."""
    assert run.box is not None
    oracle = run.full_oracle
    x, g = oracle.space.tensor(run.full_x), oracle.space.tensor(oracle.gradient(run.full_x)[1])
    box = run.box
    return ((x <= box.lower) | (x >= box.upper)) & (box.lower < box.upper) & (g.abs() <= run.tol)


def release_weak_bounds(run: Run) -> bool:
    """Continue on the face on which the weakly active variables are free, too; return whether there are any."""
    if run.box is None:
        return False
    weak = weakly_active(run)
    if not bool(weak.any()):
        return False
    x = run.full_oracle.space.tensor(run.full_x)
    _change_face(run, weak | run.box.between(x))
    return True
