"""Builds the input of preflight from a resource, or from two models: the boundary of I/O and the pure core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.resource import Spec
from aerie.api.source import HuggingFaceSource, ModelSource
from aerie.cli.console import CommandError
from aerie.cli.inputs.gpus import count_gpus, read_gpu_memory_bytes
from aerie.cli.inputs.model_location import HubReader, HubRepository, ModelLocation, read_model_location
from aerie.engine import arguments, command_line, releases
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.engine.preflight import PreflightInput
from aerie.engine.speculative_config import DRAFT_SAMPLING_METHODS, validate_engine_options
from aerie.rollout.revision.drafter_selection import select_drafter


class UnreadableSourceError(CommandError):
    """The source of a model is a volume or an image, and no other location is set."""


@dataclass(frozen=True)
class PreflightOverrides:
    """Options of the command line that add to the resource, or replace parts of it."""

    target: ModelLocation | None = None
    """Location to read instead of the resource's source."""
    drafter: ModelLocation | None = None
    gpu_bytes: int | None = None
    vllm_version: str | None = None


def build_input_from_models(overrides: PreflightOverrides, hub_reader: HubReader) -> PreflightInput:
    """Return the input for two models without a resource: vLLM's defaults, three draft tokens. Raises CommandError,
    CheckpointError."""
    if overrides.target is None or overrides.drafter is None:
        raise CommandError("nothing to check: set a manifest with -f, or two models with --target and --drafter.")
    try:
        version = releases.Version.parse(overrides.vllm_version) if overrides.vllm_version else releases.NEWEST_VERIFIED_VERSION
    except releases.VersionError as error:
        raise CommandError(f"--vllm: {error}") from None
    return PreflightInput(
        target=read_model_location(overrides.target, hub_reader),
        drafter=read_model_location(overrides.drafter, hub_reader),
        version=version,
        speculative_config={"method": "eagle3", "num_speculative_tokens": 3},
        gpu_memory_bytes=overrides.gpu_bytes,
        gpu_resource=None,
    )


def build_input_from_deployment(
    deployment: SpeculativeDeployment, overrides: PreflightOverrides, catalog: DrafterCatalog, hub_reader: HubReader
) -> tuple[PreflightInput, tuple[str, ...]]:
    """Return what the resource will run, and notes for the user about how it was read.

    Raises CommandError, CheckpointError, ArgumentError.
    """
    selection = select_drafter(deployment, catalog)
    spec = selection.resource.spec
    engine = releases.resolve_engine_version(spec.engine.image, overrides.vllm_version or spec.engine.version)
    if isinstance(engine, releases.UnknownVersion):
        raise CommandError(engine.message)
    if invalid_arguments := command_line.validate_user_arguments(spec.engine.args):
        raise CommandError(" ".join(invalid_arguments))
    notes = list(engine.warnings)
    target = _read_source(spec.model.source, overrides.target, "model", "--target", hub_reader)
    drafter = None
    if spec.speculation.num_speculative_tokens == 0:
        notes.append("spec.speculation.numSpeculativeTokens is 0: the engine runs without a drafter.")
    elif deployment.spec.drafter is None and overrides.drafter is not None:
        drafter = read_model_location(overrides.drafter, hub_reader)
    elif spec.drafter is not None:
        drafter = _read_source(spec.drafter.source, overrides.drafter, "drafter", "--drafter", hub_reader)
        if selection.selected_drafter is not None:
            notes.append(f"spec.drafter is missing: checked with {drafter.name} from the catalog.")
    else:
        raise CommandError(selection.problem)
    limits = (spec.engine.resources and spec.engine.resources.limits) or {}
    pod_spec = spec.engine.pod_template.spec if spec.engine.pod_template else {}
    gpu_count, gpu_resource = count_gpus(limits, pod_spec)
    preflight_input = PreflightInput(
        target=target,
        drafter=drafter,
        version=engine.version,
        is_version_from_tag=not (overrides.vllm_version or spec.engine.version),
        speculative_config=_build_speculative_config(spec) if drafter is not None else {},
        arguments=arguments.parse_arguments(spec.engine.args),
        environment={variable.name: variable.value or "" for variable in spec.engine.env if variable.value_from is None},
        image=spec.engine.image,
        gpu_memory_bytes=overrides.gpu_bytes or read_gpu_memory_bytes(limits, pod_spec),
        gpu_count=gpu_count,
        gpu_resource=gpu_resource,
    )
    return preflight_input, tuple(notes)


def read_drafter(deployment: SpeculativeDeployment, folder: ModelLocation | None, hub_reader: HubReader) -> Checkpoint:
    """Return the drafter of a resource. `folder`: where its source is mounted, unless it is a repository of the Hub.

    Raises CommandError, CheckpointError, HubError.
    """
    if deployment.spec.drafter is None:
        raise CommandError("spec.drafter is missing: there is no drafter to read.")
    return _read_source(deployment.spec.drafter.source, folder, "drafter", "--running-drafter", hub_reader)


def _build_speculative_config(spec: Spec) -> dict[str, Any]:
    """Return vLLM's speculative config without the drafter's location. Raises CommandError: an option belongs elsewhere."""
    speculation = spec.speculation
    options = speculation.engine_options or {}
    if misplaced := validate_engine_options(options):
        raise CommandError(" ".join(misplaced))
    config: dict[str, Any] = {"method": spec.drafter.method if spec.drafter is not None else "eagle3"}
    config["num_speculative_tokens"] = speculation.num_speculative_tokens
    if speculation.draft_sampling is not None:
        config["draft_sample_method"] = DRAFT_SAMPLING_METHODS[speculation.draft_sampling]
    return config | options


def _read_source(
    source: ModelSource, override: ModelLocation | None, field: str, option: str, hub_reader: HubReader
) -> Checkpoint:
    variant = source.variant
    if isinstance(variant, HuggingFaceSource):
        # Name a folder after the source: checks compare the name with the target that a drafter was trained for.
        repository = HubRepository(variant.repo, variant.revision)
        return read_model_location(override or repository, hub_reader, f"{variant.repo}@{variant.revision}")
    if override is None:
        kind = "a volume claim" if source.persistent_volume_claim is not None else "an image"
        raise UnreadableSourceError(
            f"spec.{field}.source is {kind}, which cannot be read from here: set {option} to a folder or OWNER/NAME@COMMIT."
        )
    return read_model_location(override, hub_reader)
