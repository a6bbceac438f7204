"""Compiled models, distributed checkpoints and TensorBoard."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sanc
from driving import drive, flat

dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict", reason="torch is built without distributed")


def network(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 4, generator=generator)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    return [(x[rows], y[rows]) for rows in torch.randint(200, (count, 20), generator=generator)]


def whole(model):
    """Return the loss on many rows, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        values = [float((model(a) - b).square().mean()) for a, b in batches(40)]
    model.train()
    return sum(values) / 40


# ---------------------------------------------------------------------------------------------- compiled models


@pytest.mark.parametrize(("style", "backend"), [("loss", "eager"), ("backward", "eager"), ("gradients", "aot_eager")])
@pytest.mark.filterwarnings("ignore:Using .torch.compile")  # with the hooks that hold buffers fixed
def test_a_compiled_model_is_trained_as_without_compilation(style, backend):
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net = network(norm=True)
        model = torch.compile(net, backend=backend) if compiled else net
        opt = sanc.SANC(model.parameters(), seed=0)
        before = whole(model)
        drive(style, model, opt, batches(30))
        opt.eval()
        assert whole(model) < 0.9 * before
        assert int(net[1].num_batches_tracked) == 30
        ends.append(flat(net))
    assert torch.allclose(*ends, rtol=0, atol=1e-4)


class Network(nn.Module):
    """A network that torch compiles as a whole, unlike `nn.Sequential`."""

    def __init__(self):
        super().__init__()
        self.layers = network(norm=True)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compiled_by(how, net, backend):
    """Return a compiled network; `module.compile` compiles it in place."""
    if how == "torch.compile":
        return torch.compile(net, backend=backend)
    if how == "a function":
        return torch.compile(lambda x: net(x), backend=backend)
    net.compile(backend=backend)
    return net


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "a function"])
@pytest.mark.parametrize("style", ["loss", "backward"])
@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_a_model_is_compiled_a_few_times_only(how, style):
    """All evaluations use the same hook to hold buffers fixed, so that torch does not compile again."""
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    net = Network()
    model = compiled_by(how, net, backend)
    opt = sanc.SANC(net.parameters(), seed=0)
    for k, data in enumerate(batches(12)):
        drive(style, model, opt, [data])
        assert int(net.layers[1].num_batches_tracked) == k + 1
        if k == 3:
            early = len(made)
    assert 1 <= early == len(made) <= 3  # with a graph for the backward pass, and without


@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_a_missing_second_derivative_is_an_error_or_warned_of_once():
    torch._dynamo.reset()
    model = torch.compile(network(), backend="aot_eager")
    exact = sanc.SANC(model.parameters(), hvp="double-backward", seed=0)
    with pytest.raises(sanc.SecondDerivativeError, match="not compiled"):
        drive("loss", model, exact, batches(1))
    opt = sanc.SANC(model.parameters(), seed=0)
    with pytest.warns(RuntimeWarning, match=r"torch.compile with aot_autograd has no second derivative") as seen:
        drive("loss", model, opt, batches(2))
    assert sum(issubclass(w.category, RuntimeWarning) for w in seen) == 1
    assert opt.hvp == opt.record.hvp == "finite-difference" and opt.style == "loss"


def earlier_passes(kind, net, model):
    """Run backward passes without a graph, by which torch compiles code whose gradient cannot have one."""
    x, y = batches(1)[0]
    other = Network() if kind == "another model" else net
    code = torch.compile(other, backend="aot_eager") if other is not net else model
    for _ in range(2):
        torch.autograd.grad((code(x) - y).square().mean(), list(other.parameters()))


