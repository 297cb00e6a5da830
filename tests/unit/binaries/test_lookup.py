"""Binaries from a folder of the user, and binaries that are found without a build."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_lab import binaries
from aerie_lab.binaries.families import ENVOY_VERSION, FAMILIES, manifest_path
from aerie_lab.errors import BuildError

VERSION = FAMILIES["kubernetes"].version


def write_program(folder: Path, name: str, output: str) -> Path:
    """Write a program that prints `output`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def kubernetes_folder(tmp_path: Path) -> Path:
    """Return a folder with all Kubernetes binaries of the right version, and no other family."""
    for member in FAMILIES["kubernetes"].binaries:
        write_program(tmp_path / "ready", member.name, f"Kubernetes v{VERSION}")
    return tmp_path / "ready"


def test_a_folder_of_the_user_is_used_without_a_build(
    kubernetes_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AERIE_LAB_BINARIES", str(kubernetes_folder))
    assert binaries.ensure_family("kubernetes") == binaries.find_family_folder("kubernetes") == kubernetes_folder
    assert binaries.ensure_binary("kubectl") == binaries.find_installed_binary("kubectl") == kubernetes_folder / "kubectl"
    assert not cache.exists()


def test_the_parameter_overrides_the_environment_variable(
    kubernetes_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AERIE_LAB_BINARIES", str(tmp_path / "nowhere"))
    assert binaries.ensure_family("kubernetes", binaries_folder=kubernetes_folder) == kubernetes_folder


def test_a_wrong_version_is_reported(kubernetes_folder: Path) -> None:
    write_program(kubernetes_folder, "kube-scheduler", "Kubernetes v1.29.1")
    with pytest.raises(BuildError, match=rf"kube-scheduler is version 1\.29\.1, and the lab needs version {VERSION}"):
        binaries.ensure_family("kubernetes", binaries_folder=kubernetes_folder)
    assert binaries.ensure_binary("kubectl", binaries_folder=kubernetes_folder) == kubernetes_folder / "kubectl"
    write_program(kubernetes_folder, "kube-scheduler", f"Kubernetes v{VERSION}  ")  # the version is not cached
    assert binaries.ensure_family("kubernetes", binaries_folder=kubernetes_folder) == kubernetes_folder


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "cannot be used (No such file or directory)"),
        (lambda path: path.write_text("#!/bin/sh\necho hello\n"), "reports no version"),
        (lambda path: path.write_bytes(b"\x7fELF truncated"), "cannot be run (Exec format error)"),
        (lambda path: path.chmod(0o644), "cannot be run (Permission denied)"),
    ],
)
def test_an_unusable_binary_is_reported(kubernetes_folder: Path, damage: object, reason: str) -> None:
    assert callable(damage)
    damage(kubernetes_folder / "kubectl")
    with pytest.raises(BuildError) as caught:
        binaries.ensure_binary("kubectl", binaries_folder=kubernetes_folder)
    assert str(caught.value) == (
        f"{kubernetes_folder}/kubectl {reason}, and the lab needs version {VERSION}: "
        "put that there, or unset AERIE_LAB_BINARIES to build it."
    )


def test_a_folder_of_the_user_needs_the_manifests_too(tmp_path: Path) -> None:
    contour = FAMILIES["contour"]
    contour_folder = tmp_path / "ready"
    write_program(contour_folder, "contour", f"Version: v{contour.version}")
    with pytest.raises(BuildError, match=r"manifests/contour/00-common\.yaml does not exist"):
        binaries.ensure_family("contour", binaries_folder=contour_folder)
    for manifest in contour.manifests:
        (contour_folder / manifest_path(manifest)).parent.mkdir(parents=True, exist_ok=True)
        (contour_folder / manifest_path(manifest)).write_text("kind: List\n")
    assert binaries.ensure_family("contour", binaries_folder=contour_folder) == contour_folder


def test_a_folder_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nowhere, named to have the lab's binaries, is not a folder"):
        binaries.ensure_family("etcd", binaries_folder=tmp_path / "nowhere")


def test_envoy_comes_from_its_package_unless_the_folder_has_it(kubernetes_folder: Path) -> None:
    packaged = binaries.ensure_binary("envoy")
    assert (
        packaged == binaries.find_installed_binary("envoy") == binaries.ensure_binary("envoy", binaries_folder=kubernetes_folder)
    )
    assert packaged.stat().st_size > 10**7
    write_program(kubernetes_folder, "envoy", f"envoy  version: 6eb0d2d97489/{ENVOY_VERSION}/Clean/RELEASE/BoringSSL")
    assert binaries.ensure_binary("envoy", binaries_folder=kubernetes_folder) == kubernetes_folder / "envoy"


def test_looking_for_a_binary_builds_nothing(cache: Path) -> None:
    assert binaries.find_installed_binary("kubectl") is None
    with pytest.raises(BuildError, match=r"etcd is not ready, because it has not been built: run `aerie-lab build etcd`"):
        binaries.find_family_folder("etcd")
    assert not cache.exists()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BuildError, match="'kubelet' is no binary of the lab: use one of contour, envoy, etcd"):
        binaries.ensure_binary("kubelet")
    with pytest.raises(BuildError, match="'istio' is no family of binaries: use one of kubernetes, etcd"):
        binaries.ensure_family("istio")
