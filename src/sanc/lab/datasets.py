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
import importlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

from sanc.errors import ArgumentError, nearest
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
Part = Literal["train", "test"]
Progress: TypeAlias = Callable[[str, int, int], None]

FORMAT = 1
"""Version of the parsed form; another one is parsed anew."""

_ATTEMPTS = 5
_PAUSE = 0.5
_TIMEOUT = (10.0, 60.0)
_SUFFIXES = ("", ".txt", ".bz2", ".xz", ".gz", ".txt.bz2", ".txt.xz", ".txt.gz")


@dataclass(frozen=True)
class RemoteFile:
    """A file as it is published.

    Attributes
    ----------
    url : str
        Where it is.
    path : str
        Where it goes, relative to the data folder.
    size : int or None
        Bytes, where known.
    digest : str or None
        Checksum of the file, ``algorithm:hexdigits``, where one is published.
    parts : tuple of {"train", "test"}
        What is in it.
    """

    url: str
    path: str
    size: int | None = None
    digest: str | None = None
    parts: tuple[Part, ...] = ("train",)


@dataclass(frozen=True)
class Layout:
    """One of the forms in which a set may lie in the data folder.

    Attributes
    ----------
    reader : {"libsvm", "statlog", "idx", "cifar", "npy"}
        The format.
    files : tuple of str
        Names without the suffix of a compression; "a|b" stands for either.
    members : tuple of str
        What to read from the one file, an archive.
    digests : tuple of str
        SHA-256 of the content of each file or member after decompression, where published.
    part : {"train", "test"}
        What it holds.
    scaled : bool
        The publishers have scaled it already.
    subset : bool
        It holds some of the rows only.
    note : str
        What to tell the user.
    """

    reader: Literal["libsvm", "statlog", "idx", "cifar", "npy"]
    files: tuple[str, ...]
    members: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    part: Part = "train"
    scaled: bool = False
    subset: bool = False
    note: str = ""


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set.

    Attributes
    ----------
    name : str
        Key in `CATALOGUE`.
    rows, features, classes : int
        Size of the training part.
    task : {"binary", "multiclass", "images"}
        Kind of the problem.
    files : tuple of RemoteFile
        What `fetch` downloads.
    note : str
        What to tell the user.
    labels : tuple of int
        The labels in the files, in the order of the classes.
    counts : tuple of int or None
        Rows of each class, where known.
    test_rows : int
        Rows of the test part; 0 where there is none.
    test_counts : tuple of int or None
        The same of the test part.
    layouts : tuple of Layout
        The forms that `load` accepts, the best first.
    folders : tuple of str
        Further folders inside the data folder to look into.
    store : str
        Type of the entries on disk.
    sparse : bool
        Whether X is a CSR matrix.
    interval : (float, float) or None
        What each feature is mapped to.
    """

    name: str
    rows: int
    features: int
    classes: int
    task: Literal["binary", "multiclass", "images"]
    files: tuple[RemoteFile, ...]
    note: str = ""
    labels: tuple[int, ...] = (-1, 1)
    counts: tuple[int, ...] | None = None
    test_rows: int = 0
    test_counts: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = ()
    folders: tuple[str, ...] = ()
    store: str = "float64"
    sparse: bool = False
    interval: tuple[float, float] | None = None


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


def _catalogue() -> dict[str, DataSet]:
    site = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
    mnist = "https://ossci-datasets.s3.amazonaws.com/mnist"
    w1a = "0ae2b1c40f6a99061d1c6f4a1f3b50eea58a2f3b8bf851a337c25c2a65a49d32"
    w8a = "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2"
    a9a = "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906"
    ijcnn1 = "16506cad788cf7c9607454150ed1994788204bac2ff4c9cb3b320036b6950d3f"
    covtype = "6dc7eb75285900ec3a3f0332ab122f72bcfa60dc5a3db014e79d9414e98ccd1d"
    batches = (
        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    )
    batch = "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
    batch_names = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    bin_folder = "cifar-10-batches-bin"
    sets = (
        DataSet(
            "w1a", 2_477, 300, 2, "binary",
            (RemoteFile(f"{site}/binary/w1a", "w1a", 170_263, f"sha256:{w1a}"),),
            counts=(2_405, 72), sparse=True,
            layouts=(Layout("libsvm", ("w1a",), digests=(w1a,)),),
        ),
        DataSet(
            "w8a", 49_749, 300, 2, "binary",
            (RemoteFile(f"{site}/binary/w8a", "w8a", 3_478_238, f"sha256:{w8a}"),),
            counts=(48_270, 1_479), sparse=True,
            layouts=(Layout("libsvm", ("w8a",), digests=(w8a,)),),
        ),
        DataSet(
            "a9a", 32_561, 123, 2, "binary",
            (RemoteFile(f"{site}/binary/a9a", "a9a", 2_329_875, f"sha256:{a9a}"),),
            counts=(24_720, 7_841), sparse=True,
            layouts=(Layout("libsvm", ("a9a",), digests=(a9a,)),),
        ),
        DataSet(
            "ijcnn1", 49_990, 22, 2, "binary",
            (RemoteFile(
                f"{site}/binary/ijcnn1.bz2", "ijcnn1.bz2", 1_398_220,
                "sha256:450dee8470b168e47b9fae1fc160396b8a809c675737837fce3acd51dcdc0481",
            ),),
            counts=(45_137, 4_853),
            layouts=(Layout("libsvm", ("ijcnn1",), digests=(ijcnn1,)),),
        ),
        DataSet(
            "covtype", 581_012, 54, 2, "binary",
            (RemoteFile(
                f"{site}/binary/covtype.libsvm.binary.bz2", "covtype.libsvm.binary.bz2", 7_020_350,
                "sha256:fbcdd4f2ab981b598f2d9688860b20556b515770b1ed1b5629178e889cc4e89d",
            ),),
            note="each feature mapped to [0, 1]", labels=(1, 2), counts=(297_711, 283_301), interval=(0.0, 1.0),
            layouts=(
                Layout("libsvm", ("covtype.libsvm.binary",), digests=(covtype,)),
                Layout("libsvm", ("covtype.libsvm.binary.scale",), scaled=True, note="scaled by its publishers"),
            ),
        ),
        DataSet(
            "higgs", 11_000_000, 28, 2, "binary",
            (RemoteFile(f"{site}/binary/HIGGS.xz", "HIGGS.xz"),),
            note="a download of gigabytes", labels=(0, 1), store="float32",
            layouts=(
                Layout("libsvm", ("HIGGS",)),
                Layout("npy", ("X_num_test.npy", "y_test.npy", "X_num_val.npy", "y_val.npy"), subset=True),
            ),
        ),
        DataSet(
            "segment", 2_310, 19, 7, "multiclass",
            (RemoteFile(f"{site}/multiclass/segment.scale", "segment.scale"),),
            note="each feature mapped to [−1, 1]", labels=(1, 2, 3, 4, 5, 6, 7), counts=(330,) * 7,
            interval=(-1.0, 1.0),
            layouts=(
                Layout("statlog", ("segment.dat",)),
                Layout("libsvm", ("segment.scale",), scaled=True, note="scaled by its publishers"),
            ),
        ),
        DataSet(
            "seismic", 78_823, 50, 3, "multiclass",
            (RemoteFile(f"{site}/multiclass/vehicle/seismic.bz2", "seismic.bz2"),),
            labels=(1, 2, 3),
            layouts=(
                Layout("libsvm", ("seismic",)),
                Layout("libsvm", ("seismic.scale|seismic_scale",), scaled=True, note="scaled by its publishers"),
            ),
        ),
        DataSet(
            "mnist", 60_000, 784, 10, "images",
            (
                RemoteFile(
                    f"{mnist}/train-images-idx3-ubyte.gz", "mnist/train-images-idx3-ubyte.gz", 9_912_422,
                    "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                ),
                RemoteFile(
                    f"{mnist}/train-labels-idx1-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz", 28_881,
                    "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                ),
                RemoteFile(
                    f"{mnist}/t10k-images-idx3-ubyte.gz", "mnist/t10k-images-idx3-ubyte.gz", 1_648_877,
                    "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", ("test",),
                ),
                RemoteFile(
                    f"{mnist}/t10k-labels-idx1-ubyte.gz", "mnist/t10k-labels-idx1-ubyte.gz", 4_542,
                    "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", ("test",),
                ),
            ),
            labels=tuple(range(10)), test_rows=10_000, store="uint8", folders=("MNIST/raw",),
            counts=(5_923, 6_742, 5_958, 6_131, 5_842, 5_421, 5_918, 6_265, 5_851, 5_949),
            test_counts=(980, 1_135, 1_032, 1_010, 982, 892, 958, 1_028, 974, 1_009),
            layouts=(
                Layout(
                    "idx", ("train-images-idx3-ubyte|train-images.idx3-ubyte",
                            "train-labels-idx1-ubyte|train-labels.idx1-ubyte"),
                    digests=("ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                             "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
                ),
                Layout(
                    "idx", ("t10k-images-idx3-ubyte|t10k-images.idx3-ubyte",
                            "t10k-labels-idx1-ubyte|t10k-labels.idx1-ubyte"),
                    digests=("0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                             "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
                    part="test",
                ),
            ),
        ),
        DataSet(
            "cifar10", 50_000, 3_072, 10, "images",
            (RemoteFile(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz", 170_052_171,
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", ("train", "test"),
            ),),
            labels=tuple(range(10)), counts=(5_000,) * 10, test_rows=10_000, test_counts=(1_000,) * 10,
            store="uint8", folders=(bin_folder, f"cifar10/{bin_folder}"),
            layouts=(
                Layout("cifar", batch_names, digests=batches),
                Layout("cifar", ("test_batch.bin",), digests=(batch,), part="test"),
                Layout("cifar", ("cifar-10-binary.tar.gz",), tuple(f"{bin_folder}/{name}" for name in batch_names),
                       digests=batches),
                Layout("cifar", ("cifar-10-binary.tar.gz",), (f"{bin_folder}/test_batch.bin",), digests=(batch,),
                       part="test"),
            ),
        ),
    )  # fmt: skip
    return {dataset.name: dataset for dataset in sets}


CATALOGUE: Mapping[str, DataSet] = _catalogue()
"""Every set by name: w1a w8a a9a ijcnn1 covtype higgs segment seismic mnist cifar10."""


# ------------------------------------------------------------------------------------------------------- folders


def _pooch() -> Any:
    try:
        return importlib.import_module("pooch")
    except ImportError as problem:
        raise ImportError(
            f"The data sets need the module {problem.name!r} for downloads and for the user's cache folder: run  "
            "pip install 'sanc[lab]'  or set SANC_DATA and SANC_CACHE to folders of your own.",
            name=problem.name,
        ) from problem


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data files: `data_dir`, else $SANC_DATA, else a folder of the user's cache."""
    chosen = data_dir or os.environ.get("SANC_DATA")
    return Path(chosen).expanduser() if chosen else Path(_pooch().os_cache("sanc"))


