"""The longest request that an engine takes, prompt and completion together, as the engine reports it.

vLLM's `/v1/models` has `max_model_len` of each base model that it serves (vllm/entrypoints/openai/models/serving.py, 0.32.0 and
0.33.0). This is the effective value and not the one of the command line. vLLM fits it to the GPU's memory (`--max-model-len
auto`) and, from 0.33 on, cuts it to the drafter's positions (vllm/config/vllm.py, `_limit_max_model_len_to_draft`).
"""

from __future__ import annotations

import json

MODELS_PATH = "/v1/models"


def read_max_model_len(body: bytes, model_name: str) -> int | None:
    """Return the tokens of the longest request to this model, from the body of a response; None if it has none."""
    try:
        cards = json.loads(body)["data"]
        max_model_len = next((card["max_model_len"] for card in cards if card["id"] == model_name), None)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return max_model_len if type(max_model_len) is int and max_model_len > 0 else None
