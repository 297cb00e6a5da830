"""The training loop, on one or several devices, with checkpoints to resume from.

Guarantees: on CPU, with the same number of threads, a training results in the same weights bit for bit, however often it was
killed and resumed. Several processes train like one process with all their rows, up to rounding. `last` and `best` in the output
folder are replaced atomically. A requested stop saves after the step. `last` is saved before an evaluation, so that one that
fails loses no step; the resumed training repeats it first. No random number is used after the initial weights: the data order
depends on seed and epoch.
Not guaranteed: equal bits on GPU or with another number of processes.

`best` is the checkpoint with the highest acceptance length on held-out text: all of it, or `max_held_out_conversations`
evenly spaced ones, so that each part of the data counts. The loss does not select it, because it includes
positions that verification never reaches. By default, greedy speculation over the text is simulated. With `output.best_by`, the
weighted mean of the expected acceptance lengths at those temperatures and draft samplings counts
(`aerie_drafter.evaluate.expected`): exact for answers that the target drew at that temperature, otherwise an estimate that
compares checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aerie_drafter import checkpoint
from aerie_drafter.checkpoint import DrafterCheckpoint, Provenance
from aerie_drafter.errors import ConfigError, TrainingError
from aerie_drafter.evaluate.expected import expected_counts_of_spans
from aerie_drafter.model import Drafter
from aerie_drafter.train.data import BatchRow, Corpus, assemble_batch, plan_batches
from aerie_drafter.train.losses import LossMixture
from aerie_drafter.train.packing import compute_text_starts, fetch_packed_hidden_states
from aerie_drafter.train.processes import CPU_DEVICE, Processes
from aerie_drafter.train.settings import AcceptanceCondition, TrainingSettings
from aerie_drafter.train.sharding import gather, gathered_parameters, like_parameter, shard_module
from aerie_drafter.train.states import HiddenStateSource
from aerie_drafter.train.ttt import LossOutput, TrainingBatch, TrainingMetrics, TrainingTimeTest, simulate_speculation

TRAINING_STATE_FILE = "training.pt"

PREFETCHED_BATCHES = 4
"""Batches after the current step whose hidden states are loaded in advance, if they come from files or a server."""


@dataclass(frozen=True)
class StepReport:
    """Report of an optimizer step."""

    step: int
    total_steps: int
    epoch: int
    loss: float
    """Weighted sum of the losses over unrolled steps, as the mean over positions."""
    gradient_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    tokens: int
    """Tokens of this step over all processes, without padding."""
    metrics: TrainingMetrics


@dataclass(frozen=True)
class EvaluationReport:
    """Report of an evaluation on held-out data."""

    step: int
    acceptance_length: float
    """Tokens per verification step, with the bonus token; with `output.best_by`, the weighted mean."""
    is_best: bool
    metrics: TrainingMetrics


class TrainingReporter(Protocol):
    """Receiver of progress reports; called in the main process only."""

    def on_step(self, step: StepReport) -> None: ...
    def on_evaluation(self, evaluation: EvaluationReport) -> None: ...


class NullReporter:
    """Reporter that ignores all reports."""

    def on_step(self, step: StepReport) -> None:
        """Ignore the report."""

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        """Ignore the report."""


@dataclass
class TrainingProgress:
    """Steps done so far, and the batch that comes next."""

    step: int = 0
    epoch: int = 0
    next_batch: int = 0
    best_acceptance_length: float = 0.0
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(step, acceptance length) of every evaluation."""


