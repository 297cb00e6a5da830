"""Greedy completion requests of the output-equivalence probe, and the parser of their responses, token by token.

The request goes to vLLM's `/v1/completions` (vllm/entrypoints/openai/completion/protocol.py). It has temperature 0, and no
penalty that a model's generation_config.json might add. The response has, for each token, the most likely tokens by the target's
own unscaled logits. Tokens are identified by their ids, because several ids may have the same text. Releases from 0.14 on draft
for such requests as for any other; earlier ones did not (vLLM pull request 26060, issue 34497).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

COMPLETIONS_PATH = "/v1/completions"
MAX_COMPLETION_TOKENS = 64
"""The most tokens of one completion."""
TOP_LOGPROBS = 5
"""Most likely tokens that the response has for a position, besides the generated one."""

PROBE_PROMPTS = (
    "The lighthouse keeper climbed the stairs one last time, because",
    "Dear Ms. Alvarez,\nthank you for your letter of the third of May. I regret that",
    "The three causes of the decline in honey bees that scientists name most often are",
    "In short, photosynthesis turns",
    "Once upon a time a miller had three sons. The eldest",
    "def fibonacci(n: int) -> int:\n",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    '{"name": "Ada Lovelace", "born": 1815, "known_for": [',
    "<ul>\n  <li>Monday: soup</li>\n  <li>Tuesday:",
    "# Installation\n\n1. Download the archive.\n2.",
    "Q: A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive?\nA:",
    "17 + 26 = 43\n58 + 37 = 95\n64 + 19 =",
    "If all ravens are black and this bird is white, then",
    "one, two, three, four, five, six,",
    "red green blue red green blue red green",
    "User: Can you recommend a book about the sea?\nAssistant:",
    "Patient: I have had a headache since Tuesday.\nDoctor:",
    "La capitale de la France est Paris. La capitale de l'Italie est",
    "Der Zug nach Hamburg f\u00e4hrt heute von Gleis sieben, weil",
    "Hab\u00eda una vez en un pueblo de la costa",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec",
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u2014 \u0441\u0442\u043e\u043b\u0438\u0446\u0430",
    "ROMEO: But soft, what light through yonder window breaks?\n",
)
"""Prompts to continue, of several kinds: prose, letters, code, data, sums, lists, dialogue, other languages. They are short, so
that they cost next to nothing. No two share a beginning as long as a block of the prefix cache."""


VLLM_ERROR_TYPES = frozenset(
    ("BadRequestError", "NotFoundError", "InternalServerError", "NotImplementedError", "invalid_request_error")
)
"""Types of vLLM's errors (vllm/entrypoints/utils.py: create_error_response)."""


class CompletionError(ValueError):
    """A response that is no greedy completion; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class GreedyCompletion:
    """A greedy completion."""

    tokens: tuple[str, ...]
    top_logprobs: tuple[Mapping[str, float], ...]
    """Log probabilities of the most likely tokens and of the generated one at each position, as the engine's own target
    computes them."""


def build_completion_request(model: str, prompt: str) -> bytes:
    """Return the body of the request."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_COMPLETION_TOKENS,
        "temperature": 0,
        "seed": 0,
        "repetition_penalty": 1.0,
        "logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
    }
    return json.dumps(body).encode()


def parse_completion(body: bytes) -> GreedyCompletion:
    """Parse the body of a response. Raises CompletionError."""
    try:
        (choice,) = json.loads(body)["choices"]
        logprobs = choice["logprobs"]
        tokens = tuple(str(token) for token in logprobs["tokens"])
        top_logprobs = tuple({str(token): float(value) for token, value in row.items()} for row in logprobs["top_logprobs"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CompletionError("it has no log probabilities in vLLM's form") from error
    if not tokens or len(tokens) > MAX_COMPLETION_TOKENS or len(tokens) != len(top_logprobs):
        raise CompletionError(f"it has {len(tokens)} tokens and log probabilities of {len(top_logprobs)}")
    if not all(token in row for token, row in zip(tokens, top_logprobs, strict=True)):
        raise CompletionError("it has no log probability of one of its tokens")
    return GreedyCompletion(tokens, top_logprobs)


def read_error_type(body: bytes) -> str:
    """Return the type of vLLM's error in a response; empty if it is none of `VLLM_ERROR_TYPES`."""
    try:
        error_type = json.loads(body)["error"]["type"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return error_type if isinstance(error_type, str) and error_type in VLLM_ERROR_TYPES else ""
