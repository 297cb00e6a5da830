"""Arguments, options and drafters: the simulator accepts what vLLM accepts, and rejects the rest like vLLM."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE, expected_length
from aerie_lab.engine.performance_model.step import ScaledStepTime, StepTimeFormula, StepTimeGrid
from aerie_lab.engine.serving.arguments import parse_simulator_arguments
from aerie_lab.engine.serving.drafter import EngineError, inspect_drafter
from aerie_lab.engine.serving.options import SimulatorOptions, parse_options, read_options
from aerie_lab.engine.serving.setup import EngineSetup, prepare_engine
from aerie_lab.errors import StateError


def test_a_typical_command_line_is_parsed() -> None:
    arguments = parse_simulator_arguments(
        shlex.split(
            "serve acme/m --served-model-name a b --port=9000 --max_model_len 8k --max-num-seqs 64 --shutdown-timeout 30 "
            "--no-enable-prefix-caching --enforce-eager -tp 2 --dtype float32 --gpu-memory-utilization 0.9 "
            """--speculative-config '{"method": "eagle3", "model": "acme/d", "num_speculative_tokens": 3}' """
            "--compilation-config.cudagraph_mode NONE --api-key x"
        )
    )
    assert (arguments.model, arguments.served_model_names, arguments.port) == ("acme/m", ("a", "b"), 9000)
    assert (arguments.max_model_len, arguments.max_num_seqs, arguments.shutdown_timeout) == (8000, 64, 30)
    assert arguments.speculative_config == {"method": "eagle3", "model": "acme/d", "num_speculative_tokens": 3}
    assert (arguments.enable_prefix_caching, arguments.api_keys) == (False, ("x",))
    assert (arguments.api_server_count, arguments.has_drafter_endpoint, arguments.has_drafter_worker) == (1, False, False)


@pytest.mark.parametrize(
    ("words", "halves"),
    [
        ("--middleware a.B --middleware aerie_vllm.endpoint.DrafterEndpoint", (True, False)),
        ("--worker-extension-cls aerie_vllm.worker.DrafterWorker", (False, True)),
        ("--middleware a.B --worker-extension-cls c.D", (False, False)),
    ],
)
def test_flags_switch_the_halves_of_the_plugin_on(words: str, halves: tuple[bool, bool]) -> None:
    arguments = parse_simulator_arguments(["m", *words.split()])
    assert (arguments.has_drafter_endpoint, arguments.has_drafter_worker) == halves


def test_the_model_may_be_a_flag_and_json_may_be_dotted() -> None:
    arguments = parse_simulator_arguments(["--model", "m", "-sc.method=ngram", "-sc.num_speculative_tokens", "4"])
    assert arguments.model == "m"
    assert arguments.served_model_names == ("m",)
    assert arguments.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("--disable-prefix-caching", False),
        ("--no-enable-prefix-caching", False),
        ("--disable-prefix-caching --enable-prefix-caching", True),
        ("--watchdog-config {} --reasoning-effort-map {} --sleep-mode-backend cumem --monokernel", True),
        ("--enable-custom-all-reduce --disable-log-requests --no-disable-cascade-attn", True),
        ("--kv-cache-dtype whatever", True),
        ("--tool-strict-level None --spec-method None", True),
    ],
)
def test_flags_that_0_33_accepts_and_0_32_rejects(words: str, on: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_simulator_arguments(["m", *words.split()], "0.33.0").enable_prefix_caching is on
    if words.startswith("--no-"):  # the form that both versions accept
        assert parse_simulator_arguments(["m", *words.split()], "0.32.0").enable_prefix_caching is on
        return
    with pytest.raises(SystemExit, match="2"):
        parse_simulator_arguments(["m", *words.split()], "0.32.0")
    assert words.split()[0] in capsys.readouterr().err


def test_flags_that_0_33_no_longer_accepts() -> None:
    words = ["m", "--spec-method", "medusa"]
    parse_simulator_arguments(words, "0.32.1")
    for newer in ("0.33.0", "0.34.0", "0.33.0rc1"):
        with pytest.raises(SystemExit, match="2"):
            parse_simulator_arguments(words, newer)


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("v0.32.0", "0.32.0"),
        ("0.32.1", "0.32.1"),
        ("v0.32.0-cu129", "0.32.0"),
        ("v0.33.0rc1", "0.33.0rc1"),
        ("v0.10.1.1", "0.10.1.1"),
        ("latest", "0.33.0"),
        ("25.10-py3", "0.33.0"),
        ("1", "0.33.0"),
        ("", "0.33.0"),
    ],
)
def test_the_tag_of_the_image_gives_the_version(tag: str, version: str) -> None:
    assert read_options({"AERIE_SIMULATOR_TAG": tag}).version == version
    assert read_options({"AERIE_SIMULATOR_TAG": tag, "AERIE_SIMULATOR": '{"version": "0.30.0"}'}).version == "0.30.0"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["m", "--no-such-flag", "3", "--other"], "vllm: error: unrecognized arguments: --no-such-flag 3 --other"),
        (["m", "--port", "abc"], "vllm serve: error: argument --port: invalid int value: 'abc'"),
        (["m", "--max-model-len"], "vllm serve: error: argument --max-model-len: expected one argument"),
        (["m", "--dtype", "float99"], "vllm serve: error: argument --dtype: invalid choice: 'float99' (choose from 'auto', "),
        (["m", "-sc", "{bad"], "vllm serve: error: argument --speculative-config/-sc: Value {bad cannot be converted to"),
    ],
)
def test_an_invalid_command_line_gives_exit_status_2(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_simulator_arguments(words)
    assert sentence in capsys.readouterr().err


def prepare(*words: str, options: SimulatorOptions | None = None) -> EngineSetup:
    return prepare_engine(parse_simulator_arguments(["acme/m", *words]), options or SimulatorOptions())


def speculation(**config: Any) -> list[str]:
    return ["--speculative-config", json.dumps(config)]


def test_limits_come_from_the_flags_the_model_and_the_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    setup = prepare_engine(parse_simulator_arguments([str(tmp_path), "--block-size", "32"]), parse_options({"kv_tokens": 64_000}))
    assert (setup.settings.max_model_len, setup.settings.block_size, setup.settings.num_blocks) == (4096, 32, 2000)
    assert (setup.settings.num_speculative_tokens, setup.drafter) == (None, None)
    with pytest.raises(EngineError, match=r"User-specified max_model_len \(5000\) is greater than the derived max_model_len"):
        prepare_engine(parse_simulator_arguments([str(tmp_path), "--max-model-len", "5000"]), SimulatorOptions())


def test_a_schedule_is_parsed_to_tiers() -> None:
    ranges = [[1, 4, 5], [5, 64, 1]]
    setup = prepare(*speculation(method="ngram", num_speculative_tokens=5, num_speculative_tokens_per_batch_size=ranges))
    assert setup.settings.k_schedule == ((1, 4, 5), (5, 64, 1))
    assert setup.settings.drops_last_block is False


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3, "foo": 1}, "foo\n  Unexpected keyword argument"),
        ({"method": "ngram"}, "num_speculative_tokens must be provided with speculative model unless"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"greater than zero \(0\)"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided but without speculative model"),
        (
            {"method": "eagle3", "model": "/nowhere/drafter", "num_speculative_tokens": 3},
            "Invalid repository ID or local directory specified: '/nowhere/drafter'",
        ),
    ],
)
def test_invalid_speculation_settings_are_rejected(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        prepare(*speculation(**config))


def test_a_missing_folder_is_rejected_and_a_hub_name_accepted() -> None:
    with pytest.raises(EngineError, match="Repo id must be in the form"):
        prepare_engine(parse_simulator_arguments(["/nowhere/model"]), SimulatorOptions())
    assert prepare().settings.max_model_len == 32768


def length(setup: EngineSetup) -> float:
    return expected_length(setup.acceptance["chat"], 3)


def test_each_drafter_behaves_according_to_its_files(drafters: dict[str, Path]) -> None:
    def build_acceptance(name: str) -> EngineSetup:
        return prepare(*speculation(method="eagle3", model=str(drafters[name]), num_speculative_tokens=3))

    assert length(build_acceptance("eagle3")) == pytest.approx(expected_length(CLASS_ACCEPTANCE["chat"], 3))
    assert length(build_acceptance("eagle3")) < length(build_acceptance("eagle3.1")) < 1.08 * length(build_acceptance("eagle3"))
    assert length(build_acceptance("no norm_output")) < 0.9 * length(build_acceptance("eagle3"))
    assert length(build_acceptance("plain as 3.1")) < 0.75 * length(build_acceptance("eagle3"))
    assert length(build_acceptance("shifted")) < length(build_acceptance("eagle3"))
    assert length(build_acceptance("rated")) == pytest.approx(1.8, rel=0.05)
    with pytest.raises(EngineError, match="There is no module or parameter named 'fc_norm'"):
        build_acceptance("no flags")


@pytest.mark.parametrize(
    ("rope", "version", "taken"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "0.33.0", 4096),
        ({"rope_type": "yarn", "factor": 4.0}, "0.32.0", 32768),
        ({"type": "longrope"}, "0.34.0", 4096),
        ({"rope_type": "llama3"}, "0.33.0", 32768),
        (None, "0.33.0", 32768),
    ],
)
def test_a_drafter_with_fewer_positions_limits_the_context_from_0_33(
    rope: dict[str, Any] | None, version: str, taken: int, drafters: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(drafters["eagle3"], tmp_path / "short")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    words = speculation(method="eagle3", model=str(folder), num_speculative_tokens=3)
    assert prepare(*words, options=SimulatorOptions(version=version)).settings.max_model_len == taken


def test_measured_acceptance_is_not_shifted(drafters: dict[str, Path]) -> None:
    words = speculation(method="eagle3", model=str(drafters["no norm_output"]), num_speculative_tokens=3)
    options = parse_options({"acceptance": {"chat": {"rates": [0.6, 0.3, 0.1]}}, "apply_drafter_effect": False})
    assert prepare(*words, options=options).acceptance["chat"].survival(3).tolist() == pytest.approx([0.6, 0.3, 0.1])


def test_mismatched_drafter_files_have_the_measured_effect() -> None:
    """The shifts reproduce the rates that they were computed from (module docstring of aerie_lab.engine.serving.drafter)."""
    from aerie_lab.engine.performance_model.acceptance import Acceptance, conditionals_from_rates
    from aerie_lab.engine.serving.drafter import _NO_NORM_OUTPUT_SHIFTS, _PLAIN_AS_31_SHIFTS

    right = Acceptance(conditionals_from_rates((0.683, 0.487, 0.341)))
    assert right.shift_logits(*_NO_NORM_OUTPUT_SHIFTS).survival(3).tolist() == pytest.approx([0.669, 0.314, 0.097], abs=0.002)
    plain = Acceptance(conditionals_from_rates((0.668, 0.456, 0.330)))
    assert expected_length(plain.shift_logits(*_PLAIN_AS_31_SHIFTS), 3) == pytest.approx(1.58, abs=0.03)


def test_each_kind_of_damaged_file_has_its_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(EngineError, match="Invalid repository ID or local directory"):
        inspect_drafter("eagle3", str(empty))
    (empty / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="Cannot find any model weights"):
        inspect_drafter("eagle3", str(empty))
    (empty / "model.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0nope")
    with pytest.raises(EngineError, match="Error while deserializing header"):
        inspect_drafter("eagle3", str(empty))


def test_options_of_every_kind_are_parsed(tmp_path: Path) -> None:
    document = {
        "step_time": {"grid": "llama3.1-8b-h100-tp1", "seconds_per_prompt_token": 2e-5},
        "acceptance": {"chat": {"rates": [0.7, 0.5], "spread": 0.3}, "code": {"conditionals": [0.9]}},
        "drift": {"per_1k_context": -0.1},
        "speed": 2.0,
    }
    file = tmp_path / "options.json"
    file.write_text(json.dumps(document))
    options = read_options({"AERIE_SIMULATOR": str(file)})
    assert isinstance(options.step_time, ScaledStepTime)
    assert isinstance(options.step_time.inner, StepTimeGrid)
    assert options.step_time.fixed_seconds(1, 0) == pytest.approx(options.step_time.inner.fixed_seconds(1, 0) / 2)
    assert options.acceptance["chat"].survival(2).tolist() == pytest.approx([0.7, 0.5])
    assert read_options({}) == SimulatorOptions()
    formula = parse_options(
        {"step_time": {"formula": {"base_seconds": 1.0, "seconds_per_token": 0.1, "captured_sizes": [8, 16]}}}
    ).step_time
    assert formula == StepTimeFormula(1.0, 0.1, captured_sizes=(8, 16))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "AERIE_SIMULATOR is not JSON"),
        ("/nowhere.json", "names the file /nowhere.json, which cannot be read"),
        ('{"speeed": 1}', "unknown field 'speeed': one of acceptance"),
        ('{"step_time": {"grid": "x"}}', "step-time grid 'x' is unknown"),
        ('{"step_time": {"formula": "x"}}', "formula 'x' is unknown: one of dense-32b"),
        ('{"acceptance": {"a": {"rates": [0.5]}}}', "default_class is 'chat': acceptance names a"),
        ('{"acceptance": {"chat": {"rates": [1.5]}}}', "rates are .* never rise"),
        ('{"drift": {"moon": 1}}', "cannot be used"),
        ('{"drafter_fault": "rain"}', "there is no drafter fault 'rain': one of stage-hangs"),
    ],
)
def test_invalid_options_are_rejected(text: str, sentence: str) -> None:
    with pytest.raises(StateError, match=sentence):
        read_options({"AERIE_SIMULATOR": text})
