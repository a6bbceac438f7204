"""Every Python block of the README and the documentation runs, and says what the package does."""

from __future__ import annotations

import doctest
import html
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Protocol

import pytest
from markdown_it import MarkdownIt

import sanc
from sanc.minibatch.state import STATE_GROUPS
from tool_modules import load_tool

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
WRAPPED = {"table.md"}  # a benchmark prints it
MARKDOWN = MarkdownIt("commonmark").enable("table")
KATEX = ROOT / "docs" / "assets" / "katex"
FRAMEWORKS = ["lightning", "accelerate", "transformers", "skorch", "tensorboard"]
ELSEWHERE = {"integrations.md", "distributed.md"}  # the one below, the other in tests/ranks
SUMMARISED = {"sanc.extend.setting", "sanc.extend.Range"}  # their first line says what both parameters are
PUBLIC_MODULES = ["sanc.extend", "sanc.problems", "sanc.lab.watch", "sanc.sklearn"]
MODULES = ["sanc.autograd.batches", "sanc.leastsquares.networks", "sanc.sklearn", "sanc.sums.losses", "sanc.theory"]


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


def test_the_readme_is_short_and_has_its_sections():
    text = (ROOT / "README.md").read_text()
    examples = blocks(ROOT / "README.md")
    lines = [len([line for line in code.splitlines() if line.strip()]) for code in examples]
    assert len(examples) == 3 and lines[0] <= 15 and lines[1] <= 6 and lines[2] <= 8
    assert "make test" in text and "make demo" in text and "When not to use this" in text
    assert len(text.splitlines()) <= 120 and len(re.findall(r"^!\[", text, re.M)) == 1


def test_the_error_on_the_page_is_the_error(capsys):
    namespace = {}
    for code in blocks(ROOT / "docs" / "guide.md"):
        exec(code, namespace)
    out = capsys.readouterr().out
    assert "option 'sigma_0' (= 1.0) is not known: did you mean 'sigma0'?" in out


def test_the_table_of_systems_is_what_the_command_prints():
    systems = load_tool("systems")
    page = (ROOT / "README.md").read_text()
    assert systems.written(page) == page
    assert "| Linux" in systems.table() and "failed" not in systems.table()


NUMBER = r"(?<![\w.])\d+(?:[.,]\d+)*(?!\w)"


def section(text, anchor):
    """The part of a page under a heading with its subsections; without an anchor, what precedes the second heading."""
    parts = re.split(r"^(#+) (.+)$", text, flags=re.MULTILINE)
    found, depth = "", 0
    for level, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if depth and (not anchor or len(level) <= depth):
            break
        if depth or not anchor or anchor in anchors(f"# {name}"):
            found, depth = found + body, depth or len(level)
    return found


def unfounded_numbers(page, read):
    """The numbers in the table of results of a page that are missing in the section to which their row links."""
    rows = re.findall(r"^\| \[([^\]]+)\]\(([\w./-]+)(?:#([\w-]+))?\) \|[^|]+\| (.+) \|$", page, re.MULTILINE)
    wrong = [row for row in rows if not re.search(NUMBER, row[3])]
    for name, target, anchor, result in rows:
        known = re.findall(NUMBER, section(read(target), anchor))
        wrong += [(name, number) for number in re.findall(NUMBER, f"{name} {result}") if number not in known]
    return rows, wrong


def test_the_results_in_the_readme_are_those_of_the_pages():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows, wrong = unfounded_numbers(text, lambda target: (ROOT / target).read_text(encoding="utf-8"))
    table = text.split("## Measured")[1].split("\n![")[0]
    assert len(rows) == len(re.findall(r"^\| \[", table, re.MULTILINE)) >= 10
    assert wrong == []


@pytest.mark.parametrize(("readme", "page", "wrong"), [
    ("0.35 × the work", "0.35 times", []), ("0.35 × the work", "0.354 times", ["0.35"]),
    ("0.36 × the work", "0.35 times", ["0.36"]), ("12 to 79 %", "12 to 60 % (79 %)", []),
    ("3 of 4 solved", "3 of 4\n\n## More\n\n5", []), ("5 of 4 solved", "3 of 4\n\n## More\n\n5", ["5"]),
])  # fmt: skip
def test_a_number_that_changed_on_one_side_is_found(readme, page, wrong):
    found = unfounded_numbers(f"| [tasks](a.md) | b | {readme} |", lambda target: f"# Page\n\n{page}\n")[1]
    assert [number for _, number in found] == wrong
    found = unfounded_numbers(f"| [tasks](a.md#more) | b | {readme} |", lambda target: f"# Page\n\n{page}\n")[1]
    assert [number for _, number in found] == [
        number for number in re.findall(NUMBER, readme) if "## More" not in page or number != "5"
    ]


