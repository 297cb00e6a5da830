"""What stable pods tell of themselves: which blocks count, what outlives a promotion, and what begins anew."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aerie.rollout.analysis import packing
from aerie.rollout.analysis.blocks import Block, Rule, Side
from aerie.rollout.analysis.calibration import BATCH, ENOUGH, KEPT, PODS, History
from aerie.rollout.analysis.criteria import ACCEPTANCE_LENGTH, ERRORS, FIRST_TIME, OUTPUT_TIME, Terms, criteria
from aerie.rollout.analysis.memory import Memory
from aerie.rollout.analysis.readings import Counts, Kept

TERMS = Terms(kept=Kept(positions=3))
RULE = Rule(per=1)
NAMES = {one.name for one in criteria(TERMS)}


def counts(noise: np.random.Generator, length: float = 2.5, drafts: float = 5000.0) -> Counts:
    return Counts(
        drafts=drafts,
        accepted=drafts * (length * float(noise.normal(1, 0.01)) - 1),
        draft_tokens=3 * drafts,
        decode_tokens=12_000.0,
        decode_seconds=120 * float(noise.normal(1, 0.01)),
        output_tokens=12_120.0,
        finished=drafts / 40,
        first_tokens=120.0,
        first_seconds=12.0,
        timed=120.0,
    )


def block(number: int, **pods: Counts) -> Block:
    return Block(120.0 * number, 120.0 * (number + 1), None, Side(len(pods), Counts(), None, pods))


def lived(blocks: int, memory: Memory | None = None, pods: str = "abc", seed: int = 2) -> Memory:
    noise, found = np.random.default_rng(seed), memory or Memory(TERMS)
    for number in range(blocks):
        found = found.counted(block(number, **{name: counts(noise) for name in pods}), RULE)
    return found


DAY = lived(ENOUGH * BATCH)


def test_a_day_of_stable_pods_tells_how_each_criterion_scatters() -> None:
    found = DAY.scatters(TERMS)
    assert (DAY.blocks, DAY.until) == (720, 720 * 120.0)
    assert set(found) == NAMES
    assert found[ACCEPTANCE_LENGTH].variance == pytest.approx(0.01**2, rel=0.15)
    assert found[ACCEPTANCE_LENGTH].inflation < 2
    assert found[ERRORS].inflation == 1.0


def test_too_little_tells_nothing_at_all() -> None:
    assert lived(4 * BATCH - 1).scatters(TERMS) == {}
    assert set(lived(4 * BATCH).scatters(TERMS)) == NAMES


def test_it_comes_back_as_it_was() -> None:
    again = Memory.unpack(lived(50, DAY, "abd").pack())
    assert again == lived(50, DAY, "abd")
    assert len(DAY.pack()) < 8000


@pytest.mark.parametrize(
    "text",
    ["", "not base64!", "aGVsbG8=", packing.pack([]), packing.pack({"histories": {}}), packing.pack({"histories": []})],
)
def test_what_another_release_wrote_is_no_memory(text: str) -> None:
    assert Memory.unpack(text) is None


def test_a_torn_history_is_no_memory() -> None:
    found = packing.unpack(DAY.pack())
    found["histories"][ACCEPTANCE_LENGTH]["a"]["closed"] = "AAAA"
    assert Memory.unpack(packing.pack(found)) is None


def test_a_block_counts_with_two_pods_that_have_enough_of_it() -> None:
    noise = np.random.default_rng(1)
    empty = Memory(TERMS)
    whole, few = counts(noise), counts(noise, drafts=900)
    assert empty.counted(Block(0.0, 120.0, None, None), RULE) == empty
    assert empty.counted(block(0, a=whole), RULE) == empty
    assert empty.counted(block(0, a=whole, b=few), RULE) == empty, "fewer than half of the drafts that a block needs"
    assert empty.counted(block(0, a=whole, b=few), replace(RULE, per=2)).blocks == 1, "of two pods, each needs half"
    found = empty.counted(block(0, a=whole, b=whole, c=few), RULE)
    assert set(found.histories[ACCEPTANCE_LENGTH].pods) == {"a", "b"}


def test_a_promotion_keeps_what_is_known() -> None:
    promoted = DAY.fitted(replace(TERMS, margin=0.05, soak=60.0, pods=(2, 2)))
    assert promoted.histories == DAY.histories
    found = lived(10, promoted, "xyz").scatters(TERMS)[ACCEPTANCE_LENGTH]
    assert found.batches == ENOUGH
    assert found.variance == pytest.approx(0.01**2, rel=0.15)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"block": 60.0}, NAMES),
        ({"kept": Kept(positions=5)}, {ACCEPTANCE_LENGTH}),
        ({"kept": Kept(positions=2)}, set()),
        ({"kept": Kept(3, output_edge=0.05)}, {OUTPUT_TIME}),
        ({"kept": Kept(3, first_edge=0.5)}, {FIRST_TIME}),
        ({"incomparable": "the canary serves without a drafter."}, {ACCEPTANCE_LENGTH}),
        ({"goal": "Superior"}, set()),
    ],
)
def test_what_is_counted_otherwise_begins_anew(change: dict[str, Any], lost: set[str]) -> None:
    terms = replace(TERMS, **change)
    assert NAMES - set(DAY.fitted(terms).histories) == lost
    assert NAMES - set(DAY.scatters(terms)) == lost
    assert DAY.fitted(terms).blocks == (0 if lost == NAMES else DAY.blocks)


def test_shares_beyond_an_objective_are_no_means() -> None:
    objective = replace(TERMS, kept=Kept(3, output_edge=0.05))
    shares = lived(4 * BATCH, Memory(objective))
    means = replace(objective, goal="Superior", incomparable="the canary serves another target.")
    assert OUTPUT_TIME in shares.scatters(objective)
    assert OUTPUT_TIME in {one.name for one in criteria(means)}
    assert OUTPUT_TIME not in shares.scatters(means)


def test_a_wild_block_does_not_spoil_a_day() -> None:
    noise, found = np.random.default_rng(2), Memory(TERMS)
    for number in range(ENOUGH * BATCH):
        pods = {name: counts(noise) for name in "abc"}
        if number in (100, 400):
            pods["a"] = counts(noise, length=3.9)  # a dozen requests that fell into repetition
        found = found.counted(block(number, **pods), RULE)
    odd, usual = found.scatters(TERMS)[ACCEPTANCE_LENGTH], DAY.scatters(TERMS)[ACCEPTANCE_LENGTH]
    assert odd.variance == pytest.approx(usual.variance, rel=0.25)
    assert odd.inflation == pytest.approx(usual.inflation, rel=0.25)
    assert json.loads(json.dumps(found.histories[ACCEPTANCE_LENGTH].to_dict()))


def test_it_is_small_however_long_it_lives() -> None:
    noise = np.random.default_rng(3)

    def pod() -> dict[str, Any]:
        closed = np.column_stack([noise.normal(0, 0.01, KEPT), noise.normal(0.001, 0.0002, KEPT)]).astype("<f4").tobytes()
        return {"closed": base64.b64encode(closed).decode(), "open": [29, *noise.normal(0, 0.1, 2).tolist()]}

    pods = {name: {f"chat-0123456789-5d4b8c7f6-{index}": pod() for index in range(PODS)} for name in NAMES}
    full = Memory(TERMS, {name: History.from_dict(found) for name, found in pods.items()}, 2000, 240_000.0)
    assert 20_000 < len(full.pack()) < 40_000
    assert Memory.unpack(full.pack()) == full
