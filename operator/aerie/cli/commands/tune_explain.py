"""`aerie tune explain`: why a resource's engines have their speculation setting, from what the operator has written.

It reads the resource's status and the ConfigMap of its tuner, with the rights of the kubeconfig. It writes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from aerie.api import SpeculativeDeployment
from aerie.api.status import PerformanceGain, SettingStatus, SpeculationStatus, Status, TrialRecord, TuningSavings
from aerie.api.types.base import format_timestamp
from aerie.cli.commands.preflight import OutputFormat
from aerie.cli.console import CommandError, out
from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.revision.desired import build_status_setting
from aerie.terminal import sanitize_text
from aerie.tuning.recommendation import Recommendation


def explain(
    name: Annotated[str, typer.Argument(help="Name of the SpeculativeDeployment.")],
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace. Default: from the kubeconfig.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: the current context.")] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="Kubeconfig file. Default: $KUBECONFIG, else ~/.kube/config.")] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")] = OutputFormat.TEXT,
) -> None:
    """Explain a resource's speculation setting: the last decision of the tuner, and earlier trials."""
    document, data = asyncio.run(_read_resource_and_record(name, namespace, kubeconfig, context))
    resource = SpeculativeDeployment.from_dict(document)
    record = TuningRecord.from_data(data or {})
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(explanation_to_json(resource, record), indent=2))
    else:
        out.print(sanitize_text("\n".join(render_explanation(resource, record, datetime.now(UTC)))))


def explanation_to_json(resource: SpeculativeDeployment, record: TuningRecord | None) -> dict[str, Any]:
    """Return the explanation for a program; docs/tuning.md describes it."""
    spec, status = resource.spec.speculation, resource.status or Status()
    return {
        "namespace": resource.metadata.namespace or "default",
        "name": resource.metadata.name,
        "mode": spec.tuning.mode,
        "numSpeculativeTokens": spec.num_speculative_tokens,
        "speculation": None if status.speculation is None else status.to_dict()["speculation"],
        "condition": next((condition.to_dict() for condition in status.conditions if condition.type == "SpeculationTuned"), None),
        "decision": None if record is None else _decision_to_json(record),
    }


def _decision_to_json(record: TuningRecord) -> dict[str, Any]:
    try:
        recommendation = Recommendation.from_dict(json.loads(record.recommendation))
    except (ValueError, RecursionError):  # of another release: the explanation is available nevertheless
        recommendation = None
    predicted = None
    if recommendation is not None and recommendation.predicted_gain is not None:
        lower, estimate, upper = recommendation.predicted_gain
        predicted = {"estimate": estimate, "lower": lower, "upper": upper}
    return {
        "decisionTime": format_timestamp(datetime.fromtimestamp(record.decision_time, tz=UTC)),
        "revision": recommendation.revision if recommendation is not None else None,
        "action": recommendation.action if recommendation is not None else None,
        "setting": build_status_setting(recommendation.setting).to_dict()
        if recommendation is not None and recommendation.setting is not None
        else None,
        "predicted": predicted,
        "reason": recommendation.reason if recommendation is not None else None,
        "explanation": record.explanation,
    }


def render_explanation(resource: SpeculativeDeployment, record: TuningRecord | None, now: datetime) -> Iterator[str]:
    """Yield the lines of the explanation."""
    spec, status = resource.spec.speculation, resource.status or Status()
    speculation = status.speculation
    yield f"{resource.metadata.namespace or 'default'}/{resource.metadata.name}: tuning.mode {spec.tuning.mode}"
    if speculation is not None:
        yield from _render_settings(speculation, spec.num_speculative_tokens, now)
    for condition in status.conditions:
        if condition.type == "SpeculationTuned":
            yield f"  SpeculationTuned={condition.status} ({condition.reason}): {condition.message}"
    yield ""
    yield from _render_trials(speculation.trials if speculation else [], speculation.savings if speculation else None, now)
    yield ""
    if spec.tuning.mode == "Off":
        yield "Tuning is off: set spec.speculation.tuning.mode to Recommend or Auto."
    elif record is None:
        interval = spec.tuning.decision_interval.total_seconds() / 60
        yield (
            f"No decision yet: the first one follows {interval:.0f} minutes after the first requests, if the "
            "operator is running and can read the pods' metrics."
        )
    else:
        decision_time = datetime.fromtimestamp(record.decision_time, tz=UTC)
        yield f"Last decision: {decision_time:%Y-%m-%d %H:%M} UTC, {_format_age(decision_time, now)}"
        yield ""
        yield record.explanation.rstrip("\n")


