"""`aerie diagnose` on a simulated engine under traffic: the acceptance that it was given, and the finding that belongs to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aerie.cli.app import run_command_line
from tests.unit.simulator.conftest import PLAIN, Start, write_drafter


@pytest.mark.parametrize(
    ("rates", "status", "title"),
    [
        ((0.7, 0.5, 0.35), 0, None),
        ((0.7, 0.25, 0.03), 1, "acceptance falls from position to position"),
        ((0.01, 0.0, 0.0), 1, "the drafter is of no use: acceptance near chance"),
    ],
)
def test_acceptance_of_a_simulated_engine(
    start: Start,
    tmp_path: Path,
    rates: tuple[float, ...],
    status: int,
    title: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = write_drafter(tmp_path / "rated", *PLAIN, simulator={"acceptance_rates": rates})
    config = json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3})
    engine = start("--speculative-config", config, options={"own_requests_per_second": 60.0})
    assert run_command_line(["diagnose", str(engine.client.base_url), "--duration", "3", "-o", "json"]) == status
    document = json.loads(capsys.readouterr().out)
    acceptance = document["acceptance"]
    assert acceptance["lower"] <= 1 + sum(rates) <= acceptance["upper"]
    assert [finding["title"] for finding in document["findings"] if finding["severity"] == "action"] == ([title] if title else [])
