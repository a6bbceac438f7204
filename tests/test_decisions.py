"""The decisions of a recorded step in step.cu, compiled for this machine, beside those in Python."""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
import subprocess

import numpy as np
import pytest
import torch

from sanc import kernels
from sanc.decisions import Desk, Note, Orders, Outcome, Report
from sanc.engine import Engine
from sanc.kernels import rules_of, source
from sanc.oracles.layout import Layout
from sanc.oracles.recording import NotRecordableError
from sanc.settings import find_method, make_settings

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here; tests/test_gpu.py has it on a GPU")

DIM = 40
CASES = {
    "paper": {},
    "scr": {"method": "scr"},
    "long": {"krylov_dim": 14},
    "robust rules": {"sigma_rule": "interpolate", "sign": "descent", "krylov_dim": 9},
    "authors": {"curvature_guard": "epsilon", "otherwise": "stay", "gradient_tolerance_power": 1, "L2": 0.1},
    "stops early": {"epsilon": 3.0, "krylov_dim": 12},
}


def desk_of(options, dtype=torch.float64):
    options = dict(options)
    method = find_method(options.pop("method", "sanc"))
    engine = Engine(method, make_settings(method, "paper", options), 0)
    layout = Layout([torch.zeros(DIM, dtype=dtype)], [0.0])
    return Desk(engine, layout, engine.settings.krylov_dim, method.on_rejection == "escape")


FUSED = ["-mfma"] if platform.machine() in ("x86_64", "AMD64") else []


@pytest.fixture(scope="module", params=[["-ffp-contract=off"], ["-ffp-contract=fast", *FUSED]], ids=["plain", "fused"])
def compiled(request, tmp_path_factory):
    """Compile step.cu for this machine, with sums of products rounded twice or, as on a GPU, once."""
    made = {}

    def of(desk):
        rules = rules_of(desk)
        if desk.limit not in made:
            folder = tmp_path_factory.mktemp("kernels")
            (folder / "step.cpp").write_text(source(desk.limit, 1, "double", list(rules)), encoding="utf-8")
            library = str(folder / "step.so")
            flags = ["-O1", *request.param, "-shared", "-fPIC", "-DHOST", "-o", library]
            subprocess.run([COMPILER, *flags, str(folder / "step.cpp")], check=True)
            made[desk.limit] = ctypes.CDLL(library)
        return made[desk.limit], np.array(list(rules.values()), np.float64)

    return of


def run(desk, compiled, numbers, orders=None, sigma=1.0, frozen=0.0, reached=0.5, there=0.7):
    """Decide and conclude by both; return reports, weights, states and the points that were taken."""
    orders = orders or Orders()
    value, before, x_norm, *coefficients = numbers
    x = torch.zeros(DIM, dtype=torch.float64)
    desk.orders.copy_(torch.tensor(orders, dtype=torch.float64))
    desk.state.copy_(torch.tensor([sigma, frozen], dtype=torch.float64))
    scalars = [torch.tensor(v, dtype=torch.float64) for v in (value, before, x_norm)]
    desk.decide(*scalars, torch.tensor(coefficients, dtype=torch.float64))
    weights = desk.weights.numpy().copy()
    desk.layout.leaves[0].zero_()
    desk.conclude(x, x + 1, x + 2, *[torch.tensor(v, dtype=torch.float64) for v in (reached, there)])
    mine = (Report(*desk.report.tolist()), weights, desk.state.tolist(), int(desk.layout.leaves[0][0]))

    library, rules = compiled(desk)
    arrays = {
        "rules": rules,
        "orders": np.array(orders),
        "state": np.array([sigma, frozen]),
        "value": np.array([value]),
        "before": np.array([before]),
        "x_norm": np.array([x_norm]),
        "coefficients": np.array(coefficients, np.float64),
        "weights": np.full(2 * desk.limit + 1, math.nan),
        "report": np.array(Report(), np.float64),
        "reached": np.array([reached]),
        "there": np.array([there]),
        "choice": np.zeros(1, np.int32),
    }
    pointer = {name: array.ctypes.data_as(ctypes.c_void_p) for name, array in arrays.items()}
    first = ("rules", "orders", "state", "value", "before", "x_norm", "coefficients", "weights", "report")
    library.decide(*[pointer[name] for name in first])
    library.conclude(*[pointer[name] for name in ("rules", "state", "report", "reached", "there", "choice")])
    theirs = (Report(*arrays["report"]), arrays["weights"], arrays["state"].tolist(), int(arrays["choice"][0]))
    return mine, theirs


def agree(mine, theirs, rel=1e-9):
    for name, a, b in zip(Report._fields, mine[0], theirs[0], strict=True):
        assert a == pytest.approx(b, rel=rel, abs=1e-13, nan_ok=True), (name, mine[0], theirs[0])
    size = np.linalg.norm(mine[1])
    assert np.allclose(mine[1], theirs[1], rtol=0, atol=1e-8 * size), (mine[1], theirs[1])
    assert mine[2] == pytest.approx(theirs[2], rel=rel)
    assert mine[3] == theirs[3]


