"""Builds the input of preflight from a plain Kubernetes workload that runs vLLM, for users who do not run Aerie yet.

    pod template  ─►  container  ─►  arguments of `vllm serve`  ─►  model, drafter, arguments  ─►  PreflightInput

Guarantees: nothing is guessed. A value that decides a check and cannot be read is a CommandError with the option that replaces
it; other unknown values are listed in notes. Values of unknown arguments and of variables, which may be secrets, are not
repeated.
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
_COMMAND_HINT = "set the command line of vLLM as command and args of the container."


@dataclass(frozen=True)
class Workload:
    """A container that runs vLLM."""

    name: str
    """Name for messages."""
    image: str
    serve_arguments: list[str]
    """Arguments of `vllm serve`."""
    environment: Mapping[str, str]
    """Variables of the container; `is_fully_expanded` tells whether a value is known."""
    has_env_from: bool
    """Whether there are variables of unknown name."""
    limits: Mapping[str, str]
    pod_spec: Mapping[str, Any]


# -- Manifest ------------------------------------------------------------------------------------------------------------


def find_workloads(documents: Iterable[Mapping[str, Any]]) -> list[Workload]:
    """Return the containers that run vLLM. Raises CommandError: a container seems to run it, and cannot be read."""
    budget = ExpansionBudget()
    return [
        workload
        for document in documents
        for name, container, pod_spec in _iter_containers(document)
        if (workload := _read_workload(name, container, pod_spec, budget)) is not None
    ]


def _iter_containers(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    if document.get("kind") not in WORKLOAD_KINDS:
        return
    name = f"{document['kind']}/{_read_mapping('', document, 'metadata').get('name')}"
    owner = document if document["kind"] == "Pod" else _read_mapping(name, _read_mapping(name, document, "spec"), "template")
    pod_spec = _read_mapping(name, owner, "spec")
    for container in _read_list(name, pod_spec, "containers"):
        if isinstance(container, dict):
            yield f"{name}, container {container.get('name')}", container, pod_spec


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
        vllm_command = _find_vllm_command(
            name, command, args, environment, budget, is_official_image=releases.is_published_image(image)
        )
    except ValueError as error:
        raise CommandError(f"{name}: its command cannot be read ({error}): {_COMMAND_HINT}") from None
    if vllm_command is None:
        return None
    limits = _read_mapping(name, _read_mapping(name, container, "resources"), "limits")
    return Workload(
        name=name,
        image=image,
        serve_arguments=vllm_command.serve_arguments,
        environment=vllm_command.environment,
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
    """Return the arguments of `vllm serve`, and their environment. None: the container does not run it, as far as is visible.

    Raises CommandError; ValueError: its script cannot be read.
    """
    if (script := extract_shell_script([*command, *args])) is not None:
        commands = find_vllm_commands(script, environment, budget)
        if len(commands) > 1:
            raise CommandError(f"{name}: its script starts vLLM more than once: {_COMMAND_HINT}")
        if not commands and is_official_image:
            raise CommandError(f"{name}: its script does not visibly start vLLM: {_COMMAND_HINT}")
        return commands[0] if commands else None
    if (words := find_serve_arguments([*command, *args])) is not None:
        return VllmCommand(words, environment)
    if not command and (is_official_image or _looks_like_vllm_arguments(args)):
        return VllmCommand(args, environment)  # arguments of the image's entrypoint, `vllm serve`
    if is_official_image:
        raise CommandError(f"{name}: it runs {command[0]}, which preflight does not read: {_COMMAND_HINT}")
    return None


def _looks_like_vllm_arguments(args: Sequence[str]) -> bool:
    """Return whether the arguments are vLLM's, for an image whose name does not reveal it."""
    return any(arg == "--model" or arg.startswith("--model=") for arg in args) or ("/" in args[0] if args else False)


