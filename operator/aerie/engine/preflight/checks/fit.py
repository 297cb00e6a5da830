"""Checks that the drafter belongs to this target: sizes, vocabulary, and the target's layers that it reads.

vLLM gives the drafter hidden states of some of the target's layers. Id k is the state that enters layer k, so k = L is the output
of the last of L layers. vLLM sorts the ids and drops duplicates, so fc_norm.0 belongs to the lowest id (vLLM
models/interfaces.py, EagleModelMixin).
"""

from __future__ import annotations

from collections.abc import Iterable

from aerie.engine.models.layer_ids import LayerNumbering
from aerie.engine.models.supported_targets import Eagle3Support, first_supported_version, lookup_eagle3_support
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import eagle3_only, register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, info, pass_check, skip, warning

_USE_MATCHING_DRAFTER = "use a drafter that was trained for this target (see `aerie catalog`)"


@register_check(
    "C25",
    "hidden size matches the target",
    rationale="the target's hidden states do not fit the drafter's fc: the engine fails to start with a shape error",
    max_severity=Severity.ERROR,
    source="vLLM models/llama_eagle3.py, combine_hidden_states",
)
@eagle3_only
def check_hidden_size(inputs: PreflightInput) -> Iterable[CheckResult]:
    expected, actual = inputs.target_model.hidden_size, inputs.drafter_model.target_hidden_size
    if expected is None or actual is None:
        model = "target" if expected is None else "drafter"
        yield info(f"the {model}'s config.json has no hidden_size: the sizes could not be compared")
    elif expected != actual:
        yield error(f"the drafter expects hidden size {actual}, and the target's is {expected}", _USE_MATCHING_DRAFTER)
    else:
        yield pass_check(f"both {expected}")


@register_check(
    "C26",
    "vocabulary matches the target",
    rationale="the drafter proposes ids that mean other tokens to the target: no draft token is accepted",
    max_severity=Severity.ERROR,
    source="vLLM models/llama_eagle3.py, compute_logits",
)
@eagle3_only
def check_vocabulary(inputs: PreflightInput) -> Iterable[CheckResult]:
    expected, drafter = inputs.target_model.vocab_size, inputs.drafter_model
    if expected is None or drafter.vocab_size is None:
        model = "target" if expected is None else "drafter"
        yield info(f"the {model}'s config.json has no vocab_size: the vocabularies could not be compared")
    elif drafter.vocab_size != expected:
        yield error(f"the drafter's vocab_size is {drafter.vocab_size}, and the target's is {expected}", _USE_MATCHING_DRAFTER)
    elif drafter.draft_vocab_size and drafter.draft_vocab_size > expected:
        yield error(
            f"draft_vocab_size is {drafter.draft_vocab_size}, and the target has {expected} tokens",
            "correct draft_vocab_size in the drafter's config.json",
        )
    else:
        draft_vocab_size = drafter.draft_vocab_size
        subset = f", of which it drafts {draft_vocab_size}" if draft_vocab_size != expected else ""
        yield pass_check(f"both {expected}{subset} (sizes only: configs do not show whether the tokenizers are equal)")


