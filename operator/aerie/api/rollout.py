"""Rollout of a change: the canary, its analysis, its traffic, and its time limits.

docs/reference.md describes the analysis fields, docs/rollouts.md their effect. The sequential test behind them is a confidence
sequence over paired blocks (Lindon, Ham, Tingley, Bojinov, arXiv 2210.08589), which is anytime-valid: it may be evaluated after
every block.
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
    """How a new revision is started next to the stable one, and how its traffic grows once it is accepted."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Pods of the new revision while it is judged, at most spec.replicas. With control Fresh, as many control pods are started
    with them."""
    control: Literal["Fresh", "Stable"] = "Fresh"
    """What the canary is compared with. Fresh: pods of the stable revision started together with it, so that both are of an
    age. Stable: the running pods; needs no control pods, and favours the canary where acceptance falls with a pod's age. In the
    ramp and the promotion it is compared with the running pods in either case."""
    capacity: Literal["Surge", "Reuse"] = "Surge"
    """Where canary and control pods come from. Surge: spare capacity of the cluster. Reuse: pods of the stable revision
    make room for them, so that no spare GPU is needed; while the new ones load, so many fewer serve. One stable pod stays in any
    case: where spec.replicas is smaller than canary, control and one, so many pods run until the canary has ended."""
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
    """Percent of the traffic that an accepted canary gets, step by step, before it is promoted; it grows with them. In mode
    Service in whole pods, at least the share. Empty: promoted at once."""
    step_duration: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=5)
    """How long each step of the ramp lasts, and in any case until its pods serve, with only the tests armed that roll back."""
    scale_down_delay: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=10)
    """How long after a promotion pods of the previous revision stay, so that the way back needs no model to be loaded first: as
    many as canary and control were. They get no requests unless the tokens per step fall; then they are what it is compared
    with. 0s: they go at once. With capacity Reuse there is no place for them, and they go at once too."""
    approval: Literal["Automatic", "Manual"] = "Automatic"
    """Whether an accepted canary is promoted by itself, or waits for a person's annotation aerie.dev/promote or
    aerie.dev/rollback, whose value is the canary's revision."""


class AnalysisSpec(ResourceModel):
    """How a canary is judged. After warmup, time is cut into blocks; over each, tokens per step, latency and failures of the
    canary are compared with the control's, by tests whose error rates hold although they are looked at after every block. A
    canary is accepted when minBlocks and soak are over at the earliest, rejected as soon as the figures say so, and undecided at
    deadline. The parameters are frozen when an analysis begins: changing them takes effect with the next one."""

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
                "warmupDuration and minBlocks blocks together are longer than maxDuration, so no analysis could reach a verdict: "
                "raise maxDuration, or lower minBlocks, blockDuration or warmupDuration",
                "'warmupDuration (%s) and %d blocks of %s together are longer than maxDuration (%s), so no analysis could reach a "
                "verdict: raise maxDuration, or lower minBlocks, blockDuration or warmupDuration'"
                ".format([self.warmupDuration, self.minBlocks, self.blockDuration, self.maxDuration])",
                ".minBlocks",
            ),
        )
    )

    block_duration: Annotated[timedelta, DurationRange("2s", "1h")] = timedelta(minutes=2)
    """Length of one block: counters of both arms are differenced over the same block and compared. Well above the length of a
    common request, because requests that span blocks make neighbouring blocks alike."""
    warmup_duration: Annotated[timedelta, DurationRange("0s", "24h")] = timedelta(minutes=5)
    """Time after all pods of both arms are ready that counts for nothing: graphs are captured, prefix caches fill."""
    min_blocks: Annotated[int, Field(ge=2, le=1000)] = 5
    """Blocks that have to be closed before any decision, but for faults that need no statistics. Fewer than 5 are seldom enough
    for one."""
    min_duration: Annotated[timedelta, DurationRange("0s", "168h")] = timedelta(minutes=30)
    """Time under analysis before a canary may be accepted, however clear the figures are."""
    max_duration: Annotated[timedelta, DurationRange("1m", "336h")] = timedelta(hours=4)
    """Time after all pods of both arms are ready by which the analysis ends; without a decision it is inconclusive. A trial
    of another speculation setting, which is judged by time, has twice as long."""
    goal: Literal["NonInferior", "Superior"] = "NonInferior"
    """What the canary has to show. NonInferior: tokens that requests get per verification step not below the control's by more
    than the margin. Superior: more than the control's. Either way its time per output token has to be good enough, and being
    certainly faster is enough; where tokens per step do not tell, as with unlike numbers of draft tokens, time decides alone."""
    margin: Annotated[
        float,
        Field(
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self >= 0.001 && self <= 0.2",
                    "write the margin as a fraction from 0.001 to 0.2: 0.02 stands for 2 %; to accept only what is better, write "
                    "goal: Superior",
                ),
                **{"x-bounds": "0.001 to 0.2"},
            )
        ),
    ] = 0.02
    """Loss of tokens per step that goal NonInferior cannot tell from none, as a fraction of the control's: 0.02 is 2 %. The
    smaller, the longer a decision takes. It is no allowance: what is certainly worse is rolled back. Superior tolerates none."""
    failure_margin: Annotated[
        float,
        Field(
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self >= 0.001 && self <= 0.2",
                    "write the share as a fraction from 0.001 to 0.2: 0.005 stands for half a percent of the requests",
                ),
                **{"x-bounds": "0.001 to 0.2"},
            )
        ),
    ] = 0.005
    """Share of failed requests, beyond twice the control's, that cannot be told from none: 0.005 is half a percent of them.
    To be accepted, a canary has to be certainly below it, which takes some 5 requests by it on each arm, here 1,000: with little
    traffic, raise it. More failures than the control's roll back whatever it is."""
    output_equivalence: Literal["Enabled", "Disabled"] = "Enabled"
    """Whether the engines are asked a few short prompts, to see that the canary's drafter does not change answers: one pod each
    of canary, control and stable, 24 prompts with answers of at most 64 tokens, during warmup where it is long enough. Skip: no
    request but the clients' is sent to an engine."""
    on_inconclusive: Literal["Hold", "Rollback"] = "Hold"
    """What follows when the deadline passes without a decision. Hold: canary and control keep their traffic until a person
    decides by the annotation aerie.dev/promote or aerie.dev/rollback, whose value is the canary's revision. Rollback: the canary
    is removed. Never a promotion."""