class Trainer:
    """A training run. Models and data are loaded by the caller."""

    def __init__(
        self,
        drafter: Drafter,
        hidden_state_source: HiddenStateSource,
        target_lm_head: Tensor,
        corpus: Corpus,
        held_out: Corpus,
        settings: TrainingSettings,
        *,
        processes: Processes | None = None,
        provenance: Provenance | None = None,
        input_ids: Mapping[str, str] | None = None,
        reporter: TrainingReporter | None = None,
    ) -> None:
        """`input_ids` identify target and data: a training resumes only with the same."""
        self.input_ids = dict(input_ids or {})
        self.processes = processes or Processes()
        self.settings, self.hidden_state_source, self.corpus, self.held_out = settings, hidden_state_source, corpus, held_out
        self.provenance, self.reporter = (
            provenance or Provenance(training_horizon=settings.loss.horizon),
            reporter or NullReporter(),
        )
        self.output_folder = settings.output.folder
        device = self.processes.device
        self.drafter = drafter.to(device)
        loss = settings.loss
        self.loss = TrainingTimeTest(
            self.drafter,
            target_lm_head,
            step_weights=loss.weights_by_step,
            mixture=LossMixture(loss.kl, loss.total_variation, loss.lk_alpha, loss.lk_lambda, loss.lk_eta),
            temperatures=(loss.acceptance_temperature,),
            recompute=settings.optimizer.activation_checkpointing,
        )
        self.evaluation = TrainingTimeTest(
            self.drafter,
            target_lm_head,
            step_weights=loss.weights_by_step,
            mixture=self.loss.mixture,
            temperatures=(loss.acceptance_temperature, *(condition.temperature for condition in settings.output.best_by)),
        )
        optimizer_settings = settings.optimizer
        self.is_sharded = optimizer_settings.shard
        if self.is_sharded:
            shard_module(self.loss, self.processes)
        parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=optimizer_settings.learning_rate,
            betas=optimizer_settings.betas,
            weight_decay=optimizer_settings.weight_decay,
        )
        self.compute_dtype = _resolve_compute_dtype(optimizer_settings.precision, device)
        self.progress = TrainingProgress()
        self.is_stop_requested = self._is_stopping = False
        self._lengths_by_condition: dict[str, float] = {}
        self.rows_per_batch = optimizer_settings.batch_size_per_process * self.processes.world_size
        self.packed_row_tokens = settings.data.max_length if settings.data.packing else None
        self.conversation_lengths = corpus.lengths
        per_epoch = [self._count_optimizer_steps(len(self._plan_epoch(epoch))) for epoch in range(optimizer_settings.epochs)]
        self.total_steps = sum(per_epoch)
        if min(per_epoch) == 0:
            raise TrainingError(
                f"the data has fewer rows than one step needs ({self.rows_per_batch} rows x "
                f"{optimizer_settings.gradient_accumulation_steps} batches): add data, or lower "
                "optimizer.batch_size_per_process or "
                "optimizer.gradient_accumulation_steps."
            )

    def request_stop(self) -> None:
        """Let all processes save after the current step, and `run` return. May be called by a signal handler or a reporter."""
        self.is_stop_requested = True

    def run(self) -> TrainingProgress:
        """Train to the end, or save and return after the step in which a stop was requested. Raises DrafterError.

        A training resumes from `last` in the output folder if it exists.
        """
        try:
            with report_out_of_memory(self.settings):
                return self._run()
        finally:
            self.hidden_state_source.discard_prefetched()

    def _run(self) -> TrainingProgress:
        if self.progress.step == 0:
            self.resume()
        processes = self.processes
        module: Any = self.loss
        if processes.world_size > 1 and not self.is_sharded:
            module = DistributedDataParallel(self.loss, broadcast_buffers=False)
        self.drafter.train()
        progress, size = self.progress, self.settings.optimizer.gradient_accumulation_steps
        if self._is_evaluation_due() and progress.step not in dict(progress.evaluations):
            self._evaluate_and_save()  # the process ended between the save and the evaluation
        for epoch in range(progress.epoch, self.settings.optimizer.epochs):
            batches = self._plan_epoch(epoch)
            last_batch = self._count_optimizer_steps(len(batches)) * size
            for begin in range(progress.next_batch, last_batch, size):
                self._prefetch(batches[begin : min(begin + size + PREFETCHED_BATCHES, last_batch)])
                report = self._train_step(module, batches[begin : begin + size])
                progress.step, progress.next_batch = progress.step + 1, begin + size
                if processes.is_main:
                    self.reporter.on_step(report)
                save_every = self.settings.output.save_every
                if self._is_evaluation_due():
                    self._save()
                    self._evaluate_and_save()
                elif self._is_stopping or (save_every is not None and progress.step % save_every == 0):
                    self._save()
                if self._is_stopping:
                    return progress
            progress.epoch, progress.next_batch = epoch + 1, 0
        return self.progress

    def _is_evaluation_due(self) -> bool:
        step = self.progress.step
        return step > 0 and (step % self.settings.output.evaluate_every == 0 or step == self.total_steps)

    def _count_optimizer_steps(self, batches: int) -> int:
        return batches // self.settings.optimizer.gradient_accumulation_steps

    def _plan_epoch(self, epoch: int) -> list[tuple[BatchRow, ...]]:
        return plan_batches(
            self.conversation_lengths,
            rows_per_batch=self.rows_per_batch,
            seed=self.settings.optimizer.seed,
            epoch=epoch,
            packed_row_tokens=self.packed_row_tokens,
        )

    def _select_own_rows(self, rows: Sequence[BatchRow]) -> Sequence[BatchRow]:
        size = self.settings.optimizer.batch_size_per_process
        return rows[self.processes.rank * size : (self.processes.rank + 1) * size]

    def _prefetch(self, batches: Sequence[Sequence[BatchRow]]) -> None:
        """Let the source load the states of this step and the next batches, which overlaps with the computation."""
        indices = [index for rows in batches for row in self._select_own_rows(rows) for index in row]
        self.hidden_state_source.prefetch([self.corpus[index][0] for index in indices])

    def _train_step(self, module: Any, batches: Sequence[Sequence[BatchRow]]) -> StepReport:
        processes, optimizer_settings = self.processes, self.settings.optimizer
        rate = scheduled_learning_rate(
            self.progress.step, self.total_steps, optimizer_settings.warmup_ratio, optimizer_settings.learning_rate
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        metrics, tokens = TrainingMetrics.zero(self.settings.loss.horizon, processes.device), 0
        total = torch.zeros((), dtype=torch.float64, device=processes.device)
        for index, rows in enumerate(batches):
            own_rows = self._select_own_rows(rows)
            tokens += sum(self.conversation_lengths[index] for row in rows for index in row)
            with self._communicate_gradients(module, is_last=index + 1 == len(batches)):
                loss = self._compute_loss(module, self.corpus, own_rows)
                loss.weighted_sum.backward()  # type: ignore[no-untyped-call]
            metrics += loss.metrics
            total += loss.weighted_sum.detach()
        processes.all_reduce(metrics.sums)
        # All processes have to stop after the same step, so a request of any of them travels with the loss.
        shared = processes.all_reduce(torch.stack([total, total.new_tensor(self.is_stop_requested)]))
        total, self._is_stopping = shared[0], bool(shared[1])
        # The loss is the mean over the positions of all processes; DistributedDataParallel divided by the number of processes.
        positions = max(metrics.position_count, 1.0)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        torch._foreach_mul_(
            [parameter.grad for parameter in parameters if parameter.grad is not None], processes.world_size / positions
        )
        norm = float(gather(torch.nn.utils.clip_grad_norm_(parameters, optimizer_settings.max_grad_norm)))
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {self.progress.step + 1}: the gradient is {norm}; `last` contains an earlier step: lower "
                f"optimizer.learning_rate ({optimizer_settings.learning_rate}) or check the data."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress = self.progress
        return StepReport(
            progress.step + 1, self.total_steps, progress.epoch, float(total) / positions, norm, rate, tokens, metrics
        )

    def _communicate_gradients(self, module: Any, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a batch: gradients of the processes are added with the last batch of a step only."""
        if self.is_sharded:
            module.set_requires_gradient_sync(is_last)
        elif self.processes.world_size > 1 and not is_last:
            context: contextlib.AbstractContextManager[None] = module.no_sync()
            return context
        return contextlib.nullcontext()

    def _compute_loss(self, module: Any, corpus: Corpus, rows: Sequence[BatchRow]) -> LossOutput:
        device = self.processes.device
        tokens, loss_mask = assemble_batch(corpus, rows)
        tokens = tokens.to(device)
        conversations = [[corpus[index][0] for index in row] for row in rows]
        text_starts = None
        if any(len(row) > 1 for row in conversations):
            lengths = [[len(conversation) for conversation in row] for row in conversations]
            text_starts = compute_text_starts(lengths, tokens.shape[1]).to(device)
            states = fetch_packed_hidden_states(self.hidden_state_source, tokens, conversations)
        else:
            states = self.hidden_state_source.fetch_hidden_states(tokens, conversations)
        batch = TrainingBatch(tokens, loss_mask.to(device), states.aux_hidden_states, states.final_hidden_states, text_starts)
        with torch.autocast(device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not torch.float32):
            loss: LossOutput = module(batch)
        return loss

    def measure_acceptance(self) -> tuple[float, TrainingMetrics]:
        """Return (acceptance length, metrics) on the held-out data, over all processes."""
        with gathered_parameters(self.loss) if self.is_sharded else contextlib.nullcontext():
            return self._measure_acceptance()

    def _choose_held_out(self) -> list[int]:
        """Return the indices to evaluate, evenly spaced: a corpus is in the order of its sources."""
        count = min(len(self.held_out), self.settings.output.max_held_out_conversations)
        return [position * len(self.held_out) // count for position in range(count)]

    @torch.no_grad()
    def _measure_acceptance(self) -> tuple[float, TrainingMetrics]:
        processes, rows = self.processes, self.settings.optimizer.batch_size_per_process
        indices = self._choose_held_out()
        batches = [[(index,) for index in indices[at : at + rows]] for at in range(0, len(indices), rows)]
        metrics = TrainingMetrics.zero(self.settings.loss.horizon, processes.device)
        conditions = self.settings.output.best_by
        # Without conditions: tokens and verification steps; with them: tokens and steps of each.
        totals = torch.zeros(max(len(conditions), 1), 2, dtype=torch.float64, device=processes.device)
        for round_number in range(math.ceil(len(batches) / processes.world_size)):
            index = round_number * processes.world_size + processes.rank
            # A process without a batch computes one that another process counts, because a sharded target needs all processes.
            batch = batches[index % len(batches)]
            loss = self._compute_loss(self.evaluation, self.held_out, batch)
            if index < len(batches):
                _, loss_mask = assemble_batch(self.held_out, batch)
                metrics += loss.metrics
                totals += self._count_tokens_and_steps(loss, loss_mask).to(totals.device)
        processes.all_reduce(metrics.sums)
        lengths = [emitted / max(steps, 1.0) for emitted, steps in processes.all_reduce(totals).tolist()]
        self._lengths_by_condition = dict(zip(map(describe_condition, conditions), lengths, strict=False))
        weights = [condition.weight for condition in conditions] or [1.0]
        mean = sum(weight * length for weight, length in zip(weights, lengths, strict=True)) / sum(weights)
        return mean, metrics

    def _count_tokens_and_steps(self, loss: LossOutput, loss_mask: Tensor) -> Tensor:
        """Return (tokens, verification steps) of a batch: a row for each condition, or that of greedy speculation."""
        k, conditions = self.settings.output.num_speculative_tokens, self.settings.output.best_by
        if not conditions:
            return torch.tensor([simulate_speculation(loss.argmax_matches, loss_mask, k)], dtype=torch.float64)
        rows = []
        for condition, acceptance in zip(conditions, loss.acceptance[1:], strict=True):
            by_position, of_text = acceptance.greedy, acceptance.greedy_text
            if condition.draft_sampling == "drawn":
                by_position, of_text = acceptance.drawn, acceptance.drawn_text
            counts = torch.zeros(k + 1, dtype=torch.float64)
            for row in zip(
                by_position[:k].transpose(0, 1).tolist(), of_text[:k].transpose(0, 1).tolist(), loss_mask.tolist(), strict=True
            ):
                counts += expected_counts_of_spans(*row)
            rows.append(torch.stack([counts.sum(), counts[0]]))  # a step emits the accepted tokens and another
        return torch.stack(rows)

    def _evaluate_and_save(self) -> None:
        length, metrics = self.measure_acceptance()
        is_best = length > self.progress.best_acceptance_length
        self.progress.best_acceptance_length = max(self.progress.best_acceptance_length, length)
        self.progress.evaluations.append((self.progress.step, length))
        if self.processes.is_main:
            self.reporter.on_evaluation(EvaluationReport(self.progress.step, length, is_best, metrics))
        if is_best:
            notes = {
                "step": str(self.progress.step),
                "acceptance_length": f"{length:.4f}",
                "tokens": str(self.settings.output.num_speculative_tokens),
                **{f"acceptance_length, {name}": f"{value:.4f}" for name, value in self._lengths_by_condition.items()},
            }
            content = self._build_checkpoint(dataclasses.replace(self.provenance, notes={**self.provenance.notes, **notes}))
            if self.processes.is_main:
                with checkpoint.replace_checkpoint(self.output_folder / "best") as folder:
                    checkpoint.write_checkpoint(folder, content)
        self._save()

    def _save(self) -> None:
        """Save `last`, from which a training resumes."""
        content, state = self._build_checkpoint(self.provenance), self._training_state()
        if self.processes.is_main:
            with checkpoint.replace_checkpoint(self.output_folder / "last") as folder:
                checkpoint.write_checkpoint(folder, content, include_embedding=False)
                _write_state(folder / TRAINING_STATE_FILE, state)
        self.processes.barrier()

    def _build_checkpoint(self, provenance: Provenance) -> DrafterCheckpoint:
        """Return the content of a checkpoint, in all processes."""
        content = checkpoint.build_checkpoint(self.drafter, provenance)
        return dataclasses.replace(content, tensors=self._gather(content.tensors))

    def _gather(self, values: Any) -> Any:
        """Return whole tensors, on CPU if they are sharded, because a device may not have the memory for them."""
        return gather(values, CPU_DEVICE) if self.is_sharded else values

    def _training_state(self) -> dict[str, Any]:
        return {
            "progress": vars(self.progress),
            "optimizer": self._gather(self.optimizer.state_dict()),
            "requirements": self._resume_requirements(),
        }

    def _resume_requirements(self) -> dict[str, Any]:
        """Return the settings and sizes that must be equal to resume a training."""
        settings = self.settings.model_dump(
            mode="json",
            include={
                "drafter": True,
                "data": {"max_length", "packing"},
                "loss": True,
                "optimizer": True,
                "output": {"best_by", "num_speculative_tokens", "max_held_out_conversations"},
            },
            exclude={"optimizer": {"shard"}},  # checkpoints are whole, so that it may change
        )
        # By its digest: the same weights may lie in another folder.
        settings["drafter"]["initial_checkpoint"] = self.provenance.notes.get("trained further from")
        return {
            **settings,
            **self.input_ids,
            "processes": self.processes.world_size,
            "conversations": len(self.corpus),
            "tokens": len(self.corpus.tokens),
            "held-out conversations": len(self.held_out),
        }

    def resume(self) -> bool:
        """Resume from `last`; False if it does not exist. Raises CheckpointError, TrainingError.

        A kill while `last` was replaced may leave it as `.last.previous` only (`aerie_drafter.files`).
        """
        folder = self.output_folder / "last"
        if not folder.exists():
            folder = folder.resolve().with_name(".last.previous")
        if not folder.exists():
            return False
        saved = checkpoint.read_checkpoint(folder)
        try:
            state = torch.load(folder / TRAINING_STATE_FILE, map_location=self.processes.device, weights_only=True)
            progress, optimizer = TrainingProgress(**state["progress"]), state["optimizer"]
            requirements = state["requirements"]
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise TrainingError(
                f"{folder / TRAINING_STATE_FILE}: invalid training state ({error}); set another output.folder."
            ) from error
        differing = _find_first_difference(requirements, self._resume_requirements())
        if differing is not None:
            name, before, now = differing
            raise TrainingError(
                f"{folder}: that training had {name} {before!r}, but now it is {now!r}; set another output.folder, "
                "or restore the setting to resume."
            )
        if saved.config != self.drafter.config:
            raise TrainingError(
                f"{folder}: its drafter has another configuration than these settings; set another output.folder."
            )
        self._load(saved.tensors, optimizer)
        self.progress = progress
        return True

    def _load(self, tensors: Mapping[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Load saved weights and the optimizer's state, which are whole. The embedding is the target's."""
        state = self.drafter.state_dict()
        loaded = {name: like_parameter(tensor, state[name]) for name, tensor in tensors.items()}
        self.drafter.load_state_dict({**state, **loaded})
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {
            index: {name: like_parameter(value, parameters[index]) for name, value in values.items()}
            for index, values in optimizer["state"].items()
        }
        self.optimizer.load_state_dict({**optimizer, "state": moments})


@contextlib.contextmanager
def report_out_of_memory(settings: TrainingSettings) -> Iterator[None]:
    """Raise TrainingError with the fields to change if a device has too little memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows, length = settings.optimizer.batch_size_per_process, settings.data.max_length
        raise TrainingError(
            f"the device has too little memory: lower optimizer.batch_size_per_process ({rows}) or data.max_length ({length}), "
            f"or set optimizer.activation_checkpointing, optimizer.shard or target.shard ({str(error).partition('. ')[0]})."
        ) from error


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a training state. Raises OSError, in place of the RuntimeError by which torch.save hides a full disk."""
    with path.open("wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def describe_condition(condition: AcceptanceCondition) -> str:
    """Return a condition in words, as the model card has it."""
    return f"temperature {condition.temperature:g}, {condition.draft_sampling} drafts"


def scheduled_learning_rate(step: int, total_steps: int, warmup_share: float, peak_learning_rate: float) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then half a cosine to zero."""
    warmup_steps = round(total_steps * warmup_share)
    if step < warmup_steps:
        return peak_learning_rate * (step + 1) / warmup_steps
    return peak_learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))


def _resolve_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "float32" and device.type == "cuda":
        raise ConfigError(
            "optimizer.precision is float32: the fused attention on GPU supports 16-bit numbers only; use bfloat16."
        )
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _find_first_difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return (name, before, now) of the first difference between settings; None if they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            inner = f"{name}.{key}" if name else key
            if (difference := _find_first_difference(before.get(key), now.get(key), inner)) is not None:
                return difference
        return None
    return None if before == now else (name, before, now)
