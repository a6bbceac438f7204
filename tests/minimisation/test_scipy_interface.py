"""The interface of SciPy in `minimize`: names, differences, bounds that do not bind, nested points, printing."""

from __future__ import annotations

import inspect
import math
import pickle
import types
from typing import NamedTuple

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc import Status
from zoo import rosen_torch

X0 = [1.3, 0.7, 0.8, 1.9]


def given(**more):
    return {"fun": rosen, "x0": X0, "jac": rosen_der, "hessp": rosen_hess_prod} | more


@pytest.mark.parametrize(
    "how", [{"maxiter": 3}, {"options": {"maxiter": 3}}, {"options": {"maxiter": 3, "disp": False}}]
)
def test_maxiter(how):
    res = sanc.minimize(**given(**how))
    assert res.nit == 3 and res.status is Status.ITERATION_LIMIT


@pytest.mark.parametrize("name", ["maxfev", "maxfun", "max_nfev"])
def test_maxfev(name):
    res = sanc.minimize(**given(**{name: 5}))
    assert res.status is Status.CALL_LIMIT and 5 <= res.nfev < sanc.minimize(**given()).nfev


def test_gtol():
    loose, same, tight = (sanc.minimize(**given(**how)) for how in ({"gtol": 1e-2}, {"tol": 1e-2}, {}))
    assert 1e-8 < np.linalg.norm(loose.jac) <= 1e-2
    assert (loose.x == same.x).all() and np.linalg.norm(tight.jac) <= 1e-8


def test_an_option_of_none_is_the_default():
    res = sanc.minimize(**given(method=None, options={"maxiter": None, "gtol": None}))
    assert (res.x == sanc.minimize(**given()).x).all()


def test_the_order_of_arguments_is_scipys():
    theirs = list(inspect.signature(scipy.optimize.minimize).parameters)
    assert list(inspect.signature(sanc.minimize).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "bounds",
    [
        None,
        (),
        [(None, None)] * 4,
        [(-np.inf, np.inf)] * 4,
        [(None, np.inf)] * 4,
        scipy.optimize.Bounds(),
        scipy.optimize.Bounds([-np.inf] * 4, [np.inf] * 4),
    ],
    ids=str,
)
def test_bounds_that_do_not_bind(bounds):
    assert sanc.minimize(**given(bounds=bounds)).success
    res = scipy.optimize.minimize(rosen, X0, jac=rosen_der, bounds=bounds, method=sanc.scipy_method)
    assert res.success


# ---------------------------------------------------------------------------------------------- differences


@pytest.mark.parametrize(("scheme", "near"), [("2-point", 1e-5), ("3-point", 1e-6), ("cs", 1e-8)])
def test_gradients_by_differences(scheme, near):
    calls = 0

    def fun(x):
        nonlocal calls
        calls += 1
        return rosen_torch(x)

    res = sanc.minimize(fun, X0, jac=scheme)
    assert res.success and res.status is Status.SECOND_ORDER
    assert np.linalg.norm(rosen_der(res.x)) <= 3 * near
    assert res.jac == pytest.approx(rosen_der(res.x), abs=2e-5 if scheme == "2-point" else 1e-7)
    assert res.nfev <= calls and res.njev > res.nit  # evaluations for the certificate are not counted
    assert res.nfev >= 4 * res.njev  # "3-point" begins with forward differences


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_values_of_a_lower_precision_than_the_point_are_named(scheme):
    """Their differences are zero or roundoff, so that any point would seem stationary."""

    def f(x):
        return np.float32(((x - 1.0) ** 2).sum())

    with pytest.raises(sanc.ArgumentError, match=r"fun returned .* in float32 .*: compute in the precision of x0, or"):
        sanc.minimize(f, np.array([3.0, -2.0]), jac=scheme)
    single = sanc.minimize(f, np.array([3.0, -2.0], np.float32), jac=scheme)
    assert single.x == pytest.approx([1.0, 1.0], abs=1e-2)


