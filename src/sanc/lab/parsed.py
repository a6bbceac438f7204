"""Store parsed data sets on disk as arrays with checksums, and map them into memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from sanc.lab.catalogue import DataSet, FileLayout
from sanc.lab.readers import READERS, Array, DataError, Source, checked, unpack

FORMAT = 3
"""Version of the parsed form. Data of another version are parsed again."""

ROWS = 1 << 16
"""Rows per block when features are scaled, which bounds the memory."""

_STALE_FOLDER_SECONDS = 86_400
"""Age in seconds from which a temporary folder is removed. Parsing the largest set takes less than a day."""

_verified: set[tuple[str, int, int]] = set()
"""Path, size and time of the files whose checksums this process has verified."""


def load(
    dataset: DataSet, layout: FileLayout, sources: Sequence[Source], cache: Path, dtype: np.dtype[Any]
) -> tuple[Any, Array]:
    """Return X and y of these files, which are parsed unless their parsed form is stored."""
    state = [_stamp(source.path.resolve()) for source in sources]
    paths, key = (
        hashlib.sha256(repr(content).encode()).hexdigest()[:12]
        for content in ([path for path, _, _ in state], (FORMAT, dataset, layout, state))
    )
    family = f"{dataset.name}-{dtype.name}-{paths}"
    entry = cache / f"{family}-{key}"
    try:
        if not entry.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            outdated = list(cache.glob(f"{family}-*"))
            _write(dataset, layout, sources, entry, dtype)
            for old in outdated:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{cache}: the parsed form of {dataset.name} cannot be written ({error}): free some space, or set "
            "SANC_CACHE to another folder."
        ) from error
    return _open(entry, dataset)


def _stamp(path: Path) -> tuple[str, int, int]:
    return str(path), path.stat().st_size, path.stat().st_mtime_ns


def _write(dataset: DataSet, layout: FileLayout, sources: Sequence[Source], entry: Path, dtype: np.dtype[Any]) -> None:
    """Parse the files into a temporary folder and rename it to `entry`. Stale temporary folders are removed."""
    for old in entry.parent.glob(".*-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_FOLDER_SECONDS:
                shutil.rmtree(old)
    temporary = tempfile.TemporaryDirectory(prefix=f".{dataset.name}-", dir=entry.parent, ignore_cleanup_errors=True)
    with temporary as name:
        scratch = Path(name)
        _build(dataset, layout, sources, scratch, dtype)
        digests = {path.name: _digest(path) for path in sorted(scratch.glob("*.np*"))}
        (scratch / "meta.json").write_text(json.dumps({"sha256": digests}), encoding="utf-8")
        scratch.chmod(0o755)
        with suppress(OSError):  # another process wrote the entry first
            os.rename(scratch, entry)


def _build(dataset: DataSet, layout: FileLayout, sources: Sequence[Source], folder: Path, dtype: np.dtype[Any]) -> None:
    """Parse the files and write X and y."""
    text, last = layout.reader in ("libsvm", "statlog"), sources[-1]
    rows = None if layout.subset else dataset.rows
    files = [(source, unpack(source, folder / f"plain-{k}", text=text)) for k, source in enumerate(sources)]
    pieces: list[Any] = []
    ys: list[Array] = []
    X, done = None, 0
    if not dataset.sparse and rows is not None:
        X = np.lib.format.open_memmap(folder / "X.npy", "w+", dtype, (rows, dataset.features))
    for part, raw in READERS[layout.reader](files, dataset, dtype):
        if rows is not None and done + len(raw) > rows:
            raise last.error(f"{dataset.name} has more than its {rows} rows")
        try:
            ys.append(checked(part, raw, dataset))
        except ValueError as error:
            raise last.error(str(error)) from error
        if X is None:
            pieces.append(part)
        else:
            X[done : done + len(raw)] = part.toarray() if scipy.sparse.issparse(part) else part
        done += len(raw)
    if rows is not None and done != rows:
        raise last.error(f"{dataset.name} ends after {done} rows instead of {rows}")
    y = np.concatenate(ys)
    counts = np.bincount(y, minlength=dataset.classes).tolist()
    if 0 in counts:
        raise last.error(f"the classes of {dataset.name} have {counts} rows instead of at least one of each")
    if dataset.sparse:
        scipy.sparse.save_npz(folder / "X.npz", scipy.sparse.vstack(pieces, format="csr"), compressed=False)
    elif X is None:
        np.save(folder / "X.npy", np.concatenate(pieces))
    else:
        if dataset.interval is not None and not layout.scaled:
            _scale(X, *dataset.interval)
        X.flush()
    np.save(folder / "y.npy", y)
    for path in folder.glob("plain-*"):
        path.unlink()


def _scale(X: Array, low: float, high: float) -> None:
    """Map each column to [low, high]; a constant column becomes 0."""
    blocks = [slice(begin, begin + ROWS) for begin in range(0, len(X), ROWS)]
    least = np.min([X[block].min(axis=0) for block in blocks], axis=0)
    spread = np.max([X[block].max(axis=0) for block in blocks], axis=0) - least
    for block in blocks:
        scaled = low + (high - low) * ((X[block] - least) / np.where(spread == 0, 1, spread))
        X[block] = np.where(spread == 0, 0, scaled)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(entry: Path, dataset: DataSet) -> tuple[Any, Array]:
    """Open X and y of an entry. Their checksums are verified once per process."""
    try:
        digests = json.loads((entry / "meta.json").read_text(encoding="utf-8"))["sha256"]
        for name in ("X.npz" if dataset.sparse else "X.npy", "y.npy"):
            stamp = _stamp(entry / name)
            if stamp not in _verified and _digest(entry / name) != digests[name]:
                raise ValueError(f"{name} has changed since it was written")
            _verified.add(stamp)
        y = np.load(entry / "y.npy").astype(np.int64)
        if dataset.sparse:
            X = scipy.sparse.csr_matrix(scipy.sparse.load_npz(entry / "X.npz"))
            X.check_format(full_check=True)  # an invalid index would read beyond the arrays
        else:
            X = np.load(entry / "X.npy", mmap_mode="r")
        if X.shape != (len(y), dataset.features) or not 0 <= y.min() <= y.max() < dataset.classes:
            raise ValueError(f"{X.shape} numbers and labels from {y.min()} to {y.max()} do not fit")
        return X, y
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = f"the parsed form of {dataset.name} is damaged ({type(error).__name__}: {error})"
        raise DataError(f"{entry}: {reason}: remove that folder.") from error
