"""The archive and the manifest for krew."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from scripts.krew import main, read_version, write_krew_files


def test_the_manifest_has_the_archive_and_its_digest(tmp_path: Path) -> None:
    archive, manifest = write_krew_files("https://example.com/releases/", tmp_path / "a")
    document = yaml.safe_load(manifest.read_text())
    assert (document["kind"], document["metadata"]["name"]) == ("Plugin", "aerie")
    assert document["spec"]["version"] == f"v{read_version()}"
    for platform in document["spec"]["platforms"]:
        assert platform["uri"] == f"https://example.com/releases/{archive.name}"
        assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    rebuilt, _ = write_krew_files("https://example.com/releases", tmp_path / "b")
    assert rebuilt.read_bytes() == archive.read_bytes()


def test_the_launcher_has_uv_run_this_release(tmp_path: Path) -> None:
    archive, _ = write_krew_files("https://example.com", tmp_path)
    with tarfile.open(archive) as packed:
        assert set(packed.getnames()) == {"kubectl-aerie", "LICENSE"}
        packed.extractall(tmp_path, filter="data")
    launcher = tmp_path / "kubectl-aerie"
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    uv.chmod(0o755)
    path = f"{uv.parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run([launcher, "status", "a b"], capture_output=True, text=True, env={"PATH": path}, check=True)
    assert run.stdout == f"tool|run|--quiet|--from|aerie-operator=={read_version()}|kubectl-aerie|status|a b|"
    without = subprocess.run(["/bin/sh", launcher], capture_output=True, text=True, env={"PATH": "/none"}, check=False)
    assert without.returncode == 2
    assert "needs uv" in without.stderr


@pytest.mark.parametrize("arguments", [[], ["http://example.com", "x"], ["https://example.com"]])
def test_a_wrong_call_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err
