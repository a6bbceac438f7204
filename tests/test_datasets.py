"""The data module: formats, faults, layouts, the cache and downloads over loopback."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import socket
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import sanc
from sanc.errors import ArgumentError
from sanc.lab import datasets, download, parsing
from sanc.lab.datasets import DataSet, Layout, RemoteFile

pooch = pytest.importorskip("pooch")

REAL = os.environ.get("SANC_DATA")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".bz2": bz2.compress,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
}

TEXT = b"-1 1:0.5 3:2\n+1\n-1 2:-1e-3\n1 1:1 2:2 3:3\n"
MATRIX = np.array([[0.5, 0, 2], [0, 0, 0], [0, -1e-3, 0], [1, 2, 3]])
LABELS = [0, 1, 0, 1]
TINY = DataSet(
    "tiny", 4, 3, 2, "binary", (RemoteFile("http://127.0.0.1:9/tiny", "tiny"),), layouts=(Layout("libsvm", ("tiny",)),)
)


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SANC_DATA", raising=False)
    monkeypatch.delenv("SANC_CACHE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "user" / name)
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    monkeypatch.setattr(download, "_TIMEOUT", (2.0, 2.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


def put(folder: Path, name: str, content: bytes) -> Path:
    """Write a file, compressed as its name says."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](content))
    return path


def dense(X: Any) -> np.ndarray:
    return X.toarray() if scipy.sparse.issparse(X) else np.asarray(X)


def libsvm(X: np.ndarray, labels: Any) -> bytes:
    lines = []
    for row, label in zip(X, labels, strict=True):
        entries = "".join(f" {j + 1}:{v!r}" for j, v in enumerate(row.tolist()) if v)
        lines.append(f"{label}{entries}\n")
    return "".join(lines).encode()


def idx(pixels: np.ndarray, side: tuple[int, int] = (28, 28), magic: int = 2051) -> bytes:
    return struct.pack(">4I", magic, len(pixels), *side) + pixels.tobytes()


def idx_labels(y: Any, magic: int = 2049) -> bytes:
    return struct.pack(">2I", magic, len(y)) + np.asarray(y, np.uint8).tobytes()


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def shrink(name: str, rows: int, **changes: Any) -> DataSet:
    """A set of the catalogue with fewer rows and without the checksums of the whole one."""
    whole = datasets.CATALOGUE[name]
    layouts = tuple(replace(layout, digests=()) for layout in whole.layouts)
    test_rows = rows // 2 if whole.test_rows else 0
    return replace(whole, rows=rows, counts=None, test_rows=test_rows, test_counts=None, layouts=layouts, **changes)


# ------------------------------------------------------------------------------------------------------ the parser


@pytest.mark.parametrize("suffix", ["", ".txt", ".bz2", ".gz", ".xz"])
@pytest.mark.parametrize("sparse", [False, True])
def test_libsvm_text_is_read_whatever_the_compression(folder: Path, suffix: str, sparse: bool) -> None:
    put(folder, f"tiny{suffix}", TEXT)
    loaded = datasets.load_set(replace(TINY, sparse=sparse), folder)
    assert isinstance(loaded.X, scipy.sparse.csr_matrix if sparse else np.memmap)
    assert np.array_equal(dense(loaded.X), MATRIX)
    assert loaded.y.tolist() == LABELS and loaded.y.dtype == np.int64
    assert (loaded.name, loaded.classes, loaded.note) == ("tiny", 2, "")


@pytest.mark.parametrize("block", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_blocks_of_any_size_give_the_same_matrix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, block: int, ends: bytes
) -> None:
    monkeypatch.setattr(parsing, "BLOCK", block)
    X = rng.normal(size=(60, 5)) * 10.0 ** rng.integers(-300, 300, (60, 5)) * (rng.random((60, 5)) < 0.5)
    y = rng.integers(0, 2, 60)
    text = libsvm(X, 2 * y - 1).replace(b"\n", ends)
    put(folder, "tiny.bz2", text.replace(ends, ends + ends, 3))  # blank lines do not count
    for sparse in (False, True):
        loaded = datasets.load_set(replace(TINY, rows=60, features=5, sparse=sparse), folder)
        assert np.array_equal(dense(loaded.X), X)  # to the last bit
        assert np.array_equal(loaded.y, y)


FAULTS = {
    b"1 4:1": "out of range",
    b"1 0:1": "out of range",
    b"1 -1:1": "out of range",
    b"1 99999999999999999999:1": "out of range",
    b"1 2:1 1:1": "does not exceed",
    b"1 2:1 2:1": "does not exceed",
    b"1 1.5:1": "not an integer",
    b"1 a:1": "not an integer",
    b"1 :2": "not an integer",
    b"1 1:abc": "not a number",
    b"1 1:": "not a number",
    b"1 1: 2:3": "not a number",
    b"1 1:1.5.2": "not a number",
    b"1 1:1-2": "not a number",
    b"1 1:--2": "not a number",
    b"1 1:1e": "not a number",
    b"1 1:2:3": "not a number",
    b"1 1:0x1": "not a number",
    b"1 1:1_0": "not finite",
    b"1 1:nan": "not finite",
    b"1 1:1e999": "not finite",
    b"1 1": "index:value",
    b"1 1:1 # x": "index:value",
    b"1 qid:3": "not an integer",
    b"3 1:1": "label '3' is not one of -1, 1",
    b"0.5 1:1": "label",
    b"x 1:1": "label 'x' is not a number",
    b"1:1 2:1": "label",
    b"<html>": "label",
    b"\xff\xfe1": "label",
    b"1 1:1\x0c2:2": "cannot be read",
}


