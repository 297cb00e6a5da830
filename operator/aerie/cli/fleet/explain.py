"""Why a resource serves with its drafter and its speculation setting: the last verdict in numbers, and the tuner's last decision.

It reads the resource and the ConfigMap of its tuner, which `aerie.manifests.tuning_config_map` describes.

Guarantee: pure; a record of another release is shown as far as it can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from aerie.cli.fleet import screens
from aerie.cli.fleet.resource_view import Object, ResourceView, format_age, format_setting, parse_time


def tuning_config_map_name(view: ResourceView) -> str:
    """Return the name of the ConfigMap with the tuner's last decision."""
    return f"{view.name}-aerie-tuning"


def read_tuning_record(view: ResourceView, config_map: Object | None) -> Mapping[str, str] | None:
    """Return the tuner's record; None if there is none of this resource."""
    if config_map is None:
        return None
    owners = config_map["metadata"].get("ownerReferences") or ()
    data: Mapping[str, str] = config_map.get("data") or {}
    is_record = (
        any(owner.get("uid") == view.metadata["uid"] for owner in owners) and {"decisionTime", "explanation"} <= data.keys()
    )
    return data if is_record else None


# --------------------------------------------------------------------------------------------------------------------- text
def render_explanation(view: ResourceView, record: Mapping[str, str] | None, now: datetime, *, width: int) -> RenderableType:
    """Return the explanation. `width`: of the terminal."""
    parts: list[RenderableType] = [
        _heading("Drafter"),
        *_indent(_describe_drafter(view)),
        Text(),
        _heading("Last verdict"),
    ]
    if view.analysis:
        parts += [*_indent(_describe_verdict(view)), Text(), screens.render_comparisons(view, width=width, shows_all=True)]
    else:
        parts += _indent(["No revision has been compared with another yet."])
    parts += [Text(), _heading("Speculation setting"), *_indent(_describe_setting(view, now))]
    parts += [Text(), _heading("Last decision of tuning"), *_indent(_describe_decision(view, record, now))]
    return Group(*parts)


def _heading(text: str) -> Text:
    return Text(text.upper(), "bold")


def _indent(lines: Iterator[str] | list[str]) -> list[RenderableType]:
    return [Padding(Text(screens.clean(line)), (0, 0, 0, 2)) for line in lines]


def _describe_drafter(view: ResourceView) -> Iterator[str]:
    stable = next((arm for arm in view.arms if arm.role == "stable"), None)
    if stable is None:
        yield "No revision serves yet."
        return
    yield f"{stable.drafter or 'No drafter'}, revision {view.served_revision}"
    record = next(
        (item for item in view.history if item["revision"] == view.served_revision and item["result"] == "Promoted"), None
    )
    if record is not None:
        yield f"since {_format_time(record['completionTime'])}"
    reference = (view.status.get("stable") or {}).get("referenceAcceptanceLength")
    if stable.acceptance_length is not None:
        compared = f"; the reference is {reference:.2f}" if reference is not None else ""
        yield f"acceptance length {stable.acceptance_length:.2f}{compared}"


def _describe_verdict(view: ResourceView) -> Iterator[str]:
    yield f"{view.analysis['verdict']}: {view.analysis.get('message') or 'no reason is recorded.'}"


def _describe_setting(view: ResourceView, now: datetime) -> Iterator[str]:
    speculation: Object = view.status.get("speculation") or {}
    spec: Object = view.spec.get("speculation") or {}
    if current := speculation.get("current"):
        tokens = spec.get("numSpeculativeTokens")
        origin = f"by tuning; the spec has K={tokens}" if speculation.get("applied") else "by the spec"
        yield f"in use       {_name_setting(current)}, {origin}"
    if recommended := speculation.get("recommended"):
        yield f"recommended  {_name_setting(recommended)}{_format_predicted(speculation.get('predicted'))}"
    if sampling := speculation.get("recommendedDraftSampling"):
        yield f"recommended  draftSampling {sampling}, for sampled traffic"
    if trial := speculation.get("trial"):
        since = f"since {_format_time(trial['startTime'])} ({trial['purpose']})"
        yield f"under trial  {_name_setting(trial['setting'])}{_format_predicted(trial.get('predicted'))}, {since}"
    if message := speculation.get("message"):
        yield str(message)
    if tuned := view.condition("SpeculationTuned"):
        yield f"SpeculationTuned={tuned['status']} ({tuned['reason']}): {tuned.get('message')}"
    if savings := speculation.get("savings"):
        yield (
            f"replica-hours: {savings.get('saved', 0):.1f} saved, {savings.get('spent', 0):.1f} spent on trials, "
            f"{savings.get('net', 0):+.1f} net, as of {format_age(parse_time(savings['updateTime']), now)} ago; "
            f"rate since then {100 * savings.get('currentRate', 0):.1f} %"
        )
    trials = speculation.get("trials") or ()
    count = "1 trial" if len(trials) == 1 else f"{len(trials)} trials"
    yield f"{count} in the history (kubectl aerie history)" if trials else "no trials yet"


