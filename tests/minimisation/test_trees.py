"""Trees and their flat vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from sanc.errors import ArgumentError, ArgumentTypeError
from sanc.minimisation.trees import Tree, is_tree, map_tree, tree_leaves


class Pair(NamedTuple):
    a: object
    b: object


EXAMPLE = {"w": [np.array([[1.0, 2.0], [3.0, 4.0]]), 5.0], "p": Pair(np.array([6.0]), (np.float64(7.0),))}


@pytest.mark.parametrize(("x", "expected"), [({}, True), (Pair(1, 2), True), ([torch.ones(1)], True),
    ([[1.0, {}]], True), ([1.0, 2.0], False), (np.ones(2), False), (torch.ones(2), False),
    ([np.ones(2)], False)])  # fmt: skip
def test_what_is_a_tree(x, expected):
    assert is_tree(x) is expected


def test_a_tree_is_flattened_in_its_order_and_built_again():
    tree = Tree(EXAMPLE, "x0")
    assert tree.flat.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    built = tree.build(10.0 * tree.flat)
    assert list(built) == ["w", "p"] and isinstance(built["w"], list) and isinstance(built["p"], Pair)
    assert built["w"][0].tolist() == [[10.0, 20.0], [30.0, 40.0]] and float(built["w"][1]) == 50.0
    assert built["p"].a.tolist() == [60.0] and float(built["p"].b[0]) == 70.0
    reordered = {"p": built["p"], "w": built["w"]}
    assert tree.flatten(reordered, "jac").tolist() == (10.0 * tree.flat).tolist()


def test_leaves_are_views_of_the_flat_tensor():
    tree = Tree([torch.ones(2), torch.zeros(1, 2)], "x0")
    flat = tree.flat.clone()
    tree.build(flat)[1][0, 1] = 3.0
    assert flat.tolist() == [1.0, 1.0, 0.0, 3.0]
    doubled = map_tree(lambda leaf: 2 * leaf, tree.build(flat))
    assert tree.flatten(doubled, "jac").tolist() == [2.0, 2.0, 0.0, 6.0]


def test_leaves_have_the_expression_that_selects_them():
    assert [place for place, _ in tree_leaves(EXAMPLE, "x")] == ["x['w'][0]", "x['w'][1]", "x['p'][0]", "x['p'][1][0]"]


@pytest.mark.parametrize(("x", "message"), [({}, "x0 is empty"),
    ({"a": np.array("text")}, r"x0\['a'\] = .* real numbers"),
    ([torch.ones(1), 2.0], r"x0\[1\] is of float and x0\[0\] a tensor"),
    ([torch.ones(1), torch.ones(1).double()], "of torch.float64")])  # fmt: skip
def test_leaves_that_do_not_fit_are_errors(x, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        Tree(x, "x0")


def test_a_returned_tree_has_the_same_structure():
    tree = Tree(EXAMPLE, "x0")
    with pytest.raises(ArgumentError, match=r"jac returned a tree that differs from x0 at x0\['p'\]"):
        tree.flatten({"w": EXAMPLE["w"]}, "jac")
    with pytest.raises(ArgumentError, match=r"jac returned shape \(2,\) for x0\['p'\]\[0\]: return \(1,\)"):
        tree.flatten({"w": EXAMPLE["w"], "p": Pair(np.ones(2), (1.0,))}, "jac")
