"""Settings that users' engine arguments imply, in every form that vLLM accepts."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.arguments import (
    SHORT_FLAG_NAMES,
    ArgumentError,
    EngineArguments,
    ParsedFlag,
    parse_arguments,
    parse_flags,
    parse_human_readable_int,
)


def parse_line(line: str) -> EngineArguments:
    return parse_arguments(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--tensor-parallel-size=4", {"tensor_parallel": 4}),
        ("--tensor-parallel-size 4", {"tensor_parallel": 4}),
        ("--tensor_parallel_size 4", {"tensor_parallel": 4}),
        ("-tp 4 -pp=2", {"tensor_parallel": 4, "pipeline_parallel": 2}),
        ("-tp 4 --tensor-parallel-size 8", {"tensor_parallel": 8}),
        ("--model-impl transformers", {"model_impl": "transformers"}),
        ("--cpu-offload-gb=100", {"offload_flag": "--cpu-offload-gb=100"}),
        ("--offload-group-size 8", {"offload_flag": "--offload-group-size"}),
        ("-dp 3", {"data_parallel": 3, "api_server_count": 3}),
        ("-dp 3 --api-server-count 1", {"data_parallel": 3, "api_server_count": 1}),
        ("--max-model-len 8192", {"max_model_len": 8192}),
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len=8K", {"max_model_len": 8192}),
        ("--max-model-len 25.6k", {"max_model_len": 25600}),
        ("--max-model-len auto", {}),
        ("--max-model-len 8k --max-model-len -1", {}),
        ("--max-num-seqs 64 --max-num-batched-tokens 8K", {"max_num_seqs": 64, "max_num_batched_tokens": 8192}),
        ("--cudagraph-capture-sizes 4 1 2 2", {"cudagraph_capture_sizes": (1, 2, 4)}),
        ("--compilation-config.cudagraph_capture_sizes [8,4]", {"cudagraph_capture_sizes": (4, 8)}),
        ("--compilation-config.cudagraph_capture_sizes+ 8,4", {"cudagraph_capture_sizes": (4, 8)}),
        ("-cc.cudagraph_capture_sizes+ 8 -cc.cudagraph_capture_sizes+=4", {"cudagraph_capture_sizes": (4, 8)}),
        ("""--compilation-config '{"cudagraph_capture_sizes": [1, 2]}'""", {"cudagraph_capture_sizes": (1, 2)}),
        ("--compilation_config.max_cudagraph_capture_size 1k", {"max_cudagraph_capture_size": 1000}),
        ("--max-cudagraph-capture-size 1024", {"max_cudagraph_capture_size": 1024}),
        ("--compilation-config 3", {}),
        # Dots replace an undotted flag of the same name, wherever it stands.
        ("""-cc.cudagraph_capture_sizes [4] -cc '{"cudagraph_capture_sizes": [1]}'""", {"cudagraph_capture_sizes": (4,)}),
        ("--enforce-eager", {"enforce_eager": True}),
        ("--enforce-eager --no-enforce-eager", {}),
        ("--enforce-eager --no-enforce-eager --enforce-eager", {"enforce_eager": True}),
        ("--async-scheduling", {"async_scheduling": True}),
        ("--no-async-scheduling", {"async_scheduling": False}),
        ("--no_async_scheduling", {"async_scheduling": False}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--disable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-expert-parallel", {"enable_expert_parallel": True}),
        ("-ep", {"enable_expert_parallel": True}),
        ("--enable-lora --lora-modules a=b c=d", {"enable_lora": True}),
        ("--gpu-memory-utilization .85", {"gpu_memory_utilization": 0.85}),
        (
            "--dtype bfloat16 -q fp8 --kv-cache-dtype fp8_e4m3",
            {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
        ),
        ("-qfp8", {"quantization": "fp8"}),
        ("--scheduler-cls my.Scheduler", {"scheduler_cls": "my.Scheduler"}),
        ("--moe-backend triton", {"moe_backend": "triton"}),
        ("--kernel-config.moe_backend triton", {"moe_backend": "triton"}),
        ("""--kv-transfer-config '{"kv_connector":"X"}'""", {"has_kv_transfer_config": True}),
        ("--kv-transfer-config.kv_connector X", {"has_kv_transfer_config": True}),
        ("--structured-outputs-config.backend xgrammar", {"structured_outputs_backend": "xgrammar"}),
        ("--logits-processors a:b c:d", {"has_logits_processors": True}),
        ("--enable-auto-tool-choice --tool-call-parser hermes", {"has_tool_or_reasoning_parser": True}),
        ("--reasoning-parser deepseek_r1", {"has_tool_or_reasoning_parser": True}),
        ("--trust-remote-code --chat-template ./x.jinja --seed 0", {"trust_remote_code": True}),
    ],
)
def test_arguments_imply_settings(line: str, expected: dict[str, object]) -> None:
    assert parse_line(line) == EngineArguments(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tensor-parallel-size two", "sets --tensor-parallel-size to two: vLLM expects a whole number above 0"),
        ("-tp 0", "sets --tensor-parallel-size to 0"),
        ("-tp", "sets --tensor-parallel-size to nothing"),
        ("-tp 2 4", "sets --tensor-parallel-size to 2 4"),
        ("--max-model-len 8.5K", "sets --max-model-len to 8.5K: vLLM expects tokens, such as 8192, 8k, 8K or auto"),
        ("--max-model-len -5", "sets --max-model-len to -5"),
        ("--gpu-memory-utilization 1.5", "a share above 0 and up to 1"),
        ("--gpu-memory-utilization nan", "a share above 0 and up to 1"),
        ("--cudagraph-capture-sizes 1 x", "sets --cudagraph-capture-sizes to 1 x: vLLM expects whole numbers"),
        ("--enforce-eager=true", "sets --enforce-eager to true: it is a switch and takes no value"),
        ("--compilation-config '{\"x\"'", "invalid JSON"),
        ("--compilation-config.mode", "has '--compilation-config.mode' with 0 values: set --compilation-config.mode=VALUE"),
        ("--tensor-par 2", "has '--tensor-par', short for --tensor-parallel-size: use the full name"),
        ("--max-num 2", "short for --max-num-batched-tokens or --max-num-seqs: use the full name"),
    ],
)
def test_arguments_that_vllm_would_reject(line: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_line(line)
    assert str(caught.value).startswith("spec.engine.args ")
    assert message in str(caught.value)


def test_options_keep_order_and_spelling() -> None:
    assert parse_flags(["model", "--served_model_name", "a", "b", "-tp=2", "--seed", "-1", "--x.y_z=1"]) == [
        ParsedFlag("", ("model",), "model"),
        ParsedFlag("--served-model-name", ("a", "b"), "--served_model_name"),
        ParsedFlag("--tensor-parallel-size", ("2",), "-tp=2"),
        ParsedFlag("--seed", ("-1",), "--seed"),
        ParsedFlag("--x", ('{"y_z": 1}',), "--x.y_z=1"),
    ]


def test_dotted_flags_merge_into_one_object() -> None:
    args = ["--a.b.c", "1", "--a.b.d", "text", "--a.e", "80g", "--a.f", "true", "--a.b.c", "2", "--g.h", "1", "--g.h.i", "2"]
    assert [option.values[0] for option in parse_flags(args)] == [
        '{"b": {"c": 2, "d": "text"}, "e": 80000000000, "f": true}',
        '{"h": {"i": 2}}',
    ]


@given(
    st.integers(1, 10**6),
    st.sampled_from(
        [
            "--tensor-parallel-size",
            "--tensor_parallel_size",
            *[k for k, v in SHORT_FLAG_NAMES.items() if v.startswith("--tensor")],
        ]
    ),
)
def test_both_forms_of_a_flag_are_equal(number: int, name: str) -> None:
    assert (
        parse_arguments([f"{name}={number}"]) == parse_arguments([name, str(number)]) == EngineArguments(tensor_parallel=number)
    )


@given(st.integers(0, 10**6), st.sampled_from("kmgt"))
def test_human_readable_numbers(number: int, suffix: str) -> None:
    power = "kmgt".index(suffix) + 1
    assert parse_human_readable_int(f"{number}{suffix}") == number * 1000**power
    assert parse_human_readable_int(f"{number}{suffix.upper()}") == number * 1024**power
    assert parse_human_readable_int(str(number)) == number


def test_gpus_per_replica() -> None:
    assert parse_line("-tp 4 -pp 2 -dp 3").gpus_per_replica == 24


@pytest.mark.parametrize(
    "args",
    [
        ['--compilation-config={"a":' + "[" * 4000],
        ["--compilation-config.a=" + "[" * 4000],
        ["--compilation-config." + "a." * 2000 + "a=1"],
        ["--max-model-len=" + "9" * 400 + "k"],
        ["--compilation-config.a=" + "9" * 400 + "k"],
        ["--max-model-len=" + "9" * 4000],
    ],
    ids=lambda args: args[0][:40],
)
def test_extreme_arguments_parse_or_are_rejected(args: list[str]) -> None:
    try:
        assert parse_arguments(args) is not None
    except ArgumentError as error:
        assert len(str(error)) < 5000  # noqa: PT017 - either way is right


@pytest.mark.parametrize(
    ("line", "is_enabled", "preserved"),
    [
        ("", False, ()),
        ("--enable-sleep-mode", True, ()),
        ("--enable-sleep-mode --disable-sleep-mode", False, ()),
        ("--enable-sleep-mode --sleep-preserve-parameter-names lm_head.* draft.*", True, ("lm_head.*", "draft.*")),
        ("--sleep_preserve_parameter_names=draft.*", False, ("draft.*",)),
    ],
)
def test_sleep_mode_and_preserved_parameters(line: str, is_enabled: bool, preserved: tuple[str, ...]) -> None:
    arguments = parse_arguments(line.split())
    assert (arguments.enable_sleep_mode, arguments.sleep_preserve_parameter_names) == (is_enabled, preserved)
