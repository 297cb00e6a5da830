"""What is asked for, by the spec and by tuning: a revision, its pods, and how both are called in the status.

Guarantee: pure. A spec that could not run has no pods, and `problem` says why in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aerie.analysis.criteria import AnalysisGoal
from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, ModelSource, VolumeClaimSource
from aerie.api.speculation import DraftSampling
from aerie.api.status import Arm, SettingStatus, Status, TierStatus, Trial
from aerie.engine import arguments, command_line, releases
from aerie.engine.speculation import (
    Adaptive,
    Off,
    Schedule,
    ScheduleTier,
    SpeculationSetting,
    Static,
    describe_setting,
    max_speculative_tokens,
)
from aerie.manifests.pod import engine_pod
from aerie.manifests.pod.pod_template_policy import PodTemplateError
from aerie.manifests.revision_hash import compute_revision


@dataclass(frozen=True)
class DesiredRevision:
    """A revision and its pods."""

    resource: SpeculativeDeployment
    """With the most tokens of the setting in its spec, whoever chose it."""
    setting: SpeculationSetting
    revision: str
    pod_template: dict[str, Any] | None = None
    problem: str = ""
    """Why there are no pods that could run."""
    trial: Trial | None = None
    """The trial that it is for; None where it is to stay."""

    @property
    def goal(self) -> AnalysisGoal | None:
        """What a trial has to show; None: what the spec says."""
        if self.trial is None:
            return None
        return "Faster" if self.trial.purpose == "Change" else "Explore"

    @property
    def arm(self) -> Arm:
        """As the status shows it, without pods."""
        spec, tokens = self.resource.spec, max_speculative_tokens(self.setting)
        return Arm(
            revision=self.revision,
            target=_short_source_name(spec.model.source),
            drafter=_short_source_name(spec.drafter.source) if spec.drafter and tokens else None,
            setting=build_status_setting(self.setting),
            draft_sampling=spec.speculation.draft_sampling if tokens else None,
        )

    def describe_change(self, previous_status: Status) -> str:
        """What is new in it, in a word."""
        if previous_status.stable is None:
            return "first revision"
        if self.trial is not None:
            return describe_setting(self.setting)
        if self.arm.drafter != previous_status.stable.drafter:
            return f"drafter {self.arm.drafter}" if self.arm.drafter else "no drafter"
        if self.arm.setting != previous_status.stable.setting:
            return describe_setting(self.setting)
        if self.arm.draft_sampling != previous_status.stable.draft_sampling:
            sampling = self.arm.draft_sampling
            return f"{sampling.lower()} drafts" if sampling else "drafts as the engine samples them"
        if self.arm.target != previous_status.stable.target:
            return f"target {self.arm.target}"
        return "engine"


def resolve_desired_revision(
    resource: SpeculativeDeployment,
    no_drafter_reason: str = "",
    setting: SpeculationSetting | None = None,
    trial: Trial | None = None,
) -> DesiredRevision:
    """The revision that the spec asks for, with the setting that tuning puts in place of the spec's, if any. `no_drafter` says
    why none was chosen, where the spec names none."""
    spec = resource.spec
    setting = read_spec_setting(resource) if setting is None else setting
    wanted = DesiredRevision(
        _with_max_tokens(resource, max_speculative_tokens(setting)), setting, compute_revision(resource, setting), trial=trial
    )
    if spec.drafter is None and not isinstance(setting, Off):
        return replace(wanted, problem=no_drafter_reason or "spec.drafter is missing: write one, or spec.speculation.tokens: 0.")
    engine = releases.resolve_engine_version(spec.engine.image, spec.engine.version)
    if isinstance(engine, releases.UnknownVersion):
        return replace(wanted, problem=engine.message)
    try:
        config = None
        if spec.drafter is not None:
            drafter = command_line.DrafterArguments(
                engine_pod.drafter_location(resource) or "",
                spec.drafter.method,
                _pinned_commit(spec.drafter.source),
                spec.speculation.draft_sampling,
                spec.speculation.engine_options or {},
            )
            config = command_line.build_speculative_config(
                setting, drafter, engine.version, arguments.parse_arguments(spec.engine.args)
            )
        return replace(wanted, pod_template=engine_pod.build_pod_template(resource, config))
    except (arguments.ArgumentError, PodTemplateError) as error:
        return replace(wanted, problem=str(error))


def recommend_draft_sampling(resource: SpeculativeDeployment, setting: SpeculationSetting) -> DraftSampling | None:
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
    return None if resolve_desired_revision(other, setting=setting).problem else "Probabilistic"


def read_spec_setting(resource: SpeculativeDeployment) -> SpeculationSetting:
    """The setting that the spec names."""
    tokens = resource.spec.speculation.tokens
    return Static(tokens) if tokens else Off()


def build_status_setting(setting: SpeculationSetting) -> SettingStatus:
    """A setting as the status shows it."""
    tokens = max_speculative_tokens(setting)
    match setting:
        case Schedule(tiers):
            told = [TierStatus(first=one.first, last=one.last, tokens=one.tokens) for one in tiers]
            return SettingStatus(mode="Schedule", tokens=tokens, schedule=told)
        case Adaptive():
            return SettingStatus(mode="Adaptive", tokens=tokens)
        case Static():
            return SettingStatus(mode="Static", tokens=tokens)
        case Off():
            return SettingStatus(mode="Off", tokens=tokens)


def read_status_setting(status_setting: SettingStatus) -> SpeculationSetting:
    """The setting that the status shows. Raises SettingError for what is none."""
    match status_setting.mode:
        case "Off":
            return Off()
        case "Static":
            return Static(status_setting.tokens)
        case "Adaptive":
            return Adaptive(status_setting.tokens)
        case "Schedule":
            return Schedule(
                tuple(ScheduleTier(one.first, one.last, one.tokens) for one in status_setting.schedule or ()),
                status_setting.tokens,
            )


def _with_max_tokens(resource: SpeculativeDeployment, tokens: int) -> SpeculativeDeployment:
    """What preflight is to look at: a drafter has to fit the most tokens that are drafted."""
    spec = resource.spec
    if spec.speculation.tokens == tokens:
        return resource
    speculation = spec.speculation.model_copy(update={"tokens": tokens})
    return resource.model_copy(update={"spec": spec.model_copy(update={"speculation": speculation})})


def _pinned_commit(source: ModelSource) -> str | None:
    return source.variant.revision if isinstance(source.variant, HuggingFaceSource) else None


def _short_source_name(source: ModelSource) -> str:
    match source.variant:
        case HuggingFaceSource(repo=repo, revision=commit):
            return f"{repo}@{commit[:8]}"
        case VolumeClaimSource(claim_name=claim, path=path):
            return f"{claim}/{path}".rstrip("/")
        case image:
            return f"{image.reference.partition('@')[0]}{image.path}".rstrip("/")
