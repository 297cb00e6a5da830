"""Construction of a trainer from settings: loads the target, tokenizes the data, and creates or loads the drafter."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aerie_drafter import checkpoint
from aerie_drafter.chat_template import read_template_arguments
from aerie_drafter.checkpoint import Provenance
from aerie_drafter.config import DrafterConfig
from aerie_drafter.errors import ConfigError, DataError, TargetError
from aerie_drafter.model import Drafter
from aerie_drafter.train import data
from aerie_drafter.train.answers import read_run_file
from aerie_drafter.train.compatibility import check_lengths, check_settings, describe_draft_vocabulary
from aerie_drafter.train.conversations import compute_sources_digest
from aerie_drafter.train.create import build_drafter_config, create_drafter
from aerie_drafter.train.data import Corpus
from aerie_drafter.train.identity import identify_target, identify_tokenizer
from aerie_drafter.train.processes import Processes
from aerie_drafter.train.settings import TrainingSettings
from aerie_drafter.train.state_server import HiddenStateServer
from aerie_drafter.train.states import (
    HiddenStateFiles,
    HiddenStateSource,
    InProcessTarget,
    LoadStates,
    StateLayout,
    StoredHiddenStates,
    TargetParts,
    check_layout,
    extract_target_parts,
    load_model,
    load_target_parts,
    load_tokenizer,
)
from aerie_drafter.train.trainer import Trainer, TrainingReporter, report_out_of_memory


@dataclass(frozen=True)
class PreparedData:
    """Data of a training, and the identity of its target."""

    corpus: Corpus
    held_out: Corpus
    target_id: str

    @property
    def conversations(self) -> list[Tensor]:
        """Return the tokens of all conversations, those held out last."""
        return [corpus[index][0] for corpus in (self.corpus, self.held_out) for index in range(len(corpus))]

    @property
    def input_ids(self) -> dict[str, str]:
        """Return what has to be the same when a training resumes, by its name in messages."""
        return {
            "target": self.target_id,
            "training data": data.compute_corpus_digest(self.corpus),
            "held-out data": data.compute_corpus_digest(self.held_out),
        }


def build_trainer(
    settings: TrainingSettings,
    *,
    prepared: PreparedData | None = None,
    processes: Processes | None = None,
    reporter: TrainingReporter | None = None,
    log_progress: Callable[[str], None] | None = None,
) -> Trainer:
    """Build the trainer. Raises DrafterError.

    `log_progress` gets a message before each slow step. In a process group `prepared` has to be passed.
    """
    processes, log_progress = processes or Processes(), log_progress or (lambda _: None)
    prepared = prepared or prepare_data(settings, log_progress)
    corpus = prepared.corpus
    log_progress("loading the target")
    with report_out_of_memory(settings):
        target_parts, create_source = _load_target(settings, processes, prepared)
        _check_token_ids((corpus, prepared.held_out), target_parts)
        drafter = _load_or_create_drafter(settings, target_parts, corpus)
        log_progress(describe_draft_vocabulary(corpus, drafter.t2d))
        return Trainer(
            drafter,
            create_source(drafter.config),
            target_parts.lm_head,
            corpus,
            prepared.held_out,
            settings,
            processes=processes,
            provenance=_build_provenance(settings, prepared.target_id),
            input_ids=prepared.input_ids,
            reporter=reporter,
        )


def prepare_data(settings: TrainingSettings, log_progress: Callable[[str], None] | None = None) -> PreparedData:
    """Identify the target and load the data, which may take hours. Raises DrafterError.

    Processes of a group call this before they join it: collective operations wait only some minutes for each other.
    """
    tokenizer = load_tokenizer(settings.target.model, settings.target.revision)
    if settings.data.chat_template is not None:
        tokenizer.chat_template = _read_chat_template(settings.data.chat_template)
    for source in (*settings.data.train, *settings.data.held_out):
        check_tokenizer_of_answers(source, tokenizer)
    check_settings(settings)
    target_id = identify_target(settings.target.model, settings.target.revision)
    if log_progress is not None:
        log_progress("reading the data")
    corpus, held_out = load_corpora(settings, tokenizer, log_progress)
    for each in (corpus, held_out):
        check_lengths(settings, each)
    return PreparedData(corpus, held_out, target_id)


def load_corpora(
    settings: TrainingSettings, tokenizer: object, log_progress: Callable[[str], None] | None = None
) -> tuple[Corpus, Corpus]:
    """Load (training corpus, held-out corpus). Raises DataError."""
    output = Path(os.path.abspath(settings.output.folder))  # `.` has no name
    load = partial(
        data.load_corpus,
        tokenizer=tokenizer,
        max_length=settings.data.max_length,
        template=read_template_arguments(settings.template.tools, settings.template.kwargs),
        cache_folder=settings.data.cache or output.with_name(f"{output.name}.tokens"),
        skip_invalid=settings.data.skip_invalid,
        log_progress=log_progress,
    )
    corpus = load(settings.data.train)
    if settings.data.held_out:
        return corpus, load(settings.data.held_out)
    if len(corpus) < 2:
        raise DataError("data.train: only one conversation, so none can be held out; set data.held_out.")
    order = list(range(len(corpus)))
    random.Random(f"held out {settings.optimizer.seed}").shuffle(order)  # noqa: S311 (an order, no secret)
    count = max(1, round(len(order) * settings.data.held_out_share))
    return corpus.select(sorted(order[count:])), corpus.select(sorted(order[:count]))


def _check_token_ids(corpora: Sequence[Corpus], target_parts: TargetParts) -> None:
    largest = max(int(corpus.tokens.max()) for corpus in corpora)
    if largest >= len(target_parts.embedding):
        raise DataError(
            f"the data contains token {largest}, and the target has {len(target_parts.embedding)} tokens: the exact tokens are "
            "another target's; generate them with this one."
        )


def check_tokenizer_of_answers(source: Path, tokenizer: object) -> None:
    """Check that exact tokens were generated with this tokenizer, if a run file says with which. Raises DataError."""
    generated_with, own = read_run_file(source).get("tokenizer"), identify_tokenizer(tokenizer)
    if generated_with not in (None, own):
        raise DataError(
            f"{source}: its tokens are of the tokenizer {generated_with}, and the target's is {own}: they are another target's "
            "answers; generate them with this one."
        )


def load_parts_of_folder(settings: TrainingSettings, dtype: torch.dtype, device: torch.device) -> TargetParts:
    """Load what a training from stored states needs of its target. Raises TargetError."""
    folder = Path(settings.target.model)
    if not folder.is_dir():
        raise TargetError(f"target.model {folder}: target.hidden_states requires a folder.")
    return load_target_parts(folder, dtype, device)


def resolve_layout(settings: TrainingSettings, target_parts: TargetParts, aux_layer_ids: Sequence[int]) -> StateLayout:
    """Return the layout of stored states: by default the auxiliary layers, then the number of layers. Raises TargetError."""
    last = int(target_parts.config.num_hidden_layers)
    layers = settings.target.hidden_state_layer_ids or tuple(dict.fromkeys((*aux_layer_ids, last)))
    check_layout(layers, aux_layer_ids, target_parts)
    return StateLayout(layers, int(target_parts.config.hidden_size))


def _build_state_loader(
    settings: TrainingSettings, target_parts: TargetParts, layout: StateLayout, prepared: PreparedData
) -> LoadStates:
    """Return a function that reads a conversation's states from a file, or requests them from the server if there is none."""
    target = settings.target
    stored = None if target.hidden_states is None else HiddenStateFiles(target.hidden_states, layout, prepared.target_id)
    if target.hidden_states_endpoint is None:
        assert stored is not None
        stored.check_complete(prepared.conversations)
        return stored.load
    server = HiddenStateServer(
        target.hidden_states_endpoint,
        target.hidden_states_model,
        target_parts,
        layout,
        shared_folder=target.hidden_states_shared_folder,
    )
    return lambda tokens: stored.load(tokens) if stored is not None and tokens in stored else server.extract(tokens)


