"""Canaries whose engine accepts shorter requests than the stable pods."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.rollout.facts.context_length import ContextLengths, shorter_context_message
from tests.golden import Messages
from tests.unit.rollout.world import World, world_in_phase


def canary_phase_with(world: World, canary: int, control: int) -> str:
    """Return the canary's phase after one more reconcile, with these context lengths."""
    world.context_lengths = ContextLengths(canary, control)
    world.step()
    return str(world.status.get("canary", {}).get("phase"))


def test_shorter_context_message_names_lengths_and_fix(messages: Messages) -> None:
    message = shorter_context_message(ContextLengths(4096, 131_072), ("--max-num-seqs=64",))
    messages.check("shorter context", message)


@pytest.mark.parametrize(
    ("lengths", "args"),
    [
        (None, ()),
        (ContextLengths(4096, 4096), ()),
        (ContextLengths(8192, 4096), ()),
        (ContextLengths(4096, 8192), ("--max-model-len=4096",)),
        (ContextLengths(4096, 8192), ("--max-model-len", "4k")),
    ],
)
def test_equal_unknown_or_requested_context_has_no_message(lengths: ContextLengths | None, args: tuple[str, ...]) -> None:
    assert shorter_context_message(lengths, args) == ""


@pytest.mark.parametrize("args", [("--max-model-len=8192",), ("--max-model-len=auto",), ("--max-model-len=-1",)])
def test_less_than_requested_context_has_message(args: tuple[str, ...]) -> None:
    assert shorter_context_message(ContextLengths(4096, 8192), args)


@pytest.mark.parametrize("phase", ["WarmingUp", "Analyzing", "Ramping", "Promoting"])
def test_shorter_context_aborts_canary_in_every_phase(phase: Any) -> None:
    world, old = world_in_phase(phase)
    assert canary_phase_with(world, 4096, 8192) == "RollingBack"
    assert world.status["stable"]["revision"] == old
    assert world.status["rolloutHistory"][0]["result"] == "RolledBack"
    assert "4096 tokens" in world.status["rolloutHistory"][0]["message"]
    world.settle()
    assert world.status["rejectedRevision"] == world.desired_revision, "it is not retried automatically"


def test_equal_or_unknown_context_changes_nothing() -> None:
    world, _ = world_in_phase("Analyzing")
    assert canary_phase_with(world, 8192, 8192) == "Analyzing"
    world.context_lengths = None
    world.step()
    assert world.status["canary"]["phase"] == "Analyzing"


def test_requested_shorter_context_is_rolled_out() -> None:
    world, _ = world_in_phase("Analyzing", engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    assert canary_phase_with(world, 4096, 8192) == "Analyzing"
