"""Train a small network on scikit-learn's digits, save it half way, and go on from the file.

python examples/train_digits.py
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import sanc


def build() -> tuple[torch.nn.Module, sanc.SANC]:
    """Return a fresh network and its optimiser."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 10))
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return model, sanc.SANC([{"params": weights, "weight_decay": 1e-4}, {"params": biases}], seed=0)


def epoch(model: torch.nn.Module, opt: sanc.SANC, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
    """Go through the data once, in an order that depends on the number of the epoch only."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
    for rows in order.split(128):
        opt.step(lambda rows=rows: cross_entropy(model(x[rows]), y[rows]))


def main() -> None:
    """Train, save, go on, and compare with a run that was not interrupted."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)
    train, test = slice(0, 1400), slice(1400, None)

    model, opt = build()
    for number in range(2):
        epoch(model, opt, x[train], y[train], number)
    path = Path(tempfile.mkdtemp()) / "half.pt"
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
    for number in range(2, 4):
        epoch(model, opt, x[train], y[train], number)
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean()
    print(f"accuracy on {len(y[test])} images that were not trained on: {accuracy:.3f}")
    print(f"last step: {opt.record.branch}, loss {opt.record.value:.4f}, {opt.record.calls.gradient} gradients in all")

    again, resumed = build()
    saved = torch.load(path, weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    for number in range(2, 4):
        epoch(again, resumed, x[train], y[train], number)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    print("resumed from the file, bit for bit the same:", same)


if __name__ == "__main__":
    main()
