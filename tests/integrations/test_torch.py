"""Compiled models, distributed checkpoints and TensorBoard."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import sanc
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from tensors import flat
from training_styles import drive

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
        drive(style, model, opt, batches(20))
        opt.eval()
        assert whole(model) < 0.9 * before
        assert int(net[1].num_batches_tracked) == 20
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


@pytest.mark.parametrize(
    ("how", "style"),
    [("torch.compile", "loss"), ("torch.compile", "backward"), ("module.compile", "loss"), ("a function", "backward")],
)
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


@pytest.mark.parametrize(("how", "hvp"), [
    ("torch.compile", "auto"), ("module.compile", "auto"), ("a function", "double-backward"),
])  # fmt: skip
@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:Using .torch.compile")
def test_products_of_compiled_code_are_exact(how, hvp):
    """Compare with the dense Hessian in float64 of the model that is not compiled."""
    torch._dynamo.reset()
    net = Network()
    dense = copy.deepcopy(net).double()
    (x, y), names = batches(1)[0], list(dict(dense.named_parameters()))
    point = flat(dense)

    def loss(values):
        sizes = [p.numel() for p in dense.parameters()]
        parts = [v.reshape(p.shape) for v, p in zip(values.split(sizes), dense.parameters(), strict=True)]
        predicted = torch.func.functional_call(dense, dict(zip(names, parts, strict=True)), (x.double(),))
        return (predicted - y).square().mean()

    hessian = torch.autograd.functional.hessian(loss, point)
    model = compiled_by(how, net, "aot_eager")
    leaves = Leaves(list(net.parameters()), [0.0] * len(names))
    oracle = AutogradOracle(leaves, hvp=hvp)
    sample = Sample("closure", [(1.0, lambda: (model(x) - y).square().mean())], 1, None)
    oracle.bind(sample, sample, sample)
    here = oracle.read_point()
    v = torch.randn(len(here), generator=torch.Generator().manual_seed(3))
    oracle.gradient(here)
    for _ in range(2):
        product = oracle.hessian(here)(v).double()
        assert float((product - hessian @ v.double()).norm()) < 1e-5 * float((hessian @ v.double()).norm())
    assert oracle.hvp == hvp


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:Using .torch.compile")
def test_a_compiled_closure_trains_as_the_one_that_is_not_compiled():
    """Losses after 45 steps agree within 5 %, without differences of gradients."""
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net, (x, _) = Network(), batches(1)[0]
        y = torch.sin(3 * x.sum(1, keepdim=True))
        model = torch.compile(net, backend="aot_eager") if compiled else net
        opt = sanc.SANC(net.parameters(), seed=0)
        for _ in range(45):
            loss = opt.step(lambda model=model, x=x, y=y: (model(x) - y).square().mean())
        assert opt.hvp == opt.record.hvp == "auto"
        ends.append(float(loss))
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_averaged_steps_run_compiled_code():
    """Only steps with Hessian products run the model as it was written."""
    torch._dynamo.reset()
    ran = []

    class Counted(Network):
        def forward(self, x):
            ran.append(torch.compiler.is_compiling())
            return super().forward(x)

    net = Counted()
    model = torch.compile(net, backend="aot_eager")
    opt = sanc.SANC(net.parameters(), seed=0)
    for data in batches(20):
        ran.clear()
        drive("loss", model, opt, [data])
        averaged = opt.record.branch is sanc.Branch.AVERAGED
        written = [traced for traced in ran if not traced]
    assert averaged and not written


def earlier_passes(kind, net, model):
    """Run backward passes without a graph, by which torch compiles code whose gradient cannot have one."""
    x, y = batches(1)[0]
    other = Network() if kind == "another model" else net
    code = torch.compile(other, backend="aot_eager") if other is not net else model
    for _ in range(2):
        torch.autograd.grad((code(x) - y).square().mean(), list(other.parameters()))


MATRIX = torch.diag(torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64))


def ridge(x, penalty):
    return (MATRIX @ x - 1.0).square().sum() + penalty.exp() * (x * x).sum()


def ridge_residuals(x):
    return MATRIX @ x - 1.0


COMPILED = {
    "argmin": lambda x, penalty: sanc.argmin(ridge, x, penalty),
    "minimize": lambda x, penalty: sanc.minimize(ridge, x, args=(penalty.detach(),)).x * penalty,
    "minimize_many": lambda x, penalty: (
        sanc.minimize_many(ridge, x.expand(2, 3), penalty.detach().expand(2)).x[1] * penalty
    ),
    "least_squares": lambda x, penalty: sanc.least_squares(ridge_residuals, x).x * penalty,
    "curve_fit": lambda x, penalty: sanc.curve_fit(lambda t, a: a * t, x + 1.0, x + 2.0, x[:1])[0] * penalty,
    "certificate": lambda x, penalty: penalty * sanc.certificate(ridge, x, args=(penalty.detach(),)).lambda_min,
}


@pytest.mark.parametrize("name", COMPILED)
def test_minimisation_inside_a_compiled_function_runs_as_written(name):
    """Tracing the minimiser fails: its numbers become symbols, which have no order."""

    def value(penalty):
        return (COMPILED[name](torch.zeros(3, dtype=torch.float64), 2.0 * penalty) * 3.0).sum()

    results = []
    for function in (value, torch.compile(value, backend="eager")):
        penalty = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        found = function(penalty)
        results.append((found.detach(), torch.autograd.grad(found, penalty)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("kind", "preset"), [
    ("this model", "robust"), ("another model", "robust"), ("this model", "paper"),
    pytest.param("none", "robust", marks=pytest.mark.slow),  # test_a_compiled_model_is_trained is fast
])  # fmt: skip
@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:Using .torch.compile")
def test_earlier_backward_passes_do_not_change_the_steps_of_a_compiled_model(kind, preset):
    """Compare with the model that is not compiled; a step trains buffers once, whatever torch compiled before."""
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net = Network()
        model = torch.compile(net, backend="aot_eager") if compiled else net
        start = {name: value.clone() for name, value in net.state_dict().items()}
        if compiled and kind != "none":
            earlier_passes(kind, net, model)
            net.load_state_dict(start)
        opt = sanc.SANC(net.parameters(), seed=0, preset=preset)
        drive("loss", model, opt, batches(6))
        assert opt.hvp == "auto" and int(net.layers[1].num_batches_tracked) == 6
        ends.append(torch.cat([flat(net), net.layers[1].running_mean]))
    assert torch.allclose(*ends, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------------------------------- distributed checkpoints


@pytest.mark.parametrize(
    ("style", "options"),
    [("loss", {}), ("backward", {}), ("gradients", {}), ("gradients", {"full_state_dict": True, "cpu_offload": True})],
    ids=str,
)
def test_a_state_by_names_resumes(style, options):
    how, data = dcp.StateDictOptions(**options), batches(25)
    model, other = network(), network()
    opt, twin = (sanc.SANC(net.parameters(), seed=seed) for seed, net in enumerate((model, other)))
    drive(style, model, opt, data[:15])
    opt.zero_grad()
    held = flat(model)
    state = dcp.get_optimizer_state_dict(model, opt, options=how)
    assert torch.equal(held, flat(model)) and opt._iteration.state.iteration == 15  # nothing was moved
    assert "0.weight" in state["state"]
    other.load_state_dict(model.state_dict())
    dcp.set_optimizer_state_dict(other, twin, state, options=how)
    assert twin.style == style and twin.param_groups[0]["lr"] == 1.0
    for net, mine in ((model, opt), (other, twin)):
        drive(style, net, mine, data[15:])
        mine.eval()
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("style", ["loss", "backward", "gradients"])
@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_vectors_cannot_be_loaded_into_a_fresh_optimiser_and_the_error_names_the_remedy(style, tmp_path):
    """`load` fills existing entries of a state dict, and before the first step there are no vectors."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, other, data = network(), network(), batches(25)
    opt, twin = (sanc.SANC(net.parameters(), seed=seed) for seed, net in enumerate((model, other)))
    drive(style, model, opt, data[:15])
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
        drive(style, net, mine, data[15:])
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
    assert opt.style == "" and opt._iteration.state.iteration == 0
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


