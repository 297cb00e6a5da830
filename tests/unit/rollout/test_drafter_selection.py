"""The drafter of a resource that names none: the catalog's first with a commit, and from the first pod on always the same."""

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


def row(repo: str, commit: str | None = None, kind: str = "eagle3.1", target: str = "acme/big") -> str:
    pinned = f'\nrevision = "{commit}"' if commit else ""
    return f'targets = ["{target}"]\nrepo = "{repo}"\nkind = "{kind}"' + pinned


def catalog(*rows: str) -> DrafterCatalog:
    return DrafterCatalog(()).with_user_entries({f"row{number}": text for number, text in enumerate(rows)})


def hub(repo: str, commit: str = "0" * 40) -> dict[str, Any]:
    return {"source": {"huggingFace": {"repo": repo, "revision": commit}}}


def resource(status: dict[str, Any] | None = None, target: str = "acme/big", **spec: Any) -> SpeculativeDeployment:
    document = {
        "metadata": {"name": "chat", "namespace": "default", "uid": "u1", "generation": 1},
        "spec": {"model": hub(target), "engine": {"image": "vllm/vllm-openai:v0.33.0"}, **spec},
    }
    return SpeculativeDeployment.from_dict(document | ({"status": status} if status else {}))


def plan(one: SpeculativeDeployment, rows: DrafterCatalog, passed: str = "") -> ReconcilePlan:
    """One pass; the preflight of the revision `passed` is over."""
    job = {
        "kind": "Job",
        "metadata": {"name": f"chat-{passed}-preflight"},
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    }
    return build_reconcile_plan(build_snapshot(one, (job,) if passed else ()), PreflightJobConfig("image"), NOW, rows)


def deployment(of: ReconcilePlan) -> dict[str, Any] | None:
    return next((item for item in of.objects_to_apply if item["kind"] == "Deployment"), None)


@pytest.mark.parametrize(
    ("rows", "repo"),
    [
        ([row("me/one", OLD)], "me/one"),
        ([row("me/one"), row("me/two", OLD)], "me/two"),
        ([row("me/plain", OLD, "eagle3"), row("me/better", NEW)], "me/better"),
        ([row("me/plain", OLD, "eagle3"), row("me/better")], "me/plain"),
        ([row("me/other", OLD, "dflash"), row("me/plain", NEW, "eagle3")], "me/plain"),
        ([row("me/first", OLD), row("me/second", NEW)], "me/first"),
        ([row("me/elsewhere", OLD, target="acme/small"), row("me/here", NEW)], "me/here"),
    ],
)
def test_first_candidate_with_commit_is_selected(rows: list[str], repo: str) -> None:
    found = select_drafter(resource(), catalog(*rows))
    assert found.problem == ""
    assert found.selected_drafter is not None
    assert (found.selected_drafter.target, found.selected_drafter.repo, found.selected_drafter.in_use) == (
        "acme/big",
        repo,
        False,
    )
    drafter = found.resource.spec.drafter
    assert drafter is not None
    assert drafter.to_dict()["source"]["huggingFace"]["repo"] == repo


def test_selected_and_explicit_drafter_have_same_revision() -> None:
    chosen = select_drafter(resource(), catalog(row("me/one", OLD))).resource
    assert compute_revision(chosen, Static(3)) == compute_revision(resource(drafter=hub("me/one", OLD)), Static(3))


@pytest.mark.parametrize("spec", [{"drafter": hub("my/own", NEW)}, {"speculation": {"numSpeculativeTokens": 0}}])
def test_explicit_drafter_is_not_replaced(spec: dict[str, Any]) -> None:
    one = resource(**spec)
    found = select_drafter(one, catalog(row("me/one", OLD)))
    assert (found.resource, found.selected_drafters, found.selected_drafter, found.problem) == (one, (), None, "")


