"""The shipped models: preflight passes them, and catches what is done to them before an engine would start.

What real vLLM 0.32 does with each: a wrong target ends the start; EAGLE 3 weights under a 3.1 config load in silence and accept
less, as does a 3.1 drafter without norm_output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aerie.cli.app import run_command_line

BUNDLE = Path(__file__).resolve().parents[4] / "drafter" / "bundle"


def refused(capsys: pytest.CaptureFixture[str], target: Path, drafter: Path) -> list[str]:
    """Ids of the checks that refuse the pair."""
    status = run_command_line(
        ["preflight", "--target", str(target), "--drafter", str(drafter), "--gpu-memory", "16GiB", "-o", "json"]
    )
    report = json.loads(capsys.readouterr().out)
    found = [finding["id"] for finding in report["findings"] if finding["severity"] == "error"]
    assert status == (1 if found else 0)
    return found


def edited(source: Path, folder: Path, **changes: object) -> Path:
    """A copy whose config has other values; None takes a key out."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("name", ["eagle3", "eagle31", "weak"])
def test_shipped_drafters_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, BUNDLE / "target", BUNDLE / name) == []


def test_wrong_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = edited(BUNDLE / "target", tmp_path / "other", hidden_size=512, vocab_size=4096)
    assert refused(capsys, other, BUNDLE / "eagle31") == ["C25", "C26"]


def test_plain_3_flagged_as_31(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = edited(BUNDLE / "eagle3", tmp_path / "drafter", fc_norm=True, norm_output=True)
    assert refused(capsys, BUNDLE / "target", drafter) == ["C9"]


def test_missing_norm_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = edited(BUNDLE / "eagle31", tmp_path / "drafter", norm_output=None)
    assert refused(capsys, BUNDLE / "target", drafter) == ["C27"]


def test_31_without_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = edited(BUNDLE / "eagle31", tmp_path / "drafter", fc_norm=None, norm_output=None)
    assert refused(capsys, BUNDLE / "target", drafter) == ["C9", "C27"]
