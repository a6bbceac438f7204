"""How many vectors a step holds, what micro-batches save, and that the commands that show it work."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

import sanc
from benchmarks import memory, scaling

CPU = torch.device("cpu")
SLACK = 0.08  # activations of two rows beside layers of 300×300


def paper(layers, lanczos, dim, hvp, more):
    options = {"preset": "paper", "lanczos": lanczos, "krylov_dim": dim, "hvp": hvp, "epsilon": 1e-12, **more}
    return memory.step_memory(layers, 300, CPU, **options)


def test_the_count_sees_what_is_alive_at_the_same_time():
    def call():
        a = torch.ones(1000, dtype=torch.float64)
        b = a + 1
        del a
        return b * 2

    assert memory.peak_and_rest(call, CPU) == pytest.approx((16_000, 8_000), abs=64)
    assert memory.peak_and_rest(lambda: float(call()[0]), CPU) == pytest.approx((16_000, 0), abs=64)


@pytest.mark.parametrize("dim", [5, 10])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_stored_basis_needs_j_and_five_vectors(layers, dim):
    accepted = paper(layers, "store", dim, "double-backward", memory.ACCEPTED)
    assert accepted["branches"] == ["very successful"]
    assert accepted["peak"] == pytest.approx(dim + 4, abs=SLACK)
    assert accepted["rest"] == pytest.approx(0, abs=1e-3)
    rejected = paper(layers, "store", dim, "double-backward", memory.REJECTED)
    assert rejected["branches"] == ["curvature"]
    assert rejected["peak"] == pytest.approx(dim + 5, abs=SLACK)


@pytest.mark.parametrize("dim", [5, 10])
@pytest.mark.parametrize("layers", [1, 3])
def test_without_a_basis_five_vectors_are_enough(layers, dim):
    accepted = paper(layers, "regenerate", dim, "double-backward", memory.ACCEPTED)
    assert accepted["branches"] == ["very successful"]
    # Two paths lead to a weight in the middle, and in inference mode torch takes their sum in place.
    assert accepted["peak"] == pytest.approx(5, abs=SLACK)
    rejected = paper(layers, "regenerate", dim, "double-backward", memory.REJECTED)
    assert rejected["branches"] == ["curvature"]
    assert rejected["peak"] == pytest.approx(5, abs=SLACK)


@pytest.mark.parametrize("more", [memory.ACCEPTED, memory.REJECTED])
@pytest.mark.parametrize("dim", [5, 10])
@pytest.mark.parametrize("hvp", ["forward-over-reverse", "linearised"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_tangents_fit_into_the_bound(layers, hvp, dim, more):
    # Torch's product rule makes tensors of a weight's size beside its gradient: of one in three, or of all there is.
    stored = paper(layers, "store", dim, hvp, more)
    assert stored["peak"] <= dim + 6 + (SLACK if hvp == "forward-over-reverse" else memory.slack(300))
    assert paper(layers, "regenerate", dim, hvp, more)["peak"] <= 6 + SLACK


@pytest.mark.parametrize("hvp", memory.EXACT)
@pytest.mark.parametrize("used", ["first layer", "last layer", "first factor", "embedding"])
def test_one_matrix_among_small_leaves_fits_into_the_bound(used, hvp):
    x, rows = torch.randn(2, 300), torch.randint(0, 900, (3,))
    models = {
        "first layer": nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)),
        "last layer": nn.Sequential(nn.Linear(300, 10), nn.Linear(10, 300), nn.Tanh(), nn.Linear(300, 300)),
        "first factor": nn.Linear(300, 300),
        "embedding": nn.Sequential(nn.Embedding(900, 100), nn.Linear(100, 3)),
    }
    model = models[used]
    forms = {"first factor": lambda: model.weight @ x.t() + model.bias[:, None], "embedding": lambda: model(rows)}
    form = forms.get(used, lambda: model(x))

    def run(lanczos="store"):
        options = {"preset": "paper", "lanczos": lanczos, "hvp": hvp, "krylov_dim": 4}
        optimizer = sanc.SANC(model.parameters(), seed=0, check=False, epsilon=1e-12, **options, **memory.REJECTED)
        optimizer.step(lambda: 10.0 * torch.cos(2.0 * form()).square().mean())
        return optimizer

    run()
    unit = 4 * memory.length(model)
    assert memory.peak_and_rest(run, CPU)[0] / unit <= 4 + 6 + 2 * memory.slack(300)  # more layers, more activations
    assert memory.peak_and_rest(lambda: run("regenerate"), CPU)[0] / unit <= 6 + SLACK


@pytest.mark.parametrize("name", memory.USES)
def test_other_uses_of_a_weight_fit_into_the_bound(name):
    for row in memory.use_rows(300, CPU, 4, [name]):
        assert row["store"] <= 4 + 6 + memory.slack(300), row
        assert row["regenerate"] <= 6 + memory.slack(300), row


def test_a_convolution_on_two_threads_fits_into_the_bound():
    """There oneDNN is used, which holds a copy of the gradient of the weight."""
    torch.set_num_threads(2)
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*oneDNN.*")
            for row in memory.use_rows(300, CPU, 4, ["convolution"]):
                assert row["store"] <= 4 + 6 + memory.slack(300), row
                assert row["regenerate"] <= 6 + memory.slack(300), row
    finally:
        torch.set_num_threads(1)
    assert torch._C._get_mkldnn_enabled() == before


@pytest.mark.parametrize("hvp", memory.EXACT)
def test_the_default_preset_keeps_to_the_bound_where_a_weight_is_used_often(hvp):
    measured = memory.use_memory("recurrence, 12 steps", 300, CPU, steps=20, hvp=hvp, krylov_dim=5)
    assert measured["rest"] <= 5 + 6 + 0.01
    assert measured["peak"] - measured["rest"] <= 5 + 6 + 3 * memory.slack(300)  # twelve layers, as it were


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("dim", [5, 10])
@pytest.mark.parametrize("hvp", memory.EXACT)
def test_the_default_preset_needs_j_and_six_vectors_beside_those_it_keeps(hvp, dim, layers):
    measured = memory.step_memory(layers, 150, CPU, steps=40, hvp=hvp, krylov_dim=dim)
    assert measured["rest"] <= dim + 6 + 0.01
    assert measured["peak"] - measured["rest"] <= dim + 6 + memory.slack(150)


@pytest.mark.parametrize("layers", [1, 4])
def test_the_choice_of_products_fits_into_the_bound(layers):
    (row,) = memory.auto_rows(300, CPU, 5, [layers])
    assert 9 <= row["peak"] <= 10 + memory.slack(300)  # whatever J is


def test_microbatches_bound_the_activations():
    small = [nn.Conv2d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 8, 5, padding=2), nn.Tanh(), nn.AvgPool2d(8)]
    model = nn.Sequential(*small, nn.Flatten(), nn.Linear(8 * 4, 10))
    rows = memory.batch_rows(model, 64, [None, 8], 16, CPU)
    assert [row["call"] for row in rows[::2]] == [
        "value", "gradient", "product, double-backward", "product, forward-over-reverse", "step"
    ]  # fmt: skip
    ratios = [row["ratio"] for row in rows[1::2]]  # of an eighth of the rows; one row is taken off both
    assert max(ratios) <= 0.16


def test_a_step_without_a_basis_repeats_the_step_with_one():
    finals = {}
    for lanczos in ("store", "regenerate"):
        for hvp in memory.MODES:
            torch.manual_seed(0)
            model = memory.network(2, 12, CPU).double()
            x = torch.randn(6, 12, dtype=torch.float64)
            options = {"preset": "paper", "lanczos": lanczos, "hvp": hvp, "microbatch": 4, "weight_decay": 0.1}
            optimizer = sanc.SANC(model.parameters(), seed=1, **options)
            batch = sanc.Batch(lambda x: torch.cos(2.0 * model(x)).mean(), x)
            for _ in range(5):
                optimizer.step(batch)
            finals[lanczos, hvp] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    first = finals["store", "double-backward"]
    for other in finals.values():
        torch.testing.assert_close(other, first, rtol=0, atol=1e-9)


@pytest.mark.parametrize("hvp", memory.MODES)
def test_a_point_whose_memory_was_lent_comes_back_after_an_error(hvp):
    model = memory.network(1, 8, CPU)
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def loss():
        calls.append(1)
        if len(calls) == (3 if hvp == "forward-over-reverse" else 4):  # in a product of the second pass
            raise KeyError("lost")
        return torch.cos(2.0 * model(torch.ones(1, 8))).mean()

    options = {"preset": "paper", "lanczos": "regenerate", "hvp": hvp, "check": False, **memory.REJECTED}
    with pytest.raises(KeyError, match="lost"):
        sanc.SANC(model.parameters(), seed=0, **options).step(loss)
    for p, content in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, content)


def test_long_sums_keep_their_digits():
    errors = memory.rounding(5 * 10**6, CPU)
    assert max(errors.values()) < 3e-6


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert memory.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "regenerate" in printed and "proportional" in printed
    document = json.loads((tmp_path / "memory.json").read_text())
    assert {row["lanczos"] for row in document["steps"]} == {"store", "regenerate"}
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_the_command_for_a_large_network(tmp_path, capsys):
    assert memory.main(["--billion", "--width", "100", "--out", str(tmp_path)]) == 0
    large = json.loads((tmp_path / "memory-billion.json").read_text())["large"]
    assert large["parameters"] == 40_000
    assert large["loss after"] < large["loss before"]
    assert "40,000" in capsys.readouterr().out


def test_the_command_that_draws_growth(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert scaling.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "by hand" in capsys.readouterr().out
    panels = json.loads((tmp_path / "scaling.json").read_text())["panels"]
    assert list(panels) == ["d", "n", "J", "batch"]
    assert all(row["step"] > 0 and row["by hand"] > 0 for rows in panels.values() for row in rows)
    assert (tmp_path / "scaling.png").stat().st_size > 1000
