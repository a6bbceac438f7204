"""The benchmark of saddle points at its tiny sizes: that it runs, reports and draws, not who wins."""

import json
import math

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks import saddles


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "names", [["factor"], pytest.param(list(saddles.PROBLEMS), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_quick_run_reports_and_draws(one_thread, tmp_path, capsys, names):
    out = tmp_path / "new" / "report.json"
    options = ["--problems", ",".join(names), "--out", str(out), "--device", "cpu"]
    assert saddles.main(["--quick", *options]) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert list(report["problems"]) == names
    for name, entry in report["problems"].items():
        assert f"**{name}**" in printed
        for result in entry["runs"]:
            seconds, evaluations, losses = zip(*result["points"], strict=True)
            assert list(seconds) == sorted(seconds) and list(evaluations) == sorted(evaluations)
            assert all(map(math.isfinite, losses))
            assert result["ending"] in ("target", "limit", "stalled")
    picture = out.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG")

    picture.unlink()
    assert saddles.main(["--plot", str(out), "--target", "factor=1e-300"]) == 0
    rows = capsys.readouterr().out.split("**factor**")[1].split("**")[0]
    assert picture.exists() and rows.count("| — | — |") == 4


def test_sanc_leaves_the_saddle_along_negative_curvature(one_thread):
    options = saddles.arguments(["--quick"])
    problem = saddles.PROBLEMS["factor"](options, 0)
    result = saddles.run(problem, "minimize", 0, limit=20.0)
    assert result["ending"] == "target" and result["final"] <= problem.target
    fall = result["start"] - result["final"]
    assert sum(share for kind, share in result["earned"].items() if kind != "λ < 0") == pytest.approx(fall)
    assert result["earned"].get("curvature", 0.0) + result["earned"].get("λ < 0", 0.0) > 0.5 * fall
    assert result["marks"]


@pytest.mark.parametrize("name", ["linear", "factor", "poisson"])
def test_gauss_newton_products_are_right(name):
    problem = saddles.PROBLEMS[name](saddles.arguments(["--quick"]), 1)
    x = (problem.x0 + 0.1).requires_grad_()
    r = problem.residual(x).reshape(-1)
    jacobian = torch.autograd.functional.jacobian(lambda x: problem.residual(x).reshape(-1), x)
    dual = torch.zeros_like(r, requires_grad=True)
    (linear_in_dual,) = torch.autograd.grad(r, x, dual, create_graph=True)
    g = jacobian.T @ r.detach()
    p, _, promised = saddles._conjugate_gradients(r, x, dual, linear_in_dual, g, 0.1, 1e-10)
    wanted = torch.linalg.solve(jacobian.T @ jacobian + 0.1 * torch.eye(len(g), dtype=g.dtype), -g)
    assert torch.allclose(p, wanted, rtol=1e-6, atol=1e-8)
    assert promised == pytest.approx(0.5 * float((r @ r - (r + jacobian @ p).square().sum()).detach()), rel=1e-6)


def test_poisson_differentiates_the_network():
    options = saddles.arguments(["--quick"])
    problem = saddles.PROBLEMS["poisson"](options, 0)
    width = 8
    t = torch.linspace(-1, 1, 30, dtype=torch.float64, requires_grad=True)
    parts = problem.x0.split([width, width, width * width, width, width, 1])
    a = torch.tanh(t[:, None] * parts[0] + parts[1])
    u = torch.tanh(a @ parts[2].view(width, width).T + parts[3]) @ parts[4] + parts[5]
    (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), t)
    inside = bend / math.pi**2 + torch.sin(math.pi * t.detach())
    loss = inside.square().mean() + 0.5 * (u[0] ** 2 + u[-1] ** 2)
    assert float(problem.loss(problem.x0)) == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--problems", "lineal"], "--problems lineal is not known"),
        (["--methods", "adm"], "--methods adm is not known"),
        (["--target", "factor"], "pass NAME=LOSS"),
        (["--target", "x=1"], "choose from"),
        (["--seeds", "0"], "--seeds must be at least 1"),
    ],
)
def test_arguments_that_cannot_be_used(capsys, argv, words):
    with pytest.raises(SystemExit):
        saddles.arguments(argv)
    assert words in capsys.readouterr().err
