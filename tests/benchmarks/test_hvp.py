"""The benchmark of Hessian products at small sizes: its products and its report."""

import json

import pytest
import torch

from benchmarks import hvp
from benchmarks.paper_networks import Network


def test_quick_run_reports_every_mode(tmp_path, capsys):
    out = tmp_path / "new"
    assert hvp.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((out / "hvp.json").read_text())["rows"]
    assert [row["model"] for row in rows] == list(hvp.QUICK)
    for row in rows:
        assert f"| {row['model']}" in printed and set(row["ratios"]) == set(hvp.MODES)
        assert row["ratios"]["double-backward"] == 1.0
        assert all(value > 0 for value in row["milliseconds"].values())


@pytest.mark.parametrize("mode", hvp.MODES)
def test_the_timed_function_computes_hessian_products(mode):
    network = Network("small-logistic", 16, "cpu")
    leaves = network.leaves
    shapes = [p.shape for p in leaves]

    def loss(flat):
        weight, bias = (part.view(s) for part, s in zip(flat.split([p.numel() for p in leaves]), shapes, strict=True))
        return torch.nn.functional.cross_entropy(network.x @ weight.T + bias, network.y)

    flat = torch.cat([p.detach().reshape(-1) for p in leaves])
    v = torch.randn(len(flat))
    made = hvp.products(network, mode, v)()
    wanted = torch.func.hessian(loss)(flat) @ v
    assert len(made) == hvp.PRODUCTS
    tolerance = 1e-2 if mode == "finite-difference" else 1e-5
    assert all(torch.allclose(product, wanted, atol=tolerance, rtol=tolerance) for product in made)
