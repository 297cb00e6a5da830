"""Settings of a training: the YAML file with its fields, meanings and defaults.

Guarantees: a file with an unknown field, a wrong type or contradicting fields is rejected with one message.
`render_default_yaml` is a file with all fields and their meanings, and reads back as the defaults. Not checked here: what
requires the target or the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aerie.yaml_documents import YamlDocumentError, read_yaml_documents
from aerie_drafter.config import MAX_LAYERS, MIN_SLIDING_WINDOW
from aerie_drafter.errors import ConfigError

PositiveCount = Annotated[int, Field(ge=1)]
LossWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Settings = TypeVar("_Settings", bound=BaseModel)


class SettingsGroup(BaseModel):
    """A group of fields, or all groups of a command."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSettings(SettingsGroup):
    """The target model, which the drafter predicts."""

    model: str = Field(
        description="Folder or Hugging Face repository of the target.", examples=["meta-llama/Llama-3.1-8B-Instruct"]
    )
    revision: str | None = Field(default=None, description="Commit of the repository, for a reproducible training.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Type of the target's weights. auto: bfloat16 on GPU, float32 on CPU."
    )
    shard: bool = Field(default=False, description="Shard the target's layers over all processes (FSDP); requires torchrun.")
    hidden_states: Path | None = Field(
        default=None,
        description="Folder of hidden states, written by `aerie-drafter states`. Default: run the target in this process.",
    )
    hidden_states_endpoint: str | None = Field(
        default=None,
        description="Address of a vLLM with extract_hidden_states: conversations without a file are requested from it.",
    )
    hidden_states_model: str = Field(default="target", description="Served model name at that address.")
    hidden_states_shared_folder: Path | None = Field(
        default=None, description="Where this machine sees the server's shared_storage_path. Default: under the same path."
    )
    hidden_state_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Layer ids in those files, in their order. Default: the auxiliary layers, then the number of layers.",
    )

    @property
    def reads_states(self) -> bool:
        """Return whether hidden states come from files or a server."""
        return self.hidden_states is not None or self.hidden_states_endpoint is not None


class DrafterSettings(SettingsGroup):
    """The drafter. Sizes default to the target's."""

    initial_checkpoint: Path | None = Field(
        default=None, description="Checkpoint to start from; it determines all other fields of this group."
    )
    family: Literal["llama", "qwen3", "deepseek_v2"] | None = Field(
        default=None, description="Type of attention. Default: the target's."
    )
    aux_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Layers of the target whose inputs are read. Default: vLLM's, a low, a middle and a high one.",
    )
    draft_vocab_size: PositiveCount | None = Field(
        default=None,
        description="Number of draft tokens: the most frequent in the data. Default: the target's vocabulary.",
    )
    intermediate_size: PositiveCount | None = Field(default=None, description="Width of the MLP. Default: the target's.")
    num_layers: int = Field(
        default=1,
        ge=1,
        le=MAX_LAYERS,
        description="Number of decoder layers. Each adds its weights to the cost of a draft token.",
    )
    sliding_window: int | None = Field(
        default=None,
        ge=MIN_SLIDING_WINDOW,
        description="Tokens that a query sees, its own included; not with deepseek_v2. Default: all before it.",
    )
    fc_norm: bool = Field(default=True, description="EAGLE 3.1: a norm for each auxiliary state.")
    norm_output: bool = Field(default=True, description="EAGLE 3.1: the state after the final norm is fed to the next step.")
    norm_before_fc: bool = Field(
        default=False, description="One norm over all auxiliary states (gpt-oss); not together with fc_norm."
    )
    norm_before_residual: bool = Field(default=False, description="The residual branch starts from the normalized state.")


class DataSettings(SettingsGroup):
    """Conversations: see aerie_drafter.train.conversations."""

    train: tuple[Path, ...] = Field(
        min_length=1,
        description="Training files: JSON Lines, JSON, Parquet, or hub:NAME:SPLIT@COMMIT.",
        examples=[["answers.jsonl"]],
    )
    held_out: tuple[Path, ...] = Field(
        default=(), description="Evaluation files, which select the best checkpoint. Default: a share of `train`."
    )
    held_out_share: float = Field(
        default=0.02, gt=0, lt=1, description="Share of `train` for evaluation; no effect with held_out."
    )
    skip_invalid: bool = Field(
        default=False, description="Omit and report conversations that cannot be read. Default: the first ends the command."
    )
    max_length: int = Field(default=2048, ge=4, description="Maximum tokens of a conversation; the rest is truncated.")
    packing: bool = Field(
        default=False,
        description="Pack several short conversations into a row of max_length; none sees another.",
    )
    chat_template: Path | None = Field(default=None, description="File with the chat template. Default: the tokenizer's.")
    cache: Path | None = Field(
        default=None, description="Cache folder for tokenized data. Default: beside output.folder, with the suffix .tokens."
    )


