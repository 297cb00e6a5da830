"""Step times: those of the published grids are exact, and outside them a larger batch is never faster."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie_lab.engine.step import STEP_TIME_FORMULAS, StepTimeFormula, list_grid_names, load_grid
from aerie_lab.errors import StateError

GRIDS = json.loads(resources.files("aerie_lab.engine").joinpath("step_time_grids.json").read_text())["grids"]


@pytest.mark.parametrize("published", GRIDS, ids=[g["name"] for g in GRIDS])
def test_a_published_cell_gives_its_measured_throughput(published: dict[str, Any]) -> None:
    profile = load_grid(published["name"])
    for k, throughputs in published["throughput"].items():
        for batch, throughput in zip(published["batch"], throughputs, strict=True):
            if throughput is not None:
                length = published["acceptance_length"][k]
                assert batch * length / profile.fixed_seconds(batch, int(k)) == pytest.approx(throughput)


def test_step_times_are_interpolated_between_usable_cells() -> None:
    profile = load_grid("nemotron3-super-120b-gb200-tp4")
    assert profile.fixed_seconds(3, 0) == pytest.approx((profile.fixed_seconds(2, 0) + profile.fixed_seconds(4, 0)) / 2)
    assert profile.fixed_seconds(4, 2) == pytest.approx(
        profile.fixed_seconds(2, 2) + (profile.fixed_seconds(8, 2) - profile.fixed_seconds(2, 2)) / 3
    )
    llama = load_grid("llama3.1-8b-h100-tp1")
    assert llama.fixed_seconds(16, 2) == pytest.approx((llama.fixed_seconds(16, 1) + llama.fixed_seconds(16, 3)) / 2)


@pytest.mark.parametrize("name", list_grid_names())
@given(batch=st.integers(1, 2000), k=st.integers(0, 12))
def test_outside_the_grid_larger_batches_are_never_faster(name: str, batch: int, k: int) -> None:
    profile = load_grid(name)
    last_batch, last_k = max(max(b) for b, _ in profile.step_seconds_by_k.values()), max(profile.step_seconds_by_k)
    assert profile.fixed_seconds(last_batch + batch, min(k, last_k)) >= profile.fixed_seconds(last_batch, min(k, last_k)) * (
        1 - 1e-9
    )
    assert profile.fixed_seconds(batch, last_k + k) >= profile.fixed_seconds(batch, last_k) * (1 - 1e-9)
    assert profile.fixed_seconds(0, k) >= 0


def test_an_unknown_grid_lists_the_known_ones() -> None:
    with pytest.raises(StateError, match=r"grid 'gpt' is unknown: one of qwen3-32b-gb200-tp2"):
        load_grid("gpt")


def test_a_formula_is_its_sum() -> None:
    formula = StepTimeFormula(
        base_seconds=7.0, seconds_per_token=0.5, seconds_per_draft_token=0.3, seconds_per_request_draft_token=0.01
    )
    assert formula.fixed_seconds(4, 3) == pytest.approx(7.0 + 0.5 * 16 + 3 * (0.3 + 0.04))
    assert formula.fixed_seconds(4, 0) == pytest.approx(7.0 + 0.5 * 4)


def test_captured_sizes_pad_the_batch_and_larger_batches_are_slower() -> None:
    formula = StepTimeFormula(base_seconds=0.0, seconds_per_token=1.0, captured_sizes=(8, 16, 512), no_graph_seconds=1000.0)
    assert [formula.fixed_seconds(batch, 0) for batch in (0, 7, 8, 9, 512)] == [0.0, 8.0, 8.0, 16.0, 512.0]
    assert formula.fixed_seconds(128, 3) == 512.0
    assert formula.fixed_seconds(128, 4) == 1640.0


def test_a_mixture_of_experts_has_a_knee() -> None:
    moe = STEP_TIME_FORMULAS["moe-30b-a3b"]
    before, after = moe.fixed_seconds(8, 0) - moe.fixed_seconds(7, 0), moe.fixed_seconds(40, 0) - moe.fixed_seconds(39, 0)
    assert before > 10 * after > 0
