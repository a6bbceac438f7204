"""Errors for plausible mistakes name the argument, its value and the remedy.

A case has a name, a function that makes the mistake, and the words that the message must contain, in this order. A step
that raises an error changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import types
import warnings
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

import sanc
from sanc.lab.watch import StepLog

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
ROWS = torch.utils.data.TensorDataset(X, Y)
LOGISTIC = sanc.problems.Logistic(X.numpy(), Y.numpy() % 2)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def made(**options):
    return sanc.SANC(network().parameters(), **({"seed": 0} | options))


def grouped(**entries):
    return sanc.SANC([{"params": network().parameters(), **entries}])


def twice():
    w = nn.Parameter(X)
    return sanc.SANC([{"params": [w]}, {"params": [w]}])


def mixed():
    model = network()
    model[2].double()
    return sanc.SANC(model.named_parameters())


def meta():
    with torch.device("meta"):
        model = network()
    return sanc.SANC(model.parameters())


def nine(model, opt):
    """Make nine steps on batches that are not finite, which are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(9):
            opt.step(lambda: loss(model) * math.nan)


def stepped(closure=None, cls=sanc.SANC, before=None, hessian=None, objective=None, **options):
    """Make a step with the closure that `closure(model, opt)` returns, after `before(model, opt)`."""
    model = network()
    opt = cls(model.parameters(), seed=0, **options)
    if before is not None:
        before(model, opt)
    held = copy.deepcopy(model.state_dict())
    try:
        opt.step(None if closure is None else closure(model, opt), hessian=hessian, objective=objective)
    finally:
        assert all(torch.equal(now, held[name]) for name, now in model.state_dict().items())


def loss(model, x=X, y=Y):
    return nn.functional.cross_entropy(model(x), y)


def plain(model, opt):
    """Make a step with a closure that returns the loss."""
    opt.step(lambda: loss(model))


def clipped(model, opt):
    loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def backwards(model, opt, factor=1.0):
    """Return a closure that calls backward()."""

    def closure():
        opt.zero_grad()
        value = loss(model)
        (factor * value).backward()
        return value

    return closure


def alternating(model, opt):
    """Return a closure that evaluates another batch in every call."""
    batches = iter(range(100))
    return lambda: loss(model, X * (1.0 + next(batches)))


def ending(model, opt):
    """Return a closure that draws from an iterator of one batch."""
    batches = iter([X])
    return lambda: loss(model, next(batches))


def summed(model, opt):
    return sanc.Batch(lambda x, y: loss(model, x, y) * len(x), X, Y)


def ignored(model, opt):
    return sanc.Batch(partial(loss, model), X, torch.where(torch.arange(12) < 3, -100, Y))


def loaded(change=lambda state: state, cls=sanc.SANC):
    """Change the state of a run and load it into another optimiser."""
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    loss(model).backward()
    opt.step()
    cls(model.parameters()).load_state_dict(change(opt.state_dict()))


def narrower():
    """Load the state of a network of width 5 into the optimiser of one of width 7."""
    model = network()
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.step(lambda: loss(model))
    wide = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    sanc.SANC(wide.parameters()).load_state_dict(opt.state_dict())


def cleared_after(model, opt):
    def closure():
        value = loss(model)
        value.backward()
        opt.zero_grad()
        return value

    return closure


def line(x, a, b):
    return a * x + b


def bowl(x):
    return x.square().sum()


def rosenbrock(x):
    return 100.0 * (x[1] - x[0] ** 2) ** 2 + (1.0 - x[0]) ** 2


def gradient(x):
    return np.array([-400.0 * x[0] * (x[1] - x[0] ** 2) - 2.0 * (1.0 - x[0]), 200.0 * (x[1] - x[0] ** 2)])


def minimised(fun=rosenbrock, x0=(0.0, 0.0), **options):
    return sanc.minimize(fun, x0, **({"jac": gradient} | options))


def lines(*arguments):
    """Run the command line, which reports a mistake with exit code 2 and a message, without a traceback."""
    pytest.importorskip("typer", reason="the command line needs the extra lab")
    from sanc.lab.cli import main

    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        code = main(list(arguments))
    assert code == 2 and "Traceback" not in text.getvalue()
    raise sanc.ArgumentError(" ".join(text.getvalue().replace("│", " ").split()))


def jax_total():
    """Return a function as of JAX: it rejects tensors of torch, and converts its value to a float."""
    module = types.ModuleType("jax.fake")
    exec(
        "def total(x):\n    if hasattr(x, 'backward'): raise TypeError('not a valid JAX type')\n"
        "    return float((x ** 2).sum())",
        module.__dict__,
    )
    return module.total


def accumulated(model, opt):
    for _ in range(2):
        (0.5 * loss(model)).backward()


def logged(target):
    model, opt = network(), None
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.step(lambda: loss(model))
    StepLog(opt, target).update()


def faulty_file(folder):
    path = folder / "bad.svm"
    path.write_text("1 1:0.5 2:1\n# a remark\n-1 1:0.x\n")
    lines("run", str(path), "--out", str(folder))


def fitted(y, **options):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from sanc.sklearn import LogisticRegression

    LogisticRegression(**options).fit(X.numpy(), y)


