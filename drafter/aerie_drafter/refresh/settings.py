"""Settings of a refresh. All have defaults: a small learning rate and few epochs, because the drafter is trained already.

Guarantee: settings that contradict each other are an error before the first step. Not guaranteed: that the defaults suit a
drafter; the demo and the benchmark have settings of their own.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from aerie_drafter.train.settings import LossSettings, OptimizerSettings, PositiveCount, SettingsGroup, TemplateSettings


class PromptSettings(SettingsGroup):
    """Choice of prompts."""

    held_out_share: float = Field(
        default=0.1, gt=0, lt=1, description="Share of the prompts that is held back for the evaluation."
    )
    max_trained: PositiveCount = Field(default=20000, description="Maximum number of new prompts to train on.")
    max_held_out: PositiveCount = Field(default=200, description="Maximum number of held-back prompts of each domain.")
    old_share: float = Field(
        default=0.5, ge=0, lt=1, description="Share of old conversations in the training, if there are enough of them."
    )


class AnswerSettings(SettingsGroup):
    """The target's answers."""

    max_tokens: PositiveCount = Field(default=1024, description="Maximum tokens of an answer.")
    temperature: str | None = Field(
        default=None,
        description="A temperature, or TEMPERATURE:SHARE,... Default: the temperatures of the captured requests.",
    )
    default_temperature: float = Field(default=1.0, ge=0, description="Temperature of captured requests that set none.")
    batch_size: PositiveCount = Field(default=8, description="Conversations per batch without an endpoint.")
    concurrency: PositiveCount = Field(default=32, description="Maximum concurrent requests to the endpoint.")
    max_rejected_share: float = Field(
        default=0.05, ge=0, lt=1, description="Share of the prompts that the endpoint may reject; they are omitted."
    )


class ConversationSettings(SettingsGroup):
    """Rows of the training."""

    max_length: int = Field(default=2048, ge=4, description="Maximum tokens of a conversation; the rest is truncated.")
    packing: bool = Field(
        default=False, description="Pack several short conversations into a row of max_length; none sees another."
    )


class RefreshOptimizerSettings(OptimizerSettings):
    """AdamW, as in the settings of `aerie-drafter train`."""

    learning_rate: float = Field(default=3e-5, gt=0, description="Learning rate at the end of the warm-up.")
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1, description="Warm-up as a share of all steps.")


class EvaluationSettings(SettingsGroup):
    """Comparison of the served and the refreshed drafter."""

    num_speculative_tokens: PositiveCount = Field(default=3, description="K that is served; at most loss.horizon.")
    temperature: float | None = Field(
        default=None, ge=0, description="Temperature of the requests. Default: the most frequent of the answers."
    )
    draft_sampling: Literal["greedy", "drawn"] = Field(
        default="greedy", description="greedy is vLLM's default; drawn is its draft_sample_method: probabilistic."
    )
    max_tokens: int = Field(default=256, ge=2, description="Maximum tokens of an answer.")
    batch_size: PositiveCount = Field(default=16, description="Prompts per batch.")
    checkpoint_every: PositiveCount = Field(
        default=100, description="Steps of the training between checkpoints, of which the best on held-out answers is kept."
    )


class LimitSettings(SettingsGroup):
    """Limits of the decision; both apply to the lower bound of a 95 % interval."""

    min_new_gain: float = Field(default=0.0, description="Relative gain of acceptance length that new prompts must exceed.")
    max_old_loss: float = Field(default=0.02, ge=0, description="Relative loss of acceptance length that old prompts may have.")


class RefreshSettings(SettingsGroup):
    """All settings of a refresh."""

    prompts: PromptSettings = PromptSettings()
    answers: AnswerSettings = AnswerSettings()
    template: TemplateSettings = TemplateSettings()
    data: ConversationSettings = ConversationSettings()
    loss: LossSettings = LossSettings()
    optimizer: RefreshOptimizerSettings = RefreshOptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    limits: LimitSettings = LimitSettings()

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.evaluation.num_speculative_tokens > self.loss.horizon:
            raise ValueError(
                f"evaluation.num_speculative_tokens is {self.evaluation.num_speculative_tokens}, and loss.horizon "
                f"{self.loss.horizon}: set loss.horizon to at least the served number of tokens"
            )
        if self.evaluation.temperature == 0 and self.evaluation.draft_sampling == "drawn":
            raise ValueError(
                "evaluation.draft_sampling is drawn, and evaluation.temperature 0: nothing is drawn at 0; set greedy"
            )
        return self
