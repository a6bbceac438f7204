"""What a release needs: one version and one address everywhere, workflows that run, archives without pictures."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import packaging.requirements
import pytest

import sanc
from tool_modules import load_tool

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def loaded(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def workflow(name):
    if not (ROOT / ".github").is_dir():
        pytest.skip("the source archive has no workflows")
    found = loaded(f".github/workflows/{name}.yml")
    return found[True], found["jobs"]  # YAML 1.1 reads the key "on" as a boolean


def test_the_version_is_dated_and_the_same_everywhere():
    release = load_tool("release")
    assert release.version() == sanc.__version__
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", release.dated())
    assert loaded("conda/recipe.yaml")["context"]["version"] == sanc.__version__
    release.require_tag(f"v{sanc.__version__}")
    with pytest.raises(SystemExit, match=re.escape(f"tag v{sanc.__version__}")):
        release.require_tag("v9.9")


def test_a_version_without_a_date_is_not_tagged(tmp_path, monkeypatch):
    release = load_tool("release")
    for name in ("CHANGELOG.md", "CITATION.cff", "src/sanc/_version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(
            re.sub(r"(date-released: |– )\d{4}-\d\d-\d\d", r"\1unreleased", text), encoding="utf-8"
        )
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.dated() is None
    with pytest.raises(SystemExit, match="has no date"):
        release.require_tag(f"v{release.version()}")
    release.date("2030-01-02")
    assert release.dated() == "2030-01-02" and "## 0.1.0\n" in (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_addresses_are_in_one_place():
    known = load_tool("addresses").addresses()
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= known.keys()
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in [page for page in pages if page.name != "bibliography.md"]:  # that links to works of others
        for address in re.findall(
            r"https?://(?:github\.com|[\w-]+\.github\.io)/[^)\s>]+", page.read_text(encoding="utf-8")
        ):
            assert address.startswith(tuple(known.values())), f"{page.name}: {address}"


def test_links_of_the_package_page_lead_to_the_repository():
    source, text = PROJECT["urls"]["Source"], load_tool("addresses").readme()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    assert f"]({source}/blob/main/docs/choosing.md#when-not-to-use-this)" in text
    assert f"]({source}/raw/main/docs/pictures/saddle.png)" in text
    for target in targets:
        path = re.sub(rf"{source}/(blob|raw)/main/", "", target).partition("#")[0]
        assert path.startswith("https://") or (ROOT / path).exists(), target


def test_the_metadata_say_which_pythons_are_tested():
    names = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert names[0] == PROJECT["requires-python"].lstrip(">=")
    jobs = workflow("ci")[1]
    assert jobs["test"]["strategy"]["matrix"]["python"] == names
    assert jobs["newest"]["steps"][1]["with"]["python-version"] == names[-1]
    badge = f"python-{names[0]}%20to%20{names[-1]}-blue"
    assert badge in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_newest_versions_are_not_pinned():
    """That job takes what pip takes; the others have the pins, also for a Python whose wheels are newer."""
    recipe = re.search(r"^test-newest:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1]
    assert "install" in recipe and "constraints" not in recipe and "oldest" not in recipe
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    for python in [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]:
        named = []
        for line in pins:
            requirement = packaging.requirements.Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                named.append(requirement.name)
        assert len(named) == len(set(named)) and {"torch", "numpy", "scipy"} <= set(named), python


@pytest.mark.parametrize("name", ["ci", "publish"])
def test_workflows_run_commands_that_exist(name):
    _, jobs = workflow(name)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    steps = [step for job in jobs.values() for step in job["steps"]]
    made = [word for step in steps for word in re.findall(r"make ([\w-]+)", step.get("run", ""))]
    tools = [word for step in steps for word in re.findall(r"python (tools/\w+\.py)", step.get("run", ""))]
    assert made and set(made) <= set(targets) and all((ROOT / path).is_file() for path in tools)
    assert all("uses" in step or "run" in step for step in steps)


def test_both_processors_and_the_oldest_versions_are_tested():
    events, jobs = workflow("ci")
    assert {"push", "pull_request"} <= events.keys()
    assert {"ubuntu-latest", "ubuntu-24.04-arm"} <= set(jobs["test"]["strategy"]["matrix"]["os"])
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    assert all(
        word in commands
        for word in ("make test ", "make test-oldest", "make test-newest", "make docs", "release.py check")
    )


def test_publishing_needs_no_password():
    events, jobs = workflow("publish")
    assert events == {"push": {"tags": ["v*"]}}
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["environment"] == "release"
    assert "secrets." not in (ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8")


def test_the_conda_recipe_requires_what_the_package_requires():
    recipe = loaded("conda/recipe.yaml")
    theirs = {line.split()[0]: line.split()[1] for line in recipe["requirements"]["run"]}
    ours = dict(re.fullmatch(r"([\w-]+)(>=.+)", line).groups() for line in PROJECT["dependencies"])
    ours["pytorch"] = ours.pop("torch")
    assert {name: theirs[name] for name in ours} == ours
    assert recipe["context"]["python_min"] == PROJECT["requires-python"].lstrip(">=")
    assert recipe["about"]["license"] == PROJECT["license"]


def test_archives_with_pictures_of_results_are_rejected():
    release = load_tool("release")
    needed = ["sanc/py.typed", "sanc/lab/page.html", "LICENSE"]
    release._check_contents("a", needed)
    with pytest.raises(SystemExit, match=r"MANIFEST\.in"):
        release._check_contents("a", [*needed, "docs/results/figures/fig1.png"])
    with pytest.raises(SystemExit, match="LICENSE"):
        release._check_contents("a", needed[:2])


@pytest.mark.slow
def test_what_would_be_published_installs_and_runs_the_readme(tmp_path):
    """Both archives, each in an environment of its own that sees the packages of this one."""
    pytest.importorskip("build", reason="build is not installed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "release.py"), "check", "--offline"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sanc " + sanc.__version__) >= 2 and "Both archives" in done.stdout
    (archive,) = (ROOT / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
        page = opened.extractfile(f"sanc-{sanc.__version__}/PKG-INFO").read().decode()
    assert not any("results" in name and name.endswith(".png") for name in names)
    assert f"{PROJECT['urls']['Source']}/blob/main/docs/choosing.md" in page and "Project-URL: Documentation" in page
