"""The Trainer of transformers: steps without closures; the Trainer calls train() and eval() of the optimiser."""

from __future__ import annotations

import pytest
import torch

import sanc
from tensors import flat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Rows(torch.utils.data.Dataset):
    """Sequences that count up by one, modulo the vocabulary."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 16
        return {"input_ids": ids, "labels": ids}


def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def trainer(folder, epochs=6, opt=None, **options):
    net = model()
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=16, lr_scheduler_type="constant",
        logging_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0, **options,
    )  # fmt: skip
    opt = sanc.SANC(net.parameters(), seed=0)
    return transformers.Trainer(model=net, args=args, train_dataset=Rows(), eval_dataset=Rows(), optimizers=(opt, None))


def unwrapped(train):
    return getattr(train.optimizer, "optimizer", train.optimizer)


def test_training_lowers_the_loss(tmp_path):
    train = trainer(tmp_path, epochs=12, eval_strategy="epoch")
    before = train.evaluate()["eval_loss"]
    train.train()
    opt = unwrapped(train)
    assert opt.style == "gradients" and opt._iteration.state.iteration == 48
    assert train.evaluate()["eval_loss"] < 0.7 * before
    assert opt._driver.at_average  # evaluate() moved the parameters there
    seen = [row["eval_loss"] for row in train.state.log_history if "eval_loss" in row]
    assert seen[-1] < seen[1]


def test_a_run_resumes(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    half = trainer(tmp_path / "half", max_steps=12)
    half.args.save_strategy = transformers.trainer_utils.SaveStrategy.STEPS
    half.args.save_steps = 12
    half.train()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-12"))
    for train in (whole, again):
        unwrapped(train).eval()
    assert unwrapped(again)._iteration.state.iteration == 24
    assert torch.allclose(flat(whole.model), flat(again.model), rtol=0, atol=1e-6)


def test_gradients_may_be_accumulated(tmp_path):
    train = trainer(tmp_path, epochs=2, gradient_accumulation_steps=2)
    train.train()
    assert unwrapped(train)._iteration.state.iteration == 4


def test_the_class_may_be_passed_and_lr_is_a_factor(tmp_path):
    """Half the rate with twice the scale makes the same steps."""
    args, ends = trainer(tmp_path, epochs=2).args, []
    for lr in (1.0, 0.5):
        options = {"seed": 0, "distance": 0.0, "scale": 0.004 / lr, "lr": lr}
        with_class = transformers.Trainer(
            model=model(), args=args, train_dataset=Rows(), optimizer_cls_and_kwargs=(sanc.SANC, options)
        )
        with_class.train()
        opt = unwrapped(with_class)
        assert opt.style == "gradients" and {group["lr"] for group in opt.param_groups} == {lr}
        opt.eval()
        ends.append(flat(with_class.model))
    assert torch.allclose(*ends, rtol=0, atol=1e-6)


def test_a_schedule_of_the_trainer_changes_the_factor(tmp_path):
    train = trainer(tmp_path, epochs=2)
    train.args.lr_scheduler_type = "linear"
    train.train()
    rates = [row["learning_rate"] for row in train.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([5 / 8, 1 / 8])  # of 1.0, in the fourth and the last of eight steps
