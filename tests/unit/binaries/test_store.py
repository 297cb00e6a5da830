"""A build is complete or absent, runs once, and is repeated when its files are damaged."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie_lab.binaries import store
from aerie_lab.binaries.families import Binary, BinaryFamily
from aerie_lab.binaries.toolchain import GoToolchain
from aerie_lab.errors import BuildError

pytestmark = pytest.mark.usefixtures("cache")


def find_unfinished_entries(cache: Path) -> list[str]:
    """Return the cache's entries other than finished builds, logs and locks."""
    return [path.name for path in (cache / "bin").iterdir() if path.name.endswith(".building")]


def test_go_builds_binaries_and_manifests_are_copied(tiny: BinaryFamily, go: GoToolchain, cache: Path) -> None:
    progress: list[str] = []
    folder = store.ensure_build(tiny, progress.append)

    assert subprocess.run([folder / "hello"], capture_output=True, text=True).stdout == "hello version v1.2.3\n"
    assert (folder / "manifests/crds/01-crds.yaml").read_text() == "kind: List\n"
    assert progress[0].startswith(f"tiny 1.2.3: building hello with {go.version}")
    assert progress[-1].startswith("tiny 1.2.3: ready after ")
    assert find_unfinished_entries(cache) == []


def test_second_use_builds_nothing(tiny: BinaryFamily, fake_go: Callable[[str], Path]) -> None:
    fake_go("produce")
    store.ensure_build(tiny, print)
    fake_go("exit 1")
    progress: list[str] = []
    assert (store.ensure_build(tiny, progress.append) / "hello").exists()
    assert progress == []


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("go.mod", lambda text: text + "\n// another pin\n"),
        ("go.sum", lambda text: text + "example.com/x v1.0.0 h1:abc=\n"),
    ],
)
def test_another_pinned_version_is_another_build(tiny: BinaryFamily, path: str, change: Callable[[str], str]) -> None:
    before = store.build_folder(tiny)
    file = tiny.sources / path
    file.write_text(change(file.read_text() if file.exists() else ""))
    assert store.build_folder(tiny) != before


def test_another_recipe_is_another_build(tiny: BinaryFamily) -> None:
    others = [
        dataclasses.replace(tiny, linker_variables=()),
        dataclasses.replace(tiny, tags=()),
        dataclasses.replace(tiny, manifests=()),
        dataclasses.replace(tiny, binaries=(Binary("hello", "example.com/tool/cmd/other"),)),
    ]
    assert len({store.build_folder(family) for family in [tiny, *others]}) == 5


def test_a_truncated_binary_is_reported_and_rebuilt(tiny: BinaryFamily, fake_go: Callable[[str], Path]) -> None:
    fake_go("produce")
    binary = store.ensure_build(tiny, print) / "hello"
    size = binary.stat().st_size
    binary.write_bytes(b"#!")
    progress: list[str] = []
    store.ensure_build(tiny, progress.append)
    assert progress[0].startswith(f"tiny: hello has 2 bytes instead of {size} in ")
    assert binary.stat().st_size == size


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "hello").unlink(), "hello is missing"),
        (lambda folder: (folder / "manifests/crds/01-crds.yaml").unlink(), "01-crds.yaml is missing"),
        (lambda folder: (folder / "build.json").unlink(), "build.json is missing"),
        (lambda folder: (folder / "build.json").write_text("{}"), "its build.json cannot be read"),
        (lambda folder: (folder / "build.json").write_text('{"sizes": [1]}'), "its build.json cannot be read"),
        (lambda folder: (folder / "build.json").write_bytes(b"\xff\x00"), "its build.json cannot be read"),
    ],
)
def test_a_damaged_build_is_reported_and_rebuilt(
    tiny: BinaryFamily, fake_go: Callable[[str], Path], damage: Callable[[Path], object], message: str
) -> None:
    fake_go("produce")
    damage(store.ensure_build(tiny, print))
    progress: list[str] = []
    store.ensure_build(tiny, progress.append)
    assert progress[0].startswith(f"tiny: {message}")
    assert store.unusable_reason(tiny) is None


def test_remains_of_a_killed_build_are_removed(tiny: BinaryFamily, fake_go: Callable[[str], Path], cache: Path) -> None:
    (cache / "bin" / ".tiny.building" / "out").mkdir(parents=True)
    (cache / "bin" / ".tiny.building" / "out" / "hello").write_text("half")
    fake_go("produce")
    assert (store.ensure_build(tiny, print) / "hello").read_text().startswith("#!/bin/sh")
    assert find_unfinished_entries(cache) == []


