"""Fifty resources that change at once while the operator is killed fifty times."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.lab.operator.resources import SHORT, accepted, resource, revision_of
from tests.lab.operator.stage import Case, Stage

Object = dict[str, Any]
SEED = 7
KILLS, CROWD = 50, 50
WAYS = ("promoted", "undecided", "turned down", "superseded")


class Crowd:
    """Fifty small resources that change at once, each in one of four ways."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.cases = [Case(f"crowd-{number}", stage) for number in range(CROWD)]

    def document(self, number: int, drafter: str) -> Object:
        undecided: Object = {"analysis": SHORT | {"onInconclusive": "Rollback"}} if self.way(number) == "undecided" else {}
        node = f"node-{1 + number % 2}"
        return resource(f"crowd-{number}", drafter, node=node, canary={"stepWeights": [50], "stepDuration": "1s"}, **undecided)

    @staticmethod
    def way(number: int) -> str:
        return WAYS[number % len(WAYS)]

    async def serve(self) -> None:
        """All first revisions, when nobody else needs the time."""
        await self.stage.all_serve.wait()
        for number, case in enumerate(self.cases):
            await case.apply(self.document(number, "eagle3"))
        for case in self.cases:
            await case.until(lambda status: status.get("phase") == "Ready", "the first revision serves")

    async def change(self) -> None:
        """Change all of them, and kill the operator meanwhile."""
        chance = random.Random(SEED)  # noqa: S311 - no secrets
        moments = [chance.uniform(0.1, 2.0) for _ in range(KILLS)]

        async def kill() -> None:
            for moment in moments:
                await asyncio.sleep(moment)
                self.stage.reign.kill()

        later = [chance.uniform(0.0, sum(moments)) for _ in self.cases]
        for number, case in enumerate(self.cases):
            changed = self.document(number, "eagle31")
            await case.apply(accepted(changed) if self.way(number) == "promoted" else changed)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            for number, moment in enumerate(later):
                tasks.create_task(self._live(number, moment))

    async def _live(self, number: int, moment: float) -> None:
        case = self.cases[number]
        match self.way(number):
            case "promoted":
                await case.ended("Promoted", drafter="eagle31", words="manually")
            case "undecided":
                await case.ended("RolledBack", drafter="eagle3", verdict="Inconclusive")
            case "turned down":
                await asyncio.sleep(moment)
                await case.say(rollback=revision_of(self.document(number, "eagle31")))
                await case.ended("RolledBack", drafter="eagle3", words="manually")
            case "superseded":
                await asyncio.sleep(moment)
                await case.apply(accepted(self.document(number, "better")))
                await case.ended("Promoted", drafter="better", words="manually")
