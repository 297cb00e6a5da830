"""What an analysis keeps between two looks: every block once, whatever is shown twice or comes late."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api.rollout import Analysis
from aerie.api.status import Arm, Setting
from aerie.rollout.analysis.blocks import Block
from aerie.rollout.analysis.criteria import OUTPUT_TIME, TOKENS_PER_STEP, Goal, criteria
from aerie.rollout.evidence import Evidence, begun, incomparable, rule_of
from tests.unit.rollout.world import side

NOW = datetime(2026, 11, 1, tzinfo=UTC)
T0 = NOW.timestamp()


def arm(tokens: int = 3, target: str = "acme/big@00000000", mode: str = "Static") -> Arm:
    setting = Setting.model_validate({"mode": mode, "tokens": tokens})
    return Arm(revision="r", target=target, drafter="acme/drafter@11111111", setting=setting)


def evidence(attempt: int = 0) -> Evidence:
    return begun(Analysis(), (arm(), arm()), (1, 1), None, attempt, None, NOW)


def blocks(count: int, better: float = 0.0) -> list[Block]:
    return [Block(T0 + 120 * n, T0 + 120 * (n + 1), side(2.5 * (1 + better) + n % 3 / 100), side(2.5)) for n in range(count)]


@given(st.lists(st.integers(1, 12), max_size=8))
def test_a_block_counts_once_however_often_it_is_shown(shown: list[int]) -> None:
    found = evidence()
    for count in shown:
        found = Evidence.unpack(found.counted(reversed(blocks(count))).pack()) or found
    assert found.state.blocks == max(shown, default=0)
    assert found.until == T0 + 120 * max(shown, default=0)


def test_a_block_that_began_before_is_not_counted() -> None:
    later = begun(Analysis(), (arm(), arm()), (1, 1), None, 0, None, NOW + timedelta(seconds=90))
    assert later.counted(blocks(3)).state.blocks == 2


def test_it_comes_back_from_the_status_as_it_was() -> None:
    found = evidence(attempt=2).counted(blocks(7, 0.1)).renewed(NOW + timedelta(minutes=14)).counted(blocks(12, 0.1))
    assert Evidence.unpack(found.pack()) == found
    assert found.watched is not None
    assert (found.state.blocks, found.watched.blocks) == (7, 5)
    assert len(found.pack()) < 4000


@pytest.mark.parametrize("text", ["", "not base64!", "aGVsbG8=", evidence().pack()[:-8]])
def test_what_another_release_wrote_is_no_evidence(text: str) -> None:
    assert Evidence.unpack(text) is None


def test_what_it_was_accepted_with_stays_while_it_is_watched() -> None:
    found = evidence().counted(blocks(5)).renewed(NOW + timedelta(minutes=10))
    found, judgement = found.counted(blocks(30, -0.3)).watching(NOW + timedelta(hours=1), [])
    assert judgement.verdict == "Rollback"
    assert found.state.blocks == 5


@pytest.mark.parametrize(
    ("canary", "control", "why"),
    [
        (arm(), arm(), ""),
        (arm(5), arm(3), "the canary drafts 5 tokens at a time and the stable revision 3;"),
        (arm(target="acme/other@0"), arm(), "another target"),
        (arm(0, mode="Off"), arm(), "the canary serves without a drafter"),
        (arm(), arm(0, mode="Off"), "the stable revision serves without a drafter"),
        (arm(mode="Adaptive"), arm(), "the canary drafts by the rule Adaptive"),
        (arm(mode="Adaptive"), arm(mode="Adaptive"), "compared only while as many requests are in flight on both."),
        (arm(5, mode="Adaptive"), arm(mode="Adaptive"), "Time per output token decides."),
    ],
)
def test_what_may_be_compared(canary: Arm, control: Arm, why: str) -> None:
    found = incomparable(canary, control)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("canary", "control", "judged"),
    [
        (arm(), arm(), (TOKENS_PER_STEP, 3)),
        (arm(5), arm(), (OUTPUT_TIME, 3)),
        (arm(mode="Adaptive"), arm(mode="Adaptive"), (OUTPUT_TIME, 3)),
        (arm(target="acme/other@0"), arm(), (OUTPUT_TIME, 3)),
    ],
)
def test_what_decides(canary: Arm, control: Arm, judged: tuple[str, int]) -> None:
    """With unlike numbers of tokens drafts are shown at the common positions."""
    terms = begun(Analysis(), (canary, control), (1, 1), None, 0, None, NOW).terms
    assert (next(one for one in criteria(terms) if one.accept).name, terms.kept.positions) == judged


@pytest.mark.parametrize(
    ("canary", "control", "goal", "compared"),
    [
        (arm(mode="Adaptive"), arm(mode="Adaptive"), None, True),
        (arm(mode="Adaptive"), arm(mode="Adaptive"), "Faster", False),
        (arm(5, mode="Adaptive"), arm(mode="Adaptive"), None, False),
        (arm(target="acme/other@0", mode="Adaptive"), arm(mode="Adaptive"), None, False),
        (arm(mode="Adaptive"), arm(), None, False),
    ],
)
def test_adaptive_arms_are_compared_in_tokens_per_step_besides_time(
    canary: Arm, control: Arm, goal: Goal | None, compared: bool
) -> None:
    terms = begun(Analysis(), (canary, control), (1, 1), None, 0, None, NOW, goal=goal).terms
    assert (TOKENS_PER_STEP in {one.name for one in criteria(terms)}) == compared


def test_short_blocks_need_fewer_drafts_and_long_ones_no_more() -> None:
    def rule(seconds: float) -> tuple[float, float]:
        terms = begun(Analysis(block=timedelta(seconds=seconds)), (arm(), arm()), (1, 1), None, 0, None, NOW).terms
        found = rule_of(terms, 15)
        return found.drafts, found.finished

    assert rule(120) == rule(600) == (2000, 20)
    assert rule(30) == (500, 5)
    assert rule(5) == pytest.approx((2000 / 24, 3))