@register_check(
    "C2",
    "auxiliary layers match the training",
    rationale="trainers number layers by output and vLLM by input, and model runner V2 ignores ids in eagle_config: read one "
    "layer "
    "off, a drafter loses acceptance without an error",
    max_severity=Severity.ERROR,
    source="vLLM v1/worker/gpu/spec_decode/eagle/eagle3_utils.py (V2), v1/worker/gpu_model_runner.py (V1), 0.22 to 0.33; "
    "pull request 43671; SGLang pull request 25454",
)
@eagle3_only
def check_effective_layers(inputs: PreflightInput) -> Iterable[CheckResult]:
    drafter, declared = inputs.drafter_model, inputs.declared_aux_layer_ids
    top, nested = drafter.top_level_aux_layer_ids, drafter.nested_aux_layer_ids
    if not drafter.uses_aux_hidden_states or declared is None:
        yield skip("the drafter's config has no layer ids: see C4")
        return
    numbering, ids = declared
    if top is not None and nested is not None and set(nested) not in (set(top), {layer - 1 for layer in top}):
        yield warning(
            f"{_LAYER_IDS_KEY} is {list(top)} at the top level and {list(nested)} in eagle_config; vLLM uses the first",
            "set both to the ids that the drafter was trained with",
        )
        return
    # A converted drafter has vLLM's ids at the top level and the trainer's in eagle_config.
    is_converted = top is not None and nested is not None and set(nested) == {layer - 1 for layer in top}
    trained = ids if is_converted else _trained_layer_ids(numbering, ids)
    declaration = f"{list(ids)} {'at the top level' if top is not None else 'only inside eagle_config'}"
    effective_ids = inputs.effective_aux_layer_ids
    runner, reason = inputs.model_runner
    reader = "vLLM" if top is not None else f"model runner V{runner} ({reason})"
    if effective_ids is None:
        yield info(
            f"{declaration}, which {reader} ignores there; the target's config.json has no num_hidden_layers, so that "
            "the layers that it reads instead could not be determined",
            _layer_ids_fix(numbering, ids),
        )
    elif trained is not None and set(effective_ids) == set(trained):
        yield _matching_layers_result(inputs, declaration, numbering, ids, trained)
    elif numbering is LayerNumbering.OUTPUTS and set(effective_ids) == set(ids):
        yield warning(
            f"{declaration}, apparently numbered by output; in vLLM's numbering they are {list(trained or ())}, and "
            f"{reader} reads {list(effective_ids)}, one layer too early",
            _layer_ids_fix(numbering, ids),
        )
    elif set(effective_ids) == set(ids):
        yield info(f"{declaration}, used unchanged; whether they are numbered by input, as in vLLM, could not be checked")
    else:
        yield error(
            f"{declaration}, which {reader} ignores there: it reads {list(effective_ids)}", _layer_ids_fix(numbering, ids)
        )


_LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def _trained_layer_ids(numbering: LayerNumbering | None, ids: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if numbering is None else numbering.to_vllm(ids)


def _layer_ids_fix(numbering: LayerNumbering | None, ids: tuple[int, ...]) -> str:
    """Return the fix after which every engine reads the layers of the training."""
    if numbering is LayerNumbering.INPUTS:
        return f"copy {_LAYER_IDS_KEY}: {list(ids)} to the top level of the drafter's config.json"
    shifted = list(LayerNumbering.OUTPUTS.to_vllm(ids))
    if numbering is LayerNumbering.OUTPUTS:
        return f"convert the drafter with `aerie-drafter convert`, which writes {_LAYER_IDS_KEY}: {shifted} to the top level"
    return (
        f"convert the drafter with `aerie-drafter convert --layer-ids inputs` if vLLM's ids are {list(ids)}, or with "
        f"`--layer-ids outputs` if they are {shifted}"
    )


def _matching_layers_result(
    inputs: PreflightInput,
    declaration: str,
    numbering: LayerNumbering | None,
    ids: tuple[int, ...],
    trained: tuple[int, ...],
) -> CheckResult:
    """Return the result if the engine reads the layers of the training: a pass, unless another model runner would not."""
    drafter, (runner, reason) = inputs.drafter_model, inputs.model_runner
    if drafter.top_level_aux_layer_ids is not None:
        return pass_check(declaration)
    default = inputs.target_model.default_aux_layer_ids
    if default is not None and set(trained) == set(default):
        if numbering is LayerNumbering.OUTPUTS:
            return info(
                f"{declaration}, numbered by output; in vLLM's numbering they are {list(trained)}, its default, and model runner "
                f"V{runner} ({reason}) reads the default because it ignores them there",
                f"{_layer_ids_fix(numbering, ids)}, so that the result does not depend on the model runner",
            )
        return pass_check(f"{declaration}; they are the default, so that both model runners read the same layers")
    default_text = f"{list(default)}" if default else "its default"
    return warning(
        f"{declaration}; model runner V{runner} ({reason}) reads them there, the other model runner reads {default_text}",
        _layer_ids_fix(numbering, ids),
    )


@register_check(
    "C3",
    "number of auxiliary layers",
    rationale="vLLM sizes fc and fc_norm by it, and the Llama and DeepSeek classes count only ids inside eagle_config, else "
    "assume 3",
    max_severity=Severity.ERROR,
    source="vLLM models/llama_eagle3.py, deepseek_eagle3.py, qwen3_eagle3.py; vLLM issue 54526; speculators issue 1065",
)
@eagle3_only
def check_aux_layer_count(inputs: PreflightInput) -> Iterable[CheckResult]:
    drafter = inputs.drafter_model
    if not drafter.uses_aux_hidden_states:
        yield skip("the drafter uses no auxiliary hidden states")
        return
    layer_ids = drafter.aux_layer_ids
    count = len(set(layer_ids)) if layer_ids else 3
    if drafter.expected_aux_hidden_states == count:
        yield pass_check(f"vLLM sizes fc for {count} hidden states, as many as the drafter has")
        return
    reason = (
        f"num_aux_hidden_states is {drafter.num_aux_hidden_states}"
        if drafter.num_aux_hidden_states
        else "num_aux_hidden_states is missing"
    )
    parent = "transformer_layer_config of " if drafter.format == "speculators" else ""
    source = f"the config has {len(layer_ids)} layer ids" if layer_ids else "the config has no layer ids, which means 3"
    yield error(
        f"{source}, but {reason}, so vLLM sizes fc for {drafter.expected_aux_hidden_states}",
        f"set num_aux_hidden_states: {count} in {parent}the drafter's config.json",
    )


@register_check(
    "C38",
    "attention of the drafter's layers",
    rationale="model runner V1 fails to start if only some layers have a sliding window; the DeepSeek class ignores a window",
    max_severity=Severity.ERROR,
    source="vLLM 0.32 v1/spec_decode/llm_base_proposer.py, validate_same_kv_cache_group; models/deepseek_eagle3.py",
)
@eagle3_only
def check_layer_kinds(inputs: PreflightInput) -> Iterable[CheckResult]:
    attention, family = inputs.drafter_model.attention, inputs.drafter_model.family
    count, sliding = attention.layer_count or 1, attention.sliding_layer_count
    if family == "mla" and sliding:
        yield warning(
            f"the drafter's sliding_window is {attention.sliding_window}, which vLLM's DeepSeek class ignores: past it, the "
            "drafter sees more than in its training",
            "train it without a window",
        )
    elif 0 < sliding < count:
        evidence = f"{sliding} of the drafter's {count} layers have a sliding window"
        runner, reason = inputs.model_runner
        if runner == 1:
            fix = "use a drafter whose layers are all of one kind"
            yield error(f"{evidence}, which model runner V1 ({reason}) rejects at the start", fix)
        else:
            yield info(f"{evidence}, which only model runner V2 ({reason}) accepts")
    else:
        yield pass_check(f"{count} of one kind" if count > 1 else "one layer")


@register_check(
    "C4",
    "auxiliary layer ids",
    rationale="without ids vLLM reads its default layers: a drafter trained on other layers reached AL 1.04",
    max_severity=Severity.ERROR,
    source="vLLM issue 50170; models/interfaces.py",
)
@eagle3_only
def check_declared_layers(inputs: PreflightInput) -> Iterable[CheckResult]:
    drafter, layer_count = inputs.drafter_model, inputs.target_model.layer_count
    layer_ids = drafter.aux_layer_ids
    if not drafter.uses_aux_hidden_states:
        yield skip("the drafter uses no auxiliary hidden states")
    elif layer_ids is None:
        effective_ids = inputs.effective_aux_layer_ids
        yield warning(
            f"the drafter's config has no eagle_aux_hidden_state_layer_ids, so that vLLM reads "
            f"{list(effective_ids) if effective_ids else 'its default'}; "
            "a published drafter that was trained on other layers reached AL 1.04",
            "set it to the layers that the drafter was trained on, even if they are the default",
        )
    elif layer_count is None:
        yield info("the target's config.json has no num_hidden_layers: the range of the layer ids could not be checked")
    elif outside := [layer for layer in layer_ids if not 0 <= layer <= layer_count]:
        yield error(f"the drafter reads layer {outside[0]}, and the target has layers 0 to {layer_count}", _USE_MATCHING_DRAFTER)
    elif len(set(layer_ids)) != len(layer_ids):
        yield error(
            f"the layer ids {list(layer_ids)} contain a duplicate, which vLLM drops: fc gets too few hidden states",
            "list each layer once",
        )
    elif list(layer_ids) != sorted(layer_ids):
        yield warning(
            f"the layer ids {list(layer_ids)} are not ascending; vLLM sorts them, so that fc and fc_norm get another order",
            "check that the drafter was trained in ascending order, and list the ids in that order",
        )
    else:
        yield pass_check(f"{list(layer_ids)} of {layer_count} layers")


@register_check(
    "C30",
    "target supports EAGLE 3",
    rationale='after it has loaded the target, the engine fails with "Model does not support EAGLE3 interface"',
    max_severity=Severity.ERROR,
    source="vLLM v1/worker/gpu/spec_decode/eagle/eagle3_utils.py; SupportsEagle3 in model_executor/models, 0.22 to 0.33",
)
@eagle3_only
def check_target_supports_eagle3(inputs: PreflightInput) -> Iterable[CheckResult]:
    name, version = inputs.target_model.architecture, inputs.version
    support = lookup_eagle3_support(name, version)
    if inputs.arguments.model_impl in ("transformers", "terratorch"):
        yield info(f"the target's class depends on --model-impl={inputs.arguments.model_impl} and could not be checked")
    elif support is Eagle3Support.YES:
        yield pass_check(f"vLLM {version} supports EAGLE 3 for {name}")
    elif support is Eagle3Support.UNKNOWN or name is None:
        yield info(f"whether vLLM {version} supports EAGLE 3 for {name or 'the target, whose config names no class,'} is unknown")
    else:
        since = first_supported_version(name)
        alternative = "disable speculation, or use a method without hidden states, such as ngram"
        fix = f"use vLLM {since} or newer" if since is not None else alternative
        yield error(f"vLLM {version} does not support EAGLE 3 for {name}", fix)


@register_check(
    "C22",
    "training target",
    rationale="models of equal sizes can differ; a speculators checkpoint that is served alone starts the verifier it names",
    max_severity=Severity.WARNING,
    source="vLLM transformers_utils/configs/speculators/base.py",
)
@eagle3_only
def check_training_target(inputs: PreflightInput) -> Iterable[CheckResult]:
    """Check the verifier of a speculators config, or the metadata that Aerie's own trainer writes."""
    assert inputs.drafter is not None
    training_target = inputs.drafter_model.verifier or inputs.drafter.metadata.get("eagle.target")
    if training_target is None:
        yield info("the drafter's config does not name the target it was trained for: only sizes could be compared")
    elif training_target.startswith((".", "/", "~")) or "/" not in training_target:
        yield info(f"the drafter was trained for the local folder {training_target}, which could not be compared with the target")
    elif inputs.target.name.startswith((".", "/", "~")):
        yield info(f"the drafter was trained for {training_target}, which could not be compared with the target, a folder")
    elif training_target.lower() != inputs.target.name.partition("@")[0].lower():
        yield warning(
            f"the drafter was trained for {training_target}, and the target is {inputs.target.name}",
            "check that the target is a quantised or identical copy of that model, or use a drafter for this target",
        )
    else:
        yield pass_check(f"{training_target}")
