"""The data sets of the paper: where they come from, how to get them, and how to load them.

The files are kept in one folder under their usual names, compressed or not: the argument `data_dir`, else the
environment variable SANC_DATA, else a folder of the user's cache. What has been parsed is kept in binary form beside
them in ``parsed/``, or in the user's cache where the folder cannot be written, or in SANC_CACHE where that is set; it
is opened memory-mapped, so a second load takes no time, and it is parsed again when a file has changed.

Features are as distributed but for three things: covtype is mapped per feature to [0, 1] and segment to [−1, 1] (a
feature with one value only becomes 0, as in LIBSVM's svm-scale), and pixels are divided by 255. Labels are 0 … c − 1
in the order of the labels in the files; of two classes, the one with the larger label is 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

from sanc.errors import ArgumentError, nearest
from sanc.lab.catalogue import CATALOGUE, DataSet, Layout, Part, RemoteFile
from sanc.lab.download import Progress, download, pooch_module, writable
from sanc.lab.parsing import (
    ROWS,
    Builder,
    Content,
    DataError,
    NpyWriter,
    Source,
    read_cifar,
    read_idx,
    read_libsvm,
    read_npy,
    read_statlog,
)

__all__ = ["CATALOGUE", "DataError", "DataSet", "Layout", "Loaded", "RemoteFile", "available", "data_folder", "fetch",
           "load", "load_set"]  # fmt: skip

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 1
"""Version of the parsed form; another one is parsed anew."""

_SUFFIXES = ("", ".txt", ".bz2", ".xz", ".gz", ".txt.bz2", ".txt.xz", ".txt.gz")


@dataclass(frozen=True)
class Loaded:
    """A data set in memory, or mapped into it.

    Attributes
    ----------
    name : str
        Key in `CATALOGUE`.
    X : array or scipy.sparse.csr_matrix, shape (rows, features)
        Features, read-only and memory-mapped; images are rows of pixels (channel, height, width).
    y : array of int, shape (rows,)
        Labels 0 … classes − 1.
    classes : int
        Number of classes.
    note : str
        What is special about this copy, such as "subset: 35,298 of 11,000,000 rows"; often empty.
    """

    name: str
    X: Any
    y: Array
    classes: int
    note: str = ""


# ------------------------------------------------------------------------------------------------------- folders


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data files: `data_dir`, else $SANC_DATA, else a folder of the user's cache."""
    chosen = data_dir or os.environ.get("SANC_DATA")
    return Path(chosen).expanduser() if chosen else Path(pooch_module().os_cache("sanc"))


def _cache_folder(folder: Path) -> Path:
    own = os.environ.get("SANC_CACHE")
    if own:
        return Path(own).expanduser()
    beside = folder / "parsed"
    if writable(beside if beside.is_dir() else folder):
        return beside
    return Path(pooch_module().os_cache("sanc")) / "parsed"


def _find(name: str) -> DataSet:
    if name not in CATALOGUE:
        raise ArgumentError(f"name = {name!r} is not a data set of the catalogue: {nearest(str(name), CATALOGUE)}.")
    return CATALOGUE[name]


def _places(dataset: DataSet, folder: Path, layout: Layout, names: str) -> Iterator[Path]:
    """Yield the paths at which a file of the layout may lie."""
    exact = layout.reader == "npy" or layout.members
    for inner in ("", dataset.name, *dataset.folders):
        for name in names.split("|"):
            for suffix in ("",) if exact else _SUFFIXES:
                yield folder / inner / f"{name}{suffix}"


def _sources(dataset: DataSet, folder: Path, layout: Layout) -> list[Source] | None:
    """Return the files of a layout, or None where one is missing."""
    found = [next((p for p in _places(dataset, folder, layout, names) if p.is_file()), None) for names in layout.files]
    paths = [path for path in found if path is not None]
    if len(paths) < len(found):
        return None
    pieces = [(paths[0], member) for member in layout.members] if layout.members else [(path, "") for path in paths]
    digests = layout.digests or ("",) * len(pieces)
    return [Source(path, member, digest) for (path, member), digest in zip(pieces, digests, strict=True)]