@pytest.mark.parametrize(("kind", "preset"), [
    ("none", "robust"), ("this model", "robust"), ("another model", "robust"), ("this model", "paper"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_earlier_backward_passes_do_not_change_the_steps_of_a_compiled_model(kind, preset):
    """Compare with the model that is not compiled; a step trains buffers once, whether it falls back or not."""
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net = Network()
        model = torch.compile(net, backend="aot_eager") if compiled else net
        start = {name: value.clone() for name, value in net.state_dict().items()}
        if compiled and kind != "none":
            earlier_passes(kind, net, model)
            net.load_state_dict(start)
        opt = sanc.SANC(net.parameters(), seed=0, preset=preset, hvp="auto" if compiled else "finite-difference")
        if compiled:
            with pytest.warns(RuntimeWarning, match="torch.compile with aot_autograd has no second derivative") as seen:
                drive("loss", model, opt, batches(6))
            assert sum(issubclass(w.category, RuntimeWarning) for w in seen) == 1
        else:
            drive("loss", model, opt, batches(6))
        assert opt.hvp == "finite-difference" and int(net.layers[1].num_batches_tracked) == 6
        ends.append(torch.cat([flat(net), net.layers[1].running_mean]))
    assert torch.allclose(*ends, rtol=0, atol=1e-4)
    exact = sanc.SANC(net.parameters(), seed=0, hvp="double-backward")
    with pytest.raises(sanc.SecondDerivativeError, match="not compiled"):
        drive("loss", model, exact, batches(1))


# ---------------------------------------------------------------------------------------------- distributed checkpoints


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True, "cpu_offload": True}], ids=str)
def test_a_state_by_names_resumes(style, options):
    how, data = dcp.StateDictOptions(**options), batches(60)
    model, other = network(), network()
    opt, twin = (sanc.SANC(net.parameters(), seed=seed) for seed, net in enumerate((model, other)))
    drive(style, model, opt, data[:30])
    opt.zero_grad()
    held = flat(model)
    state = dcp.get_optimizer_state_dict(model, opt, options=how)
    assert torch.equal(held, flat(model)) and opt._iterates.state.iteration == 30  # nothing was moved
    assert "0.weight" in state["state"]
    other.load_state_dict(model.state_dict())
    dcp.set_optimizer_state_dict(other, twin, state, options=how)
    assert twin.style == style and twin.param_groups[0]["lr"] == 1.0
    for net, mine in ((model, opt), (other, twin)):
        drive(style, net, mine, data[30:])
        mine.eval()
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_vectors_cannot_be_loaded_into_a_fresh_optimiser_and_the_error_names_the_remedy(style, tmp_path):
    """`load` fills existing entries of a state dict, and before the first step there are no vectors."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, other, data = network(), network(), batches(60)
    opt, twin = (sanc.SANC(net.parameters(), seed=seed) for seed, net in enumerate((model, other)))
    drive(style, model, opt, data[:30])
    opt.zero_grad()
    checkpoint.save({"optimizer": dcp.get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path / "saved")
    state = {"optimizer": dcp.get_optimizer_state_dict(other, twin)}
    checkpoint.load(state, checkpoint_id=tmp_path / "saved")
    with pytest.raises(
        sanc.ArgumentError, match=r"sanc.load_checkpoint. To use an existing checkpoint, .*dcp_to_torch_save"
    ):
        dcp.set_optimizer_state_dict(other, twin, state["optimizer"])
    assert twin.style == "" and twin.param_groups[0]["lr"] == 1.0
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "file.pt")
    other.load_state_dict(model.state_dict())
    dcp.set_optimizer_state_dict(other, twin, torch.load(tmp_path / "file.pt", weights_only=True)["optimizer"])
    for net, mine in ((model, opt), (other, twin)):
        drive(style, net, mine, data[30:])
        mine.eval()
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_a_state_without_vectors_is_loaded_into_a_fresh_optimiser(steps, tmp_path):
    from torch.distributed import checkpoint

    model, other, data = network(), network(), batches(6)
    opt, twin = (sanc.SANC(net.parameters(), seed=seed, preset="paper") for seed, net in enumerate((model, other)))
    drive("loss", model, opt, data[:steps])
    checkpoint.save(dcp.get_optimizer_state_dict(model, opt), checkpoint_id=tmp_path)
    state = dcp.get_optimizer_state_dict(other, twin)
    checkpoint.load(state, checkpoint_id=tmp_path)
    dcp.set_optimizer_state_dict(other, twin, state)
    other.load_state_dict(model.state_dict())
    for net, mine in ((model, opt), (other, twin)):
        drive("loss", net, mine, data[steps:])
    assert torch.equal(flat(model), flat(other))


def test_saving_a_state_does_not_fix_the_style():
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    dcp.get_optimizer_state_dict(model, opt)
    assert opt.style == "" and opt._iterates.state.iteration == 0
    drive("loss", model, opt, batches(2))
    assert opt.style == "loss"


# ---------------------------------------------------------------------------------------------- TensorBoard


def test_numbers_of_the_record_are_logged_to_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for data in batches(5):
            drive("loss", model, opt, [data])
            for name, value in opt.record.as_dict().items():
                writer.add_scalar(f"sanc/{name}", value, opt.record.iteration)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {f"sanc/{name}" for name in opt.record.as_dict()} == set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("sanc/value")] == [0, 1, 2, 3, 4]
