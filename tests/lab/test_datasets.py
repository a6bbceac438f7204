"""Data sets: formats, errors, layouts and the cache."""

from __future__ import annotations

import io
import os
import re
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import sanc
from sanc import ArgumentError
from sanc.lab import datasets, parsed, readers
from sanc.lab.catalogue import DataSet
from tiny_data import COMPRESS, LABELS, TEXT, TINY, put

pooch = pytest.importorskip("pooch")
pytestmark = pytest.mark.usefixtures("folders_of_the_test")


MATRIX = np.array([[0.5, 0, 2], [0, 0, 0], [0, -1e-3, 0], [1, 2, 3]])


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
    """Return a set of the catalogue with fewer rows."""
    return replace(datasets.CATALOGUE[name], rows=rows, **changes)


@pytest.mark.parametrize("suffix", ["", ".txt", ".bz2", ".gz", ".xz"])
@pytest.mark.parametrize("sparse", [False, True])
def test_libsvm_text_is_read_with_every_compression(folder: Path, suffix: str, sparse: bool) -> None:
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
    monkeypatch.setattr(readers, "BLOCK", block)
    X = rng.normal(size=(60, 5)) * 10.0 ** rng.integers(-300, 300, (60, 5)) * (rng.random((60, 5)) < 0.5)
    y = rng.integers(0, 2, 60)
    text = libsvm(X, 2 * y - 1).replace(b"\n", ends)
    put(folder, "tiny.bz2", text.replace(ends, ends + ends, 3))  # blank lines are ignored
    for sparse in (False, True):
        loaded = datasets.load_set(replace(TINY, rows=60, features=5, sparse=sparse), folder)
        assert np.array_equal(dense(loaded.X), X)  # to the last bit
        assert np.array_equal(loaded.y, y)


FAULTS = (b"1 4:1", b"1 0:1", b"1 -1:1", b"1 2:1 1:1", b"1 2:1 2:1", b"1 1.5:1", b"1 :2", b"1 1:abc", b"1 1:",
          b"1 1:1e", b"1 1:nan", b"1 1:1e999", b"1 1", b"3 1:1", b"0.5 1:1", b"x 1:1", b"1:1 2:1", b"<html>",
          b"\xff\xfe1")  # fmt: skip


@pytest.mark.parametrize("block", [8, 1 << 20])
@pytest.mark.parametrize("line", FAULTS, ids=lambda line: line.decode("latin-1"))
def test_errors_name_the_faulty_line(folder: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, block: int) -> None:
    monkeypatch.setattr(readers, "BLOCK", block)
    path = put(folder, "tiny", b"-1 1:0.5 3:2\n\n+1\n" + line + b"\n-1\n")
    with pytest.raises(datasets.DataError, match=r"line 4: .*remove it and fetch it again") as caught:
        datasets.load_set(TINY, folder)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ArgumentError)
    assert not list((folder / "parsed").iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: TEXT.rindex(b"1 1:1")], "ends after 3 rows instead of 4"),
        (TEXT + b"1 1:1\n", "more than its 4 rows"),
        (TEXT[:-1], "no line end"),
        (TEXT.replace(b"-1", b"1"), r"\[0, 4\] rows instead of at least one of each"),
        (b"", "empty"),
        (b"\n\n", "ends after 0 rows"),
    ],
)
def test_rows_and_classes_must_be_those_of_the_catalogue(folder: Path, text: bytes, message: str) -> None:
    for sparse in (False, True):
        put(folder, "tiny", text)
        with pytest.raises(datasets.DataError, match=message):
            datasets.load_set(replace(TINY, sparse=sparse), folder)


