"""Pods and weights of the arms: the requested replicas in each case, and a cluster whose pods start at any time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aerie.api.rollout import CanarySpec
from aerie.rollout.capacity import traffic_weights
from aerie.rollout.capacity.replica_counts import (
    ArmReplicas,
    Capacity,
    PodCounts,
    canary_replicas_for_traffic,
    max_retained_replicas,
    replicas_during_analysis,
    replicas_during_ramp_up,
    replicas_during_rollback,
    with_substitute_control_pods,
)
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT


def capacity(replicas: int, /, **canary: object) -> Capacity:
    return Capacity.from_spec(replicas, CanarySpec.model_validate(canary))


def test_surge_uses_spare_capacity_and_keeps_stable_pods() -> None:
    assert replicas_during_analysis(capacity(4, replicas=1)) == ArmReplicas(4, 1, 1)
    assert replicas_during_analysis(capacity(4, replicas=1, control="Stable")) == ArmReplicas(4, 1, 0)
    assert replicas_during_analysis(capacity(1, replicas=5)) == ArmReplicas(1, 1, 1)


def test_reuse_scales_stable_down_first() -> None:
    assert replicas_during_analysis(capacity(4, replicas=1, capacity="Reuse")) == ArmReplicas(2, 1, 1)
    assert replicas_during_analysis(capacity(4, replicas=1, capacity="Reuse", control="Stable")) == ArmReplicas(3, 1, 0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_reuse_keeps_one_stable_pod(replicas: int) -> None:
    small = capacity(replicas, replicas=1, capacity="Reuse")
    assert replicas_during_analysis(small) == ArmReplicas(1, 1, 1)
    assert (small.max_total_pods, small.min_ready_pods) == (3, 1)
    assert replicas_during_analysis(capacity(0, capacity="Reuse")) == ArmReplicas(0, 0, 0)


def test_lowered_ramp_keeps_canary_pods_until_stable_serves() -> None:
    forty = capacity(40, replicas=1)

    def lowered(stable: int, requested: int, serving: int) -> ArmReplicas:
        return replicas_during_ramp_up(
            forty, 1, PodCounts(requested=stable, ready=stable), PodCounts(requested=requested, ready=serving), PodCounts()
        )

    assert lowered(35, 7, 5) == ArmReplicas(35, 5)
    assert lowered(35, 5, 5) == ArmReplicas(37, 5)
    assert lowered(37, 5, 5) == ArmReplicas(37, 3)
    assert lowered(39, 3, 3) == ArmReplicas(39, 1)
    assert lowered(40, 1, 1) == ArmReplicas(40, 1)


def test_only_serving_pod_stays_when_late_fleet_shrinks() -> None:
    """One of the previous eight stable pods may be late; the only requested one may not."""
    capacity = Capacity.from_spec(1, CanarySpec())
    assert (
        replicas_during_rollback(
            capacity, PodCounts(requested=8, tolerated_late=1), PodCounts(requested=1, ready=1), PodCounts()
        ).canary
        == 1
    )


def test_only_serving_control_pods_stay_when_not_requested() -> None:
    capacity = Capacity.from_spec(4, CanarySpec(control="Stable"))
    control, nobody = PodCounts(requested=2, ready=2), PodCounts(requested=1)
    assert with_substitute_control_pods(
        replicas_during_analysis(capacity), capacity, PodCounts(requested=4, ready=3), nobody, control
    ) == ArmReplicas(4, 1, 1)
    assert with_substitute_control_pods(
        replicas_during_analysis(capacity), capacity, PodCounts(requested=4, ready=4), nobody, control
    ) == ArmReplicas(4, 1, 0)
    assert with_substitute_control_pods(
        replicas_during_analysis(capacity), capacity, PodCounts(requested=4), nobody, PodCounts(requested=2)
    ) == ArmReplicas(4, 1, 0)


def test_few_late_pods_are_tolerated() -> None:
    forty = capacity(40, replicas=1)
    stuck = PodCounts(requested=22, ready=20, tolerated_late=0)
    assert replicas_during_ramp_up(forty, 40, PodCounts(20, 0, 20), stuck, PodCounts()) == ArmReplicas(20, 22), (
        "both places beyond the fleet are taken"
    )
    plan = replicas_during_ramp_up(
        forty, 40, PodCounts(20, 0, 20), PodCounts(requested=22, ready=20, tolerated_late=2), PodCounts()
    )
    assert plan == ArmReplicas(18, 22), "two stable pods make room, and no more than two pods less serve"
    assert replicas_during_ramp_up(
        forty, 40, PodCounts(18, 0, 18), PodCounts(requested=22, ready=20, tolerated_late=2), PodCounts()
    ) == ArmReplicas(18, 24)


def test_promotion_needs_no_more_places_than_analysis() -> None:
    four = capacity(4, replicas=1)
    assert replicas_during_ramp_up(four, 4, PodCounts(4, 0, 4), PodCounts(1, 0, 1), PodCounts(1, 0, 1)) == ArmReplicas(
        3, 1
    )  # the control still holds its place
    assert replicas_during_ramp_up(four, 4, PodCounts(3, 0, 3), PodCounts(1, 0, 1), PodCounts(0, 0, 0)) == ArmReplicas(3, 3)
    assert replicas_during_ramp_up(four, 4, PodCounts(3, 0, 3), PodCounts(3, 0, 1), PodCounts(0, 0, 0)) == ArmReplicas(3, 3)
    assert replicas_during_ramp_up(four, 4, PodCounts(3, 0, 3), PodCounts(3, 0, 3), PodCounts(0, 0, 0)) == ArmReplicas(2, 3)
    assert replicas_during_ramp_up(four, 4, PodCounts(2, 0, 2), PodCounts(3, 0, 3), PodCounts(0, 0, 0)) == ArmReplicas(2, 4)


def test_retained_pods_use_places_of_canary_and_control() -> None:
    assert max_retained_replicas(capacity(4, replicas=1)) == 2
    assert max_retained_replicas(capacity(4, replicas=1, control="Stable")) == 1
    assert max_retained_replicas(capacity(1, replicas=1)) == 1, "no more than it was"
    assert max_retained_replicas(capacity(4, replicas=1, capacity="Reuse")) == 0
    assert max_retained_replicas(capacity(0)) == 0


def test_ramp_pods_follow_weight_or_share() -> None:
    assert canary_replicas_for_traffic(capacity(4), 25, by_pods=False) == 1
    assert canary_replicas_for_traffic(capacity(4), 50, by_pods=False) == 2
    assert canary_replicas_for_traffic(capacity(10), 5, by_pods=False) == 1
    assert (
        canary_replicas_for_traffic(capacity(4), 50, by_pods=True) == 3
    )  # beside three stable ones, in the six places that there are
    assert canary_replicas_for_traffic(capacity(4, capacity="Reuse"), 50, by_pods=True) == 2
    assert canary_replicas_for_traffic(capacity(1), 50, by_pods=True) == 1


@pytest.mark.parametrize(
    ("arms", "serving", "weights"),
    [
        (ArmReplicas(4, 1, 1), (4, 1, 1), (66_666, 16_667, 16_667)),
        (ArmReplicas(4, 1, 0), (4, 1, 0), (80_000, 20_000, 0)),
        (ArmReplicas(4, 1, 1), (4, 0, 1), (TOTAL_WEIGHT, 0, 0)),
        (ArmReplicas(4, 1, 1), (4, 1, 0), (TOTAL_WEIGHT, 0, 0)),
        (ArmReplicas(0, 1, 1), (0, 1, 1), (0, 50_000, 50_000)),
        (ArmReplicas(1, 1, 1), (0, 0, 1), (0, 0, TOTAL_WEIGHT)),
        (ArmReplicas(1, 1, 1), (0, 1, 0), (0, TOTAL_WEIGHT, 0)),
        (ArmReplicas(1, 1, 1), (0, 0, 0), (TOTAL_WEIGHT, 0, 0)),
        (ArmReplicas(1000, 1, 1), (1000, 1, 1), (99_800, 100, 100)),
    ],
)
def test_weights_during_analysis(arms: ArmReplicas, serving: tuple[int, int, int], weights: tuple[int, int, int]) -> None:
    by_arm = traffic_weights.weights_by_replicas(arms, *(PodCounts(ready=count) for count in serving))
    assert tuple(by_arm.values()) == weights


def test_weights_during_ramp() -> None:
    quarter = TOTAL_WEIGHT // 4
    assert traffic_weights.ramp_weights(quarter, PodCounts(4, 0, 4), PodCounts(1, 0, 1)) == {
        "stable": TOTAL_WEIGHT - quarter,
        "canary": quarter,
        "control": 0,
    }
    assert traffic_weights.ramp_weights(quarter, PodCounts(4, 0, 4), PodCounts(1, 0, 0)) == {
        "stable": TOTAL_WEIGHT,
        "canary": 0,
        "control": 0,
    }
    assert traffic_weights.ramp_weights(quarter, PodCounts(4, 0, 0), PodCounts(1, 0, 1)) == {
        "stable": 0,
        "canary": TOTAL_WEIGHT,
        "control": 0,
    }


@pytest.mark.parametrize("replicas", [1, 2, 4, 40, 150, 200, 400, 700, 1000])
@pytest.mark.parametrize("canary", [1, 3])
def test_canary_pod_has_load_of_stable_pod(replicas: int, canary: int) -> None:
    arms = replicas_during_analysis(capacity(replicas, replicas=canary))
    weights = traffic_weights.weights_by_replicas(
        arms, *(PodCounts(ready=count) for count in (arms.stable, arms.canary, arms.control))
    )
    stable = weights["stable"] / arms.stable
    assert abs(weights["canary"] / arms.canary / stable - 1) < 0.01
    assert weights["control"] == weights["canary"]


def test_status_weight_is_at_least_one_percent() -> None:
    assert [traffic_weights.weight_to_percent(weight) for weight in (0, 1, 100, 16_667, TOTAL_WEIGHT)] == [0, 1, 1, 17, 100]


CANARIES = st.builds(
    lambda replicas, control, capacity: CanarySpec.model_validate(
        {"replicas": replicas, "control": control, "capacity": capacity}
    ),
    st.integers(1, 3),
    st.sampled_from(["Fresh", "Stable"]),
    st.sampled_from(["Surge", "Reuse"]),
)


@given(replicas=st.integers(1, 20), canary=CANARIES, serving=st.tuples(*[st.integers(0, 20)] * 3))
def test_weights_sum_up_and_go_to_serving_pods(replicas: int, canary: CanarySpec, serving: tuple[int, int, int]) -> None:
    arms = replicas_during_analysis(Capacity.from_spec(replicas, canary))
    weights = traffic_weights.weights_by_replicas(arms, *(PodCounts(ready=count) for count in serving))
    assert sum(weights.values()) == TOTAL_WEIGHT
    assert all(weight >= 0 for weight in weights.values())
    for weight, count in zip(weights.values(), serving, strict=True):
        assert not weight or count or not any(serving)
    if weights["control"] and weights["canary"]:
        assert weights["control"] == weights["canary"]


class Cluster(RuleBasedStateMachine):
    """Pods that are created when requested, serve at any time later, and hold their place until they have ended."""

    @initialize(replicas=st.integers(2, 9), canary=CANARIES, share=st.sampled_from([0, 25, 50]), by_pods=st.booleans())
    def begin(self, replicas: int, canary: CanarySpec, share: int, by_pods: bool) -> None:
        self.capacity = Capacity.from_spec(max(replicas, 2 * canary.replicas), canary)
        replicas_by_arm = replicas_during_analysis(self.capacity)
        self.goal = canary_replicas_for_traffic(self.capacity, share, by_pods=by_pods) if share else self.capacity.replicas
        self.desired = {"stable": replicas_by_arm.stable, "canary": replicas_by_arm.canary, "control": replicas_by_arm.control}
        self.serving = dict(self.desired)  # the analysis has passed
        self.starting = dict.fromkeys(self.desired, 0)
        self.ending = dict.fromkeys(self.desired, 0)
        self.canary_before = self.desired["canary"]

    def pod_count(self, arm: str) -> int:
        return self.serving[arm] + self.starting[arm] + self.ending[arm]

    @rule()
    def decide(self) -> None:
        requested = {arm: max(count, self.serving[arm] + self.starting[arm]) for arm, count in self.desired.items()}
        counts = (PodCounts(requested[arm], self.ending[arm], self.serving[arm]) for arm in self.desired)
        arms = replicas_during_ramp_up(self.capacity, self.goal, *counts)
        assert arms.canary >= self.canary_before
        self.canary_before = arms.canary
        self.desired = {"stable": arms.stable, "canary": arms.canary, "control": arms.control}
        for arm, count in self.desired.items():  # as a ReplicaSet does: pods that do not serve are deleted first
            spare = self.serving[arm] + self.starting[arm] - count
            for pods in (self.starting, self.serving):
                ended = max(0, min(spare, pods[arm]))
                pods[arm] -= ended
                self.ending[arm] += ended
                spare -= ended
            self.starting[arm] += max(0, count - self.serving[arm] - self.starting[arm])

    @rule(arm=st.sampled_from(["stable", "canary"]))
    def a_pod_becomes_ready(self, arm: str) -> None:
        if self.starting[arm]:
            self.starting[arm] -= 1
            self.serving[arm] += 1

    @rule(arm=st.sampled_from(["stable", "canary", "control"]))
    def a_pod_ends(self, arm: str) -> None:
        self.ending[arm] = max(0, self.ending[arm] - 1)

    @rule(arm=st.sampled_from(["stable", "canary"]))
    def a_pod_is_lost(self, arm: str) -> None:
        """Lose a pod; its Deployment has not observed it yet."""
        self.serving[arm] = max(0, self.serving[arm] - 1)

    @rule(arm=st.sampled_from(["stable", "canary"]))
    def missing_pods_are_created(self, arm: str) -> None:
        self.starting[arm] += max(0, self.desired[arm] - self.serving[arm] - self.starting[arm])

    @rule(arm=st.sampled_from(["stable", "canary"]))
    def a_lost_pod_is_replaced(self, arm: str) -> None:
        """Lose a pod; its Deployment creates another one."""
        if self.serving[arm]:
            self.serving[arm] -= 1
            self.starting[arm] += 1

    @invariant()
    def pods_fit_into_the_places(self) -> None:
        if hasattr(self, "capacity"):
            assert sum(self.pod_count(arm) for arm in self.desired) <= self.capacity.max_total_pods

    @invariant()
    def at_least_min_ready_pods_are_requested(self) -> None:
        if hasattr(self, "capacity"):
            assert self.desired["stable"] + self.desired["canary"] >= self.capacity.min_ready_pods

    @invariant()
    def goal_is_reached(self) -> None:
        if not hasattr(self, "capacity"):
            return
        saved = tuple(dict(counts) for counts in (self.desired, self.serving, self.starting, self.ending)), self.canary_before
        for _ in range(4 * self.capacity.replicas + 4):
            self.decide()
            for arm in self.desired:
                self.missing_pods_are_created(arm)
                self.serving[arm] += self.starting[arm]
                self.starting[arm] = self.ending[arm] = 0
        assert self.serving["canary"] == self.goal
        assert self.serving["control"] == 0
        assert self.serving["stable"] + self.serving["canary"] >= self.capacity.replicas
        (self.desired, self.serving, self.starting, self.ending), self.canary_before = saved


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
