"""The only module that uses undocumented parts of torch, each with a feature test and a fallback."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def once_differentiable(loss: Tensor) -> str:
    """Return the name of a Function in the graph whose backward is marked once_differentiable; empty if there is none.

    In some cases torch computes a zero second derivative for such a function instead of raising an error. The class of
    a node is in an undocumented attribute. Without this attribute the function finds nothing, and torch's own check
    applies.
    """
    for node in nodes(loss.grad_fn):
        function = getattr(node, "_forward_cls", None)
        if function is not None and _is_marked(function.backward):
            return str(function.__name__)
    return ""


def nodes(root: Any) -> Iterator[Any]:
    """Iterate over all nodes of a graph, each once."""
    visited: set[Any] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)


def intermediate_entries(tensor: Tensor) -> int:
    """Return the number of entries of all derivatives that a backward pass from a tensor computes; 0 if not known.

    The shapes are in an undocumented attribute of the nodes.
    """
    shapes = (entry.shape for node in nodes(tensor.grad_fn) for entry in getattr(node, "_input_metadata", ()))
    return sum(math.prod(shape) for shape in shapes)


def _is_marked(backward: Any) -> bool:
    """Return whether torch's once_differentiable wraps this function."""
    while backward is not None:
        code = getattr(backward, "__code__", None)
        if code is not None and code.co_qualname.startswith("once_differentiable."):
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target; in one call if torch has the function for it."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def forward_mode_enabled() -> AbstractContextManager[Any]:
    """Return a context in which forward-mode derivatives are computed.

    Torch disables them inside the method `jvp` of a Function, so that the tangents of an outer forward mode would be
    zero. Without the undocumented setter they are zero.
    """
    setter = getattr(forward_ad, "_set_fwd_grad_enabled", None)
    return nullcontext() if setter is None else setter(True)


def without_saving_hooks() -> AbstractContextManager[Any]:
    """Return a context in which hooks that are active, such as hooks of checkpointing, do not change saved tensors.

    Checkpointing replaces the tensors that graphs save, and computes them again once. Graphs that a function makes and
    differentiates itself need theirs at once. Without the undocumented test for hooks nothing is changed; without
    active ones no hooks are set, because each of them is called for every tensor.
    """
    active = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if active is None or active(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