def test_the_differences_are_those_of_scipy(rng):
    x = rng.standard_normal(6)
    for scheme, tolerance in (("2-point", 1e-4), ("3-point", 1e-6), ("cs", 1e-12)):
        res = sanc.minimize(rosen_torch, x, jac=scheme, max_iter=0, certify=False)
        assert res.jac == pytest.approx(rosen_der(x), rel=tolerance, abs=tolerance)


def test_differences_in_float32_and_on_tensors():
    res = sanc.minimize(lambda x: ((x - 1) ** 2).sum(), torch.zeros(3, dtype=torch.float64), jac="3-point")
    assert res.success and res.x == pytest.approx(np.ones(3), abs=1e-6)
    res = sanc.minimize(lambda x: ((x - 1) ** 2).sum(), np.zeros(3, np.float32), jac="2-point", tol=1e-2)
    assert res.x.dtype == np.float32 and res.x == pytest.approx(np.ones(3), abs=2e-2)


def test_a_scheme_as_hess_means_differences_of_the_gradient():
    res = sanc.minimize(rosen, X0, jac=rosen_der, hess="2-point")
    assert res.success and (res.x == sanc.minimize(rosen, X0, jac=rosen_der).x).all()


def test_scipy_method_without_a_gradient():
    for jac in (None, "2-point", "3-point", "cs"):
        res = scipy.optimize.minimize(rosen_torch, X0, jac=jac, method=sanc.scipy_method, options={"maxiter": 100})
        assert res.success and res.x == pytest.approx(np.ones(4), abs=1e-4)


# ---------------------------------------------------------------------------------------------- nested points


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


TREES = {
    "dict": ({"w": torch.zeros(2, 2), "b": torch.tensor(3.0)}, lambda t: (t["w"], t["b"])),
    "list": ([torch.zeros(2, 2), torch.tensor(3.0)], lambda t: (t[0], t[1])),
    "tuple": ((torch.zeros(2, 2), torch.tensor(3.0)), lambda t: (t[0], t[1])),
    "named tuple": (Pair(torch.zeros(2, 2), torch.tensor(3.0)), lambda t: (t.a, t.b)),
    "nested": (
        {"w": [torch.zeros(2, 2)], "rest": ({"b": torch.tensor(3.0)},)},
        lambda t: (t["w"][0], t["rest"][0]["b"]),
    ),
}


@pytest.mark.parametrize("kind", TREES)
def test_trees_of_tensors(kind):
    x0, parts = TREES[kind]

    def fun(tree):
        w, b = parts(tree)
        return ((w - 1) ** 2).sum() + (b**2 - 1) ** 2 + b * w[0, 0]

    def flat(x):
        return ((x[:4] - 1) ** 2).sum() + (x[4] ** 2 - 1) ** 2 + x[4] * x[0]

    res = sanc.minimize(fun, x0, tol=1e-4)
    same = sanc.minimize(flat, torch.tensor([0.0, 0, 0, 0, 3.0]), tol=1e-4)
    w, b = parts(res.x)
    assert type(res.x) is type(x0) and w.shape == (2, 2) and b.shape == ()
    assert torch.cat([w.reshape(-1), b.reshape(-1)]) == pytest.approx(same.x)
    assert parts(res.jac)[0].shape == (2, 2) and res.success
    assert float(parts(x0)[1]) == 3.0  # the start is not changed
    assert sanc.certificate(fun, res.x, tol=1e-3).second_order


