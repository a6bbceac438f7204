"""The map in docs/architecture.md is true: no import goes up, none in a circle, and private names stay in one place."""

from __future__ import annotations

import ast
import functools
import re
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch

import sanc
from preset_options import PIECES
from sanc.core.bounded.box_model import BoundedModel, BoundedSubspace
from sanc.core.method import Method
from sanc.core.model import KrylovSubspace
from sanc.core.pieces import Decision
from sanc.core.point import Point, State
from sanc.core.ratio import TrialOutcome
from sanc.core.record import Record
from sanc.core.runs.preconditioned import PreconditionedVariables
from sanc.core.runs.scaled_variables import ScaledVariables
from sanc.core.runs.status import Findings
from sanc.core.runs.variables import PlainVariables
from sanc.core.sigma import SigmaRule
from sanc.leastsquares.column_scales import ColumnScales
from sanc.leastsquares.residual_variables import ResidualVariables
from sanc.leastsquares.second_order_term import SecondOrderTerm
from sanc.many.rows import Rows
from sanc.minibatch.state import STATE_GROUPS, MinibatchState

VALUES = [
    BoundedModel, BoundedSubspace, ColumnScales, Decision, Findings, KrylovSubspace, Method, MinibatchState,
    PlainVariables, Point, PreconditionedVariables, Record, ResidualVariables, ScaledVariables, SecondOrderTerm,
    SigmaRule, State, TrialOutcome, *STATE_GROUPS.values(),
]  # fmt: skip

SOURCE = Path(__file__).parent.parent / "src" / "sanc"
LAYERS = [  # a package imports only from packages above it in this list, and from itself
    {"errors", "_version"},
    {"theory"},
    {"core"},
    {"minibatch", "autograd", "functions", "sums"},
    {"extend", "graphs", "problems", "ranks"},
    {"options"},
    {"presets"},
    {"optim", "minimisation"},
    {"many"},
    {"diagnosis", "leastsquares"},
    {"implicit"},
    {"__init__", "sklearn"},
    {"lab"},
    {"__main__"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}


@functools.cache
def modules():
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def nodes(path):
    """Return all nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def name_of(path):
    return path.relative_to(SOURCE).with_suffix("")


@functools.cache
def files_by_name():
    """Return the file of each module."""
    return {".".join(("sanc", *name_of(path).parts)).removesuffix(".__init__"): path for path in modules()}


@functools.cache
def imports(path):
    """Modules of the package that a file imports, also within functions and for the type checker alone."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {files_by_name()[name] for name in found if name in files_by_name()}


def package(path):
    return name_of(path).parts[0]


def test_every_file_is_in_a_package_of_the_list():
    assert {package(path) for path in modules()} == set(LAYER)


def test_no_import_goes_up():
    """The laboratory uses the public names, which are above it."""
    pairs = [(path, target) for path in modules() for target in imports(path) if package(target) != package(path)]
    assert len(pairs) > 200
    upward = [
        f"{name_of(path)} imports {name_of(target)}"
        for path, target in pairs
        if LAYER[package(target)] >= LAYER[package(path)] and (package(path), package(target)) != ("lab", "__init__")
    ]
    assert upward == []


def test_the_packages_of_the_core_are_layers():
    """Runs use bounds, both use the iteration and the spectrum; nothing uses them in turn."""
    above = {"": {"bounded", "runs"}, "spectrum": {"bounded", "runs"}, "bounded": {"runs"}, "runs": set()}
    for path in SOURCE.glob("core/**/*.py"):
        targets = {name_of(target).parts[1] for target in imports(path) if package(target) == "core"}
        folder = path.parent.name
        assert not targets & above["" if folder == "core" else folder], path


def test_the_algebra_of_the_spectrum_knows_no_oracle():
    """The oracle builds on it. Only what measures the Hessian of an oracle imports that."""
    spectrum = SOURCE / "core" / "spectrum"
    measuring = {spectrum / name for name in ("monitored_lanczos.py", "curvature.py", "extremes.py")}
    algebra = set(spectrum.glob("*.py")) - measuring
    allowed = algebra | {SOURCE / "core" / "space.py", SOURCE / "errors.py"}
    assert {path: imports(path) - allowed for path in algebra if imports(path) - allowed} == {}
    assert all(imports(path) & {SOURCE / "core" / "oracle.py"} for path in measuring)


def test_the_map_has_every_package_and_every_file():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing, core = page.split("```")[1], page.split("**`core/`**")[1].split("\n\n**`")[0]
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {name for name in packages if not re.search(rf"\b{name}\b", drawing)} == set()
    files = {path.name for path in SOURCE.glob("core/**/*.py")} - {"__init__.py"}
    assert {name for name in files if f"`{name}`" not in core} == set()
    assert set(re.findall(r"^\|[^|]*`(\w+\.py)`", core, re.MULTILINE)) <= files
    for name in packages - {"core"}:
        section = page.split(f"**`{name}/`**")[1].split("\n\n**`")[0]
        files = {path.name for path in SOURCE.glob(f"{name}/*.py")} - {"__init__.py"}
        assert {file for file in files if f"`{file}`" not in section} == set(), name


def codes_in_the_map():
    """Return the text of docs/architecture.md without its drawing, and what it has in code font: paths, and others."""
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    codes = set(re.findall(r"`([^`]+)`", text))
    paths = {code for code in codes if re.fullmatch(r"[\w/]+\.(?:py|md|yml)|[\w/]+/", code)}
    return text, paths, codes - paths


def test_paths_in_the_map_exist():
    text, paths, _ = codes_in_the_map()
    root = SOURCE.parent.parent
    folders = (root, root / "src", SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir()))
    assert {path for path in paths if not any((folder / path).exists() for folder in folders)} == set()
    for folder, sentences in re.findall(r"^\*\*`(\w+)/`\*\*(.+)$", text, re.MULTILINE):  # about the files of a package
        names = re.findall(r"`(\w+\.py)`", sentences)
        assert [name for name in names if not any((SOURCE / folder).rglob(name))] == [], folder


