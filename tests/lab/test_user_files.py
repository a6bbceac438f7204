"""Data files of the user: formats, errors, and the command `sanc run FILE`."""

from __future__ import annotations

import bz2
import json
import zipfile

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import dump_svmlight_file
from typer.testing import CliRunner

import sanc
from sanc.lab import cli, user_files
from sanc.lab.datasets import DataError
from sanc.lab.peers import fit_peers


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
    loaded = user_files.load(str(tmp_path / name), dtype)
    dense = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else loaded.X
    assert loaded.X.dtype == dtype and dense == pytest.approx(X, abs=1e-6)
    assert loaded.y.tolist() == (y - 1).tolist() and loaded.classes == 2 and loaded.name == name
    assert loaded.note.startswith("sha256 ")


def test_a_compressed_file_is_loaded(tmp_path, data):
    write(tmp_path / "mine.svm", *data)
    (tmp_path / "mine.svm.bz2").write_bytes(bz2.compress((tmp_path / "mine.svm").read_bytes()))
    assert user_files.load(str(tmp_path / "mine.svm.bz2")).X.shape == (60, 4)


@pytest.mark.parametrize(
    ("head", "place"), [("a,b,c,d,e", 4), ("a,Label,b,c,d", 1), ("y,a,b,c,d", 0), ("a,b,target,c,d", 2)]
)
def test_a_header_names_the_label(tmp_path, data, head, place):
    X, y = data
    cells = [[*row[:place], f"class {label}", *row[place:]] for row, label in zip(X.tolist(), y, strict=True)]
    (tmp_path / "mine.csv").write_text("\n".join([head, *(",".join(map(str, row)) for row in cells), ""]))
    loaded = user_files.load(str(tmp_path / "mine.csv"))
    assert loaded.X == pytest.approx(X) and loaded.y.tolist() == (y - 1).tolist()
    assert loaded.label == f"column {place + 1} of 5, {head.split(',')[place]!r}"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no.csv", None, "does not exist"),
        ("bad.csv", "1,2,a\n1,b\n", "line 2: 2 cells instead of 3"),
        ("bad.csv", "1,2,a\n1,x,b\n", "line 2: 'x' in column 2 is not a number"),
        ("bad.csv", "1,2,a\n1,1_000,b\n", "line 2: '1_000' in column 2 is not a number"),
        ("bad.csv", '1,2,a\n1,"1,000",b\n', "line 2: '1,000' in column 2 is not a number"),
        ("bad.csv", "1,2,a\n,3,b\n", "line 2: the cell in column 1 is empty"),
        ("bad.csv", 'a,b,"two\nlines"\n1,2,a\n,3,b\n', "line 4: the cell in column 1, 'a', is empty"),
        ("bad.csv", "a,1,2\nb,3,4\n", "line 1: 'a' in column 1 is not a number.*write a header, and pass its name"),
        (
            "bad.csv",
            "x,species,z\n1,a,2\n3,b,4\n",
            "line 2: 'a' in column 2, 'species', is not a number.*pass --label species",
        ),
        ("bad.csv", "x,label,Label\n1,a,2\n3,b,4\n", "2 columns named label: rename"),
        ("bad.csv", ",x,label\n0,1,a\n1,3,b\n", "first column has no name and holds row numbers"),
        ("bad.csv", ",0,1,kind\n0,1,2,a\n1,3,4,b\n", "first column has no name and holds row numbers"),
        ("bad.csv", "1,2,\n1,3,0\n2,3,1\n", "line 1: the label is empty"),
        ("bad.csv", "", "is empty"),
        ("bad.csv", "1,2,a\n1,3,a\n", "1 different labels"),
        ("bad.csv", "1,2,0.1\n1,3,0.2\n1,4,0.3\n2,4,0.4\n", "4 different labels"),
        ("bad.csv", "1,nan,a\n1,3,b\n", "not finite"),
        ("bad.csv", ",1,2,0\n1,2,3,1\n", "line 1: the cell in column 1 is empty"),
        ("bad.csv", "1,2,a\n1,3,\n", "line 2: the label is empty"),
        ("bad.csv", "a,b,label\n", "0 rows of 2 features"),
        ("bad.csv", "1;2;0\n1;3;1\n", "line 1: '1;2;0' is one cell. Separate the cells by commas"),
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
        user_files.load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "label", "words"),
    [
        ("a,sold,city\n1,yes,Ulm\n2,no,Bonn\n", "sold", "'Ulm' in column 3, 'city', .* one column of 0 and 1 each.$"),
        ("a,sold,city\n1,yes,2\n2,no,3\n", None, "'yes' in column 2, 'sold', .* pass --label sold.$"),
        ("a,b,sold\n1,nan,0\n2,3,1\n", "sold", "not finite, such as nan in row 1 of the data, feature 2"),
        ("a,sold\n1,0\n2,0\n3,0\n", "sold", "1 different labels in 3 rows, .* write the class of each row"),
        ("a;sold\n1;0\n2;1\n", "sold", "'a;sold' is one cell. Separate the cells by commas"),
    ],
)
def test_errors_with_a_named_label(tmp_path, text, label, words):
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        user_files.load(str(tmp_path / "mine.csv"), label=label)


