"""Rules that the API server checks at apply: for every rule a rejected object, and the most similar accepted one.

tests/unit/api/messages/test_admission.txt has the messages. The server has to print the same ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from aerie.api.crd import build_root_schema
from aerie.api.validation.admission import find_manifest_errors
from aerie_lab.errors import KubeError, LabError
from aerie_lab.testing import Namespace
from tests.lab.api.conftest import build_manifest

Changes = Mapping[str, Any]
DryRun = Callable[..., dict[str, Any]]

DIGEST = "sha256:" + "0123456789abcdef" * 4
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@dataclass(frozen=True)
class Case:
    """A rejected object, and an accepted one."""

    name: str
    rejected: Changes
    field: str
    """Field that the message names."""
    accepted: Changes

    @property
    def message(self) -> str:
        """The message about the rejected object, without its field."""
        (error,) = find_manifest_errors(build_manifest(self.rejected))
        field, separator, message = error.partition(": ")
        assert (field, separator) == (self.field, ": ")
        return message.removesuffix(".")


def claim(path: str) -> Changes:
    return {"model.source": {"persistentVolumeClaim": {"claimName": "models", "path": path}}}


def image(reference: str = f"registry.example/llama@{DIGEST}", path: str = "/") -> Changes:
    return {"model.source": {"image": {"reference": reference, "path": path}}}


def variable(**fields: Any) -> Changes:
    return {"engine.env": [{"name": "A", **fields}]}


def container(name: str = "engine", **fields: Any) -> Changes:
    return {"engine.podTemplate": {"spec": {"containers": [{"name": "log"}, {"name": name, **fields}]}}}


def gateway(**fields: Any) -> Changes:
    return {"rollout.traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}], **fields}}}


def shadow(**fields: Any) -> Changes:
    return {"rollout.analysis": {"shadow": fields}}


def prometheus(**fields: Any) -> Changes:
    return {"metrics.source": {"prometheus": {"address": "http://prometheus", **fields}}}


def capture(**fields: Any) -> Changes:
    consent = {"confirmed": True, "basis": "terms of service, section 4"}
    storage = {"persistentVolumeClaim": {"claimName": "prompts"}}
    return {**gateway(), "capture": {"consent": consent, "storage": storage, **fields}}


def redaction_hook(**fields: Any) -> Changes:
    return capture(redaction={"hook": {"image": "registry.example/redact:1", **fields}})


def object_store(**fields: Any) -> Changes:
    return capture(storage={"objectStore": {"bucket": "prompts", "credentialsSecretRef": {"name": "keys"}, **fields}})


CASES = [
    # -- accepted preflight checks, and amounts
    Case(
        "preflight check in lower case",
        {"rollout.preflight": {"acceptedChecks": ["c2"]}},
        "spec.rollout.preflight.acceptedChecks[0]",
        {"rollout.preflight": {"acceptedChecks": ["C2"]}},
    ),
    Case(
        "negative amount",
        {"engine.resources": {"limits": {"nvidia.com/gpu": -1}}},
        "spec.engine.resources.limits[nvidia.com/gpu]",
        {"engine.resources": {"limits": {"nvidia.com/gpu": 1}}},
    ),
    # -- sources
    Case(
        "two sources",
        {"model.source.image": {"reference": f"registry.example/llama@{DIGEST}"}},
        "spec.model.source",
        {},
    ),
    Case(
        "no source",
        {"drafter": {"source": {}}},
        "spec.drafter.source",
        {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models"}}}},
    ),
    Case(
        "branch as revision",
        {"model.source.huggingFace.revision": "main"},
        "spec.model.source.huggingFace.revision",
        {"model.source.huggingFace.revision": COMMIT},
    ),
    Case(
        "claim path from the root",
        claim("/llama"),
        "spec.model.source.persistentVolumeClaim.path",
        claim("llama"),
    ),
    Case(
        "claim path upwards",
        claim("llama/../.."),
        "spec.model.source.persistentVolumeClaim.path",
        claim("llama/..hidden"),
    ),
    Case(
        "image source by tag",
        image("registry.example/llama:1"),
        "spec.model.source.image.reference",
        image(f"registry.example/llama:1@{DIGEST}"),
    ),
    Case(
        "image path not from the root",
        image(path="llama"),
        "spec.model.source.image.path",
        image(path="/llama"),
    ),
    Case(
        "served name with a space",
        {"model.servedName": "llama 8b"},
        "spec.model.servedName",
        {"model.servedName": "meta-llama/Llama-3.1-8B"},
    ),
    # -- engine
    Case(
        "tag without version",
        {"engine.image": "registry.example:5000/vllm:nightly"},
        "spec.engine.version",
        {"engine.image": "registry.example:5000/vllm:nightly", "engine.version": "0.34.0.dev12+gabc"},
    ),
    Case(
        "version with v",
        {"engine.version": "v0.33.0"},
        "spec.engine.version",
        {"engine.version": "0.33.0rc1"},
    ),
    Case(
        "image with a space",
        {"engine.image": "vllm/vllm-openai: v0.33.0", "engine.version": "0.33.0"},
        "spec.engine.image",
        {"engine.image": f"vllm/vllm-openai:v0.33.0-cu130@{DIGEST}"},
    ),
    Case(
        "value before any flag",
        {"engine.args": ["meta-llama/Llama-3.1-8B"]},
        "spec.engine.args",
        {"engine.args": ["--max-model-len", "8192"]},
    ),
    Case(
        "value and valueFrom",
        variable(value="1", valueFrom={"fieldRef": {"fieldPath": "status.podIP"}}),
        "spec.engine.env[0]",
        variable(valueFrom={"fieldRef": {"fieldPath": "status.podIP"}}),
    ),
    Case(
        "two sources of a variable",
        variable(valueFrom={"secretKeyRef": {"name": "a", "key": "b"}, "configMapKeyRef": {"name": "a", "key": "b"}}),
        "spec.engine.env[0].valueFrom",
        variable(valueFrom={"secretKeyRef": {"name": "a", "key": "b"}}),
    ),
    Case(
        "two values for HF_TOKEN",
        {"engine.tokenSecretRef": {"name": "hub"}, "engine.env": [{"name": "HF_TOKEN", "value": "hf_1"}]},
        "spec.engine.env",
        {"engine.tokenSecretRef": {"name": "hub"}, "engine.env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]},
    ),
    # -- podTemplate
    Case(
        "args of the engine container",
        container(args=["--max-model-len=8192"]),
        "spec.engine.podTemplate.spec.containers[1].args",
        container("side", args=["--max-model-len=8192"]),
    ),
    Case(
        "image of the engine container",
        container(image="vllm/vllm-openai:v0.33.0"),
        "spec.engine.podTemplate.spec.containers[1].image",
        container("side", image="vllm/vllm-openai:v0.33.0"),
    ),
    Case(
        "the engine's port under another name",
        container(ports=[{"containerPort": 8000, "name": "api"}]),
        "spec.engine.podTemplate.spec.containers[1].ports",
        container(ports=[{"containerPort": 8000, "name": "http"}, {"containerPort": 8000}, {"containerPort": 1, "name": "api"}]),
    ),
    Case(
        "the engine's port by another number",
        container(ports=[{"containerPort": 9000, "name": "http"}]),
        "spec.engine.podTemplate.spec.containers[1].ports",
        container("side", ports=[{"containerPort": 9000, "name": "http"}]),
    ),
    Case(
        "restart policy Never",
        {"engine.podTemplate": {"spec": {"restartPolicy": "Never"}}},
        "spec.engine.podTemplate.spec.restartPolicy",
        {"engine.podTemplate": {"spec": {"restartPolicy": "Always"}}},
    ),
    Case(
        "reserved label",
        {"engine.podTemplate": {"metadata": {"labels": {"aerie.dev/revision": "mine"}}}},
        "spec.engine.podTemplate.metadata.labels",
        {"engine.podTemplate": {"metadata": {"labels": {"example.com/aerie.dev": "mine"}}}},
    ),
    # -- speculation
    Case(
        "maxSpeculativeTokens below numSpeculativeTokens",
        {"speculation.numSpeculativeTokens": 5, "speculation.tuning.maxSpeculativeTokens": 4},
        "spec.speculation.tuning.maxSpeculativeTokens",
        {"speculation.numSpeculativeTokens": 5, "speculation.tuning.maxSpeculativeTokens": 5},
    ),
    Case(
        "maxSpeculativeTokens below numSpeculativeTokens in mode Recommend",
        {"speculation.numSpeculativeTokens": 8, "speculation.tuning.mode": "Recommend"},
        "spec.speculation.tuning.maxSpeculativeTokens",
        {"speculation.numSpeculativeTokens": 8, "speculation.tuning.mode": "Off"},
    ),
    Case(
        "empty objective",
        {"speculation.tuning.slo": {"percentile": 95}},
        "spec.speculation.tuning.slo",
        {"speculation.tuning.slo": {"timeToFirstToken": "1s"}},
    ),
    Case(
        "history window of less than two intervals",
        {"speculation.tuning.decisionInterval": "1h", "speculation.tuning.historyWindow": "90m"},
        "spec.speculation.tuning.historyWindow",
        {"speculation.tuning.decisionInterval": "45m", "speculation.tuning.historyWindow": "90m"},
    ),
    # -- rollout
    Case(
        "falling step weights",
        {"rollout.canary.stepWeights": [50, 25]},
        "spec.rollout.canary.stepWeights",
        {"rollout.canary.stepWeights": [25, 50, 75]},
    ),
    Case(
        "equal step weights",
        {"rollout.canary.stepWeights": [25, 25]},
        "spec.rollout.canary.stepWeights",
        {"rollout.canary.stepWeights": []},
    ),
    Case(
        "minDuration beyond maxDuration",
        {"rollout.analysis": {"minDuration": "3h56m"}},
        "spec.rollout.analysis.minDuration",
        {"rollout.analysis": {"minDuration": "3h55m"}},
    ),
    Case(
        "blocks beyond maxDuration",
        {"rollout.analysis": {"blockDuration": "10m", "minBlocks": 24}},
        "spec.rollout.analysis.minBlocks",
        {"rollout.analysis": {"blockDuration": "10m", "minBlocks": 23}},
    ),
    Case(
        "margin in percent",
        {"rollout.analysis.margin": 2},
        "spec.rollout.analysis.margin",
        {"rollout.analysis.margin": 0.2},
    ),
    Case(
        "margin of zero",
        {"rollout.analysis.margin": 0},
        "spec.rollout.analysis.margin",
        {"rollout.analysis.goal": "Superior"},
    ),
    Case(
        "failure margin in percent",
        {"rollout.analysis.failureMargin": 0.5},
        "spec.rollout.analysis.failureMargin",
        {"rollout.analysis.failureMargin": 0.2},
    ),
    Case(
        "Gateway mode without a Gateway",
        {"rollout.traffic": {"mode": "Gateway"}},
        "spec.rollout.traffic.gateway",
        gateway(),
    ),
    Case(
        "a Gateway in Service mode",
        {"rollout.traffic": {"gateway": {"parentRefs": [{"name": "public"}]}}},
        "spec.rollout.traffic.gateway",
        {"rollout.traffic": {"mode": "Service"}},
    ),
    *(
        Case(
            f"disruption of {rejected_value}",
            {"rollout.disruption.maxUnavailable": rejected_value},
            "spec.rollout.disruption.maxUnavailable",
            {"rollout.disruption.maxUnavailable": accepted_value},
        )
        for rejected_value, accepted_value in ((0, 1), (1001, 1000), ("0%", "1%"), ("101%", "100%"), ("all", "25%"))
    ),
    Case(
        "maxUnavailable without budgets",
        {"rollout.disruption": {"budget": "None", "maxUnavailable": 2}},
        "spec.rollout.disruption.maxUnavailable",
        {"rollout.disruption": {"budget": "None"}},
    ),
    Case(
        "host name with a scheme",
        gateway(hostnames=["https://chat.example.com"]),
        "spec.rollout.traffic.gateway.hostnames[0]",
        gateway(hostnames=["chat.example.com", "*.example.com"]),
    ),
    Case(
        "preflight check in lower case, second entry",
        {"rollout.preflight.acceptedChecks": ["C2", "c2"]},
        "spec.rollout.preflight.acceptedChecks[1]",
        {"rollout.preflight.acceptedChecks": ["C2", "C29"]},
    ),
    Case(
        "shadow evaluation with prompts from nowhere",
        shadow(source="Prompts"),
        "spec.rollout.analysis.shadow.prompts",
        shadow(source="Prompts", prompts={"configMap": "prompts"}),
    ),
    Case(
        "prompts of a shadow evaluation that sends none",
        shadow(prompts={"configMap": "prompts"}),
        "spec.rollout.analysis.shadow.prompts",
        shadow(source="None"),
    ),
    Case(
        "shadow evaluation by copies of requests without a gateway",
        shadow(source="Mirror"),
        "spec.rollout.analysis.shadow.source",
        {**shadow(source="Mirror"), **gateway()},
    ),
    Case(
        "scrape interval too long for a block",
        {"metrics.scrapeInterval": "61s"},
        "spec.metrics.scrapeInterval",
        {"metrics.scrapeInterval": "1m"},
    ),
    *(
        Case(
            f"Prometheus at {rejected_address}",
            prometheus(address=rejected_address),
            "spec.metrics.source.prometheus.address",
            prometheus(address=accepted_address),
        )
        for rejected_address, accepted_address in [
            ("prometheus.monitoring:9090", "http://prometheus.monitoring:9090"),
            ("https://me:secret@thanos.example", "https://thanos.example"),
            ("http://10.0.0.1:9090/api/v1/", "http://10.0.0.1:9090/"),
            ("http://mimir/prometheus?tenant=a", "http://mimir/prometheus"),
            ("http://[fd00::1]:9090x", "http://[fd00::1]:9090"),
        ]
    ),
    Case(
        "invalid Prometheus label name",
        prometheus(matchLabels={"kubernetes.io/cluster": "west"}),
        "spec.metrics.source.prometheus.matchLabels",
        prometheus(matchLabels={"kubernetes_io_cluster": 'west, or "east"'}),
    ),
    # -- capture
    Case(
        "capture without consent",
        capture(consent={"confirmed": False, "basis": "terms of service, section 4"}),
        "spec.capture.consent.confirmed",
        capture(),
    ),
    Case(
        "sampling rate in percent",
        capture(sampling={"rate": 2.0}),
        "spec.capture.sampling.rate",
        capture(sampling={"rate": 1.0}),
    ),
    Case(
        "size in another unit",
        capture(retention={"maxSize": "5G"}),
        "spec.capture.retention.maxSize",
        capture(retention={"maxSize": "5Gi"}),
    ),
    Case(
        "size too small",
        capture(retention={"maxSize": "63Mi"}),
        "spec.capture.retention.maxSize",
        capture(retention={"maxSize": "64Mi"}),
    ),
    Case(
        "pattern that matches an empty text",
        capture(redaction={"patterns": [{"pattern": "[0-9]*"}]}),
        "spec.capture.redaction.patterns[0].pattern",
        capture(redaction={"patterns": [{"pattern": "[0-9]+"}]}),
    ),
    Case(
        "hook on the recorder's port",
        redaction_hook(port=8000),
        "spec.capture.redaction.hook.port",
        redaction_hook(port=8001),
    ),
    Case(
        "hook's image with a space",
        redaction_hook(image="registry.example/redact: 1"),
        "spec.capture.redaction.hook.image",
        redaction_hook(image=f"registry.example/redact@{DIGEST}"),
    ),
    Case(
        "hook's path not from the root",
        redaction_hook(path="redact"),
        "spec.capture.redaction.hook.path",
        redaction_hook(path="/v1/redact"),
    ),
    Case(
        "two storages",
        capture(
            storage={
                "persistentVolumeClaim": {"claimName": "prompts"},
                "objectStore": {"bucket": "prompts", "credentialsSecretRef": {"name": "keys"}},
            }
        ),
        "spec.capture.storage",
        object_store(),
    ),
    Case(
        "storage path upwards",
        capture(storage={"persistentVolumeClaim": {"claimName": "prompts", "path": "../chat"}}),
        "spec.capture.storage.persistentVolumeClaim.path",
        capture(storage={"persistentVolumeClaim": {"claimName": "prompts", "path": "chat/..a"}}),
    ),
    Case(
        "bucket in upper case",
        object_store(bucket="Prompts"),
        "spec.capture.storage.objectStore.bucket",
        object_store(bucket="prompts.2026"),
    ),
    Case(
        "pattern with a class that RE2 does not have",
        capture(redaction={"patterns": [{"pattern": r"\p{Letter}+"}]}),
        "spec.capture.redaction.patterns[0].pattern",
        capture(redaction={"patterns": [{"pattern": r"\p{L}+"}]}),
    ),
    Case(
        "prefix that leads elsewhere",
        object_store(prefix="team/../x"),
        "spec.capture.storage.objectStore.prefix",
        object_store(prefix="team/..x"),
    ),
    Case(
        "prefix from the root",
        object_store(prefix="/chat"),
        "spec.capture.storage.objectStore.prefix",
        object_store(prefix="chat/eu"),
    ),
    Case(
        "object store without scheme",
        object_store(endpoint="minio.team.svc:9000"),
        "spec.capture.storage.objectStore.endpoint",
        object_store(endpoint="http://minio.team.svc:9000"),
    ),
]

FLAGS = [
    (["--model=x", "--model"], "--model-impl=vllm"),
    (["--revision=main", "--rev"], "--tokenizer-revision=main"),
    (["--served-model-name=x", "--served_model_name", "--served"], "--seed=1"),
    (
        ["--speculative-config={}", "--speculative_config", "--speculative-config.method=ngram", "--spec-method", "-sc"],
        "--specialize-active-lora",
    ),
    (["--host=0.0.0.0", "--host"], "--hf-overrides={}"),
    (["--port=80", "--port", "--por"], "--pooler-config={}"),
    (["--uds=/s", "--uds"], "--uvicorn-log-level=info"),
    (["--shutdown-timeout=1", "--shutdown_timeout", "--shutdown"], "--show-hidden-metrics-for-version=0.32"),
    (["--hf-token=hf_1", "--hf_tok"], "--hf-config-path=x"),
    (["--config=/etc/vllm.yaml", "--config"], "--config-format=hf"),
    (["--disable-log-stats", "--disable_log_stats"], "--disable-log-requests"),
    (["--ssl-keyfile=k", "--ssl_certfile"], "--safetensors-load-strategy=lazy"),
]
"""Reserved flags, in all spellings that vLLM's parser accepts, and a similar flag that users may set."""
CASES += [
    Case(
        f"flag {argument}",
        {"engine.args": ["--max-model-len=8192", argument]},
        "spec.engine.args[1]",
        {"engine.args": ["--max-model-len=8192", similar]},
    )
    for arguments, similar in FLAGS
    for argument in arguments
]