@pytest.mark.parametrize("suffix", [".bz2", ".gz", ".xz"])
def test_a_damaged_compressed_file_is_an_error(folder: Path, rng: np.random.Generator, suffix: str) -> None:
    whole = COMPRESS[suffix](libsvm(rng.normal(size=(4, 3)), [1, -1, 1, -1]))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    path = folder / f"tiny{suffix}"
    for content in (whole[: len(whole) // 2], whole[:-1], bytes(damaged), b"<!DOCTYPE html>"):
        path.write_bytes(content)
        with pytest.raises(datasets.DataError, match="remove it and fetch it again") as caught:
            datasets.load_set(TINY, folder)
        assert path.name in str(caught.value)
    path.unlink()
    put(folder, f"tiny{suffix}", TEXT).rename(folder / "tiny")  # compressed, but without the suffix
    with pytest.raises(datasets.DataError, match="tiny"):
        datasets.load_set(TINY, folder)


def test_features_are_scaled_and_constant_ones_become_zero(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "ROWS", 3)
    X = np.array([[1.0, -5, 9], [2, 0, 9], [5, 5, 9], [3, 2.5, 9]])
    put(folder, "tiny", libsvm(X, [1, -1, 1, -1]))
    zero_one = datasets.load_set(replace(TINY, interval=(0.0, 1.0)), folder).X
    assert np.array_equal(zero_one, [[0, 0, 0], [0.25, 0.5, 0], [1, 1, 0], [0.5, 0.75, 0]])
    both = datasets.load_set(replace(TINY, interval=(-1.0, 1.0)), folder).X
    assert np.array_equal(both, [[-1, -1, 0], [-0.5, 0, 0], [1, 1, 0], [0, 0.5, 0]])


def tiny_mnist(rng: np.random.Generator) -> tuple[DataSet, dict[str, bytes], np.ndarray, np.ndarray]:
    pixels, y = rng.integers(0, 256, (20, 784)).astype(np.uint8), np.arange(20) % 10
    files = {
        "train-images-idx3-ubyte": idx(pixels),
        "train-labels-idx1-ubyte": idx_labels(y),
    }
    return shrink("mnist", 20), files, pixels, y


@pytest.mark.parametrize("pattern", ["mnist/{}.gz", "{}", "MNIST/raw/{}"])
def test_mnist_is_loaded_from_every_layout(folder: Path, rng: np.random.Generator, pattern: str) -> None:
    dataset, files, pixels, y = tiny_mnist(rng)
    for name, content in files.items():
        put(folder, pattern.format(name), content)
    loaded = datasets.load_set(dataset, folder)
    assert np.array_equal(loaded.X, pixels / 255) and np.array_equal(loaded.y, y)
    single = datasets.load_set(dataset, folder, dtype="float32")
    assert single.X.dtype == np.float32 and isinstance(single.X, np.memmap)
    assert np.array_equal(single.X, pixels / np.float32(255)) and np.array_equal(single.y, y)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("images", lambda b: b"\x00\x00\x08\x01" + b[4:], "magic number 2051"),
        ("images", lambda b: b[:7], "differs from that in its header"),
        ("images", lambda b: b[:-5], "differs from that in its header"),
        ("images", lambda b: b + b"\x00", "differs from that in its header"),
        ("images", lambda b: b[:4] + struct.pack(">I", 19) + b[8:], "differs from that in its header"),
        ("images", lambda b: b[:8] + struct.pack(">2I", 14, 14) + b[16:], "differs from that in its header"),
        ("labels", lambda b: b"\x00\x00\x08\x03" + b[4:], "magic number 2049"),
        ("labels", lambda b: b[:4] + struct.pack(">I", 19) + b[8:-1], "19 labels for 20 images"),
        ("labels", lambda b: b[:-1] + b"\x0a", "the label 10 is not one of"),
        ("labels", lambda b: b[:-1], "differs from that in its header"),
    ],
)
def test_errors_for_invalid_idx_files(
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
    return shrink("cifar10", 20), files, records


@pytest.mark.parametrize("pattern", ["cifar10/{}.xz", "cifar-10-batches-bin/{}", "tar"])
def test_cifar_is_loaded_from_every_layout(folder: Path, rng: np.random.Generator, pattern: str) -> None:
    dataset, files, records = tiny_cifar(rng)
    if pattern == "tar":
        backwards = {f"cifar-10-batches-bin/{name}": files[name] for name in reversed(files)}
        (folder / "cifar-10-binary.tar.gz").write_bytes(tar(backwards))
    else:
        for name, content in files.items():
            put(folder, pattern.format(name), content)
    loaded = datasets.load_set(dataset, folder)
    assert np.array_equal(loaded.X, records[:, 1:] / 255) and np.array_equal(loaded.y, records[:, 0])
    assert loaded.classes == 10


def test_errors_for_invalid_cifar_files(folder: Path, rng: np.random.Generator) -> None:
    dataset, files, records = tiny_cifar(rng)
    for name, content in files.items():
        put(folder, name, content)
    third = folder / "data_batch_3.bin"
    for content, message in (
        (third.read_bytes()[:-1], "are not a whole number of records of 3073 bytes"),
        (third.read_bytes()[:-3073], "ends after 19 rows instead of 20"),
        (b"\xc8" + third.read_bytes()[1:], "the label 200 is not one of"),
        (third.read_bytes() + records[0].tobytes(), "more than its 20 rows"),
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


def test_segment_is_loaded_from_statlog_text(folder: Path, rng: np.random.Generator) -> None:
    X, y = rng.normal(size=(14, 19)), np.arange(14) % 7
    X[:, 2] = 9
    text = "".join(" ".join(map(repr, row.tolist())) + f" {label + 1}\n" for row, label in zip(X, y, strict=True))
    put(folder, "segment.dat.bz2", text.encode())
    loaded = datasets.load_set(shrink("segment", 14), folder)
    spread = np.ptp(X, axis=0) + (np.ptp(X, axis=0) == 0)
    expected = 2 * (X - X.min(axis=0)) / spread - 1
    expected[:, 2] = 0
    assert np.allclose(loaded.X, expected, atol=1e-15) and np.array_equal(loaded.y, y) and loaded.classes == 7
    for old, new, message in (
        (" 3\n", "\n", "number of columns changed from 20 to 19 at row 3"),
        (" 3\n", " 9\n", "the label 9 is not one of"),
        (" 3\n", " x\n", "'x' to float64 at row 2"),
        (" 9.0 ", " nan ", "a value is not finite"),
        (text[:40], text[:40].replace(" ", "\n", 1), "columns"),
    ):
        put(folder, "segment.dat.bz2", text.replace(old, new, 1).encode())
        with pytest.raises(datasets.DataError, match=message):
            datasets.load_set(shrink("segment", 14), folder)


def test_the_higgs_subset_is_noted_and_the_whole_set_is_preferred(
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
    assert row["present"] and row["note"] == "a subset" and row["where"] == str(folder / "higgs")
    put(folder, "HIGGS.xz", libsvm(X[:6].astype(float), y[:6]))
    whole = datasets.load_set(shrink("higgs", 6), folder, dtype="float32")
    assert whole.note == "" and whole.X.dtype == np.float32 and np.array_equal(whole.X, X[:6])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("X_num_test", npy(np.zeros((4, 27), np.float32)), "27 columns instead of 28"),
        ("X_num_test", npy(np.full((4, 28), np.nan, np.float32)), "a value is not finite"),
        ("X_num_test", npy(np.zeros((4, 28), np.float32))[:-9], r"X_num_test.npy: .*not a readable .npy file"),
        ("X_num_test", npy(np.zeros(4)), "not rows and their labels"),
        ("X_num_test", b"PK\x03\x04", "not a readable .npy file"),
        ("y_test", npy(np.array([0, 1, 0])), r"\(4, 28\) and \(3,\) are not rows"),
        ("y_test", npy(np.array([0, 1, 0, 2])), "the label 2 is not one of 0, 1"),
        ("y_test", npy(np.array([None] * 4)), r"y_test.npy is not a readable .npy file"),
    ],
)
def test_errors_for_invalid_npy_files(folder: Path, name: str, content: bytes, message: str) -> None:
    for part in ("test", "val"):
        put(folder, f"higgs/X_num_{part}.npy", npy(np.zeros((4, 28), np.float32)))
        put(folder, f"higgs/y_{part}.npy", npy(np.array([0, 1, 0, 1])))
    put(folder, f"higgs/{name}.npy", content)
    with pytest.raises(datasets.DataError, match=message):
        datasets.load("higgs", folder)


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
def test_every_file_name_is_found(folder: Path, rng: np.random.Generator, name: str, file: str) -> None:
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
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
    listed, bundled = page.split("## Data\n")[1].split("`breast_cancer`")[0], page.split("need no download")[0]
    assert re.findall(r"`(\w+)`", listed) == list(datasets.CATALOGUE)
    assert all(f"`{name}`" in bundled for name in datasets.BUNDLED)
    for name, dataset in datasets.CATALOGUE.items():
        assert dataset.name == name and dataset.files and dataset.layouts
        for file in dataset.files:
            assert file.url.startswith("https://") and file.url.endswith(Path(file.path).name)
            assert file.digest is None or len(file.digest) == len("sha256:") + 64


def test_errors_for_unknown_names_and_types(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"name = 'covtyp' is not known.*did you mean 'covtype'\?"):
        datasets.load("covtyp", folder)
    for bad in ("int32", "no such type", "complex128"):
        with pytest.raises(ArgumentError, match=f"dtype = '{bad}'"):
            datasets.load_set(TINY, folder, dtype=bad)


def test_the_error_for_a_missing_set_contains_the_remedies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the name of each set that is parsed."""
    names: list[str] = []
    build = parsed._build

    def counted(dataset: DataSet, *rest: Any) -> Any:
        names.append(dataset.name)
        return build(dataset, *rest)

    monkeypatch.setattr(parsed, "_build", counted)
    return names


@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_is_parsed_again_only_if_it_changed(folder: Path, parses: list[str], sparse: bool) -> None:
    tiny = replace(TINY, sparse=sparse)
    path = put(folder, "tiny", TEXT)
    first, second = (datasets.load_set(tiny, folder) for _ in range(2))
    assert parses == ["tiny"]
    assert np.array_equal(dense(first.X), dense(second.X)) and np.array_equal(first.y, second.y)
    single, again = (datasets.load_set(tiny, folder, dtype=dtype) for dtype in ("float32", "float32"))
    assert single.X.dtype == again.X.dtype == np.float32 and len(parses) == 2
    assert np.array_equal(dense(again.X), MATRIX.astype(np.float32))
    path.write_bytes(TEXT.replace(b"0.5", b"7.5"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert dense(datasets.load_set(tiny, folder).X)[0, 0] == 7.5
    assert dense(first.X)[0, 0] == 0.5  # the old memory map is unchanged
    assert len(parses) == 3 and len(list((folder / "parsed").iterdir())) == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_a_damaged_cache_is_an_error_with_a_remedy(
    folder: Path, parses: list[str], monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    tiny = replace(TINY, sparse=sparse)
    put(folder, "tiny", TEXT)
    datasets.load_set(tiny, folder)
    (entry,) = (folder / "parsed").iterdir()
    for name in sorted(path.name for path in entry.iterdir()):
        whole = (entry / name).read_bytes()
        for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-8], b""):
            (entry / name).write_bytes(content)
            with pytest.raises(datasets.DataError, match=r"is damaged.*remove that folder") as caught:
                datasets.load_set(tiny, folder)
            assert str(entry) in str(caught.value)
        (entry / name).write_bytes(whole)
    datasets.load_set(tiny, folder)
    assert len(parses) == 1
    monkeypatch.setattr(parsed, "FORMAT", 999)
    datasets.load_set(tiny, folder)
    assert len(parses) == 2


def test_stale_temporary_folders_are_removed(folder: Path) -> None:
    put(folder, "tiny", TEXT)
    old, new = folder / "parsed" / ".tiny-1-aa", folder / "parsed" / ".tiny-2-bb"
    for temporary in (old, new):
        temporary.mkdir(parents=True)
    os.utime(old, (0, 0))
    datasets.load_set(TINY, folder)
    assert not old.exists() and new.exists()


def test_read_only_folders_use_another_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "tiny", TEXT)
    folder.chmod(0o555)
    try:
        assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
        assert len(list((tmp_path / "user" / "sanc" / "parsed").iterdir())) == 1
        monkeypatch.setenv("SANC_CACHE", str(tmp_path / "cache"))
        assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
        assert len(list((tmp_path / "cache").iterdir())) == 1
        assert [path.name for path in folder.iterdir()] == ["tiny"]
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(datasets, "CATALOGUE", {"tiny": TINY})
        with pytest.raises(datasets.DataError, match=r"cannot be written.*SANC_DATA"):
            datasets.fetch(["tiny"], tmp_path / "file")
        monkeypatch.setenv("SANC_CACHE", str(tmp_path / "file"))
        with pytest.raises(datasets.DataError, match="SANC_CACHE"):
            datasets.load_set(TINY, folder)
    finally:
        folder.chmod(0o755)


def test_a_concurrent_parse_uses_the_entry_written_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "tiny", TEXT)
    build = parsed._build

    def overtaken(*rest: Any) -> Any:
        monkeypatch.setattr(parsed, "_build", build)
        datasets.load_set(TINY, folder)  # as another process might do
        return build(*rest)

    monkeypatch.setattr(parsed, "_build", overtaken)
    assert np.array_equal(datasets.load_set(TINY, folder).X, MATRIX)
    assert len(list((folder / "parsed").iterdir())) == 1


def test_loaded_data_can_be_minimised_over(folder: Path) -> None:
    put(folder, "tiny", TEXT)
    for sparse in (False, True):
        for dtype in ("float32", "float64"):
            loaded = datasets.load_set(replace(TINY, sparse=sparse), folder, dtype=dtype)
            problem = sanc.problems.Logistic(loaded.X, loaded.y, strength=0.1)
            assert problem.dtype == dtype
            result = sanc.minimize(problem, np.zeros(3, dtype), max_iter=20)
            assert result.fun < problem.value(np.zeros(3, dtype))
