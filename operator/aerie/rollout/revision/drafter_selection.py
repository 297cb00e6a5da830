"""Which drafter a resource gets that names none: the catalog's first that is pinned, and for one target always the same.

    spec.drafter is written ─────────────────────────► that one
    pods were made with a choice for this target ────► that choice, whatever the catalog says by now
    otherwise ───────────────────────────────────────► the catalog's first for the target that has a commit

The choice is recorded in the status, and stays from the first pod on. So neither an entry that is added to the catalog nor an
upgrade of Aerie rolls a fleet out anew, and a target that is tried and taken back finds its drafter again. To take another
drafter, write it in spec.drafter: it makes the same revision as a choice of it.

Guarantee: pure. Not guaranteed: that the drafter is any good; preflight and the canary look at it as at any other.
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
    """The resource as it is to be read, and what its status remembers."""

    resource: SpeculativeDeployment
    """With a drafter in its spec, where one is wanted and known."""
    selected_drafters: tuple[SelectedDrafter, ...] = ()
    """The choices, that of the present target first."""
    selected_drafter: SelectedDrafter | None = None
    """The one that is in the resource, where Aerie has chosen it."""
    problem: str = ""
    """Why there is none although one is wanted."""

    def build_events(self) -> Iterator[Event]:
        """That it was chosen, once."""
        before = self.resource.status.drafters if self.resource.status else []
        if self.selected_drafter is not None and self.selected_drafter not in before:
            named = f"{self.selected_drafter.repo} at commit {self.selected_drafter.revision[:8]} ({self.selected_drafter.kind})"
            yield Event(
                "Normal", "DrafterChosen", f"spec.drafter is missing: {named} is the catalog's for {self.selected_drafter.target}"
            )

    def build_status_drafters(self, in_use: bool) -> list[SelectedDrafter]:
        """What the status is to say; `used`: pods are made with it."""
        return [
            one.model_copy(update={"used": one.used or (in_use and one == self.selected_drafter)})
            for one in self.selected_drafters
        ]


def select_drafter(resource: SpeculativeDeployment, catalog: DrafterCatalog) -> DrafterSelection:
    """The resource with the drafter that it gets."""
    spec = resource.spec
    kept = tuple(one for one in (resource.status.drafters if resource.status else ()) if one.used)
    if spec.drafter is not None or spec.speculation.tokens == 0:
        return DrafterSelection(resource, kept)
    source = spec.model.source.variant
    if not isinstance(source, HuggingFaceSource):
        return DrafterSelection(
            resource,
            kept,
            problem="spec.drafter is missing, and spec.model.source names no repository by which the catalog could know the "
            "target: name a drafter in spec.drafter.source, or write spec.speculation.tokens: 0 to serve without one.",
        )
    known = next((one for one in kept if one.target == source.repo), None)
    if known is None:
        entry = catalog.select_drafter(source.repo)
        if isinstance(entry, NoMatchingDrafter):
            return DrafterSelection(resource, kept, problem=entry.message)
        assert entry.repo is not None  # both are promised by `Catalog.choose`
        assert entry.revision is not None
        known = SelectedDrafter(target=source.repo, repo=entry.repo, revision=entry.revision, kind=entry.kind.display_name)
    drafter = DrafterSpec(source=ModelSource(hugging_face=HuggingFaceSource(repo=known.repo, revision=known.revision)))
    others = tuple(one for one in kept if one.target != known.target)
    return DrafterSelection(
        resource.model_copy(update={"spec": spec.model_copy(update={"drafter": drafter})}),
        (known, *others)[:MAX_SELECTED_DRAFTERS],
        selected_drafter=known,
    )
