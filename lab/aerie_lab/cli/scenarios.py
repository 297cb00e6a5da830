"""Demo scenarios: a resource, the drafters that it changes to, and traffic.

    simulator      simulated engines, rollouts in place; CONTAINER_SCENARIO is the same in a cluster of containers
    vllm           real vLLM on CPU, rollouts by pods, which begin with a shadow evaluation
    vllm-in-place  real vLLM on CPU, rollouts in place
    refresh        real vLLM on CPU, in place: what `--show refresh` serves (demo_refresh.py), with models of a volume

Guarantee: the drafters are on the lab's Hub under these names and commits (tests/unit/hub). The texts state what is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aerie_lab.engine.load_generation.background import SHORT_TRAFFIC_CLASSES, Clients
from aerie_lab.engine.load_generation.workload import LengthDistribution, TrafficClass
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE
from aerie_lab.images.table import SIMULATED_IMAGE_TABLE

ChatList = list[list[dict[str, str]]]

REPOSITORY_FOLDER = Path(__file__).resolve().parents[3]
PROMPTS_FILE = REPOSITORY_FOLDER / "drafter" / "bundle" / "prompts.jsonl"


@dataclass(frozen=True)
class DrafterChange:
    """A change of the drafter, and what has to become of it."""

    title: str
    drafter: dict[str, str]
    """Repository and commit."""
    expected_result: str
    """Result of the rollout in the history."""


@dataclass(frozen=True)
class DemoScenario:
    """One demo."""

    manifest: Path
    """Manifest of the resource, with its first drafter."""
    name: str
    """Name of the resource and of the served model."""
    host: str
    changes: tuple[DrafterChange, ...]
    """Changes of the drafter, one after another."""
    question: str
    engines_description: str
    """Description of the engines, for the summary."""
    load: float | Clients
    """Mean requests per second, or clients."""
    timeout_seconds: float
    """Timeout of a start or a rollout."""
    prerequisites: tuple[Path, ...] = ()
    """Manifests to apply first; their Deployments have to become available."""
    image_tables: tuple[Path, ...] = ()
    required_families: tuple[str, ...] = ("helm",)
    """Binary families to build or install before the lab starts."""
    classes: Sequence[TrafficClass] = SHORT_TRAFFIC_CLASSES
    is_in_place: bool = True
    """Whether running engines change the drafter; else pods are created."""
    prompts_file: Path | None = None
    """Chats of the traffic, one a line; default: filler of the classes' lengths."""

    @property
    def load_text(self) -> str:
        if isinstance(self.load, Clients):
            return f"requests from {self.load.count} clients, each of which waits for its answer"
        return f"{self.load:g} requests per second"

    @property
    def question_body(self) -> dict[str, Any]:
        """Return the question as a chat completion."""
        return {"model": self.name, "messages": [{"role": "user", "content": self.question}], "max_tokens": 24}

    @property
    def chats(self) -> ChatList:
        return [json.loads(line)["messages"] for line in self.prompts_file.read_text().splitlines()] if self.prompts_file else []


def _manifest_path(name: str) -> Path:
    return Path(__file__).with_name(name).resolve()


_BETTER = DrafterChange(
    "A better drafter, EAGLE 3.1",
    {"repo": "aerie/bundle-eagle31", "revision": "8e9a84344ee5a0f8a7a5f2d5a995ae77ec548e0c"},
    "Promoted",
)
_UNDERTRAINED = DrafterChange(
    "A badly trained drafter",
    {"repo": "aerie/bundle-eagle31-undertrained", "revision": "1300000000000000000000000000000000000013"},
    "RolledBack",
)
_WEAK = DrafterChange(
    "A badly trained drafter", {"repo": "aerie/bundle-weak", "revision": "5129ae8d77b37824d4efd20717f906d2a37477a9"}, "RolledBack"
)
_SAME = DrafterChange(
    "EAGLE 3.1 again, under another name",
    {"repo": "aerie/bundle-eagle31-again", "revision": _BETTER.drafter["revision"]},
    "Promoted",
)
_SUMMARY_OF_REAL_ENGINES = "So are the engines: vLLM on CPU, which is slow, with small models (drafter/bundle/README.md)"

SIMULATED_SCENARIO = DemoScenario(
    manifest=_manifest_path("demo.yaml"),
    name="chat",
    host="chat.example.com",
    changes=(_BETTER, _UNDERTRAINED),
    question="Where do eagles nest?",
    engines_description="The engines are simulated, and so are their metrics (docs/reference/simulator.md)",
    load=24.0,
    timeout_seconds=600.0,
    image_tables=(SIMULATED_IMAGE_TABLE,),
)

CONTAINER_SCENARIO = replace(
    SIMULATED_SCENARIO, manifest=_manifest_path("demo-containers.yaml"), prerequisites=(_manifest_path("demo-hub.yaml"),)
)

REAL_SCENARIO = DemoScenario(
    manifest=_manifest_path("demo-vllm.yaml"),
    name="docs",
    host="docs.example.com",
    changes=(_BETTER, _WEAK, _SAME),
    question="What is the class `collections.ChainMap`?",
    engines_description=_SUMMARY_OF_REAL_ENGINES,
    load=2.0,  # what three engines on two cores bear without a queue
    timeout_seconds=1800.0,
    image_tables=(Path(__file__).with_name("demo-drafters.toml"),),
    required_families=("helm", "vllm"),
    classes=(
        replace(
            SHORT_TRAFFIC_CLASSES[0],
            name="docs",
            acceptance=CLASS_ACCEPTANCE["chat"],
            answer_lengths=LengthDistribution(32, 0.3, 16, 64),
            share=1.0,
        ),
    ),
    is_in_place=False,
    prompts_file=PROMPTS_FILE,
)

REAL_IN_PLACE_SCENARIO = replace(
    REAL_SCENARIO,
    manifest=_manifest_path("demo-vllm-in-place.yaml"),
    changes=(_BETTER, _WEAK),
    load=Clients(4),  # the computing time of a step on a CPU follows the number of requests in it: a constant one varies least
    is_in_place=True,
)

REFRESH_SCENARIO = replace(
    REAL_IN_PLACE_SCENARIO,
    manifest=_manifest_path("demo-refresh.yaml"),
    changes=(),
    classes=(replace(REAL_SCENARIO.classes[0], answer_lengths=LengthDistribution(96)),),
)

DEMO_SCENARIOS = {"simulator": SIMULATED_SCENARIO, "vllm": REAL_SCENARIO, "vllm-in-place": REAL_IN_PLACE_SCENARIO}
