"""Membership and growth of a trial."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api.rollout import RolloutSpec
from aerie.api.status import TrialPod
from aerie.rollout.in_place.trial_pods import MAX_TRIAL_PODS, compute_growth_step, count_desired_pods, update_trial_pods
from tests.unit.rollout.in_place import reports

SPEC = RolloutSpec.from_dict({"canary": {"stepWeights": [25, 50], "stepDuration": "5m"}})


@pytest.mark.parametrize(
    ("pods", "replicas", "growth_step", "count"),
    [
        (1, 1, 2, 1),
        (1, 0, 0, 1),
        (3, 2, 0, 2),
        (1, 10, 0, 1),
        (1, 10, 1, 3),
        (1, 10, 2, 5),
        (1, 1000, 2, MAX_TRIAL_PODS),
        (60, 1000, 0, 60),
        (60, 1000, 2, 60),
    ],
)
def test_pods_on_trial(pods: int, replicas: int, growth_step: int, count: int) -> None:
    spec = SPEC.model_copy(update={"in_place": SPEC.in_place.model_copy(update={"pods": pods})})
    assert count_desired_pods(spec, replicas, growth_step) == count


@pytest.mark.parametrize(("minutes", "step"), [(0, 0), (4.9, 0), (5, 1), (10, 2), (100, 2)])
def test_growth_by_time(minutes: float, step: int) -> None:
    assert compute_growth_step(SPEC, timedelta(minutes=minutes)) == step


def test_growth_without_step_duration_is_immediate() -> None:
    spec = RolloutSpec.from_dict({"canary": {"stepWeights": [25, 50], "stepDuration": "0s"}})
    assert compute_growth_step(spec, timedelta(0)) == 2


def test_replacement_takes_the_index_of_the_pod_that_is_gone() -> None:
    before = [TrialPod(name=name, uid=f"uid-{name}", index=index) for index, name in enumerate("abc")]
    after = update_trial_pods(before, [reports.pod(name) for name in "acd"], 3, first_pair=7)
    assert [(pod.name, pod.index, pod.first_pair) for pod in after] == [("a", 0, 0), ("d", 1, 7), ("c", 2, 0)]


def test_pod_that_was_replaced_under_its_name_is_another_pod() -> None:
    before = [TrialPod(name="a", uid="uid-of-the-former-pod", index=0)]
    assert update_trial_pods(before, [reports.pod("a")], 1, 3) == [TrialPod(name="a", uid="uid-a", index=0, first_pair=3)]


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.integers(1, 20), st.sets(st.integers(0, 30), max_size=20))
def test_indexes_are_unique_and_pods_keep_theirs(
    members: set[int], available: set[int], desired_count: int, indexes: set[int]
) -> None:
    before = [
        TrialPod(name=f"p{member}", uid=f"uid-p{member}", index=index)
        for member, index in zip(sorted(members), sorted(indexes), strict=False)
    ]
    after = update_trial_pods(before, [reports.pod(f"p{number}") for number in sorted(available)], desired_count, 5)
    names = {f"p{number}" for number in available}
    retained = [pod for pod in before if pod.name in names]
    assert len({pod.index for pod in after}) == len({pod.name for pod in after}) == len(after)
    assert {pod.name for pod in after} <= names
    assert [pod for pod in after if pod in retained] == sorted(retained, key=lambda pod: pod.index)
    assert len(after) == max(len(retained), min(desired_count, len(names)))
