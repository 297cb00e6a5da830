"""Whether the weight files hold what their index says, and the drafter's tensors are those that vLLM's EAGLE 3 classes will look
for, by name, shape and type.

vLLM (models/llama_eagle3.py, load_weights) puts `model.` before every name but lm_head, d2t and t2d, and renames `midlayer.` to
`layers.0.`. A name that it does not know ends the start; one that is missing does not: norms keep their initial ones, and
matrices what their memory held, because these classes do not report what they loaded (model_loader/default_loader.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from aerie.engine.models.checkpoint import Checkpoint, TensorInfo
from aerie.engine.models.config import DrafterModel
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import eagle3_only, register_check
from aerie.engine.preflight.report import CheckResult, Severity, note, pass_check, refuse, warn

_EXPORT_AGAIN = "export the drafter again"
_TENSOR_NAME_ROOTS = frozenset(
    {"fc", "fc_norm", "input_norm", "midlayer", "layers", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "mask_hidden", "model"}
)


@register_check(
    "C32",
    "tensors are where the index says, once",
    rationale="vLLM reads each file of the index whole: a tensor that none has is missing, and of one in two files it keeps the last",
    max_severity=Severity.REFUSE,
    source="vLLM 0.32 model_executor/model_loader/weight_utils.py, filter_duplicate_safetensors_files, "
    "safetensors_weights_iterator and default_weight_loader",
)
def check_tensor_index(inputs: PreflightInput) -> Iterable[CheckResult]:
    faults = [
        *_check_tensor_files("target", inputs.target),
        *(_check_tensor_files("drafter", inputs.drafter) if inputs.drafter else ()),
    ]
    yield from faults
    if not faults:
        yield pass_check("each tensor is in one file, the one that an index names")


def _check_tensor_files(whose: str, checkpoint: Checkpoint) -> Iterable[CheckResult]:
    tensors = checkpoint.tensors
    if tensors is None:
        yield note(f"the {whose}'s weights are not safetensors: which file holds what could not be checked")
        return
    says = f"the {whose}'s index says that"
    absent = [name for name in checkpoint.misindexed_tensors if name not in tensors]
    if absent:
        more = f" (nor {len(absent) - 1} more)" if len(absent) > 1 else ""
        yield refuse(
            f"{says} '{absent[0]}' is in {checkpoint.misindexed_tensors[absent[0]]}, and no file has it{more}",
            "download it again: files or index are incomplete, or of another export",
        )
    elsewhere = [name for name in checkpoint.misindexed_tensors if name in tensors]
    if elsewhere:
        name, more = elsewhere[0], f"; {len(elsewhere) - 1} more are elsewhere too" if len(elsewhere) > 1 else ""
        yield note(
            f"{says} '{name}' is in {checkpoint.misindexed_tensors[name]}, and it is in {tensors[name].file}: vLLM reads both whole{more}"
        )
    # Those of several shapes go first: one is named for all.
    doubled = sorted(
        checkpoint.duplicate_tensors, key=lambda name: len({copy.shape for copy in checkpoint.duplicate_tensors[name]}) == 1
    )
    if doubled:
        copies = checkpoint.duplicate_tensors[doubled[0]]
        *files, last = [copy.file for copy in copies]
        more = f" (and files share {len(doubled) - 1} more)" if len(doubled) > 1 else ""
        held = (
            f"the {whose}'s files {', '.join(files)} and {last} {'both' if len(copies) == 2 else 'all'} hold '{doubled[0]}'{more}"
        )
        way_out = "remove the file that is left over from another export"
        if len({copy.shape for copy in copies}) > 1:
            shapes = " and ".join(str(list(copy.shape)) for copy in copies)
            yield refuse(f"{held}, in the shapes {shapes}, of which only one can be right", way_out)
        else:
            yield warn(f"{held}, and vLLM keeps what it reads last", way_out)


@register_check(
    "C9",
    "weights are those the config promises",
    rationale="a missing fc_norm loads in silence (AL 1.58 instead of 2.51), a surplus one ends the start after a minute",
    max_severity=Severity.REFUSE,
    source="vLLM models/llama_eagle3.py, load_weights and compute_logits; measured on vLLM 0.32, K = 3",
)
@eagle3_only
def check_weights_match_config(inputs: PreflightInput) -> Iterable[CheckResult]:
    assert inputs.drafter is not None
    tensors, drafter = inputs.drafter.tensors, inputs.drafter_model
    if tensors is None:
        yield note(
            "the drafter's weights are not safetensors: their names, shapes and d2t could not be checked",
            "convert the drafter to safetensors",
        )
        return
    # The drafter against itself: whether its vocabulary is the target's is another check.
    vocab = drafter.vocab_size or inputs.target_model.vocab_size
    faults = [
        *_check_tensor_names(tensors),
        *_check_fc(tensors, drafter),
        *_check_norms(tensors, drafter),
        *_check_layer(tensors, drafter),
        *_check_lm_head(tensors, drafter, vocab),
        *_check_d2t(tensors, drafter, inputs.drafter.d2t_offsets, vocab),
    ]
    yield from faults
    if not faults:
        yield pass_check(f"{len(tensors)} tensors have the names and shapes that vLLM looks for")


def _check_tensor_names(tensors: Mapping[str, TensorInfo]) -> Iterable[CheckResult]:
    prefixed = sorted(name for name in tensors if name.startswith("model."))
    if prefixed:
        yield refuse(
            f"{len(prefixed)} tensors begin with 'model.' (the first is {prefixed[0]}), and vLLM puts another 'model.' "
            "before them",
            "export the drafter without that prefix",
        )
    if any(name.startswith("aux_norm_") for name in tensors):
        yield refuse(
            "there are tensors aux_norm_*, an older name of SGLang's that vLLM does not know",
            "rename aux_norm_low, aux_norm_mid and aux_norm_high to fc_norm.0, fc_norm.1 and fc_norm.2",
        )
    elif unknown := sorted(name for name in tensors if name.partition(".")[0] not in _TENSOR_NAME_ROOTS and name not in prefixed):
        yield refuse(f"vLLM's EAGLE 3 classes have nothing called {unknown[0]}, and the start ends there", _EXPORT_AGAIN)


def _check_fc(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    if not drafter.uses_aux_hidden_states:
        return
    if "fc.weight" not in tensors:
        if not drafter.is_quantized:
            yield refuse("fc.weight is missing, which joins the target's hidden states", _EXPORT_AGAIN)
        return
    if drafter.hidden_size and drafter.target_hidden_size and not drafter.is_quantized:
        expected = (drafter.hidden_size, drafter.expected_aux_hidden_states * drafter.target_hidden_size)
        meaning = f"hidden size x {drafter.expected_aux_hidden_states} hidden states of {drafter.target_hidden_size}"
        yield from _check_shape(
            tensors, "fc.weight", expected, meaning, "correct hidden_size, target_hidden_size or the auxiliary layers"
        )


def _check_norms(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    present = sorted(name for name in tensors if name.startswith("fc_norm."))
    needed = [f"fc_norm.{index}.weight" for index in range(drafter.expected_aux_hidden_states)] if drafter.fc_norm else []
    missing = [name for name in needed if name not in tensors]
    if missing and not present:
        yield refuse(
            "fc_norm is true, and there is no tensor fc_norm.N.weight: these are EAGLE 3 weights with a 3.1 config; "
            "vLLM loads them "
            "without an error and norms with ones (AL 1.58 instead of 2.51 at K = 3)",
            "set fc_norm and norm_output to false in the drafter's config.json, or use the weights that belong to it",
        )
    elif missing:
        yield refuse(
            f"fc_norm is true, and {', '.join(missing)} is missing of {drafter.expected_aux_hidden_states}", _EXPORT_AGAIN
        )
    elif present and not drafter.fc_norm:
        yield refuse(
            f"there are weights {present[0]} and fc_norm is not true in the drafter's config: vLLM's start ends with "
            '"no module or '
            'parameter named fc_norm" once the target is loaded',
            "write fc_norm: true and norm_output: true into its config.json",
        )
    elif surplus := [name for name in present if name not in needed]:
        yield refuse(
            f"{surplus[0]} is one norm too many for {drafter.expected_aux_hidden_states} auxiliary hidden states",
            "correct eagle_aux_hidden_state_layer_ids and num_aux_hidden_states",
        )
    for name in present if drafter.target_hidden_size else ():
        yield from _check_shape(tensors, name, (drafter.target_hidden_size or 0,), "the target's hidden size", _EXPORT_AGAIN)
    if drafter.norm_before_fc != ("input_norm.weight" in tensors):
        state, has = ("true", "no") if drafter.norm_before_fc else ("not true", "a")
        yield refuse(
            f"norm_before_fc is {state} and there is {has} tensor input_norm.weight; vLLM loads it all the same",
            "make the config say what the drafter was trained with",
        )
    if "norm.weight" not in tensors:
        yield refuse("norm.weight is missing, the norm before lm_head", _EXPORT_AGAIN)


def _check_layer(tensors: Mapping[str, TensorInfo], drafter: DrafterModel) -> Iterable[CheckResult]:
    """The first layer, whose attention reads embedding and hidden state side by side: 2 x hidden size in."""
    found = {re.sub(r"^(midlayer|layers\.0)\.", "", name) for name in tensors if re.match(r"(midlayer|layers\.0)\.", name)}
    if not found:
        yield refuse("there is no layer: neither midlayer.* nor layers.0.*", _EXPORT_AGAIN)
        return
    # A quantised matrix has other names than .weight.
    parts = {name.rpartition(".")[0] for name in found}
    if missing := [part for part in _required_layer_parts(drafter, parts) if part not in parts]:
        named = " and ".join(missing)
        yield refuse(f"the layer has no {named}, and vLLM would use what its memory happens to hold", _EXPORT_AGAIN)
    if drafter.family == "llama" and (surplus := parts & {"self_attn.q_norm", "self_attn.k_norm"}):
        yield refuse(
            f"the layer has {min(surplus)}, which only vLLM's Qwen3 class knows, and the class is {drafter.architecture}",
            "write Eagle3Qwen3ForCausalLM into architectures of its config.json",
        )
    attention = drafter.attention
    if drafter.is_quantized or drafter.hidden_size is None:
        return
    first = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    double = 2 * drafter.hidden_size
    if drafter.family != "mla" and attention.heads and attention.kv_heads and attention.head_dim:
        heads = {"q": attention.heads, "k": attention.kv_heads, "v": attention.kv_heads}
        for letter, count in heads.items():
            name = f"{first}.self_attn.{letter}_proj.weight"
            rows = count * attention.head_dim
            if name in tensors:
                meaning = f"{count} heads of {attention.head_dim} x twice the hidden size"
                yield from _check_shape(
                    tensors, name, (rows, double), meaning, "correct the heads, head_dim or hidden_size in its config"
                )
    elif drafter.family == "mla":
        for name in (f"{first}.self_attn.q_a_proj.weight", f"{first}.self_attn.kv_a_proj_with_mqa.weight"):
            if name in tensors and tensors[name].shape[1:] != (double,):
                shape = list(tensors[name].shape)
                yield refuse(f"{name} has shape {shape}, and must read twice the hidden size, {double}", _EXPORT_AGAIN)


def _required_layer_parts(drafter: DrafterModel, found: Collection[str]) -> list[str]:
    """What the layer must have. Matrices that vLLM fuses may come fused."""
    parts = ["input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"]
    if "mlp.gate_up_proj" not in found:
        parts += ["mlp.gate_proj", "mlp.up_proj"]
    if drafter.family == "mla":
        parts += ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj"]
        # Without a rank the queries are not compressed.
        low_rank = ["self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj"]
        return parts + (["self_attn.q_proj"] if "self_attn.q_proj" in found else low_rank)
    if "self_attn.qkv_proj" not in found:
        parts += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    return parts + (["self_attn.q_norm", "self_attn.k_norm"] if drafter.family == "qwen3" else [])


def _check_lm_head(tensors: Mapping[str, TensorInfo], drafter: DrafterModel, vocab: int | None) -> Iterable[CheckResult]:
    if "lm_head.weight" in tensors:
        if drafter.draft_vocab_size and drafter.hidden_size and not drafter.is_quantized:
            expected = (drafter.draft_vocab_size, drafter.hidden_size)
            way_out = "correct draft_vocab_size or hidden_size in its config"
            yield from _check_shape(tensors, "lm_head.weight", expected, "draft vocabulary x hidden size", way_out)
    elif drafter.draft_vocab_size != vocab and not drafter.is_quantized:
        yield refuse(
            f"lm_head.weight is missing, and the target's cannot stand in: it has {vocab} tokens and the drafter "
            f"{drafter.draft_vocab_size}",
            _EXPORT_AGAIN,
        )


def _check_d2t(
    tensors: Mapping[str, TensorInfo], drafter: DrafterModel, offsets: tuple[int, ...] | None, vocab: int | None
) -> Iterable[CheckResult]:
    """d2t: target id = draft id + d2t[draft id]."""
    size = drafter.draft_vocab_size
    if size is None or vocab is None:
        return
    if "d2t" not in tensors:
        if size != vocab:
            yield refuse(
                f"d2t is missing, and the drafter has {size} tokens where the target has {vocab}: every drafted id "
                "would be wrong",
                _EXPORT_AGAIN,
            )
        return
    if offsets is None:
        yield note("the values of d2t could not be read, so that its range was not checked")
        return
    if len(offsets) != size:
        yield refuse(f"d2t has {len(offsets)} entries, and draft_vocab_size is {size}", "correct draft_vocab_size in its config")
        return
    ids = [draft + offset for draft, offset in enumerate(offsets)]
    outside = next((draft for draft, target in enumerate(ids) if not 0 <= target < vocab), None)
    first: dict[int, int] = {}
    doubled = next((draft for draft, target in enumerate(ids) if first.setdefault(target, draft) != draft), None)
    if outside is not None:
        absolute = all(0 <= value < vocab for value in offsets) and all(a < b for a, b in itertools.pairwise(offsets))
        hint = "; it looks like target ids, and vLLM expects offsets" if absolute else ""
        yield refuse(
            f"d2t sends draft id {outside} to {ids[outside]}, and the target has ids 0 to {vocab - 1}{hint}",
            "write d2t[i] = target id - i" if absolute else "use the drafter that was trained for this target's vocabulary",
        )
    elif doubled is not None:
        yield refuse(
            f"d2t sends draft ids {first[ids[doubled]]} and {doubled} both to {ids[doubled]}, and vLLM keeps the logit of one",
            _EXPORT_AGAIN,
        )


def _check_shape(
    tensors: Mapping[str, TensorInfo], name: str, expected: tuple[int, ...], meaning: str, way_out: str
) -> Iterable[CheckResult]:
    shape = tensors[name].shape
    if shape != expected:
        yield refuse(f"{name} has shape {list(shape)}, and the config promises {list(expected)} ({meaning})", way_out)
