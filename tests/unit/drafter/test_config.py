"""Any configuration that is written for vLLM is read back equal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie_drafter.checks import expected_tensor_shapes, find_shape_errors
from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims, default_aux_layer_ids
from aerie_drafter.errors import ConfigError

from .sizes import SIZES

SIZE = st.integers(1, 64)
ROPES = st.sampled_from(
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0, "original_max_position_embeddings": 1024},
    ]
)


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    """Draw any valid drafter configuration."""
    family = draw(st.sampled_from(DrafterFamily))
    fc_norm = draw(st.booleans())
    groups, vocabulary = draw(st.integers(1, 4)), draw(st.integers(2, 64))
    heads = groups * draw(st.integers(1, 4))
    mla = MlaDims(*(2 * draw(SIZE) for _ in range(5))) if family is DrafterFamily.MLA else None
    rope: dict[str, Any] = draw(ROPES.filter(lambda candidate: mla is None or candidate["rope_type"] != "linear"))
    return DrafterConfig(
        family=family,
        hidden_size=draw(SIZE) * (1 if family is DrafterFamily.QWEN3 else heads),
        intermediate_size=draw(SIZE),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=2 * draw(SIZE) if mla is None else 2,
        vocab_size=vocabulary,
        draft_vocab_size=draw(st.integers(1, vocabulary)),
        target_hidden_size=draw(SIZE),
        aux_layer_ids=tuple(sorted(draw(st.sets(st.integers(0, 90), min_size=1, max_size=5)))),
        fc_norm=fc_norm,
        norm_output=draw(st.booleans()),
        norm_before_fc=not fc_norm and mla is None and draw(st.booleans()),
        norm_before_residual=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        max_position_embeddings=2048,
        rope=rope,
        num_hidden_layers=draw(st.integers(1, 3)),
        sliding_window=draw(st.none() | st.integers(33, 4096)) if mla is None else None,
        mla=mla,
    )


@settings(deadline=None)
@given(configs())
def test_a_config_written_for_vllm_is_read_back_equal(config: DrafterConfig) -> None:
    back = DrafterConfig.from_vllm_config(json.loads(json.dumps(config.to_vllm_config())))
    if config.mla is not None:  # has heads of its own, and writes no head_dim
        assert {**vars(back), "head_dim": 0} == {**vars(config), "head_dim": 0}
    else:
        assert back == config


@settings(deadline=None)
@given(configs())
def test_tensors_of_a_config_have_valid_shapes(config: DrafterConfig) -> None:
    shapes = expected_tensor_shapes(config)
    assert find_shape_errors(config, shapes) == []
    assert len(find_shape_errors(config, {name: shape for name, shape in shapes.items() if name != "norm.weight"})) == 1
    assert len([name for name in shapes if name.startswith("fc_norm.")]) == (len(config.aux_layer_ids) if config.fc_norm else 0)


@given(st.integers(1, 200))
def test_default_layers_are_in_the_target(layers: int) -> None:
    layer_ids = default_aux_layer_ids(layers)
    assert layer_ids
    assert list(layer_ids) == sorted(set(layer_ids))
    assert layer_ids[0] >= 0
    assert layer_ids[-1] <= layers
    if layers >= 8:
        assert layer_ids == (2, layers // 2, layers - 3)


SLIDING, FULL = "sliding_attention", "full_attention"

WINDOWS: dict[str, tuple[DrafterFamily, dict[str, Any], int | None]] = {
    "llama: layer_types decide": (DrafterFamily.LLAMA, {"sliding_window": 64}, None),
    "llama": (DrafterFamily.LLAMA, {"sliding_window": 64, "layer_types": [SLIDING] * 2}, 64),
    "llama, full": (DrafterFamily.LLAMA, {"sliding_window": 64, "layer_types": [FULL] * 2}, None),
    "qwen3: transformers drops the window": (DrafterFamily.QWEN3, {"sliding_window": 64, "layer_types": [SLIDING] * 2}, None),
    "qwen3: from layer 28 on": (DrafterFamily.QWEN3, {"sliding_window": 64, "use_sliding_window": True}, None),
    "qwen3: from layer 0 on": (DrafterFamily.QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, 4096),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_a_window_is_read_as_vllm_reads_it(case: str) -> None:
    family, keys, expected = WINDOWS[case]
    config = DrafterConfig(family=family, **SIZES, num_hidden_layers=2).to_vllm_config()
    assert DrafterConfig.from_vllm_config({**config, **keys}).sliding_window == expected


UNSERVED: dict[str, tuple[DrafterFamily, dict[str, Any], str]] = {
    "both kinds": (DrafterFamily.LLAMA, {"sliding_window": 64, "layer_types": [SLIDING, FULL]}, "all layers must have the same"),
    "too few kinds": (
        DrafterFamily.LLAMA,
        {"sliding_window": 64, "layer_types": [SLIDING]},
        "one entry for each of the 2 layers",
    ),
    "another kind": (DrafterFamily.LLAMA, {"layer_types": ["linear_attention"] * 2}, "contains 'linear_attention'"),
    "no window": (DrafterFamily.LLAMA, {"layer_types": [SLIDING] * 2}, "sliding_window is missing"),
    "small window": (
        DrafterFamily.LLAMA,
        {"sliding_window": 8, "layer_types": [SLIDING] * 2},
        "must be an integer of at least 33",
    ),
    "latent attention": (
        DrafterFamily.MLA,
        {"sliding_window": 64, "layer_types": [SLIDING] * 2},
        "vLLM's drafter with latent attention ignores it",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_vllm_does_not_serve_is_rejected(case: str) -> None:
    family, keys, message = UNSERVED[case]
    mla = MlaDims(8, 4, 4, 4, 6) if family is DrafterFamily.MLA else None
    config = DrafterConfig(family=family, **SIZES, num_hidden_layers=2, mla=mla).to_vllm_config()
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_vllm_config({**config, **keys})
