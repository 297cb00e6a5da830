"""From a plain Kubernetes workload that runs vLLM to what preflight looks at, for those who do not run Aerie yet.

    pod template  ─►  container  ─►  words behind `vllm serve`  ─►  model, drafter, arguments  ─►  Subject

Guarantees: nothing is guessed. What decides about the checks and cannot be read ends with a CommandError that names the option
which stands in for it; the rest that is not known here is said in a remark. Values of unknown arguments and of variables, which
may be secrets, are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.cli.console import CommandError
from aerie.cli.inputs.gpus import count_gpus, read_gpu_memory_bytes
from aerie.cli.inputs.model_location import HubReader, HubRepository, ModelLocation, parse_hub_repository, read_model_location
from aerie.cli.inputs.preflight_input import PreflightOverrides
from aerie.cli.inputs.shell_command import (
    ExpansionBudget,
    VllmCommand,
    expand_kubernetes_variables,
    extract_shell_script,
    find_serve_arguments,
    find_vllm_commands,
    is_fully_expanded,
)
from aerie.engine import command_line, releases
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.preflight import PreflightInput
from aerie.engine.serve_command import ServeCommand, parse_serve_command

WORKLOAD_KINDS = frozenset({"DaemonSet", "Deployment", "Pod", "ReplicaSet", "StatefulSet"})
_DEFAULT_SPECULATIVE_TOKENS = 3
_COMMAND_HINT = "write the command line of vLLM as command and args of the container."


@dataclass(frozen=True)
class Workload:
    """A container that runs vLLM."""

    name: str
    """For sentences."""
    image: str
    serve_arguments: list[str]
    """Those behind `vllm serve`."""
    environment: Mapping[str, str]
    """A value that is not known here is one for `is_known`."""
    has_env_from: bool
    """Whether there are variables of which not even the names are known here."""
    limits: Mapping[str, str]
    pod_spec: Mapping[str, Any]


# -- In a manifest -------------------------------------------------------------------------------------------------------


def find_workloads(documents: Iterable[Mapping[str, Any]]) -> list[Workload]:
    """The containers that run vLLM. Raises CommandError: one seems to, and cannot be read."""
    room = ExpansionBudget()
    return [
        workload
        for document in documents
        for name, container, pod in _iter_containers(document)
        if (workload := _read_workload(name, container, pod, room)) is not None
    ]


def _iter_containers(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    if document.get("kind") not in WORKLOAD_KINDS:
        return
    name = f"{document['kind']}/{_read_mapping('', document, 'metadata').get('name')}"
    owner = document if document["kind"] == "Pod" else _read_mapping(name, _read_mapping(name, document, "spec"), "template")
    pod = _read_mapping(name, owner, "spec")
    for container in _read_list(name, pod, "containers"):
        if isinstance(container, dict):
            yield f"{name}, container {container.get('name')}", container, pod


def _read_workload(
    name: str, container: Mapping[str, Any], pod_spec: Mapping[str, Any], budget: ExpansionBudget
) -> Workload | None:
    image = container.get("image")
    image = image if isinstance(image, str) else ""
    if "vllm" not in image and "vllm" not in json.dumps([container.get("command"), container.get("args")]):
        return None
    command, args = _read_strings(name, container, "command"), _read_strings(name, container, "args")
    try:
        environment = _read_environment(name, container, budget)
        command, args = ([expand_kubernetes_variables(word, environment, budget) for word in words] for words in (command, args))
        engine = _find_vllm_command(
            name, command, args, environment, budget, is_official_image=releases.is_published_image(image)
        )
    except ValueError as error:
        raise CommandError(f"{name}: its command cannot be read ({error}): {_COMMAND_HINT}") from None
    if engine is None:
        return None
    limits = _read_mapping(name, _read_mapping(name, container, "resources"), "limits")
    return Workload(
        name=name,
        image=image,
        serve_arguments=engine.serve_arguments,
        environment=engine.environment,
        has_env_from=bool(container.get("envFrom")),
        limits={key: str(value) for key, value in limits.items()},
        pod_spec=pod_spec,
    )


def _find_vllm_command(
    name: str,
    command: list[str],
    args: list[str],
    environment: Mapping[str, str],
    budget: ExpansionBudget,
    *,
    is_official_image: bool,
) -> VllmCommand | None:
    """The words behind `vllm serve`, and their environment. None: the container does not run it, as far as is visible.

    Raises CommandError; ValueError: its script cannot be read.
    """
    if (script := extract_shell_script([*command, *args])) is not None:
        started = find_vllm_commands(script, environment, budget)
        if len(started) > 1:
            raise CommandError(f"{name}: its script starts vLLM more than once: {_COMMAND_HINT}")
        if not started and is_official_image:
            raise CommandError(f"{name}: its script starts no vLLM that can be seen: {_COMMAND_HINT}")
        return started[0] if started else None
    if (words := find_serve_arguments([*command, *args])) is not None:
        return VllmCommand(words, environment)
    if not command and (is_official_image or _looks_like_vllm_arguments(args)):
        return VllmCommand(args, environment)  # to the entrypoint of the image, which is `vllm serve`
    if is_official_image:
        raise CommandError(f"{name}: it runs {command[0]}, which is not read: {_COMMAND_HINT}")
    return None


def _looks_like_vllm_arguments(args: Sequence[str]) -> bool:
    """Whether they are vLLM's, of an image whose name does not tell that it is."""
    return any(arg == "--model" or arg.startswith("--model=") for arg in args) or ("/" in args[0] if args else False)


