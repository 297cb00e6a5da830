"""Resolution of paths below a new root: they never lead outside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_lab.sandbox.rootfs import _resolve_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "var" / "lib").mkdir(parents=True)
    (tmp_path / "var" / "run").symlink_to("/run")
    (tmp_path / "var" / "up").symlink_to("../../../../outside")
    (tmp_path / "var" / "lib" / "near").symlink_to("../run/here")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("/var/lib/x", "/var/lib/x"),
        ("/var/run/secrets", "/run/secrets"),
        ("/var/up/x", "/outside/x"),
        ("/var/lib/near/x", "/run/here/x"),
        ("/../../etc", "/etc"),
        ("//var/./lib/../x", "/var/x"),
        ("/new/folder", "/new/folder"),
        ("/loop/x", "/loop/x"),
    ],
)
def test_paths_resolve_below_the_root(root: Path, path: str, real: str) -> None:
    assert _resolve_below(str(root), path) == f"{root}{real}"
