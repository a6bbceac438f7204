"""Factorise a matrix from a start near its saddle: L-BFGS ends there, `sanc.minimize` does not.

    python examples/escape_a_saddle.py

f(U, V) = ‖U Vᵀ − A‖²/2 + ‖(U, V)‖²/200 has a saddle at U = V = 0 and no minimum that is not global.
"""

import torch

import sanc

torch.manual_seed(0)
A = (torch.randn(12, 2) @ torch.randn(2, 8)).double()


def f(factors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the penalised error of the factorisation."""
    penalty = sum((part**2).sum() for part in factors.values())
    return ((factors["U"] @ factors["V"].T - A) ** 2).sum() / 2 + penalty / 200


start = {"U": torch.zeros(12, 2).double(), "V": torch.zeros(8, 2).double()}
leaves = {name: part.clone().requires_grad_() for name, part in start.items()}
lbfgs = torch.optim.LBFGS(leaves.values(), max_iter=200, line_search_fn="strong_wolfe")


def closure() -> torch.Tensor:
    """Return the loss, with gradients."""
    lbfgs.zero_grad()
    loss = f(leaves)
    loss.backward()
    return loss


lbfgs.step(closure)
stuck = {name: part.detach() for name, part in leaves.items()}
print(f"L-BFGS:        f = {f(stuck):8.4f}, {sanc.certificate(f, stuck)}")

result = sanc.minimize(f, start)
print(f"sanc.minimize: f = {result.fun:8.4f}, {result.certificate}")
