"""Where an engine's API key is, by its pod."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.manifests.engine_key import EngineKey, find_engine_key

PLAIN = "s3cret-in-plain-text"
SECRET = {"secretKeyRef": {"name": "keys", "key": "engine"}}
FROM_SECRET = EngineKey({"secret": {"secretName": "keys", "items": [{"key": "engine", "path": "key"}]}})


def pod(args: list[str] | None = None, env: list[dict[str, Any]] | None = None, command: list[str] | None = None) -> Any:
    engine = {"name": "engine", "args": args or [], "env": env or [], **({"command": command} if command else {})}
    return {"spec": {"containers": [{"name": "sidecar", "args": [f"--api-key={PLAIN}"]}, engine]}}


def variable(name: str, source: dict[str, Any] | str) -> dict[str, Any]:
    return {"name": name, "value": source} if isinstance(source, str) else {"name": name, "valueFrom": source}


@pytest.mark.parametrize(
    "document",
    [
        pod(),
        pod(["--port=8000"], [variable("HF_TOKEN", SECRET)]),
        pod(env=[variable("VLLM_API_KEY", "")]),
        pod(env=[variable("VLLM_API_KEY", SECRET), variable("VLLM_API_KEY", "")]),
        {"spec": {"containers": [{"name": "engine"}]}},
    ],
)
def test_an_engine_without_a_key(document: Any) -> None:
    assert find_engine_key(document) == EngineKey()


@pytest.mark.parametrize(
    "document",
    [
        pod(env=[variable("VLLM_API_KEY", SECRET)]),
        pod(["--api-key", "$(KEY)"], [variable("KEY", SECRET)]),
        pod(["--api-key=$(KEY)", "--port=8000"], [variable("KEY", SECRET), variable("VLLM_API_KEY", PLAIN)]),
        pod(["--api_key=$(KEY)", "$(OTHER)"], [variable("KEY", SECRET), variable("OTHER", PLAIN)]),
        pod([f"--api-key={PLAIN}", "--api-key=$(KEY)"], [variable("KEY", SECRET)]),
        pod(command=["vllm", "serve", "--api-key=$(KEY)"], env=[variable("KEY", SECRET)]),
        pod(env=[variable("KEY", SECRET), variable("VLLM_API_KEY", "$(KEY)")]),
    ],
)
def test_a_key_of_a_secret_is_referred_to(document: Any) -> None:
    assert find_engine_key(document) == FROM_SECRET


def test_a_key_of_a_config_map_is_referred_to() -> None:
    document = pod(env=[variable("VLLM_API_KEY", {"configMapKeyRef": {"name": "settings", "key": "k"}})])
    assert find_engine_key(document) == EngineKey({"configMap": {"name": "settings", "items": [{"key": "k", "path": "key"}]}})


@pytest.mark.parametrize(
    ("document", "holder"),
    [
        (pod(["--api-key", PLAIN]), "--api-key"),
        (pod(["--api-key", f"prefix-$(KEY){PLAIN}"], [variable("KEY", SECRET)]), "--api-key"),
        (pod(["--api-key=$(KEY)"]), "KEY"),
        (pod(["--api-key=$(KEY)"], [variable("KEY", PLAIN)]), "KEY"),
        (pod(env=[variable("VLLM_API_KEY", PLAIN)]), "VLLM_API_KEY"),
        (pod(env=[variable("VLLM_API_KEY", "$(VLLM_API_KEY)")]), "VLLM_API_KEY"),
        (pod(env=[variable("A", "$(B)"), variable("B", "$(A)"), variable("VLLM_API_KEY", "$(A)")]), "A"),
        (pod(env=[variable("VLLM_API_KEY", {"fieldRef": {"fieldPath": "metadata.uid"}})]), "VLLM_API_KEY"),
    ],
)
def test_a_key_that_is_in_the_pod_itself_is_explained_and_not_quoted(document: Any, holder: str) -> None:
    key = find_engine_key(document)
    assert key.volume_source is None
    assert holder in key.problem
    assert "valueFrom.secretKeyRef" in key.problem
    assert PLAIN not in key.problem


WORDS = st.sampled_from(["--api-key", f"--api-key={PLAIN}", "--api-key=$(A)", "--api-key=$(B)", PLAIN, "$(A)", "--port=1", "-x"])
VARIABLES = st.builds(
    variable, st.sampled_from(["A", "B", "VLLM_API_KEY"]), st.sampled_from([PLAIN, "", "$(A)", "$(B)", SECRET, {"fieldRef": {}}])
)


@given(st.lists(WORDS, max_size=4), st.lists(VARIABLES, max_size=4))
def test_no_value_is_ever_returned(args: list[str], env: list[dict[str, Any]]) -> None:
    key = find_engine_key(pod(args, env))
    assert key.volume_source is None or not key.problem
    assert PLAIN not in json.dumps(key.volume_source) + key.problem