def _describe_decision(view: ResourceView, record: Mapping[str, str] | None, now: datetime) -> Iterator[str]:
    tuning: Object = (view.spec.get("speculation") or {}).get("tuning") or {}
    if tuning.get("mode") == "Off":
        yield "Tuning is off: set spec.speculation.tuning.mode to Recommend or Auto."
    elif record is None:
        yield (
            f"No decision yet: the first one follows {tuning.get('decisionInterval', 'an interval')} after the first "
            "requests, if the operator is running and can read the pods' metrics."
        )
    else:
        yield f"{_format_time(record['decisionTime'])}, {format_age(parse_time(record['decisionTime']), now)} ago"
        yield from record["explanation"].rstrip("\n").splitlines()


def _name_setting(setting: Object) -> str:
    match setting.get("mode"):
        case "Off":
            return "no speculation"
        case "Static":
            return f"K={format_setting(setting)}"
        case "Adaptive":
            return f"adaptive verification up to {setting.get('numSpeculativeTokens')}"
        case _:
            return f"schedule {format_setting(setting)}"


def _format_predicted(gain: Object | None) -> str:
    return f", predicted {screens.format_gain(gain)}" if gain else ""


def _format_time(text: str) -> str:
    time = parse_time(text)
    return f"{time:%Y-%m-%d %H:%M} UTC" if time is not None else "an unknown time"


# ---------------------------------------------------------------------------------------------------------------- for programs
def build_explanation_document(view: ResourceView, record: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the explanation for programs; docs/how-to/cli.md describes it."""
    speculation: Object = view.spec.get("speculation") or {}
    analysis = {name: value for name, value in view.analysis.items() if name not in ("state", "parameters")}
    return {
        "namespace": view.namespace,
        "name": view.name,
        "servedRevision": view.served_revision or None,
        "analysis": analysis or None,
        "mode": (speculation.get("tuning") or {}).get("mode"),
        "numSpeculativeTokens": speculation.get("numSpeculativeTokens"),
        "speculation": view.status.get("speculation"),
        "condition": view.condition("SpeculationTuned") or None,
        "decision": None if record is None else _build_decision(record),
    }


def _build_decision(record: Mapping[str, str]) -> dict[str, Any]:
    try:
        recommendation = json.loads(record.get("recommendation", ""))
    except (ValueError, RecursionError):
        recommendation = None
    content: Object = recommendation if isinstance(recommendation, dict) else {}
    gain = content.get("predicted_gain")
    predicted = dict(zip(("lower", "estimate", "upper"), gain, strict=False)) if isinstance(gain, list) else None
    return {
        "decisionTime": record["decisionTime"],
        "revision": content.get("revision"),
        "action": content.get("action"),
        "setting": _convert_setting(content.get("setting")),
        "predicted": predicted,
        "reason": content.get("reason"),
        "explanation": record["explanation"],
    }


def _convert_setting(setting: Any) -> dict[str, Any] | None:
    """Return a recommended setting in the form of the status; None for anything else."""
    if not isinstance(setting, dict) or "mode" not in setting:
        return None
    document = {"mode": setting["mode"], "numSpeculativeTokens": setting.get("tokens", 0)}
    names = ("minBatchSize", "maxBatchSize", "numSpeculativeTokens")
    if isinstance(tiers := setting.get("tiers"), list):
        document["schedule"] = [dict(zip(names, tier, strict=False)) for tier in tiers]
    return document
