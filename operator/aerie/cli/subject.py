"""From a resource, or from two models, to what preflight looks at: where I/O and the pure core meet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.engine import Engine
from aerie.api.source import HuggingFaceSource, Source
from aerie.cli.console import CommandError
from aerie.cli.place import FromHub, Place, Repository, read_place
from aerie.engine import arguments, flags, versions
from aerie.engine.catalog import Catalog
from aerie.engine.checkpoint import Checkpoint
from aerie.engine.preflight import Subject
from aerie.rollout.choice import choose

GPU = "nvidia.com/gpu"
_GPUS = frozenset({GPU, "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"})
"""Extended resources of the vendors' device plugins, one for each device."""
_MIG = "nvidia.com/mig-"
"""Instances of a divided GPU, such as nvidia.com/mig-3g.40gb."""


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
        version = versions.Version.parse(given.version) if given.version else versions.NEWEST_KNOWN
    except versions.VersionError as error:
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
    engine = versions.resolve(spec.engine.image, given.version or spec.engine.version)
    if isinstance(engine, versions.NoVersion):
        raise CommandError(engine.sentence)
    if refused := flags.refused(spec.engine.args):
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
    method = spec.drafter.method if spec.drafter is not None else "eagle3"
    gpus, gpu_resource = _gpus(spec.engine)
    subject = Subject(
        target=target,
        drafter=drafter,
        version=engine.version,
        version_from_tag=not (given.version or spec.engine.version),
        speculative={"method": method, "num_speculative_tokens": spec.speculation.tokens} if drafter is not None else {},
        arguments=arguments.read(spec.engine.args),
        environment={variable.name: variable.value or "" for variable in spec.engine.env if variable.value_from is None},
        gpu_bytes=given.gpu_bytes or _gpu_bytes(spec.engine),
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


def _gpus(engine: Engine) -> tuple[int | None, str]:
    """GPUs of one pod, where it asks for a whole number of them, and how it asks for them."""
    limits = (engine.resources and engine.resources.limits) or {}
    named = [name for name in limits if name in _GPUS or name.startswith(_MIG)]
    pod: dict[str, Any] = engine.pod_template.spec if engine.pod_template else {}
    if len(named) == 1:
        amount = limits[named[0]]
        return (int(amount) if amount.isdecimal() else None), named[0]
    if named:
        return None, " and ".join(sorted(named))
    return None, "resourceClaims (DRA)" if pod.get("resourceClaims") else ""


def _gpu_bytes(engine: Engine) -> int | None:
    """From the name of a MIG instance, or the labels that NVIDIA's GPU feature discovery gives nodes: gpu.memory in MiB, or the
    GB in the product's name."""
    limits = (engine.resources and engine.resources.limits) or {}
    instances = [name for name in limits if name.startswith(_MIG)]
    if instances:
        size = re.search(r"[.](\d+)gb", instances[0])
        return int(size[1]) * 2**30 if size and len(instances) == 1 else None
    labels: dict[str, Any] = (engine.pod_template.spec if engine.pod_template else {}).get("nodeSelector") or {}
    memory, product = str(labels.get(f"{GPU}.memory", "")), str(labels.get(f"{GPU}.product", ""))
    if memory.isdecimal():
        return int(memory) * 2**20
    named = re.search(r"(\d+)GB", product)
    return int(named[1]) * 2**30 if named else None
