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
STATUS = {"phase": "Ready", "replicas": 2, "stable": ARM, "conditions": [CONDITION], "rolloutHistory": [OUTCOME]}


def build_newer_status() -> dict[str, Any]:
    """A status with a field of another release in each place."""
    status: dict[str, Any] = copy.deepcopy(STATUS)
    for part in (status, status["stable"], status["conditions"][0], status["rolloutHistory"][0]):
        part["novel"] = {"of": [1, 2]}
    return status


def test_fields_of_another_release_are_preserved() -> None:
    assert Status.from_dict(build_newer_status()).to_dict() == Status.from_dict(STATUS).to_dict()
    assert preserve_unknown_fields(Status.from_dict(build_newer_status()).to_dict(), build_newer_status()) == build_newer_status()


def test_unknown_field_is_dropped_with_its_parent() -> None:
    written_status: dict[str, Any] = copy.deepcopy(STATUS)
    written_status["stable"] = {**ARM, "revision": "b"}
    written_status["rolloutHistory"] = [{**OUTCOME, "revision": "b"}, OUTCOME]
    written_status["conditions"] = [{**CONDITION, "message": "1/2 pods ready"}]
    preserved_status = preserve_unknown_fields(written_status, build_newer_status())
    assert preserved_status["novel"] == {"of": [1, 2]}
    assert "novel" not in preserved_status["stable"]
    assert ["novel" in outcome for outcome in preserved_status["rolloutHistory"]] == [False, True]
    assert preserved_status["conditions"][0]["novel"] == {"of": [1, 2]}, "it is the same condition"
    assert "stable" not in preserve_unknown_fields({"phase": "Ready"}, build_newer_status())


@given(st.sampled_from(sorted(STATUS)), st.booleans())
def test_status_of_this_release_is_unchanged(left_out: str, was_complete: bool) -> None:
    status = {key: value for key, value in STATUS.items() if key != left_out}
    assert preserve_unknown_fields(status, STATUS if was_complete else status) == status


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
    missing_fields = [
        "status.phase: Verifying",
        "status.selectedDrafters",
        *([] if preserved else ["status.rolloutHistory[].replacedDrafter"]),
    ]
    assert find_missing_crd_fields(definition) == missing_fields


@pytest.mark.parametrize("definition", [{}, {"spec": {}}, {"spec": {"versions": [{"name": "v1"}]}}])
def test_definition_without_the_version_lacks_the_status(definition: dict[str, Any]) -> None:
    assert find_missing_crd_fields(definition) == ["status"]


def test_dropped_fields_are_named() -> None:
    stored: dict[str, Any] = copy.deepcopy(STATUS)
    del stored["phase"], stored["stable"]["replicas"], stored["rolloutHistory"][0]["change"]
    assert list(find_dropped_fields(STATUS, stored)) == [
        "status.phase",
        "status.stable.replicas",
        "status.rolloutHistory[].change",
    ]
    assert list(find_dropped_fields(STATUS, build_newer_status())) == []
