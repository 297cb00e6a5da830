"""The manifests of the demo in a cluster of containers: they agree with images, chart, scenario and the demo of the lab."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import yaml

from aerie.api import SpeculativeDeployment
from aerie.engine.releases import Version
from aerie.manifests.pod import drafter_plugin, engine_pod
from aerie_lab.cli.container_cluster import IMAGES
from aerie_lab.cli.demo_requests import TRAFFIC_MANIFEST
from aerie_lab.cli.scenarios import CONTAINER_SCENARIO, SIMULATED_SCENARIO
from aerie_lab.sandbox.addresses import HUB_PORT

ROOT = Path(__file__).resolve().parents[3]
ENGINE_IMAGE = "aerie.dev/lab/engine:v0.33.0"
(HUB_MANIFEST,) = CONTAINER_SCENARIO.prerequisites
HUB, HUB_SERVICE = yaml.safe_load_all(HUB_MANIFEST.read_text())
TRAFFIC = yaml.safe_load(TRAFFIC_MANIFEST.read_text())


def read_resource(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def test_images_are_those_that_are_built() -> None:
    chart = yaml.safe_load((ROOT / "charts/aerie/Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "charts/aerie/values.yaml").read_text())
    (hub,), (traffic,) = HUB["spec"]["template"]["spec"]["containers"], TRAFFIC["spec"]["containers"]
    engine = read_resource(CONTAINER_SCENARIO.manifest)["spec"]["engine"]
    used = {f"{values['image']['repository']}:{chart['appVersion']}", hub["image"], traffic["image"], engine["image"]}
    assert used == set(IMAGES)
    tag = re.search(r"^ARG VLLM=(.+)$", (ROOT / IMAGES[ENGINE_IMAGE]).read_text(), re.MULTILINE)
    assert tag is not None
    assert ENGINE_IMAGE.endswith(f":{tag[1]}")


def test_resource_is_that_of_the_lab_but_for_gateway_gpu_image_and_hub() -> None:
    here, lab = (read_resource(scenario.manifest)["spec"] for scenario in (CONTAINER_SCENARIO, SIMULATED_SCENARIO))
    here.pop("engine"), lab.pop("engine")
    for gateway_field in ("traffic", "analysis"):
        del lab["rollout"][gateway_field]
    assert here == lab


def test_engine_gets_the_plugin() -> None:
    resource = SpeculativeDeployment.from_dict(read_resource(CONTAINER_SCENARIO.manifest), unknown_fields="forbid")
    draft = {"method": "eagle3", "model": "aerie/bundle-eagle3", "num_speculative_tokens": 3}
    template = engine_pod.build_pod_template(resource, draft)
    additions = drafter_plugin.plan_plugin(resource, "r1", Version.parse("0.33.0"), template)
    assert isinstance(additions, drafter_plugin.PluginAdditions), additions
    assert "PYTHONPATH" not in (ROOT / IMAGES[ENGINE_IMAGE]).read_text()  # the resource would replace it


def test_hub_is_where_the_engines_look_for_it() -> None:
    env = {row["name"]: row["value"] for row in read_resource(CONTAINER_SCENARIO.manifest)["spec"]["engine"]["env"]}
    assert env["HF_ENDPOINT"] == f"http://{HUB_SERVICE['metadata']['name']}"
    (container,) = HUB["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": HUB_PORT}]
    assert HUB_SERVICE["spec"]["ports"] == [{"port": 80, "targetPort": "http"}]
    assert HUB_SERVICE["spec"]["selector"].items() <= HUB["spec"]["template"]["metadata"]["labels"].items()


def test_requests_go_to_the_service_at_the_rate_that_the_demo_prints() -> None:
    (container,) = TRAFFIC["spec"]["containers"]
    name = CONTAINER_SCENARIO.name
    assert container["args"] == [f"http://$({name.upper()}_SERVICE_HOST)", name, f"{CONTAINER_SCENARIO.load:g}"]


def test_programs_exist() -> None:
    (hub,), (traffic,) = HUB["spec"]["template"]["spec"]["containers"], TRAFFIC["spec"]["containers"]
    for container in (hub, traffic):
        python, option, module = container["command"]
        assert (python, option) == ("python", "-m")
        assert importlib.util.find_spec(f"{module}.__main__") is not None
