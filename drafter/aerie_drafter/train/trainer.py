"""The training loop: what is done in which order, on how many devices, and what survives a kill.

Guarantees: on CPU, with the same number of threads, a training gives the same weights bit for bit however often it was killed
and started again; several processes train as one does on all their rows, to rounding; `last` and `best` in the output folder
are each replaced whole or not at all. No random number is drawn after the first weights: the order of the data is a function
of seed and epoch. Not guaranteed: equal bits on GPU or between numbers of processes.

`best` is the checkpoint with the longest acceptance length on held-out text, measured by a walk of greedy speculation over it,
not the one with the least loss, which also counts what verification never reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aerie_drafter import checkpoint
from aerie_drafter.checkpoint import Provenance
from aerie_drafter.errors import ConfigError, TrainingError
from aerie_drafter.model import Drafter
from aerie_drafter.train.data import Corpus, Row, assemble, plan
from aerie_drafter.train.processes import Processes
from aerie_drafter.train.settings import Settings
from aerie_drafter.train.states import Source
from aerie_drafter.train.ttt import Batch, Outcome, Tally, TrainingTimeTest, walk

STATE = "training.pt"


@dataclass(frozen=True)
class Stepped:
    """One step of the optimizer."""

    step: int
    of: int
    epoch: int
    loss: float
    """Mean over counted positions of the weighted sum over steps of KL, in nats."""
    gradient: float
    """Norm before clipping."""
    learning_rate: float
    tokens: int
    """Read in this step, by all processes, padding not counted."""
    tally: Tally


@dataclass(frozen=True)
class Measured:
    """One measurement on the held-out data."""

    step: int
    acceptance_length: float
    """Tokens per verification step of a greedy walk, the bonus token included."""
    best: bool
    tally: Tally


class Report(Protocol):
    """Who is told how it goes; called in the first process only."""

    def stepped(self, news: Stepped) -> None: ...
    def measured(self, news: Measured) -> None: ...


class Silent:
    """Tells nobody."""

    def stepped(self, news: Stepped) -> None:
        """Nothing."""

    def measured(self, news: Measured) -> None:
        """Nothing."""


@dataclass
class Place:
    """Where a training stands: the step it has done, and the batch that comes next."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0
    measured: list[tuple[int, float]] = field(default_factory=list)
    """(step, acceptance length) of every measurement."""


