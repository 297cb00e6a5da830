"""vLLM's releases: a version parsed from a string or an image tag, and the release in which each feature came or went.

Why not the `packaging` library: engine images carry vendor suffixes that PEP 440 rejects (`v0.25.1-rocm`). A tag that only looks
like a version (`25.10-py3`, a vendor's calendar) must be distinguished from a real one.

Guarantees: the order is total and agrees with PEP 440 wherever both parse the string. A feature never counts as present in a
release that is not known to have it, nor in a pre-release of its first release. Not guaranteed: the real content of an image. Its
tag is the only evidence, and `spec.engine.version` takes precedence.

The first and the last release of nearly every row were checked in the published wheels of vLLM 0.15.1 to 0.33.0. A new vLLM
release changes `NEWEST_VERIFIED_VERSION`, and adds a row for each feature that Aerie uses and that it adds or removes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering

_VERSION_PATTERN = re.compile(
    r"v?(?P<release>\d+(?:\.\d+){1,3})"
    r"(?:[-_.]?(?P<pre>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<pre_number>\d*))?"
    r"(?:-(?P<implicit_post>\d+)|(?P<post>[-_.]?(?:post|rev|r))[-_.]?(?P<post_number>\d*))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_number>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*)|[-_](?P<vendor>[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*))?"
)
_PRE_RELEASE_ALIASES = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}


class VersionError(ValueError):
    """A string that is no vLLM version; the message is a full sentence."""


@total_ordering
@dataclass(frozen=True, eq=False)
class Version:
    """One vLLM version: PEP 440 without epochs, with vendor suffixes as a local part.

    Two versions are equal when they are the same release of the same build: 0.33 == 0.33.0, but 0.32.0+cpu > 0.32.0.
    """

    release: tuple[int, int, int, int]
    """Four components; missing ones are 0. vLLM has released 0.9.0.1 and 0.10.1.1."""
    pre: tuple[str, int] | None = None
    """("a" | "b" | "rc", number)."""
    post: int | None = None
    dev: int | None = None
    local: tuple[int | str, ...] = ()
    """The build: `cpu` in 0.32.0+cpu, `rocm` in v0.25.1-rocm."""

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse `0.33.0`, `v0.33.0`, `0.33.0rc1`, `0.32.0+cpu`, `0.29.0.post1` or `v0.25.1-rocm`.

        Raises VersionError with a message for anything else.
        """
        match = _VERSION_PATTERN.fullmatch(text.strip().lower()) if text.isascii() else None
        if match is None:
            raise VersionError(f"'{text}' is not a vLLM version: use the form {NEWEST_VERIFIED_VERSION}.")
        numbers = [int(part) for part in match["release"].split(".")]
        first, second, third, fourth = [*numbers, 0, 0][:4]
        pre = (_PRE_RELEASE_ALIASES.get(match["pre"], match["pre"]), int(match["pre_number"] or 0)) if match["pre"] else None
        post = None
        if match["implicit_post"] is not None:
            post = int(match["implicit_post"])
        elif match["post"]:
            post = int(match["post_number"] or 0)
        dev = int(match["dev_number"] or 0) if match["dev"] else None
        local = re.split(r"[-_.]", match["local"] or match["vendor"] or "")
        parts = tuple(int(part) if part.isdigit() else part for part in local if part)
        return cls((first, second, third, fourth), pre, post, dev, parts)

    def __str__(self) -> str:
        numbers = self.release if self.release[3] else self.release[:3]
        text = ".".join(str(number) for number in numbers)
        text += f"{self.pre[0]}{self.pre[1]}" if self.pre else ""
        text += f".post{self.post}" if self.post is not None else ""
        text += f".dev{self.dev}" if self.dev is not None else ""
        return text + ("+" + ".".join(str(part) for part in self.local) if self.local else "")

    def __eq__(self, other: object) -> bool:
        return self._sort_key() == other._sort_key() if isinstance(other, Version) else NotImplemented

    def __lt__(self, other: Version) -> bool:
        return self._sort_key() < other._sort_key()

    def __hash__(self) -> int:
        return hash(self._sort_key())

    def _sort_key(self) -> tuple[object, ...]:
        """Return the key of PEP 440's order: dev, pre-releases, the release, post-releases; a local part is later than none."""
        if self.pre is not None:
            pre = (1, *self.pre)
        else:
            pre = (0, "", 0) if self.dev is not None and self.post is None else (2, "", 0)
        post = -1 if self.post is None else self.post
        dev = (1, 0) if self.dev is None else (0, self.dev)
        local = tuple((1, part, "") if isinstance(part, int) else (0, 0, part) for part in self.local)
        return (self.release, pre, post, dev, local)


@dataclass(frozen=True)
class UnknownVersion:
    """The result where no vLLM version can be determined; the message says why and how to fix it."""

    message: str


