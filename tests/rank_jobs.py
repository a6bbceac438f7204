"""Functions that the tests run on ranks: training of small networks, invalid uses, and faults."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import tempfile
import time
import warnings
from dataclasses import replace

import numpy as np
import scipy.sparse
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sanc
from preset_options import composed
from sanc.core.saved import vectors_of
from sanc.lab.authors import AUTHORS
from tensors import flat

ROWS = 12

METHODS = {
    f"{method} {preset}": (method, preset)
    for method in ("SANC", "SCR", "ARC", "CR", "CRM", "NCD")
    for preset in ("robust", "paper", "authors")
}


def network(seed=0, *layers):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Linear(6, 2)).double()


def batches(count, rows=ROWS, last=None, seed=1):
    rng = torch.Generator().manual_seed(seed)
    sizes = [rows] * (count - 1) + [last or rows]
    x = [torch.randn(size, 4, generator=rng, dtype=torch.float64) for size in sizes]
    return [(a, (a @ torch.ones(4, 2, dtype=torch.float64)).sin() + 0.3 * a[:, :2]) for a in x]


def share(batch, rank, size):
    """Return the rows of a batch that belong to a rank; the first ranks may have one more."""
    return [part.tensor_split(size)[rank] for part in batch]


def loss_of(model):
    return lambda a, b: (model(a) - b).square().mean()


def train(opt, model, data, style="loss", batch=False):
    """Make a step with each batch, in one of the three styles."""
    loss = loss_of(model)
    for a, b in data:
        closure = sanc.Batch(loss, a, b) if batch else lambda a=a, b=b: loss(a, b)

        def backward(closure=closure):
            opt.zero_grad()
            value = closure()
            value.backward()
            return value

        if style == "gradients":
            opt.train()
            backward()
            opt.step()
        else:
            opt.step(closure if style == "loss" else backward)
    if style == "gradients":
        opt.eval()


def outcome(opt, model):
    """Return what the ranks must agree on: the parameters, and branch and numbers of the last step."""
    record = opt.record
    numbers = [record.value, record.sigma, record.step_norm, record.grad_norm, float(record.krylov_dim)]
    vector = flat(model)
    return vector, str(record.branch), numbers, record.calls


def cases(steps, rows=ROWS):
    """Return by name: method, settings, style, whether DDP wraps the model, whether closures are `Batch`, the data."""
    even, uneven = batches(steps, rows), batches(steps, rows, last=rows - 3)
    found = {
        name: (method, composed(method.lower(), preset), "loss", False, False, even)
        for name, (method, preset) in METHODS.items()
    }
    for style in ("loss", "backward", "gradients"):
        for ddp in (False, True):
            found[f"{style} ddp={ddp}"] = ("SANC", {"weight_decay": 1e-2}, style, ddp, False, even)
    found |= {
        "backward paper ddp": ("SANC", {"preset": "paper"}, "backward", True, False, even),
        "uneven": ("SANC", {}, "loss", False, True, uneven),
        "uneven paper": ("SCR", {"preset": "paper", "weight_decay": 1e-3}, "loss", True, True, uneven),
        "microbatch": ("SANC", {"microbatch": rows // 6, "preset": "paper"}, "loss", False, True, uneven),
        "regenerate": ("SANC", {"lanczos": "regenerate", "preset": "paper"}, "loss", False, False, even),
        "forward": ("SANC", {"hvp": "forward-over-reverse", "preset": "paper"}, "loss", False, False, even),
        "diagonal": ("SANC", {"metric": "diagonal", "curvature": False}, "loss", False, False, even),
    }
    return found


FEW = {
    "SANC robust", "SANC paper", "SANC authors", "ARC robust", "CRM paper", "NCD robust", "loss ddp=True",
    "backward ddp=False", "backward ddp=True", "gradients ddp=False", "gradients ddp=True", "uneven", "uneven paper",
    "microbatch", "diagonal",
}  # fmt: skip
"""The cases of the tests that are not marked slow."""


def run_cases(steps, names=None, rows=ROWS, device="cpu"):
    """Train each case on this rank's share of the rows, and return the outcomes."""
    rank, size = rank_and_size()
    results = {}
    for name, (method, settings, style, ddp, batch, data) in cases(steps, rows).items():
        if names is not None and name not in names:
            continue
        model = network().to(device)
        opt = getattr(sanc, method)(model.parameters(), seed=0, compare_every=5, **settings)
        wrapped = DistributedDataParallel(model) if ddp and dist.is_initialized() else model
        local = [[part.to(device) for part in share(rows, rank, size)] for rows in data]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(opt, wrapped, local, style, batch)
        vector, *more = outcome(opt, model)
        results[name] = vector.cpu(), *more
    return results


