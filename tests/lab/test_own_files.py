"""Data files of the user: formats, errors, and the command `sanc run FILE`."""

from __future__ import annotations

import bz2
import json

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import dump_svmlight_file
from typer.testing import CliRunner

from sanc.lab import cli, own_files
from sanc.lab.datasets import DataError


@pytest.fixture
def data(rng):
    X = rng.standard_normal((60, 4)).round(3)
    return X, np.where(X[:, 0] + 0.5 * rng.standard_normal(60) > 0, 2, 1)


def write(path, X, y):
    if path.name.endswith(".npz"):
        np.savez(path, X=X, y=y)
    elif path.suffix == ".csv":
        path.write_text("".join(",".join(map(str, [*row, label])) + "\n" for row, label in zip(X, y, strict=True)))
    else:
        dump_svmlight_file(X, y, str(path), zero_based=False)


@pytest.mark.parametrize("name", ["mine.svm", "mine.libsvm", "mine.txt", "mine.csv", "mine.npz"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_format_is_loaded(tmp_path, data, name, dtype):
    X, y = data
    write(tmp_path / name, X, y)
    loaded = own_files.load(str(tmp_path / name), dtype)
    dense = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else loaded.X
    assert loaded.X.dtype == dtype and dense == pytest.approx(X, abs=1e-6)
    assert loaded.y.tolist() == (y - 1).tolist() and loaded.classes == 2 and loaded.name == name
    assert loaded.note.startswith("sha256 ")


def test_a_compressed_file_is_loaded(tmp_path, data):
    write(tmp_path / "mine.svm", *data)
    (tmp_path / "mine.svm.bz2").write_bytes(bz2.compress((tmp_path / "mine.svm").read_bytes()))
    assert own_files.load(str(tmp_path / "mine.svm.bz2")).X.shape == (60, 4)


@pytest.mark.parametrize(
    ("head", "place"), [("a,b,c,d,e", 4), ("a,Label,b,c,d", 1), ("y,a,b,c,d", 0), ("a,b,target,c,d", 2)]
)
def test_a_header_names_the_label(tmp_path, data, head, place):
    X, y = data
    cells = [[*row[:place], f"class {label}", *row[place:]] for row, label in zip(X.tolist(), y, strict=True)]
    (tmp_path / "mine.csv").write_text("\n".join([head, *(",".join(map(str, row)) for row in cells), ""]))
    loaded = own_files.load(str(tmp_path / "mine.csv"))
    assert loaded.X == pytest.approx(X) and loaded.y.tolist() == (y - 1).tolist()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no.csv", None, "does not exist"),
        ("bad.csv", "1,2,a\n1,b\n", "line 2: 2 cells instead of 3"),
        ("bad.csv", "1,2,a\n1,x,b\n", "line 2: could not convert"),
        ("bad.csv", "", "is empty"),
        ("bad.csv", "1,2,a\n1,3,a\n", "1 different labels"),
        ("bad.csv", "1,2,0.1\n1,3,0.2\n1,4,0.3\n2,4,0.4\n", "4 different labels"),
        ("bad.csv", "1,nan,a\n1,3,b\n", "not finite"),
        ("bad.csv", ",1,2,0\n1,2,3,1\n", "line 1: could not convert"),
        ("bad.csv", "1,2,a\n1,3,\n", "line 2: the label is empty"),
        ("bad.csv", "a,b,label\n", "0 rows of 2 features"),
        ("bad.csv", "1;2;0\n1;3;1\n", "separate the cells of a CSV by commas"),
        ("bad.csv", "é,b\n".encode("latin-1"), "not a table in UTF-8"),
        ("bad.csv.gz", "1,2,0\n", "not a LIBSVM file"),
        ("bad.svm", "1 1:x\n", "not a LIBSVM file"),
        ("bad.svm", "1 3000000000:1\n0 1:1\n", "not a LIBSVM file"),
        ("bad.npz", "text", "np.savez"),
        ("bad.npz", "", "np.savez"),
        ("bad.npz", b"PK\x03\x04 cut", "np.savez"),
    ],
)
def test_errors_name_the_fault(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        own_files.load(str(tmp_path / name))


def test_errors_for_invalid_archives(tmp_path):
    for X, y, words in (
        (np.ones(3), np.ones(3), "not rows"),
        (np.ones((3, 2)) + 1j, np.arange(3), "complex128.*not rows"),
        (np.ones((3, 2)), np.array([0, 1, np.nan]), "labels that are not finite"),
    ):
        np.savez(tmp_path / "bad.npz", X=X, y=y)
        with pytest.raises(DataError, match=words):
            own_files.load(str(tmp_path / "bad.npz"))
    np.save(tmp_path / "array.npy", np.ones((3, 2)))
    (tmp_path / "bad.npz").write_bytes((tmp_path / "array.npy").read_bytes())
    with pytest.raises(DataError, match=r"np\.savez"):
        own_files.load(str(tmp_path / "bad.npz"))


def test_a_label_y_is_not_taken_for_a_header(tmp_path):
    (tmp_path / "mine.csv").write_text("1,2,y\n3,4,n\n5,6,n\n7,8,y\n")
    assert own_files.load(str(tmp_path / "mine.csv")).y.tolist() == [1, 0, 0, 1]


def test_headers_may_be_numbers_and_labels_are_sorted_as_numbers(tmp_path):
    rows = [f"{k},{k % 7},{label}" for k, label in enumerate([9, 10, 10, 9, 10, 9])]
    (tmp_path / "mine.csv").write_text("\n".join(["0,1,label", *rows]))
    loaded = own_files.load(str(tmp_path / "mine.csv"))
    assert loaded.X[:, 0].tolist() == [0, 1, 2, 3, 4, 5] and loaded.y.tolist() == [0, 1, 1, 0, 1, 0]


def test_the_command_runs_a_data_file(tmp_path, data, monkeypatch):
    write(tmp_path / "mine.csv", *data)
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "mine.csv", "--methods", "sanc", "--runs", "1", "--workers", "1", "--budget", "300"]
    result = CliRunner().invoke(cli.app, [*arguments, "--out", "results"])
    assert result.exit_code == 0, result.output
    (config,) = (json.loads(path.read_text()) for path in (tmp_path / "results").rglob("config.json"))
    assert config["data"] == str(tmp_path / "mine.csv") and config["n"] == 60 and config["title"] == "mine.csv"
    assert (tmp_path / "results" / "report.html").is_file()
    assert "own-logistic-mine.csv" in (tmp_path / "results" / "summary.md").read_text()
    again = CliRunner().invoke(cli.app, [*arguments, "--out", "results"])
    assert again.exit_code == 0 and "1 were finished before" in again.output
    (tmp_path / "mine.csv").write_text((tmp_path / "mine.csv").read_text() + "1,2,3,4,1\n")
    changed = cli.main([*arguments, "--out", "results"])  # changed data conflict with the stored run
    assert changed == 2


@pytest.mark.parametrize(("name", "words"), [
    ("bad.csv", "line 2: could not convert string to float: 'x'. Encode"), ("no.npz", "no.npz does not exist: pass"),
    ("a9a", "pass one that ends in .svm, .libsvm, .svmlight, .txt, .csv, .npz, or a data set by its name with --data"),
])  # fmt: skip
def test_the_command_reports_an_invalid_file(tmp_path, monkeypatch, capsys, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("1,2,a\n1,x,b\n")
    assert cli.main(["run", name]) == 2
    output = capsys.readouterr()
    assert words in output.err and "sanc datasets" not in output.out


def test_a_file_conflicts_with_the_name_of_a_data_set(tmp_path, data, capsys):
    write(tmp_path / "mine.csv", *data)
    assert cli.main(["run", str(tmp_path / "mine.csv"), "--data", "w1a"]) == 2
    assert "name the data once" in capsys.readouterr().err
