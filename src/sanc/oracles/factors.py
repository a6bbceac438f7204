"""Where a large leaf is a factor of matrix products: its part of a Hessian product can then be added term by term.

Torch's product rule would hold two terms and their sum, each as large as the leaf; where memory is short and one matrix
is most of the model, that is more than everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from sanc.oracles.autograd import Layout


@dataclass(frozen=True, slots=True)
class MatrixUse:
    """One product of two matrices of which a leaf, or its transpose, is a factor.

    Attributes
    ----------
    output : GradientEdge
        Where the gradient of the product arrives.
    other : Tensor
        The other factor.
    first : bool
        Whether the leaf is the first factor.
    transposed : bool
        Whether it is transposed.
    """

    output: GradientEdge
    other: Tensor
    first: bool
    transposed: bool

    def add(self, g: Tensor, other: Tensor, weight: float, into: Tensor) -> None:
        """Add the leaf's gradient, a product of the gradient g of the matrix product and the other factor."""
        a, b = (g, other.mT) if self.first else (other.mT, g)
        into.addmm_(*((b.mT, a.mT) if self.transposed else (a, b)), alpha=weight)

    def add_tangent(self, g: Tensor, weight: float, into: Tensor) -> None:
        """Add the tangent of the leaf's gradient, one term after the other."""
        (g, slope), (other, tangent) = (_unpacked(t) for t in (g, self.other))
        if slope is not None:
            self.add(slope, other, weight, into)
        if tangent is not None:
            self.add(g, tangent, weight, into)


def _unpacked(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return primal, None if tangent is None or tangent._is_zerotensor() else tangent


def uses_apart(layout: Layout, roots: Sequence[Any], share: float, least: int = 1) -> list[tuple[int, MatrixUse]]:
    """Return places and uses of the leaves that have more than a share of all entries and are plain factors.

    With `least` only those that are used so often.
    """
    heavy = layout.heavy(share)
    if not heavy:
        return []
    uses = matrix_uses(roots, [layout.leaves[place] for place in heavy])
    found = [(place, uses.get(id(layout.leaves[place]), [])) for place in heavy]
    return [(place, use) for place, several in found if len(several) >= least for use in several]


def matrix_uses(roots: Sequence[Any], leaves: Sequence[Tensor]) -> dict[int, list[MatrixUse]]:
    """Find the leaves, by identity, that a graph uses in plain products of matrices and nowhere else."""
    users: dict[Any, list[tuple[Any, int]]] = {}
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for place, (parent, _) in enumerate(node.next_functions):
            if parent is not None:
                users.setdefault(parent, []).append((node, place))
                stack.append(parent)
    wanted = {id(leaf) for leaf in leaves if not leaf._backward_hooks}  # somebody's hooks want to see the gradient
    found: dict[int, list[MatrixUse]] = {}
    for node in users:
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in wanted:
            uses = [_use(*user, leaf) for user in _through_transposes(node, users)]
            if all(use is not None for use in uses):
                found[id(leaf)] = [use for use in uses if use is not None]
    return found


def _through_transposes(node: Any, users: dict[Any, list[tuple[Any, int]]]) -> list[tuple[Any, int, bool]]:
    """Return who uses a leaf, at which place, and whether transposed."""
    answers = []
    for user, place in users.get(node, []):
        if user.name() == "TBackward0":
            beyond = _through_transposes(user, users)
            answers += [(far, there, not transposed) for far, there, transposed in beyond]
        else:
            answers.append((user, place, False))
    return answers


def _use(node: Any, place: int, transposed: bool, leaf: Tensor) -> MatrixUse | None:
    """Describe a use of a leaf; None where it is no plain product of matrices of one type."""
    if node.name() == "AddmmBackward0" and node._saved_alpha == 1 and place > 0:
        first, other = place == 1, node._saved_mat2 if place == 1 else node._saved_mat1
    elif node.name() == "MmBackward0":
        first, other = place == 0, node._saved_mat2 if place == 0 else node._saved_self
    else:
        return None
    if other is None or other.dtype != leaf.dtype or other.layout != torch.strided:
        return None
    return MatrixUse(GradientEdge(node, 0), other, first, transposed)