def test_names_in_the_map_exist():
    text, _, codes = codes_in_the_map()
    root = SOURCE.parent.parent
    files = [*modules(), *(root / "tests" / name for name in ("test_architecture.py", "test_typing.py"))]
    files.append(root / "benchmarks" / "suite_methods.py")
    words = {path: set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in files}
    every = set().union(*words.values())
    names = {code for code in codes if re.fullmatch(r"[\w.]+=?", code)}
    assert {name for name in names if not set(re.findall(r"\w+", name)) <= every} == set()
    members = [name.split(".") for name in names if re.fullmatch(r"[A-Z]\w+\.\w+", name)]
    for kind, member in members:
        homes = [p for p in modules() if any(isinstance(n, ast.ClassDef) and n.name == kind for n in nodes(p))]
        assert any(member in words[path] for path in homes), f"{kind}.{member}"
    places = re.findall(r"`(?:\w+\.)?(\w+)` in `((?:\w+/)+\w+\.py)`", text)
    for name, place in places:
        assert any(name in words.get(folder / place, ()) for folder in (root, root / "src", SOURCE)), (name, place)
    assert len(members) >= 8 and len(places) >= 15


def averaged_iterations():
    """Make a run with a batch that is not finite and a rise of the loss; return the calls of each averaged iteration.

    A call is the name of the function and of its file.
    """
    folder, iterations, depth = str(SOURCE / "minibatch"), [], [0]

    def trace(frame, event, _):
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(folder):
            is_outer = code.co_qualname == "AveragedPhase.iterate"
            if event == "call":
                depth[0] += is_outer
                if is_outer:
                    iterations.append([])
                if depth[0]:
                    iterations[-1].append((code.co_qualname, Path(code.co_filename).name))
            else:
                depth[0] -= is_outer

    weights = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    opt = sanc.SANC([weights], curvature=False, seed=0)
    sys.setprofile(trace)
    try:
        for k in range(32):
            factor = float("nan") if k == 5 else 1.0
            if k == 31:  # as after a rise of the mean loss from that of a lower point
                losses = opt._iteration.state.losses
                change = {"lowest_loss_mean": losses.loss_mean - 1e-6, "loss_variance": 0.0}
                losses = replace(losses, safe_point=0.0 * losses.safe_point, **change)
                opt._iteration.state = replace(opt._iteration.state, losses=losses)
            opt.step(lambda factor=factor: factor * weights.square().sum())
    finally:
        sys.setprofile(None)
    return iterations