# fmt: off
CONSTRUCTION = [
    ("no parameters", lambda: sanc.SANC([]), "params is empty", "model.parameters()"),
    ("the model itself", lambda: sanc.SANC(network()), "params = Sequential", "pass model.parameters()"),
    ("one tensor", lambda: sanc.SANC(nn.Parameter(X)), "params = Parameter", "pass model.parameters()"),
    ("a dict of names", lambda: sanc.SANC(dict(network().named_parameters())), "params = {",
     "pass model.parameters()"),
    ("names", lambda: sanc.SANC(["0.weight", "0.bias"]), "params", "str", "pass model.parameters()"),
    ("a tensor that was computed", lambda: sanc.SANC([nn.Parameter(X) * 2]), "params", "non-leaf", "leaf tensors"),
    ("one parameter in two groups", twice, "params", "more than one parameter group", "each of them once"),
    ("a generator that was used up", lambda: sanc.SANC(iter([])), "params is empty"),
    ("all frozen", lambda: sanc.SANC(network().requires_grad_(False).parameters()), "nothing to optimise", "free"),
    ("half precision", lambda: sanc.ARC(network().half().parameters()), "params[0]", "float16", "sanc.SANC",
     "torch.autocast"),
    ("two types", mixed, "params['2.weight']", "torch.float64", "one type"),
    ("complex parameters", lambda: sanc.SANC([nn.Parameter(X + 1j)]), "params[0]", "complex64", "torch.view_as_real"),
    ("lazy parameters", lambda: sanc.SANC(nn.LazyLinear(3).parameters()), "params[0]", "no shape yet", "on one batch"),
    ("parameters on meta", meta, "params[0]", "meta", "to_empty"),
    ("the rate by position", lambda: sanc.SANC(network().parameters(), 0.01), "0.01", "by position", "lr = 1.0"),
    ("a rate below zero", lambda: made(lr=-1.0), "lr = -1.0", "≥ 0"),
    ("a rate as text", lambda: made(lr="0.1"), "lr = '0.1'", "number"),
    ("decay below zero", lambda: made(weight_decay=-1e-4), "weight_decay = -0.0001", "≥ 0"),
    ("the sampling of minimize", lambda: made(sampling="buffered"), "sampling = 'buffered' has no", "leave it out"),
    ("the stopping test of minimize", lambda: made(epsilon_s=1.0), "epsilon_s = 1.0 has no effect", "leave it out"),
    ("a tolerance of the paper", lambda: made(epsilon=1.0), "epsilon = 1.0 has no effect", 'krylov_stop="paper"'),
    ("momentum as for SGD", lambda: made(momentum=0.9), "momentum = 0.9", "Momentum", "leave it out"),
    ("betas as for Adam", lambda: made(betas=(0.9, 0.999)), "betas = (0.9, 0.999)", "leave it out", "sanc.Minibatch"),
    ("damping as for other optimisers", lambda: made(damping=0.1), "'damping'", "0.1", "leave it out"),
    ("a misspelt option", lambda: made(weight_decy=0.1), "'weight_decy'", "did you mean 'weight_decay'?"),
    ("the beginning of a name", lambda: made(krylov=5), "'krylov'", "did you mean 'krylov_dim'?"),
    ("an unknown preset", lambda: made(preset="fast"), "preset = 'fast'",
     "choose from paper, robust"),
    ("a preset as a dict", lambda: made(preset={"sigma0": 1.0}), "preset = {'sigma0': 1.0}", "sanc.Method"),
    ("an unknown kind of products", lambda: made(hvp="jvp"), "hvp = 'jvp'", "double-backward"),
    ("a seed as a float", lambda: made(seed=1.5), "seed = 1.5", "integer"),
    ("micro-batches of zero rows", lambda: made(microbatch=0), "microbatch = 0", "≥ 1"),
    ("capture as a string", lambda: made(capture="yes"), "capture = 'yes'", "True or False"),
    ("check as a string", lambda: made(check="no"), "check = 'no'", "True or False"),
    ("sigma0 = 0", lambda: made(preset="paper", sigma0=0.0), "sigma0 = 0.0", "positive"),
    ("eta2 below eta1", lambda: made(preset="paper", eta1=0.9), "eta2 = 0.8", "above eta1 = 0.9"),
    ("gamma = 1", lambda: made(preset="paper", gamma=1.0), "gamma = 1.0", "above 1"),
    ("no limit on Lanczos iterations", lambda: made(krylov_dim=None), "krylov_dim = None", "such as 5"),
    ("a metric of another package", lambda: made(metric="shampoo"), "metric = 'shampoo'", "kronecker"),
    ("memory = 1", lambda: made(memory=1.0), "memory = 1.0", "[0, 1)"),
    ("a misspelt group option", lambda: grouped(weight_decai=0.1), "'weight_decai'", "0.1", "'weight_decay'"),
    ("a group with betas", lambda: grouped(betas=(0.9, 0.99)), "group option 'betas'",
     "choose from frozen, lr, params"),
    ("frozen by a number", lambda: grouped(frozen=1), "frozen = 1", "True or False"),
    ("an unknown method", lambda: sanc.method_for("sank"), "method = 'sank'", "choose from arc"),
]

