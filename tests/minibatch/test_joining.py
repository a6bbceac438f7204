"""Parameters that leave and join between steps: what belongs to those that stay is kept."""

import copy
import warnings

import pytest
import torch

import sanc
from sanc.core.space import Space
from sanc.minibatch import step_numbers
from sanc.minibatch.settings import Minibatch, StepSize
from sanc.minibatch.state import MinibatchState
from training_styles import drive

STYLES = ("loss", "backward", "gradients")


def network(seed=0):
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return torch.nn.Sequential(*layers).double()


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs @ torch.ones(6, dtype=torch.float64)).unsqueeze(1)
    rows = [torch.randint(400, (16,), generator=generator) for _ in range(count)]
    return [(inputs[r], targets[r]) for r in rows]


def state_of(opt, parameter):
    """The saved state of one parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # saved in train mode
        saved = opt.state_dict()["state"]
    index = next(k for k, p in enumerate(opt.param_groups[0]["params"]) if p is parameter)
    entry = copy.deepcopy(saved.get(index, {}))
    return entry | entry.pop("metric", {})


def trained(style, steps=60, frozen=None):
    model = network()
    if frozen is not None:
        model[frozen].requires_grad_(False)
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    drive(style, model, opt, batches(steps))
    return model, opt


@pytest.mark.parametrize("style", STYLES)
def test_a_parameter_that_stays_continues_as_if_nothing_had_happened(style):
    """With the gradient of the frozen layer at zero, the others see the same gradients in both runs."""
    model, opt = trained(style)
    twin, other = trained(style)
    model[4].requires_grad_(False)
    held = model[4].weight.detach().clone()
    if style == "gradients":
        opt.eval()
        held = model[4].weight.detach().clone()
        opt.train()
    before = state_of(opt, model[0].weight)
    batch = batches(1, seed=5)
    drive(style, model, opt, batch)
    drive(style, twin, other, batch)
    assert torch.equal(model[4].weight, held)
    after, reference = state_of(opt, model[0].weight), state_of(other, twin[0].weight)
    assert set(after) >= set(before) - {"safe_point"}  # a change of the parameters starts the watch of the loss again
    # One step with nearly the same gradient: the metric and the offset agree far better than after a reset.
    for name in ("offset", "second_moment", "left_basis"):
        scale = float(reference[name].abs().max())
        assert torch.allclose(after[name], reference[name], atol=0.15 * scale), name
    assert opt._iteration.state.steps == other._iteration.state.steps


def test_what_is_kept_is_kept_bit_for_bit():
    model, opt = trained("loss")
    before = {name: state_of(opt, p) for name, p in model.named_parameters()}
    weights = copy.deepcopy(model.state_dict())
    model[0].requires_grad_(False)
    driver = opt._driver
    driver._adapt_to(opt._leaves(), opt._leaves().read())
    after = {name: state_of(opt, p) for name, p in model.named_parameters()}
    assert not after["0.weight"]
    for name in ("2.weight", "2.bias", "4.weight"):
        assert set(after[name]) == set(before[name])
        assert all(torch.equal(after[name][key], before[name][key]) for key in before[name]), name
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("style", STYLES)
def test_a_parameter_that_joins_starts_with_its_own_gradient(style):
    model, opt = trained(style, frozen=0)
    kept = state_of(opt, model[2].weight)
    steps, unit = opt._iteration.state.steps, opt._iteration.state.gradient_unit
    model[0].requires_grad_(True)
    batch = batches(1, seed=5)
    grads = []
    model[0].bias.register_hook(lambda g: grads.append(g.clone()))
    drive(style, model, opt, batch)
    g = grads[-1] / unit
    # V of a bias is not rotated: set up by the first gradient, then updated with the same one.
    assert torch.allclose(state_of(opt, model[0].bias)["second_moment"], g * g, rtol=1e-6)
    joined = {name: state_of(opt, p)["joined_at"] for name, p in model.named_parameters()}
    assert bool((joined["0.bias"] == steps).all()) and bool((joined["2.weight"] == 0.5 * steps).all())
    after = state_of(opt, model[2].weight)
    change = (after["left"] - 0.95 * kept["left"]) / 0.05  # GGᵀ of this step
    assert float(torch.linalg.eigvalsh(change).min()) > -1e-9 * float(change.abs().max())
    drive(style, model, opt, batches(40, seed=6))
    assert opt.record.branch == "averaged" and opt._iteration.state.steps == steps + 41


def test_the_average_of_new_entries_starts_at_the_step_at_which_they_joined():
    """c = (p + 1)/(k + p) is the average with weights i(i + 1)(i + 2): against their sum, entry by entry."""
    model, opt = trained("loss", frozen=0)
    steps = opt._iteration.state.steps
    model[0].requires_grad_(True)
    iterates, points, averages = opt._iteration, [], []
    for batch in batches(7, seed=5):
        drive("loss", model, opt, [batch])
        leaves = opt._driver.last_leaves
        x = leaves.split(leaves.read())[0]
        points.append(x + leaves.split(iterates.state.offset)[0])
        averages.append(x)
    weights = torch.tensor([i * (i + 1.0) * (i + 2.0) for i in range(1, 8)], dtype=torch.float64)
    mean = sum(w * z for w, z in zip(weights, points, strict=True)) / weights.sum()
    assert iterates.state.steps == steps + 7
    assert torch.allclose(averages[-1], mean, rtol=1e-10, atol=1e-12)


def test_a_short_pause_of_a_layer_does_not_cost_the_progress_of_the_others():
    """Frozen for ten steps: the loss afterwards stays near that before; it rose threefold when all was reset."""
    model, opt = trained("loss", 400)
    everything = batches(60, seed=9)
    inputs, targets = (torch.cat(part) for part in zip(*everything, strict=True))

    def loss():
        return float((model(inputs) - targets).detach().square().mean())

    before, largest = loss(), 0.0
    for k, batch in enumerate(batches(60, seed=7)):
        model[2].requires_grad_(k >= 10)
        drive("loss", model, opt, [batch])
        largest = max(largest, loss())
    assert largest < 2.0 * before and loss() < 1.2 * before


def test_parameters_that_are_frozen_in_every_second_step_slow_down_no_others():
    """The others keep their step size; it began again with every change, and the loss fell to half of its start."""
    rows, ends = batches(300), []
    for alternate in (False, True):
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0)
        for k, batch in enumerate(rows):
            for layer in model[::2]:
                layer.bias.requires_grad_(not alternate or k % 2 == 0)
            drive("gradients", model, opt, [batch])
        opt.eval()
        inputs, targets = (torch.cat(part) for part in zip(*rows, strict=True))
        ends.append(float((model(inputs) - targets).detach().square().mean()))
    assert ends[1] < 10.0 * ends[0] < 0.2


def test_an_exception_in_the_step_after_a_change_restores_metric_and_average():
    model, opt = trained("loss")
    before = copy.deepcopy(opt.state_dict()["state"])
    model[0].requires_grad_(False)

    def broken():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        opt.step(broken)
    model[0].requires_grad_(True)
    after = opt.state_dict()["state"]
    assert all(
        torch.equal(before[k][n], after[k][n]) for k in before for n in before[k] if torch.is_tensor(before[k][n])
    )
    twin, other = trained("loss")
    more = batches(5, seed=8)
    drive("loss", model, opt, more)
    drive("loss", twin, other, more)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_first_gradient_that_is_not_finite_leaves_a_state_that_can_be_saved():
    model, opt = trained("loss", frozen=0)
    model[0].requires_grad_(True)
    inputs, targets = batches(1, seed=5)[0]
    drive("loss", model, opt, [(inputs, targets * float("nan"))])
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    twin = network()
    other = sanc.SANC(twin.parameters(), seed=3, curvature=False)
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    more = batches(10, seed=8)
    drive("loss", model, opt, more)
    drive("loss", twin, other, more)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(("horizon", "remaining"), [(0, None), (1000, 940), (70, 10), (50, 1)])
def test_towards_a_known_end_all_entries_follow_the_last_iterates(horizon, remaining):
    """c is at least that of a mean over as many iterates as steps remain, also for entries that joined late."""
    joined_at = torch.tensor([0.0, 20.0, 50.0], dtype=torch.float64)
    state = MinibatchState(0, steps=60, joined_at=joined_at, weight_sum=sum(k**3 for k in range(1, 61)))
    settings = Minibatch(step_size=StepSize(horizon=horizon))
    usual = torch.tensor([61**3 / sum(k**3 for k in range(1, 62)), 4 / 44, 4 / 14], dtype=torch.float64)
    least = 0.0 if remaining is None else 4 / (remaining + 4)
    scalars = step_numbers.step_scalars(state, settings, 1.0)
    space = Space(3, torch.float64, torch.device("cpu"))
    weights = step_numbers.average_weights(state, settings, scalars.average_weight, space)
    torch.testing.assert_close(weights, usual.clamp(min=least))
