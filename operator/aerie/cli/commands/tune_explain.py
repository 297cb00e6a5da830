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
from aerie.api.status import Balance, Gain, Status, Tried
from aerie.api.status import Setting as StatusSetting
from aerie.api.types.base import write_time
from aerie.cli.commands.preflight import Output
from aerie.cli.console import CommandError, out
from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import Kept
from aerie.rollout.revision.desired import shown
from aerie.terminal import plain
from aerie.tuning.recommendation import Advice


def explain(
    name: Annotated[str, typer.Argument(help="Name of the SpeculativeDeployment.")],
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="Its namespace. Default: the kubeconfig's.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: its current one.")] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="The kubeconfig. Default: $KUBECONFIG, else ~/.kube/config.")] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print it.")] = Output.TEXT,
) -> None:
    """Say why a resource's engines have the speculation setting that they have: the last decision, and what was done before."""
    document, data = asyncio.run(_read(name, namespace, kubeconfig, context))
    resource = SpeculativeDeployment.from_dict(document)
    kept = Kept.from_data(data or {})
    if output is Output.JSON:
        typer.echo(json.dumps(to_json(resource, kept), indent=2))
    else:
        out.print(plain("\n".join(account(resource, kept, datetime.now(UTC)))))


def to_json(resource: SpeculativeDeployment, kept: Kept | None) -> dict[str, Any]:
    """The same for a program; docs/tuning.md describes it."""
    spec, status = resource.spec.speculation, resource.status or Status()
    return {
        "namespace": resource.metadata.namespace or "default",
        "name": resource.metadata.name,
        "mode": spec.tuning.mode,
        "tokens": spec.tokens,
        "speculation": None if status.speculation is None else status.to_dict()["speculation"],
        "tuned": next((one.to_dict() for one in status.conditions if one.type == "Tuned"), None),
        "decision": None if kept is None else _decision(kept),
    }


def _decision(kept: Kept) -> dict[str, Any]:
    try:
        advice = Advice.from_dict(json.loads(kept.advice))
    except (ValueError, RecursionError):  # of another release: the explanation is there all the same
        advice = None
    predicted = None
    if advice is not None and advice.gain is not None:
        lower, estimate, upper = advice.gain
        predicted = {"estimate": estimate, "lower": lower, "upper": upper}
    return {
        "at": write_time(datetime.fromtimestamp(kept.at, tz=UTC)),
        "revision": advice.revision if advice is not None else None,
        "action": advice.action if advice is not None else None,
        "setting": shown(advice.setting).to_dict() if advice is not None and advice.setting is not None else None,
        "predicted": predicted,
        "reason": advice.reason if advice is not None else None,
        "explanation": kept.explanation,
    }


def account(resource: SpeculativeDeployment, kept: Kept | None, now: datetime) -> Iterator[str]:
    """The lines of it."""
    spec, status = resource.spec.speculation, resource.status or Status()
    told = status.speculation
    yield f"{resource.metadata.namespace or 'default'}/{resource.metadata.name}: tuning.mode {spec.tuning.mode}"
    if told is not None:
        yield f"  in force     {named(told.current)}" + _of_spec(told.chosen is not None, spec.tokens)
        if told.recommended is not None:
            yield f"  recommended  {named(told.recommended)}{_gain(told.predicted)}"
        if told.recommended_draft_sampling is not None:
            yield f"  recommended  draftSampling {told.recommended_draft_sampling}, for sampled traffic"
        if told.trial is not None:
            trial = told.trial
            since = f"{_ago(trial.started_at, now)} ({trial.purpose})"
            yield f"  under trial  {named(trial.setting)}{_gain(trial.predicted)}, since {since}"
        if told.why:
            yield f"  {told.why}"
    for one in status.conditions:
        if one.type == "Tuned":
            yield f"  Tuned={one.status} ({one.reason}): {one.message}"
    yield ""
    yield from _before(told.changes if told is not None else [], told.balance if told is not None else None, now)
    yield ""
    if spec.tuning.mode == "Off":
        yield "The mode is Off, so nothing is decided: set spec.speculation.tuning.mode to Recommend to be told, or to Auto."
    elif kept is None:
        interval = spec.tuning.interval.total_seconds() / 60
        yield (
            f"No decision has been written yet: the first one comes {interval:.0f} minutes after the first requests, if the "
            "operator runs and can read the pods' metrics."
        )
    else:
        at = datetime.fromtimestamp(kept.at, tz=UTC)
        yield f"The last decision, {at:%Y-%m-%d %H:%M} UTC, {_ago(at, now)}"
        yield ""
        yield kept.explanation.rstrip("\n")


