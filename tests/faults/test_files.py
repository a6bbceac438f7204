"""Killed processes, full disks, flipped bytes, mutated data files: the same result, or an error that names the file."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_svmlight_file

import sanc
from sanc.lab import datasets, directory, parsed, runs, user_files
from sanc.lab.catalogue import DataSet, FileLayout, RemoteFile
from tests.lab.test_damage import SPEC, interrupted, outcome

pytestmark = pytest.mark.slow

ALONE = """
import sys
from dataclasses import replace
from pathlib import Path
from sanc.lab import runs
from tests.lab.test_damage import SPEC
spec = replace(SPEC, panel=replace(SPEC.panel, calls=60_000))
print("ready", flush=True)
runs.execute(spec, Path(sys.argv[1]), checkpoint_every=0.0)
"""


def test_kills_at_any_moment(tmp_path, tally):
    """A run is killed several times, by SIGKILL and SIGHUP, and resumed each time; the result equals a whole run's."""
    spec = replace(SPEC, panel=replace(SPEC.panel, calls=60_000))
    clock = time.perf_counter()
    whole = outcome(runs.execute(spec, tmp_path / "whole", checkpoint_every=0.0))
    took = time.perf_counter() - clock
    rng, kills, failures = random.Random(5), 7, []
    folder = tmp_path / "cut" / "runs" / spec.path
    for number in range(kills):
        arguments = [sys.executable, "-c", ALONE, str(tmp_path / "cut")]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.2 * took))
            process.send_signal(signal.SIGKILL if number % 3 else signal.SIGHUP)
        left = list(folder.glob(".*")) if folder.exists() else []
        if len(left) > 1:
            failures.append((number, left))
    if outcome(runs.execute(spec, tmp_path / "cut")) != whole:
        failures.append("another result")
    if list(folder.glob(".*")):
        failures.append("temporary files are left")
    tally("kills", kills, failures)


def test_a_disk_that_is_full_at_any_write(tmp_path, monkeypatch, tally):
    whole = outcome(runs.execute(SPEC, tmp_path / "whole", checkpoint_every=0.0))
    plain, writes, failures = directory.os.fsync, 0, []

    def full_at(number):
        count = 0

        def fsync(descriptor):
            nonlocal count
            count += 1
            if count == number:
                raise OSError(28, "No space left on device")
            plain(descriptor)

        return fsync

    folder = tmp_path / "cut" / "runs" / SPEC.path
    for number in range(1, 30):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        monkeypatch.setattr(directory.os, "fsync", full_at(number))
        try:
            runs.execute(SPEC, tmp_path / "cut", checkpoint_every=0.0)
            if number < 10:
                failures.append((number, "no error"))
        except OSError:
            if list(folder.glob(".*")):
                failures.append((number, "temporary files are left"))
        monkeypatch.setattr(directory.os, "fsync", plain)
        writes += 1
        if outcome(runs.execute(SPEC, tmp_path / "cut", checkpoint_every=0.0)) != whole:
            failures.append((number, "another result"))
    tally("full disks", writes, failures)


