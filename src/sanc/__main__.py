"""The command ``sanc``, also ``python -m sanc``. Its subcommands need the extra ``sanc[lab]``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from sanc._version import __version__

_HELP = """Usage: sanc [--version | --help | COMMAND ...]

Second-order optimisation that does not stop at saddle points.

The commands demo, run, diagnose, reproduce, report and datasets need the extra lab: pip install 'sanc[lab]'."""


def main() -> int:
    """Run the command line and return the exit code; without the extra ``lab`` only the version and this help."""
    arguments = sys.argv[1:]
    if find_spec("typer") is None and arguments in (["--version"], ["--help"], []):
        print(f"sanc {__version__}" if arguments == ["--version"] else _HELP)
        return 0
    from sanc.lab.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
