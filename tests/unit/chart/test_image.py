"""Contents of the image as the Dockerfile states them, checked without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from aerie.manifests import plugin_config_map

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def copied_paths() -> list[str]:
    """Return the paths of the repository that the Dockerfile copies."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [path for line in lines for path in line.split()[:-1]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the Dockerfile copies, and no others."""
    folder = tmp_path_factory.mktemp("source")
    for path in copied_paths():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, folder / path)
    return folder


def build_wheel(source: Path, project: str, wheel_folder: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheel_folder)]
    completed = subprocess.run(command, cwd=source / project, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    (wheel_path,) = wheel_folder.glob("*.whl")
    return zipfile.ZipFile(wheel_path)


def test_image_has_the_operator_and_the_plugin_that_it_delivers(source: Path, tmp_path: Path) -> None:
    projects = re.findall(r"--wheel-dir /wheel (.+) \\\n", DOCKERFILE)
    assert projects == [". ./plugin"]
    operator = build_wheel(source, ".", tmp_path / "operator").namelist()
    assert {name.split("/")[0] for name in operator if ".dist-info/" not in name} == {"aerie"}
    assert {"aerie/cli/__init__.py", "aerie/engine/models/catalog.toml", "aerie/py.typed"} <= set(operator)
    plugin = set(build_wheel(source, "plugin", tmp_path / "plugin").namelist())
    delivered = set(plugin_config_map.load_plugin().files)
    assert delivered <= plugin
    assert delivered >= {name for name in plugin if name.endswith((".py", "/entry_points.txt", "/METADATA"))}


def test_locked_packages_have_hashes_and_exclude_torch() -> None:
    locks = re.findall(r"-r (\S+)", DOCKERFILE)
    assert set(locks) <= set(copied_paths())
    for lock in locks:
        pins = re.findall(r"^([a-z0-9-]+)==\S+( ;.*?)? \\$", text := (ROOT / lock).read_text(), re.MULTILINE)
        assert len(pins) == len(re.findall(r"^\S+==", text, re.MULTILINE))
        assert not {"torch", "vllm", "transformers"} & {name for name, _ in pins}
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all(pin in (ROOT / "requirements" / "build.txt").read_text() for pin in backend)


def test_build_context_includes_every_copied_path() -> None:
    included_paths = [line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all(any(path == entry or path.startswith(f"{entry}/") for entry in included_paths) for path in copied_paths())