@pytest.mark.parametrize("block", [8, 1 << 20])
@pytest.mark.parametrize("line", FAULTS, ids=lambda line: line.decode("latin-1"))
def test_a_faulty_line_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, block: int) -> None:
    monkeypatch.setattr(parsing, "BLOCK", block)
    path = put(folder, "tiny", b"-1 1:0.5 3:2\n\n+1\n" + line + b"\n-1\n")
    with pytest.raises(datasets.DataError, match=FAULTS[line]) as caught:
        datasets.load_set(TINY, folder)
    assert str(path) in str(caught.value) and "remove it and fetch it again" in str(caught.value)
    assert caught.value.path == path
    if line in (b"1 1:1\x0c2:2",):
        assert caught.value.line is not None and caught.value.line <= 4
    else:
        assert caught.value.line == 4 and "line 4" in str(caught.value)
    assert isinstance(caught.value, ArgumentError)
    assert not list((folder / "parsed").iterdir())


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (TEXT[: TEXT.rindex(b"1 1:1")], {}, "ends after 3 rows instead of 4"),
        (TEXT + b"1 1:1\n", {}, "line 5: a row too many"),
        (TEXT[:-1], {}, "no line end"),
        (TEXT.replace(b"-1", b"1"), {}, "no row of tiny has the label -1"),
        (TEXT, {"counts": (3, 1)}, r"\[2, 2\] rows instead of \[3, 1\]"),
        (b"", {}, "empty"),
        (b"\n\n", {}, "ends after 0 rows"),
    ],
)
def test_rows_and_classes_must_be_those_of_the_catalogue(
    folder: Path, text: bytes, changes: dict[str, Any], message: str
) -> None:
    put(folder, "tiny", text)
    with pytest.raises(datasets.DataError, match=message):
        datasets.load_set(replace(TINY, **changes), folder)


def test_the_checksum_of_the_content_is_compared_but_for_line_ends(folder: Path) -> None:
    digest = hashlib.sha256(TEXT).hexdigest()
    dataset = replace(TINY, layouts=(Layout("libsvm", ("tiny",), digests=(digest,)),))
    for text in (TEXT, TEXT.replace(b"\n", b"\r\n"), TEXT[:-1], TEXT + b"\n"):
        put(folder, "tiny", text)
        assert datasets.load_set(dataset, folder).y.tolist() == LABELS
    put(folder, "tiny", TEXT.replace(b"0.5", b"0.6"))
    with pytest.raises(datasets.DataError, match="differs from the published"):
        datasets.load_set(dataset, folder)


def test_a_line_without_end_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "BLOCK", 100)
    monkeypatch.setattr(parsing, "LONGEST_LINE", 1000)
    put(folder, "tiny", b"1 " * 1000)
    with pytest.raises(datasets.DataError, match="64 MiB"):
        datasets.load_set(TINY, folder)


