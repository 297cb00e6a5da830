"""What the spec asks for: a revision, its pods, and how both are called in the status.

Guarantee: pure. A spec that could not run has no pods, and `problem` says why in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, Source, VolumeClaimSource
from aerie.api.status import Arm, Status
from aerie.api.status import Setting as StatusSetting
from aerie.engine import arguments, flags, versions
from aerie.engine.speculation import Off, Setting, Static, max_tokens
from aerie.resources import pod
from aerie.resources.protect import TemplateError
from aerie.resources.revision import revision


@dataclass(frozen=True)
class Wanted:
    """A revision and its pods."""

    resource: SpeculativeDeployment
    setting: Setting
    revision: str
    template: dict[str, Any] | None = None
    problem: str = ""
    """Why there are no pods that could run."""

    @property
    def arm(self) -> Arm:
        """As the status shows it, without pods."""
        spec, tokens = self.resource.spec, max_tokens(self.setting)
        return Arm(
            revision=self.revision,
            target=_in_short(spec.model.source),
            drafter=_in_short(spec.drafter.source) if spec.drafter and tokens else None,
            setting=StatusSetting(mode="Static" if tokens else "Off", tokens=tokens),
        )

    def change(self, before: Status) -> str:
        """What is new in it, in a word."""
        if before.stable is None:
            return "first revision"
        if self.arm.drafter != before.stable.drafter:
            return f"drafter {self.arm.drafter}" if self.arm.drafter else "no drafter"
        if self.arm.setting != before.stable.setting:
            return f"K={max_tokens(self.setting)}"
        if self.arm.target != before.stable.target:
            return f"target {self.arm.target}"
        return "engine"


def read_wanted(resource: SpeculativeDeployment, no_drafter: str = "") -> Wanted:
    """The revision that the spec asks for. `no_drafter` says why none was chosen, where the spec names none."""
    spec = resource.spec
    setting: Setting = Static(spec.speculation.tokens) if spec.speculation.tokens else Off()
    wanted = Wanted(resource, setting, revision(resource, setting))
    if spec.drafter is None and not isinstance(setting, Off):
        return replace(wanted, problem=no_drafter or "spec.drafter is missing: write one, or spec.speculation.tokens: 0.")
    engine = versions.resolve(spec.engine.image, spec.engine.version)
    if isinstance(engine, versions.NoVersion):
        return replace(wanted, problem=engine.sentence)
    try:
        config = None
        if spec.drafter is not None:
            drafter = flags.Drafter(pod.drafter_location(resource) or "", spec.drafter.method, _commit(spec.drafter.source))
            config = flags.speculative_config(setting, drafter, engine.version, arguments.read(spec.engine.args))
        return replace(wanted, template=pod.template(resource, config))
    except (arguments.ArgumentError, TemplateError) as error:
        return replace(wanted, problem=str(error))


def _commit(source: Source) -> str | None:
    return source.given.revision if isinstance(source.given, HuggingFaceSource) else None


def _in_short(source: Source) -> str:
    match source.given:
        case HuggingFaceSource(repo=repo, revision=commit):
            return f"{repo}@{commit[:8]}"
        case VolumeClaimSource(claim_name=claim, path=path):
            return f"{claim}/{path}".rstrip("/")
        case image:
            return f"{image.reference.partition('@')[0]}{image.path}".rstrip("/")
