"""Randomness and buffers: every evaluation of a sample repeats its draws, and the caller's states are restored."""

from __future__ import annotations

import copy
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sanc
from classifier import loss_of
from tensors import flat, torch_number


def make(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    return model, torch.randn(60, 5, dtype=dtype), torch.randint(0, 3, (60,))


@contextmanager
def forward_mode_of_checkpoints(hvp):
    """Skip the test if this version of torch has no forward mode of checkpoints."""
    try:
        yield
    except sanc.SecondDerivativeError:
        if hvp != "forward-over-reverse":
            raise
        pytest.skip(f"torch {torch.__version__} has no forward mode of checkpoints")


def test_every_evaluation_of_a_sample_repeats_its_draws():
    model, x, y = make()
    seen = {"closure": set(), "hessian": set(), "objective": set()}

    def noisy(name):
        def closure():
            draws = (torch.rand(()).item(), np.random.rand(), random.random())
            seen[name].add(draws)
            return nn.functional.cross_entropy(model(x), y) * (1 + 0.1 * draws[0] + 0.1 * draws[1] + 0.1 * draws[2])

        return closure

    opt = sanc.SANC(model.parameters(), preset="paper", hvp="forward-over-reverse", seed=0)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    opt.step(noisy("closure"), hessian=noisy("hessian"), objective=noisy("objective"))
    assert all(len(draws) == 1 for draws in seen.values())
    assert len(set.union(*seen.values())) == 3  # the three samples draw independently
    opt.step(noisy("closure"), hessian=noisy("hessian"), objective=noisy("objective"))
    assert all(len(draws) == 2 for draws in seen.values())  # the next step makes new draws
    assert torch.equal(torch.get_rng_state(), states[0])  # the global generators are restored
    assert np.array_equal(np.random.get_state()[1], states[1]) and random.getstate() == states[2]


def test_the_default_seed_comes_from_torch():
    finals = []
    for seed in (1, 1, 2):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        nn.init.constant_(model[0].weight, 0.1)
        _, x, y = make()
        for p in model.parameters():
            nn.init.constant_(p, 0.2)
        torch.manual_seed(seed)
        opt = sanc.SANC(model.parameters())
        opt.step(loss_of(model, x, y))
        finals.append(flat(model))
    assert torch.equal(finals[0], finals[1]) and not torch.equal(finals[0], finals[2])


@pytest.mark.parametrize("hvp", ["double-backward", "forward-over-reverse", "finite-difference"])
def test_batch_norm_is_updated_once_a_step(hvp):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin.load_state_dict(model.state_dict())
    _, x, y = make()
    opt = sanc.SANC(model.parameters(), preset="paper", hvp=hvp, seed=0)
    opt.step(loss_of(model, x[:30], y[:30]), hessian=loss_of(model, x[30:], y[30:]), objective=loss_of(model, x, y))
    twin(x[:30])  # one plain forward pass of the gradient sample, at the old weights
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert torch.equal(model[1].running_var, twin[1].running_var)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("lanczos", ["store", "regenerate"])
@pytest.mark.parametrize("hvp", ["double-backward", "forward-over-reverse", "finite-difference"])
def test_batch_norm_in_a_checkpoint_is_updated_as_by_a_plain_gradient(hvp, lanczos):
    torch.manual_seed(0)
    layer, norm, x = nn.Linear(5, 5), nn.BatchNorm1d(5), torch.randn(8, 5)

    def closure():
        h = x
        for _ in range(3):
            h = checkpoint(lambda h: torch.tanh(norm(layer(h))), h, use_reentrant=False)
        return torch.cos(h).mean()

    closure().backward()
    once = int(norm.num_batches_tracked)
    layer.zero_grad(), norm.zero_grad()
    opt = sanc.SANC([*layer.parameters(), *norm.parameters()], preset="paper", hvp=hvp, lanczos=lanczos, seed=0)
    for step in (2, 3):
        with forward_mode_of_checkpoints(hvp):
            opt.step(closure)
        assert int(norm.num_batches_tracked) == once * step


def test_batch_norm_of_another_sample_is_not_updated():
    """Only the objective's sample uses a module with buffers."""
    torch.manual_seed(0)
    first, second, norm = nn.Linear(5, 8).double(), nn.Linear(8, 3).double(), nn.BatchNorm1d(8).double()
    _, x, y = make()
    before = copy.deepcopy(norm.state_dict())
    opt = sanc.SANC([*first.parameters(), *second.parameters()], preset="paper", seed=0)
    for _ in range(3):
        opt.step(
            lambda: nn.functional.cross_entropy(second(first(x).tanh()), y),
            objective=lambda: nn.functional.cross_entropy(second(norm(first(x)).tanh()), y),
        )
        assert opt.record.trials >= 1
    assert all(torch.equal(now, before[name]) for name, now in norm.state_dict().items())


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_batch_norm_is_updated_once_if_a_value_is_evaluated_again(preset):
    """A loss that calls torch.autograd.grad fails without a graph, here before its BatchNorm runs."""
    torch.manual_seed(0)
    linear, norm, x = nn.Linear(4, 4), nn.BatchNorm1d(4), torch.randn(8, 4)

    def loss():
        z = x.clone().requires_grad_()
        (derivative,) = torch.autograd.grad(linear(z).tanh().sum(), z, create_graph=True)
        return (derivative**2).mean() + (norm(linear(x)) ** 4).mean()

    opt = sanc.SANC([*linear.parameters(), *norm.parameters()], preset=preset, seed=0, check=False)
    for k in range(3):
        opt.step(loss)
        assert int(norm.num_batches_tracked) == k + 1


@pytest.mark.parametrize("early", [True, False])
def test_buffers_registered_in_the_forward_pass_are_restored(early):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            if early:
                self.register_buffer("count", None)
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            if getattr(self, "count", None) is None:
                self.register_buffer("count", torch.zeros(()))
            self.count += 1
            return x @ self.weight

    model, x = Late(), torch.randn(10, 3, dtype=torch.float64)
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0, check=False)
    for k in range(3):
        opt.step(lambda: (model(x) ** 2).mean())
        assert int(model.count) == k + 1


