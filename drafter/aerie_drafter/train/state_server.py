"""Hidden states from a running vLLM with the method `extract_hidden_states`, on demand or as files for later trainings.

The server writes the states of each request into a file of a folder that this process has to see too, and answers with its path
(vLLM's ExampleHiddenStatesConnector, equal in 0.32 and 0.33). The file is read, checked and removed. A file that the server
names is removed only if it has the states of the requested tokens, or is a file of states in the shared folder that the user set.

Checks of each conversation: its tokens, shape, type, finite numbers, and whether the target's own norm and lm_head give the next
token that the server chose. The last shows a wrong last layer, and targets with another lm_head. Not noticed: auxiliary layers in
another order, and a server with another fine-tune that has almost the same lm_head.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aerie_drafter import files
from aerie_drafter.errors import CheckpointError, ConfigError, DataError, TargetError
from aerie_drafter.train.endpoint import MAX_PAUSE_SECONDS, is_retried
from aerie_drafter.train.states import (
    MANIFEST_FILE,
    HiddenStateFiles,
    StateLayout,
    TargetParts,
    check_manifest,
    compute_token_digest,
    read_state_file,
    state_file_path,
)

NEXT_TOKEN_TOLERANCE = 0.05
"""Share of the logits' range by which the server's greedy token may be below the best one: rounding of 16-bit states."""


class HiddenStateServer:
    """Client of a vLLM server that extracts hidden states; it can be used by several threads."""

    def __init__(
        self,
        url: str,
        model: str,
        target_parts: TargetParts,
        layout: StateLayout,
        *,
        shared_folder: Path | None = None,
        attempts: int = 5,
        timeout_seconds: float = 600.0,
        first_pause_seconds: float = 0.5,
    ) -> None:
        """`shared_folder` is where this process sees the server's shared_storage_path; default: the same path."""
        key = os.environ.get("OPENAI_API_KEY")
        try:
            self.client = httpx.Client(
                base_url=url.rstrip("/").removesuffix("/v1"),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(timeout_seconds, connect=10),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # so nothing is open between requests
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url}: not an address of a server ({error}); expected: http://HOST:PORT.") from None
        self.model, self.target_parts, self.layout, self.shared_folder = model, target_parts, layout, shared_folder
        self.final_index = layout.layer_ids.index(int(target_parts.config.num_hidden_layers))
        self.attempts, self.first_pause_seconds = attempts, first_pause_seconds

    def extract(self, tokens: Tensor) -> Tensor:
        """Return the states [tokens, layers, hidden] of a conversation. Raises DataError, TargetError."""
        body = {
            "model": self.model,
            "prompt": tokens.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = self._request(body)
        path = self._find_path(answer)
        lock = path.with_name(f"{path.name}.lock")
        try:
            with contextlib.suppress(FileNotFoundError), lock.open() as stream:  # without it the server writes without a lock
                fcntl.flock(stream, fcntl.LOCK_SH)  # held until the file is complete
            if not path.exists():
                raise DataError(
                    f"{path}: the server wrote this file, and it is not visible here: set the folder where the server's "
                    "shared_storage_path is mounted."
                )
            states = read_state_file(path, tokens, self.layout)
        finally:
            if self._is_own_file(path, tokens):
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        self._check(states, self._find_next_token(answer))
        return states

    def _find_path(self, answer: dict[str, Any]) -> Path:
        try:
            path = Path(answer["kv_transfer_params"]["hidden_states_path"])
        except (KeyError, TypeError):
            path = Path()
        if path.suffix != ".safetensors" or not str(path).isprintable():
            raise DataError(
                f"{self.client.base_url}: the answer has no path of hidden states: start vLLM with the method "
                "extract_hidden_states and its connector (docs/how-to/train-a-drafter.md)."
            )
        return path if self.shared_folder is None else self.shared_folder / path.name

    def _find_next_token(self, answer: dict[str, Any]) -> int:
        try:
            token = int(answer["choices"][0]["token_ids"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(
                f"{self.client.base_url}: the answer has no token ids: it needs a vLLM with return_token_ids (0.32 and 0.33 have "
                "it)."
            ) from None
        count = len(self.target_parts.lm_head)
        if not 0 <= token < count:
            raise TargetError(
                f"{self.client.base_url}: the server continues with token {token}, and target.model has {count} tokens: they are "
                "different targets."
            )
        return token

    def _is_own_file(self, path: Path, tokens: Tensor) -> bool:
        """Return whether the file may be removed: a wrong or hostile server can name any file."""
        try:
            with safe_open(path, framework="pt") as opened:
                opened.get_slice("hidden_states")
                token_ids = opened.get_tensor("token_ids")
        except (SafetensorError, OSError):
            return False
        return self.shared_folder is not None or torch.equal(token_ids.long(), tokens.long())

    def _check(self, states: Tensor, next_token: int) -> None:
        if not states.isfinite().all():
            raise TargetError(f"{self.client.base_url}: hidden states are not finite: the server's model overflows.")
        head = self.target_parts.lm_head
        with torch.no_grad():
            final = self.target_parts.final_norm(states[-1:, self.final_index].to(head))
            logits = (final @ head.T)[0].float()
        if logits.max() - logits[next_token] > NEXT_TOKEN_TOLERANCE * (logits.max() - logits.min()):
            raise TargetError(
                f"{self.client.base_url}: the server continues with token {next_token}, and target.model with "
                f"{int(logits.argmax())} after the same states: they are different targets, or the layer ids differ."
            )

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        reason = ""
        for attempt in range(self.attempts):
            if attempt:
                pause = min(self.first_pause_seconds * 2 ** (attempt - 1), MAX_PAUSE_SECONDS)
                time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)
            try:
                answer = self.client.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                reason = f"no response ({type(error).__name__}: {error})"
                continue
            if answer.is_success:
                return self._parse(answer)
            reason = f"status {answer.status_code}: {answer.text[:300]}"
            if not is_retried(answer.status_code):
                break
        raise DataError(f"{self.client.base_url}/v1/completions: {reason}")

    def _parse(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise DataError(
                f"{self.client.base_url}/v1/completions: the answer is no JSON object, so no vLLM listens there: "
                f"{answer.text[:100]!r}"
            )
        return parsed


def write_state_files(
    server: HiddenStateServer,
    folder: Path,
    conversations: Sequence[Tensor],
    target_id: str,
    *,
    concurrency: int = 16,
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Write the states of conversations that have no file yet, and return their number. Raises DrafterError.

    A file is complete or missing, so a run that was killed is resumed.
    """
    manifest = {"target": target_id, "layer_ids": list(server.layout.layer_ids), "hidden_size": server.layout.hidden_size}
    if (folder / MANIFEST_FILE).exists():
        check_manifest(folder, server.layout, target_id)
    elif folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: has files, but no {MANIFEST_FILE}: choose a new folder.")
    else:
        files.replace_file(folder / MANIFEST_FILE, json.dumps(manifest) + "\n")
    existing = HiddenStateFiles(folder, server.layout, target_id)
    unique = {compute_token_digest(tokens): tokens for tokens in conversations}
    missing = [(digest, tokens) for digest, tokens in unique.items() if tokens not in existing]
    if on_progress is not None:
        on_progress(len(unique) - len(missing))

    def write(digest: str, tokens: Tensor) -> None:
        path = state_file_path(folder, digest)
        new = path.with_suffix(".writing")
        states = server.extract(tokens).contiguous()
        try:
            path.parent.mkdir(exist_ok=True)
            save_file({"token_ids": tokens.long(), "hidden_states": states}, new)
            new.replace(path)
        except (OSError, SafetensorError) as error:  # of a full disk
            raise CheckpointError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}).") from error
        finally:
            new.unlink(missing_ok=True)

    with ThreadPoolExecutor(concurrency) as pool:
        for done in _run_bounded(pool, write, iter(missing), concurrency):
            if on_progress is not None:
                on_progress(len(unique) - len(missing) + done)
    return len(missing)


def _run_bounded(
    pool: ThreadPoolExecutor, work: Callable[..., None], items: Iterator[tuple[str, Tensor]], count: int
) -> Iterator[int]:
    """Run `work` on all items, at most `count` at a time, and yield the number of completed ones. The first error ends it."""
    pending: set[Future[None]] = {pool.submit(work, *item) for item in islice(items, count)}
    done = 0
    while pending:
        completed, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in completed:
            future.result()
            done += 1
        yield done
        pending |= {pool.submit(work, *item) for item in islice(items, len(completed))}