def test_errors_for_invalid_archives(tmp_path):
    for X, y, words in (
        (np.ones(3), np.ones(3), "not rows"),
        (np.ones((3, 2)) + 1j, np.arange(3), "complex128.*not rows"),
        (np.ones((3, 2)), np.arange(3) + 1j, "y of shape .3,. and type complex128.*not rows"),
        (np.ones((3, 2)), np.array([0, 1, np.nan]), "labels that are not finite"),
    ):
        np.savez(tmp_path / "bad.npz", X=X, y=y)
        with pytest.raises(DataError, match=words):
            user_files.load(str(tmp_path / "bad.npz"))
    np.save(tmp_path / "array.npy", np.ones((3, 2)))
    (tmp_path / "bad.npz").write_bytes((tmp_path / "array.npy").read_bytes())
    with pytest.raises(DataError, match=r"np\.savez"):
        user_files.load(str(tmp_path / "bad.npz"))


def test_a_label_y_is_not_taken_for_a_header(tmp_path):
    (tmp_path / "mine.csv").write_text("1,2,y\n3,4,n\n5,6,n\n7,8,y\n")
    assert user_files.load(str(tmp_path / "mine.csv")).y.tolist() == [1, 0, 0, 1]


def test_headers_may_be_numbers_and_labels_are_sorted_as_numbers(tmp_path):
    rows = [f"{k},{k % 7},{label}" for k, label in enumerate([9, 10, 10, 9, 10, 9])]
    (tmp_path / "mine.csv").write_text("\n".join(["0,1,label", *rows]))
    loaded = user_files.load(str(tmp_path / "mine.csv"))
    assert loaded.X[:, 0].tolist() == [0, 1, 2, 3, 4, 5] and loaded.y.tolist() == [0, 1, 1, 0, 1, 0]


HEADERS_OF_NUMBERS = {
    "0,1,2,species": "a b", "0,1,2,3": "a b", "0,1,2,3 ": "5 6", "2001,2002,2003,growth": "0 1", "id,1,2,kind": "a b",
    "0.5,1.5,2.5,kind": "0 1", "+1,-1,nan,kind": "0 1", "400.0,400.5,401.0,401.5": "a b",
}  # fmt: skip


@pytest.mark.parametrize("head", HEADERS_OF_NUMBERS)
def test_a_header_of_numbers_is_no_row(tmp_path, rng, head):
    X, classes = rng.standard_normal((30, 3)), HEADERS_OF_NUMBERS[head].split()
    rows = [",".join(map(str, row.tolist())) + f",{classes[k % 2]}" for k, row in enumerate(X)]
    (tmp_path / "mine.csv").write_text("\n".join([head, *rows]))
    loaded = user_files.load(str(tmp_path / "mine.csv"))
    assert np.array_equal(loaded.X, X) and loaded.y.tolist() == [k % 2 for k in range(30)]


@pytest.mark.parametrize("rows", [
    "0,1,a 1,2,b 2,0,a 2,1,b",  # the label of the first row occurs again
    "0,1,1 1,2,0 2,0,1 2,1,0",
    "0,0,c 1,2,b 2,0,b 2,1,a 3,1,a 4,2,a",  # cells of the first row are equal
    "1.5,0.5,7 1,2,5 2,0,5 2,1,6 3,1,6 4,2,5",  # numbers that do not increase
    "6,5,c 1,2,b 2,0,a 2,1,a 3,1,a 4,2,a",  # another class has one row, too
    "0,1,a 2,3,b",
])  # fmt: skip
def test_a_first_row_of_numbers_is_no_header(tmp_path, rows):
    (tmp_path / "mine.csv").write_text(rows.replace(" ", "\n"))
    loaded = user_files.load(str(tmp_path / "mine.csv"))
    cells = [row.split(",") for row in rows.split()]
    assert loaded.X.tolist() == [[float(a), float(b)] for a, b, _ in cells]
    assert loaded.classes == len({label for *_, label in cells})


