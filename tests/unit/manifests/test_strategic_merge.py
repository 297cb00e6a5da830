"""The user's podTemplate over Aerie's pod: as kubectl patch merges."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.manifests.pod.strategic_merge import MERGE_KEYS, apply_strategic_merge

BASE: dict[str, Any] = {
    "enableServiceLinks": False,
    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{"name": "engine", "image": "vllm", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
}


@pytest.mark.parametrize(
    ("patch", "path", "expected"),
    [
        ({"nodeSelector": {"gpu": "h200"}}, ["nodeSelector"], {"gpu": "h200"}),
        ({"securityContext": {"fsGroup": 1}}, ["securityContext"], {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 1}),
        ({"securityContext": None}, ["securityContext"], None),
        ({"tolerations": [{"key": "a"}]}, ["tolerations"], [{"key": "a"}]),
        (
            {"containers": [{"name": "engine", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}]},
            ["containers", 0, "env"],
            [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
        ),
        (
            {"containers": [{"name": "engine", "image": None}]},
            ["containers", 0],
            {"name": "engine", "env": BASE["containers"][0]["env"]},
        ),
        ({"containers": [{"name": "proxy", "image": "envoy"}]}, ["containers", 1], {"name": "proxy", "image": "envoy"}),
        ({"volumes": [{"name": "shm", "$patch": "delete"}]}, ["volumes"], []),
        ({"volumes": [{"name": "x"}, {"$patch": "replace"}]}, ["volumes"], [{"name": "x"}]),
        ({"securityContext": {"$patch": "replace", "fsGroup": 1}}, ["securityContext"], {"fsGroup": 1}),
        ({"containers": [{"image": "no-name"}]}, ["containers", 1], {"image": "no-name"}),
    ],
)
def test_patch_is_merged_as_by_kubectl(patch: dict[str, Any], path: list[Any], expected: object) -> None:
    before = copy.deepcopy((BASE, patch))
    merged: Any = apply_strategic_merge(BASE, patch)
    for part in path[:-1]:
        merged = merged[part]
    last = path[-1]
    assert (merged.get(last) if isinstance(merged, dict) else merged[last]) == expected
    assert before == (BASE, patch), "the arguments were changed"


values = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda children: (
        st.dictionaries(st.sampled_from(["a", "b", "name", *MERGE_KEYS]), children, max_size=3)
        | st.lists(st.fixed_dictionaries({"name": st.text(max_size=2)}), max_size=3, unique_by=lambda e: e["name"])
    ),
    max_leaves=12,
)
pods = st.dictionaries(st.sampled_from(["a", "containers", "volumes", "tolerations"]), values, max_size=4)


def has_merge_keys(value: Any) -> bool:
    """Whether every list that is merged by a key holds maps that have it, and nothing else stands in its place."""
    if isinstance(value, dict):
        has_keys = all(
            isinstance(v, list) and all(MERGE_KEYS[k] in e for e in v if isinstance(e, dict))
            for k, v in value.items()
            if k in MERGE_KEYS
        )
        return has_keys and all(has_merge_keys(v) for v in value.values())
    return all(has_merge_keys(v) for v in value) if isinstance(value, list) else True


@given(pods.filter(has_merge_keys))
def test_empty_patch_and_own_content_change_nothing(pod: dict[str, Any]) -> None:
    assert apply_strategic_merge(pod, {}) == pod
    assert apply_strategic_merge(pod, pod) == pod


@given(pods.filter(has_merge_keys), pods.filter(has_merge_keys))
def test_merge_is_idempotent(pod: dict[str, Any], patch: dict[str, Any]) -> None:
    once = apply_strategic_merge(pod, patch)
    assert apply_strategic_merge(once, patch) == once
