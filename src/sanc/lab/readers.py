"""Read the published formats: decompress the files, then parse them in blocks with scikit-learn and NumPy.

Every reader yields rows of X, dense or CSR, with the labels of the file. A fault in a file raises a `DataError` that
names the file, the line in a text file, and the remedy.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

from sanc import ArgumentError
from sanc.lab.catalogue import DataSet

Array: TypeAlias = npt.NDArray[Any]
Files: TypeAlias = Sequence[tuple["Source", Path]]
Chunks: TypeAlias = Iterator[tuple[Any, Array]]

BLOCK = 32 << 20
"""Bytes of LIBSVM text per block, 32 MiB: the largest set, HIGGS, does not fit into memory as text."""

OPENERS: dict[str, Callable[..., Any]] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
"""How to open a compressed file, by its suffix."""
_STREAM_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)
"""Errors of a truncated or damaged archive."""


class DataError(ArgumentError):
    """A data file is missing, damaged or of another format than expected."""


@dataclass(frozen=True)
class Source:
    """A file to read, compressed or not, or a member of a tar archive."""

    path: Path
    member: str = ""

    def error(self, fault: str, line: int | None = None) -> DataError:
        """Return an error with the place, the fault and the remedy."""
        place = f"{self.path} ({self.member})" if self.member else str(self.path)
        place += f", line {line}" if line else ""
        remedy = "The file may be damaged or be another one: remove it and fetch it again."
        return DataError(f"{place}: {fault}. {remedy}")


def unpack(source: Source, target: Path, *, text: bool) -> Path:
    """Return the path of the uncompressed content, which is `target` if the source is compressed."""
    plain = source.path
    if source.path.suffix in OPENERS:
        plain = target
        try:
            with _content(source) as stream, target.open("wb") as output:
                shutil.copyfileobj(stream, output)
        except _STREAM_ERRORS as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise source.error(f"the compressed stream is truncated, corrupt or of another kind ({error})") from error
    if plain.stat().st_size == 0:
        raise source.error("the file is empty")
    if text:  # without a line end, the last number may be truncated
        with plain.open("rb") as file:
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                raise source.error("the last line has no line end, so it may be truncated")
    return plain


@contextmanager
def _content(source: Source) -> Iterator[Any]:
    """Open a compressed file, or a member of an archive, for reading its content."""
    if not source.member:
        with OPENERS[source.path.suffix](source.path, "rb") as stream:
            yield stream
        return
    opened = OPENERS[source.path.suffix](source.path, "rb")
    with opened as stream, tarfile.TarFile(fileobj=_Bounded(stream)) as archive:
        members = [member for member in archive if member.name == source.member]
        if not members or not members[-1].isreg():
            raise source.error("the archive has no such member, or it is not a regular file")
        yield archive.extractfile(members[-1])


class _Bounded(io.RawIOBase):
    """A stream for tarfile that bounds the size of a read, which the headers of a malicious archive could choose."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell  # type: ignore[method-assign]

    def read(self, size: int = -1) -> bytes:
        """Read up to `BLOCK` bytes, far more than the headers of the published archives need."""
        if not 0 <= size <= BLOCK:
            raise tarfile.ReadError(f"a read of {size:,} bytes")
        return bytes(self.stream.read(size))


def checked(X: Any, labels: Array, dataset: DataSet) -> Array:
    """Return the classes of the labels, or raise a `ValueError` that describes the fault in these rows."""
    if X.shape[1] != dataset.features:
        raise ValueError(f"{X.shape[1]} columns instead of {dataset.features}")
    if not np.isfinite(X.data if scipy.sparse.issparse(X) else X).all():
        raise ValueError("a value is not finite")
    expected = np.array(dataset.labels)
    classes = np.minimum(np.searchsorted(expected, labels), len(expected) - 1)
    if len(bad := np.flatnonzero(expected[classes] != labels)):
        raise ValueError(f"the label {labels[bad[0]]:g} is not one of {', '.join(map(str, dataset.labels))}")
    return classes.astype(np.uint8)


def _parse(file: Any, dataset: DataSet, dtype: np.dtype[Any], offset: int = 0, length: int = -1) -> tuple[Any, Array]:
    """Return X and labels in a range of bytes, parsed by scikit-learn."""
    from sklearn.datasets import load_svmlight_file

    X, labels = load_svmlight_file(
        file, n_features=dataset.features, dtype=dtype, zero_based=False, offset=offset, length=length
    )
    checked(X, labels, dataset)
    return X, labels


