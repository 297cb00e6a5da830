"""Checks that the engine supports and applies the keys of its speculative config besides drafter and number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from aerie.api.engine_options import ENGINE_OPTIONS_BY_NAME
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, info, pass_check, skip, warning
from aerie.engine.speculative_config import find_config_problems, find_runner_problems

_KEYS_OF_OTHER_CHECKS = frozenset(
    {"method", "model", "revision", "num_speculative_tokens", "draft_tensor_parallel_size", "tensor_parallel_size"}
)
"""Keys that other checks cover, or that every config has."""


@register_check(
    "C34",
    "speculative config keys",
    rationale="the engine fails to start with an unknown key, and ignores some keys that its model runner does not support",
    max_severity=Severity.ERROR,
    source="vLLM config/speculative.py and config/vllm.py, 0.22 to 0.33; v1/worker/gpu/spec_decode/speculator.py; "
    "v1/spec_decode/llm_base_proposer.py",
)
def check_engine_options(inputs: PreflightInput) -> Iterable[CheckResult]:
    config = {
        name: value
        for name, value in inputs.speculative_config.items()
        if name not in _KEYS_OF_OTHER_CHECKS and value is not None
    }
    if not config:
        yield skip("the speculative config has no other keys")
        return
    method = {"method": inputs.method} if inputs.method is not None else {}
    runner, runner_reason = inputs.model_runner
    problems = [
        *find_config_problems(method | config, inputs.version, tensor_parallel=inputs.arguments.tensor_parallel),
        *find_runner_problems(config, runner, runner_reason),
    ]
    for problem in problems:
        yield (error if problem.prevents_start else warning)(problem.description, problem.fix)
    for name in sorted(config.keys() - ENGINE_OPTIONS_BY_NAME.keys()):
        yield info(f"the speculative config has {name}, which is unknown to Aerie: whether vLLM supports it could not be checked")
    if not problems and config.keys() <= ENGINE_OPTIONS_BY_NAME.keys():
        yield pass_check(f"vLLM {inputs.version} supports {', '.join(sorted(config))}")
