"""The folder of the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_drafter.bundle import find_bundle_path
from aerie_drafter.errors import CheckpointError


def test_a_part_of_the_bundle_is_found(tmp_path: Path) -> None:
    (tmp_path / "registry.json").write_text("{}")
    (tmp_path / "eagle3").mkdir()
    assert find_bundle_path("eagle3", tmp_path) == tmp_path / "eagle3"
    assert find_bundle_path(bundle_folder=tmp_path) == tmp_path


def test_an_unknown_part_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "registry.json").write_text("{}")
    (tmp_path / "weak").mkdir()
    (tmp_path / "weak" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no 'eagle4'; it has weak, prompts"):
        find_bundle_path("eagle4", tmp_path)


def test_outside_the_repository_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the bundle is missing"):
        find_bundle_path("target", tmp_path)
