"""A plan for programs: the content of a RolloutPlan of cli.aerie.dev/v1. docs/how-to/plan-an-apply.md describes it."""

from __future__ import annotations

from typing import Any

from aerie.cli.plan.rollout_plan import RolloutPlan


def build_plan_document(plan: RolloutPlan) -> dict[str, Any]:
    """Return the content. What is unknown is null."""
    change, room = plan.change, plan.room
    superseded = change.superseded
    return {
        "namespace": plan.namespace,
        "name": plan.name,
        "verdict": plan.verdict,
        "summary": plan.headline,
        "change": {
            "kind": change.kind,
            "revision": change.desired.revision,
            "servedRevision": change.stable.served_revision if change.stable is not None else None,
            "description": change.description or None,
            "message": change.message,
            "paused": change.is_paused,
            "superseded": None
            if superseded is None
            else {"revision": superseded.revision, "change": superseded.change, "phase": superseded.phase},
            "inPlaceObstacle": change.in_place_obstacle or None,
            "changedFields": list(change.changed_fields),
            "objects": list(change.objects),
        },
        "preflight": {
            "state": plan.preflight.state,
            "message": plan.preflight.message,
            "findings": [finding.to_json() for finding in plan.preflight.findings],
            "passed": plan.preflight.passed,
            "notes": plan.preflight.notes,
        },
        "pods": {
            "canary": plan.need.canary,
            "control": plan.need.control,
            "extra": plan.need.extra,
            "gpuResource": plan.gpus.resource or None,
            "gpusPerPod": plan.gpus.count,
            "fit": plan.has_room,
            "problem": plan.gpus.problem or plan.room_problem or None,
            "room": None
            if room is None
            else {
                "pods": room.pods,
                "excludedNodes": room.excluded,
                "pendingPods": room.pending,
                "nodes": [
                    {"name": node.name, "product": node.product or None, "freeGpus": node.free, "pods": node.pods}
                    for node in room.nodes
                ],
            },
        },
        "forecast": [
            {
                "effectPercent": round(100 * row.effect, 6),
                "medianSeconds": row.median_seconds,
                "promotionChance": row.promotion_chance,
                "rollbackChance": row.rollback_chance,
            }
            for row in plan.forecast.rows
        ]
        or None,
        "users": list(plan.users),
        "reversal": plan.reversal or None,
        "next": list(plan.next_commands),
        "diff": plan.diff,
    }
