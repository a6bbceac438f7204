"""Every Python block of the README and the documentation runs, and says what the package does."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import tempfile
from pathlib import Path

import pytest

import sanc

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORKS = ["lightning", "accelerate", "transformers", "skorch", "tensorboard"]
ELSEWHERE = {"integrations.md", "distributed.md"}  # the one below, the other in tests/ranks
MODULES = ["sanc.autograd.batches", "sanc.sums.losses", "sanc.theory"]


def blocks(page):
    text = page if isinstance(page, str) else page.read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.name)
def test_code_on_a_page_runs_in_order(page, capsys):
    namespace = {}
    for number, code in enumerate(blocks(page)):
        exec(compile(code, f"{page.name} block {number}", "exec"), namespace)


def sections():
    """Cut the page on frameworks at its headings; what comes before the first belongs to all."""
    first, *others = re.split(r"^## ", (ROOT / "docs" / "integrations.md").read_text(), flags=re.MULTILINE)
    return {text.splitlines()[0]: first + text for text in others}


@pytest.mark.parametrize("name", sections())
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_code_for_a_framework_runs_where_it_is_installed(name, capsys, monkeypatch, tmp_path):
    if name.lower() in FRAMEWORKS:
        pytest.importorskip(name.lower(), reason=f"{name.lower()} is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace = {"__name__": "page"}
    for number, code in enumerate(blocks(sections()[name])):
        exec(compile(code, f"{name} block {number}", "exec"), namespace)


def test_the_readme_keeps_its_promises():
    text = (ROOT / "README.md").read_text()
    examples = blocks(ROOT / "README.md")
    lines = [len([line for line in code.splitlines() if line.strip()]) for code in examples]
    assert len(examples) >= 4 and lines[0] <= 15 and lines[1] <= 6
    assert "make test" in text and "make demo" in text and "When not to use this" in text


def test_the_error_on_the_page_is_the_error(capsys):
    namespace = {}
    for code in blocks(ROOT / "docs" / "guide.md"):
        exec(code, namespace)
    out = capsys.readouterr().out
    assert "option 'sigma_0' (= 1.0) is not known: did you mean 'sigma0'?" in out


def test_the_table_of_systems_is_what_the_command_prints():
    spec = importlib.util.spec_from_file_location("systems", ROOT / "tools" / "systems.py")
    systems = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(systems)
    page = (ROOT / "README.md").read_text()
    assert systems.written(page) == page
    assert "| Linux" in systems.table() and "failed" not in systems.table()


def test_every_link_between_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("thing", [sanc.minimize, sanc.certificate, sanc.scipy_method])
def test_examples_of_functions(thing):
    runner = doctest.DocTestRunner()
    tests = doctest.DocTestFinder().find(thing, globs={})
    assert sum(len(test.examples) for test in tests) > 0
    assert all(runner.run(test).failed == 0 for test in tests)


def test_every_public_name_is_documented():
    for name in sanc.__all__:
        thing = getattr(sanc, name)
        if callable(thing):
            assert thing.__doc__ and len(thing.__doc__) > 20, name


def test_the_changelog_names_the_version():
    assert f"## {sanc.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {sanc.__version__}" in (ROOT / "CITATION.cff").read_text()
