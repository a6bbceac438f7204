"""Where a graph uses a large leaf in plain products: its part of a Hessian product can then be added term by term.

Torch's product rule would hold two terms and their sum for each use, and of several uses all of them, each as large as
the leaf; where that is most of the model, it is more than everything else that a step needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from sanc.oracles.layout import Layout

Pull = Callable[[Tensor, Any], Tensor]

SMALL = 2**12
"""Entries of a leaf up to which it does not matter how many of its terms there are at a time."""


@dataclass(frozen=True, slots=True)
class Use:
    """An operation whose result is linear in a leaf and, if there is another factor, linear in that.

    Attributes
    ----------
    node : node of a graph
        The operation.
    other : Tensor or None
        The other factor.
    pull : callable
        The leaf's gradient, from the gradient of the result and the other factor.
    """

    node: Any
    other: Tensor | None
    pull: Pull

    def add(self, g: Tensor, other: Tensor | None, weight: float, into: Tensor) -> None:
        """Add the leaf's gradient to a tensor of its shape."""
        into.add_(self.pull(g, other), alpha=weight)

    def terms(self, g: Tensor) -> Terms:
        """Return what the tangent of the leaf's gradient is made from; both factors carry theirs."""
        return Terms(self, *_unpacked(g), *((None, None) if self.other is None else _unpacked(self.other)))


def nodes(*roots: Any) -> Iterator[Any]:
    """Go through all nodes of a graph, each once, in an order that is the same for equal graphs."""
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)


