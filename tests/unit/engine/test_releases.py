"""Versions: how they are parsed and ordered, image tags, the feature table."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import InvalidVersion
from packaging.version import Version as Pep440

from aerie.engine.releases import (
    MIN_SECURE_VERSION,
    NEWEST_VERIFIED_VERSION,
    EngineVersion,
    Feature,
    UnknownVersion,
    Version,
    VersionError,
    describe_missing_feature,
    parse_image_version,
    resolve_engine_version,
    supports,
)

parse = Version.parse


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("0.33.0", "0.33.0"),
        ("v0.33.0", "0.33.0"),
        ("0.33", "0.33.0"),
        ("0.33.0rc1", "0.33.0rc1"),
        ("v0.33.0-rc.1", "0.33.0rc1"),
        ("0.32.0+cpu", "0.32.0+cpu"),
        ("0.29.0.post1", "0.29.0.post1"),
        ("0.29.0-1", "0.29.0.post1"),
        ("0.33.1.dev12+g0abc123", "0.33.1.dev12+g0abc123"),
        ("0.10.1.1", "0.10.1.1"),
        ("v0.25.1-rocm", "0.25.1+rocm"),
        ("v0.28.0-cu130-ubuntu2404", "0.28.0+cu130.ubuntu2404"),
        ("v0.11.2-x86_64", "0.11.2+x86.64"),
        (" V0.33.0 ", "0.33.0"),
    ],
)
def test_versions_are_parsed(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


@pytest.mark.parametrize(
    "text", ["", "latest", "1", "0.33.0.0.1", "0.33.x", "0.33.0+", "0.33.0-", "25.10-3py", "v", "0.3\u00b3.0", "\u0660.1.2"]
)
def test_invalid_versions_are_rejected(text: str) -> None:
    with pytest.raises(VersionError, match=r"is not a vLLM version: use the form 0\.\d+\.\d+\.$"):
        parse(text)


_RELEASES = st.lists(st.integers(0, 40), min_size=2, max_size=4).map(lambda parts: ".".join(map(str, parts)))
_TEXTS = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["", "v"]),
    _RELEASES,
    st.sampled_from(["", "a1", "b2", "rc1", "-rc.2", ".pre3", "c1"]),
    st.sampled_from(["", ".post1", "-2", ".rev3", "post"]),
    st.sampled_from(["", ".dev0", "dev3"]),
    st.sampled_from(["", "+cpu", "+cu130.5", "+5", "+g0abc123", "+cpu.7", "-rocm", "-cu130"]),
)


@given(st.lists(_TEXTS, min_size=2, max_size=6))
def test_the_order_is_total_and_that_of_pep_440(texts: list[str]) -> None:
    for left, right in itertools.product(texts, repeat=2):
        first, second = parse(left), parse(right)
        assert (first < second) + (first == second) + (first > second) == 1
        assert (hash(first) == hash(second)) or first != second
        try:
            reference = (Pep440(left), Pep440(right))
        except InvalidVersion:  # a vendor's suffix: only Aerie reads it
            continue
        assert (first < second, first == second) == (reference[0] < reference[1], reference[0] == reference[1])


@given(_TEXTS)
def test_a_formatted_version_parses_to_itself(text: str) -> None:
    assert parse(str(parse(text))) == parse(text)


@given(st.text(max_size=20))
def test_any_text_parses_or_raises_version_error(text: str) -> None:
    with contextlib.suppress(VersionError):
        parse(text)


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.33.0", "0.33.0"),
        ("vllm/vllm-openai:v0.33.0@sha256:" + "0" * 64, "0.33.0"),
        ("docker.io/vllm/vllm-openai:v0.25.1-rocm", "0.25.1+rocm"),
        ("registry.example:5000/vllm/vllm-openai:v0.33.0rc1", "0.33.0rc1"),
        ("localhost:5000/vllm-openai:0.32.0", "0.32.0"),
        ("registry.example/vllm/vllm-openai-rocm:v0.30.0", "0.30.0"),
        ("vllm-openai:v0.10.1.1", "0.10.1.1"),
        ("rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210", "0.11.2"),
    ],
)
def test_versions_of_image_tags(image: str, version: str) -> None:
    parsed = parse_image_version(image)
    assert isinstance(parsed, Version)
    assert str(parsed) == str(parse(version))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("vllm/vllm-openai:latest", "the tag 'latest', which is not a vLLM version"),
        ("vllm/vllm-openai:nightly", "the tag 'nightly'"),
        ("vllm/vllm-openai:nightly-0123456789abcdef", "the tag 'nightly-0123456789abcdef'"),
        ("vllm/vllm-openai:25.10-py3", "not a full vLLM version"),
        ("vllm/vllm-openai:25.10.1-py3", "a version of another product than vLLM"),
        ("nvcr.io/nvidia/vllm:25.10-py3", "from a repository whose tags may differ from vLLM versions"),
        (
            "registry.example/dlc/vllm:0.27.0-gpu-py312-cu130-ubuntu22.04-v1.5",
            "from a repository whose tags may differ from vLLM versions",
        ),
        ("ghcr.io/llm-d/llm-d-cuda:v0.4.0", "from a repository whose tags may differ from vLLM versions"),
        ("kserve/huggingfaceserver:v0.16.0-gpu", "from a repository whose tags may differ from vLLM versions"),
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.7.1", "from a repository whose tags may differ from vLLM versions"),
        ("lmcache/vllm-openai:v0.3.9", "from a repository whose tags may differ from vLLM versions"),
        ("docker.io/lmcache/vllm-openai:v0.3.9", "from a repository whose tags may differ from vLLM versions"),
        ("mycorp/vllm:0.30.1", "from a repository whose tags may differ from vLLM versions"),
        ("vllm/vllm-openai", "has no tag"),
        ("registry.example:5000/vllm-openai", "has no tag"),
        ("vllm/vllm-openai@sha256:" + "0" * 64, "has only a digest"),
    ],
)
def test_tags_without_a_version_name_the_field_to_set(image: str, message: str) -> None:
    version = parse_image_version(image)
    assert isinstance(version, UnknownVersion)
    assert message in version.message
    assert version.message.startswith(f"spec.engine.image '{image}'")
    assert version.message.endswith(f"set spec.engine.version to its vLLM version, such as {NEWEST_VERIFIED_VERSION}.")


def test_an_empty_image_has_no_version() -> None:
    version = parse_image_version("")
    assert isinstance(version, UnknownVersion)
    assert "is not an image" in version.message


def test_the_declared_version_takes_precedence_over_the_tag() -> None:
    assert resolve_engine_version("x/y:latest", "v0.30.0") == EngineVersion(parse("0.30.0"))
    assert resolve_engine_version("vllm/vllm-openai:v0.30.0") == EngineVersion(parse("0.30.0"))
    assert resolve_engine_version("vllm/vllm-openai:v0.30.0-rocm", "0.30.0") == EngineVersion(parse("0.30.0"))
    assert isinstance(resolve_engine_version("x/y:latest"), UnknownVersion)
    declared = resolve_engine_version("vllm/vllm-openai:v0.30.0", "0.29.0")
    assert isinstance(declared, EngineVersion)
    assert declared.version == parse("0.29.0")
    assert "spec.engine.version is 0.29.0 but the tag of spec.engine.image" in declared.warnings[0]


def test_an_invalid_declared_version_is_named() -> None:
    version = resolve_engine_version("vllm/vllm-openai:v0.30.0", "newest")
    assert isinstance(version, UnknownVersion)
    assert version.message.startswith("spec.engine.version is 'newest', which is not a vLLM version")


@pytest.mark.parametrize("newer", ["0.34.0", "1.0.0", "0.40.2"])
def test_a_newer_release_is_treated_as_the_newest_verified(newer: str) -> None:
    engine_version = resolve_engine_version("x/y:latest", newer)
    assert isinstance(engine_version, EngineVersion)
    assert f"it is treated as {NEWEST_VERIFIED_VERSION}" in engine_version.warnings[0]
    assert [supports(engine_version.version, feature) for feature in Feature] == [
        supports(NEWEST_VERIFIED_VERSION, feature) and not feature.uses_internals for feature in Feature
    ]


@pytest.mark.parametrize("release", ["0.33.0", "0.33.4", "0.25.1", "0.33.0rc1"])
def test_known_releases_have_no_warning(release: str) -> None:
    assert resolve_engine_version("x/y:latest", release) == EngineVersion(parse(release))


@pytest.mark.parametrize(
    ("feature", "without", "with_it"),
    [
        (Feature.EAGLE31_LLAMA, "0.21.0", "0.22.0"),
        (Feature.EAGLE31_MLA, "0.22.1", "0.23.0"),
        (Feature.EAGLE31_QWEN3, "0.23.0", "0.24.0"),
        (Feature.EAGLE31_SPECULATORS, "0.24.0", "0.25.0"),
        (Feature.SCHEDULE, "0.23.0", "0.24.0+cpu"),
        (Feature.SCHEDULE, "0.24.0rc1", "0.24.0.post1"),
        (Feature.SCHEDULE_DATA_PARALLEL_GUARD, "0.25.1", "0.26.0"),
        (Feature.ADAPTIVE_DSPARK, "0.27.1", "0.28.0"),
        (Feature.ADAPTIVE, "0.29.0", "0.30.0"),
        (Feature.PIPELINE_PARALLEL, "0.29.0", "0.30.0"),
        (Feature.MEDUSA, "0.33.0", "0.32.0+cpu"),
        (Feature.MEDUSA, "0.33.0rc1", "0.32.0"),
        (Feature.P_EAGLE, "0.15.1", "0.16.0"),
        (Feature.DRAFTER_IN_PLACE, "0.25.1", "0.26.0"),
        (Feature.DRAFTER_IN_PLACE, "0.34.0rc1", "0.33.1+cpu"),
    ],
)
def test_features_are_supported_from_and_up_to_a_version(feature: Feature, without: str, with_it: str) -> None:
    assert supports(parse(with_it), feature)
    assert not supports(parse(without), feature)
    assert without in describe_missing_feature(parse(without), feature)


@pytest.mark.parametrize("feature", Feature)
def test_every_feature_has_versions_and_a_source(feature: Feature) -> None:
    assert feature.since <= NEWEST_VERIFIED_VERSION
    assert feature.removed_in is None or feature.since < feature.removed_in <= NEWEST_VERIFIED_VERSION
    assert feature.description
    assert feature.source.startswith(("vllm/", "pull request "))


def test_no_two_features_have_equal_values() -> None:
    """Two equal values of an Enum are one member with two names."""
    assert len(Feature.__members__) == len(list(Feature))


def test_the_minimum_secure_version_is_older_than_the_newest() -> None:
    assert MIN_SECURE_VERSION < NEWEST_VERIFIED_VERSION
