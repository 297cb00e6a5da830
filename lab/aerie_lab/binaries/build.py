"""Builds one family with Go into an empty folder, and proves that each binary is the version it should be.

Guarantees: what is built depends on the family's sources (go.mod, go.sum), its recipe and this machine's architecture,
and on no other setting of the user; every module is one whose hash go.sum has. After a failure the folders hold
anything: the caller (store.py) throws them away.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from aerie_lab.binaries import commands, toolchain, version_check
from aerie_lab.binaries.commands import ProgressCallback
from aerie_lab.binaries.families import BinaryFamily, manifest_path
from aerie_lab.binaries.toolchain import BINARIES_FOLDER_HINT, GoToolchain
from aerie_lab.errors import BuildError

# Go's messages when a registry cannot be reached.
_UNREACHABLE_ERRORS = ("dial tcp", "no such host", "connection refused", "i/o timeout", "proxyconnect", "tls: ", "goproxy=off")


def hash_recipe(family: BinaryFamily) -> str:
    """Return a hash of all that determines the build, except the version of Go: every suitable one builds the same."""
    files = sorted(file for file in family.sources.rglob("*") if file.is_file())
    hashes = [(str(file.relative_to(family.sources)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    recipe = json.dumps([hashes, _build_arguments(family), family.files, toolchain.go_target()])
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def build_family(
    family: BinaryFamily, work_folder: Path, output_folder: Path, log_file: Path, report_progress: ProgressCallback
) -> dict[str, str]:
    """Build `family` into the new `output_folder`, with `work_folder` for temporary files.

    Returns the versions of the tools, for the record.
    """
    go = toolchain.find_go(family.min_go_version, report_progress)
    _require_disk_space(family, go, work_folder)
    # A copy, because the installed package may be read-only and Go locks a file beside go.mod.
    module = work_folder / "module"
    shutil.copytree(family.sources, module, copy_function=shutil.copyfile)
    module.chmod(0o755)
    # Go's scratch space too: a link needs more than a small /tmp has.
    scratch = work_folder / "scratch"
    scratch.mkdir()
    environment = {"GOGC": "200", **go.environment, "GOTMPDIR": str(scratch)}  # a compiler's heap is short-lived
    output_folder.mkdir()

    names = ", ".join(binary.name for binary in family.binaries)
    report_progress(
        f"{family.name} {family.version}: building {names} with {go.version}, minutes the first time (log: {log_file})"
    )
    log_file.write_bytes(b"")
    status = commands.run_command(
        [str(go.path), "build", "-o", f"{output_folder}/", *_build_arguments(family)],
        folder=module,
        environment=environment,
        log_file=log_file,
        on_heartbeat=lambda seconds: report_progress(f"{family.name}: {seconds:.0f} s, {_progress(log_file)}"),
    )
    if status != 0:
        raise BuildError(f"{family.name} {family.version} cannot be built: {_explain(family, status, log_file)}")
    for binary in family.binaries:
        (output_folder / binary.built_name).rename(output_folder / binary.name)
        if problem := version_check.find_version_problem(output_folder / binary.name, binary.version_arguments, family.version):
            raise BuildError(f"the {binary.name} built from {family.sources} {problem}, not {family.version}: report this.")
    _copy_manifests(family, go, module, output_folder)
    return {"go": go.version}


def _build_arguments(family: BinaryFamily) -> list[str]:
    # -v does not change the result; with it the log shows the progress. Without DWARF, which the linker would drop, compiling
    # takes a seventh less: 72.9 instead of 84.5 s of CPU time for net/http and what it imports.
    tags = ["-tags", ",".join(family.tags)] if family.tags else []
    flags = ["-v", "-mod=readonly", "-trimpath", "-gcflags=all=-dwarf=false", *tags, "-ldflags", family.linker_flags]
    return [*flags, *(binary.package for binary in family.binaries)]


def _require_disk_space(family: BinaryFamily, go: GoToolchain, work: Path) -> None:
    caches = _run_go(go, work, "env", "GOCACHE", "GOMODCACHE").splitlines()
    for folder in (work.parent, *(Path(cache) for cache in caches)):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < family.disk_gib * 2**30:
            raise BuildError(
                f"building {family.name} may need {family.disk_gib} GiB below {folder}, and {free / 2**30:.1f} GiB are free: "
                f"free some, or {BINARIES_FOLDER_HINT}."
            )


def _copy_manifests(family: BinaryFamily, go: GoToolchain, module: Path, out: Path) -> None:
    if not family.manifests:
        return
    source = Path(_run_go(go, module, "list", "-m", "-f", "{{.Dir}}", family.module))
    for manifest in family.manifests:
        target = out / manifest_path(manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / manifest, target)


def _run_go(go: GoToolchain, folder: Path, *arguments: str) -> str:
    done = subprocess.run([go.path, *arguments], cwd=folder, env=go.environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{go.path} {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _progress(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    packages = [line for line in lines if " " not in line]
    if packages:
        return f"{len(packages)} packages compiled, now {packages[-1]}"
    modules = sum(line.startswith("go: downloading") for line in lines)
    return f"{modules} modules downloaded" if modules else "linking"


def _explain(family: BinaryFamily, status: int, log: Path) -> str:
    """Return why Go failed, and the fix, from its output."""
    output = log.read_text(errors="replace")
    lowered = output.lower()
    # What go prints between package names and notes of progress; an error names its package in a line with #.
    messages = [line.strip() for line in output.splitlines() if " " in line and not line.startswith(("go: downloading", "#"))]
    last = " / ".join(messages[-2:])[-300:] or "it gave no reason"
    if "no space left on device" in lowered:
        return f"the disk is full ({last}): free about {family.disk_gib} GiB, or {BINARIES_FOLDER_HINT}."
    if "checksum mismatch" in lowered or "security error" in lowered:
        return f"a downloaded module does not match its hash in go.sum: see {log}."
    if any(error in lowered for error in _UNREACHABLE_ERRORS):
        return (
            f"the Go module registry cannot be reached ({last}): connect, set GOPROXY to a reachable one, "
            f"or {BINARIES_FOLDER_HINT}."
        )
    if status < 0 or "signal: killed" in lowered:
        return (
            f"Go was killed, probably because memory was exhausted ({last}): free some memory, or {BINARIES_FOLDER_HINT}. "
            f"Full output: {log}."
        )
    return f"{last}. Full output: {log}. Report this, or {BINARIES_FOLDER_HINT}."