def test_an_averaged_step_makes_the_calls_of_the_map_in_its_order():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## One averaged step\n")[1].split("\n## ")[0].split("in this order:")[1]
    listed = re.findall(r"`([\w.]+)` in `minibatch/(\w+\.py)`", section)
    made = set()
    for calls_made in averaged_iterations():
        first = {call: calls_made.index(call) for call in listed if call in calls_made}
        assert list(first.values()) == sorted(first.values()), first
        made |= first.keys()
    assert made == set(listed) and len(listed) == len(set(listed)) == 18


def test_the_laboratory_uses_public_names_only():
    allowed = {"__init__", "_version", "errors", "problems", "theory", "lab"}
    for path in SOURCE.glob("lab/*.py"):
        assert {package(target) for target in imports(path)} <= allowed, path


def test_only_the_driver_of_the_optimisers_imports_the_graphs():
    assert {package(p) for p in modules() for target in imports(p) if package(target) == "graphs"} <= {
        "graphs",
        "optim",
    }


def test_entry_points_use_each_other_as_the_map_says():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.search(r"the entry points \(([^)]+)\)", page).group(1)
    entries = set(re.findall(r"`(\w+)`", listed))
    sentence = re.search(r"Among the entry points (.+?);", page).group(1)
    drawn = {
        (user, used)
        for user, targets in re.findall(r"`(\w+)` uses ((?:`\w+`(?: and )?)+)", sentence)
        for used in re.findall(r"`(\w+)`", targets)
    }
    pairs = {(package(path), package(target)) for path in modules() for target in imports(path)}
    assert {(user, used) for user, used in pairs if {user, used} <= entries and user != used} == drawn
    assert len(entries) == 7 and len(drawn) == 7


def test_every_error_of_the_package_is_one_error():
    """Users catch `SancError`. The others are caught before they reach the user."""
    caught = {"NonFiniteProductError", "NonFiniteValueError", "_StoppedError"}
    bases = {node.name: {ast.unparse(base) for base in node.bases} for path in modules() for node in nodes(path)
             if isinstance(node, ast.ClassDef) and node.name.endswith("Error")}  # fmt: skip
    derived = {"SancError"}
    for _ in bases:
        derived |= {name for name in bases if bases[name] & derived}
    assert len(bases) > 12 and bases.keys() - derived == caught


def test_there_is_no_circle():
    graph = {path: imports(path) - {path} for path in modules() if package(path) != "__init__"}
    done = []
    while graph:
        free = [path for path, targets in graph.items() if not targets & graph.keys()]
        assert free, f"these import each other: {sorted(map(str, graph))}"
        done += free
        graph = {path: targets for path, targets in graph.items() if path not in free}


def test_private_names_of_torch_are_used_in_one_place():
    used = r"\b(?:torch(?:\.\w+)*|np|numpy|scipy(?:\.\w+)*)\._(?!_)\w+"
    private = re.compile(used + r"|from (?:torch|numpy|scipy)[\w.]*\._(?!_)\w+")
    for path in modules():
        if name_of(path).parts[-1] != "internals":
            assert not private.search(path.read_text()), path


