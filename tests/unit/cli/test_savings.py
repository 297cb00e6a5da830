"""`savings`: what is added, what is not, and what the screen states about it."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aerie.cli.app import run_command_line
from aerie.cli.fleet.resource_view import ResourceView
from aerie.cli.fleet.savings import (
    MAX_TRIAL_RECORDS,
    ResourceSavings,
    build_savings_document,
    count_gpus,
    read_savings,
    render_savings,
)
from tests.golden import Messages
from tests.unit.cli.fleet_documents import Document, ready

NOW = datetime(2026, 11, 28, 8, 30, tzinfo=UTC)


def tuned(name: str, saved: float, spent: float, rate: float, gpus: str | None, trials: int = 1) -> Document:
    """Return a resource of four replicas with savings ten hours ago."""
    figures = {"saved": saved, "spent": spent, "net": saved - spent, "currentRate": rate, "updateTime": "2026-11-27T22:30:00Z"}
    records = [{"startTime": f"2026-11-{20 - number}T08:00:00Z"} for number in range(trials)]
    document = ready(name, speculation={"savings": figures, "trials": records})
    if gpus is not None:
        document["spec"]["engine"] = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return document


def items(*documents: Document) -> list[ResourceSavings]:
    return [item for document in documents if (item := read_savings(ResourceView(document), NOW)) is not None]


FLEET = (
    tuned("chat", 120.0, 14.0, 0.05, "2"),
    tuned("coder", 3.0, 9.5, 0.0, "8", MAX_TRIAL_RECORDS),
    tuned("k2", 10.0, 4.0, 0.1, None),
)


def test_the_present_rate_accrues_until_now() -> None:
    (item,) = items(FLEET[0])
    assert item.saved == pytest.approx(120.0 + 0.05 * 4 * 10)
    assert item.net == pytest.approx(108.0)
    assert item.since == datetime(2026, 11, 20, 8, tzinfo=UTC)
    assert items(ready()) == []


def test_only_equal_replicas_are_added() -> None:
    assert build_savings_document(items(*FLEET), 3)["total"]["netReplicaHours"] is None
    equal = items(FLEET[0], tuned("other", 1.0, 0.0, 0.0, "2"))
    total = build_savings_document(equal, 2)["total"]
    assert total["netReplicaHours"] == pytest.approx(109.0)
    assert total["netGpuHours"] == {"nvidia.com/gpu": pytest.approx(218.0)}
    unknown = items(FLEET[2], tuned("other", 1.0, 0.0, 0.0, None))
    assert build_savings_document(unknown, 2)["total"]["netReplicaHours"] is None


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ({"nvidia.com/gpu": "8", "memory": "64Gi"}, {"nvidia.com/gpu": 8.0}),
        ({"amd.com/gpu": 1}, {"amd.com/gpu": 1.0}),
        ({"nvidia.com/mig-3g.40gb": "1"}, {}),
        ({}, {}),
    ],
)
def test_gpus_of_a_pod(limits: dict[str, Any], counts: dict[str, float]) -> None:
    assert count_gpus({"engine": {"resources": {"limits": limits}}}) == counts


@pytest.mark.parametrize("width", [80, 130])
def test_screens_fit_the_terminal(width: int, messages: Messages) -> None:
    for name, documents in (("fleet", FLEET), ("equal", FLEET[:1]), ("none", ())):
        console = Console(width=width, highlight=False, color_system=None)
        with console.capture() as capture:
            console.print(render_savings(items(*documents), NOW, resource_count=5))
        lines = [line.rstrip() for line in capture.get().splitlines()]
        assert max(map(len, lines)) <= width
        messages.check(f"{name}, {width} columns", "\n".join(lines))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.json").write_text(json.dumps({"items": [*FLEET, ready()]}))
    script = tmp_path / "kubectl"
    script.write_text(f'#!/bin/sh\ncat "{tmp_path}/out.json"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert run_command_line(["savings", "-A", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], len(document["items"]), document["total"]["resources"]) == ("SavingsReport", 3, 4)
    assert run_command_line(["savings"]) == 0
    assert "Estimate" in capsys.readouterr().out