def _libsvm(files: Files, dataset: DataSet, dtype: np.dtype[Any]) -> Chunks:
    """Read lines ``label index:value index:value …`` with increasing indices from 1, in blocks of bytes."""
    for source, path in files:
        size, begin = path.stat().st_size, 0
        with path.open("rb") as file:
            while begin < size:
                file.seek(begin + BLOCK)
                file.readline()
                while (line := file.readline()) and not line.split(b"#")[0].strip():
                    pass  # a block must end with a row, since scikit-learn reads past blank lines
                end, offset = file.tell(), max(begin - 1, 0)
                try:
                    yield _parse(str(path), dataset, dtype, offset, end - 1 - offset)
                except ValueError as error:
                    raise _located(source, file, begin, error, dataset, dtype) from error
                begin = end


def _located(source: Source, file: Any, begin: int, error: ValueError, *rest: Any) -> DataError:
    """Return an error for the first faulty line of the block that begins at a byte."""
    file.seek(position := 0)
    for number, line in enumerate(file, 1):
        position += len(line)
        if position > begin:
            try:
                _parse(io.BytesIO(line), *rest)
            except ValueError as fault:
                return source.error(str(fault).rstrip("."), number)
    return source.error(str(error).rstrip("."))


def _statlog(files: Files, dataset: DataSet, dtype: np.dtype[Any]) -> Chunks:
    """Read lines with the features and then the label."""
    for source, path in files:
        try:
            table = np.loadtxt(path, ndmin=2)
        except ValueError as error:
            raise source.error(f"not a table of numbers ({error})") from error
        yield table[:, :-1].astype(dtype), table[:, -1]


def _idx(files: Files, dataset: DataSet, dtype: np.dtype[Any]) -> Chunks:
    """Read the two files of MNIST: a magic number, the sizes, and the bytes."""
    arrays = []
    for (source, path), magic in zip(files, (2051, 2049), strict=True):
        axes = magic & 3
        number, *shape = np.fromfile(path, ">u4", axes + 1).tolist() or [0]
        content = np.fromfile(path, np.uint8)[4 * axes + 4 :]
        if number != magic:
            raise source.error(f"an idx file of this kind begins with the magic number {magic}, not {number}")
        if len(shape) < axes or len(content) != np.prod(shape):
            raise source.error("the size of the file differs from that in its header")
        arrays.append(content.reshape(shape))
    images, labels = arrays
    if len(labels) != len(images):
        raise files[1][0].error(f"{len(labels)} labels for {len(images)} images")
    yield np.divide(images.reshape(len(images), -1), 255, dtype=dtype), labels


def _cifar(files: Files, dataset: DataSet, dtype: np.dtype[Any]) -> Chunks:
    """Read records of a label byte and pixel bytes."""
    for source, path in files:
        content, width = np.fromfile(path, dtype=np.uint8), dataset.features + 1
        if len(content) % width:
            raise source.error(f"{len(content)} bytes are not a whole number of records of {width} bytes")
        records = content.reshape(-1, width)
        yield np.divide(records[:, 1:], 255, dtype=dtype), records[:, 0]


def _npy(files: Files, dataset: DataSet, dtype: np.dtype[Any]) -> Chunks:
    """Read pairs of .npy files, a matrix and its labels."""
    for (source, rows), (_, labels) in zip(files[0::2], files[1::2], strict=True):
        try:
            X, y = (np.lib.format.open_memmap(path, mode="r") for path in (rows, labels))
            if X.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
                raise ValueError(f"of {X.dtype} and {y.dtype} instead of numbers")
        except Exception as error:  # NumPy parses the header as Python, which can raise any exception
            raise source.error(f"it or {labels.name} is not a readable .npy file ({error})") from error
        if X.ndim != 2 or y.shape != X.shape[:1]:
            raise source.error(f"arrays of shape {X.shape} and {y.shape} are not rows and their labels")
        yield X.astype(dtype), y


READERS: dict[str, Callable[[Files, DataSet, np.dtype[Any]], Chunks]] = {
    "libsvm": _libsvm, "statlog": _statlog, "idx": _idx, "cifar": _cifar, "npy": _npy,
}  # fmt: skip
"""Readers by format. They take the sources with their uncompressed files, the set and the type, and yield chunks."""
