"""Rollout of a change: the canary, its analysis, its traffic, and its time limits.

docs/reference/resource.md describes the analysis fields, docs/concepts/verdict.md their effect. The sequential test behind them
is a confidence sequence over paired blocks (Lindon, Ham, Tingley, Bojinov, arXiv 2210.08589), which is anytime-valid: it may be
evaluated after every block.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from aerie.api.types.base import (
    DNS_LABEL_PATTERN,
    DurationRange,
    ObjectName,
    ResourceModel,
    ValidationRule,
    cel_any_malformed_duration,
    int_to_text,
    schema_extra,
)


class CanarySpec(ResourceModel):
    """Canary of a new revision: its pods, its control, and its traffic after a passed analysis."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Pods of the new revision during the analysis, at most spec.replicas. With control Fresh, the same number of control pods is
    started with them."""
    control: Literal["Fresh", "Stable"] = "Fresh"
    """Pods with which the canary is compared. Fresh: pods of the stable revision that are started together with the canary, so
    that both have the same age. Stable: the running pods. Stable needs no control pods, but favours the canary if acceptance
    decreases with a pod's age. During ramp and promotion the canary is always compared with the running pods."""
    capacity: Literal["Surge", "Reuse"] = "Surge"
    """Source of the capacity for canary and control pods. Surge: spare capacity of the cluster. Reuse: stable pods are scaled
    down for them, so that no spare GPU is needed. Fewer pods are then ready while the new ones load. One stable pod always
    remains: if spec.replicas is smaller than canary, control and one, that sum of pods runs until the canary has ended."""
    step_weights: Annotated[
        list[Annotated[int, Field(ge=1, le=99)]],
        Field(
            max_length=16,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.isSorted() && self.all(share, self.exists_one(other, other == share))",
                    "write shares that rise, such as [25, 50]; the last step to 100 needs no entry",
                    "'the shares %s do not rise: write each larger than the one before, such as [25, 50]; the last step to 100 "
                    "needs no entry'.format([self])",
                ),
                **{"x-kubernetes-list-type": "atomic"},
            ),
        ),
    ] = Field(default=[25, 50])
    """Traffic percentages of a canary that has passed its analysis, one step after the other, before its promotion. The number of
    its pods grows with them. In mode Service they are rounded up to whole pods. Empty: immediate promotion."""
    step_duration: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=5)
    """Minimum duration of each ramp step. A step also lasts until its pods are ready. Only guardrails are evaluated in it, which
    can roll back."""
    scale_down_delay: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=10)
    """Time for which pods of the previous revision are retained after a promotion, so that a rollback loads no model. As many are
    retained as the canary and control had. They get no requests unless tokens per step decrease; then the promoted pods are
    compared with them. 0s: they are scaled down immediately. With capacity Reuse there is no capacity for them, and they are
    scaled down immediately too."""
    approval: Literal["Automatic", "Manual"] = "Automatic"
    """Automatic: a canary that has passed its analysis is promoted automatically. Manual: it waits for the annotation
    aerie.dev/promote or aerie.dev/rollback, with the canary's revision as its value."""


class PromptsSource(ResourceModel):
    """Requests in a ConfigMap in the namespace of the resource: lines of JSON, each an OpenAI chat or completion request."""

    config_map: ObjectName
    """Name of the ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = "prompts.jsonl"
    """Key with the lines."""


ShadowSource = Literal["None", "Mirror", "Prompts"]
"""Source of the requests of a shadow evaluation."""


class ShadowSpec(ResourceModel):
    """Shadow evaluation: both drafters answer the same requests in pods that users do not reach, before any user is served with
    the new drafter. In place, that is one of at least two ready pods, which gets no requests of users meanwhile. By pods, canary
    and control get the same requests before those of users. A drafter that is significantly worse is rolled back. An accepted
    drafter continues with the ramp, and any other with the analysis under the traffic of users. Trials of tuning have none."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "!has(self.source) || self.source != 'Prompts' || has(self.prompts)",
                "source Prompts requires requests: write prompts.configMap, or another source",
                field_path=".prompts",
                is_missing_field=True,
            ),
            ValidationRule(
                "(has(self.source) && self.source == 'Prompts') || !has(self.prompts)",
                "prompts has an effect with source: Prompts only: write that, or leave prompts out",
                field_path=".prompts",
            ),
        )
    )

    source: ShadowSource | None = None
    """Source of the requests. None: no shadow evaluation. Mirror: copies of the users' requests, which the gateway sends beside
    the originals; it requires traffic mode Gateway. Prompts: the requests in prompts. Of an answer only counts are kept. Default:
    Mirror in traffic mode Gateway, in place with at least four ready pods; else None."""
    only: bool = True
    """Whether the shadow evaluation alone decides that a drafter is accepted. true: an accepted drafter continues with the ramp,
    in which only the guardrails are evaluated. false: the analysis under the traffic of users follows in any case."""
    prompts: PromptsSource | None = None
    max_duration: Annotated[timedelta, DurationRange("1m", "24h")] = timedelta(minutes=15)
    """Time after which a shadow evaluation without a verdict ends, and the rollout continues without it."""