def _render_settings(speculation: SpeculationStatus, tokens: int, now: datetime) -> Iterator[str]:
    origin = _format_setting_origin(speculation.applied is not None, tokens)
    yield f"  current      {format_setting(speculation.current)}{origin}"
    if speculation.recommended is not None:
        yield f"  recommended  {format_setting(speculation.recommended)}{_format_predicted_gain(speculation.predicted)}"
    if speculation.recommended_draft_sampling is not None:
        yield f"  recommended  draftSampling {speculation.recommended_draft_sampling}, for sampled traffic"
    if (trial := speculation.trial) is not None:
        since = f"{_format_age(trial.start_time, now)} ({trial.purpose})"
        yield f"  trial        {format_setting(trial.setting)}{_format_predicted_gain(trial.predicted)}, since {since}"
    if speculation.message:
        yield f"  {speculation.message}"


def format_setting(setting: SettingStatus) -> str:
    """Return a short description of a setting."""
    match setting.mode:
        case "Off":
            return "no speculation"
        case "Static":
            return f"K={setting.num_speculative_tokens}"
        case "Adaptive":
            return f"adaptive verification up to {setting.num_speculative_tokens}"
        case "Schedule":
            return "schedule " + ",".join(
                f"{tier.min_batch_size}-{tier.max_batch_size}:{tier.num_speculative_tokens}" for tier in setting.schedule or ()
            )


def _format_setting_origin(is_tuned: bool, tokens: int) -> str:
    return f", by tuning (spec: {tokens})" if is_tuned else ", by the spec"


def _render_trials(trials: list[TrialRecord], savings: TuningSavings | None, now: datetime) -> Iterator[str]:
    if not trials:
        yield "No trials yet."
        return
    yield "Trials, newest first"
    for trial in trials:
        settings = f"{format_setting(trial.from_setting)} to {format_setting(trial.to_setting)}"
        yield f"  {_format_age(trial.completion_time, now):<12} {settings} ({trial.purpose}): {trial.result}"
        yield f"               predicted {_format_gain(trial.predicted)}, measured {_format_gain(trial.measured)}"
    if savings is not None:
        yield (
            f"  Total, in replica-hours: {savings.saved:.1f} saved, {savings.spent:.1f} spent on trials, "
            f"{savings.net:+.1f} net, as of {_format_age(savings.update_time, now)}; "
            f"current rate {100 * savings.current_rate:.1f} %."
        )


def _format_predicted_gain(gain: PerformanceGain | None) -> str:
    return "" if gain is None else f", predicted {_format_gain(gain)}"


def _format_gain(gain: PerformanceGain | None) -> str:
    if gain is None:
        return "unknown"
    bounds = "" if gain.lower is None or gain.upper is None else f" ({100 * gain.lower:+.1f} to {100 * gain.upper:+.1f})"
    return f"{100 * gain.estimate:+.1f} %{bounds}"


def _format_age(time: datetime, now: datetime) -> str:
    age = max(now - time, timedelta())
    if age < timedelta(hours=2):
        return f"{age.total_seconds() / 60:.0f} min ago"
    if age < timedelta(days=2):
        return f"{age.total_seconds() / 3600:.0f} h ago"
    return f"{age.days} days ago"


_API_ERROR_HINTS = {
    401: ": log in again, or use a context with valid credentials.",
    403: ": the user needs the permission to get speculativedeployments.aerie.dev and configmaps in that namespace.",
}


async def _read_resource_and_record(
    name: str, namespace: str | None, kubeconfig: str | None, context: str | None
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the resource, and the data of its ConfigMap; None where there is no ConfigMap of this resource."""
    # Imported here: the other commands do not need the cluster's client.
    from aerie.controller.kubernetes.client import CONFIG_MAPS, SPECULATIVE_DEPLOYMENTS, ApiError, Cluster
    from aerie.controller.kubernetes.kubeconfig import ConnectError, KubeconfigSelection

    try:
        cluster = await Cluster.connect(selection=KubeconfigSelection(kubeconfig, context))
    except ConnectError as error:
        raise CommandError(str(error)) from None
    try:
        resource_namespace = namespace or cluster.namespace
        resource = await cluster.get(SPECULATIVE_DEPLOYMENTS, resource_namespace, name)
        if resource is None:
            raise CommandError(f"there is no SpeculativeDeployment {resource_namespace}/{name}: set its namespace with -n.")
        config_map = await cluster.get(CONFIG_MAPS, resource_namespace, tuning_config_map.tuning_config_map_name(name))
        uid = resource["metadata"]["uid"]
        is_owned = config_map is not None and any(
            reference.get("uid") == uid for reference in config_map["metadata"].get("ownerReferences") or []
        )
        return resource, dict(config_map.get("data") or {}) if config_map is not None and is_owned else None
    except (LookupError, TypeError, AttributeError):
        raise CommandError("the response of the API server is not a SpeculativeDeployment: use another context.") from None
    except ApiError as error:
        if error.status is None:
            raise CommandError(f"{error}: check the connection, or use another context.") from None
        raise CommandError(f"the API server returned {error.status} ({error}){_API_ERROR_HINTS.get(error.status, '.')}") from None
    finally:
        await cluster.close()