def _load_target(
    settings: TrainingSettings, processes: Processes, prepared: PreparedData
) -> tuple[TargetParts, Callable[[DrafterConfig], HiddenStateSource]]:
    target = settings.target
    device = processes.device
    names = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}
    dtype = names.get(target.dtype) or getattr(torch, target.dtype)
    if target.reads_states:
        target_parts = load_parts_of_folder(settings, dtype, device)

        def create_stored_source(config: DrafterConfig) -> HiddenStateSource:
            layout = resolve_layout(settings, target_parts, config.aux_layer_ids)
            load = _build_state_loader(settings, target_parts, layout, prepared)
            return StoredHiddenStates(load, target_parts, config.aux_layer_ids, layout)

        return target_parts, create_stored_source
    model = load_model(target.model, target.revision, dtype, torch.device("cpu") if target.shard else device)
    target_parts = extract_target_parts(model)
    if target.shard:
        target_parts = _shard_target(model, target_parts, processes)
    return target_parts, lambda config: InProcessTarget(model, config.aux_layer_ids)


def _load_or_create_drafter(settings: TrainingSettings, target_parts: TargetParts, corpus: Corpus) -> Drafter:
    initial_checkpoint = settings.drafter.initial_checkpoint
    if initial_checkpoint is not None:
        target_folder = Path(settings.target.model)
        drafter = checkpoint.load_drafter(initial_checkpoint, target=target_folder if target_folder.is_dir() else None).float()
        shape, expected = tuple(drafter.embed_tokens.weight.shape), tuple(target_parts.embedding.shape)
        if shape != expected or drafter.config.target_hidden_size != expected[1]:
            raise TargetError(
                f"drafter.initial_checkpoint {initial_checkpoint}: its embedding is {shape[0]} x {shape[1]}, the "
                f"target's {expected[0]} x {expected[1]}: it was "
                "trained for another target."
            )
        return drafter
    config = build_drafter_config(settings.drafter, target_parts.config)
    if tuple(target_parts.embedding.shape) != (config.vocab_size, config.hidden_size):
        raise TargetError(
            f"the target's embedding is {tuple(target_parts.embedding.shape)}, but its configuration has vocab_size "
            f"{config.vocab_size} and hidden_size {config.hidden_size}."
        )
    return create_drafter(
        config,
        target_parts,
        data.most_frequent_tokens(corpus, config.draft_vocab_size, config.vocab_size),
        settings.optimizer.seed,
    )


