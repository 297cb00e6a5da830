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
from aerie.tuning.decision.candidates import EngineConfig
from aerie.tuning.decision.explain import explain_decision
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.recommendation import Recommendation, RecommendedAction
from aerie.tuning.worker.codec import pack_telemetry
from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse, EngineFacts

WORKER_NICENESS = 10
"""The operator's own loop comes first."""
_RECOMMENDED_ACTIONS: dict[TuningAction, RecommendedAction] = {
    TuningAction.HOLD: "Hold",
    TuningAction.CHANGE: "Change",
    TuningAction.EXPLORE: "Explore",
    TuningAction.INSUFFICIENT: "Insufficient",
}


def handle_request(request: DecisionRequest) -> DecisionResponse:
    """The decision that was asked for."""
    telemetry = request.merged_telemetry()
    situation = TuningContext(
        engine=parse_engine_config(request.engine),
        current_setting=request.current,
        max_speculative_tokens=request.most,
        replicas=request.replicas,
        now=request.now,
        objectives=request.objectives,
        history=request.history,
        queued_requests=request.waiting,
        borrowed_replicas=request.lent,
        surge_pods=request.extra,
        failed_trials=request.failed,
        explored_setting=request.exploring,
    )
    decision = decide_setting(telemetry, situation, request.policy, zlib.crc32(request.revision.encode()))
    advice = Recommendation(
        revision=request.revision,
        decision_time=request.now,
        action=_RECOMMENDED_ACTIONS[decision.action],
        setting=decision.setting,
        predicted_gain=_predicted_gain(decision),
        reason=decision.reason,
        blocked_reason=decision.blocked_reason,
        traffic_changed_at=decision.evidence.change_points.newest_timestamp,
    )
    return DecisionResponse(advice, explain_decision(decision, telemetry, situation, request.policy), pack_telemetry(telemetry))


def parse_engine_config(facts: EngineFacts) -> EngineConfig:
    """What is known of the engines. Raises ValueError for arguments that no engine takes."""
    return EngineConfig(
        releases.Version.parse(facts.version),
        arguments.parse_arguments(list(facts.arguments)),
        facts.method,
        facts.environment,
        is_moe=facts.experts,
    )


def _predicted_gain(decision: TuningDecision) -> tuple[float, float, float] | None:
    found = next((one for one in decision.predictions if one.setting == decision.setting), None)
    return None if found is None else (found.gain[0], found.gain[2], found.gain[3])


def main() -> None:
    """Until the input ends."""
    with contextlib.suppress(OSError):
        os.nice(WORKER_NICENESS)
    for line in sys.stdin.buffer:
        try:
            text = handle_request(DecisionRequest.from_line(line)).to_line()
        except Exception as error:  # noqa: BLE001 - one resource's fault must not end the others' decisions
            traceback.print_exc()
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