def private_names(path):
    """Return the private names that a file assigns or defines."""
    defined = {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {getattr(target, "attr", getattr(target, "id", "")) for node in nodes(path)
                for target in (node, getattr(node, "target", None))
                if isinstance(target, ast.Name | ast.Attribute) and isinstance(target.ctx, ast.Store)}  # fmt: skip
    return {name for name in defined | assigned if name.startswith("_")}


def foreign_private_names(path, known):
    """Yield private attributes, not of `self`, that are not among the names `known`."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr) and node.attr not in known:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()", "sys") and node.attr not in ("_asdict", "_make", "_replace"):
                yield f"{path}:{node.lineno}: {owner}.{node.attr}"


def test_private_attributes_are_used_in_their_package():
    """Also those of an object whose class another package defines, which no import shows."""
    known = {}
    for path in modules():
        known.setdefault(package(path), set()).update(private_names(path))
    for path in modules():
        if name_of(path).parts[-1] != "internals":
            assert list(foreign_private_names(path, known[package(path)])) == []


def written(node):
    """Attributes that a statement assigns, also in tuples and by an operator."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    parts = [part for target in targets for part in ast.walk(target)]
    return [part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]


def written_keys(node):
    """Constant keys that a statement assigns, as `state["sigma"] = …` does, and those merged in by `|` and `update`."""
    if isinstance(node, ast.BinOp):
        mappings = [node.left, node.right]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
        mappings = node.args
    else:
        mappings = []
    if mappings:
        keys = [key for mapping in mappings if isinstance(mapping, ast.Dict) for key in mapping.keys]
        return [key.value for key in keys if isinstance(key, ast.Constant)]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
        return [node.slice.value]
    return []


def calls(path):
    """Names of what a file calls, without the modules they are called from."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found.add(name)
    return found


ROW_STATES = {SOURCE / "many" / name for name in ("iteration.py", "proposals.py")}
"""The modules that write σ of many rows, whose state is one mutable object of tensors. Their rules are functions."""


def test_problems_and_rules_of_rows_return_values():
    """Only the iteration of rows, its proposals, and the run that they enter and leave write an attribute of `Rows`."""
    writers = {SOURCE / "many" / name for name in ("iteration.py", "proposals.py", "running.py")}
    found = {path for path in modules() for node in nodes(path) for target in written(node)
             if isinstance(target.value, ast.Name) and target.value.id in ("rows", "part", "fresh")
             and target.attr in Rows.__dataclass_fields__}  # fmt: skip
    assert found == writers


def test_sigma_is_a_value_that_no_piece_writes():
    """σ is passed in and returned. No statement for one problem assigns an attribute `sigma`, of whatever object."""
    for path in set(modules()) - ROW_STATES:
        for node in nodes(path):
            for target in written(node):
                assert target.attr != "sigma", f"{path}:{target.lineno}"


@pytest.mark.parametrize(
    "statement",
    ['state["sigma"] /= 8.0', 'a, state["sigma"] = b', 'numbers() | {"sigma": 1.0}', 'x.update({"sigma": 1})'],
)
def test_the_guard_on_states_sees_keys(statement):
    assert "sigma" in [key for node in ast.walk(ast.parse(statement)) for key in written_keys(node)]


def test_no_state_is_changed_by_the_keys_of_its_saved_form():
    """`numbers` and `restore` are for saved states; a run changes numbers of a state by `replace_numbers`."""
    names = {item.name for item in fields(State)} - {"seed", "iteration", "seconds", "acceptance_state"}
    for path in modules():
        for node in nodes(path):
            assert not names.intersection(written_keys(node)), f"{path}:{node.lineno}"
    restoring = [SOURCE / name for name in ("core/runs/resume.py", "core/runs/run.py", "optim/checkpoints.py")]
    assert [path for path in modules() if "iteration.restore(" in path.read_text()] == restoring


def test_the_rules_for_rows_are_functions():
    """They return what they decide, and assign no attribute of what they are given but of themselves."""
    for name in ("rules.py", "decisions.py", "cubic.py", "algebra.py", "spectra.py", "box.py"):
        for node in nodes(SOURCE / "many" / name):
            for target in written(node):
                assert getattr(target.value, "id", "") == "self", f"{name}:{target.lineno}"


def test_in_the_core_only_the_oracle_counts():
    """Pieces and iterations return what they decided. The counters are written by `Meter` and `Oracle` alone."""
    counters = {"value", "gradient", "product", "paper_calls", "nfev", "njev", "nhev"}
    for path in SOURCE.glob("core/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AugAssign) and path.name not in ("meter.py", "oracle.py"):
                assert getattr(node.target, "attr", "") not in counters, f"{path}:{node.lineno}"


def replaces_a_state(node):
    """Return whether it is a call such as `replace(self.state, …)`."""
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replace"):
        return False
    return getattr(node.args[0], "attr", getattr(node.args[0], "id", "")) == "state"


def state_writers(path):
    """Return how often each function of a file assigns `self.state`."""
    counts = {}
    for function in (node for node in nodes(path) if isinstance(node, ast.FunctionDef)):
        targets = [target for node in ast.walk(function) for target in written(node) if target.attr == "state"]
        if targets:
            counts[function.name] = len(targets)
    return counts


def test_only_the_iterations_write_records_and_states():
    """On samples functions return the next state, the averaged phase with a record; the iteration sets it."""
    iterations = {SOURCE / "core" / "iteration.py", SOURCE / "minibatch" / "iteration.py"}
    returning = {SOURCE / "minibatch" / f"{name}.py" for name in ("joining", "step_size", "step_numbers")}
    parts = {SOURCE / "minibatch" / "averaged_phase.py", SOURCE / "minibatch" / "recovery.py"}
    assert {path for path in modules() if "Record" in calls(path)} == {SOURCE / "core" / "iteration.py"} | parts
    assert {path for path in modules() if calls(path) & {"State", "MinibatchState"}} == iterations
    assert {path for path in modules() if any(map(replaces_a_state, nodes(path)))} == iterations | parts | returning
    states = [(str(path.relative_to(SOURCE)), getattr(target.value, "id", "")) for path in modules()
              for node in nodes(path) for target in written(node) if target.attr == "state"]  # fmt: skip
    assert {SOURCE / path for path, owner in states if owner == "self"} == iterations
    assert state_writers(SOURCE / "minibatch" / "iteration.py") == {
        **dict.fromkeys(("__init__", "iterate", "finish_step", "on_move", "restore", "roll_back"), 1),
        **dict.fromkeys(("rearrange", "reset", "before_saving"), 1),
    }
    foreign = {path for path, owner in states if owner != "self"}
    assert foreign == {"sums/oracle.py"}  # that of a random generator
    names = {"branch", "rho", "step_norm", "model_decrease", "trial_value", "note", "curvature_share", "ritz_value"}
    for path in set(modules()) - ROW_STATES:
        for node in nodes(path):
            for target in written(node):
                assert target.attr not in names, f"{path}:{target.lineno}"


def test_only_its_methods_write_a_run():
    """The other modules of a run decide, and call its methods. No class derives from it."""
    assert {path for path in modules() for node in nodes(path) if isinstance(node, ast.ClassDef)
            and "Run" in map(ast.unparse, node.bases)} == set()  # fmt: skip
    writers = {str(path.relative_to(SOURCE)) for path in modules() for node in nodes(path) for target in written(node)
               if getattr(target.value, "id", "") == "run"}  # fmt: skip
    assert writers == set()
    methods = nodes(SOURCE / "core" / "runs" / "run.py")
    assert {"x", "oracle", "variables", "findings"} <= {target.attr for node in methods for target in written(node)}


@pytest.mark.parametrize(
    "kind",
    [*VALUES, *PIECES],
)
def test_what_pieces_are_given_and_return_is_frozen(kind):
    assert kind.__dataclass_params__.frozen


def test_a_piece_that_writes_into_the_point_or_the_state_fails():
    """The guard at run time: nothing that an acceptance rule is given can be assigned to."""

    class Writes(sanc.RatioTest):
        def __call__(self, here, subspace, step, trial, trial_count):
            for target, name in (
                (here, "value"),
                (here.state, "sigma"),
                (here.sigma_rule, "sigma0"),
                (subspace, "sigma"),
            ):
                with pytest.raises(FrozenInstanceError):
                    setattr(target, name, 3.0)
            return super().__call__(here, subspace, step, trial, trial_count)

    found = sanc.minimize(lambda x: (x**4 - x**2).sum(), torch.ones(2, dtype=torch.float64), acceptance=Writes())
    assert found.success


def test_requirements_are_attributes_and_not_identities():
    """No file asks which function or class a piece of a method is, except where a preset is composed."""
    allowed = {"presets", "lab", "graphs"}
    for path in modules():
        for node in nodes(path):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "isinstance"
                and package(path) not in allowed
            ):
                named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                assert not named & {kind.__name__ for kind in PIECES} - {"Method"}, f"{path}:{node.lineno}"
                assert not named & {"Iteration", "MinibatchIteration"}, f"{path}:{node.lineno}"


def test_only_the_faces_ask_which_oracle_wraps_another():
    """A run uses `full_oracle`, `unscaled_oracle`, `exponent` and `free_indices`, which every oracle has."""
    allowed = {SOURCE / "core" / name for name in ("runs/faces.py", "bounded/box_model.py")}
    for path in set(modules()) - allowed:
        assert not re.search(r"isinstance\([^)]*(?:FaceOracle|ScaledObjectiveOracle)", path.read_text()), path


VAGUE = re.compile(
    r"(?<![a-z])(slopes?|refus(?:e|es|ed|al)|forgets?|nobody|somebody|whoever|doubt(?:s|ed)?|promise[sd]?|judge[sd]?|"
    r"at[_ ]rest|went[_ ]back|gains?|renew(?:s|ed|al|als)|mend(?:s|ed)?|tells|told|curvature_length)(?![a-z])|"
    r'"""(?:Let|Says?) |^ *own = |(?:step|difference) of length\b',
    re.IGNORECASE,
)
"""Words with several meanings, in prose and in parts of names. Those of the field are gradient norm and directional
derivative, reject, reset, inconsistent, predicted decrease, stagnated, decrease and step norm. Docstrings begin with
what is done or returned."""


