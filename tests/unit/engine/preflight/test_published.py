"""C2 against the configs that trainers and publishers ship: layers that vLLM reads right pass, wrong ones fail."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.engine.models.checkpoint import build_checkpoint
from aerie.engine.preflight import Finding, PreflightInput, Severity, run_preflight
from aerie.engine.releases import Version
from tests.unit.engine.preflight.published import KEY, ROWS, Row

VERSIONS = tuple(f"0.{minor}.0" for minor in range(22, 34))


def subject(small_models: Any, row: Row, version: str, runner: int) -> PreflightInput:
    tensors = {name.replace("midlayer", row.layer): value for name, value in small_models.drafter_tensors.items()}
    return PreflightInput(
        target=small_models.target(num_hidden_layers=row.target_layers),
        drafter=build_checkpoint("example/drafter@def", dict(row.config), [small_models.build_header(tensors)]),
        version=Version.parse(version),
        speculative_config={"method": "eagle3", "num_speculative_tokens": 3},
        environment={"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)},
    )


def find_layers_finding(small_models: Any, row: Row, version: str, runner: int) -> Finding:
    findings = run_preflight(subject(small_models, row, version, runner)).findings
    return next(finding for finding in findings if finding.id == "C2")


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_layers_are_read_as_vllm_reads_them(small_models: Any, row: Row, runner: int) -> None:
    layer_ids = {subject(small_models, row, version, runner).effective_aux_layer_ids for version in VERSIONS}
    assert layer_ids == {row.v1 if runner == 1 else row.v2}


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_wrong_layers_are_reported_and_right_ones_pass(small_models: Any, row: Row, runner: int) -> None:
    severities = {find_layers_finding(small_models, row, version, runner).severity for version in VERSIONS}
    if row.trained is None:
        assert severities == {Severity.SKIP}
    elif set(row.v1 if runner == 1 else row.v2) == set(row.trained):
        assert severities <= {Severity.PASS, Severity.INFO}
    else:
        assert severities <= {Severity.WARNING, Severity.ERROR}


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("row", [row for row in ROWS if row.trained], ids=lambda row: row.name)
def test_no_fix_makes_vllm_read_other_layers(small_models: Any, row: Row, runner: int) -> None:
    """The layer ids that a fix proposes are those of the training, and no fix changes the model runner."""
    assert row.trained is not None
    for version in VERSIONS:
        fix = find_layers_finding(small_models, row, version, runner).fix
        assert "VLLM_USE_V2_MODEL_RUNNER" not in fix
        if KEY in fix:
            assert f"{KEY}: {list(row.trained)} to the top level" in fix
