"""A small target and an EAGLE 3.1 drafter that fits it, as checkpoints and as real files; a Hub that serves a folder."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from aerie.engine.models.checkpoint import DTYPE_BITS, Checkpoint, SafetensorsHeader, build_checkpoint, parse_header
from aerie.engine.preflight import Finding, PreflightInput, run_preflight
from aerie.engine.releases import Version

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensors by name: type and shape."""

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
TARGET_TENSORS: Specs = {"model.embed_tokens.weight": ("BF16", (256, 64)), "lm_head.weight": ("BF16", (256, 64))}

DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "target_hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "draft_vocab_size": 128,
    "max_position_embeddings": 2048,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "num_aux_hidden_states": 3,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 6],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]},
}
LAYER: Specs = {
    "midlayer.input_layernorm.weight": ("BF16", (64,)),
    "midlayer.hidden_norm.weight": ("BF16", (64,)),
    "midlayer.post_attention_layernorm.weight": ("BF16", (64,)),
    "midlayer.self_attn.q_proj.weight": ("BF16", (64, 128)),
    "midlayer.self_attn.k_proj.weight": ("BF16", (32, 128)),
    "midlayer.self_attn.v_proj.weight": ("BF16", (32, 128)),
    "midlayer.self_attn.o_proj.weight": ("BF16", (64, 64)),
    "midlayer.mlp.gate_proj.weight": ("BF16", (96, 64)),
    "midlayer.mlp.up_proj.weight": ("BF16", (96, 64)),
    "midlayer.mlp.down_proj.weight": ("BF16", (64, 96)),
}
FC_NORMS: Specs = {f"fc_norm.{index}.weight": ("BF16", (64,)) for index in range(3)}
DRAFTER_TENSORS: Specs = {
    "fc.weight": ("BF16", (64, 192)),
    **FC_NORMS,
    **LAYER,
    "norm.weight": ("BF16", (64,)),
    "lm_head.weight": ("BF16", (128, 64)),
    "d2t": ("I64", (128,)),
    "t2d": ("BOOL", (256,)),
}
OFFSETS = tuple(range(128))
"""Draft id i is target id 2 i."""


def build_file(specs: Specs, metadata: Mapping[str, str] | None = None, values: Mapping[str, bytes] | None = None) -> bytes:
    """Return a whole safetensors file; tensors without `values` are zeros."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = bytearray()
    for name, (dtype, shape) in specs.items():
        size = DTYPE_BITS[dtype] // 8
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + size]}
        data += (values or {}).get(name, bytes(size))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def build_header(specs: Specs, metadata: Mapping[str, str] | None = None, file: str = "model.safetensors") -> SafetensorsHeader:
    data = build_file(specs, metadata)
    length = struct.unpack("<Q", data[:8])[0]
    return parse_header(data[8 : 8 + length], len(data), file)


class SmallModels:
    """The models, their files, and the preflight input with them."""

    build_file = staticmethod(build_file)
    build_header = staticmethod(build_header)
    offsets = OFFSETS
    drafter_tensors = DRAFTER_TENSORS
    drafter_config = DRAFTER

    def target(self, name: str = "example/target@abc", **config: Any) -> Checkpoint:
        return build_checkpoint(name, {**TARGET, **config}, [build_header(TARGET_TENSORS)])

    def drafter(
        self,
        name: str = "example/drafter@def",
        *,
        drop: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        add: Specs | None = None,
        offsets: tuple[int, ...] | None = OFFSETS,
        metadata: Mapping[str, str] | None = None,
        **config: Any,
    ) -> Checkpoint:
        """Return the drafter without the config keys `drop`, and without the tensors whose names begin with `without`."""
        settings = {key: value for key, value in {**DRAFTER, **config}.items() if key not in drop}
        tensors = (
            {key: value for key, value in DRAFTER_TENSORS.items() if not key.startswith(without)} if without else DRAFTER_TENSORS
        )
        checkpoint = build_checkpoint(name, settings, [build_header({**tensors, **(add or {})}, metadata)])
        return replace(checkpoint, d2t_offsets=offsets)

    def speculators(self, *, layer: Mapping[str, Any] | None = None, **config: Any) -> Checkpoint:
        """Return the same drafter with a config in the format of the speculators library."""
        inner = (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
            "model_type",
        )
        flags = ("fc_norm", "norm_output", "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
        document = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {key: DRAFTER[key] for key in inner} | {"num_hidden_layers": 1} | dict(layer or {}),
            "speculators_config": {"verifier": {"name_or_path": "example/target"}},
            **{key: DRAFTER[key] for key in flags},
            **config,
        }
        return replace(self.drafter(), config={key: value for key, value in document.items() if value is not None})

    def subject(self, **changes: Any) -> PreflightInput:
        base = PreflightInput(
            target=self.target(),
            drafter=self.drafter(),
            version=Version.parse("0.33.0"),
            speculative_config={"method": "eagle3", "num_speculative_tokens": 3},
            gpu_memory_bytes=80 * 2**30,
            gpu_count=1,
        )
        return replace(base, **changes)

    def findings(self, check_id: str, **changes: Any) -> list[Finding]:
        return [finding for finding in run_preflight(self.subject(**changes)).findings if finding.id == check_id]

    def write(self, folder: Path, checkpoint: Checkpoint) -> Path:
        """Write the checkpoint to a folder with one weight file."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(checkpoint.config))
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in (checkpoint.tensors or {}).items()}
        values = (
            {"d2t": struct.pack(f"<{len(checkpoint.d2t_offsets)}q", *checkpoint.d2t_offsets)} if checkpoint.d2t_offsets else None
        )
        (folder / "model.safetensors").write_bytes(build_file(specs, checkpoint.metadata, values))
        return folder