@dataclass(frozen=True)
class EngineVersion:
    """The version that Aerie assumes, and warnings for the user about it."""

    version: Version
    warnings: tuple[str, ...] = ()


NEWEST_VERIFIED_VERSION = Version.parse("0.33.0")
"""The newest release that this table was verified against (2026-11), and whose engines get the plugin
(docs/project/in-place-vllm.md)."""

MIN_SECURE_VERSION = Version.parse("0.24.0")
"""The first release that a remote request cannot stop under speculation: vLLM pull request 44744."""


@dataclass(frozen=True)
class FeatureAvailability:
    """One feature: present in every release from `since` on and before `removed_in`."""

    description: str
    since: Version
    source: str
    """vLLM pull request number or source file."""
    removed_in: Version | None = None
    """The first release without it."""
    limitations: str = ""
    """Limitations in the releases that have it."""
    uses_internals: bool = False
    """Whether Aerie uses internals of vLLM for it, so that a release that was not read may not even start with it."""


def _availability(
    description: str,
    since: str,
    source: str,
    *,
    removed_in: str | None = None,
    limitations: str = "",
    uses_internals: bool = False,
) -> FeatureAvailability:
    removed = Version.parse(removed_in) if removed_in else None
    return FeatureAvailability(description, Version.parse(since), source, removed, limitations, uses_internals)


class Feature(Enum):
    """Features of vLLM, by release. Each value is a `FeatureAvailability`, whose fields are also attributes of the member."""

    EAGLE31_LLAMA = _availability("EAGLE 3.1 drafters of Llama form", "0.22.0", "pull request 42764")
    EAGLE31_MLA = _availability(
        "EAGLE 3.1 drafters with multi-head latent attention (DeepSeek form)",
        "0.23.0",
        "pull request 43482",
        limitations="0.22.0 and 0.22.1 load fc_norm but do not apply it",
    )
    EAGLE31_QWEN3 = _availability(
        "EAGLE 3 and 3.1 drafters of Qwen3 form", "0.24.0", "vllm/model_executor/models/qwen3_eagle3.py"
    )
    EAGLE31_SPECULATORS = _availability(
        "EAGLE 3.1 drafters with a speculators-format config",
        "0.25.0",
        "pull request 46488",
        limitations="0.24 and older ignore fc_norm and norm_output without an error",
    )
    SCHEDULE = _availability(
        "number of speculative tokens by batch size (num_speculative_tokens_per_batch_size)",
        "0.24.0",
        "pull request 32374",
        limitations="indexed by the requests scheduled in a step; K is clamped to num_speculative_tokens; "
        "eagle, eagle3, mtp, dflash, ngram and draft_model on model runner V1; verified for eagle3 on 0.32 (CPU)",
    )
    SCHEDULE_DATA_PARALLEL_GUARD = _availability(
        "the replacement of schedules by a fixed K under data parallelism",
        "0.26.0",
        "vllm/config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel",
        limitations="0.24 and 0.25 have no guard and can deadlock",
    )
    SCHEDULE_TIER_GRAPHS = _availability(
        "CUDA graphs captured by default for the decode batch of each tier of a schedule",
        "0.29.0",
        "vllm/config/vllm.py, decode_tiers",
        limitations="not where the user sets the capture sizes",
    )
    ADAPTIVE_DSPARK = _availability(
        "adaptive verification with DSpark drafters (enable_adaptive_verification)",
        "0.28.0",
        "pull request 47808",
        limitations="model runner V2; no LoRA, pipeline parallelism or eager execution",
    )
    ADAPTIVE = _availability(
        "adaptive verification with any drafter that model runner V2 runs",
        "0.30.0",
        "vllm/config/speculative.py: 0.28 and 0.29 reject methods other than dspark, 0.30 no longer does",
        limitations="model runner V2; no LoRA, pipeline parallelism or eager execution; not with use_local_argmax_reduction; "
        "the option's own description still names dspark alone",
    )
    PIPELINE_PARALLEL = _availability(
        "EAGLE 3 under pipeline parallelism",
        "0.30.0",
        "pull request 50514",
        limitations="targets that opt in: Llama, Qwen2 and dense Qwen3, Sarvam, MiniMax-M3, DeepSeek-V4, Kimi-K3; "
        "not DeepSeek-V2/V3",
    )
    BLOCK_VERIFICATION = _availability(
        "block verification, lossless (rejection_sample_method block)", "0.25.0", "vllm/config/speculative.py"
    )
    DFLASH = _availability("DFlash drafters", "0.20.0", "vllm/config/speculative.py")
    DSPARK = _availability("DSpark drafters", "0.25.0", "vllm/config/speculative.py")
    P_EAGLE = _availability(
        "P-EAGLE drafters (parallel_drafting)", "0.16.0", "vllm/config/speculative.py", limitations="model runner V1"
    )
    DRAFT_KV_CACHE_DTYPE = _availability("a KV cache type of the drafter's own", "0.26.0", "vllm/config/speculative.py")
    DRAFT_LOGITS_NARROW = _availability(
        "draft logits that are kept in the model's type, not in float32",
        "0.28.0",
        "vllm/v1/worker/gpu/spec_decode/speculator.py, draft_logits_spec",
        limitations="model runner V2",
    )
    DRAFT_CONTEXT_RAISED = _availability(
        "a drafter's shorter context raised to the target's, where its RoPE type allows",
        "0.27.0",
        "pull request 49343",
        limitations="older releases fail or return wrong output past the drafter's max_position_embeddings; "
        "with yarn and long-context RoPE types the engine's context is cut instead",
    )
    EAGLE_CONFIG_LAYER_IDS = _availability(
        "auxiliary layers by eagle_config.layer_ids",
        "0.27.0",
        "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
        limitations="model runner V2",
    )
    LOOKAHEAD_HASHES = _availability(
        "prefix caching without losing the last block under EAGLE",
        "0.33.0",
        "pull request 50897",
        limitations="not with a KV transfer config",
    )
    DRAFTER_IN_PLACE = _availability(
        "changes of the drafter inside a running engine",
        "0.26.0",
        "vllm/v1/worker/gpu_worker.py, get_draft_model",
        limitations="one API server; no pipeline parallelism, elastic expert parallelism or fault tolerance",
        uses_internals=True,
    )
    REQUEST_SPECULATION_METRICS = _availability(
        "counts of speculation in each answer (--per-request-spec-decode-metrics)",
        "0.29.0",
        "vllm/config/observability.py, per_request_spec_decode_metrics",
        limitations="chat and completion requests with one answer; not with the Rust front end",
    )
    V2_RUNNER_DENSE = _availability("model runner V2 by default for models without experts", "0.25.0", "vllm/config/vllm.py")
    V2_RUNNER_ALL = _availability("model runner V2 by default for all models", "0.29.0", "pull request 53183")
    MEDUSA = _availability(
        "Medusa and MLP speculators",
        "0.15.1",
        "vllm/config/speculative.py",
        removed_in="0.33.0",
        limitations="releases before 0.15.1 were not examined",
    )

    @property
    def description(self) -> str:
        return self.value.description

    @property
    def since(self) -> Version:
        return self.value.since

    @property
    def removed_in(self) -> Version | None:
        return self.value.removed_in

    @property
    def limitations(self) -> str:
        return self.value.limitations

    @property
    def source(self) -> str:
        return self.value.source

    @property
    def uses_internals(self) -> bool:
        return self.value.uses_internals


