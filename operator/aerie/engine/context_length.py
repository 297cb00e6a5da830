"""How long a request an engine takes, prompt and answer together, as it says itself.

vLLM's `/v1/models` has `max_model_len` of each base model that it serves (vllm/entrypoints/openai/models/serving.py, 0.32.0 and
0.33.0): not what the command line asks for, but what came of it, after it was fitted to the GPU's memory (`--max-model-len auto`)
and, from 0.33 on, cut to the drafter's positions (vllm/config/vllm.py, `_limit_max_model_len_to_draft`).
"""

from __future__ import annotations

import json

MODELS_PATH = "/v1/models"


def read_max_model_len(body: bytes, model_name: str) -> int | None:
    """Tokens of the longest request to the model of this name, from the body of an answer; None where it does not say."""
    try:
        cards = json.loads(body)["data"]
        found = next((card["max_model_len"] for card in cards if card["id"] == model_name), None)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if type(found) is int and found > 0 else None
