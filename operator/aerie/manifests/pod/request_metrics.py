"""Flags by which an engine's answers have the counts that a shadow evaluation compares.

They are added to pods of revisions that start while `spec.rollout.analysis.shadow` has a source, and to control pods. Revisions
do not depend on them, and templates of existing Deployments never change. So a change of shadow restarts no pod.

Guarantees: pure; a flag of the user is left as it is. Not guaranteed: that the image has the flags; its version is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie.engine.arguments import parse_flags
from aerie.engine.releases import Feature, Version, describe_missing_feature, supports
from aerie.manifests import naming

SPECULATION_FLAG, TIME_FLAG = "--per-request-spec-decode-metrics", "--enable-per-request-metrics"
_TIME_FLAGS = (TIME_FLAG, "--no-enable-per-request-metrics", "--disable-per-request-metrics", "--no-disable-per-request-metrics")
_RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"


def find_request_metrics_obstacle(version: Version, pod_template: Mapping[str, Any]) -> str:
    """Return why answers of these pods would have no counts of speculation, as sentences; empty where they would.

    `pod_template`: that of the engine, with the user's arguments and variables.
    """
    return " ".join(_obstacles(version, _engine_container(pod_template)))


def add_request_metrics(pod_template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template with the flags that it does not have. Raises ArgumentError for arguments that cannot be parsed."""
    names = {flag.name for flag in parse_flags(_engine_arguments(pod_template))}
    added = [] if any(map(_is_speculation_flag, names)) else [f"{SPECULATION_FLAG}=summary"]
    if not names.intersection(_TIME_FLAGS):
        added.append(TIME_FLAG)
    spec = pod_template["spec"]
    containers = [
        {**container, "args": [*(container.get("args") or []), *added]} if _is_engine(container) else container
        for container in spec["containers"]
    ]
    return {**pod_template, "spec": {**spec, "containers": containers}}


def has_request_metrics(pod_template: Mapping[str, Any]) -> bool:
    """Return whether answers of pods with this template have counts of speculation."""
    return any(_is_speculation_flag(flag.name) for flag in parse_flags(_engine_arguments(pod_template)))


def without_request_metrics(arguments: Sequence[str]) -> list[str]:
    """Return an engine's arguments without the flags that `add_request_metrics` adds: they change no answer."""
    return [argument for argument in arguments if argument not in (f"{SPECULATION_FLAG}=summary", TIME_FLAG)]


def _obstacles(version: Version, engine: Mapping[str, Any]) -> Iterator[str]:
    if not supports(version, Feature.REQUEST_SPECULATION_METRICS):
        yield describe_missing_feature(version, Feature.REQUEST_SPECULATION_METRICS)
    arguments = engine.get("args") or []
    if "--speculative-config" not in arguments:
        yield "The revision drafts no tokens: there is no drafter to evaluate."
    for flag in parse_flags(arguments):
        if _is_speculation_flag(flag.name) and flag.values not in (("summary",), ("detailed",)):
            value = " ".join(flag.values) or "nothing"
            yield f"spec.engine.args sets {SPECULATION_FLAG} to {value}: remove it, or set summary."
    for variable in engine.get("env") or []:
        if variable["name"] == _RUST_FRONTEND and variable.get("value") != "0":
            yield (
                f"spec.engine.env sets {_RUST_FRONTEND}, and answers of vLLM's front end in Rust have no counts of speculation: "
                "set it to 0."
            )


def _is_speculation_flag(name: str) -> bool:
    """Return whether vLLM takes the name as the flag: argparse completes its beginning."""
    return len(name) > len("--per-request-") and SPECULATION_FLAG.startswith(name)


def _is_engine(container: Mapping[str, Any]) -> bool:
    return bool(container["name"] == naming.ENGINE_CONTAINER)


def _engine_container(pod_template: Mapping[str, Any]) -> Mapping[str, Any]:
    containers: Sequence[Mapping[str, Any]] = pod_template["spec"].get("containers") or ()
    return next(filter(_is_engine, containers), {})


def _engine_arguments(pod_template: Mapping[str, Any]) -> list[str]:
    return list(_engine_container(pod_template).get("args") or [])