class Trainer:
    """One training. Everything that is random or costly to make is given to it."""

    def __init__(
        self,
        drafter: Drafter,
        source: Source,
        teacher: Tensor,
        corpus: Corpus,
        held_out: Corpus,
        settings: Settings,
        *,
        processes: Processes | None = None,
        provenance: Provenance | None = None,
        report: Report | None = None,
    ) -> None:
        self.processes = processes or Processes()
        self.settings, self.source, self.corpus, self.held_out = settings, source, corpus, held_out
        self.provenance, self.report = provenance or Provenance(horizon=settings.loss.horizon), report or Silent()
        self.folder = settings.output.folder
        device = self.processes.device
        self.drafter = drafter.to(device)
        self.loss = TrainingTimeTest(self.drafter, teacher, horizon=settings.loss.horizon, decay=settings.loss.decay)
        parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        how = settings.optimizer
        self.optimizer = torch.optim.AdamW(parameters, lr=how.learning_rate, betas=how.betas, weight_decay=how.weight_decay)
        self.precision = _precision(how.precision, device)
        self.place = Place()
        self.rows = how.rows * self.processes.count
        self.pack = settings.data.max_length if settings.data.packing else None
        if self.pack is not None and not source.packs:
            raise ConfigError("data.packing is true, and states from files are of one conversation each; set it to false.")
        self.lengths = corpus.lengths
        per_epoch = [self._steps_of(len(self._plan(epoch))) for epoch in range(how.epochs)]
        self.steps = sum(per_epoch)
        if min(per_epoch) == 0:
            raise TrainingError(
                f"the data makes fewer rows than one step takes ({self.rows} rows x {how.accumulate} batches): give more data, "
                "or lower optimizer.rows or optimizer.accumulate."
            )

    def run(self) -> Place:
        """Train to the end, on from `last` in the output folder if it is there. Raises EagleError."""
        if self.place.step == 0:
            self.resume()
        processes = self.processes
        module: Any = self.loss
        if processes.count > 1:
            module = DistributedDataParallel(self.loss, broadcast_buffers=False)
        self.drafter.train()
        place, size = self.place, self.settings.optimizer.accumulate
        for epoch in range(place.epoch, self.settings.optimizer.epochs):
            batches = self._plan(epoch)
            for at in range(place.batch, self._steps_of(len(batches)) * size, size):
                news = self._step(module, batches[at : at + size])
                place.step, place.batch = place.step + 1, at + size
                if processes.first:
                    self.report.stepped(news)
                if place.step % self.settings.output.evaluate_every == 0 or place.step == self.steps:
                    self._measure_and_save()
            place.epoch, place.batch = epoch + 1, 0
        return self.place

    def _steps_of(self, batches: int) -> int:
        return batches // self.settings.optimizer.accumulate

    def _plan(self, epoch: int) -> list[tuple[Row, ...]]:
        return plan(self.lengths, rows=self.rows, seed=self.settings.optimizer.seed, epoch=epoch, pack=self.pack)

    def _step(self, module: Any, batches: Sequence[Sequence[Row]]) -> Stepped:
        processes, how = self.processes, self.settings.optimizer
        rate = learning_rate(self.place.step, self.steps, how.warmup, how.learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tally, tokens = Tally.empty(self.settings.loss.horizon, processes.device), 0
        total = torch.zeros((), dtype=torch.float64, device=processes.device)
        for index, rows in enumerate(batches):
            mine = rows[processes.rank * how.rows : (processes.rank + 1) * how.rows]
            tokens += sum(self.lengths[one] for row in rows for one in row)
            later = index + 1 < len(batches) and processes.count > 1
            with module.no_sync() if later else contextlib.nullcontext():
                outcome = self._outcome(module, self.corpus, mine)
                outcome.total.backward()  # type: ignore[no-untyped-call]
            tally += outcome.tally
            total += outcome.total.detach()
        processes.sum(tally.values)
        processes.sum(total)
        # The loss is a mean over all counted positions of all processes; DistributedDataParallel has divided by their number.
        positions = max(tally.positions, 1.0)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        torch._foreach_mul_([one.grad for one in parameters if one.grad is not None], processes.count / positions)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, how.clip))
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {self.place.step + 1}: the gradient is {norm}; `last` is of an earlier step: lower "
                f"optimizer.learning_rate ({how.learning_rate}) or look for broken data."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        place = self.place
        return Stepped(place.step + 1, self.steps, place.epoch, float(total) / positions, norm, rate, tokens, tally)

    def _outcome(self, module: Any, corpus: Corpus, rows: Sequence[Row]) -> Outcome:
        device = self.processes.device
        tokens, counted = assemble(corpus, rows)
        tokens = tokens.to(device)
        states = self.source.states(tokens, [[corpus[index][0] for index in row] for row in rows])
        batch = Batch(tokens, counted.to(device), states.aux, states.final)
        with torch.autocast(device.type, dtype=self.precision, enabled=self.precision is not torch.float32):
            found: Outcome = module(batch)
        return found

    @torch.no_grad()
    def measure(self) -> tuple[float, Tally]:
        """(acceptance length, tally) on the held-out data, over all processes."""
        processes, rows = self.processes, self.settings.optimizer.rows
        some = range(min(len(self.held_out), self.settings.output.held_out_limit))
        batches = [[(index,) for index in some[at : at + rows]] for at in range(0, len(some), rows)]
        tally = Tally.empty(self.settings.loss.horizon, processes.device)
        walked = torch.zeros(2, dtype=torch.float64, device=processes.device)
        for turn in range(math.ceil(len(batches) / processes.count)):
            index = turn * processes.count + processes.rank
            # A process without a batch of its own goes along with one that is counted elsewhere: a sharded target needs all.
            batch = batches[index % len(batches)]
            outcome = self._outcome(self.loss, self.held_out, batch)
            if index < len(batches):
                _, counted = assemble(self.held_out, batch)
                tally += outcome.tally
                walked += torch.tensor(walk(outcome.agreed, counted, self.settings.output.tokens), dtype=torch.float64).to(
                    walked.device
                )
        processes.sum(tally.values)
        emitted, steps = processes.sum(walked).tolist()
        return emitted / max(steps, 1.0), tally

    def _measure_and_save(self) -> None:
        length, tally = self.measure()
        best = length > self.place.best
        self.place.best = max(self.place.best, length)
        self.place.measured.append((self.place.step, length))
        if self.processes.first:
            self.report.measured(Measured(self.place.step, length, best, tally))
            if best:
                notes = {
                    "step": str(self.place.step),
                    "acceptance_length": f"{length:.4f}",
                    "tokens": str(self.settings.output.tokens),
                }
                origin = dataclasses.replace(self.provenance, notes=notes)
                checkpoint.save(self.folder / "best", self.drafter, origin)
            with checkpoint.writing(self.folder / "last") as folder:
                checkpoint.write(folder, checkpoint.pieces(self.drafter, self.provenance), embeddings=False)
                torch.save(self._state(), folder / STATE)
        self.processes.wait()

    def _state(self) -> dict[str, Any]:
        return {
            "place": vars(self.place),
            "optimizer": self.optimizer.state_dict(),
            "same": self._same(),
        }

    def _same(self) -> dict[str, Any]:
        """What has to be the same for a training to go on."""
        kept = self.settings.model_dump(mode="json", include={"drafter", "data", "loss", "optimizer"})
        return {**kept, "processes": self.processes.count, "conversations": len(self.corpus), "tokens": len(self.corpus.tokens)}

    def resume(self) -> bool:
        """Take up `last`; False where there is none. Raises CheckpointError, TrainingError."""
        folder = self.folder / "last"
        if not folder.exists():
            return False
        found = checkpoint.read(folder)
        try:
            state = torch.load(folder / STATE, map_location=self.processes.device, weights_only=True)
            place, same, optimizer = Place(**state["place"]), state["same"], state["optimizer"]
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise TrainingError(f"{folder / STATE}: no state of a training ({error}); name another output.folder.") from error
        differing = _difference(same, self._same())
        if differing is not None:
            name, before, now = differing
            raise TrainingError(
                f"{folder}: that training had {name} {before!r}, and now it is {now!r}; name another output.folder, "
                "or set it back to go on."
            )
        if found.config != self.drafter.config:
            raise TrainingError(f"{folder}: its drafter has another shape than these settings say; name another output.folder.")
        self.drafter.load_state_dict({**self.drafter.state_dict(), **found.tensors})  # the embedding is the target's
        self.optimizer.load_state_dict(optimizer)
        self.place = place
        return True


def learning_rate(step: int, steps: int, warmup: float, peak: float) -> float:
    """Of a step, counted from 0: up in a straight line over the warm-up, then down half a cosine."""
    rising = round(steps * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


def _precision(name: str, device: torch.device) -> torch.dtype:
    if name == "float32" and device.type == "cuda":
        raise ConfigError("optimizer.precision is float32: the fused attention on GPU takes 16-bit numbers only; use bfloat16.")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two settings differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for one in sorted({*before, *now}):
            inner = f"{name}.{one}" if name else one
            if (found := _difference(before.get(one), now.get(one), inner)) is not None:
                return found
        return None
    return None if before == now else (name, before, now)
