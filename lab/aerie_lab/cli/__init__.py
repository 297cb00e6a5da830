"""The command line `aerie-lab`: thin over `Lab` and `Faults`. Every refusal is one sentence and exit status 1."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point."""
    try:
        # Imported here, because Ctrl-C may come while the imports are still running.
        from aerie_lab.cli.run import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
