"""The YAML file of a training: every field, what it means, and its default.

Guarantees: a file with an unknown field, a field of a wrong kind or fields that contradict each other is refused in one
sentence; `commented()` is a file that says all of this itself, and reads back as the defaults. Not checked here: what needs
the target or the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aerie.yaml_documents import YamlDocumentError, read_yaml_documents
from aerie_drafter.errors import ConfigError

PositiveCount = Annotated[int, Field(ge=1)]


class _SettingsGroup(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSettings(_SettingsGroup):
    """The model that is served, and that the drafter is to predict."""

    model: str = Field(
        description="Folder or Hugging Face repository of the target.", examples=["meta-llama/Llama-3.1-8B-Instruct"]
    )
    revision: str | None = Field(
        default=None, description="Commit of the repository; name one so that a training can be repeated."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Of the target's weights. auto: bfloat16 on GPU, float32 on CPU."
    )
    shard: bool = Field(default=False, description="Spread the target's layers over all processes (FSDP); needs torchrun.")
    hidden_states: Path | None = Field(
        default=None,
        description="Folder of hidden states written by vLLM's extract_hidden_states; without it the target runs here.",
    )
    hidden_state_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Layers in those files, in vLLM's order. Default: the auxiliary layers, then the number of layers.",
    )


class DrafterSettings(_SettingsGroup):
    """What is trained. Sizes that are not named are the target's."""

    initial_checkpoint: Path | None = Field(
        default=None, description="Checkpoint to go on from; everything else of this group then comes from it."
    )
    family: Literal["llama", "qwen3", "deepseek_v2"] | None = Field(
        default=None, description="Kind of attention. Default: the target's."
    )
    aux_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Layers of the target whose inputs are read. Default: a low, a middle and a high one, as vLLM has it.",
    )
    draft_vocab_size: PositiveCount | None = Field(
        default=None,
        description="Tokens that can be drafted: the most frequent in the data. Default: the target's whole vocabulary.",
    )
    intermediate_size: PositiveCount | None = Field(default=None, description="Width of the MLP. Default: the target's.")
    fc_norm: bool = Field(default=True, description="EAGLE 3.1: a norm on each auxiliary state.")
    norm_output: bool = Field(default=True, description="EAGLE 3.1: the state after the final norm is fed to the next step.")
    norm_before_fc: bool = Field(
        default=False, description="One norm over all auxiliary states (gpt-oss); not together with fc_norm."
    )
    norm_before_residual: bool = Field(default=False, description="The residual branch starts from the normed state.")


class DataSettings(_SettingsGroup):
    """Conversations: JSON lines of {"messages": [...]} or {"prompt": ..., "response": ...}."""

    train: tuple[Path, ...] = Field(min_length=1, description="Files to learn from.", examples=[["answers.jsonl"]])
    held_out: tuple[Path, ...] = Field(
        default=(), description="Files that checkpoints are chosen by. Default: a share of `train`."
    )
    held_out_share: float = Field(default=0.02, gt=0, lt=1, description="That share; without effect where held_out is given.")
    max_length: int = Field(default=2048, ge=4, description="Tokens of a conversation that are read; the rest is cut off.")
    packing: bool = Field(
        default=False,
        description="Fill rows with several conversations, as one text; only where the target runs in this process.",
    )
    chat_template: Path | None = Field(default=None, description="File of the chat template. Default: the tokenizer's own.")
    cache: Path | None = Field(default=None, description="Folder where tokens are kept between trainings.")


class LossSettings(_SettingsGroup):
    """Training-time test: see aerie_drafter.train.ttt."""

    horizon: int = Field(
        default=7, ge=1, le=32, description="Steps that are unrolled; at least the num_speculative_tokens to be served."
    )
    step_decay: float = Field(default=0.8, gt=0, le=1, description="The loss of step i is weighted with step_decay^i.")