@pytest.fixture(scope="session")
def small_models() -> SmallModels:
    return SmallModels()


@pytest.fixture
def folders(tmp_path: Path, small_models: SmallModels) -> Callable[..., tuple[Path, Path]]:
    """Return a function that writes target and drafter, and returns their folders."""

    def write(target: Checkpoint | None = None, drafter: Checkpoint | None = None) -> tuple[Path, Path]:
        return (
            small_models.write(tmp_path / "target", target or small_models.target()),
            small_models.write(tmp_path / "drafter", drafter or small_models.drafter()),
        )

    return write


@dataclass
class FakeHub:
    """A Hub over a folder: /api/models/me/model/revision/main and /me/model/resolve/<commit>/<file>."""

    folder: Path
    commit: str = "c0ffee" * 6 + "abcd"
    address: str = ""
    supports_ranges: bool = True
    token: str | None = None
    failures: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Responses to send first, each once: status and headers."""
    sent_bytes: int = 0
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range of each request."""
    redirects_weights: bool = False
    """Whether weights are redirected to a store on another host."""
    authorized: list[tuple[str, bool]] = field(default_factory=list)
    """Host of each request, and whether it carried a token."""
    html_after: int | None = None
    """Number of responses after which a proxy's HTML comes instead."""
    card: object = None
    """The metadata of the model card."""
    truncated_responses: int = 0
    """Number of responses to cut off in the middle."""

    def files(self) -> list[dict[str, str]]:
        return [{"rfilename": path.name} for path in self.folder.iterdir()]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    state = FakeHub(tmp_path / "repository")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("Range")))
            host = self.headers["Host"]
            if state.html_after is not None and len(state.requests) > state.html_after:
                return self.respond(200, b"<!DOCTYPE html><p>Sign in", {"Content-Type": "text/html; charset=utf-8"})
            state.authorized.append((host.partition(":")[0], "Authorization" in self.headers))
            if state.failures:
                status, headers = state.failures.pop(0)
                return self.respond(status, b"", headers)
            if state.token and host.startswith("127.0.0.1") and self.headers.get("Authorization") != f"Bearer {state.token}":
                return self.respond(401, b"")
            if self.path in (f"/api/models/me/model/revision/{name}" for name in ("main", state.commit)):
                listing = {"sha": state.commit, "siblings": state.files(), "cardData": state.card}
                return self.respond(200, json.dumps(listing).encode())
            if state.redirects_weights and self.path.endswith(".safetensors") and host.startswith("127.0.0.1"):
                return self.respond(302, b"", {"Location": f"http://localhost:{host.partition(':')[2]}{self.path}"})
            path = state.folder / self.path.removeprefix(f"/me/model/resolve/{state.commit}/")
            if not path.is_file():
                return self.respond(404, b"")
            data = path.read_bytes()
            requested_range = self.headers.get("Range")
            if requested_range is None or not state.supports_ranges:
                return self.respond(200, data)
            begin, end = (int(part) for part in requested_range.removeprefix("bytes=").split("-"))
            if begin >= len(data):
                return self.respond(416, b"")
            last = min(end, len(data) - 1)
            return self.respond(206, data[begin : end + 1], {"Content-Range": f"bytes {begin}-{last}/{len(data)}"})

        def respond(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.truncated_responses and len(body) > 1:
                state.truncated_responses -= 1
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            self.wfile.write(body)
            state.sent_bytes += len(body)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that close the connection early, as some tests do."""

    server = Server(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()
