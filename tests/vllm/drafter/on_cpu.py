"""vLLM's ExampleHiddenStatesConnector for a machine without a GPU; loaded by vLLM's `kv_connector_module_path`.

vLLM 0.32 copies the states out of its cache by CUDA streams. Only that copy is replaced here: the selection of states, the
cache, the files and their names are vLLM's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms


class CompletedEvent:
    """A CUDA event that is complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HiddenStatesOnCpu(vllms.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's connector, with a copy that needs no CUDA streams."""

    def _submit_async_write(self, pending: Any) -> None:
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids).unsqueeze(-1) * self._block_size + offsets).flatten()
        states = vllms.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, CompletedEvent(), pending.filename, self._lock_fds.pop(pending.req_id, None))
        self._req_copy_events[pending.req_id] = CompletedEvent()