@pytest.mark.parametrize("suffix", [".bz2", ".gz", ".xz"])
def test_damaged_compression_is_an_error(folder: Path, rng: np.random.Generator, suffix: str) -> None:
    text = libsvm(rng.normal(size=(4, 3)), [1, -1, 1, -1])
    whole = COMPRESS[suffix](text)
    path = folder / f"tiny{suffix}"
    for cut in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(datasets.DataError, match=r"ends too early|ends after 0 rows") as caught:
            datasets.load_set(TINY, folder)
        assert path.name in str(caught.value)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    damaged[len(whole) // 2 + 3] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(datasets.DataError):
        datasets.load_set(TINY, folder)


def test_a_name_that_lies_about_the_compression(folder: Path) -> None:
    (folder / "tiny.bz2").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(datasets.DataError, match="the name says bz2, but the file begins with b'<!DOCTYP'"):
        datasets.load_set(TINY, folder)
    (folder / "tiny").write_bytes(gzip.compress(TEXT))
    with pytest.raises(datasets.DataError, match=r"should end in \.gz"):
        datasets.load_set(TINY, folder)


def test_scaling_maps_each_feature_and_constants_to_zero(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "ROWS", 3)
    monkeypatch.setattr(parsing, "BLOCK", 10)
    X = np.array([[1.0, -5, 9], [2, 0, 9], [5, 5, 9], [3, 2.5, 9]])
    put(folder, "tiny", libsvm(X, [1, -1, 1, -1]))
    zero_one = datasets.load_set(replace(TINY, interval=(0.0, 1.0)), folder).X
    assert np.array_equal(zero_one, [[0, 0, 0], [0.25, 0.5, 0], [1, 1, 0], [0.5, 0.75, 0]])
    both = datasets.load_set(replace(TINY, interval=(-1.0, 1.0)), folder).X
    assert np.array_equal(both, [[-1, -1, 0], [-0.5, 0, 0], [1, 1, 0], [0, 0.5, 0]])


# --------------------------------------------------------------------------------------------- the other formats


def tiny_mnist(rng: np.random.Generator) -> tuple[DataSet, dict[str, bytes], np.ndarray, np.ndarray]:
    pixels, y = rng.integers(0, 256, (20, 784)).astype(np.uint8), np.arange(20) % 10
    files = {
        "train-images-idx3-ubyte": idx(pixels),
        "train-labels-idx1-ubyte": idx_labels(y),
        "t10k-images-idx3-ubyte": idx(pixels[:10]),
        "t10k-labels-idx1-ubyte": idx_labels(y[:10]),
    }
    return shrink("mnist", 20), files, pixels, y


@pytest.mark.parametrize("pattern", ["mnist/{}.gz", "{}.gz", "{}", "MNIST/raw/{}", "mnist/{}"])
def test_mnist(folder: Path, rng: np.random.Generator, pattern: str) -> None:
    dataset, files, pixels, y = tiny_mnist(rng)
    for name, content in files.items():
        put(folder, pattern.format(name), content)
    loaded = datasets.load_set(dataset, folder)
    assert np.array_equal(loaded.X, pixels / 255) and np.array_equal(loaded.y, y)
    test = datasets.load_set(dataset, folder, part="test", dtype="float32")
    assert test.X.dtype == np.float32 and isinstance(test.X, np.memmap)
    assert np.array_equal(test.X, pixels[:10] / np.float32(255)) and np.array_equal(test.y, y[:10])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("images", lambda b: b"\x00\x00\x08\x01" + b[4:], "magic number 2051"),
        ("images", lambda b: b[:7], "magic number 2051"),
        ("images", lambda b: b[:-5], "ends within record 20 of 20"),
        ("images", lambda b: b + b"\x00", "goes on after its 20 records"),
        ("images", lambda b: b[:4] + struct.pack(">I", 19) + b[8:], "19 images instead of 20"),
        ("images", lambda b: b[:8] + struct.pack(">2I", 14, 14) + b[16:], "14 × 14 pixels instead of 784"),
        ("labels", lambda b: b"\x00\x00\x08\x03" + b[4:], "magic number 2049"),
        ("labels", lambda b: b[:4] + struct.pack(">I", 21) + b[8:], "21 labels for 20 images"),
        ("labels", lambda b: b[:-1] + b"\x0a", "record 20 has the label 10"),
        ("labels", lambda b: b[:-1], "ends within record"),
    ],
)
def test_faults_of_idx_files(
    folder: Path, rng: np.random.Generator, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    dataset, files, _, _ = tiny_mnist(rng)
    for key, content in files.items():
        put(folder, f"mnist/{key}.gz", change(content) if f"train-{name}" in key else content)
    with pytest.raises(datasets.DataError, match=message) as caught:
        datasets.load_set(dataset, folder)
    assert f"train-{name}" in str(caught.value)


def tiny_cifar(rng: np.random.Generator) -> tuple[DataSet, dict[str, bytes], np.ndarray]:
    records = rng.integers(0, 256, (20, 3073)).astype(np.uint8)
    records[:, 0] = np.arange(20) % 10
    files = {f"data_batch_{k + 1}.bin": records[4 * k : 4 * k + 4].tobytes() for k in range(5)}
    return shrink("cifar10", 20), {**files, "test_batch.bin": records[:10].tobytes()}, records


@pytest.mark.parametrize("pattern", ["cifar10/{}.xz", "cifar10/{}", "cifar-10-batches-bin/{}", "tar"])
def test_cifar(folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.setattr(parsing, "BLOCK", 3 * 3073 + 5)
    dataset, files, records = tiny_cifar(rng)
    if pattern == "tar":
        backwards = {f"cifar-10-batches-bin/{name}": files[name] for name in reversed(files)}
        (folder / "cifar-10-binary.tar.gz").write_bytes(tar(backwards))
    else:
        for name, content in files.items():
            put(folder, pattern.format(name), content)
    loaded = datasets.load_set(dataset, folder)
    assert np.array_equal(loaded.X, records[:, 1:] / 255) and np.array_equal(loaded.y, records[:, 0])
    test = datasets.load_set(dataset, folder, part="test")
    assert np.array_equal(test.X, records[:10, 1:] / 255) and test.classes == 10


def test_faults_of_cifar_files(folder: Path, rng: np.random.Generator) -> None:
    dataset, files, records = tiny_cifar(rng)
    for name, content in files.items():
        put(folder, name, content)
    third = folder / "data_batch_3.bin"
    for content, message in (
        (third.read_bytes()[:-1], "ends within record 4: a record has 3073 bytes"),
        (third.read_bytes()[:-3073], "ends after 19 rows instead of 20"),
        (b"\xc8" + third.read_bytes()[1:], "label 200, not one of 0 to 9"),
        (third.read_bytes() + records[0].tobytes(), "more than the 20|instead of"),
    ):
        third.write_bytes(content)
        with pytest.raises(datasets.DataError, match=message):
            datasets.load_set(dataset, folder)
        third.write_bytes(files["data_batch_3.bin"])
    for path in folder.glob("*.bin"):
        path.unlink()
    whole = tar({f"cifar-10-batches-bin/{name}": content for name, content in files.items()})
    archive = folder / "cifar-10-binary.tar.gz"
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(datasets.DataError, match=r"cifar-10-binary\.tar\.gz"):
        datasets.load_set(dataset, folder)
    archive.write_bytes(tar({"cifar-10-batches-bin/data_batch_1.bin": files["data_batch_1.bin"]}))
    with pytest.raises(datasets.DataError, match="no such member"):
        datasets.load_set(dataset, folder)


def segment(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, bytes]:
    X, y = rng.normal(size=(14, 19)), np.arange(14) % 7
    X[:, 2] = 9
    text = "".join(" ".join(map(repr, row.tolist())) + f" {label + 1}\n" for row, label in zip(X, y, strict=True))
    return X, y, text.encode()


@pytest.mark.parametrize("name", ["segment.dat.bz2", "segment.dat", "segment/segment.dat"])
def test_segment_as_statlog(folder: Path, rng: np.random.Generator, name: str) -> None:
    X, y, text = segment(rng)
    put(folder, name, text)
    loaded = datasets.load_set(shrink("segment", 14), folder)
    spread = np.ptp(X, axis=0) + (np.ptp(X, axis=0) == 0)
    expected = 2 * (X - X.min(axis=0)) / spread - 1
    expected[:, 2] = 0
    assert np.allclose(loaded.X, expected, atol=1e-15) and np.array_equal(loaded.y, y) and loaded.classes == 7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b" 3\n", b"\n", "line 3: 19 numbers instead of 19 features and a label"),
        (b" 3\n", b" 9\n", "line 3: the label '9'"),
        (b" 3\n", b" x\n", "line 3: a value is not a number"),
        (b" 9.0 ", b" nan ", "line 1: a value is not finite"),
        (b"\n", b"\n\n", "7 instead of 14"),
    ],
)
def test_faults_of_statlog_text(folder: Path, rng: np.random.Generator, old: bytes, new: bytes, message: str) -> None:
    text = segment(rng)[2]
    text = text[: len(text) // 2].rpartition(b"\n")[0] + b"\n" if message.startswith("7") else text.replace(old, new, 1)
    put(folder, "segment.dat", text)
    with pytest.raises(datasets.DataError, match=message.replace("7 instead", "rows instead")):
        datasets.load_set(shrink("segment", 14), folder)


def test_the_higgs_subset_says_so_and_gives_way_to_the_whole(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = rng.normal(size=(9, 28)).astype(np.float32)
    y = np.array([0, 1, 0, 1, 1, 0, 0, 1, 1])
    for name, array in (("X_num_test", X[:5]), ("y_test", y[:5]), ("X_num_val", X[5:]), ("y_val", y[5:])):
        put(folder, f"higgs/{name}.npy", npy(array))
    monkeypatch.setattr(datasets, "CATALOGUE", {"higgs": datasets.CATALOGUE["higgs"]})
    loaded = datasets.load("higgs", folder)
    assert loaded.note == "subset: 9 of 11,000,000 rows"
    assert loaded.X.dtype == np.float64 and np.array_equal(loaded.X, X) and np.array_equal(loaded.y, y)
    (row,) = datasets.available(folder)
    assert row["present"] and row["note"] == loaded.note and row["where"] == str(folder / "higgs")
    put(folder, "HIGGS.xz", libsvm(X[:6].astype(float), y[:6]))
    whole = datasets.load_set(shrink("higgs", 6), folder, dtype="float32")
    assert whole.note == "" and whole.X.dtype == np.float32 and np.array_equal(whole.X, X[:6])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("X_num_test", npy(np.zeros((4, 27), np.float32)), "27 columns instead of 28"),
        ("X_num_test", npy(np.full((4, 28), np.nan, np.float32)), "row 0 has a value that is not finite"),
        ("X_num_test", npy(np.zeros((4, 28), np.float32))[:-9], "not a readable .npy file"),
        ("X_num_test", npy(np.zeros(4)), "2 axes"),
        ("X_num_test", b"PK\x03\x04", "not a readable .npy file"),
        ("y_test", npy(np.array([0, 1, 0])), "3 labels for the 4 rows"),
        ("y_test", npy(np.array([0, 1, 0, 2])), "label 2 of row 3"),
        ("y_test", npy(np.array([None] * 4)), "not a readable .npy file"),
    ],
)
def test_faults_of_npy_files(folder: Path, name: str, content: bytes, message: str) -> None:
    for part in ("test", "val"):
        put(folder, f"higgs/X_num_{part}.npy", npy(np.zeros((4, 28), np.float32)))
        put(folder, f"higgs/y_{part}.npy", npy(np.array([0, 1, 0, 1])))
    put(folder, f"higgs/{name}.npy", content)
    with pytest.raises(datasets.DataError, match=message) as caught:
        datasets.load("higgs", folder)
    assert f"{name}.npy" in str(caught.value)


