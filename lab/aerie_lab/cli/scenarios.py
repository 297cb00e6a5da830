"""Demo scenarios, one per kind of engine: a resource, a better drafter, a worse one, and traffic.

Guarantee: the drafters are on the lab's Hub under these names and commits (tests/unit/hub). The texts state what is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aerie_lab.engine.load_generation.background import SHORT_TRAFFIC_CLASSES, Clients
from aerie_lab.engine.load_generation.workload import LengthDistribution, TrafficClass
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE
from aerie_lab.images.table import SIMULATED_IMAGE_TABLE

ChatList = list[list[dict[str, str]]]

REPOSITORY_FOLDER = Path(__file__).resolve().parents[3]
PROMPTS_FILE = REPOSITORY_FOLDER / "drafter" / "bundle" / "prompts.jsonl"


@dataclass(frozen=True)
class DemoScenario:
    """One demo."""

    manifest: Path
    """Manifest of the resource, with its first drafter."""
    name: str
    """Name of the resource and of the served model."""
    host: str
    better_drafter: dict[str, str]
    worse_drafter: dict[str, str]
    question: str
    engines_description: str
    """Description of the engines, for the summary."""
    load: float | Clients
    """Mean requests per second, or clients."""
    timeout_seconds: float
    """Timeout of a start or a rollout."""
    image_tables: tuple[Path, ...] = ()
    required_families: tuple[str, ...] = ("helm",)
    """Binary families to build or install before the lab starts."""
    classes: Sequence[TrafficClass] = SHORT_TRAFFIC_CLASSES
    prompts_file: Path | None = None
    """Chats of the traffic, one a line; default: filler of the classes' lengths."""

    @property
    def load_text(self) -> str:
        if isinstance(self.load, Clients):
            return f"requests from {self.load.count} clients, each of which waits for its answer"
        return f"{self.load:g} requests per second"

    @property
    def chats(self) -> ChatList:
        return [json.loads(line)["messages"] for line in self.prompts_file.read_text().splitlines()] if self.prompts_file else []


def _manifest_path(name: str) -> Path:
    return Path(__file__).with_name(name).resolve()


_BETTER_DRAFTER = {"repo": "aerie/bundle-eagle31", "revision": "55f8cf57420bcfb8f7a95c89a51fb969df6c8270"}

SIMULATED_SCENARIO = DemoScenario(
    manifest=_manifest_path("demo.yaml"),
    name="chat",
    host="chat.example.com",
    better_drafter=_BETTER_DRAFTER,
    worse_drafter={"repo": "aerie/bundle-eagle31-undertrained", "revision": "1300000000000000000000000000000000000013"},
    question="Where do eagles nest?",
    engines_description="The engines are simulated, and so are their metrics (docs/simulator.md)",
    load=24.0,
    timeout_seconds=600.0,
    image_tables=(SIMULATED_IMAGE_TABLE,),
)

REAL_SCENARIO = DemoScenario(
    manifest=_manifest_path("demo-vllm.yaml"),
    name="docs",
    host="docs.example.com",
    better_drafter=_BETTER_DRAFTER,
    worse_drafter={"repo": "aerie/bundle-weak", "revision": "3181f66889155967a7c90382584aecf39bb37cfc"},
    question="What is the class `collections.ChainMap`?",
    engines_description="So are the engines: vLLM on CPU, which is slow, with small models (drafter/bundle/README.md)",
    load=Clients(4),  # the computing time of a step on a CPU follows the number of requests in it: a constant one varies least
    timeout_seconds=1800.0,
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
    prompts_file=PROMPTS_FILE,
)

DEMO_SCENARIOS = {"simulator": SIMULATED_SCENARIO, "vllm": REAL_SCENARIO}
