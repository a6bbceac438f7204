import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from matplotlib.colors import to_hex

from made_runs import PANELS, line, write_lab, write_run
from sanc.lab import curves, figures, style, traces


def shown(axes):
    """Return the lines of means, by colour."""
    return {to_hex(drawn.get_color()).upper(): drawn for drawn in axes.lines if len(drawn.get_xdata()) > 2}


@pytest.mark.usefixtures("unrendered")
def test_save_all_writes_panels_and_figures(tmp_path):
    write_lab(tmp_path, seeds=2, steps=20, panels=dict(list(PANELS.items())[:1]), methods=("sanc", "sgd"))
    write_run(tmp_path, "fig9", "sanc", 0, [line(-1, 2.0, 0), line(0, 1.0, 4)], figure="fig9")
    write_run(tmp_path, "empty", "sanc", 0, [line(-1, None, 0)], done=False, figure="fig8")
    paths = figures.save_all(tmp_path, traces.read(tmp_path))
    assert {path.name for path in paths} == {
        f"{stem}.{kind}"
        for stem in ("fig2a-w1a", "fig2a-w1a-records", "fig2a", "fig9", "fig9-sheet")
        for kind in ("png", "svg")
    }
    assert {path.parent for path in paths} == {tmp_path / "figures"}


def test_figures_are_pictures_in_both_formats(tmp_path):
    panel = PANELS["fig2a-w1a"] | dict(figure="fig9", title="$x_{ <&> 50%")
    write_lab(tmp_path, seeds=2, steps=20, panels={"fig9": panel}, methods=("sanc", "sgd"))
    paths = figures.save_all(tmp_path, traces.read(tmp_path))
    assert {path.stem for path in paths} == {"fig9-sheet", "fig9-records", "fig9"} and len(paths) == 6
    for path in paths:
        content = path.read_bytes()
        assert len(content) > 10_000
        assert content.startswith(b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<?xml")


def test_gradient_norms_ritz_values_and_step_norms_are_drawn_over_three_axes(tmp_path):
    norms = {"grad_norm": [4.0, 2.0, 1.0], "ritz_value": [-0.5, 0.25, 2.0], "step_norm": [1.0, 0.0, 0.5]}
    rows = [line(-1, 4.0, 0)]
    rows += [line(k, 2.0, 10 * (k + 1), **{name: column[k] for name, column in norms.items()}) for k in range(3)]
    write_run(tmp_path, "p", "sanc-eta1=0.1", 0, rows)
    write_run(tmp_path, "p", "sanc-eta1=0.4", 0, rows)
    figure = figures.draw_records(traces.read(tmp_path))
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] * 3 + ["linear"] * 3 + ["log"] * 3
    assert [axes.get_title(loc="left") for axes in figure.axes[::3]] == [style.RECORDS[name] for name in norms]
    moved = {"grad_norm": [0, 1, 2], "ritz_value": [0, 1, 2], "step_norm": [0, 2]}  # the second step stayed
    scales = {"paper_calls": 10.0, "calls": 60.0, "seconds": 1.0}
    for place, axes in enumerate(figure.axes):
        name, scale = list(norms)[place // 3], list(scales.values())[place % 3]
        for drawn in axes.lines:
            assert list(drawn.get_ydata()) == [norms[name][k] for k in moved[name]]
            assert list(drawn.get_xdata()) == [scale * (k + 1) for k in moved[name]]
    assert len({drawn.get_color() for drawn in figure.axes[0].lines}) == 2


def test_runs_without_records_have_no_page_of_them(tmp_path):
    write_run(tmp_path, "p", "sgd", 0, [line(-1, 4.0, 0), line(0, 2.0, 10)])
    assert figures.draw_records(traces.read(tmp_path)) is None


def test_a_page_shows_f_and_f_minus_f_star_over_three_axes(tmp_path):
    rows = [line(-1, 4.0, 0), line(0, 2.0, 10), line(1, 1.0, 20)]
    write_run(tmp_path, "p", "sanc", 0, rows, title="w1a", subtitle="a subtitle")
    write_run(tmp_path, "p", "sgd", 0, [line(-1, 4.0, 0), line(0, 3.0, 20)])
    runs = traces.read(tmp_path)
    figure = figures.draw_panel(runs, 0.5)
    assert len(figure.axes) == 6
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log"] * 3
    assert [axes.get_xlabel() for axes in figure.axes[1::2]] == list(style.AXES.values())
    for axes, end in zip(figure.axes, (20, 20, 120, 120, 2, 2), strict=True):
        lines = shown(axes)
        assert set(lines) == {style.METHOD_STYLES["sanc"].colour, style.METHOD_STYLES["sgd"].colour}
        sanc = lines[style.METHOD_STYLES["sanc"].colour]
        assert sanc.get_xdata()[-1] == pytest.approx(end)
        assert sanc.get_ydata()[-1] == pytest.approx(0.5 if axes.get_yscale() == "log" else 1.0)
        low, high = axes.get_ylim()
        assert low < sanc.get_ydata().min() and sanc.get_ydata().max() < high
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    words = " ".join(text.get_text() for text in figure.texts)
    assert named == ["SANC", "SGD"] and "w1a" in words and "a subtitle" in words and "one run of each method" in words


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(tmp_path):
    write_run(tmp_path, "fig9-a", "sanc", 0, [line(-1, 2.0, 0), line(0, 1.0, 4)], figure="fig9")
    kept = []
    for _ in range(2):
        paths = figures.save_all(tmp_path, traces.read(tmp_path))
        kept.append([path.read_bytes() for path in paths])
    assert kept[0] == kept[1]


def test_a_figure_has_its_panels_side_by_side(tmp_path):
    write_lab(tmp_path, seeds=2, steps=20)
    grouped = traces.by_figure(traces.read(tmp_path))
    assert list(grouped) == ["fig2a", "fig2b"]
    figure = figures.draw_figure("fig2a", grouped["fig2a"])
    boxes = [axes.get_position() for axes in figure.axes]
    assert len(boxes) == 2 and boxes[0].y0 == boxes[1].y0 and boxes[0].x1 < boxes[1].x0
    words = " ".join(text.get_text() for text in figure.texts)
    assert "Figure 2a" in words and "mean of 2 runs" in words and "1 of 24 runs not finished" in words
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert named == ["SANC", "SCR", "CR", "CRM", "NCD", "SGD"]
    assert [style.figure_name(name) for name in ("fig12", "own")] == ["Figure 12", "own"]


def test_a_diverging_method_does_not_stretch_the_axis(tmp_path):
    write_run(tmp_path, "p", "sanc", 0, [line(-1, 4.0, 0), line(0, 1.0, 20)])
    write_run(tmp_path, "p", "sgd", 0, [line(-1, 4.0, 0), line(0, 1e12, 10), line(1, None, 20)], done=False)
    runs = traces.read(tmp_path)
    figure = figures.draw_panel(runs, curves.f_star(runs))
    for axes in figure.axes:
        assert axes.get_ylim()[1] < 20


def test_f_star_separates_final_losses_on_the_logarithmic_axis(tmp_path):
    for method, final in (("sanc", 0.5), ("scr", 0.502), ("sgd", 0.51)):
        write_run(tmp_path, "p", method, 0, [line(-1, 1000.0, 0), line(0, final, 10), line(1, final, 20)])
    runs = traces.read(tmp_path)
    assert 0.4 < curves.f_star(runs) < 0.5
    gaps = [run.final_loss - curves.f_star(runs) for run in runs]
    assert gaps[2] > 1.5 * gaps[0]


def test_panels_without_a_loss_are_not_drawn(tmp_path):
    write_run(tmp_path, "p", "sanc", 0, [line(-1, None, 0)], done=False)
    assert figures.save_all(tmp_path, traces.read(tmp_path)) == []
