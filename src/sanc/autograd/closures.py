"""Calls of closures, with errors that name what a closure did and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sanc.autograd.precision import callers_precision
from sanc.core.interrupts import interruptible
from sanc.errors import ArgumentError, ArgumentTypeError, first_line, shown

LOSS_TOLERANCE = 1e-3
"""Relative difference below which two losses count as the same: above the rounding of float32, below batch noise."""


def call_closure(closure: Callable[[], Any], name: str) -> Any:
    """Call a closure in the precision of its caller, and return what it returned."""
    with interruptible(), callers_precision():
        try:
            return closure()
        except StopIteration as end:
            raise ArgumentError(
                f"{name} raised StopIteration: it draws from an exhausted iterator, and a step calls it several "
                "times. Draw the batch before the step, and use it in the closure."
            ) from end


def explained_error(error: RuntimeError) -> ArgumentError | None:
    """Return the error for a loss that torch could not differentiate, if its cause is known."""
    if "second time" in str(error):
        return ArgumentError(
            "closure cannot be differentiated, because it has called backward() and has cleared the gradients "
            "afterwards: call zero_grad() before backward(), or leave both to step()."
        )
    if "inplace operation" in str(error):
        return ArgumentError(
            "the loss cannot be differentiated, because an operation has changed a tensor that its gradient "
            f"needs ({first_line(error)}): use operations that return new tensors."
        )
    return None


def checked_loss(loss: Any, name: str, *, needs_graph: bool) -> Tensor:
    """Return what a closure returned as a scalar; raise an error unless it is a real loss, with a graph if needed."""
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(f"{name} returned {type(loss).__name__} ({shown(loss)}): {_loss_remedy(loss)}.")
    if loss.numel() != 1:
        raise ArgumentError(
            f"{name} returned a tensor of shape {tuple(loss.shape)}: return a scalar, for instance its mean()."
        )
    if not loss.is_floating_point():
        raise ArgumentTypeError(f"{name} returned a tensor of {loss.dtype}: return a real floating-point loss.")
    if needs_graph and not loss.requires_grad:
        what = "x: compute it from x" if name == "fun" else "the parameters: compute it from the model in the closure"
        raise ArgumentError(
            f"{name} returned a loss that does not depend on {what}, without torch.no_grad(), detach() or .data."
        )
    return loss.reshape(())


def _loss_remedy(returned: Any) -> str:
    """Return the end of the message for a closure that returned no tensor."""
    if isinstance(returned, Mapping):
        entry = "loss" if "loss" in returned else next(iter(returned), "loss")
        return f"return the mean loss alone, such as its entry {entry!r}"
    if isinstance(returned, tuple | list):
        return "return the mean loss alone, such as its first entry, and keep the others in a variable"
    return "return the mean loss as a tensor of one element, without .item()"