class ParentReference(ResourceModel):
    """A Gateway that serves the route."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL_PATTERN)] | None = None
    """Its namespace. Default: that of the resource."""
    section_name: ObjectName | None = None
    """Name of one of its listeners. Default: all that fit."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of its listeners. Default: all."""


class GatewaySpec(ResourceModel):
    """Where the HTTPRoute of mode Gateway is attached. Aerie owns the route, with one weight for each arm."""

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
    """Host names that the route answers to. Default: all of the Gateway's."""


class TrafficSpec(ResourceModel):
    """How requests are split between stable, canary and control."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "self.mode != 'Gateway' || has(self.gateway)",
                "mode Gateway needs to know the Gateway: write gateway.parentRefs, or mode: Service",
                field_path=".gateway",
                is_missing_field=True,
            ),
            ValidationRule(
                "self.mode != 'Service' || !has(self.gateway)",
                "gateway is of no use in mode Service: write mode: Gateway, or leave gateway out",
                field_path=".gateway",
            ),
        )
    )

    mode: Literal["Service", "Gateway"] = "Service"
    """Service: one Service over all serving pods, so a share of the traffic is a share of the pods, and a new pod has it as soon
    as it serves. Gateway: an HTTPRoute with a weight for each arm; needs the Gateway API and a gateway."""
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
    """What node drains and other voluntary disruptions may take. Each revision's pods have a PodDisruptionBudget of their own,
    so that a canary that loads keeps no stable pod from being drained; control pods have none."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "!(self.budget == 'None' && has(self.maxUnavailable))",
                "maxUnavailable is of no use with budget: None: leave one of them out",
                field_path=".maxUnavailable",
            ),
        )
    )

    budget: Literal["Managed", "None"] = "Managed"
    """Managed: Aerie makes the budgets. None: it makes none, so that there may be budgets of your own; where two select the same
    pod, Kubernetes evicts it by neither."""
    max_unavailable: PodCountOrPercent | None = None
    """Pods of a revision that may be missing at a time, as a number or as a percentage of its pods, rounded up. A pod that does
    not serve counts as missing, and may be evicted in any case. Default: 10%."""

    @property
    def max_unavailable_or_default(self) -> int | str:
        """The value as a PodDisruptionBudget takes it, 10% where it is not set."""
        value = self.max_unavailable or "10%"
        return int(value) if value.isdecimal() else value


class PreflightSpec(ResourceModel):
    """What preflight may hold back. A change of it makes no new revision: one that was refused goes on when its refusals are
    accepted, and one that serves is left alone."""

    mode: Literal["Enforce", "Warn", "Off"] = "Enforce"
    """Enforce: no engine is started of a revision that preflight refuses, or about which it has no verdict. Warn: it goes on as
    soon as preflight has ended, whatever it says, and PreflightPassed names the refusals. Off: preflight does not run."""
    accepted_checks: Annotated[
        list[
            Annotated[
                str,
                Field(
                    max_length=8,
                    json_schema_extra=schema_extra(
                        ValidationRule(
                            "self.matches('^C[1-9][0-9]?$')", "write the id of a check, such as C2; docs/preflight.md lists them"
                        )
                    ),
                ),
            ]
        ],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = Field(default_factory=list)
    """Ids of checks whose refusals are accepted, such as C2, in mode Enforce. PreflightPassed goes on listing them."""

    def allows(self, failed_check_ids: Collection[str]) -> bool:
        """Return whether a revision proceeds although the checks with these ids fail; no ids: the rejection comes from no
        check."""
        return self.mode != "Enforce" or (bool(failed_check_ids) and set(failed_check_ids) <= set(self.accepted_checks))


class RolloutSpec(ResourceModel):
    """How a change of the resource reaches the fleet: preflight, canary, analysis, traffic, disruptions, time limits."""

    preflight: PreflightSpec = PreflightSpec()
    canary: CanarySpec = CanarySpec()
    analysis: AnalysisSpec = AnalysisSpec()
    traffic: TrafficSpec = TrafficSpec()
    disruption: DisruptionSpec = DisruptionSpec()
    progress_deadline: Annotated[timedelta, DurationRange("1m", "24h")] = timedelta(minutes=30)
    """Time that a new pod has to become ready; it has to cover downloading and loading the model. A pod that has not served for
    so long is late. A late canary fails; in the ramp and the promotion more than 5 % of late pods, and more than one, roll it
    back, and fewer are gone around. How long a step takes with all its pods does not matter."""
    paused: bool = False
    """Whether Aerie leaves everything as it is and only goes on reporting. A canary under way keeps its pods and its traffic."""
