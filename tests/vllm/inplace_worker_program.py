"""A program of vLLM's Python: an engine that reads commands, each a line of JSON, and answers each with a line.

    {"command": "generate", "prompts": 8}                        -> {"drafts": ..., "accepted": ..., "answers": [...]}
    {"command": "call", "method": "...", "arguments": [...]}     -> what the first rank's worker returns

Its only argument is JSON: `target`, `drafter`, `prompts` (files), `method`, `compiled` and `plugin` (booleans). With the variable
`WITHOUT_REPACKING` linear layers keep their weights as they are, as on GPUs; on CPU vLLM packs them and drops the originals.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

ANSWER = "answer: "
"""Begins a line of standard output that is an answer; vLLM logs there too."""
TOKENS = 160
WITHOUT_REPACKING = "WITHOUT_REPACKING"

if os.environ.get(WITHOUT_REPACKING):  # the worker imports this module too, before it builds a model
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def get_worker_base() -> type:
    """Return the plugin's class; an engine without the plugin does not have it."""
    try:
        from aerie_vllm.worker import DrafterWorker
    except ImportError:
        return object
    return DrafterWorker


class FaultyWorker(get_worker_base()):  # type: ignore[misc] # vLLM makes it a base of its own worker
    """The plugin's worker, with a fault wherever a test needs one."""

    def aerie_drafter_break(self, where: str, count: int) -> str:
        """Raise from now on: `load` after `count` tensors, `finalize`, `capture` or `restore`; nowhere for an empty string."""
        from vllm.model_executor.model_loader import reload

        from aerie_vllm.weights import Snapshot

        mock.patch.stopall()
        drafter = self.get_draft_model()
        load_weights = drafter.load_weights

        def load_some(weights: Any) -> Any:
            def some() -> Any:
                for index, weight in enumerate(weights):
                    if index == count:
                        raise RuntimeError("injected")
                    yield weight

            return load_weights(some())

        error = RuntimeError("injected")
        if where == "load":
            mock.patch.object(drafter, "load_weights", load_some).start()
        if where == "finalize":
            mock.patch.object(reload, "finalize_layerwise_reload", side_effect=error).start()
        if where in ("capture", "restore"):
            mock.patch.object(Snapshot, where, side_effect=error).start()
        return where

    def aerie_drafter_hash_tensors(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor of the drafter, those that its loader calculated included."""
        import hashlib

        from aerie_vllm.weights import _tensor_attributes

        drafter, digests = self.get_draft_model(), {}
        for prefix, module in drafter.named_modules():
            for name, tensor in {**module._parameters, **module._buffers, **_tensor_attributes(module)}.items():
                if tensor is not None:
                    digests[f"{prefix}.{name}"] = hashlib.sha256(
                        tensor.detach().contiguous().view(-1).numpy().tobytes()
                    ).hexdigest()
        return digests


def answer(value: Any) -> None:
    """Write a line for the test."""
    sys.stdout.write(f"{ANSWER}{json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve commands until the input ends."""
    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[1])
    more = {"worker_extension_cls": f"{__file__.rpartition('/')[2][:-3]}.FaultyWorker"} if settings["plugin"] else {}
    engine = LLM(
        settings["target"],
        dtype="float32",
        enforce_eager=not settings["compiled"],
        max_model_len=2048,
        max_num_seqs=8,
        block_size=128,
        kv_cache_memory_bytes=1 << 27,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"method": settings["method"], "model": settings["drafter"], "num_speculative_tokens": 3},
        **more,
    )
    with open(settings["prompts"]) as file:
        prompts = [json.loads(line)["messages"] for line in file]

    def count() -> tuple[int, int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]

    def respond(request: dict[str, Any]) -> Any:
        if request["command"] == "call":
            return engine.collective_rpc(request["method"], args=tuple(request["arguments"]))[0]
        before = count()
        outputs = engine.chat(prompts[: request["prompts"]], SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
        drafts, accepted = (after - earlier for earlier, after in zip(before, count(), strict=True))
        return {"drafts": drafts, "accepted": accepted, "answers": [output.outputs[0].text for output in outputs]}

    answer("ready")
    for line in sys.stdin:
        answer(respond(json.loads(line)))


if __name__ == "__main__":
    main()
