"""Whether a drafter can change in place: the plugin's rules on what preflight knows, with configs as checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from aerie.checkpoints.directory import read_checkpoint_directory
from aerie.engine.models.checkpoint import Checkpoint, TensorInfo
from aerie.engine.preflight.in_place import MAX_MESSAGE_CHARACTERS, MAX_PROBLEMS, find_cache_problem, find_in_place_problems
from aerie_drafter.bundle import find_bundle_path
from aerie_vllm.checkpoint import Tensor
from aerie_vllm.validation import FLAGS, Engine, Form, find_problem
from tests.golden import Messages

if TYPE_CHECKING:
    from tests.unit.engine.preflight.conftest import SmallModels

BUNDLE = {name: read_checkpoint_directory(find_bundle_path(name)) for name in ("eagle3", "eagle31", "weak")}
EAGLE3, EAGLE31 = BUNDLE["eagle3"], BUNDLE["eagle31"]
VOCABULARY = 2048


def reason(running: Checkpoint, candidate: Checkpoint, method: str = "eagle3") -> str | None:
    problems = find_in_place_problems(running, candidate, method, VOCABULARY)
    return problems[0]["reason"] if problems else None


def with_config(checkpoint: Checkpoint, **keys: Any) -> Checkpoint:
    """Return the checkpoint with keys of its config replaced or, where None, left out."""
    config = {key: value for key, value in {**checkpoint.config, **keys}.items() if value is not None}
    return replace(checkpoint, config=config)


def with_tensor(checkpoint: Checkpoint, name: str, *shape: int, dtype: str = "F32") -> Checkpoint:
    assert checkpoint.tensors is not None
    return replace(checkpoint, tensors={**checkpoint.tensors, name: TensorInfo(dtype, shape, "model.safetensors", 0, 0)})


@pytest.mark.parametrize("running", BUNDLE)
@pytest.mark.parametrize("candidate", BUNDLE)
def test_bundled_drafters_fit_each_other(running: str, candidate: str) -> None:
    assert find_in_place_problems(BUNDLE[running], BUNDLE[candidate], "eagle3", VOCABULARY) == ()


CHANGES: Mapping[str, tuple[dict[str, Any], str | None]] = {
    "other positions": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "Config"),
    "rope in the older form": ({"rope_parameters": None, "rope_theta": 10000}, None),
    "rope by default": ({"rope_parameters": None}, None),
    "scaled rope": ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "Config"),
    "defaults left out": ({"attention_bias": None, "hidden_act": None, "tie_word_embeddings": None, "head_dim": None}, None),
    "defaults written": ({"mlp_bias": False, "attention_dropout": 0.0}, None),
    "other epsilon by default": ({"rms_norm_eps": None}, "Config"),
    "other heads": ({"num_key_value_heads": None}, "Config"),
    "deeper": ({"num_hidden_layers": 2}, "Config"),
    "other layers read": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "Config"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "Quantization"),
    "another class": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Architecture"),
    "another name of the class": ({"architectures": ["Eagle3LlamaForCausalLM"]}, None),
    "unknown key": ({"new_key": 1}, "Config"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_configs(change: str) -> None:
    keys, expected = CHANGES[change]
    assert reason(EAGLE3, with_config(EAGLE31, **keys)) == expected


@given(
    st.fixed_dictionaries(
        {
            "attention_bias": st.sampled_from([None, False, True]),
            "mlp_bias": st.sampled_from([None, False, True]),
            "hidden_act": st.sampled_from([None, "silu", "gelu"]),
            "rms_norm_eps": st.sampled_from([None, 1e-5, 1e-6]),
            "num_key_value_heads": st.sampled_from([None, 4, 8]),
            "head_dim": st.sampled_from([None, 32, 64]),
            "max_position_embeddings": st.sampled_from([None, 2048, 4096]),
            "tie_word_embeddings": st.sampled_from([None, False, True]),
            "rope_parameters": st.sampled_from([None, {"rope_theta": 1e4, "rope_type": "default"}, {"rope_theta": 5e5}]),
            "rope_theta": st.sampled_from([None, 10000, 500000.0]),
        }
    )
)
def test_verdict_is_that_of_a_config_that_transformers_has_read(keys: dict[str, Any]) -> None:
    """A pod compares configs with the defaults of transformers."""
    candidate = with_config(EAGLE3, **keys)

    def read_form(checkpoint: Checkpoint) -> Form:
        tensors = {name: Tensor(*info) for name, info in (checkpoint.tensors or {}).items()}
        return Form(LlamaConfig(**json.loads(json.dumps(checkpoint.config))).to_dict(), tensors)

    same_class = frozenset({"LlamaForCausalLMEagle3"})
    engine = Engine("eagle3", frozenset(FLAGS), frozenset({"embed_tokens"}), same_class)
    expected = find_problem(read_form(EAGLE3), read_form(candidate), engine)
    assert reason(EAGLE3, candidate) == (expected["reason"] if expected else None)


def test_tensors_are_compared_by_the_flags_of_their_config() -> None:
    assert reason(EAGLE31, replace(EAGLE31, tensors=EAGLE3.tensors)) == "TensorMissing"
    assert reason(EAGLE3, replace(EAGLE3, tensors=EAGLE31.tensors)) == "TensorUnknown"
    assert reason(EAGLE3, with_tensor(EAGLE3, "fc.weight", 256, 512)) == "Shape"
    assert reason(EAGLE3, with_tensor(EAGLE3, "fc.weight", 256, 768, dtype="F8_E4M3")) == "Type"
    # A copy of the target's embedding may be equal, which only a pod knows.
    own_embedding = with_tensor(EAGLE3, "embed_tokens.weight", VOCABULARY, 256)
    assert reason(EAGLE3, own_embedding) is None
    assert reason(own_embedding, EAGLE3) == "TensorMissing"


def test_vocabulary_map_has_to_fit_the_target() -> None:
    offsets = EAGLE31.d2t_offsets
    assert offsets is not None
    assert reason(EAGLE3, replace(EAGLE31, d2t_offsets=(*offsets[:-1], VOCABULARY))) == "VocabularyMap"
    assert find_in_place_problems(EAGLE3, replace(EAGLE31, d2t_offsets=(*offsets[:-1], VOCABULARY)), "eagle3") == ()


def test_speculators_format_fits_its_own_kind(small_models: SmallModels) -> None:
    """vLLM reads it as another kind of config, so a pod does not change between the formats."""
    drafter = small_models.speculators()
    assert reason(drafter, drafter) is None
    assert reason(drafter, small_models.speculators(norm_output=False)) is None
    assert reason(drafter, small_models.speculators(layer={"num_hidden_layers": 2})) == "Config"
    assert reason(drafter, small_models.speculators(layer={"model_type": "qwen3"})) == "Architecture"
    assert reason(small_models.drafter(), drafter) == reason(drafter, small_models.drafter()) == "Config"


def test_other_methods_need_equal_configs() -> None:
    plain = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    running = replace(EAGLE3, config=plain)
    assert reason(running, running, "draft_model") is None
    assert reason(running, with_config(running, fc_norm=True), "draft_model") == "Flag"
    assert reason(running, with_config(running, architectures=["Qwen3ForCausalLM"]), "draft_model") == "Architecture"


def test_mla_heads_have_no_gate_for_the_norm_before_fc() -> None:
    mla = with_config(EAGLE3, architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="deepseek_v3")
    assert reason(mla, with_config(mla, norm_before_residual=True)) is None
    assert reason(mla, with_config(mla, norm_before_fc=True)) == "Flag"


def test_checkpoints_that_cannot_be_compared(messages: Messages) -> None:
    tensors = EAGLE3.tensors
    assert tensors is not None
    fc = tensors["fc.weight"]
    drafters = {
        "no safetensors": replace(EAGLE3, tensors=None),
        "tensor twice": replace(EAGLE3, duplicate_tensors={"fc.weight": (fc, fc)}),
        "parallel drafting": with_config(EAGLE3, architectures=["PeagleLlamaForCausalLM"], speculators_model_type="peagle"),
        "malformed": with_config(EAGLE3, num_aux_hidden_states=10**9),
    }
    for name, drafter in drafters.items():
        (problem,) = find_in_place_problems(EAGLE3, replace(drafter, name="me/drafter"), "eagle3", VOCABULARY)
        messages.check(name, f"{problem['reason']}: {problem['message']}")
        assert find_in_place_problems(replace(drafter, name="me/drafter"), EAGLE3, "eagle3", VOCABULARY) == (problem,)


MALFORMED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = (
    *("architectures", "eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm", "head_dim", "hidden_size", "model_type"),
    *("norm_before_fc", "num_attention_heads", "num_aux_hidden_states", "num_aux_layers", "rope_parameters", "rope_scaling"),
    *("speculators_model_type", "target_hidden_size", "transformer_layer_config"),
)


@given(st.dictionaries(st.sampled_from(KEYS), MALFORMED), st.sampled_from(["native", "eagle3"]), st.booleans())
def test_no_config_breaks_the_comparison(keys: dict[str, Any], form: str, nested: bool) -> None:
    config = {**EAGLE3.config, **({"eagle_config": keys} if nested else keys)}
    if form == "eagle3":
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": keys}
    candidate = replace(EAGLE3, config=config)
    for problems in (
        find_in_place_problems(EAGLE3, candidate, "eagle3", VOCABULARY),
        find_in_place_problems(candidate, EAGLE3, "eagle3", VOCABULARY),
    ):
        assert len(problems) <= MAX_PROBLEMS
        assert all(len(problem["message"]) <= MAX_MESSAGE_CHARACTERS for problem in problems)


def test_long_values_are_cut() -> None:
    (problem,) = find_in_place_problems(EAGLE3, with_config(EAGLE3, new_key="x" * 10_000), "eagle3")
    assert len(problem["message"]) == MAX_MESSAGE_CHARACTERS


def test_a_cache_holds_what_its_limit_permits(messages: Messages) -> None:
    models = [EAGLE3, EAGLE31]
    total = sum(model.weight_bytes or 0 for model in models)
    assert find_cache_problem(total, models) is None
    assert find_cache_problem(total - 1, [EAGLE3, EAGLE31, replace(EAGLE3, name="pickle", tensors=None)]) is not None
    assert find_cache_problem(total // 2 + 1, [EAGLE3, EAGLE3]) is None, "the same files"
    repositories = [replace(model, name=f"me/{index}@{'0' * 40}") for index, model in enumerate(models)]
    problem = find_cache_problem(1_000_000, repositories)
    assert problem is not None
    messages.check("cache", problem["message"])