STEPS = [
    ("no closure and no backward", stepped, "no parameter has a gradient", "call loss.backward()"),
    ("no closure with preset paper", lambda: stepped(preset="paper"), "closure is missing: SANC", "returns the loss"),
    ("no closure with ARC", lambda: stepped(cls=sanc.ARC), "closure is missing: ARC", "SANC or SCR", "robust"),
    ("the loss, not a closure", lambda: stepped(lambda m, o: loss(m)), "closure = tensor", "pass a function"),
    ("the model, not a closure", lambda: stepped(lambda m, o: m), "closure = Sequential", "(input)", "lambda: loss("),
    ("a closure of a batch", lambda: stepped(lambda m, o: lambda batch: loss(m)), "(batch)",
     "lambda: loss(model(x), y)"),
    ("a number is returned", lambda: stepped(lambda m, o: lambda: loss(m).item()), "closure returned float", ".item()"),
    ("nothing is returned", lambda: stepped(lambda m, o: lambda: None), "closure returned NoneType", "return the mean"),
    ("a pair is returned", lambda: stepped(lambda m, o: lambda: (loss(m), 0)), "closure returned tuple", "return the"),
    ("a vector is returned", lambda: stepped(lambda m, o: lambda: m(X)[:, 0]), "shape (12,)", "mean()"),
    ("an integer is returned", lambda: stepped(lambda m, o: lambda: loss(m).long()), "torch.int64", "floating-point"),
    ("the loss is detached", lambda: stepped(lambda m, o: lambda: loss(m).detach()), "does not depend", "detach()"),
    ("inference mode", lambda: torch.inference_mode()(stepped)(lambda m, o: lambda: loss(m)), "does not depend",
     "no_grad"),
    ("the loss of another model", lambda: stepped(lambda m, o: partial(loss, network())), "reaches none", "the model"),
    ("a new batch in each call", lambda: stepped(alternating), "closure returned", "fix the batch", "check=False"),
    ("a loss that is not finite", lambda: stepped(lambda m, o: lambda: loss(m) * math.nan, preset="paper"),
     "not finite", "check the data"),
    ("ten such losses", lambda: stepped(lambda m, o: lambda: loss(m) * math.nan, before=nine),
     "not finite", "each of 10 batches", "check the data"),
    ("backward() after plain closures", lambda: stepped(backwards, before=plain), "called backward()",
     "do one of the two in all"),
    ("gradients after closures", lambda: stepped(before=lambda m, o: (plain(m, o), loss(m).backward())),
     "closure is missing",
     "Pass it again"),
    ("clipped beside a closure", lambda: stepped(lambda m, o: partial(loss, m), before=clipped), "hold gradients from",
     "zero_grad()", "inside the closure"),
    ("scaled in a closure", lambda: stepped(partial(backwards, factor=65536.0)), "closure called backward() on",
     "GradScaler", "bfloat16"),
    ("another loss is returned", lambda: stepped(partial(backwards, factor=1.1)), "backward() on 1.2342", "1.1220",
     "call it on the loss that is returned"),
    ("exact products of backward()", lambda: stepped(backwards, hvp="double-backward"), "hvp = 'double-backward'",
     "only return the loss"),
    ("eval() before a pass", lambda: stepped(before=lambda m, o: (loss(m).backward(), o.step(), o.eval())),
     "since eval()",
     "call train()"),
    ("eval() before the first step", lambda: stepped(before=lambda m, o: (o.eval(), loss(m).backward())),
     "since eval()", "call train()"),
    ("an objective with the default preset", lambda: stepped(lambda m, o: partial(loss, m), objective=loss),
     "objective cannot be used", 'preset="paper"'),
    ("samples of ARC", lambda: stepped(lambda m, o: partial(loss, m), hessian=loss, cls=sanc.ARC), "ARC uses one exact",
     "use SCR"),
    ("a Hessian sample alone", lambda: stepped(hessian=loss), "closure is missing beside hessian", "pass it"),
    ("a Hessian sample as a tensor", lambda: stepped(lambda m, o: partial(loss, m), hessian=X), "hessian = tensor",
     "pass a function"),
    ("a function in micro-batches", lambda: stepped(lambda m, o: partial(loss, m), microbatch=4), "microbatch = 4",
     "sanc.Batch(loss, *tensors)"),
    ("a sum in micro-batches", lambda: stepped(summed, microbatch=4), "the loss of 4 rows",
     "Return the mean over rows"),
    ("ignored targets in micro-batches", lambda: stepped(ignored, microbatch=4), "tensors[1] holds -100", "weight="),
    ("all parameters frozen since", lambda: stepped(before=lambda m, o: m.requires_grad_(False)),
     "nothing to optimise", "free at least one"),
]

DATA = [
    ("a batch without tensors", lambda: sanc.Batch(loss), "tensors is empty", "pass at least one"),
    ("tensors with different numbers of rows", lambda: sanc.Batch(loss, X, Y[:5]), "tensors[1] has 5 rows",
     "tensors[0] has 12"),
    ("the tensors before the loss", lambda: sanc.Batch(X, Y), "loss = tensor", "cannot be called", "pass a function"),
    ("a batch of an array", lambda: sanc.Batch(loss, X.numpy()), "tensors[0] = array", "torch.as_tensor"),
    ("a weight as a tensor", lambda: sanc.Batch(loss, X, weight=X[0]), "weight = tensor", "pass a function"),
    ("samples larger than the data", lambda: sanc.ThreeSamples(ROWS, 13), "batch_size = 13", "from 1 to 12"),
    ("samples of half the data", lambda: sanc.ThreeSamples(ROWS, 0.5), "batch_size = 0.5", "one integer, or three"),
    ("samples of a stream", lambda: sanc.ThreeSamples(iter([1, 2]), 1), "dataset = ", "no length", "map-style"),
]

STATES = [
    ("the state of Adam", lambda: loaded(lambda s: torch.optim.Adam(network().parameters()).state_dict()),
     "'run_state'", "state_dict() of this optimiser"),
    ("of another method", lambda: loaded(cls=sanc.SCR), "'sanc', not 'scr'", "load it into that method"),
    ("of another preset", lambda: loaded(cls=partial(sanc.SANC, preset="paper")), "another iteration",
     "the same preset"),
    ("without its vectors", lambda: loaded(lambda s: s | {"state": {}}), "has 0 parameters instead of", "as a whole"),
]

