"""The Python of one release with the compiled files of another environment: the origin of each file, and rejected bases."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aerie.engine.releases import NEWEST_VERIFIED_VERSION, Version
from aerie_lab import binaries
from aerie_lab.binaries import environment, lookup, pip, store
from aerie_lab.binaries.families import ENVIRONMENTS, Addon, Binary, EnvironmentOverlay, PythonEnvironment
from aerie_lab.engine.arguments import NEWEST_VLLM_VERSION
from aerie_lab.errors import BuildError
from tests.unit.binaries.wheels import Wheels

pytestmark = pytest.mark.usefixtures("cache")

PROGRAM = """
import importlib.metadata, pathlib, subprocess, sys, beneath, engine

def main():
    program = "import engine, pathlib; print(engine.RELEASE, (pathlib.Path(engine.__file__).parent / 'k.so').read_text())"
    print("version", importlib.metadata.version("engine"))
    if sys.argv[1:] != ["--version"]:
        # A child without variables: nothing hangs on PYTHONPATH.
        print(subprocess.run([sys.executable, "-c", program], env={}, capture_output=True, text=True, check=True).stdout)
"""
ADDON = """
import engine

def register():
    if engine.RELEASE not in ("1.0.0", "2.0.0"):
        raise ValueError(f"release {engine.RELEASE} is not known")
"""


@pytest.fixture(autouse=True)
def without_pip(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow step, pip in each environment. Wheels are unpacked instead; test_environment.py tests pip itself."""

    def make(_: PythonEnvironment, home: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)

    def install(python: Path, lock: Path, *_: object, **__: object) -> None:
        home = python.parent.parent
        for name, version in re.findall(r"^(\S+)==(\S+)", lock.read_text(), re.MULTILINE):
            wheels.unpack(name, version, next(home.glob("lib/python*/site-packages")))
        (home / "bin" / "engine").write_text(f"#!{python}\nimport tool\ntool.main()\n")
        (home / "bin" / "engine").chmod(0o755)

    monkeypatch.setattr(environment, "_create_virtual_environment", make)
    monkeypatch.setattr(pip, "install_lock", install)


@pytest.fixture
def base(tmp_path: Path, wheels: Wheels) -> PythonEnvironment:
    """Return an engine for CPU: release 1.0.0, with a compiled file, a package that both need, and an add-on."""
    files = {"engine/__init__.py": "RELEASE = '1.0.0'", "engine/k.so": "cpu kernel", "engine/old.py": "", "beneath.py": ""}
    files["tool.py"] = PROGRAM
    addon = tmp_path / "addon_of_lab.py"
    addon.write_text(ADDON)
    return PythonEnvironment(
        name="engine",
        lock=wheels.lock("engine", wheels.write("engine-cpu", "1.0.0", files, {"engine": "tool:main"})),
        distribution="engine-cpu",
        binaries=(Binary("engine", package="", version_arguments=None),),
        max_python_version=(3, 99),
        alias_distribution="engine",
        local_version_suffix="+cpu",
        checked_files=("engine/__init__.py",),
        addons=(Addon(addon, "engine.plugins", "register"),),
    )


@pytest.fixture
def overlay(base: PythonEnvironment, wheels: Wheels) -> PythonEnvironment:
    """Return release 2.0.0, which only has compiled files for another device."""
    return build_overlay(base, wheels, "2.0.0")


def build_overlay(base: PythonEnvironment, wheels: Wheels, version: str) -> PythonEnvironment:
    files = {
        "engine/__init__.py": f"RELEASE = '{version}'",
        "engine/k.so": "gpu kernel",
        "engine/deep/gpu.so": "",
        "tool.py": PROGRAM,
    }
    files |= {"engine/table.json": "{}", "engine/binary": "ELF"}
    return dataclasses.replace(
        base,
        name="engine-2",
        lock=wheels.lock("engine-2", wheels.write("engine", version, files, {"engine": "tool:main"})),
        distribution="engine",
        checked_files=("engine/__init__.py", "engine/k.so"),
        addons=(),
        overlay=EnvironmentOverlay(base=base, base_version="1.0.0", package="engine", compiled_files=("k.so",)),
    )


def test_an_overlay_runs_its_python_with_compiled_files_of_the_base(base: PythonEnvironment, overlay: PythonEnvironment) -> None:
    assert store.unusable_reason(overlay) == "engine, which it stands on, cannot be used (it has not been built)"
    progress: list[str] = []
    home = store.ensure_build(overlay, progress.append)
    assert [line.split(":")[0] for line in progress if "ready" in line] == ["engine 1.0.0", "engine-2 2.0.0"]
    done = subprocess.run([home / "bin" / "engine"], capture_output=True, text=True, cwd="/", env={}, check=True)
    assert done.stdout.split() == ["version", "2.0.0+cpu", "2.0.0", "cpu", "kernel"]

    package = home / overlay.site_packages / "engine"
    left = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert left == {"__init__.py", "table.json", "k.so"}
    assert (package / "k.so").resolve() == (store.build_folder(base) / base.site_packages / "engine" / "k.so").resolve()

    assert store.unusable_reason(overlay) is None
    (store.build_folder(base) / base.site_packages / "engine" / "k.so").write_text("another")
    assert store.unusable_reason(overlay) == f"{overlay.site_packages}/engine/k.so has 7 bytes instead of 10"


