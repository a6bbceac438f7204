"""``python -m sanc`` is the command ``sanc``."""

import sys

from sanc.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
