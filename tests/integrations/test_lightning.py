"""Lightning: automatic optimisation with closures that call backward(), and manual optimisation with and without."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sanc

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Automatic(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.values = []

    def training_step(self, batch, index):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def on_train_batch_end(self, outputs, batch, index):
        record = self.optimizers().record
        if record is not None:  # None before the first step
            self.values.append(record.value)

    def configure_optimizers(self):
        opt = sanc.SANC([{"params": self.parameters(), "name": "all"}], seed=0)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 3, 0.9)]


class Manual(Automatic):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        opt = self.optimizers()
        opt.step(lambda: super(Manual, self).training_step(batch, index))


class Gradients(Automatic):
    """Without closures: the parameters are moved to the average before validation and saving."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_epoch_start(self):
        self.optimizers().optimizer.train()

    def training_step(self, batch, index):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        opt.step()

    def on_train_epoch_end(self):
        self.optimizers().optimizer.eval()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(240, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3]), batch_size=40)


def trainer(folder, epochs, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder, **(quiet | options)
    )


def made(kind):
    torch.manual_seed(0)
    return kind()


def loss(model):
    model.eval()
    x, y = data().dataset.tensors
    with torch.no_grad():
        value = float((model.net(x) - y).square().mean())
    model.train()  # Lightning does not change the mode
    return value


@pytest.mark.parametrize("kind", [Automatic, Manual, Gradients])
def test_fit_lowers_the_loss_and_resumes(kind, tmp_path):
    whole = made(kind)
    before = loss(whole)
    fit = trainer(tmp_path, 8)
    fit.fit(whole, data())
    opt = fit.optimizers[0]
    assert fit.global_step == opt._iteration.state.iteration == 48
    assert loss(whole) < 0.7 * before
    assert opt.style == {Automatic: "backward", Manual: "loss", Gradients: "gradients"}[kind]
    assert opt._driver.at_average
    assert int(whole.net[1].num_batches_tracked) == 48  # trial points do not count as training
    first = made(kind)
    part = trainer(tmp_path, 4)
    part.fit(first, data())
    part.save_checkpoint(tmp_path / "half.ckpt")
    second = kind()
    trainer(tmp_path, 8).fit(second, data(), ckpt_path=tmp_path / "half.ckpt")
    for mine, theirs in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert first.values + second.values == pytest.approx(whole.values, nan_ok=True)


def test_monitors_log_lr_by_the_name_of_the_group(tmp_path):
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    model, monitor = made(Automatic), LearningRateMonitor("epoch")
    options = {"logger": CSVLogger(tmp_path), "callbacks": [monitor], "log_every_n_steps": 1}
    trainer(tmp_path, 4, enable_checkpointing=False, **options).fit(model, data())
    assert monitor.lrs == {"lr-SANC/all": pytest.approx([1.0, 1.0, 1.0, 0.9])}


@pytest.mark.parametrize(("kind", "style"), [(Automatic, "backward"), (Manual, "loss"), (Gradients, "gradients")])
def test_mixed_precision(kind, style, tmp_path):
    model = made(kind)
    before = loss(model)
    fit = trainer(tmp_path, 8, precision="bf16-mixed", enable_checkpointing=False)
    fit.fit(model, data())
    assert loss(model) < 0.7 * before and fit.optimizers[0].style == style
    assert model.net[0].weight.dtype == torch.float32


def test_accumulated_batches_are_an_error(tmp_path):
    """A step with a closure uses its batch alone, and not the gradients that Lightning accumulated before."""
    fit = trainer(tmp_path, 1, accumulate_grad_batches=3, enable_checkpointing=False)
    with pytest.raises(sanc.ArgumentError, match=r"step without a closure; in Lightning leave acc"):
        fit.fit(made(Automatic), data())
    assert fit.optimizers[0]._iteration.state.iteration == 0


def test_manual_optimisation_accumulates_batches(tmp_path):
    """Two halves of a batch give the steps of the whole batch."""

    class Accumulating(Gradients):
        def __init__(self, batches):
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.batches = batches

        def training_step(self, batch, index):
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.manual_backward(loss / self.batches)
            if (index + 1) % self.batches == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()

    found = []
    for batches in (1, 2):
        torch.manual_seed(0)
        model, rows = Accumulating(batches), data().dataset
        fit = trainer(tmp_path, 2, enable_checkpointing=False)
        fit.fit(model, DataLoader(rows, batch_size=40 // batches))
        assert fit.optimizers[0].style == "gradients"
        found.append(model.net.weight.detach().clone())
    assert torch.allclose(*found, rtol=1e-4) and not torch.equal(found[0], torch.zeros(1, 4))


def test_gradients_are_clipped(tmp_path):
    model = made(Automatic)
    fit = trainer(tmp_path, 1, gradient_clip_val=1e-3, enable_checkpointing=False)
    fit.fit(model, data())
    assert fit.optimizers[0].record.grad_norm <= 1.01e-3


def test_a_search_for_a_learning_rate_is_warned_of(tmp_path):
    from lightning.pytorch.tuner import Tuner

    class Searched(Automatic):
        def configure_optimizers(self):
            return sanc.SANC(self.parameters(), lr=self.lr, seed=0)

    model = made(Searched)
    model.lr = 1.0
    with pytest.warns(UserWarning, match="lr = 1e-08 in the first step.*such as lr_find: leave the search out"):
        Tuner(trainer(tmp_path, 1, enable_checkpointing=False)).lr_find(model, data(), num_training=5)