FUNCTIONS = [
    ("no function", lambda: sanc.minimize(3.0, [0.0, 0.0]), "fun = 3.0", "pass a function"),
    ("no start", lambda: minimised(x0=[]), "x0 is empty", "pass at least one"),
    ("a start that is not finite", lambda: minimised(x0=[math.nan, 0.0]), "x0", "NaN", "finite"),
    ("a start of text", lambda: minimised(x0=["a", "b"]), "x0 = ", "real numbers"),
    ("a start of numbers as text", lambda: minimised(x0=["3", "4"]), "x0 = ", "real numbers"),
    ("a start of dates", lambda: minimised(x0=np.array(["2020-01-01"], "M8[D]")), "x0 = ", "real numbers"),
    ("a start of None", lambda: minimised(x0=None), "x0 = None", "real numbers"),
    ("a start that overflows", lambda: minimised(x0=[10**400]), "x0 = [1000", "real numbers"),
    ("a start with masked entries", lambda: minimised(x0=np.ma.masked_array([1.0, 2.0], [0, 1])), "x0 = masked_array",
     "real numbers"),
    ("a sparse start", lambda: sanc.minimize(bowl, torch.eye(2).to_sparse()), "torch.sparse_coo", "pass a dense one"),
    ("a start on the meta device", lambda: sanc.minimize(bowl, torch.ones(2, device="meta")), "on meta", "dense"),
    ("a sum of NumPy's", lambda: sanc.minimize(lambda x: np.sum(x**2), np.ones(2)), "fun is no torch function", "jac"),
    ("a function that ignores x", lambda: sanc.minimize(lambda x: torch.tensor(3.0), torch.ones(2)),
     "fun returned a loss that does not depend on x", "compute it from x"),
    ("options by number", lambda: minimised(options={1: 2}), "options = {1: 2}", "a mapping of names"),
    ("the function in options", lambda: minimised(options={"fun": 3}), "'fun' is given in options", "once"),
    ("certify by a word", lambda: minimised(certify="no"), "certify = 'no'", "True or False"),
    ("bounds of NaN", lambda: minimised(bounds=[(math.nan, math.nan), (0, 1)]), "bounds[0] = (nan, nan)", "lower ≤"),
    ("jac = True of a tree, and no pair", lambda: sanc.minimize(lambda p: p["a"] ** 2, {"a": 1.0}, jac=True),
     "fun returned", "(f, g)"),
    ("hess returns None", lambda: minimised(hess=lambda x: None), "hess returned None", "real numbers"),
    ("arguments of a sum", lambda: sanc.minimize(LOGISTIC, np.zeros(4), args=(1,)), "args = (1,)", "leave it out"),
    ("a method of SciPy", lambda: minimised(method="BFGS"), "method = 'BFGS'", "choose from arc"),
    ("a misspelt option of minimize", lambda: minimised(max_iters=3), "'max_iters' (= 3)", "did you mean 'max_iter'?"),
    ("a misspelt entry of options", lambda: minimised(options={"max_itr": 3}), "'max_itr' (= 3)", "'max_iter'?"),
    ("options as a number", lambda: minimised(options=3), "options = 3", "a mapping"),
    ("momentum of sanc", lambda: minimised(momentum=0.5), "momentum = 0.5", "Momentum"),
    ("bounds in the wrong order", lambda: minimised(bounds=[(0, 1), (3, 2)]), "bounds[1] = (3, 2)", "lower ≤ upper"),
    ("a preset of minimize", lambda: minimised(preset="default"), "preset = 'default'", "choose from paper"),
    ("jac with too many entries", lambda: minimised(jac=lambda x: np.ones(3)), "jac returned 3 numbers", "2 variables"),
    ("jac by a name", lambda: minimised(jac="4-point"), "jac = '4-point'", "pass a function"),
    ("jac = True, and no pair", lambda: minimised(jac=True), "fun returned", "jac = True", "(f, g)"),
    ("hess is too large", lambda: minimised(hess=lambda x: np.eye(3)), "hess", "(3, 3)", "(2, 2)"),
    ("hessp with too many entries", lambda: minimised(hessp=lambda x, v: np.ones(5)), "hessp returned 5",
     "2 variables"),
    ("a loss that is an array", lambda: minimised(fun=lambda x: x), "fun returned 2 numbers", "return one"),
    ("a callback as a number", lambda: minimised(callback=3), "callback = 3", "pass a function"),
    ("a callback of nothing", lambda: minimised(callback=lambda: 0), "callback = <function", "1 argument (too many",
     "callback(x), callback(x, intermediate_result)"),
    ("a callback of three", lambda: minimised(callback=lambda x, f, g: 0), "callback = <function", "argument: 'f'",
     "callback(x), callback(x, intermediate_result)"),
    ("a keyword beside the result", lambda: minimised(callback=lambda *, intermediate_result, log: 0),
     "callback = <function", "callback(intermediate_result=…)"),
    ("a tolerance below zero", lambda: minimised(tol=-1.0), "tol = -1.0", "positive"),
    ("iterations below zero", lambda: minimised(max_iter=-1), "max_iter = -1", "≥ 0"),
    ("no seed", lambda: minimised(seed=None), "seed = None", "≥ 0"),
    ("samples of a function", lambda: minimised(batch_size=3), "batch_size = 3", "sanc.problems.FiniteSum"),
    ("samples larger than the sum", lambda: minimised(LOGISTIC, np.zeros(4), jac=None, batch_size=99),
     "batch_size = 99",
     "from 1 to 12"),
    ("a start with too many entries", lambda: minimised(LOGISTIC, np.zeros(5), jac=None), "x0 has 5 entries",
     "4 variables"),
    ("an empty state", lambda: minimised(resume={}), "resume lacks", "intermediate result"),
    ("a certificate without a function", lambda: sanc.certificate(None, [0.0, 0.0]), "fun = None", "pass a function"),
    ("a certificate with tol = 0", lambda: sanc.certificate(bowl, torch.zeros(2), tol=0.0), "tol = 0.0", "positive"),
    ("a certificate at NaN", lambda: sanc.certificate(bowl, torch.full((2,), math.nan)), "x holds NaN", "finite"),
    ("a certificate of no products", lambda: sanc.certificate(bowl, torch.zeros(2), max_products=0), "max_products = 0",
     "≥ 1"),
    ("a certificate of no seed", lambda: sanc.certificate(bowl, torch.zeros(2), seed=None), "seed = None", "≥ 0"),
    ("labels of other values", lambda: sanc.problems.Logistic(X.numpy(), Y.numpy() % 2 * 2), "y holds 2 in row 1",
     "0 and 1"),
    ("too few labels", lambda: sanc.problems.Logistic(X.numpy(), np.ones(3)), "y has shape (3,)", "12 rows"),
    ("labels as text", lambda: sanc.problems.Logistic(X.numpy(), np.array(["a", "b"] * 6)), "y holds", "as numbers"),
    ("rows that are not finite", lambda: sanc.problems.Logistic(np.full((3, 2), np.inf), np.arange(3) % 2), "X holds 6",
     "remove or impute"),
    ("rows without columns", lambda: sanc.problems.Logistic(np.ones(3), np.ones(3)), "X has shape (3,)", "a matrix"),
    ("a penalty of sklearn", lambda: sanc.problems.Logistic(X.numpy(), Y.numpy() % 2, penalty="elasticnet"),
     "penalty = 'elasticnet'", "choose from"),
    ("strength below zero", lambda: sanc.problems.Logistic(X.numpy(), Y.numpy() % 2, strength=-1.0), "strength = -1.0",
     "≥ 0"),
    ("strength of an SVM below zero", lambda: sanc.problems.NonconvexSVM(X.numpy(), Y.numpy() % 2 * 2 - 1, -1.0),
     "strength = -1.0", "≥ 0"),
]

