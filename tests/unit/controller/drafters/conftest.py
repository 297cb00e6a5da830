"""Drafters for pods, and fast fake engines: these tests run on real sockets, so in real time."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_vllm import staging
from tests.unit.controller.drafters.served_plugin import Drafters
from tests.unit.plugin import fake_engine


@pytest.fixture
def drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drafters:
    """The drafters on the pods' disk."""
    monkeypatch.setattr(fake_engine, "STAGE_SECONDS", 0.01)
    monkeypatch.setattr(staging, "_FIRST_POLL_SECONDS", 0.03)
    return Drafters(tmp_path, monkeypatch)
