"""Checks that config, weights and engine agree whether a drafter is EAGLE 3.1 or 3.

EAGLE 3.1 is two booleans of the drafter's config: `fc_norm` (one norm for each hidden state before fc, with weights of its
own) and `norm_output` (the next step gets the normed state, with no weights of its own). If they are wrong nothing fails, but
acceptance drops. The measurements are of one small drafter on vLLM 0.32 on CPU, K = 3, trained as EAGLE 3.1 to AL 2.51.
"""

from __future__ import annotations

from collections.abc import Iterable

from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import eagle3_only, register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, info, pass_check, warning
from aerie.engine.releases import Feature

_FEATURE_BY_FAMILY = {"llama": Feature.EAGLE31_LLAMA, "qwen3": Feature.EAGLE31_QWEN3, "mla": Feature.EAGLE31_MLA}


@register_check(
    "C1",
    "EAGLE 3.1 support",
    rationale="an older engine ignores fc_norm or norm_output: acceptance drops without an error",
    max_severity=Severity.ERROR,
    source="vLLM pull requests 42764 (Llama), 43482 (MLA), 46488 (speculators format); models/qwen3_eagle3.py",
)
@eagle3_only
def check_engine_supports_eagle31(inputs: PreflightInput) -> Iterable[CheckResult]:
    drafter = inputs.drafter_model
    if not drafter.is_eagle31:
        yield pass_check("the drafter is plain EAGLE 3")
        return
    keys = (("fc_norm", drafter.fc_norm), ("norm_output", drafter.norm_output))
    flags = " and ".join(name for name, is_set in keys if is_set)
    feature = Feature.EAGLE31_SPECULATORS if drafter.format == "speculators" else _FEATURE_BY_FAMILY.get(drafter.family)
    if feature is None:
        yield info(
            f"the drafter needs {flags}; the vLLM release that supports this for {drafter.architecture} is unknown",
            "compare its acceptance length with the published one",
        )
    elif not inputs.supports(feature):
        limits = f": {feature.limitations}" if feature.limitations else ""
        yield error(
            f"the drafter needs {flags}, and vLLM {inputs.version} does not support {feature.description}{limits}",
            f"use vLLM {feature.since} or newer",
        )
    else:
        yield pass_check(
            f"the drafter needs {flags}; vLLM supports this since {feature.since}, and the engine is {inputs.version}"
        )


@register_check(
    "C6",
    "single norm before fc",
    rationale="vLLM applies both norms in sequence; no drafter was trained that way",
    max_severity=Severity.ERROR,
    source="vLLM models/llama_eagle3.py, combine_hidden_states; speculators pull request 670",
)
@eagle3_only
def check_single_norm_before_fc(inputs: PreflightInput) -> Iterable[CheckResult]:
    drafter = inputs.drafter_model
    if drafter.fc_norm and drafter.norm_before_fc:
        yield error(
            "fc_norm and norm_before_fc are both true, and vLLM applies both",
            "keep the norm that the drafter was trained with: fc_norm has weights fc_norm.N.weight, norm_before_fc has "
            "input_norm.weight",
        )
    elif drafter.norm_before_fc and drafter.family == "mla":
        yield error(
            "norm_before_fc is true, and vLLM's drafter class for multi-head latent attention ignores it",
            "use a drafter that was trained with fc_norm",
        )
    else:
        name = "fc_norm" if drafter.fc_norm else "norm_before_fc" if drafter.norm_before_fc else "none"
        yield pass_check(f"norm before fc: {name}")


@register_check(
    "C7",
    "norm_output matches the training",
    rationale="SpecForge from 2026-07-20 to 2026-09-15 wrote norm_output: true and trained without it",
    max_severity=Severity.WARNING,
    source="SpecForge pull requests 568 and 879",
)
@eagle3_only
def check_norm_output_training(inputs: PreflightInput) -> Iterable[CheckResult]:
    assert inputs.drafter is not None
    drafter = inputs.drafter_model
    if not drafter.norm_output:
        yield pass_check("norm_output is not true: SpecForge's mismatch of 2026 does not apply")
        return
    texts = [inputs.drafter.name, str(inputs.drafter.config.get("_name_or_path", "")), *inputs.drafter.metadata.values()]
    trainer = next((trainer for trainer in _TRAINERS if any(trainer in text.lower() for text in texts)), None)
    if trainer == "specforge":
        yield warning(
            "norm_output is true and the checkpoint names SpecForge, which from 2026-07-20 to 2026-09-15 wrote the flag but "
            "trained without it",
            "if the drafter was trained in that period, set norm_output: false in its config.json or retrain it; if later, "
            "ignore this warning",
        )
    elif drafter.format == "speculators" or trainer is not None:
        yield pass_check(f"norm_output is true, and the checkpoint is from {trainer or 'speculators'}, not from SpecForge")
    else:
        yield info(
            "norm_output is true; whether the drafter was trained with it could not be checked, because headers do not "
            "name the trainer",
            "if SpecForge trained it between 2026-07-20 and 2026-09-15, set norm_output: false in its config.json",
        )