def test_prose_and_names_have_words_of_the_field():
    root = SOURCE.parent.parent
    patterns = ("src/**/*.py", "tests/**/*.py", "benchmarks/*.py", "tools/*.py", "docs/**/*.md", "*.md")
    paths = {path for pattern in patterns for path in root.glob(pattern)} - {Path(__file__)}
    for path in paths - {root / "CHANGELOG.md"}:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            prose = re.sub("AT_REST|new Promise", "", line)  # a former name, and one of JavaScript
            assert not (found := VAGUE.search(prose)), f"{path}:{number}: {found}"


def test_descriptions_of_conditions_have_one_form():
    """A function returns whether something holds, a property is whether it holds; numbers of equations are last."""
    properties = 0
    for path in modules():
        for node in nodes(path):
            sentence = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if sentence is None:
                continue
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            is_condition = node.returns is not None and ast.unparse(node.returns) == "bool"
            place = f"{path}:{node.lineno}: {sentence}"
            assert not re.match(r"\d\.\d", sentence), place
            assert sentence.startswith("Whether ") == (is_property and is_condition), place
            properties += is_property and is_condition
    assert properties > 30


def documented_names(docstring):
    """Return the names in the sections of parameters and attributes; None without such a section."""
    sections = re.findall(
        r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=\n\n\w[^\n]*\n---|\Z)", docstring, re.MULTILINE | re.DOTALL
    )
    entries = [line.split(" : ")[0] for section in sections for line in re.findall(r"^\S.*", section, re.MULTILINE)]
    return {name for entry in entries for name in re.findall(r"\w+", entry)} if sections else None


