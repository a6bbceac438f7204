"""The decisions of a recorded step on a GPU, by kernels of our own: a step then never waits for the host.

They stand in step.cu and are compiled when the first step is recorded, by the compiler that comes with torch. Where
there is none, a `NotRecordableError` says so, and steps are made eagerly.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from sanc.decisions import PLANS, Desk, Note, Orders, Outcome, Product, Report
from sanc.engine import Engine
from sanc.judge import Judge
from sanc.oracles.layout import Layout
from sanc.oracles.recording import NotRecordableError

MOST = 64
"""Largest Krylov space whose model is minimised on the device."""

_AT_ONCE = 4


def rules_of(desk: Desk) -> dict[str, float]:
    """Return the settings of an iteration as the numbers that step.cu reads, by name."""
    s, eps = desk.engine.settings, desk.space.eps
    return {
        "eta1": s.eta1,
        "eta2": s.eta2,
        "gamma": s.gamma,
        "floor": Judge(s, eps).floor,
        "ceiling": s.sigma_ceiling,
        "reject_ceiling": max(s.sigma_ceiling, s.sigma0),
        "interpolates": s.sigma_rule == "interpolate",
        "l1": s.L1,
        "l2": s.L2,
        "eps": eps,
        "epsilon": s.epsilon,
        "tolerance": s.gradient_tolerance,
        "guard": -s.epsilon if s.curvature_guard == "epsilon" else 0.0,
        "slack": s.gradient_tolerance**s.gradient_tolerance_power,
        "stays": s.otherwise == "stay",
        "descends": s.sign == "descent",
        "escapes": desk.escapes,
        "dim": desk.space.dim,
        "far": desk.far,
    }


def source(most: int, blocks: int, real: str, names: list[str]) -> str:
    """Return step.cu for Krylov spaces of a dimension and a type; `names` are those of the rules, in their order."""
    defined = {"MOST": most, "SUM_BLOCKS": blocks, "RULES": len(names)}
    defined |= {f"RULE_{name.upper()}": k for k, name in enumerate(names)}
    defined |= {f"ORDER_{name.upper()}": k for k, name in enumerate(Orders._fields)}
    defined |= {f"REPORT_{name.upper()}": k for k, name in enumerate(Report._fields)}
    defined |= {f"OUTCOME_{entry.name}": entry.value for entry in Outcome}
    defined |= {f"NOTE_{entry.name}": entry.value for entry in Note}
    defined |= {f"PLAN_{branch.name}": k for k, branch in enumerate(PLANS)}
    lines = [f"#define {name} {value}" for name, value in defined.items()]
    text = files("sanc").joinpath("step.cu").read_text(encoding="utf-8")
    return "\n".join([*lines, f"typedef {real} real;", text])


@cache
def _compiled(text: str, index: int) -> dict[str, Any]:
    """Compile the kernels for a device."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if torch.version.hip is not None:
        raise NotRecordableError("the kernels that decide on a step are for NVIDIA GPUs")
    if compiler is None:
        raise NotRecordableError(
            f"torch {torch.__version__} does not offer its compiler for kernels; update torch (2.11 has it)"
        )
    names = ("decide", "combine", "conclude", "exchange", "dots", "take_out", "normalise")
    try:
        with torch.cuda.device(index), _without_toolkit():
            first = compiler(text, names[0])
            module = torch.cuda._utils._CudaModule(first.module)
            return {name: getattr(module, name) for name in names}
    except Exception as problem:  # of a compiler that may change; steps can always be made eagerly
        raise NotRecordableError(f"the kernels that decide on a step cannot be compiled ({problem})") from problem