def test_trees_of_arrays_with_derivatives():
    def fun(p):
        return rosen(np.append(p["a"], p["b"]))

    def jac(p):
        g = rosen_der(np.append(p["a"], p["b"]))
        return {"a": g[:2], "b": g[2:].reshape(2, 1)}

    def hessp(p, v):
        h = rosen_hess_prod(np.append(p["a"], p["b"]), np.append(v["a"], v["b"]))
        return {"a": h[:2], "b": h[2:].reshape(2, 1)}

    x0 = {"a": np.array(X0[:2]), "b": np.array(X0[2:]).reshape(2, 1)}
    res = sanc.minimize(fun, x0, jac=jac, hessp=hessp)
    assert res.success and res.x["a"] == pytest.approx(np.ones(2)) and res.x["b"].shape == (2, 1)
    assert sanc.minimize(lambda p: (fun(p), jac(p)), x0, jac=True).success
    reordered = sanc.minimize(fun, x0, jac=lambda p: dict(reversed(jac(p).items())), hessp=hessp)
    assert reordered.nit == res.nit and np.array_equal(reordered.x["b"], res.x["b"])  # the order of keys is irrelevant
    assert sanc.minimize(fun, x0, jac="3-point").success
    whole = sanc.minimize(fun, x0, jac=jac, hess=lambda p: scipy.optimize.rosen_hess(np.append(p["a"], p["b"])))
    assert whole.success


def test_a_callback_is_called_with_the_tree():
    seen = []
    sanc.minimize(lambda p: (p["a"] ** 2).sum(), {"a": torch.ones(3)}, callback=seen.append)
    assert seen and all(list(x) == ["a"] for x in seen)


def test_a_list_of_numbers_is_an_array():
    res = sanc.minimize(lambda x: (x**2).sum(), [[1.0, 2.0], [3.0, 4.0]])
    assert isinstance(res.x, np.ndarray) and res.x.shape == (2, 2)


# ---------------------------------------------------------------------------------------------- JAX


def test_jax_functions():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with jax.enable_x64(True):

        def fun(p):
            x = jax.numpy.append(p["a"], p["b"])
            return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

        grad = jax.jit(jax.grad(fun))
        hessp = jax.jit(lambda x, v: jax.jvp(grad, (x,), (v,))[1])
        x0 = {"a": jax.numpy.array(X0[:2]), "b": jax.numpy.array(X0[2:])}
        res = sanc.minimize(jax.jit(fun), x0, jac=grad, hessp=hessp)
        flat = sanc.minimize(rosen_torch, jax.numpy.array(X0), jac=jax.grad(rosen_torch))
    assert res.success and np.append(res.x["a"], res.x["b"]) == pytest.approx(np.ones(4), abs=1e-8)
    assert flat.success and flat.x == pytest.approx(np.ones(4), abs=1e-8)


def test_jax_differentiates_its_functions():
    """Without `jac`: the steps are those of the same function in torch, also for a tree and further arguments."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with jax.enable_x64(True):

        def fun(x, scale):
            return scale * (jax.numpy.sin(x[0]) ** 2 + (x[1] - x[0] ** 2) ** 2 + jax.numpy.exp(x[2]) - x[2])

        start = [1.0, 2.0, -1.0]
        res = sanc.minimize(fun, jax.numpy.array(start), args=(3.0,))
        tree = sanc.minimize(
            lambda p: fun(jax.numpy.append(p["a"], p["b"]), 3.0),
            {"a": jax.numpy.array(start[:1]), "b": jax.numpy.array(start[1:])},
        )
    ours = sanc.minimize(
        lambda x: 3.0 * (torch.sin(x[0]) ** 2 + (x[1] - x[0] ** 2) ** 2 + torch.exp(x[2]) - x[2]), np.array(start)
    )
    assert res.success and (res.nit, res.njev, res.nhev) == (ours.nit, ours.njev, ours.nhev)
    assert res.x == pytest.approx(ours.x, abs=1e-9) and res.fun == pytest.approx(3.0)
    assert tree.success and np.append(tree.x["a"], tree.x["b"]) == pytest.approx(ours.x, abs=1e-9)


def test_jax_differentiates_its_functions_of_numpy_arrays():
    """A function that returns an array of JAX for one of NumPy is one of JAX; the precision is that of JAX."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    short = {"max_iter": 2, "certify": False}

    def fun(x):
        return jax.numpy.sum(rosen_torch(x))

    def through_scipy(**options):
        return scipy.optimize.minimize(fun, X0, method=sanc.scipy_method, options=short | options)

    with jax.enable_x64(True):
        theirs = sanc.minimize(fun, jax.numpy.array(X0), **short)
        for res in (sanc.minimize(fun, X0, **short), through_scipy()):
            assert np.array_equal(res.x, theirs.x) and (res.nfev, res.nhev) == (theirs.nfev, theirs.nhev)
        tree = sanc.minimize(lambda p: fun(p["x"]), {"x": np.array(X0)}, **short)
        assert np.array_equal(tree.x["x"], theirs.x) and through_scipy(scheme="2-point").nfev > 2 * theirs.nfev
    with jax.enable_x64(False):
        assert sanc.minimize(fun, X0, **short).x.dtype == np.float32
    with pytest.raises(sanc.ArgumentTypeError, match=r"fun is a function of JAX.*x0 is a tensor"):
        sanc.minimize(fun, torch.tensor(X0))