def _locate(dataset: DataSet, folder: Path, part: Part, *, whole: bool = False) -> tuple[Layout, list[Source]] | None:
    for layout in dataset.layouts:
        if layout.part == part and not (whole and layout.subset):
            sources = _sources(dataset, folder, layout)
            if sources is not None:
                return layout, sources
    return None


# ---------------------------------------------------------------------------------------------------- the cache


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    dtype: npt.DTypeLike = "float64",
    part: Part = "train",
    progress: Progress | None = None,
) -> Loaded:
    """Load a data set of the catalogue.

    Parameters
    ----------
    name : str
        Key in `CATALOGUE`.
    data_dir : path, optional
        Folder of the files; by default $SANC_DATA, else a folder of the user's cache.
    dtype : {"float64", "float32"}
        Type of X.
    part : {"train", "test"}
        mnist and cifar10 have a test part.
    progress : callable, optional
        Called with the name, the bytes of the files read so far and their total while the files are parsed.

    Returns
    -------
    Loaded
        The set. It is parsed once; later loads map what is on disk.

    Raises
    ------
    DataError
        Where a file is missing, damaged or not what it should be; nothing is ever downloaded here.
    """
    return load_set(_find(name), data_dir, dtype=dtype, part=part, progress=progress)


def load_set(
    dataset: DataSet,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    dtype: npt.DTypeLike = "float64",
    part: Part = "train",
    progress: Progress | None = None,
) -> Loaded:
    """Load a set that need not be in the catalogue; see `load`."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ArgumentError(f'dtype = {dtype!r} cannot be used: pass "float64" or "float32".')
    parts = sorted({layout.part for layout in dataset.layouts}, reverse=True)
    if part not in parts:
        raise ArgumentError(f"part = {part!r} does not exist in {dataset.name}: choose from {', '.join(parts)}.")
    folder = data_folder(data_dir)
    found = _locate(dataset, folder, part)
    if found is None:
        raise _missing(dataset, folder, part)
    layout, sources = found
    cache = _cache_folder(folder)
    for _ in range(3):
        entry = _entry(dataset, layout, sources, cache, progress)
        with suppress(FileNotFoundError):  # another process has replaced it
            return _open(dataset, layout, entry, kind)
    raise DataError(f"{cache}: the parsed form of {dataset.name} vanishes as soon as it is written.", cache)


def _missing(dataset: DataSet, folder: Path, part: Part) -> DataError:
    wanted = [file for file in dataset.files if part in file.parts]
    files = "; ".join(f"{folder / file.path} from {file.url}" for file in wanted)
    return DataError(
        f"{dataset.name} is not in {folder}: run `sanc datasets get {dataset.name}`, or download by hand "
        f"{files}, or set SANC_DATA to the folder that holds it.",
        folder,
    )


def _entry(dataset: DataSet, layout: Layout, sources: list[Source], cache: Path, progress: Progress | None) -> Path:
    """Return the folder with the parsed form of these very files, after parsing them if need be."""
    paths = [source.path.resolve() for source in sources]
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    recipe = (dataset.rows, dataset.features, dataset.labels, dataset.counts, dataset.test_rows, dataset.test_counts,
              dataset.store, dataset.sparse, dataset.interval, layout)  # fmt: skip
    here = hashlib.sha256(repr([str(path) for path in paths]).encode()).hexdigest()[:10]
    key = hashlib.sha256(repr((FORMAT, recipe, state)).encode()).hexdigest()[:16]
    family = f"{dataset.name}-{layout.part}-{here}-"
    entry = cache / f"{family}{key}"
    if _valid(entry):
        return entry
    with _writing(cache, dataset.name):
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        scratch = _scratch(cache, dataset.name)
        scratch.mkdir()
    try:
        with _writing(cache, dataset.name):
            meta = _build(dataset, layout, sources, scratch, progress)
            if [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths] != [s[1:] for s in state]:
                raise DataError(f"{paths[0]} has changed while it was read: load it again.", paths[0])
            meta |= {
                "format": FORMAT,
                "sources": [
                    {"path": path, "bytes": size, "mtime_ns": mtime, "member": source.member, "sha256": digest}
                    for (path, size, mtime), source, digest in zip(state, sources, meta.pop("digests"), strict=True)
                ],
            }
            (scratch / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            _put(scratch, entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in cache.glob(f"{family}*"):
        if old != entry:
            shutil.rmtree(old, ignore_errors=True)
    return entry


@contextmanager
def _writing(cache: Path, name: str) -> Iterator[None]:
    """Say which folder cannot be written and what to do about it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise DataError(
            f"{cache}: the parsed form of {name} cannot be written there ({problem}): free some space, or set "
            "SANC_CACHE to another folder.",
            cache,
        ) from problem