def flipped(content, rng):
    changed = bytearray(content)
    changed[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
    return bytes(changed)


@pytest.mark.parametrize("name", ["checkpoint.pt", "trace.jsonl", "config.json"])
def test_flipped_bytes_of_a_run(tmp_path, name, tally):
    whole = outcome(runs.execute(SPEC, tmp_path / "whole"))
    folder = interrupted(tmp_path / "cut")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    rng, cases, failures = np.random.default_rng(3), 250, []
    for case in range(cases):
        shutil.rmtree(folder)
        folder.mkdir()
        for other, content in files.items():
            (folder / other).write_bytes(flipped(content, rng) if other == name else content)
        try:
            if outcome(runs.execute(SPEC, tmp_path / "cut")) != whole:
                failures.append((case, "another result"))
        except sanc.SancError as error:
            failures += [] if str(folder) in str(error) else [(case, str(error))]
        except Exception as error:
            failures.append((case, repr(error)))
    tally("flipped bytes of a run", cases, failures)


SET = DataSet("made", 40, 6, (RemoteFile("http://127.0.0.1:9/made", "made"),), (FileLayout("libsvm", ("made",)),))


def text(rng):
    X = scipy.sparse.random(40, 6, density=0.6, random_state=rng, format="csr")
    X.data = np.round(rng.standard_normal(X.nnz), 3) + 0.001
    rows = []
    for number in range(40):
        row = X[number]
        order = np.argsort(row.indices)
        entries = "".join(f" {row.indices[k] + 1}:{row.data[k]:.6g}" for k in order)
        rows.append(f"{'+1' if number % 3 else '-1'}{entries}\n")
    return "".join(rows).encode()


@pytest.mark.parametrize("sparse", [False, True])
def test_flipped_bytes_of_the_parsed_form(tmp_path, sparse, monkeypatch, tally):
    made = replace(SET, sparse=sparse)
    monkeypatch.setenv("SANC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "made").write_bytes(text(np.random.default_rng(0)))
    known = datasets.load_set(made, tmp_path)
    dense = known.X.toarray() if sparse else np.array(known.X)
    (entry,) = (tmp_path / "cache").iterdir()
    rng, cases, failures = np.random.default_rng(4), 0, []
    for path in sorted(entry.iterdir()):
        content = path.read_bytes()
        for _ in range(150):
            path.write_bytes(flipped(content, rng))
            parsed._verified.clear()
            cases += 1
            try:
                again = datasets.load_set(made, tmp_path)
                X = again.X.toarray() if sparse else np.array(again.X)
                if not (np.array_equal(X, dense) and np.array_equal(again.y, known.y)):
                    failures.append((path.name, "other data"))
            except datasets.DataError as error:
                failures += [] if str(entry) in str(error) and "remove" in str(error) else [str(error)]
            except Exception as error:
                failures.append((path.name, repr(error)))
        path.write_bytes(content)
    tally("flipped bytes of the parsed form", cases, failures)


def mutated(content, rng):
    """Change, delete, repeat or insert a piece of a text, or cut it off."""
    place, kind = int(rng.integers(len(content))), int(rng.integers(5))
    size = int(rng.integers(1, 12))
    if kind == 0:
        return flipped(content, rng)
    if kind == 1:
        return content[:place] + content[place + size :]
    if kind == 2:
        return content[: place + size] + content[place:]
    if kind == 3:
        return content[:place] + bytes(rng.choice(list(b"0123456789:.-+e \n#nainf"), size).tolist()) + content[place:]
    return content[:place]


def by_another_reader(path):
    """Return X and y as scikit-learn reads them, or None if it raises an error or the data are implausible."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        return None
    try:
        X, y = load_svmlight_file(str(path), n_features=6, zero_based=False)
    except ValueError:
        return None
    good = X.shape == (40, 6) and np.isfinite(X.data).all() and set(y) == {-1.0, 1.0}
    return (X.toarray(), (y > 0).astype(int)) if good else None


def test_mutated_data_files(tmp_path, monkeypatch, tally):
    monkeypatch.setenv("SANC_CACHE", str(tmp_path / "cache"))
    content, cases, failures, read = text(np.random.default_rng(1)), 800, [], 0
    rng = np.random.default_rng(2)
    for case in range(cases):
        path = tmp_path / "made"
        path.write_bytes(mutated(content, rng))
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        expected = by_another_reader(path)
        try:
            found = datasets.load_set(SET, tmp_path)
            read += 1
            same = (
                expected is not None and np.array_equal(found.X, expected[0]) and np.array_equal(found.y, expected[1])
            )
            failures += [] if same else [(case, "other data")]
        except datasets.DataError as error:
            if expected is not None:
                failures.append((case, f"rejected: {error}"))
            if str(path) not in str(error):
                failures.append((case, f"no path: {error}"))
        except Exception as error:
            failures.append((case, repr(error)))
    assert 20 < read < cases - 20
    tally("mutated data files", cases, failures)


NAMES = {
    "none": None, "letters": lambda k: "abcdefgh"[k], "counted": str, "from one": lambda k: str(k + 1),
    "years": lambda k: str(2001 + k), "wavelengths": lambda k: f"{400 + 0.5 * k}",
    "mixed": lambda k: ("id", str(k))[k > 0],
}  # fmt: skip


def test_tables_with_and_without_headers(tmp_path, tally):
    """A table is read as it was written, or the error says how to write it; no header is a row and no row a header."""
    rng, failures, cases, read = np.random.default_rng(7), [], 0, 0
    for case in range(2000):
        kind, named = rng.choice(list(NAMES)), rng.choice(["label", "species", "number"])
        n, d = int(rng.integers(2, 30)), int(rng.integers(1, 6))
        X = rng.integers(0, 4, (n, d)) if rng.random() < 0.5 else rng.standard_normal((n, d)).round(2)
        classes = rng.choice(["a b c", "0 1 2 3", "1 2", "1.0 -1.0", "y n"]).split()
        labels = rng.choice(classes, n).tolist()
        place = int(rng.integers(d + 1)) if named == "label" and NAMES[kind] else d
        rows = [
            [*map(str, row[:place]), label, *map(str, row[place:])]
            for row, label in zip(X.tolist(), labels, strict=True)
        ]
        if name_of := NAMES[kind]:
            head = [name_of(k) for k in range(d)]
            head.insert(place, name_of(d) if named == "number" else named)
            if head[-1] in labels and X.dtype.kind == "i":
                continue  # a row of such a table can look the same
            rows.insert(0, head)
        (tmp_path / "table.csv").write_text("".join(",".join(row) + "\n" for row in rows))
        _, y = np.unique(labels, return_inverse=True)
        cases += 1
        try:
            found = user_files.load(str(tmp_path / "table.csv"))
            read += 1
            if not (np.array_equal(found.X, X) and found.classes == max(y) + 1):
                failures.append((case, kind, named, rows[:3], "other data"))
        except datasets.DataError as error:
            expected = len(set(labels)) < 2 or len(set(labels)) > max(2, n // 2)
            if not (expected or "header" in str(error) or "or one named label" in str(error)):
                failures.append((case, kind, named, rows[:3], str(error)))
        except Exception as error:
            failures.append((case, repr(error)))
    assert read > cases // 2
    tally("tables with and without headers", cases, failures)


def test_mutated_files_of_users(tmp_path, tally):
    """Changed text and archives are read as finite data of the requested type, or the error names the file."""
    X = np.random.default_rng(8).standard_normal((12, 3)).round(3)
    np.savez(tmp_path / "mine.npz", X=X, y=np.arange(12) % 2)
    (tmp_path / "mine.csv").write_text("".join(f"{a},{b},{c},{k % 2}\n" for k, (a, b, c) in enumerate(X.tolist())))
    rng, cases, failures = np.random.default_rng(9), 0, []
    for name in ("mine.npz", "mine.csv"):
        path = tmp_path / name
        content = path.read_bytes()
        for _ in range(800):
            path.write_bytes(mutated(content, rng))
            cases += 1
            try:
                found = user_files.load(str(path), "float32")
                if not np.isfinite(found.X).all() or found.X.dtype != np.float32:
                    failures.append((name, cases, "not finite"))
            except datasets.DataError as error:
                failures += [] if str(path) in str(error) else [str(error)]
            except Exception as error:
                failures.append((name, cases, repr(error)))
    tally("mutated files of users", cases, failures)


def test_mutated_reports(tmp_path, tally):
    """Mutate every file of a finished run: the runs are read, or the error names the file."""
    folder = runs.execute(SPEC, tmp_path)
    known = json.loads((folder / "done.json").read_text())["loss"]
    rng, cases, failures = np.random.default_rng(6), 0, []
    for path in sorted(folder.glob("*.json*")):
        content = path.read_bytes()
        for _ in range(150):
            path.write_bytes(mutated(content, rng))
            cases += 1
            try:
                (run,) = sanc.lab.traces.read(tmp_path)
                if path.name == "trace.jsonl" and (run.final_loss != known or path.read_bytes() != content):
                    failures.append((path.name, "another trace"))
            except sanc.lab.traces.TraceError as error:
                failures += [] if str(folder) in str(error) else [str(error)]
            except Exception as error:
                failures.append((path.name, repr(error)))
        path.write_bytes(content)
    tally("mutated reports", cases, failures)