REJECTED_OPTIONS: dict[str, Any] = {
    "fly_entropy_threshold": 0.5,
    "fly_entropy_top_k": 4,
    "fly_window_size": 4,
    "synthetic_acceptance_length": 2.5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
    "suffix_decoding_max_cached_requests": 100,
    "suffix_decoding_max_spec_factor": 1.5,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_min_token_prob": 0.1,
    "draft_sample_method": "probabilistic",
    "num_speculative_tokens": 3,
    "method": "eagle3",
    "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "revision": COMMIT,
    "enable_adaptive_verification": True,
    "tensor_parallel_size": 1,
    "dspark_draft_topk": 4,
    "index_share_for_mtp_iteration": True,
    "use_heterogeneous_vocab": True,
    "xpress_topc": 8,
}
"""Keys of the speculative config that are no engine options, each with a value."""
CASES += [
    Case(
        f"engine option {key}",
        {"speculation.engineOptions": {"enforce_eager": True, key: value}},
        f"spec.speculation.engineOptions.{key}",
        {"speculation.engineOptions": {"enforce_eager": True, "draft_tensor_parallel_size": 1}},
    )
    for key, value in REJECTED_OPTIONS.items()
]


NAME_MESSAGE, SERVED_NAME_MESSAGE = (rule["message"] for rule in build_root_schema()["x-kubernetes-validations"])


