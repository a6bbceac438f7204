"""The sampler of three independent mini-batches, and micro-batches."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import sanc


class Rows(Dataset):
    """A map-style data set that returns one row at a time."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": torch.full((2,), float(i)), "i": i}


def index_set(n=50):
    return TensorDataset(torch.arange(n), torch.arange(n) * 10)


def test_samples_are_without_replacement_and_independent():
    samples = sanc.ThreeSamples(index_set(), (10, 20, 30), seed=1)
    overlaps = []
    for _ in range(200):
        (g, g10), (b, _), (f, _) = samples.draw()
        assert [len(part) for part in (g, b, f)] == [10, 20, 30]
        assert all(len(set(part.tolist())) == len(part) for part in (g, b, f))
        assert torch.equal(g10, 10 * g)
        overlaps.append(len(set(g.tolist()) & set(b.tolist())))
    # Independent draws of 10 and 20 out of 50 share 4 on average (hypergeometric, variance 10·0.4·0.6·40/49).
    assert np.mean(overlaps) == pytest.approx(4.0, abs=4 * np.sqrt(1.96 / 200))


def test_all_rows_are_equally_likely():
    samples = sanc.ThreeSamples(index_set(20), 5, seed=3)
    counts = np.zeros((3, 20))
    for _ in range(2000):
        for role, (rows, _) in enumerate(samples.draw()):
            counts[role, rows.numpy()] += 1
    assert counts == pytest.approx(500, abs=5 * np.sqrt(2000 * 0.25 * 0.75))


def test_draws_depend_on_the_seed_and_resume_from_a_state():
    first = sanc.ThreeSamples(index_set(), 8, seed=5)
    second = sanc.ThreeSamples(index_set(), 8, seed=5)
    other = sanc.ThreeSamples(index_set(), 8, seed=6)
    for _ in range(3):
        a, b, c = (s.draw()[0][0] for s in (first, second, other))
        assert torch.equal(a, b) and not torch.equal(a, c)
    other.load_state_dict(first.state_dict())
    iterator = iter(first)
    for _ in range(3):
        for expected, resumed in zip(next(iterator), other.draw(), strict=True):
            assert torch.equal(expected[0], resumed[0])


def test_any_map_style_data_set_can_be_sampled():
    batch, *_ = sanc.ThreeSamples(Rows(30), 6).draw()
    assert batch["x"].shape == (6, 2) and torch.equal(batch["x"][:, 0], batch["i"].to(torch.float32))
    moved, *_ = sanc.ThreeSamples(Rows(30), 6, device="cpu").draw()
    assert torch.equal(moved["i"], batch["i"])
    listed, *_ = sanc.ThreeSamples(Rows(30), 6, collate_fn=lambda rows: [row["i"] for row in rows]).draw()
    assert listed == batch["i"].tolist()


def test_getitems_of_the_data_set_is_used():
    class Fast(Rows):
        def __getitems__(self, rows):
            self.requested = rows
            return [self[i] for i in rows]

    data = Fast(30)
    batch, *_ = sanc.ThreeSamples(data, 4).draw()
    assert len(data.requested) == 4 and batch["x"].shape == (4, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(batch_size=51), ["batch_size = 51", "50 rows"]),
        (dict(batch_size=0), ["batch_size = 0"]),
        (dict(batch_size=(5, 5)), ["batch_size = (5, 5)", "three"]),
        (dict(batch_size=2.0), ["batch_size = 2.0", "integer"]),
        (dict(seed=-1), ["seed = -1"]),
        (dict(dataset=Stream()), ["no length", "map-style"]),
    ],
)
def test_the_error_names_an_invalid_argument(given, words):
    with pytest.raises(sanc.SancError) as caught:
        sanc.ThreeSamples(**({"dataset": index_set(), "batch_size": 5} | given))
    for word in words:
        assert word in str(caught.value)


class Pair(NamedTuple):
    x: torch.Tensor
    i: int


def test_named_tuples_are_moved_to_the_device():
    class Named(Rows):
        def __getitem__(self, i):
            return Pair(torch.full((2,), float(i)), i)

    batch, *_ = sanc.ThreeSamples(Named(20), 5, device="cpu").draw()
    assert isinstance(batch, Pair) and batch.x.shape == (5, 2)


def test_a_state_of_other_data_or_batches_is_rejected():
    samples = sanc.ThreeSamples(index_set(), 5)
    with pytest.raises(sanc.ArgumentError, match="40 rows and this one has 50"):
        samples.load_state_dict(sanc.ThreeSamples(index_set(40), 5).state_dict())
    with pytest.raises(sanc.ArgumentError, match="use the same batch_size"):
        samples.load_state_dict(sanc.ThreeSamples(index_set(), 6).state_dict())
    with pytest.raises(sanc.ArgumentError, match="lacks"):
        samples.load_state_dict({"seed": 1})


