"""SpeculativeDeployments as the API server returns them, for tests of commands about them."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
SETTING = {"mode": "Static", "numSpeculativeTokens": 3}


def condition(name: str, status: str, reason: str, message: str) -> Document:
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-11-28T08:00:00Z"}


def arm(revision: str, drafter: str, replicas: int, weight: int | None, length: float) -> Document:
    document: Document = {"revision": revision, "drafter": drafter, "setting": SETTING, "replicas": replicas}
    document |= {"readyReplicas": replicas, "acceptanceLength": length, "timePerOutputToken": 0.0112, "timeToFirstToken": 0.182}
    return document if weight is None else document | {"weight": weight}


def ready(name: str = "chat", phase: str = "Ready", **status: Any) -> Document:
    """Return a resource whose first revision serves."""
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name, "namespace": "prod", "uid": "6b1f", "generation": 3, "resourceVersion": "77"},
        "spec": {"replicas": 4},
        "status": {
            "observedGeneration": 3,
            "phase": phase,
            "conditions": [condition("Ready", "True", "AllPodsReady", "4/4 pods ready")],
            "stable": arm("71a723caa5", "yuhuili/EAGLE3-LLaMA3.1-8B@ada412b", 4, 100, 3.08),
            "rolloutHistory": [
                {
                    "revision": "71a723caa5",
                    "change": "first revision",
                    "result": "Promoted",
                    "message": "Revision 71a723caa5 is stable: 4/4 pods ready.",
                    "startTime": "2026-11-28T04:45:17.014Z",
                    "completionTime": "2026-11-28T04:49:38.055Z",
                }
            ],
            **status,
        },
    }


COMPARISONS = [
    {"metric": "TokensPerStep", "sampleCount": 12, "estimate": 0.036, "lower": 0.004, "upper": 0.069},
    {"metric": "TimePerOutputToken", "sampleCount": 12, "estimate": -0.021, "lower": -0.04, "upper": -0.001},
    {"metric": "TimeToFirstToken", "sampleCount": 12, "estimate": 0.024, "lower": -0.098, "upper": 0.28},
    {"metric": "OutputLength", "sampleCount": 12, "estimate": 0.001},
    {"metric": "OutputEquivalence", "sampleCount": 24, "message": "24 of 24 equal"},
]
REQUIREMENTS = {
    "TokensPerStep": ("above -2.0 %", True),
    "TimePerOutputToken": ("below +2.5 %", True),
    "TimeToFirstToken": ("below +25 %", False),
}


def analyzing(phase: str = "Analyzing", name: str = "chat") -> Document:
    """Return a resource with a canary."""
    control = arm("71a723caa5", "yuhuili/EAGLE3-LLaMA3.1-8B@ada412b", 1, 17, 3.10)
    canary = arm("b2657d3a14", "acme/llama-eagle3.1@5d9f3c2", 1, 17, 3.21)
    canary |= {
        "change": "drafter acme/llama-eagle3.1@5d9f3c2",
        "phase": phase,
        "startTime": "2026-11-28T07:40:00Z",
        "control": control,
    }
    message = "After 12 blocks: time to first token (+2.4 % vs control) significantly below +25 %, in about 12 min at this rate."
    conditions = [
        condition("Ready", "True", "AllPodsReady", "6/6 pods ready"),
        condition("Progressing", "True", phase, message),
    ]
    comparisons = [
        item | dict(zip(("requirement", "met"), REQUIREMENTS[str(item["metric"])], strict=True))
        if item["metric"] in REQUIREMENTS
        else item
        for item in COMPARISONS
    ]
    analysis = {"design": "BetweenPods", "verdict": "Continue", "comparisons": comparisons, "state": "packed"}
    document = ready(name, phase, conditions=conditions, canary=canary, analysis=analysis)
    document["status"]["stable"] |= {"weight": 66}
    return document
