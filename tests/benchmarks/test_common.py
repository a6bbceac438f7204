"""The comparison of deterministic minimisers: counts, summaries and commands."""

from __future__ import annotations

import math

import numpy as np
import pytest

import zoo
from benchmarks import ablation, deterministic
from benchmarks.common import profile
from benchmarks.reporting import read_runs


def test_profiles_are_those_of_dolan_and_more():
    curves = profile({"a": [1, 4, math.inf, 10], "b": [2, 2, 3, math.inf]})
    assert curves["a"][0].tolist() == [1.0, 1.0, 2.0]
    assert curves["a"][1].tolist() == [0.25, 0.5, 0.75]
    assert curves["b"][0].tolist() == [1.0, 1.0, 2.0]


def test_evaluations_are_counted_and_a_small_gradient_ends_a_run():
    problem = zoo.BY_NAME["ROSENBROCK"]
    counted = deterministic.Counted(problem, stop_at=1e-8)
    counted.fun(problem.x0)
    counted.jac(problem.x0)
    counted.hess(problem.x0)
    counted.hessp(problem.x0, np.ones(2))
    assert (counted.nfev, counted.njev, counted.products) == (
        1,
        1,
        3,
    )  # a dense Hessian of two variables counts as two products
    with pytest.raises(deterministic.StopRun):
        counted.jac(np.ones(2))
    np.testing.assert_array_equal(counted.end, np.ones(2))


def test_a_small_gradient_at_a_saddle_is_not_solved():
    start = next(start for start in zoo.SADDLES if start.name == "double well")
    run = deterministic.run_one("trust-exact", start, 100, 10.0)
    assert run["saddle"] and not run["solved"]
    assert not deterministic.run_one("sanc", start, 100, 10.0)["saddle"]


def test_failures_count_as_infinite():
    runs = [
        {"problem": p, "method": m, "solved": s, "global": s, "small_gradient": s, "saddle": False, "certificate": 2,
         "seconds": 0.1, "nfev": c, "njev": c, "products": 2 * c}
        for p, m, s, c in (("p", "sanc", True, 10), ("q", "sanc", True, 20), ("r", "sanc", True, 30),
                           ("p", "trust-exact", True, 20), ("q", "trust-exact", False, 1),
                           ("r", "trust-exact", False, 1))
    ]  # fmt: skip
    mine, other = deterministic.summary(runs, [])
    assert (mine["solved"], mine["nfev_all"], mine["nfev_common"], mine["common"]) == (3, 20.0, 10.0, 1)
    assert (other["solved"], other["nfev_all"], other["nfev_ratio"]) == (1, math.inf, 2.0)
    assert (mine["products_all"], mine["products_common"]) == (42.0, 22.0)  # with those of the certificate
    table = deterministic.table_of([mine | {"nfev_common": 10.5}, other])
    assert "∞" in table and "10.5" in table


def test_starts_that_lead_to_a_saddle_are_counted_beside_the_saddles():
    names = [zoo.SADDLES[0].name, zoo.SADDLES[1].name, zoo.HIDDEN[0].name]
    ends = {"sanc": (0, 0, 0), "trust-exact": (1, 1, 0), "BFGS": (1, 1, 1)}
    runs = [{"set": deterministic.STARTS, "problem": name, "method": method, "saddle": bool(saddle)}
            for method, saddles in ends.items() for name, saddle in zip(names, saddles, strict=True)]  # fmt: skip
    assert deterministic.stuck(runs) == (2, 1, 0, [2, 3])
    assert deterministic.stuck_in_words(runs) == (
        "`sanc.minimize` is stuck at 0 of 3 starts (2 exact saddles, 1 that lead to one), and SciPy's methods at 2 to 3"
    )