def space_of(rng, limit, dim=DIM):
    """Lanczos' numbers for a random matrix and gradient of random sizes; some spaces end before the limit."""
    scale, slope = 10.0 ** rng.uniform(-3, 3, 2)
    kind = rng.integers(4)
    spectrum = scale * rng.standard_normal(dim)
    if kind == 1:
        spectrum = abs(spectrum)
    if kind == 2:
        spectrum = scale * rng.choice([-1.0, 2.0, 3.0], dim)  # invariant after three
    q, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    B = (q * spectrum) @ q.T
    g = slope * rng.standard_normal(dim)
    rows, alpha, beta = [g / np.linalg.norm(g)], [], []
    for _ in range(limit):
        r = B @ rows[-1]
        alpha.append(float(r @ rows[-1]))
        for _ in range(2):
            r -= np.array(rows).T @ (np.array(rows) @ r)
        beta.append(float(np.linalg.norm(r)))
        rows.append(r / max(beta[-1], 1e-300))
    return [float(np.linalg.norm(g)), *alpha, *beta]


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_decide_as_python_does(name, compiled):
    desk = desk_of(CASES[name])
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(150):
        coefficients = space_of(rng, desk.limit)
        coins = rng.choice([-1.0, 1.0], 2)
        value, before = rng.standard_normal(2)
        sigma = 10.0 ** rng.uniform(-6, 6)
        told = Orders(*coins, sigma if rng.random() < 0.5 else math.nan)
        reached = before - 10.0 ** rng.uniform(-6, 6) * rng.choice([-1.0, 0.0, 1.0])
        if rng.random() < 0.1:
            reached = math.nan
        there = math.inf if rng.random() < 0.1 else 0.7
        numbers = [value, before, 10.0 ** rng.uniform(-3, 3), *coefficients]
        mine, theirs = run(desk, compiled, numbers, told, sigma=sigma, reached=reached, there=there)
        agree(mine, theirs)
        seen.add((mine[0].verdict, mine[0].plan, mine[3]))
        assert mine[2][0] == mine[0].next_sigma and mine[0].sigma == sigma
    assert len({verdict for verdict, *_ in seen}) == 3 and len(seen) >= (4 if desk.escapes else 3)


def test_cubic_steps_are_minimisers(compiled):
    """Beside the characterisation of a global minimiser: (T + μI)u = −c, μ = σ‖u‖, T + μI positive semidefinite."""
    desk = desk_of({"krylov_dim": 6, "epsilon": 1e-12})
    rng = np.random.default_rng(1)
    for _ in range(50):
        coefficients = space_of(rng, 6)
        sigma = 10.0 ** rng.uniform(-4, 4)
        _, (report, weights, *_) = run(desk, compiled, [1.0, 1.0, 1.0, *coefficients], Orders(1, 1, sigma))
        j = int(report.dim)
        alpha, beta = coefficients[1 : 1 + j], coefficients[7 : 7 + j - 1]
        T = np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)
        u, c = weights[:j], np.zeros(j)
        c[0] = coefficients[0]
        mu = sigma * np.linalg.norm(u)
        size = np.linalg.norm(T, 2) * np.linalg.norm(u) + coefficients[0]
        assert np.linalg.norm(T @ u + mu * u + c) <= 1e-10 * size
        assert np.linalg.eigvalsh(T)[0] + mu >= -1e-12 * np.linalg.norm(T, 2)
        model = c @ u + 0.5 * u @ T @ u + sigma / 3 * np.linalg.norm(u) ** 3
        assert report.decrease == pytest.approx(-model, rel=1e-8, abs=1e-10 * size * np.linalg.norm(u))
        assert report.ritz_value == pytest.approx(np.linalg.eigvalsh(T)[0], rel=1e-10, abs=1e-12)


BAD = {
    "loss": ({0: math.nan}, Outcome.REFUSED, Note.LOSS),
    "infinite loss": ({0: math.inf}, Outcome.REFUSED, Note.LOSS),
    "loss, no gradient": ({0: math.nan, 3: 0.0}, Outcome.REFUSED, Note.LOSS),
    "gradient": ({3: math.inf}, Outcome.REFUSED, Note.GRADIENT),
    "objective": ({1: math.nan}, Outcome.REFUSED, Note.OBJECTIVE),
    "first product": ({4: math.nan}, Outcome.MOVED, Note.PRODUCT),
    "later product": ({6: math.inf}, Outcome.MOVED, Note.PRODUCT),
    "residual": ({10: math.nan}, Outcome.MOVED, Note.PRODUCT),
    "no gradient": ({3: 0.0}, Outcome.VANISHED, Note.NOTHING),
    "far away": ({2: 1e30}, Outcome.MOVED, Note.ROUNDING),
}


