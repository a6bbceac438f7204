"""The constants and settings of `benchmarks.constants` exist, and each other value differs from the present one."""

import argparse

import numpy as np
import pytest

from benchmarks import constants
from benchmarks.least_squares_problems import large_problems
from sanc.presets import PRESETS, compose

NAMED = {name: values for _, _, part, _ in constants.PARTS.values() for name, values in part.items()}
SET = {name: values for *_, part in constants.PARTS.values() for name, values in part.items()}


@pytest.mark.parametrize("names", NAMED)
def test_every_constant_exists_and_is_varied(names):
    present = {constants.value_of(name) for name in names.split(", ")}
    assert len(present) == 1, "modules that share a constant have the same value"
    assert not present & set(map(float, NAMED[names]))


@pytest.mark.parametrize("name", SET)
def test_every_setting_exists_and_is_varied(name):
    present = PRESETS["robust"].options()[name]
    for value in SET[name]:
        assert value != present and compose("sanc", "robust", {name: value}).options()[name] != present


def test_a_constant_has_its_value_again_after_it_was_varied():
    """Also one that several modules hold, and one of a class."""
    for names in (
        "leastsquares.accelerated.MAX_CORRECTION, leastsquares.network_model.MAX_CORRECTION",
        "leastsquares.jacobian_model.JacobianModel.first_sigma_in_units",
    ):
        before = constants.value_of(names)
        with constants.patched(names, 0.125):
            assert {constants.value_of(name) for name in names.split(", ")} == {0.125}
        assert {constants.value_of(name) for name in names.split(", ")} == {before}


def test_fits_are_compared_with_the_lowest_cost_of_their_family():
    run = {"floor": 0.0, "values": 9, "Jacobians": 9, "products": 0}
    default = {"a": {"family": "A", "cost": 1.0, **run}, "b": {"family": "A", "cost": 2.0, **run}}
    found = {"a": {"family": "A", "cost": 1.0, **run, "values": 19}, "b": {"family": "A", "cost": 0.5, **run}}
    assert constants.fits_row(default, default) == {"solved": 1, "values": 1.0, "Jacobians": 1.0, "products": 1.0}
    row = constants.fits_row(found, default)
    assert row["solved"] == 2 and row["values"] == pytest.approx(2.0)


def test_rows_are_compared_one_by_one():
    def runs(cost, factor=1):
        counts = {"nfev": 10 * factor, "njev": 5, "seconds": 2.0, "covariance": 1e-9 * factor}
        return {"peak": {"cost": cost, **counts}, "chain": {"cost": [0.0], **counts}}

    row = constants.rows_row(runs([1.0, 3.0, 4.0], 2), runs([1.0, 2.0, 5.0]))
    assert (row["above"], row["below"], row["values"], row["derivatives"]) == (1, 1, 2.0, 1.0)
    assert row["covariance"] == 2e-9 and row["values, n = 600"] == 2.0


def test_only_the_named_constants_are_varied():
    chosen = constants.chosen(constants.ROWS, argparse.Namespace(quick=False, only=["REFITS", "POOR"]))
    assert chosen == [("leastsquares.row_fits._POOR_FIT_FACTOR", 1.5), ("leastsquares.row_fits._POOR_FIT_FACTOR", 10.0),
                      ("leastsquares.row_fits._MAX_REFITS", 1), ("leastsquares.row_fits._MAX_REFITS", 4)]  # fmt: skip


def test_large_problems_have_finite_residuals_that_vanish_at_known_solutions():
    problems = {problem.name.split(",")[0]: problem for problem in large_problems(40)}
    assert all(np.isfinite(problem.fun(problem.start)).all() for problem in problems.values())
    assert not problems["Extended-Rosenbrock"].fun(np.ones(40)).any()
    assert not problems["Trigonometric"].fun(np.zeros(40)).any()
