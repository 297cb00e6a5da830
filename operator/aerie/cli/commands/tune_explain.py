"""`aerie tune explain`: why a resource's engines have the speculation setting that they have, from what the operator has written.

Read are the resource's status and the ConfigMap of its tuner, with the rights of the kubeconfig; nothing is written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from aerie.api import SpeculativeDeployment
from aerie.api.status import PerformanceGain, SettingStatus, Status, TrialRecord, TuningSavings
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
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="Its namespace. Default: the kubeconfig's.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: its current one.")] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="The kubeconfig. Default: $KUBECONFIG, else ~/.kube/config.")] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="How to print it.")] = OutputFormat.TEXT,
) -> None:
    """Say why a resource's engines have the speculation setting that they have: the last decision, and what was done before."""
    document, data = asyncio.run(_read_resource_and_record(name, namespace, kubeconfig, context))
    resource = SpeculativeDeployment.from_dict(document)
    kept = TuningRecord.from_data(data or {})
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(explanation_to_json(resource, kept), indent=2))
    else:
        out.print(sanitize_text("\n".join(render_explanation(resource, kept, datetime.now(UTC)))))


def explanation_to_json(resource: SpeculativeDeployment, record: TuningRecord | None) -> dict[str, Any]:
    """The same for a program; docs/tuning.md describes it."""
    spec, status = resource.spec.speculation, resource.status or Status()
    return {
        "namespace": resource.metadata.namespace or "default",
        "name": resource.metadata.name,
        "mode": spec.tuning.mode,
        "tokens": spec.tokens,
        "speculation": None if status.speculation is None else status.to_dict()["speculation"],
        "tuned": next((one.to_dict() for one in status.conditions if one.type == "Tuned"), None),
        "decision": None if record is None else _decision_to_json(record),
    }


def _decision_to_json(record: TuningRecord) -> dict[str, Any]:
    try:
        advice = Recommendation.from_dict(json.loads(record.recommendation))
    except (ValueError, RecursionError):  # of another release: the explanation is there all the same
        advice = None
    predicted = None
    if advice is not None and advice.predicted_gain is not None:
        lower, estimate, upper = advice.predicted_gain
        predicted = {"estimate": estimate, "lower": lower, "upper": upper}
    return {
        "at": format_timestamp(datetime.fromtimestamp(record.decision_time, tz=UTC)),
        "revision": advice.revision if advice is not None else None,
        "action": advice.action if advice is not None else None,
        "setting": build_status_setting(advice.setting).to_dict() if advice is not None and advice.setting is not None else None,
        "predicted": predicted,
        "reason": advice.reason if advice is not None else None,
        "explanation": record.explanation,
    }


def render_explanation(resource: SpeculativeDeployment, record: TuningRecord | None, now: datetime) -> Iterator[str]:
    """The lines of it."""
    spec, status = resource.spec.speculation, resource.status or Status()
    told = status.speculation
    yield f"{resource.metadata.namespace or 'default'}/{resource.metadata.name}: tuning.mode {spec.tuning.mode}"
    if told is not None:
        yield f"  in force     {format_setting(told.current)}" + _format_setting_origin(told.chosen is not None, spec.tokens)
        if told.recommended is not None:
            yield f"  recommended  {format_setting(told.recommended)}{_format_predicted_gain(told.predicted)}"
        if told.recommended_draft_sampling is not None:
            yield f"  recommended  draftSampling {told.recommended_draft_sampling}, for sampled traffic"
        if told.trial is not None:
            trial = told.trial
            since = f"{_format_age(trial.started_at, now)} ({trial.purpose})"
            yield f"  under trial  {format_setting(trial.setting)}{_format_predicted_gain(trial.predicted)}, since {since}"
        if told.why:
            yield f"  {told.why}"
    for one in status.conditions:
        if one.type == "Tuned":
            yield f"  Tuned={one.status} ({one.reason}): {one.message}"
    yield ""
    yield from _render_trials(told.changes if told is not None else [], told.balance if told is not None else None, now)
    yield ""
    if spec.tuning.mode == "Off":
        yield "The mode is Off, so nothing is decided: set spec.speculation.tuning.mode to Recommend to be told, or to Auto."
    elif record is None:
        interval = spec.tuning.interval.total_seconds() / 60
        yield (
            f"No decision has been written yet: the first one comes {interval:.0f} minutes after the first requests, if the "
            "operator runs and can read the pods' metrics."
        )
    else:
        at = datetime.fromtimestamp(record.decision_time, tz=UTC)
        yield f"The last decision, {at:%Y-%m-%d %H:%M} UTC, {_format_age(at, now)}"
        yield ""
        yield record.explanation.rstrip("\n")


