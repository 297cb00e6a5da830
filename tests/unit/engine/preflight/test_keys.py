"""C34: draft sampling and further keys against version, method and model runner, and the memory of draft logits by runner."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.engine.arguments import EngineArguments
from aerie.engine.preflight import Severity
from aerie.engine.releases import Version
from tests.unit.engine.preflight.conftest import SmallModels

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}
DRAWN = {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("keys", "version", "environment", "severity", "evidence"),
    [
        ({}, "0.33.0", {}, Severity.SKIP, "no other keys"),
        (DRAWN, "0.33.0", {}, Severity.PASS, "vLLM 0.33.0 supports draft_sample_method"),
        (DRAWN, "0.20.2", {}, Severity.ERROR, "draftSampling is Probabilistic (draft_sample_method), which vLLM 0.20.2"),
        (DRAWN | {"use_local_argmax_reduction": True}, "0.33.0", {}, Severity.ERROR, "no draft logits to sample from"),
        ({"rejection_sample_method": "block"}, "0.33.0", {}, Severity.PASS, "rejection_sample_method"),
        ({"rejection_sample_method": "block"}, "0.33.0", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, Severity.WARNING, "token by token"),
        (
            {"draft_lm_head_quantization": "fp8"},
            "0.33.0",
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            Severity.ERROR,
            "(VLLM_USE_V2_MODEL_RUNNER=0) rejects",
        ),
        ({"of_tomorrow": 1}, "0.33.0", {}, Severity.INFO, "of_tomorrow"),
    ],
)
def test_finding_for_each_key(
    small_models: SmallModels, keys: dict[str, Any], version: str, environment: dict[str, str], severity: Severity, evidence: str
) -> None:
    (finding,) = small_models.findings(
        "C34", speculative_config=EAGLE | keys, version=Version.parse(version), environment=environment
    )
    assert finding.severity is severity
    assert evidence in finding.evidence
    assert bool(finding.fix) == (severity in (Severity.ERROR, Severity.WARNING))


@pytest.mark.parametrize(
    ("version", "environment", "element_bytes"),
    [("0.27.1", {}, 4), ("0.33.0", {}, 2), ("0.33.0", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, 4)],
)
def test_draft_logits_are_counted_by_model_runner(
    small_models: SmallModels, version: str, environment: dict[str, str], element_bytes: int
) -> None:
    subject = small_models.subject(
        speculative_config=EAGLE | DRAWN,
        version=Version.parse(version),
        environment=environment,
        arguments=EngineArguments(max_num_seqs=64),
    )
    assert subject.memory_estimate.draft_logits_bytes == 3 * 256 * 64 * element_bytes
    assert small_models.subject().memory_estimate.draft_logits_bytes == 0