def test_buffers_replaced_in_the_forward_pass_are_restored():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            self.count = self.count + 1
            return x @ self.weight

    model = Counter()
    x = torch.randn(10, 3, dtype=torch.float64)
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    opt.step(lambda: (model(x) ** 2).mean())
    assert int(model.count) == 1


class Drawing:
    """A loss that draws from a global generator of the host from step `begins` on."""

    def __init__(self, source, begins, raises=None):
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.source, self.step, self.begins, self.raises = source, 0, begins, raises

    def noise(self):
        if self.source == "numpy":
            return np.random.standard_normal(6)
        return np.array([random.gauss(0.0, 1.0) for _ in range(7)][:6])  # an odd number, so that Python stores one more

    def __call__(self):
        loss = (self.w**4).sum() + self.w.sum().cos()
        if self.step >= self.begins:
            loss = loss + (torch.from_numpy(self.noise()) * self.w).sum()
            if self.step == self.raises:
                raise KeyError("after a draw")
        return loss


def seed_host(seed):
    np.random.seed(seed)
    random.seed(seed)
    random.gauss(0.0, 1.0)


def draw_host():
    return np.random.random(), random.gauss(0.0, 1.0), random.random()


@pytest.mark.parametrize("source", ["numpy", "python"])
def test_the_generators_are_restored_after_a_loss_that_draws_and_raises(source):
    loss = Drawing(source, begins=2, raises=2)
    opt = sanc.SANC([loss.w], seed=1)
    seed_host(3)
    for loss.step in range(2):
        opt.step(loss)
    before, loss.step = loss.w.detach().clone(), 2
    with pytest.raises(KeyError):
        opt.step(loss)
    assert torch.equal(loss.w, before)
    loss.step = 3
    opt.step(loss)
    seen = draw_host()
    seed_host(3)
    assert seen == draw_host()


@pytest.mark.parametrize("fails", [False, True])
def test_the_normal_number_that_python_stores_is_restored(fails):
    """`random.gauss` may return a stored number, which changes none of the generator's words."""
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt, drawn = sanc.SANC([w], seed=1), []

    def loss(draws):
        factor = random.gauss(0.0, 1.0) if draws else 1.0
        drawn.append(factor)
        if draws and fails:
            raise KeyError("after a draw")
        return (w**4).sum() * factor

    for k in range(4):
        seed_host(3)
        drawn.clear()
        if fails and k > 1:
            with pytest.raises(KeyError):
                opt.step(lambda: loss(True))
        else:
            opt.step(lambda k=k: loss(k > 1))
            assert len(set(drawn[-2:])) == 1 or k == 0
        seen = draw_host()
        seed_host(3)
        assert seen == draw_host()