def test_every_page_of_results_names_the_commit_of_its_runs():
    folder = ROOT / "docs" / "results"
    overview = section((folder / "README.md").read_text(encoding="utf-8"), "runs-and-commits")
    for page in sorted(folder.glob("*.md")):
        if page.name != "README.md":
            assert re.search(rf"^\|.*\]\({page.name}\).*\|.* [0-9a-f]{{7}}\b.*\|$", overview, re.MULTILINE), page.name
            text = page.read_text(encoding="utf-8")
            assert re.search(r"commit [0-9a-f]{7}\b|\]\(README\.md#runs-and-commits\)", text), page.name


def test_the_tables_of_the_report_are_those_of_the_pages():
    """Every number in a table of the report is in a section that the line below the table links to."""
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    tables = re.findall(r"((?:^\|.+\n)+)\n(.+)$", text, re.MULTILINE)
    assert len(tables) >= 6 and all(source.startswith("Source: ") for _, source in tables)
    for table, source in tables:
        links = re.findall(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", source)
        known = {
            number
            for page, anchor in links
            for number in re.findall(NUMBER, section((ROOT / "docs" / page).read_text(encoding="utf-8"), anchor))
        }
        assert set(re.findall(NUMBER, table)) <= known, source


def test_pages_agree_on_how_often_unseen_problems_were_looked_at():
    """The page on networks lists the sets of runs that were seen."""
    pages = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("report.md", "results/README.md")}
    found = {name: re.findall(r"looked at at least (\w+) times", text) for name, text in pages.items()}
    networks = (ROOT / "docs" / "results" / "networks.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"looked at at least (\w+) times", networks)
    assert set(map(tuple, found.values())) == {(said,)}
    assert len(re.findall(r"\b0\.\d{3} \((?:commit )?[0-9a-f]{7}\b", networks)) == 11 and said == "eleven"
    for others in (r"bounds.{0,30}at least three times", r"87 .{0,90}three times"):
        assert all(re.search(others, text) for text in pages.values())


def test_every_work_in_the_bibliography_has_a_year_and_a_link():
    """Works that the documentation cites by author and year are listed."""
    text = (ROOT / "docs" / "bibliography.md").read_text(encoding="utf-8")
    works = re.findall(r"^- (.+)$", text, re.MULTILINE)
    assert all(re.search(r"\((?:19|20)\d\d\)\. ", work) for work in works)
    assert [work[:10] for work in works if "](https://" not in work] == ["D. Ruppert"]  # a report on paper
    cited = r"([A-Z]\w+)(?: et al\.| and others|(?:,? (?:and )?[A-Z]\w+)*) \(?((?:19|20)\d\d)[)\];]"
    names = [("method", 5), ("robust", 8), ("constants", 2), ("diagnosis", 1), ("extending", 1), ("report", 20)]
    for name, least in names:
        found = re.findall(cited, (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
        assert len(found) >= least, name
        for author, year in found:
            assert any(author in work and f"({year})" in work for work in works), f"{name}.md: {author} {year}"


def test_every_link_between_pages_leads_somewhere():
    for page in TEXTS:
        for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]+)?\)", page.read_text()):
            if target.startswith("http") or f"{page.parent.name}/{target}" == "docs/contributing.md":
                continue
            goal = page.parent / target if target else page
            if target.endswith(".png") and not (ROOT / "docs" / "results" / "figures").is_dir():
                continue  # the source archive has no pictures of results
            assert goal.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor[1:] in anchors(goal), f"{page.name} links to {target}{anchor}"


def anchors(page):
    """The headings of a page or a text, as Markdown makes anchors of them."""
    text = page if isinstance(page, str) else page.read_text()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_paragraphs(text):
    """The first lines of paragraphs and list items that continue on a second line; references to code (:::) may."""
    body = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.S | re.M)
    lines = body.splitlines()
    spans = [token.map for token in MARKDOWN.parse(body) if token.type == "paragraph_open"]
    return [lines[first] for first, end in spans if end - first > 1 and not lines[first].startswith(":::")]


