"""Facts about the engines of a revision, from its record (the ConfigMap of its preflight).

Windows of engines with a different image, version, arguments, variables, target or drafter (`RevisionFacts.engine_family`) are
never added up. For example, vLLM 0.33 skips drafts that cannot be used (v1/core/sched/scheduler.py, `_drafts_unused`), so the
step times of 0.32 do not apply to 0.33. Not guaranteed: that a tag stays with one release where no version is written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from aerie.api import SpeculativeDeployment
from aerie.engine import arguments, releases
from aerie.manifests import preflight_job
from aerie.rollout.facts.snapshot import Snapshot
from aerie.tuning.worker.protocol import EngineFacts


@dataclass(frozen=True, slots=True)
class RevisionFacts:
    """Facts about a revision, from its record."""

    engine_family: str
    """Hash of spec.engine (with image and version), target, drafter, draft sampling and engine options."""
    engine: EngineFacts
    api_servers: int


class RevisionFactsCache:
    """Cache of the facts about a resource's revisions, each read once."""

    def __init__(self) -> None:
        self._facts_by_revision: dict[str, RevisionFacts | None] = {}

    def engine_family(self, snapshot: Snapshot, revision: str) -> str | None:
        """Return the hash of the revision's engines, except for the setting; None without a record."""
        facts = self.get(snapshot, revision)
        return None if facts is None else facts.engine_family

    def get(self, snapshot: Snapshot, revision: str) -> RevisionFacts | None:
        """Return the facts about the revision; None where there is no record of it, or an unreadable one."""
        if revision not in self._facts_by_revision:
            record = snapshot.cluster.child(
                "ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision)
            )
            if record is None:
                return None
            self._facts_by_revision = {
                **dict(list(self._facts_by_revision.items())[-3:]),
                revision: _parse_revision_facts((record.get("data") or {}).get("resource.json")),
            }
        return self._facts_by_revision[revision]


def _parse_revision_facts(text: str | None) -> RevisionFacts | None:
    try:
        document = json.loads(text or "")
        spec = SpeculativeDeployment.from_dict(document).spec
        engine_arguments = list(spec.engine.args)
        api_servers = arguments.parse_arguments(engine_arguments).api_server_count
        version = releases.resolve_engine_version(spec.engine.image, spec.engine.version)
        family_facts = {name: document["spec"].get(name) for name in ("model", "engine", "drafter")}
        # These affect acceptance and step times too. Where they are not set, the hash is that of earlier operators.
        optional_facts = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        family_facts |= {name: value for name, value in optional_facts.items() if value}
    except (ValueError, LookupError, TypeError):
        return None
    if isinstance(version, releases.UnknownVersion):
        return None
    engine = EngineFacts(
        version=str(version.version),
        arguments=tuple(engine_arguments),
        method=spec.drafter.method if spec.drafter is not None else "eagle3",
        environment={variable.name: variable.value or "" for variable in spec.engine.env if variable.value_from is None},
    )
    family = hashlib.sha256(json.dumps(family_facts, sort_keys=True).encode()).hexdigest()[:16]
    return RevisionFacts(family, engine, api_servers)