def test_factories_by_name_for_the_hub():
    root = Path(__file__).parents[2]
    for name in ("arc", "cr", "crm", "ncd", "sanc", "scr"):
        opt = torch.hub.load(str(root), name, network().parameters(), source="local", seed=0)
        assert type(opt) is getattr(sanc, name.upper())


@pytest.mark.parametrize("schedule", [
    lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12),
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=12, cycle_momentum=False),
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=12),
    lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, 12),
])  # fmt: skip
def test_schedules_lower_the_factor_and_the_loss(schedule):
    torch.manual_seed(0)
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    scheduler, first = schedule(opt), whole(model)
    for x, y in batches(11):
        opt.step(lambda x=x, y=y: nn.functional.mse_loss(model(x), y))
        scheduler.step()
    assert opt.param_groups[0]["lr"] < 0.1 and whole(model) < first


@pytest.mark.parametrize("cycle", [
    lambda opt, **options: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=12, **options),
    lambda opt, **options: torch.optim.lr_scheduler.CyclicLR(opt, 0.5, 1.0, step_size_up=6, **options),
])  # fmt: skip
def test_a_momentum_that_a_schedule_changes_has_no_effect_and_is_saved(cycle):
    """The steps are those without it, a state with its entries loads, and a caller cannot pass them."""
    ends = []
    for options in ({}, {"cycle_momentum": False}):
        torch.manual_seed(0)
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
        scheduler = cycle(opt, **options)
        for x, y in batches(11):
            opt.step(lambda model=model, x=x, y=y: nn.functional.mse_loss(model(x), y))
            scheduler.step()
        ends.append(flat(model))
        sanc.SANC(model.parameters(), seed=0, curvature=False).load_state_dict(opt.state_dict())
    assert torch.equal(*ends)
    with pytest.raises(sanc.ArgumentError, match="group option 'momentum'"):
        sanc.SANC([{"params": network().parameters(), "momentum": 0.9}])