class AnalysisSpec(ResourceModel):
    """Analysis of a canary. After warmupDuration, time is divided into blocks. Over each block, tokens per step, latency and
    failures of the canary are compared with the control's. The tests are anytime-valid: their error rates hold although they are
    evaluated after every block. A canary passes after minBlocks and minDuration at the earliest, is rolled back as soon as it is
    significantly worse, and is inconclusive at maxDuration. The parameters are frozen when an analysis begins: a change takes
    effect with the next one."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                f"{cel_any_malformed_duration('self.warmupDuration', 'self.minDuration', 'self.maxDuration')} || "
                "duration(self.warmupDuration) + duration(self.minDuration) <= duration(self.maxDuration)",
                "warmupDuration and minDuration together are longer than maxDuration, so no canary could ever be promoted: raise "
                "maxDuration, or shorten minDuration or warmupDuration",
                "'warmupDuration (%s) and minDuration (%s) together are longer than maxDuration (%s), so no canary could ever be "
                "promoted: raise maxDuration, or shorten minDuration or warmupDuration'"
                ".format([self.warmupDuration, self.minDuration, self.maxDuration])",
                ".minDuration",
            ),
            ValidationRule(
                f"{cel_any_malformed_duration('self.warmupDuration', 'self.blockDuration', 'self.maxDuration')} || "
                "duration(self.warmupDuration).getSeconds() + self.minBlocks * duration(self.blockDuration).getSeconds() "
                "<= duration(self.maxDuration).getSeconds()",
                "warmupDuration and minBlocks blocks together are longer than maxDuration, so no analysis could reach a "
                "verdict: raise maxDuration, or lower minBlocks, blockDuration or warmupDuration",
                "'warmupDuration (%s) and %d blocks of %s together are longer than maxDuration (%s), so no analysis could "
                "reach a verdict: raise maxDuration, or lower minBlocks, blockDuration or warmupDuration'"
                ".format([self.warmupDuration, self.minBlocks, self.blockDuration, self.maxDuration])",
                ".minBlocks",
            ),
        )
    )

    block_duration: Annotated[timedelta, DurationRange("2s", "1h")] = timedelta(minutes=2)
    """Length of a block, over which the counters of both arms are compared. It should be well above the duration of a typical
    request, because requests that span blocks make neighbouring blocks correlated."""
    warmup_duration: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=5)
    """Time after all pods of both arms are ready in which nothing is counted: graphs are captured, and prefix caches fill."""
    min_blocks: Annotated[int, Field(ge=2, le=1000)] = 5
    """Minimum number of closed blocks before any verdict, except for abort conditions, which need no statistics. Fewer than 5 are
    seldom enough for a verdict."""
    min_duration: Annotated[timedelta, DurationRange("0s", "168h")] = timedelta(minutes=30)
    """Minimum time under analysis before a canary may pass, however clear the metrics are."""
    max_duration: Annotated[timedelta, DurationRange("1m", "336h")] = timedelta(hours=4)
    """Time after all pods of both arms are ready at which the analysis ends. Without a verdict by then it is inconclusive. A
    trial of another speculation setting, which is compared by time, has twice as long."""
    goal: Literal["NonInferior", "Superior"] = "NonInferior"
    """Hypothesis that the canary has to meet. NonInferior: its tokens per verification step are not below the control's by more
    than the margin. Superior: they are above the control's. In both cases its time per output token has to be good enough, and a
    significantly lower time is sufficient. If tokens per step are not comparable, as with different numbers of draft tokens, time
    decides alone."""
    margin: Annotated[
        float,
        Field(
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self >= 0.001 && self <= 0.2",
                    "write the margin as a fraction from 0.001 to 0.2: 0.02 is 2 %; to promote only a canary that is better, "
                    "write goal: Superior",
                ),
                **{"x-bounds": "0.001 to 0.2"},
            )
        ),
    ] = 0.02
    """Loss of tokens per step that goal NonInferior counts as equal, as a fraction of the control's: 0.02 is 2 %. A smaller
    margin takes longer to decide. It is no allowance: a canary that is significantly worse is rolled back. Superior tolerates no
    loss."""
    failure_margin: Annotated[
        float,
        Field(
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self >= 0.001 && self <= 0.2",
                    "write the share as a fraction from 0.001 to 0.2: 0.005 is half a percent of the requests",
                ),
                **{"x-bounds": "0.001 to 0.2"},
            )
        ),
    ] = 0.005
    """Share of failed requests, beyond twice the control's, that counts as equal: 0.005 is half a percent of them. A canary
    passes only if it is significantly below. That takes about 5 divided by this share of requests on each arm, 1,000 by default:
    with little traffic, raise it. Significantly more failures than the control's roll back, whatever the margin."""
    output_equivalence: Literal["Enabled", "Disabled"] = "Enabled"
    """Enabled: the engines get a few short prompts at temperature 0, to verify that the canary's drafter does not change outputs.
    One pod each of canary, control and stable gets 24 prompts with answers of at most 64 tokens. They are sent during the warm-up
    if that is long enough. Disabled: the engines get no requests except the clients'."""
    on_inconclusive: Literal["Hold", "Rollback"] = "Hold"
    """Behaviour at maxDuration without a verdict. Hold: canary and control keep their traffic until the annotation
    aerie.dev/promote or aerie.dev/rollback is set, with the canary's revision as its value. Rollback: the canary is rolled back.
    An inconclusive canary is never promoted automatically."""
    shadow: ShadowSpec = ShadowSpec()


