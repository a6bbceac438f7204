"""Points that consist of several arrays: nested dictionaries, lists and tuples of tensors or arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import OptimizeResult
from torch import Tensor

from sanc.errors import ArgumentError, ArgumentTypeError, shown


def is_tree(x: Any) -> bool:
    """Return whether a point is a tree: a mapping, a named tuple, or a list or tuple with a tensor or a tree in it."""
    if isinstance(x, Mapping) or (isinstance(x, tuple) and hasattr(x, "_fields")):
        return True
    return isinstance(x, list | tuple) and any(isinstance(part, Tensor) or is_tree(part) for part in x)


class Tree:
    """The structure of a tree, and its leaves concatenated into one flat vector.

    Parameters
    ----------
    x : mapping, list or tuple
        The tree; the leaves are tensors of one type and device, or arrays and numbers.
    name : str
        The name of the tree in messages.

    Attributes
    ----------
    flat : Tensor or array
        The leaves in one vector: a tensor if any leaf is one.
    """

    def __init__(self, x: Any, name: str) -> None:
        if isinstance(x, OptimizeResult):
            raise ArgumentTypeError(f"{name} = {type(x).__name__} is the result of a run: pass its x.")
        leaves = dict(tree_leaves(x, name))
        if not leaves:
            raise ArgumentError(f"{name} is empty: pass at least one variable.")
        tensors = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, Tensor)}
        self._example, self._name = x, name
        self._shapes = {place: tuple(np.shape(leaf)) for place, leaf in leaves.items()}
        if tensors:
            self.flat: Any = self._concatenated(leaves, tensors)
        else:
            arrays = [np.asarray(leaf) for leaf in leaves.values()]
            for place, array in zip(leaves, arrays, strict=True):
                if array.dtype.kind not in "fiub":
                    raise ArgumentTypeError(
                        f"{place} = {shown(leaves[place])} is not an array of real numbers: pass one."
                    )
            self.flat = np.concatenate([array.reshape(-1) for array in arrays])

    @staticmethod
    def _concatenated(leaves: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the leaves in one tensor; raise an error unless they are tensors of one type on one device."""
        first = next(iter(tensors))
        like = tensors[first]
        for place, leaf in leaves.items():
            if not isinstance(leaf, Tensor):
                raise ArgumentTypeError(f"{place} is of {type(leaf).__name__} and {first} a tensor: pass tensors only.")
            if (leaf.dtype, leaf.device) != (like.dtype, like.device):
                raise ArgumentTypeError(
                    f"{place} is of {leaf.dtype} on {leaf.device}, {first} of {like.dtype} on {like.device}: pass "
                    "leaves of one type on one device."
                )
        return torch.cat([leaf.detach().reshape(-1) for leaf in tensors.values()])

    def build(self, flat: Any) -> Any:
        """Return the tree of a flat vector; its leaves are views of the vector."""
        ends = accumulate(map(math.prod, self._shapes.values()), initial=0)
        cuts = zip(pairwise(ends), self._shapes.values(), strict=True)
        return rebuild(self._example, (flat[begin:end].reshape(shape) for (begin, end), shape in cuts))

    def flatten(self, tree: Any, name: str) -> Any:
        """Return the flat vector of a tree of the same structure, such as a gradient."""
        given_leaves = dict(tree_leaves(tree, self._name))
        if self._shapes.keys() != given_leaves.keys():
            place = sorted(self._shapes.keys() ^ given_leaves.keys())[0]
            raise ArgumentError(
                f"{name} returned a tree that differs from {self._name} at {place}: return the same structure."
            )
        for place, leaf in given_leaves.items():
            shape, expected = tuple(np.shape(leaf)), self._shapes[place]
            if shape != expected:
                raise ArgumentError(f"{name} returned shape {shape} for {place}: return {expected}.")
        leaves = [given_leaves[place] for place in self._shapes]  # a mapping may be returned in another order
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            return torch.cat([torch.as_tensor(leaf).reshape(-1) for leaf in leaves])
        return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in leaves])


def tree_leaves(x: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves, each with the expression that selects it."""
    if isinstance(x, Mapping):
        for key, part in x.items():
            yield from tree_leaves(part, f"{place}[{key!r}]")
    elif isinstance(x, list | tuple):
        for number, part in enumerate(x):
            yield from tree_leaves(part, f"{place}[{number}]")
    else:
        yield place, x


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with a function of each leaf."""
    return rebuild(tree, (function(leaf) for _, leaf in tree_leaves(tree, "")))


def rebuild(example: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree with the structure of `example` and other leaves."""
    if isinstance(example, Mapping):
        built: dict[Any, Any] = copy(example) if isinstance(example, dict) else {}
        built.update((key, rebuild(part, leaves)) for key, part in example.items())
        return built
    if isinstance(example, list | tuple):
        parts = [rebuild(part, leaves) for part in example]
        if isinstance(example, list):
            return parts
        return type(example)(*parts) if hasattr(example, "_fields") else tuple(parts)
    return next(leaves)