@pytest.mark.parametrize(("first", "classes"), [
    ("2001,2002,growth", "ab"), ("2002,2001,growth", "ab"), ("1,2,3", "56"), ("400.5,401.0,401.5", "56"),
    ("0,1,2", "12"), ("3,4,5", "56"), ("0,1,kind", "a"),
])  # fmt: skip
def test_a_line_that_may_be_a_header_or_a_row_is_an_error(tmp_path, first, classes):
    rows = [f"{k}.5,{k + 0.25},{classes[k % len(classes)]}" for k in range(8)]
    (tmp_path / "mine.csv").write_text("\n".join([first, *rows]))
    with pytest.raises(DataError, match=r"line 1: .* may hold the names of columns or data. Write a header"):
        user_files.load(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_text("\n".join(["x,y,label", first, *rows]))
    found = user_files.load(str(tmp_path / "mine.csv"))
    assert found.X[0].tolist() == [float(cell) for cell in first.split(",")[:2]]


@pytest.mark.parametrize(("first", "classes"), [
    ("0,1,2", "12"), ("0,1,2", "012"), ("1,2,3", "123"), ("1,2,3", "56"), ("-1,0,1", "01"), ("2,3,4", "45"),
])  # fmt: skip
def test_consecutive_integers_over_integers_may_be_a_header(tmp_path, first, classes):
    rows = [f"{9 - k},{k % 3},{classes[k % len(classes)]}" for k in range(8)]
    (tmp_path / "mine.csv").write_text("\n".join([first, *rows]))
    with pytest.raises(DataError, match=r"line 1: .* may hold the names of columns or data. Write a header"):
        user_files.load(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_text("\n".join([first, *rows, "1,2,3", first, "1,2,3"]))
    found = user_files.load(str(tmp_path / "mine.csv"))  # a line that occurs twice is a row
    assert found.X[0].tolist() == [float(cell) for cell in first.split(",")[:2]] and len(found.y) == 12


def test_a_header_that_pandas_writes_over_integers_is_no_row(tmp_path):
    """The names of columns are 0, 1, 2, …; the last one is no label, or the column of row numbers has no name."""
    rows = [f"{7 - k},{k % 3},{k % 2}" for k in range(8)]
    (tmp_path / "mine.csv").write_text("\n".join(["0,1,2", *rows]))
    assert user_files.load(str(tmp_path / "mine.csv")).X[:, 0].tolist() == list(range(7, -1, -1))
    (tmp_path / "mine.csv").write_text("\n".join([",0,1,2", *(f"{k},{row[:-1]}{k % 3}" for k, row in enumerate(rows))]))
    with pytest.raises(DataError, match=r"first column has no name and holds row numbers.*index=False"):
        user_files.load(str(tmp_path / "mine.csv"))


@pytest.mark.parametrize("name", ["mine.svm", "mine.csv", "mine.npz"])
@pytest.mark.filterwarnings("error")
def test_values_that_overflow_in_the_chosen_type_are_an_error(tmp_path, data, name):
    X, y = data
    X[7, 2] = -1e60
    write(tmp_path / name, X, y)
    assert user_files.load(str(tmp_path / name)).X.min() == -1e60
    with pytest.raises(DataError, match=r"values up to 1e\+60, which overflow in float32: scale them"):
        user_files.load(str(tmp_path / name), "float32")


def member(shape, *, kind="<f8", content=b"", version=b"\x01\x00"):
    """Return a .npy file by the format's description, with a header that need not fit its content."""
    head = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY" + version + len(head).to_bytes(2, "little") + head + content


@pytest.mark.parametrize(("X", "words"), [
    (member("(1000000000, 1000)"), "8,000,000,000,000 bytes"),
    (member("(2, 2)"), "declares 32 bytes and has 0"),
    (member("(2, 1)", content=bytes(32)), "declares 16 bytes and has 32"),
    (member("(-2, -2)", content=bytes(24)), "declares 32 bytes and has 24"),
    (member("(2, 2)", content=bytes(32), version=b"\x03\x00"), "X has fields"),
    (member("(2, 2", content=bytes(32)), "np.savez"),
    (b"", "np.savez"),
])  # fmt: skip
def test_archives_whose_headers_are_wrong_are_an_error(tmp_path, X, words):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("X.npy", X)
        archive.writestr("y.npy", member("(2,)", content=np.arange(2.0).tobytes()))
    with pytest.raises(DataError, match=words):
        user_files.load(str(tmp_path / "bad.npz"))
    with zipfile.ZipFile(tmp_path / "good.npz", "w") as archive:
        archive.writestr("X.npy", member("(2, 2)", content=np.arange(4.0).tobytes()))
        archive.writestr("y.npy", member("(2,)", content=np.arange(2.0).tobytes()))
    assert user_files.load(str(tmp_path / "good.npz")).X.tolist() == [[0, 1], [2, 3]]


def test_the_command_runs_a_data_file(tmp_path, data, monkeypatch, scheduler, without_figures):
    write(tmp_path / "mine.csv", *data)
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "mine.csv", "--methods", "sanc", "--runs", "1", "--budget", "300", "--out", "results"]
    result = CliRunner().invoke(cli.app, [*arguments, "--workers", "1"])  # in another process
    assert result.exit_code == 0, result.output
    assert "Label: column 5 of 5 without a header, 2 classes." in result.output and "--label" in result.output
    (config,) = (json.loads(path.read_text()) for path in (tmp_path / "results").rglob("config.json"))
    assert config["data"] == str(tmp_path / "mine.csv") and config["n"] == 60 and config["title"] == "mine.csv"
    assert (tmp_path / "results" / "report.html").is_file()
    assert "For comparison" in result.output and "L-BFGS" in result.output and "Adam, step" in result.output
    assert "own-logistic-mine.csv" in (tmp_path / "results" / "summary.md").read_text()
    again = CliRunner().invoke(cli.app, [*arguments, "--scheduler", scheduler])
    assert again.exit_code == 0 and "1 were finished before" in again.output
    (tmp_path / "mine.csv").write_text((tmp_path / "mine.csv").read_text() + "1,2,3,4,1\n")
    changed = cli.main([*arguments, "--scheduler", scheduler])  # changed data conflict with the stored run
    assert changed == 2


@pytest.mark.parametrize(("name", "words"), [
    ("bad.csv", "line 2: 'x' in column 2 is not a number. Encode"), ("no.npz", "no.npz does not exist: pass"),
    ("a9a", "pass one that ends in .svm, .libsvm, .svmlight, .txt, .csv, .npz, or a data set by its name with --data"),
])  # fmt: skip
def test_the_command_reports_an_invalid_file(tmp_path, monkeypatch, capsys, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("1,2,a\n1,x,b\n")
    assert cli.main(["run", name]) == 2
    output = capsys.readouterr()
    assert words in output.err and "sanc datasets" not in output.out


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match=r"is a folder: pass the path of a \.svm"):
        user_files.load(str(tmp_path))


def test_a_file_conflicts_with_the_name_of_a_data_set(tmp_path, data, capsys):
    write(tmp_path / "mine.csv", *data)
    assert cli.main(["run", str(tmp_path / "mine.csv"), "--data", "w1a"]) == 2
    assert "name the data once" in capsys.readouterr().err


def test_columns_are_standardised_on_request(tmp_path, data):
    X, y = data
    X = X * [1.0, 1e4, 1.0, 0.0] + [0.0, 5.0, 3.0, 7.0]
    write(tmp_path / "mine.csv", X, y)
    write(tmp_path / "mine.svm", X, y)
    dense = user_files.load(str(tmp_path / "mine.csv"), standardise=True).X
    scaled = np.column_stack([(column - column.mean()) / (column.std() or 1.0) for column in X.T])
    assert np.allclose(dense, scaled, atol=1e-9)
    sparse = user_files.load(str(tmp_path / "mine.svm"), standardise=True).X
    assert scipy.sparse.issparse(sparse) and np.allclose(abs(sparse.toarray()).max(axis=0), 1.0)
    assert "--standardise" in user_files.scale_hint(X) and user_files.scale_hint(dense) == ""
    assert user_files.scale_hint(scipy.sparse.csr_matrix(X)) == user_files.scale_hint(X)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e25), ("float32", 1e-42), ("float64", 1e200),
                                              ("float64", 1e-310)])  # fmt: skip