def _writable(folder: Path) -> bool:
    """Whether files may be made in a folder; one without any write bit is left alone, even by root."""
    return folder.is_dir() and os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def _cache_folder(folder: Path) -> Path:
    own = os.environ.get("SANC_CACHE")
    if own:
        return Path(own).expanduser()
    beside = folder / "parsed"
    if _writable(beside if beside.is_dir() else folder):
        return beside
    return Path(_pooch().os_cache("sanc")) / "parsed"


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


class _AgainError(Exception):
    """The download did not come through; it may the next time."""


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
                _download(file, target, progress)


def _download(file: RemoteFile, target: Path, progress: Progress | None) -> None:
    pooch = _pooch()
    nearest_folder = next(path for path in target.parents if path.exists())
    if not _writable(nearest_folder) and not target.is_file():
        raise DataError(
            f"{target.parent} cannot be written, so {target.name} cannot be downloaded there: pass another data_dir or "
            "set SANC_DATA to a folder that can be written.",
            target,
        )
    download = _Resuming(file, target, progress)
    with _quiet(pooch):
        for attempt in range(2):
            resumed = download.pending > 0
            try:
                pooch.retrieve(
                    file.url, known_hash=file.digest, fname=target.name, path=target.parent, downloader=download
                )
                return
            except DataError:
                raise
            except ValueError as problem:  # the checksum; pooch has removed the file
                if attempt == 0 and resumed:  # two halves of different files
                    continue
                raise DataError(
                    f"{target.name}: what {file.url} sent is not the published file: its checksum is not "
                    f"{file.digest}. It was removed; fetch it again, or put a good copy at {target}.",
                    target,
                ) from problem
            except OSError as problem:
                raise DataError(f"{target} cannot be written ({problem}): check the disk.", target) from problem


