"""Events of a resource with tuning: those of `test_rollouts`, and recommendations at any time, for these pods and others, new and
old; edits of mode and number of tokens; reconciles with an old list of pods.

Safety: never two changes at once, trials only in mode Auto, only settings of the spec or of a proven or manually promoted canary
are applied, and the user's spec takes precedence. Liveness as in `test_rollouts`: a trial ends automatically.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aerie.engine.speculation import Off, SpeculationSetting, Static
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie.tuning.recommendation import Recommendation, RecommendedAction
from tests.unit.rollout.test_rollouts import Rollouts
from tests.unit.rollout.world import K_OF_SPEC


class Tuning(Rollouts):
    """The state machine of events with tuning, see the module's docstring."""

    @rule(
        setting=st.sampled_from([Static(5), Static(1), Static(3), Off()]),
        action=st.sampled_from(["Change", "Change", "Explore", "Hold", "Insufficient"]),
        old=st.sampled_from([0, 0, 0, 4000]),
        other=st.sampled_from([False, False, False, True]),
    )
    @precondition(lambda self: self.world.status.get("stable"))
    def a_recommendation_comes(self, setting: SpeculationSetting, action: RecommendedAction, old: int, other: bool) -> None:
        revision = "another" if other else self.world.status["stable"]["revision"]
        at = self.world.now.timestamp() - old
        self.world.recommendation = Recommendation(revision, at, action, setting, (0.02, 0.08, 0.15), f"{setting} is advised.")

    @rule()
    def another_operator_starts(self) -> None:
        self.world.recommendation = None

    @rule(mode=st.sampled_from(["Auto", "Auto", "Recommend", "Off"]), tokens=st.sampled_from([K_OF_SPEC, K_OF_SPEC, 5, 2]))
    def another_tuning(self, mode: str, tokens: int) -> None:
        self.world.edit(speculation={"numSpeculativeTokens": tokens, "tuning": {"mode": mode}})

    @rule(parts=st.integers(4, 9), blocks=st.integers(1, 8), slower=st.sampled_from([-0.2, 0.0, 0.2]))
    @precondition(lambda self: self.world.status.get("analysis"))
    def blocks_of_a_trial_close(self, parts: int, blocks: int, slower: float) -> None:
        for _ in range(blocks):
            self.world.measure_time(1, slower, step=False)
            self.reconcile(parts)

    @rule(action=st.sampled_from(["promote", "rollback"]))
    @precondition(lambda self: self.world.status.get("canary"))
    def manual_action_on_the_canary(self, action: str) -> None:
        self.world.annotate(**{action: self.world.status["canary"]["revision"]})

    @rule(parts=st.integers(0, 8))
    def reconcile_with_old_pods(self, parts: int) -> None:
        now = self.world.pods
        before, self.world.pods = copy.deepcopy(now), [pod for pod in now if pod["status"].get("phase") != "Running"]
        self.reconcile(parts)
        self.world.pods = before

    def reconcile(self, parts: int = 1000) -> None:
        world, before = self.world, self.world.status
        super().reconcile(parts)
        after = world.status
        if after == before:
            return
        spec_revision = resolve_desired_revision(world.observed().resource).revision
        tuning = after.get("speculation") or {}
        trial = tuning.get("trial")
        if trial is not None:
            event("a trial")
            assert world.document["spec"].get("speculation", {}).get("tuning", {}).get("mode") == "Auto"
            assert trial["specRevision"] == spec_revision, "the user's spec wins"
            canary = after.get("canary")
            assert canary is None or canary["revision"] == trial["revision"] or canary["phase"] == "RollingBack", "one at a time"
            assert after.get("previous") is None
        self.check_promotion(before, after, spec_revision)
        applied = tuning.get("applied")
        if applied is not None:
            event("a choice")
            arms = [after["stable"], after.get("previous") or {}]
            assert applied["revision"] in {arm.get("revision") for arm in arms}
            assert applied["revision"] != applied["specRevision"]

    def check_promotion(self, before: dict[str, Any], after: dict[str, Any], spec_revision: str) -> None:
        """Check that a new stable revision is the spec's, the previous one, or one that passed a trial."""
        old_revision, new_revision = (before.get("stable") or {}).get("revision"), (after.get("stable") or {}).get("revision")
        if new_revision in (old_revision, spec_revision, (before.get("previous") or {}).get("revision")) or old_revision is None:
            return
        trial = (before.get("speculation") or {})["trial"]
        assert new_revision == trial["revision"]
        assert (after.get("analysis") or {}).get("verdict") == "Promote" or new_revision in self.promoted_revisions
        event("a trial was promoted")


# Shrinking is left out: it takes minutes here.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Tuning.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None, phases=_PHASES)
TestTuning = pytest.mark.slow(Tuning.TestCase)
