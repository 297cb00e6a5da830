"""The operator's chart and one resource with real vLLM: from files of a Hub to an answer of drafted tokens.

The simulator cannot prove this: with Aerie's command line, environment and volumes, vLLM loads target and drafter by their
names on a Hub, becomes Ready by Aerie's probes, and speculates.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from aerie_lab.cluster import Lab
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.plugin import new_namespace

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM

ROOT = Path(__file__).resolve().parents[2]
START = 900.0
"""Seconds for preflight, two downloads inside the lab and a start of vLLM: a minute on idle cores, several on busy ones."""

RESOURCE = """
apiVersion: aerie.dev/v1alpha1
kind: SpeculativeDeployment
metadata: {name: docs}
spec:
  replicas: 1
  model:
    source: {huggingFace: {repo: aerie/bundle-target, revision: 4680777ff6b61ba6b16fa43d8cdebd93825ebe5c}}
  drafter:
    source: {huggingFace: {repo: aerie/bundle-eagle31, revision: 8e9a84344ee5a0f8a7a5f2d5a995ae77ec548e0c}}
  engine:
    image: vllm/vllm-openai:v0.32.0
    # All but the first two are for a CPU (docs/how-to/vllm-on-cpu.md).
    args: [--max-model-len=2048, --max-num-seqs=8, --dtype=float32, --enforce-eager, --kv-cache-memory-bytes=67108864]
    podTemplate: {spec: {terminationGracePeriodSeconds: 30}}
  speculation: {numSpeculativeTokens: 3, tuning: {mode: "Off"}}
  metrics: {scrapeInterval: 1s}
  rollout:
    traffic:
      mode: Gateway
      gateway: {parentRefs: [{name: lab, namespace: projectcontour}], hostnames: [docs.example.com]}
"""


@pytest.fixture
def operated_namespace(lab: Lab, namespace: Namespace) -> Iterator[Namespace]:
    """Yield a namespace with one operator of this repository's chart, which acts only there."""
    with new_namespace(lab, "aerie-system") as system_namespace:
        options = ("--namespace", system_namespace.name, "--wait", "--timeout=180s")
        try:
            values = ("--set", f"namespaces={{{namespace.name}}}", "--set", "replicas=1")
            lab.helm("install", "aerie", str(ROOT / "charts" / "aerie"), *options, *values)
            yield namespace
        finally:
            lab.helm("uninstall", "aerie", *options, "--ignore-not-found")
            lab.kubectl("delete", "crd", "speculativedeployments.aerie.dev", "--ignore-not-found")


@pytest.mark.usefixtures("vllm")
def test_a_resource_becomes_an_engine_that_drafts(operated_namespace: Namespace) -> None:
    operated_namespace.apply(RESOURCE)

    def ready(item: dict[str, Any]) -> bool:
        conditions = {condition["type"]: condition["status"] for condition in item.get("status", {}).get("conditions") or []}
        return item.get("status", {}).get("phase") == "Ready" and conditions.get("Ready") == "True"

    status = operated_namespace.wait_until("specdep", "docs", ready, "it is Ready", timeout_seconds=START)["status"]
    drafter = yaml.safe_load(RESOURCE)["spec"]["drafter"]["source"]["huggingFace"]
    assert status["stable"]["drafter"] == f"{drafter['repo']}@{drafter['revision'][:8]}"
    (pod,) = operated_namespace.list_all("pods", "aerie.dev/name=docs")
    assert "Initializing a V1 LLM engine (v0.32.0)" in operated_namespace.kubectl("logs", pod["metadata"]["name"])

    assert operated_namespace.lab.gateway_url is not None
    with httpx.Client(base_url=operated_namespace.lab.gateway_url, headers={"Host": "docs.example.com"}, timeout=120) as client:
        wait_until(lambda: healthy(client), "the route is served")
        prompts = itertools.cycle(map(json.loads, (ROOT / "drafter/bundle/prompts.jsonl").read_text().splitlines()))

        def send_request() -> None:
            messages = next(prompts)["messages"]
            body = {"model": "docs", "messages": messages, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == 48

        for _ in range(8):
            send_request()

        def acceptance_length() -> float:
            drafts, accepted = (
                sum_metric(client, f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens")
            )
            return 1 + accepted / drafts if drafts else 0.0

        # On these prompts the bundle's registry has 1.9 to 2.4; an engine that loads the wrong files accepts next to nothing.
        assert wait_until(lambda: length if (length := acceptance_length()) > 1 else 0.0, "accepted tokens are counted") > 1.3

        def status_length() -> float | None:
            send_request()
            length: float | None = operated_namespace.get("specdep", "docs")["status"]["stable"].get("acceptanceLength")
            return length

        assert (wait_until(status_length, "the operator shows an acceptance length", timeout_seconds=180) or 0.0) > 1.3


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False  # Envoy opens its port with the first route


def sum_metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))