# --------------------------------------------------------------------------------------------------- the layouts


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("w1a", "w1a.bz2"), ("w1a", "w1a"), ("w1a", "w1a.txt"), ("w8a", "w8a.bz2"), ("a9a", "a9a"), ("a9a", "a9a.txt"),
        ("ijcnn1", "ijcnn1.bz2"), ("ijcnn1", "ijcnn1"), ("covtype", "covtype.libsvm.binary.bz2"),
        ("covtype", "covtype.libsvm.binary"), ("covtype", "covtype.libsvm.binary.scale.bz2"),
        ("segment", "segment.scale"), ("segment", "segment.scale.txt"), ("seismic", "seismic"),
        ("seismic", "seismic.bz2"), ("seismic", "seismic.scale"), ("seismic", "seismic_scale.bz2"), ("higgs", "HIGGS"),
        ("higgs", "HIGGS.bz2"), ("higgs", "HIGGS.xz"), ("higgs", "higgs/HIGGS.xz"),
    ],
)  # fmt: skip
def test_every_name_is_found(folder: Path, rng: np.random.Generator, name: str, file: str) -> None:
    dataset = shrink(name, 21)
    X = rng.integers(0, 2, (21, dataset.features)).astype(float)
    X[0], X[1] = 0, 1
    y = np.arange(21) % dataset.classes
    put(folder, file, libsvm(X, [dataset.labels[k] for k in y]))
    loaded = datasets.load_set(dataset, folder)
    scaled_here = dataset.interval == (-1.0, 1.0) and "scale" not in file
    assert np.array_equal(dense(loaded.X), 2 * X - 1 if scaled_here else X) and np.array_equal(loaded.y, y)
    assert scipy.sparse.issparse(loaded.X) == (name in ("w1a", "w8a", "a9a"))
    assert loaded.note == ("scaled by its publishers" if "scale" in file else "")


