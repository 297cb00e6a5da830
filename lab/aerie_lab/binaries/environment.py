"""Installs one environment of Python packages into its final place, and proves that its programs run.

In its final place, because a virtual environment cannot be moved: its scripts and its byte code name their own folder.
So it is the caller's record (store.py), written last, that tells a complete one from what a killed installation left.

Guarantees: every package is the one that the lock names, by hash; the lab's own packages and the user's play no part, but for the
environment's add-ons, which are part of its key.
Byte code is compiled, because containers of the lab see these files copy-on-write and would compile them at each start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

from aerie_lab.binaries import pip, proof
from aerie_lab.binaries.commands import Say
from aerie_lab.binaries.families import Addon, Environment
from aerie_lab.errors import BuildError

NEEDED_BYTES = 9 * 2**30
"""What the largest environment takes while it is installed: 5.5 GiB, and 2.7 GiB of packages that pip unpacks them from."""

_PATIENCE = 300.0
"""Seconds for the programs' first answer: vLLM reads a gigabyte for it."""


def key(environment: Environment) -> str:
    """A hash of all that decides what is installed. The Python is in it by place, because the environment links to it."""
    python = (sys.version_info[:2], sys.base_prefix, platform.machine())
    addons = [(addon.module, addon.group, addon.function, addon.text()) for addon in environment.addons]
    recipe = json.dumps([environment.pins(), environment.poses_as, environment.local_version, environment.files, addons, python])
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def build(environment: Environment, work: Path, home: Path, log: Path, say: Say) -> dict[str, str]:
    """Install `environment` into the new folder `home`, with the folder `work` for what is needed on the way.

    Returns what it was made with, for the record. After a failure `home` holds anything.
    """
    _require_python(environment)
    _require_space(environment, work)
    say(f"{environment.name} {environment.version}: installing its Python packages, minutes the first time (log: {log})")
    _make(environment, home)
    failure = pip.install(
        home / "bin" / "python",
        environment.lock,
        # pip's cache would take as much disk again, for what is installed once.
        ["--no-cache-dir"],
        folder=work,
        # pip unpacks below TMPDIR, and /tmp is often small.
        environment={**os.environ, "TMPDIR": str(work)},
        log=log,
        beat=lambda seconds: say(f"{environment.name}: {seconds:.0f} s, {_progress(log, home / environment.site_packages)}"),
    )
    if failure is not None:
        raise BuildError(f"{environment.name} {environment.version} cannot be installed: {_explain(environment, failure, log)}")
    if environment.poses_as:
        _pose(environment, home)
    for addon in environment.addons:
        add(addon, home / environment.site_packages)
    say(f"{environment.name}: trying it")
    for binary in environment.binaries:
        program = home / "bin" / binary.name
        if problem := proof.complaint(program, ("--version",), environment.version, _PATIENCE):
            raise BuildError(f"{binary.name} {environment.version} is installed, but {problem}: report this, with {log}.")
    return {"python": platform.python_version()}


def _way_out(environment: Environment) -> str:
    names = " and ".join(binary.name for binary in environment.binaries)
    return f"put a {names} that runs into a folder and name it in AERIE_LAB_BINARIES"


def _require_python(environment: Environment) -> None:
    if sys.version_info[:2] > environment.newest_python:
        newest = "{}.{}".format(*environment.newest_python)
        raise BuildError(
            f"{environment.name} {environment.version} has packages for Python 3.11 to {newest}, and this is "
            f"{platform.python_version()}: install aerie with an older one, or {_way_out(environment)}."
        )


def _require_space(environment: Environment, work: Path) -> None:
    free = shutil.disk_usage(work).free
    if free < NEEDED_BYTES:
        raise BuildError(
            f"installing {environment.name} needs {NEEDED_BYTES / 2**30:.0f} GiB below {work.parent}, and "
            f"{free / 2**30:.1f} GiB are free: free some, or set AERIE_LAB_CACHE to a folder on another disk."
        )


def _make(environment: Environment, home: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "venv", str(home)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = " / ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-2:]) or "it gave no reason"
        raise BuildError(
            f"{environment.name} {environment.version} needs a virtual environment, and `{sys.executable} -m venv` failed "
            f"({said}): install the venv module of this Python, or {_way_out(environment)}."
        )


def _pose(environment: Environment, home: Path) -> None:
    """Answer for the package name that the programs look themselves up by."""
    version = f"{environment.version}{environment.local_version}"
    folder = home / environment.site_packages / f"{environment.poses_as}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {environment.poses_as}\nVersion: {version}\n")


def add(addon: Addon, folder: Path) -> None:
    """Put the module into a folder of packages, with an entry point that names it."""
    module = folder / f"{addon.module}.py"
    module.write_text(addon.text())
    py_compile.compile(str(module), doraise=True)
    about = folder / f"{addon.module}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {addon.module}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{addon.group}]\n{addon.module} = {addon.module}:{addon.function}\n")


def _progress(log: Path, site_packages: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith("Installing collected packages: "):
            # pip's own record is there before we begin, and stays out of the count.
            installed = sum(1 for _ in site_packages.glob("*.dist-info/INSTALLER")) - 1
            return f"{max(0, installed)} of {line.count(',') + 1} packages installed"
    fetched = [line.split()[1] for line in lines if line.startswith("Collecting ")]
    return f"{len(fetched)} packages downloaded, now {fetched[-1].partition('==')[0]}" if fetched else "looking for packages"


def _explain(environment: Environment, failure: pip.Failure, log: Path) -> str:
    match failure.cause:
        case pip.Cause.DISK:
            return f"the disk is full: free about {NEEDED_BYTES / 2**30:.0f} GiB, or set AERIE_LAB_CACHE to another disk."
        case pip.Cause.UNREACHABLE:
            return (
                "the Python package registry cannot be reached: connect, set PIP_INDEX_URL to one that can be, or "
                f"{_way_out(environment)}."
            )
        case pip.Cause.WRONG_HASH:
            return f"a downloaded package is not the one that the lock names, so it was refused: see {log}."
        case _:
            return f"{failure.said}. All that pip said: {log}. Report this, or {_way_out(environment)}."
