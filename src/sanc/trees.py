"""Points made of several arrays: dictionaries, lists and tuples of tensors or arrays, nested as you like."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.errors import ArgumentError, ArgumentTypeError, shown


def is_tree(x: Any) -> bool:
    """Whether a point is a tree: a mapping, or a list or tuple that holds a tensor or a tree and not numbers only."""
    if isinstance(x, Mapping):
        return True
    return isinstance(x, list | tuple) and any(isinstance(part, Tensor) or is_tree(part) for part in x)


class Tree:
    """The structure of a tree, and its leaves laid into one flat vector in their order.

    Parameters
    ----------
    x : mapping, list or tuple
        The tree; the leaves are tensors of one type and device, or arrays and numbers.
    name : str
        What an error calls it.

    Attributes
    ----------
    flat : Tensor or array
        The leaves in one vector: a tensor where there is a tensor among them.
    """

    def __init__(self, x: Any, name: str) -> None:
        leaves = dict(_leaves(x, name))
        if not leaves:
            raise ArgumentError(f"{name} is empty: pass at least one variable.")
        tensors = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, Tensor)}
        self._example, self._name = x, name
        if tensors:
            self.flat: Any = self._one_tensor(leaves, tensors)
        else:
            arrays = [np.asarray(leaf) for leaf in leaves.values()]
            for place, array in zip(leaves, arrays, strict=True):
                if array.dtype.kind not in "fiub":
                    raise ArgumentTypeError(f"{place} = {shown(leaves[place])} is no array of real numbers: pass one.")
            self.flat = np.concatenate([array.reshape(-1) for array in arrays])

    @staticmethod
    def _one_tensor(leaves: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
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
        """Return the tree of a flat vector; its leaves are views of it."""
        tree, end = _built(self._example, flat, 0)
        assert end == len(flat)
        return tree

    def lay(self, tree: Any, name: str) -> Any:
        """Return the flat vector of a tree of the same structure, such as a gradient."""
        expected, given = dict(_leaves(self._example, self._name)), dict(_leaves(tree, self._name))
        if expected.keys() != given.keys():
            odd = sorted(expected.keys() ^ given.keys())[0]
            raise ArgumentError(f"{name} returned a tree that differs from {self._name} at {odd}: return the same one.")
        for place, leaf in given.items():
            shape, wanted = tuple(np.shape(leaf)), tuple(np.shape(expected[place]))
            if shape != wanted:
                raise ArgumentError(f"{name} returned shape {shape} for {place}: return {wanted}.")
        if any(isinstance(leaf, Tensor) for leaf in given.values()):
            return torch.cat([torch.as_tensor(leaf).reshape(-1) for leaf in given.values()])
        return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in given.values()])


def _leaves(x: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Go through the leaves, each with the expression that reaches it."""
    if isinstance(x, Mapping):
        for key, part in x.items():
            yield from _leaves(part, f"{place}[{key!r}]")
    elif isinstance(x, list | tuple):
        for number, part in enumerate(x):
            yield from _leaves(part, f"{place}[{number}]")
    else:
        yield place, x


def _built(example: Any, flat: Any, begin: int) -> tuple[Any, int]:
    if isinstance(example, Mapping):
        parts = {}
        for key, part in example.items():
            parts[key], begin = _built(part, flat, begin)
        return parts, begin
    if isinstance(example, list | tuple):
        row = []
        for part in example:
            made, begin = _built(part, flat, begin)
            row.append(made)
        if isinstance(example, list):
            return row, begin
        return (type(example)(*row) if hasattr(example, "_fields") else tuple(row)), begin
    shape = tuple(np.shape(example))
    end = begin + math.prod(shape)
    return flat[begin:end].reshape(shape), end
