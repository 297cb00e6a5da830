"""Whether a checkpoint fits an engine: the bundle's drafters, and each difference that matters, by its reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aerie_drafter.bundle import find_bundle_path
from aerie_vllm.checkpoint import Tensor, open_checkpoint
from aerie_vllm.validation import FLAGS, Engine, Form, find_map_problem, find_problem, gated_tensors, name_kind, read_flags

SAME_CLASS = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
GATED = Engine("eagle3", frozenset(FLAGS), frozenset({"embed_tokens"}), SAME_CLASS)
PLAIN = dataclasses.replace(GATED, gates=frozenset())


def read(name: str) -> Form:
    with open_checkpoint(find_bundle_path(name)) as checkpoint:
        return Form(checkpoint.config, checkpoint.tensors)


EAGLE3, EAGLE31 = read("eagle3"), read("eagle31")


def reason(own: Form, candidate: Form, engine: Engine = GATED) -> str | None:
    problem = find_problem(own, candidate, engine)
    return problem["reason"] if problem else None


def tensor(*shape: int, dtype: str = "F32") -> Tensor:
    return Tensor(dtype, shape, "model.safetensors", 0, 0)


def with_tensors(form: Form, **tensors: Tensor | None) -> Form:
    """Return a form with tensors replaced or, where None, removed; `__` stands for a dot."""
    edited = {**form.tensors, **{name.replace("__", "."): value for name, value in tensors.items()}}
    return Form(form.config, {name: value for name, value in edited.items() if value is not None})


def with_config(form: Form, **keys: Any) -> Form:
    return Form({**form.config, **keys}, form.tensors)


def test_gates_make_both_kinds_fit_one_engine() -> None:
    for own in (EAGLE3, EAGLE31):
        for candidate in (EAGLE3, EAGLE31, read("weak")):
            assert reason(own, candidate) is None
    assert reason(EAGLE3, EAGLE31, PLAIN) == reason(EAGLE31, EAGLE3, PLAIN) == "Flag"
    assert reason(EAGLE31, read("weak"), PLAIN) is None


def test_what_only_one_kind_has_comes_from_its_flags() -> None:
    """EAGLE 3's weights with 3.1's flags, and the reverse: vLLM would load both without an error."""
    assert reason(EAGLE31, Form(EAGLE31.config, EAGLE3.tensors)) == "TensorMissing"
    assert reason(EAGLE3, Form(EAGLE3.config, EAGLE31.tensors)) == "TensorUnknown"
    assert gated_tensors(EAGLE3.config, GATED.gates) == {
        **{f"fc_norm.{index}.weight": ("fc_norm", (256,)) for index in range(3)},
        "input_norm.weight": ("norm_before_fc", (768,)),
    }


def test_other_flags_are_gates_too() -> None:
    before_fc = with_tensors(with_config(EAGLE3, norm_before_fc=True), input_norm__weight=tensor(768))
    assert reason(EAGLE3, before_fc) is None
    assert reason(EAGLE3, with_config(EAGLE3, norm_before_fc=True)) == "TensorMissing"
    assert reason(EAGLE3, with_config(EAGLE3, norm_before_residual=True)) is None
    assert reason(EAGLE3, with_config(EAGLE3, norm_before_residual=True), PLAIN) == "Flag"
    deepseek = dataclasses.replace(GATED, gates=GATED.gates - {"norm_before_fc"})
    assert reason(EAGLE3, before_fc, deepseek) == "Flag"


CONFIGS: Mapping[str, tuple[dict[str, Any], str | None]] = {
    "more layers": ({"num_hidden_layers": 2}, "Config"),
    "other width": ({"hidden_size": 512}, "Config"),
    "other heads": ({"num_attention_heads": 4}, "Config"),
    "other positions": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "Config"),
    "other epsilon": ({"rms_norm_eps": 1e-6}, "Config"),
    "other draft vocabulary": ({"draft_vocab_size": 512}, "Config"),
    "other aux layers": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "Config"),
    "fewer aux states": ({"num_aux_hidden_states": 2}, "Config"),
    "no aux states": ({"eagle_config": {"use_aux_hidden_state": False}}, "Config"),
    "a key that nobody knows": ({"new_key": 1}, "Config"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "Quantization"),
    "another class": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Architecture"),
    "no architecture": ({"architectures": []}, "Architecture"),
    "another name of the class": ({"architectures": ["Eagle3LlamaForCausalLM"]}, None),
    "the name of the layers' class": ({"architectures": ["LlamaForCausalLM"]}, None),
    "another type of the file": ({"dtype": "bfloat16", "transformers_version": "9"}, None),
    "the same in one place": ({"eagle_config": None}, None),
    "defaults": ({"target_hidden_size": None, "logit_scale": 1.0}, None),
    "another scale": ({"logit_scale": 0.5}, "Config"),
    "the same aux states, counted": ({"num_aux_hidden_states": None}, None),
}


@pytest.mark.parametrize("change", CONFIGS)
def test_configs(change: str) -> None:
    keys, expected = CONFIGS[change]
    assert reason(EAGLE3, with_config(EAGLE3, **keys)) == expected
    if expected != "Architecture":  # the engine's own class is what it runs
        assert reason(with_config(EAGLE3, **keys), EAGLE3) == expected


TENSORS: Mapping[str, tuple[dict[str, Tensor | None], str | None]] = {
    "no head": ({"lm_head__weight": None}, "TensorMissing"),
    "no map": ({"d2t": None}, "TensorMissing"),
    "no inverse map": ({"t2d": None}, None),
    "another name of the layer": (
        {"midlayer__hidden_norm__weight": None, "layers__0__hidden_norm__weight": tensor(256)},
        None,
    ),
    "a prefix": ({"norm__weight": None, "model__norm__weight": tensor(256)}, "TensorMissing"),
    "a bias": ({"midlayer__self_attn__q_proj__bias": tensor(256)}, "TensorUnknown"),
    "another width": ({"fc__weight": tensor(256, 512)}, "Shape"),
    "transposed": ({"midlayer__mlp__down_proj__weight": tensor(512, 256)}, "Shape"),
    "another float": ({"fc__weight": tensor(256, 768, dtype="BF16")}, None),
    "double precision": ({"fc__weight": tensor(256, 768, dtype="F64")}, "Type"),
    "8-bit weights": ({"fc__weight": tensor(256, 768, dtype="F8_E4M3")}, "Type"),
    "a map of floats": ({"d2t": tensor(1536)}, "Type"),
    "the target's embedding": ({"embed_tokens__weight": tensor(2048, 256)}, None),
    "a scale of the shared embedding": ({"embed_tokens__weight_scale": tensor(1)}, "TensorUnknown"),
}


@pytest.mark.parametrize("change", TENSORS)
def test_tensors(change: str) -> None:
    tensors, expected = TENSORS[change]
    assert reason(EAGLE3, with_tensors(EAGLE3, **tensors)) == expected


def test_a_module_of_its_own_is_needed_and_a_shared_one_is_not() -> None:
    own = with_tensors(EAGLE3, embed_tokens__weight=tensor(2048, 256))
    unshared = dataclasses.replace(GATED, shared=frozenset())
    assert reason(own, EAGLE3) is None
    assert reason(own, EAGLE3, unshared) == "TensorMissing"
    assert reason(EAGLE3, own, unshared) == "TensorUnknown"


def test_messages_name_the_tensor_both_values_and_the_fix() -> None:
    problem = find_problem(EAGLE3, with_tensors(EAGLE3, fc__weight=tensor(256, 512)), GATED)
    assert problem is not None
    assert problem["message"] == "fc.weight has the shape [256, 512], and the engine needs [256, 768]: roll it out by pods."


def test_quantized_drafters_have_to_agree_in_every_type() -> None:
    own = with_tensors(EAGLE3, fc__weight=tensor(256, 768, dtype="F8_E4M3"), fc__weight_scale=tensor(1))
    assert reason(own, own) is None
    assert reason(own, with_tensors(own, fc__weight=tensor(256, 768, dtype="BF16"))) == "Type"
    assert reason(own, with_tensors(own, fc__weight_scale=None)) == "TensorMissing"


def test_other_methods_need_the_same_tensors() -> None:
    engine = Engine("eagle", frozenset(), frozenset({"embed_tokens", "lm_head"}), frozenset())
    own = Form({"architectures": ["EagleLlamaForCausalLM"]}, {"fc.weight": tensor(4, 8), "layers.0.norm.weight": tensor(4)})
    assert reason(own, own, engine) is None
    assert reason(own, Form(own.config, {"fc.weight": tensor(4, 8)}), engine) == "TensorMissing"
    midlayer = Form(own.config, {"fc.weight": tensor(4, 8), "midlayer.norm.weight": tensor(4)})
    assert reason(own, midlayer, engine) == "TensorMissing"


MAPS: Mapping[str, tuple[Callable[[list[int]], list[int]], str | None]] = {
    "as it is": (lambda offsets: offsets, None),
    "negative": (lambda offsets: [-1, *offsets[1:]], "maps draft token 0 to -1"),
    "beyond the end": (lambda offsets: [*offsets[:-1], 100], "maps draft token 3 to 103"),
    "two to one": (lambda offsets: [1, 0, *offsets[2:]], "two draft tokens to one"),
}


@pytest.mark.parametrize("change", MAPS)
def test_vocabulary_maps(change: str) -> None:
    edit, expected = MAPS[change]
    problem = find_map_problem(edit([0, 2, 2, 96]), 100)
    assert (problem is None) == (expected is None)
    if problem is not None:
        assert problem["reason"] == "VocabularyMap"
        assert str(expected) in problem["message"]


def test_flags_and_kinds() -> None:
    """`eagle_config` wins for norm_before_fc, as in vLLM's classes."""
    assert read_flags({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}})["norm_before_fc"] is False
    assert read_flags({"eagle_config": {"norm_before_fc": True}})["norm_before_fc"] is True
    assert name_kind("eagle3", read_flags(EAGLE31.config)) == "eagle3.1"
    assert name_kind("eagle3", read_flags(EAGLE3.config)) == name_kind("eagle3", read_flags({"fc_norm": True})) == "eagle3"
    assert name_kind("draft_model", {}) == "draft_model"
    assert json.loads(json.dumps(read_flags(EAGLE3.config))) == dict.fromkeys(FLAGS, False)
