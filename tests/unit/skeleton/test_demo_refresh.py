"""The demo of a refresh: what it computes of counters, which requests it sends, and that its files fit each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from aerie.api import SpeculativeDeployment
from aerie_drafter.refresh.settings import RefreshSettings
from aerie_lab.cli.demo_refresh import (
    CAPTURE_PATCH,
    SETTINGS_FILE,
    Reading,
    Stage,
    build_curve,
    build_requests,
    build_timeline,
    choose_evenly,
    compute_acceptance_length,
)
from aerie_lab.cli.scenarios import REFRESH_SCENARIO
from benchmarks import refresh as benchmark
from benchmarks._parts import replace_section

COMPARISON = {"metric": "TokensPerStep", "estimate": 0.3, "lower": 0.2, "upper": 0.4}
REPORT: dict[str, Any] = {
    "captured": 320,
    "trained": {"new": 250, "old": 250},
    "new": {"prompts": 70, "served": 1.9, "refreshed": 2.6},
    "old": {"prompts": 166, "served": 2.4, "refreshed": 2.41},
    "draft_vocabulary_coverage": 0.98,
    "seconds": {"select": 0.5, "answer": 40.0, "train": 150.0, "evaluate": 30.0},
    "accepted": True,
}


def build_example() -> dict[str, Any]:
    lengths = (2.4, 1.9, 2.0, 2.3, 2.5, 2.376)
    stages = [Stage(f"stage {index}", 60.0 * index, 60.0 * index + 58, length, 10) for index, length in enumerate(lengths)]
    readings = [Reading(5.0 * index, 100.0 * index, 90.0 * index) for index in range(9)]
    timeline = build_timeline(stages, readings, REPORT, {"result": "Promoted", "comparisons": [COMPARISON]})
    decoded: dict[str, Any] = json.loads(json.dumps(timeline))
    return decoded


def test_acceptance_length_is_that_between_two_readings() -> None:
    assert compute_acceptance_length(Reading(0, 100, 50), Reading(60, 300, 350)) == 2.5
    assert compute_acceptance_length(Reading(0, 100, 50), Reading(60, 100, 50)) is None


def test_the_curve_has_a_point_for_each_interval_with_drafts() -> None:
    readings = [Reading(0, 0, 0), Reading(8, 10, 10), Reading(12, 20, 30), Reading(24, 20, 30), Reading(34, 30, 30)]
    assert build_curve(readings, 10.0) == [(6.0, 2.5), (29.0, 1.0)]


def test_items_are_chosen_at_equal_distances() -> None:
    items = [{"number": number} for number in range(10)]
    assert [item["number"] for item in choose_evenly(items, 4)] == [0, 2, 5, 7]
    assert choose_evenly(items, 20) == items


@pytest.mark.slow
def test_recorded_texts_and_measured_ones_differ() -> None:
    questions, texts, other_texts = ({json.dumps(request) for request in requests} for requests in build_requests())
    assert texts
    assert other_texts
    assert not texts & other_texts
    assert not questions & (texts | other_texts)


def test_manifest_patch_and_settings_fit_each_other() -> None:
    document = yaml.safe_load(REFRESH_SCENARIO.manifest.read_text())
    document["spec"] |= yaml.safe_load(CAPTURE_PATCH.read_text())["spec"]
    spec = SpeculativeDeployment.from_dict(document, unknown_fields="forbid").spec
    assert spec.capture is not None
    settings = RefreshSettings.model_validate(yaml.safe_load(SETTINGS_FILE.read_text()))
    assert settings.evaluation.num_speculative_tokens == spec.speculation.num_speculative_tokens


def test_figures_of_a_timeline() -> None:
    figures = benchmark.summarize_timeline(build_example())
    assert figures["loop_recovered_pct"] == 125.0
    assert figures["loop_old_loss_pct"] == 1.0
    assert (figures["loop_gain_lower_pct"], figures["loop_gain_pct"], figures["loop_gain_upper_pct"]) == (20.0, 30.0, 40.0)
    assert figures["loop_refresh_s"] == 220.5
    assert figures["loop_requests"] == 60
    assert "from 2.40 to 2.00, then 2.50; on questions 2.38" in benchmark.format_row(figures)
    assert "125 % of the lost" in benchmark.describe_loop(figures)
    assert "| stage 1 | 1.0 min | 2.0 min | 1.90 | 10 |" in benchmark.format_timeline(build_example())


def test_a_part_replaces_its_section_alone() -> None:
    page = "a\n<!-- loop -->\nold\n<!-- end -->\nb\n<!-- offline -->\nkept\n<!-- end -->\n"
    assert replace_section(page, "loop", "new") == page.replace("old", "new")
