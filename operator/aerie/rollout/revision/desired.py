"""What is asked for, by the spec and by tuning: a revision, its pods, and how both are called in the status.

Guarantee: pure. A spec that could not run has no pods, and `problem` says why in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aerie.analysis.criteria import Goal
from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, Source, VolumeClaimSource
from aerie.api.speculation import DraftSampling
from aerie.api.status import Arm, Status, Trial
from aerie.api.status import Setting as StatusSetting
from aerie.api.status import Tier as StatusTier
from aerie.engine import arguments, command_line, releases
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, Tier, max_tokens, named
from aerie.manifests.pod import engine_pod
from aerie.manifests.pod.pod_template_policy import TemplateError
from aerie.manifests.revision_hash import revision


@dataclass(frozen=True)
class Wanted:
    """A revision and its pods."""

    resource: SpeculativeDeployment
    """With the most tokens of the setting in its spec, whoever chose it."""
    setting: Setting
    revision: str
    template: dict[str, Any] | None = None
    problem: str = ""
    """Why there are no pods that could run."""
    trial: Trial | None = None
    """The trial that it is for; None where it is to stay."""

    @property
    def goal(self) -> Goal | None:
        """What a trial has to show; None: what the spec says."""
        if self.trial is None:
            return None
        return "Faster" if self.trial.purpose == "Change" else "Explore"

    @property
    def arm(self) -> Arm:
        """As the status shows it, without pods."""
        spec, tokens = self.resource.spec, max_tokens(self.setting)
        return Arm(
            revision=self.revision,
            target=_in_short(spec.model.source),
            drafter=_in_short(spec.drafter.source) if spec.drafter and tokens else None,
            setting=shown(self.setting),
            draft_sampling=spec.speculation.draft_sampling if tokens else None,
        )

    def change(self, before: Status) -> str:
        """What is new in it, in a word."""
        if before.stable is None:
            return "first revision"
        if self.trial is not None:
            return named(self.setting)
        if self.arm.drafter != before.stable.drafter:
            return f"drafter {self.arm.drafter}" if self.arm.drafter else "no drafter"
        if self.arm.setting != before.stable.setting:
            return named(self.setting)
        if self.arm.draft_sampling != before.stable.draft_sampling:
            sampling = self.arm.draft_sampling
            return f"{sampling.lower()} drafts" if sampling else "drafts as the engine samples them"
        if self.arm.target != before.stable.target:
            return f"target {self.arm.target}"
        return "engine"


def read_wanted(
    resource: SpeculativeDeployment, no_drafter: str = "", setting: Setting | None = None, trial: Trial | None = None
) -> Wanted:
    """The revision that the spec asks for, with the setting that tuning puts in place of the spec's, if any. `no_drafter` says
    why none was chosen, where the spec names none."""
    spec = resource.spec
    setting = of_spec(resource) if setting is None else setting
    wanted = Wanted(_with_tokens(resource, max_tokens(setting)), setting, revision(resource, setting), trial=trial)
    if spec.drafter is None and not isinstance(setting, Off):
        return replace(wanted, problem=no_drafter or "spec.drafter is missing: write one, or spec.speculation.tokens: 0.")
    engine = releases.resolve(spec.engine.image, spec.engine.version)
    if isinstance(engine, releases.NoVersion):
        return replace(wanted, problem=engine.sentence)
    try:
        config = None
        if spec.drafter is not None:
            drafter = command_line.Drafter(
                engine_pod.drafter_location(resource) or "",
                spec.drafter.method,
                _commit(spec.drafter.source),
                spec.speculation.draft_sampling,
                spec.speculation.engine_options or {},
            )
            config = command_line.speculative_config(setting, drafter, engine.version, arguments.read(spec.engine.args))
        return replace(wanted, template=engine_pod.template(resource, config))
    except (arguments.ArgumentError, TemplateError) as error:
        return replace(wanted, problem=str(error))


def recommended_sampling(resource: SpeculativeDeployment, setting: Setting) -> DraftSampling | None:
    """What to write in spec.speculation.draftSampling for the traffic that the spec says there is; None where nothing is.

    Greedy requests accept what they did before, whatever the drafts are drawn by, so that it is for Sampled alone; and of what
    somebody has written there, nobody is told.
    """
    spec = resource.spec.speculation
    if spec.tuning.mode == "Off" or spec.tuning.traffic != "Sampled" or spec.draft_sampling is not None:
        return None
    if isinstance(setting, Off):
        return None
    drawn = spec.model_copy(update={"draft_sampling": "Probabilistic"})
    other = resource.model_copy(update={"spec": resource.spec.model_copy(update={"speculation": drawn})})
    return None if read_wanted(other, setting=setting).problem else "Probabilistic"


def of_spec(resource: SpeculativeDeployment) -> Setting:
    """The setting that the spec names."""
    tokens = resource.spec.speculation.tokens
    return Static(tokens) if tokens else Off()


def shown(setting: Setting) -> StatusSetting:
    """A setting as the status shows it."""
    tokens = max_tokens(setting)
    match setting:
        case Schedule(tiers):
            told = [StatusTier(first=one.first, last=one.last, tokens=one.tokens) for one in tiers]
            return StatusSetting(mode="Schedule", tokens=tokens, schedule=told)
        case Adaptive():
            return StatusSetting(mode="Adaptive", tokens=tokens)
        case Static():
            return StatusSetting(mode="Static", tokens=tokens)
        case Off():
            return StatusSetting(mode="Off", tokens=tokens)


def read_shown(found: StatusSetting) -> Setting:
    """The setting that the status shows. Raises SettingError for what is none."""
    match found.mode:
        case "Off":
            return Off()
        case "Static":
            return Static(found.tokens)
        case "Adaptive":
            return Adaptive(found.tokens)
        case "Schedule":
            return Schedule(tuple(Tier(one.first, one.last, one.tokens) for one in found.schedule or ()), found.tokens)


def _with_tokens(resource: SpeculativeDeployment, tokens: int) -> SpeculativeDeployment:
    """What preflight is to look at: a drafter has to fit the most tokens that are drafted."""
    spec = resource.spec
    if spec.speculation.tokens == tokens:
        return resource
    speculation = spec.speculation.model_copy(update={"tokens": tokens})
    return resource.model_copy(update={"spec": spec.model_copy(update={"speculation": speculation})})


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
