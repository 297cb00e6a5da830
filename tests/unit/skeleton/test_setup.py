"""scripts/setup.py: its error messages, and that it repairs the remains of an interrupted run.

The project that it sets up here is a small one: real pip and a real .venv, one package without dependencies, no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# A build backend that returns a prepared wheel, so that installing the project needs no network.
BACKEND = """
import shutil

def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("small-1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""


def write_wheel(folder: Path, name: str) -> Path:
    """Write a wheel with one empty module."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with setup.py, a lock that names one wheel beside it, and a project without dependencies."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    (root / "requirements").mkdir()
    shutil.copy(ROOT / "scripts/setup.py", root / "scripts")
    write_wheel(root, "small")
    wheel = write_wheel(root / "requirements", "pinned")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (root / "requirements/dev.txt").write_text(f"pinned==1.0 --hash=sha256:{sha}\n")
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "small"\nversion = "1.0"\n'
    )
    return root


def set_up(project: Path, *options: str, path: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py, with the wheel beside the lock as the only registry."""
    registry = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "requirements")}
    return subprocess.run(
        [sys.executable, str(project / "scripts/setup.py"), *options],
        env={**os.environ, **registry, "PATH": path or os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )


def replace_python(folder: Path, script: str) -> str:
    """Return a PATH whose only program is python3, the given shell script."""
    folder.mkdir()
    (folder / "python3").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python3").chmod(0o755)
    return str(folder)


@pytest.mark.slow
def test_setup_runs_once_and_repairs_an_interrupted_run(project: Path) -> None:
    first = set_up(project)
    assert (first.returncode, first.stderr) == (0, "")
    progress = "setup:   "  # "done in", and the progress of long steps
    assert [line.split(" (log")[0] for line in first.stdout.splitlines() if not line.startswith(progress)][1:] == [
        "setup: installing 1 pinned packages",
        "setup: installing aerie itself, editable",
    ]
    assert set_up(project).stdout == ""

    # A new project file installs the project again; the packages stay.
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "pinned packages" not in set_up(project).stdout

    # Interrupted while installing packages: no stamps, and part of the rest is missing. The Python on the PATH is that
    # of the .venv, as in an activated shell; it is about to be removed.
    (project / ".venv/.packages").unlink()
    (project / ".venv/.project").unlink()
    shutil.rmtree(project / ".venv/lib")
    second = set_up(project, path=f"{project}/.venv/bin:{os.environ['PATH']}")
    assert second.stdout.startswith("setup: removing .venv: it is unfinished")
    subprocess.run([project / ".venv/bin/python", "-c", "import pinned, small"], check=True)


@pytest.mark.nightly  # a behaviour of pip with the lock that the other tests use
@pytest.mark.slow
def test_a_package_with_another_hash_than_the_lock_is_rejected(project: Path) -> None:
    lock = project / "requirements/dev.txt"
    lock.write_text(f"pinned==1.0 --hash=sha256:{'0' * 64}\n")
    done = set_up(project)
    assert done.returncode == 1
    assert done.stderr.startswith("setup: a package is not the one that the lock names, so it was refused: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_no_network_is_one_sentence(project: Path) -> None:
    done = set_up(project, PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 1
    assert done.stderr.startswith("setup: the Python package registry cannot be reached")
    assert done.stderr.count("\n") == 1
    assert not (project / ".venv/.packages").exists()


def write_lab_build(project: Path, code: str) -> None:
    """Give the project a lab whose build is this code."""
    package = project / "lab/aerie_lab/binaries"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "__main__.py").write_text(code)


@pytest.mark.slow
def test_lab_is_built_meanwhile_and_its_failure_is_none_of_set_up(project: Path) -> None:
    write_lab_build(
        project, "import pathlib, sys; pathlib.Path('built').write_text(str(pathlib.Path('.venv').exists())); sys.exit(1)"
    )
    done = set_up(project, "--lab")
    assert (done.returncode, done.stderr) == (0, "")
    assert (project / ".venv/.project").exists()
    (project / "built").unlink()
    assert set_up(project, "--lab").stdout == ""
    assert not (project / "built").exists(), "what is set up is not built again by each command"


@pytest.mark.nightly  # the reverse of the failure above
@pytest.mark.slow
def test_failed_set_up_ends_the_build_of_the_lab(project: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('ended').touch(), sys.exit()))\n"
        "time.sleep(600)\n"
    )
    write_lab_build(project, code)
    (project / "requirements/dev.txt").write_text(f"pinned==1.0 --hash=sha256:{'0' * 64}\n")
    assert set_up(project, "--lab").returncode == 1
    assert (project / "ended").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "3.9.2"', "python3 is 3.9.2: install one and put it on the PATH."),
        ("exit 127", "no python3 is on the PATH: install one"),
        (
            'case "$2" in *ensurepip*) exit 1 ;; *) echo 3.12.4 ;; esac',
            "lacks the venv module, which Debian and Ubuntu call python3.12-venv",
        ),
    ],
)
def test_an_unsuitable_python_is_one_sentence(project: Path, tmp_path: Path, script: str, message: str) -> None:
    done = set_up(project, path=replace_python(tmp_path / "bin", script))
    assert done.returncode == 1
    assert done.stderr.startswith("setup: Aerie needs Python 3.11 or newer with the venv module, and ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
