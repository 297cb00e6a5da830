"""The process that decides: an order a line on its standard input, an answer a line on its standard output (aerie.tuning.worker.protocol).

It is a process of its own for numpy's memory, which the operator's does not bear, and for the time of a decision, which would
hold up the operator's loop. It ends with its input. Run it as `python -m aerie.tuning.worker.process`.

Guarantees: an order gives one line, a decision or the error that there was instead of it; the same order gives the same answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import zlib

from aerie.engine import arguments, releases
from aerie.tuning.decision.candidates import Engine
from aerie.tuning.decision.explain import explain
from aerie.tuning.decision.recommend import decide
from aerie.tuning.decision.types import Action, Decision, Situation
from aerie.tuning.recommendation import Action as Word
from aerie.tuning.recommendation import Advice
from aerie.tuning.worker.codec import pack
from aerie.tuning.worker.protocol import Answer, EngineFacts, Order

NICENESS = 10
"""The operator's own loop comes first."""
_WORDS: dict[Action, Word] = {
    Action.HOLD: "Hold",
    Action.CHANGE: "Change",
    Action.EXPLORE: "Explore",
    Action.INSUFFICIENT: "Insufficient",
}


def answered(order: Order) -> Answer:
    """The decision that was asked for."""
    telemetry = order.telemetry()
    situation = Situation(
        engine=engine_of(order.engine),
        current=order.current,
        most=order.most,
        replicas=order.replicas,
        now=order.now,
        objectives=order.objectives,
        history=order.history,
        waiting=order.waiting,
        lent=order.lent,
        extra=order.extra,
        failed=order.failed,
        exploring=order.exploring,
    )
    decision = decide(telemetry, situation, order.policy, zlib.crc32(order.revision.encode()))
    advice = Advice(
        revision=order.revision,
        at=order.now,
        action=_WORDS[decision.action],
        setting=decision.setting,
        gain=_gain(decision),
        reason=decision.reason,
        obstacle=decision.obstacle,
        since=decision.evidence.regimes.newest,
    )
    return Answer(advice, explain(decision, telemetry, situation, order.policy), pack(telemetry))


def engine_of(facts: EngineFacts) -> Engine:
    """What is known of the engines. Raises ValueError for arguments that no engine takes."""
    return Engine(
        releases.Version.parse(facts.version),
        arguments.read(list(facts.arguments)),
        facts.method,
        facts.environment,
        experts=facts.experts,
    )


def _gain(decision: Decision) -> tuple[float, float, float] | None:
    found = next((one for one in decision.predictions if one.setting == decision.setting), None)
    return None if found is None else (found.gain[0], found.gain[2], found.gain[3])


def main() -> None:
    """Until the input ends."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    for line in sys.stdin.buffer:
        try:
            text = answered(Order.from_line(line)).to_line()
        except Exception as error:  # noqa: BLE001 - one resource's fault must not end the others' decisions
            traceback.print_exc()
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
