"""Downloads of data sets from a server on this machine: resumed, retried and checked."""

from __future__ import annotations

import fcntl
import hashlib
import http.server
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sanc.lab import datasets, download
from sanc.lab.catalogue import RemoteFile
from tiny_data import LABELS, TEXT, TINY, names, put

pooch = pytest.importorskip("pooch")
pytestmark = pytest.mark.usefixtures("folders_of_the_test")


REAL = os.environ.get("SANC_DATA")


def test_pooch_is_needed_for_downloads_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    put(folder, "tiny", TEXT)
    assert datasets.load_set(TINY, folder).classes == 2
    with pytest.raises(ImportError, match="pooch"):
        datasets.fetch(["a9a"], folder)


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes by path. `cuts` are the numbers of bytes after which the next responses for a path break off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, bytes] = {}
        self.cuts: dict[str, list[int]] = {}
        self.statuses: dict[str, list[int]] = {}
        self.kinds: dict[str, str] = {}
        self.etag = True
        self.ranges = True
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, path = self.server, self.path
        byte_range = self.headers.get("Range")
        server.requests.append((path, byte_range))
        if server.statuses.get(path):
            self.send_error(server.statuses[path].pop(0))
            return
        if path not in server.content:
            self.send_error(404)
            return
        content = server.content[path]
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        start = 0
        if byte_range and server.ranges and self.headers.get("If-Range", tag) == tag:
            start = int(byte_range.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.etag:
            self.send_header("ETag", tag)
        self.send_header("Content-Type", server.kinds.get(path, "application/octet-stream"))
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content)
        if server.cuts.get(path):
            end = min(end, start + server.cuts[path].pop(0))
        self.wfile.write(content[start:end])
        self.wfile.flush()
        if end < len(content):
            self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=lambda: running.serve_forever(0.01), daemon=True)
        thread.start()
        yield running
        running.shutdown()


BIG = b"".join(b"%d 1:%d 2:%d\n" % (1 - 2 * (k % 2), k + 1, k * k + 1) for k in range(60_000))


