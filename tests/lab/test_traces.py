import math

import numpy as np
import pytest

from made_runs import line, write_lab, write_run
from sanc.lab import curves, style, traces
from sanc.lab.style import METHOD_STYLES
from sanc.lab.traces import TraceError


@pytest.fixture
def lab(tmp_path):
    return write_lab(tmp_path, seeds=2, steps=30)


# ---------------------------------------------------------------------------------------------- reading


def test_runs_are_sorted_and_null_is_nan(tmp_path):
    rows = [
        line(-1, 2.0, 0),
        line(0, None, 4, branch="curvature", rho=None, sigma=0.5),
        line(1, 1.0, 8, branch="stayed"),
    ]
    write_run(tmp_path, "own", "sgd", 0, rows)
    write_run(tmp_path, "fig2a-w1a", "scr", 10, rows)
    write_run(tmp_path, "fig2a-w1a", "scr", 9, rows, done=False)
    write_run(tmp_path, "fig2a-w1a", "sanc", 0, rows)
    (tmp_path / "runs" / "fig2a-w1a" / "sanc" / "seed-1").mkdir()  # an empty folder
    runs = traces.read(tmp_path)
    order = [(run.panel, run.method, run.seed) for run in runs]
    assert order == [("fig2a-w1a", "sanc", 0), ("fig2a-w1a", "scr", 9), ("fig2a-w1a", "scr", 10), ("own", "sgd", 0)]
    run = runs[0]
    np.testing.assert_array_equal(run.columns["loss"], [2.0, math.nan, 1.0])
    np.testing.assert_array_equal(run.columns["sigma"], [math.nan, 0.5, math.nan])
    np.testing.assert_array_equal(run.columns["calls"], [0, 24, 48])
    assert list(run.columns["branch"]) == ["", "curvature", "stayed"]
    assert run.steps == 2 and run.final_loss == 1.0 and run.done == {"status": "call limit", "loss": 1.0}
    assert runs[1].done is None and run.environment["sanc"] == "0.1.0"


