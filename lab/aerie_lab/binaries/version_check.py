"""Asks a binary which version it is: a file name proves nothing, and a wrong version fails later, far from its cause.

Not guaranteed: that the binary is honest, or was built from the pinned sources.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

# Three numbers, not inside a word: v1.36.4, 3.6.14, <commit>/1.39.3/Clean.
_VERSION_PATTERN = re.compile(r"(?<![\w.])v?(\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?)")
_VERSION_TIMEOUT_SECONDS = 30.0


def find_version_problem(
    binary: Path, arguments: tuple[str, ...] | None, version: str, timeout_seconds: float = _VERSION_TIMEOUT_SECONDS
) -> str | None:
    """Return why `binary` is not `version`, as the rest of a sentence about it; None if it is.

    Without `arguments` the version is not checked: the file only has to be executable.
    """
    try:
        state = binary.stat()
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if arguments is None:
        return None if binary.is_file() and os.access(binary, os.X_OK) else "cannot be run (it is not an executable file)"
    reported_version, problem = _read_version(binary, arguments, state.st_mtime_ns, state.st_size, timeout_seconds)
    if problem:
        return problem
    return None if reported_version == version else f"is version {reported_version}"


@functools.cache
def _read_version(binary: Path, arguments: tuple[str, ...], mtime: int, size: int, timeout_seconds: float) -> tuple[str, str]:
    """Return the version, or why it is unknown. `mtime` and `size` are cache keys: a changed file is run again."""
    del mtime, size
    try:
        done = subprocess.run(
            [binary, *arguments],
            cwd="/",
            # kubectl and helm read a kubeconfig even for this, and a broken one would make them fail.
            env={**os.environ, "KUBECONFIG": os.devnull},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
        )
    except OSError as error:
        return "", f"cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return "", f"does not report its version within {timeout_seconds:.0f} s"
    match = _VERSION_PATTERN.search(f"{done.stdout}\n{done.stderr}")
    return (match[1], "") if match else ("", "reports no version")