COMMANDS = [
    ("a misspelt command", lambda: lines("repoduce", "fig2a"), "'repoduce'", "'reproduce'"),
    ("an unknown panel", lambda: lines("reproduce", "fig9z"), "figure = 'fig9z'", "choose from all, fig1"),
    ("an unknown data set", lambda: lines("run", "--data", "a9b"), "'a9b'", "a9a"),
    ("a command's option", lambda: lines("reproduce", "fig2a", "--wokers", "2"), "--wokers", "--workers"),
    ("no workers", lambda: lines("reproduce", "fig2a", "--workers", "0"), "'--workers'", "1"),
    ("a preset of a command", lambda: lines("reproduce", "fig2a", "--preset", "fast"), "--preset = 'fast'", "robust"),
    ("a method of a command", lambda: lines("reproduce", "fig2a", "--methods", "sank"), "--methods = 'sank'", "sanc"),
    ("a device of a command", lambda: lines("reproduce", "fig4", "--device", "gpu"), "--device = 'gpu'", "cuda"),
    ("a report of an empty folder", lambda: lines("report", "/nowhere/at/all"), "'/nowhere/at/all'", "--out"),
    ("no runs", lambda: lines("reproduce", "fig2a", "--runs", "0"), "'--runs': 0 cannot be used", "an integer ≥ 1"),
    ("no budget", lambda: lines("run", "--budget", "0"), "'--budget': 0 cannot be used", "an integer ≥ 1"),
    ("a budget as a word", lambda: lines("run", "--budget", "ten"), "'--budget': ten cannot", "an integer ≥ 1"),
    ("no rows", lambda: lines("run", "--batch", "0"), "'--batch': 0 cannot be used", "an integer ≥ 1"),
    ("negative workers", lambda: lines("demo", "--workers", "-1"), "'--workers': -1 cannot", "an integer ≥ 1"),
    ("a strength as a word", lambda: lines("run", "--strength", "big"), "'--strength': big cannot", "a number"),
    ("seconds as NaN", lambda: lines("run", "--checkpoint-every", "nan"), "nan cannot be used", "≥ 0"),
    ("a file of options that is missing", lambda: lines("run", "--from", "/no/such.toml"), "/no/such.toml cannot be",
     "No such file", "pass a TOML file"),
    ("a seed of runs", lambda: lines("run", "--seed", "3"), "'--seed': 3 cannot be used", "--runs"),
    ("a seed of panels", lambda: lines("reproduce", "fig2a", "--seed", "3"), "'--seed': 3 cannot be used", "--runs"),
    ("a folder of the demonstration", lambda: lines("demo", "--out", "/dev/null/x"), "/dev/null/x", "check the path"),
]

