"""Both forms of export to vLLM itself: what it reads from the speculators form computes what the serving form does, bit for bit.

Bringing the speculators form in again is the third. oracle.py is vLLM's side.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie_drafter import checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.convert import ConversionOverrides, import_checkpoint
from aerie_drafter.export import ExportFormat, export_checkpoint
from aerie_drafter.model import Drafter
from aerie_lab.testing.model import write_tiny_llama

# Most of it is for installing vLLM, which the fixture may have to do.
pytestmark = pytest.mark.timeout(2400)

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 258,  # that of the tiny target
    "draft_vocab_size": 100,
    "target_hidden_size": 64,
    "aux_layer_ids": (0, 1, 2),
}
CASES: dict[str, dict[str, Any]] = {
    "EAGLE 3.1": {"family": DrafterFamily.LLAMA, "fc_norm": True, "norm_output": True},
    "EAGLE 3": {"family": DrafterFamily.LLAMA, "draft_vocab_size": 258},
    "one norm, residual normed": {"family": DrafterFamily.LLAMA, "norm_before_fc": True, "norm_before_residual": True},
    "two layers": {"family": DrafterFamily.LLAMA, "aux_layer_ids": (1, 2), "fc_norm": True},
    "Qwen3, two layers, linear": {
        "family": DrafterFamily.QWEN3,
        "aux_layer_ids": (0, 2),
        "norm_output": True,
        "rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
}
FORMS = ("vllm", "speculators", "there and back")


def random_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """Norms random too, so that an exchange of two shows."""
    chance = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for weight in drafter.parameters():
            spread = torch.randn(weight.shape, generator=chance)
            weight.copy_(1 + 0.3 * spread if weight.dim() == 1 else spread * weight.shape[1] ** -0.5)
    if config.draft_vocab_size < config.vocab_size:
        kept = torch.randperm(config.vocab_size, generator=chance)[: config.draft_vocab_size]
        drafter.set_draft_vocabulary(kept.sort().values)
    return drafter


@pytest.fixture(scope="module")
def answered(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case and form, with what vLLM makes of it."""
    root = tmp_path_factory.mktemp("forms")
    target = write_tiny_llama(root / "target")
    folders = []
    for number, changes in enumerate(CASES.values()):
        config = DrafterConfig(**{**BASE, **changes})
        trained = root / f"trained-{number}"
        checkpoint.save_checkpoint(trained, random_drafter(config, number), {"target": str(target)})
        chance = torch.Generator().manual_seed(number)
        inputs = {
            "0.aux": torch.randn(12, 64 * len(config.aux_layer_ids), generator=chance),
            "0.tokens": torch.randint(258, (16,), generator=chance),
        }
        for form in FORMS:
            folder = root / f"{number} {form}"
            folder.mkdir()
            (folder / "target").symlink_to(target)
            save_file(inputs, folder / "inputs.safetensors")
            folders.append(folder)
        export_checkpoint(trained, root / f"{number} vllm" / "drafter")
        export_checkpoint(trained, root / f"{number} speculators" / "drafter", export_format=ExportFormat.SPECULATORS)
        import_checkpoint(
            root / f"{number} speculators" / "drafter", root / f"{number} there and back" / "drafter", ConversionOverrides()
        )
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [vllm / "python", Path(__file__).with_name("oracle.py"), *folders]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return root


@pytest.mark.parametrize("case", CASES)
def test_all_forms_are_one_drafter_to_vllm(case: str, answered: Path) -> None:
    number = list(CASES).index(case)
    for form in FORMS:
        fault = answered / f"{number} {form}" / "error.txt"
        assert not fault.exists(), fault.read_text()
    expected, *others = (load_file(answered / f"{number} {form}" / "outputs.safetensors") for form in FORMS)
    assert len(expected) == 3 * 5
    for found in others:
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