def test_another_base_gives_another_overlay_key(base: PythonEnvironment, overlay: PythonEnvironment) -> None:
    before = environment.hash_environment(overlay)
    base.lock.write_text(base.lock.read_text() + "other==1\n")
    assert environment.hash_environment(overlay) != before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_version": "0.9.0"}, r"runs with the compiled files of engine 0\.9\.0, and .*engine\.txt pins 1\.0\.0"),
        (
            {"compiled_files": ("k.so", "fast.so")},
            r"has on x86_64, and .*/engine lacks fast\.so: use an x86_64 machine, or remove",
        ),
        ({"compiled_files": ("fast.so",)}, r"/engine lacks fast\.so and also has k\.so:"),
    ],
)
def test_an_incompatible_base_is_rejected_before_the_build(
    overlay: PythonEnvironment, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    assert overlay.overlay is not None
    package = tmp_path / "base" / overlay.site_packages / "engine"
    package.mkdir(parents=True)
    (package / "k.so").write_text("cpu kernel")
    other = dataclasses.replace(overlay, overlay=dataclasses.replace(overlay.overlay, **change))
    with pytest.raises(BuildError, match=f"^engine-2 2.0.0 .*{reason}") as caught:
        environment.install_environment(
            other, tmp_path, tmp_path / "home", tmp_path / "log", print, base_folder=tmp_path / "base"
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_a_release_unknown_to_the_addon_of_the_base_is_rejected(base: PythonEnvironment, wheels: Wheels) -> None:
    other = build_overlay(base, wheels, "3.0.0")
    with pytest.raises(
        BuildError, match=r"^engine-2 3\.0\.0 is rejected by the lab's add-on addon_of_lab: .*3\.0\.0 is not known$"
    ):
        store.ensure_build(other, print)
    assert store.unusable_reason(other) == "it has not been built"


def test_an_unfinished_build_of_an_overlay_is_not_removed(
    base: PythonEnvironment, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of engine-2 have their own lock, so a build of engine must not remove them as remains of a killed build."""
    unfinished_build = cache / "bin" / "engine-2-0123456789abcdef"
    left = cache / "bin" / "engine-0123456789abcdef"
    for folder in (unfinished_build, left):
        folder.mkdir(parents=True)
    monkeypatch.setattr(environment, "install_environment", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(pytest.fail.Exception):
        store.ensure_build(base, print)
    assert unfinished_build.is_dir()
    assert not left.exists()


# -- vLLM 0.33 --------------------------------------------------------------------------------------------------------


def test_the_lab_runs_the_newest_release_that_aerie_supports() -> None:
    """It is also the newest release whose flags the simulator accepts."""
    runs = {Version.parse(environment.version) for environment in ENVIRONMENTS.values()}
    assert max(runs) == NEWEST_VERIFIED_VERSION == Version.parse(NEWEST_VLLM_VERSION)


def test_vllm_0_33_is_an_overlay_of_the_vllm_of_the_lab() -> None:
    next_release = ENVIRONMENTS["vllm-0.33"]
    assert next_release.overlay is not None
    assert next_release.overlay.base is ENVIRONMENTS["vllm"]
    assert next_release.overlay.base_version == ENVIRONMENTS["vllm"].version
    pins = next_release.read_lock()
    assert "://" not in pins
    assert re.findall(r"^(\S+)==", pins, re.MULTILINE) == ["orjson", "vllm"]
    assert "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa" in pins  # the x86_64 wheel of the release


def test_vllm_0_33_is_built_only_on_request() -> None:
    assert "vllm-0.33" in binaries.FAMILY_NAMES
    assert "vllm-0.33" not in binaries.DEFAULT_FAMILY_NAMES
    with pytest.raises(BuildError, match=r"vllm-0\.33 is not ready, because .*: run `aerie-lab build vllm-0\.33`"):
        binaries.find_family_folder("vllm-0.33")


def test_the_vllm_program_comes_from_the_requested_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ensure_build", lambda recipe, _: tmp_path / recipe.name)
    assert lookup.ensure_binary("vllm") == tmp_path / "vllm" / "bin" / "vllm"
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "vllm").symlink_to("/bin/sh")
    assert os.access(ready / "vllm", os.X_OK)
    assert lookup.ensure_family("vllm", binaries_folder=ready) == ready
    assert (
        lookup.ensure_family("vllm-0.33", binaries_folder=ready) == tmp_path / "vllm-0.33" / "bin"
    )  # a vllm of the user may have any release