@contextmanager
def _without_toolkit() -> Iterator[None]:
    """Let torch compile where no CUDA toolkit is installed: it looks for headers there, of which we need none."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    try:
        cpp_extension.CUDA_HOME = home or os.curdir
        yield
    finally:
        cpp_extension.CUDA_HOME = home


class DeviceDesk(Desk):
    """A `Desk` whose numbers lie on a GPU and are dealt with there."""

    def __init__(self, engine: Engine, layout: Layout, limit: int, escapes: bool) -> None:
        if limit > MOST:
            raise NotRecordableError(f"krylov_dim = {limit} is above {MOST}, the most that is decided on the device")
        assert len(Report._fields) <= 32  # one warp sends them
        if layout.dim >= 2**31:
            raise NotRecordableError(f"{layout.dim} parameters are more than the kernels can count")
        super().__init__(engine, layout, limit, escapes)
        dtype, device = layout.kind
        rules = rules_of(self)
        self._blocks = min(512, -(-layout.dim // 1024))  # of 512 threads in a sum; elsewhere four of 256 instead
        text = source(limit, self._blocks, "double" if dtype == torch.float64 else "float", list(rules))
        index = torch.cuda.current_device() if device.index is None else device.index
        self._kernels = _compiled(text, index)
        self._rules = torch.tensor(list(rules.values()), dtype=torch.float64, device=device)
        self._parts = torch.zeros((limit, self._blocks), dtype=torch.float64, device=device)
        self._square = torch.zeros(self._blocks, dtype=torch.float64, device=device)
        leaves, begin = [leaf.detach() for leaf in layout.leaves], 0
        table = []
        # Leaves that do not lie in order are written by torch, from one that does.
        self._point = None if all(leaf.is_contiguous() for leaf in leaves) else leaves[0].new_empty(layout.dim)
        for leaf in leaves if self._point is None else [self._point]:
            table.append([leaf.data_ptr(), begin, leaf.numel()])
            begin += leaf.numel()
        self._widest = min(self._blocks, -(-max(size for _, _, size in table) // 1024))
        self._table = torch.tensor(table, dtype=torch.int64, device=device)

        # Host and device write into the same memory. Orders take turns: the host may be one step ahead of the device.
        self._mailed = torch.zeros(len(Report._fields), dtype=torch.float64, pin_memory=True)
        self._mail = [torch.zeros(len(Orders._fields), dtype=torch.float64, pin_memory=True) for _ in range(2)]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        weakref.finalize(self, self._arrived.synchronize).atexit = False  # not before the device is done with the mail

    def exchange(self, orders: Orders | None) -> None:
        self._mail.reverse()
        mail = self._mail[0]
        if orders is not None:
            mail.numpy()[:] = orders
        count = 0 if orders is None else len(orders)
        tensors = (self.report, self._mailed, len(self._mailed), mail, self.orders, count)
        with torch.cuda.device(self.layout.kind[1]):
            self._launch("exchange", *tensors)
        self._arrived.record(torch.cuda.current_stream(self.layout.kind[1]))

    def read(self) -> Report:
        self._arrived.synchronize()
        return Report(*self._mailed.tolist())

    def _launch(self, name: str, *arguments: Tensor | int, blocks: tuple[int, int] = (1, 1), threads: int = 32) -> None:
        self._kernels[name](grid=(*blocks, 1), block=(threads, 1, 1), args=list(arguments))

    def _sweep(self, name: str, *arguments: Tensor | int) -> None:
        """Launch a kernel that passes once over the parameters."""
        self._launch(name, *arguments, blocks=(4 * self._blocks, 1), threads=256)

    def _sum(self, name: str, *arguments: Tensor | int) -> None:
        """Launch a kernel that passes once over the parameters and leaves parts of sums."""
        self._launch(name, *arguments, blocks=(self._blocks, 1), threads=512)

    def norm(self, x: Tensor) -> Tensor:
        length = torch.empty(1, dtype=torch.float64, device=x.device)
        self._sum("take_out", x, x, 0, len(x), self._parts, length, self._square)
        self._launch("normalise", x, len(x), self._square, length, x, 0)
        return length

    def lanczos(self, product: Product, start: Tensor, rows: Tensor, reorthogonalise: bool) -> Tensor:
        n, d = rows.shape
        found = torch.empty(2 * n + 1, dtype=torch.float64, device=rows.device)
        spare = torch.empty(1, dtype=torch.float64, device=rows.device)
        self._sum("take_out", start, start, 0, d, self._parts, spare, self._square)
        self._sweep("normalise", start, d, self._square, found, rows[0], 1)
        for j in range(n):
            r = product(rows[j]).contiguous()
            first = 0 if reorthogonalise else max(j - 1, 0)
            count = j + 1 - first
            for again in range(1 + reorthogonalise):
                for k in range(0, count, _AT_ONCE):
                    self._sum("dots", r, rows[first + k :], min(_AT_ONCE, count - k), d, self._parts[k:])
                diagonal = spare if again else found[1 + j :]
                self._sum("take_out", r, rows[first:], count, d, self._parts, diagonal, self._square)
            length, last = found[1 + n + j :], j + 1 == n
            launch = self._launch if last else self._sweep
            launch("normalise", r, d, self._square, length, rows[j if last else j + 1], int(not last))
        return found

    def decide(self, value: Tensor, before: Tensor, x_norm: Tensor, coefficients: Tensor) -> None:
        tensors = (self._rules, self.orders, self.state, value, before, x_norm, coefficients, self.weights, self.report)
        self._launch("decide", *tensors)

    def combine(self, x: Tensor, g: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        trial, other = torch.empty_like(x), torch.empty_like(x)
        self._sweep("combine", self.weights, x, g, rows, len(x), trial, other)
        return trial, other

    def conclude(self, x: Tensor, trial: Tensor, other: Tensor, reached: Tensor, there: Tensor) -> None:
        tensors = (self._rules, self.state, self.report, reached, there, x, trial, other, self._table)
        self._launch("conclude", *tensors, blocks=(self._widest, len(self._table)), threads=256)
        if self._point is not None:
            self.layout.write(self._point)


def desk_on(device: torch.device) -> type[Desk]:
    """Return the kind of desk for a device."""
    return DeviceDesk if device.type == "cuda" else Desk
