"""The claims of the paper, against values computed from the traces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import ttest_rel

import made_runs
from made_runs import LOGISTIC
from sanc.lab import claims, experiments, runs
from sanc.lab.traces import read


def test_claims_equal_values_computed_from_the_traces(tmp_path):
    panels = [
        replace(LOGISTIC, name="fig1-tiny", figure="fig1", methods=("sanc", "scr"), options={"sigma0": 1e-3}),
        replace(LOGISTIC, name="fig3-tiny", figure="fig3", methods=("sanc", "scr")),
    ]
    for spec in experiments.specs(panels, 2, "paper", "cpu"):
        runs.execute(spec, tmp_path)
    found = claims.evaluate(read(tmp_path))
    by = {(claim.panel, claim.statement.split(".")[0][:38]): claim for claim in found}
    faster = next(c for c in found if "needs fewer calls" in c.statement)
    traces = {(t.panel, t.method, t.seed): t for t in read(tmp_path)}
    star = min(float(np.nanmin(t.columns["loss"])) for t in traces.values())
    ours, theirs = (
        [claims.calls_to(traces["fig1-tiny", method, seed], 1.05 * star) for seed in (0, 1)]
        for method in ("sanc", "scr")
    )
    middle = np.median(ours)
    assert f"{middle:,.0f}" in faster.measured or f"{middle:.4g}" in faster.measured
    p = ttest_rel(np.log(ours), np.log(theirs), alternative="less").pvalue
    assert (faster.holds is True) == bool(2 * p < 0.05)  # of two comparisons, in the worst case of Holm's correction
    identical = next(c for c in found if "identical" in c.statement)
    assert identical.panel == "fig3-tiny" and "2 runs" in identical.spread
    rejected = next(c for c in found if "unsuccessful iterations at the start" in c.statement)
    assert rejected.panel == "fig1-tiny"
    assert len({c.panel for c in found}) == 2 and len(by) >= 5
    assert all(claim.holds in (True, False, None) for claim in found)


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.1], True),
        ([2.0, 2.2, 2.1], [1.0, 1.1, 1.2], False),
        ([1.0, 1.3, 1.11], [1.1, 1.1, 1.2], None),  # that no difference was found is no evidence of equality
        ([1.01, 1.11, 1.2], [1.0, 1.12, 1.21], True),  # the interval lies within 1 % of the decrease, which is 8.9
        ([1.0], [1.1], None),
    ],
)
def test_the_competitive_claim_compares_runs_with_equal_seeds(ours, theirs, holds):
    start = {"loss": np.array([10.0])}
    methods = {
        name: [SimpleNamespace(seed=seed, final_loss=loss, columns=start) for seed, loss in enumerate(losses)]
        for name, losses in (("sanc", ours), ("scr", theirs[::-1]))
    }
    for index, trace in enumerate(methods["scr"]):  # runs are paired by seed, not by order
        trace.seed = len(theirs) - 1 - index
    (claim,) = claims.decided([claims._competitive("fig2b", methods, "scr")])
    assert claim.holds is holds and "competitive" in claim.statement
    if len(ours) > 1:
        share = 100 / (10.0 - np.mean(theirs))
        found = ttest_rel(np.array(ours) * share, np.array(theirs) * share).confidence_interval(0.95)
        assert f"[{found.low:+.2f}, {found.high:+.2f}] % of the decrease" in claim.measured


def test_verdicts_account_for_the_number_of_tests():
    """0.03 decides alone; of two tests the smaller counts twice, and claims without a test are not counted."""
    claim = claims.Claim("a", "b", "c", "d", None)
    assert [found.holds for found in claims.decided([claims.ClaimTest(claim, 0.03, 0.97)])] == [True]
    several = [claims.ClaimTest(claim, 0.03, 0.97), replace(claim, holds=False), claims.ClaimTest(claim, 0.9, 0.01)]
    assert [found.holds for found in claims.decided(several)] == [None, False, False]


def test_runs_that_miss_the_level_are_compared_by_sign(tmp_path):
    claim = claims.Claim("a", "b", "c", "d", None)
    test = claims._fewer(claim, [(1.0, np.inf)] * 5 + [(np.inf, np.inf)])
    assert test.p_if_false == pytest.approx(2.0**-5) and test.p_if_true == 1.0


def test_panels_with_other_settings_have_no_claims(tmp_path):
    for seed in range(2):
        for method in ("sanc", "scr"):
            rows = made_runs.simulate(method, seed, steps=20)
            made_runs.write_run(tmp_path, "fig2a-w1a-by-lr", method, seed, rows, figure="fig2a-by-lr")
    assert claims.evaluate(read(tmp_path)) == []
