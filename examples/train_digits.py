"""Train a small network on scikit-learn's digits, and evaluate it.

python examples/train_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import sanc

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 10))
matrices = [p for p in model.parameters() if p.ndim > 1]
biases = [p for p in model.parameters() if p.ndim == 1]
opt = sanc.SANC([{"params": matrices, "weight_decay": 1e-4}, {"params": biases}], seed=0)

for epoch in range(4):
    for rows in torch.randperm(1400).split(128):
        opt.step(lambda rows=rows: cross_entropy(model(x[rows]), y[rows]))
    print(f"epoch {epoch}: loss {opt.record.value:.4f}, {opt.record.branch}")

opt.eval()  # the parameters are now at the average
accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
print(f"accuracy on {len(y[1400:])} images that were not trained on: {accuracy:.3f}")
print(f"{opt.record.calls.gradient} gradients in all")
