"""Types and completion: what type checkers accept and reject, and what `dir` and `repr` show."""

from __future__ import annotations

import inspect
import pickle
import shutil
import subprocess
import sys
import typing
from dataclasses import fields

import pytest
import torch

import sanc
from preset_options import PIECES
from sanc.implicit.entry import _REJECTED_ARGUMENTS
from sanc.many.entry import RunOptions
from sanc.many.rules import RowRules
from sanc.minibatch.settings import METRICS
from sanc.options import (
    ArgminArguments,
    ArgminOptions,
    CurveFitOptions,
    LeastSquaresArguments,
    MinimizeArguments,
    MinimizeOptions,
    OptimizerOptions,
    RowSettings,
)

PIECE_OPTIONS = ("model", "acceptance", "escape", "sigma", "minibatch", "metric", "step_size", "average")
PROGRAM = """
import numpy, torch, sanc

params = torch.nn.Linear(2, 2).parameters()
sanc.SANC(params, eta1=0.2, metric="diagonal", minibatch=None, krylov_dim=3, escape=sanc.PaperEscape(L1=2.0))
sanc.SANC(params, bogus=3)  # wrong
sanc.SANC(params, eta1="high")  # wrong
sanc.SCR(params, metric="diagnoal")  # wrong
sanc.method_for("cr", sigma0=2.0, bogus=1)  # wrong
result: sanc.Result = sanc.minimize(lambda x: (x**2).sum(), torch.ones(2), sigma0=None, gtol=1e-6)
sanc.minimize(lambda x: (x**2).sum(), torch.ones(2), bogus=3)  # wrong
x = torch.ones(2)
sanc.argmin(lambda x, t: ((x - t) ** 2).sum(), x, x, tol=1e-6, hvp="auto", method="arc", eta1=0.2)
sanc.argmin(lambda x, t: ((x - t) ** 2).sum(), x, x, bogus=3)  # wrong
sanc.argmin(lambda x, t: ((x - t) ** 2).sum(), x, x, max_iter="many")  # wrong
sanc.curve_fit(lambda x, a: a * x, x, x, loss="huber", max_nfev=20)
sanc.curve_fit(lambda x, a: a * x, x, x, bogus=3)  # wrong
sanc.least_squares(lambda x: x, x, max_nfev=20, callback=print)
sanc.least_squares(lambda x: x, x, bogus=3)  # wrong
point: torch.Tensor = sanc.minimize(lambda x: (x**2).sum(), x).x
listed: numpy.ndarray = sanc.minimize(lambda x: x @ x, [1.0, 2.0], (), "arc", "2-point", bounds=[(0, 1)] * 2).x
array: numpy.ndarray = sanc.minimize(lambda x: x @ x, numpy.ones(2), hess=None, batch_size=None).x
other: numpy.ndarray = sanc.minimize(lambda x: (x**2).sum(), x).x  # wrong
tree = sanc.minimize(lambda x: (x["a"] ** 2).sum(), {"a": x}).x["a"]
sanc.minimize(lambda x: x @ x, [1.0, 2.0], max_iter="many")  # wrong
fit = sanc.least_squares(lambda x: x, numpy.ones(2), "3-point", ([0, 0], [1, 1]), loss="huber")
cost: float = fit.cost + fit.optimality + fit.x.sum() + len(fit.active_mask)
fit.costs  # wrong
result.x.sum(), result.multipliers, result.nfev
result.xs  # wrong
minimum: torch.Tensor = sanc.argmin(lambda x, t: ((x - t) ** 2).sum(), x, x, rtol=1e-6)
least, solution = sanc.argmin(lambda x, t: ((x - t) ** 2).sum(), x, x, details=True)
solution.problem.strip(), least.backward(), solution.bogus  # wrong
def report(progress: sanc.Progress) -> bool: return progress.ended > 1
sanc.minimize_many(lambda x: (x**2).sum(), x[None], callback=report)
sanc.minimize_many(lambda x: (x**2).sum(), x[None], bogus=3)  # wrong
count: int = result.nit
text: str = result.message
wrong: str = result.nit  # wrong
name: str = result.status.name
certified = result.certificate is not None and result.certificate.lambda_min > 0
sanc.minimise  # wrong
"""


def test_every_setting_of_every_piece_has_the_type_of_its_field():
    hints = typing.get_type_hints(MinimizeOptions)
    found = {}
    for kind in PIECES:
        types = typing.get_type_hints(kind)
        for item in fields(kind):
            found.setdefault(item.name, types[item.name])
    settings = {name: kind for name, kind in found.items() if name not in ("name", "exact")}
    scipy = {"maxiter", "maxfev", "maxfun", "gtol"}
    assert hints.keys() - scipy == settings.keys()
    assert {name: hints[name] for name in settings if name not in PIECE_OPTIONS} == {
        name: kind for name, kind in settings.items() if name not in PIECE_OPTIONS
    }
    assert hints.keys() - typing.get_type_hints(OptimizerOptions).keys() == {"lr", "epsilon_s", "sampling", *scipy}


def types_of(function):
    """Return the types of the arguments that a function has by name."""
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is not p.VAR_KEYWORD}


