"""`minimize_many`: independent minimisations, one for each row of the starting points."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from sanc.autograd.guards import runs_uncompiled
from sanc.core.bounded.bounds import Box
from sanc.core.runs.limits import iteration_limit, time_limit
from sanc.core.space import Space
from sanc.core.units import default_tolerance
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    is_number,
    require,
    require_bool,
    require_integer,
    require_positive,
    shown,
)
from sanc.many.endings import is_success
from sanc.many.functions import FunctionProblem, LargeFunctionProblem, RowFunction
from sanc.many.lanczos import MAX_CERTIFICATE_DIM
from sanc.many.result import ManyResult
from sanc.many.rules import ROBUST_RULES, RowRules
from sanc.many.running import Progress, RowRun, RunLimits, rows_in_memory
from sanc.minimisation.arguments import check_callback, reject_arguments
from sanc.minimisation.bounds import build_box
from sanc.minimisation.objective import checked_point
from sanc.minimisation.trees import Tree, is_tree, map_tree, tree_leaves
from sanc.options import RowSettings
from sanc.presets import compose

TOLERANCES = {dtype: default_tolerance(torch.finfo(dtype).eps) for dtype in (torch.float64, torch.float32)}
"""Default tolerances, as of `minimize` and `least_squares`."""
LARGEST_DIM = 512
"""Variables of a row for which Hessians are dense; 512² numbers are 2 MB in float64."""


@runs_uncompiled
def minimize_many(
    fun: Callable[..., Any],
    x0: Any = None,
    args: Sequence[Any] = (),
    *,
    in_dims: int | Sequence[int | None] | None = 0,
    vectorized: bool = False,
    starts: Any = None,
    bounds: Any = None,
    tol: float | None = None,
    curvature_tol: float | None = None,
    max_iter: int | None = 10_000,
    max_time: float | None = None,
    chunk_size: int | str = "auto",
    callback: Callable[[Progress], Any] | None = None,
    progress: bool = False,
    seed: int = 0,
    **settings: Unpack[RowSettings],
) -> ManyResult:
    """Find second-order points of many independent problems, one for each row of `x0`.

    Every row has its own σ, ratio test, escape steps and ending, by the rules of `minimize`. All rows are evaluated
    together, and those that end leave the batch. Hessians are dense up to 512 variables in a row. Beyond, steps are
    made in Krylov spaces, and the bound of the smallest eigenvalue holds with a probability of 0.99, as in `minimize`.

    Parameters
    ----------
    fun : callable
        A torch function ``fun(x, *args)`` of one row that returns a scalar tensor; `torch.func.vmap` maps it over the
        rows. With `vectorized`, a function of all rows that returns a value for each.
    x0 : array, Tensor or pytree of these
        The starting points, with a row for each problem along the first dimension of every leaf.
    args : sequence
        Further arguments of `fun`.
    in_dims : int, None or a sequence of these
        As in `torch.func.vmap`, for `args`: 0 if an argument has an entry for each row along its first dimension, None
        if all rows share it. Arguments without tensors are shared.
    vectorized : bool
        Whether `fun` takes all rows. It is called with some of the rows, and the entries of `args` that belong to them.
    starts : int, array or Tensor, optional
        Many starts of one problem, instead of `x0`: starting points, or the number of Sobol points between finite
        `bounds`. `args` are then shared. See `ManyResult.best` and `ManyResult.minima`.
    bounds : optional
        As in `minimize`, for the variables of one row; or a pair (lower, upper) of tensors like `x0`, with bounds for
        each row. Nothing is evaluated outside.
    tol, curvature_tol : float, optional
        Tolerances on ‖∇f‖ and negative curvature, with the defaults of `minimize`.
    max_iter, max_time : number, optional
        Limits on the iterations of each row, and on seconds.
    chunk_size : int or "auto"
        Rows in the batch at a time; new ones enter as others end. "auto" depends on the memory.
    callback : callable, optional
        Receives a `Progress` after each round: counts of active, pending and ended rows. True or StopIteration
        ends the run.
    progress : bool
        Print the number of rows that have ended, on one line of the standard error stream.
    seed : int
        Seed of Sobol points, and of signs where both are equally good.
    **settings
        Settings of the method as of `minimize`: `eta1`, `eta2`, `first_radius`, `max_resolves`, `sigma_floor`,
        `sigma_ceiling` and `gamma`.

    Returns
    -------
    ManyResult
        With x, fun, jac, success, status, nit, nfev, njev, grad_norm, lambda_min, each with an entry for each row. A
        row of it, such as ``res[3]``, is a result as that of `minimize`, with its certificate.

    Examples
    --------
    >>> import torch, sanc
    >>> x0 = torch.zeros(3, 2, dtype=torch.float64)
    >>> centres = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    >>> res = sanc.minimize_many(lambda x, centre: ((x - centre) ** 2).sum(), x0, (centres,))
    >>> res.success.all().item(), res.x.round().tolist()
    (True, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    """
    rules = _rules_with(settings)
    if not callable(fun):
        raise ArgumentTypeError(f"fun = {shown(fun)} cannot be called: pass a function of one row.")
    require_bool("vectorized", vectorized)
    if starts is not None:
        if x0 is not None:
            raise ArgumentError("x0 and starts were both passed: pass starts for one problem, or x0 for many.")
        x0, in_dims = _starting_points(starts, bounds, seed), None
    points = StartingRows(x0)
    x = points.flat
    is_large = x.shape[1] > LARGEST_DIM
    if is_large and bounds is not None:
        raise ArgumentError(
            f"bounds cannot be used with {x.shape[1]} variables in a row: use sanc.minimize in a loop above "
            f"{LARGEST_DIM}."
        )
    arguments, dims = _checked_arguments(args, in_dims, x)
    function = RowFunction(fun, arguments, dims, vectorized, points.build)
    entries = x.shape[1] * min(x.shape[1], MAX_CERTIFICATE_DIM)
    options = RunOptions(
        max_iter=max_iter, max_time=max_time, chunk_size=chunk_size, callback=callback, progress=progress, seed=seed
    )
    limits = options.limits(x, entries)
    lower, upper = row_bounds(bounds, points)
    tolerance = TOLERANCES[x.dtype] if tol is None else tol
    require(is_number(tolerance) and 0 < tolerance < math.inf, "tol", tol, "pass a positive number")
    require_positive("curvature_tol", curvature_tol, optional=True)
    x = project_start(x, lower, upper)
    function.check(x, stores_hessians=not is_large)
    eps = torch.finfo(x.dtype).eps
    kind = LargeFunctionProblem if is_large else FunctionProblem
    problem = kind(function, eps, tolerance, curvature_tol, tol is None, rules)
    run = RowRun(problem, limits)
    run.run(x, lower, upper)
    return build_result(run.outputs, run.rounds, points, lower, upper, problem.confidence)


def _rules_with(settings: Mapping[str, Any]) -> RowRules:
    """Return the rules of the default with settings of the caller; raise an error for one that rows do not have."""
    names = {item.name for item in fields(RowRules)}
    parameters = inspect.signature(minimize_many).parameters.keys() - {"settings"}
    others = {name: value for name, value in settings.items() if name not in names}
    reject_arguments("minimize_many", others, parameters | names)
    return RowRules.of(compose("sanc", "robust", settings)) if settings else ROBUST_RULES


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run of many rows as users pass them.

    Attributes
    ----------
    tol, max_iter, max_time, chunk_size, callback, progress, seed
        As in `minimize_many`.
    """

    tol: float | None = None
    max_iter: int | None = None
    max_time: float | None = None
    chunk_size: int | str = "auto"
    callback: Callable[[Progress], Any] | None = None
    progress: bool = False
    seed: int = 0

    def limits(self, x: Tensor, entries: int) -> RunLimits:
        """Return the limits of a run after checks; `entries` are the numbers that one row holds at a time."""
        require_integer("seed", self.seed, 0)
        require_bool("progress", self.progress)
        check_callback(self.callback, 1, "pass a function of the progress, called as callback(progress)")
        if self.chunk_size != "auto":
            require_integer("chunk_size", self.chunk_size, 1)
        return RunLimits(
            max_iter=iteration_limit(self.max_iter),
            max_time=time_limit(self.max_time),
            chunk_size=rows_in_memory(x, entries) if self.chunk_size == "auto" else int(self.chunk_size),
            callback=self.callback,
            progress=self.progress,
            seed=self.seed,
        )


class StartingRows:
    """The starting points of all rows as a matrix, and the form in which they were passed.

    Attributes
    ----------
    flat : Tensor
        A row of variables for each problem.
    example : any
        The first row, in the form of the caller.
    """

    def __init__(self, x0: Any) -> None:
        if x0 is None:
            raise ArgumentError("x0 = None cannot be used: pass a row for each problem, or starts.")
        self._is_tree = is_tree(x0)
        self._is_numpy = not self._is_tree and not isinstance(x0, Tensor)
        if self._is_tree:
            self._set_tree(x0)
        else:
            self._set_array(x0)
        if len(self.flat) == 0 or self.flat.shape[1] == 0:
            raise ArgumentError("x0 is empty: pass at least one row with one variable.")

    def _set_array(self, x0: Any) -> None:
        try:
            checked = checked_point(x0, "x0")
        except ArgumentTypeError:
            if isinstance(x0, list | tuple) and len({np.size(row) for row in x0}) > 1:
                raise ArgumentError(
                    "x0 has rows of different length: pass rows of one length, or call minimize for each."
                ) from None
            raise
        tensor = checked.detach() if isinstance(checked, Tensor) else torch.from_numpy(np.array(checked))
        if tensor.ndim < 2:
            raise ArgumentError(
                f"x0 has shape {tuple(tensor.shape)}: pass a row for each problem, such as x0[:, None] for problems of "
                "one variable, or call minimize for one problem."
            )
        self.flat = tensor.reshape(len(tensor), -1).clone()
        self._shape = tuple(tensor.shape[1:])
        self.example: Any = tensor[0]

    def _set_tree(self, x0: Any) -> None:
        leaves = [torch.as_tensor(checked_point(leaf, name)) for name, leaf in tree_leaves(x0, "x0")]
        lengths = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
        if len(lengths) != 1 or 0 in lengths:
            raise ArgumentError(
                f"x0 has leaves with {sorted(lengths)} rows: pass leaves with the same first dimension, a row for each "
                "problem."
            )
        self.example = map_tree(lambda leaf: torch.as_tensor(checked_point(leaf, "x0"))[0], x0)
        self._tree = Tree(self.example, "x0")
        self.flat = torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)

    def build(self, row: Tensor) -> Any:
        """Return a row in the form of the caller."""
        return self._tree.build(row) if self._is_tree else row.reshape(self._shape)

    def build_all(self, rows: Tensor) -> Any:
        """Return all rows in the form of the caller."""
        if self._is_tree:
            return torch.func.vmap(self._tree.build)(rows)
        return self.build_numbers(rows.reshape(len(rows), *self._shape))

    def build_numbers(self, numbers: Tensor) -> Any:
        """Return a tensor, or an array if the caller passed arrays."""
        return numbers.cpu().numpy() if self._is_numpy else numbers


