"""Install exactly the locked packages and the project itself in `.venv`; do nothing if they are already there.

With --lab the programs of the lab are built at the same time: pip needs one processor and the network, Go the others.

Only the standard library, and syntax that an old Python can read: it has to run before anything is installed, and to
reject a Python that is too old with one sentence.

Guarantees: a step is recorded by the hash of all that it depends on, after it has ended well; so an interrupted
set-up is repaired by the next one, and a finished one takes a few milliseconds. Concurrent set-ups wait for each
other. Every failure ends with one sentence and status 1; a failed build of the lab's programs is only reported, because what
needs them builds them again. Not detected: manual changes of `.venv`.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Optional, Tuple

OLDEST = (3, 11)
CANDIDATES = ("python3", "python3.13", "python3.12", "python3.11")
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
# Modules that a virtual environment needs; some distributions have them in separate packages.
# The path is the real one: `python3` may be that of an activated .venv, which set-up is about to remove.
LOCATE = "import os, sys, venv, ensurepip; print(os.path.realpath(sys.executable))"
LAB_OPTION = "--lab"
# The module that builds the lab's programs; it needs no installed package.
LAB_BUILD = "aerie_lab.binaries"
# Seconds between two lines of progress while pip works.
BEAT = 10.0

ROOT = Path(__file__).resolve().parent.parent


class SetupError(Exception):
    """Set-up cannot continue; the message is one sentence that names the fix."""


def print_progress(line: str) -> None:
    print("setup: " + line, flush=True)


def digest(*parts: bytes) -> str:
    """Return a hash of the parts in order; it includes the length of each, so that no two lists of parts collide."""
    total = hashlib.sha256()
    for part in parts:
        total.update(b"%d:" % len(part))
        total.update(part)
    return total.hexdigest()


def answer(python: str, code: str) -> str:
    """Return what `code` prints in that Python; empty if it fails, such as a placeholder for a missing version."""
    return subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True
    ).stdout.strip()


def find_python() -> Tuple[str, str]:
    """Return the first suitable Python of CANDIDATES, as (path, version)."""
    unsuitable = []
    for name in CANDIDATES:
        path = shutil.which(name)
        version = answer(path, VERSION) if path else ""
        if not path or not version:
            continue
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            unsuitable.append(name + " is " + version)
            continue
        located = answer(path, LOCATE)
        if located:
            return located, version
        package = "python%s-venv" % ".".join(version.split(".")[:2])
        unsuitable.append("%s (%s) lacks the venv module, which Debian and Ubuntu call %s" % (name, version, package))
    raise SetupError(
        "Aerie needs Python %d.%d or newer with the venv module, and %s: install one and put it on the PATH."
        % (*OLDEST, "; ".join(unsuitable) or "no python3 is on the PATH")
    )


def run_pip(venv: Path, what: str, arguments: List[str]) -> None:
    """Run the environment's pip with a line at the start, progress lines, and a line at the end."""
    log = venv / "setup.log"
    print_progress(what + " (log: " + str(log.relative_to(ROOT)) + ")")
    begin = beat = time.monotonic()
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar=off", "--no-input", "--retries=2"]
    with log.open("wb") as output:
        pip = subprocess.Popen(command + arguments, cwd=str(ROOT), stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - beat >= BEAT:
                    beat = time.monotonic()
                    lines = log.read_text(errors="replace").splitlines()
                    print_progress("  %3.0f s  %s" % (beat - begin, lines[-1].strip()[:90] if lines else "waiting for pip"))
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        raise SetupError(explain_pip_failure(log.read_text(errors="replace"), log))
    print_progress("  done in %.0f s" % (time.monotonic() - begin))


def explain_pip_failure(output: str, log: Path) -> str:
    """Return one sentence for the output of a failed pip."""
    if "No space left on device" in output:
        return "the disk is full: free about 1 GiB and run make again."
    unreachable = (
        "NewConnectionError",
        "NameResolutionError",
        "Max retries exceeded",
        "ReadTimeoutError",
        "ProxyError",
    )
    if any(error in output for error in unreachable):
        return (
            "the Python package registry cannot be reached, and pip's cache does not hold all that is needed: "
            "connect this machine, or set PIP_INDEX_URL to a registry that it can reach, and run make again."
        )
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in output:
        return "a package is not the one that the lock names, so it was refused: %s says which." % log
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR")]
    return "pip failed: %s (all of it: %s)." % (errors[0] if errors else "no error was named", log)


def start_lab_build(python: str) -> "subprocess.Popen[bytes]":
    """Start to build the lab's programs, with this Python."""
    return subprocess.Popen([python, "-m", LAB_BUILD], cwd=str(ROOT), env=dict(os.environ, PYTHONPATH=str(ROOT / "lab")))


def end_lab_build(build: "Optional[subprocess.Popen[bytes]]") -> None:
    """End the build, if it has not ended."""
    if build is not None and build.poll() is None:
        build.terminate()
        build.wait()


def set_up(venv: Path, with_lab: bool) -> None:
    """Update `venv` step by step; a step is skipped if its stamp contains its key."""
    lock = (ROOT / "requirements" / "dev.txt").read_bytes()
    projects = [ROOT, *sorted(path.parent for path in ROOT.glob("*/pyproject.toml"))]
    python, version = find_python()
    packages_key = digest(version.encode(), str(venv).encode(), lock)
    project_key = digest(packages_key.encode(), *[(project / "pyproject.toml").read_bytes() for project in projects])
    packages_stamp = venv / ".packages"
    project_stamp = venv / ".project"

    if read(project_stamp) == project_key:
        return
    lab_build = start_lab_build(python) if with_lab else None
    try:
        if read(packages_stamp) != packages_key:
            install_packages(venv, python, version, lock)
            packages_stamp.write_text(packages_key)
        editable = [argument for project in projects for argument in ("--editable", str(project))]
        run_pip(venv, "installing aerie itself, editable", ["--no-deps", "--no-build-isolation", *editable])
        project_stamp.write_text(project_key)
        if lab_build is not None:
            lab_build.wait()
    finally:
        end_lab_build(lab_build)


def install_packages(venv: Path, python: str, version: str, lock: bytes) -> None:
    """Make a new `venv` with the packages of the lock."""
    if venv.exists():
        print_progress("removing .venv: it is unfinished, or made for another lock or Python")
        shutil.rmtree(str(venv))
    print_progress("creating .venv with Python " + version)
    result = subprocess.run(
        [python, "-m", "venv", str(venv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if result.returncode != 0:
        lines = result.stdout.strip().splitlines()
        raise SetupError("python -m venv failed: %s." % (lines[-1] if lines else "it gave no reason"))
    count = sum(1 for line in lock.splitlines() if b"==" in line)
    run_pip(venv, "installing %d pinned packages" % count, ["--require-hashes", "-r", "requirements/dev.txt"])


def read(stamp: Path) -> str:
    return stamp.read_text() if stamp.exists() else ""


def main() -> int:
    try:
        # Beside .venv, because a set-up may remove .venv.
        with (ROOT / ".venv.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up(ROOT / ".venv", LAB_OPTION in sys.argv[1:])
    except SetupError as error:
        print("setup: " + str(error), file=sys.stderr)
        return 1
    except OSError as error:
        print("setup: %s: free space or mend the permissions, and run make again." % error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next make goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
