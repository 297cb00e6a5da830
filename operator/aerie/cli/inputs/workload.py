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
from aerie.cli.inputs.gpus import count_gpus, gpu_memory
from aerie.cli.inputs.model_location import FromHub, Place, Repository, parse_repository, read_place
from aerie.cli.inputs.preflight_input import Given
from aerie.cli.inputs.shell_command import Command, Room, behind_serve, expanded, is_known, script_of, served
from aerie.engine import command_line, releases
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.preflight import Subject
from aerie.engine.serve_command import Served, read_served

KINDS = frozenset({"DaemonSet", "Deployment", "Pod", "ReplicaSet", "StatefulSet"})
_TOKENS = 3
_WRITE = "write the command line of vLLM as command and args of the container."


@dataclass(frozen=True)
class Workload:
    """A container that runs vLLM."""

    name: str
    """For sentences."""
    image: str
    words: list[str]
    """Those behind `vllm serve`."""
    environment: Mapping[str, str]
    """A value that is not known here is one for `is_known`."""
    has_env_from: bool
    """Whether there are variables of which not even the names are known here."""
    limits: Mapping[str, str]
    pod: Mapping[str, Any]


# -- In a manifest -------------------------------------------------------------------------------------------------------


def find_workloads(documents: Iterable[Mapping[str, Any]]) -> list[Workload]:
    """The containers that run vLLM. Raises CommandError: one seems to, and cannot be read."""
    room = Room()
    return [
        workload
        for document in documents
        for name, container, pod in _containers(document)
        if (workload := _read_workload(name, container, pod, room)) is not None
    ]


