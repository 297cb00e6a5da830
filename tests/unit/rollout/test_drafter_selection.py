"""Drafter selection for a resource without a drafter: the catalog's first with a commit, fixed from the first pod on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.engine.models.drafter_catalog import DrafterCatalog, load_published_catalog
from aerie.engine.speculation import Static
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.manifests.revision_hash import compute_revision
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from aerie.rollout.revision.drafter_selection import select_drafter
from tests.golden import Messages
from tests.snapshots import build_snapshot

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD, NEW = "a" * 40, "b" * 40


def catalog_row(repo: str, commit: str | None = None, kind: str = "eagle3.1", target: str = "acme/big") -> str:
    pinned = f'\nrevision = "{commit}"' if commit else ""
    return f'targets = ["{target}"]\nrepo = "{repo}"\nkind = "{kind}"' + pinned


def catalog(*rows: str) -> DrafterCatalog:
    return DrafterCatalog(()).with_user_entries({f"row{number}": text for number, text in enumerate(rows)})


def hub_source(repo: str, commit: str = "0" * 40) -> dict[str, Any]:
    return {"source": {"huggingFace": {"repo": repo, "revision": commit}}}


def resource(status: dict[str, Any] | None = None, target: str = "acme/big", **spec: Any) -> SpeculativeDeployment:
    document = {
        "metadata": {"name": "chat", "namespace": "default", "uid": "u1", "generation": 1},
        "spec": {"model": hub_source(target), "engine": {"image": "vllm/vllm-openai:v0.33.0"}, **spec},
    }
    return SpeculativeDeployment.from_dict(document | ({"status": status} if status else {}))


def build_plan(deployment: SpeculativeDeployment, rows: DrafterCatalog, passed_revision: str = "") -> ReconcilePlan:
    """Return the plan of one reconcile; the revision `passed_revision` has passed preflight."""
    job = {
        "kind": "Job",
        "metadata": {"name": f"chat-{passed_revision}-preflight"},
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    }
    return build_reconcile_plan(
        build_snapshot(deployment, (job,) if passed_revision else ()), PreflightJobConfig("image"), NOW, rows
    )


def deployment(plan: ReconcilePlan) -> dict[str, Any] | None:
    return next((item for item in plan.objects_to_apply if item["kind"] == "Deployment"), None)


@pytest.mark.parametrize(
    ("rows", "repo"),
    [
        ([catalog_row("me/one", OLD)], "me/one"),
        ([catalog_row("me/one"), catalog_row("me/two", OLD)], "me/two"),
        ([catalog_row("me/plain", OLD, "eagle3"), catalog_row("me/better", NEW)], "me/better"),
        ([catalog_row("me/plain", OLD, "eagle3"), catalog_row("me/better")], "me/plain"),
        ([catalog_row("me/other", OLD, "dflash"), catalog_row("me/plain", NEW, "eagle3")], "me/plain"),
        ([catalog_row("me/first", OLD), catalog_row("me/second", NEW)], "me/first"),
        ([catalog_row("me/elsewhere", OLD, target="acme/small"), catalog_row("me/here", NEW)], "me/here"),
    ],
)
def test_first_candidate_with_commit_is_selected(rows: list[str], repo: str) -> None:
    selection = select_drafter(resource(), catalog(*rows))
    assert selection.problem == ""
    assert selection.selected_drafter is not None
    assert (selection.selected_drafter.target, selection.selected_drafter.repo, selection.selected_drafter.in_use) == (
        "acme/big",
        repo,
        False,
    )
    drafter = selection.resource.spec.drafter
    assert drafter is not None
    assert drafter.to_dict()["source"]["huggingFace"]["repo"] == repo


def test_selected_and_explicit_drafter_have_same_revision() -> None:
    chosen = select_drafter(resource(), catalog(catalog_row("me/one", OLD))).resource
    assert compute_revision(chosen, Static(3)) == compute_revision(resource(drafter=hub_source("me/one", OLD)), Static(3))


@pytest.mark.parametrize("spec", [{"drafter": hub_source("my/own", NEW)}, {"speculation": {"numSpeculativeTokens": 0}}])
def test_explicit_drafter_is_not_replaced(spec: dict[str, Any]) -> None:
    deployment_spec = resource(**spec)
    selection = select_drafter(deployment_spec, catalog(catalog_row("me/one", OLD)))
    assert (selection.resource, selection.selected_drafters, selection.selected_drafter, selection.problem) == (
        deployment_spec,
        (),
        None,
        "",
    )


def test_candidates_without_commit_are_listed_with_fix(messages: Messages) -> None:
    rows = catalog(catalog_row("me/better"), catalog_row("me/plain", kind="eagle3"), catalog_row("me/other", OLD, "dflash"))
    plan = build_plan(resource(), rows)
    assert [item["kind"] for item in plan.objects_to_apply if item["kind"] in ("Job", "Deployment")] == []
    (condition,) = [entry for entry in plan.status.conditions if entry.type == "PreflightPassed"]
    assert (condition.status, condition.reason) == ("False", "InvalidSpec")
    messages.check("candidates without a commit", condition.message)
    assert plan.status.selected_drafters == []


def test_target_outside_catalog_has_no_selection(messages: Messages) -> None:
    problem = select_drafter(resource(target="acme/unheard-of"), load_published_catalog()).problem
    messages.check("an unknown target", problem)
    claim = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "big"}}}
    problem = select_drafter(resource(model=claim), load_published_catalog()).problem
    messages.check("a target on a volume", problem)


def test_selection_has_one_event_and_is_recorded(messages: Messages) -> None:
    rows = catalog(catalog_row("me/one", OLD))
    first = build_plan(resource(), rows)
    (event,) = [event for event in first.events if event.reason == "DrafterSelected"]
    messages.check("event of a selection", event.message)
    checked = next(item for item in first.objects_to_apply if item["kind"] == "ConfigMap")
    assert '"repo": "me/one"' in checked["data"]["resource.json"]
    status = first.status.to_dict()
    assert status["selectedDrafters"] == [
        {"target": "acme/big", "repo": "me/one", "revision": OLD, "kind": "EAGLE 3.1", "inUse": False}
    ]
    second = build_plan(resource(status), rows)
    assert [event for event in second.events if event.reason == "DrafterSelected"] == []


def test_selection_is_fixed_after_first_pod() -> None:
    status = build_plan(resource(), catalog(catalog_row("me/one", OLD))).status.to_dict()
    better = catalog(catalog_row("me/better", NEW), catalog_row("me/one", OLD))
    changed = build_plan(resource(status), better)
    assert [drafter.repo for drafter in changed.status.selected_drafters] == ["me/better"]

    revision = compute_revision(resource(drafter=hub_source("me/one", OLD)), Static(3))
    started = build_plan(resource(status), catalog(catalog_row("me/one", OLD)), passed_revision=revision)
    assert deployment(started) is not None
    status = started.status.to_dict()
    assert [(drafter["repo"], drafter["inUse"]) for drafter in status["selectedDrafters"]] == [("me/one", True)]
    for rows in (better, catalog()):
        next_plan = build_plan(resource(status), rows, passed_revision=revision)
        assert next_plan.status.canary is not None
        assert next_plan.status.canary.revision == revision
        assert next_plan.status.selected_drafters == started.status.selected_drafters


def test_selection_survives_engine_change_and_target_revert() -> None:
    used = {"target": "acme/big", "repo": "me/one", "revision": OLD, "kind": "EAGLE 3.1", "inUse": True}
    rows = catalog(catalog_row("me/better", NEW), catalog_row("me/little", NEW, target="acme/small"))
    moved = select_drafter(resource({"selectedDrafters": [used]}, engine={"image": "vllm/vllm-openai:v0.32.0"}), rows)
    assert moved.selected_drafter is not None
    assert moved.selected_drafter.repo == "me/one"

    elsewhere = select_drafter(resource({"selectedDrafters": [used]}, target="acme/small"), rows)
    assert [drafter.repo for drafter in elsewhere.selected_drafters] == ["me/little", "me/one"]
    status = {"selectedDrafters": [drafter.to_dict() for drafter in elsewhere.selected_drafters]}
    back = select_drafter(resource(status), rows)
    assert back.selected_drafter is not None
    assert back.selected_drafter.repo == "me/one"
    # Unused selections are dropped; an explicit drafter drops no used selection.
    assert [drafter.repo for drafter in back.selected_drafters] == ["me/one"]
    assert [
        drafter.repo for drafter in select_drafter(resource(status, drafter=hub_source("my/own")), rows).selected_drafters
    ] == ["me/one"]


def test_status_keeps_bounded_number_of_selections() -> None:
    used = [
        {"target": f"acme/t{number}", "repo": "me/one", "revision": OLD, "kind": "EAGLE 3.1", "inUse": True}
        for number in range(8)
    ]
    selection = select_drafter(resource({"selectedDrafters": used}), catalog(catalog_row("me/one", OLD)))
    assert [drafter.target for drafter in selection.selected_drafters] == [
        "acme/big",
        *(f"acme/t{number}" for number in range(7)),
    ]