@pytest.mark.parametrize("name", ["mine.npz", "mine.svm"])
@pytest.mark.filterwarnings("error")
def test_columns_whose_squares_overflow_or_underflow_are_standardised(tmp_path, name, dtype, scale):
    X, y = np.array([[1.0, 5.0], [-3.0, 4.0], [2.0, 7.0], [4.0, 0.5]]), np.array([0, 1, 0, 1])
    write(tmp_path / name, X * [scale, 1.0], y)
    found = user_files.load(str(tmp_path / name), dtype, standardise=True).X
    expected = X / abs(X).max(axis=0) if name == "mine.svm" else (X - X.mean(axis=0)) / X.std(axis=0)
    tolerance = 1e-2 if scale < 1e-40 and dtype == "float32" else 1e-6  # of subnormal numbers
    assert found.dtype == dtype
    assert np.allclose(found.toarray() if name == "mine.svm" else found, expected, rtol=tolerance, atol=tolerance)


def test_the_label_may_be_any_column(tmp_path):
    (tmp_path / "mine.csv").write_text("a,sold,b\n1,yes,2\n3,no,4\n5,yes,6\n")
    loaded = user_files.load(str(tmp_path / "mine.csv"), label="sold")
    assert loaded.X.tolist() == [[1, 2], [3, 4], [5, 6]] and list(loaded.y) == [1, 0, 1]
    assert user_files.label_note(loaded).startswith("Label: column 2 of 3, 'sold', 2 classes. To choose another")
    with pytest.raises(DataError, match=r"label = 'bought' is no column of .* has a, sold, b"):
        user_files.load(str(tmp_path / "mine.csv"), label="bought")
    (tmp_path / "mine.csv").write_text("1,yes,0\n3,no,1\n5,yes,0\n")
    with pytest.raises(DataError, match=r"label = 'yes' is a cell of the first line of .* write a header"):
        user_files.load(str(tmp_path / "mine.csv"), label="yes")
    (tmp_path / "mine.csv").write_text("a,a,b\n1,2,0\n3,4,1\n")
    with pytest.raises(DataError, match="label = 'a' names 2 columns"):
        user_files.load(str(tmp_path / "mine.csv"), label="a")
    (tmp_path / "mine.svm").write_text("1 1:2\n")
    with pytest.raises(DataError, match="names a column of a CSV"):
        user_files.load(str(tmp_path / "mine.svm"), label="a")