@pytest.mark.parametrize(
    "page", [page for page in TEXTS if page.name not in WRAPPED], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_paragraph_is_one_line(page):
    assert broken_paragraphs(page.read_text()) == []


@pytest.mark.parametrize(("text", "broken"), [
    ("One line.\n\nAnother.\n", 0), ("One\nparagraph.\n", 1), ("- an\n  item\n- another\n", 1),
    ("- a\n\n  b\n  c\n", 1), ("1. one\n2. two\n   and more\n", 1), ("> a\n> b\n", 1), ("```\na\nb\n```\n", 0),
    ("| a | b |\n|---|---|\n| 1 | 2 |\n", 0), ("<!-- a\nb -->\n", 0), ("<div>\na\n</div>\n", 0),
    ("---\na: 1\nb: 2\n---\n\nText.\n", 0), ("# Title\nText.\n", 0), ("::: sanc.x\n    options:\n      x: 1\n", 0),
])  # fmt: skip
def test_broken_paragraphs_are_found(text, broken):
    assert len(broken_paragraphs(text)) == broken


def formulas(text):
    """The formulas of a page, those in lines of their own first."""
    prose = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.S | re.M)
    pattern = r"\$\$(.+?)\$\$"
    return re.findall(pattern, prose) + re.findall(r"\$([^$\n]+)\$", re.sub(pattern, "", prose))


def test_formulas_are_what_both_the_site_and_github_render():
    """GitHub takes \\, and \\{ and \\_ for escapes of Markdown, and both take a | for the end of a cell."""
    for page in TEXTS:
        for formula in formulas(page.read_text()):
            assert not re.search(r"\\[,;:!{}|_]|[|*]", formula), f"{page.name}: {formula}"
            assert formula == formula.strip() and formula.count("{") == formula.count("}"), f"{page.name}: {formula}"


def test_katex_knows_every_formula():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    found = [formula for page in TEXTS for formula in formulas(page.read_text())]
    program = "const katex = require(process.argv[1]); for (const f of JSON.parse(require('fs').readFileSync(0)))"
    program += " katex.renderToString(f, {throwOnError: true, strict: 'error'})"
    done = subprocess.run(
        [node, "-e", program, str(KATEX / "katex.min.js")], input=json.dumps(found), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_formulas_need_no_network():
    """What renders them lies in docs/, with its licence, and so in the source archive."""
    config = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"^extra_(?:css|javascript): \[(.*?)\]", config, re.M)
    files = [name.strip() for names in named for name in names.split(",")]
    assert {"assets/katex/katex.min.css", "assets/katex/katex.min.js", "assets/formulas.js"} <= set(files)
    assert all((ROOT / "docs" / name).is_file() for name in files)
    style = (KATEX / "katex.min.css").read_text()
    fonts = re.findall(r"url\(([^)]+\.woff2)\)", style)
    assert len(fonts) == 20 and all((KATEX / font).is_file() for font in fonts)
    assert "//" not in re.sub(r"/\*.*?\*/", "", style, flags=re.S) and "MIT" in (KATEX / "LICENSE").read_text()
    manifest = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert "graft docs" in manifest and not any(
        "docs" in line and "docs/results" not in line for line in manifest if "exclude" in line or "prune" in line
    )


