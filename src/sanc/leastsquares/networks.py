"""Residuals of a network at points: differential equations, boundary values, observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from sanc.errors import ArgumentError, ArgumentTypeError, is_number, require, require_integer, shown

__all__ = ["NetworkResiduals"]

_MAX_CHUNK_ENTRIES = 2**22
"""Entries of the Jacobian that are computed at once if `chunk_size` is None: 32 MB in float64, near a CPU's caches."""


@dataclass(frozen=True)
class _Term:
    """Residuals of one function at its points.

    Attributes
    ----------
    function : callable
        The residual at one point.
    points : tuple of Tensor
        The points, and further arguments.
    weight : float
        The weight of the term in the cost.
    """

    function: Callable[..., Tensor]
    points: tuple[Tensor, ...]
    weight: float

    def __len__(self) -> int:
        return len(self.points[0])


class NetworkResiduals:
    """Residuals of a network at points, as a function of its parameters; pass it to `least_squares`.

    The cost is ½ Σ_t w_t mean_i r_t(u, x_i)², over terms t with weights w_t: residual i of a term is multiplied by
    √(w_t/N_t). Each residual depends on one point, so that a Jacobian costs little more than a gradient.

    Parameters
    ----------
    module : torch.nn.Module
        The network. It is not changed. Use float64, in which least squares can reach small residuals.
    terms : sequence of tuples
        ``(function, points)`` or ``(function, points, weight)``. ``function(u, x)`` returns the residual at one point
        x, or a vector of residuals; ``u(x)`` is the network's output there, a scalar if it has one entry. Derivatives
        of u are those of `torch.func`. `points` is a tensor with a row for each point, or a tuple of tensors whose rows
        are the further arguments of `function`, such as observations.
    chunk_size : int, optional
        Points whose rows of the Jacobian are computed at once. By default as many as fit into some megabytes.

    Attributes
    ----------
    start : dict of Tensor
        Copies of the parameters that require gradients, by name: the starting point.

    Examples
    --------
    >>> import torch, sanc
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    >>> x = torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
    >>> decay = lambda u, x: torch.func.grad(u)(x)[0] + 2 * u(x)
    >>> residuals = sanc.NetworkResiduals(net, [(decay, x), (lambda u, x: u(x) - 1, x[:1])])
    >>> res = sanc.least_squares(residuals, residuals.start, max_iter=20, certify=False)
    >>> residuals.load(res.x)
    >>> bool((net(x) - torch.exp(-2 * x)).abs().max() < 1e-2)
    True
    """

    def __init__(
        self, module: torch.nn.Module, terms: Sequence[tuple[Any, ...]], chunk_size: int | None = None
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentTypeError(f"module = {shown(module)} is no torch.nn.Module: pass the network.")
        self.start = {
            name: parameter.detach().clone() for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        if not self.start:
            raise ArgumentError("module has no parameter that requires a gradient: pass a network to be fitted.")
        if not isinstance(terms, list | tuple) or not terms:
            raise ArgumentError(f"terms = {shown(terms)} is no list of terms: pass [(function, points), ...].")
        require_integer("chunk_size", chunk_size, 1, optional=True)
        self.module = module
        self._terms = [_checked_term(term, number) for number, term in enumerate(terms)]
        self._chunk_size = chunk_size

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the residuals of all terms in one vector."""
        self._check(parameters)
        return torch.cat([self._residuals(term, parameters) for term in self._terms])

    def jacobian(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the Jacobian: a row for each residual, and a column for each entry of the parameters in order."""
        self._check(parameters)
        return torch.cat([self._rows(term, parameters) for term in self._terms])

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy parameters, for example of a result, into the network."""
        self._check(parameters)
        parameters_by_name = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in parameters.items():
                parameters_by_name[name].copy_(tensor)

    def _check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise an error unless the network has parameters of these names and shapes."""
        if not isinstance(parameters, Mapping) or parameters.keys() != self.start.keys():
            raise ArgumentError(
                f"x0 = {shown(parameters)} has not the names of the network's parameters: pass residuals.start, or a "
                "dictionary with the same names."
            )
        for name, tensor in parameters.items():
            if tensor.shape != self.start[name].shape:
                raise ArgumentError(
                    f"x0[{name!r}] has shape {tuple(tensor.shape)}: pass {tuple(self.start[name].shape)}, as the "
                    "network has it."
                )

    def _at_point(self, term: _Term, parameters: Mapping[str, Tensor], *point: Tensor) -> Tensor:
        """Return the residuals of a term at one point, as a scalar or a vector."""

        def u(x: Tensor) -> Tensor:
            output: Tensor = functional_call(self.module, dict(parameters), (x,))
            return output.reshape(()) if output.numel() == 1 else output

        r = term.function(u, *point)
        if not isinstance(r, Tensor):
            raise ArgumentTypeError(f"a function of terms returned {shown(r)}: return a tensor, the residual at x.")
        r = r.reshape(()) if r.numel() == 1 else r.reshape(-1)
        return r * math.sqrt(term.weight / len(term))

    def _residuals(self, term: _Term, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the residuals of a term at all of its points."""

        def at(*point: Tensor) -> Tensor:
            return self._at_point(term, parameters, *point)

        r: Tensor = vmap(at, randomness="error")(*term.points)
        return r.reshape(-1)

    def _rows(self, term: _Term, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of the Jacobian of a term, computed in chunks of points."""

        def at(values: Mapping[str, Tensor], *point: Tensor) -> Tensor:
            return self._at_point(term, values, *point)

        def rows_at(*point: Tensor) -> Tensor:
            count = self._count(term, parameters)
            derivatives = (grad if count is None else jacrev)(at)(dict(parameters), *point)
            return torch.cat([derivatives[name].reshape(count or 1, -1) for name in parameters], dim=1)

        columns = sum(tensor.numel() for tensor in parameters.values())
        chunk = self._chunk_size or max(1, _MAX_CHUNK_ENTRIES // columns)
        parts = [vmap(rows_at, randomness="error")(*points) for points in _chunks(term.points, chunk)]
        return torch.cat(parts).reshape(-1, columns)

    def _count(self, term: _Term, parameters: Mapping[str, Tensor]) -> int | None:
        """Return the number of residuals at a point; None for a scalar."""
        with torch.no_grad():
            shape = self._at_point(term, parameters, *(tensor[0] for tensor in term.points)).shape
        return shape[0] if shape else None


def _chunks(points: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the points in chunks."""
    yield from zip(*(torch.split(tensor, size) for tensor in points), strict=True)


def _checked_term(term: Any, number: int) -> _Term:
    """Return a term of the caller; raise an error if it does not fit."""
    if not isinstance(term, list | tuple) or len(term) not in (2, 3) or not callable(term[0]):
        raise ArgumentTypeError(
            f"terms[{number}] = {shown(term)} is no term: pass (function, points) or (function, points, weight)."
        )
    points = term[1] if isinstance(term[1], list | tuple) else (term[1],)
    for tensor in points:
        if not isinstance(tensor, Tensor) or tensor.ndim == 0 or len(tensor) == 0 or len(tensor) != len(points[0]):
            raise ArgumentError(
                f"terms[{number}] has the points {shown(tensor)}: pass tensors with a row for each point, and as many "
                "rows in each."
            )
    weight = term[2] if len(term) == 3 else 1.0
    fits = is_number(weight) and 0.0 < weight < math.inf
    require(fits, f"terms[{number}][2]", weight, "pass a positive weight")
    return _Term(term[0], tuple(points), float(weight))