# ---------------------------------------------------------------------------------------------- SciPy's other methods


@pytest.mark.parametrize(
    "options", [{"maxiter": 3.0}, {"maxfun": math.inf}, {"disp": None}, {"scale": None}, {"maxiter": None}]
)
def test_numbers_of_scipys_options_may_be_floats_and_none_is_a_default(options):
    expected = sanc.minimize(rosen, X0, jac=rosen_der, max_iter=3 if options.get("maxiter") else 10_000)
    res = scipy.optimize.minimize(rosen, X0, jac=rosen_der, method=sanc.scipy_method, options=options)
    assert res.nit == expected.nit and np.array_equal(res.x, expected.x)
    with pytest.raises(sanc.ArgumentError, match=r"max_iter = 2.5"):
        sanc.minimize(rosen, X0, jac=rosen_der, options={"maxiter": 2.5})


@pytest.mark.parametrize("name", ["return_all", "eps", "norm", "xatol", "maxls", "ftol", "maxcor", "eta", "mesg_num"])
def test_options_of_other_methods_warn_as_in_scipy(name):
    options = {name: 1, "maxiter": 50}
    with pytest.warns(scipy.optimize.OptimizeWarning, match=f"^Unknown solver options: {name}$"):
        res = scipy.optimize.minimize(rosen, X0, jac=rosen_der, method=sanc.scipy_method, options=options)
    with pytest.warns(scipy.optimize.OptimizeWarning, match=f"^Unknown solver options: {name}$") as caught:
        same = sanc.minimize(rosen, X0, jac=rosen_der, options=options)
    assert caught[0].filename == __file__
    assert res.success and np.array_equal(res.x, same.x)
    with pytest.raises(sanc.ArgumentError, match="maxitre"):
        sanc.minimize(rosen, X0, jac=rosen_der, options={"maxitre": 3})


def test_disp_may_be_a_level(capsys):
    assert sanc.minimize(rosen, X0, jac=rosen_der, options={"disp": 3}).success
    assert "iterations" in capsys.readouterr().out
    assert sanc.minimize(rosen, X0, jac=rosen_der, options={"disp": 0}).success
    assert capsys.readouterr().out == ""


def test_a_callback_of_two_arguments_is_that_of_trust_constr():
    seen = []

    def callback(xk, state):
        seen.append((np.array(xk), state.nit, state.fun))
        return state.nit == 3

    res = scipy.optimize.minimize(rosen, X0, jac=rosen_der, method=sanc.scipy_method, callback=callback)
    assert [nit for _, nit, _ in seen] == [1, 2, 3] and res.nit == 3
    assert all(rosen(x) == pytest.approx(value) for x, _, value in seen)


@pytest.mark.parametrize("scheme", ["2-point", "3-point", "cs"])
def test_a_scheme_as_jac_does_not_arrive_through_scipy(scheme):
    """SciPy replaces it by None, as docs/moving.md says. If that changes, the page and `scipy_method` may."""
    found = []

    def method(fun, x0, args, jac, **others):
        found.append(jac)
        return scipy.optimize.OptimizeResult(x=x0)

    scipy.optimize.minimize(rosen, X0, jac=scheme, method=method)
    assert found == [None]