class ParentReference(ResourceModel):
    """A Gateway that serves the route."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL_PATTERN)] | None = None
    """Namespace of the Gateway. Default: that of the resource."""
    section_name: ObjectName | None = None
    """Name of one of its listeners. Default: all listeners that match."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of its listeners. Default: all."""


class GatewaySpec(ResourceModel):
    """Gateways of the HTTPRoute in mode Gateway. Aerie owns the route, with one weight for each arm."""

    parent_refs: Annotated[
        list[ParentReference],
        Field(min_length=1, max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ]
    """Gateways that serve the route; at least one."""
    hostnames: Annotated[
        list[
            Annotated[
                str,
                Field(
                    min_length=1,
                    max_length=253,
                    json_schema_extra=schema_extra(
                        ValidationRule(
                            r"self.matches('^([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",
                            "write a host name in lower case without scheme, port and path, such as chat.example.com",
                        )
                    ),
                ),
            ]
        ],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = Field(default_factory=list)
    """Host names of the route. Default: all of the Gateway's."""


class TrafficSpec(ResourceModel):
    """Split of requests between stable, canary and control."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "self.mode != 'Gateway' || has(self.gateway)",
                "mode Gateway requires a Gateway: write gateway.parentRefs, or mode: Service",
                field_path=".gateway",
                is_missing_field=True,
            ),
            ValidationRule(
                "self.mode != 'Service' || !has(self.gateway)",
                "gateway has no effect in mode Service: write mode: Gateway, or leave gateway out",
                field_path=".gateway",
            ),
        )
    )

    mode: Literal["Service", "Gateway"] = "Service"
    """Service: one Service for all ready pods, so that a share of the traffic is a share of the pods. A new pod gets its share as
    soon as it is ready. Gateway: an HTTPRoute with a weight for each arm; it requires the Gateway API and a gateway."""
    gateway: GatewaySpec | None = None


_POD_COUNT_OR_PERCENT_PATTERN = r"^([1-9][0-9]{0,2}|1000|([1-9][0-9]?|100)%)$"

PodCountOrPercent = Annotated[
    str,
    BeforeValidator(int_to_text),
    Field(pattern=_POD_COUNT_OR_PERCENT_PATTERN),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 4,
            **schema_extra(
                ValidationRule(
                    f"type(self) == int ? self >= 1 && self <= 1000 : self.matches('{_POD_COUNT_OR_PERCENT_PATTERN}')",
                    "write a number of pods from 1 to 1000, or a percentage from 1% to 100%; with 0 no node could be drained",
                )
            ),
            "x-bounds": "1 to 1000, or 1% to 100%",
            "x-type": "number or percentage",
        }
    ),
]
"""A number of pods or a percentage of them."""


class DisruptionSpec(ResourceModel):
    """Limits for node drains and other voluntary disruptions. The pods of each revision have their own PodDisruptionBudget, so
    that a loading canary blocks no drain of stable pods. Control pods have none."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "!(self.budget == 'None' && has(self.maxUnavailable))",
                "maxUnavailable has no effect with budget: None: leave one of them out",
                field_path=".maxUnavailable",
            ),
        )
    )

    budget: Literal["Managed", "None"] = "Managed"
    """Managed: Aerie creates the budgets. None: it creates none, so that you can have your own. Kubernetes evicts no pod that two
    budgets select."""
    max_unavailable: PodCountOrPercent | None = None
    """Maximum number of unavailable pods of a revision, as a number or as a percentage of its pods, rounded up. A pod that is not
    ready counts as unavailable, and may always be evicted. Default: 10%."""

    @property
    def max_unavailable_or_default(self) -> int | str:
        """The value as a PodDisruptionBudget takes it, 10% where it is not set."""
        value = self.max_unavailable or "10%"
        return int(value) if value.isdecimal() else value