HABITS = [  # of other optimisers, minimisers and losses
    ("max_iter of L-BFGS", lambda: made(max_iter=20), "max_iter = 20", "step()", "sanc.minimize"),
    ("batch_size", lambda: made(batch_size=32), "batch_size = 32", "DataLoader"),
    ("a method", lambda: made(method=sanc.Method()), "method = ", "pass a sanc.Method as preset"),
    ("maximize", lambda: made(maximize=True), "maximize = True", "negative"),
    ("foreach", lambda: made(foreach=True), "foreach = True", "leave it out", "capture=True"),
    ("fused", lambda: made(fused=True), "fused = True", "leave it out"),
    ("betas", lambda: made(betas=(0.9, 0.99)), "betas = (0.9, 0.99)", "leave it out", "sanc.Minibatch"),
    ("capturable", lambda: made(capturable=True), "capturable = True", "pass capture=True"),
    ("learning_rate", lambda: made(learning_rate=0.1), "learning_rate = 0.1", "leave it out", "lr = 1.0"),
    ("a line search", lambda: made(line_search_fn="strong_wolfe"), "line_search_fn = 'strong_wolfe'", "ratio test"),
    ("a device", lambda: made(device="cpu"), "device = 'cpu'", "device of the parameters"),
    ("verbose", lambda: made(verbose=True), "verbose = True", "opt.record"),
    ("a group without parameters", lambda: sanc.SANC([{"lr": 1.0}]), "group {'lr': 1.0}", "'params'"),
    ("a generator that was used", lambda: sanc.SANC(iter([])), "params is empty", "generator", "pass a list"),
    ("an iterator that ends", lambda: stepped(ending), "closure raised StopIteration", "before the step"),
    ("loss and logits", lambda: stepped(lambda m, o: lambda: (loss(m), m(X))), "closure returned tuple", "first entry"),
    ("a dict with the loss", lambda: stepped(lambda m, o: lambda: {"loss": loss(m)}), "closure returned dict",
     "its entry 'loss'"),
    ("a checkpoint of another width", lambda: narrower(), "state_dict", "parameter 0", "(5, 4) instead of (7, 4)",
     "Construct the model as"),
    ("three classes for two", lambda: sanc.problems.Logistic(X.numpy(), Y.numpy()), "y holds 3 classes", "[0, 1, 2]",
     "sanc.problems.Softmax"),
    ("three classes for an SVM", lambda: sanc.problems.NonconvexSVM(X.numpy(), Y.numpy()), "y holds 3 classes",
     "labels -1 and 1"),
    ("point and function exchanged", lambda: sanc.minimize(torch.ones(2), bowl), "x0 = <function", "function first"),
    ("confidence of minimize", lambda: minimised(confidence=0.9), "confidence = 0.9", "sanc.certificate has it"),
    ("niter of minimize", lambda: minimised(niter=5), "niter = 5", "pass max_iter"),
    ("verbose of minimize", lambda: minimised(verbose=1), "verbose = 1", "disp=True"),
    ("grad of minimize", lambda: sanc.minimize(bowl, X, grad=1), "grad = 1", "as jac"),
    ("a function of two arguments", lambda: sanc.minimize(lambda x, a: bowl(x) * a, X),
     "fun cannot be called as fun(x)",
     "'a'", "args=(…,)"),
    ("a method as the third argument", lambda: sanc.minimize(bowl, X, "adam"), "args = 'adam'", "by name"),
    ("jac as the third argument", lambda: sanc.minimize(rosenbrock, [0.0, 0.0], gradient), "args = <function",
     "by name"),
    ("bounds as the third argument", lambda: sanc.minimize(bowl, X, [(0, 1)] * 2), "args = [(0, 1)", "bounds by name"),
    ("a class of sums", lambda: sanc.minimize(sanc.problems.Logistic, np.zeros(4)), "fun = Logistic is a class",
     "Logistic(X, y)"),
    ("argmin of x alone", lambda: sanc.argmin(bowl, X, X), "fun cannot be called as fun(x, theta)", "both"),
    ("a DataLoader for three samples", lambda: sanc.ThreeSamples(torch.utils.data.DataLoader(ROWS), 2), "DataLoader",
     "loader.dataset"),
    ("a model as a folder", lambda: sanc.save_checkpoint(network(), made(), "runs"), "folder = Sequential", "no path"),
    ("a folder that is None", lambda: sanc.load_checkpoint(None, network(), made()), "folder = None", "no path"),
    ("a model by its name", lambda: sanc.save_checkpoint("runs", "net", made()), "model = 'net' is no module",
     "folder"),
    ("a loss in place of the model", lambda: sanc.diagnose(nn.CrossEntropyLoss(), network(), [(X, Y)]),
     "model = CrossEntropyLoss", "the network, then the loss"),
    ("gradients cleared after backward", lambda: stepped(cleared_after), "closure cannot be differentiated",
     "zero_grad() before backward()"),
    ("pairs as bounds of two residuals", lambda: sanc.least_squares(bowl, torch.zeros(2).double(),
     bounds=[(0, 0.5), (0, 2)]), "bounds = [(0, 0.5), (0, 2)] would fix a variable", "scipy.optimize.Bounds"),
    ("pairs as bounds of a fit", lambda: sanc.curve_fit(line, np.arange(5.0), np.arange(5.0), bounds=[(0, 5), (0, 5)]),
     "would fix a variable", "Bounds"),
    ("absolute_sigma as text", lambda: sanc.curve_fit(line, np.arange(5.0), np.arange(5.0), absolute_sigma="no"),
     "absolute_sigma = 'no'", "True or False"),
    ("full_output as text", lambda: sanc.curve_fit(line, np.arange(5.0), np.arange(5.0), full_output="no"),
     "full_output = 'no'", "True or False"),
    ("a curve of None", lambda: sanc.curve_fit(lambda x, a: None, np.arange(5.0), np.arange(5.0)), "f returned None"),
    ("observations as text", lambda: sanc.curve_fit(line, np.arange(2.0), ["a", "b"]), "ydata = ['a', 'b']", "numbers"),
    ("labels from 1 on", lambda: sanc.problems.Softmax(X.numpy(), Y.numpy() + 1), "up to 3 but no 0", "classes = 4"),
    ("a pair beside jac", lambda: minimised(lambda x: (rosenbrock(x), gradient(x))), "fun returned (", "tuple",
     "return the value alone; jac=True"),
    ("a list beside differences", lambda: minimised(lambda x: [rosenbrock(x), gradient(x)], jac="2-point"),
     "fun returned [", "list", "jac=True"),
    ("a pair beside the complex step", lambda: minimised(lambda x: (x @ x, 2 * x), jac="cs"), "fun returned (",
     "jac=True"),
    ("a ragged value", lambda: minimised(lambda x: [[1.0], [1.0, 2.0], 3.0]), "fun returned [[1.0],", "real number"),
    ("jac as an array", lambda: minimised(jac=np.zeros(3)), "jac = array([0., 0., 0.])", "pass a function"),
    ("jac of residuals as an array", lambda: sanc.least_squares(lambda x: x, np.ones(2), np.eye(2)), "jac = array(",
     "pass a function"),
    ("jac of two arguments", lambda: minimised(jac=lambda x, a: x), "jac cannot be called as jac(x)", "'a'",
     "args=(…,)"),
    ("hess of none", lambda: minimised(hess=lambda: 0), "hess cannot be called as hess(x)", "too many", "of x"),
    ("hessp of x alone", lambda: minimised(hessp=lambda x: x), "hessp cannot be called as hessp(x, v)", "of x, v"),
    ("jac without args", lambda: minimised(lambda x, a: 0.0, args=(1,)), "jac cannot be called as jac(x, *args) with 1",
     "too many"),
    ("jac of a tree", lambda: sanc.minimize(lambda p: p["a"], {"a": 1.0}, jac=lambda p, q: p),
     "jac cannot be called as jac(x)", "'q'"),
    ("residuals of two arguments", lambda: sanc.least_squares(lambda x, a: x, np.ones(2)),
     "fun cannot be called as fun(x)", "'a'", "args=(…,)"),
    ("jac of a curve without parameters", lambda: sanc.curve_fit(line, np.arange(3.0), np.arange(3.0),
     jac=lambda x: x), "jac cannot be called with xdata and 2 parameters", "arguments of f"),
    ("data of a curve as text", lambda: sanc.curve_fit(line, ["a", "b"], [1.0, 2.0]), "f failed for xdata = ['a', 'b']",
     "pass numbers"),
    ("ragged data of a curve", lambda: sanc.curve_fit(line, [[1, 2], [3]], [1.0, 2.0]), "xdata = [[1, 2], [3]]",
     "pass numbers"),
    ("data of rows as text", lambda: sanc.curve_fit(line, ["a", "b", "c"], np.ones((4, 3))),
     "xdata = ['a', 'b', 'c'] is no array of numbers"),
    ("a change in place", lambda: sanc.minimize(lambda x: x.add_(1).square().sum(), X), "fun changes x in place",
     "x + 1 for x.add_(1)"),
    ("an entry that is set", lambda: sanc.minimize(lambda x: x[0].fill_(1.0).sum(), X), "fun changes x in place",
     "x.clone()"),
    ("residuals that change x", lambda: sanc.least_squares(lambda x: x.add_(1), torch.ones(2)),
     "fun changes x in place"),
    ("a change of what the gradient needs", lambda: sanc.minimize(lambda x: (y := x.exp(), y.add_(1), y @ y)[2],
     torch.ones(2)), "cannot be differentiated", "inplace", "new tensors"),
    ("a value of JAX as a float", lambda: sanc.minimize(jax_total(), np.ones(2)), "fun returned 2.0, of type float",
     "return the array of JAX, without float()"),
    ("a point of torch for JAX", lambda: sanc.minimize(jax_total(), X), "x0 is a tensor", "jax.numpy.asarray(x0)"),
    ("an update of SciPy as hess", lambda: minimised(hess=scipy.optimize.BFGS()), "hess = BFGS()", "leave it out"),
    ("a log of one argument", lambda: logged(lambda d: 0), "target = <function", "target(numbers, iteration)",
     "to_tensorboard"),
    ("named as a name", lambda: made(named=1), "'named' (= 1) is not known: leave it out"),
    ("differentiable", lambda: made(differentiable=True), "differentiable = True", "a step is not differentiated"),
    ("eta without a number", lambda: made(eta=0.1), "'eta' (= 0.1)", "did you mean 'eta1' or 'eta2'?"),
    ("gradients that were accumulated", lambda: stepped(lambda m, o: partial(loss, m), before=accumulated),
     "hold gradients", "accumulate_grad_batches at 1", "manual_backward(loss)", "clip_grad_norm_"),
    ("one class as floats", lambda: fitted(np.zeros(12)), "only one class, 0.0:"),
    ("a result as the start", lambda: sanc.minimize(bowl, minimised()), "x0 = Result is the result of a run",
     "pass its x"),
    ("a result as the point", lambda: sanc.certificate(bowl, minimised()), "x = Result", "pass its x"),
    ("a loss of fewer tensors", lambda: sanc.Batch(lambda x: x.sum(), X, Y), "loss = <function", "the 2 tensors",
     "too many positional", "pass a function of as many"),
    ("a loss without the output", lambda: sanc.Batch(lambda x, y: x.sum(), X, Y, outputs=lambda x, y: x),
     "the output and the 2 tensors", "pass a function"),
    ("the length of a schedule", lambda: made(total_steps=100), "total_steps = 100", "leave it out", "pass horizon"),
    ("steps of an optimiser", lambda: made(steps=100), "steps = 100", "each step()"),
    ("steps of minimize", lambda: minimised(steps=100), "steps = 100", "pass max_iter"),
    ("starts of minimize", lambda: minimised(n_starts=3), "n_starts = 3", "sanc.minimize_many"),
    ("a type of minimize", lambda: minimised(dtype="float32"), "dtype = 'float32'", "the type of x0"),
    ("initial parameters as NaN", lambda: sanc.curve_fit(line, np.arange(3.0), np.arange(3.0), p0=[math.nan, 1.0]),
     "p0 holds NaN", "finite numbers"),
    ("initial parameters as text", lambda: sanc.curve_fit(line, np.arange(3.0), np.arange(3.0), p0=["a", "b"]),
     "p0 = ['a', 'b'] is not an array of real numbers"),
    ("math.exp of an array", lambda: sanc.curve_fit(lambda x, a: math.exp(a * x), np.arange(3.0), np.arange(3.0)),
     "f treats an array as one number", "all of xdata", "numpy.exp for math.exp"),
    ("math.exp of a tensor", lambda: sanc.curve_fit(lambda x, a: math.exp(a * x), X[0], X[0]), "as one number",
     "functions of NumPy or torch"),
    ("if of an array", lambda: sanc.curve_fit(lambda x, a: a if x > 1 else 0, np.arange(3.0), np.arange(3.0)),
     "as one number", "numpy.where for if"),
    ("rows of a function of two arguments", lambda: sanc.minimize_many(lambda x, a: bowl(x) * a, X),
     "fun cannot be called as fun(x)", "'a'", "args=(…,)"),
    ("too many arguments of rows", lambda: sanc.minimize_many(bowl, X, (1.0,), in_dims=None),
     "fun cannot be called as fun(x, *args) with 1 in args", "too many", "of x"),
    ("progress as text", lambda: sanc.diagnose(network(), nn.CrossEntropyLoss(), [(X, Y)], progress="yes"),
     "progress = 'yes'", "True or False"),
    ("batches of arrays", lambda: sanc.diagnose(network(), nn.CrossEntropyLoss(), [(X.numpy(), Y.numpy())]),
     "data has a batch of arrays", "torch.as_tensor"),
    ("weights of classes below zero", lambda: fitted(Y.numpy(), class_weight={0: 1, 1: 1, 2: -1}),
     "class_weight = {0: 1, 1: 1, 2: -1}", "≥ 0"),
    ("C of a sum", lambda: sanc.problems.Logistic(X.numpy(), Y.numpy() % 2, C=1.0),
     "C = 1.0 is not an argument of Logistic", "strength = 1 / (C · n)"),
    ("fit_intercept of a sum", lambda: sanc.problems.NonconvexSVM(X.numpy(), Y.numpy() % 2 * 2 - 1, fit_intercept=True),
     "fit_intercept = True is not an argument of NonconvexSVM", "pass intercept"),
    ("a misspelt argument of a sum", lambda: sanc.problems.Softmax(X.numpy(), Y.numpy(), clases=3),
     "clases = 3 is not an argument of Softmax", "did you mean 'classes'?"),
    ("a number that collates", lambda: sanc.ThreeSamples(ROWS, 4, collate_fn=3), "collate_fn = 3", "a list of rows"),
    ("a checkpoint of two models", lambda: sanc.save_checkpoint("runs", network(), made()),
     "optimizer has 4 parameters that model does not have", "(5, 4)", "whose parameters it optimises"),
    ("a checkpoint for two models", lambda: sanc.load_checkpoint("runs", network(), made()),
     "optimizer has 4 parameters that model does not have", "whose parameters"),
    ("observations in three dimensions", lambda: sanc.curve_fit(line, np.arange(2.0), np.ones((1, 2, 2))),
     "ydata = array(", "a row of them for each fit"),
    ("ragged observations", lambda: sanc.curve_fit(line, np.arange(2.0), [[1, 2], [3]]), "ydata = [[1, 2], [3]]",
     "not an array of real numbers"),
    ("model and optimiser in one state", lambda: loaded(lambda s: {"model": {}, "optimizer": s}),
     "no entry 'run_state', but ['model', 'optimizer']", "state_dict() of this optimiser"),
]



