"""Check and make a release: `python tools/release.py check`, `date`, `tag` and `tagged TAG`; see CONTRIBUTING.md.

check
    Build the wheel and the source archive into dist/, install each into an empty environment, and run every Python
    block of README.md there. With ``--offline`` the environments see the packages of the present one.
date
    Write today's date beside the version in CHANGELOG.md and CITATION.cff.
tag
    Tag the present commit with the version, if it is dated and nothing is uncommitted.
tagged TAG
    Check that a tag is that of the version, and that the version is dated.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = (".png", ".svg", ".jpg")
RUN_BLOCKS = """
import re, sys
from pathlib import Path
import sanc
print("sanc", sanc.__version__, "from", Path(sanc.__file__).parent)
for code in re.findall(r"^```python\\n(.*?)^```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.S | re.M):
    exec(compile(code, "README.md", "exec"), {})
"""


def version() -> str:
    """Return the version of the package."""
    return re.findall(r'^__version__ = "(.+)"', _text("src/sanc/_version.py"), re.M)[0]


def dated() -> str | None:
    """Return the date of the version, if CHANGELOG.md and CITATION.cff have the same one."""
    heading = re.search(rf"^## {re.escape(version())} – (\S+)$", _text("CHANGELOG.md"), re.M)
    cited = re.search(r"^date-released: (\S+)$", _text("CITATION.cff"), re.M)
    same = heading and cited and heading[1] == cited[1] and re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1])
    return heading[1] if heading and same else None


def date(today: str) -> None:
    """Write the date of the release into CHANGELOG.md and CITATION.cff."""
    changelog = re.sub(rf"^(## {re.escape(version())}) – .*$", rf"\1 – {today}", _text("CHANGELOG.md"), flags=re.M)
    (ROOT / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    citation = re.sub(r"^date-released: .*\n", "", _text("CITATION.cff"), flags=re.M)
    citation = re.sub(r"^(version: .*)$", rf"\1\ndate-released: {today}", citation, flags=re.M)
    (ROOT / "CITATION.cff").write_text(citation, encoding="utf-8")


def require_tag(name: str) -> None:
    """End with a message unless `name` is the tag of the version, and the version is dated."""
    if name != f"v{version()}":
        raise SystemExit(f"The tag {name} is not that of version {version()}: tag v{version()}.")
    if dated() is None:
        raise SystemExit(f"Version {version()} has no date: run python tools/release.py date, and commit.")


def tag() -> None:
    """Tag the present commit."""
    require_tag(f"v{version()}")
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout:
        raise SystemExit("There are changes that are not committed: commit them first.")
    subprocess.run(["git", "tag", "-a", f"v{version()}", "-m", f"sanc {version()}"], cwd=ROOT, check=True)
    print(f"Tagged v{version()}. To publish it: git push origin v{version()}")


def check(*, offline: bool) -> None:
    """Build both archives, and run the README in an environment of each."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--outdir", str(dist), *(["--no-isolation"] if offline else [])]
    subprocess.run([*build, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        _check_contents(wheel.name, archive.namelist())
    with tarfile.open(source) as archive:
        _check_contents(source.name, archive.getnames())
    for archive_path in (wheel, source):
        _check_installed(archive_path, offline=offline)
    print(f"Both archives of version {version()} install, and the blocks of README.md run with each.")


def _check_contents(name: str, files: list[str]) -> None:
    """End with a message if an archive lacks what it needs, or holds pictures of results."""
    pictures = [file for file in files if file.endswith(PICTURES) and "results" in file]
    if pictures:
        raise SystemExit(f"{name} holds pictures of results: exclude {', '.join(pictures[:3])} in MANIFEST.in.")
    for needed in ("sanc/py.typed", "sanc/lab/page.html", "LICENSE"):
        if not any(file.endswith(needed) for file in files):
            raise SystemExit(f"{name} lacks {needed}: see MANIFEST.in and package-data in pyproject.toml.")


def _check_installed(archive: Path, *, offline: bool) -> None:
    """Install an archive into an empty environment, and run the README there, outside the repository."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "environment"
        venv.create(place, with_pip=True)
        scripts = "Scripts" if os.name == "nt" else "bin"
        python = str(place / scripts / "python")
        options = ["--constraint", str(ROOT / "constraints.txt"), "--prefer-binary"]
        if offline:
            # The setuptools of a new environment may be older than the one that pyproject.toml requires.
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
            purelib = subprocess.run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            present = sysconfig.get_path("purelib")
            (Path(purelib.stdout.strip()) / "present.pth").write_text(f"{present}\n", encoding="utf-8")
            options = ["--no-deps", "--no-build-isolation", "--force-reinstall"]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        install = [python, "-m", "pip", "install", "--quiet", *options, f"{archive}[sklearn]"]
        subprocess.run(install, check=True, env=clean)
        script = Path(folder) / "blocks.py"
        script.write_text(RUN_BLOCKS, encoding="utf-8")
        subprocess.run([python, str(script), str(ROOT / "README.md")], check=True, cwd=folder, env=clean)
        said = subprocess.run([place / scripts / "sanc", "--version"], check=True, env=clean, capture_output=True)
        if version() not in said.stdout.decode():
            raise SystemExit(f"sanc --version of {archive.name} printed {said.stdout.decode()!r}.")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "date", "tag", "tagged"))
    parser.add_argument("tag", nargs="?", default="")
    parser.add_argument("--offline", action="store_true")
    chosen = parser.parse_args()
    if chosen.command == "check":
        check(offline=chosen.offline)
    elif chosen.command == "date":
        date(datetime.datetime.now(datetime.UTC).date().isoformat())
    elif chosen.command == "tag":
        tag()
    else:
        require_tag(chosen.tag)


if __name__ == "__main__":
    main()
