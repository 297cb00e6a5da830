"""Fifty simultaneous canaries under an operator that is killed fifty times: test_rollout_faults.py and test_faults.py at another
size."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.testing.namespace import Namespace
from tests.lab.operator.bulk_change import KILL_COUNT, RESOURCE_COUNT, BulkChange
from tests.lab.operator.environment import Environment, OperatorSeries
from tests.lab.operator.event_recorder import record_events
from tests.lab.operator.notification_sink import NotificationSink, run_notification_sink

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


async def change_fifty_resources(lab: Lab, namespace: Namespace, launcher: Any, sink: NotificationSink) -> None:
    """Create all resources, change them under kills, and check results, notifications and invariants."""
    async with lab.client() as client, record_events(client, namespace.name) as recorder:
        operators = OperatorSeries(launcher, namespace.name, sink.url)
        operators_task = asyncio.create_task(operators.run())
        try:
            bulk_change = BulkChange(Environment(lab, namespace.name, client, recorder, operators, namespace.faults))
            await bulk_change.create_all()
            await bulk_change.change_all()
            assert operators.kills == KILL_COUNT
            assert await sink.wait_until_none_missing(recorder) == set()
        finally:
            operators_task.cancel()
            await asyncio.gather(operators_task, return_exceptions=True)
        assert recorder.phase_changes() > 4 * RESOURCE_COUNT, "the recorder has observed them"
        assert recorder.violations() == []


def test_fifty_canaries_complete_despite_fifty_kills(
    lab: Lab, namespace: Namespace, inner_operators: Any, tmp_path: Path
) -> None:
    try:
        with run_notification_sink(lab, tmp_path) as sink:
            asyncio.run(change_fifty_resources(lab, namespace, inner_operators, sink))
    finally:
        inner_operators.end_all()