def test_the_catalogue_is_consistent() -> None:
    assert list(datasets.CATALOGUE) == [
        "w1a", "w8a", "a9a", "ijcnn1", "covtype", "higgs", "segment", "seismic", "mnist", "cifar10"
    ]  # fmt: skip
    for name, dataset in datasets.CATALOGUE.items():
        assert dataset.name == name and len(dataset.labels) == dataset.classes and dataset.files
        assert dataset.counts is None or (sum(dataset.counts), len(dataset.counts)) == (dataset.rows, dataset.classes)
        assert dataset.test_counts is None or sum(dataset.test_counts) == dataset.test_rows
        for layout in dataset.layouts:
            pieces = layout.members or layout.files
            assert len(layout.digests) in (0, len(pieces))
            assert all(len(digest) == 64 for digest in layout.digests)
        for file in dataset.files:
            assert file.url.startswith("https://") and file.url.endswith(Path(file.path).name)
            assert file.digest is None or len(file.digest) == len("sha256:") + 64


def test_unknown_names_parts_and_types(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"name = 'covtyp' is not .*did you mean 'covtype'\?"):
        datasets.load("covtyp", folder)
    with pytest.raises(ArgumentError, match="part = 'test' does not exist in tiny"):
        datasets.load_set(TINY, folder, part="test")
    for bad in ("int32", "no such type", "complex128"):
        with pytest.raises(ArgumentError, match=f"dtype = '{bad}'"):
            datasets.load_set(TINY, folder, dtype=bad)


def test_a_missing_set_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(datasets.DataError) as caught:
        datasets.load("a9a", folder)
    text = str(caught.value)
    assert (
        "sanc datasets get a9a" in text and str(folder / "a9a") in text and "https://" in text and "SANC_DATA" in text
    )
    monkeypatch.setenv("SANC_DATA", str(folder / "elsewhere"))
    with pytest.raises(datasets.DataError, match="elsewhere"):
        datasets.load("a9a")
    monkeypatch.delenv("SANC_DATA")
    with pytest.raises(datasets.DataError, match="user"):
        datasets.load("a9a")
    for row in datasets.available(folder):
        assert not row["present"] and row["where"].startswith("https://")
        assert set(row) == {"name", "rows", "features", "classes", "size", "present", "where", "note"}


def test_pooch_is_imported_late_and_named_where_it_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    put(folder, "tiny", TEXT)
    assert datasets.load_set(TINY, folder).classes == 2
    with pytest.raises(ImportError, match=r"pip install 'sanc\[lab\]'"):
        datasets.fetch(["a9a"], folder)


# ----------------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the name of each set that is parsed."""
    names: list[str] = []
    build = datasets._build

    def counted(dataset: DataSet, *rest: Any) -> Any:
        names.append(dataset.name)
        return build(dataset, *rest)

    monkeypatch.setattr(datasets, "_build", counted)
    return names


