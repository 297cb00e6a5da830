"""Fields of other releases are preserved, and missing fields of a definition are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api.crd import build_custom_resource_definition
from aerie.api.status import Status
from aerie.api.validation.release_skew import find_dropped_fields, find_missing_crd_fields, preserve_unknown_fields

ARM = {"revision": "a", "replicas": 2, "readyReplicas": 2}
CONDITION = {
    "type": "Ready",
    "status": "True",
    "reason": "AllPodsReady",
    "message": "2/2 pods ready",
    "lastTransitionTime": "2026-11-21T12:00:00.000Z",
}
OUTCOME = {
    "revision": "a",
    "change": "the drafter",
    "result": "Promoted",
    "message": "It is better.",
    "startTime": "2026-11-21T12:00:00.000Z",
    "completionTime": "2026-11-21T13:00:00.000Z",
}
KNOWN = {"phase": "Ready", "replicas": 2, "stable": ARM, "conditions": [CONDITION], "rolloutHistory": [OUTCOME]}


def novel() -> dict[str, Any]:
    """A status with a field of another release in each place."""
    found: dict[str, Any] = copy.deepcopy(KNOWN)
    for part in (found, found["stable"], found["conditions"][0], found["rolloutHistory"][0]):
        part["novel"] = {"of": [1, 2]}
    return found


def test_fields_of_another_release_are_preserved() -> None:
    assert Status.from_dict(novel()).to_dict() == Status.from_dict(KNOWN).to_dict()
    assert preserve_unknown_fields(Status.from_dict(novel()).to_dict(), novel()) == novel()


def test_unknown_field_is_dropped_with_its_parent() -> None:
    made: dict[str, Any] = copy.deepcopy(KNOWN)
    made["stable"] = {**ARM, "revision": "b"}
    made["rolloutHistory"] = [{**OUTCOME, "revision": "b"}, OUTCOME]
    made["conditions"] = [{**CONDITION, "message": "1/2 pods ready"}]
    found = preserve_unknown_fields(made, novel())
    assert found["novel"] == {"of": [1, 2]}
    assert "novel" not in found["stable"]
    assert ["novel" in one for one in found["rolloutHistory"]] == [False, True]
    assert found["conditions"][0]["novel"] == {"of": [1, 2]}, "it is the same condition"
    assert "stable" not in preserve_unknown_fields({"phase": "Ready"}, novel())


@given(st.sampled_from(sorted(KNOWN)), st.booleans())
def test_status_of_this_release_is_unchanged(left_out: str, before: bool) -> None:
    made = {key: value for key, value in KNOWN.items() if key != left_out}
    assert preserve_unknown_fields(made, KNOWN if before else made) == made


def test_current_definition_lacks_nothing() -> None:
    assert find_missing_crd_fields(build_custom_resource_definition()) == []


@pytest.mark.parametrize("preserved", [True, False])
def test_older_definition_lacks_fields_and_values(preserved: bool) -> None:
    definition = build_custom_resource_definition()
    status = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    del status["properties"]["selectedDrafters"]
    del status["properties"]["rolloutHistory"]["items"]["properties"]["replacedDrafter"]
    status["properties"]["phase"]["enum"].remove("Verifying")
    if preserved:
        status["properties"]["rolloutHistory"]["items"]["x-kubernetes-preserve-unknown-fields"] = True
    found = [
        "status.phase: Verifying",
        "status.selectedDrafters",
        *([] if preserved else ["status.rolloutHistory[].replacedDrafter"]),
    ]
    assert find_missing_crd_fields(definition) == found


@pytest.mark.parametrize("definition", [{}, {"spec": {}}, {"spec": {"versions": [{"name": "v1"}]}}])
def test_definition_without_the_version_lacks_the_status(definition: dict[str, Any]) -> None:
    assert find_missing_crd_fields(definition) == ["status"]


def test_dropped_fields_are_named() -> None:
    stored: dict[str, Any] = copy.deepcopy(KNOWN)
    del stored["phase"], stored["stable"]["replicas"], stored["rolloutHistory"][0]["change"]
    assert list(find_dropped_fields(KNOWN, stored)) == [
        "status.phase",
        "status.stable.replicas",
        "status.rolloutHistory[].change",
    ]
    assert list(find_dropped_fields(KNOWN, novel())) == []