@pytest.mark.parametrize(("wish", "target"), [
    ("train", "start/train.md"), ("minimise", "start/minimise.md"), ("fit", "start/fit.md"),
    ("resume", "guide.md#checkpoints"), ("resume", "start/minimise.md#stop-and-resume"),
    ("several GPUs", "distributed.md"), ("record", "guide.md#what-happened-the-record"),
])  # fmt: skip
def test_the_start_page_leads_there_in_one_click(wish, target):
    """A row of the table says what one wants, and there is code where it leads to, under that heading or the next."""
    rows = [row.split("|")[1:3] for row in (ROOT / "docs" / "index.md").read_text().splitlines() if row.startswith("|")]
    assert any(wish in what and f"]({target})" in where for what, where in rows)
    page, _, anchor = target.partition("#")
    parts = re.split(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    names = [re.sub(r"[^a-z -]", "", name.lower()).replace(" ", "-") for name in parts[1::2]]
    at = names.index(anchor) if anchor else 0
    assert "```python" in "".join(parts[2::2][at : at + 2])


def test_the_navigation_holds_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    made = {"changelog.md", "contributing.md", "reference/command-line.md"}
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert named - made == pages


def test_the_reference_has_every_public_name():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: sanc\.([\w.]+)$", text, re.MULTILINE))
    modules = {name for name in sanc.__all__ if inspect.ismodule(getattr(sanc, name))}
    assert set(sanc.__all__) - modules - {"__version__"} <= shown and "theory" in shown
    ranges = {name for name in sanc.extend.__all__ if isinstance(getattr(sanc.extend, name), sanc.extend.Range)}
    assert all(f"`{name}`" in text for name in ranges)
    for path in PUBLIC_MODULES:
        names = set(importlib.import_module(path).__all__) - ranges
        assert {f"{path.removeprefix('sanc.')}.{name}" for name in names} <= shown
    assert modules <= {"errors", "theory"} | {path.removeprefix("sanc.") for path in PUBLIC_MODULES}
    for name in shown:
        pkgutil.resolve_name(f"sanc.{name}")


def test_what_pages_import_is_in_the_reference():
    shown = {name for name, _ in public_objects()}
    for page in PAGES:
        for module, names in re.findall(r"^from (sanc[.\w]*) import (.+)$", "\n".join(blocks(page)), re.M):
            missing = {f"{module}.{name}" for name in names.split(", ")} - shown
            assert not missing, f"{page.name}: {missing}"


def test_listed_members_of_the_reference_have_docstrings():
    """Other members without one are not shown; these would be an empty entry."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for name, members in re.findall(r"^::: (sanc\.\w+)\n.*\n +inherited_members: \[(.*)\]", page.read_text(), re.M):
            for member in members.split(", "):
                thing = getattr(pkgutil.resolve_name(name), member)
                assert len(inspect.getdoc(thing) or "") > 20, f"{name}.{member}"


def test_the_attributes_of_a_state_are_its_fields():
    """Also those of its parts, which the state names too."""
    text = inspect.getdoc(sanc.extend.MinibatchState)
    for kind in (sanc.extend.MinibatchState, *STATE_GROUPS.values()):
        names = [item.name for item in fields(kind)]
        assert re.findall(r"^(\w+) : ", inspect.getdoc(kind), re.MULTILINE) == names
        assert kind is sanc.extend.MinibatchState or all(f"`{name}`" in text for name in names)


def test_signatures_show_defaults_and_what_can_be_passed():
    griffe = pytest.importorskip("griffe", reason="the extra docs is not installed")
    extensions = griffe.load_extensions(load_tool("docstrings").PreparedDocstrings)
    package = griffe.load("sanc", search_paths=[ROOT / "src"], extensions=extensions)
    noise = package["minibatch.settings.Minibatch"].parameters["noise"]
    assert float(str(noise.default)) == sanc.Minibatch().noise
    shown = [parameter.name for parameter in package["least_squares"].final_target.parameters]
    assert "others" not in shown and "others" in inspect.signature(sanc.least_squares).parameters


def test_names_in_docstrings_link_to_their_entries():
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    with_links = load_tool("docstrings").with_links
    text = "See `sanc.Method`, ``sanc.Method`` and `sanc.nothing`."
    assert with_links(text, {"sanc.Method"}) == text.replace("See `sanc.Method`", "See [`sanc.Method`][sanc.Method]")


def test_the_link_checker_finds_what_is_broken(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<a href="sub/a.html#here">a</a><img src="no.png"><a href="#gone">b</a>')
    (tmp_path / "sub" / "a.html").write_text(
        '<h1 id="here">x</h1><a href="../index.html">c</a><a href="https://x.y">d</a>'
    )
    broken = load_tool("links").broken(tmp_path)
    assert len(broken) == 2 and "no.png is not there" in broken[0] and "#gone has no such anchor" in broken[1]


def test_the_pictures_can_be_drawn_again(tmp_path):
    load_tool("pictures").main(tmp_path)
    names = {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    shown = "\n".join(page.read_text() for page in PAGES)
    assert all(f"pictures/{name}" in shown for name in names)


@pytest.mark.slow
def test_the_site_builds_with_warnings_as_errors(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_tool("links").broken(tmp_path) == []
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r"<(script|link)(?![^>]*canonical)[^>]* (src|href)=\"?(https?:)?//", page.read_text()), (
            page
        )
    assert (tmp_path / "assets" / "katex" / "fonts" / "KaTeX_Main-Regular.woff2").is_file()
    assert 'class="arithmatex"' in (tmp_path / "method.html").read_text()
    assert not re.search(r":math:|\.\. math::", (tmp_path / "reference" / "theory.html").read_text())
    entries, described = reference_entries(tmp_path), 0
    for name, thing in public_objects():
        assert name in entries
        if not callable(thing) or name in SUMMARISED:
            continue
        if isinstance(thing, type) and issubclass(thing, BaseException | Enum | Protocol | dict):
            continue
        signature, listed = entries[name]
        for parameter in inspect.signature(thing).parameters.values():
            if parameter.annotation == "Never":  # which exists for an error text
                bare = rf"\*{parameter.name}\b(?!:)"  # annotations stand in the signatures of overloads alone
                assert not re.search(bare, signature), f"{name}: {parameter.name} accepts nothing"
            else:
                if not (isinstance(thing, type) and issubclass(thing, tuple)):  # whose page has the fields
                    assert re.search(rf"\b{parameter.name}\b", signature), f"{name}: {parameter.name} in the signature"
                assert parameter.name in listed, f"{name}: {parameter.name} in the list of parameters"
                described += 1
        assert not re.search(r"\bsetting\(|\bfield\(", signature), f"{name} shows no default"
    assert described > 250
    for name in ("SANC", "SCR", "ARC", "CR", "CRM", "NCD"):
        for member in ("step", "train", "eval", "record", "state_dict", "load_state_dict"):
            assert f"sanc.{name}.{member}" in entries
        assert {"closure", "hessian", "objective"} <= entries[f"sanc.{name}.step"][1]
    optimisers = (tmp_path / "reference" / "optimisers.html").read_text()
    assert re.search(r'href="settings\.html#sanc\.Method"[^>]*>\s*<code>sanc\.Method</code>', optimisers)


def reference_entries(site):
    """The signature and the described parameters of every entry of the reference."""
    found = {}
    for page in (site / "reference").glob("*.html"):
        parts = re.split(r'<h\d id="(sanc\.[\w.]+)"', page.read_text())
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            signatures = re.findall(r"doc-signature.*?</code>", body, re.S)  # also those of overloads
            listed = re.findall(r"<b>(<code>.*?</code>)</b>", body, re.S)
            names = {name.lstrip("*") for entry in listed for name in plain(entry).split(", ")}
            found[name] = (plain(" ".join(signatures)), names)
    return found


def plain(markup):
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def public_objects():
    """The classes and functions of the reference, by name."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in re.findall(r"^::: (sanc\.[\w.]+)$", text, re.MULTILINE):
        thing = pkgutil.resolve_name(name)
        if inspect.ismodule(thing):
            yield from ((f"{name}.{part}", getattr(thing, part)) for part in thing.__all__)
        else:
            yield name, thing


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("thing", [sanc.minimize, sanc.argmin, sanc.certificate, sanc.diagnose, sanc.scipy_method])
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


def test_the_method_lists_every_decision_that_the_code_cites():
    listed = re.findall(r"^\| (D\d+) \|", (ROOT / "docs" / "method.md").read_text(), re.MULTILINE)
    assert listed == [f"D{number}" for number in range(1, len(listed) + 1)]
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"\bD\d+\b", source)) <= set(listed)


def test_the_changelog_is_short():
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert len(versions) >= 2
    assert all(len(version.splitlines()) <= 40 for version in versions)


def test_the_changelog_names_the_version():
    assert f"## {sanc.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {sanc.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_the_numbers_that_the_iteration_cites_are_items_of_the_method():
    section = (ROOT / "docs" / "method.md").read_text(encoding="utf-8").split("## One iteration")[1].split("\n## ")[0]
    items = re.findall(r"^- \*\*(2\.\d) ", section, re.MULTILINE)
    assert items == [f"2.{number}" for number in range(1, 8)]
    cited = re.findall(r"2\.\d(?=[ ,:)])", (ROOT / "src/sanc/core/iteration.py").read_text(encoding="utf-8"))
    assert set(cited) == set(items)