def supports(version: Version, feature: Feature) -> bool:
    """Return whether the version has the feature. A version newer than the newest verified one counts as the newest verified one.

    A feature for which Aerie uses internals of vLLM is the exception: no minor release after the newest verified one has it.
    A pre-release counts as lacking both the features that its release brings and those that its release removes.
    """
    if feature.removed_in is not None and version.release >= feature.removed_in.release:
        return False
    return version >= feature.since and not (feature.uses_internals and _is_unverified(version))


def describe_missing_feature(version: Version, feature: Feature) -> str:
    """Return the message for a version that lacks the feature: what is missing, and which version has it."""
    if feature.removed_in is not None and version.release >= feature.removed_in.release:
        return f"vLLM {version} no longer supports {feature.description}: use a release before {feature.removed_in}."
    if feature.uses_internals and _is_unverified(version):
        return (
            f"vLLM {version} is newer than {NEWEST_VERIFIED_VERSION}, and {feature.description} use internals of vLLM that were "
            "verified up to that release: upgrade Aerie."
        )
    limits = f" ({feature.limitations})" if feature.limitations else ""
    return f"vLLM {version} does not support {feature.description}: use vLLM {feature.since} or newer{limits}."


def parse_image_version(image: str) -> Version | UnknownVersion:
    """Return the vLLM version that an image's tag names, or a message that says to set `spec.engine.version`.

    Handles registries with ports, digests and vendor suffixes. A tag counts only if it is vLLM's own: in a repository that vLLM
    publishes (`vllm-openai` and its builds, also in a mirror), or in the form `vllm_0.11.2`, as in ROCm's tags. The tags of
    products that contain vLLM (llm-d, KServe, Dynamo, LMCache) count the products' own releases.
    """
    repository, tag = _split_image(image)
    fix = f"set spec.engine.version to its vLLM version, such as {NEWEST_VERIFIED_VERSION}."
    if not repository:
        return UnknownVersion(
            f"spec.engine.image is '{image}', which is not an image: use the form vllm/vllm-openai:v{NEWEST_VERIFIED_VERSION}."
        )
    if not tag:
        reference = "only a digest" if "@" in image else "no tag"
        return UnknownVersion(f"spec.engine.image '{image}' has {reference}, which does not contain its vLLM version: {fix}")
    vllm_part = re.search(r"(?:^|[-_.])vllm[-_]?v?(\d+\.\d+\.\d+)(?:[-_]|$)", tag.lower())
    if vllm_part is None and not _is_published_repository(repository):
        return UnknownVersion(
            f"spec.engine.image '{image}' is from a repository whose tags may differ from vLLM versions (those of "
            "vllm-openai are vLLM versions): "
            f"{fix}"
        )
    try:
        version = Version.parse(vllm_part[1] if vllm_part else tag)
    except VersionError:
        return UnknownVersion(f"spec.engine.image '{image}' has the tag '{tag}', which is not a vLLM version: {fix}")
    if re.match(r"v?\d+\.\d+\.\d+", vllm_part[1] if vllm_part else tag.lower()) is None:
        return UnknownVersion(f"spec.engine.image '{image}' has the tag '{tag}', which is not a full vLLM version: {fix}")
    if version.release[0] > NEWEST_VERIFIED_VERSION.release[0]:
        return UnknownVersion(
            f"spec.engine.image '{image}' has the tag '{tag}', which seems to be a version of another product than vLLM "
            f"(the newest known is {NEWEST_VERIFIED_VERSION}): {fix}"
        )
    return version


