"""C2 against the configs that trainers and publishers ship: nothing that vLLM reads right is refused, nothing wrong passes."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.engine.models.checkpoint import build_checkpoint
from aerie.engine.preflight import Finding, PreflightInput, Severity, run_preflight
from aerie.engine.releases import Version
from tests.unit.engine.preflight.published import KEY, ROWS, Row

VERSIONS = tuple(f"0.{minor}.0" for minor in range(22, 34))


def subject(small: Any, row: Row, version: str, runner: int) -> PreflightInput:
    tensors = {name.replace("midlayer", row.layer): value for name, value in small.drafter_tensors.items()}
    return PreflightInput(
        target=small.target(num_hidden_layers=row.target_layers),
        drafter=build_checkpoint("example/drafter@def", dict(row.config), [small.header_of(tensors)]),
        version=Version.parse(version),
        speculative_config={"method": "eagle3", "num_speculative_tokens": 3},
        environment={"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)},
    )


def finding(small: Any, row: Row, version: str, runner: int) -> Finding:
    [found] = [one for one in run_preflight(subject(small, row, version, runner)).findings if one.id == "C2"]
    return found


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_layers_are_read_as_vllm_reads_them(small: Any, row: Row, runner: int) -> None:
    reads = {subject(small, row, version, runner).effective_aux_layer_ids for version in VERSIONS}
    assert reads == {row.v1 if runner == 1 else row.v2}


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_wrong_layers_are_told_and_right_ones_are_not_refused(small: Any, row: Row, runner: int) -> None:
    found = {finding(small, row, version, runner).severity for version in VERSIONS}
    if row.trained is None:
        assert found == {Severity.SKIP}
    elif set(row.v1 if runner == 1 else row.v2) == set(row.trained):
        assert found <= {Severity.PASS, Severity.INFO}
    else:
        assert found <= {Severity.WARNING, Severity.ERROR}


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("row", [row for row in ROWS if row.trained], ids=lambda row: row.name)
def test_no_way_out_has_vllm_read_other_layers(small: Any, row: Row, runner: int) -> None:
    """Ids that the way out has written to the top level are those of the training, and it never has the runner changed."""
    assert row.trained is not None
    for version in VERSIONS:
        way_out = finding(small, row, version, runner).fix
        assert "VLLM_USE_V2_MODEL_RUNNER" not in way_out
        if KEY in way_out:
            assert f"{KEY}: {list(row.trained)} to the top level" in way_out
