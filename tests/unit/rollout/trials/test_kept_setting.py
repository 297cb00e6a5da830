"""An applied setting and changes of the drafter: when it is kept, which revisions its record names, and when that of the spec
is rolled out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Off, SpeculationSetting, Static, max_speculative_tokens
from aerie.manifests.revision_hash import compute_revision
from aerie.rollout.revision.desired import build_status_setting
from tests.golden import Messages
from tests.unit.rollout.in_place.fleet import Fleet, serving_fleet
from tests.unit.rollout.tuned_world import K3, K5, recommend, speculation
from tests.unit.rollout.world import START

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
AUTO = {"mode": "Auto"}


def revision_of(fleet: Fleet, drafter: str, setting: SpeculationSetting) -> str:
    """Return the revision of the present spec with this drafter and setting."""
    source = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": drafter}}}
    document = {**fleet.document, "spec": {**fleet.document["spec"], "drafter": source}}
    return compute_revision(SpeculativeDeployment.from_dict(document), setting)


def fleet_with_applied_setting(setting: SpeculationSetting | None = None, **arguments: Any) -> Fleet:
    """Return a fleet that serves with the drafter eagle3 and K=5, which a trial has proven; the spec has K=3."""
    setting = setting or Static(5)
    tokens = max_speculative_tokens(setting)
    fleet = serving_fleet(**arguments, speculation={"numSpeculativeTokens": tokens, "tuning": AUTO})
    fleet.edit(speculation={"tuning": AUTO})
    applied, spec_revision, time = (
        build_status_setting(setting).to_dict(),
        revision_of(fleet, "eagle3", Static(3)),
        START.isoformat(),
    )
    failure = {"reason": "Regressed", "specRevision": spec_revision, "lastStartTime": time, "lastCompletionTime": time}
    trial = {"purpose": "Improve", "result": "Promoted", "revision": fleet.status["stable"]["revision"], "completionTime": time}
    fleet.document["status"]["speculation"] |= {
        "applied": {"setting": applied, "revision": revision_of(fleet, "eagle3", setting), "specRevision": spec_revision},
        "failures": [{"setting": {"mode": "Static", "numSpeculativeTokens": 7}, **failure}],
        "trials": [{"fromSetting": K3, "toSetting": applied, "measured": {"estimate": 0.1}, **trial}],
        "savings": {"currentRate": 0.1, "updateTime": time},
    }
    fleet.wake()
    fleet.run(SECOND)
    assert fleet.phase == "Ready"
    return fleet


def assert_applied(fleet: Fleet, drafter: str) -> None:
    """Check that K=5 is active, and is recorded for this drafter."""
    assert speculation(fleet)["applied"] == {
        "setting": K5,
        "revision": revision_of(fleet, drafter, Static(5)),
        "specRevision": revision_of(fleet, drafter, Static(3)),
    }
    assert speculation(fleet)["current"] == K5
    assert speculation(fleet)["savings"]["currentRate"] == 0.1
    assert fleet.violations == []


def test_setting_is_kept_by_a_change_in_place_and_tuning_continues(messages: Messages) -> None:
    fleet = fleet_with_applied_setting(replicas=2)
    fleet.run(2 * MINUTE)
    pods, changed = [pod["metadata"]["name"] for pod in fleet.pods], revision_of(fleet, "better", Static(5))
    fleet.drafter("better")
    states: list[tuple[str, str, bool]] = []

    def record(_: Any) -> None:
        """Record what an operator that starts now finds: it knows the status alone."""
        states.append((fleet.desired_revision, speculation(fleet)["applied"]["revision"], "failures" in speculation(fleet)))

    fleet.on_reconcile = record
    fleet.wake()
    fleet.run_until_phase("Analyzing")
    assert fleet.condition("SpeculationTuned") == ("False", "RolloutInProgress")
    messages.check("kept for a new drafter", fleet.message("SpeculationTuned"))
    assert_applied(fleet, "eagle3")
    fleet.run_until_phase("Ready")
    fleet.run(20 * MINUTE)
    assert fleet.status["stable"]["inPlace"]["revision"] == changed
    assert fleet.status["rolloutHistory"][0]["change"] == "drafter models/better"
    assert [pod["metadata"]["name"] for pod in fleet.pods] == pods
    assert set(fleet.loaded_names()) == {"better"}
    assert_applied(fleet, "better")
    old = revision_of(fleet, "eagle3", Static(5))
    assert list(dict.fromkeys(states)) == [(changed, old, True), (changed, changed, True), (changed, changed, False)]
    fleet.on_reconcile = lambda _: None
    recommend(fleet, Static(7))
    fleet.wake()
    fleet.run(SECOND)
    trial = speculation(fleet)["trial"]
    assert trial["specRevision"] == revision_of(fleet, "better", Static(3))
    assert trial["revision"] == revision_of(fleet, "better", Static(7))


@pytest.mark.parametrize("phase", ["Staging", "Analyzing", "Promoting", "Ready"])
def test_return_of_the_spec_restores_the_record(phase: str) -> None:
    fleet = fleet_with_applied_setting(replicas=30)
    fleet.run(2 * MINUTE)
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase(phase)
    if phase == "Ready":
        fleet.run(MINUTE)
        assert_applied(fleet, "better")
    fleet.drafter("eagle3")
    fleet.wake()
    if phase == "Ready":
        fleet.run_until_phase("Analyzing")
        fleet.annotate(promote=fleet.desired_revision)
        fleet.wake()
    fleet.run_until_phase("Ready")
    fleet.run(20 * MINUTE)
    assert fleet.phase == "Ready"
    assert set(fleet.loaded_names()) == {"eagle3"}
    assert_applied(fleet, "eagle3")
    assert ("failures" in speculation(fleet)) == (phase != "Ready")


def test_worse_drafter_is_rejected_and_the_record_stays() -> None:
    fleet = fleet_with_applied_setting(requests_per_second=20.0)
    fleet.run(2 * MINUTE)
    fleet.drafter("worse")
    fleet.wake()
    fleet.run_until_phase("RolledBack")
    fleet.run(60 * MINUTE)
    assert fleet.phase == "RolledBack"
    assert fleet.status["rejectedRevision"] == revision_of(fleet, "worse", Static(5))
    assert len(fleet.status["rolloutHistory"]) == 2
    assert_applied(fleet, "eagle3")
    fleet.drafter("eagle3")
    fleet.wake()
    fleet.run_until_phase("Ready")
    assert_applied(fleet, "eagle3")
    assert speculation(fleet)["failures"], "they were measured with this drafter"


@pytest.mark.parametrize("end", ["promoted", "rolled back", "third drafter"])
def test_setting_is_kept_by_a_change_by_pods(end: str) -> None:
    fleet = fleet_with_applied_setting(replicas=2, rollout={"canary": {"scaleDownDelay": "1h"}})
    for engine in fleet.engines.values():
        engine.rejects = True
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Starting")
    assert fleet.status["canary"]["revision"] == revision_of(fleet, "better", Static(5))
    assert "by pods" in fleet.status["canary"]["change"]
    fleet.annotate(promote=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("Monitoring")
    assert_applied(fleet, "better")
    if end == "promoted":
        fleet.run_until_phase("Ready", minutes=90)
        assert_applied(fleet, "better")
        return
    if end == "rolled back":
        fleet.annotate(rollback=fleet.desired_revision)
    else:  # while clients need the previous pods
        fleet.ready(fleet.desired_revision, "False")
        fleet.drafter("equal")
    fleet.wake()
    fleet.run(SECOND)
    assert fleet.status["stable"]["revision"] == revision_of(fleet, "eagle3", Static(5))
    assert_applied(fleet, "eagle3")
    fleet.run(20 * MINUTE)
    assert_applied(fleet, "eagle3")
    if end == "rolled back":
        assert fleet.phase == "RolledBack"
        assert fleet.status["rejectedRevision"] == revision_of(fleet, "better", Static(5))
    else:
        assert fleet.desired_revision == revision_of(fleet, "equal", Static(5))


def edit_tuning(fleet: Fleet, **tuning: Any) -> None:
    fleet.edit(speculation={"tuning": {**AUTO, **tuning}})


NOT_KEPT: dict[str, tuple[Callable[[Fleet], None], int]] = {
    "in place is off": (lambda fleet: fleet.edit(rollout={"inPlace": {"mode": "Off"}}), 3),
    "tuning is off": (lambda fleet: edit_tuning(fleet, mode="Off"), 3),
    "beyond a bound": (lambda fleet: edit_tuning(fleet, maxSpeculativeTokens=4), 3),
    "stricter objective": (lambda fleet: edit_tuning(fleet, slo={"timePerOutputToken": "20ms"}), 3),
    "another number": (lambda fleet: fleet.edit(speculation={"numSpeculativeTokens": 2, "tuning": AUTO}), 2),
    "another argument": (
        lambda fleet: fleet.edit(engine={**fleet.document["spec"]["engine"], "args": ["--max-model-len=4096"]}),
        3,
    ),
}
"""Edits beside a change of the drafter after which the spec's own number applies, and that number."""


@pytest.mark.parametrize("change", NOT_KEPT)
def test_setting_is_not_kept(change: str) -> None:
    fleet, (edit, tokens) = fleet_with_applied_setting(), NOT_KEPT[change]
    fleet.drafter("better")
    assert fleet.desired_revision == revision_of(fleet, "better", Static(5))
    edit(fleet)
    assert fleet.desired_revision == revision_of(fleet, "better", Static(tokens))
    fleet.step()
    if change in ("beyond a bound", "stricter objective"):
        assert fleet.condition("SpeculationTuned") == ("False", "SettingVoid")


def test_setting_without_drafts_is_not_kept_for_a_new_drafter() -> None:
    fleet = fleet_with_applied_setting(Off())
    fleet.drafter("better")
    assert fleet.desired_revision == revision_of(fleet, "better", Static(3))
