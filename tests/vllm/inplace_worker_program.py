"""A program of vLLM's Python that imports vLLM once, and runs each engine in a fork: an import takes most of a start.

Each line of its input is JSON and starts an engine: `port`, `target`, `drafter`, `prompts` (files), `method`, `path` (folders to
import from), `log`, `compiled`, `plugin` and `repacks` (booleans). The engine connects to the port, sends "ready", and answers
commands, one line of JSON each, until the connection is closed:

    {"command": "generate", "prompts": 8}                        -> {"drafts": ..., "accepted": ..., "answers": [...]}
    {"command": "call", "method": "...", "arguments": [...]}     -> what the first rank's worker returns

Engine and worker are one process, as vLLM runs one GPU (VLLM_ENABLE_V1_MULTIPROCESSING=0). Without `repacks` linear layers keep
their weights as they are, as on GPUs; on CPU vLLM packs them and drops the originals. Not guaranteed: that an engine releases
anything but its memory at its end; its process is reaped after this one. test_inplace_endpoint.py has an engine with a worker
process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import sys
from typing import Any
from unittest import mock

TOKENS = 160


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


def run_engine(settings: dict[str, Any]) -> None:
    """Run an engine until the connection is closed."""
    # The program's own import of `vllm` is complete: only names that are not imported yet come from these folders.
    sys.path[:0] = settings["path"]
    # vLLM inspects a class that it does not know yet in a new process.
    os.environ["PYTHONPATH"] = os.pathsep.join(settings["path"])
    with socket.create_connection(("127.0.0.1", settings["port"])) as connection, connection.makefile("rw") as stream:
        log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(log, number)
        answer_commands(settings, stream)


def answer_commands(settings: dict[str, Any], stream: Any) -> None:
    """Build the engine, and answer commands."""
    import vllm._custom_ops
    from vllm import LLM, SamplingParams

    if not settings["repacks"]:
        vllm._custom_ops._supports_onednn = False
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

    def send(value: Any) -> None:
        stream.write(f"{json.dumps(value)}\n")
        stream.flush()

    send("ready")
    for line in stream:
        send(respond(json.loads(line)))


def main() -> None:
    """Fork an engine for each line of the input, until it ends."""
    from vllm import LLM  # noqa: F401 - imported once for all engines

    gc.freeze()  # vLLM collects garbage several times at a start, and would look through all imported modules each time
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            status = 1
            try:
                run_engine(json.loads(line))
                status = 0
            except BaseException:
                logging.getLogger(__name__).exception("the engine has ended")
            finally:
                os._exit(status)  # the threads of vLLM and of the plugin end with the process


if __name__ == "__main__":
    main()