class TemplateSettings(SettingsGroup):
    """Arguments of the chat template, as the deployment has them; a conversation's own take precedence."""

    tools: Path | None = Field(default=None, description="JSON file with a list of tool definitions in OpenAI's format.")
    kwargs: dict[str, Any] = Field(
        default={}, description="Further arguments, vLLM's chat_template_kwargs, such as {enable_thinking: false}."
    )


class LossSettings(SettingsGroup):
    """Training-time test, see aerie_drafter.train.ttt. The loss is the weighted sum of four, see aerie_drafter.train.losses."""

    horizon: int = Field(
        default=7, ge=1, le=32, description="Number of unrolled steps; at least the num_speculative_tokens to serve with."
    )
    step_decay: float = Field(default=0.8, gt=0, le=1, description="The loss of step i is weighted with step_decay^i.")
    step_weights: tuple[LossWeight, ...] | None = Field(
        default=None, description="A weight for each step, in place of step_decay."
    )
    kl: LossWeight = Field(
        default=1.0,
        description="Weight of the forward KL to the target, within the draft vocabulary (EAGLE-3, arXiv 2503.01840).",
    )
    total_variation: LossWeight = Field(default=0.0, description="Weight of the chance that a drawn draft token is rejected.")
    lk_alpha: LossWeight = Field(
        default=0.0, description="Weight of the negative log of the chance that it is accepted (LK losses, arXiv 2602.23881)."
    )
    lk_lambda: LossWeight = Field(
        default=0.0, description="Weight of KL that becomes total variation as acceptance grows (the same paper)."
    )
    lk_eta: float = Field(default=3.0, ge=0, description="Speed of that change: KL has the share exp(-lk_eta x acceptance).")
    acceptance_temperature: float = Field(
        default=1.0, ge=0, description="Temperature of target and drafter in the acceptance that the training reports."
    )

    @property
    def weights_by_step(self) -> tuple[float, ...]:
        """Return the weight of each step."""
        return self.step_weights or tuple(self.step_decay**step for step in range(self.horizon))


class OptimizerSettings(SettingsGroup):
    """AdamW with warm-up and a cosine schedule to zero."""

    learning_rate: float = Field(default=1e-4, gt=0, description="Learning rate at the end of the warm-up.")
    warmup_ratio: float = Field(default=0.015, ge=0, lt=1, description="Warm-up as a share of all steps.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of AdamW.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Betas of AdamW.")
    max_grad_norm: float = Field(default=0.5, gt=0, description="Maximum norm of the gradient (clipping).")
    epochs: PositiveCount = Field(default=2, description="Number of epochs.")
    batch_size_per_process: PositiveCount = Field(default=4, description="Rows of a batch per process.")
    gradient_accumulation_steps: PositiveCount = Field(default=1, description="Batches per optimizer step.")
    activation_checkpointing: bool = Field(
        default=False, description="Compute the activations of a step again in the backward pass: less memory, more time."
    )
    shard: bool = Field(
        default=False,
        description="Shard the drafter's weights and AdamW's state over all processes (FSDP); requires torchrun.",
    )
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Type of the arithmetic; weights are float32. auto: bfloat16 on GPU, float32 on CPU."
    )
    seed: int = Field(default=0, ge=0, description="Random seed of initial weights and data order.")


class AcceptanceCondition(SettingsGroup):
    """A temperature and draft sampling, as served."""

    temperature: float = Field(ge=0, allow_inf_nan=False, description="Temperature of the requests.")
    draft_sampling: Literal["greedy", "drawn"] = Field(
        default="greedy", description="greedy is vLLM's default; drawn is its draft_sample_method: probabilistic."
    )
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="Weight of its acceptance length in the mean.")


class OutputSettings(SettingsGroup):
    """Checkpoints and evaluation."""

    folder: Path = Field(description="Output folder: `last` to resume from, `best` to serve.", examples=["drafter"])
    evaluate_every: PositiveCount = Field(
        default=500, description="Steps between evaluations on the held-out data; each saves a checkpoint."
    )
    save_every: PositiveCount | None = Field(
        default=None, description="Steps between further saves of `last`, without an evaluation. Default: none."
    )
    num_speculative_tokens: PositiveCount = Field(default=3, description="K of the evaluation; at most loss.horizon.")
    max_held_out_conversations: PositiveCount = Field(
        default=256, description="Maximum number of held-out conversations to evaluate, evenly spaced over all of them."
    )
    best_by: tuple[AcceptanceCondition, ...] = Field(
        default=(),
        description="What selects `best`: a weighted mean of acceptance lengths, such as "
        "[{temperature: 1, draft_sampling: drawn, weight: 1}]. Default: that of greedy speculation over the held-out text.",
    )


class TrackingSettings(SettingsGroup):
    """Experiment trackers besides the console, see aerie_drafter.train.trackers; each needs the extra of its name."""

    tensorboard: Path | None = Field(default=None, description="Folder for TensorBoard's event files. Default: none.")
    wandb: str | None = Field(
        default=None, min_length=1, description="Project of Weights & Biases; WANDB_MODE=offline needs no network. Default: none."
    )


