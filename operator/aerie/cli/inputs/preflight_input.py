"""From a resource, or from two models, to what preflight looks at: where I/O and the pure core meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, Source
from aerie.cli.console import CommandError
from aerie.cli.inputs.gpus import count_gpus, gpu_memory
from aerie.cli.inputs.model_location import FromHub, Place, Repository, read_place
from aerie.engine import arguments, command_line, releases
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.models.drafter_catalog import Catalog
from aerie.engine.preflight import Subject
from aerie.engine.speculative_config import SAMPLING
from aerie.engine.speculative_config import misplaced as misplaced_options
from aerie.rollout.revision.drafter_selection import choose


@dataclass(frozen=True)
class Given:
    """What the command line adds to the resource, or stands in for it."""

    target: Place | None = None
    """What to read instead of the resource's source."""
    drafter: Place | None = None
    gpu_bytes: int | None = None
    version: str | None = None


def of_models(given: Given, from_hub: FromHub) -> Subject:
    """Two models without a resource: vLLM's defaults, three tokens. Raises CommandError, CheckpointError."""
    if given.target is None or given.drafter is None:
        raise CommandError("there is nothing to check: give a manifest with -f, or two models with --target and --drafter.")
    try:
        version = releases.Version.parse(given.version) if given.version else releases.NEWEST_KNOWN
    except releases.VersionError as error:
        raise CommandError(f"--vllm: {error}") from None
    return Subject(
        target=read_place(given.target, from_hub),
        drafter=read_place(given.drafter, from_hub),
        version=version,
        speculative={"method": "eagle3", "num_speculative_tokens": 3},
        gpu_bytes=given.gpu_bytes,
    )


def of_deployment(
    deployment: SpeculativeDeployment, given: Given, catalog: Catalog, from_hub: FromHub
) -> tuple[Subject, tuple[str, ...]]:
    """What the resource will run, and what the user should know about how it was read.

    Raises CommandError, CheckpointError, ArgumentError.
    """
    choice = choose(deployment, catalog)
    spec = choice.resource.spec
    engine = releases.resolve(spec.engine.image, given.version or spec.engine.version)
    if isinstance(engine, releases.NoVersion):
        raise CommandError(engine.sentence)
    if refused := command_line.refused(spec.engine.args):
        raise CommandError(" ".join(refused))
    remarks = list(engine.warnings)
    target = _read(spec.model.source, given.target, "model", "--target", from_hub)
    drafter = None
    if spec.speculation.tokens == 0:
        remarks.append("spec.speculation.tokens is 0: the engine runs without a drafter.")
    elif deployment.spec.drafter is None and given.drafter is not None:
        drafter = read_place(given.drafter, from_hub)
    elif spec.drafter is not None:
        drafter = _read(spec.drafter.source, given.drafter, "drafter", "--drafter", from_hub)
        if choice.chosen is not None:
            remarks.append(f"spec.drafter is missing: this is about {drafter.name}, the catalog's for this target.")
    else:
        raise CommandError(choice.problem)
    speculation = spec.speculation
    options = speculation.engine_options or {}
    if drafter is not None and (misplaced := misplaced_options(options)):
        raise CommandError(" ".join(misplaced))
    speculative: dict[str, Any] = {"method": spec.drafter.method if spec.drafter is not None else "eagle3"}
    speculative["num_speculative_tokens"] = speculation.tokens
    if speculation.draft_sampling is not None:
        speculative["draft_sample_method"] = SAMPLING[speculation.draft_sampling]
    limits = (spec.engine.resources and spec.engine.resources.limits) or {}
    pod = spec.engine.pod_template.spec if spec.engine.pod_template else {}
    gpus, gpu_resource = count_gpus(limits, pod)
    subject = Subject(
        target=target,
        drafter=drafter,
        version=engine.version,
        version_from_tag=not (given.version or spec.engine.version),
        speculative=speculative | options if drafter is not None else {},
        arguments=arguments.read(spec.engine.args),
        environment={variable.name: variable.value or "" for variable in spec.engine.env if variable.value_from is None},
        image=spec.engine.image,
        gpu_bytes=given.gpu_bytes or gpu_memory(limits, pod),
        gpus=gpus,
        gpu_resource=gpu_resource,
    )
    return subject, tuple(remarks)


def _read(source: Source, given: Place | None, field: str, option: str, from_hub: FromHub) -> Checkpoint:
    found = source.given
    if isinstance(found, HuggingFaceSource):
        # A folder has the name of the source, because checks compare it with what a drafter says it was trained for.
        own = Repository(found.repo, found.revision)
        return read_place(given or own, from_hub, f"{found.repo}@{found.revision}")
    if given is None:
        kind = "volume claim" if source.volume_claim is not None else "image"
        raise CommandError(
            f"spec.{field}.source is a {kind}, which this machine cannot read: give its files with {option}, a folder or "
            "OWNER/NAME@COMMIT."
        )
    return read_place(given, from_hub)
