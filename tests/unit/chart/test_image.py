"""Contents of the images as the Dockerfiles state them, checked without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from aerie.manifests import plugin_config_map

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = ("Dockerfile", "lab/Dockerfile")
IMPORT_PROGRAMS = """
import aerie_lab.engine.load_generation.__main__, aerie_lab.engine.serving.drafter_endpoint, aerie_lab.engine.serving.server
from aerie_lab.hub.checkpoints import load_repositories
import aerie_lab.hub.server
repositories = load_repositories()
print(aerie_lab.__file__, *(file for repository in repositories.values() for file in repository.files()))
"""


def copied_paths(dockerfile: str) -> list[str]:
    """Return the paths of the repository that a Dockerfile copies."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", (ROOT / dockerfile).read_text(), re.MULTILINE)
    return [path for line in lines for path in line.split()[:-1]]


def copy_source(dockerfile: str, folder: Path) -> Path:
    """Copy the files that a Dockerfile copies, and no others, into the folder; return it."""
    for path in copied_paths(dockerfile):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, folder / path, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, folder / path)
    return folder


def build_wheel(project: Path, wheel_folder: Path, target: str = "wheel") -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(wheel_folder)]
    completed = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    (wheel_path,) = wheel_folder.glob("*.whl")
    return zipfile.ZipFile(wheel_path)


def test_image_has_the_operator_and_the_plugin_that_it_delivers(tmp_path: Path) -> None:
    source = copy_source("Dockerfile", tmp_path / "source")
    projects = re.findall(r"--wheel-dir /wheel (.+) \\\n", (ROOT / "Dockerfile").read_text())
    assert projects == [". ./plugin"]
    operator = build_wheel(source, tmp_path / "operator").namelist()
    assert {name.split("/")[0] for name in operator if ".dist-info/" not in name} == {"aerie"}
    assert {"aerie/cli/__init__.py", "aerie/engine/models/catalog.toml", "aerie/py.typed"} <= set(operator)
    plugin = set(build_wheel(source / "plugin", tmp_path / "plugin").namelist())
    delivered = set(plugin_config_map.load_plugin().files)
    assert delivered <= plugin
    assert delivered >= {name for name in plugin if name.endswith((".py", "/entry_points.txt", "/METADATA"))}


def test_lab_image_has_the_engine_the_hub_with_its_files_and_the_sender_of_requests(tmp_path: Path) -> None:
    source = copy_source("lab/Dockerfile", tmp_path / "source")
    text = (ROOT / "lab/Dockerfile").read_text()
    (projects,) = re.findall(r"for project in (.+); do", text)
    (target,) = re.findall(r"hatchling build --target (\S+)", text)
    search_path = []
    for project in projects.split():
        wheel = build_wheel(source / project, tmp_path / "wheel" / project, target)
        search_path += [wheel.read(name).decode().strip() for name in wheel.namelist() if name.endswith(".pth")]
    assert search_path == [str(source / folder) for folder in ("operator", "plugin", "lab")]
    # Without `site`, so that this checkout is not on the path, from which its packages are installed.
    command = [sys.executable, "-S", "-c", IMPORT_PROGRAMS]
    environment = {"PYTHONPATH": ":".join([*search_path, sysconfig.get_path("purelib")]), "PYTHONDONTWRITEBYTECODE": "1"}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(str(source / "lab/aerie_lab"))
    assert "model.safetensors" in completed.stdout.split()


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_locked_packages_have_hashes_and_exclude_torch(dockerfile: str) -> None:
    locks = re.findall(r"-r (\S+)", (ROOT / dockerfile).read_text())
    assert set(locks) <= set(copied_paths(dockerfile))
    for lock in locks:
        pins = re.findall(r"^([a-z0-9-]+)==\S+( ;.*?)? \\$", text := (ROOT / lock).read_text(), re.MULTILINE)
        assert len(pins) == len(re.findall(r"^\S+==", text, re.MULTILINE))
        assert not {"torch", "vllm", "transformers"} & {name for name, _ in pins}
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all(pin in (ROOT / "requirements" / "build.txt").read_text() for pin in backend)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_build_context_includes_every_copied_path(dockerfile: str) -> None:
    included_paths = [line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in copied_paths(dockerfile):
        assert (ROOT / path).exists()
        assert any(path == entry or path.startswith(f"{entry}/") for entry in included_paths)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_image_does_not_run_as_root(dockerfile: str) -> None:
    last_stage = (ROOT / dockerfile).read_text().rpartition("FROM ")[2]
    assert re.findall(r"^USER (.+)$", last_stage, re.MULTILINE) == ["65532:65532"]
