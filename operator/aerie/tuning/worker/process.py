"""The worker process: it reads a request a line from standard input, and writes a response a line to standard output.

The protocol is `aerie.tuning.worker.protocol`. The process is separate from the operator's because of numpy's memory, and because
a decision would block the operator's event loop. It ends with its input.

    python -m aerie.tuning.worker.process

Guarantees: a request gives one line, either a decision or the error that prevented it. The same request gives the same response.
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
"""The operator's event loop has priority."""
_RECOMMENDED_ACTIONS: dict[TuningAction, RecommendedAction] = {
    TuningAction.HOLD: "Hold",
    TuningAction.CHANGE: "Change",
    TuningAction.EXPLORE: "Explore",
    TuningAction.INSUFFICIENT: "Insufficient",
}


def handle_request(request: DecisionRequest) -> DecisionResponse:
    """Return the decision on a request."""
    telemetry = request.merged_telemetry()
    context = TuningContext(
        engine=parse_engine_config(request.engine),
        current_setting=request.current_setting,
        max_speculative_tokens=request.max_speculative_tokens,
        replicas=request.replicas,
        now=request.now,
        objectives=request.objectives,
        history=request.history,
        queued_requests=request.queued_requests,
        borrowed_replicas=request.borrowed_replicas,
        surge_pods=request.surge_pods,
        failed_trials=request.failed_trials,
        explored_setting=request.explored_setting,
    )
    decision = decide_setting(telemetry, context, request.policy, zlib.crc32(request.revision.encode()))
    recommendation = Recommendation(
        revision=request.revision,
        decision_time=request.now,
        action=_RECOMMENDED_ACTIONS[decision.action],
        setting=decision.setting,
        predicted_gain=_predicted_gain(decision),
        reason=decision.reason,
        blocked_reason=decision.blocked_reason,
        traffic_changed_at=decision.evidence.change_points.newest_timestamp,
    )
    return DecisionResponse(
        recommendation, explain_decision(decision, telemetry, context, request.policy), pack_telemetry(telemetry)
    )


def parse_engine_config(facts: EngineFacts) -> EngineConfig:
    """Return the configuration of the engines. Raises ValueError for arguments that no engine takes."""
    return EngineConfig(
        releases.Version.parse(facts.version),
        arguments.parse_arguments(list(facts.arguments)),
        facts.method,
        facts.environment,
        is_moe=facts.is_moe,
    )


def _predicted_gain(decision: TuningDecision) -> tuple[float, float, float] | None:
    predictions = (prediction for prediction in decision.predictions if prediction.setting == decision.setting)
    prediction = next(predictions, None)
    return None if prediction is None else (prediction.gain[0], prediction.gain[2], prediction.gain[3])


def main() -> None:
    """Handle requests until the input ends."""
    with contextlib.suppress(OSError):
        os.nice(WORKER_NICENESS)
    for request_line in sys.stdin.buffer:
        try:
            response_line = handle_request(DecisionRequest.from_line(request_line)).to_line()
        except Exception as error:  # noqa: BLE001 - an error of one resource must not stop the others' decisions
            traceback.print_exc()
            response_line = json.dumps({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(response_line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
