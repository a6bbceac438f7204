"""Check that the full HIGGS (11 million rows of 28 features) is parsed and trained on within 4 GiB of memory.

    python -m benchmarks.higgs                    # full size: 8.9 GB of text, 1.2 GB parsed, minutes
    python -m benchmarks.higgs --rows 1000000     # a minute
    python -m benchmarks.higgs --json

The benchmark writes a file in the format of LIBSVM's HIGGS, 19 digits to a number, with random features and labels from
a planted logistic model. `sanc.lab.datasets` parses the file, and SANC trains on the memory map. The file goes to a
temporary folder, or to --dir, where it is kept and used again. The exit status is 1 if the peak of the resident memory,
mapped pages included, exceeds --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import sanc
from benchmarks.reporting import command
from sanc.lab import datasets

FEATURES = 28
BLOCK = 10_000


def peak() -> int:
    """Return the peak of the resident memory so far, in bytes."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def generate(path: Path, rows: int, seed: int = 0) -> None:
    """Write LIBSVM text like ``1 1:+8.692932128906250000e-01 2:-6.350818276405334473e-01 …``."""
    rng = np.random.default_rng(seed)
    planted = rng.normal(size=FEATURES) / np.sqrt(FEATURES)
    quads = np.frombuffer("".join(f"{number:04d}" for number in range(10_000)).encode(), np.uint8).reshape(-1, 4)
    value = b"+0.000000000000000000e-01"
    pieces = [b"0"]
    places = []
    for feature in range(1, FEATURES + 1):
        key = f" {feature}:".encode()
        places.append(sum(map(len, pieces)) + len(key))
        pieces.append(key + value)
    line = np.frombuffer(b"".join(pieces) + b"\n", np.uint8)
    with path.open("wb") as output:
        for start in range(0, rows, BLOCK):
            count = min(BLOCK, rows - start)
            text = np.tile(line, (count, 1))
            scores = np.zeros(count)
            for weight, place in zip(planted, places, strict=True):
                negative = rng.random(count) < 0.5
                lead = rng.integers(1, 10, count)
                digits = rng.integers(0, 10_000, (count, 5))
                large = rng.random(count) < 0.3
                text[negative, place] = ord("-")
                text[:, place + 1] += lead.astype(np.uint8)
                for group in range(4):
                    text[:, place + 3 + 4 * group : place + 7 + 4 * group] = quads[digits[:, group]]
                text[:, place + 19 : place + 21] = quads[digits[:, 4], :2]
                text[large, place + 22] = ord("+")
                text[large, place + 24] = ord("0")
                size = (lead + digits[:, 0] / 10_000) * np.where(large, 1.0, 0.1)
                scores += weight * np.where(negative, -size, size)
            text[:, 0] += (rng.random(count) < 1 / (1 + np.exp(-scores))).astype(np.uint8)
            output.write(text.data)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate, parse and train; return sizes, times and peaks of memory."""

    def report(words: str) -> None:
        if not options.json:
            print(words, flush=True)

    result: dict[str, Any] = {"rows": options.rows, "features": FEATURES}
    os.environ["SANC_CACHE"] = str(folder / "parsed")
    dataset = replace(datasets.CATALOGUE["higgs"], rows=options.rows)
    path = folder / "HIGGS"
    clock = time.perf_counter()
    if not path.exists():
        scratch = path.with_name("HIGGS.tmp")
        generate(scratch, options.rows)
        scratch.replace(path)
        result["generate_seconds"] = time.perf_counter() - clock
    result["text_bytes"] = path.stat().st_size
    report(f"text     {result['text_bytes'] / 1e9:.2f} GB for {options.rows:,} rows")

    clock = time.perf_counter()
    loaded = datasets.load_set(dataset, folder, dtype="float32")
    seconds = time.perf_counter() - clock
    result |= {"parse_seconds": seconds, "parse_rows_per_second": len(loaded.y) / seconds, "parse_peak_bytes": peak()}
    rates = f"{len(loaded.y) / seconds:,.0f} rows/s, {result['text_bytes'] / seconds / 1e6:.0f} MB/s"
    report(f"parse    {seconds:.1f} s, {rates}, peak {peak() / 2**30:.2f} GiB")
    clock = time.perf_counter()
    loaded = datasets.load_set(dataset, folder, dtype="float32")
    result["reload_seconds"] = time.perf_counter() - clock
    report(f"reload   {result['reload_seconds']:.3f} s, X is a {type(loaded.X).__name__} of {loaded.X.dtype}")

    n = len(loaded.y)
    problem = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1e-3)
    w0 = np.zeros(FEATURES, dtype=np.float32)
    before = problem.value(w0)
    clock = time.perf_counter()
    answer = sanc.minimize(
        problem, w0, method="sanc", preset="paper", batch_size=n // 20, max_iter=options.iterations, certify=False
    )
    seconds = time.perf_counter() - clock
    result |= {
        "train_seconds": seconds,
        "iterations": answer.nit,
        "iterations_per_second": answer.nit / seconds,
        "loss_before": before,
        "loss_after": problem.value(answer.x),
        "peak_bytes": peak(),
        "limit_bytes": int(options.limit * 2**30),
    }
    report(f"train    {answer.nit} iterations in {seconds:.1f} s, loss {before:.4f} to {result['loss_after']:.4f}")
    report(f"peak     {peak() / 2**30:.2f} GiB of resident memory; the limit is {options.limit:g} GiB")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__)
    parser.add_argument("--rows", type=int, default=11_000_000, help="rows of the file")
    parser.add_argument("--dir", type=Path, help="folder in which the files are kept; by default a temporary one")
    parser.add_argument("--iterations", type=int, default=20, help="training iterations")
    parser.add_argument("--limit", type=float, default=4.0, help="largest allowed peak of the memory, in GiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    if options.rows < 100:
        parser.error(f"--rows {options.rows} is too small: pass at least 100")
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        result = run(options.dir, options)
    else:
        with tempfile.TemporaryDirectory(prefix="sanc-higgs-") as folder:
            result = run(Path(folder), options)
    if options.json:
        print(json.dumps(result, indent=1))
    return int(result["peak_bytes"] > result["limit_bytes"])


if __name__ == "__main__":
    sys.exit(main())