def _scratch(folder: Path, name: str) -> Path:
    """Return a path for what is not finished, which no other process has."""
    return folder / f".{name}-{os.getpid()}-{secrets.token_hex(6)}"


def _sweep(cache: Path) -> None:
    """Remove what processes that were killed have left behind more than a day ago."""
    for old in cache.glob(".*-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > 86_400:
                shutil.rmtree(old, ignore_errors=True)


def _put(scratch: Path, entry: Path) -> None:
    """Move a finished folder into place; whoever comes second leaves the first one's there."""
    for _ in range(3):
        try:
            os.replace(scratch, entry)
            return
        except OSError:
            if _valid(entry):
                return
            shutil.rmtree(entry, ignore_errors=True)
    os.replace(scratch, entry)


def _valid(entry: Path) -> bool:
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        return all((entry / name).stat().st_size == size for name, size in meta["arrays"].items())
    except (OSError, ValueError, KeyError):
        return False


def _build(
    dataset: DataSet, layout: Layout, sources: list[Source], scratch: Path, progress: Progress | None
) -> dict[str, Any]:
    """Parse the files into a folder and return what is to be remembered of it."""
    test = layout.part == "test"
    known = dataset.test_counts if test else dataset.counts
    builder = Builder(
        scratch,
        dataset.name,
        features=dataset.features,
        labels=dataset.labels,
        rows=None if layout.subset else dataset.test_rows if test else dataset.rows,
        dtype=dataset.store,
        sparse=dataset.sparse,
        interval=None if layout.scaled else dataset.interval,
    )
    total = sum({source.path: source.path.stat().st_size for source in sources}.values())
    done = 0

    def report(position: int) -> None:
        if progress is not None:
            progress(dataset.name, min(done + position, total), total)

    digests: list[str] = []
    try:
        if layout.reader in ("idx", "npy"):
            for first, second in zip(sources[0::2], sources[1::2], strict=True):
                if layout.reader == "idx":
                    with Content(first, report) as images, Content(second) as labels:
                        digests += read_idx(images, labels, builder)
                else:
                    digests += read_npy(first, second, builder)
                done += first.path.stat().st_size + second.path.stat().st_size
                report(0)
        else:
            read = {"libsvm": read_libsvm, "statlog": read_statlog, "cifar": read_cifar}[layout.reader]
            for source in sources:
                with Content(source, report) as content:
                    digests.append(read(content, builder))
                if not source.member:
                    done += source.path.stat().st_size
        builder.finish(sources[-1], None if layout.subset else known)
    except BaseException:
        builder.abandon()
        raise
    if progress is not None:
        progress(dataset.name, total, total)
    return {
        "name": dataset.name,
        "part": layout.part,
        "rows": builder.done,
        "counts": builder.counts.tolist(),
        "digests": digests,
        "arrays": {path.name: path.stat().st_size for path in sorted(scratch.glob("*.npy"))},
    }


def _array(entry: Path, name: str, kind: np.dtype[Any]) -> Array:
    """Map an array of an entry in the wanted type; where it is stored in another, convert it once, on disk."""
    stored: Array = np.load(entry / f"{name}.npy", mmap_mode="r")
    if stored.dtype == kind:
        return stored
    converted = entry / f"{name}-{kind.name}.npy"
    if converted.is_file():
        done: Array = np.load(converted, mmap_mode="r")
        return done
    with _writing(entry, name):
        scratch = _scratch(entry, name)
        try:
            writer = NpyWriter(scratch, kind, stored.shape[1] if stored.ndim == 2 else None)
            try:
                for start in range(0, len(stored), ROWS // 4):
                    piece = stored[start : start + ROWS // 4]
                    writer.write(np.divide(piece, 255, dtype=kind) if stored.dtype == np.uint8 else piece)
                writer.close()
            finally:
                writer.abandon()
            os.replace(scratch, converted)
        finally:
            scratch.unlink(missing_ok=True)
    result: Array = np.load(converted, mmap_mode="r")
    return result


def _open(dataset: DataSet, layout: Layout, entry: Path, kind: np.dtype[Any]) -> Loaded:
    y = np.load(entry / "y.npy").astype(np.int64)
    X: Any
    if dataset.sparse:
        indptr = np.load(entry / "indptr.npy")
        indices = np.load(entry / "indices.npy", mmap_mode="r")
        shape = (len(y), dataset.features)
        X = scipy.sparse.csr_matrix((_array(entry, "data", kind), indices, indptr), shape=shape, copy=False)
        X.has_canonical_format = True  # so that nobody sorts the read-only arrays
    else:
        X = _array(entry, "X", kind)
    note = _subset_note(len(y), dataset) if layout.subset else layout.note
    return Loaded(dataset.name, X, y, dataset.classes, note)


def _subset_note(rows: int, dataset: DataSet) -> str:
    return f"subset: {rows:,} of {dataset.rows:,} rows"


def available(data_dir: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """List the catalogue and what of it is in the data folder.

    Parameters
    ----------
    data_dir : path, optional
        As in `load`.

    Returns
    -------
    list of dict
        One for each set: name, rows, features, classes, size (bytes of the download, None where not known), present,
        where (the path, or the URL where it is not present) and note.
    """
    folder = data_folder(data_dir)
    table = []
    for dataset in CATALOGUE.values():
        found = _locate(dataset, folder, "train")
        sizes = [file.size for file in dataset.files]
        note, where = dataset.note, dataset.files[0].url if dataset.files else ""
        if found is not None:
            layout, sources = found
            paths = list(dict.fromkeys(source.path for source in sources))
            where = str(paths[0] if len(paths) == 1 else paths[0].parent)
            if layout.subset:
                rows = sum(_npy_rows(path) for path in paths[0::2])
                note = _subset_note(rows, dataset)
            elif layout.note:
                note = layout.note
        table.append(
            {
                "name": dataset.name,
                "rows": dataset.rows,
                "features": dataset.features,
                "classes": dataset.classes,
                "size": None if None in sizes else sum(size or 0 for size in sizes),
                "present": found is not None,
                "where": where,
                "note": note,
            }
        )
    return table


def _npy_rows(path: Path) -> int:
    try:
        return len(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError, TypeError):
        return 0


# ------------------------------------------------------------------------------------------------------ download


def fetch(
    names: Iterable[str],
    data_dir: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Download data sets into the data folder.

    A set that is there already, in any form that `load` accepts, is left as it is; a subset does not count. A download
    that was cut goes on where it stopped, in this call (after growing pauses) or in the next one.

    Parameters
    ----------
    names : iterable of str
        Keys in `CATALOGUE`.
    data_dir : path, optional
        As in `load`.
    progress : callable, optional
        Called with the name of the file, the bytes that are there and their total (0 where the server does not tell).

    Raises
    ------
    DataError
        Where a file cannot be had, or is not the published one; the message says where to put it by hand.
    """
    sets = [_find(name) for name in ([names] if isinstance(names, str) else names)]
    folder = data_folder(data_dir)
    for dataset in sets:
        there = {part for part in ("train", "test") if _locate(dataset, folder, part, whole=True)}
        for file in dataset.files:
            target = folder / file.path
            if target.is_file() or not there.issuperset(file.parts):
                download(file, target, progress)