def test_candidates_without_commit_are_listed_with_fix(messages: Messages) -> None:
    rows = catalog(row("me/better"), row("me/plain", kind="eagle3"), row("me/other", OLD, "dflash"))
    found = plan(resource(), rows)
    assert [item["kind"] for item in found.objects_to_apply if item["kind"] in ("Job", "Deployment")] == []
    (condition,) = [one for one in found.status.conditions if one.type == "PreflightPassed"]
    assert (condition.status, condition.reason) == ("False", "InvalidSpec")
    messages.check("candidates without a commit", condition.message)
    assert found.status.selected_drafters == []


def test_target_outside_catalog_has_no_selection(messages: Messages) -> None:
    said = select_drafter(resource(target="acme/unheard-of"), load_published_catalog()).problem
    messages.check("an unknown target", said)
    claim = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "big"}}}
    said = select_drafter(resource(model=claim), load_published_catalog()).problem
    messages.check("a target on a volume", said)


def test_selection_has_one_event_and_is_recorded(messages: Messages) -> None:
    rows = catalog(row("me/one", OLD))
    first = plan(resource(), rows)
    (event,) = [one for one in first.events if one.reason == "DrafterSelected"]
    messages.check("event of a selection", event.message)
    checked = next(item for item in first.objects_to_apply if item["kind"] == "ConfigMap")
    assert '"repo": "me/one"' in checked["data"]["resource.json"]
    status = first.status.to_dict()
    assert status["selectedDrafters"] == [
        {"target": "acme/big", "repo": "me/one", "revision": OLD, "kind": "EAGLE 3.1", "inUse": False}
    ]
    again = plan(resource(status), rows)
    assert [one for one in again.events if one.reason == "DrafterSelected"] == []


def test_selection_is_fixed_after_first_pod() -> None:
    status = plan(resource(), catalog(row("me/one", OLD))).status.to_dict()
    better = catalog(row("me/better", NEW), row("me/one", OLD))
    changed = plan(resource(status), better)
    assert [one.repo for one in changed.status.selected_drafters] == ["me/better"]

    wanted = compute_revision(resource(drafter=hub("me/one", OLD)), Static(3))
    started = plan(resource(status), catalog(row("me/one", OLD)), passed=wanted)
    assert deployment(started) is not None
    status = started.status.to_dict()
    assert [(one["repo"], one["inUse"]) for one in status["selectedDrafters"]] == [("me/one", True)]
    for rows in (better, catalog()):
        kept = plan(resource(status), rows, passed=wanted)
        assert kept.status.canary is not None
        assert kept.status.canary.revision == wanted
        assert kept.status.selected_drafters == started.status.selected_drafters


def test_selection_survives_engine_change_and_target_revert() -> None:
    used = {"target": "acme/big", "repo": "me/one", "revision": OLD, "kind": "EAGLE 3.1", "inUse": True}
    rows = catalog(row("me/better", NEW), row("me/little", NEW, target="acme/small"))
    moved = select_drafter(resource({"selectedDrafters": [used]}, engine={"image": "vllm/vllm-openai:v0.32.0"}), rows)
    assert moved.selected_drafter is not None
    assert moved.selected_drafter.repo == "me/one"

    elsewhere = select_drafter(resource({"selectedDrafters": [used]}, target="acme/small"), rows)
    assert [one.repo for one in elsewhere.selected_drafters] == ["me/little", "me/one"]
    status = {"selectedDrafters": [one.to_dict() for one in elsewhere.selected_drafters]}
    back = select_drafter(resource(status), rows)
    assert back.selected_drafter is not None
    assert back.selected_drafter.repo == "me/one"
    # What was only considered is forgotten, and writing a drafter forgets nothing that was used.
    assert [one.repo for one in back.selected_drafters] == ["me/one"]
    assert [one.repo for one in select_drafter(resource(status, drafter=hub("my/own")), rows).selected_drafters] == ["me/one"]


def test_status_keeps_bounded_number_of_selections() -> None:
    used = [
        {"target": f"acme/t{number}", "repo": "me/one", "revision": OLD, "kind": "EAGLE 3.1", "inUse": True}
        for number in range(8)
    ]
    found = select_drafter(resource({"selectedDrafters": used}), catalog(row("me/one", OLD)))
    assert [one.target for one in found.selected_drafters] == ["acme/big", *(f"acme/t{number}" for number in range(7))]
