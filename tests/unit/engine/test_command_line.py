"""The command line as Aerie writes it: reserved flags, lossy verification, and the speculative config by setting and release."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from aerie.engine.arguments import ArgumentError, EngineArguments, parse_arguments
from aerie.engine.command_line import (
    LOSSLESS_SAMPLING_METHODS,
    RESERVED_FLAGS,
    DrafterArguments,
    ServerArguments,
    build_serve_arguments,
    build_speculative_config,
    check_lossless,
    find_unsupported_reasons,
    validate_user_arguments,
)
from aerie.engine.releases import NEWEST_VERIFIED_VERSION, Version
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static

EAGLE = DrafterArguments("/models/drafter")
SCHEDULE = Schedule((ScheduleTier(1, 4, 5), ScheduleTier(5, 64, 1)), 5)
PLAIN = EngineArguments()


# --------------------------------------------------------------------------------------------------------- reserved flags
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--model x", "the model belongs in spec.model.source"),
        ("some/model --seed 1", "the model belongs in spec.model.source"),
        ("--revision=abc", "spec.model.source.huggingFace.revision"),
        ("--served_model_name chat", "spec.model.servedName"),
        (
            "--speculative-config {}",
            "the drafter belongs in spec.drafter, K in spec.speculation.numSpeculativeTokens",
        ),
        ("-sc {}", "spec.drafter"),
        ("--speculative_config.method eagle3", "spec.drafter"),
        ("-sc.num_speculative_tokens 3", "spec.drafter"),
        ("--speculative-conf {}", "spec.drafter"),
        ("--spec-tokens 3", "spec.speculation.numSpeculativeTokens"),
        ("--port 8080", "Service"),
        ("--host=0.0.0.0", "Service"),
        ("--uds /x", "Service"),
        ("--shutdown-timeout 3", "spec.engine.podTemplate.spec.terminationGracePeriodSeconds"),
        ("--hf-token x", "spec.engine.tokenSecretRef"),
        ("--config file.yaml", "spec.engine.args one by one"),
        ("--disable-log-stats", "without the engine's metrics"),
        ("--ssl-keyfile x", "TLS belongs at the gateway"),
        ("--grpc", "HTTP"),
        ("--headless", "a replica is one pod"),
        ("-n 2", "a replica is one pod"),
        ("-dpl 1", "a replica is one pod"),
    ],
)
def test_reserved_flags_are_rejected_with_the_field_to_use(line: str, fix: str) -> None:
    messages = validate_user_arguments(shlex.split(line))
    assert len(messages) == 1
    assert messages[0].startswith("spec.engine.args ")
    assert messages[0].endswith(".")
    assert fix in messages[0]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--max-model-len=8192",
        "--model-impl transformers --config-format hf --hf-overrides {} --hf-config-path x",
        "--specialize-active-lora",
        "--data-parallel-size 2 --enable-log-requests --tokenizer x --tokenizer-revision y",
        "--port-like-nothing-known",
        "--per-request-spec-decode-metrics summary",
    ],
)
def test_other_flags_are_accepted(line: str) -> None:
    assert validate_user_arguments(shlex.split(line)) == ()


def test_every_reserved_flag_has_a_message() -> None:
    assert len(validate_user_arguments(["--port=1", "--host", "x", "--max-model-len", "8k", "--model=y"])) == 3


def test_each_reserved_flag_is_listed_once() -> None:
    flags = [flag for row in RESERVED_FLAGS for flag in row.flags]
    assert len(flags) == len(set(flags))


# ------------------------------------------------------------------------------------------------------- lossy verification
@pytest.mark.parametrize(
    "config",
    [
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0]},
        {"rejection_sample_method": "fly"},
        {"rejection_sample_method": "typical"},
        {"acceptance_method": "typical_acceptance_sampler"},
        {"synthetic_acceptance_length": 2.5},
        {"fly_window_size": 3},
        {"relaxed_topk": 3},
        {"posterior_alpha": 0.3},
    ],
)
def test_lossy_verification_is_rejected(config: dict[str, object]) -> None:
    message = check_lossless({"method": "eagle3", **config})
    assert message is not None
    assert "lets the drafter change the model's outputs" in message
    messages = validate_user_arguments(["--speculative-config", json.dumps(config)])
    assert messages[1:] == (message,)


@pytest.mark.parametrize("method", sorted(LOSSLESS_SAMPLING_METHODS))
def test_lossless_verification_is_accepted(method: str) -> None:
    assert check_lossless({"method": "eagle3", "rejection_sample_method": method}) is None
    assert check_lossless({"method": "eagle3"}) is None


def test_a_speculative_config_that_is_no_object_has_one_message() -> None:
    assert len(validate_user_arguments(["-sc", "eagle3"])) == 1
    assert len(validate_user_arguments(["-sc", "[]"])) == 1


# ----------------------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("setting", "drafter", "expected"),
    [
        (Off(), EAGLE, None),
        (Static(3), EAGLE, {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 3}),
        (
            Static(3),
            DrafterArguments("a/b", revision="0e9e", engine_options={"draft_tensor_parallel_size": 1}),
            {
                "method": "eagle3",
                "model": "a/b",
                "revision": "0e9e",
                "num_speculative_tokens": 3,
                "draft_tensor_parallel_size": 1,
            },
        ),
        (
            SCHEDULE,
            EAGLE,
            {
                "method": "eagle3",
                "model": "/models/drafter",
                "num_speculative_tokens": 5,
                "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 64, 1]],
            },
        ),
        (
            Adaptive(7),
            EAGLE,
            {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 7, "enable_adaptive_verification": True},
        ),
    ],
)
def test_the_speculative_config_of_each_setting(
    setting: SpeculationSetting, drafter: DrafterArguments, expected: dict[str, object] | None
) -> None:
    config = build_speculative_config(setting, drafter, NEWEST_VERIFIED_VERSION, PLAIN)
    assert config == expected
    assert config is None or list(config) == list(expected or {})
    assert config is None or check_lossless(config) is None


@pytest.mark.parametrize(
    ("setting", "version", "line", "drafter", "message"),
    [
        (SCHEDULE, "0.23.0", "", EAGLE, "use vLLM 0.24.0 or newer"),
        (SCHEDULE, "0.25.0", "-dp 2", EAGLE, "vLLM 0.25.0 may deadlock on a schedule with data parallel size 2"),
        (SCHEDULE, "0.33.0", "-dp 2", EAGLE, "vLLM 0.33.0 ignores a schedule with data parallel size 2"),
        (SCHEDULE, "0.33.0", "", DrafterArguments("x", "dspark"), "cannot be used with the method 'dspark'"),
        (Adaptive(3), "0.29.0", "", EAGLE, "use vLLM 0.30.0 or newer"),
        (Adaptive(3), "0.27.1", "", DrafterArguments("x", "dspark"), "use vLLM 0.28.0 or newer"),
        (Adaptive(3), "0.33.0", "--enable-lora", EAGLE, "cannot be used with LoRA"),
        (Adaptive(3), "0.33.0", "-pp 2", EAGLE, "cannot be used with pipeline parallelism"),
        (Adaptive(3), "0.33.0", "--enforce-eager", EAGLE, "cannot be used with eager execution"),
        (Adaptive(3), "0.32.0", "", DrafterArguments("x", "medusa"), "cannot be used with the method 'medusa'"),
        (Static(3), "0.29.0", "-pp 2", EAGLE, "use vLLM 0.30.0 or newer"),
        (
            Static(3),
            "0.33.0",
            "-tp 4",
            DrafterArguments("x", engine_options={"draft_tensor_parallel_size": 2}),
            "draft_tensor_parallel_size is 2, and vLLM accepts only 1 or the target's, 4",
        ),
        (Static(3), "0.33.0", "", DrafterArguments("x", "medusa"), "no longer supports Medusa"),
        (Static(3), "0.24.0", "", DrafterArguments("x", "dspark"), "use vLLM 0.25.0 or newer"),
        (Static(3), "0.33.0", "", DrafterArguments("x", "eagle-3"), "the drafter's method is 'eagle-3'"),
    ],
)
def test_unsupported_settings_are_rejected(
    setting: SpeculationSetting, version: str, line: str, drafter: DrafterArguments, message: str
) -> None:
    arguments = parse_arguments(shlex.split(line))
    reasons = find_unsupported_reasons(setting, drafter, Version.parse(version), arguments)
    assert len(reasons) == 1
    assert message in reasons[0]
    assert reasons[0].endswith(".")
    with pytest.raises(ArgumentError, match=re.escape(reasons[0])):
        build_speculative_config(setting, drafter, Version.parse(version), arguments)


@pytest.mark.parametrize(
    ("setting", "version", "line", "drafter"),
    [
        (Off(), "0.1.0", "-pp 2", DrafterArguments("x", "nothing")),
        (Static(3), "0.22.0", "-dp 2 -tp 4", DrafterArguments("x", engine_options={"draft_tensor_parallel_size": 4})),
        (Static(3), "0.30.0", "-pp 2", EAGLE),
        (Static(3), "0.32.0+cpu", "", DrafterArguments("x", "medusa")),
        (SCHEDULE, "0.24.0", "--enable-lora", EAGLE),
        (Adaptive(3), "0.28.0", "", DrafterArguments("x", "dspark")),
        (Adaptive(3), "0.34.0", "", EAGLE),
    ],
)
def test_supported_settings_are_accepted(setting: SpeculationSetting, version: str, line: str, drafter: DrafterArguments) -> None:
    assert find_unsupported_reasons(setting, drafter, Version.parse(version), parse_arguments(shlex.split(line))) == ()


def test_the_whole_command_line() -> None:
    speculative = build_speculative_config(Static(3), EAGLE, NEWEST_VERIFIED_VERSION, PLAIN)
    server = ServerArguments("/models/target", "chat", 8000, 60)
    assert build_serve_arguments(server, ["--max-model-len=8k"], speculative) == [
        "/models/target",
        "--served-model-name",
        "chat",
        "--port",
        "8000",
        "--shutdown-timeout",
        "60",
        "--max-model-len=8k",
        "--speculative-config",
        '{"method":"eagle3","model":"/models/drafter","num_speculative_tokens":3}',
    ]
    arguments = build_serve_arguments(ServerArguments("a/b", "chat", 8000, 60, "0e9e"), [], None)
    assert arguments[5:7] == ["--revision", "0e9e"]
    assert "--speculative-config" not in arguments
    with pytest.raises(ArgumentError, match=r"'--port'.*'--model=x'"):
        build_serve_arguments(server, ["--port", "1", "--model=x"], None)