_TRAINERS = ("specforge", "torchspec", "speculators", "aerie")


@register_check(
    "C8",
    "norm_before_residual is explicit",
    rationale="the default is False in a native config and True in a speculators config: a conversion can flip it silently",
    max_severity=Severity.INFO,
    source="vLLM transformers_utils/configs/speculators/algos.py, update_eagle3; models/llama_eagle3.py",
)
@eagle3_only
def check_norm_before_residual(inputs: PreflightInput) -> Iterable[CheckResult]:
    drafter = inputs.drafter_model
    if drafter.norm_before_residual is not None:
        yield pass_check(f"norm_before_residual is {_format_bool(drafter.norm_before_residual)}")
    else:
        default = _format_bool(drafter.format == "speculators")
        yield info(
            f"norm_before_residual is not in the drafter's config; vLLM's default for the {drafter.format} format is {default}",
            f"set norm_before_residual: {default} in its config.json if the drafter was trained with it, so that no "
            "conversion changes it",
        )


@register_check(
    "C27",
    "fc_norm and norm_output agree",
    rationale="an EAGLE 3.1 drafter without norm_output gets hidden states it was not trained on: AL 2.08 instead of 2.51",
    max_severity=Severity.ERROR,
    source="vLLM pull request 42764; measured on vLLM 0.32, K = 3; arXiv 2605.09992 for norm_output without training",
)
@eagle3_only
def check_fc_norm_with_norm_output(inputs: PreflightInput) -> Iterable[CheckResult]:
    assert inputs.drafter is not None
    drafter = inputs.drafter_model
    has_weights = any(name.startswith("fc_norm.") for name in inputs.drafter.tensors or ())
    if drafter.norm_output is None and (drafter.fc_norm or has_weights):
        evidence = "there are weights fc_norm.N.weight" if has_weights else "fc_norm is true"
        yield error(
            f"{evidence}, so the drafter is EAGLE 3.1, but its config does not say norm_output, which vLLM then takes for false; "
            "a 3.1 drafter served so lost more than a quarter of its accepted tokens (AL 2.08 instead of 2.51 at K = 3) "
            "without an error",
            "set norm_output: true in its config.json, or false if the drafter was trained without it",
        )
    elif drafter.norm_output is False and (drafter.fc_norm or has_weights):
        yield warning(
            "fc_norm is present and norm_output is false: EAGLE 3.1 has both",
            "set norm_output: true, unless the drafter was trained without it (SpecForge before 2026-09-15)",
        )
    elif drafter.norm_output and not (drafter.fc_norm or has_weights or drafter.norm_before_fc):
        yield warning(
            "norm_output is true without fc_norm or norm_before_fc; for a drafter that was trained without "
            "it, this costs "
            "most of the acceptance (AL 3.06 to 1.33 in the paper)",
            "set norm_output: false, unless the drafter was trained with it",
        )
    elif drafter.norm_output:
        form = "fc_norm" if drafter.fc_norm or has_weights else "norm_before_fc"
        yield pass_check(f"{form} and norm_output: the drafter is EAGLE 3.1")
    elif inputs.drafter.tensors is None:
        yield info(
            "the drafter's weights are not safetensors: whether they hold fc_norm.N.weight could not be checked",
            _CONVERT_TO_SAFETENSORS,
        )
    else:
        yield pass_check("neither fc_norm nor norm_output: the drafter is plain EAGLE 3")


_CONVERT_TO_SAFETENSORS = "convert the drafter to safetensors"


def _format_bool(value: bool) -> str:
    return "true" if value else "false"