def test_a_closure_may_replace_the_global_generator():
    twister = np.random.get_bit_generator()
    w = nn.Parameter(torch.ones(3))
    opt = sanc.SANC([w], seed=1, preset="paper")

    def replacing():
        np.random.set_bit_generator(np.random.MT19937(5))
        return (w**4).sum()

    try:
        opt.step(lambda: (w**4).sum())
        before = twister.state["state"]["key"].copy()
        opt.step(replacing)
        assert np.array_equal(twister.state["state"]["key"], before)
    finally:
        np.random.set_bit_generator(twister)


def test_a_step_runs_while_random_is_patched(monkeypatch):
    monkeypatch.setattr("random.random", lambda: 0.5)
    w = nn.Parameter(torch.ones(3))
    opt = sanc.SANC([w], seed=1, preset="paper")
    for _ in range(3):
        opt.step(lambda: (w**4).sum())
    assert opt.record.iteration == 2


def test_a_global_generator_of_another_type_is_restored():
    twister = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        opt = sanc.SANC([nn.Parameter(torch.ones(3))], seed=1)
        w = opt.param_groups[0]["params"][0]
        for _ in range(3):
            before = np.random.get_bit_generator().state
            opt.step(lambda: (w**4).sum())
            assert np.random.get_bit_generator().state == before
    finally:
        np.random.set_bit_generator(twister)


def test_draws_in_the_backward_pass_are_repeated():
    """A function whose backward pass draws from NumPy makes the same draw in every evaluation of a step."""
    seen = []

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(np.random.rand())
            return g

    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    opt = sanc.SANC(model.parameters(), seed=1, preset="paper", hvp="finite-difference")
    for k in range(3):
        np.random.seed(k)
        before = np.random.get_state()[1].copy()
        seen.clear()
        opt.step(lambda: Noise.apply(model(x)).square().mean())
        assert len(seen) > 3 and len(set(seen)) == 1
        assert np.array_equal(np.random.get_state()[1], before)


# ---------------------------------------------------------------------------------------------- threads


def trained(model, seed, steps=30, barrier=None):
    """Train a network; return the count of its BatchNorm, its parameters and the draws of its closure."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=generator)
    x, y = torch.randn(30, 5, dtype=torch.float64, generator=generator), torch.arange(30) % 3
    opt, draws = sanc.SANC(model.parameters(), seed=seed), []

    def closure():
        draws.append((random.random(), np.random.rand(), float(torch.rand(()))))
        return nn.functional.cross_entropy(model(x), y)

    if barrier is not None:
        barrier.wait()
    for _ in range(steps):
        opt.step(closure)
    return int(model[1].num_batches_tracked), flat(model), draws


def test_optimisers_in_two_threads_are_independent():
    middle = [nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()]
    models = [nn.Sequential(nn.Linear(5, 8), *copy.deepcopy(middle), nn.Linear(8, 3)).double() for _ in range(4)]
    alone = [trained(model, seed) for seed, model in enumerate(models[:2])]
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda seed: trained(models[2 + seed], seed, barrier=barrier), (0, 1)))
    for (count, end, draws), (other_count, other_end, other_draws) in zip(alone, together, strict=True):
        assert count == other_count == 30
        assert torch.equal(end, other_end) and draws == other_draws
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert np.array_equal(np.random.get_state()[1], state[2])


@contextmanager
def drawing_thread(*draws, pause=1e-4):
    """Call these functions again and again in another thread; yield a list of what each returned."""
    drawn, stop = [[] for _ in draws], threading.Event()

    def work():
        while not stop.is_set():
            for numbers, draw in zip(drawn, draws, strict=True):
                numbers.append(draw())
            time.sleep(pause)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield drawn
    finally:
        stop.set()
        thread.join()


def ended(model, steps=12, preset="robust"):
    """Train a network on fixed data and return its parameters."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=generator)
    x, y = torch.randn(30, 5, dtype=torch.float64, generator=generator), torch.arange(30) % 3
    opt = sanc.SANC(model.parameters(), seed=0, preset=preset)
    for _ in range(steps):
        opt.step(loss_of(model, x, y))
    return flat(model)


