"""Readers of the published file formats, which stream, check everything and name the file and line of what is wrong.

LIBSVM text, Statlog text, idx, CIFAR's binary records and .npy files are read in pieces of bounded size and appended to
.npy files, so that a set larger than the memory can be parsed.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import math
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sanc.errors import ArgumentError

__all__ = ["Builder", "Content", "DataError", "NpyWriter", "Source", "read_cifar", "read_idx", "read_libsvm",
           "read_npy", "read_statlog"]  # fmt: skip

Array: TypeAlias = npt.NDArray[Any]

BLOCK = 8 << 20
"""Bytes of text that are parsed at a time."""

ROWS = 1 << 16
"""Rows that are scaled or converted at a time."""

LONGEST_LINE = 64 << 20

_REMEDY = "The file may be damaged or be another one: remove it and fetch it again."
_MAGIC = {".bz2": b"BZh", ".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00"}
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)


class DataError(ArgumentError):
    """A data file is missing, damaged or not what its name says; the message names it, and the line where it has any.

    Attributes
    ----------
    path : Path or None
        The file.
    line : int or None
        The line of a text file, counted from 1.
    """

    def __init__(self, message: str, path: Path | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


@dataclass(frozen=True)
class Source:
    """A file to read, compressed or not, or a member of an archive.

    Attributes
    ----------
    path : Path
        The file.
    member : str
        Name inside the tar archive `path`; empty for a file of its own.
    digest : str
        SHA-256 of the content after decompression (of text: with line ends LF and without blank lines), or empty.
    """

    path: Path
    member: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.member})" if self.member else str(self.path)

    def error(self, what: str, line: int | None = None) -> DataError:
        """Return the error that says what is wrong, where, and what to do."""
        place = f"{self}, line {line}" if line else str(self)
        return DataError(f"{place}: {what}. {_REMEDY}", self.path, line)


class Content:
    """The decompressed bytes of a source; a truncated or corrupt stream becomes an error that names the file.

    Parameters
    ----------
    source : Source
        What to read.
    report : callable, optional
        Called with the bytes consumed of the file on disk.
    """

    def __init__(self, source: Source, report: Callable[[int], None] | None = None) -> None:
        self.source = source
        self.where = ""
        self._report = report
        self._hash = hashlib.sha256()
        self._open: list[Any] = []
        try:
            raw = source.path.open("rb")
            self._open.append(raw)
            self._raw = raw
            self._stream = self._decompress(raw)
        except _BROKEN as problem:
            self.close()
            raise self._failure(problem) from problem
        except BaseException:
            self.close()
            raise

    def _decompress(self, raw: IO[bytes]) -> Any:
        source, head = self.source, raw.read(8)
        raw.seek(0)
        if not head:
            raise source.error("the file is empty")
        suffix = source.path.suffix if source.path.suffix in _MAGIC else ""
        actual = next((key for key, magic in _MAGIC.items() if head.startswith(magic)), "")
        if suffix and suffix != actual:
            raise source.error(f"the name says {suffix[1:]}, but the file begins with {head!r}")
        if actual and not suffix:
            raise source.error(f"the file is compressed and its name does not say so: it should end in {actual}")
        if source.member:
            archive = tarfile.open(fileobj=raw, mode=f"r:{suffix[1:]}")  # type: ignore[call-overload]  # noqa: SIM115
            self._open.append(archive)
            found = next((info for info in archive if info.name == source.member), None)  # stops there
            stream = archive.extractfile(found) if found is not None else None
            if stream is None:
                raise source.error("the archive has no such member")
        elif suffix:
            stream = _OPENERS[suffix](raw)
        else:
            return raw
        self._open.append(stream)
        return stream

    def _failure(self, problem: BaseException) -> DataError:
        if isinstance(problem, FileNotFoundError | PermissionError):
            return DataError(f"{self.source}: {problem.strerror}: check the file.", self.source.path)
        cut = isinstance(problem, EOFError)
        what = "the compressed stream ends too early" if cut else "the compressed stream is corrupt"
        return self.source.error(f"{what}{self.where} ({problem})")

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""
        pieces: list[bytes] = []
        while size > 0:
            try:
                piece: bytes = self._stream.read(size)
            except _BROKEN as problem:
                raise self._failure(problem) from problem
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        if self._report is not None:
            self._report(self._raw.tell())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def digest(self, data: bytes) -> None:
        """Count `data` towards the checksum of the content."""
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def verify(self) -> str:
        """Compare the checksum with the published one, where there is one, and return it."""
        if self.source.digest and self.sha256 != self.source.digest:
            raise self.source.error(
                f"the content differs from the published file: its SHA-256 is {self.sha256} instead of "
                f"{self.source.digest}"
            )
        return self.sha256

    def close(self) -> None:
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> Content:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NpyWriter:
    """A .npy file that grows along its first axis and never is in memory.

    Parameters
    ----------
    path : Path
        The file to write.
    dtype : dtype
        Type of the entries.
    columns : int, optional
        Columns of a matrix; None for a vector.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, columns: int | None = None) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.columns = columns
        self.rows = 0
        self._file = path.open("wb")
        self._header()

    def _header(self) -> int:
        shape = (self.rows,) if self.columns is None else (self.rows, self.columns)
        fields = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, fields)  # leaves room for a longer first axis
        return self._file.tell()

    def write(self, piece: Array) -> None:
        piece = np.ascontiguousarray(piece, dtype=self.dtype)
        if piece.size:
            self._file.write(piece.data)
        self.rows += len(piece)

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.seek(0)
        end = self._header()
        self._file.close()
        width = self.dtype.itemsize * (1 if self.columns is None else self.columns)
        if self.path.stat().st_size != end + self.rows * width:
            raise OSError(f"{self.path} was not written wholly: check the free space of the disk.")

    def abandon(self) -> None:
        self._file.close()


