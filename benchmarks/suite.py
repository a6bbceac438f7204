"""Tasks of `benchmarks.networks`: network, loss, data, batch size, steps, penalty and precision.

There are two halves, fixed before any tuning. Parameters of the optimisers may be chosen on the tasks of the first half
("chosen"). The tasks of the second half ("unseen") are for measurements only. Both have small tasks, and large ones
with 5 to 50 million parameters in bfloat16 ("chosen-large", "unseen-large").

A loss is a function of the network and of the tensors of a batch, and is a mean over the rows. The first half is mostly
ordinary. The second has mixed precision, noise inside the loss, wrong labels, features of very different scales,
unscaled targets, and small and large batches. Initial weights and the order of the batches depend on the seed alone.
The data are those of `benchmarks.suite_data`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks import suite_data as data
from sanc.lab import models

EVALUATION_ROWS = 4096
"""Most rows on which losses of small tasks are evaluated."""

# ---------------------------------------------------------------------- networks


def stack(widths: Sequence[int], act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Add(nn.Module):
    """x + f(x), or shortcut(x) + f(x), with an optional activation after it."""

    def __init__(self, *inner: nn.Module, after: nn.Module | None = None, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.after = nn.Sequential(*inner), after or nn.Identity()
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.shortcut(x) + self.inner(x))


def _conv(a: int, b: int, side: int = 3, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, side, stride, side // 2, bias=False), nn.BatchNorm2d(b)]


def resnet() -> nn.Module:
    """Three residual blocks of 16, 32 and 64 channels."""
    layers: list[nn.Module] = [*_conv(3, 16), nn.ReLU()]
    for a, b in ((16, 16), (16, 32), (32, 64)):
        shortcut = nn.Sequential(*_conv(a, b, 1, b // a)) if a != b else None
        layers.append(Add(*_conv(a, b, 3, b // a), nn.ReLU(), *_conv(b, b), after=nn.ReLU(), shortcut=shortcut))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Attention(nn.Module):
    """Self-attention: from elementary operations, or torch's fused one, which has no second derivative."""

    def __init__(self, width: int, heads: int, causal: bool, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.into(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))


def _block(width: int, heads: int, causal: bool, fused: bool = False) -> list[nn.Module]:
    wide = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return [Add(nn.LayerNorm(width), Attention(width, heads, causal, fused)), Add(*wide)]