def public_members(node):
    """Return the arguments of a function, or the public attributes that a class annotates or its __init__ sets."""
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {argument.arg for argument in arguments} - {"self", "cls"}
    names = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            targets = [target for part in ast.walk(item) for target in written(part)]
            names |= {target.attr for target in targets if getattr(target.value, "id", "") == "self"}
    return {name for name in names if not name.startswith("_")}


def test_sections_of_docstrings_are_complete():
    """Where a docstring lists parameters or attributes, it lists all of them."""
    complete = 0
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                documented = documented_names(ast.get_docstring(node) or "")
                if documented is not None:
                    missing = public_members(node) - documented
                    assert not missing, f"{path}:{node.lineno}: {node.name} does not describe {sorted(missing)}"
                    complete += 1
    assert complete > 150


MAX_UNDOCUMENTED_FIELDS = 3


def test_classes_of_many_fields_describe_them():
    """A dataclass or named tuple with more fields than that has a section of attributes or parameters."""
    described = 0
    for path in modules():
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef):
                continue
            kinds = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
            if (
                re.search(r"\b(?:dataclass|NamedTuple)\b", kinds)
                and len(public_members(node)) > MAX_UNDOCUMENTED_FIELDS
            ):
                assert documented_names(ast.get_docstring(node) or ""), f"{path}:{node.lineno}: {node.name}"
                described += 1
    assert described > 60


def names_in(path):
    """Names that a file assigns, as variables, attributes, arguments, functions and classes, with their lines."""
    for node in nodes(path):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield getattr(node, "id", getattr(node, "attr", "")), node.lineno


def test_names_are_those_of_the_field():
    """Words that prose may have, but that say too little as names: `own` of what?"""
    vague = {"own", "lost", "young", "turn", "turned", "found", "known"}
    vague |= {"WORTH", "CHANGE", "SAME", "SMALL", "COPIES", "USABLE", "PREDICTED", "DIFFERENCE"}  # of constants
    for path in modules():
        found = {f"{name}, line {line}" for name, line in names_in(path) if name.strip("_") in vague}
        assert not found, path


def test_comments_refer_to_names_that_exist():
    """`see` and a name in code font, as in comments beside attributes."""
    referred = {name for path in modules() for name in re.findall(r"see `(\w+)`", path.read_text(encoding="utf-8"))}
    defined = {name for path in modules() for name, _ in names_in(path)}
    assert len(referred) > 8 and referred <= defined


def constants(path):
    """Yield the names in capitals that a module assigns, also in tuples and with annotations, with their values."""
    for node in nodes(path)[0].body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            for part in ast.walk(target) if isinstance(target, ast.expr) else ():
                if isinstance(part, ast.Name) and part.id.isupper() and len(part.id) > 1:  # no type variables
                    yield part.id, node.value


