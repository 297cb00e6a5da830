"""Where builds lie: one folder each below the cache, named by family and key, complete or of no account.

    bin/kubernetes-0123456789abcdef/   the binaries, manifests/, and build.json with the size of each file
    bin/vllm-0123456789abcdef/         a virtual environment with its build.json
    bin/kubernetes.log                 output of the last build
    bin/.kubernetes.lock               held by the process that builds
    bin/.kubernetes.building/          a build in progress, or what a killed one has left

Guarantees: two processes do not build one family at once; build.json appears by one rename, after the binaries have reported
the right version, and a folder without it is not used; a file that has changed its size since is noticed on use, named and
built again. A build that fails or is interrupted leaves its log and nothing else; what a killed one leaves goes with the
next. Not guaranteed: that contents of the right size are intact. Folders of older keys stay, because another checkout may
use them.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from aerie_lab.binaries import build, environment
from aerie_lab.binaries.commands import ProgressCallback, file_lock
from aerie_lab.binaries.families import BinaryFamily, PythonEnvironment
from aerie_lab.errors import BuildError
from aerie_lab.paths import cache_folder

BUILD_RECORD_FILE = "build.json"


BuildRecipe = BinaryFamily | PythonEnvironment


def build_folder(recipe: BuildRecipe) -> Path:
    """Return the folder of the recipe's build, whether it exists or not."""
    key = environment.hash_environment(recipe) if isinstance(recipe, PythonEnvironment) else build.hash_recipe(recipe)
    return cache_folder() / "bin" / f"{recipe.name}-{key}"


def unusable_reason(recipe: BuildRecipe) -> str | None:
    """Return why the build cannot be used; None if it can. Checks sizes only, which takes a few milliseconds."""
    if (base := _base_environment(recipe)) and (reason := unusable_reason(base)):
        return f"{base.name}, which it stands on, cannot be used ({reason})"
    home = build_folder(recipe)
    if not home.exists():
        return "it has not been built"
    try:
        sizes = json.loads((home / BUILD_RECORD_FILE).read_text())["sizes"]
        for name in recipe.files:
            size = (home / name).stat().st_size
            if size != sizes[name]:
                return f"{name} has {size} bytes instead of {sizes[name]}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError):
        return f"its {BUILD_RECORD_FILE} cannot be read"
    return None


def ensure_build(recipe: BuildRecipe, report_progress: ProgressCallback) -> Path:
    """Return the folder of the complete build; builds it first if necessary."""
    if unusable_reason(recipe) is None:
        return build_folder(recipe)
    if base := _base_environment(recipe):
        ensure_build(base, report_progress)
    home = build_folder(recipe)
    try:
        with file_lock(
            home.parent / f".{recipe.name}.lock", lambda: report_progress(f"{recipe.name}: another process is building it")
        ):
            reason = unusable_reason(recipe)  # the other process may just have done it
            if reason is not None:
                if home.exists():
                    report_progress(f"{recipe.name}: {reason} in {home}: building it again")
                _build(recipe, home, report_progress)
    except OSError as error:
        raise BuildError(
            f"{recipe.name} cannot be built, because of {error.filename or home}: {error.strerror}. Free space or mend "
            f"the permissions there, or set AERIE_LAB_CACHE to another folder."
        ) from error
    return home


def _base_environment(recipe: BuildRecipe) -> PythonEnvironment | None:
    return recipe.overlay.base if isinstance(recipe, PythonEnvironment) and recipe.overlay else None


def _build(recipe: BuildRecipe, home: Path, report_progress: ProgressCallback) -> None:
    begin = time.monotonic()
    work = home.parent / f".{recipe.name}.building"
    log = home.parent / f"{recipe.name}.log"
    _clear(recipe, home, work)
    work.mkdir()
    try:
        if isinstance(recipe, PythonEnvironment):
            base = _base_environment(recipe)
            made_with = environment.install_environment(
                recipe, work, home, log, report_progress, base_folder=build_folder(base) if base else None
            )
            _write_record(recipe, home, made_with)
        else:
            out = work / "out"
            _write_record(recipe, out, build.build_family(recipe, work, out, log, report_progress))
            out.rename(home)
    except BaseException:
        _clear(recipe, home, work)
        raise
    _remove(work)
    report_progress(f"{recipe.name} {recipe.version}: ready after {time.monotonic() - begin:.0f} s")


def _write_record(recipe: BuildRecipe, folder: Path, made_with: dict[str, str]) -> None:
    """Declare the build in `folder` complete."""
    sizes = {name: (folder / name).stat().st_size for name in recipe.files}
    unfinished = folder / f".{BUILD_RECORD_FILE}"
    unfinished.write_text(json.dumps({"version": recipe.version, **made_with, "sizes": sizes}, indent=2) + "\n")
    unfinished.rename(folder / BUILD_RECORD_FILE)


def _clear(recipe: BuildRecipe, home: Path, work: Path) -> None:
    """Remove what lies where the build will be, and what killed builds have left."""
    _remove(work)
    _remove(home)
    # The key's own form: "vllm-*" is also what another process has half built of vllm-0.33.
    for other in home.parent.glob(f"{recipe.name}-{'[0-9a-f]' * 16}"):
        if other.is_dir() and not (other / BUILD_RECORD_FILE).exists():
            _remove(other)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