class PreflightSpec(ResourceModel):
    """Effect of the preflight checks. A change creates no new revision: a revision that failed preflight proceeds when its failed
    checks are accepted, and running revisions are not affected."""

    mode: Literal["Enforce", "Warn", "Off"] = "Enforce"
    """Enforce: no engine is started of a revision that failed preflight or has no preflight result. Warn: the rollout proceeds as
    soon as preflight has ended, whatever the result, and PreflightPassed names the failed checks. Off: preflight does not run."""
    accepted_checks: Annotated[
        list[
            Annotated[
                str,
                Field(
                    max_length=8,
                    json_schema_extra=schema_extra(
                        ValidationRule(
                            "self.matches('^C[1-9][0-9]?$')",
                            "write the id of a check, such as C2; docs/reference/preflight-checks.md lists them",
                        )
                    ),
                ),
            ]
        ],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = Field(default_factory=list)
    """Ids of checks whose failures are accepted in mode Enforce, such as C2. PreflightPassed still lists them."""

    def allows(self, failed_check_ids: Collection[str]) -> bool:
        """Return whether a revision proceeds although the checks with these ids fail; no ids: the rejection comes from no
        check."""
        return self.mode != "Enforce" or (bool(failed_check_ids) and set(failed_check_ids) <= set(self.accepted_checks))


class InPlaceSpec(ResourceModel):
    """Changes of the drafter inside running engines, without new pods. Any other change is rolled out by pods. A change of these
    fields creates no new revision: the pods of a revision stay as they were built."""

    mode: Literal["Auto", "Required", "Off"] = "Auto"
    """Auto: pods of new revisions load Aerie's plugin of vLLM, where the engine supports it and no argument, variable or volume
    of yours conflicts with it. A change of the drafter alone is rolled out in place, where both drafters fit the engine, and by
    pods elsewhere. Required: as Auto, but a change of the drafter alone fails where it would be rolled out by pods. Off: every
    change is rolled out by pods."""
    pods: Annotated[int, Field(ge=1, le=100)] = 1
    """Pods on trial at the start, at most spec.replicas. They alternate between the two drafters during the analysis."""
    min_duration: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=2)
    """Minimum time for which pods alternate before a promotion, however clear the metrics are. It replaces analysis.minDuration
    in rollouts in place."""


class RolloutSpec(ResourceModel):
    """Rollout of a change: preflight, changes in place, canary, analysis, traffic, disruptions, time limits."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "!has(self.analysis.shadow.source) || self.analysis.shadow.source != 'Mirror' || self.traffic.mode == 'Gateway'",
                "source Mirror requires a gateway that copies requests: write traffic.mode: Gateway, or shadow.source: Prompts",
                field_path=".analysis.shadow.source",
            ),
        )
    )

    preflight: PreflightSpec = PreflightSpec()
    in_place: InPlaceSpec = InPlaceSpec()
    canary: CanarySpec = CanarySpec()
    analysis: AnalysisSpec = AnalysisSpec()
    traffic: TrafficSpec = TrafficSpec()
    disruption: DisruptionSpec = DisruptionSpec()
    progress_deadline: Annotated[timedelta, DurationRange("1m", "24h")] = timedelta(minutes=30)
    """Time in which a new pod has to become ready, including download and loading of the model. A pod that has not been ready for
    so long is late. A late canary fails. During ramp and promotion the canary is rolled back if more than one pod and more than 5
    % are late; fewer do not block it. The duration of a whole step has no limit."""
    paused: bool = False
    """Whether Aerie changes nothing, and only reports the state. A canary in progress keeps its pods and its traffic."""

    @property
    def shadow_source(self) -> ShadowSource:
        """Source of the requests of shadow evaluations, with its default."""
        default: ShadowSource = "Mirror" if self.traffic.mode == "Gateway" else "None"
        return self.analysis.shadow.source or default