class OptimizerSettings(_SettingsGroup):
    """AdamW, warm-up, then half a cosine down to zero."""

    learning_rate: float = Field(default=1e-4, gt=0, description="At the end of the warm-up.")
    warmup_ratio: float = Field(default=0.015, ge=0, lt=1, description="Share of all steps.")
    weight_decay: float = Field(default=0.0, ge=0, description="Of AdamW.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Of AdamW.")
    max_grad_norm: float = Field(default=0.5, gt=0, description="Largest norm of the gradient.")
    epochs: PositiveCount = Field(default=2, description="Times that the data is gone through.")
    batch_size_per_process: PositiveCount = Field(default=4, description="Rows of a batch, per process.")
    gradient_accumulation_steps: PositiveCount = Field(default=1, description="Batches per step of the optimizer.")
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Of the arithmetic; weights are float32. auto: bfloat16 on GPU, float32 on CPU."
    )
    seed: int = Field(default=0, ge=0, description="Of the first weights and of the order of the data.")


class OutputSettings(_SettingsGroup):
    """What is written, and when."""

    folder: Path = Field(description="Gets `last`, to resume from, and `best`, to be served.", examples=["drafter"])
    evaluate_every: PositiveCount = Field(
        default=500, description="Steps between measurements on the held-out data, each followed by a save."
    )
    num_speculative_tokens: PositiveCount = Field(
        default=3, description="num_speculative_tokens of these measurements; at most loss.horizon."
    )
    max_held_out_conversations: PositiveCount = Field(default=256, description="Conversations measured at most.")


class TrainingSettings(_SettingsGroup):
    """All of it."""

    target: TargetSettings
    drafter: DrafterSettings = Field(default_factory=DrafterSettings)
    data: DataSettings
    loss: LossSettings = Field(default_factory=LossSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    output: OutputSettings

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.output.num_speculative_tokens > self.loss.horizon:
            raise ValueError(
                f"output.num_speculative_tokens is {self.output.num_speculative_tokens}, and loss.horizon {self.loss.horizon}: a measurement takes as many "
                "steps as the unroll has at most"
            )
        if self.drafter.fc_norm and self.drafter.norm_before_fc and self.drafter.initial_checkpoint is None:
            raise ValueError("drafter.fc_norm and drafter.norm_before_fc are both true; set one of them to false")
        if self.target.hidden_states is not None and self.data.packing:
            raise ValueError(
                "data.packing is true, and target.hidden_states names files, which hold one conversation each; set it to false"
            )
        if self.target.hidden_states is not None and self.target.shard:
            raise ValueError("target.shard is true, and with target.hidden_states no target runs here; set it to false")
        return self


def read_settings(path: Path) -> TrainingSettings:
    """Settings from a YAML file; paths in it are relative to where the command runs. Raises ConfigError."""
    try:
        raw = next(iter(read_yaml_documents(str(path))), None)
    except YamlDocumentError as error:
        raise ConfigError(f"{error} `aerie-drafter train --init` prints one to start from.") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: groups {', '.join(TrainingSettings.model_fields)} are expected; `aerie-drafter train --init` prints them."
        )
    return parse_settings(raw, str(path))


def parse_settings(raw: dict[str, Any], location: str) -> TrainingSettings:
    """Settings from a mapping. Raises ConfigError, whose sentence begins with `where`."""
    try:
        return TrainingSettings.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{location}: {_format_validation_error(error)}.") from None


def _format_validation_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    name, message = ".".join(location), str(first["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    if first["type"] == "extra_forbidden":
        known_fields = _field_names(location[:-1])
        return f"{name} is no field; " + (f"known are {', '.join(known_fields)}" if known_fields else "leave it out")
    if first["type"] == "missing":
        return f"{name} is missing; `aerie-drafter train --init` prints a file with every field"
    return f"{name} is {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _field_names(group: list[str]) -> list[str]:
    model: Any = TrainingSettings
    for name in group:
        model = model.model_fields[name].annotation if name in model.model_fields else None
    return list(model.model_fields) if model is not None else []


def render_default_yaml() -> str:
    """A YAML file with every field, its meaning and its default; fields without one hold an example."""
    lines = ["# Settings of `aerie-drafter train FILE`. Fields whose value is the default can be left out."]
    for group, info in TrainingSettings.model_fields.items():
        model: Any = info.annotation
        lines += ["", f"# {' '.join(str(model.__doc__).split())}", f"{group}:"]
        for name, field in model.model_fields.items():
            value = field.examples[0] if field.is_required() else _to_plain_value(field.default)
            lines.append(f"  # {field.description}" + (" Has to be given." if field.is_required() else ""))
            text = yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip()
            lines.append(f"  {name}: {text}")
    return "\n".join(lines) + "\n"


def _to_plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value
