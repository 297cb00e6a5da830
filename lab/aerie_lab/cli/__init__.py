"""The command line `aerie-lab`: thin over `Lab` and `Faults`. Every refusal is one sentence and exit status 1."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Entry point."""
    # Ctrl-C may come while the imports are still running, in which Python may lose it, or tell it as another error.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        from aerie_lab.cli.run import run

        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        sys.exit(run())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