def test_the_sentence_on_test_functions_has_the_lowest_medians_of_the_peers():
    counts = {"sanc": (10, 20, 3), "trust-ncg": (14, 22, 0), "Newton-CG": (15, 21, 0), "L-BFGS-B": (5, 0, 0)}
    runs = [
        {"set": which, "problem": p, "method": method, "solved": (method, p) != ("trust-ncg", "q"), "global": True,
         "small_gradient": True, "saddle": False, "certificate": c, "seconds": 0.1, "nfev": f, "njev": f, "products": h}
        for which in ("zoo", "unseen") for p in "pqr" for method, (f, h, c) in counts.items()
    ]  # fmt: skip
    text = deterministic.in_words(runs)
    assert "solves 3 of 3 test functions and 3 of 3 problems" in text and "methods solve 3 and 3." in text
    assert "a median of 10 evaluations and 23 Hessian products" in text and "of the peers are 14 and 21." in text


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = ["--problems", "BEALE", "ROSENBROCK", "--methods", "sanc", "trust-krylov", "L-BFGS-B"]
    assert deterministic.main([*names, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text(encoding="utf-8").strip() in printed
    runs = read_runs(tmp_path / "deterministic.jsonl.xz")
    assert len(runs) == 6 and all(run["set"] == "zoo" and run["solved"] and run["lambda_min"] > 0 for run in runs)
    assert (tmp_path / "deterministic.png").stat().st_size > 1000
    assert deterministic.main(["--from", str(tmp_path / "deterministic.jsonl.xz")]) == 0
    assert capsys.readouterr().out in printed
    with pytest.raises(SystemExit):
        deterministic.main(["--problems", "UNKNOWN"])


def test_quick(capsys):
    assert deterministic.main(["--quick", "--methods", "sanc"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| sanc"))
    assert row.split("|")[2].strip() == str(len(deterministic.QUICK))


def test_other_starts_and_units(capsys):
    """Scaled problems take as many evaluations as the original ones."""
    only = ["--problems", "BEALE", "HELICAL-VALLEY", "--methods", "sanc", "--sets", "zoo", "scaled", "moved", "far"]
    assert deterministic.main(only) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| sanc")]
    rows = dict(zip(("zoo", "moved", "far", "scaled"), lines[::2], strict=True))  # a table of failures follows each
    assert all(row[2].strip() == "2" for row in rows.values()) and all(line[2].strip() == "–" for line in lines[1::2])
    assert rows["zoo"][7] == rows["scaled"][7] and rows["zoo"][10] == rows["scaled"][10]


@pytest.mark.slow
def test_the_ablation_switches_off_one_component_at_a_time(tmp_path, capsys):
    assert ablation.main(["--quick", "--parts", "logistic", "mlp", "--out", str(tmp_path)]) == 0
    runs = read_runs(tmp_path / "ablation.jsonl.xz")
    assert [run["name"] for run in runs] == 2 * list(ablation.SAMPLED)
    losses = {run["name"]: run["loss"] for run in runs if "loss" in run}
    assert losses["no Hessian products"] != losses["default"]
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text().strip() in printed
    assert ablation.main(["--from", str(tmp_path / "ablation.jsonl.xz")]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_rows_of_the_ablation():
    runs = [{"part": "exact", "name": "default", "problem": p, "solved": s, "values": v, "products": 2 * v}
            for p, s, v in (("p", True, 10), ("q", True, 20), ("r", False, 1))]  # fmt: skip
    runs += [{"part": "logistic, a9a", "name": "default", "seed": k, "calls": c, "gap": 0.1 * (k + 1), "sigma": 3.0 - k}
             for k, c in enumerate((0.5, 0.7, None))]  # fmt: skip
    runs += [{"part": "mlp, segment", "name": "default", "seed": k, "evaluations": None, "loss": 0.5 + k}
             for k in range(2)]  # fmt: skip
    exact, logistic, mlp = ablation.summary(runs)
    assert (exact["solved"], exact["problems"], exact["values"], exact["products"]) == (2, 3, 20.0, 40.0)
    assert (logistic["calls"], logistic["sigma"]) == (0.7, 3.0) and math.isclose(logistic["gap"], 0.2)
    assert (mlp["evaluations"], mlp["loss"], mlp["worst"]) == (math.inf, 1.0, 1.5)
    assert ablation.report(runs).count("∞") == 1


def test_problems_solved_within_a_limit_of_evaluations_count_all_of_them():
    def run(method, work, solved=True):
        return {"set": "zoo", "problem": "P", "n": 9, "method": method, "solved": solved, "nfev": work, "njev": 10,
                "products": 20, "certificate": 5}  # fmt: skip

    runs = [run("sanc", 265), run("sanc", 266), run("BFGS", 1965), run("BFGS", 10, solved=False)]
    assert deterministic.evaluations(runs[0]) == 300
    lines = [line.split("|")[2:-1] for line in deterministic.table_within_limits(runs).splitlines()[2:]]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells == [["300", "1", "0"], ["1000", "2", "0"], ["2000", "2", "1"]]
