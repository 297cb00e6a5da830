"""Rules of spec.capture: what is rejected at apply, and the message."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.api.validation.admission import find_manifest_errors
from aerie.recorder.redaction import Pattern, PatternError, Redaction

CONSENT = {"confirmed": True, "basis": "terms of service, section 4"}
CLAIM: dict[str, Any] = {"persistentVolumeClaim": {"claimName": "prompts"}}
STORE: dict[str, Any] = {"bucket": "prompts", "credentialsSecretRef": {"name": "keys"}}


def find_errors(**capture: Any) -> list[str]:
    spec = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
        "engine": {"image": "vllm/vllm-openai:v0.33.0"},
        "capture": {"consent": CONSENT, "storage": CLAIM} | capture,
    }
    document = {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": {"name": "chat"}, "spec": spec}
    return find_manifest_errors(document)


@pytest.mark.parametrize(
    "capture",
    [
        {},
        {"sampling": {"rate": 1.0}, "retention": {"duration": "1h", "maxSize": "64Mi"}},
        {"redaction": {"patterns": [{"pattern": r"(?i)\bcard: [0-9]{13,19}$"}], "hook": {"image": "registry/redact@sha256:1"}}},
        {"storage": {"objectStore": STORE | {"endpoint": "http://minio.team.svc:9000", "prefix": "a/b"}}},
        {"storage": {"objectStore": STORE | {"prefix": "a..b/.c"}}},
    ],
)
def test_accepted(capture: dict[str, Any]) -> None:
    assert find_errors(**capture) == []


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ({"consent": CONSENT | {"confirmed": False}}, "consent.confirmed: prompts are recorded only with the consent"),
        ({"consent": {"confirmed": True}}, "consent.basis is missing"),
        ({"consent": CONSENT | {"basis": "yes"}}, "consent.basis"),
        ({"sampling": {"rate": 0.0}}, "sampling.rate: write the share of the requests as a fraction from 0.0001 to 1"),
        ({"sampling": {"rate": 2.0}}, "sampling.rate: write the share"),
        ({"sampling": {"maxPerMinute": 0}}, "sampling.maxPerMinute"),
        ({"retention": {"duration": "59m"}}, "retention.duration: write a duration from 1h to 8760h"),
        ({"retention": {"maxSize": "63Mi"}}, "retention.maxSize: write a size of at least 64Mi"),
        ({"retention": {"maxSize": "5G"}}, "retention.maxSize: write a size of at least 64Mi"),
        ({"redaction": {"patterns": [{"pattern": "(a"}]}}, "patterns[0].pattern: the regular expression has to be RE2"),
        ({"redaction": {"patterns": [{"pattern": "a*"}]}}, "patterns[0].pattern: the regular expression has to be RE2"),
        ({"storage": {"objectStore": STORE | {"prefix": ".."}}}, "objectStore.prefix: the prefix .. has a part . or .."),
        ({"storage": {"objectStore": STORE | {"prefix": "."}}}, "objectStore.prefix: the prefix . has a part . or .."),
        ({"storage": {"objectStore": STORE | {"prefix": "team/../x"}}}, "the prefix team/../x has a part . or .."),
        ({"redaction": {"hook": {"image": "a", "port": 8000}}}, "hook.port: the recorder listens on port 8000"),
        ({"redaction": {"hook": {"image": "a b"}}}, "hook.image: write an image reference without white space"),
        ({"redaction": {"hook": {"image": "a", "path": "redact"}}}, "hook.path: write a path that begins with /"),
        ({"storage": {}}, "storage: write exactly one of persistentVolumeClaim and objectStore, not 0 of them"),
        (
            {"storage": CLAIM | {"objectStore": STORE}},
            "storage: write exactly one of persistentVolumeClaim and objectStore, not 2",
        ),
        (
            {"storage": {"persistentVolumeClaim": {"claimName": "a", "path": "../b"}}},
            "path: write the folder relative to the root",
        ),
        ({"storage": {"objectStore": STORE | {"endpoint": "minio:9000"}}}, "endpoint: write the URL of the store"),
        ({"storage": {"objectStore": STORE | {"endpoint": "https://user@host"}}}, "endpoint: write the URL of the store"),
        ({"storage": {"objectStore": STORE | {"prefix": "/a"}}}, "prefix: write the prefix without / at either end"),
        ({"storage": {"objectStore": STORE | {"bucket": "A_b"}}}, "bucket: write the name of a bucket"),
    ],
)
def test_rejected(capture: dict[str, Any], message: str) -> None:
    errors = find_errors(**capture)
    assert [error for error in errors if message in error] == errors[:1], errors


PATTERNS = {
    r"\p{L}+@": True,
    r"[\pL\pN_]{2,}": True,
    r"\p{Old_Italic}|\p{^Greek}": True,
    r"a\z": True,
    r"(?U)a+": True,
    r"\Qa.b\E": True,
    r"x(?i)y": True,
    r"\x{41}": True,
    r"\\\\p[{]letter}": True,
    r"(?=a)b": False,
    r"a(?!b)": False,
    r"(a)\1": False,
    r"a++": False,
    r"\p{Letter}+": False,
    r"\P{^Uppercase_Letter}": False,
    r"\p{Private_Use}": False,
    r"\p{lu}": False,
}


@pytest.mark.parametrize(("pattern", "is_valid"), PATTERNS.items())
def test_patterns_are_checked_as_the_recorder_reads_them(pattern: str, is_valid: bool) -> None:
    errors = find_errors(redaction={"patterns": [{"pattern": pattern}]})
    assert (errors == []) is is_valid, errors
    if is_valid:
        Redaction([Pattern(pattern, "x")])
    else:
        with pytest.raises(PatternError):
            Redaction([Pattern(pattern, "x")])
