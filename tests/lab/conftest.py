"""Fixtures of the laboratory's tests: a cluster of two threads in this process, and reports without figures."""

from __future__ import annotations

from pathlib import Path

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


@pytest.fixture
def unrendered(monkeypatch):
    """Draw the figures, and write empty files in place of pictures, which take most of the time."""
    from sanc.lab import figures

    def save(figure, folder, name):
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr(figures, "save", save)


@pytest.fixture
def folders_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use no folders of the user for data and caches, and no pauses between downloads."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.delenv("SANC_DATA", raising=False)
    monkeypatch.delenv("SANC_CACHE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "user" / name)
    monkeypatch.setattr(pooch.core.time, "sleep", lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder for data."""
    path = tmp_path / "data"
    path.mkdir()
    return path
