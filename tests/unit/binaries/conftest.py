"""A family that needs no network, a fake Go with the test's own build, and a cache per test."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie_lab.binaries import toolchain
from aerie_lab.binaries.families import Binary, BinaryFamily
from aerie_lab.binaries.toolchain import GoToolchain
from tests.unit.binaries.wheels import Wheels

MAIN = """//go:build lab

package main

import "os"

var version = "unstamped"

func main() { os.Stdout.WriteString("hello version " + version + "\\n") }
"""

# Responds like `go`, and "builds" by running the test's own lines: `produce` writes the files of a build.
FAKE_GO = r"""#!/bin/sh
produce() {
    printf '#!/bin/sh\necho hello version v1.2.3\n' > "$out/hello"
    chmod +x "$out/hello"
}
case "$1 $2" in
"env GOVERSION") echo go1.99.0 ;;
"env GOCACHE") echo "$AERIE_LAB_CACHE"; echo "$AERIE_LAB_CACHE" ;;
"list -m") echo "$PWD/tool" ;;
build*) out=$3; {build} ;;
esac
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the lab's cache for this test."""
    monkeypatch.setenv("AERIE_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AERIE_LAB_BINARIES", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheels:
    """Return the only wheels that pip finds in this test."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return Wheels(tmp_path / "wheels")


@pytest.fixture
def tiny(tmp_path: Path) -> BinaryFamily:
    """Return a family of one binary whose module is beside its go.mod."""
    sources = tmp_path / "modules" / "tiny"
    for name, text in {
        "go.mod": "module aerie.dev/tiny\n\ngo 1.26.0\n\nrequire example.com/tool v1.2.3\n\nreplace example.com/tool => ./tool\n",
        "tool/go.mod": "module example.com/tool\n\ngo 1.26.0\n",
        "tool/cmd/hello/main.go": MAIN,
        "tool/examples/crds/01-crds.yaml": "kind: List\n",
    }.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text)
    return BinaryFamily(
        name="tiny",
        module="example.com/tool",
        binaries=(Binary("hello", "example.com/tool/cmd/hello"),),
        tags=("lab",),
        linker_variables=("main.version=v{version}",),
        manifests=("examples/crds/01-crds.yaml",),
        folder=tmp_path / "modules",
    )


@pytest.fixture(scope="session")
def any_go() -> GoToolchain:
    """Return the Go that the lab itself would use; installed when this machine has none."""
    return toolchain.find_go("1.26.0", print)


@pytest.fixture
def go(any_go: GoToolchain, monkeypatch: pytest.MonkeyPatch) -> GoToolchain:
    """Return a real Go, first on the PATH, with its caches outside the test's own."""
    monkeypatch.setenv("PATH", f"{any_go.path.parent}:{os.environ['PATH']}")
    for name in ("GOCACHE", "GOMODCACHE", "GOPATH"):
        if name in any_go.environment:
            monkeypatch.setenv(name, any_go.environment[name])
    return any_go


@pytest.fixture
def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a fake `go` on the PATH that runs the given shell lines in place of a build."""

    def put(build: str) -> Path:
        path = tmp_path / "fake" / "go"
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE_GO.replace("{build}", build))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return path

    return put
