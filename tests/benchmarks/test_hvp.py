"""The benchmark of Hessian products at its tiny sizes: that it multiplies and reports, not who wins."""

import json

import pytest
import torch

from benchmarks import hvp


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
def test_what_is_timed_are_hessian_products(mode):
    leaves, rows = hvp.rows_of(hvp.QUICK["logistic"], 16, "cpu")
    x, y = rows.tensors
    shapes = [p.shape for p in leaves]

    def loss(flat):
        weight, bias = (part.view(s) for part, s in zip(flat.split([p.numel() for p in leaves]), shapes, strict=True))
        return torch.nn.functional.cross_entropy(x @ weight.T + bias, y)

    flat = torch.cat([p.detach().reshape(-1) for p in leaves])
    v = torch.randn(len(flat))
    made = hvp.products(leaves, rows, mode, v)()
    wanted = torch.func.hessian(loss)(flat) @ v
    assert len(made) == hvp.PRODUCTS
    tolerance = 1e-2 if mode == "finite-difference" else 1e-5
    assert all(torch.allclose(product, wanted, atol=tolerance, rtol=tolerance) for product in made)