def test_options_that_are_passed_on_have_the_types_of_the_function_that_they_are_passed_to():
    added = typing.get_type_hints(ArgminOptions).items() - typing.get_type_hints(MinimizeOptions).items()
    named = {"fun", "x0", "bounds", "max_products", *_REJECTED_ARGUMENTS}
    assert dict(added) == {name: kind for name, kind in types_of(sanc.minimize).items() if name not in named}
    positional = {"fun", "x0", "args", "method", "jac"}
    hints = typing.get_type_hints(MinimizeArguments).items() - typing.get_type_hints(MinimizeOptions).items()
    assert dict(hints) == {name: kind for name, kind in types_of(sanc.minimize).items() if name not in positional}
    hints = typing.get_type_hints(ArgminArguments).items() - typing.get_type_hints(ArgminOptions).items()
    positional = {"fun", "x0", "theta", "details"}
    assert dict(hints) == {name: kind for name, kind in types_of(sanc.argmin).items() if name not in positional}
    positional = {"fun", "x0", "jac", "bounds"}
    arguments = {name: kind for name, kind in types_of(sanc.least_squares).items() if name not in positional}
    assert typing.get_type_hints(LeastSquaresArguments) == arguments
    named = {"fun", "x0", "jac", "bounds", "args", "kwargs"}
    rows = {item.name: types_of(sanc.minimize_many)[item.name] for item in fields(RunOptions)}
    one = {name: kind for name, kind in types_of(sanc.least_squares).items() if name not in named}
    assert typing.get_type_hints(CurveFitOptions) == rows | one


def test_settings_of_rows_are_those_of_their_rules_with_the_types_of_minimize():
    hints, all_hints = typing.get_type_hints(RowSettings), typing.get_type_hints(MinimizeOptions)
    assert hints == {item.name: all_hints[item.name] for item in fields(RowRules)}


def test_typed_options_are_accepted_by_some_method():
    """Every listed name is one that `with_options` knows: a name of no piece would be an error."""
    known = set().union(*(sanc.method_for(name, preset).options() for name in sanc.METHODS for preset in sanc.PRESETS))
    assert typing.get_type_hints(OptimizerOptions).keys() <= known


def test_the_result_has_the_entries_that_its_type_names():
    result = sanc.minimize(lambda x: (x**2).sum(), torch.ones(2))
    hints = typing.get_type_hints(sanc.Result)
    bounded = {"active", "multipliers", "weakly_active"}
    assert set(result) == hints.keys() - {"record", "state"} - bounded
    result = sanc.minimize(lambda x: (x**2).sum(), torch.ones(2), bounds=[(0, 2), (1, 2)])
    assert set(result) == hints.keys() - {"record", "state"}
    fit = sanc.least_squares(lambda x: x, torch.ones(2), bounds=([0, 1], [2, 2]))
    assert set(fit) == typing.get_type_hints(sanc.LeastSquaresResult).keys() - {"record", "state", "hvp"}
    for name, kind in hints.items():
        if name in result and kind in (float, bool, str, int):
            assert isinstance(result[name], kind), name
    seen = []
    sanc.minimize(
        lambda x: (x**2).sum(), torch.ones(2), callback=lambda intermediate_result: seen.append(intermediate_result)
    )
    assert set(seen[0]) == {"x", "fun", "nit", "record", "state"}


def test_dir_shows_the_public_names_only():
    assert dir(sanc) == sorted(sanc.__all__)


def test_repr_shows_the_preset_and_what_was_changed():
    params = list(torch.nn.Linear(2, 2).parameters())
    assert "    preset: robust\n" in repr(sanc.SANC(params))
    changed = sanc.SANC(params, metric="diagonal", sigma0=2.0)
    assert "    preset: robust with sigma0=2.0, metric=Diagonal\n" in repr(changed)
    changed = sanc.SANC(params, metric=sanc.Diagonal(memory=0.9, refresh=10), compare_every=7)  # 10 as Kronecker's
    assert "    preset: robust with metric=Diagonal, memory=0.9, refresh=10, compare_every=7\n" in repr(changed)
    arguments = {"hvp": "finite-difference", "microbatch": 8, "capture": True, "check": False, "seed": 0}
    changed = sanc.SANC(params, eta1=0.2, **arguments)
    text = "eta1=0.2, hvp='finite-difference', microbatch=8, capture=True, check=False, seed=0"
    assert f"    preset: robust with {text}\n" in repr(changed)
    assert repr(pickle.loads(pickle.dumps(changed))) == repr(changed)
    paper = repr(sanc.ARC(params, preset="paper", eta1=0.3, escape=sanc.PaperEscape(L1=3.0)))
    assert "preset: paper with eta1=0.3, escape=PaperEscape, L1=3.0" in paper
    assert "    preset: robust\n" in repr(sanc.CR(params)) and "not driven yet" in repr(changed)


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_reject_what_is_wrong_and_accept_the_rest(checker, tmp_path):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)] if checker == "mypy" else ["pyright"]
    if checker == "pyright" and shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    if checker == "mypy":
        pytest.importorskip("mypy", reason="mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([*command, str(program)], capture_output=True, text=True)
    said = {
        int(line.split("program.py:")[1].split(":")[0])
        for line in done.stdout.splitlines()
        if "error" in line and "program.py:" in line
    }
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert said == wrong, done.stdout


def test_the_names_of_metrics_in_the_options_are_those_that_are_accepted():
    *_, names = typing.get_args(typing.get_type_hints(OptimizerOptions)["metric"])
    assert typing.get_args(names) == tuple(METRICS)
