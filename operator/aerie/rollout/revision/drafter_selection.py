"""Selection of a drafter for a resource that names none: the first automatic one of the catalog, and always the same for
one target.

    spec.drafter is set ───────────────────────────────► that one
    pods were created with a selection for this target ► that selection, whatever the catalog contains now
    otherwise ─────────────────────────────────────────► the catalog's first for the target that may be selected

The selection is recorded in the status, and stays from the first pod on. So neither a new entry of the catalog nor an upgrade
of Aerie starts a rollout, and a target that is tried and reverted gets the same drafter again. To use another drafter, set
spec.drafter: it makes the same revision as a selection of it.

Guarantee: pure. Not guaranteed: that the drafter is any good; preflight and the canary check it like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aerie.api import SpeculativeDeployment
from aerie.api.source import DrafterSpec, HuggingFaceSource, ModelSource
from aerie.api.status import MAX_SELECTED_DRAFTERS, SelectedDrafter
from aerie.engine.models.drafter_catalog import DrafterCatalog, NoMatchingDrafter
from aerie.rollout.plan import Event


@dataclass(frozen=True)
class DrafterSelection:
    """The resource with its drafter, and the selections that its status records."""

    resource: SpeculativeDeployment
    """The resource with a drafter in its spec, where one is needed and available."""
    selected_drafters: tuple[SelectedDrafter, ...] = ()
    """All recorded selections, that of the present target first."""
    selected_drafter: SelectedDrafter | None = None
    """The drafter in the resource, where Aerie has selected it."""
    problem: str = ""
    """Why there is no drafter although one is needed."""

    def build_events(self) -> Iterator[Event]:
        """Yield the event that the drafter was selected, once."""
        recorded = self.resource.status.selected_drafters if self.resource.status else []
        if self.selected_drafter is not None and self.selected_drafter not in recorded:
            drafter_text = (
                f"{self.selected_drafter.repo} at commit {self.selected_drafter.revision[:8]} ({self.selected_drafter.kind})"
            )
            yield Event(
                "Normal",
                "DrafterSelected",
                f"Selected drafter {drafter_text} from the catalog for {self.selected_drafter.target}: spec.drafter is missing.",
            )

    def build_status_drafters(self, in_use: bool) -> list[SelectedDrafter]:
        """Return the drafters of the status; `in_use`: pods are created with the selected one."""
        return [
            drafter.model_copy(update={"in_use": drafter.in_use or (in_use and drafter == self.selected_drafter)})
            for drafter in self.selected_drafters
        ]


def select_drafter(resource: SpeculativeDeployment, catalog: DrafterCatalog) -> DrafterSelection:
    """Return the resource with its drafter."""
    spec = resource.spec
    used_drafters = tuple(
        selected for selected in (resource.status.selected_drafters if resource.status else ()) if selected.in_use
    )
    if spec.drafter is not None or spec.speculation.num_speculative_tokens == 0:
        return DrafterSelection(resource, used_drafters)
    source = spec.model.source.variant
    if not isinstance(source, HuggingFaceSource):
        return DrafterSelection(
            resource,
            used_drafters,
            problem="spec.drafter is missing, and spec.model.source names no repository for which the catalog could select one. "
            "Set spec.drafter.source, or set spec.speculation.numSpeculativeTokens: 0 to serve without a drafter.",
        )
    selection = next((selected for selected in used_drafters if selected.target == source.repo), None)
    if selection is None:
        entry = catalog.select_drafter(source.repo)
        if isinstance(entry, NoMatchingDrafter):
            return DrafterSelection(resource, used_drafters, problem=entry.message)
        assert entry.repo is not None  # both are guaranteed by `DrafterCatalog.select_drafter`
        assert entry.revision is not None
        selection = SelectedDrafter(target=source.repo, repo=entry.repo, revision=entry.revision, kind=entry.kind.display_name)
    drafter = DrafterSpec(source=ModelSource(hugging_face=HuggingFaceSource(repo=selection.repo, revision=selection.revision)))
    other_drafters = tuple(selected for selected in used_drafters if selected.target != selection.target)
    return DrafterSelection(
        resource.model_copy(update={"spec": spec.model_copy(update={"drafter": drafter})}),
        (selection, *other_drafters)[:MAX_SELECTED_DRAFTERS],
        selected_drafter=selection,
    )
