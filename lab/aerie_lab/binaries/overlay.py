"""Lays one release's Python over the compiled files and the packages of another environment (families.EnvironmentOverlay).

For a release without a build for CPU: its Python is what is tested, and the compiled files of the release before it
do while they have what it calls. The environment keeps a folder and an interpreter of its own, and a .pth file puts the other's
packages after its own. Not PYTHONPATH: that belongs to one process, and a pod's variables or a program that starts another may
drop it; a .pth file belongs to the interpreter.

Guarantees: nothing compiled stays of the release itself; a base that has other compiled files, or another version, is refused
before anything is downloaded. Not guaranteed: that the compiled files have all that the release may call. What a run reaches
shows that.
"""

from __future__ import annotations

from pathlib import Path

from aerie_lab.binaries.families import EnvironmentOverlay, PythonEnvironment
from aerie_lab.errors import BuildError


def find_base_packages(environment: PythonEnvironment, base_folder: Path) -> Path:
    """Return the packages of the environment in `base_folder`, on which `environment` stands. Raises BuildError."""
    over = environment.overlay
    if over is None:
        raise AssertionError(f"{environment.name} stands alone")
    name = f"{environment.name} {environment.version}"
    if over.base.version != over.base_version:
        raise BuildError(
            f"{name} runs with the compiled files of {over.base.name} {over.base_version}, and {over.base.lock} pins "
            f"{over.base.version}: change families.py with the lock, after a run of both."
        )
    packages = base_folder / over.base.site_packages
    package = packages / over.package
    compiled_files = {path.relative_to(package).as_posix() for path in package.rglob("*.so")}
    if compiled_files != set(over.compiled_files):
        missing, more = sorted(set(over.compiled_files) - compiled_files), sorted(compiled_files - set(over.compiled_files))
        differ = " and ".join(f"{verb} {', '.join(names)}" for verb, names in (("lacks", missing), ("also has", more)) if names)
        raise BuildError(
            f"{name} runs with the compiled files that {over.base.name} {over.base_version} has on x86_64, and {package} "
            f"{differ}: use an x86_64 machine, or remove {base_folder} there and build {over.base.name} again."
        )
    return packages


def apply_overlay(overlay: EnvironmentOverlay, packages: Path, base_packages: Path) -> None:
    """Keep the files with `kept_suffixes` of the package in `packages`, link the compiled files from `base_packages`, and append
    these packages to the search path."""
    package = packages / overlay.package
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in overlay.kept_suffixes:
            path.unlink()
    for name in overlay.compiled_files:
        (package / name).symlink_to(base_packages / overlay.package / name)
    (packages / f"{overlay.base.name}.pth").write_text(f"{base_packages}\n")
