"""The demo for clusters of containers, in a lab as bare as such a cluster: without gateway, GPUs and the lab's own Hub.

Its manifests are applied as they are, but for the Hub's address: the lab has no cluster DNS. Not tested: the images, kind, k3d.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aerie_lab.binaries import ensure_family
from aerie_lab.cli.demo import DemoRunner
from aerie_lab.cli.demo_requests import PodRequests
from aerie_lab.cli.demo_tools import DemoTools
from aerie_lab.cli.scenarios import CONTAINER_SCENARIO
from aerie_lab.cluster import Lab, LabSettings

HUB_ADDRESS = "10.96.70.70"


def change_manifest(manifest: Path, folder: Path, before: str, after: str) -> Path:
    """Write a copy of the manifest with one text changed; return its path."""
    text = manifest.read_text()
    assert text.count(before) == 1
    changed = folder / manifest.name
    changed.write_text(text.replace(before, after))
    return changed


@pytest.mark.nightly  # test_container_cluster.py has its commands, test_canary.py its rollouts
@pytest.mark.timeout(900)
def test_better_drafter_is_promoted_and_a_worse_one_rolled_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hub,) = CONTAINER_SCENARIO.prerequisites
    scenario = replace(
        CONTAINER_SCENARIO,
        manifest=change_manifest(CONTAINER_SCENARIO.manifest, tmp_path, "http://hub}", f"http://{HUB_ADDRESS}}}"),
        prerequisites=(
            change_manifest(hub, tmp_path, "  selector: {app: hub}", f"  clusterIP: {HUB_ADDRESS}\n  selector: {{app: hub}}"),
        ),
    )
    ensure_family("helm", lambda _: None)
    with Lab.up(
        LabSettings(name=f"containers-{os.getpid()}", nodes=1, gpus_per_node=0, gateway=False), end_with_caller=True
    ) as lab:
        tools = DemoTools(lab.environment())
        DemoRunner(scenario, tools, PodRequests(scenario, tools)).run("--cluster kind")
        assert "/resolve/" in tools.run("kubectl", "logs", "deployment/hub")
    output = capsys.readouterr().out
    assert "Promoted: " in output
    assert "RolledBack: " in output
    assert " 0 failed." in output