def test_the_command_states_its_objective_and_the_accuracy(tmp_path, data, scheduler, without_figures):
    """The final loss and accuracy are those of scikit-learn's solution of the same objective."""
    from sklearn.linear_model import LogisticRegression

    X, y = data
    write(tmp_path / "mine.csv", X * [1.0, 5e3, 1.0, 1.0], y)
    arguments = ["run", str(tmp_path / "mine.csv"), "--penalty", "l2", "--strength", "0.01", "--methods", "sanc"]
    more = ["--standardise", "--batch", "60", "--runs", "1", "--out", str(tmp_path / "out"), "--scheduler", scheduler]
    more += ["--budget", "20000"]
    said = CliRunner().invoke(cli.app, [*arguments, *more])
    assert said.exit_code == 0, said.output
    assert "log(1 + exp(−t·xᵀw)) + 0.01/2·‖w‖², with labels t = ±1, without an intercept" in said.output
    assert "--standardise" not in said.output.split("Results go to")[1]
    (done,) = (tmp_path / "out").rglob("done.json")
    scaled = (X - X.mean(axis=0)) / X.std(axis=0)
    reference = LogisticRegression(C=1 / (0.01 * 60), fit_intercept=False, tol=1e-10).fit(scaled, y)
    w, sign = reference.coef_[0], 2 * y - 3
    loss = np.logaddexp(0, -sign * (scaled @ w)).mean() + 0.005 * w @ w
    found = json.loads(done.read_text())
    assert found["loss"] == pytest.approx(loss, abs=1e-6)
    assert found["training_accuracy"] == pytest.approx(reference.score(scaled, y))
    assert f"{100 * found['training_accuracy']:.2f} %" in said.output
    assert cli.main(["run", "--data", "a9a", "--standardise"]) == 2
    assert cli.main([*arguments, "--problem", "svm"]) == 2


def test_peers_reach_the_minimum_of_the_same_objective(data):
    from sklearn.linear_model import LogisticRegression

    X, y = data
    problem = sanc.problems.Logistic(X, y - 1, strength=0.01)
    exact = LogisticRegression(C=1 / (0.01 * len(y)), fit_intercept=False, tol=1e-10).fit(X, y)
    best = problem.value(exact.coef_[0])
    lbfgs, adam = fit_peers(problem, budget=120_000, batch=60)
    assert lbfgs.loss == pytest.approx(best, abs=1e-9) and adam.loss == pytest.approx(best, abs=1e-6)
    assert lbfgs.evaluations % 60 == 0 and adam.evaluations == 120_000 and adam.name.startswith("Adam, step 0.")
    assert fit_peers(problem, budget=1, batch=60)[0].evaluations <= 180  # at least one pass