@pytest.fixture
def remote(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make /tiny the only set of the catalogue."""

    def register(content: bytes = TEXT, digest: str | None = "right", rows: int = 4, size: int | None = None) -> None:
        server.content["/tiny"] = content
        if digest == "right":
            digest = "sha256:" + hashlib.sha256(content).hexdigest()
        file = RemoteFile(f"{server.url}/tiny", "tiny", size or len(content), digest)
        monkeypatch.setattr(datasets, "CATALOGUE", {"tiny": replace(TINY, rows=rows, files=(file,))})

    return register


def test_a_set_is_downloaded_once_and_loaded(
    folder: Path, tmp_path: Path, server: Server, remote: Callable[..., None]
) -> None:
    remote()
    target = folder / "deep" / "er"
    datasets.fetch(["tiny"], target)
    assert names(target) == ["tiny"]
    assert datasets.load("tiny", target).y.tolist() == LABELS
    datasets.fetch(["tiny"], target)
    put(folder, "tiny.bz2", TEXT)
    datasets.fetch(["tiny"], folder)
    assert len(server.requests) == 1  # it was present, the second time in another form
    (row,) = datasets.available(target)
    assert row["present"] and row["where"] == str(target / "tiny") and row["size"] == len(TEXT)
    put(target, "tiny", b"damaged")
    datasets.fetch(["tiny"], target)
    assert (target / "tiny").read_bytes() == TEXT
    datasets.fetch(["tiny"])  # into the user's cache
    assert (tmp_path / "user" / "sanc" / "tiny").read_bytes() == TEXT and datasets.load("tiny").classes == 2


def test_a_failed_download_leaves_no_file(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote(digest="sha256:" + "0" * 64)
    with pytest.raises(datasets.DataError, match="not the published file") as caught:
        datasets.fetch(["tiny"], folder)
    assert f"put it at {folder / 'tiny'}" in str(caught.value) and names(folder) == []
    remote(digest=None)
    server.kinds["/tiny"] = "text/html; charset=utf-8"
    with pytest.raises(datasets.DataError, match="a web page instead of the file"):
        datasets.fetch(["tiny"], folder)
    del server.content["/tiny"]
    with pytest.raises(datasets.DataError, match="404") as caught:
        datasets.fetch(["tiny"], folder)
    assert server.url in str(caught.value) and names(folder) == []


def test_an_interrupted_download_is_resumed(
    folder: Path, server: Server, remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(BIG, rows=60_000)
    server.cuts["/tiny"] = [300_000] * 2
    datasets.fetch(["tiny"], folder)
    assert (folder / "tiny").read_bytes() == BIG and names(folder) == ["tiny"]
    ranges = [byte_range for _, byte_range in server.requests]
    assert ranges[0] is None and all(ranges[1:]) and len(ranges) == 3
    (folder / "tiny").unlink()
    monkeypatch.setattr(download, "RETRIES", 0)
    server.cuts["/tiny"] = [400_000]
    with pytest.raises(datasets.DataError, match="put it at"):
        datasets.fetch(["tiny"], folder)
    assert names(folder) == ["tiny.part"]
    datasets.fetch(["tiny"], folder)  # the next call resumes
    assert names(folder) == ["tiny"] and (folder / "tiny").read_bytes() == BIG
    assert server.requests[-1][1] is not None


def test_a_download_larger_than_the_published_file_is_an_error(
    folder: Path, server: Server, remote: Callable[..., None]
) -> None:
    remote(size=10)
    with pytest.raises(datasets.DataError, match="more than the 10 bytes") as caught:
        datasets.fetch(["tiny"], folder)
    assert f"put it at {folder / 'tiny'}" in str(caught.value) and names(folder) == []


def test_an_invalid_partial_file_is_discarded(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    for digest, ranges, half in (("right", True, 10), (None, True, 10), ("right", True, 999), ("right", False, 999)):
        remote(digest=digest)
        server.ranges = ranges
        (folder / "tiny.part").write_bytes(b"x" * half)
        datasets.fetch(["tiny"], folder)
        assert (folder / "tiny").read_bytes() == TEXT and names(folder) == ["tiny"]
        (folder / "tiny").unlink()


def test_errors_of_the_server_are_retried(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote()
    server.statuses["/tiny"] = [503, 429, 500]
    datasets.fetch(["tiny"], folder)
    assert len(server.requests) == 4 and names(folder) == ["tiny"]
    (folder / "tiny").unlink()
    server.statuses["/tiny"] = [503] * 99
    with pytest.raises(datasets.DataError, match="503"):
        datasets.fetch(["tiny"], folder)
    assert names(folder) == [] and len(server.requests) == 4 + 1 + download.RETRIES


def test_the_error_without_a_network_contains_the_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/tiny"
    monkeypatch.setattr(datasets, "CATALOGUE", {"tiny": replace(TINY, files=(RemoteFile(url, "tiny"),))})
    with pytest.raises(datasets.DataError, match="cannot be downloaded") as caught:
        datasets.fetch(["tiny"], folder)
    assert url in str(caught.value) and f"put it at {folder / 'tiny'}" in str(caught.value) and names(folder) == []


def test_two_processes_cannot_download_the_same_file(folder: Path, remote: Callable[..., None]) -> None:
    remote()
    with (folder / "tiny.part").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(datasets.DataError, match="another process"):
            datasets.fetch(["tiny"], folder)
    datasets.fetch(["tiny"], folder)
    assert names(folder) == ["tiny"]


@pytest.mark.skipif(REAL is None, reason="SANC_DATA is not set: no published files to check")
@pytest.mark.parametrize("name", list(datasets.CATALOGUE))
def test_published_files_match_the_catalogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REAL is not None
    monkeypatch.undo()
    dataset = datasets.CATALOGUE[name]
    if datasets._locate(dataset, Path(REAL)) is None:
        pytest.skip(f"SANC_DATA does not hold {name}")
    loaded = datasets.load(name)
    counts = np.bincount(loaded.y, minlength=dataset.classes).tolist()
    rows = len(loaded.y) if loaded.note.startswith("subset") else dataset.rows
    assert loaded.X.shape == (rows, dataset.features) and len(loaded.y) == rows
    assert len(counts) == dataset.classes == loaded.classes and min(counts) > 0
    if name in ("mnist", "cifar10", "covtype", "segment"):
        low, high = dataset.interval or (0.0, 1.0)
        assert loaded.X.min() == low and loaded.X.max() == high