# ---------------------------------------------------------------------------------------------- invalid uses


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def error_of(job):
    """Return type and text of the exception that a function raises; empty if there is none."""
    try:
        job()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def invalid_uses():
    """Return the errors of invalid uses by name; after each the group can still be used."""
    rank, size = rank_and_size()
    found = {}
    data = [share(rows, rank, size) for rows in batches(6)]

    found["other parameters"] = error_of(lambda: sanc.SANC(network(rank).named_parameters(), seed=0))
    found["other seeds"] = error_of(lambda: sanc.SANC(network().parameters(), seed=rank))
    found["other settings"] = error_of(lambda: sanc.SANC(network().parameters(), seed=0, sigma0=1.0 + rank))
    found["other rates"] = error_of(lambda: sanc.SANC([{"params": network().parameters(), "lr": 1.0 + rank}], seed=0))
    found["fewer parameters"] = error_of(lambda: sanc.SANC(list(network().parameters())[rank:], seed=0))
    found["capture"] = error_of(lambda: sanc.SANC(network().parameters(), capture=True))
    found["invalid group"] = error_of(lambda: sanc.SANC(network().parameters(), process_group="world"))
    torch.manual_seed(rank)
    free = sanc.SANC(network().parameters())  # without a seed: that of rank 0 is used
    found["drawn seed"] = free._driver.iteration.state.seed

    alone = network(rank)
    train(sanc.SANC(alone.parameters(), process_group=None, seed=rank), alone, data)
    found["alone"] = flat(alone)

    model = network()
    opt = sanc.SANC(model.named_parameters(), seed=0, compare_every=2)
    train(opt, model, data[:2])
    if rank == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-14
    found["changed on one rank"] = error_of(lambda: train(opt, model, data[2:4]))
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, compare_every=0)
    if rank == 1:
        opt.param_groups[0]["weight_decay"] = 0.1
    train(opt, model, data[:4])
    found["never compared"] = True  # no error was raised

    for name, preset, style in (
        ("paper", "paper", "loss"),
        ("robust", "robust", "loss"),
        ("given", "robust", "gradients"),
    ):
        model = network()
        opt = sanc.SANC(model.parameters(), preset=preset, seed=0, **({"curvature": False} if name == "robust" else {}))
        train(opt, model, data[:2], style)
        if style == "gradients":
            opt.train()
        before = flat(model)
        bad = [data[2][0].clone(), data[2][1]]
        bad[0][0] = float("nan") if rank == 1 else 1.0
        if style == "gradients":
            loss_of(model)(*bad).backward()
            opt.step()
        else:
            opt.step(lambda: loss_of(model)(*bad))
        found[f"nan {name}"] = (torch.equal(flat(model), before), opt.record.note, str(opt.record.branch))

    model = network()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    train(opt, model, data[:2])
    before, calls = flat(model), []

    def raises():
        calls.append(0)
        if rank == 1 and len(calls) == 2:
            raise KeyError("a row is missing")
        return loss_of(model)(*data[2])

    found["raises"] = (*error_of(lambda: opt.step(raises)), torch.equal(flat(model), before))
    train(opt, model, data[3:])  # the group can still be used
    found["after"] = flat(model)
    opt = sanc.SANC(model.parameters(), seed=0)
    kinds = sanc.Batch(loss_of(model), *data[0]) if rank else lambda: loss_of(model)(*data[0])
    found["kinds"] = error_of(lambda: opt.step(kinds))
    copies = pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt)
    found["pickled and copied"] = tuple(type(other._driver.mode).__name__ for other in copies)
    ignoring = sanc.Batch(
        lambda a, y: nn.functional.cross_entropy(model(a), y), data[0][0], torch.tensor([0, -100, 1, 1, 0, 1])
    )
    found["ignored"] = error_of(lambda: opt.step(ignoring))
    ddp = DistributedDataParallel(network())
    opt = sanc.SANC(ddp.parameters(), seed=0)

    def backward(*parts):
        value = loss_of(ddp)(*parts)
        value.backward()
        return value

    rows = sanc.Batch(backward, *(part[: 4 + rank] for part in data[0]))
    found["ddp uneven"] = error_of(lambda: opt.step(rows))
    broken = [data[0][0] * (float("nan") if rank == 1 else 1.0), data[0][1]]
    found["nan at the start"] = error_of(lambda: [opt.step(lambda: backward(*broken)) for _ in range(10)])
    opt.step(lambda: backward(*data[0]))  # the group can still be used
    return found


def rows_of_nan():
    """Give one rank rows of NaN in one step; return whether that step left the parameters alone, and the last ones."""
    rank, size = rank_and_size()
    found = {}
    for name, (method, settings, style, ddp, batch, data) in cases(6).items():
        for bad_rank in range(size):
            for at in (1, 4):
                model = network()
                opt = getattr(sanc, method)(model.parameters(), seed=0, compare_every=1, **settings)
                wrapped = DistributedDataParallel(model) if ddp else model
                local = [share(rows, rank, size) for rows in data]
                if rank == bad_rank:
                    local[at][0] = torch.full_like(local[at][0], torch.nan)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    train(opt, wrapped, local[:at], style, batch)
                    before = flat(model)
                    train(opt, wrapped, local[at : at + 1], style, batch)
                    stayed = torch.equal(flat(model), before)
                    train(opt, wrapped, local[at + 1 :], style, batch)
                found[f"{name}, rank {bad_rank}, step {at}"] = stayed, flat(model)
    return found


class GlobalNorm(nn.Module):
    """Normalises by mean and variance over the rows of all ranks, as SyncBatchNorm does on a GPU."""

    def forward(self, x):
        from torch.distributed.nn.functional import all_reduce

        if not dist.is_initialized():
            return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()
        total = all_reduce(torch.stack([x.sum(0), x.square().sum(0)]))
        count = len(x) * dist.get_world_size()
        mean = total[0] / count
        return (x - mean) / (total[1] / count - mean.square() + 1e-3).sqrt()