def outside(part, call=False, **options):
    """Make a step with a closure that uses a loss, outputs or hidden activations from before the step."""
    model, opt = network(), None
    opt = sanc.SANC(model.parameters(), seed=0, **options)
    value, logits, hidden = loss(model), model(X), model[1](model[0](X))

    def closure():
        cross_entropy = nn.functional.cross_entropy
        found = {"loss": value, "logits": cross_entropy(logits, Y), "hidden": cross_entropy(model[2](hidden), Y)}[part]
        if call:
            opt.zero_grad()
            found.backward()
        return found

    opt.step(closure)


STALE = [
    ("a loss from before the step", lambda: outside("loss"), "closure uses a loss that was computed before the step",
     "inside the closure"),
    ("outputs from before the step", lambda: outside("logits", preset="paper"), "computed before the step"),
    ("activations from before the step", lambda: outside("hidden"), "computed before the step"),
    ("backward() of a loss from before the step", lambda: outside("loss", call=True), "computed before the step"),
]

# fmt: on
MISTAKES = CONSTRUCTION + STEPS + DATA + STATES + FUNCTIONS + COMMANDS + HABITS + STALE


@pytest.mark.parametrize(("make", "words"), [
    pytest.param(make, words, id=name) for name, make, *words in MISTAKES
])  # fmt: skip
def test_an_error_names_the_argument_its_value_and_the_remedy(make, words):
    with pytest.raises(sanc.SancError) as caught:
        make()
    text, at = str(caught.value), 0
    for word in words:
        assert word in text[at:], text
        at = text.index(word, at) + len(word)


