"""The benchmark of ranks at its tiny size: that it counts what is sent, not who wins."""

import json

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

from benchmarks import ranks


@pytest.mark.slow
def test_quick_run_counts_what_is_sent(tmp_path, capsys):
    assert ranks.main(["--quick", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "ranks.json").read_text())
    one, two = (document["measured"][size] for size in "12")
    assert all(entry["collectives"] == 0 for entry in one.values())
    vector = 4e-6 * document["parameters"]
    assert two[ranks.ADAMW]["megabytes"] == pytest.approx(vector)
    assert two["SANC, gradients"]["megabytes"] == pytest.approx(vector, rel=1e-2)
    assert two["SANC, closures"]["megabytes"] == pytest.approx(vector, rel=1e-2)
    assert two["SANC, closures"]["collectives"] == 1.0
    paper = two["SANC, paper"]
    assert paper["products"] > 0
    assert paper["megabytes"] == pytest.approx((1 + paper["products"]) * vector, rel=1e-2)
    assert capsys.readouterr().out.rstrip("\n") == (tmp_path / "ranks.md").read_text().rstrip("\n")


def test_the_model_on_paper_shares_the_metric_out():
    few, many = ranks.on_paper(8), ranks.on_paper(1024)
    assert many["dealt metric alone"] < 0.1 * few["dealt metric alone"]
    assert few["SANC, gradients"] > few["DDP + AdamW"]
