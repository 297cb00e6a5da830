"""Desired revision, from the spec and the tuner: its pods, and how the status names both.

Guarantee: pure. A spec that could not run has no pods, and `problem` says why in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aerie.analysis.criteria.plan import AnalysisGoal
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
from aerie.manifests.pod import drafter_plugin, engine_pod, request_metrics
from aerie.manifests.pod.pod_template_policy import PodTemplateError
from aerie.manifests.revision_hash import compute_revision


@dataclass(frozen=True)
class DesiredRevision:
    """A revision and its pods."""

    resource: SpeculativeDeployment
    """The resource with the maximum tokens of the setting in its spec, whether spec or tuner selected it."""
    setting: SpeculationSetting
    revision: str
    pod_template: dict[str, Any] | None = None
    problem: str = ""
    """Why no pods could run; empty where they could."""
    plugin_obstacle: str = ""
    """Why its pods would run without Aerie's plugin of vLLM; empty where they would have it."""
    shadow_obstacle: str = ""
    """Why its pods could take part in no shadow evaluation; empty where they could, and where the spec requests none."""
    trial: Trial | None = None
    """The trial that it belongs to; None where it is to stay."""

    @property
    def goal(self) -> AnalysisGoal | None:
        """Goal of a trial's analysis; None: that of the spec."""
        if self.trial is None:
            return None
        return "Faster" if self.trial.purpose == "Improve" else "Explore"

    @property
    def arm(self) -> Arm:
        """The arm as the status shows it, without pods."""
        spec, tokens = self.resource.spec, max_speculative_tokens(self.setting)
        return Arm(
            revision=self.revision,
            target=_short_source_name(spec.model.source),
            drafter=_short_source_name(spec.drafter.source) if spec.drafter and tokens else None,
            setting=build_status_setting(self.setting),
            draft_sampling=spec.speculation.draft_sampling if tokens else None,
        )

    def describe_change(self, previous_status: Status) -> str:
        """Return a short description of what is new in the revision."""
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
            return f"{sampling.lower()} draft sampling" if sampling else "default draft sampling"
        if self.arm.target != previous_status.stable.target:
            return f"target {self.arm.target}"
        return "engine"


def resolve_desired_revision(
    resource: SpeculativeDeployment,
    no_drafter_reason: str = "",
    setting: SpeculationSetting | None = None,
    trial: Trial | None = None,
) -> DesiredRevision:
    """Return the desired revision, with the tuner's setting instead of the spec's, if any.

    `no_drafter_reason` says why no drafter was selected, where the spec names none.
    """
    spec = resource.spec
    setting = read_spec_setting(resource) if setting is None else setting
    desired = DesiredRevision(
        _with_max_tokens(resource, max_speculative_tokens(setting)), setting, compute_revision(resource, setting), trial=trial
    )
    if spec.drafter is None and not isinstance(setting, Off):
        return replace(
            desired,
            problem=no_drafter_reason or "spec.drafter is missing: set it, or set spec.speculation.numSpeculativeTokens: 0.",
        )
    engine = releases.resolve_engine_version(spec.engine.image, spec.engine.version)
    if isinstance(engine, releases.UnknownVersion):
        return replace(desired, problem=engine.message)
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
        template = engine_pod.build_pod_template(resource, config)
        if spec.rollout.shadow_source != "None":
            shadow_obstacle = request_metrics.find_request_metrics_obstacle(engine.version, template)
            desired = replace(desired, shadow_obstacle=shadow_obstacle)
            template = template if shadow_obstacle else request_metrics.add_request_metrics(template)
        plugin = drafter_plugin.plan_plugin(resource, desired.revision, engine.version, template)
        if isinstance(plugin, drafter_plugin.PluginObstacle):
            return replace(desired, pod_template=template, plugin_obstacle=plugin.message)
        return replace(desired, pod_template=plugin.add_to(template))
    except (arguments.ArgumentError, PodTemplateError) as error:
        return replace(desired, problem=str(error))


def recommend_draft_sampling(resource: SpeculativeDeployment, setting: SpeculationSetting) -> DraftSampling | None:
    """Return the recommended spec.speculation.draftSampling for the traffic that the spec declares; None where there is none.

    Greedy requests accept the same drafts as before, however drafts are sampled, so the recommendation is for Sampled traffic
    alone. Where the user has set the field, there is no recommendation.
    """
    speculation = resource.spec.speculation
    if (
        speculation.tuning.mode == "Off"
        or speculation.tuning.traffic_sampling != "Sampled"
        or speculation.draft_sampling is not None
    ):
        return None
    if isinstance(setting, Off):
        return None
    probabilistic = speculation.model_copy(update={"draft_sampling": "Probabilistic"})
    changed_resource = resource.model_copy(update={"spec": resource.spec.model_copy(update={"speculation": probabilistic})})
    return None if resolve_desired_revision(changed_resource, setting=setting).problem else "Probabilistic"


def read_spec_setting(resource: SpeculativeDeployment) -> SpeculationSetting:
    """Return the setting that the spec names."""
    tokens = resource.spec.speculation.num_speculative_tokens
    return Static(tokens) if tokens else Off()


def build_status_setting(setting: SpeculationSetting) -> SettingStatus:
    """Return a setting as the status shows it."""
    tokens = max_speculative_tokens(setting)
    match setting:
        case Schedule(tiers):
            schedule_tiers = [
                TierStatus(min_batch_size=tier.first, max_batch_size=tier.last, num_speculative_tokens=tier.tokens)
                for tier in tiers
            ]
            return SettingStatus(mode="Schedule", num_speculative_tokens=tokens, schedule=schedule_tiers)
        case Adaptive():
            return SettingStatus(mode="Adaptive", num_speculative_tokens=tokens)
        case Static():
            return SettingStatus(mode="Static", num_speculative_tokens=tokens)
        case Off():
            return SettingStatus(mode="Off", num_speculative_tokens=tokens)


def read_status_setting(status_setting: SettingStatus) -> SpeculationSetting:
    """Return the setting that the status shows. Raises SpeculationSettingError for an invalid setting."""
    match status_setting.mode:
        case "Off":
            return Off()
        case "Static":
            return Static(status_setting.num_speculative_tokens)
        case "Adaptive":
            return Adaptive(status_setting.num_speculative_tokens)
        case "Schedule":
            return Schedule(
                tuple(
                    ScheduleTier(tier.min_batch_size, tier.max_batch_size, tier.num_speculative_tokens)
                    for tier in status_setting.schedule or ()
                ),
                status_setting.num_speculative_tokens,
            )


def _with_max_tokens(resource: SpeculativeDeployment, tokens: int) -> SpeculativeDeployment:
    """Return the resource that preflight inspects: a drafter has to fit the maximum number of draft tokens."""
    spec = resource.spec
    if spec.speculation.num_speculative_tokens == tokens:
        return resource
    speculation = spec.speculation.model_copy(update={"num_speculative_tokens": tokens})
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