def _containers(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    if document.get("kind") not in KINDS:
        return
    name = f"{document['kind']}/{_table('', document, 'metadata').get('name')}"
    owner = document if document["kind"] == "Pod" else _table(name, _table(name, document, "spec"), "template")
    pod = _table(name, owner, "spec")
    for container in _list(name, pod, "containers"):
        if isinstance(container, dict):
            yield f"{name}, container {container.get('name')}", container, pod


def _read_workload(name: str, container: Mapping[str, Any], pod: Mapping[str, Any], room: Room) -> Workload | None:
    image = container.get("image")
    image = image if isinstance(image, str) else ""
    if "vllm" not in image and "vllm" not in json.dumps([container.get("command"), container.get("args")]):
        return None
    command, args = _texts(name, container, "command"), _texts(name, container, "args")
    try:
        environment = _environment(name, container, room)
        command, args = ([expanded(word, environment, room) for word in words] for words in (command, args))
        engine = _engine(name, command, args, environment, room, published=releases.is_published(image))
    except ValueError as error:
        raise CommandError(f"{name}: its command cannot be read ({error}): {_WRITE}") from None
    if engine is None:
        return None
    limits = _table(name, _table(name, container, "resources"), "limits")
    return Workload(
        name=name,
        image=image,
        words=engine.words,
        environment=engine.environment,
        has_env_from=bool(container.get("envFrom")),
        limits={key: str(value) for key, value in limits.items()},
        pod=pod,
    )


def _engine(
    name: str, command: list[str], args: list[str], environment: Mapping[str, str], room: Room, *, published: bool
) -> Command | None:
    """The words behind `vllm serve`, and their environment. None: the container does not run it, as far as is visible.

    Raises CommandError; ValueError: its script cannot be read.
    """
    if (script := script_of([*command, *args])) is not None:
        started = served(script, environment, room)
        if len(started) > 1:
            raise CommandError(f"{name}: its script starts vLLM more than once: {_WRITE}")
        if not started and published:
            raise CommandError(f"{name}: its script starts no vLLM that can be seen: {_WRITE}")
        return started[0] if started else None
    if (words := behind_serve([*command, *args])) is not None:
        return Command(words, environment)
    if not command and (published or _names_model(args)):
        return Command(args, environment)  # to the entrypoint of the image, which is `vllm serve`
    if published:
        raise CommandError(f"{name}: it runs {command[0]}, which is not read: {_WRITE}")
    return None


def _names_model(args: Sequence[str]) -> bool:
    """Whether they are vLLM's, of an image whose name does not tell that it is."""
    return any(arg == "--model" or arg.startswith("--model=") for arg in args) or ("/" in args[0] if args else False)


def _texts(name: str, container: Mapping[str, Any], key: str) -> list[str]:
    entries = _list(name, container, key)
    for place, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise CommandError(f"{name}: {key}[{place}] is {json.dumps(entry)[:40]}: write a text, in quotes.")
    return entries


def _list(name: str, document: Mapping[str, Any], key: str) -> list[Any]:
    found = document.get(key)
    if not isinstance(found, list | None):
        raise CommandError(f"{name}: {key} is {json.dumps(found)[:40]}: write a list.")
    return found or []


def _table(name: str, document: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    if not isinstance(found, dict | None):
        raise CommandError(f"{name}: {key} is {json.dumps(found)[:40]}: write a table.")
    return found or {}


def _environment(name: str, container: Mapping[str, Any], room: Room) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in _list(name, container, "env"):
        variable = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(variable, str):
            raise CommandError(f"{name}: env has an entry without a name: write one.")
        value = entry.get("value")
        unknown = entry.get("valueFrom") is not None
        found[variable] = f"$({variable})" if unknown else expanded(value if isinstance(value, str) else "", found, room)
    return found


# -- To a subject --------------------------------------------------------------------------------------------------------


def of_workload(workload: Workload, given: Given, from_hub: FromHub) -> tuple[Subject, tuple[str, ...]]:
    """What the container runs, and what the user should know about how it was read. Raises CommandError, CheckpointError."""
    name = workload.name
    try:
        line = read_served(workload.words)
    except ArgumentError as error:
        raise CommandError(str(error).replace("spec.engine.args", name)) from None
    engine = _version(workload, given)
    tag = "" if given.version else f"; the version of vLLM, {engine.version}, is that of its image's tag"
    remarks = [f"checked is {name}{tag}.", *engine.warnings, *(f"{name}: {sentence}." for sentence in _unknown(workload, line))]
    target = _read(name, "serves", line.model, line.revision, given.target, "--target", from_hub)
    speculative = dict(line.speculative)
    if "model" not in speculative and given.drafter is not None:
        tokens = speculative.get("num_speculative_tokens", _TOKENS)
        speculative = {"method": "eagle3", "num_speculative_tokens": tokens}
        remarks.append(f"{name} has no drafter: checked is what --drafter names, with {json.dumps(speculative)}.")
    drafter = None
    if "model" in speculative or given.drafter is not None:
        own, revision = speculative.get("model"), speculative.get("revision")
        drafter = _read(name, "drafts with", own, revision, given.drafter, "--drafter", from_hub)
        if "num_speculative_tokens" not in speculative:
            remarks.append(
                f"{name}: --speculative-config has no num_speculative_tokens: vLLM starts only if the drafter's config has one."
            )
    elif not speculative:
        _refuse_speculators(name, target, line)
        remarks.append(f"{name} has no --speculative-config: the engine runs without a drafter.")
    else:
        method = speculative.get("method", "of no name")
        remarks.append(f"{name}: method {method} drafts without a model of its own, and the checks of drafters do not apply.")
    if sentence := command_line.lossy(speculative):
        remarks.append(f"{name}: {sentence}")
    gpus, how = count_gpus(workload.limits, workload.pod)
    subject = Subject(
        target=target,
        drafter=drafter,
        version=engine.version,
        speculative=speculative,
        arguments=line.arguments,
        environment={name: value for name, value in workload.environment.items() if is_known(value)},
        image=workload.image,
        gpu_bytes=given.gpu_bytes or gpu_memory(workload.limits, workload.pod),
        gpus=None if line.spread else gpus,
        gpu_resource=f"{how} of several pods" if line.spread and how else how,
    )
    return subject, tuple(remarks)


def _version(workload: Workload, given: Given) -> releases.EngineVersion:
    if given.version:
        try:
            releases.Version.parse(given.version)
        except releases.VersionError as error:
            raise CommandError(f"--vllm: {error}") from None
    found = releases.resolve("" if given.version else workload.image, given.version)
    if isinstance(found, releases.NoVersion):
        raise CommandError(
            f"{workload.name}: the image {workload.image} does not tell its version of vLLM: give it with --vllm, such as "
            f"--vllm {releases.NEWEST_KNOWN}."
        )
    return found


def _unknown(workload: Workload, served: Served) -> Iterator[str]:
    if workload.has_env_from:
        yield "variables by envFrom are not known here"
    for name, value in workload.environment.items():
        if name.startswith("VLLM_") and not is_known(value):
            yield f"the value of the variable {name} is not known here"
    last = ""
    for word in workload.words:
        last = word.partition("=")[0] if word.startswith("-") else last
        if not is_known(word):
            yield f"the value of {last or 'an argument'} is not known here"
    if served.config_file:
        yield "--config names a file of the pod: flags in it are not known here"
    if served.spread:
        yield f"{served.spread} spreads an engine over several pods: their GPUs are not counted"


def _read(
    name: str, verb: str, model: str | None, revision: str | None, given: Place | None, option: str, from_hub: FromHub
) -> Checkpoint:
    own = f"{model}@{revision}" if revision else model
    if given is not None:
        return read_place(given, from_hub, own)
    instead = f"give its files with {option}, a folder or OWNER/NAME@COMMIT"
    if model is None:
        raise CommandError(f"{name} names no model: {instead.replace('its files', 'one')}.")
    if not is_known(model) or (revision and not is_known(revision)):
        raise CommandError(f"{name} {verb} {own}, which is not known here: {instead}.")
    if parse_repository(f"{model}@{revision or 'main'}") is None:
        raise CommandError(f"{name} {verb} {model}, a path in the pod: {instead}.")
    return read_place(Repository(model, revision), from_hub)


def _refuse_speculators(name: str, target: Checkpoint, served: Served) -> None:
    """vLLM serves the verifier that such a checkpoint names, with the checkpoint as its drafter."""
    config = target.config.get("speculators_config")
    if not isinstance(config, dict):
        return
    verifier = config.get("verifier")
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    own = served.model or target.name
    raise CommandError(
        f"{name}: {own} is a drafter that names its target, {named or 'of no name'}: give "
        f"--target {named or 'OWNER/NAME'} --drafter {own}."
    )