class Builder:
    """Takes the rows of a set as the readers deliver them and writes its arrays into a folder.

    Parameters
    ----------
    folder : Path
        Where X.npy (or data.npy, indices.npy and indptr.npy) and y.npy go.
    name : str
        The set, for messages.
    features : int
        Columns.
    labels : sequence of int
        The labels of the files in the order of the classes 0, 1, 2 …
    rows : int or None
        Rows the set must have; None takes what comes.
    dtype : dtype
        Type of the entries on disk.
    sparse : bool
        Write CSR rather than a dense matrix.
    interval : (float, float) or None
        Map each feature linearly to this interval at the end; a feature with one value only becomes 0.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        features: int,
        labels: Sequence[int],
        rows: int | None,
        dtype: npt.DTypeLike = "float64",
        sparse: bool = False,
        interval: tuple[float, float] | None = None,
    ) -> None:
        self.folder, self.name, self.features, self.labels = folder, name, features, tuple(labels)
        self.rows, self.sparse, self.interval = rows, sparse, interval
        self.done = 0
        self.counts = np.zeros(len(self.labels), dtype=np.int64)
        self._nonzeros = 0
        self._low: Array = np.full(features, math.inf)
        self._high: Array = np.full(features, -math.inf)
        files: dict[str, tuple[npt.DTypeLike, int | None]] = {"y": ("uint8", None)}
        if sparse:
            files |= {"data": (dtype, None), "indices": ("int32", None), "indptr": ("int64", None)}
        else:
            files |= {"X": (dtype, features)}
        self._writers = {key: NpyWriter(folder / f"{key}.npy", *form) for key, form in files.items()}
        if sparse:
            self._writers["indptr"].write(np.zeros(1, dtype=np.int64))

    @property
    def room(self) -> float:
        """How many rows may still come."""
        return math.inf if self.rows is None else self.rows - self.done

    def classify(self, raw: Array) -> Array:
        """Turn labels of the file into class numbers; −1 marks a label that is not expected."""
        y = np.full(len(raw), -1, dtype=np.int16)
        for number, label in enumerate(self.labels):
            y[raw == label] = number
        return y

    def _count(self, y: Array) -> None:
        self._writers["y"].write(y)
        self.counts += np.bincount(y, minlength=len(self.labels))
        self.done += len(y)

    def add_dense(self, X: Array, y: Array) -> None:
        """Append rows of a dense matrix and their class numbers."""
        if self.interval is not None:
            np.minimum(self._low, X.min(axis=0, initial=math.inf), out=self._low)
            np.maximum(self._high, X.max(axis=0, initial=-math.inf), out=self._high)
        self._writers["X"].write(X)
        self._count(y)

    def add_entries(self, per_row: Array, columns: Array, values: Array, y: Array) -> None:
        """Append rows as (column, value) pairs, `per_row` of them for each."""
        if not self.sparse:
            X = np.zeros((len(y), self.features))
            X[np.repeat(np.arange(len(y)), per_row), columns] = values
            self.add_dense(X, y)
            return
        self._writers["data"].write(values)
        self._writers["indices"].write(columns)
        self._writers["indptr"].write(self._nonzeros + np.cumsum(per_row))
        self._nonzeros += len(values)
        self._count(y)

    def add_images(self, source: Source, y: Array) -> None:
        """Append the labels of images, which are written apart."""
        bad = np.flatnonzero(y >= len(self.labels))
        if bad.size:
            raise source.error(
                f"record {self.done + int(bad[0]) + 1} has the label {int(y[bad[0]])}, not one of 0 to "
                f"{len(self.labels) - 1}"
            )
        if len(y) > self.room:
            raise source.error(f"the records are more than the {self.rows} of {self.name}")
        self._count(y)

    def add_pixels(self, pixels: Array) -> None:
        """Append rows of X alone; `add_images` brings their labels."""
        self._writers["X"].write(pixels)

    def finish(self, source: Source, counts: Sequence[int] | None) -> None:
        """Check the numbers against what is known of the set, close the files and scale.

        Parameters
        ----------
        source : Source
            The file to name in an error.
        counts : sequence of int, optional
            Rows of each class that the set is known to have.
        """
        if self.rows is not None and self.done != self.rows:
            raise source.error(f"{self.name} ends after {self.done} rows instead of {self.rows}")
        found = self.counts.tolist()
        if counts is not None and found != list(counts):
            raise source.error(f"the classes of {self.name} have {found} rows instead of {list(counts)}")
        if 0 in found:
            missing = self.labels[found.index(0)]
            raise source.error(f"no row of {self.name} has the label {missing}")
        for writer in self._writers.values():
            writer.close()
        if self.interval is not None:
            self._scale(*self.interval)

    def _scale(self, low: float, high: float) -> None:
        X = np.load(self.folder / "X.npy", mmap_mode="r+")
        spread = self._high - self._low
        constant = spread == 0
        spread[constant] = 1
        for start in range(0, len(X), ROWS):
            piece = X[start : start + ROWS]
            scaled = low + (high - low) * ((piece - self._low) / spread)
            scaled[:, constant] = 0
            piece[:] = scaled
        X.flush()

    def abandon(self) -> None:
        """Close the files without finishing them."""
        for writer in self._writers.values():
            writer.abandon()


# ---------------------------------------------------------------------------------------------------------- text

_NUMERIC, _SPACE, _LINE_END, _COLON, _OTHER = range(5)
_KIND = np.full(256, _OTHER, dtype=np.uint8)
_KIND[list(b"0123456789+-.eE")] = _NUMERIC
_KIND[list(b" \t\r")] = _SPACE
_KIND[ord("\n")] = _LINE_END
_KIND[ord(":")] = _COLON
_BLANKS = bytes.maketrans(b":\n\r\t", b"    ")


def _blocks(content: Content) -> Iterator[bytes]:
    """Yield pieces of text that end with a line."""
    rest = b""
    while block := content.read(BLOCK):
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
        if len(rest) > LONGEST_LINE:
            raise content.source.error("the file has a line of more than 64 MiB, so it is not the text it should be")
    if rest:
        if not content.source.digest:  # nothing else could tell whether the last number is whole
            raise content.source.error("the last line has no line end, so it may be cut")
        yield rest + b"\n"


def _digest_text(content: Content, text: bytes) -> None:
    """Count text towards the checksum with line ends LF and without blank lines."""
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    if text.startswith(b"\n") or b"\n\n" in text:
        text = b"".join(line for line in text.splitlines(keepends=True) if line.strip())
    content.digest(text)


@dataclass(frozen=True)
class _Rows:
    """What a piece of LIBSVM text says: class numbers, and the (column, value) pairs of all rows one after another."""

    y: Array
    per_row: Array
    columns: Array
    values: Array


def _numbers(text: bytes) -> Array | None:
    """All numbers of a text of numbers and blanks, or None where something in it is not a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(text.translate(_BLANKS), sep=" ")
        except (DeprecationWarning, ValueError):
            return None


