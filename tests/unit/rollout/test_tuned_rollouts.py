"""All that may happen to a resource while it is tuned: what `test_rollouts` does, and advices at any time, of these pods and of
others, fresh and old; modes and numbers of tokens that a user writes; passes that see pods as they were.

Safety: never two changes at once, no trial but in mode Auto, no setting in force but the spec's and such as a canary has proven
or a person has promoted, and what the user writes wins. Liveness is that of `test_rollouts`: a trial ends by itself.
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
    """See the module."""

    @rule(
        setting=st.sampled_from([Static(5), Static(1), Static(3), Off()]),
        action=st.sampled_from(["Change", "Change", "Explore", "Hold", "Insufficient"]),
        old=st.sampled_from([0, 0, 0, 4000]),
        other=st.sampled_from([False, False, False, True]),
    )
    @precondition(lambda self: self.world.status.get("stable"))
    def an_advice_comes(self, setting: SpeculationSetting, action: RecommendedAction, old: int, other: bool) -> None:
        revision = "another" if other else self.world.status["stable"]["revision"]
        at = self.world.now.timestamp() - old
        self.world.recommendation = Recommendation(revision, at, action, setting, (0.02, 0.08, 0.15), f"{setting} is advised.")

    @rule()
    def another_operator_begins(self) -> None:
        self.world.recommendation = None

    @rule(mode=st.sampled_from(["Auto", "Auto", "Recommend", "Off"]), tokens=st.sampled_from([K_OF_SPEC, K_OF_SPEC, 5, 2]))
    def another_tuning(self, mode: str, tokens: int) -> None:
        self.world.edit(speculation={"numSpeculativeTokens": tokens, "tuning": {"mode": mode}})

    @rule(parts=st.integers(4, 9), blocks=st.integers(1, 8), slower=st.sampled_from([-0.2, 0.0, 0.2]))
    @precondition(lambda self: self.world.status.get("analysis"))
    def blocks_of_a_trial_close(self, parts: int, blocks: int, slower: float) -> None:
        for _ in range(blocks):
            self.world.measure_time(1, slower, step=False)
            self.look(parts)

    @rule(word=st.sampled_from(["promote", "rollback"]))
    @precondition(lambda self: self.world.status.get("canary"))
    def a_person_says_so_of_the_canary(self, word: str) -> None:
        self.world.annotate(**{word: self.world.status["canary"]["revision"]})

    @rule(parts=st.integers(0, 8))
    def a_pass_that_sees_pods_as_they_were(self, parts: int) -> None:
        now = self.world.pods
        before, self.world.pods = copy.deepcopy(now), [pod for pod in now if pod["status"].get("phase") != "Running"]
        self.look(parts)
        self.world.pods = before

    def look(self, parts: int = 1000) -> None:
        world, before = self.world, self.world.status
        super().look(parts)
        after = world.status
        if after == before:
            return
        alone = resolve_desired_revision(world.observed().resource).revision
        tuning = after.get("speculation") or {}
        trial = tuning.get("trial")
        if trial is not None:
            event("a trial")
            assert world.document["spec"].get("speculation", {}).get("tuning", {}).get("mode") == "Auto"
            assert trial["specRevision"] == alone, "the user's spec wins"
            known = after.get("canary")
            assert known is None or known["revision"] == trial["revision"] or known["phase"] == "RollingBack", "one at a time"
            assert after.get("previous") is None
        self.proven(before, after, alone)
        chosen = tuning.get("applied")
        if chosen is not None:
            event("a choice")
            arms = [after["stable"], after.get("previous") or {}]
            assert chosen["revision"] in {arm.get("revision") for arm in arms}
            assert chosen["revision"] != chosen["specRevision"]

    def proven(self, before: dict[str, Any], after: dict[str, Any], alone: str) -> None:
        """What has become stable by this pass is the spec's, or was before, or has passed a trial."""
        was, now = (before.get("stable") or {}).get("revision"), (after.get("stable") or {}).get("revision")
        if now in (was, alone, (before.get("previous") or {}).get("revision")) or was is None:
            return
        trial = (before.get("speculation") or {})["trial"]
        assert now == trial["revision"]
        assert (after.get("analysis") or {}).get("verdict") == "Promote" or now in self.words
        event("a trial was promoted")


# Without shrinking, which takes minutes here.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Tuning.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None, phases=_PHASES)
TestTuning = pytest.mark.slow(Tuning.TestCase)