def test_a_thread_beside_a_loss_that_draws_nothing_draws_no_number_twice():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    alone = ended(copy.deepcopy(model), 30)
    with drawing_thread(random.random, np.random.random, torch_number) as drawn:
        beside = ended(model, 30)
    assert torch.equal(alone, beside) and int(model[1].num_batches_tracked) == 30
    for numbers in drawn:
        # Before, a quarter was drawn twice. A number may repeat if it is drawn between two calls that seed.
        assert len(numbers) > 20 and len(numbers) - len(set(numbers)) <= max(2, len(numbers) // 1000)


def test_a_thread_that_draws_from_other_generators_does_not_change_dropout():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3)).double()
    alone = ended(copy.deepcopy(model))
    state = torch.get_rng_state()
    with drawing_thread(random.random, np.random.random) as drawn:
        assert torch.equal(alone, ended(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(len(numbers) - len(set(numbers)) <= 2 for numbers in drawn)


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("source", ["numpy", "python"])
def test_steps_beside_a_quiet_thread_are_those_without_it(source, preset, monkeypatch):
    """Draws that begin and end are repeated within each step, and undone after it, as if all generators were seeded."""
    ends = []
    for others in (False, True):
        monkeypatch.setattr("sanc.autograd.randomness._has_other_threads", lambda others=others: others)
        loss = Drawing(source, begins=0)
        opt = sanc.SANC([loss.w], seed=1, preset=preset)
        seed_host(3)
        for step, drawing in enumerate((False, True, True, False, False, True)):
            loss.begins, loss.step = (0 if drawing else 9), step
            opt.step(loss)
        ends.append((loss.w.detach().clone(), draw_host()))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_an_evaluation_that_another_thread_disturbs_is_compared(monkeypatch):
    """Beside draws of another thread, equal losses show that a closure draws nothing, and others that it does."""
    from sanc.autograd import generators, randomness

    device, generator = torch.device("cpu"), generators.PythonGenerator()
    monkeypatch.setattr(randomness, "_has_other_threads", lambda: True)
    monkeypatch.setattr(randomness, "_drawn_by_others", lambda states, evaluation_seconds: set(states))
    for draws in (False, True):
        tests, seen = {}, []

        def unit(draws=draws, seen=seen):
            number = random.random()  # the other thread's, unless `draws`
            seen.append(number)
            return (torch.tensor(number if draws else 1.0),)

        random.seed(5)
        with randomness.repeatable_draws(device, tests, repeats=True):
            for _ in range(8):
                randomness.current_step().seed(7)
                randomness.current_step().call(unit, lambda: None, 7, "value")
        assert tests[generator.name].draws is draws
        if draws:
            assert len(set(seen[2:])) == 1
            assert random.random() == random.Random(5).random()
        else:
            assert len(set(seen)) == len(seen) and tests[generator.name].shared


def test_buffers_of_a_model_in_another_thread_are_not_restored():
    """A BatchNorm that runs in another thread during a step counts all its forward passes."""
    other, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    opt = sanc.SANC(model.parameters(), seed=0)
    with ThreadPoolExecutor(1) as pool:

        def closure():
            pool.submit(other, x).result()
            return model(x).square().mean()

        calls = 0
        for k in range(5):
            opt.step(closure)
            assert int(model[1].num_batches_tracked) == k + 1
            assert int(other.num_batches_tracked) > calls + 1
            calls = int(other.num_batches_tracked)


def test_the_hook_is_removed_unless_a_model_is_compiled(monkeypatch):
    from torch.nn.modules import module

    from sanc.autograd import buffers

    monkeypatch.setattr(buffers.FORWARD_HOOK, "is_permanent", False)
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), seed=0)
    for _ in range(2):
        opt.step(loss_of(model, x, y))
        assert (
            opt._driver.oracle.usual_module_calls == 4 and not buffers.FORWARD_HOOK.is_permanent
        )  # three layers and the Sequential
    with pytest.raises(KeyError):
        opt.step(lambda: {}["loss"])
    if buffers.FORWARD_HOOK._handle is not None:  # left by a compiled model in another test
        buffers.FORWARD_HOOK._handle.remove()
        buffers.FORWARD_HOOK._handle = None
    opt.step(loss_of(model, x, y))
    assert not module._global_forward_hooks and not module._global_forward_pre_hooks
