"""The free variables of a minimum: those that no active bound fixes. Derivatives are with respect to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds
from torch import Tensor

from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.oracle import Oracle
from sanc.errors import ArgumentError
from sanc.implicit.derivatives import is_transformed
from sanc.minimisation.trees import is_tree, tree_leaves


def free_variables(result: Any) -> Tensor | None:
    """Return the mask of the free variables in the flat vector; None if all variables are free.

    The field ``active`` of a result has the form of x and marks variables at a bound, by True or by its sign. A result
    without this field has no bounds.
    """
    marked = _marked(result, "active")
    return None if marked is None or not bool(marked.any()) else ~marked


def has_weak_bounds(result: Any) -> bool:
    """Return whether a variable of a result is at a bound with a multiplier of zero up to `tol`."""
    marked = _marked(result, "weakly_active")
    return marked is not None and bool(marked.any())


def _marked(result: Any, field: str) -> Tensor | None:
    """Return the flat mask of the variables that a field of a result marks; None if it has no such field."""
    marks = result.get(field)
    if marks is None:
        return None
    leaves = [leaf for _, leaf in tree_leaves(marks, field)] if is_tree(marks) else [marks]
    parts = [leaf.detach().cpu() if isinstance(leaf, Tensor) else torch.as_tensor(np.asarray(leaf)) for leaf in leaves]
    return torch.cat([part.reshape(-1) != 0 for part in parts])


def free_oracle(oracle: Oracle, box: Box, x: Tensor, result: Any) -> FaceOracle:
    """Return f as a function of the free variables, with the others at their values in x; nothing leaves the box."""
    oracle.box = box
    free = free_variables(result)
    return FaceOracle(oracle, box, x, None if free is None else torch.nonzero(free.to(x.device)).reshape(-1))


def require_constant(bounds: Any) -> None:
    """Raise an error for bounds that are to be differentiated: variables at them would have the derivative zero."""
    tensors = list(_tensors(bounds))
    if any(tensor.requires_grad for tensor in tensors) or is_transformed(tensors):
        raise ArgumentError(
            "bounds depend on a tensor that requires a gradient, and their gradient would be missing: detach them, or "
            "minimise over y with x = lower + y and lower in theta."
        )


def _tensors(bounds: Any) -> Iterator[Tensor]:
    """Yield all tensors in bounds."""
    if isinstance(bounds, Tensor):
        yield bounds
    elif isinstance(bounds, Bounds):
        yield from _tensors([bounds.lb, bounds.ub])
    elif isinstance(bounds, dict | list | tuple):
        for part in bounds.values() if isinstance(bounds, dict) else bounds:
            yield from _tensors(part)
