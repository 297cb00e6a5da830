"""Fifty simultaneous changes of resources while the operator is killed fifty times."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.lab.operator.environment import Case, Environment
from tests.lab.operator.resources import SHORT, resource, revision_of, with_manual_promotion

Object = dict[str, Any]
SEED = 7
KILL_COUNT, RESOURCE_COUNT = 50, 50
OUTCOMES = ("promoted", "inconclusive", "rolled back", "superseded")


class BulkChange:
    """Fifty small resources that change simultaneously, each with one of four outcomes."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.cases = [Case(f"bulk-{number}", environment) for number in range(RESOURCE_COUNT)]

    def document(self, number: int, drafter: str) -> Object:
        spec: Object = {"analysis": SHORT | {"onInconclusive": "Rollback"}} if self.outcome(number) == "inconclusive" else {}
        node = f"node-{1 + number % 2}"
        return resource(f"bulk-{number}", drafter, node=node, canary={"stepWeights": [50], "stepDuration": "1s"}, **spec)

    @staticmethod
    def outcome(number: int) -> str:
        return OUTCOMES[number % len(OUTCOMES)]

    async def create_all(self) -> None:
        """Create all first revisions, and wait until they serve."""
        for number, case in enumerate(self.cases):
            await case.apply(self.document(number, "eagle3"))
        for case in self.cases:
            await case.until(lambda status: status.get("phase") == "Ready", "the first revision serves")

    async def change_all(self) -> None:
        """Change all resources, and kill the operator meanwhile."""
        rng = random.Random(SEED)  # noqa: S311 - no secrets
        delays = [rng.uniform(0.1, 2.0) for _ in range(KILL_COUNT)]

        async def kill() -> None:
            for delay in delays:
                await asyncio.sleep(delay)
                self.environment.operators.kill()

        start_delays = [rng.uniform(0.0, sum(delays)) for _ in self.cases]
        for number, case in enumerate(self.cases):
            changed = self.document(number, "eagle31")
            await case.apply(with_manual_promotion(changed) if self.outcome(number) == "promoted" else changed)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            for number, delay in enumerate(start_delays):
                tasks.create_task(self._act(number, delay))

    async def _act(self, number: int, delay: float) -> None:
        case = self.cases[number]
        match self.outcome(number):
            case "promoted":
                await case.until_ended("Promoted", drafter="eagle31", message="manually")
            case "inconclusive":
                await case.until_ended("RolledBack", drafter="eagle3", verdict="Inconclusive")
            case "rolled back":
                await asyncio.sleep(delay)
                await case.annotate(rollback=revision_of(self.document(number, "eagle31")))
                await case.until_ended("RolledBack", drafter="eagle3", message="manually")
            case "superseded":
                await asyncio.sleep(delay)
                await case.apply(with_manual_promotion(self.document(number, "better")))
                await case.until_ended("Promoted", drafter="better", message="manually")