def test_a_faulty_line_of_a_file_has_its_number(tmp_path):
    with pytest.raises(sanc.ArgumentError, match=r"bad\.svm, line 3, is not a LIBSVM file .*0\.x.*index:value"):
        faulty_file(tmp_path)


@pytest.mark.parametrize(("fun", "jac", "words"), [
    (lambda x: np.log(x[0] - 1.0), gradient, "f is nan"),
    (rosenbrock, lambda x: np.array([1.0, np.inf]), "Entry 1 of the gradient is inf"),
], ids=["value", "gradient"])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_start_that_is_not_finite_is_named_with_a_remedy(fun, jac, words):
    message = minimised(fun, jac=jac).message
    assert f"{words}: pass an x0 where it is finite" in message


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_residuals_that_are_not_finite_at_the_start_are_named():
    message = sanc.least_squares(lambda x: np.log(x - 1.0), np.array([3.0, 0.0])).message
    assert "Entry 1 of the residuals is nan: pass an x0" in message


@pytest.mark.parametrize(("name", "words"), [
    ("hess_inv", "certificate"), ("grad", "use jac"), ("loss", "use fun"), ("allvecs", "callback"),
    ("record", "history[-1]"), ("bogus", "has no attribute 'bogus'"),
])  # fmt: skip
def test_an_attribute_of_other_results_has_a_remedy(name, words):
    found = minimised()
    assert not hasattr(found, name)
    with pytest.raises(AttributeError) as caught:
        getattr(found, name)
    assert words in str(caught.value) and caught.value.name == name
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(other) is type(found) and other.fun == found.fun and other.status is found.status


@pytest.mark.parametrize(("make", "remedies"), [
    (lambda: sanc.minimize_many(bowl, torch.ones(2, 3)),
     {"loss": "use fun", "hess_inv": "lambda_min", "bogus": "bogus"}),
    (lambda: sanc.diagnose(network(), nn.CrossEntropyLoss(), [(X, Y)], max_products=20),
     {"loss": "use value", "eigenvalues": "use lambda_min", "bogus": "bogus"}),
], ids=["rows", "report"])  # fmt: skip
def test_an_attribute_that_results_of_rows_and_reports_lack_has_a_remedy(make, remedies):
    found = make()
    for name, words in remedies.items():
        assert not hasattr(found, name)
        with pytest.raises(AttributeError, match=words):
            getattr(found, name)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert repr(other) == repr(found)


def test_a_path_is_no_figure():
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    report = sanc.diagnose(network(), nn.CrossEntropyLoss(), [(X, Y)], max_products=20)
    with pytest.raises(sanc.ArgumentTypeError, match=r"figure = 'x.png' is no figure of Matplotlib.*savefig\(path\)"):
        report.plot("x.png")


@pytest.mark.parametrize(("name", "words"), [
    ("loss", "use value; in loops"), ("lr", "param_groups[0]['lr']"), ("bogus", "no attribute 'bogus'"),
])  # fmt: skip
def test_an_attribute_of_other_records_has_a_remedy(name, words):
    model, opt = network(), None
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.step(partial(loss, model))
    assert not hasattr(opt.record, name)
    with pytest.raises(AttributeError) as caught:
        getattr(opt.record, name)
    assert words in str(caught.value) and caught.value.name == name
    for other in (copy.deepcopy(opt.record), pickle.loads(pickle.dumps(opt.record))):
        assert other == opt.record


def test_there_are_at_least_fifty_mistakes():
    assert len(MISTAKES) >= 50 and len({name for name, *_ in MISTAKES}) == len(MISTAKES)


def _step_without_a_layer():
    layer, unused = nn.Linear(4, 1), nn.Linear(4, 1)
    sanc.SANC([*layer.parameters(), *unused.parameters()], seed=0).step(lambda: layer(X).square().mean())


def _sum_outside_bounds():
    sanc.minimize(lambda x: x @ x, np.full(2, 3.0), jac=lambda x: 2 * x, bounds=[(0.0, 1.0)] * 2)


def _fit_through_a_search():
    from sklearn.model_selection import cross_val_score

    from sanc.sklearn import LogisticRegression

    model = LogisticRegression(max_iter=1)
    cross_val_score(model, X.numpy(), Y.numpy() % 2, cv=2)


WARNINGS = [
    (_step_without_a_layer, "does not reach params"),
    (_sum_outside_bounds, "outside the bounds"),
    (_fit_through_a_search, "max_iter"),
]


@pytest.mark.parametrize(("mistake", "words"), WARNINGS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_warning_names_the_line_of_the_caller(mistake, words):
    """Not a line of this package, nor one of torch or scikit-learn, which call it."""
    with pytest.warns(Warning, match=words) as caught:
        mistake()
    line = mistake.__code__.co_firstlineno
    assert caught[0].filename == __file__ and line < caught[0].lineno <= line + 7
