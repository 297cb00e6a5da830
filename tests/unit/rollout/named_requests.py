"""Requests that name their user, each another one, and the check that no outcome names a user who did not decide it.

Guarantee: every user requests once, so that an outcome which names the user tells which request it follows from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from aerie.rollout.progression.user_request import MAX_CLOCK_DIFFERENCE
from tests.unit.rollout.cluster_state import ClusterState


@dataclass
class NamedRequests:
    """All requests so far, by user: action, revision and time."""

    requests_by_user: dict[str, tuple[str, str, datetime]] = field(default_factory=dict)

    def build(self, action: str, revision: str, now: datetime) -> str:
        """Return the annotation of one more request."""
        user = f"user-{len(self.requests_by_user)}"
        self.requests_by_user[user] = action, revision, now
        return json.dumps({"action": action, "user": user, "time": now.isoformat(), "reason": "because"})

    def check(self, cluster: ClusterState, tolerance: timedelta = timedelta(0)) -> int:
        """Check every outcome that names a user; return their number. `tolerance`: by how much a request may be earlier."""
        history: list[dict[str, Any]] = (cluster.document.get("status") or {}).get("rolloutHistory") or []
        outcomes = [outcome for outcome in history if "requestedBy" in outcome]
        for outcome in outcomes:
            user, start = outcome["requestedBy"]["user"], datetime.fromisoformat(outcome["startTime"])
            action, revision, time = self.requests_by_user[user]
            assert (action, revision) == (outcome["requestedBy"]["action"], outcome["revision"])
            assert outcome["message"].endswith(f" by {user}: because.")
            if action == "retry":
                earlier = [datetime.fromisoformat(each["completionTime"]) for each in history]
                assert time <= start
                # A request may be read after an outcome that it preceded by less than two clocks may differ.
                late = time + MAX_CLOCK_DIFFERENCE
                assert not any(late < completion <= start for completion in earlier), "a rollout came in between"
            else:
                assert outcome["result"] == {"promote": "Promoted", "rollback": "RolledBack"}[action]
                assert start - tolerance <= time <= datetime.fromisoformat(outcome["completionTime"])
        return len(outcomes)
