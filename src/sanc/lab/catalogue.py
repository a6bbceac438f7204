"""The data sets of the paper: their published files, and the file layouts that can be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RemoteFile:
    """A published file.

    Attributes
    ----------
    url : str
        Its address.
    path : str
        Where it is stored, relative to the data folder.
    size : int or None
        Its size in bytes, if that was published.
    digest : str or None
        Its digest, ``algorithm:hexdigits``, if that was published.
    """

    url: str
    path: str
    size: int | None = None
    digest: str | None = None


@dataclass(frozen=True)
class FileLayout:
    """The files of a data set in one of its formats.

    Attributes
    ----------
    reader : str
        The format, a key of `READERS` in `sanc.lab.readers`.
    files : tuple of str
        The names of the files without the suffix of a compression; "a|b" means a or b.
    members : tuple of str
        The members to read if a file is an archive.
    scaled : bool
        Whether the publishers scaled the features.
    subset : bool
        Whether some rows are absent.
    """

    reader: Literal["libsvm", "statlog", "idx", "cifar", "npy"]
    files: tuple[str, ...]
    members: tuple[str, ...] = ()
    scaled: bool = False
    subset: bool = False


@dataclass(frozen=True)
class DataSet:
    """A data set of the catalogue.

    Attributes
    ----------
    name : str
        Its name in commands.
    rows, features : int
        The numbers of rows and features.
    files : tuple of RemoteFile
        The files that `fetch` downloads.
    layouts : tuple of FileLayout
        The files that `load` accepts, in order of preference.
    labels : tuple of int
        The labels in the files, in the order of the classes.
    note : str
        A remark for the list of data sets; it may be empty.
    folders : tuple of str
        Further folders that `load` searches, relative to the data folder.
    sparse : bool
        Whether X is a CSR matrix.
    interval : tuple of float or None
        The interval to which each feature is mapped; None: features stay as they are.
    """

    name: str
    rows: int
    features: int
    files: tuple[RemoteFile, ...]
    layouts: tuple[FileLayout, ...]
    labels: tuple[int, ...] = (-1, 1)
    note: str = ""
    folders: tuple[str, ...] = ()
    sparse: bool = False
    interval: tuple[float, float] | None = None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.labels)


_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_CIFAR_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))


def _libsvm(path: str, size: int | None = None, digest: str = "") -> tuple[RemoteFile]:
    """Return a file of the LIBSVM collection, with its size and digest if they are known."""
    name = path.rpartition("/")[2]
    return (RemoteFile(f"{_LIBSVM}/{path}", name, size, f"sha256:{digest}" if digest else None),)


def _text(name: str, rows: int, features: int, size: int, digest: str) -> DataSet:
    """Return a sparse data set that LIBSVM publishes without compression."""
    files = _libsvm(f"binary/{name}", size, digest)
    return DataSet(name, rows, features, files, (FileLayout("libsvm", (name,)),), sparse=True)


def _mnist(kind: str, size: int, digest: str) -> RemoteFile:
    """Return the file of the training images or labels of MNIST."""
    name = f"train-{kind}-ubyte.gz"
    return RemoteFile(f"{_MNIST}/{name}", f"mnist/{name}", size, f"sha256:{digest}")


_SETS = (
    _text("w1a", 2_477, 300, 170_263, "0ae2b1c40f6a99061d1c6f4a1f3b50eea58a2f3b8bf851a337c25c2a65a49d32"),
    _text("w8a", 49_749, 300, 3_478_238, "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2"),
    _text("a9a", 32_561, 123, 2_329_875, "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906"),
    DataSet(
        "ijcnn1",
        rows=49_990,
        features=22,
        files=_libsvm(
            "binary/ijcnn1.bz2", 1_398_220, "450dee8470b168e47b9fae1fc160396b8a809c675737837fce3acd51dcdc0481"
        ),
        layouts=(FileLayout("libsvm", ("ijcnn1",)),),
    ),
    DataSet(
        "covtype",
        rows=581_012,
        features=54,
        files=_libsvm(
            "binary/covtype.libsvm.binary.bz2",
            7_020_350,
            "fbcdd4f2ab981b598f2d9688860b20556b515770b1ed1b5629178e889cc4e89d",
        ),
        layouts=(
            FileLayout("libsvm", ("covtype.libsvm.binary",)),
            FileLayout("libsvm", ("covtype.libsvm.binary.scale",), scaled=True),
        ),
        labels=(1, 2),
        note="each feature mapped to [0, 1]",
        interval=(0.0, 1.0),
    ),
    DataSet(
        "higgs",
        rows=11_000_000,
        features=28,
        files=_libsvm("binary/HIGGS.xz"),
        layouts=(
            FileLayout("libsvm", ("HIGGS",)),
            FileLayout("npy", ("X_num_test.npy", "y_test.npy", "X_num_val.npy", "y_val.npy"), subset=True),
        ),
        labels=(0, 1),
        note="a download of gigabytes",
    ),
    DataSet(
        "segment",
        rows=2_310,
        features=19,
        files=_libsvm("multiclass/segment.scale"),
        layouts=(FileLayout("statlog", ("segment.dat",)), FileLayout("libsvm", ("segment.scale",), scaled=True)),
        labels=tuple(range(1, 8)),
        note="each feature mapped to [−1, 1]",
        interval=(-1.0, 1.0),
    ),
    DataSet(
        "seismic",
        rows=78_823,
        features=50,
        files=_libsvm("multiclass/vehicle/seismic.bz2"),
        layouts=(
            FileLayout("libsvm", ("seismic",)),
            FileLayout("libsvm", ("seismic.scale|seismic_scale",), scaled=True),
        ),
        labels=(1, 2, 3),
    ),
    DataSet(
        "mnist",
        rows=60_000,
        features=784,
        files=(
            _mnist("images-idx3", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            _mnist("labels-idx1", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ),
        layouts=(
            FileLayout(
                "idx",
                ("train-images-idx3-ubyte|train-images.idx3-ubyte", "train-labels-idx1-ubyte|train-labels.idx1-ubyte"),
            ),
        ),
        labels=tuple(range(10)),
        folders=("MNIST/raw",),
    ),
    DataSet(
        "cifar10",
        rows=50_000,
        features=3_072,
        files=(
            RemoteFile(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "cifar-10-binary.tar.gz",
                170_052_171,
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        layouts=(
            FileLayout("cifar", _CIFAR_FILES),
            FileLayout(
                "cifar", ("cifar-10-binary.tar.gz",), tuple(f"cifar-10-batches-bin/{name}" for name in _CIFAR_FILES)
            ),
        ),
        labels=tuple(range(10)),
        folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
    ),
)

CATALOGUE: Mapping[str, DataSet] = {dataset.name: dataset for dataset in _SETS}
"""Every data set by name."""
