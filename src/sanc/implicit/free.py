"""The free variables of a minimum: those that no active bound fixes. Derivatives are with respect to these alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import Space, Vector
from sanc.minimisation.trees import is_tree, tree_leaves


def free_variables(result: Any) -> Tensor | None:
    """Return the mask of the free variables in the flat vector; None if all variables are free.

    The field ``active`` of a result has the form of x and marks variables at a bound, by True or by its sign. A result
    without this field has no bounds.
    """
    active = result.get("active")
    if active is None:
        return None
    leaves = [leaf for _, leaf in tree_leaves(active, "active")] if is_tree(active) else [active]
    parts = [leaf.detach().cpu() if isinstance(leaf, Tensor) else torch.as_tensor(np.asarray(leaf)) for leaf in leaves]
    mask = torch.cat([part.reshape(-1) == 0 for part in parts])
    return None if bool(mask.all()) else mask


class FreeOracle(Oracle):
    """f as a function of the free variables alone, with the others fixed at the values of `x`."""

    def __init__(self, inner: Oracle, x: Any, free: Tensor) -> None:
        self.inner = inner
        self.indices = torch.nonzero(free.to(x.device)).reshape(-1)
        self.space = Space(len(self.indices), x.dtype, x.device)
        self.meter, self.exact, self.hvp = inner.meter, inner.exact, inner.hvp
        self._x = x

    def restrict(self, v: Any) -> Any:
        """Return the free entries of a vector."""
        return v[self.indices]

    def extend(self, v: Any) -> Any:
        """Return the vector with these free entries, and zeros elsewhere."""
        return torch.zeros_like(self._x).index_copy(0, self.indices, v)

    def _point(self, x: Any) -> Any:
        return self._x.index_copy(0, self.indices, x)

    def value(self, x: Vector) -> float:
        return self.inner.value(self._point(x))

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        value, g = self.inner.gradient(self._point(x))
        return value, self.restrict(g)

    def hessian(self, x: Vector) -> Operator:
        return _FreeHessian(self, self.inner.hessian(self._point(x)))


class _FreeHessian(Operator):
    """Rows and columns of the Hessian that belong to free variables."""

    def __init__(self, oracle: FreeOracle, inner: Operator) -> None:
        self._oracle, self._inner = oracle, inner

    def __call__(self, v: Vector) -> Vector:
        return self._oracle.restrict(self._inner(self._oracle.extend(v)))  # type: ignore[no-any-return]

    def gradient(self) -> Vector:
        return self._oracle.restrict(self._inner.gradient())  # type: ignore[no-any-return]

    def error(self, v: Vector, product: Vector) -> float:
        return self._inner.error(self._oracle.extend(v), self._oracle.extend(product))

    def release(self) -> None:
        self._inner.release()
