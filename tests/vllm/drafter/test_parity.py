"""`aerie_drafter.model.Drafter` against vLLM's own classes: the same checkpoint, the same inputs, the same numbers.

`aerie_drafter.checkpoint` writes the checkpoints and vLLM's `load_weights` loads them, so the names are tested with the numbers.
One process of vLLM's interpreter answers all cases (oracle.py), because importing vLLM takes longer than they do.
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

# Most of it is for installing vLLM, which the fixture may have to do.
pytestmark = pytest.mark.timeout(2400)

ROUNDING = 2e-5
"""Largest difference allowed, in parts of the largest number of the tensor.

float32 keeps 6e-8. A number here goes through six steps, one fed by the other, of some ten sums of up to 320 terms each. What
that makes can be measured: the same cases in float64 differ from vLLM's by up to 9e-6, and ours in float32 by up to 4e-6. A
switch that is read differently makes more than a hundred times the bound, which a test here holds to."""

BUNDLE = Path(aerie_drafter.__file__).parents[1] / "bundle"
SHIPPED = ("eagle3", "eagle31", "weak")

VOCABULARY = 258  # that of the tiny target
COLUMNS, STEPS = (24, 3), 5
"""Per round, columns that the target's states are known for: a prefill, then three accepted tokens; and drafted steps each."""

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


def configured(family: DrafterFamily, **changes: Any) -> DrafterConfig:
    mla: dict[str, Any] = {"mla": LATENT, "head_dim": 16} if family is DrafterFamily.MLA else {}
    return DrafterConfig(family, **{**BASE, **mla, **changes})


def cases() -> dict[str, DrafterConfig]:
    """All combinations of the norm switches that vLLM has, with both kinds of vocabulary; the rest one by one on EAGLE 3.1."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes: dict[str, dict[str, Any]] = {
        "one part": {"aux_layer_ids": (3,)},
        "five parts": {"aux_layer_ids": (0, 1, 2, 3, 4)},
        "wider target": {"target_hidden_size": 80},
        "eps": {"rms_norm_eps": 1e-2},
        "yarn": {"rope": yarn},
    }
    grouped: dict[str, dict[str, Any]] = {
        "no grouping": {"num_key_value_heads": 4},
        "one group": {"num_key_value_heads": 1},
        "rope base": {"rope": {"rope_type": "default", "rope_theta": 5e5}},
        "linear": {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "llama3": {"rope": {**llama3, "original_max_position_embeddings": 32}},
        "yarn with mscale": {"rope": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}},
        "yarn with factor": {"rope": {**yarn, "attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    }
    latent: dict[str, dict[str, Any]] = {
        "values as wide as keys": {"mla": dataclasses.replace(LATENT, v_head_dim=48)},
        "yarn as in V3": {"rope": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "yarn, all_dim alone": {"rope": {**yarn, "mscale_all_dim": 1.0}},
        "yarn, mscale alone": {"rope": {**yarn, "mscale": 0.7, "truncate": False}},
    }
    found = {}
    for family in DrafterFamily:
        norms = ("fc_norm", "") if family is DrafterFamily.MLA else ("fc_norm", "norm_before_fc", "")
        for norm, output, residual, reduced in product(norms, (True, False), (True, False), (True, False)):
            switches: dict[str, Any] = {
                "fc_norm": norm == "fc_norm",
                "norm_before_fc": norm == "norm_before_fc",
                "norm_output": output,
            }
            size = 100 if reduced else VOCABULARY
            words = [norm, "norm_output" * output, "norm_before_residual" * residual, "reduced" * reduced]
            name = f"{family.name} " + ("+".join(filter(None, words)) or "plain")
            switches |= {"norm_before_residual": residual, "draft_vocab_size": size}
            found[name] = configured(family, **switches)
        more = latent if family is DrafterFamily.MLA else grouped
        for name, change in {**changes, **more}.items():
            found[f"{family.name} {name}"] = configured(family, **change)
    return found


CASES = cases()

LEFT_OUT = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "draft_vocab_size", "target_hidden_size")

OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "left out": (
        {"fc_norm": False, "norm_output": False, "draft_vocab_size": VOCABULARY},
        dict.fromkeys([*LEFT_OUT, "num_aux_hidden_states", "rms_norm_eps"]),
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
"""How other projects write a configuration: what it means, and what is to be read so (None: the key is not there)."""

OLDER_GROUPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm_before_fc in eagle_config": (
        {"fc_norm": False, "norm_before_fc": True},
        {"norm_before_fc": None, "eagle_config": {"norm_before_fc": True}},
    ),
    "norm_before_fc twice": (
        {"fc_norm": False, "norm_before_fc": False},
        {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
    ),
}


def older() -> dict[str, tuple[DrafterConfig, dict[str, Any]]]:
    found = {}
    for family in DrafterFamily:
        for name, (meant, written) in (OLDER if family is DrafterFamily.MLA else {**OLDER, **OLDER_GROUPED}).items():
            found[f"{family.name} {name}"] = configured(family, **meant), written
    heads = {"head_dim": None, "num_key_value_heads": None}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    found["LLAMA heads left out"] = configured(DrafterFamily.LLAMA, **sizes), heads
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    found["QWEN3 heads left out"] = configured(DrafterFamily.QWEN3, **sizes), heads
    return found


WRITTEN = older()


def random_drafter(config: DrafterConfig, chance: torch.Generator) -> Drafter:
    """Every weight random, norms too: with norms of 1 an exchange of two would not show."""
    drafter = Drafter(config)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=chance))
            else:
                scale = 1.0 if name == "embed_tokens.weight" else weight.shape[1] ** -0.5
                weight.copy_(scale * torch.randn(weight.shape, generator=chance))
    if config.draft_vocab_size < config.vocab_size:
        kept = torch.randperm(config.vocab_size, generator=chance)[: config.draft_vocab_size]
        drafter.set_draft_vocabulary(kept.sort().values)
    return drafter


def random_inputs(config: DrafterConfig, chance: torch.Generator) -> dict[str, Tensor]:
    """Per round: auxiliary states, each part ten times as large as the one before (as real ones grow with depth), and tokens."""
    parts = len(config.aux_layer_ids)
    scale = (10.0 ** torch.arange(parts)).repeat_interleave(config.target_hidden_size) * 10.0 ** (-parts / 2)
    inputs = {}
    for number, columns in enumerate(COLUMNS):
        inputs[f"{number}.aux"] = scale * torch.randn(columns, len(scale), generator=chance)
        inputs[f"{number}.tokens"] = torch.randint(config.vocab_size, (columns + STEPS,), generator=chance)
    return inputs


@dataclass(frozen=True)
class Case:
    """A drafter and what it is asked; `folder` is the oracle's."""

    folder: Path
    drafter: Drafter
    inputs: dict[str, Tensor]

    @property
    def error(self) -> str:
        """Why vLLM did not load it; empty when it did."""
        file = self.folder / "error.txt"
        return file.read_text() if file.exists() else ""

    @property
    def outputs(self) -> dict[str, Tensor]:
        assert not self.error
        return load_file(self.folder / "outputs.safetensors")


