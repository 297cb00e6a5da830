"""Rollouts in place under any sequence of faults and changes: what always holds, and how every history ends.

The machine keeps no model of the rollout. It compares what engines do with what the status says.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aerie.analysis.measurement import codec
from aerie.analysis.switchback.plan import TOKENS_PER_STEP
from aerie.api.status import InPlaceRollout
from aerie.rollout.in_place.trial import resume_trial
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.progression.user_request import MAX_CLOCK_DIFFERENCE
from tests.unit.rollout.in_place.fleet import DRAFTERS, EFFECTS, NAMES_BY_DIGEST, Fleet, serving_fleet
from tests.unit.rollout.named_requests import NamedRequests

name_strategy = st.sampled_from(DRAFTERS)
index_strategy = st.integers(0, 999)
seconds_strategy = st.sampled_from((0.3, 1.0, 3.0, 7.0, 20.0, 61.0, 300.0))
MAX_EXAMPLES = 30
WAITING_PHASES = ("Held", "AwaitingApproval")


class RolloutMachine(RuleBasedStateMachine):
    """A fleet, its user and its faults."""

    sizes: tuple[int, ...] = (1, 2, 40)

    @initialize(
        size=st.sampled_from((0, 1, 2)),
        pods=st.sampled_from((1, 2, 5)),
        rate=st.sampled_from((0.0, 2.0, 20.0)),
        approval=st.sampled_from(("Automatic", "Manual")),
        shadow=st.sampled_from(({}, {"source": "Prompts", "prompts": {"configMap": "prompts"}, "maxDuration": "5m"})),
        seed=st.integers(0, 1000),
    )
    def start(self, size: int, pods: int, rate: float, approval: str, shadow: dict[str, Any], seed: int) -> None:
        rollout = {
            "inPlace": {"mode": "Auto", "pods": pods},
            "canary": {"approval": approval, "stepWeights": [25, 50], "stepDuration": "3m"},
            "analysis": {"maxDuration": "30m", "minDuration": "0s", "shadow": shadow},
            "progressDeadline": "5m",
        }
        self.fleet = serving_fleet(self.sizes[size], requests_per_second=rate, seed=seed, noise=0.0, rollout=rollout)
        self.fleet.on_reconcile = self.observe
        self.closed_pairs: Counter[str] = Counter()
        self.requests = NamedRequests()
        self.fleet.run(timedelta(minutes=1))

    def observe(self, plan: ReconcilePlan) -> None:
        """Check what must hold after each reconcile."""
        rollout = plan.status.in_place_rollout
        if rollout is not None and rollout.state:
            self.check_counts(rollout)
        if rollout is not None and rollout.trial_start_time is not None and rollout.phase != "Promoting":
            assert plan.status.stable is not None
            served = plan.status.stable.in_place
            replaced = served.digest if served is not None else rollout.replaced and rollout.replaced.digest
            begun = rollout.start_time.timestamp()
            promoted = {engine.own for engine in self.fleet.engines.values() if (engine.promoted_at or 0.0) >= begun}
            promoted &= {rollout.digest} - {replaced}
            if promoted and rollout.phase != "RollingBack":
                self.fleet.violations.append(f"{rollout.phase}: a pod has the new drafter as its own")

    def check_counts(self, rollout: InPlaceRollout) -> None:
        """Check that no pair is counted twice, and none that has not been."""
        trial = resume_trial(rollout, self.fleet.observed().resource.spec.rollout.analysis)
        assert trial is not None
        name = f"{rollout.start_time}/{rollout.trial_start_time}"
        assert trial.state.closed_pair_count >= self.closed_pairs[name]
        self.closed_pairs[name] = trial.state.closed_pair_count
        pods = max(1, len(self.fleet.pods), 100)
        assert trial.state.counted_pairs + trial.state.lost_pairs <= trial.state.closed_pair_count * pods
        assert trial.state.open_windows == {}
        assert codec.unpack(rollout.state).items() >= trial.state.to_dict().items()
        moments = trial.state.moments.get(TOKENS_PER_STEP)
        if moments is not None and moments.control_mean > 0:
            # Without noise, one window that is counted for the other drafter would change the ratio.
            assert rollout.replaced is not None
            canary, stable = (
                EFFECTS.get(NAMES_BY_DIGEST[digest or ""], 0.0) for digest in (rollout.digest, rollout.replaced.digest)
            )
            assert moments.canary_mean / moments.control_mean == pytest.approx((1 + canary) / (1 + stable), rel=1e-9)
            event("a ratio was checked")

    # -------------------------------------------------------------------------------------------------------- the user
    @rule(name=name_strategy)
    def change_drafter(self, name: str) -> None:
        self.fleet.drafter(name)
        self.fleet.wake()

    @rule(action=st.sampled_from(("promote", "rollback", "retry")))
    def annotate(self, action: str) -> None:
        revision, now = self.fleet.desired_revision, self.fleet.now
        value = f"{now.timestamp():.0f}" if action == "retry" else revision
        self.fleet.annotate(**{action: value, "requested-by": self.requests.build(action, revision, now)})
        self.fleet.wake()

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.fleet.edit(rollout={**self.fleet.document["spec"]["rollout"], "paused": paused})
        self.fleet.wake()

    @rule(replicas=st.sampled_from((0, 1, 2, 3, 41)))
    def scale(self, replicas: int) -> None:
        self.fleet.scale(replicas)

    # ------------------------------------------------------------------------------------------------------- the faults
    def pick(self, index: int) -> str | None:
        names = sorted(self.fleet.engines)
        return names[index % len(names)] if names else None

    @rule(index=index_strategy)
    def crash(self, index: int) -> None:
        if (name := self.pick(index)) is not None:
            self.fleet.crash_engine(name, seconds=20)

    @rule(index=index_strategy)
    def evict(self, index: int) -> None:
        if (name := self.pick(index)) is not None:
            self.fleet.delete_pod(name)

    @rule(index=index_strategy, hangs=st.booleans())
    def hang(self, index: int, hangs: bool) -> None:
        if (name := self.pick(index)) is not None:
            self.fleet.engines[name].hangs = hangs

    @rule(index=index_strategy, rejects=st.booleans())
    def reject(self, index: int, rejects: bool) -> None:
        if (name := self.pick(index)) is not None:
            self.fleet.engines[name].rejects = rejects

    @rule(index=index_strategy)
    def replace_files(self, index: int) -> None:
        if (name := self.pick(index)) is not None:
            self.fleet.engines[name].other_files = True

    @rule(parts=st.integers(0, 3))
    def kill_operator_in_a_write(self, parts: int) -> None:
        self.fleet.reconcile(parts)

    @rule()
    def kill_operator(self) -> None:
        self.fleet.restart_operator()

    @rule()
    def lose_the_status(self) -> None:
        self.fleet.document.pop("status", None)
        self.fleet.wake()

    # ---------------------------------------------------------------------------------------------------------- time
    @rule(seconds=seconds_strategy)
    def wait(self, seconds: float) -> None:
        self.fleet.run(timedelta(seconds=seconds))

    @rule(
        name=name_strategy,
        phase=st.sampled_from(("Staging", "Evaluating", "Analyzing", "Promoting", "RollingBack", *WAITING_PHASES)),
    )
    def reach_phase(self, name: str, phase: str) -> None:
        self.fleet.drafter(name)
        self.fleet.wake()
        self.fleet.run(timedelta(minutes=10), lambda: self.fleet.phase == phase)

    @rule()
    def wait_for_the_next_phase(self) -> None:
        phase = self.fleet.phase
        self.fleet.run(timedelta(minutes=10), lambda: self.fleet.phase != phase)

    # ------------------------------------------------------------------------------------------------ what always holds
    @invariant()
    def nothing_is_violated(self) -> None:
        fleet: Fleet | None = getattr(self, "fleet", None)
        if fleet is not None:
            assert fleet.violations == []
            # Without its status, the operator knows an earlier request only by its time.
            if self.requests.check(fleet, tolerance=MAX_CLOCK_DIFFERENCE):
                event("an outcome names its user")

    def teardown(self) -> None:
        """Heal everything: the rollout ends or waits for a user, and pods serve with the drafter of the status."""
        fleet: Fleet | None = getattr(self, "fleet", None)
        if fleet is None:
            return
        for engine in fleet.engines.values():
            engine.hangs = engine.rejects = False
        fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": False})
        fleet.scale(fleet.document["spec"]["replicas"] or 1)
        for _ in range(2):  # a rollout in place may follow the removal of a canary
            ended = fleet.run(timedelta(minutes=90), self.has_ended)
            assert ended, f"{fleet.phase}: {fleet.message('Progressing')} {fleet.violations}"
            fleet.run(timedelta(minutes=20))
        assert fleet.violations == []
        self.check_end(fleet)

    def has_ended(self) -> bool:
        is_complete = self.fleet.phase == "Ready" and self.fleet.condition("Progressing") == ("False", "Complete")
        return is_complete or self.fleet.phase in ("RolledBack", "Failed", *WAITING_PHASES) or self.is_by_pods

    @property
    def is_by_pods(self) -> bool:
        return self.fleet.status.get("canary") is not None or self.fleet.status.get("previous") is not None

    def check_end(self, fleet: Fleet) -> None:
        if self.is_by_pods or fleet.status.get("stable") is None or fleet.condition("Degraded")[1] == "WrongDrafter":
            return  # a pod without the files of the drafter is named, and waits for the user
        stable: dict[str, Any] = fleet.status["stable"]
        in_place = stable.get("inPlace")
        expected = NAMES_BY_DIGEST[in_place["digest"]] if in_place else fleet.drafter_of_revision(stable["revision"])
        assert set(fleet.loaded_names()) <= {expected}
        assert fleet.own_names() <= {expected}
        reconciles = fleet.reconciles
        fleet.run(timedelta(minutes=30))
        assert fleet.reconciles - reconciles <= 40


RolloutMachine.TestCase.settings = settings(max_examples=MAX_EXAMPLES, stateful_step_count=25, deadline=None)
TestRollouts = pytest.mark.slow(RolloutMachine.TestCase)
