"""Builds the programs that every lab needs, while set-up installs the Python packages: `python -m aerie_lab.binaries`.

Only the standard library, because no package is installed yet. Envoy and vLLM are not built here: they are Python packages.

Guarantees: it ends with the process that started it, at SIGTERM or SIGINT, and leaves no unfinished build then. A failure is one
line and status 1; what needs the program later builds it again, and reports why it cannot.
"""

from __future__ import annotations

import ctypes
import signal
import sys

from aerie_lab.binaries.families import FAMILIES
from aerie_lab.binaries.lookup import DEFAULT_FAMILY_NAMES, ensure_family
from aerie_lab.errors import BuildError

_PR_SET_PDEATHSIG = 1


def print_progress(line: str) -> None:
    print("lab:   " + line, flush=True)  # noqa: T201 - the progress of a command


def main() -> int:
    # SIGINT too: a shell starts background jobs with SIGINT ignored, and the build would continue.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        for name in DEFAULT_FAMILY_NAMES:
            if name in FAMILIES:
                ensure_family(name, print_progress)
    except BuildError as error:
        print_progress(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