# ---------------------------------------------------------------------------------------------- micro-batches


class Always(nn.Module):
    """Dropout that stays active in evaluation mode."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5)


class TrainingOnly(nn.Module):
    """Dropout that raises in evaluation mode."""

    def forward(self, x):
        assert self.training, "no loss in evaluation mode"
        return nn.functional.dropout(x, 0.5)


def tokens(kind, microbatch, weight=None, middle=(), ignored=-100, where=(0, 1, 4)):
    """Return a small model, its optimiser and a batch in which some targets are ignored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 5)).double()
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randint(4, (10,))
    y[list(where)] = ignored
    losses = {
        "mean": lambda x, y: nn.functional.cross_entropy(model(x), y, ignore_index=ignored),
        "sum": lambda x, y: nn.functional.cross_entropy(model(x), y.clamp_min(0), reduction="sum"),
        "rows": lambda x, y: nn.functional.cross_entropy(model(x), y.clamp_min(0)),
        "pairs": lambda x, y: (model(x) @ model(x).T).square().mean(),
    }
    opt = sanc.SANC(model.parameters(), preset="paper", microbatch=microbatch, seed=0)
    return model, opt, sanc.Batch(losses[kind], x, y, weight=weight)


@pytest.mark.parametrize("hvp", ["double-backward", "finite-difference"])
def test_micro_batches_are_weighted_by_the_terms_of_the_mean(hvp):
    ends = []
    for microbatch in (None, 2, 3):
        model, opt, batch = tokens("mean", microbatch, weight=lambda x, y: (y != -100).sum())
        opt._driver.oracle.hvp = hvp
        for _ in range(3):
            loss = opt.step(batch)  # the first micro-batch of two rows has no terms
        ends.append(torch.cat([loss.reshape(1), *(p.detach().reshape(-1) for p in model.parameters())]))
    assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-6) and torch.allclose(ends[0], ends[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "words"), [
    ("mean", [r"tensors[1] holds -100", "weight=lambda *tensors: (tensors[1] != -100).sum()"]),
    ("sum", ["the mean of its halves", "Return the mean over rows"]),
    ("pairs", ["the mean of its halves", "leave microbatch out"]),
])  # fmt: skip
def test_micro_batches_that_change_the_loss_are_rejected(kind, words):
    weight = None if kind == "mean" else lambda x, y: len(x)
    model, opt, batch = tokens(kind, 4, weight=weight)
    held = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(sanc.ArgumentError) as caught:
        opt.step(batch)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(map(torch.equal, held, model.parameters())) and opt.style == ""


LAYERS = {
    "plain": nn.Identity, "dropout": nn.Dropout, "norm": partial(nn.BatchNorm1d, 6), "always": Always,
    "training": TrainingOnly,
}  # fmt: skip


@pytest.mark.parametrize("middle", ["plain", "dropout", "norm"])
@pytest.mark.parametrize(("microbatch", "where"), [
    (4, (0, 1, 4)), (6, (0, 1, 4)),  # one half of the first four rows has no terms
    (4, (9,)),  # only in the last micro-batch
    (4, (4, 6)),  # equally many in each half of the second micro-batch, none in the first
])  # fmt: skip
def test_another_ignored_index_is_detected_from_the_halves(microbatch, where, middle):
    model, opt, batch = tokens("mean", microbatch, ignored=4, where=where, middle=[LAYERS[middle]()])
    held = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(sanc.ArgumentError, match=r"mean of its halves.*pass weight= to sanc.Batch"):
        opt.step(batch)
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("middle", ["always", "training"])
def test_halves_that_cannot_be_compared_need_a_weight(middle):
    _, opt, batch = tokens("mean", 4, ignored=4, middle=[LAYERS[middle]()])
    with pytest.raises(sanc.ArgumentError, match=r"whether microbatch would change it\. Pass weight= to sanc"):
        opt.step(batch)


@pytest.mark.parametrize(("middle", "weight"), [
    ("plain", None), ("dropout", None), ("norm", None), ("dropout", len), ("norm", len), ("always", len),
    ("training", len),
])  # fmt: skip
def test_a_mean_over_rows_is_split_into_micro_batches(middle, weight):
    model, opt, batch = tokens(
        "rows", 4, weight=weight and (lambda x, y: weight(x)), middle=[LAYERS[middle]()], ignored=4
    )
    opt.step(batch)
    assert opt.record.iteration == 0 and all(module.training for module in model.modules())
    if middle == "norm":
        assert int(model[1].num_batches_tracked) == 3  # once for each micro-batch


@pytest.mark.parametrize("count", [0.0, float("nan"), -1.0])
def test_the_error_names_invalid_weights(count):
    _, opt, batch = tokens("mean", 4, weight=lambda x, y: count)
    with pytest.raises(sanc.ArgumentError, match=r"weight returned .*return the number of terms"):
        opt.step(batch)