def _parse(text: bytes, builder: Builder) -> _Rows | None:
    """Parse lines of LIBSVM text all at once; None where any of them is irregular."""
    kind = _KIND[np.frombuffer(text, dtype=np.uint8)]
    if kind.max() == _OTHER:
        return None
    numeric = kind == _NUMERIC
    starts = numeric.copy()
    starts[1:] &= ~numeric[:-1]
    tokens = np.flatnonzero(starts)
    line_ends = np.flatnonzero(kind == _LINE_END)
    counts = np.diff(np.searchsorted(tokens, line_ends), prepend=0)
    counts = counts[counts > 0]
    if np.any(counts % 2 == 0):
        return None
    colons = np.flatnonzero(kind == _COLON)
    is_value = kind[tokens - 1] == _COLON
    if not numeric[colons - 1].all() or np.count_nonzero(is_value) != len(colons):
        return None
    label_at = np.cumsum(counts) - counts
    is_label = np.zeros(len(tokens), dtype=bool)
    is_label[label_at] = True
    pairs = is_value[~is_label]
    if is_value[label_at].any() or pairs[0::2].any() or not pairs[1::2].all():
        return None
    numbers = _numbers(text) if len(tokens) else np.zeros(0)
    if numbers is None or len(numbers) != len(tokens):
        return None
    y = builder.classify(numbers[label_at])
    entries = numbers[~is_label]
    index, values = entries[0::2], entries[1::2]
    if y.min(initial=0) < 0 or not np.isfinite(values).all():
        return None
    if index.size and not (index.min() >= 1 and index.max() <= builder.features):
        return None
    columns = index.astype(np.int64)
    per_row = (counts - 1) // 2
    rising = columns[1:] > columns[:-1]
    borders = np.cumsum(per_row)[:-1]
    rising[borders[(borders > 0) & (borders < len(columns))] - 1] = True
    if not rising.all() or not np.array_equal(columns, index):
        return None
    return _Rows(y, per_row, columns - 1, values)


