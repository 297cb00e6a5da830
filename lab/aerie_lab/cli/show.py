"""What a demo shows, for each kind of engine: a resource, a drafter that is better than its own, one that is worse, and traffic.

Guarantee: the drafters are on the lab's Hub under these names and commits (tests/unit/hub). The words say what is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aerie_lab.engine.acceptance import CLASSES
from aerie_lab.engine.background import SHORT
from aerie_lab.engine.workload import Lengths, TrafficClass
from aerie_lab.images.table import SIMULATED

Chats = list[list[dict[str, str]]]

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = ROOT / "drafter" / "bundle" / "prompts.jsonl"


@dataclass(frozen=True)
class Show:
    """One demo."""

    manifest: Path
    """Of the resource, with the drafter that is served first."""
    name: str
    """The resource's, and the served model's."""
    host: str
    target: str
    better: dict[str, str]
    worse: dict[str, str]
    question: str
    engines: str
    """What the engines are, for the last words."""
    rate: float
    """Requests a second, in the mean."""
    limit: float
    """Seconds within which a start or a rollout has to be over."""
    images: tuple[Path, ...] = ()
    binaries: tuple[str, ...] = ("helm",)
    """Built or installed before the lab comes up."""
    classes: Sequence[TrafficClass] = SHORT
    asked: Path | None = None
    """Questions of the traffic, one a line; without it filler of the classes' lengths."""

    @property
    def chats(self) -> Chats:
        return [json.loads(line)["messages"] for line in self.asked.read_text().splitlines()] if self.asked else []


def _manifest(name: str) -> Path:
    return Path(__file__).with_name(name).resolve()


SIMULATED_ENGINES = Show(
    manifest=_manifest("demo.yaml"),
    name="chat",
    host="chat.example.com",
    target="Llama 3.1 8B",
    better={"repo": "aerie/Llama-3.1-8B-Instruct-EAGLE3.1", "revision": "3100000000000000000000000000000000000031"},
    worse={"repo": "aerie/Llama-3.1-8B-Instruct-EAGLE3.1-undertrained", "revision": "1300000000000000000000000000000000000013"},
    question="Where do eagles nest?",
    engines="The engines are simulated, and so are their figures (docs/simulator.md)",
    rate=32.0,
    limit=300.0,
    images=(SIMULATED,),
)

REAL_ENGINES = Show(
    manifest=_manifest("demo-vllm.yaml"),
    name="docs",
    host="docs.example.com",
    target="the bundle's small target",
    better={"repo": "aerie/bundle-eagle31", "revision": "55f8cf57420bcfb8f7a95c89a51fb969df6c8270"},
    worse={"repo": "aerie/bundle-weak", "revision": "3181f66889155967a7c90382584aecf39bb37cfc"},
    question="What is the class `collections.ChainMap`?",
    engines="So are the engines: vLLM on CPU, with small models trained for this (drafter/bundle/README.md), which is slow",
    rate=2.0,  # what three engines on two cores bear without a queue
    limit=2400.0,
    binaries=("helm", "vllm"),
    classes=(replace(SHORT[0], name="docs", acceptance=CLASSES["chat"], answer=Lengths(48, 0.3, 16, 128), share=1.0),),
    asked=PROMPTS,
)

SHOWS = {"simulator": SIMULATED_ENGINES, "vllm": REAL_ENGINES}
