"""Bounds as a caller passes them: SciPy's `Bounds`, pairs, tensors and trees; and their part of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, OptimizeWarning
from torch import Tensor

from sanc.core.bounded.bounds import Box
from sanc.core.bounded.box_model import BoundedModel
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.record import Note
from sanc.core.runs.faces import weakly_active
from sanc.core.runs.run import Run
from sanc.core.runs.stall import STALL_LIMIT
from sanc.core.runs.status import Status
from sanc.core.space import Space, Vector
from sanc.errors import ArgumentError, ArgumentTypeError, shown, warn
from sanc.minimisation.trees import Tree, is_tree

_BOUNDS_REMEDY = (
    "pass a (lower, upper) pair for each variable, or scipy.optimize.Bounds, or a pair of arrays or trees like x0"
)
_MAX_LISTED_VARIABLES = 5
"""Variables that a message lists by number; of more it gives the count."""


def apply_bounds(bounds: Any, x0: Any, oracle: Oracle, x: Vector, method: Method) -> tuple[Box | None, Vector, Method]:
    """Return the box, or None if no variable is bounded, the start in it, and the method with steps in it."""
    box = build_box(bounds, x0, oracle.space, x)
    if box is None:
        return None, x, method
    if not oracle.exact:
        raise ArgumentError(
            "bounds cannot be used with samples: leave batch_size out, or project after each step of an optimiser."
        )
    x = _project_start(box, oracle, x)
    oracle.box = box
    return box, x, replace(method, model=BoundedModel(inner=method.model))


def build_box(bounds: Any, x0: Any, space: Space, x: Vector) -> Box | None:
    """Return the box of the caller's bounds; None if no variable is bounded."""
    if bounds is None or (isinstance(bounds, Sequence) and len(bounds) == 0):
        return None
    like = space.tensor(x)
    lower, upper = (like.new_tensor(side) for side in _sides(bounds, x0, space.dim))
    if bool(torch.isneginf(lower).all()) and bool(torch.isposinf(upper).all()):
        return None
    _check_order(lower, upper)
    return Box(lower, upper)


def _project_start(box: Box, oracle: Oracle, x: Vector) -> Vector:
    """Return the start, projected on the box with a warning; raise an error if a fixed variable starts elsewhere."""
    start = oracle.space.tensor(x)
    moved = (start < box.lower) | (start > box.upper)
    if not bool(moved.any()):
        return x
    fixed = torch.nonzero(moved & (box.lower == box.upper)).reshape(-1)
    if len(fixed):
        k = int(fixed[0])
        raise ArgumentError(
            f"x0[{k}] = {float(start[k]):g} differs from {float(box.lower[k]):g}, at which bounds fix it: start there, "
            "or pass wider bounds."
        )
    warn(f"x0 is outside the bounds in {_listed(moved)}, and is projected on them.", OptimizeWarning)
    return oracle.space.vector(box.project(start))


def bounded_entries(run: Run, unflatten: Any) -> dict[str, Any]:
    """Return the entries of a result that describe the bounds at its point."""
    box, oracle = run.box, run.unscaled_oracle
    if box is None:
        return {}
    space, (_, g) = oracle.space, oracle.gradient(run.full_x)
    active = box.active(space.tensor(run.full_x), space.tensor(g))
    multipliers = torch.where(active != 0, space.tensor(g), 0.0)

    def formed(mask: Tensor, kind: Any) -> Any:
        return _converted(unflatten(space.vector(mask.to(space.tensor(g).dtype))), kind)

    return {
        "active": formed(active, int),
        "multipliers": unflatten(space.vector(multipliers)),
        "weakly_active": formed(weakly_active(run), bool),
    }


def bounded_sentence(run: Run, status: Status) -> str:
    """Return the sentence of an ending, with the conditions at bounds."""
    if run.box is None:
        return status.sentence
    sentence = status.sentence
    if status is Status.SECOND_ORDER:
        sentence = (
            "Converged to a second-order point of the bound-constrained problem: the projected gradient is small, the "
            "multipliers have the right sign, and the curvature of the free variables is certified."
        )
    if _is_infinite_at_bounds(run, status):
        sentence += (
            " f or its gradient is not finite at a bound: start between the bounds, and pass bounds at which both are "
            "finite, such as 1e-8 instead of 0."
        )
    weak = weakly_active(run) if status.success else torch.zeros(1)
    if bool(weak.any()):
        sentence += f" Weakly active, with a multiplier of zero: {_listed(weak)}."
    return sentence


def _is_infinite_at_bounds(run: Run, status: Status) -> bool:
    """Return whether a run failed because f or its gradient is not finite where a variable is at a bound."""
    if status is Status.NOT_FINITE:
        assert run.box is not None
        x = run.full_oracle.space.tensor(run.full_x)
        return bool(((x <= run.box.lower) | (x >= run.box.upper)).any())
    notes = (Note.TRIAL_NOT_FINITE, Note.GRADIENT_NOT_FINITE)
    failed = status in (Status.NO_GRADIENT, Status.STALLED)
    return failed and any(record.note in notes for record in run.history[-STALL_LIMIT:])