def layers(steps, parts=2, rows=ROWS):
    """Train networks whose loss depends on several rows at once: BatchNorm, `GlobalNorm`, a weighted `Batch`.

    BatchNorm normalises the rows of each rank. One process normalises as many `parts` of each batch instead.
    """
    rank, size = rank_and_size()
    data = [share(batch, rank, size) for batch in batches(steps, rows)]
    found = {}
    for name, layer, settings in (
        ("batchnorm", nn.BatchNorm1d(6), {}),
        ("batchnorm paper", nn.BatchNorm1d(6), {"preset": "paper"}),
        ("global norm", GlobalNorm(), {}),
        ("global norm paper", GlobalNorm(), {"preset": "paper"}),
    ):
        if steps > 50 and "preset" in settings:
            continue  # the paper's escapes amplify a difference of 1e-13 after ten steps to 1e-5 after a hundred
        model = network(0, layer)
        if size == 1 and "batch" in name:
            settings = settings | {"microbatch": rows // parts}
        opt = sanc.SANC(model.parameters(), seed=0, compare_every=1, **settings)
        train(opt, model, data, batch=True)
        found[name] = outcome(opt, model)
    model = network()
    opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
    for batch in batches(steps, rows, last=rows - 1):
        a, b = share(batch, rank, size)
        opt.step(sanc.Batch(lambda a, b, model=model: (model(a) - b)[a[:, 0] > -0.5].square().mean(), a, b,
                            weight=lambda a, b: (a[:, 0] > -0.5).sum()))  # fmt: skip
    found["terms"] = outcome(opt, model)
    return found


def dropout(steps, settings):
    """Train with dropout; return the masks of each step, the last parameters, and the loss before and after."""
    rank, size = rank_and_size()
    model = network(0, nn.Dropout(0.5))
    masks = []
    model[1].register_forward_hook(lambda module, inputs, output: masks[-1].append((output == 0).clone()))
    opt = sanc.SANC(model.parameters(), seed=0, compare_every=1, **settings)
    whole, losses = batches(1, 480, seed=2)[0], []
    for k, batch in enumerate([None, *batches(steps, 48), None]):
        masks.append([])
        if batch is None:
            model.eval()
            losses.append(loss_of(model)(*whole).item())
            model.train()
            masks.pop()
            continue
        a, b = share(batch, 0 if k == 1 else rank, size)  # in the first step all ranks have the same rows
        opt.step(lambda a=a, b=b: loss_of(model)(a, b))
    return masks, flat(model), losses


def normalised(device):
    """Train networks with torch's SyncBatchNorm, in all styles."""
    rank, size = rank_and_size()
    data = [[part.to(device) for part in share(batch, rank, size)] for batch in batches(8, 48)]
    found = {}
    for style in ("loss", "backward", "gradients"):
        for settings in ({}, {"preset": "paper"}) if style != "gradients" else ({},):
            model = nn.SyncBatchNorm.convert_sync_batchnorm(network(0, nn.BatchNorm1d(6))).to(device)
            opt = sanc.SANC(model.parameters(), seed=0, compare_every=1, hvp="finite-difference", **settings)
            wrapped = DistributedDataParallel(model) if style == "backward" and dist.is_initialized() else model
            train(opt, wrapped, data, style)
            vector, *more = outcome(opt, model)
            statistics = torch.cat([model[1].running_mean, model[1].running_var])
            found[f"{style} {settings}"] = torch.cat([vector, statistics]).cpu(), *more
    return found


# ---------------------------------------------------------------------------------------------- finite sums


def problem(kind, rows):
    rng = np.random.default_rng(3)
    X = rng.standard_normal((40, 5)) * (rng.random((40, 5)) < 0.6)
    y = (X @ np.ones(5) + rng.standard_normal(40) > 0).astype(int)
    if kind == "mapped":  # each rank maps its rows of a file
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/X.npy", X)
            part = np.load(f"{folder}/X.npy", mmap_mode="r")[rows[0] : rows[-1] + 1]
        assert isinstance(part, np.memmap)
        return sanc.problems.Logistic(part, y[rows], strength=0.1)
    X, y = X[rows], y[rows]
    if kind == "softmax":
        return sanc.problems.Softmax(X, y, classes=3, strength=1e-2)
    if kind == "svm":
        return sanc.problems.NonconvexSVM(X, 2 * y - 1)
    return sanc.problems.Logistic(scipy.sparse.csr_matrix(X) if kind == "csr" else X, y, strength=0.1)


def sums():
    rank, size = rank_and_size()
    rows = np.split(np.arange(40), [23])[rank] if size == 2 else np.array_split(np.arange(40), size)[rank]
    found = {}
    for name, kind, settings in (
        ("mapped", "mapped", {"max_iter": 40}),
        ("mapped and sampled", "mapped", {"batch_size": 6, "max_iter": 40, "seed": 1}),
        ("full", "dense", {"max_iter": 40}),
        ("paper", "csr", {"preset": "paper", "max_iter": 20, "tol": 1e-5}),
        ("sampled", "dense", {"batch_size": 6, "max_iter": 40, "seed": 1}),
        ("sampled paper", "csr", {"batch_size": 3, "preset": "paper", "max_iter": 30, "max_time": 1e6}),
        ("authors", "svm", {"batch_size": 8, "preset": AUTHORS, "max_iter": 30}),
        ("growing", "svm", {"batch_size": 4, "method": "scr", "preset": "paper", "grow_samples": True, "max_iter": 15}),
        ("bounded", "dense", {"bounds": [(0.0, 0.3)] * 5, "max_iter": 40}),
        ("softmax", "softmax", {"max_iter": 30}),
    ):
        local = problem(kind, rows)
        calls, stop = [], {}
        if name == "softmax":
            stop = {"callback": lambda x: calls.append(0) or (rank == 0 and len(calls) == 8)}
        result = sanc.minimize(local, np.full(local.dim, 0.1), process_group="default", **stop, **settings)
        certificate = result.certificate
        found[name] = (result.x, result.fun, result.nit, result.status, result.calls, certificate.lambda_min)
    if size > 1:
        local = problem("dense", rows)
        found["other x0"] = error_of(lambda: sanc.minimize(local, np.full(5, float(rank)), process_group="default"))
        other = sanc.problems.Logistic(local.X, local.y, strength=0.1 + rank)
        found["other penalty"] = error_of(lambda: sanc.minimize(other, np.zeros(5), process_group="default"))
        weighted = sanc.problems.Logistic(local.X, local.y, weights=np.ones(local.n))
        found["weights"] = error_of(lambda: sanc.minimize(weighted, np.zeros(5), process_group="default"))
        found["no sum"] = error_of(lambda: sanc.minimize(lambda x: (x**2).sum(), np.zeros(5), process_group="default"))
        bounds = [(0.0, 1.0 + rank)] * 5
        found["bounds"] = error_of(lambda: sanc.minimize(local, np.zeros(5), bounds=bounds, process_group="default"))
        alone = sanc.minimize(local, np.zeros(5))
        found["alone"] = alone.fun
    return found


# ---------------------------------------------------------------------------------------------- sharded parameters

SHARDED = {
    "second-order": ("loss", {"preset": "paper"}),
    "robust": ("loss", {"weight_decay": 1e-2}),
    "averaged": ("loss", {"curvature": False, "weight_decay": 1e-2}),
    "backward": ("backward", {}),
    "gradients": ("gradients", {"lr": 0.5}),
    "no metric": ("gradients", {"metric": "none"}),
    "diagonal": ("gradients", {"metric": "diagonal"}),
    "long sides": ("gradients", {"largest_side": 6, "refresh": 2}),
    "regenerate": ("loss", {"preset": "paper", "lanczos": "regenerate"}),
}


def deep(size=1, width=7):
    """Return a network whose matrices cannot be split evenly, sharded unless `size` is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    if size:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    return model


def gathered(opt):
    """Return all parameters as one whole vector."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().reshape(-1) for p in params])


def sharded(steps, names=None):
    """Train the cases of `SHARDED` on the rows of this rank, with sharded parameters if there are several ranks."""
    rank, size = rank_and_size()
    found = {}
    for name in names or SHARDED:
        style, settings = SHARDED[name]
        model = deep(size > 1)
        products = {"hvp": "finite-difference"} if style == "loss" else {}
        opt = sanc.SANC(model.parameters(), seed=0, compare_every=2, **products, **settings)
        train(opt, model, [share(rows, rank, size) for rows in batches(steps)], style)
        record = opt.record
        found[name] = (gathered(opt), str(record.branch), [record.value, record.sigma, record.grad_norm])
    return found


def bytes_held():
    """Return the bytes of the vectors and of the metric on this rank, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.train()
    model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    iterates = opt._driver.iteration
    vectors = {tensor.data_ptr(): tensor for tensor in vectors_of(iterates.state).values()}  # some are the same
    tensors = [*vectors.values(), *iterates.averaged_phase.metric.preconditioner.tensors()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def invalid_sharded_uses():
    """Return the errors of invalid uses of sharded parameters by name, and the outcomes of two faults."""
    rank, size = rank_and_size()
    found, data = {}, [share(rows, rank, size) for rows in batches(6)]
    found["products"] = error_of(lambda: sanc.SANC(deep().parameters(), hvp="double-backward"))
    found["alone"] = error_of(lambda: sanc.SANC(deep().parameters(), process_group=None))
    found["mixed"] = error_of(lambda: sanc.SANC([*deep().parameters(), *network().parameters()]))
    found["capture"] = error_of(lambda: sanc.SANC(deep().parameters(), capture=True))
    found["seeds"] = error_of(lambda: sanc.SANC(deep().parameters(), seed=rank))
    model = deep()
    opt = sanc.SANC(model.parameters(), seed=0)
    rows = sanc.Batch(loss_of(model), *(part[: 4 + rank] for part in data[0]))
    found["uneven"] = error_of(lambda: opt.step(rows))

    # After a pass without gradients the outermost module keeps gathered parameters; a change must free them.
    for style in ("gradients", "loss"):
        model = deep()
        opt = sanc.SANC(model.parameters(), seed=0)
        train(opt, model, data, style)
        a, b = data[0]
        with torch.no_grad():
            model(a)
            opt.train()
            current = loss_of(model)(a, b)
            plain = deep(0)
            for p, part in zip(opt.param_groups[0]["params"], plain.parameters(), strict=True):
                part.copy_(p.full_tensor())
            found[f"stale {style}"] = float(current - loss_of(plain)(a, b))

    before = gathered(opt)
    bad = data[0][0] * (float("nan") if rank == 1 else 1.0)
    opt.step(lambda: loss_of(model)(bad, data[0][1]))
    found["nan"] = (torch.equal(gathered(opt), before), opt.record.note)
    return found


def checkpointed(folder, begin, end, parts, style, save):
    """Train from step `begin`, at which a checkpoint is loaded unless it is 0, to step `end`."""
    rank, size = rank_and_size()
    model = deep(parts)
    opt = sanc.SANC(model.parameters(), seed=0, compare_every=3)
    assert begin == 0 or sanc.load_checkpoint(folder, model, opt) == begin
    train(opt, model, [share(rows, rank, size) for rows in batches(40)[begin:end]], style)
    if save:
        sanc.save_checkpoint(folder, model, opt)
    return gathered(opt)


def low_precision(folder, parts, style):
    """Train bfloat16 parameters, save after 12 of 15 steps, and resume; return both ends with their master values.

    All ranks have the same rows, so that means over ranks are exact. `parts` = 1: sharded parameters.
    """
    data = [(a.bfloat16(), b.bfloat16()) for a, b in batches(15)]
    found = []
    for begin in (0, 12):
        model = deep(0).bfloat16()
        if parts:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        opt = sanc.SANC(model.parameters(), seed=0, compare_every=2)
        if begin:
            assert sanc.load_checkpoint(folder, model, opt) == begin
        else:
            train(opt, model, data[:12], style)
            if folder is not None:
                sanc.save_checkpoint(folder, model, opt)
        train(opt, model, data[12:], style)
        states = opt.state_dict()["state"].values()
        masters = [getattr(entry["master"], "full_tensor", lambda entry=entry: entry["master"])() for entry in states]
        found.append((gathered(opt), torch.cat([master.reshape(-1) for master in masters])))
        if folder is None:
            break
    return found


# ---------------------------------------------------------------------------------------------- faults


def fault(kind, parts=0):
    """Train until rank 1 fails; return error, seconds until it was raised, and whether parameters are unchanged."""
    rank, _ = rank_and_size()
    model = deep(parts)
    opt = sanc.SANC(model.parameters(), seed=0)
    train(opt, model, batches(3), "gradients" if parts else "loss")
    before = gathered(opt) if not parts else None
    if rank == 1:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hangs":
            time.sleep(13)
        if kind == "raises":
            raise KeyError("a file is missing")
        return None  # fewer steps
    begun = time.monotonic()
    name, text = error_of(lambda: train(opt, model, batches(2), "gradients" if parts else "loss"))
    return name, text, time.monotonic() - begun, parts or torch.equal(gathered(opt), before)


def kill_while_saving(folder):
    """Kill rank 1 while it writes the second checkpoint; return the error on the other rank."""
    rank, _ = rank_and_size()
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    train(opt, model, batches(2))
    sanc.save_checkpoint(folder, model, opt)
    train(opt, model, batches(2))
    if rank == 1:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        FileSystemWriter.write_data = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: sanc.save_checkpoint(folder, model, opt))


def end_process(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def end_after(function):
    def changed(*arguments, **options):
        function(*arguments, **options)
        end_process()

    return changed


def end_halfway(writer, *arguments, **options):
    """Write the first half of a file of this rank."""
    (writer.path / f"__{dist.get_rank()}_0.distcp").write_bytes(b"PK" + bytes(100))
    end_process()


def end_while_deleting(folder, *arguments, **options):
    """Delete one file of a checkpoint, and end."""
    next(path for path in sorted(folder.iterdir()) if path.is_file()).unlink()
    end_process()


def moments():
    """Return by name the ranks that are killed, and owner, name and replacement of the function in which they are."""
    import pathlib
    import shutil

    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write, finish, rename = FileSystemWriter.write_data, FileSystemWriter.finish, pathlib.Path.rename
    renamed = []

    def end_before_name(number):
        def changed(path, target):
            renamed.extend([path] * path.is_dir())  # torch changes the names of files
            return end_process() if len(renamed) == number else rename(path, target)

        return changed

    return {
        "before a step": (range(4), sanc.SANC, "step", end_process),
        "one rank before a step": ([2], sanc.SANC, "step", end_process),
        "one rank after a step": ([1], sanc.SANC, "step", end_after(sanc.SANC.step)),
        "before a save": (range(4), sanc, "save_checkpoint", end_process),
        "before writing": (range(4), FileSystemWriter, "write_data", end_process),
        "one rank while writing": ([3], FileSystemWriter, "write_data", end_halfway),
        "all ranks while writing": (range(4), FileSystemWriter, "write_data", end_halfway),
        "one rank after writing": ([1], FileSystemWriter, "write_data", end_after(write)),
        "before the metadata": ([0], FileSystemWriter, "finish", end_process),
        "after the metadata": ([0], FileSystemWriter, "finish", end_after(finish)),
        "before the first name is changed": ([0], pathlib.Path, "rename", end_before_name(1)),
        "before the second name is changed": ([0], pathlib.Path, "rename", end_before_name(2)),
        "before the third name is changed": ([0], pathlib.Path, "rename", end_before_name(3)),
        "while an old one is deleted": ([0], shutil, "rmtree", end_while_deleting),
    }


def resumable(folder, end, twice=False, kill=None, at=0):
    """Train sharded parameters from the newest checkpoint, save after every second step, and return the losses by step.

    `twice` saves each checkpoint again, which replaces it. `kill` names one of `moments`, from the end of step `at` on.
    """
    rank, size = rank_and_size()
    model = deep()
    opt = sanc.SANC(model.parameters(), seed=0, compare_every=3)
    done = sanc.load_checkpoint(folder, model, opt)
    losses = {}
    for step, batch in enumerate(batches(end)[done:], done + 1):
        a, b = share(batch, rank, size)
        losses[step] = float(opt.step(lambda a=a, b=b: loss_of(model)(a, b)))
        if step == at:
            ranks, owner, name, replacement = moments()[kill]
            if rank in ranks:
                setattr(owner, name, replacement)
        for _ in range((1 + twice) * (step % 2 == 0)):
            sanc.save_checkpoint(folder, model, opt)
    return losses


def resumed(folders, end):
    """Continue the runs of several folders."""
    return [resumable(folder, end) for folder in folders]


def load_damaged(folder, parts):
    """Load a damaged checkpoint; return the error, and whether model and optimiser are unchanged."""
    model = deep(parts)
    opt = sanc.SANC(model.parameters(), seed=0)
    before, state = gathered(opt), str(opt.state_dict()["run_state"])
    error = error_of(lambda: sanc.load_checkpoint(folder, model, opt))
    return error, torch.equal(gathered(opt), before) and str(opt.state_dict()["run_state"]) == state


def raise_under_a_wrapper(wrapped):
    """Raise an exception in the closure of rank 1; return the error, and whether parameters are unchanged."""
    rank, _ = rank_and_size()
    model = DistributedDataParallel(network()) if wrapped else network()
    x = torch.full((4, 4), 1.0 + rank * wrapped).double()
    opt = sanc.SANC(model.parameters(), seed=0)

    def closure(fails=False):
        if fails and rank == 1:
            raise ValueError("a bad row")
        opt.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    for _ in range(3):
        opt.step(closure)
    before = flat(model).clone()
    try:
        opt.step(lambda: closure(True))
    except Exception as error:
        return type(error).__name__, bool(torch.equal(flat(model), before))


# ---------------------------------------------------------------------------------------------- drift


def freeze(model, opt):
    model[0].weight.requires_grad_(False)


def freeze_all(model, opt):
    model.requires_grad_(False)


def freeze_group(model, opt):
    opt.param_groups[0]["frozen"] = True


def clip(model, opt):
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def last_bit(model, opt):
    with torch.no_grad():
        model[0].weight[0, 0] *= 1.0 + 2 * torch.finfo(model[0].weight.dtype).eps


def negate(model, opt):
    with torch.no_grad():
        model[0].weight.neg_()


def rate(model, opt):
    opt.param_groups[0]["lr"] = 0.5


def decay(model, opt):
    opt.param_groups[0]["weight_decay"] = 0.1


def invalid_rate(model, opt):
    opt.param_groups[0]["lr"] = -1.0


def widen(model, opt):
    opt.add_param_group({"params": [("more", torch.zeros(3, dtype=model[0].weight.dtype, requires_grad=True))]})


def narrow(model, opt):
    model.bfloat16()


def empty_group(model, opt):
    opt.param_groups.append(opt.param_groups[0] | {"params": [], "param_names": []})


def state(model, opt):
    iterates = opt._driver.iteration
    iterates.state = replace(iterates.state, seed=iterates.state.seed + 1)


DRIFTS = {
    freeze: r"parameter 0\.weight has requires_grad = False on rank 1 and requires_grad = True on rank 0",
    freeze_all: r"parameter 0\.weight has requires_grad = False on rank 1",
    freeze_group: r"parameter 0\.weight has frozen = True on rank 1 and frozen = False on rank 0",
    clip: r"parameter 0\.weight of shape \(\d+, 4\) of rank 1 differs from that of rank 0",
    last_bit: r"parameter 0\.weight of shape \(\d+, 4\) of rank 1 differs from that of rank 0",
    negate: r"parameter 0\.weight of shape \(\d+, 4\) of rank 1 differs from that of rank 0",
    rate: r"parameter 0\.weight has lr = 0\.5 on rank 1 and lr = 1\.0 on rank 0",
    decay: r"parameter 0\.weight has weight_decay = 0\.1 on rank 1 and weight_decay = 0\.0 on rank 0",
    invalid_rate: r"parameter 0\.weight has lr = -1\.0 on rank 1",
    widen: "the number of parameters of rank 1 differs",
    narrow: r"parameter 0\.weight has dtype = torch\.bfloat16 on rank 1 and dtype = torch\.float(64|32) on rank 0",
    empty_group: "the number of parameter groups of rank 1 differs",
    state: "'seed' in the state of the method of rank 1 differs",
}
"""Changes on one rank only, and what the error says of them."""

VALUES = (clip, last_bit, negate)
"""The changes of values, which sharded parameters cannot show: no two ranks hold the same entry."""


def drift(changes, moments, styles, dtype=torch.float64, parts=0, settings=None):
    """Change something on rank 1 before a step; return the errors, and whether that step changed parameters.

    `parts` = 1: sharded parameters.
    """
    rank, size = rank_and_size()
    found = {}
    for style in styles:
        for at in moments:
            for change in changes:
                model = (deep() if parts else network()).to(dtype)
                opt = sanc.SANC(model.named_parameters(), seed=0, **(settings or {}))
                data = [[part.to(dtype) for part in share(batch, rank, size)] for batch in batches(at + 2)]
                train(opt, model, data[:at], style)
                opt.train()
                if style == "gradients":
                    opt.zero_grad()
                    loss_of(model)(*data[at]).backward()
                if rank == 1:
                    change(model, opt)
                before = gathered(opt)

                def loss(model=model, rows=data[at]):
                    return loss_of(model)(*rows)

                def backward(model=model, opt=opt, rows=data[at]):
                    opt.zero_grad()
                    value = loss_of(model)(*rows)
                    value.backward()
                    return value

                closure = {"gradients": None, "backward": backward, "loss": loss}[style]
                kind, text = error_of(lambda opt=opt, closure=closure: opt.step(closure))
                found[f"{change.__name__}, {style}, step {at}"] = kind, text, torch.equal(gathered(opt), before)
    return found


class Elsewhere(sanc.Diagonal):
    """A metric of a user without a `repr` of its own: that of `object` contains an address."""

    __repr__ = object.__repr__


DIFFERENT_OPTIONS = {
    "preset": {"preset": "paper"},
    "metric": {"metric": "diagonal"},
    "an option of the metric": {"refresh": 3},
    "an option of the model": {"krylov_dim": 3},
    "curvature": {"curvature": False},
    "lr": {"lr": 0.5},
    "weight_decay": {"weight_decay": 0.1},
    "seed": {"seed": 1},
    "hvp": {"hvp": "finite-difference"},
    "microbatch": {"microbatch": 2},
    "check": {"check": False},
    "compare_every": {"compare_every": 3},
    "no comparison": {"compare_every": 0},
}
"""Options of rank 1 only."""


def different_options(parts=0):
    """Construct optimisers with different options on rank 1; return the errors by name."""
    rank, _ = rank_and_size()
    found = {}
    for name, options in DIFFERENT_OPTIONS.items():
        model = deep() if parts else network()
        settings = {"seed": 0} | (options if rank == 1 else {})
        found[name] = error_of(lambda model=model, settings=settings: sanc.SANC(model.parameters(), **settings))
    model = deep() if parts else network()
    kind = sanc.SCR if rank == 1 else sanc.SANC
    found["method"] = error_of(lambda: kind(model.parameters(), seed=0))
    return found


STYLES = ("loss", "backward", "gradients")


def different_styles(settings):
    """Make the first step in another style on rank 1; return the errors, and parameters after steps in one style."""
    rank, size = rank_and_size()
    found = {}
    for pair in [(one, other) for one in STYLES for other in STYLES if one != other]:
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0, **settings)
        data = [share(batch, rank, size) for batch in batches(4)]
        before = flat(model)
        error = error_of(lambda model=model, opt=opt: train(opt, model, data[:1], pair[rank]))
        same = torch.equal(flat(model), before)
        opt.zero_grad()
        train(opt, model, data[1:])
        found[" and ".join(pair)] = error, same, flat(model)
    return found


EXTRAS = {
    str(dtype): torch.ones(5).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
        torch.complex64, torch.complex128,
    )
} | {"of one entry": torch.ones(()), "without entries": torch.ones(0)}  # fmt: skip
"""Frozen parameters of all types, with an odd number of entries."""


def frozen_parameters():
    """Train beside frozen parameters of all types; return the errors, and those after one is changed on rank 1."""
    rank, size = rank_and_size()
    found = {}
    for name, extra in EXTRAS.items():
        model = network()
        frozen = nn.Parameter(extra.clone(), requires_grad=False)
        groups = [*model.named_parameters(), ("extra", frozen)]
        data = [share(batch, rank, size) for batch in batches(4)]

        def made(groups=groups, model=model, data=data):
            opt = sanc.SANC(groups, seed=0, compare_every=1, metric=Elsewhere())
            train(opt, model, data[:2])
            return opt

        error = error_of(made)
        opt = made()
        if rank == 1 and extra.numel():
            frozen.view(-1)[-1:].zero_()
        found[name] = error, error_of(lambda opt=opt, model=model, data=data: train(opt, model, data[2:3]))
    return found


def fail_alone(parts, moments):
    """Make a call before a step on rank 1 only, after which it cannot make the step.

    Return by name the errors, the seconds, and the parameters after both ranks have trained on.
    """
    rank, size = rank_and_size()
    found = {}
    for name in ("eval", "zero_grad", "load_state_dict"):
        for at in moments:
            model = deep() if parts else network()
            opt = sanc.SANC(model.parameters(), seed=0)
            data = [share(batch, rank, size) for batch in batches(at + 3)]
            train(opt, model, data[:at], "gradients")
            opt.train()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved = opt.state_dict()  # at the point of gradients
            opt.zero_grad()
            loss_of(model)(*data[at]).backward()
            before, begun = gathered(opt), time.monotonic()
            if rank == 1:
                opt.load_state_dict(saved) if name == "load_state_dict" else getattr(opt, name)()
            error, seconds = error_of(opt.step), time.monotonic() - begun
            if name != "eval":
                assert torch.equal(gathered(opt), before)
            if name == "load_state_dict":  # now on all ranks
                opt.load_state_dict(saved)
            opt.eval()
            train(opt, model, data[at + 1 :], "gradients")
            found[f"{name}, step {at}"] = error, seconds, gathered(opt)
    return found


def start_training(model, opt):
    opt.train()


def move_and_project(steps):
    """Clamp the parameters from a step on, and call `eval`, often `state_dict`, and `train` after each step.

    Return the parameters, and after each step the number of those in which further changes are expected.
    """
    rank, size = rank_and_size()
    model = deep(size > 1)
    opt = sanc.SANC(model.parameters(), seed=0)
    seen = []
    for number, batch in enumerate(batches(steps)):
        opt.train()
        opt.zero_grad()
        loss_of(model)(*share(batch, rank, size)).backward()
        opt.step()
        before = opt._driver.mode.ranks.collectives if size > 1 else 0
        opt.eval()
        if number % 2:
            opt.train()
            opt.eval()
        if size > 1:  # no rank waits for another
            assert opt._driver.mode.ranks.collectives == before
        if number % 3 == 0:
            opt.load_state_dict(opt.state_dict())
        if number >= steps // 2:
            with torch.no_grad():
                for p in model.parameters():
                    (p.to_local() if hasattr(p, "to_local") else p).clamp_(-0.1, 0.1)
        seen.append(opt._iteration.state.caller.projection_countdown)
    return seen, gathered(opt)


def recover():
    """Undo a change after the error that it caused, and train on; return the parameters of both and an error."""
    rank, size = rank_and_size()
    ends, error = [], ""
    for changed in (False, True):
        model = network()
        opt = sanc.SANC(model.parameters(), seed=0)
        data = [share(batch, rank, size) for batch in batches(6)]
        train(opt, model, data[:3])
        if changed:
            model[0].weight.requires_grad_(rank == 0)
            error, _ = error_of(lambda model=model, opt=opt: train(opt, model, data[3:4]))
            model[0].weight.requires_grad_(True)
        train(opt, model, data[3:])
        ends.append(flat(model))
    return error, *ends


def change_on_all_ranks():
    """Freeze, clip and schedule on all ranks alike; return the collectives of the last steps, and the parameters."""
    rank, size = rank_and_size()
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    data = [share(batch, rank, size) for batch in batches(12)]
    counts = []
    for number, batch in enumerate(data):
        opt.param_groups[0]["lr"] = 1.0 / (1 + number)
        if number == 4:
            clip(model, opt)
        if number in (5, 7):
            model[0].weight.requires_grad_(number == 7)
        before = opt._driver.mode.ranks.collectives if size > 1 else 0
        train(opt, model, [batch])
        counts.append(opt._driver.mode.ranks.collectives - before if size > 1 else 0)
    return counts, flat(model)


def drift_before_saving(folder, changes, parts=0):
    """Change something on rank 1 and save; return by change the errors of both ways to save, and the files."""
    rank, _ = rank_and_size()
    found = {}
    for change in changes:
        model = deep() if parts else network()
        opt = sanc.SANC(model.named_parameters(), seed=0)
        train(opt, model, batches(2), "gradients")
        if rank == 1:
            change(model, opt)
        saved = error_of(lambda model=model, opt=opt: sanc.save_checkpoint(folder, model, opt))
        kept = error_of(opt.state_dict) if parts or rank == 0 else None  # one rank alone may call it
        found[change.__name__] = saved, kept, os.listdir(folder)
    return found


def fail_early():
    """Pass no closure on rank 1; return the errors, and the parameters after further steps."""
    rank, size = rank_and_size()
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    data = [share(batch, rank, size) for batch in batches(6)]
    train(opt, model, data[:3])
    error = error_of(lambda: opt.step((lambda: loss_of(model)(*data[3])) if rank == 0 else None))
    train(opt, model, data[3:])
    return error, flat(model)


def two_dimensional_mesh():
    """Return the error for parameters that are replicated and sharded over a mesh of two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for sides in ((1, 2), (2, 1)):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", sides, mesh_dim_names=("replicate", "shard")))
        found.append(error_of(lambda model=model: sanc.SANC(model.parameters(), seed=0)))
    return found


def pausing_layers(size, style):
    """Freeze layers for some averaged steps; return all parameters after each step. `size` is 0 for one process."""
    rank, size = rank_and_size() if size else (0, 0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 4, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs @ torch.ones(4, 2, dtype=torch.float64))
    model = deep(size)
    opt = sanc.SANC(model.parameters(), seed=0, curvature=False)
    ends = []
    for k in range(50):
        rows = torch.randint(400, (16,), generator=generator)[rank :: max(size, 1)]
        model[0].requires_grad_(not 25 <= k < 32)
        model[4].requires_grad_(k != 40)
        train(opt, model, [(inputs[rows], targets[rows])], style)
        ends.append(gathered(opt))
    return ends


# ---------------------------------------------------------------------------------------------- diagnose


def classes(count=4, rows=8):
    """Return batches of inputs and labels, of unequal sizes unless `rows` is negative."""
    rng = torch.Generator().manual_seed(3)
    sizes = [abs(rows) + (2 * k if rows > 0 else 0) for k in range(count)]
    return [
        (torch.randn(n, 4, generator=rng, dtype=torch.float64), torch.randint(0, 2, (n,), generator=rng)) for n in sizes
    ]


def diagnosed(wrapper, data, **options):
    """Diagnose a network on this rank's rows of each batch; return the numbers, and whether nothing changed."""
    rank, size = rank_and_size()
    if wrapper == "fully_shard" and size > 1:
        model = deep()
    else:
        model = deep(0) if wrapper == "fully_shard" else network(0, nn.BatchNorm1d(6)).eval()
    if wrapper == "ddp" and size > 1:
        model = DistributedDataParallel(model)
    local = [share(batch, rank, size) for batch in data]
    with torch.no_grad():
        model(local[0][0])  # after it, a sharded model has gathered parameters
    before = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = sanc.diagnose(model, nn.CrossEntropyLoss(), local, held_out=local[:1], start_vectors=1, **options)
    same = all(torch.equal(whole(tensor), before[name]) for name, tensor in model.state_dict().items())
    return report.as_dict(), same


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def diagnoses():
    """Diagnose plain and wrapped networks with batches of unequal sizes; return the numbers by name."""
    return {name: diagnosed(name, classes(), max_products=6, max_time=1e3) for name in ("plain", "ddp")}


def invalid_diagnoses():
    """Return the errors of calls that differ between the ranks; after each the group can still be used."""
    rank, size = rank_and_size()
    data = [share(batch, rank, size) for batch in classes()]
    loss = nn.CrossEntropyLoss()
    other = network(rank)

    def broken(model, batch):
        if rank == 1:
            raise KeyError("a row is missing")
        return loss(model(batch[0]), batch[1])

    found = {
        "parameters": error_of(lambda: sanc.diagnose(other, loss, data)),
        "seed": error_of(lambda: sanc.diagnose(network(), loss, data, seed=rank)),
        "batches": error_of(lambda: sanc.diagnose(network(), loss, data[rank:])),
        "no batch": error_of(lambda: sanc.diagnose(network(), loss, data[: 0 if rank else None])),
        "raises": error_of(lambda: sanc.diagnose(network(), broken, data)),
    }
    alone = sanc.diagnose(network(rank), loss, data[rank:], process_group=None, start_vectors=1, max_products=1)
    found["alone"] = alone.rows, alone.value
    return found


def sharded_diagnoses():
    """Diagnose a sharded network; return its numbers, and the error for batches of unequal sizes."""
    rank, _ = rank_and_size()
    uneven = [tuple(part[: len(part) - rank] for part in batch) for batch in classes(2, -6)]
    error = error_of(lambda: sanc.diagnose(deep(), nn.CrossEntropyLoss(), uneven))
    return diagnosed("fully_shard", classes(2, -8), max_products=4), error