def _read_strings(name: str, container: Mapping[str, Any], key: str) -> list[str]:
    entries = _read_list(name, container, key)
    for index, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise CommandError(f"{name}: {key}[{index}] is {json.dumps(entry)[:40]}: set a string, in quotes.")
    return entries


def _read_list(name: str, document: Mapping[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list | None):
        raise CommandError(f"{name}: {key} is {json.dumps(value)[:40]}: set a list.")
    return value or []


def _read_mapping(name: str, document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict | None):
        raise CommandError(f"{name}: {key} is {json.dumps(value)[:40]}: set an object.")
    return value or {}


def _read_environment(name: str, container: Mapping[str, Any], budget: ExpansionBudget) -> dict[str, str]:
    environment: dict[str, str] = {}
    for entry in _read_list(name, container, "env"):
        variable = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(variable, str):
            raise CommandError(f"{name}: an entry of env has no name: add one.")
        value = entry.get("value")
        is_unknown = entry.get("valueFrom") is not None
        environment[variable] = (
            f"$({variable})"
            if is_unknown
            else expand_kubernetes_variables(value if isinstance(value, str) else "", environment, budget)
        )
    return environment


# -- Preflight input -----------------------------------------------------------------------------------------------------


def build_input_from_workload(
    workload: Workload, overrides: PreflightOverrides, hub_reader: HubReader
) -> tuple[PreflightInput, tuple[str, ...]]:
    """Return what the container runs, and notes for the user about how it was read. Raises CommandError, CheckpointError."""
    name = workload.name
    try:
        serve_command = parse_serve_command(workload.serve_arguments)
    except ArgumentError as error:
        raise CommandError(str(error).replace("spec.engine.args", name)) from None
    engine = _resolve_version(workload, overrides)
    tag_note = "" if overrides.vllm_version else f"; vLLM {engine.version}, by its image's tag"
    notes = [
        f"checked: {name}{tag_note}.",
        *engine.warnings,
        *(f"{name}: {unknown_value}." for unknown_value in _iter_unknown_values(workload, serve_command)),
    ]
    target = _read_model(name, "serves", serve_command.model, serve_command.revision, overrides.target, "--target", hub_reader)
    speculative_config = dict(serve_command.speculative_config)
    if "model" not in speculative_config and overrides.drafter is not None:
        tokens = speculative_config.get("num_speculative_tokens", _DEFAULT_SPECULATIVE_TOKENS)
        speculative_config = {"method": "eagle3", "num_speculative_tokens": tokens}
        notes.append(f"{name} has no drafter: checked with --drafter and {json.dumps(speculative_config)}.")
    drafter, drafter_note = _read_drafter(name, target, serve_command, speculative_config, overrides, hub_reader)
    if drafter_note:
        notes.append(drafter_note)
    if message := command_line.check_lossless(speculative_config):
        notes.append(f"{name}: {message}")
    gpu_count, gpu_resource = count_gpus(workload.limits, workload.pod_spec)
    preflight_input = PreflightInput(
        target=target,
        drafter=drafter,
        version=engine.version,
        speculative_config=speculative_config,
        arguments=serve_command.arguments,
        environment={variable: value for variable, value in workload.environment.items() if is_fully_expanded(value)},
        image=workload.image,
        gpu_memory_bytes=overrides.gpu_bytes or read_gpu_memory_bytes(workload.limits, workload.pod_spec),
        gpu_count=None if serve_command.multi_pod_flag else gpu_count,
        gpu_resource=f"{gpu_resource} of several pods" if serve_command.multi_pod_flag and gpu_resource else gpu_resource,
    )
    return preflight_input, tuple(notes)


def _read_drafter(
    name: str,
    target: Checkpoint,
    serve_command: ServeCommand,
    speculative_config: Mapping[str, Any],
    overrides: PreflightOverrides,
    hub_reader: HubReader,
) -> tuple[Checkpoint | None, str]:
    """Return the drafter, if there is one, and a note for the user, which may be empty. Raises CommandError, CheckpointError."""
    if "model" in speculative_config or overrides.drafter is not None:
        model, revision = speculative_config.get("model"), speculative_config.get("revision")
        drafter = _read_model(name, "drafts with", model, revision, overrides.drafter, "--drafter", hub_reader)
        if "num_speculative_tokens" in speculative_config:
            return drafter, ""
        return drafter, (
            f"{name}: --speculative-config has no num_speculative_tokens: vLLM starts only if the drafter's config has it."
        )
    if not speculative_config:
        _reject_speculators_checkpoint(name, target, serve_command)
        return None, f"{name} has no --speculative-config: the engine runs without a drafter."
    method = speculative_config.get("method", "without a name")
    return None, f"{name}: method {method} needs no drafter: the checks of drafters do not apply."


def _resolve_version(workload: Workload, overrides: PreflightOverrides) -> releases.EngineVersion:
    if overrides.vllm_version:
        try:
            releases.Version.parse(overrides.vllm_version)
        except releases.VersionError as error:
            raise CommandError(f"--vllm: {error}") from None
    engine = releases.resolve_engine_version("" if overrides.vllm_version else workload.image, overrides.vllm_version)
    if isinstance(engine, releases.UnknownVersion):
        raise CommandError(
            f"{workload.name}: the image {workload.image} does not show its vLLM version: set it with --vllm, such as "
            f"--vllm {releases.NEWEST_VERIFIED_VERSION}."
        )
    return engine


def _iter_unknown_values(workload: Workload, serve_command: ServeCommand) -> Iterator[str]:
    if workload.has_env_from:
        yield "variables by envFrom are unknown"
    for name, value in workload.environment.items():
        if name.startswith("VLLM_") and not is_fully_expanded(value):
            yield f"the value of the variable {name} is unknown"
    last_flag = ""
    for word in workload.serve_arguments:
        last_flag = word.partition("=")[0] if word.startswith("-") else last_flag
        if not is_fully_expanded(word):
            yield f"the value of {last_flag or 'an argument'} is unknown"
    if serve_command.has_config_file:
        yield "--config is a file in the pod: its flags are unknown"
    if serve_command.multi_pod_flag:
        yield f"{serve_command.multi_pod_flag} distributes an engine over several pods: their GPUs are not counted"


def _read_model(
    name: str,
    verb: str,
    model: str | None,
    revision: str | None,
    override: ModelLocation | None,
    option: str,
    hub_reader: HubReader,
) -> Checkpoint:
    source = f"{model}@{revision}" if revision else model
    if override is not None:
        return read_model_location(override, hub_reader, source)
    hint = f"set {option} to a folder or OWNER/NAME@COMMIT"
    if model is None:
        raise CommandError(f"{name} names no model: {hint}.")
    if not is_fully_expanded(model) or (revision and not is_fully_expanded(revision)):
        raise CommandError(f"{name} {verb} {source}, which is unknown: {hint}.")
    if parse_hub_repository(f"{model}@{revision or 'main'}") is None:
        raise CommandError(f"{name} {verb} {model}, a path in the pod: {hint}.")
    return read_model_location(HubRepository(model, revision), hub_reader)


def _reject_speculators_checkpoint(name: str, target: Checkpoint, serve_command: ServeCommand) -> None:
    """Raise CommandError for a speculators checkpoint: vLLM serves the verifier that it names, with the checkpoint as its
    drafter."""
    config = target.config.get("speculators_config")
    if not isinstance(config, dict):
        return
    verifier = config.get("verifier")
    verifier_name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    drafter_name = serve_command.model or target.name
    raise CommandError(
        f"{name}: {drafter_name} is a drafter whose config names its target, {verifier_name or 'without a name'}: set "
        f"--target {verifier_name or 'OWNER/NAME'} --drafter {drafter_name}."
    )
