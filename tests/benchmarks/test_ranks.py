"""The benchmark of ranks at a small size: its counts of traffic and its estimate."""

import json

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

from benchmarks import ranks


@pytest.mark.slow
def test_quick_run_counts_the_traffic(tmp_path, capsys):
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


def test_the_estimate_distributes_the_metric():
    few, many = ranks.estimate(8), ranks.estimate(1024)
    assert many["distributed metric alone"] < 0.1 * few["distributed metric alone"]
    assert few["SANC, gradients"] > few["DDP + AdamW"]


@pytest.mark.slow
def test_the_cost_of_digests_is_printed(capsys):
    assert ranks.main(["--digests", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "with ÷ without digests" in out and all(name in out for name in ranks.CANDIDATES)
