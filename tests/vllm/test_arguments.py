"""Aerie's parser of engine arguments against vLLM's own: the same settings of the same line."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aerie.engine.arguments import EngineArguments, parse_arguments
from aerie_lab.binaries.families import ENVIRONMENTS
from tests.vllm.parser import BUILD_PARSER, read_simulator_flags, read_vllm_flags

pytestmark = pytest.mark.timeout(2400)  # most of it is for a first installation of vLLM

LINES = (
    "",
    "-tp 4 -pp=2",
    "--tensor_parallel_size 4",
    "--tensor-parallel-size 4 -tp 8",
    "-dp 3 --api-server-count 1",
    "--max-model-len 8k",
    "--max-model-len=8K",
    "--max_model_len 25.6k",
    "--max-model-len -1",
    "--max-model-len auto",
    "--max-num-seqs 64 --max-num-batched-tokens 8K",
    "--cudagraph-capture-sizes 4 1 2",
    "--compilation-config.cudagraph_capture_sizes [8,4]",
    "-cc.cudagraph_capture_sizes+ 8 -cc.cudagraph_capture_sizes+=4",
    """-cc.cudagraph_capture_sizes [4] -cc '{"cudagraph_capture_sizes": [1]}'""",
    "--enforce-eager --no-enforce-eager --enforce-eager",
    "--no_async_scheduling",
    "--no-enable-prefix-caching",
    "--gpu-memory-utilization .85 --dtype bfloat16 -qfp8 --kv-cache-dtype fp8_e4m3",
    "-q=awq --enable-lora --lora-modules a=b c=d",
    "--kernel-config.moe_backend triton",
    "--structured-outputs-config.backend xgrammar",
    "--trust-remote-code --model-impl transformers",
    "--enable-auto-tool-choice --tool-call-parser hermes",
)

ORACLE = f"""
import json, shlex, sys
{BUILD_PARSER}
"""
ORACLE += """
def read_field(config, name):
    return config.get(name) if isinstance(config, dict) else getattr(config, name)
def settings(line):
    a = parser.parse_args(shlex.split(line))
    sizes = a.cudagraph_capture_sizes or read_field(a.compilation_config, "cudagraph_capture_sizes")
    return {
        "tensor_parallel": a.tensor_parallel_size, "pipeline_parallel": a.pipeline_parallel_size,
        "data_parallel": a.data_parallel_size, "api_server_count": a.api_server_count,
        "max_model_len": a.max_model_len, "max_num_seqs": a.max_num_seqs, "max_num_batched_tokens": a.max_num_batched_tokens,
        "cudagraph_capture_sizes": sorted(sizes) if sizes else None,
        "enforce_eager": a.enforce_eager, "async_scheduling": a.async_scheduling,
        "enable_prefix_caching": a.enable_prefix_caching,
        "gpu_memory_utilization": a.gpu_memory_utilization, "dtype": a.dtype, "quantization": a.quantization,
        "kv_cache_dtype": a.kv_cache_dtype, "enable_lora": a.enable_lora, "trust_remote_code": a.trust_remote_code,
        "moe_backend": a.moe_backend if a.moe_backend != "auto" else read_field(a.kernel_config, "moe_backend"),
        "structured_outputs_backend": read_field(a.structured_outputs_config, "backend"),
        "has_tool_or_reasoning_parser": a.enable_auto_tool_choice or bool(a.tool_call_parser),
    }
print("settings" + json.dumps([settings(line) for line in json.load(sys.stdin)]))
"""


def test_every_line_has_the_same_settings_in_vllm(vllm: Path) -> None:
    python = vllm / "python"
    if not python.exists():
        pytest.skip(f"{vllm} has a vllm of the user's own without its Python beside it")
    process = subprocess.run(
        [str(python), "-B", "-c", ORACLE],  # -B: the folder belongs to the lab
        input=json.dumps(LINES),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    output = next(line for line in process.stdout.splitlines() if line.startswith("settings"))
    for line, vllm_settings in zip(LINES, json.loads(output.removeprefix("settings")), strict=True):
        assert _in_vllm_form(parse_arguments(shlex.split(line)), vllm_settings) == vllm_settings, line


def test_the_simulator_has_the_flags_of_vllms_parser(vllm: Path) -> None:
    """The flags of 0.33, where it is installed, are tested in test_vllm_0_33.py."""
    if not (vllm / "python").exists():
        pytest.skip(f"{vllm} has a vllm of the user's own without its Python beside it")
    assert read_simulator_flags(ENVIRONMENTS["vllm"].version) == read_vllm_flags(vllm)


def _in_vllm_form(arguments: EngineArguments, vllm_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed settings in vLLM's form, with vLLM's value where Aerie's is None."""
    defaults = {"dtype": "auto", "kv_cache_dtype": "auto", "moe_backend": "auto", "structured_outputs_backend": "auto"}
    settings = {name: getattr(arguments, name) for name in vllm_settings}
    settings |= {name: default for name, default in defaults.items() if settings[name] is None}
    if arguments.max_model_len is None and vllm_settings["max_model_len"] == -1:
        settings["max_model_len"] = -1
    if vllm_settings["api_server_count"] is None:  # vLLM works it out later
        settings["api_server_count"] = None
    settings["cudagraph_capture_sizes"] = list(arguments.cudagraph_capture_sizes) if arguments.cudagraph_capture_sizes else None
    if not arguments.enable_lora and vllm_settings["enable_lora"] is None:
        settings["enable_lora"] = None
    return settings
