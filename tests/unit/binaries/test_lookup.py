"""Binaries from a folder that the user names, and what is found without building."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_lab import binaries
from aerie_lab.binaries.families import ENVOY_VERSION, FAMILIES, manifest_path
from aerie_lab.errors import BuildError

VERSION = FAMILIES["kubernetes"].version


def put(folder: Path, name: str, output: str) -> Path:
    """A program that prints `output`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A folder with a whole Kubernetes of the right version, and no other family."""
    for member in FAMILIES["kubernetes"].binaries:
        put(tmp_path / "ready", member.name, f"Kubernetes v{VERSION}")
    return tmp_path / "ready"


def test_named_folder_is_used_and_nothing_is_built(ready: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AERIE_LAB_BINARIES", str(ready))
    assert binaries.ensure_family("kubernetes") == binaries.find_family_folder("kubernetes") == ready
    assert binaries.ensure_binary("kubectl") == binaries.find_installed_binary("kubectl") == ready / "kubectl"
    assert not cache.exists()


def test_parameter_goes_before_the_variable(ready: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AERIE_LAB_BINARIES", str(tmp_path / "nowhere"))
    assert binaries.ensure_family("kubernetes", binaries_folder=ready) == ready


def test_wrong_version_is_named(ready: Path) -> None:
    put(ready, "kube-scheduler", "Kubernetes v1.29.1")
    with pytest.raises(BuildError, match=rf"kube-scheduler is version 1\.29\.1, and the lab needs version {VERSION}"):
        binaries.ensure_family("kubernetes", binaries_folder=ready)
    assert binaries.ensure_binary("kubectl", binaries_folder=ready) == ready / "kubectl"
    put(ready, "kube-scheduler", f"Kubernetes v{VERSION}  ")  # the answer is not taken from memory
    assert binaries.ensure_family("kubernetes", binaries_folder=ready) == ready


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "cannot be used (No such file or directory)"),
        (lambda path: path.write_text("#!/bin/sh\necho hello\n"), "reports no version"),
        (lambda path: path.write_bytes(b"\x7fELF truncated"), "cannot be run (Exec format error)"),
        (lambda path: path.chmod(0o644), "cannot be run (Permission denied)"),
    ],
)
def test_unusable_binary_is_named(ready: Path, spoil: object, reason: str) -> None:
    assert callable(spoil)
    spoil(ready / "kubectl")
    with pytest.raises(BuildError) as caught:
        binaries.ensure_binary("kubectl", binaries_folder=ready)
    assert str(caught.value) == (
        f"{ready}/kubectl {reason}, and the lab needs version {VERSION}: put that there, or unset AERIE_LAB_BINARIES to build it."
    )


def test_named_folder_needs_the_manifests_too(tmp_path: Path) -> None:
    contour = FAMILIES["contour"]
    ready = tmp_path / "ready"
    put(ready, "contour", f"Version: v{contour.version}")
    with pytest.raises(BuildError, match=r"manifests/contour/00-common\.yaml does not exist"):
        binaries.ensure_family("contour", binaries_folder=ready)
    for manifest in contour.manifests:
        (ready / manifest_path(manifest)).parent.mkdir(parents=True, exist_ok=True)
        (ready / manifest_path(manifest)).write_text("kind: List\n")
    assert binaries.ensure_family("contour", binaries_folder=ready) == ready


def test_named_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nowhere, named to have the lab's binaries, is not a folder"):
        binaries.ensure_family("etcd", binaries_folder=tmp_path / "nowhere")


def test_envoy_comes_from_its_package_unless_the_named_folder_has_it(ready: Path) -> None:
    packaged = binaries.ensure_binary("envoy")
    assert packaged == binaries.find_installed_binary("envoy") == binaries.ensure_binary("envoy", binaries_folder=ready)
    assert packaged.stat().st_size > 10**7
    put(ready, "envoy", f"envoy  version: 6eb0d2d97489/{ENVOY_VERSION}/Clean/RELEASE/BoringSSL")
    assert binaries.ensure_binary("envoy", binaries_folder=ready) == ready / "envoy"


def test_nothing_is_built_to_answer_whether_it_is_there(cache: Path) -> None:
    assert binaries.find_installed_binary("kubectl") is None
    with pytest.raises(BuildError, match=r"etcd is not ready, because it has not been built: run `aerie-lab build etcd`"):
        binaries.find_family_folder("etcd")
    assert not cache.exists()


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(BuildError, match="'kubelet' is no binary of the lab: use one of contour, envoy, etcd"):
        binaries.ensure_binary("kubelet")
    with pytest.raises(BuildError, match="'istio' is no family of binaries: use one of kubernetes, etcd"):
        binaries.ensure_family("istio")