@pytest.mark.parametrize(("scheme", "values"), [("2-point", 1), ("3-point", 2), ("cs", 1)])
def test_a_scheme_arrives_through_scipy(scheme, values):
    """One gradient costs n values besides f(x), or 2n; SciPy drops the name if it is given as jac."""
    counted = []

    def fun(x):
        counted.append(1)
        return (x**2).sum()

    options = {"scheme": scheme, "maxiter": 0, "certify": False}
    scipy.optimize.minimize(fun, np.ones(4), method=sanc.scipy_method, options=options)
    assert 4 * values <= len(counted) <= 4 * values + 2
    with pytest.raises(sanc.ArgumentError, match="scheme = '5-point'"):
        scipy.optimize.minimize(fun, np.ones(4), method=sanc.scipy_method, options={"scheme": "5-point"})


# ---------------------------------------------------------------------------------------------- printing


@pytest.mark.parametrize("dim", [2, 100_000])
def test_a_result_fits_a_screen(dim):
    seen = []
    res = sanc.minimize(
        lambda x: ((x**2 - 1) ** 2).mean(), torch.linspace(-2, 2, dim, dtype=torch.float64), max_iter=30,
        callback=lambda intermediate_result: seen.append(repr(intermediate_result)),
    )  # fmt: skip
    for text in (str(res), repr(res), *seen):
        lines = text.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 80, text
    for word in (res.message.split()[0], f"nit: {res.nit}", f"{res.nit} × Record", "certificate:", "status: "):
        assert word in str(res)
    assert isinstance(res, scipy.optimize.OptimizeResult) and "history" in dir(res)
    again = pickle.loads(pickle.dumps(res))
    assert again.nit == res.nit and str(again) == str(res)


def test_a_nested_result_fits_a_screen():
    x0 = {f"layer{k}": [torch.ones(50, 50), torch.ones(50)] for k in range(20)}
    res = sanc.minimize(lambda p: sum((t**2).sum() for pair in p.values() for t in pair), x0)
    lines = str(res).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 80
    assert "layer0: 0: [" in str(res) and "… and 1" in str(res) and "(50×50)" in str(res)


@pytest.mark.parametrize("returned", [(1.0, 2.0), {"loss": 1.0}, None])
def test_a_function_that_returns_more_than_a_value_is_named(returned):
    with pytest.raises(sanc.ArgumentTypeError, match=r"return the value alone.* jac=True"):
        sanc.minimize(lambda x: returned, torch.zeros(2))


def test_a_function_of_jax_needs_a_point_of_jax(monkeypatch):
    """The function is one of a module of the name jax, which rejects tensors as JAX does."""
    module = types.ModuleType("jax.fake")
    exec("def total(x):\n    raise TypeError('not a valid JAX type')", module.__dict__)
    with pytest.raises(sanc.ArgumentTypeError, match=r"fun is a function of JAX, and x0 is a .*jax.numpy.asarray"):
        sanc.minimize(lambda x: module.total(x), torch.zeros(2))
    with pytest.raises(sanc.ArgumentTypeError, match=r"fails for an array of NumPy \(TypeError: not a valid JAX type"):
        sanc.minimize(lambda x: module.total(x), np.zeros(2))


@pytest.mark.parametrize(("convert", "of_jax"), [
    (float, False), (np.asarray, False), (lambda value: value.item(), False), (float, True), (np.asarray, True),
], ids=["float", "asarray", "item", "float at a point of JAX", "asarray at a point of JAX"])  # fmt: skip
def test_a_value_that_jax_cannot_differentiate_is_named(convert, of_jax):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x0 = jax.numpy.ones(2) if of_jax else np.ones(2)
    with pytest.raises(sanc.ArgumentTypeError, match=r"fun (returned|converts).*without float\(\), .item\(\) or numpy"):
        sanc.minimize(lambda x: convert(jax.numpy.sum(x**2)), x0)
