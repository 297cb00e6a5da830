"""What the API server refuses at apply: for every rule an object, the sentence that it gets, and the nearest that is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from aerie.api.validation.admission import find_manifest_errors
from aerie_lab.errors import KubeError, LabError
from aerie_lab.testing import Namespace
from tests.lab.api.conftest import changed

Changes = Mapping[str, Any]
Offer = Callable[..., dict[str, Any]]

FILES = "can come to mean other files, and pods of one revision would then serve different weights"
DIGEST = "sha256:" + "0123456789abcdef" * 4
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
PORTS = (
    "the engine listens on port 8000, and Services, probes and metrics find it by the name http: give other ports other names "
    "and numbers"
)
IN_POD = "and clients use the Service that bears the name of the resource"


@dataclass(frozen=True)
class Case:
    """An object that is refused and one that is not."""

    name: str
    refused: Changes
    field: str
    says: str
    taken: Changes


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


def prometheus(**fields: Any) -> Changes:
    return {"metrics.source": {"prometheus": {"address": "http://prometheus", **fields}}}


CASES = [
    # -- what preflight lets pass, and amounts
    Case(
        "no check's id",
        {"rollout.preflight": {"acceptedChecks": ["c2"]}},
        "spec.rollout.preflight.accept[0]",
        "write the id of a check, such as C2; docs/preflight.md lists them",
        {"rollout.preflight": {"acceptedChecks": ["C2"]}},
    ),
    Case(
        "an amount below 0",
        {"engine.resources": {"limits": {"nvidia.com/gpu": -1}}},
        "spec.engine.resources.limits[nvidia.com/gpu]",
        "write an amount of 0 or more",
        {"engine.resources": {"limits": {"nvidia.com/gpu": 1}}},
    ),
    # -- sources
    Case(
        "two sources",
        {"model.source.image": {"reference": f"registry.example/llama@{DIGEST}"}},
        "spec.model.source",
        "write exactly one of huggingFace, persistentVolumeClaim and image, not 2 of them",
        {},
    ),
    Case(
        "no source",
        {"drafter": {"source": {}}},
        "spec.drafter.source",
        "write exactly one of huggingFace, persistentVolumeClaim and image, not 0 of them",
        {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models"}}}},
    ),
    Case(
        "branch as revision",
        {"model.source.huggingFace.revision": "main"},
        "spec.model.source.huggingFace.revision",
        "write the full commit of the repository (40 characters of 0-9 and a-f; its page on the Hub lists them under Files, "
        f"History): a branch, a tag or a short commit {FILES}",
        {"model.source.huggingFace.revision": COMMIT},
    ),
    Case(
        "claim path from the root",
        claim("/llama"),
        "spec.model.source.persistentVolumeClaim.path",
        "write the folder relative to the root of the claim, without .., such as models/llama-3.1-8b",
        claim("llama"),
    ),
    Case(
        "claim path upwards",
        claim("llama/../.."),
        "spec.model.source.persistentVolumeClaim.path",
        "write the folder relative to the root of the claim, without .., such as models/llama-3.1-8b",
        claim("llama/..hidden"),
    ),
    Case(
        "image source by tag",
        image("registry.example/llama:1"),
        "spec.model.source.image.reference",
        f"write the image with its digest, as registry/name@sha256:<64 hexadecimal characters>: a tag {FILES}",
        image(f"registry.example/llama:1@{DIGEST}"),
    ),
    Case(
        "image path not from the root",
        image(path="llama"),
        "spec.model.source.image.path",
        "write the folder as an absolute path inside the image, without .., such as / or /models/llama-3.1-8b",
        image(path="/llama"),
    ),
    Case(
        "served name with a space",
        {"model.servedName": "llama 8b"},
        "spec.model.servedName",
        "write letters, digits and . _ : / - only, a letter or digit first: clients send it as `model`",
        {"model.servedName": "meta-llama/Llama-3.1-8B"},
    ),
    # -- engine
    Case(
        "tag without version",
        {"engine.image": "registry.example:5000/vllm:nightly"},
        "spec.engine.version",
        "engine.version is missing, and the tag of engine.image is no version of vLLM that Aerie goes by "
        "(those of vllm-openai are, also in a mirror): write the version of vLLM in the image, such as "
        "0.33.0, because flags and metrics differ from version to version",
        {"engine.image": "registry.example:5000/vllm:nightly", "engine.version": "0.34.0.dev12+gabc"},
    ),
    Case(
        "version with v",
        {"engine.version": "v0.33.0"},
        "spec.engine.version",
        "write the version of vLLM with three numbers and no v, such as 0.33.0",
        {"engine.version": "0.33.0rc1"},
    ),
    Case(
        "image with a space",
        {"engine.image": "vllm/vllm-openai: v0.33.0", "engine.version": "0.33.0"},
        "spec.engine.image",
        "write an image reference, as registry/name:tag or registry/name:tag@sha256:<64 hexadecimal characters>",
        {"engine.image": f"vllm/vllm-openai:v0.33.0-cu130@{DIGEST}"},
    ),
    Case(
        "value before any flag",
        {"engine.args": ["meta-llama/Llama-3.1-8B"]},
        "spec.engine.args",
        "the first argument is a value without a flag: write a flag first; the model belongs in spec.model.source",
        {"engine.args": ["--max-model-len", "8192"]},
    ),
    Case(
        "value and valueFrom",
        variable(value="1", valueFrom={"fieldRef": {"fieldPath": "status.podIP"}}),
        "spec.engine.env[0]",
        "write either value or valueFrom, not both",
        variable(valueFrom={"fieldRef": {"fieldPath": "status.podIP"}}),
    ),
    Case(
        "two origins of a variable",
        variable(valueFrom={"secretKeyRef": {"name": "a", "key": "b"}, "configMapKeyRef": {"name": "a", "key": "b"}}),
        "spec.engine.env[0].valueFrom",
        "write exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        variable(valueFrom={"secretKeyRef": {"name": "a", "key": "b"}}),
    ),
    Case(
        "two values for HF_TOKEN",
        {"engine.tokenSecretRef": {"name": "hub"}, "engine.env": [{"name": "HF_TOKEN", "value": "hf_1"}]},
        "spec.engine.env",
        "tokenSecretRef sets the variable HF_TOKEN, which env sets too: leave one of them out",
        {"engine.tokenSecretRef": {"name": "hub"}, "engine.env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]},
    ),
    # -- podTemplate
    Case(
        "args of the engine",
        container(args=["--max-model-len=8192"]),
        "spec.engine.podTemplate.spec.containers[1].args",
        "args would replace those by which Aerie gives the engine its model and drafter: write further arguments in "
        "spec.engine.args",
        container("side", args=["--max-model-len=8192"]),
    ),
    Case(
        "image of the engine",
        container(image="vllm/vllm-openai:v0.33.0"),
        "spec.engine.podTemplate.spec.containers[1].image",
        "the engine's image belongs in spec.engine.image, because the version of vLLM is told by it",
        container("side", image="vllm/vllm-openai:v0.33.0"),
    ),
    Case(
        "the engine's port under another name",
        container(ports=[{"containerPort": 8000, "name": "api"}]),
        "spec.engine.podTemplate.spec.containers[1].ports",
        PORTS,
        container(ports=[{"containerPort": 8000, "name": "http"}, {"containerPort": 8000}, {"containerPort": 1, "name": "api"}]),
    ),
    Case(
        "the engine's port by another number",
        container(ports=[{"containerPort": 9000, "name": "http"}]),
        "spec.engine.podTemplate.spec.containers[1].ports",
        PORTS,
        container("side", ports=[{"containerPort": 9000, "name": "http"}]),
    ),
    Case(
        "engines that end",
        {"engine.podTemplate": {"spec": {"restartPolicy": "Never"}}},
        "spec.engine.podTemplate.spec.restartPolicy",
        "engines are restarted always: leave restartPolicy out, or write Always",
        {"engine.podTemplate": {"spec": {"restartPolicy": "Always"}}},
    ),
    Case(
        "a label of Aerie's",
        {"engine.podTemplate": {"metadata": {"labels": {"aerie.dev/revision": "mine"}}}},
        "spec.engine.podTemplate.metadata.labels",
        "labels that begin with aerie.dev/ are those by which Aerie finds its pods: leave them out",
        {"engine.podTemplate": {"metadata": {"labels": {"example.com/aerie.dev": "mine"}}}},
    ),
    # -- speculation
    Case(
        "maxSpeculativeTokens below tokens",
        {"speculation.numSpeculativeTokens": 5, "speculation.tuning.maxSpeculativeTokens": 4},
        "spec.speculation.tuning.maxSpeculativeTokens",
        "tuning.maxSpeculativeTokens is 4, below tokens, which is 5: raise tuning.maxSpeculativeTokens or lower tokens",
        {"speculation.numSpeculativeTokens": 5, "speculation.tuning.maxSpeculativeTokens": 5},
    ),
    Case(
        "maxSpeculativeTokens below tokens, only recommended",
        {"speculation.numSpeculativeTokens": 8, "speculation.tuning.mode": "Recommend"},
        "spec.speculation.tuning.maxSpeculativeTokens",
        "tuning.maxSpeculativeTokens is 7, below tokens, which is 8: raise tuning.maxSpeculativeTokens or lower tokens",
        {"speculation.numSpeculativeTokens": 8, "speculation.tuning.mode": "Off"},
    ),
    Case(
        "empty objective",
        {"speculation.tuning.slo": {"percentile": 95}},
        "spec.speculation.tuning.slo",
        "write timePerOutputToken, timeToFirstToken or both, or leave slo out",
        {"speculation.tuning.slo": {"timeToFirstToken": "1s"}},
    ),
    Case(
        "history of less than two intervals",
        {"speculation.tuning.interval": "1h", "speculation.tuning.history": "90m"},
        "spec.speculation.tuning.history",
        "history (90m) is shorter than two intervals (1h), and a decision needs more than the figures of one: lengthen history "
        "or shorten interval",
        {"speculation.tuning.interval": "45m", "speculation.tuning.history": "90m"},
    ),
    # -- rollout
    Case(
        "ramp falls",
        {"rollout.canary.stepWeights": [50, 25]},
        "spec.rollout.canary.stepWeights",
        "the shares [50, 25] do not rise: write each larger than the one before, such as [25, 50]; the last step to 100 needs no "
        "entry",
        {"rollout.canary.stepWeights": [25, 50, 75]},
    ),
    Case(
        "ramp stands still",
        {"rollout.canary.stepWeights": [25, 25]},
        "spec.rollout.canary.stepWeights",
        "the shares [25, 25] do not rise: write each larger than the one before, such as [25, 50]; the last step to 100 needs no "
        "entry",
        {"rollout.canary.stepWeights": []},
    ),
    Case(
        "soak beyond the deadline",
        {"rollout.analysis": {"minDuration": "3h56m"}},
        "spec.rollout.analysis.minDuration",
        "warmup (5m) and soak (3h56m) together are longer than deadline (4h), so no canary could ever be accepted: raise "
        "deadline, or shorten soak or warmup",
        {"rollout.analysis": {"minDuration": "3h55m"}},
    ),
    Case(
        "blocks beyond the deadline",
        {"rollout.analysis": {"block": "10m", "minBlocks": 24}},
        "spec.rollout.analysis.minBlocks",
        "warmup (5m) and 24 blocks of 10m together are longer than deadline (4h), so no canary could ever be judged: raise "
        "deadline, or lower minBlocks, block or warmup",
        {"rollout.analysis": {"block": "10m", "minBlocks": 23}},
    ),
    Case(
        "margin in percent",
        {"rollout.analysis.margin": 2},
        "spec.rollout.analysis.margin",
        "write the margin as a fraction from 0.001 to 0.2: 0.02 stands for 2 %; to accept only what is better, write goal: "
        "Superior",
        {"rollout.analysis.margin": 0.2},
    ),
    Case(
        "margin nought",
        {"rollout.analysis.margin": 0},
        "spec.rollout.analysis.margin",
        "write the margin as a fraction from 0.001 to 0.2: 0.02 stands for 2 %; to accept only what is better, write goal: "
        "Superior",
        {"rollout.analysis.goal": "Superior"},
    ),
    Case(
        "failure margin in percent",
        {"rollout.analysis.failureMargin": 0.5},
        "spec.rollout.analysis.failureMargin",
        "write the share as a fraction from 0.001 to 0.2: 0.005 stands for half a percent of the requests",
        {"rollout.analysis.failureMargin": 0.2},
    ),
    Case(
        "Gateway mode without a Gateway",
        {"rollout.traffic": {"mode": "Gateway"}},
        "spec.rollout.traffic.gateway",
        "mode Gateway needs to know the Gateway: write gateway.parentRefs, or mode: Service",
        gateway(),
    ),
    Case(
        "a Gateway in Service mode",
        {"rollout.traffic": {"gateway": {"parentRefs": [{"name": "public"}]}}},
        "spec.rollout.traffic.gateway",
        "gateway is of no use in mode Service: write mode: Gateway, or leave gateway out",
        {"rollout.traffic": {"mode": "Service"}},
    ),
    *(
        Case(
            f"disruption of {given}",
            {"rollout.disruption.maxUnavailable": given},
            "spec.rollout.disruption.maxUnavailable",
            "write a number of pods from 1 to 1000, or a percentage from 1% to 100%; with 0 no node could be drained",
            {"rollout.disruption.maxUnavailable": instead},
        )
        for given, instead in ((0, 1), (1001, 1000), ("0%", "1%"), ("101%", "100%"), ("all", "25%"))
    ),
    Case(
        "disruptions of no budget",
        {"rollout.disruption": {"budget": "None", "maxUnavailable": 2}},
        "spec.rollout.disruption.maxUnavailable",
        "maxUnavailable is of no use with budget: None: leave one of them out",
        {"rollout.disruption": {"budget": "None"}},
    ),
    Case(
        "host name with a scheme",
        gateway(hostnames=["https://chat.example.com"]),
        "spec.rollout.traffic.gateway.hostnames[0]",
        "write a host name in lower case without scheme, port and path, such as chat.example.com",
        gateway(hostnames=["chat.example.com", "*.example.com"]),
    ),
    Case(
        "no id of a check",
        {"rollout.preflight.acceptedChecks": ["C2", "c2"]},
        "spec.rollout.preflight.accept[1]",
        "write the id of a check, such as C2; docs/preflight.md lists them",
        {"rollout.preflight.acceptedChecks": ["C2", "C29"]},
    ),
    Case(
        "interval too long for a block",
        {"metrics.scrapeInterval": "61s"},
        "spec.metrics.scrapeInterval",
        "metrics.scrapeInterval is more than half of rollout.analysis.blockDuration, and a block is the difference of two readings at least: "
        "shorten metrics.scrapeInterval or lengthen rollout.analysis.blockDuration",
        {"metrics.scrapeInterval": "1m"},
    ),
    *(
        Case(
            f"Prometheus at {bad}",
            prometheus(address=bad),
            "spec.metrics.source.prometheus.address",
            "write the URL of the server as http://host:port or https://host/path, without user, query and /api/v1",
            prometheus(address=good),
        )
        for bad, good in [
            ("prometheus.monitoring:9090", "http://prometheus.monitoring:9090"),
            ("https://me:secret@thanos.example", "https://thanos.example"),
            ("http://10.0.0.1:9090/api/v1/", "http://10.0.0.1:9090/"),
            ("http://mimir/prometheus?tenant=a", "http://mimir/prometheus"),
            ("http://[fd00::1]:9090x", "http://[fd00::1]:9090"),
        ]
    ),
    Case(
        "a label that Prometheus does not know",
        prometheus(matchLabels={"kubernetes.io/cluster": "west"}),
        "spec.metrics.source.prometheus.matchLabels",
        "write names of labels as Prometheus has them, with letters, digits and _ only",
        prometheus(matchLabels={"kubernetes_io_cluster": 'west, or "east"'}),
    ),
]

# Each flag as Aerie's own, in the ways that vLLM's parser reads, and the neighbour that stays with the user.
FLAGS = [
    ("--model", ["--model=x", "--model"], "--model-impl=vllm", "the model belongs in spec.model.source"),
    (
        "--revision",
        ["--revision=main", "--rev"],
        "--tokenizer-revision=main",
        "the commit belongs in spec.model.source.huggingFace.revision",
    ),
    (
        "--served-model-name",
        ["--served-model-name=x", "--served_model_name", "--served"],
        "--seed=1",
        "the name belongs in spec.model.servedName",
    ),
    (
        "--speculative-config",
        ["--speculative-config={}", "--speculative_config", "--speculative-config.method=ngram", "--spec-method", "-sc"],
        "--specialize-active-lora",
        "the drafter belongs in spec.drafter, K in spec.speculation.numSpeculativeTokens",
    ),
    ("--host", ["--host=0.0.0.0", "--host"], "--hf-overrides={}", f"engines listen on the address of their pod, {IN_POD}"),
    ("--port", ["--port=80", "--port", "--por"], "--pooler-config={}", f"engines listen on a port that Aerie gives, {IN_POD}"),
    ("--uds", ["--uds=/s", "--uds"], "--uvicorn-log-level=info", f"engines listen on the address of their pod, {IN_POD}"),
    (
        "--shutdown-timeout",
        ["--shutdown-timeout=1", "--shutdown_timeout", "--shutdown"],
        "--show-hidden-metrics-for-version=0.32",
        "it follows spec.engine.podTemplate.spec.terminationGracePeriodSeconds",
    ),
    (
        "--hf-token",
        ["--hf-token=hf_1", "--hf_tok"],
        "--hf-config-path=x",
        "a token does not belong on a command line, its Secret belongs in spec.engine.tokenSecretRef",
    ),
    (
        "--config",
        ["--config=/etc/vllm.yaml", "--config"],
        "--config-format=hf",
        "Aerie does not see when a file in the pod changes, its flags belong in spec.engine.args one by one",
    ),
    (
        "--disable-log-stats",
        ["--disable-log-stats", "--disable_log_stats"],
        "--disable-log-requests",
        "without the engine's metrics no drafter can be judged",
    ),
    (
        "--ssl-*",
        ["--ssl-keyfile=k", "--ssl_certfile"],
        "--safetensors-load-strategy=lazy",
        "probes and metrics use plain HTTP, TLS belongs at the gateway",
    ),
]
CASES += [
    Case(
        f"flag {argument}",
        {"engine.args": ["--max-model-len=8192", argument]},
        "spec.engine.args[1]",
        f"leave {flag} out: {instead}",
        {"engine.args": ["--max-model-len=8192", neighbour]},
    )
    for flag, arguments, neighbour, instead in FLAGS
    for argument in arguments
]


LEFT_OUT: dict[str, dict[str, Any]] = {
    "it lets the drafter change what the model answers: leave it out": {
        "fly_entropy_threshold": 0.5,
        "fly_entropy_top_k": 4,
        "fly_window_size": 4,
        "synthetic_acceptance_length": 2.5,
    },
    "it is for drafts without a drafter, which Aerie does not run: leave it out": {
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "suffix_decoding_max_cached_requests": 100,
        "suffix_decoding_max_spec_factor": 1.5,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_min_token_prob": 0.1,
    },
    "it belongs in spec.speculation.draftSampling": {"draft_sample_method": "probabilistic"},
    "it belongs in spec.speculation.numSpeculativeTokens": {"num_speculative_tokens": 3},
    "it belongs in spec.drafter.method": {"method": "eagle3"},
    "it belongs in spec.drafter.source": {"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"},
    "it belongs in spec.drafter.source.huggingFace.revision": {"revision": COMMIT},
    "tuning decides on it: leave it out, and see spec.speculation.tuning": {"enable_adaptive_verification": True},
    "vLLM refuses it: call it draft_tensor_parallel_size": {"tensor_parallel_size": 1},
    "it is for DSpark drafters, which Aerie does not run: leave it out": {"dspark_draft_topk": 4},
    "it is for MTP, which Aerie does not run: leave it out": {"index_share_for_mtp_iteration": True},
    "it is for whole draft models, which Aerie does not run: leave it out": {"use_heterogeneous_vocab": True},
    "it is for XPress drafters, which Aerie does not run: leave it out": {"xpress_topc": 8},
}
"""Why a key of the speculative config is not an engine option, and the keys of which that is said."""
CASES += [
    Case(
        f"engine option {key}",
        {"speculation.engineOptions": {"enforce_eager": True, key: value}},
        f"spec.speculation.engineOptions.{key}",
        says,
        {"speculation.engineOptions": {"enforce_eager": True, "draft_tensor_parallel_size": 1}},
    )
    for says, keys in LEFT_OUT.items()
    for key, value in keys.items()
]


def refusal(offer: Offer, changes: Changes) -> str:
    with pytest.raises(KubeError) as caught:
        offer(changes)
    assert caught.value.status == 422, caught.value
    return caught.value.message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rule(offer: Offer, case: Case) -> None:
    message = refusal(offer, case.refused)
    assert f"{case.field}: " in message
    assert message.endswith(f": {case.says}"), message  # one complaint and no other: several stand in brackets
    assert find_manifest_errors(changed(case.refused)) == [f"{case.field}: {case.says}."]
    offer(case.taken)
    assert find_manifest_errors(changed(case.taken)) == []


NAME = "metadata.name becomes part of the names of Services and Jobs: write a-z, 0-9 and - only, a letter first and no - last"


@pytest.mark.parametrize("name", ["llama.8b", "8b-llama"])
def test_a_name_that_a_service_cannot_bear(offer: Offer, name: str) -> None:
    with pytest.raises(KubeError) as caught:
        offer({}, name)
    assert caught.value.message.endswith(f": {NAME}")


SERVED_NAME = (
    "spec.model.servedName cannot change, because old and new pods serve side by side during a rollout, and each would refuse "
    "requests for the other's name: write the old name, or create another SpeculativeDeployment"
)


def test_another_served_name(namespace: Namespace, least: dict[str, Any]) -> None:
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(least))
    least["spec"]["model"]["servedName"] = "llama"
    with pytest.raises(LabError) as caught:
        namespace.kubectl("apply", "-f", "-", stdin=json.dumps(least))
    assert f"spec.model.servedName: Invalid value: {SERVED_NAME}" in str(caught.value)
    least["spec"]["model"]["servedName"] = "chat"  # what it has been by default
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(least))


def test_every_rule_has_a_case(crd: dict[str, Any]) -> None:
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = [*root["x-kubernetes-validations"], *_rules(root["properties"]["spec"])]
    said = {case.says for case in CASES} | {NAME, SERVED_NAME}
    missing = {rule["message"] for rule in rules if not any(_says(rule, sentence) for sentence in said)}
    assert {message for message in missing if "duration" not in message} == set()  # those are in test_bounds.py


def _rules(node: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    yield from node.get("x-kubernetes-validations", [])
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from _rules(node[key])
    for child in node.get("properties", {}).values():
        yield from _rules(child)


def _says(rule: Mapping[str, str], sentence: str) -> bool:
    if "messageExpression" not in rule:
        return rule["message"] == sentence
    text = rule["messageExpression"].split("'.format(")[0].removeprefix("'")
    return re.fullmatch(re.sub("%[ds]", ".+", re.escape(text)), sentence) is not None
