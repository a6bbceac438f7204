"""Files that were damaged, cut short or made to harm: an error that names path and remedy, never another result."""

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
    """Make a run that stops at half of its budget, with a checkpoint; return its directory."""

    def tick(share, *_):
        if share > 0.5:
            raise StoppedError

    with pytest.raises(StoppedError):
        runs.execute(SPEC, out, tick=tick, checkpoint_every=0.0)
    return out / "runs" / SPEC.path


def outcome(folder):
    """The trace without its times, and what the run ended with."""
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text(encoding="utf-8").splitlines()]
    done = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows], done["loss"], done["status"]


def flips(content, count, seed):
    """Copies with one byte changed, at places that are spread over all of it."""
    rng = np.random.default_rng(seed)
    for place in np.linspace(0, len(content) - 1, count).astype(int):
        changed = bytearray(content)
        changed[place] ^= int(rng.integers(1, 256))
        yield bytes(changed)


@pytest.mark.parametrize("name", ["checkpoint.pt", "trace.jsonl", "config.json"])
def test_a_flipped_byte_never_leads_to_another_result(tmp_path, name):
    whole = outcome(runs.execute(SPEC, tmp_path / "whole"))
    folder = interrupted(tmp_path / "cut")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused = []
    for changed in flips(files[name], 25, seed=1):
        for path in folder.iterdir():
            path.unlink()
        for other, content in files.items():
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(changed)
        try:
            assert outcome(runs.execute(SPEC, tmp_path / "cut")) == whole
        except sanc.SancError as problem:
            refused.append(str(problem))
    assert all(str(folder) in said and "remove" in said for said in refused)
    assert len(refused) >= (25 if name == "checkpoint.pt" else 1)


def test_a_finished_trace_that_changed_is_told(tmp_path):
    folder = runs.execute(SPEC, tmp_path)
    content = (folder / "trace.jsonl").read_bytes()
    assert len(traces.read(tmp_path)) == 1
    (folder / "trace.jsonl").write_bytes(content.replace(b"0.1", b"0.2", 1))
    with pytest.raises(traces.TraceError, match=r"trace\.jsonl: it has changed.*Remove"):
        traces.read(tmp_path)


def test_no_temporary_files_stay(tmp_path, monkeypatch):
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
def test_a_closed_terminal_is_an_interrupt(number, code, capsys):
    kept = {other: signal.getsignal(other) for other in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for other in (signal.SIGHUP, signal.SIGTERM):  # nohup ignores the first
        signal.signal(other, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as left:
            cli._leave(lambda: signal.raise_signal(number) or 0)
        assert all(signal.getsignal(other) is signal.SIG_DFL for other in (signal.SIGHUP, signal.SIGTERM))
    finally:
        for other, handler in kept.items():
            signal.signal(other, handler)
    assert left.value.exit_code == code and "Nothing is lost" in capsys.readouterr().out


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
def test_npy_headers_that_make_no_sense(tmp_path, header):
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(7)
    (tmp_path / "X.npy").write_bytes(content)
    np.save(tmp_path / "y.npy", np.zeros(3))
    files = [(Source(tmp_path / name), tmp_path / name) for name in ("X.npy", "y.npy")]
    with pytest.raises(DataError, match=r"X\.npy.*fetch it again"):
        list(READERS["npy"](files, None, np.dtype(float)))


def test_archives_that_mean_harm(tmp_path):
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
        with pytest.raises(DataError, match="no such member, or it is no plain file"):
            unpack(Source(path, name), out, text=False)
    assert unpack(Source(path, "good"), out, text=False).read_bytes() == b"12345"
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    with gzip.open(path, "wb") as stream:
        stream.write(header.tobuf())
        stream.write(bytes(1024))
    with pytest.raises(DataError, match=r"a\.tar\.gz .*(piece of 1,073,741,824 bytes|no such member)"):
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
def test_a_report_of_malformed_files_names_the_file(tmp_path, name, content, capsys):
    folder = made_runs.write_run(
        tmp_path, "fig1-w1a", "sanc", 0, [made_runs.line(-1, 1.0, 0), made_runs.line(0, 0.5, 9)]
    )
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert name in said and "Remove" in said and "Traceback" not in said


def test_a_report_of_a_folder_that_is_no_seed(tmp_path):
    folder = made_runs.write_run(tmp_path, "fig1-w1a", "sanc", 0, [made_runs.line(-1, 1.0, 0)])
    folder.rename(folder.with_name("seed-x"))
    with pytest.raises(traces.TraceError, match="'x' is not the number"):
        study.report(tmp_path, cli.console)
