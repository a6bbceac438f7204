"""Fixtures of the laboratory's tests: a cluster of two threads in this process, and reports without figures."""

from __future__ import annotations

import pytest

pytest.importorskip("distributed", reason="the laboratory is an extra: pip install 'sanc[lab]'")
pytest.importorskip("typer", reason="the laboratory is an extra: pip install 'sanc[lab]'")


@pytest.fixture(scope="session")
def scheduler():
    """Return the address of a scheduler whose workers are threads of this process, which has imported torch."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def without_figures(monkeypatch):
    """Omit the figures, which take most of the time of a report; test_figures.py and one command draw them."""
    from sanc.lab import figures

    monkeypatch.setattr(figures, "save_all", lambda out, runs: [])