def named(setting: StatusSetting) -> str:
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


def _of_spec(chosen: bool, tokens: int) -> str:
    return f", by tuning; the spec says {tokens}" if chosen else ", by the spec"


def _before(changes: list[Tried], balance: Balance | None, now: datetime) -> Iterator[str]:
    if not changes:
        yield "Nothing was tried before."
        return
    yield "What was tried before, the newest first"
    for one in changes:
        yield f"  {_ago(one.ended_at, now):<12} {named(one.was)} to {named(one.tried)} ({one.purpose}): {one.result}"
        yield f"               predicted {_figures(one.predicted)}, realised {_figures(one.realised)}"
    if balance is not None:
        yield (
            f"  Together, in hours of one replica: {balance.gained:.1f} gained, {balance.spent:.1f} spent on trials, "
            f"{balance.net:+.1f} net, as of {_ago(balance.as_of, now)}; now {100 * balance.rate:.1f} % are saved."
        )


def _gain(found: Gain | None) -> str:
    return "" if found is None else f", predicted {_figures(found)}"


def _figures(found: Gain | None) -> str:
    if found is None:
        return "unknown"
    bounds = "" if found.lower is None or found.upper is None else f" ({100 * found.lower:+.1f} to {100 * found.upper:+.1f})"
    return f"{100 * found.estimate:+.1f} %{bounds}"


def _ago(moment: datetime, now: datetime) -> str:
    passed = max(now - moment, timedelta())
    if passed < timedelta(hours=2):
        return f"{passed.total_seconds() / 60:.0f} min ago"
    if passed < timedelta(days=2):
        return f"{passed.total_seconds() / 3600:.0f} h ago"
    return f"{passed.days} days ago"


_WAYS_OUT = {
    401: ": log in anew, or choose a context whose user it knows.",
    403: ": ask for the right to get speculativedeployments.aerie.dev and configmaps in that namespace.",
}


async def _read(
    name: str, namespace: str | None, kubeconfig: str | None, context: str | None
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The resource, and the data of its ConfigMap."""
    # Imported here: the other commands do not need the cluster's client.
    from aerie.controller.kubernetes.client import CONFIG_MAPS, RESOURCES, ApiError, Cluster
    from aerie.controller.kubernetes.kubeconfig import Access, ConnectError

    try:
        cluster = await Cluster.connect(access=Access(kubeconfig, context))
    except ConnectError as error:
        raise CommandError(str(error)) from None
    try:
        where = namespace or cluster.namespace
        found = await cluster.get(RESOURCES, where, name)
        if found is None:
            raise CommandError(f"there is no SpeculativeDeployment {where}/{name}: give its namespace with -n.")
        kept = await cluster.get(CONFIG_MAPS, where, tuning_config_map.name(name))
        owner = found["metadata"]["uid"]
        mine = kept is not None and any(one.get("uid") == owner for one in kept["metadata"].get("ownerReferences") or [])
        return found, dict(kept.get("data") or {}) if kept is not None and mine else None
    except (LookupError, TypeError, AttributeError):
        raise CommandError("the API server answered with what is no SpeculativeDeployment: choose another context.") from None
    except ApiError as error:
        if error.status is None:
            raise CommandError(f"{error}: see to the connection, or choose another context.") from None
        raise CommandError(f"the API server answered with {error.status} ({error}){_WAYS_OUT.get(error.status, '.')}") from None
    finally:
        await cluster.close()