@pytest.mark.parametrize("sparse", [False, True])
def test_a_second_load_does_not_parse_and_a_changed_file_does(folder: Path, parses: list[str], sparse: bool) -> None:
    tiny = replace(TINY, sparse=sparse)
    path = put(folder, "tiny", TEXT)
    first = datasets.load_set(tiny, folder)
    second = datasets.load_set(tiny, folder)
    single = datasets.load_set(tiny, folder, dtype="float32")
    again = datasets.load_set(tiny, folder, dtype=np.float32)
    assert parses == ["tiny"]
    assert np.array_equal(dense(first.X), dense(second.X)) and np.array_equal(first.y, second.y)
    assert single.X.dtype == again.X.dtype == np.float32
    assert np.array_equal(dense(again.X), MATRIX.astype(np.float32))
    path.write_bytes(TEXT.replace(b"0.5", b"7.5"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert dense(datasets.load_set(tiny, folder).X)[0, 0] == 7.5
    assert len(parses) == 2
    (entry,) = (folder / "parsed").iterdir()
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["format"] == datasets.FORMAT and meta["rows"] == 4 and meta["counts"] == [2, 2]
    assert meta["sources"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert dense(first.X)[0, 0] == 0.5 or sys.platform == "win32"  # the old map still stands


def test_a_damaged_or_outdated_cache_is_parsed_anew(
    folder: Path, parses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "tiny", TEXT)
    datasets.load_set(TINY, folder)
    (entry,) = (folder / "parsed").iterdir()
    (entry / "X.npy").write_bytes((entry / "X.npy").read_bytes()[:-8])
    assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
    (entry / "meta.json").write_text("{")
    assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
    assert len(parses) == 3
    monkeypatch.setattr(datasets, "FORMAT", 999)
    datasets.load_set(TINY, folder)
    datasets.load_set(replace(TINY, interval=(0.0, 1.0)), folder)
    assert len(parses) == 5


def test_what_a_killed_process_left_is_swept(folder: Path) -> None:
    put(folder, "tiny", TEXT)
    old, new = folder / "parsed" / ".tiny-1-aa", folder / "parsed" / ".tiny-2-bb"
    for left in (old, new):
        left.mkdir(parents=True)
    os.utime(old, (0, 0))
    datasets.load_set(TINY, folder)
    assert not old.exists() and new.exists()


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "tiny", TEXT)
    folder.chmod(0o555)
    try:
        assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
        assert len(list((tmp_path / "user" / "sanc" / "parsed").iterdir())) == 1
        monkeypatch.setenv("SANC_CACHE", str(tmp_path / "own"))
        assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
        assert len(list((tmp_path / "own").iterdir())) == 1
        for path in ("other", "deeper/still/other"):
            other = replace(TINY, files=(RemoteFile("http://127.0.0.1:9/other", path),), layouts=())
            monkeypatch.setattr(datasets, "CATALOGUE", {"other": other})
            with pytest.raises(datasets.DataError, match="cannot be written"):
                datasets.fetch(["other"], folder)
        assert [path.name for path in folder.iterdir()] == ["tiny"]
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SANC_CACHE", str(tmp_path / "file"))
        with pytest.raises(datasets.DataError, match="SANC_CACHE"):
            datasets.load_set(TINY, folder)
    finally:
        folder.chmod(0o755)


def test_two_processes_at_once(folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    X = rng.normal(size=(500, 3))
    put(folder, "tiny", libsvm(X, [1, -1] * 250))
    script = textwrap.dedent(
        """
        import time
        from pathlib import Path
        from sanc.lab import datasets

        build = datasets._build

        def both(*arguments):  # wait until the other one has begun, so that both have parsed and both want to write
            result = build(*arguments)
            deadline = time.monotonic() + 60
            while len(list((Path(FOLDER) / "parsed").iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            return result

        datasets._build = both
        tiny = datasets.DataSet("tiny", 500, 3, 2, "binary", (), layouts=(datasets.Layout("libsvm", ("tiny",)),))
        total = float(datasets.load_set(tiny, FOLDER).X.sum())
        single = datasets.load_set(tiny, FOLDER, dtype="float32").X
        print(total, single.shape)
        """
    ).replace("FOLDER", repr(str(folder)))
    monkeypatch.setattr(datasets, "_build", datasets._build)  # restored after the test
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        own: dict[str, Any] = {}
        exec(script, own)  # this process is the second
        output, complaint = other.communicate(timeout=60)
    assert other.returncode == 0, complaint
    assert output == f"{own['total']} (500, 3)\n"
    assert own["total"] == pytest.approx(X.sum())
    (entry,) = (folder / "parsed").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == ["X-float32.npy", "X.npy", "meta.json", "y.npy"]


def test_progress_of_parsing_rises_to_the_whole(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "BLOCK", 5000)
    dataset, files, _ = tiny_cifar(rng)
    for name, content in files.items():
        put(folder, f"cifar10/{name}.xz", content)
    seen: list[tuple[str, int, int]] = []
    datasets.load_set(dataset, folder, progress=lambda *news: seen.append(news))
    total = sum((folder / f"cifar10/data_batch_{k}.bin.xz").stat().st_size for k in range(1, 6))
    done = [news[1] for news in seen]
    assert {(news[0], news[2]) for news in seen} == {("cifar10", total)}
    assert done == sorted(done) and done[-1] == total


def test_the_problems_take_what_is_loaded(folder: Path) -> None:
    put(folder, "tiny", TEXT)
    for sparse in (False, True):
        for dtype in ("float32", "float64"):
            loaded = datasets.load_set(replace(TINY, sparse=sparse), folder, dtype=dtype)
            problem = sanc.problems.Logistic(loaded.X, loaded.y, strength=0.1)
            assert problem.dtype == dtype
            assert problem.subset(np.array([0, 3])).value(np.ones(3, dtype)) > 0
            answer = sanc.minimize(problem, np.zeros(3, dtype), max_iter=20)
            assert answer.fun < problem.value(np.zeros(3, dtype))


# ------------------------------------------------------------------------------------------------------ downloads


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes by path; `cuts` says after how many bytes the next answers for a path break off."""

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
        wanted = self.headers.get("Range")
        server.requests.append((path, wanted))
        if server.statuses.get(path):
            self.send_error(server.statuses[path].pop(0))
            return
        if path not in server.content:
            self.send_error(404)
            return
        content = server.content[path]
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        start = 0
        if wanted and server.ranges and self.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
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
    """Make /tiny the one set of the catalogue."""

    def register(content: bytes = TEXT, digest: str | None = "right", rows: int = 4) -> None:
        server.content["/tiny"] = content
        if digest == "right":
            digest = "sha256:" + hashlib.sha256(content).hexdigest()
        file = RemoteFile(f"{server.url}/tiny", "tiny", len(content), digest)
        monkeypatch.setattr(datasets, "CATALOGUE", {"tiny": replace(TINY, rows=rows, files=(file,))})

    return register


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_fetch_and_load(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote()
    seen: list[tuple[str, int, int]] = []
    target = folder / "deep" / "er"
    datasets.fetch(["tiny"], target, progress=lambda *news: seen.append(news))
    assert names(target) == ["tiny"] and seen[-1] == ("tiny", len(TEXT), len(TEXT))
    assert datasets.load("tiny", target).y.tolist() == LABELS
    datasets.fetch("tiny", target)
    assert len(server.requests) == 1  # it was there
    (row,) = datasets.available(target)
    assert row["present"] and row["where"] == str(target / "tiny") and row["size"] == len(TEXT)


def test_fetch_goes_to_the_users_cache_by_default(tmp_path: Path, remote: Callable[..., None]) -> None:
    remote()
    datasets.fetch(["tiny"])
    assert (tmp_path / "user" / "sanc" / "tiny").read_bytes() == TEXT
    assert datasets.load("tiny").classes == 2


def test_fetch_leaves_what_is_there_in_another_form(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote()
    put(folder, "tiny.bz2", TEXT)
    datasets.fetch(["tiny"], folder)
    assert server.requests == [] and names(folder) == ["tiny.bz2"]


def test_fetch_replaces_a_damaged_file(folder: Path, remote: Callable[..., None]) -> None:
    remote()
    put(folder, "tiny", b"damaged")
    datasets.fetch(["tiny"], folder)
    assert (folder / "tiny").read_bytes() == TEXT


def test_a_wrong_checksum_leaves_nothing(folder: Path, remote: Callable[..., None]) -> None:
    remote(digest="sha256:" + "0" * 64)
    with pytest.raises(datasets.DataError, match="not the published file") as caught:
        datasets.fetch(["tiny"], folder)
    assert str(folder / "tiny") in str(caught.value) and "0" * 64 in str(caught.value)
    assert names(folder) == []


@pytest.mark.parametrize("digest", ["right", None])
def test_a_cut_connection_is_gone_on_with(
    folder: Path, server: Server, remote: Callable[..., None], digest: str | None
) -> None:
    remote(BIG, digest, 60_000)
    server.cuts["/tiny"] = [300_000] * 2
    datasets.fetch(["tiny"], folder)
    assert (folder / "tiny").read_bytes() == BIG and names(folder) == ["tiny"]
    ranges = [wanted for _, wanted in server.requests]
    assert ranges[0] is None and all(wanted for wanted in ranges[1:]) and len(ranges) == 3


def test_a_download_goes_on_in_the_next_call(
    folder: Path, server: Server, remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(BIG, None, 60_000)
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    server.cuts["/tiny"] = [400_000]
    with pytest.raises(datasets.DataError, match="put it at"):
        datasets.fetch(["tiny"], folder)
    assert names(folder) == ["tiny.part", "tiny.part.tag"]
    datasets.fetch(["tiny"], folder)
    assert names(folder) == ["tiny"] and (folder / "tiny").read_bytes() == BIG
    assert server.requests[-1][1] is not None


def test_a_file_that_has_changed_is_not_mixed_with_its_old_half(
    folder: Path, server: Server, remote: Callable[..., None]
) -> None:
    remote(BIG, None, 60_000)
    (folder / "tiny.part").write_bytes(b"x" * 1000)
    (folder / "tiny.part.tag").write_text('"old"')
    datasets.fetch(["tiny"], folder)
    assert (folder / "tiny").read_bytes() == BIG
    server.etag = False  # nothing to tell by but the checksum, which sees it and starts afresh
    (folder / "tiny").unlink()
    remote(BIG, rows=60_000)
    (folder / "tiny.part").write_bytes(b"x" * 1000)
    datasets.fetch(["tiny"], folder)
    assert (folder / "tiny").read_bytes() == BIG and names(folder) == ["tiny"]


@pytest.mark.parametrize("ranges", [False, True])
def test_a_server_that_cannot_go_on(folder: Path, server: Server, remote: Callable[..., None], ranges: bool) -> None:
    remote()
    server.ranges = ranges
    (folder / "tiny.part").write_bytes(b"x" * (len(TEXT) + 5))  # 416, or the whole again
    datasets.fetch(["tiny"], folder)
    assert (folder / "tiny").read_bytes() == TEXT and names(folder) == ["tiny"]


def test_a_busy_server_is_asked_again(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote()
    server.statuses["/tiny"] = [503, 429, 500]
    datasets.fetch(["tiny"], folder)
    assert len(server.requests) == 4 and names(folder) == ["tiny"]
    (folder / "tiny").unlink()
    server.statuses["/tiny"] = [503] * 99
    with pytest.raises(datasets.DataError, match="503"):
        datasets.fetch(["tiny"], folder)
    assert names(folder) == [] and len(server.requests) == 4 + download._ATTEMPTS


def test_a_file_that_is_not_there(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote()
    del server.content["/tiny"]
    with pytest.raises(datasets.DataError, match="404") as caught:
        datasets.fetch(["tiny"], folder)
    assert str(folder / "tiny") in str(caught.value) and server.url in str(caught.value)
    assert names(folder) == [] and len(server.requests) == 1


def test_a_web_page_is_not_taken_for_the_file(folder: Path, server: Server, remote: Callable[..., None]) -> None:
    remote(digest=None)
    server.kinds["/tiny"] = "text/html; charset=utf-8"
    with pytest.raises(datasets.DataError, match="a web page instead of the file"):
        datasets.fetch(["tiny"], folder)
    assert names(folder) == []


def test_offline(folder: Path, remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/tiny"
    monkeypatch.setattr(datasets, "CATALOGUE", {"tiny": replace(TINY, files=(RemoteFile(url, "tiny"),))})
    with pytest.raises(datasets.DataError, match="cannot be downloaded") as caught:
        datasets.fetch(["tiny"], folder)
    text = str(caught.value)
    assert url in text and f"put it at {folder / 'tiny'}" in text and "connection" in text
    assert names(folder) == []


def test_pauses_grow(
    folder: Path, server: Server, remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote()
    server.statuses["/tiny"] = [503] * 99
    pauses: list[float] = []
    monkeypatch.setattr(download, "_PAUSE", 0.5)
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    with pytest.raises(datasets.DataError):
        datasets.fetch(["tiny"], folder)
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_two_downloads_of_one_file_do_not_mix(folder: Path, remote: Callable[..., None]) -> None:
    fcntl = pytest.importorskip("fcntl")
    remote()
    with (folder / ".tiny.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(datasets.DataError, match="another process"):
            datasets.fetch(["tiny"], folder)
    datasets.fetch(["tiny"], folder)
    assert names(folder) == ["tiny"]


# ---------------------------------------------------------------------------------------------------- real files


@pytest.mark.skipif(REAL is None, reason="SANC_DATA is not set: no real data sets to check")
@pytest.mark.parametrize("name", list(datasets.CATALOGUE))
@pytest.mark.parametrize("part", ["train", "test"])
def test_real_sets(name: str, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REAL is not None
    monkeypatch.undo()
    dataset = datasets.CATALOGUE[name]
    if part == "test" and not dataset.test_rows:
        pytest.skip(f"{name} has no test part")
    if datasets._locate(dataset, Path(REAL), part) is None:
        pytest.skip(f"SANC_DATA does not hold {name}")
    loaded = datasets.load(name, part=part)
    counts = np.bincount(loaded.y, minlength=dataset.classes).tolist()
    rows, expected = (dataset.rows, dataset.counts) if part == "train" else (dataset.test_rows, dataset.test_counts)
    if loaded.note.startswith("subset"):
        rows, expected = len(loaded.y), None
    assert loaded.X.shape == (rows, dataset.features) and len(loaded.y) == rows
    assert len(counts) == dataset.classes == loaded.classes and min(counts) > 0
    assert expected is None or counts == list(expected)
    if dataset.task == "images" or name in ("covtype", "segment"):
        low, high = dataset.interval or (0.0, 1.0)
        assert loaded.X.min() == low and loaded.X.max() == high