@contextmanager
def _quiet(pooch: Any) -> Iterator[None]:
    logger: logging.Logger = pooch.get_logger()
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Resuming:
    """A downloader for pooch that keeps what has come in NAME.part and goes on from there."""

    def __init__(self, file: RemoteFile, target: Path, progress: Progress | None) -> None:
        self.file, self.target, self.progress = file, target, progress
        self.part = target.with_name(f"{target.name}.part")
        self.tag = target.with_name(f"{target.name}.part.tag")

    @property
    def pending(self) -> int:
        """Bytes of an earlier download that can be gone on with."""
        if not self.part.is_file() or not (self.file.digest or self._tag()):
            return 0
        return self.part.stat().st_size

    def _tag(self) -> str:
        try:
            return self.tag.read_text(encoding="latin-1").strip()
        except OSError:
            return ""

    def __call__(self, url: str, output_file: str, pooch: Any = None) -> None:
        requests = importlib.import_module("requests")
        best, failures = self.pending, 0
        with self._lock():
            while True:
                try:
                    self._get(requests, url)
                    break
                except (_AgainError, requests.exceptions.RequestException) as problem:
                    self._drop_if_empty()
                    if self.pending > best:
                        best, failures = self.pending, 0
                    failures += 1
                    if failures >= _ATTEMPTS or isinstance(problem, requests.exceptions.InvalidURL):
                        raise DataError(
                            f"{self.target.name}: {url} cannot be downloaded ({_reason(problem)}). Check the "
                            f"connection and fetch again, or get the file by other means and put it at {self.target}.",
                            self.target,
                        ) from problem
                    time.sleep(_PAUSE * 2 ** (failures - 1))
            self.tag.unlink(missing_ok=True)
            os.replace(self.part, output_file)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep a second process from writing into the same partial file, where the system can."""
        try:
            fcntl = importlib.import_module("fcntl")
        except ImportError:
            yield
            return
        lock = self.target.with_name(f".{self.target.name}.lock")
        with lock.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                raise DataError(
                    f"{self.target.name} is being downloaded by another process: wait for it.", self.target
                ) from problem
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)

    def _drop_if_empty(self) -> None:
        if self.part.is_file() and self.part.stat().st_size == 0:
            self._drop()

    def _drop(self) -> None:
        self.part.unlink(missing_ok=True)
        self.tag.unlink(missing_ok=True)

    def _get(self, requests: Any, url: str) -> None:
        have = self.pending
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if self._tag():
                headers["If-Range"] = self._tag()
        with requests.get(url, stream=True, headers=headers, timeout=_TIMEOUT) as answer:
            status: int = answer.status_code
            if status in (408, 429) or status >= 500:
                raise _AgainError(f"the server answers {status} {answer.reason}")
            if status == 416 or (status == 206 and not _begins(answer.headers.get("Content-Range", ""), have)):
                self._drop()
                raise _AgainError(f"the server cannot go on at byte {have}")
            if status not in (200, 206) or "text/html" in answer.headers.get("Content-Type", ""):
                self._drop()
                what = "a web page instead of the file" if status in (200, 206) else f"{status} {answer.reason}"
                raise DataError(
                    f"{self.target.name}: {url} answers {what}. It may have moved: get the file by other means and "
                    f"put it at {self.target}.",
                    self.target,
                )
            if status == 200:
                have = 0
                tag = answer.headers.get("ETag", "")
                tag = tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", "")
                self.tag.write_text(tag, encoding="latin-1")
            length = answer.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else 0
            with self.part.open("ab" if have else "wb") as output:
                for block in answer.iter_content(1 << 18):
                    output.write(block)
                    have += len(block)
                    if self.progress is not None:
                        self.progress(self.target.name, have, total)
            if total and have != total:
                raise _AgainError(f"the connection ended after {have} of {total} bytes")


def _begins(content_range: str, at: int) -> bool:
    return content_range.strip().startswith(f"bytes {at}-")


def _reason(problem: BaseException) -> str:
    text = str(problem)
    return f"{type(problem).__name__}: {text[:200]}" if text and not isinstance(problem, _AgainError) else text
