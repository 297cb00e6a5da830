"""An endpoint of notifications in the lab's network, and which notifications of a set of resources it has not received."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.rollout.status.notifications import build_notifications
from aerie_lab.cluster import Lab, process
from tests.lab.operator.event_recorder import EventRecorder


@dataclass(frozen=True)
class NotificationSink:
    """A notification endpoint in the lab's network, with the notifications that it has received."""

    url: str
    file: Path

    def missing_ids(self, resources: Iterable[dict[str, Any]]) -> set[str]:
        """Return the ids of the statuses' notifications that were not received."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        deployments = [SpeculativeDeployment.from_dict(item) for item in resources]
        expected = {
            notification.id
            for deployment in deployments
            if deployment.status is not None
            for notification in build_notifications(deployment, deployment.status)
        }
        return expected - {json.loads(line)["id"] for line in lines}

    async def wait_until_none_missing(self, recorder: EventRecorder) -> set[str]:
        """Wait up to two minutes until no notification is missing; return the missing ids."""
        for _ in range(240):
            if not self.missing_ids(recorder.resources.values()):
                break
            await asyncio.sleep(0.5)
        return self.missing_ids(recorder.resources.values())


@contextlib.contextmanager
def run_notification_sink(lab: Lab, folder: Path) -> Iterator[NotificationSink]:
    """Run an endpoint that ends with the block; `folder` gets its file."""
    file = folder / "notices"
    network_command = [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(lab.folder))]
    command = [*network_command, sys.executable, str(Path(__file__).with_name("receiver.py")), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as endpoint:
        assert endpoint.stdout is not None
        yield NotificationSink(f"http://127.0.0.1:{endpoint.stdout.readline().strip()}", file)
        endpoint.kill()