def _converted(form: Any, kind: Any) -> Any:
    """Return a point with its numbers converted to integers or booleans."""
    if isinstance(form, Mapping):
        return {key: _converted(part, kind) for key, part in form.items()}
    if isinstance(form, list | tuple):
        return [_converted(part, kind) for part in form]
    return form.to(torch.int64 if kind is int else torch.bool) if isinstance(form, Tensor) else form.astype(kind)


def _sides(bounds: Any, x0: Any, dim: int) -> tuple[Any, Any]:
    """Return lower and upper bounds as flat float64 arrays."""
    try:
        if isinstance(bounds, Bounds):
            lower, upper = bounds.lb, bounds.ub
        elif _is_pair_of_sides(bounds, x0, dim):
            lower, upper = bounds
        elif isinstance(bounds, Mapping):
            raise TypeError("a mapping is one side only")
        else:
            pairs = [tuple(pair) for pair in bounds]
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError("no pairs")
            if len(pairs) != dim:
                raise ArgumentError(f"bounds has {len(pairs)} pairs for {dim} variables: pass one for each.")
            lower, upper = ([pair[side] for pair in pairs] for side in (0, 1))
        return _flat_side(lower, x0, dim, -np.inf), _flat_side(upper, x0, dim, np.inf)
    except ArgumentError:
        raise
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentTypeError(f"bounds = {shown(bounds)} are not pairs of numbers: {_BOUNDS_REMEDY}.") from None


def _is_pair_of_sides(bounds: Any, x0: Any, dim: int) -> bool:
    """Return whether bounds are one lower and one upper side, and not a sequence of pairs.

    Pairs are tuples, lists or the rows of an array. Two arrays or tensors of two entries for two variables may be
    either, and raise an error.
    """
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return False
    if is_tree(x0):
        return True
    arrays = [side for side in bounds if isinstance(side, np.ndarray | Tensor) and side.ndim > 0]
    if dim == 2 and arrays and all(np.shape(side) == (2,) for side in bounds):
        raise ArgumentError(
            f"bounds = {shown(bounds)} are two arrays for two variables, which may be sides or pairs: pass "
            "scipy.optimize.Bounds(lower, upper), or a list of (lower, upper) tuples."
        )
    shape = np.shape(x0)
    return any(isinstance(side, Tensor) or side.shape == shape for side in arrays)


def _flat_side(side: Any, x0: Any, dim: int, unbounded: float) -> Any:
    """Return one side as a flat float64 array; None is infinite, and a number is the bound of all variables."""
    if is_tree(x0) and is_tree(side):
        filled = _filled(x0, side, unbounded)
        return np.asarray(_array(Tree(x0, "x0").flatten(filled, "bounds")), np.float64)
    array = _array(side)
    if array.dtype == object or array.ndim == 0:
        array = np.array([unbounded if entry is None else float(entry) for entry in np.ravel(array)])
    array = array.astype(np.float64).reshape(-1)
    if array.size == 1:
        array = np.full(dim, array[0])
    if array.size != dim:
        raise ArgumentError(f"bounds has {array.size} numbers on one side for {dim} variables: pass one for each.")
    return array


def _filled(x0: Any, side: Any, unbounded: float) -> Any:
    """Return a tree of bounds with arrays of the shape of x0 where it has None or a number."""
    if isinstance(x0, Mapping):
        if not isinstance(side, Mapping) or set(side) != set(x0):
            raise ArgumentError(f"bounds = {shown(side)} differ from x0 in structure: pass the same keys.")
        return {key: _filled(part, side[key], unbounded) for key, part in x0.items()}
    if isinstance(x0, list | tuple):
        if not isinstance(side, list | tuple) or len(side) != len(x0):
            raise ArgumentError(f"bounds = {shown(side)} differ from x0 in structure: pass the same length.")
        return [_filled(part, other, unbounded) for part, other in zip(x0, side, strict=True)]
    array = np.asarray(unbounded if side is None else _array(side), np.float64)
    shape = tuple(np.shape(x0))
    if array.ndim and array.shape != shape:
        raise ArgumentError(f"bounds has shape {array.shape} for a leaf of shape {shape}: pass the same shape.")
    return np.broadcast_to(array, shape).copy()


def _array(side: Any) -> Any:
    """Return numbers, or None for no bound, as an array on the host."""
    return side.detach().cpu().numpy() if isinstance(side, Tensor) else np.asarray(side)


def _check_order(lower: Tensor, upper: Tensor) -> None:
    """Raise an error for bounds that are NaN, in the wrong order, or infinite on the wrong side."""
    wrong = ~(lower <= upper) | torch.isposinf(lower) | torch.isneginf(upper)
    if not bool(wrong.any()):
        return
    k = int(torch.nonzero(wrong).reshape(-1)[0])
    pair = f"({float(lower[k]):g}, {float(upper[k]):g})"
    raise ArgumentError(f"bounds[{k}] = {pair} cannot be used: pass lower ≤ upper, and None or inf for no bound.")


def _listed(mask: Tensor) -> str:
    """Return the numbers of some variables, or their count."""
    indices = torch.nonzero(mask).reshape(-1).tolist()
    if len(indices) > _MAX_LISTED_VARIABLES:
        return f"{len(indices)} variables"
    return ("variable " if len(indices) == 1 else "variables ") + ", ".join(map(str, indices))