def is_published_image(image: str) -> bool:
    """Return whether the image is from a repository that vLLM publishes, or from a mirror of one; its tag does not matter."""
    return _is_published_repository(_split_image(image)[0])


def is_cpu_build(image: str, version: Version) -> bool:
    """Return whether an image's name, its tag or the version marks it as vLLM's build for CPUs.

    >>> is_cpu_build("ghcr.io/a/vllm-openai-cpu:v0.33.0", Version.parse("0.33.0"))
    True
    >>> is_cpu_build("vllm/vllm-openai:v0.33.0", Version.parse("0.33.0"))
    False
    """
    repository, tag = _split_image(image)
    name_parts = re.split(r"[-_.+]", f"{repository.rpartition('/')[2]}-{tag}".lower())
    return "cpu" in name_parts or "cpu" in version.local


def _split_image(image: str) -> tuple[str, str]:
    """Return repository and tag; the tag may be empty."""
    name = image.partition("@")[0]
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # the last colon belongs to the registry's port
        return name, ""
    return repository, tag


_PUBLISHED_REPOSITORY_NAMES = frozenset({"vllm-openai", "vllm-openai-cpu", "vllm-openai-rocm", "vllm-openai-xpu"})


def _is_published_repository(repository: str) -> bool:
    """Return whether the tags of a repository are versions of vLLM.

    They are if its last path element is one of vLLM's own. LMCache's repository has the same name and does not count.
    """
    *owners, name = repository.split("/")
    return name in _PUBLISHED_REPOSITORY_NAMES and owners[-1:] != ["lmcache"]


def resolve_engine_version(image: str, declared_version: str | None = None) -> EngineVersion | UnknownVersion:
    """Return the engine's version from `spec.engine.version`, else from the image's tag, with warnings about it."""
    tag_version = parse_image_version(image)
    if declared_version is None:
        if isinstance(tag_version, UnknownVersion):
            return tag_version
        return EngineVersion(tag_version, _version_warnings(tag_version))
    try:
        version = Version.parse(declared_version)
    except VersionError:
        return UnknownVersion(
            f"spec.engine.version is '{declared_version}', which is not a vLLM version: use the form "
            f"{NEWEST_VERIFIED_VERSION}, or omit it if the image's tag is the version."
        )
    warnings = _version_warnings(version)
    if isinstance(tag_version, Version) and tag_version.release != version.release:
        mismatch = (
            f"spec.engine.version is {version} but the tag of spec.engine.image '{image}' is {tag_version}: Aerie uses "
            "spec.engine.version; omit it if the tag is correct."
        )
        warnings += (mismatch,)
    return EngineVersion(version, warnings)


def _is_unverified(version: Version) -> bool:
    """Return whether the version belongs to a later minor release than the newest verified one."""
    return version.release[:2] > NEWEST_VERIFIED_VERSION.release[:2]


def _version_warnings(version: Version) -> tuple[str, ...]:
    if _is_unverified(version):
        warning = (
            f"vLLM {version} is newer than the newest release that Aerie was verified with: it is treated as "
            f"{NEWEST_VERIFIED_VERSION}. "
            "Upgrade Aerie, or monitor the first rollout."
        )
        return (warning,)
    return ()
