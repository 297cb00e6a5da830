"""A whole command line of `vllm serve`: the model, the drafter, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aerie.engine.arguments import ArgumentError
from aerie.engine.serve_command import parse_serve_command

EAGLE: dict[str, Any] = {"method": "eagle3", "model": "me/eagle", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("args", "model", "revision"),
    [
        (["me/llama"], "me/llama", None),
        (["me/llama", "--model-impl=vllm", "--revision", "abc"], "me/llama", "abc"),
        (["--model", "/models/llama", "--port=80"], "/models/llama", None),
        (["--port=80", "--model=a/b", "--model=c/d"], "c/d", None),
        (["me/llama", "--model=a/b"], "me/llama", None),
        (["--port=80"], None, None),
        ([], None, None),
    ],
)
def test_the_model_and_its_revision(args: list[str], model: str | None, revision: str | None) -> None:
    command = parse_serve_command(args)
    assert (command.model, command.revision, command.speculative_config) == (model, revision, {})


@pytest.mark.parametrize(
    "args",
    [
        ["--speculative-config", json.dumps(EAGLE)],
        ["--speculative_config=" + json.dumps(EAGLE)],
        ["-sc", json.dumps({"num-speculative-tokens": 5, "method": "eagle3", "model": "me/eagle"})],
        ["-sc.method=eagle3", "-sc.model", "me/eagle", "-sc.num_speculative_tokens=5"],
        ["--speculative-config.method=eagle3", "--speculative-config.model=me/eagle", "--spec-tokens=5"],
        ["--spec-method=eagle3", "--spec-model", "me/eagle", "--spec-tokens", "5"],
    ],
)
def test_every_form_of_the_speculative_config(args: list[str]) -> None:
    command = parse_serve_command(["me/llama", "-tp=4", *args])
    assert command.speculative_config == EAGLE
    assert command.arguments.tensor_parallel == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a/b", "c/d"], "begins with 2 words, but vLLM expects one model"),
        (["--model"], "has --model with 0 values, but vLLM expects one"),
        (["-sc", "{"], "sets --speculative-config to invalid JSON"),
        (["-sc", "[1]"], "sets --speculative-config to [1]: vLLM expects an object"),
        (["-sc", '{"num_speculative_tokens": 0}'], "sets num_speculative_tokens to 0: vLLM expects a whole number above 0"),
        (["-sc", '{"num_speculative_tokens": true}'], "sets num_speculative_tokens to True"),
        (["--spec-tokens", "many"], "sets num_speculative_tokens to 'many'"),
        (["-sc", '{"model": ["a"]}'], "sets model in --speculative-config to ['a']: set a string"),
        (["-sc", '{"method": "eagle3"}', "--spec-method=mtp"], "has --spec-method and method in --speculative-config"),
        (["--tensor-parallel-size=$TP"], "sets --tensor-parallel-size to $TP: vLLM expects a whole number above 0"),
        (["-sc", "[" * 100_000], "invalid JSON"),
    ],
)
def test_arguments_that_vllm_would_reject(args: list[str], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_serve_command(args)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ([], ""),
        (["--distributed-executor-backend=mp", "--nnodes=1"], ""),
        (["--distributed-executor-backend=ray"], "--distributed-executor-backend=ray"),
        (["-n", "2"], "-n"),
        (["--data-parallel-size=16", "--data-parallel-size-local=8"], "--data-parallel-size-local=8"),
    ],
)
def test_the_flag_of_an_engine_on_several_pods(args: list[str], flag: str) -> None:
    assert parse_serve_command(args).multi_pod_flag == flag


def test_a_config_file_is_detected() -> None:
    assert parse_serve_command(["--config", "/etc/vllm.yaml"]).has_config_file
    assert not parse_serve_command(["--port=80"]).has_config_file