def _starting_points(starts: Any, bounds: Any, seed: int) -> Tensor | Any:
    """Return many starting points of one problem."""
    if not is_number(starts, int):
        return starts
    require_integer("starts", starts, 1, optional=True)
    if bounds is None:
        raise ArgumentError(f"starts = {starts} needs finite bounds: pass bounds, or the starting points themselves.")
    pairs = bounds if hasattr(bounds, "lb") else list(bounds)
    dim = np.size(pairs.lb) if hasattr(pairs, "lb") else len(pairs)
    like = torch.zeros(dim, dtype=torch.float64)
    box = build_box(bounds, like, Space(dim, like.dtype, like.device), like)
    if box is None or not bool((box.lower.isfinite() & box.upper.isfinite()).all()):
        raise ArgumentError(f"starts = {starts} needs finite bounds for every variable: pass them, or the points.")
    sequence: Any = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    sobol = sequence.draw(starts, dtype=torch.float64)
    return box.lower + sobol * (box.upper - box.lower)


def _checked_arguments(args: Any, in_dims: Any, x: Tensor) -> tuple[list[Any], list[int | None]]:
    """Return the further arguments as tensors where they are arrays, and whether each has an entry for each row."""
    if not isinstance(args, tuple | list):
        args = (args,)
    dims = list(in_dims) if isinstance(in_dims, tuple | list) else [in_dims] * len(args)
    if len(dims) != len(args):
        raise ArgumentError(f"in_dims has {len(dims)} entries for {len(args)} arguments: pass one for each of args.")
    converted = []
    for k, arg in enumerate(args):
        arg = map_tree(lambda leaf: _as_tensor(leaf, x), arg)
        leaves = [leaf for _, leaf in tree_leaves(arg, "args") if isinstance(leaf, Tensor)]
        if not leaves:
            dims[k] = None
        if dims[k] not in (0, None):
            raise ArgumentError(f"in_dims[{k}] = {dims[k]!r} cannot be used: pass 0 for rows, or None for all rows.")
        for leaf in leaves:
            if leaf.device != x.device:
                raise ArgumentError(f"args[{k}] is on {leaf.device}, and x0 on {x.device}: pass both on one device.")
            if dims[k] == 0 and (leaf.ndim == 0 or len(leaf) != len(x)):
                raise ArgumentError(
                    f"args[{k}] has shape {tuple(leaf.shape)} for {len(x)} rows: pass an entry for each row along the "
                    f"first dimension, or in_dims with None for args[{k}] if all rows share it."
                )
        converted.append(arg)
    return converted, dims