Asked = dict[str, Case]


@pytest.fixture(scope="module")
def asked(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """All cases, by name, answered by vLLM."""
    root = tmp_path_factory.mktemp("parity")
    target = write_tiny_llama(root / "target")
    found: Asked = {}

    def add(name: str, target: Path, drafter: Drafter, inputs: dict[str, Tensor], **written: Any) -> None:
        folder = root / f"{len(found):03}"
        folder.mkdir()
        checkpoint.save_checkpoint(folder / "drafter", drafter, {})
        file = folder / "drafter" / "config.json"
        config = {**json.loads(file.read_text()), **written}
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        (folder / "target").symlink_to(target)
        save_file(inputs, folder / "inputs.safetensors")
        found[name] = Case(folder, drafter, inputs)

    for name, config in CASES.items():
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        add(name, target, random_drafter(config, chance), random_inputs(config, chance))
    chance = torch.Generator().manual_seed(0)
    for name, (config, written) in WRITTEN.items():
        add(name, target, random_drafter(config, chance), random_inputs(config, chance), **written)
    older, newer = (random_drafter(configured(DrafterFamily.LLAMA, fc_norm=on, norm_output=on), chance) for on in (False, True))
    add("weights of 3 as 3.1", target, older, random_inputs(older.config, chance), fc_norm=True, norm_output=True)
    add("weights of 3.1 as 3", target, newer, random_inputs(newer.config, chance), fc_norm=False, norm_output=False)
    for name in SHIPPED:
        pair = ModelPair.load(BUNDLE / "target", BUNDLE / name)
        add(name, BUNDLE / "target", pair.drafter, real_inputs(pair))
    ask(vllm, [case.folder for case in found.values()])
    return found


def real_inputs(pair: ModelPair) -> dict[str, Tensor]:
    """As `random_inputs`, from what the target makes of one of the bundle's prompts and its own answer."""
    ids = read_prompts(BUNDLE / "prompts.jsonl")[0].encode(pair.tokenizer)
    (text,) = answer_batch(pair.target, [ids], max_tokens=sum(COLUMNS) + STEPS + 1, extra_tokens=0, end_tokens=frozenset())
    states = pair.target(text.tokens.unsqueeze(0)).aux_hidden_states[0]
    inputs, first = {}, 0
    for number, columns in enumerate(COLUMNS):
        inputs[f"{number}.aux"] = states[first : first + columns].clone()
        inputs[f"{number}.tokens"] = text.tokens[first + 1 : first + 1 + columns + STEPS].clone()
        first += columns
    return inputs


def ask(vllm: Path, folders: list[Path]) -> None:
    """Let vLLM answer the cases in these folders."""
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


def ours(drafter: Drafter, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same questions, answered by `Drafter` the way `aerie_drafter.evaluate` drafts."""
    found: dict[str, Tensor] = {}
    memory = DecodingCache()
    with torch.inference_mode():
        for number, columns in enumerate(COLUMNS):
            tokens = inputs[f"{number}.tokens"].unsqueeze(0)
            hidden, ids = drafter.fuse_aux_hidden_states(inputs[f"{number}.aux"]).unsqueeze(0), tokens[:, :columns]
            memory.discard_uncommitted()
            for step in range(STEPS + 1):
                normed, feedback = drafter(ids, hidden, memory)
                if step == 0:
                    memory.commit()
                over_all = normed.new_full((normed.shape[1], drafter.config.vocab_size), float("-inf"))
                over_all[:, drafter.draft_token_ids] = drafter.logits(normed)[0]
                name = f"{number}.{step}"
                found |= {f"{name}.normed": normed[0], f"{name}.feedback": feedback[0], f"{name}.logits": over_all}
                ids, hidden = tokens[:, columns + step : columns + step + 1], feedback[:, -1:]
    return found


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference in parts of the largest number; infinite where shapes or the places of -inf are not the same."""
    finite = torch.isfinite(other)
    if one.shape != other.shape or not torch.equal(torch.isfinite(one), finite) or torch.isnan(one + other).any():
        return float("inf")
    return float((one[finite] - other[finite]).abs().max() / other[finite].abs().max())


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each kind of tensor: normed, feedback, logits."""
    assert found.keys() == expected.keys()
    kinds: dict[str, float] = {}
    for name, tensor in expected.items():
        kind = name.split(".")[-1]
        kinds[kind] = max(kinds.get(kind, 0.0), difference(found[name], tensor))
    return kinds


@pytest.mark.parametrize("name", [*CASES, *WRITTEN, *SHIPPED])
def test_same_numbers(name: str, asked: Asked) -> None:
    case = asked[name]
    found = largest(ours(checkpoint.load_drafter(case.folder / "drafter"), case.inputs), case.outputs)
    logging.getLogger(__name__).info("%s: %s", name, found)  # shown by --log-cli-level=info
    assert max(found.values()) < ROUNDING, found


def test_a_misread_switch_is_no_rounding(asked: Asked) -> None:
    """The bound is one that wrong semantics do not meet."""
    case = asked["LLAMA fc_norm+norm_output"]
    for change in ({"fc_norm": False}, {"norm_output": False}, {"norm_before_residual": True}, {"rms_norm_eps": 1e-3}):
        other = Drafter(dataclasses.replace(case.drafter.config, **change))
        other.load_state_dict(case.drafter.state_dict(), strict=False)
        assert max(largest(ours(other, case.inputs), case.outputs).values()) > 100 * ROUNDING


def test_weights_of_3_with_the_switches_of_3_1_are_taken_in_silence(asked: Asked) -> None:
    """vLLM then has norms of weight 1 before fc; `aerie-drafter` refuses the checkpoint."""
    case = asked["weights of 3 as 3.1"]
    other = Drafter(dataclasses.replace(case.drafter.config, fc_norm=True, norm_output=True))
    other.load_state_dict({**other.state_dict(), **case.drafter.state_dict()})
    assert max(largest(ours(other, case.inputs), case.outputs).values()) < ROUNDING
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        checkpoint.load_drafter(case.folder / "drafter")


def test_weights_of_3_1_without_its_switches_are_refused(asked: Asked) -> None:
    case = asked["weights of 3.1 as 3"]
    assert "no module or parameter named 'fc_norm'" in case.error
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        checkpoint.load_drafter(case.folder / "drafter")