class TrainingSettings(SettingsGroup):
    """All settings of a training."""

    target: TargetSettings
    drafter: DrafterSettings = Field(default_factory=DrafterSettings)
    data: DataSettings
    template: TemplateSettings = Field(default_factory=TemplateSettings)
    loss: LossSettings = Field(default_factory=LossSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    output: OutputSettings
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.output.num_speculative_tokens > self.loss.horizon:
            raise ValueError(
                f"output.num_speculative_tokens is {self.output.num_speculative_tokens}, and loss.horizon "
                f"{self.loss.horizon}: the evaluation "
                "can use at most the unrolled steps"
            )
        loss = self.loss
        if not (loss.kl or loss.total_variation or loss.lk_alpha or loss.lk_lambda):
            raise ValueError(
                "loss.kl, loss.total_variation, loss.lk_alpha and loss.lk_lambda are all 0; set at least one of them"
            )
        if loss.step_weights is not None and len(loss.step_weights) != loss.horizon:
            raise ValueError(
                f"loss.step_weights has {len(loss.step_weights)} weights, and loss.horizon is {loss.horizon}; set one per step"
            )
        if not any(loss.weights_by_step):
            raise ValueError("loss.step_weights are all 0; set at least one of them")
        if self.drafter.fc_norm and self.drafter.norm_before_fc and self.drafter.initial_checkpoint is None:
            raise ValueError("drafter.fc_norm and drafter.norm_before_fc are both true; set one of them to false")
        if self.target.reads_states and self.target.shard:
            raise ValueError("target.shard is true, but with target.hidden_states no target runs here; set it to false")
        return self


def read_settings(path: Path) -> TrainingSettings:
    """Read a YAML file; its paths are relative to the current folder. Raises ConfigError."""
    return read_settings_file(path, TrainingSettings, "train")


def parse_settings(raw: dict[str, Any], location: str) -> TrainingSettings:
    """Parse a mapping. Raises ConfigError with `location`."""
    return parse_groups(raw, location, TrainingSettings, "train")


def render_default_yaml() -> str:
    """Render a YAML file with all fields, meanings and defaults; required fields have an example."""
    return render_groups(TrainingSettings, "aerie-drafter train FILE")


def read_settings_file(path: Path, model: type[_Settings], command: str) -> _Settings:
    """Read a YAML file with the settings of a command of `aerie-drafter`. Raises ConfigError."""
    try:
        raw = next(iter(read_yaml_documents(str(path))), None)
    except YamlDocumentError as error:
        raise ConfigError(f"{error} `aerie-drafter {command} --init` prints a file to start from.") from None
    if not isinstance(raw, dict):
        groups = ", ".join(model.model_fields)
        raise ConfigError(f"{path}: expected: the groups {groups}; `aerie-drafter {command} --init` prints them.")
    return parse_groups(raw, str(path), model, command)


def parse_groups(raw: dict[str, Any], location: str, model: type[_Settings], command: str) -> _Settings:
    """Parse the settings of a command. Raises ConfigError with `location`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{location}: {_format_validation_error(error, model, command)}.") from None


def render_groups(model: type[BaseModel], usage: str) -> str:
    """Render a YAML file with all groups of settings, and the meaning and default of each field."""
    lines = [f"# Settings of `{usage}`. Fields with their default value can be omitted."]
    for group, info in model.model_fields.items():
        fields: Any = info.annotation
        lines += ["", f"# {' '.join(str(fields.__doc__).split())}", f"{group}:"]
        for name, field in fields.model_fields.items():
            value = field.examples[0] if field.is_required() else _to_plain_value(field.default)
            lines.append(f"  # {field.description}" + (" Required." if field.is_required() else ""))
            text = yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip()
            lines.append(f"  {name}: {text}")
    return "\n".join(lines) + "\n"


def _format_validation_error(error: ValidationError, settings: type[BaseModel], command: str) -> str:
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    name, message = ".".join(location), str(first["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    if first["type"] == "extra_forbidden":
        known_fields = _field_names(location[:-1], settings)
        return f"{name} is not a field; " + (f"fields: {', '.join(known_fields)}" if known_fields else "remove it")
    if first["type"] == "missing":
        return f"{name} is missing; `aerie-drafter {command} --init` prints a file with every field"
    return f"{name} is {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _field_names(group: list[str], settings: type[BaseModel]) -> list[str]:
    model: Any = settings
    for name in group:
        if name.isdecimal():
            model = get_args(model)[0]  # an item of a tuple
        else:
            model = model.model_fields[name].annotation if name in model.model_fields else None
    return list(model.model_fields) if model is not None else []


def render_json_schema() -> str:
    """Render the JSON Schema of a settings file, for editors and checks in a pipeline."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TrainingSettings.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def _to_plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value
