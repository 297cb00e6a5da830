"""Compare rows of the catalog with the repositories on a Hub: commit, licence, kind, and preflight's verdict by release of vLLM.

A row says what its sources say. Only the repository can confirm it, so this reads the repository: its description, config.json
and weight headers, never weights. A target is read for the verdict alone.

Guarantees: nothing is written. A Hub that cannot be reached is a HubError, and not a difference. A target that needs a token, or
that is not there, leaves out the verdict, with the reason. Not guaranteed: that a drafter which passes is good, or that a gated
target without a token has a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from aerie.checkpoints import HubClient, HubError, HubRejectionError, RepositoryInfo
from aerie.engine.models.checkpoint import Checkpoint, CheckpointError
from aerie.engine.models.config import parse_drafter_model
from aerie.engine.models.drafter_catalog import CatalogEntry, DrafterKind, load_published_catalog
from aerie.engine.preflight import PreflightInput, Severity, run_preflight
from aerie.engine.releases import NEWEST_VERIFIED_VERSION, Feature, Version

_DEFAULT_DRAFT_TOKENS = 3
RELEASES = tuple(
    Version.parse(f"0.{minor}.0")
    for minor in range(Feature.EAGLE31_LLAMA.since.release[1], NEWEST_VERIFIED_VERSION.release[1] + 1)
)
"""The releases of a verdict: from the first with EAGLE 3.1 to the newest that Aerie was verified with."""


@dataclass(frozen=True)
class Verdict:
    """Preflight's verdict for consecutive releases with the same findings."""

    first: str
    last: str
    errors: tuple[str, ...]
    """Codes of the checks that failed. Empty: preflight passes."""
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        releases = self.first if self.first == self.last else f"{self.first} to {self.last}"
        outcome = f"fails {', '.join(self.errors)}" if self.errors else "passes"
        return f"{releases} {outcome}" + (f", warns {', '.join(self.warnings)}" if self.warnings and not self.errors else "")


@dataclass(frozen=True)
class Comparison:
    """A row beside its repository."""

    entry: CatalogEntry
    commit: str = ""
    """The commit that was read. Empty: none could be."""
    licence: str = ""
    verdicts: tuple[Verdict, ...] = ()
    no_verdict: str = ""
    """Why there are no verdicts."""
    differences: tuple[str, ...] = ()
    """What the row says and the repository does not, each with the fix."""
    notes: tuple[str, ...] = ()


def find_entries() -> list[CatalogEntry]:
    """Return the published rows of EAGLE 3 and 3.1. Each has a repository."""
    return [entry for entry in load_published_catalog().entries if entry.kind.is_supported and entry.repo]


def compare_entry(entry: CatalogEntry, hub: HubClient) -> Comparison:
    """Compare one row, which has a repository. Raises HubError: the Hub cannot be read."""
    assert entry.repo is not None
    revision = entry.revision or entry.reported_revision
    try:
        newest = hub.read_repository_info(entry.repo)
    except HubRejectionError as error:
        fix = f"remove the row, or correct its name ({error})"
        return Comparison(entry, no_verdict="not found", differences=(f"the Hub gives no repository {entry.repo}: {fix}",))
    try:
        info = hub.read_repository_info(entry.repo, revision) if revision else newest
    except HubRejectionError as error:
        fix = f"main is at {newest.commit}: correct the row's commit ({error})"
        return Comparison(entry, no_verdict="commit not found", differences=(f"the repository has no {revision}: {fix}",))
    try:
        drafter = hub.read_checkpoint(entry.repo, info.commit)
    except CheckpointError as error:
        if isinstance(error, HubError) and not isinstance(error, HubRejectionError):
            raise
        return Comparison(entry, info.commit, info.licence, no_verdict="no readable files", differences=(f"its files: {error}",))
    target, no_verdict = _read_target(entry.targets[0], hub)
    return Comparison(
        entry,
        info.commit,
        info.licence,
        tuple(compute_verdicts(target, drafter, entry.num_speculative_tokens)) if target else (),
        no_verdict,
        tuple(_find_differences(entry, info, drafter)),
        tuple(_find_notes(revision, newest)),
    )


def _read_target(repository: str, hub: HubClient) -> tuple[Checkpoint | None, str]:
    """Return a target, or the reason why there is none."""
    try:
        return hub.read_checkpoint(repository), ""
    except HubRejectionError:
        return None, f"the target {repository} is not readable: set HF_TOKEN if it is gated"
    except HubError:
        raise
    except CheckpointError as error:
        return None, f"the target's files: {error}"


def _find_differences(entry: CatalogEntry, info: RepositoryInfo, drafter: Checkpoint) -> Iterator[str]:
    if info.licence and info.licence != entry.licence:
        yield f"licence: the model card declares {info.licence}, and the row {entry.licence or 'none'}: set licence"
    if entry.licence and not info.licence:
        yield f"licence: the model card declares none, and the row {entry.licence}: remove it, or check its source"
    kind = classify_drafter(drafter)
    if kind is not entry.kind:
        yield f"kind: the config is that of {kind.display_name}, and the row says {entry.kind.display_name}: set kind"


def _find_notes(revision: str | None, newest: RepositoryInfo) -> Iterator[str]:
    if revision is None:
        yield f"the row has no commit, and main is at {newest.commit}"
    elif newest.commit != revision:
        yield f"main has moved to {newest.commit}"


def classify_drafter(drafter: Checkpoint) -> DrafterKind:
    """Return EAGLE 3.1 for a config that enables any part of it, else EAGLE 3."""
    return DrafterKind.EAGLE31 if parse_drafter_model(drafter.config).is_eagle31 else DrafterKind.EAGLE3


def compute_verdicts(target: Checkpoint, drafter: Checkpoint, tokens: int | None) -> Iterator[Verdict]:
    """Yield preflight's verdicts from the oldest release on, with vLLM's default arguments."""

    def run(version: Version) -> tuple[tuple[str, ...], tuple[str, ...]]:
        config = {"method": "eagle3", "num_speculative_tokens": tokens or _DEFAULT_DRAFT_TOKENS}
        report = run_preflight(PreflightInput(target, drafter, version, speculative_config=config))
        errors, warnings = (
            tuple(dict.fromkeys(finding.id for finding in report.with_severity(severity)))
            for severity in (Severity.ERROR, Severity.WARNING)
        )
        return errors, warnings

    for (errors, warnings), versions in groupby(RELEASES, run):
        names = [f"{version.release[0]}.{version.release[1]}" for version in versions]
        yield Verdict(names[0], names[-1], errors, warnings)