def _read_strings(name: str, container: Mapping[str, Any], key: str) -> list[str]:
    entries = _read_list(name, container, key)
    for place, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise CommandError(f"{name}: {key}[{place}] is {json.dumps(entry)[:40]}: write a text, in quotes.")
    return entries


def _read_list(name: str, document: Mapping[str, Any], key: str) -> list[Any]:
    found = document.get(key)
    if not isinstance(found, list | None):
        raise CommandError(f"{name}: {key} is {json.dumps(found)[:40]}: write a list.")
    return found or []


def _read_mapping(name: str, document: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    if not isinstance(found, dict | None):
        raise CommandError(f"{name}: {key} is {json.dumps(found)[:40]}: write a table.")
    return found or {}


def _read_environment(name: str, container: Mapping[str, Any], budget: ExpansionBudget) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in _read_list(name, container, "env"):
        variable = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(variable, str):
            raise CommandError(f"{name}: env has an entry without a name: write one.")
        value = entry.get("value")
        unknown = entry.get("valueFrom") is not None
        found[variable] = (
            f"$({variable})" if unknown else expand_kubernetes_variables(value if isinstance(value, str) else "", found, budget)
        )
    return found


# -- To a subject --------------------------------------------------------------------------------------------------------


def build_input_from_workload(
    workload: Workload, overrides: PreflightOverrides, hub_reader: HubReader
) -> tuple[PreflightInput, tuple[str, ...]]:
    """What the container runs, and what the user should know about how it was read. Raises CommandError, CheckpointError."""
    name = workload.name
    try:
        line = parse_serve_command(workload.serve_arguments)
    except ArgumentError as error:
        raise CommandError(str(error).replace("spec.engine.args", name)) from None
    engine = _resolve_version(workload, overrides)
    tag = "" if overrides.vllm_version else f"; the version of vLLM, {engine.version}, is that of its image's tag"
    remarks = [
        f"checked is {name}{tag}.",
        *engine.warnings,
        *(f"{name}: {sentence}." for sentence in _iter_unknown_values(workload, line)),
    ]
    target = _read_model(name, "serves", line.model, line.revision, overrides.target, "--target", hub_reader)
    speculative = dict(line.speculative_config)
    if "model" not in speculative and overrides.drafter is not None:
        tokens = speculative.get("num_speculative_tokens", _DEFAULT_SPECULATIVE_TOKENS)
        speculative = {"method": "eagle3", "num_speculative_tokens": tokens}
        remarks.append(f"{name} has no drafter: checked is what --drafter names, with {json.dumps(speculative)}.")
    drafter = None
    if "model" in speculative or overrides.drafter is not None:
        own, revision = speculative.get("model"), speculative.get("revision")
        drafter = _read_model(name, "drafts with", own, revision, overrides.drafter, "--drafter", hub_reader)
        if "num_speculative_tokens" not in speculative:
            remarks.append(
                f"{name}: --speculative-config has no num_speculative_tokens: vLLM starts only if the drafter's config has one."
            )
    elif not speculative:
        _reject_speculators_checkpoint(name, target, line)
        remarks.append(f"{name} has no --speculative-config: the engine runs without a drafter.")
    else:
        method = speculative.get("method", "of no name")
        remarks.append(f"{name}: method {method} drafts without a model of its own, and the checks of drafters do not apply.")
    if sentence := command_line.check_lossless(speculative):
        remarks.append(f"{name}: {sentence}")
    gpus, how = count_gpus(workload.limits, workload.pod_spec)
    subject = PreflightInput(
        target=target,
        drafter=drafter,
        version=engine.version,
        speculative_config=speculative,
        arguments=line.arguments,
        environment={name: value for name, value in workload.environment.items() if is_fully_expanded(value)},
        image=workload.image,
        gpu_memory_bytes=overrides.gpu_bytes or read_gpu_memory_bytes(workload.limits, workload.pod_spec),
        gpu_count=None if line.multi_pod_flag else gpus,
        gpu_resource=f"{how} of several pods" if line.multi_pod_flag and how else how,
    )
    return subject, tuple(remarks)


def _resolve_version(workload: Workload, overrides: PreflightOverrides) -> releases.EngineVersion:
    if overrides.vllm_version:
        try:
            releases.Version.parse(overrides.vllm_version)
        except releases.VersionError as error:
            raise CommandError(f"--vllm: {error}") from None
    found = releases.resolve_engine_version("" if overrides.vllm_version else workload.image, overrides.vllm_version)
    if isinstance(found, releases.UnknownVersion):
        raise CommandError(
            f"{workload.name}: the image {workload.image} does not tell its version of vLLM: give it with --vllm, such as "
            f"--vllm {releases.NEWEST_VERIFIED_VERSION}."
        )
    return found


def _iter_unknown_values(workload: Workload, serve_command: ServeCommand) -> Iterator[str]:
    if workload.has_env_from:
        yield "variables by envFrom are not known here"
    for name, value in workload.environment.items():
        if name.startswith("VLLM_") and not is_fully_expanded(value):
            yield f"the value of the variable {name} is not known here"
    last = ""
    for word in workload.serve_arguments:
        last = word.partition("=")[0] if word.startswith("-") else last
        if not is_fully_expanded(word):
            yield f"the value of {last or 'an argument'} is not known here"
    if serve_command.has_config_file:
        yield "--config names a file of the pod: flags in it are not known here"
    if serve_command.multi_pod_flag:
        yield f"{serve_command.multi_pod_flag} spreads an engine over several pods: their GPUs are not counted"


def _read_model(
    name: str,
    verb: str,
    model: str | None,
    revision: str | None,
    override: ModelLocation | None,
    option: str,
    hub_reader: HubReader,
) -> Checkpoint:
    own = f"{model}@{revision}" if revision else model
    if override is not None:
        return read_model_location(override, hub_reader, own)
    instead = f"give its files with {option}, a folder or OWNER/NAME@COMMIT"
    if model is None:
        raise CommandError(f"{name} names no model: {instead.replace('its files', 'one')}.")
    if not is_fully_expanded(model) or (revision and not is_fully_expanded(revision)):
        raise CommandError(f"{name} {verb} {own}, which is not known here: {instead}.")
    if parse_hub_repository(f"{model}@{revision or 'main'}") is None:
        raise CommandError(f"{name} {verb} {model}, a path in the pod: {instead}.")
    return read_model_location(HubRepository(model, revision), hub_reader)


def _reject_speculators_checkpoint(name: str, target: Checkpoint, serve_command: ServeCommand) -> None:
    """vLLM serves the verifier that such a checkpoint names, with the checkpoint as its drafter."""
    config = target.config.get("speculators_config")
    if not isinstance(config, dict):
        return
    verifier = config.get("verifier")
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    own = serve_command.model or target.name
    raise CommandError(
        f"{name}: {own} is a drafter that names its target, {named or 'of no name'}: give "
        f"--target {named or 'OWNER/NAME'} --drafter {own}."
    )