def test_a_truncated_last_line_is_ignored_and_other_errors_name_file_and_line(tmp_path):
    folder = write_run(tmp_path, "p", "sanc", 0, [line(-1, 2.0, 0), line(0, 1.0, 4)], done=False)
    trace = folder / "trace.jsonl"
    whole = trace.read_bytes()
    for tail in (b'{"iteration": 1, "lo', b'{"note": "\xcf', b"{"):
        trace.write_bytes(whole + tail)
        assert traces.read(tmp_path)[0].steps == 1
    trace.write_bytes(whole.rstrip(b"\n"))
    assert traces.read(tmp_path)[0].steps == 1
    for bad, words in (
        (b'{"iteration": 1, "lo\n', "line 3: Unterminated string"),
        (b"[1]\n", "line 3: list instead of an object"),
        (b'{"iteration": 1}\n', "line 3: without .*loss"),
        (b"\xff\xfe\n", "line 3: Expecting value"),
    ):
        trace.write_bytes(whole + bad)
        with pytest.raises(TraceError, match=rf"trace\.jsonl, {words}"):
            traces.read(tmp_path)
    trace.write_bytes(whole)
    (folder / "config.json").write_text('{"figure":\n "fig1",,}')
    with pytest.raises(TraceError, match=r"config\.json: .*line 2 column"):
        traces.read(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(TraceError, match=r"config\.json: .*No such file"):
        traces.read(tmp_path)


def test_a_run_that_starts_while_it_is_read_is_no_error(tmp_path, monkeypatch):
    """The run writes its configuration before its trace, but possibly after a reader has checked for it."""
    config = (write_run(tmp_path / "other", "p", "sanc", 0, [line(-1, 1.0, 0)]) / "config.json").read_text()
    folder = tmp_path / "runs" / "p" / "sanc" / "seed-0"
    folder.mkdir(parents=True)
    exists = type(folder).exists

    def write_after(path):
        existed = exists(path)
        for name in ("config.json", "trace.jsonl"):
            (folder / name).write_text(config if name == "config.json" else "")
        return existed

    monkeypatch.setattr(type(folder), "exists", write_after)
    assert [run.steps for run in traces.read(tmp_path)] == [0]


def test_an_empty_folder_has_no_runs(tmp_path):
    assert traces.read(tmp_path) == [] and traces.skipped(tmp_path) == {}


def test_gaps_list_missing_runs(lab):
    runs = traces.read(lab)
    assert traces.gaps(runs, {}) == {"fig2a-higgs": "NCD has finished 1 of 2 runs"}
    assert traces.skipped(lab) == {"fig3-covtype": "covtype.libsvm.binary is not in the data folder"}
    plan = {"fig2b-segment": {"sanc": 3, "crm": 3, "scr": 2}, "fig9": {"sanc": 1}}
    gaps = traces.gaps(runs, plan)
    assert gaps["fig2b-segment"] == "SANC has finished 2 of 3 runs; CRM has finished 0 of 3 runs"
    assert gaps["fig9"] == "SANC has finished 0 of 1 runs"


# ---------------------------------------------------------------------------------------------- losses


def test_the_mean_curve_equals_values_computed_by_hand(tmp_path):
    write_run(tmp_path, "p", "sanc", 0, [line(-1, 4.0, 0), line(0, 2.0, 10), line(1, None, 15), line(2, 0.0, 20)])
    write_run(tmp_path, "p", "sanc", 1, [line(-1, 4.0, 0), line(0, 4.0, 10), line(1, 2.0, 20)])
    x, mean, low, high = curves.mean_curve(traces.read(tmp_path), grid=5)
    np.testing.assert_allclose(x, [0, 5, 10, 15, 20])
    np.testing.assert_allclose(mean, [4, 3.5, 3, 2, 1])
    np.testing.assert_allclose(low, [4, 3, 2, 1, 0])  # the deviation of two runs is range/√2, clipped to the range
    np.testing.assert_allclose(high, [4, 4, 4, 3, 2])
    np.testing.assert_allclose(curves.mean_curve(traces.read(tmp_path), "seconds", 3)[0], [0, 1, 2])
    np.testing.assert_allclose(curves.mean_curve(traces.read(tmp_path), "calls", 3)[0], [0, 60, 120])


def test_the_band_is_one_sample_deviation(tmp_path):
    for seed, loss in enumerate((1.0, 2.0, 2.0, 3.0)):
        write_run(tmp_path, "p", "sanc", seed, [line(-1, 4.0, 0), line(0, loss, 10)])
    _, mean, low, high = curves.mean_curve(traces.read(tmp_path), grid=2)
    deviation = math.sqrt(2 / 3)
    np.testing.assert_allclose((mean[1], low[1], high[1]), (2, 2 - deviation, 2 + deviation))
    assert low[0] == high[0] == 4.0


def test_finished_runs_keep_their_loss_and_others_end_with_their_last_step(tmp_path):
    write_run(tmp_path, "p", "sanc", 0, [line(-1, 4.0, 0), line(0, 2.0, 20)])
    short = write_run(tmp_path, "p", "sanc", 1, [line(-1, 4.0, 0), line(0, 1.0, 10)], done=False)
    mean = curves.mean_curve(traces.read(tmp_path), grid=3)[1]
    np.testing.assert_allclose(mean, [4, 2, 2])
    (short / "done.json").write_text('{"status": "call limit", "loss": 1.0}')
    np.testing.assert_allclose(curves.mean_curve(traces.read(tmp_path), grid=3)[1], [4, 2, 1.5])
    (short / "done.json").write_text('{"status": "not finite", "loss": null}')
    np.testing.assert_allclose(curves.mean_curve(traces.read(tmp_path), grid=3)[1], [4, 2, 2])


def test_curves_without_a_loss_are_empty(tmp_path):
    folder = write_run(tmp_path, "p", "sanc", 0, [line(-1, None, 0)], done=False)
    runs = traces.read(tmp_path)
    assert all(len(part) == 0 for part in curves.mean_curve(runs))
    assert math.isnan(curves.best_loss(runs)) and math.isnan(runs[0].final_loss)
    (folder / "trace.jsonl").unlink()
    assert traces.read(tmp_path)[0].steps == 0
    assert all(len(part) == 0 for part in curves.mean_curve(traces.read(tmp_path)))


def test_f_star_is_below_the_best_loss_of_all_panels_with_the_objective(tmp_path):
    write_run(tmp_path, "a", "sanc", 0, [line(-1, 4.0, 0), line(0, 2.0, 20)])
    write_run(tmp_path, "b", "scr", 0, [line(-1, 4.0, 0), line(0, 1.0, 20), line(1, 1.5, 30)])
    write_run(tmp_path, "c", "scr", 0, [line(-1, 4.0, 0), line(0, 0.5, 20)], data="a9a")
    write_run(tmp_path, "d", "scr", 0, [line(-1, 4.0, 0), line(0, 0.5, 20)], data="a9a", strength=2.0)
    runs = traces.read(tmp_path)
    assert curves.best_loss(runs[:2]) == 1.0
    stars = curves.f_stars(runs)
    assert stars[runs[0].objective] == stars[runs[1].objective] == pytest.approx(1.0 - curves.MAX_MARGIN * 3.0)
    assert stars[runs[2].objective] == pytest.approx(0.5 - curves.MIN_MARGIN * 3.5, abs=1e-9)
    assert len(stars) == 3


# ---------------------------------------------------------------------------------------------- steps


def test_decrease_by_branch_equals_values_computed_by_hand(tmp_path):
    rows = [
        line(-1, 10.0, 0),
        line(0, 8.0, 1, branch="very successful"),
        line(1, None, 2, branch="curvature"),
        line(2, None, 3, branch="stayed"),
        line(3, 2.0, 4, branch="gradient"),
        line(4, 2.5, 5, branch="gradient"),
        line(5, None, 6, branch="gradient"),
    ]
    write_run(tmp_path, "p", "sanc", 0, rows)
    assert curves.decrease_by_branch(traces.read(tmp_path)) == {
        "very successful": (1, 2.0),
        "curvature": (1, 3.0),
        "gradient": (3, 2.5),
        "stayed": (1, 0.0),
    }


def test_branch_shares_sum_to_one_and_follow_the_steps(tmp_path):
    rows = [line(-1, 1.0, 0)] + [line(k, 1.0, k + 1, branch="curvature" if k < 50 else "stayed") for k in range(100)]
    write_run(tmp_path, "p", "sanc", 0, rows)
    x, shares = curves.mix(traces.read(tmp_path), points=41)
    assert list(shares) == ["curvature", "stayed"] and x[-1] == 100
    np.testing.assert_allclose(sum(shares.values()), 1.0)
    assert shares["curvature"][0] > 0.999 and shares["stayed"][-1] > 0.999
    assert curves.mix([])[1] == {}


def test_quantiles_are_computed_per_cell(tmp_path):
    rows = [line(-1, 1.0, 0)] + [line(k, 1.0, k + 1, sigma=float(k), rho=None) for k in range(100)]
    write_run(tmp_path, "p", "sanc", 0, rows)
    runs = traces.read(tmp_path)
    x, median, low, high = curves.quantiles(runs, "sigma", cells=2)
    np.testing.assert_allclose(x, [25, 75])
    np.testing.assert_allclose(median, [24, 74])
    np.testing.assert_allclose(low, [4.8, 54])
    np.testing.assert_allclose(high, [43.2, 94])
    for column in ("rho", "never"):
        assert all(len(part) == 0 for part in curves.quantiles(runs, column))


def test_methods_have_distinct_styles():
    assert len({(style.colour, style.dashes) for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)
    assert style.style_of("other").name == "other"


def test_methods_with_settings_are_sorted_by_value_and_have_distinct_styles():
    names = ["sanc-eta1=0.2", "scr", "sanc-sigma0=1e-05", "sanc-eta1=0.05", "sanc-eta1=0.1", "sanc", "sgd-lr=10"]
    assert sorted(names, key=style.rank) == [
        "sanc", "sanc-eta1=0.05", "sanc-eta1=0.1", "sanc-eta1=0.2", "sanc-sigma0=1e-05", "scr", "sgd-lr=10",
    ]  # fmt: skip
    assert style.style_of("sanc-sigma0=1e-05-eta1=0.2").name == "SANC, sigma0 = 1e-05, eta1 = 0.2"
    styles = style.styles_of([f"sanc-eta1={k}" for k in range(20)] + ["scr"])
    assert len({(each.colour, each.dashes) for each in styles.values()}) == 21
    assert styles["scr"] == METHOD_STYLES["scr"]
    assert (
        style.figure_name("fig2a-by-eta1-L1") == "Figure 2a by eta1 and L1"
        and style.figure_name("fig2a") == "Figure 2a"
    )
