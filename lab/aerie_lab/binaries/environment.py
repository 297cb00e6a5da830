"""Installs one environment of Python packages into its final place, and proves that its programs run.

In its final place, because a virtual environment cannot be moved: its scripts and its byte code name their own folder.
So the caller's record (store.py), which is written last, distinguishes a complete one from the remains of a killed installation.

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

from aerie_lab.binaries import overlay, pip, version_check
from aerie_lab.binaries.commands import ProgressCallback
from aerie_lab.binaries.families import Addon, PythonEnvironment
from aerie_lab.errors import BuildError

_FIRST_RUN_TIMEOUT_SECONDS = 900.0
"""Seconds for the programs' first answer: vLLM reads a gigabyte for it, half a minute's work that busy cores make many."""


def hash_environment(environment: PythonEnvironment) -> str:
    """Return a hash of all that determines the installation. The Python is in it by path, because the environment links to it."""
    python = (sys.version_info[:2], sys.base_prefix, platform.machine())
    addons = [(addon.module, addon.group, addon.function, addon.read_source()) for addon in environment.addons]
    parts = [
        environment.read_lock(),
        environment.alias_distribution,
        environment.local_version_suffix,
        environment.files,
        addons,
        python,
    ]
    if over := environment.overlay:
        parts.append([hash_environment(over.base), over.base_version, over.package, over.compiled_files, over.kept_suffixes])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def install_environment(
    environment: PythonEnvironment,
    work_folder: Path,
    target_folder: Path,
    log_file: Path,
    report_progress: ProgressCallback,
    *,
    base_folder: Path | None = None,
) -> dict[str, str]:
    """Install `environment` into the new `target_folder`, with `work_folder` for temporary files.

    `base_folder` is the folder of its base environment. Returns the versions of its tools, for the record. After a failure the
    content of `target_folder` is undefined.
    """
    _require_python_version(environment)
    beneath = overlay.find_base_packages(environment, base_folder) if base_folder else None
    _require_disk_space(environment, work_folder)
    report_progress(
        f"{environment.name} {environment.version}: installing its Python packages, minutes the first time (log: {log_file})"
    )
    _create_virtual_environment(environment, target_folder)
    failure = pip.install_lock(
        target_folder / "bin" / "python",
        environment.lock,
        # pip's cache would take as much disk again, for what is installed once.
        ["--no-cache-dir"],
        folder=work_folder,
        # pip unpacks below TMPDIR, and /tmp is often small.
        environment={**os.environ, "TMPDIR": str(work_folder)},
        log_file=log_file,
        on_heartbeat=lambda seconds: report_progress(
            f"{environment.name}: {seconds:.0f} s, {_progress(log_file, target_folder / environment.site_packages)}"
        ),
    )
    if failure is not None:
        raise BuildError(
            f"{environment.name} {environment.version} cannot be installed: {_explain(environment, failure, log_file)}"
        )
    if environment.overlay and beneath:
        overlay.apply_overlay(environment.overlay, target_folder / environment.site_packages, beneath)
    if environment.alias_distribution:
        _write_alias_metadata(environment, target_folder)
    for addon in environment.addons:
        install_addon(addon, target_folder / environment.site_packages)
    report_progress(f"{environment.name}: trying it")
    for binary in environment.binaries:
        program = target_folder / "bin" / binary.name
        if problem := version_check.find_version_problem(
            program, ("--version",), environment.version, _FIRST_RUN_TIMEOUT_SECONDS
        ):
            raise BuildError(f"{binary.name} {environment.version} is installed, but {problem}: report this, with {log_file}.")
    for addon in (*environment.addons, *(environment.overlay.base.addons if environment.overlay else ())):
        _check_addon(addon, environment, target_folder)
    return {"python": platform.python_version()}


def _fallback_hint(environment: PythonEnvironment) -> str:
    if environment.overlay:
        return f"use {environment.overlay.base.name} {environment.overlay.base.version}"
    names = " and ".join(binary.name for binary in environment.binaries)
    return f"put a {names} that runs into a folder and name it in AERIE_LAB_BINARIES"


def _require_python_version(environment: PythonEnvironment) -> None:
    if sys.version_info[:2] > environment.max_python_version:
        newest = "{}.{}".format(*environment.max_python_version)
        raise BuildError(
            f"{environment.name} {environment.version} has packages for Python 3.11 to {newest}, and this is "
            f"{platform.python_version()}: install aerie with an older one, or {_fallback_hint(environment)}."
        )


def _require_disk_space(environment: PythonEnvironment, work: Path) -> None:
    free = shutil.disk_usage(work).free
    if free < environment.disk_gib * 2**30:
        raise BuildError(
            f"installing {environment.name} needs {environment.disk_gib} GiB below {work.parent}, and "
            f"{free / 2**30:.1f} GiB are free: free some, or set AERIE_LAB_CACHE to a folder on another disk."
        )


def _create_virtual_environment(environment: PythonEnvironment, home: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "venv", str(home)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        output = " / ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-2:]) or "it gave no reason"
        raise BuildError(
            f"{environment.name} {environment.version} needs a virtual environment, and `{sys.executable} -m venv` failed "
            f"({output}): install the venv module of this Python, or {_fallback_hint(environment)}."
        )


def _write_alias_metadata(environment: PythonEnvironment, home: Path) -> None:
    """Answer for the package name that the programs look themselves up by. Where a package has it already, its version is edited:
    of two answers Python takes either."""
    version = f"{environment.version}{environment.local_version_suffix}"
    packages = home / environment.site_packages
    folder = packages / f"{environment.alias_distribution}-{version}.dist-info"
    own = packages / f"{environment.alias_distribution}-{environment.version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {environment.alias_distribution}\nVersion: {environment.version}\n"
    if own.is_dir():
        about = (own / "METADATA").read_text()
        own.rename(folder)
    else:
        folder.mkdir()
    (folder / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {version}", about, count=1, flags=re.MULTILINE))


def install_addon(addon: Addon, folder: Path) -> None:
    """Put the module into a folder of packages, with an entry point that names it."""
    module = folder / f"{addon.module}.py"
    module.write_text(addon.read_source())
    py_compile.compile(str(module), doraise=True)
    about = folder / f"{addon.module}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {addon.module}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{addon.group}]\n{addon.module} = {addon.module}:{addon.function}\n")


def _check_addon(addon: Addon, environment: PythonEnvironment, home: Path) -> None:
    """Call the add-on's function as the packages will, so that an unsuitable add-on fails now, not at each start."""
    call = f"import {addon.module}; {addon.module}.{addon.function}()"
    command = [str(home / "bin" / "python"), "-I", "-c", call]
    try:
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FIRST_RUN_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        problem = f"it does not end within {_FIRST_RUN_TIMEOUT_SECONDS:.0f} s"
    else:
        if done.returncode == 0:
            return
        problem = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode} and gave no reason"])[-1]
    raise BuildError(f"{environment.name} {environment.version} is rejected by the lab's add-on {addon.module}: {problem}")


def _progress(log: Path, site_packages: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith("Installing collected packages: "):
            # pip's own record is there before we begin, and stays out of the count.
            installed = sum(1 for _ in site_packages.glob("*.dist-info/INSTALLER")) - 1
            return f"{max(0, installed)} of {line.count(',') + 1} packages installed"
    fetched = [line.split()[1] for line in lines if line.startswith("Collecting ")]
    return f"{len(fetched)} packages downloaded, now {fetched[-1].partition('==')[0]}" if fetched else "looking for packages"


def _explain(environment: PythonEnvironment, failure: pip.PipFailure, log: Path) -> str:
    match failure.cause:
        case pip.FailureCause.DISK:
            return f"the disk is full: free about {environment.disk_gib} GiB, or set AERIE_LAB_CACHE to another disk."
        case pip.FailureCause.UNREACHABLE:
            return (
                "the Python package registry cannot be reached: connect, set PIP_INDEX_URL to one that can be, or "
                f"{_fallback_hint(environment)}."
            )
        case pip.FailureCause.WRONG_HASH:
            return f"a downloaded package does not match its hash in the lock: see {log}."
        case _:
            return f"{failure.message}. Full output of pip: {log}. Report this, or {_fallback_hint(environment)}."
