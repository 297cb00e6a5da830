"""`aerie_drafter.model.Drafter` against vLLM's own classes: the same checkpoint, the same inputs, the same numbers.

`aerie_drafter.checkpoint` writes the checkpoints and vLLM's `load_weights` loads them, so the names are tested with the numbers.
One process of vLLM's interpreter computes all cases (oracle.py), because importing vLLM takes longer than they do.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import zlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aerie_drafter
from aerie_drafter import checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.errors import CheckpointError
from aerie_drafter.evaluate import read_prompts
from aerie_drafter.evaluate.answers import answer_batch
from aerie_drafter.evaluate.offline import ModelPair
from aerie_drafter.model import DecodingCache, Drafter
from aerie_lab.testing.model import write_tiny_llama

# Most of the timeout is for a first installation of vLLM.
pytestmark = pytest.mark.timeout(2400)

MAX_ROUNDING = 2e-5
"""Maximum difference, relative to the largest number of the tensor.

float32 has a precision of 6e-8. A number goes through six dependent steps of some ten sums of up to 320 terms each. Measured:
the same cases in float64 differ from vLLM's by up to 9e-6, and from `Drafter` in float32 by up to 4e-6. A switch that is read
differently exceeds the bound more than a hundred times, which a test checks."""

BUNDLE = Path(aerie_drafter.__file__).parents[1] / "bundle"
SHIPPED = ("eagle3", "eagle31", "weak")

VOCABULARY = 258  # that of the tiny target
COLUMNS, STEPS = (36, 3), 5
"""Columns with states of the target by round (a prefill, then three accepted tokens), and drafted steps of each round."""

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": 100,
    "target_hidden_size": 64,
    "aux_layer_ids": (1, 2, 4),
    "fc_norm": True,
    "norm_output": True,
}
LATENT = MlaDims(kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, q_lora_rank=48)


def build_config(family: DrafterFamily, **changes: Any) -> DrafterConfig:
    mla: dict[str, Any] = {"mla": LATENT, "head_dim": 16} if family is DrafterFamily.MLA else {}
    return DrafterConfig(family, **{**BASE, **mla, **changes})


def build_cases() -> dict[str, DrafterConfig]:
    """Return all combinations of vLLM's norm switches with both kinds of vocabulary, and single changes of EAGLE 3.1."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shared_changes: dict[str, dict[str, Any]] = {
        "one part": {"aux_layer_ids": (3,)},
        "five parts": {"aux_layer_ids": (0, 1, 2, 3, 4)},
        "wider target": {"target_hidden_size": 80},
        "eps": {"rms_norm_eps": 1e-2},
        "yarn": {"rope": yarn},
        "three layers": {"num_hidden_layers": 3, "norm_before_residual": True},
    }
    grouped_changes: dict[str, dict[str, Any]] = {
        "window": {"sliding_window": 33},
        "two layers with a window": {"num_hidden_layers": 2, "sliding_window": 34},
        "no grouping": {"num_key_value_heads": 4},
        "one group": {"num_key_value_heads": 1},
        "rope base": {"rope": {"rope_type": "default", "rope_theta": 5e5}},
        "linear": {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "llama3": {"rope": {**llama3, "original_max_position_embeddings": 32}},
        "yarn with mscale": {"rope": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}},
        "yarn with factor": {"rope": {**yarn, "attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    }
    latent_changes: dict[str, dict[str, Any]] = {
        "values as wide as keys": {"mla": dataclasses.replace(LATENT, v_head_dim=48)},
        "yarn as in V3": {"rope": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "yarn, all_dim alone": {"rope": {**yarn, "mscale_all_dim": 1.0}},
        "yarn, mscale alone": {"rope": {**yarn, "mscale": 0.7, "truncate": False}},
    }
    configs = {}
    for family in DrafterFamily:
        norms = ("fc_norm", "") if family is DrafterFamily.MLA else ("fc_norm", "norm_before_fc", "")
        for norm, output, residual, reduced in product(norms, (True, False), (True, False), (True, False)):
            switches: dict[str, Any] = {
                "fc_norm": norm == "fc_norm",
                "norm_before_fc": norm == "norm_before_fc",
                "norm_output": output,
            }
            size = 100 if reduced else VOCABULARY
            switch_names = [norm, "norm_output" * output, "norm_before_residual" * residual, "reduced" * reduced]
            name = f"{family.name} " + ("+".join(filter(None, switch_names)) or "plain")
            switches |= {"norm_before_residual": residual, "draft_vocab_size": size}
            configs[name] = build_config(family, **switches)
        family_changes = latent_changes if family is DrafterFamily.MLA else grouped_changes
        for name, change in {**shared_changes, **family_changes}.items():
            configs[f"{family.name} {name}"] = build_config(family, **change)
    return configs


CASES = build_cases()

MISSING_KEYS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "draft_vocab_size", "target_hidden_size")

OLDER_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "left out": (
        {"fc_norm": False, "norm_output": False, "draft_vocab_size": VOCABULARY},
        dict.fromkeys([*MISSING_KEYS, "num_aux_hidden_states", "rms_norm_eps"]),
    ),
    "layers named in eagle_config alone": ({}, {"eagle_aux_hidden_state_layer_ids": None}),
    "rope_theta by itself": (
        {"rope": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": None, "rope_theta": 5e5},
    ),
    "rope_scaling": (
        {"rope": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}},
        {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
}
"""Configurations of other projects: their meaning, and the keys they are written with (None: the key is missing)."""

OLDER_GROUPED_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm_before_fc in eagle_config": (
        {"fc_norm": False, "norm_before_fc": True},
        {"norm_before_fc": None, "eagle_config": {"norm_before_fc": True}},
    ),
    "norm_before_fc twice": (
        {"fc_norm": False, "norm_before_fc": False},
        {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
    ),
}


def build_older_cases() -> dict[str, tuple[DrafterConfig, dict[str, Any]]]:
    configs = {}
    for family in DrafterFamily:
        for name, (meaning, written_keys) in (
            OLDER_CONFIGS if family is DrafterFamily.MLA else {**OLDER_CONFIGS, **OLDER_GROUPED_CONFIGS}
        ).items():
            configs[f"{family.name} {name}"] = build_config(family, **meaning), written_keys
    heads = {"head_dim": None, "num_key_value_heads": None}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    configs["LLAMA heads left out"] = build_config(DrafterFamily.LLAMA, **sizes), heads
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    configs["QWEN3 heads left out"] = build_config(DrafterFamily.QWEN3, **sizes), heads
    return configs


OLDER_CASES = build_older_cases()


def random_drafter(config: DrafterConfig, generator: torch.Generator) -> Drafter:
    """Return a drafter with random weights and norms: with norms of 1, exchanged norms would not be detected."""
    drafter = Drafter(config)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
            else:
                scale = 1.0 if name == "embed_tokens.weight" else weight.shape[1] ** -0.5
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    if config.draft_vocab_size < config.vocab_size:
        target_ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        drafter.set_draft_vocabulary(target_ids.sort().values)
    return drafter


def random_inputs(config: DrafterConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Return auxiliary states and tokens by round. Each part is ten times the previous one, as real states grow with depth."""
    parts = len(config.aux_layer_ids)
    scale = (10.0 ** torch.arange(parts)).repeat_interleave(config.target_hidden_size) * 10.0 ** (-parts / 2)
    inputs = {}
    for number, columns in enumerate(COLUMNS):
        inputs[f"{number}.aux"] = scale * torch.randn(columns, len(scale), generator=generator)
        inputs[f"{number}.tokens"] = torch.randint(config.vocab_size, (columns + STEPS,), generator=generator)
    return inputs


@dataclass(frozen=True)
class Case:
    """A drafter and its inputs; `folder` is that of the oracle."""

    folder: Path
    drafter: Drafter
    inputs: dict[str, Tensor]

    @property
    def error(self) -> str:
        """Reason why vLLM did not load it; empty if it did."""
        file = self.folder / "error.txt"
        return file.read_text() if file.exists() else ""

    @property
    def outputs(self) -> dict[str, Tensor]:
        assert not self.error
        return load_file(self.folder / "outputs.safetensors")


Cases = dict[str, Case]


@pytest.fixture(scope="module")
def cases(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Return all cases by name, computed by vLLM."""
    root = tmp_path_factory.mktemp("parity")
    target = write_tiny_llama(root / "target")
    cases_by_name: Cases = {}

    def add(name: str, target: Path, drafter: Drafter, inputs: dict[str, Tensor], **config_keys: Any) -> None:
        folder = root / f"{len(cases_by_name):03}"
        folder.mkdir()
        checkpoint.save_checkpoint(folder / "drafter", drafter, {})
        file = folder / "drafter" / "config.json"
        config = {**json.loads(file.read_text()), **config_keys}
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        (folder / "target").symlink_to(target)
        save_file(inputs, folder / "inputs.safetensors")
        cases_by_name[name] = Case(folder, drafter, inputs)

    for name, config in CASES.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        add(name, target, random_drafter(config, generator), random_inputs(config, generator))
    generator = torch.Generator().manual_seed(0)
    for name, (config, config_keys) in OLDER_CASES.items():
        add(name, target, random_drafter(config, generator), random_inputs(config, generator), **config_keys)
    old_drafter, new_drafter = (
        random_drafter(build_config(DrafterFamily.LLAMA, fc_norm=has_switches, norm_output=has_switches), generator)
        for has_switches in (False, True)
    )
    add("weights of 3 as 3.1", target, old_drafter, random_inputs(old_drafter.config, generator), fc_norm=True, norm_output=True)
    add(
        "weights of 3.1 as 3", target, new_drafter, random_inputs(new_drafter.config, generator), fc_norm=False, norm_output=False
    )
    for name in SHIPPED:
        pair = ModelPair.load(BUNDLE / "target", BUNDLE / name)
        add(name, BUNDLE / "target", pair.drafter, real_inputs(pair))
    run_oracle(vllm, [case.folder for case in cases_by_name.values()])
    return cases_by_name


def real_inputs(pair: ModelPair) -> dict[str, Tensor]:
    """Return inputs like `random_inputs`, from the target's states for one of the bundle's prompts and its answer."""
    ids = read_prompts(BUNDLE / "prompts.jsonl")[0].encode(pair.tokenizer)
    (text,) = answer_batch(pair.target, [ids], max_tokens=sum(COLUMNS) + STEPS + 1, extra_tokens=0, end_tokens=frozenset())
    states = pair.target(text.tokens.unsqueeze(0)).aux_hidden_states[0]
    inputs, first = {}, 0
    for number, columns in enumerate(COLUMNS):
        inputs[f"{number}.aux"] = states[first : first + columns].clone()
        inputs[f"{number}.tokens"] = text.tokens[first + 1 : first + 1 + columns + STEPS].clone()
        first += columns
    return inputs


def run_oracle(vllm: Path, folders: list[Path]) -> None:
    """Compute the cases in these folders with vLLM."""
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


def run_drafter(drafter: Drafter, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of `Drafter` for the same inputs, drafted as by `aerie_drafter.evaluate`."""
    outputs: dict[str, Tensor] = {}
    cache = DecodingCache(num_layers=drafter.config.num_hidden_layers)
    with torch.inference_mode():
        for number, columns in enumerate(COLUMNS):
            tokens = inputs[f"{number}.tokens"].unsqueeze(0)
            hidden, ids = drafter.fuse_aux_hidden_states(inputs[f"{number}.aux"]).unsqueeze(0), tokens[:, :columns]
            cache.discard_uncommitted()
            for step in range(STEPS + 1):
                normed, feedback = drafter(ids, hidden, cache)
                if step == 0:
                    cache.commit()
                full_logits = normed.new_full((normed.shape[1], drafter.config.vocab_size), float("-inf"))
                full_logits[:, drafter.draft_token_ids] = drafter.logits(normed)[0]
                name = f"{number}.{step}"
                outputs |= {f"{name}.normed": normed[0], f"{name}.feedback": feedback[0], f"{name}.logits": full_logits}
                ids, hidden = tokens[:, columns + step : columns + step + 1], feedback[:, -1:]
    return outputs


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the maximum difference, relative to the largest number; infinite if shapes or the positions of -inf differ."""
    finite = torch.isfinite(expected)
    if actual.shape != expected.shape or not torch.equal(torch.isfinite(actual), finite) or torch.isnan(actual + expected).any():
        return float("inf")
    return float((actual[finite] - expected[finite]).abs().max() / expected[finite].abs().max())


def max_differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the maximum difference of each kind of tensor: normed, feedback, logits."""
    assert actual.keys() == expected.keys()
    differences: dict[str, float] = {}
    for name, tensor in expected.items():
        kind = name.split(".")[-1]
        differences[kind] = max(differences.get(kind, 0.0), relative_difference(actual[name], tensor))
    return differences


@pytest.mark.parametrize("name", [*CASES, *OLDER_CASES, *SHIPPED])
def test_outputs_equal_those_of_vllm(name: str, cases: Cases) -> None:
    case = cases[name]
    differences = max_differences(run_drafter(checkpoint.load_drafter(case.folder / "drafter"), case.inputs), case.outputs)
    logging.getLogger(__name__).info("%s: %s", name, differences)  # shown by --log-cli-level=info
    assert max(differences.values()) < MAX_ROUNDING, differences


def test_a_wrong_switch_exceeds_the_rounding(cases: Cases) -> None:
    """Wrong semantics exceed the bound."""
    case = cases["LLAMA fc_norm+norm_output"]
    for change in ({"fc_norm": False}, {"norm_output": False}, {"norm_before_residual": True}, {"rms_norm_eps": 1e-3}):
        other = Drafter(dataclasses.replace(case.drafter.config, **change))
        other.load_state_dict(case.drafter.state_dict(), strict=False)
        assert max(max_differences(run_drafter(other, case.inputs), case.outputs).values()) > 100 * MAX_ROUNDING


def test_vllm_loads_weights_of_3_with_the_switches_of_3_1(cases: Cases) -> None:
    """vLLM then has norms of weight 1 before fc; `aerie-drafter` rejects the checkpoint."""
    case = cases["weights of 3 as 3.1"]
    other = Drafter(dataclasses.replace(case.drafter.config, fc_norm=True, norm_output=True))
    other.load_state_dict({**other.state_dict(), **case.drafter.state_dict()})
    assert max(max_differences(run_drafter(other, case.inputs), case.outputs).values()) < MAX_ROUNDING
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        checkpoint.load_drafter(case.folder / "drafter")


def test_vllm_rejects_weights_of_3_1_without_its_switches(cases: Cases) -> None:
    case = cases["weights of 3.1 as 3"]
    assert "no module or parameter named 'fc_norm'" in case.error
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        checkpoint.load_drafter(case.folder / "drafter")
