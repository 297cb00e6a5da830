"""A canary of drawn drafts (`spec.speculation.draftSampling: Probabilistic`) against greedy ones, with real vLLM on CPU and the
bundle's EAGLE 3.1: with greedy traffic, then with sampled traffic, through the gateway all the time.

    EAGLE 3.1, greedy drafts ─┬─ requests at temperature 0: drawn drafts are not superior, and not promoted
                              └─ requests at temperature 1: drawn drafts are promoted

| key                             | what is measured                                                                           |
|---------------------------------|--------------------------------------------------------------------------------------------|
| requests, failed                | streamed chat completions over all of it; failed: any but a whole answer                   |
| greedy_traffic_promoted         | 1 where the canary was promoted although all requests were greedy; else 0                  |
| greedy_traffic_gain_pct         | output per verification step against the control's, when that canary ended                 |
| sampled_traffic_promoted        | 1 where it was promoted while all requests were sampled                                    |
| sampled_traffic_gain_pct, ..._lower_pct | the same estimate, and its lower confidence bound                                  |
| promote_min                     | from `kubectl apply` to the promotion with sampled traffic                                 |

The goal is Superior: with greedy traffic both kinds of drafts are the same tokens, so there is nothing to gain.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from benchmarks.e2e_vllm import (
    BETTER,
    DECISION,
    SCENARIO,
    START,
    RolloutSequence,
    build_resource,
    comparison,
)

GREEDY_DEADLINE, SAMPLED_DEADLINE = "6m", "30m"
"""Deadlines of the analysis: with greedy traffic a longer one changes nothing."""


def measure() -> dict[str, float]:
    with Lab.up(LabSettings(name="e2e")) as lab:
        return SampledRollouts(lab, build_resource()).measure()


class SampledRollouts(RolloutSequence):
    """One run of the benchmark."""

    def measure(self) -> dict[str, float]:
        self.install()
        self._write(GREEDY_DEADLINE)
        self.until(lambda status: status.get("phase") == "Ready", "EAGLE 3.1 serves", START)
        requests = failed = 0
        figures: dict[str, float] = {}
        for name, temperature, deadline in (("greedy", 0.0, GREEDY_DEADLINE), ("sampled", 1.0, SAMPLED_DEADLINE)):
            target = TrafficTarget(
                self.lab.gateway_url or "", SCENARIO.name, SCENARIO.host, temperature=temperature, chats=SCENARIO.chats
            )
            with BackgroundTraffic(target, SCENARIO.load, SCENARIO.classes, DECISION + START) as traffic:
                figures |= self._canary(name, deadline)
            requests += len(traffic.report.outcomes)
            failed += sum(outcome.error is not None for outcome in traffic.report.outcomes)
        return {"requests": requests, "failed": failed, **figures}

    def _canary(self, name: str, deadline: str) -> dict[str, float]:
        """Serve greedy drafts, then roll out probabilistic ones, until that rollout has ended."""
        self._write(deadline)
        self.until(lambda status: status.get("phase") == "Ready", "greedy drafts serve", DECISION)
        ended = len(self.status().get("rolloutHistory") or [])
        began = self._write(deadline, draftSampling="Probabilistic")
        status = self.until(lambda status: len(status.get("rolloutHistory") or []) > ended, "an outcome", DECISION)
        minutes = (time.monotonic() - began) / 60
        outcome = status["rolloutHistory"][0]
        self.report_progress(f"{outcome['result']}: {outcome['message']}")
        promoted, compared = outcome["result"] == "Promoted", comparison(outcome)
        figures = {
            f"{name}_traffic_promoted": float(promoted),
            f"{name}_traffic_gain_pct": round(100 * compared["estimate"], 1),
        }
        if promoted:
            figures |= {f"{name}_traffic_gain_lower_pct": round(100 * compared["lower"], 1), "promote_min": round(minutes, 1)}
        return figures

    def _write(self, deadline: str, **speculation: Any) -> float:
        """Apply the resource; a revision that was rejected is tried again."""
        resource = copy.deepcopy(dict(self.resource))
        spec = resource["spec"]
        spec["drafter"]["source"]["huggingFace"] = BETTER
        spec["speculation"] |= speculation
        spec["rollout"]["analysis"] |= {"goal": "Superior", "onInconclusive": "Rollback", "maxDuration": deadline}
        spec["rollout"]["analysis"]["shadow"] = {"source": "None"}  # the traffic of users decides
        resource["metadata"]["annotations"] = {"aerie.dev/retry": deadline}
        self.report_progress(f"kubectl apply: draft sampling {speculation.get('draftSampling', 'as the engine does')}")
        self.lab.kubectl("apply", "-f", "-", stdin=json.dumps(resource))
        return time.monotonic()
