"""The only place that uses what torch does not document: each with a test of whether it is there, and a fallback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def once_differentiable(loss: Tensor) -> str:
    """Name a torch.autograd.Function in the graph whose backward is marked once_differentiable; empty if there is none.

    Torch lets some of them pass where a graph of second order is built, and answers zero. A node of such a function
    tells its class by an attribute that is not documented; where it is missing nothing is found, and torch decides.
    """
    for node in nodes(loss.grad_fn):
        function = getattr(node, "_forward_cls", None)
        if function is not None and _is_marked(function.backward):
            return str(function.__name__)
    return ""


def nodes(root: Any) -> Iterator[Any]:
    """Go through all nodes of a graph, each once."""
    seen: set[Any] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)


def _is_marked(backward: Any) -> bool:
    """Whether torch's once_differentiable is among the wrappers of this function."""
    while backward is not None:
        code = getattr(backward, "__code__", None)
        if code is not None and code.co_qualname.startswith("once_differentiable."):
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False
