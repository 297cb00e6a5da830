"""The benchmark's replay: its regret, its rules, and a tuner that beats a fixed K = 3 on a grid of another file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aerie.tuning.models.acceptance import AcceptanceModel
from benchmarks._tuning_replay import choose, grids
from benchmarks._tuning_rules import RULES, profiled


@pytest.fixture
def own_grid(tmp_path: Path) -> Path:
    """A grid file of another dense engine: a simple formula, with K = 2 and 4 among the columns."""
    batches, lengths = [1, 4, 16, 64, 128], {"0": 1.0, "1": 1.8, "2": 2.4, "3": 2.85, "4": 3.2}

    def throughput(batch: int, tokens: int) -> float:
        return round(batch * lengths[str(tokens)] / (9e-3 + 6e-4 * tokens + 4e-5 * batch * (tokens + 1)), 1)

    table = {str(k): [throughput(b, k) for b in batches] for k in range(5)}
    file = tmp_path / "own.json"
    grid = {"name": "own", "batch": batches, "acceptance_length": lengths, "throughput": table}
    file.write_text(json.dumps({"about": "made up", "grids": [grid]}))
    return file


def test_another_file_of_the_same_form_is_replayed(own_grid: Path) -> None:
    (grid,) = grids(str(own_grid))
    assert grid.name == "own"
    assert grid.start == 3
    chosen = choose(grid, 1)
    tuner_regrets = [grid.regret(k, column) for column, k in enumerate(chosen.tokens)]
    fixed_regrets = [grid.regret(3, column) for column in range(5)]
    assert sum(tuner_regrets) < 0.5 * sum(fixed_regrets)
    assert max(tuner_regrets) < 0.06
    acceptance = chosen.decision.evidence.acceptance
    assert isinstance(acceptance, AcceptanceModel)
    assert float(acceptance.length(3).mean()) == pytest.approx(2.85, rel=0.02)


def test_regret_is_against_the_best_cell_of_the_batch(own_grid: Path) -> None:
    (grid,) = grids(str(own_grid))
    for column in range(5):
        regrets = [grid.regret(k, column) for k in grid.tokens]
        assert min(regrets) == 0
        assert max(regrets) < 1
    assert grid.regret(7, 0) == grid.regret(4, 0)


def test_an_unusable_cell_counts_for_no_rule() -> None:
    llama = next(grid for grid in grids() if "Llama" in grid.name)
    assert 7 not in llama.usable(4)
    assert llama.regret(7, 4) == llama.regret(5, 4)


def test_every_rule_names_a_k_for_every_batch() -> None:
    for grid in grids():
        for _, rule in RULES.values():
            assert len(rule(grid)) == len(grid.batches)


def test_the_profiled_table_is_best_where_it_was_measured() -> None:
    llama = next(grid for grid in grids() if "Llama" in grid.name)
    measured = [k for k in llama.usable(0) if k in (0, 1, 3, 5)]
    best = min(llama.regret(k, 0) for k in measured)
    assert llama.regret(profiled(floor=False)(llama)[0], 0) <= best + 0.02
