"""Rollouts in every trouble that the state machine knows, side by side in one namespace, under one operator that is killed again
and again; and then fifty canaries at once, while it is killed fifty times.

    scenarios   one resource each, as a coroutine that plays the user, the cluster's faults and the engines' lies
    kills       SIGKILL when the first canary comes into a phase, for each phase; then fifty at random moments (`SEED`)
    witness     what should never happen, over the whole time and for all of them (witness.py); and the rows that were passed

Nothing here waits for what "should be over by now": each wait is for a state, and has minutes. Pods that nobody measures run
nothing; the others are simulated engines that ask themselves, so no client's traffic is needed (that is test_canary's).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.rollout.canary.state_machine import TRANSITIONS, Trigger
from aerie.rollout.status.notifications import build_notifications
from aerie_lab.cluster import Lab, process
from aerie_lab.faults import FaultInjector
from aerie_lab.testing.plugin import new_namespace
from tests.lab.operator.crowd import CROWD, KILLS, Crowd
from tests.lab.operator.scenarios import SCENARIOS
from tests.lab.operator.stage import Case, Reign, Stage
from tests.lab.operator.witness import Witness, witness

pytestmark = pytest.mark.timeout(1800)
NOT_HERE = {
    (
        "Analyzing",
        Trigger.EXPLORED,
    ): "a trial of tuning, of which this crowd has none: unit tests of the state machine and of tuned rollouts",
    ("Verifying", Trigger.TIMER): "it takes an hour: unit tests of post-promotion monitoring",
    (
        "Ramping",
        Trigger.DEADLINE_EXCEEDED,
    ): "it takes more pods than one that are late for their revision's sake: unit tests of fleet size",
    ("Promoting", Trigger.DEADLINE_EXCEEDED): "as with Ramping",
}
"""Rows that no scenario passes, and why."""


@dataclass
class Told:
    """What a run has shown."""

    failures: dict[str, BaseException | None]
    crowd: BaseException | None
    killed_in: dict[str, str]
    kills: int
    offences: list[str]
    rows: dict[tuple[str, Trigger], set[str]]
    transitions: int
    untold: set[str]
    """Ids of notices that did not come."""


@dataclass(frozen=True)
class Received:
    """An endpoint for notices in the lab's network, and what it has taken."""

    url: str
    file: Path

    def missing(self, resources: Iterable[dict[str, Any]]) -> set[str]:
        """Of what the resources' statuses tell, what has not come."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        found = [SpeculativeDeployment.from_dict(item) for item in resources]
        wanted = {notice.id for one in found if one.status is not None for notice in build_notifications(one, one.status)}
        return wanted - {json.loads(line)["id"] for line in lines}

    async def none_missing(self, witness: Witness) -> set[str]:
        """What is missing when nothing is, or when there was time enough."""
        for _ in range(240):
            if not self.missing(witness.now.values()):
                break
            await asyncio.sleep(0.5)
        return self.missing(witness.now.values())


async def play(lab: Lab, namespace: str, faults: FaultInjector, nursery: Any, received: Received) -> Told:
    """All of it."""
    async with lab.client() as client, witness(client, namespace) as seer:
        reign = Reign(nursery, namespace, received.url)
        stage = Stage(lab, namespace, client, seer, reign, faults, waiting=set(SCENARIOS))
        keeping = asyncio.create_task(reign.run())
        try:
            crowd = Crowd(stage)
            seer.listeners.append(stage.heard)
            serving = asyncio.create_task(crowd.serve())
            cases = {name: Case(name, stage) for name in SCENARIOS}

            async def act(name: str) -> None:
                try:
                    await SCENARIOS[name](cases[name])
                finally:
                    stage.served(name)  # whoever has failed keeps nobody waiting
                    for fault in reversed(cases[name].faults):
                        await asyncio.to_thread(fault.undo)

            ends = await asyncio.gather(*map(act, SCENARIOS), return_exceptions=True)
            seer.listeners.clear()
            fifty = (await asyncio.gather(serving, return_exceptions=True))[0]
            kills = reign.kills
            if fifty is None:
                fifty = (await asyncio.gather(crowd.change(), return_exceptions=True))[0]
            kills = reign.kills - kills
            untold = await received.none_missing(seer)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        failures = dict(zip(SCENARIOS, ends, strict=True))
        return Told(failures, fifty, stage.killed_in, kills, seer.offences(), seer.rows(), seer.transitions(), untold)


@pytest.fixture(scope="module")
def received(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Received]:
    file = tmp_path_factory.mktemp("received") / "notices"
    inside = [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(lab.folder))]
    command = [*inside, sys.executable, str(Path(__file__).with_name("receiver.py")), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as endpoint:
        assert endpoint.stdout is not None
        yield Received(f"http://127.0.0.1:{endpoint.stdout.readline().strip()}", file)
        endpoint.kill()


@pytest.fixture(scope="module")
def told(lab: Lab, inner_operators: Any, received: Received) -> Iterator[Told]:
    with new_namespace(lab, "rollout-faults") as namespace:
        try:
            yield asyncio.run(play(lab, namespace.name, namespace.faults, inner_operators, received))
        finally:
            inner_operators.end_all()


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenario(told: Told, name: str) -> None:
    failure = told.failures[name]
    if failure is not None:
        raise failure


def test_fifty_canaries_at_once_while_the_operator_is_killed_fifty_times(told: Told) -> None:
    if told.crowd is not None:
        raise told.crowd
    assert told.kills == KILLS


def test_the_operator_was_killed_in_every_phase(told: Told) -> None:
    wanted = {phase for phase, _ in TRANSITIONS.keys() - NOT_HERE.keys()} | {"RollingBack"}
    assert wanted <= told.killed_in.keys()


def test_every_end_was_told_outside(told: Told) -> None:
    assert told.untold == set()


def test_nothing_happened_that_never_should(told: Told) -> None:
    assert told.transitions > 4 * CROWD, "the witness has seen them"
    assert told.offences == []


def test_every_row_of_the_table_was_passed(told: Told) -> None:
    assert TRANSITIONS.keys() >= NOT_HERE.keys(), "what is left out is a row"
    assert TRANSITIONS.keys() - NOT_HERE.keys() - told.rows.keys() == set()