def _shard_target(model: object, target_parts: TargetParts, processes: Processes) -> TargetParts:
    """Shard the target's layers over all processes, and return its other parts, which are replicated on each device."""
    if processes.world_size < 2:
        raise ConfigError("target.shard is true, but this is a single process: start it with torchrun, or set it to false.")
    from torch.distributed.fsdp import fully_shard

    from aerie_drafter.train.states import get_text_decoder

    decoder = get_text_decoder(model)
    mesh = dist.device_mesh.init_device_mesh(processes.device.type, (processes.world_size,))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    for name, child in decoder.named_children():
        if name != "layers":
            child.to(processes.device)
    head = target_parts.lm_head.to(processes.device)
    return TargetParts(target_parts.config, target_parts.embedding.to(processes.device), head, decoder.norm)


def _build_provenance(settings: TrainingSettings, target_id: str) -> Provenance:
    """Return the provenance of the checkpoints: target by name and digest, data by names and digest."""
    names, initial = ", ".join(source.name for source in settings.data.train), settings.drafter.initial_checkpoint
    return Provenance(
        target=settings.target.model,
        target_digest=target_id if target_id.startswith("sha256:") else "",
        training_data=f"{names} (sha256:{compute_sources_digest(settings.data.train)})",
        training_horizon=settings.loss.horizon,
        notes={} if initial is None else {"trained further from": checkpoint.compute_model_digest(initial)},
    )


def _read_chat_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template {path}: cannot be read ({error}).") from error