def get_rejection(dry_run: DryRun, changes: Changes) -> str:
    with pytest.raises(KubeError) as caught:
        dry_run(changes)
    assert caught.value.status == 422, caught.value
    return caught.value.message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rule_rejects_and_accepts(dry_run: DryRun, case: Case) -> None:
    message = get_rejection(dry_run, case.rejected)
    assert f"{case.field}: " in message
    assert message.endswith(f": {case.message}"), message  # several messages would be in brackets
    dry_run(case.accepted)
    assert find_manifest_errors(build_manifest(case.accepted)) == []


@pytest.mark.parametrize("name", ["llama.8b", "8b-llama"])
def test_name_that_is_no_service_name_is_rejected(dry_run: DryRun, name: str) -> None:
    with pytest.raises(KubeError) as caught:
        dry_run({}, name)
    assert caught.value.message.endswith(f": {NAME_MESSAGE}")


def test_served_name_is_immutable(namespace: Namespace, minimal_resource: dict[str, Any]) -> None:
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(minimal_resource))
    minimal_resource["spec"]["model"]["servedName"] = "llama"
    with pytest.raises(LabError) as caught:
        namespace.kubectl("apply", "-f", "-", stdin=json.dumps(minimal_resource))
    assert f"spec.model.servedName: Invalid value: {SERVED_NAME_MESSAGE}" in str(caught.value)
    minimal_resource["spec"]["model"]["servedName"] = "chat"  # the default
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(minimal_resource))


def test_every_rule_has_a_case(crd: dict[str, Any]) -> None:
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert [rule["message"] for rule in root["x-kubernetes-validations"]] == [NAME_MESSAGE, SERVED_NAME_MESSAGE]
    messages = {case.message for case in CASES}
    rules = _rules(root["properties"]["spec"])
    missing = {rule["message"] for rule in rules if not any(_matches(rule, message) for message in messages)}
    assert {message for message in missing if "duration" not in message} == set()  # those are in test_bounds.py


def _rules(node: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    yield from node.get("x-kubernetes-validations", [])
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from _rules(node[key])
    for child in node.get("properties", {}).values():
        yield from _rules(child)


def _matches(rule: Mapping[str, str], message: str) -> bool:
    if "messageExpression" not in rule:
        return rule["message"] == message
    text = rule["messageExpression"].split("'.format(")[0].removeprefix("'")
    return re.fullmatch(re.sub("%[ds]", ".+", re.escape(text)), message) is not None