def _number(token: bytes) -> float:
    return float(token) if b"_" not in token else math.nan


def _fault(line: bytes, builder: Builder) -> str | None:
    """Say what is wrong with a line of LIBSVM text."""
    label, *entries = line.split()
    expected = ", ".join(str(known) for known in builder.labels)
    shown = label[:40].decode("latin-1")
    try:
        if _number(label) not in builder.labels:
            return f"the label {shown!r} is not one of {expected}"
    except ValueError:
        return f"the label {shown!r} is not a number"
    last = 0
    for entry in entries:
        shown = entry[:60].decode("latin-1")
        key, colon, number = entry.partition(b":")
        if not colon:
            return f"{shown!r} is not of the form index:value"
        try:
            index = _number(key)
            if not index.is_integer():
                raise ValueError
        except ValueError:
            return f"the feature index of {shown!r} is not an integer"
        if not 1 <= index <= builder.features:
            return (
                f"the feature index of {shown!r} is out of range: {builder.name} has features 1 to {builder.features}"
            )
        if index <= last:
            return f"the feature index of {shown!r} does not exceed the one before it, {last}"
        try:
            if not math.isfinite(_number(number)):
                return f"the value of {shown!r} is not finite"
        except ValueError:
            return f"the value of {shown!r} is not a number"
        last = int(index)
    return None


