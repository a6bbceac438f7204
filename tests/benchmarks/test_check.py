"""The tables of docs/results follow from the committed runs, and a number that does not is found."""

from __future__ import annotations

import re
from functools import cache

import pytest

from benchmarks import check, deterministic, readme
from benchmarks.reporting import read_runs

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
LARGE = ["estimators.md", "logistic-and-mlp.md", "networks.md", "networks/table.md", "../report.md", "sensitivity.md"]
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


@pytest.mark.parametrize(("intro", "wrong"), [
    ("It takes 12 f of $10^3$.", []), ("It takes 13 f.", ["in the first paragraph, from no run: 13"]),
    ("It takes 12 f.\n\nThat is 13 less.", []), ("It takes 7 f.", []),
])  # fmt: skip
def test_a_number_in_the_first_paragraph_that_follows_from_no_run_is_found(intro, wrong):
    """7 stands in a table without runs."""
    table = "| method | seconds |\n|---|---|\n| sanc | 7 |\n"
    page = PAGE.replace("# Page\n", f"# Page\n\n{intro}\n\n{table}")
    assert list(check.compare(page, [RECOMPUTED], ["seconds"]).wrong) == wrong


ROW = "| [9 problems](docs/results/a.md#part) | peer | 12 and 30 × |"


@pytest.mark.parametrize(("table", "wrong"), [
    (ROW, []), ("", [f"not in the table: {ROW}"]), (f"{ROW}\n{ROW.replace('a.md', 'b.md')}", []),
    (ROW.replace("12", "13"), [f"not in the table: {ROW}", f"from no run: {ROW.replace('12', '13')}"]),
    (f"{ROW}\n{ROW.replace('9', '8')}", [f"from no run: {ROW.replace('9', '8')}"]),
])  # fmt: skip
def test_the_readme_has_the_rows_of_a_page_and_no_others(table, wrong):
    found = check.check_readme(f"Text.\n\n{table}\n", {"a.md": [ROW]})
    assert list(found.wrong) == wrong and found.agree == (ROW in table)


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_follow_from_its_runs(name):
    found = check.check_page(name, check.PAGES[name]())
    assert found.wrong == () and found.agree


@cache
def rows(page):
    return readme.ROWS[page]()


def test_every_result_in_the_readme_follows_from_the_runs():
    text = (check.ROOT / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \[.+$", text.split("## Measured")[1].split("\n![")[0], re.MULTILINE)
    found = check.check_readme(text, {page: rows(page) for page in readme.ROWS})
    assert found == check.Comparison(len(table), 0, ()) and len(table) >= 10


@pytest.mark.parametrize("page", readme.ROWS)
def test_every_digit_that_changes_in_a_row_of_the_readme_is_found(page):
    text = (check.ROOT / "README.md").read_text(encoding="utf-8")
    digits = 0
    for row in rows(page):
        link = range(row.index("]("), row.index(") |"))
        for place in [match.start() for match in re.finditer(r"\d", row) if match.start() not in link]:
            changed = row[:place] + str((int(row[place]) + 1) % 10) + row[place + 1 :]
            assert check.check_readme(text.replace(row, changed), {page: rows(page)}).wrong, changed
            digits += 1
        assert check.check_readme(text.replace(f"{row}\n", ""), {page: rows(page)}).wrong
    assert digits >= 2 * len(rows(page))


def test_sentences_that_other_pages_repeat_follow_from_the_runs():
    texts = {name: (check.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md",
                                                                                "docs/robust.md")}  # fmt: skip
    runs = read_runs(check.RESULTS / "deterministic.jsonl.xz")
    assert all(deterministic.stuck_in_words(runs) in text for text in texts.values())
    page = (check.RESULTS / "networks.md").read_text(encoding="utf-8")
    parts = re.search(r"^\| no-escape .*\| +(\d+ of \d+) \|$", page, re.MULTILINE)
    assert parts and f"where {parts[1]} runs have the same losses" in texts["docs/robust.md"]


def test_every_page_of_results_with_a_table_is_checked():
    pages = {str(page.relative_to(check.RESULTS)) for page in check.RESULTS.rglob("*.md")}
    others = {"../integrations.md", "../report.md"}
    assert (pages - {"README.md", "data.md"}) | others == {*check.PAGES, *check.WITHOUT_RUNS}


def test_the_command_prints_a_line_for_each_page(capsys):
    assert check.main(["commands.md"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "commands.md: 1 agree, 0 without runs, 0 differ",
        "README.md: 0 agree, 0 without runs, 0 differ",
    ]
    with pytest.raises(SystemExit):
        check.main(["unknown.md"])
