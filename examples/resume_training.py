"""Save a training run half way, and resume it from a file, bit for bit.

python examples/resume_training.py
"""

import io

import torch

import sanc

X = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
Y = X.prod(1, keepdim=True)


def build() -> tuple[torch.nn.Module, sanc.SANC]:
    """Return a new network and its optimiser."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, sanc.SANC(model.parameters(), seed=0)


def train(model: torch.nn.Module, opt: sanc.SANC, epochs: range) -> None:
    """Make epochs in an order that depends on their number alone."""
    for epoch in epochs:
        for rows in torch.randperm(400, generator=torch.Generator().manual_seed(epoch)).split(50):
            opt.step(lambda rows=rows: (model(X[rows]) - Y[rows]).square().mean())


model, opt = build()
train(model, opt, range(2))
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file := io.BytesIO())  # or a path
train(model, opt, range(2, 4))

resumed, opt = build()
saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
resumed.load_state_dict(saved["model"])
opt.load_state_dict(saved["opt"])
train(resumed, opt, range(2, 4))
print("bit for bit the same:", all(map(torch.equal, model.parameters(), resumed.parameters())))