def format_setting(setting: SettingStatus) -> str:
    """A setting as a person would say it."""
    match setting.mode:
        case "Off":
            return "no speculation"
        case "Static":
            return f"K={setting.tokens}"
        case "Adaptive":
            return f"adaptive verification up to {setting.tokens}"
        case "Schedule":
            return "schedule " + ",".join(f"{one.first}-{one.last}:{one.tokens}" for one in setting.schedule or ())


def _format_setting_origin(is_tuned: bool, tokens: int) -> str:
    return f", by tuning; the spec says {tokens}" if is_tuned else ", by the spec"


def _render_trials(trials: list[TrialRecord], savings: TuningSavings | None, now: datetime) -> Iterator[str]:
    if not trials:
        yield "Nothing was tried before."
        return
    yield "What was tried before, the newest first"
    for one in trials:
        yield f"  {_format_age(one.ended_at, now):<12} {format_setting(one.was)} to {format_setting(one.tried)} ({one.purpose}): {one.result}"
        yield f"               predicted {_format_gain(one.predicted)}, realised {_format_gain(one.realised)}"
    if savings is not None:
        yield (
            f"  Together, in hours of one replica: {savings.gained:.1f} gained, {savings.spent:.1f} spent on trials, "
            f"{savings.net:+.1f} net, as of {_format_age(savings.as_of, now)}; now {100 * savings.rate:.1f} % are saved."
        )


def _format_predicted_gain(gain: PerformanceGain | None) -> str:
    return "" if gain is None else f", predicted {_format_gain(gain)}"


def _format_gain(gain: PerformanceGain | None) -> str:
    if gain is None:
        return "unknown"
    bounds = "" if gain.lower is None or gain.upper is None else f" ({100 * gain.lower:+.1f} to {100 * gain.upper:+.1f})"
    return f"{100 * gain.estimate:+.1f} %{bounds}"


def _format_age(time: datetime, now: datetime) -> str:
    passed = max(now - time, timedelta())
    if passed < timedelta(hours=2):
        return f"{passed.total_seconds() / 60:.0f} min ago"
    if passed < timedelta(days=2):
        return f"{passed.total_seconds() / 3600:.0f} h ago"
    return f"{passed.days} days ago"


_API_ERROR_HINTS = {
    401: ": log in anew, or choose a context whose user it knows.",
    403: ": ask for the right to get speculativedeployments.aerie.dev and configmaps in that namespace.",
}


async def _read_resource_and_record(
    name: str, namespace: str | None, kubeconfig: str | None, context: str | None
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The resource, and the data of its ConfigMap."""
    # Imported here: the other commands do not need the cluster's client.
    from aerie.controller.kubernetes.client import CONFIG_MAPS, SPECULATIVE_DEPLOYMENTS, ApiError, Cluster
    from aerie.controller.kubernetes.kubeconfig import ConnectError, KubeconfigSelection

    try:
        cluster = await Cluster.connect(selection=KubeconfigSelection(kubeconfig, context))
    except ConnectError as error:
        raise CommandError(str(error)) from None
    try:
        where = namespace or cluster.namespace
        found = await cluster.get(SPECULATIVE_DEPLOYMENTS, where, name)
        if found is None:
            raise CommandError(f"there is no SpeculativeDeployment {where}/{name}: give its namespace with -n.")
        kept = await cluster.get(CONFIG_MAPS, where, tuning_config_map.tuning_config_map_name(name))
        owner = found["metadata"]["uid"]
        mine = kept is not None and any(one.get("uid") == owner for one in kept["metadata"].get("ownerReferences") or [])
        return found, dict(kept.get("data") or {}) if kept is not None and mine else None
    except (LookupError, TypeError, AttributeError):
        raise CommandError("the API server answered with what is no SpeculativeDeployment: choose another context.") from None
    except ApiError as error:
        if error.status is None:
            raise CommandError(f"{error}: see to the connection, or choose another context.") from None
        raise CommandError(
            f"the API server answered with {error.status} ({error}){_API_ERROR_HINTS.get(error.status, '.')}"
        ) from None
    finally:
        await cluster.close()
