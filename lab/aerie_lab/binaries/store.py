"""Where builds lie: one folder each below the cache, named by family and key, complete or of no account.

    bin/kubernetes-0123456789abcdef/   the binaries, manifests/, and build.json with the size of each file
    bin/vllm-0123456789abcdef/         a virtual environment with its build.json
    bin/kubernetes.log                 what the last build said
    bin/.kubernetes.lock               held by the process that builds
    bin/.kubernetes.building/          a build in progress, or what a killed one has left

Guarantees: two processes do not build one family at once; build.json appears by one rename, after the binaries have told
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
from aerie_lab.binaries.commands import Say, locked
from aerie_lab.binaries.families import Environment, Family
from aerie_lab.errors import BuildError
from aerie_lab.paths import cache_folder

RECORD = "build.json"


Recipe = Family | Environment


def folder(family: Recipe) -> Path:
    """Where the build of `family` lies, or will."""
    key = environment.key(family) if isinstance(family, Environment) else build.key(family)
    return cache_folder() / "bin" / f"{family.name}-{key}"


def lack(family: Recipe) -> str | None:
    """Why the build cannot be used; None when it can. Looks at sizes only: a few milliseconds."""
    if (base := _base(family)) and (reason := lack(base)):
        return f"{base.name}, which it stands on, cannot be used ({reason})"
    home = folder(family)
    if not home.exists():
        return "it has not been built"
    try:
        sizes = json.loads((home / RECORD).read_text())["sizes"]
        for name in family.files:
            size = (home / name).stat().st_size
            if size != sizes[name]:
                return f"{name} has {size} bytes instead of {sizes[name]}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError):
        return f"its {RECORD} cannot be read"
    return None


def ensure(family: Recipe, say: Say) -> Path:
    """The folder with the complete build; builds it first when there is none."""
    if lack(family) is None:
        return folder(family)
    if base := _base(family):
        ensure(base, say)
    home = folder(family)
    try:
        with locked(home.parent / f".{family.name}.lock", lambda: say(f"{family.name}: another process is building it")):
            reason = lack(family)  # the other process may just have done it
            if reason is not None:
                if home.exists():
                    say(f"{family.name}: {reason} in {home}: building it again")
                _build(family, home, say)
    except OSError as error:
        raise BuildError(
            f"{family.name} cannot be built, because of {error.filename or home}: {error.strerror}. Free space or mend "
            f"the permissions there, or set AERIE_LAB_CACHE to another folder."
        ) from error
    return home


def _base(family: Recipe) -> Environment | None:
    return family.over.base if isinstance(family, Environment) and family.over else None


def _build(family: Recipe, home: Path, say: Say) -> None:
    begin = time.monotonic()
    work = home.parent / f".{family.name}.building"
    log = home.parent / f"{family.name}.log"
    _clear(family, home, work)
    work.mkdir()
    try:
        if isinstance(family, Environment):
            base = _base(family)
            made_with = environment.build(family, work, home, log, say, base=folder(base) if base else None)
            _write_record(family, home, made_with)
        else:
            out = work / "out"
            _write_record(family, out, build.build(family, work, out, log, say))
            out.rename(home)
    except BaseException:
        _clear(family, home, work)
        raise
    _remove(work)
    say(f"{family.name} {family.version}: ready after {time.monotonic() - begin:.0f} s")


def _write_record(family: Recipe, folder: Path, made_with: dict[str, str]) -> None:
    """Declare the build in `folder` complete."""
    sizes = {name: (folder / name).stat().st_size for name in family.files}
    unfinished = folder / f".{RECORD}"
    unfinished.write_text(json.dumps({"version": family.version, **made_with, "sizes": sizes}, indent=2) + "\n")
    unfinished.rename(folder / RECORD)


def _clear(family: Recipe, home: Path, work: Path) -> None:
    """Remove what lies where the build will be, and what killed builds have left."""
    _remove(work)
    _remove(home)
    # The key's own form: "vllm-*" is also what another process has half built of vllm-0.33.
    for other in home.parent.glob(f"{family.name}-{'[0-9a-f]' * 16}"):
        if other.is_dir() and not (other / RECORD).exists():
            _remove(other)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
