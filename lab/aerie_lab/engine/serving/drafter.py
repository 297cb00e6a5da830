"""vLLM's handling of a drafter's files: rejects them as vLLM does, or serves them with a higher or lower acceptance.

Read are config.json and the headers of the safetensors files, never a weight. Each rule is one measured on vLLM 0.32.0 with
EAGLE 3 and EAGLE 3.1 heads of a small target (docs/reference/simulator.md):

| files | vLLM |
|---|---|
| the folder is missing | exit 1 |
| fc_norm.* weights, `fc_norm` not true in the config | exit 1: no module or parameter named 'fc_norm' |
| `fc_norm` true, `norm_output` not | loads; later positions are lost: .683 .487 .341 falls to .669 .314 .097 |
| plain EAGLE 3 weights, `fc_norm` true | loads; acceptance length 2.45 falls to 1.58 |

Not measured, but read in vLLM 0.33.0 (`_limit_max_model_len_to_draft`): a drafter with a RoPE of another kind than those of
`_EXTENDABLE_ROPE_TYPES` bounds the context of the engine by its own positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_lab.engine.serving.files import EngineError, ModelFiles, read_drafter_files, read_hub_files

__all__ = ["DrafterProfile", "EngineError", "build_drafter_profile", "inspect_drafter"]


@dataclass(frozen=True)
class DrafterProfile:
    """Properties of a drafter that loads."""

    method: str
    variant: str
    """eagle3, eagle3.1, or how the two are mixed up."""
    logit_shifts: tuple[float, ...] = (0.0,)
    """Shift of each position's conditional on the logit scale; later positions carry the last on."""
    acceptance_rates: tuple[float, ...] | None = None
    """Per-position acceptance from the config, instead of that of the traffic classes."""
    altered_share: float = 0.0
    """Share of the tokens that it changes, from the config: a fault that no drafter may have."""
    max_positions: int | None = None
    """Beyond which it cannot draft, because vLLM does not extend the table of its RoPE; None for no bound."""

    @property
    def drops_last_block(self) -> bool:
        """Whether vLLM computes the last cached block again for it."""
        return self.method in ("eagle", "eagle3", "mtp")


# On the logit scale, from what is quoted above: the two rows of conditionals (.683 .713 .700) and (.669 .469 .309); the equal
# conditionals that give 2.45 and 1.58; and 2.817 to 3.019 at K = 5 for EAGLE 3.1 on ordinary traffic (vllm-project/speculators
# pull request 610).
_NO_NORM_OUTPUT_SHIFTS = (-0.064, -1.034, -1.652)
_PLAIN_AS_31_SHIFTS = (-1.26,)
_EAGLE_31_SHIFTS = (0.14,)
_EXTENDABLE_ROPE_TYPES = frozenset(("default", "linear", "llama3", "ntk", "proportional"))
"""Kinds of RoPE whose table vLLM makes as long as the target's context."""


def inspect_drafter(method: str, model: str, revision: str | None = None) -> DrafterProfile:
    """Return the drafter `model` as `method` would serve it. Raises EngineError where vLLM ends with exit status 1.

    A model that is no path of this machine is a repository of the Hub. Without a Hub it is assumed to be a fitting EAGLE 3 head.
    """
    folder = Path(model)
    files = read_hub_files(model, revision)
    if files is None and not folder.is_absolute() and not folder.exists():
        return DrafterProfile(method, "eagle3")
    return build_drafter_profile(method, model, files or read_drafter_files(folder))


def build_drafter_profile(method: str, model: str, files: ModelFiles) -> DrafterProfile:
    """Return the drafter with these files as `method` would serve it. Raises EngineError as `inspect_drafter`.

    Weights whose names cannot be read are assumed to match the config.
    """
    config = files.config
    simulated = config.get("simulator") or {}
    rates = tuple(simulated["acceptance_rates"]) if "acceptance_rates" in simulated else None
    logit_shift, altered_share = float(simulated.get("logit_shift", 0.0)), float(simulated.get("altered_share", 0.0))
    if method != "eagle3":
        return DrafterProfile(method, method, (logit_shift,), rates, altered_share, _read_max_positions(config))
    fc_norm, norm_output = config.get("fc_norm") is True, config.get("norm_output") is True
    has_norms = fc_norm
    if files.tensor_names is not None:
        has_norms = any(name.removeprefix("model.").startswith("fc_norm.") for name in files.tensor_names)
    if has_norms and not fc_norm:
        raise EngineError(
            "ValueError: There is no module or parameter named 'fc_norm' in Eagle3LlamaForCausalLM. "
            f'({model}/config.json does not say "fc_norm": true)'
        )
    form: str
    shifts: tuple[float, ...]
    if fc_norm and not has_norms:
        form, shifts = "eagle3 weights served as eagle3.1", _PLAIN_AS_31_SHIFTS
    elif fc_norm and not norm_output:
        form, shifts = (
            "eagle3.1 without norm_output",
            tuple(a + b for a, b in zip(_NO_NORM_OUTPUT_SHIFTS, _EAGLE_31_SHIFTS * 3, strict=True)),
        )
    elif fc_norm:
        form, shifts = "eagle3.1", _EAGLE_31_SHIFTS
    else:
        form, shifts = "eagle3", (0.0,)
    return DrafterProfile(
        method, form, tuple(shift + logit_shift for shift in shifts), rates, altered_share, _read_max_positions(config)
    )


def _read_max_positions(config: Mapping[str, Any]) -> int | None:
    """Return `DrafterProfile.max_positions`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, max_positions = rope.get("rope_type") or rope.get("type") or "default", config.get("max_position_embeddings")
    return int(max_positions) if max_positions and kind not in _EXTENDABLE_ROPE_TYPES else None
