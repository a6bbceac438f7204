"""The comparison at saddle points at small sizes: runs, report and figure."""

import json
import math

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks import saddles
from benchmarks.reporting import read_text


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "names", [["factor"], pytest.param(list(saddles.PROBLEMS), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_quick_run_reports_and_draws(one_thread, tmp_path, capsys, names):
    assert saddles.main(["--quick", "--problems", *names, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(read_text(tmp_path / "saddles.json.xz"))
    assert list(document["problems"]) == names
    for name, entry in document["problems"].items():
        assert f"**{name}**" in printed
        for result in entry["runs"]:
            seconds, evaluations, losses = zip(*result["points"], strict=True)
            assert list(seconds) == sorted(seconds) and list(evaluations) == sorted(evaluations)
            assert all(map(math.isfinite, losses))
            assert result["ending"] in ("target", "limit", "stagnated")
    figure = tmp_path / "saddles.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    figure.unlink()
    assert saddles.main(["--from", str(tmp_path / "saddles.json.xz"), "--out", str(tmp_path)]) == 0
    again = capsys.readouterr().out
    assert figure.exists() and again.strip() in printed


def test_sanc_leaves_the_saddle_along_negative_curvature(one_thread):
    problem = saddles.PROBLEMS["factor"](True, 0)
    result = saddles.run(problem, "minimize", 0, limit=20.0)
    assert result["ending"] == "target" and result["final"] <= problem.target
    total = result["start"] - result["final"]
    decrease = result["decrease"]
    assert sum(part for kind, part in decrease.items() if kind != saddles.NEGATIVE) == pytest.approx(total)
    assert decrease.get("curvature", 0.0) + decrease.get(saddles.NEGATIVE, 0.0) > 0.5 * total
    assert result["marks"]


@pytest.mark.parametrize("name", ["linear", "factor", "poisson"])
def test_gauss_newton_products_are_right(name):
    problem = saddles.PROBLEMS[name](True, 1)
    x = (problem.x0 + 0.1).requires_grad_()
    r = problem.residual(x).reshape(-1)
    jacobian = torch.autograd.functional.jacobian(lambda x: problem.residual(x).reshape(-1), x)
    dual = torch.zeros_like(r, requires_grad=True)
    (linear_in_dual,) = torch.autograd.grad(r, x, dual, create_graph=True)
    g = jacobian.T @ r.detach()
    p, _, predicted = saddles._conjugate_gradients(r, x, dual, linear_in_dual, g, 0.1, 1e-10)
    wanted = torch.linalg.solve(jacobian.T @ jacobian + 0.1 * torch.eye(len(g), dtype=g.dtype), -g)
    assert torch.allclose(p, wanted, rtol=1e-6, atol=1e-8)
    assert predicted == pytest.approx(0.5 * float((r @ r - (r + jacobian @ p).square().sum()).detach()), rel=1e-6)


def test_poisson_differentiates_the_network():
    problem = saddles.PROBLEMS["poisson"](True, 0)
    width = 8
    t = torch.linspace(-1, 1, 30, dtype=torch.float64, requires_grad=True)
    parts = problem.x0.split([width, width, width * width, width, width, 1])
    a = torch.tanh(t[:, None] * parts[0] + parts[1])
    u = torch.tanh(a @ parts[2].view(width, width).T + parts[3]) @ parts[4] + parts[5]
    (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    inside = second / math.pi**2 + torch.sin(math.pi * t.detach())
    loss = inside.square().mean() + 0.5 * (u[0] ** 2 + u[-1] ** 2)
    assert float(problem.loss(problem.x0)) == pytest.approx(float(loss.detach()))


def test_arguments_that_cannot_be_used(capsys):
    for arguments in (["--problems", "lineal"], ["--seeds", "0"]):
        with pytest.raises(SystemExit):
            saddles.main(arguments)
        assert arguments[0] in capsys.readouterr().err
