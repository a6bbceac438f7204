"""Damaged, truncated or malicious files raise an error that names path and remedy, and never change a result."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import typer

import made_runs
import sanc
from sanc.lab import cli, directory, runs, study, traces
from sanc.lab.experiments import Panel, RunSpec
from sanc.lab.readers import READERS, DataError, Source, unpack

SPEC = RunSpec(Panel("own-logistic", "own", "logistic", "iris", ("sanc",), {"sigma0": 1.0}, calls=4000), "sanc", 0)
SPEC = replace(SPEC, panel=replace(SPEC.panel, problem="softmax"))


class StoppedError(Exception):
    pass


def interrupted(out):
    """Interrupt a run at half of its budget, after a checkpoint, and return its directory."""

    def tick(share, *_):
        if share > 0.5:
            raise StoppedError

    with pytest.raises(StoppedError):
        runs.execute(SPEC, out, tick=tick, checkpoint_every=0.0)
    return out / "runs" / SPEC.path


def outcome(folder):
    """Return the trace without times, the final loss and the status of a run."""
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text(encoding="utf-8").splitlines()]
    done = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows], done["loss"], done["status"]


def flips(content, count, seed):
    """Yield copies with one byte changed, at evenly spaced positions."""
    rng = np.random.default_rng(seed)
    for position in np.linspace(0, len(content) - 1, count).astype(int):
        changed = bytearray(content)
        changed[position] ^= int(rng.integers(1, 256))
        yield bytes(changed)


@pytest.mark.parametrize("name", ["checkpoint.pt", "trace.jsonl", "config.json"])
def test_a_flipped_byte_never_changes_the_result(tmp_path, name):
    whole = outcome(runs.execute(SPEC, tmp_path / "whole"))
    folder = interrupted(tmp_path / "cut")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    messages = []
    for changed in flips(files[name], 25, seed=1):
        for path in folder.iterdir():
            path.unlink()
        for other, content in files.items():
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(changed)
        try:
            assert outcome(runs.execute(SPEC, tmp_path / "cut")) == whole
        except sanc.SancError as error:
            messages.append(str(error))
    assert all(str(folder) in message and "remove" in message for message in messages)
    assert len(messages) >= (25 if name == "checkpoint.pt" else 1)


def test_a_changed_trace_of_a_finished_run_is_an_error(tmp_path):
    folder = runs.execute(SPEC, tmp_path)
    content = (folder / "trace.jsonl").read_bytes()
    assert len(traces.read(tmp_path)) == 1
    (folder / "trace.jsonl").write_bytes(content.replace(b"0.1", b"0.2", 1))
    with pytest.raises(traces.TraceError, match=r"trace\.jsonl: it has changed.*Remove"):
        traces.read(tmp_path)


def test_temporary_files_are_removed(tmp_path, monkeypatch):
    folder = interrupted(tmp_path)
    (folder / ".checkpoint.pt.1234").write_bytes(b"of a process that was killed")
    runs.execute(SPEC, tmp_path)
    assert not list(folder.glob(".*"))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        directory.write_atomically(tmp_path / "report.html", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    monkeypatch.undo()
    (tmp_path / ".report.html.99").write_bytes(b"old")
    os.utime(tmp_path / ".report.html.99", (0, 0))
    directory.write_atomically(tmp_path / "report.html", b"content")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_that_end_the_command_are_interrupts(number, code, capsys):
    kept = {other: signal.getsignal(other) for other in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for other in (signal.SIGHUP, signal.SIGTERM):  # nohup would ignore SIGHUP
        signal.signal(other, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as ended:
            cli._exit_with(lambda: signal.raise_signal(number) or 0)
        assert all(signal.getsignal(other) is signal.SIG_DFL for other in (signal.SIGHUP, signal.SIGTERM))
    finally:
        for other, handler in kept.items():
            signal.signal(other, handler)
    assert ended.value.exit_code == code and "Checkpoints are kept" in capsys.readouterr().out


HEADERS = [
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 2), }",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 2), ",
    b"{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (3,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (3, 2), }",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 2), }",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999, 2), }",
    b"{'descr': None, 'fortran_order': False, 'shape': (3, 2), }",
    b"\x00\xff(((((",
    b"'" * 60,
]


@pytest.mark.parametrize("header", HEADERS)
def test_errors_for_invalid_npy_headers(tmp_path, header):
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(7)
    (tmp_path / "X.npy").write_bytes(content)
    np.save(tmp_path / "y.npy", np.zeros(3))
    files = [(Source(tmp_path / name), tmp_path / name) for name in ("X.npy", "y.npy")]
    with pytest.raises(DataError, match=r"X\.npy.*fetch it again"):
        list(READERS["npy"](files, None, np.dtype(float)))


def test_errors_for_malicious_archives(tmp_path):
    path, out = tmp_path / "a.tar.gz", tmp_path / "plain"
    with tarfile.open(path, "w:gz") as archive:
        for kind, name in ((tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "hard"), (tarfile.DIRTYPE, "folder")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        member = tarfile.TarInfo("good")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"12345"))
    for name in ("link", "hard", "folder", "none"):
        with pytest.raises(DataError, match="no such member, or it is not a regular file"):
            unpack(Source(path, name), out, text=False)
    assert unpack(Source(path, "good"), out, text=False).read_bytes() == b"12345"
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    with gzip.open(path, "wb") as stream:
        stream.write(header.tobuf())
        stream.write(bytes(1024))
    with pytest.raises(DataError, match=r"a\.tar\.gz .*(read of 1,073,741,824 bytes|no such member)"):
        unpack(Source(path, "good"), out, text=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "3"),
        ("config.json", '{"figure": 3}'),
        ("config.json", "[" * 100_000),
        ("config.json", None),
        ("environment.json", "7"),
        ("done.json", '{"loss": "low"}'),
        ("done.json", '"done"'),
        ("trace.jsonl", "3\n"),
        ("trace.jsonl", '{"iteration": "first"}\n'),
        ("trace.jsonl", json.dumps(made_runs.line(0, "low", 10)) + "\n"),
        ("trace.jsonl", json.dumps(made_runs.line(0, 10**400, 10)) + "\n"),
        ("trace.jsonl", json.dumps(made_runs.line(0, 1.0, 10, branch="sideways")) + "\n"),
        ("trace.jsonl", json.dumps(made_runs.line(0, 1.0, 10, sigma=[1])) + "\n"),
        ("trace.jsonl", "[" * 100_000 + "\n"),
    ],
)
def test_errors_of_a_report_name_the_malformed_file(tmp_path, name, content, capsys):
    folder = made_runs.write_run(
        tmp_path, "fig1-w1a", "sanc", 0, [made_runs.line(-1, 1.0, 0), made_runs.line(0, 0.5, 9)]
    )
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    error = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert name in error and "Remove" in error and "Traceback" not in error


def test_a_folder_without_a_seed_number_is_an_error(tmp_path):
    folder = made_runs.write_run(tmp_path, "fig1-w1a", "sanc", 0, [made_runs.line(-1, 1.0, 0)])
    folder.rename(folder.with_name("seed-x"))
    with pytest.raises(traces.TraceError, match="'x' is not the number"):
        study.report(tmp_path, cli.console)
