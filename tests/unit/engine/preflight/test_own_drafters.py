"""Drafters of Aerie's own trainer pass preflight: every family, both forms of export, any vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aerie.checkpoints import read_checkpoint_directory
from aerie.engine.preflight import Severity, run_preflight
from aerie_drafter import checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.export import ExportFormat, export_checkpoint
from aerie_drafter.model import Drafter

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "draft_vocab_size": 256,
    "target_hidden_size": 64,
    "aux_layer_ids": (2, 3, 6),
    "fc_norm": True,
    "norm_output": True,
}
MLA = MlaDims(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=24)
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"fc_norm": False, "norm_output": False},
    "eagle3.1": {},
    "qwen3": {"family": DrafterFamily.QWEN3},
    "latent attention": {"family": DrafterFamily.MLA, "mla": MLA, "num_key_value_heads": 4},
    "draft vocabulary": {"draft_vocab_size": 128},
    "four layers": {"aux_layer_ids": (1, 2, 3, 6)},
}


# The speculators format has no latent attention.
CASES = [
    (kind, form) for kind in KINDS for form in ExportFormat if (kind, form) != ("latent attention", ExportFormat.SPECULATORS)
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_own_drafter_passes(small_models: Any, tmp_path: Path, kind: str, form: ExportFormat) -> None:
    config = DrafterConfig(**{"family": DrafterFamily.LLAMA, **SIZES, **KINDS[kind]})
    checkpoint.save_checkpoint(tmp_path / "trained", Drafter(config), {"target": "example/target"}, include_embedding=False)
    export_checkpoint(tmp_path / "trained", tmp_path / "exported", export_format=form, include_embedding=False)
    report = run_preflight(small_models.subject(drafter=read_checkpoint_directory(tmp_path / "exported")))
    failures = [finding.message for finding in report.findings if finding.severity in (Severity.ERROR, Severity.WARNING)]
    assert failures == []
    findings = {finding.id: finding for finding in report.findings}
    assert {findings[check_id].severity for check_id in ("C1", "C2", "C3", "C4", "C7", "C9", "C22", "C27")} == {Severity.PASS}
