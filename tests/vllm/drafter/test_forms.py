"""Both forms of export in vLLM: the speculators form and the serving form compute the same, bit for bit.

The imported speculators form is the third. oracle.py is vLLM's side.
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

# Most of the timeout is for a first installation of vLLM.
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
FORMS = ("vllm", "speculators", "imported")


def random_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """Return a drafter with random weights and norms, so that exchanged norms are detected."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5)
    if config.draft_vocab_size < config.vocab_size:
        target_ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        drafter.set_draft_vocabulary(target_ids.sort().values)
    return drafter


@pytest.fixture(scope="module")
def vllm_outputs(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root with a folder per case and form, each with vLLM's outputs."""
    root = tmp_path_factory.mktemp("forms")
    target = write_tiny_llama(root / "target")
    folders = []
    for number, changes in enumerate(CASES.values()):
        config = DrafterConfig(**{**BASE, **changes})
        trained = root / f"trained-{number}"
        checkpoint.save_checkpoint(trained, random_drafter(config, number), {"target": str(target)})
        generator = torch.Generator().manual_seed(number)
        inputs = {
            "0.aux": torch.randn(12, 64 * len(config.aux_layer_ids), generator=generator),
            "0.tokens": torch.randint(258, (16,), generator=generator),
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
            root / f"{number} speculators" / "drafter", root / f"{number} imported" / "drafter", ConversionOverrides()
        )
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [vllm / "python", Path(__file__).with_name("oracle.py"), *folders]
    process = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return root


@pytest.mark.parametrize("case", CASES)
def test_all_forms_have_the_same_outputs_in_vllm(case: str, vllm_outputs: Path) -> None:
    number = list(CASES).index(case)
    for form in FORMS:
        error_file = vllm_outputs / f"{number} {form}" / "error.txt"
        assert not error_file.exists(), error_file.read_text()
    expected, *others = (load_file(vllm_outputs / f"{number} {form}" / "outputs.safetensors") for form in FORMS)
    assert len(expected) == 3 * 5
    for outputs in others:
        assert outputs.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in outputs.items())