def gradients(
    root: GradientEdge | Tensor,
    leaves: Sequence[Tensor],
    uses: Sequence[Use],
    v: Tensor | None = None,
    *,
    retain: bool = False,
) -> tuple[Sequence[Tensor | None], list[Tensor | None]]:
    """Return ``torch.autograd.grad(root, leaves, v)``, and what arrives at uses."""
    met: dict[int, Tensor | None] = {}

    def meet(number: int, grads: Sequence[Tensor | None]) -> None:
        met[number] = grads[0]

    # An operation that is gone through is met with what everybody's hooks have made of its gradient; torch itself would
    # give out what it was before. One that is not gone through is not met.
    handles = [use.node.register_prehook(partial(meet, number)) for number, use in enumerate(uses)]
    ends: list[Any] = [GradientEdge(use.node, 0) for use in uses]
    try:
        found = torch.autograd.grad(root, [*leaves, *ends], v, retain_graph=retain, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found[: len(leaves)], [met.get(number, g) for number, g in enumerate(found[len(leaves) :])]


@dataclass(frozen=True, slots=True)
class Terms:
    """The two terms of a leaf's tangent: a factor and the tangent of the other, each way; None stands for zero."""

    use: Use
    g: Tensor
    slope: Tensor | None
    other: Tensor | None
    tangent: Tensor | None

    def add(self, weight: float, into: Tensor) -> None:
        """Add them one after the other to a tensor of the leaf's shape."""
        if self.slope is not None:
            self.use.add(self.slope, self.other, weight, into)
        if self.tangent is not None:
            self.use.add(self.g, self.tangent, weight, into)


def _unpacked(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return primal, None if tangent is None or tangent._is_zerotensor() else tangent


def uses_apart(layout: Layout, roots: Sequence[Any], most: float, always: float = 1.0) -> list[tuple[int, Use]]:
    """Return places and uses of the leaves whose terms are better added one by one, where all uses are known here.

    Parameters
    ----------
    layout : Layout
        The leaves.
    roots : sequence of node
        Where the graph begins.
    most : float
        Vectors that the largest leaf and all uses but the first of every leaf may weigh together. Where they weigh
        more, the leaves that are used more than once are returned.
    always : float
        Share of all entries above which a leaf is returned in any case.

    Small leaves are left out, and such as weigh less than what arrives at their uses, which is kept until all is there.
    """
    users = _users(roots)
    places = {id(leaf): place for place, leaf in enumerate(layout.leaves)}
    uses: dict[int, list[tuple[Any, int, tuple[Any, ...]]]] = {}
    for node in users:
        if node.name().endswith("AccumulateGrad") and id(node.variable) in places:
            uses[places[id(node.variable)]] = list(_beyond_views(node, users, ()))
    shares = layout.shares
    heaviest = max((shares[place] for place in uses), default=0.0)
    heavy = heaviest + sum(shares[place] * (len(found) - 1) for place, found in uses.items()) > most
    answer: list[tuple[int, Use]] = []
    for place, found in uses.items():
        leaf = layout.leaves[place]
        if not (shares[place] > always or (heavy and len(found) > 1)) or leaf.numel() <= SMALL:
            continue
        known = [_use(*user, leaf) for user in found]
        if leaf._backward_hooks or None in known:  # somebody wants the gradient as a whole, or it is not known here
            continue
        if sum(_numel(node) for node, _, _ in found) <= len(found) * leaf.numel():
            answer += [(place, use) for use in known if use is not None]
    return answer


def _users(roots: Sequence[Any]) -> dict[Any, list[tuple[Any, int]]]:
    """Return, for every node of a graph, the nodes that its gradient comes from and its place among their inputs."""
    users: dict[Any, list[tuple[Any, int]]] = {}
    for node in nodes(*roots):
        for place, (parent, _) in enumerate(node.next_functions):
            if parent is not None:
                users.setdefault(parent, []).append((node, place))
    return users


_VIEWS = {
    "AliasBackward0", "CloneBackward0", "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
_PICKS = {"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0"}


def _beyond_views(
    node: Any, users: dict[Any, list[tuple[Any, int]]], views: tuple[Any, ...]
) -> Iterator[tuple[Any, int, tuple[Any, ...]]]:
    """Go through who uses a leaf, at which place, and through which views of it, the last first."""
    for user, place in users.get(node, []):
        if user.name() in _VIEWS:
            yield from _beyond_views(user, users, (user, *views))
        else:
            yield user, place, views


def _numel(node: Any) -> int:
    """Count the entries of an operation's result."""
    return math.prod(node._input_metadata[0].shape)


def _use(node: Any, place: int, views: Sequence[Any], leaf: Tensor) -> Use | None:
    """Describe a use of a leaf; None where it is of another kind, or of another type than the leaf."""
    name = node.name()
    needed: str
    pull: Pull
    if name in _PICKS and not getattr(node, "_saved_sparse", False):
        needed, pull = "indices", partial(_picked, node)
    elif name in ("MmBackward0", "BmmBackward0"):
        needed, pull = ("mat2", _times_other) if place == 0 else ("self", _other_times)
    elif name == "AddmmBackward0" and node._saved_alpha == 1 and place > 0:
        needed, pull = ("mat2", _times_other) if place == 1 else ("mat1", _other_times)
    elif name == "MvBackward0" and place == 0:
        needed, pull = "vec", torch.outer
    elif name == "ConvolutionBackward0" and place == 1 and not views:
        needed, pull = "input", partial(_convolved, node, leaf)
    else:
        return None
    if node._input_metadata[0].dtype != leaf.dtype or not _at_hand(node, needed):
        return None
    other = None if name in _PICKS else getattr(node, f"_saved_{needed}")
    return Use(node, other, partial(_through, GradientEdge(views[0], 0), leaf, pull) if views else pull)


def _at_hand(node: Any, name: str) -> bool:
    """Whether a node has what it saved, and not a function of somebody who brings it or computes it anew."""
    saved = getattr(node, f"_raw_saved_{name}", ())
    several = saved if isinstance(saved, list | tuple) else [saved]
    return all(getattr(one, "unpack_hook", None) is None for one in several)


def _through(view: GradientEdge, leaf: Tensor, pull: Pull, g: Tensor, other: Tensor | None) -> Tensor:
    """Bring the gradient of a view of a leaf back to the leaf."""
    return torch.autograd.grad((view,), (leaf,), (pull(g, other),), retain_graph=True)[0]


def _picked(node: Any, g: Tensor, _: Tensor | None) -> Tensor:
    answer: Tensor | tuple[Tensor, ...] = node(g)
    return answer[0] if isinstance(answer, tuple) else answer


def _times_other(g: Tensor, other: Tensor) -> Tensor:
    return g @ other.mT


def _other_times(g: Tensor, other: Tensor) -> Tensor:
    return other.mT @ g


def _convolved(node: Any, leaf: Tensor, g: Tensor, other: Tensor) -> Tensor:
    """Return the gradient of a convolution's weight."""
    weight, _ = _unpacked(leaf)
    how = (node._saved_stride, node._saved_padding, node._saved_dilation)
    more = (node._saved_transposed, node._saved_output_padding, node._saved_groups)
    wanted = [False, True, False]
    answer: Tensor = torch.ops.aten.convolution_backward(g, other, weight, None, *how, *more, wanted)[1]
    return answer