@pytest.mark.parametrize("method", ["sanc", "scr"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_number_is_noticed_by_both(name, method, compiled):
    changes, outcome, note = BAD[name]
    desk = desk_of({"method": method})
    numbers = [1.0, 1.0, 1.0, 2.0, 1.0, -1.0, 3.0, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    for k, value in changes.items():
        numbers[k] = value
    mine, theirs = run(desk, compiled, numbers, sigma=2.0)
    agree(mine, theirs)
    assert mine[0].outcome == outcome and mine[0].note == note
    if outcome is Outcome.REFUSED:
        assert mine[2][0] == 4.0 and mine[3] == 0 and not mine[1].any()
    if outcome is Outcome.VANISHED:
        assert mine[2] == [2.0, 1.0] and mine[3] == 0


def test_a_frozen_desk_changes_nothing_until_it_is_told(compiled):
    desk = desk_of({})
    numbers = [1.0, 1.0, 1.0, *space_of(np.random.default_rng(4), 5)]
    mine, theirs = run(desk, compiled, numbers, sigma=2.0, frozen=1.0, reached=-1e9)
    agree(mine, theirs)
    assert mine[0].outcome == Outcome.FROZEN and mine[2] == [2.0, 1.0] and mine[3] == 0 and not mine[1].any()
    mine, theirs = run(desk, compiled, numbers, Orders(1, 1, 3.0), sigma=2.0, frozen=1.0, reached=-1e9)
    agree(mine, theirs)
    assert mine[0].outcome == Outcome.MOVED and mine[0].sigma == 3.0 and mine[2][1] == 0.0 and mine[3] == 1


@pytest.mark.parametrize("coin", [-1.0, 1.0])
def test_hard_cases_and_curvature_steps_follow_the_coins(coin, compiled):
    """A gradient without a part along negative curvature; and a plan along it."""
    desk = desk_of({"L2": 0.1, "krylov_dim": 2, "epsilon": 1e-30, "epsilon_g": 0.0})
    # T = [[1, 1e-11], [1e-11, -2]]: nearly invariant, and c has (nearly) no part in the left-most eigenvector.
    for beta in (1e-11, 0.5):
        numbers = [1.0, 1.0, 1.0, 1e-12, 1.0, -2.0, beta, 0.3]
        mine, theirs = run(desk, compiled, numbers, Orders(coin, coin, 1.0), reached=math.nan)
        agree(mine, theirs)
        assert mine[0].plan == 1 and mine[3] == 2
        assert math.copysign(1.0, mine[1][3]) == coin  # the largest entry of the left-most vector is its second


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_that_numbers_cannot_hold_are_not_gone_to(dtype, compiled):
    """The cubic step and the plan alike; what is far depends on the type."""
    far = {torch.float32: 1e30, torch.float64: 1e290}[dtype]
    desk = desk_of({"krylov_dim": 1, "L2": 1e-200, "sigma_floor": 0.0, "epsilon": 1e-30}, dtype)
    assert desk.far == far
    for size in (0.01 * far, 100.0 * far):
        # Along one direction of curvature −1e-10 the cubic step has the length 1e-10/σ.
        sigma = 1e-10 / size
        numbers = [1.0, 1.0, 1.0, 1e-300, -1e-10, 0.0]
        mine, theirs = run(desk, compiled, numbers, Orders(1, 1, sigma), reached=2.0)
        agree(mine, theirs)
        assert mine[0].tried == (size < far) and mine[0].note == (Note.NOTHING if size < far else Note.TRIAL)
        goes = 2e-10 / 1e-200 < far
        assert mine[0].plan == 1 and mine[0].escaped == goes and mine[3] == (2 if goes else 0)


def test_tiny_gradients_at_saddles_are_not_taken_for_hard_cases(compiled):
    """Whatever the rounding, the gradient decides the sign."""
    desk = desk_of({"krylov_dim": 2, "epsilon": 1e-30, "epsilon_g": 0.0})
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = rng.standard_normal(2)
        beta = rng.random() + 0.5
        numbers = [1.0, 1.0, 1.0, 5e-9, a, b, beta, 0.3]
        mine, theirs = run(desk, compiled, numbers, Orders(rng.choice([-1.0, 1.0]), rng.choice([-1.0, 1.0]), 5e-9))
        agree(mine, theirs, rel=1e-7)
        u = theirs[1][:2]
        assert np.linalg.norm(u) == pytest.approx(theirs[0].norm, rel=1e-9) and u[0] <= 0.0


def test_without_a_toolkit_the_headers_are_not_looked_for(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(OSError, match="CUDA_HOME"):
        cpp_extension.include_paths("cuda")
    with kernels._without_toolkit():
        cpp_extension.include_paths("cuda")
    assert cpp_extension.CUDA_HOME is None


def test_without_a_compiler_it_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_compile_kernel", None, raising=False)
    with pytest.raises(NotRecordableError, match="update torch"):
        kernels._compiled("some text", 0)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(NotRecordableError, match="NVIDIA"):
        kernels._compiled("another text", 0)
