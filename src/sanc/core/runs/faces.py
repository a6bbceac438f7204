"""The faces of a run with bounds: which variables are free at the current point.

`sanc.core.bounded.bounds` has the box and the objective on a face. The functions return a face; `Run.enter_face`
continues on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.runs.run import Run


def current_face(run: Run) -> FaceOracle | None:
    """Return the face of the current point, the same object if the run is on it; None if there are no bounds.

    Variables at a bound are released if f decreases from it into the box. If the gradient of all free variables is then
    below the tolerance, x is stationary; all variables at bounds are held, and the curvature between them is tested.
    """
    if run.box is None:
        return None
    oracle, full_x = run.full_oracle, run.full_x
    space = oracle.space
    x = space.tensor(full_x)
    if run.box.is_interior(x):
        return _face(run, run.box, None)
    g = space.tensor(oracle.gradient(full_x)[1])
    free = run.box.free(x, g)
    if oracle.norm(space.vector(torch.where(free, g, 0.0))) <= run.variables.tolerance(run):
        free = run.box.between(x)
    return _face(run, run.box, free)


def _face(run: Run, box: Box, free: Tensor | None) -> FaceOracle:
    """Return the face with these free variables, None: all; that of the run if it has the same ones."""
    free_indices = None if free is None or bool(free.all()) else torch.nonzero(free).reshape(-1)
    if isinstance(run.oracle, FaceOracle) and _is_same(run.oracle.free_indices, free_indices):
        return run.oracle
    return FaceOracle(run.full_oracle, box, run.full_x, free_indices)


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
    return ((x <= box.lower) | (x >= box.upper)) & (box.lower < box.upper) & (g.abs() <= run.variables.tolerance(run))


def face_without_weak_bounds(run: Run) -> FaceOracle | None:
    """Return the face on which the weakly active variables are free, too; None if there are none."""
    if run.box is None:
        return None
    weak = weakly_active(run)
    if not bool(weak.any()):
        return None
    return _face(run, run.box, weak | run.box.between(run.full_oracle.space.tensor(run.full_x)))