def _line_of_row(text: bytes, row: int) -> int:
    """Return the number, from 1, of the line that holds this row (from 0), blank lines counted."""
    lines = [number for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    return lines[row]


def _check_room(text: bytes, rows: int, before: int, builder: Builder, source: Source) -> None:
    if rows > builder.room:
        line = before + _line_of_row(text, int(builder.room))
        raise source.error(f"a row too many: {builder.name} has {builder.rows} rows", line)


def read_libsvm(content: Content, builder: Builder) -> str:
    """Read LIBSVM text, ``label index:value index:value …`` with rising indices from 1, and return its SHA-256."""
    before = 0
    for text in _blocks(content):
        rows = _parse(text, builder)
        if rows is None:
            lines = text.split(b"\n")
            for number, line in enumerate(lines, before + 1):
                what = _fault(line, builder) if line.strip() else None
                if what:
                    raise content.source.error(what, number)
            raise content.source.error(
                f"the lines up to {before + len(lines) - 1} are not LIBSVM text; one has a character or number that "
                "cannot be read",
                before + 1,
            )
        _check_room(text, len(rows.y), before, builder, content.source)
        builder.add_entries(rows.per_row, rows.columns, rows.values, rows.y)
        _digest_text(content, text)
        before += text.count(b"\n")
        content.where = f" after line {before}"
    return content.verify()


def read_statlog(content: Content, builder: Builder) -> str:
    """Read Statlog text, the features and then the label in each line, and return its SHA-256."""
    before = 0
    for text in _blocks(content):
        rows: list[list[float]] = []
        for number, line in enumerate(text.split(b"\n"), before + 1):
            tokens = line.split()
            if not tokens:
                continue
            if len(tokens) != builder.features + 1:
                raise content.source.error(
                    f"{len(tokens)} numbers instead of {builder.features} features and a label", number
                )
            try:
                row = [_number(token) for token in tokens]
            except ValueError as problem:
                raise content.source.error(f"a value is not a number ({problem})", number) from None
            if not all(map(math.isfinite, row)):
                raise content.source.error("a value is not finite", number)
            if row[-1] not in builder.labels:
                expected = ", ".join(map(str, builder.labels))
                raise content.source.error(f"the label {tokens[-1].decode()!r} is not one of {expected}", number)
            rows.append(row)
        _check_room(text, len(rows), before, builder, content.source)
        matrix = np.array(rows, dtype=np.float64).reshape(len(rows), builder.features + 1)
        builder.add_dense(matrix[:, :-1], builder.classify(matrix[:, -1]))
        _digest_text(content, text)
        before += text.count(b"\n")
        content.where = f" after line {before}"
    return content.verify()


# -------------------------------------------------------------------------------------------------------- binary


def _header(content: Content, magic: int, fields: int) -> list[int]:
    head = content.read(4 * (fields + 1))
    content.digest(head)
    numbers = np.frombuffer(head[: len(head) // 4 * 4], dtype=">u4").tolist()
    if len(numbers) < fields + 1 or numbers[0] != magic:
        raise content.source.error(
            f"an idx file of this kind begins with the magic number {magic}, this one with {head[:4]!r}"
        )
    sizes: list[int] = numbers[1:]
    return sizes


def _exactly(content: Content, records: int, width: int) -> Iterator[Array]:
    """Yield so many records of `width` bytes, and make sure that the content ends with them."""
    done = 0
    while done < records:
        wanted = min(max(BLOCK // width, 1), records - done)
        data = content.read(wanted * width)
        if len(data) < wanted * width:
            raise content.source.error(f"the file ends within record {done + len(data) // width + 1} of {records}")
        content.digest(data)
        yield np.frombuffer(data, dtype=np.uint8).reshape(wanted, width)
        done += wanted
    if content.read(1):
        raise content.source.error(f"the file goes on after its {records} records")


def read_idx(images: Content, labels: Content, builder: Builder) -> list[str]:
    """Read MNIST's pair of idx files and return their SHA-256."""
    count, height, width = _header(images, 2051, 3)
    (label_count,) = _header(labels, 2049, 1)
    if height * width != builder.features:
        raise images.source.error(f"the images have {height} × {width} pixels instead of {builder.features}")
    if builder.rows is not None and count != builder.rows:
        raise images.source.error(f"the header announces {count} images instead of {builder.rows}")
    if label_count != count:
        raise labels.source.error(f"the header announces {label_count} labels for {count} images")
    for pixels in _exactly(images, count, builder.features):
        builder.add_pixels(pixels)
    for y in _exactly(labels, count, 1):
        builder.add_images(labels.source, y[:, 0])
    return [images.verify(), labels.verify()]


def read_cifar(content: Content, builder: Builder) -> str:
    """Read CIFAR-10 records, a label byte and the pixels, and return their SHA-256."""
    width = builder.features + 1
    done = 0
    while data := content.read(max(BLOCK // width, 1) * width):
        if len(data) % width:
            raise content.source.error(
                f"the file ends within record {done + len(data) // width + 1}: a record has {width} bytes"
            )
        content.digest(data)
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
        builder.add_images(content.source, records[:, 0])
        builder.add_pixels(records[:, 1:])
        done += len(records)
    return content.verify()


def _load(source: Source, ndim: int) -> Array:
    try:
        array: Array = np.lib.format.open_memmap(source.path, mode="r")
    except (OSError, ValueError, EOFError) as problem:
        raise source.error(f"not a readable .npy file ({problem})") from problem
    if array.ndim != ndim or not np.issubdtype(array.dtype, np.number):
        raise source.error(f"an array of numbers with {ndim} axes is expected")
    return array


def _digest_file(source: Source) -> str:
    with source.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_npy(features: Source, labels: Source, builder: Builder) -> list[str]:
    """Read a pair of .npy files, the matrix and its labels, and return their SHA-256."""
    X, raw = _load(features, 2), _load(labels, 1)
    if X.shape[1] != builder.features:
        raise features.error(f"{X.shape[1]} columns instead of {builder.features}")
    if len(raw) != len(X):
        raise labels.error(f"{len(raw)} labels for the {len(X)} rows of {features.path.name}")
    for start in range(0, len(X), ROWS):
        piece = np.asarray(X[start : start + ROWS])
        bad = np.flatnonzero(~np.isfinite(piece).all(axis=1))
        if bad.size:
            raise features.error(f"row {start + int(bad[0])} has a value that is not finite")
        y = builder.classify(raw[start : start + ROWS])
        if y.min() < 0:
            at = int(np.argmin(y))
            raise labels.error(f"the label {raw[start + at]} of row {start + at} is not one of {builder.labels}")
        builder.add_dense(piece, y)
    return [_digest_file(features), _digest_file(labels)]
