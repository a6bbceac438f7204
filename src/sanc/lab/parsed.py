"""The parsed form of a data set on disk: arrays to map into memory, their checksums, and what they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from sanc.lab.catalogue import DataSet, Layout
from sanc.lab.download import Progress
from sanc.lab.readers import READERS, Array, DataError, Source, unpack

FORMAT = 2
"""Version of the parsed form; another one is parsed anew."""

ROWS = 1 << 16
"""Rows that are scaled at a time."""

_verified: set[tuple[str, int, int]] = set()


def load(
    dataset: DataSet, layout: Layout, sources: Sequence[Source], cache: Path, dtype: np.dtype[Any],
    progress: Progress | None,
) -> tuple[Any, Array]:  # fmt: skip
    """Return X and y of these very files, after parsing them if need be."""
    state = _state(sources)
    here, key = (
        hashlib.sha256(repr(content).encode()).hexdigest()[:12]
        for content in ([path for path, _, _ in state], (FORMAT, dataset, layout, state))
    )
    family = f"{dataset.name}-{layout.part}-{dtype.name}-{here}-"
    entry = cache / f"{family}{key}"
    if not entry.is_dir():
        with _writing(cache, dataset.name):
            cache.mkdir(parents=True, exist_ok=True)
            for old in cache.glob(".*-*"):  # what processes that were killed have left behind
                if time.time() - old.stat().st_mtime > 86_400:
                    shutil.rmtree(old, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{dataset.name}-", dir=cache))
            try:
                meta = _build(dataset, layout, sources, scratch, dtype, progress)
                if _state(sources) != state:
                    raise DataError(f"{state[0][0]} has changed while it was read: load it again.", sources[0].path)
                (scratch / "meta.json").write_text(json.dumps(meta | {"sources": state}, indent=1), encoding="utf-8")
                with suppress(OSError):  # another process was faster
                    scratch.chmod(0o755)
                    os.rename(scratch, entry)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            for old in cache.glob(f"{family}*"):
                if old != entry:
                    shutil.rmtree(old, ignore_errors=True)
    return _open(entry, dataset)


def _state(sources: Sequence[Source]) -> list[tuple[str, int, int]]:
    stats = [(source.path.resolve(), source.path.stat()) for source in sources]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


@contextmanager
def _writing(cache: Path, name: str) -> Iterator[None]:
    """Say which folder cannot be written and what to do about it."""
    try:
        yield
    except OSError as problem:
        raise DataError(
            f"{cache}: the parsed form of {name} cannot be written there ({problem}): free some space, or set "
            "SANC_CACHE to another folder.",
            cache,
        ) from problem


def _build(
    dataset: DataSet, layout: Layout, sources: Sequence[Source], folder: Path, dtype: np.dtype[Any],
    progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    """Parse the files into a folder and return what is to be remembered of it."""
    test = layout.part == "test"
    rows = None if layout.subset else dataset.test_rows if test else dataset.rows
    text = layout.reader in ("libsvm", "statlog")
    files = [(source, unpack(source, folder / f"plain-{k}", text=text)) for k, source in enumerate(sources)]
    pieces, ys, done, last = [], [], 0, sources[-1]
    X = None
    if not dataset.sparse and rows is not None:
        X = np.lib.format.open_memmap(folder / "X.npy", "w+", dtype, (rows, dataset.features))
    for part, raw in READERS[layout.reader](files, dataset, dtype):
        if part.shape[1] != dataset.features:
            raise last.error(f"{part.shape[1]} columns instead of {dataset.features}")
        if rows is not None and done + len(raw) > rows:
            raise last.error(f"{dataset.name} has more than its {rows} rows")
        if not scipy.sparse.issparse(part) and not np.isfinite(part).all():
            raise last.error("a value is not finite")
        if X is None:
            pieces.append(part)
        else:
            X[done : done + len(raw)] = part.toarray() if scipy.sparse.issparse(part) else part
        ys.append(_classes(raw, dataset, last))
        done += len(raw)
        if progress is not None:
            progress(dataset.name, done, rows or 0)
    y = np.concatenate(ys) if ys else np.zeros(0, dtype=np.uint8)
    counts = np.bincount(y, minlength=dataset.classes).tolist()
    known = None if layout.subset else dataset.test_counts if test else dataset.counts
    if rows is not None and done != rows:
        raise last.error(f"{dataset.name} ends after {done} rows instead of {rows}")
    if (known is not None and counts != list(known)) or 0 in counts:
        wanted = f"{list(known)}" if known is not None else "at least one of each"
        raise last.error(f"the classes of {dataset.name} have {counts} rows instead of {wanted}")
    if dataset.sparse:
        matrix = scipy.sparse.vstack(pieces, format="csr")
        for name in ("data", "indices", "indptr"):
            np.save(folder / f"{name}.npy", getattr(matrix, name))
    elif X is None:
        np.save(folder / "X.npy", np.concatenate(pieces))
    else:
        if dataset.interval is not None and not layout.scaled:
            _scale(X, *dataset.interval)
        X.flush()
    np.save(folder / "y.npy", y)
    for path in folder.glob("plain-*"):
        path.unlink()
    digests = {path.name: _digest(path) for path in sorted(folder.glob("*.npy"))}
    return {"name": dataset.name, "part": layout.part, "rows": done, "counts": counts, "sha256": digests}


def _classes(raw: Array, dataset: DataSet, source: Source) -> Array:
    """Turn labels of the file into class numbers."""
    labels = np.array(dataset.labels)
    place = np.minimum(np.searchsorted(labels, raw), len(labels) - 1)
    if len(bad := np.flatnonzero(labels[place] != raw)):
        raise source.error(f"the label {raw[bad[0]]:g} is not one of {', '.join(map(str, dataset.labels))}")
    return place.astype(np.uint8)


def _scale(X: Array, low: float, high: float) -> None:
    """Map each column to [low, high]; one with a single value becomes 0."""
    blocks = [slice(begin, begin + ROWS) for begin in range(0, len(X), ROWS)]
    least = np.min([X[block].min(axis=0) for block in blocks], axis=0)
    spread = np.max([X[block].max(axis=0) for block in blocks], axis=0) - least
    for block in blocks:
        scaled = low + (high - low) * ((X[block] - least) / np.where(spread == 0, 1, spread))
        X[block] = np.where(spread == 0, 0, scaled)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(entry: Path, dataset: DataSet) -> tuple[Any, Array]:
    """Map the arrays of an entry, after comparing them with their checksums."""

    def damaged(what: str) -> DataError:
        return DataError(f"{entry}: the parsed form of {dataset.name} is damaged ({what}): remove that folder.", entry)

    try:
        known = json.loads((entry / "meta.json").read_text(encoding="utf-8"))["sha256"]
        for name, digest in known.items():
            path = entry / name
            stamp = (str(path), path.stat().st_size, path.stat().st_mtime_ns)
            if stamp not in _verified:
                if _digest(path) != digest:
                    raise damaged(f"{name} has another checksum than when it was written")
                _verified.add(stamp)
        arrays = {Path(name).stem: np.lib.format.open_memmap(entry / name, mode="r") for name in known}
        y = np.array(arrays["y"], dtype=np.int64)
        if not dataset.sparse:
            return arrays["X"], y
        data, indices, indptr = (arrays[name] for name in ("data", "indices", "indptr"))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        if isinstance(problem, DataError):
            raise
        raise damaged(f"{type(problem).__name__}: {problem}") from problem
    inside = len(indices) == 0 or (indices.min() >= 0 and indices.max() < dataset.features)
    if not inside or len(data) != len(indices) or indptr[-1] != len(data) or len(indptr) != len(y) + 1:
        raise damaged("an index lies outside the matrix")
    X = scipy.sparse.csr_matrix((data, indices, indptr), shape=(len(y), dataset.features), copy=False)
    X.has_canonical_format = True  # so that nobody sorts the read-only arrays
    return X, y
