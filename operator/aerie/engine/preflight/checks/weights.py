"""Checks that weight files match their index, and the drafter's tensors match vLLM's EAGLE 3 classes by name, shape and type.

vLLM (models/llama_eagle3.py, load_weights) adds `model.` before every name except lm_head, d2t and t2d, and renames `midlayer.`
to `layers.0.`. With an unknown name the engine fails to start. With a missing name it starts: norms keep their initial ones, and
matrices have random memory, because these classes do not report the tensors that they loaded (model_loader/default_loader.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from aerie.engine.models.checkpoint import Checkpoint, TensorInfo
from aerie.engine.models.config import DrafterModel
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import eagle3_only, register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, info, pass_check, warning

_EXPORT_AGAIN = "export the drafter again"
_MAX_LAYERS = 64
"""Layers of a drafter that are looked for; those of published ones have up to five."""
_TENSOR_NAME_ROOTS = frozenset(
    {"fc", "fc_norm", "input_norm", "midlayer", "layers", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "mask_hidden", "model"}
)


@register_check(
    "C32",
    "weight files match the index",
    rationale="vLLM reads each file of the index completely: a tensor in no file is missing, and of a tensor in two files "
    "it keeps the "
    "last",
    max_severity=Severity.ERROR,
    source="vLLM 0.32 model_executor/model_loader/weight_utils.py, filter_duplicate_safetensors_files, "
    "safetensors_weights_iterator and default_weight_loader",
)
def check_tensor_index(inputs: PreflightInput) -> Iterable[CheckResult]:
    problems = [
        *_check_tensor_files("target", inputs.target),
        *(_check_tensor_files("drafter", inputs.drafter) if inputs.drafter else ()),
    ]
    yield from problems
    if not problems:
        yield pass_check("each tensor is in exactly one file, the one in the index")


def _check_tensor_files(role: str, checkpoint: Checkpoint) -> Iterable[CheckResult]:
    tensors = checkpoint.tensors
    if tensors is None:
        yield info(f"the {role}'s weights are not safetensors: the files could not be compared with the index")
        return
    index = f"by the {role}'s index,"
    missing = [name for name in checkpoint.misindexed_tensors if name not in tensors]
    if missing:
        others = f" (nor {len(missing) - 1} more)" if len(missing) > 1 else ""
        yield error(
            f"{index} '{missing[0]}' is in {checkpoint.misindexed_tensors[missing[0]]}, but no file contains it{others}",
            "download the files again: they or the index are incomplete, or from another export",
        )
    misplaced = [name for name in checkpoint.misindexed_tensors if name in tensors]
    if misplaced:
        name, others = misplaced[0], f"; {len(misplaced) - 1} more are misplaced" if len(misplaced) > 1 else ""
        yield info(
            f"{index} '{name}' is in {checkpoint.misindexed_tensors[name]}, but it is in {tensors[name].file}: vLLM reads both "
            f"files{others}"
        )
    if checkpoint.duplicate_tensors:
        yield _duplicate_tensors_result(role, checkpoint.duplicate_tensors)


def _duplicate_tensors_result(role: str, duplicates: Mapping[str, tuple[TensorInfo, ...]]) -> CheckResult:
    """Return one result for all duplicates; it names one of them, if possible one with copies of different shapes."""
    names = sorted(duplicates, key=lambda name: len({copy.shape for copy in duplicates[name]}) == 1)
    copies = duplicates[names[0]]
    *files, last_file = [copy.file for copy in copies]
    others = f" (and {len(names) - 1} more are duplicates)" if len(names) > 1 else ""
    evidence = (
        f"the {role}'s files {', '.join(files)} and {last_file} {'both' if len(copies) == 2 else 'all'} contain "
        f"'{names[0]}'{others}"
    )
    fix = "remove the file of another export"
    if len({copy.shape for copy in copies}) > 1:
        shapes = " and ".join(str(list(copy.shape)) for copy in copies)
        return error(f"{evidence}, with different shapes: {shapes}", fix)
    return warning(f"{evidence}; vLLM keeps the one that it reads last", fix)


@register_check(
    "C9",
    "weights match the config",
    rationale="a missing fc_norm loads without an error (AL 1.58 instead of 2.51); with an extra one the engine fails to start",
    max_severity=Severity.ERROR,
    source="vLLM models/llama_eagle3.py, load_weights and compute_logits; measured on vLLM 0.32, K = 3",
)
@eagle3_only
def check_weights_match_config(inputs: PreflightInput) -> Iterable[CheckResult]:
    assert inputs.drafter is not None
    tensors, drafter = inputs.drafter.tensors, inputs.drafter_model
    if tensors is None:
        yield info(
            "the drafter's weights are not safetensors: their names, shapes and d2t could not be checked",
            "convert the drafter to safetensors",
        )
        return
    # This check compares the drafter with itself. C26 compares its vocabulary with the target's.
    vocab_size = drafter.vocab_size or inputs.target_model.vocab_size
    problems = [
        *_check_tensor_names(tensors),
        *_check_fc(tensors, drafter),
        *_check_norms(tensors, drafter),
        *_check_layer(tensors, drafter),
        *_check_later_layers(tensors, drafter),
        *_check_lm_head(tensors, drafter, vocab_size),
        *_check_d2t(tensors, drafter, inputs.drafter.d2t_offsets, vocab_size),
    ]
    yield from problems
    if not problems:
        yield pass_check(f"{len(tensors)} tensors have the names and shapes that vLLM expects")


def _check_tensor_names(tensors: Mapping[str, TensorInfo]) -> Iterable[CheckResult]:
    prefixed = sorted(name for name in tensors if name.startswith("model."))
    if prefixed:
        yield error(
            f"names of {len(prefixed)} tensors begin with 'model.' (the first is {prefixed[0]}), and vLLM adds another 'model.'",
            "export the drafter without that prefix",
        )
    if any(name.startswith("aux_norm_") for name in tensors):
        yield error(
            "there are tensors aux_norm_*, an older name in SGLang that vLLM does not support",
            "rename aux_norm_low, aux_norm_mid and aux_norm_high to fc_norm.0, fc_norm.1 and fc_norm.2",
        )
    elif unknown := sorted(name for name in tensors if name.partition(".")[0] not in _TENSOR_NAME_ROOTS and name not in prefixed):
        yield error(f"vLLM's EAGLE 3 classes have no tensor {unknown[0]}: the engine fails to start", _EXPORT_AGAIN)


def _check_fc(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    if not drafter.uses_aux_hidden_states:
        return
    if "fc.weight" not in tensors:
        if not drafter.is_quantized:
            yield error("fc.weight is missing, which combines the target's hidden states", _EXPORT_AGAIN)
        return
    if drafter.hidden_size and drafter.target_hidden_size and not drafter.is_quantized:
        expected = (drafter.hidden_size, drafter.expected_aux_hidden_states * drafter.target_hidden_size)
        meaning = f"hidden size x {drafter.expected_aux_hidden_states} hidden states of {drafter.target_hidden_size}"
        yield from _check_shape(
            tensors, "fc.weight", expected, meaning, "correct hidden_size, target_hidden_size or the auxiliary layers"
        )


def _check_norms(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    present = sorted(name for name in tensors if name.startswith("fc_norm."))
    required = [f"fc_norm.{index}.weight" for index in range(drafter.expected_aux_hidden_states)] if drafter.fc_norm else []
    missing = [name for name in required if name not in tensors]
    if missing and not present:
        yield error(
            "fc_norm is true, but there is no tensor fc_norm.N.weight: these are EAGLE 3 weights with a 3.1 config; "
            "vLLM loads them without an error and uses norms of ones (AL 1.58 instead of 2.51 at K = 3)",
            "set fc_norm and norm_output to false in the drafter's config.json, or use the weights of that config",
        )
    elif missing:
        yield error(
            f"fc_norm is true, but of its {drafter.expected_aux_hidden_states} norms {', '.join(missing)} is missing",
            _EXPORT_AGAIN,
        )
    elif present and not drafter.fc_norm:
        yield error(
            f"there is a tensor {present[0]}, but fc_norm is not true in the drafter's config: the engine loads the "
            "target and then "
            'fails with "no module or parameter named fc_norm"',
            "set fc_norm: true and norm_output: true in its config.json",
        )
    elif surplus := [name for name in present if name not in required]:
        yield error(
            f"{surplus[0]} is an extra norm: there are {drafter.expected_aux_hidden_states} auxiliary hidden states",
            "correct eagle_aux_hidden_state_layer_ids and num_aux_hidden_states",
        )
    for name in present if drafter.target_hidden_size else ():
        yield from _check_shape(tensors, name, (drafter.target_hidden_size or 0,), "the target's hidden size", _EXPORT_AGAIN)
    if drafter.norm_before_fc != ("input_norm.weight" in tensors):
        state, article = ("true", "no") if drafter.norm_before_fc else ("not true", "a")
        yield error(
            f"norm_before_fc is {state}, but there is {article} tensor input_norm.weight; vLLM loads the drafter nevertheless",
            "set norm_before_fc as the drafter was trained",
        )
    if "norm.weight" not in tensors:
        yield error("norm.weight, the norm before lm_head, is missing", _EXPORT_AGAIN)


def _check_layer(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    """Check the first layer. Its attention reads embedding and hidden state side by side: 2 x hidden size in."""
    names = {re.sub(r"^(midlayer|layers\.0)\.", "", name) for name in tensors if re.match(r"(midlayer|layers\.0)\.", name)}
    if not names:
        yield error("there is no layer (neither midlayer.* nor layers.0.*)", _EXPORT_AGAIN)
        return
    # The tensors of a quantised matrix are not called .weight.
    parts = {name.rpartition(".")[0] for name in names}
    if missing := [part for part in _required_layer_parts(drafter, parts) if part not in parts]:
        description = " and ".join(missing)
        yield error(f"the layer has no {description}: vLLM would use uninitialised memory", _EXPORT_AGAIN)
    if drafter.family == "llama" and (surplus := parts & {"self_attn.q_norm", "self_attn.k_norm"}):
        yield error(
            f"the layer has {min(surplus)}, which only vLLM's Qwen3 class supports, and the class is {drafter.architecture}",
            "set architectures in its config.json to Eagle3Qwen3ForCausalLM",
        )
    yield from _check_attention_shapes(tensors, drafter)


def _check_later_layers(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    """Check the layers after the first, which read the state of the layer before, without the embedding."""
    count = drafter.attention.layer_count
    if count is None:
        return
    parts: dict[int, set[str]] = {number: set() for number in range(1, min(count, _MAX_LAYERS))}
    for name in tensors:
        if (match := re.match(r"layers\.(\d{1,9})\.(.*)", name)) and int(match[1]) > 0:
            parts.setdefault(int(match[1]), set()).add(match[2].rpartition(".")[0])
    fix = "set num_hidden_layers to the number of trained layers, or export the drafter again"
    for number, actual in sorted(parts.items()):
        if number >= count:
            yield error(f"num_hidden_layers is {count}, and there are tensors layers.{number}.*: the engine fails to start", fix)
            return
        missing = [part for part in _required_layer_parts(drafter, actual) if part not in actual and part != "hidden_norm"]
        if missing:
            absent = f"is no layers.{number}.{missing[0]}" if actual else f"are no tensors layers.{number}.*"
            yield error(f"num_hidden_layers is {count}, and there {absent}: vLLM would use uninitialised memory", fix)
            return
        if drafter.hidden_size and not drafter.is_quantized and drafter.family != "mla":
            name = f"layers.{number}.self_attn.q_proj.weight"
            if name in tensors and tensors[name].shape[1:] != (drafter.hidden_size,):
                shape = list(tensors[name].shape)
                yield error(
                    f"{name} has shape {shape}, and needs the hidden size, {drafter.hidden_size}, as input", _EXPORT_AGAIN
                )


def _check_attention_shapes(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    attention = drafter.attention
    if drafter.is_quantized or drafter.hidden_size is None:
        return
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    input_size = 2 * drafter.hidden_size
    if drafter.family != "mla" and attention.heads and attention.kv_heads and attention.head_dim:
        heads = {"q": attention.heads, "k": attention.kv_heads, "v": attention.kv_heads}
        for letter, count in heads.items():
            name = f"{prefix}.self_attn.{letter}_proj.weight"
            rows = count * attention.head_dim
            if name in tensors:
                meaning = f"{count} heads of {attention.head_dim} x twice the hidden size"
                yield from _check_shape(
                    tensors, name, (rows, input_size), meaning, "correct the heads, head_dim or hidden_size in its config"
                )
    elif drafter.family == "mla":
        for name in (f"{prefix}.self_attn.q_a_proj.weight", f"{prefix}.self_attn.kv_a_proj_with_mqa.weight"):
            if name in tensors and tensors[name].shape[1:] != (input_size,):
                shape = list(tensors[name].shape)
                yield error(f"{name} has shape {shape}, and needs twice the hidden size, {input_size}, as input", _EXPORT_AGAIN)


def _required_layer_parts(drafter: DrafterModel, actual_parts: Collection[str]) -> list[str]:
    """Return the parts that the layer must have. Matrices that vLLM fuses may already be fused in the checkpoint."""
    parts = ["input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"]
    if "mlp.gate_up_proj" not in actual_parts:
        parts += ["mlp.gate_proj", "mlp.up_proj"]
    if drafter.family == "mla":
        parts += ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj"]
        # Queries without a rank are not compressed.
        low_rank = ["self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj"]
        return parts + (["self_attn.q_proj"] if "self_attn.q_proj" in actual_parts else low_rank)
    if "self_attn.qkv_proj" not in actual_parts:
        parts += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    return parts + (["self_attn.q_norm", "self_attn.k_norm"] if drafter.family == "qwen3" else [])


def _check_lm_head(tensors: Mapping[str, TensorInfo], drafter: DrafterModel, vocab_size: int | None) -> Iterable[CheckResult]:
    if "lm_head.weight" in tensors:
        if drafter.draft_vocab_size and drafter.hidden_size and not drafter.is_quantized:
            expected = (drafter.draft_vocab_size, drafter.hidden_size)
            fix = "correct draft_vocab_size or hidden_size in its config"
            yield from _check_shape(tensors, "lm_head.weight", expected, "draft vocabulary x hidden size", fix)
    elif drafter.draft_vocab_size != vocab_size and not drafter.is_quantized:
        yield error(
            f"lm_head.weight is missing, and the target's does not fit: it has {vocab_size} tokens and the drafter "
            f"{drafter.draft_vocab_size}",
            _EXPORT_AGAIN,
        )


def _check_d2t(
    tensors: Mapping[str, TensorInfo], drafter: DrafterModel, offsets: tuple[int, ...] | None, vocab_size: int | None
) -> Iterable[CheckResult]:
    """Check d2t, where target id = draft id + d2t[draft id]."""
    draft_vocab_size = drafter.draft_vocab_size
    if draft_vocab_size is None or vocab_size is None:
        return
    if "d2t" not in tensors:
        if draft_vocab_size != vocab_size:
            yield error(
                f"d2t is missing, but the drafter has {draft_vocab_size} tokens and the target {vocab_size}: every "
                "draft token id would be wrong",
                _EXPORT_AGAIN,
            )
        return
    if offsets is None:
        yield info("the values of d2t could not be read: its range was not checked")
        return
    if len(offsets) != draft_vocab_size:
        evidence = f"d2t has {len(offsets)} entries, and draft_vocab_size is {draft_vocab_size}"
        yield error(evidence, "correct draft_vocab_size in its config")
        return
    target_ids = [draft_id + offset for draft_id, offset in enumerate(offsets)]
    outside = next((draft_id for draft_id, target_id in enumerate(target_ids) if not 0 <= target_id < vocab_size), None)
    draft_id_by_target: dict[int, int] = {}
    duplicate = next(
        (
            draft_id
            for draft_id, target_id in enumerate(target_ids)
            if draft_id_by_target.setdefault(target_id, draft_id) != draft_id
        ),
        None,
    )
    if outside is not None:
        are_target_ids = all(0 <= value < vocab_size for value in offsets) and all(a < b for a, b in itertools.pairwise(offsets))
        hint = "; d2t seems to contain target ids, but vLLM expects offsets" if are_target_ids else ""
        yield error(
            f"d2t maps draft id {outside} to {target_ids[outside]}, but the target has ids 0 to {vocab_size - 1}{hint}",
            "set d2t[i] = target id - i" if are_target_ids else "use the drafter that was trained for this target's vocabulary",
        )
    elif duplicate is not None:
        target_id = target_ids[duplicate]
        yield error(
            f"d2t maps draft ids {draft_id_by_target[target_id]} and {duplicate} both to {target_id}: vLLM keeps only one of "
            "their logits",
            _EXPORT_AGAIN,
        )


def _check_shape(
    tensors: Mapping[str, TensorInfo], name: str, expected: tuple[int, ...], meaning: str, fix: str
) -> Iterable[CheckResult]:
    shape = tensors[name].shape
    if shape != expected:
        yield error(f"{name} has shape {list(shape)}, but by the config it is {list(expected)} ({meaning})", fix)
