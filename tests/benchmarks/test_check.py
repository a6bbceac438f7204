"""The tables of docs/results follow from the committed runs, and a number that does not is found."""

from __future__ import annotations

import re

import pytest

from benchmarks import check

PAGE = """# Page

| method | f | f ratio | f ratio |
|---|---:|---:|---:|
| sanc | 12 | 1 | 2 |
| peer | 30 | 2.50 | 3 |

sanc solves 2 of 2.
"""
RECOMPUTED = """
| method | solved | f | f ratio | f ratio |
|---|---|---|---|---|
| peer | 1 | 30 | 2.50 | 3 |
| sanc | 2 | 12 | 1 | 2 |
"""
LARGE = ["estimators.md", "logistic-and-mlp.md", "networks.md", "networks/table.md", "sensitivity.md"]
PAGES = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in check.PAGES]


@pytest.mark.parametrize(("old", "new", "wrong"), [
    ("", "", []), ("| 12 |", "| 11 |", ["sanc | 11 | 1 | 2"]), ("2.50 | 3", "3 | 2.50", ["peer | 30 | 3 | 2.50"]),
    ("| f |", "| g |", ["no recomputed table has the columns method, g, f ratio, f ratio"]),
    ("| sanc | 12 | 1 | 2 |", "| peer | 30 | 2.50 | 3 |", ["peer | 30 | 2.50 | 3"]),  # the same row twice
    ("2 of 2", "1 of 2", ["not on the page: sanc solves 2 of 2."]), ("| peer | 30 | 2.50 | 3 |\n", "", []),
])  # fmt: skip
def test_a_number_that_does_not_follow_from_the_runs_is_found(old, new, wrong):
    """A page may leave out rows and columns; the second column of a name is not the first."""
    found = check.compare(PAGE.replace(old, new), [RECOMPUTED, "sanc solves 2 of 2."])
    assert list(found.wrong) == wrong and found.agree == 2 - bool(wrong)


def test_a_table_without_runs_is_counted():
    assert check.compare(PAGE, [], ["f ratio"]) == check.Comparison(0, 1, ())


def test_a_number_of_the_readme_that_does_not_follow_is_found():
    readme = "| [9 problems](docs/results/a.md#part) | peer | 12 and 30 × |\n| [text](docs/b.md) | peer | 7 |\n"
    assert check.check_readme(readme, {"a.md": [RECOMPUTED, "9 problems"]}) == check.Comparison(1, 0, ())
    assert check.check_readme(readme, {"a.md": ["9 problems, 12"]}).wrong == (
        "9 problems: 30 not in what a.md rests on",
    )


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_follow_from_its_runs(name):
    found = check.check_page(name, check.PAGES[name]())
    assert found.wrong == () and found.agree


@pytest.mark.parametrize("names", [
    [name for name in check.PAGES if name not in LARGE], pytest.param(list(check.PAGES), marks=pytest.mark.slow),
], ids=["small", "all"])  # fmt: skip
def test_the_results_in_the_readme_follow_from_the_runs(names):
    text = (check.ROOT / "README.md").read_text(encoding="utf-8")
    found = check.check_readme(text, {name: check.PAGES[name]() for name in names})
    rows = re.findall(r"^\| \[[^\]]+\]\(docs/results/([\w-]+\.md)", text, re.MULTILINE)
    assert found.wrong == () and found.agree + found.without == sum(name in names for name in rows) >= 5


def test_every_page_of_results_with_a_table_is_checked():
    pages = {str(page.relative_to(check.RESULTS)) for page in check.RESULTS.rglob("*.md")}
    assert (pages - {"README.md", "data.md"}) | {"../integrations.md"} == {*check.PAGES, *check.WITHOUT_RUNS}


def test_the_command_prints_a_line_for_each_page(capsys):
    assert check.main(["commands.md"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "commands.md: 1 agree, 0 without runs, 0 differ",
        "README.md: 0 agree, 0 without runs, 0 differ",
    ]
    with pytest.raises(SystemExit):
        check.main(["unknown.md"])
