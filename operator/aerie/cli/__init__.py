"""The command line `aerie`: the operator, and what can be known without one. Thin over the pure core.

Exit status: 0 all is well, 1 refused, 2 it could not be done (a wrong command line, a file that is no resource, a model that
cannot be read), 130 interrupted. What a program reads goes to standard output, what a person is told besides to standard error.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point."""
    try:
        # Imported here, because Ctrl-C may come while the imports are still running.
        from aerie.cli.run import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
