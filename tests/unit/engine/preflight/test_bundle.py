"""The shipped models: preflight passes them, and rejects damaged ones before an engine would start.

What real vLLM 0.32 does with each: a wrong target prevents the start; EAGLE 3 weights under a 3.1 config load without a message
and accept less, as does a 3.1 drafter without norm_output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aerie.cli.app import run_command_line

BUNDLE = Path(__file__).resolve().parents[4] / "drafter" / "bundle"


def find_failed_checks(capsys: pytest.CaptureFixture[str], target: Path, drafter: Path) -> list[str]:
    """Return the ids of the checks with an error for the pair."""
    status = run_command_line(
        ["preflight", "--target", str(target), "--drafter", str(drafter), "--gpu-memory", "16GiB", "-o", "json"]
    )
    report = json.loads(capsys.readouterr().out)
    failed_check_ids = [finding["id"] for finding in report["findings"] if finding["severity"] == "error"]
    assert status == (1 if failed_check_ids else 0)
    return failed_check_ids


def copy_with_config(source: Path, folder: Path, **changes: object) -> Path:
    """Copy a checkpoint with other values in its config; None removes a key."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("name", ["eagle3", "eagle31", "weak"])
def test_shipped_drafters_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_failed_checks(capsys, BUNDLE / "target", BUNDLE / name) == []


def test_wrong_target_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy_with_config(BUNDLE / "target", tmp_path / "other", hidden_size=512, vocab_size=4096)
    assert find_failed_checks(capsys, other, BUNDLE / "eagle31") == ["C25", "C26"]


def test_eagle3_weights_with_a_31_config_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = copy_with_config(BUNDLE / "eagle3", tmp_path / "drafter", fc_norm=True, norm_output=True)
    assert find_failed_checks(capsys, BUNDLE / "target", drafter) == ["C9"]


def test_missing_norm_output_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = copy_with_config(BUNDLE / "eagle31", tmp_path / "drafter", norm_output=None)
    assert find_failed_checks(capsys, BUNDLE / "target", drafter) == ["C27"]


def test_31_weights_without_31_flags_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = copy_with_config(BUNDLE / "eagle31", tmp_path / "drafter", fc_norm=None, norm_output=None)
    assert find_failed_checks(capsys, BUNDLE / "target", drafter) == ["C9", "C27"]