@pytest.mark.usefixtures("go")
def test_a_compile_error_names_the_line_and_leaves_no_files(tiny: BinaryFamily, cache: Path) -> None:
    (tiny.sources / "tool/cmd/hello/main.go").write_text("//go:build lab\n\npackage main\n\nfunc main() { missing() }\n")
    with pytest.raises(BuildError, match=r"tiny 1\.2\.3 cannot be built: .*main\.go:5:15: undefined: missing.*tiny\.log"):
        store.ensure_build(tiny, print)
    assert "undefined: missing" in (cache / "bin/tiny.log").read_text()
    assert find_unfinished_entries(cache) == []
    assert not store.build_folder(tiny).exists()


@pytest.mark.usefixtures("go")
def test_a_module_missing_in_go_sum_fails_the_build(tiny: BinaryFamily) -> None:
    # No registry is requested: -mod=readonly ends the build first.
    go_mod = tiny.sources / "tool/go.mod"
    go_mod.write_text(go_mod.read_text() + "\nrequire example.com/other v1.0.0\n")
    main = tiny.sources / "tool/cmd/hello/main.go"
    main.write_text(main.read_text().replace('import "os"', 'import (\n"os"\n_ "example.com/other"\n)'))
    with pytest.raises(BuildError, match=r"tiny 1\.2\.3 cannot be built: .*(go mod tidy|example\.com/other)"):
        store.ensure_build(tiny, print)


@pytest.mark.usefixtures("go")
def test_settings_of_the_user_do_not_change_the_build(
    tiny: BinaryFamily, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "go.work").write_text("this is no go.work file")
    monkeypatch.setenv("GOFLAGS", "-mod=vendor -tags=nonsense")
    monkeypatch.setenv("GOWORK", str(tmp_path / "go.work"))
    monkeypatch.setenv("GOOS", "plan9")
    assert store.ensure_build(tiny, print).exists()


@pytest.mark.usefixtures("go")
def test_a_build_that_reports_another_version_is_rejected(tiny: BinaryFamily) -> None:
    mislabelled = dataclasses.replace(tiny, linker_variables=("main.version=v9.9.9",))
    with pytest.raises(BuildError, match=r"the hello built from .* is version 9\.9\.9, not 1\.2\.3"):
        store.ensure_build(mislabelled, print)
    assert not store.build_folder(mislabelled).exists()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("compile: writing output: write $WORK/b1/_pkg_.a: no space left on device", "the disk is full .* GiB"),
        (
            'go: example.com/x@v1.0.0: Get \\"https://registry.invalid/\\": dial tcp: lookup: no such host',
            "the Go module registry cannot be reached .* GOPROXY",
        ),
        ("go: module lookup disabled by GOPROXY=off", "the Go module registry cannot be reached"),
        ("verifying example.com/x@v1.0.0: checksum mismatch", r"does not match its hash in go\.sum"),
        ("example.com/x: /usr/lib/go/compile: signal: killed", "because memory was exhausted"),
    ],
)
def test_a_failure_is_one_sentence_with_a_fix(
    tiny: BinaryFamily, fake_go: Callable[[str], Path], output: str, reason: str
) -> None:
    fake_go(f'echo example.com/x; echo "{output}" >&2; exit 1')
    with pytest.raises(BuildError, match=reason) as caught:
        store.ensure_build(tiny, print)
    assert "\n" not in str(caught.value)


def test_a_killed_go_is_reported(tiny: BinaryFamily, fake_go: Callable[[str], Path]) -> None:
    fake_go("kill -9 $$")
    with pytest.raises(BuildError, match="Go was killed, probably because memory was exhausted"):
        store.ensure_build(tiny, print)


def test_too_little_disk_space_fails_before_the_build(tiny: BinaryFamily, fake_go: Callable[[str], Path], cache: Path) -> None:
    fake_go("touch $AERIE_LAB_CACHE/built; exit 1")
    with pytest.raises(BuildError, match=r"building tiny may need 1000000000 GiB below .* GiB are free"):
        store.ensure_build(dataclasses.replace(tiny, disk_gib=10**9), print)
    assert not (cache / "built").exists()


def test_a_cache_that_cannot_be_written_is_reported(tiny: BinaryFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AERIE_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"tiny cannot be built, because of .*/file/bin.*AERIE_LAB_CACHE"):
        store.ensure_build(tiny, print)
