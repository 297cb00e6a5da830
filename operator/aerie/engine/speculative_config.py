"""The speculative config's further keys against a version of vLLM: what it lacks, what it refuses, what it ignores in silence.

The keys themselves are data (`aerie.api.engine_options`). Guarantees: every key of `spec.speculation.engineOptions` that is not
the user's to set, or is not known, is refused by a sentence with field, value and way out. Not guaranteed: that a backend or a
type that is named exists in the image; the engine says so when it starts.

Sources, 0.22 to 0.33: vllm/config/speculative.py (_verify_args, __post_init__), vllm/config/vllm.py
(_get_v1_model_runner_unsupported_features, _get_v2_model_runner_unsupported_features),
vllm/v1/worker/gpu/spec_decode/speculator.py (_validate_local_argmax_reduction), vllm/v1/spec_decode/llm_base_proposer.py
(_enable_probabilistic_draft_probs: model runner V1 draws drafts only where the rejection sampling method is standard).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aerie.api.engine_options import BY_NAME, Key
from aerie.engine.releases import Feature, Version, supports

SAMPLING = {"Greedy": "greedy", "Probabilistic": "probabilistic"}
"""Values of spec.speculation.draftSampling and of `draft_sample_method`."""
_FIELD = "spec.speculation.engineOptions"
_TYPES: dict[str, tuple[type, ...]] = {"boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,)}
_ALWAYS_GREEDY = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states"})
"""Methods whose drafts are not drawn, whatever draft_sample_method says (vllm/v1/spec_decode)."""
_HEAD_SHARED = frozenset({"eagle", "eagle3", "mtp"})
"""Methods that take draft_lm_head_quantization."""
_OF_SETTING = frozenset({"num_speculative_tokens_per_batch_size", "enable_adaptive_verification"})
"""Keys of a setting: `flags` knows which version runs it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What an engine does not do as it is written."""

    what: str
    """With key and value, as a part of a sentence."""
    way_out: str
    ends_start: bool = True
    """Whether the engine refuses to start; else it starts and ignores something."""


def misplaced(options: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence for each of `spec.speculation.engineOptions` that is not taken, whatever the version."""
    return tuple(sentence for name, value in options.items() if (sentence := _misplaced(name, value)))


def _misplaced(name: str, value: object) -> str:
    given, key = _text(value), BY_NAME.get(name)
    if key is None:
        return (
            f"{_FIELD} has {name}: {given}, and Aerie knows no such key of vLLM's speculative config: correct its name, or leave "
            "it out; docs/reference.md lists those of vLLM 0.26 to 0.33."
        )
    if key.refused:
        return f"{_FIELD} has {name}: {given}: {key.refused}."
    if expected := _expected(key, value):
        return f"{_FIELD} has {name}: {given}: write {expected}."
    return ""


def _expected(key: Key, value: object) -> str:
    """What would be right where the value is not; else nothing."""
    if type(value) not in _TYPES[key.kind]:
        return {"boolean": "true or false", "integer": "a whole number"}.get(key.kind, "a text")
    if key.words and value not in key.words:
        return f"one of {', '.join(key.words)}"
    if key.least is not None and isinstance(value, int) and value < key.least:
        return f"{key.least} or more"
    if key.pattern and isinstance(value, str) and re.fullmatch(key.pattern, value) is None:
        return f"a text that matches {key.pattern}"
    return ""


def faults(config: Mapping[str, Any], version: Version, *, tensor_parallel: int) -> Iterator[Fault]:
    """What an engine with this speculative config refuses at its start, as far as its model runner does not decide."""
    for name, value in config.items():
        key = BY_NAME.get(name)
        if key is None or name in _OF_SETTING or version >= (since := Version.parse(key.since)):
            continue
        yield Fault(
            f"{_named(name, value)}, a key that vLLM {version} does not have", f"use vLLM {since} or newer, or {_out(name)}"
        )
    method = config.get("method")
    if config.get("rejection_sample_method") == "block" and not supports(version, Feature.BLOCK_VERIFICATION):
        newer = Feature.BLOCK_VERIFICATION.since
        out = _out("rejection_sample_method")
        yield Fault(
            f"rejection_sample_method is block, which vLLM {version} does not know", f"use vLLM {newer} or newer, or {out}"
        )
    if _drawn(config) and method in _ALWAYS_GREEDY:
        yield Fault(
            f"{_named('draft_sample_method', 'probabilistic')}, and the method {method} does not draw its drafts",
            _out("draft_sample_method"),
            ends_start=method == "extract_hidden_states",
        )
    for other, why in (
        ("use_local_argmax_reduction", "which leaves no draft logits to draw from"),
        ("use_heterogeneous_vocab", "which vLLM runs with greedy drafts alone"),
    ):
        if _drawn(config) and config.get(other) is True:
            yield Fault(f"{_named('draft_sample_method', 'probabilistic')} and {other} is true, {why}", f"leave {other} out")
    if (
        config.get("enable_adaptive_verification") is True
        and config.get("use_local_argmax_reduction") is True
        and method != "dspark"
    ):
        yield Fault(
            "use_local_argmax_reduction is true, and adaptive verification needs the draft logits that it never makes",
            _out("use_local_argmax_reduction"),
        )
    head = config.get("draft_lm_head_quantization")
    if head is not None and method not in (None, *_HEAD_SHARED):
        what = f"{_named('draft_lm_head_quantization', head)}, which the method {method} does not take"
        yield Fault(what, _out("draft_lm_head_quantization"))
    if (size := config.get("draft_tensor_parallel_size")) not in (None, 1, tensor_parallel):
        yield Fault(
            f"draft_tensor_parallel_size is {size}, and vLLM takes 1 or the target's, {tensor_parallel}", "write one of them"
        )


def faults_of_runner(config: Mapping[str, Any], runner: int, why: str) -> Iterator[Fault]:
    """What model runner V1 or V2 does not do as it is written; `why`: why it is this one."""
    this = f"model runner V{runner} ({why})"
    if runner == 1 and config.get("rejection_sample_method") == "block":
        drawn = " and then drafts greedily" if _drawn(config) else ""
        yield Fault(
            f"rejection_sample_method is block, and {this} verifies token by token all the same{drawn}",
            _out("rejection_sample_method"),
            ends_start=False,
        )
    for name, value in config.items():
        key = BY_NAME.get(name)
        # P-EAGLE and foreign vocabularies choose their runner themselves.
        if key is None or key.runner in (None, runner) or name == "parallel_drafting" or value in (False, None):
            continue
        ends = name == "draft_lm_head_quantization"
        does = "refuses it" if ends else "ignores it"
        yield Fault(f"{_named(name, value)}, and {this} {does}", _out(name), ends_start=ends)


def sentence(fault: Fault) -> str:
    """Return the fault as a sentence about spec.speculation."""
    return f"spec.speculation: {fault.what}: {fault.way_out}."


def _drawn(config: Mapping[str, Any]) -> bool:
    return config.get("draft_sample_method") == "probabilistic"


def _named(name: str, value: object) -> str:
    """Key and value, and for what has a field of its own that field."""
    if name == "draft_sample_method":
        field = next((field for field, word in SAMPLING.items() if word == value), None)
        return f"draftSampling is {field} (draft_sample_method)" if field else f"draft_sample_method is {_text(value)}"
    return f"{name} is {_text(value)}"


def _out(name: str) -> str:
    return f"leave {'draftSampling' if name == 'draft_sample_method' else name} out"


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