def test_a_constant_has_one_value_and_one_place():
    """A name in capitals at the level of a module has one meaning in the whole package."""
    places = {}
    for path in modules():
        for name, _ in constants(path):
            places.setdefault(name, []).append(str(name_of(path)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_class_has_one_meaning():
    """A name of a class is that of one class; an estimator may have the name of the sum that it minimises."""
    places = {}
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(name_of(path)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {
        "NonconvexSVM": ["sklearn/svm", "sums/losses"]
    }


NO_ROW = {
    *("ESCAPE_SIGN", "LANCZOS_START", "HARD_CASE_SIGN"),  # purposes of random numbers
    *("ROUNDING_SEED", "NOISE_SEED", "_CURVATURE_SEED", "_PRODUCT_SEED", "_DIRECTION_SEED"),
    *("PENDING", "CUBIC", "LONGER", "ESCAPE", "RUNNING", "WAITING"),  # codes of rows
    *("UNSUCCESSFUL", "SUCCESSFUL", "VERY_SUCCESSFUL"),
    *("TERMINAL_WIDTH", "_NESTED_LINES", "_WIDTH_OF_VALUE", "_WIDTH_OF_LINE", "_MAX_LISTED_VARIABLES"),
    "_WIDTH",  # of text
    "FORMAT",  # version of a file
}


def is_numeric(value):
    """Return whether an expression is a number, a tuple of numbers or a dictionary of them, without a call."""
    parts = [part for entry in getattr(value, "values", [value]) for part in ast.walk(entry)]
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    return bool(numbers) and all(numbers) and not any(isinstance(part, ast.Call) for part in parts)


def test_no_class_holds_a_number_that_is_no_field():
    """A number in the body of a class is the default of a field; other numbers are constants of the module."""
    for path in modules():
        for node in nodes(path):
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                value = item.value if isinstance(item, ast.Assign) else None
                is_number = isinstance(value, ast.Constant) and type(value.value) in (int, float)
                assert not (is_number and value.value not in (0, 1)), f"{path}:{item.lineno}"


def test_every_numeric_constant_is_listed_with_its_source():
    page = (SOURCE.parent.parent / "docs" / "constants.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    found = {name: is_numeric(value) for path in modules() for name, value in constants(path)}
    numbers = {name for name in found if found[name]}
    assert numbers - NO_ROW <= listed <= set(found)
    assert NO_ROW <= numbers - listed


UNIMPORTED = {
    "": "__main__ _version",
    "autograd": "batches closures gradient_only internals masters passes",
    "core": "piece_checks protocol runs/callbacks runs/resume settings",
    "diagnosis": "curvature entry gradients report samples steps",
    "functions": "differences with_jax",
    "graphs": "oracle",
    "implicit": "autograd_functions derivatives examination minimum problem solution",
    "leastsquares": "curve_fitting entry jacobian_model whole_hessian",
    "many": "functions iteration result",
    "minibatch": "metrics/diagonal metrics/identity running_metric training",
    "minimisation": "arguments bounds certification entry preconditioners samples scipy_interface scipy_names",
    "optim": "checkpoints driving first_step groups optimizers",
    "options": "remedies",
    "ranks": "compare find modes oracle saving sharded sums",
    "sklearn": "checks classifier cross_validation logistic svm",
    "sums": "checks losses penalty",
}  # modules that no test imports, by package: packages that use them are tested


def test_every_module_is_imported_by_a_test_or_listed():
    """A new module has a test that imports it. A module that a test imports leaves the list, which only shrinks."""
    statement = re.compile(r"^ *(?:from (sanc[\w.]*) import (\([^)]*\)|.*)|import (sanc[\w.]*))", re.MULTILINE)
    names = set()
    for path in Path(__file__).parent.rglob("*.py"):
        for package_name, members, module in statement.findall(path.read_text(encoding="utf-8")):
            names |= {package_name or module, *(f"{package_name}.{member}" for member in re.findall(r"\w+", members))}
    imported = {files_by_name()[name] for name in names & files_by_name().keys()}
    untested = {str(name_of(path)) for path in modules() if path not in imported and path.name != "__init__.py"}
    listed = {f"{package}/{name}".lstrip("/") for package, names in UNIMPORTED.items() for name in names.split()}
    assert sorted(untested - listed) == [], "modules that no test imports"
    assert sorted(listed - untested) == [], "modules to delete from the list"