class Positions(nn.Module):
    """Add a learned vector for each position of a sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.vectors


def chars() -> nn.Module:
    """Two causal blocks of width 128."""
    blocks = [layer for _ in range(2) for layer in _block(128, 4, causal=True)]
    return nn.Sequential(
        nn.Embedding(data.SYMBOLS, 128),
        Positions(data.CONTEXT, 128),
        *blocks,
        nn.LayerNorm(128),
        nn.Linear(128, data.SYMBOLS),
    )


class Mean(nn.Module):
    """Mean over one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Patches(nn.Module):
    """Cut images of 32 × 32 into 64 patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 64, 48)


def vit(depth: int = 3, width: int = 96, heads: int = 4) -> nn.Module:
    """Blocks on patches of 4 × 4."""
    blocks = [layer for _ in range(depth) for layer in _block(width, heads, causal=False)]
    return nn.Sequential(
        Patches(),
        nn.Linear(48, width),
        Positions(64, width),
        *blocks,
        nn.LayerNorm(width),
        Mean(),
        nn.Linear(width, 10),
    )


def gpt(depth: int, width: int, heads: int) -> nn.Module:
    """Causal blocks on bytes, with initial weights of deviation 0.02."""
    blocks = [layer for _ in range(depth) for layer in _block(width, heads, causal=True, fused=True)]
    model = nn.Sequential(
        nn.Embedding(256, width),
        Positions(data.LONG_CONTEXT, width),
        *blocks,
        nn.LayerNorm(width),
        nn.Linear(width, 256, bias=False),
    )
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
    return model


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 × 32."""
    layers: list[nn.Module] = [*_conv(3, 64), nn.ReLU()]
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    for a, b in itertools.pairwise(widths):
        shortcut = nn.Sequential(*_conv(a, b, 1, b // a)) if a != b else None
        layers.append(Add(*_conv(a, b, 3, b // a), nn.ReLU(), *_conv(b, b), after=nn.ReLU(), shortcut=shortcut))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Factors(nn.Module):
    """Dot products of vectors of users and items, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(1000, 16), nn.Embedding(500, 16)
        self.offsets = nn.ModuleList([nn.Embedding(1000, 1), nn.Embedding(500, 1)])
        self.level = nn.Parameter(torch.zeros(1))
        for part in (self.users, self.items, *self.offsets):
            nn.init.normal_(part.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        product = (self.users(x[:, 0]) * self.items(x[:, 1])).sum(1)
        return product + self.offsets[0](x[:, 0])[:, 0] + self.offsets[1](x[:, 1])[:, 0] + self.level


class Recurrent(nn.Module):
    """A tanh cell that reads an image row by row."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(28, width), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        given = self.into(x[:, 0])
        state = torch.tanh(given[:, 0])
        for row in range(1, given.shape[1]):
            state = torch.tanh(given[:, row] + self.again(state))
        return self.out(state)


class Coder(nn.Module):
    """The two halves of a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = stack((784, 400, 40)), stack((20, 400, 784))


def plain_cnn() -> nn.Module:
    """Two convolutions and two linear layers, ReLU."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10))


def residual() -> nn.Module:
    """Three residual blocks of width 128."""
    blocks = [Add(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)) for _ in range(3)]
    return nn.Sequential(nn.Linear(54, 128), *blocks, nn.ReLU(), nn.Linear(128, 2))


# ---------------------------------------------------------------------- losses


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy; of sequences over all positions."""
    scores = model(x)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]).float(), y.reshape(-1))


def classify_augmented(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy; in training of images that are shifted by up to four pixels, and of which half are mirrored."""
    if model.training:
        rows, side = len(x), x.shape[-1]
        mirrored = torch.rand(rows, 1, 1, 1, device=x.device) < 0.5
        x = F.pad(torch.where(mirrored, x.flip(3), x), (4, 4, 4, 4))
        shifts = torch.randint(0, 9, (2, rows, 1), device=x.device) + torch.arange(side, device=x.device)
        x = x[torch.arange(rows, device=x.device)[:, None, None], :, shifts[0][:, :, None], shifts[1][:, None, :]]
        x = x.permute(0, 3, 1, 2)
    return classify(model, x, y)


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Half the squared error, summed over the targets of a row."""
    error = model(x).reshape(y.shape) - y
    return 0.5 * error.square().sum() / len(y)


def reconstruct(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """Binary cross entropy, summed over pixels."""
    return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)


def evidence(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """Negative evidence lower bound; the noise is drawn here."""
    assert isinstance(model, Coder)
    mean, spread = model.encode(x).chunk(2, 1)
    code = mean + torch.randn(mean.shape, device=mean.device) * (0.5 * spread).exp()
    distance = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum()
    return (F.binary_cross_entropy_with_logits(model.decode(code), x, reduction="sum") + distance) / len(x)


def poisson(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """Squared residual of −Δu = f on the unit square, u = 0 on its boundary; u = sin πx sin 2πy + ½ sin 4πx sin πy."""
    with torch.enable_grad():  # a value, too, requires derivatives of the network
        x = x.detach().requires_grad_()
        bump = 16 * x[:, 0] * (1 - x[:, 0]) * x[:, 1] * (1 - x[:, 1])
        u = bump * model(2 * x - 1)[:, 0]
        (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        laplacian = x.new_zeros(len(x))
        for i in range(2):
            (second,) = torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)
            laplacian = laplacian + second[:, i]
        a, b = (math.pi * x.detach()).unbind(1)
        right = 5 * (a.sin() * (2 * b).sin()) + 8.5 * ((4 * a).sin() * b.sin())
        return (laplacian / math.pi**2 + right).square().mean()


# ---------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """A network with its data and loss; steps and batch are those of a first-order method."""

    name: str
    half: str
    arrays: Callable[[Path | None], data.Arrays]
    network: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: int
    steps: int = 1200
    decay: float = 0.0
    autocast: bool = False
    xavier: bool = False
    """Whether weights are initialised as in the paper."""
    evaluated: int = EVALUATION_ROWS
    """Most rows on which training and held-out losses are evaluated."""
    warm_up: int = 0
    """Steps over which the rate of peers with a cosine decay increases."""


class Evaluation(NamedTuple):
    """Training loss with the penalty, losses without it of the validation and the test rows, accuracy of the latter."""

    train: float
    valid: float
    test: float
    accuracy: float | None


class Problem:
    """A task with its data on a device. Of the held-out rows every other one is for validation, the rest for tests."""

    def __init__(self, task: Task, folder: Path | None, device: torch.device | str) -> None:
        arrays = task.arrays(folder)
        self.task, self.device = task, torch.device(device)
        self.note = str(arrays["note"]) if "note" in arrays else ""
        x, y, held_x, held_y = (self._tensor(arrays[key]) for key in ("x", "y", "held_x", "held_y"))
        self.train = (x, y)
        self.valid, self.test = ((held_x[i : task.evaluated : 2], held_y[i : task.evaluated : 2]) for i in (0, 1))
        rows = torch.from_numpy(np.random.default_rng(8).permutation(len(x))[: task.evaluated]).to(self.device)
        self.evaluated = (x[rows], y[rows])
        self.size = min(task.batch, len(x))

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.array(array, np.float32 if array.dtype.kind == "f" else np.int64)).to(self.device)

    def model(self, seed: int) -> nn.Module:
        """Return the network with the weights of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.task.network()
        if self.task.xavier:
            models.initialise(model, seed)
        return model.to(self.device).train()

    def loss(self, model: nn.Module, *, penalty: bool = True) -> Callable[..., Tensor]:
        """Return the loss of a model as a function of a batch, the penalty ½·decay·‖W‖² on the weights included."""
        task, kind = self.task, self.device.type
        weights = [p for p in model.parameters() if p.ndim > 1] if task.decay and penalty else []

        def loss(*tensors: Tensor) -> Tensor:
            with torch.autocast(kind, torch.bfloat16) if task.autocast else nullcontext():
                value = task.loss(model, *tensors)
            for p in weights:
                value = value + 0.5 * task.decay * p.square().sum()
            return value

        return loss

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches of shuffled epochs, endlessly."""
        rng = np.random.default_rng((seed, 9))
        while True:
            order = torch.from_numpy(rng.permutation(len(self.train[0]))).to(self.device)
            for start in range(0, len(order) - self.size + 1, self.size):
                yield tuple(t[order[start : start + self.size]] for t in self.train)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Return the losses and the accuracy of a model, in evaluation mode."""
        model.eval()
        right: float | None = 0.0 if self.task.loss in (classify, classify_augmented) else None
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)  # the noise of a loss is the same in every evaluation
            ends = []
            for tensors in (self.evaluated, self.valid, self.test):
                loss = self.loss(model, penalty=tensors is self.evaluated)
                total = torch.zeros((), device=self.device)
                for part in zip(*(t.split(1024) for t in tensors), strict=True):
                    total += loss(*part).detach().float() * len(part[0])
                    if right is not None and tensors is self.test:
                        right += float((model(part[0]).argmax(-1) == part[1]).float().mean()) * len(part[0])
                ends.append(float(total) / len(tensors[0]))
        model.train()
        return Evaluation(*ends, None if right is None else right / len(self.test[0]))


_DECAY = 0.01
"""The paper's penalty, 0.005 ‖W‖²."""
_TASKS = (
    Task("resnet", "chosen", data.images("cifar10"), resnet, classify, 128, 1000),
    Task("chars", "chosen", lambda folder: data.raw("text", folder), chars, classify, 64, 1000),
    Task("tabular", "chosen", data.standard("covtype"), lambda: stack((54, 256, 256, 128, 2)), classify, 512, 1500),
    Task("autoencoder", "chosen", data.images("mnist", flat=True),
         lambda: stack((784, 400, 200, 100, 30, 100, 200, 400, 784)), reconstruct, 128),
    Task("small-batch", "chosen", data.digits, lambda: stack((64, 64, 64, 10), nn.SiLU), classify, 16, 1500),
    Task("factorisation", "chosen", data.ratings, Factors, regress, 256, 1500),
    Task("pinn", "chosen", data.points, lambda: stack((2, 64, 64, 64, 1), nn.Tanh), poisson, 256),
    Task("mnist-cnn", "chosen", data.images("mnist"), lambda: models.cnn(1, 28, 10), classify, 128, decay=_DECAY,
         xavier=True),
    Task("vit", "unseen", data.images("cifar10"), vit, classify, 128, 1000, autocast=True),
    Task("vae", "unseen", data.images("mnist", flat=True), Coder, evidence, 128),
    Task("rnn", "unseen", data.images("mnist"), Recurrent, classify, 64, 1000),
    Task("deep-linear", "unseen", data.linear_map, lambda: stack((32,) * 8 + (16,), nn.Identity), regress, 64),
    Task("noisy-labels", "unseen", data.noisy, plain_cnn, classify, 64),
    Task("bad-scale", "unseen", data.bad_scale, lambda: stack((28, 128, 128, 2)), classify, 256, 1500),
    Task("sets", "unseen", data.sets, lambda: nn.Sequential(stack((2, 64, 64, 64), nn.GELU), Mean(),
         stack((64, 64, 5), nn.GELU)), classify, 32, 1500),
    Task("segment", "unseen", lambda folder: data.raw("segment", folder), lambda: models.mlp(19, 7), classify, 128,
         decay=_DECAY, xavier=True),
    Task("cifar-cnn", "unseen", data.images("cifar10"), lambda: models.cnn(3, 32, 10), classify, 128, decay=_DECAY,
         xavier=True),
    Task("diabetes", "unseen", lambda folder: data.raw("diabetes", folder), lambda: stack((10, 32, 32, 1), nn.GELU),
         regress, 8, decay=1e-4),
    Task("big-batch", "unseen", data.standard("covtype"), residual, classify, 2048, 1000, decay=1e-4),
    Task("gpt", "chosen-large", data.code, lambda: gpt(6, 384, 6), classify, 64, 1200, autocast=True, evaluated=1024,
         warm_up=100),
    Task("vit-large", "chosen-large", data.images("cifar10"), lambda: vit(6, 320, 8), classify_augmented, 256,
         1200, autocast=True, warm_up=100),
    Task("gpt-wide", "unseen-large", data.code, lambda: gpt(8, 640, 10), classify, 48, 1200, autocast=True,
         evaluated=768, warm_up=100),
    Task("resnet18", "unseen-large", data.images("cifar10"), resnet18, classify_augmented, 128, 1400,
         autocast=True, warm_up=100),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}
HALVES = ("unseen", "chosen", "unseen-large", "chosen-large")
LONG = ("vit", "noisy-labels", "pinn", "tabular")
"""Tasks of long runs, two of each half; the loss of the first in each half can fall by decades."""