def _as_tensor(leaf: Any, x: Tensor) -> Any:
    """Return an array as a tensor, of the type of x if it has floating-point numbers."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "fiub":
        return leaf
    tensor = torch.from_numpy(leaf).to(x.device)
    return tensor.to(x.dtype) if tensor.is_floating_point() else tensor


def row_bounds(bounds: Any, points: StartingRows) -> tuple[Tensor | None, Tensor | None]:
    """Return the bounds of all rows; None if there are none."""
    x = points.flat
    if bounds is None:
        return None, None
    if isinstance(bounds, tuple | list) and len(bounds) == 2 and all(_is_for_all(side, x) for side in bounds):
        sides = [torch.as_tensor(side, dtype=x.dtype, device=x.device).reshape(x.shape) for side in bounds]
        wrong = torch.nonzero(~(sides[0] <= sides[1]))
        if len(wrong):
            row, k = wrong[0].tolist()
            pair = f"({float(sides[0][row, k]):g}, {float(sides[1][row, k]):g})"
            raise ArgumentError(f"bounds of row {row}, variable {k}, are {pair}: pass lower ≤ upper.")
        return sides[0], sides[1]
    box = build_box(bounds, points.example, Space(x.shape[1], x.dtype, x.device), x[0])
    if box is None:
        return None, None
    return box.lower.expand_as(x).contiguous(), box.upper.expand_as(x).contiguous()


def _is_for_all(side: Any, x: Tensor) -> bool:
    """Return whether a side has bounds for every row."""
    shape = tuple(np.shape(side)) if isinstance(side, np.ndarray | Tensor) else ()
    return len(shape) > 1 and shape[0] == len(x) and math.prod(shape) == x.numel()


def project_start(x: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Return the starting points in the box."""
    return x if lower is None else x.clamp(lower, upper)


def build_result(
    outputs: dict[str, Tensor],
    rounds: int,
    points: StartingRows,
    lower: Tensor | None,
    upper: Tensor | None,
    confidence: float = 1.0,
) -> ManyResult:
    """Return the result of all rows."""
    x, g, status = outputs["x"], outputs["g"].to(points.flat.dtype), outputs["status"]
    active = multipliers = None
    if lower is not None and upper is not None:
        sides = Box(lower, upper).active(x, g).long()
        active, multipliers = points.build_all(sides), points.build_all(torch.where(sides != 0, g, 0.0))
    names = ("nit", "nfev", "njev", "grad_norm", "lambda_min", "lambda_error", "tol", "curvature_tol")
    return ManyResult(
        x=points.build_all(x),
        fun=points.build_numbers(outputs["value"].to(x.dtype)),
        jac=points.build_all(g),
        success=points.build_numbers(is_success(status)),
        status=points.build_numbers(status),
        **{name: points.build_numbers(outputs[name]) for name in names},
        active=active,
        multipliers=multipliers,
        rounds=rounds,
        confidence=confidence,
        flat=x,
    )
