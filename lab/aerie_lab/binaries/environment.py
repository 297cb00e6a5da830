"""Installs one environment of Python packages into its final place, and proves that its programs run.

In its final place, because a virtual environment cannot be moved: its scripts and its byte code name their own folder.
So it is the caller's record (store.py), written last, that tells a complete one from what a killed installation left.

Guarantees: every package is the one that the lock names, by hash; the lab's own packages and the user's play no part, but for the
environment's add-ons, which are part of its key and are tried with the packages that they are for.
Byte code is compiled, because containers of the lab see these files copy-on-write and would compile them at each start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

from aerie_lab.binaries import overlay, pip, proof
from aerie_lab.binaries.commands import Say
from aerie_lab.binaries.families import Addon, Environment
from aerie_lab.errors import BuildError

_PATIENCE = 900.0
"""Seconds for the programs' first answer: vLLM reads a gigabyte for it, half a minute's work that busy cores make many."""


def key(environment: Environment) -> str:
    """A hash of all that decides what is installed. The Python is in it by place, because the environment links to it."""
    python = (sys.version_info[:2], sys.base_prefix, platform.machine())
    addons = [(addon.module, addon.group, addon.function, addon.text()) for addon in environment.addons]
    parts = [environment.pins(), environment.poses_as, environment.local_version, environment.files, addons, python]
    if over := environment.over:
        parts.append([key(over.base), over.base_version, over.package, over.compiled, over.kept])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def build(environment: Environment, work: Path, home: Path, log: Path, say: Say, *, base: Path | None = None) -> dict[str, str]:
    """Install `environment` into the new folder `home`, with the folder `work` for what is needed on the way.

    `base` is the folder of the environment that it stands on. Returns what it was made with, for the record. After a failure
    `home` holds anything.
    """
    _require_python(environment)
    beneath = overlay.fitting(environment, base) if base else None
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
    if environment.over and beneath:
        overlay.lay(environment.over, home / environment.site_packages, beneath)
    if environment.poses_as:
        _pose(environment, home)
    for addon in environment.addons:
        add(addon, home / environment.site_packages)
    say(f"{environment.name}: trying it")
    for binary in environment.binaries:
        program = home / "bin" / binary.name
        if problem := proof.complaint(program, ("--version",), environment.version, _PATIENCE):
            raise BuildError(f"{binary.name} {environment.version} is installed, but {problem}: report this, with {log}.")
    for addon in (*environment.addons, *(environment.over.base.addons if environment.over else ())):
        _try(addon, environment, home)
    return {"python": platform.python_version()}


def _way_out(environment: Environment) -> str:
    if environment.over:
        return f"use {environment.over.base.name} {environment.over.base.version}"
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
    if free < environment.disk_gib * 2**30:
        raise BuildError(
            f"installing {environment.name} needs {environment.disk_gib} GiB below {work.parent}, and "
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
    """Answer for the package name that the programs look themselves up by. Where a package has it already, its version is edited:
    of two answers Python takes either."""
    version = f"{environment.version}{environment.local_version}"
    packages = home / environment.site_packages
    folder = packages / f"{environment.poses_as}-{version}.dist-info"
    own = packages / f"{environment.poses_as}-{environment.version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {environment.poses_as}\nVersion: {environment.version}\n"
    if own.is_dir():
        about = (own / "METADATA").read_text()
        own.rename(folder)
    else:
        folder.mkdir()
    (folder / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {version}", about, count=1, flags=re.MULTILINE))


def add(addon: Addon, folder: Path) -> None:
    """Put the module into a folder of packages, with an entry point that names it."""
    module = folder / f"{addon.module}.py"
    module.write_text(addon.text())
    py_compile.compile(str(module), doraise=True)
    about = folder / f"{addon.module}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {addon.module}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{addon.group}]\n{addon.module} = {addon.module}:{addon.function}\n")


def _try(addon: Addon, environment: Environment, home: Path) -> None:
    """Call the add-on's function as the packages will: what does not know them says so now, and not at each start."""
    call = f"import {addon.module}; {addon.module}.{addon.function}()"
    command = [str(home / "bin" / "python"), "-I", "-c", call]
    try:
        done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        said = f"it does not end within {_PATIENCE:.0f} s"
    else:
        if done.returncode == 0:
            return
        said = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode} and gave no reason"])[-1]
    raise BuildError(f"{environment.name} {environment.version} is refused by the lab's add-on {addon.module}: {said}")


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
            return f"the disk is full: free about {environment.disk_gib} GiB, or set AERIE_LAB_CACHE to another disk."
        case pip.Cause.UNREACHABLE:
            return (
                "the Python package registry cannot be reached: connect, set PIP_INDEX_URL to one that can be, or "
                f"{_way_out(environment)}."
            )
        case pip.Cause.WRONG_HASH:
            return f"a downloaded package is not the one that the lock names, so it was refused: see {log}."
        case _:
            return f"{failure.said}. All that pip said: {log}. Report this, or {_way_out(environment)}."
