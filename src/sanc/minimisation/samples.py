"""The samples of a finite sum, and the ranks that hold its rows, as `minimize` receives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sanc.core.method import Method
from sanc.errors import ArgumentError, shown
from sanc.ranks.group import Ranks, find_ranks
from sanc.ranks.sums import SharedSum
from sanc.sums.linear import FiniteSum
from sanc.sums.oracle import require_sum


def sample_sizes(
    fun: Any, method: Method, batch: int | None, hessian: int | None, objective: int | None, grow: bool
) -> tuple[int | None, int | None, int | None]:
    """Return the sizes of the samples of gradient, Hessian and objective; None is the whole sum."""
    arguments = {"batch_size": batch, "hessian_batch_size": hessian, "objective_batch_size": objective}
    if grow and (method.name != "scr" or batch is None):
        raise ArgumentError('grow_samples = True needs samples of method "scr": pass method="scr" and a batch_size.')
    for name, size in arguments.items():
        if size is None:
            continue
        if not isinstance(fun, FiniteSum):
            raise ArgumentError(f"{name} = {size!r} needs a finite sum to sample from: pass a sanc.problems.FiniteSum.")
        if method.exact:
            raise ArgumentError(f'{name} = {size!r} cannot be used with method="arc", which is exact: use "scr".')
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 1 <= size <= fun.n:
            raise ArgumentError(
                f"{name} = {size!r} does not fit the {fun.n} components: pass an integer from 1 to {fun.n}."
            )
    components = fun.n if isinstance(fun, FiniteSum) else None
    sizes = (batch, batch if hessian is None else hessian, objective)
    # A sample of all components is the sum itself.
    gradient_size, hessian_size, objective_size = (None if size == components else size for size in sizes)
    return gradient_size, hessian_size, objective_size


def reject_objective_sample(objective_batch_size: int | None) -> None:
    """Raise an error for the size of an objective sample where the ratio test has none."""
    if objective_batch_size is not None:
        raise ArgumentError(
            f"objective_batch_size = {objective_batch_size!r} cannot be used: the ratio test is on the gradient "
            'sample. Leave it out, or pass preset="paper".'
        )


def objective_on_ranks(fun: Any, process_group: Any) -> tuple[Any, Ranks | None]:
    """Return the objective and the ranks that hold its rows; None if each rank runs independently."""
    if isinstance(fun, FiniteSum):
        require_sum(fun)
    ranks = find_ranks(process_group)
    if ranks is None:
        return fun, None
    if not isinstance(fun, FiniteSum):
        raise ArgumentError(
            f"process_group = {shown(process_group)} needs a finite sum whose rows lie on the ranks: pass a "
            "sanc.problems.FiniteSum, or process_group=None."
        )
    return SharedSum(fun, ranks), ranks
