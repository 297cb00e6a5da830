"""The training loop: repeatable, resumable after a kill, equal over processes, and safe on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from aerie_drafter import checkpoint
from aerie_drafter.errors import CheckpointError, ConfigError, DataError, DrafterError, TargetError, TrainingError
from aerie_drafter.evaluate.exact import Condition, DraftSampling, count_texts
from aerie_drafter.evaluate.expected import acceptance_length
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.train import data
from aerie_drafter.train.settings import TrainingSettings, parse_settings
from aerie_drafter.train.setup import build_trainer, prepare_data
from aerie_drafter.train.states import InProcessTarget, load_model, load_tokenizer
from aerie_drafter.train.trainer import EvaluationReport, StepReport, scheduled_learning_rate
from tests.nightly import at_night

Write = Callable[..., Path]

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class RecordingReporter:
    """A reporter that records its reports, and calls `at` with the number of each step."""

    def __init__(self, at: Callable[[int], None] | None = None) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.at = at or (lambda _: None)

    def on_step(self, step: StepReport) -> None:
        self.steps.append(step)
        self.at(step.step)

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        self.evaluations.append(evaluation)


@pytest.fixture
def settings_of(tmp_path: Path, target_folder: Path, write_conversations: Write) -> Callable[..., TrainingSettings]:
    """Return a function that builds settings of a training of seconds; fields by `group__field`."""
    path = write_conversations(24)

    def make(output: str = "out", **fields: Any) -> TrainingSettings:
        raw: dict[str, Any] = {
            "target": {"model": str(target_folder)},
            "drafter": {"draft_vocab_size": 48},
            "data": {"train": [str(path)], "held_out_share": 0.2},
            "loss": {"horizon": 3},
            "optimizer": {"epochs": 2, "batch_size_per_process": 2, "learning_rate": 3e-3},
            "output": {"folder": str(tmp_path / output), "evaluate_every": 4},
        }
        for name, value in fields.items():
            group, field = name.split("__")
            raw.setdefault(group, {})[field] = value
        return parse_settings(raw, "test")

    return make


Make = Callable[..., TrainingSettings]


def test_a_training_learns_and_saves_best_and_last_checkpoint(settings_of: Make) -> None:
    settings, listener = settings_of(optimizer__epochs=6), RecordingReporter()
    progress = build_trainer(settings, reporter=listener).run()
    assert progress.step == len(listener.steps) == listener.steps[0].total_steps
    assert listener.steps[-1].loss < listener.steps[0].loss / 3
    assert progress.best_acceptance_length == max(report.acceptance_length for report in listener.evaluations)
    best = checkpoint.load_drafter(settings.output.folder / "best")
    assert best.config.eagle_version == "EAGLE 3.1"
    provenance = checkpoint.read_provenance(settings.output.folder / "best")
    assert provenance.training_horizon == 3
    assert provenance.target_digest.startswith("sha256:")
    assert provenance.notes["acceptance_length"] == f"{progress.best_acceptance_length:.4f}"


def test_a_new_drafter_is_initialized_from_the_target(settings_of: Make, target_of: Callable[..., Any]) -> None:
    drafter, target = build_trainer(settings_of()).drafter, target_of()
    assert torch.equal(drafter.embed_tokens.weight, target.model.embed_tokens.weight)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[drafter.draft_token_ids])
    assert drafter.config.aux_layer_ids == (2, 3)
    assert all(parameter.eq(1).all() for name, parameter in drafter.named_parameters() if "norm" in name)


def test_other_losses_learn_too_and_report_acceptance(settings_of: Make) -> None:
    fields = {"loss__kl": 0.0, "loss__lk_lambda": 1.0, "loss__step_weights": [1.0, 0.5, 0.5], "drafter__draft_vocab_size": 264}
    listener = RecordingReporter()
    build_trainer(settings_of(optimizer__epochs=6, **fields), reporter=listener).run()
    first, last = listener.steps[0], listener.steps[-1]
    assert last.loss < first.loss / 2
    assert all(1 - b < (1 - a) / 1.5 for a, b in zip(first.metrics.drawn_acceptance, last.metrics.drawn_acceptance, strict=True))
    assert all(0 < share < 1 for share in last.metrics.drawn_acceptance + last.metrics.greedy_acceptance)


@pytest.mark.parametrize("packing", [False, True])
def test_the_same_settings_give_the_same_bits(settings_of: Make, *, packing: bool) -> None:
    digests = []
    for name in ("one", "two"):
        settings = settings_of(name, data__packing=packing, data__max_length=96, optimizer__gradient_accumulation_steps=2)
        build_trainer(settings).run()
        digests.append(checkpoint.compute_model_digest(settings.output.folder / "last"))
    assert digests[0] == digests[1]


_CHILD = """
import os, signal, sys
from pathlib import Path
from aerie_drafter.train.settings import read_settings
from aerie_drafter.train.setup import build_trainer

class Kill:
    def on_step(self, step):
        if step.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
    def on_evaluation(self, evaluation):
        pass

build_trainer(read_settings(Path(sys.argv[1])), reporter=Kill()).run()
"""


def run_child(program: str, settings: TrainingSettings, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own, with the settings' file as its first argument."""
    file, script = folder / "train.yaml", folder / "program.py"
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    script.write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *command, str(script), str(file)], capture_output=True, text=True, env=environment, timeout=240
    )


def test_a_resumed_training_gives_the_same_bits(settings_of: Make, tmp_path: Path) -> None:
    whole, killed = (
        settings_of("whole", optimizer__gradient_accumulation_steps=1),
        settings_of("killed", optimizer__gradient_accumulation_steps=1),
    )
    build_trainer(whole).run()
    ended = run_child(_CHILD, killed, tmp_path)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = build_trainer(killed)
    assert resumed.resume()
    assert resumed.progress.step == 4  # of the seven that were done, those up to the last save
    resumed.run()
    for name in ("last", "best"):
        assert checkpoint.compute_model_digest(killed.output.folder / name) == checkpoint.compute_model_digest(
            whole.output.folder / name
        )


def test_the_best_checkpoint_is_chosen_by_acceptance_length(settings_of: Make) -> None:
    """The walk over greedy answers of the target counts the drafts and tokens that `aerie_drafter.evaluate` counts."""
    trainer = build_trainer(
        settings_of(
            optimizer__epochs=20,
            optimizer__batch_size_per_process=4,
            drafter__draft_vocab_size=264,
            output__num_speculative_tokens=3,
        )
    )
    target = trainer.settings.target.model
    model = load_model(target, None, torch.float32, torch.device("cpu"))
    pair = ModelPair(TargetRunner(model, trainer.drafter.config.aux_layer_ids), load_tokenizer(target, None), trainer.drafter)
    prompts = [list(range(3 + index, 20 + 2 * index)) for index in range(24)]
    answered = answer_prompts(pair, prompts, EvaluationOptions(num_speculative_tokens=3, max_tokens=24))
    marked = []
    for prompt, text in zip(prompts, answered, strict=True):
        counted = torch.zeros(len(text.tokens), dtype=torch.bool)
        counted[len(prompt) : text.answer_end] = True
        marked.append((text.tokens, counted))
    trainer.corpus = trainer.held_out = data.Corpus.from_conversations(marked)
    trainer.conversation_lengths = trainer.corpus.lengths
    trainer.run()
    emitted = sum(int(counted.sum()) - 1 for _, counted in marked)  # the first token of each comes with the prompt
    counts = evaluate_texts(pair, answered, 3)
    assert counts.accepted_per_position[1] > 0  # so that walks with accepted tokens are compared
    assert trainer.measure_acceptance()[0] == emitted / counts.drafts


@pytest.mark.parametrize("sampling", ["drawn", "greedy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_best_by_a_condition_is_the_expected_acceptance_length(settings_of: Make, temperature: float, sampling: str) -> None:
    """The trainer's figure for answers of the target equals that of `aerie-drafter evaluate --exact`."""
    condition = {"temperature": temperature, "draft_sampling": sampling}
    trainer = build_trainer(settings_of(output__best_by=[condition], drafter__draft_vocab_size=200))
    target = trainer.settings.target.model
    model = load_model(target, None, torch.float32, torch.device("cpu"))
    pair = ModelPair(TargetRunner(model, trainer.drafter.config.aux_layer_ids), load_tokenizer(target, None), trainer.drafter)
    prompts = [list(range(3 + index, 20 + 2 * index)) for index in range(6)]
    options = EvaluationOptions(num_speculative_tokens=0, max_tokens=16, temperature=temperature)
    answered = answer_prompts(pair, prompts, options, torch.Generator().manual_seed(1))
    measured = count_texts(model, {"d": trainer.drafter}, answered, 3, temperature)
    chosen = Condition(temperature, DraftSampling(sampling))
    expected = float(acceptance_length(measured[chosen]["d"].sum(0)))
    trainer.held_out = data.Corpus.from_conversations(
        [(text.tokens, torch.arange(len(text.tokens)) >= text.prompt_length) for text in answered]
    )
    assert trainer.measure_acceptance()[0] == pytest.approx(expected, rel=1e-5)
    assert expected > 1


def test_best_by_several_conditions_is_their_weighted_mean(settings_of: Make) -> None:
    drawn, greedy = {"temperature": 1.0, "draft_sampling": "drawn"}, {"temperature": 0.5}

    def measure(*conditions: dict[str, Any]) -> float:
        return build_trainer(settings_of(output__best_by=list(conditions))).measure_acceptance()[0]

    mean = (3 * measure(drawn) + measure(greedy)) / 4
    assert measure({**drawn, "weight": 3}, greedy) == pytest.approx(mean)
    assert measure(drawn) != pytest.approx(measure(greedy), abs=1e-3)


def test_a_training_is_not_resumed_with_another_choice_of_best(settings_of: Make) -> None:
    build_trainer(settings_of(output__best_by=[{"temperature": 1.0}], optimizer__epochs=1)).run()
    with pytest.raises(TrainingError, match=r"output.best_by .* but now it is \[\]"):
        build_trainer(settings_of(optimizer__epochs=1)).run()


@pytest.mark.parametrize(("count", "expected"), [(256, range(12)), (12, range(12)), (5, [0, 2, 4, 7, 9]), (1, [0])])
def test_held_out_conversations_of_the_whole_corpus_are_evaluated(
    settings_of: Make, monkeypatch: pytest.MonkeyPatch, count: int, expected: Sequence[int]
) -> None:
    trainer = build_trainer(settings_of(output__max_held_out_conversations=count, data__held_out_share=0.5))
    held_out = [trainer.held_out[index][0].tolist() for index in range(len(trainer.held_out))]
    source = trainer.hidden_state_source
    evaluated: list[int] = []

    def fetch(tokens: Tensor, rows: Sequence[Sequence[Tensor]], original: Any = source.fetch_hidden_states) -> Any:
        evaluated.extend(held_out.index(conversation.tolist()) for row in rows for conversation in row)
        return original(tokens, rows)

    monkeypatch.setattr(source, "fetch_hidden_states", fetch)
    trainer.measure_acceptance()
    assert evaluated == list(expected)


@pytest.mark.parametrize("step", [4, at_night(18)])
def test_an_evaluation_that_failed_loses_no_step_and_is_repeated(
    settings_of: Make, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Also the last one, after which no step follows."""
    whole, failing = settings_of("whole"), settings_of("failing")
    progress = build_trainer(whole).run()
    trainer = build_trainer(failing)
    assert trainer.total_steps == 18

    def measure(original: Any = trainer.measure_acceptance) -> Any:
        if trainer.progress.step == step:
            raise DataError("the server has gone")
        return original()

    monkeypatch.setattr(trainer, "measure_acceptance", measure)
    with pytest.raises(DataError, match="the server has gone"):
        trainer.run()
    resumed = build_trainer(failing)
    assert resumed.resume()
    assert resumed.progress.step == step
    assert resumed.run() == progress
    for name in ("last", "best"):
        digests = [checkpoint.compute_model_digest(each.output.folder / name) for each in (whole, failing)]
        assert digests[0] == digests[1]


def test_resuming_a_finished_training_changes_nothing(settings_of: Make) -> None:
    settings = settings_of()
    first = build_trainer(settings).run()
    digest = checkpoint.compute_model_digest(settings.output.folder / "last")
    listener = RecordingReporter()
    assert build_trainer(settings, reporter=listener).run() == first
    assert listener.steps == []
    assert checkpoint.compute_model_digest(settings.output.folder / "last") == digest


def test_data_is_rendered_with_the_template_arguments_of_the_settings(settings_of: Make, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    (tmp_path / "template.jinja").write_text(f"{{{{ tools[0].name }}}}{{{{ mood }}}}{TEMPLATE}")
    fields = {"data__chat_template": str(tmp_path / "template.jinja"), "template__tools": str(tmp_path / "tools.json")}
    prepared = prepare_data(settings_of(template__kwargs={"mood": "!"}, **fields))
    tokenizer = load_tokenizer(settings_of().target.model, None)
    assert {tokenizer.decode(prepared.corpus[index][0][:3]) for index in range(len(prepared.corpus))} == {"f!<user>"}
    with pytest.raises(ConfigError, match=r"template.tools /none: cannot be read as JSON"):
        prepare_data(settings_of(template__tools="/none"))


def test_exact_tokens_of_another_target_are_rejected(settings_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    record = {"prompt": "a", "response": "b", "sequences": [{"token_ids": [1, 2, 3, 264], "answer_spans": [[2, 4]]}]}
    path.write_text(f"{json.dumps(record)}\n" * 9)
    with pytest.raises(DataError, match="the data contains token 264, and the target has 264 tokens"):
        build_trainer(settings_of(data__train=[str(path)]))
    (tmp_path / "answers.jsonl.run.json").write_text('{"tokenizer": "sha256:0"}')
    with pytest.raises(DataError, match=r"answers.jsonl: its tokens are of the tokenizer sha256:0, and the target's is sha256:"):
        build_trainer(settings_of(data__train=[str(path)]))


def test_a_training_is_not_resumed_with_other_settings(settings_of: Make) -> None:
    build_trainer(settings_of()).run()
    with pytest.raises(TrainingError, match=r"last: that training had loss.step_decay 0.8, but now it is 0.5; set another"):
        build_trainer(settings_of(loss__step_decay=0.5)).run()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output__num_speculative_tokens": 2}, "output.num_speculative_tokens 3, but now it is 2"),
        ({"output__max_held_out_conversations": 2}, "output.max_held_out_conversations 256, but now it is 2"),
    ],
)
def test_a_training_is_not_resumed_if_best_would_be_measured_otherwise(
    settings_of: Make, fields: dict[str, Any], message: str
) -> None:
    build_trainer(settings_of(optimizer__epochs=1)).run()
    with pytest.raises(TrainingError, match=message):
        build_trainer(settings_of(optimizer__epochs=1, **fields)).run()


def test_a_training_is_not_resumed_with_more_held_out_conversations(settings_of: Make, write_conversations: Write) -> None:
    files = [str(write_conversations(count, f"{count}.jsonl")) for count in (8, 9)]
    build_trainer(settings_of(optimizer__epochs=1, data__held_out=files[:1])).run()
    with pytest.raises(TrainingError, match="had held-out conversations 8, but now it is 9"):
        build_trainer(settings_of(optimizer__epochs=1, data__held_out=files[1:])).run()


def test_a_kill_while_last_was_renamed_is_resumed(settings_of: Make) -> None:
    """Where the file system cannot exchange two names, the earlier checkpoint has another name for a moment."""
    settings = settings_of()
    progress = build_trainer(settings).run()
    folder = settings.output.folder
    (folder / "last").rename(folder / ".last.previous")
    resumed = build_trainer(settings)
    assert resumed.resume()
    assert resumed.run() == progress


def test_the_current_folder_is_an_output_folder(settings_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    build_trainer(settings_of(output__folder=".", optimizer__epochs=1)).run()
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"best", "last"}
    assert (tmp_path / "here.tokens").is_dir()


def test_too_little_memory_names_the_fields_to_change(settings_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer = build_trainer(settings_of())
    monkeypatch.setattr(trainer, "_compute_loss", run_out)
    with pytest.raises(TrainingError, match=r"lower optimizer.batch_size_per_process \(2\) or data.max_length \(2048\)"):
        trainer.run()
    monkeypatch.setattr("aerie_drafter.train.setup.load_model", run_out)
    with pytest.raises(TrainingError, match=r"target\.shard"):
        build_trainer(settings_of())


def test_what_was_prefetched_is_discarded_when_a_training_ends(settings_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    for name, learning_rate in (("complete", 3e-3), ("failed", 1e30)):
        trainer = build_trainer(settings_of(name, optimizer__learning_rate=learning_rate))
        monkeypatch.setattr(trainer.hidden_state_source, "discard_prefetched", lambda name=name: ended.append(name))
        with contextlib.suppress(TrainingError):
            trainer.run()
    assert ended == ["complete", "failed"]


def test_a_training_is_not_resumed_with_another_target(settings_of: Make, tmp_path: Path, target_of: Callable[..., Any]) -> None:
    """Other weights of the same sizes in the same folder, such as a newer fine-tune: `best` would be of the earlier target."""
    target = tmp_path / "target"
    shutil.copytree(settings_of().target.model, target)
    build_trainer(settings_of(target__model=str(target))).run()
    target_of(seed=1).save_pretrained(target)
    with pytest.raises(
        TrainingError, match=r"last: that training had target 'sha256:\w+', but now it is 'sha256:\w+'; set another"
    ):
        build_trainer(settings_of(target__model=str(target))).run()


@pytest.mark.parametrize(("name", "label"), [("train", "training data"), ("held_out", "held-out data")])
def test_a_training_is_not_resumed_with_other_data(settings_of: Make, write_conversations: Write, name: str, label: str) -> None:
    """Other words, with as many conversations and tokens."""
    files = {"data__train": [str(write_conversations(20, "a.jsonl"))], "data__held_out": [str(write_conversations(8, "b.jsonl"))]}
    build_trainer(settings_of(**files)).run()
    path = Path(files[f"data__{name}"][0])
    path.write_text(path.read_text().replace("one", "eno"))
    with pytest.raises(TrainingError, match=rf"last: that training had {label} 'sha256:\w+', but now it is 'sha256:\w+'"):
        build_trainer(settings_of(**files)).run()


def test_a_training_is_resumed_after_its_files_have_moved(settings_of: Make, tmp_path: Path) -> None:
    settings = settings_of()
    build_trainer(settings).run()
    shutil.copytree(settings.target.model, tmp_path / "moved")
    shutil.copy(settings.data.train[0], tmp_path / "moved.jsonl")
    moved = settings_of(
        target__model=str(tmp_path / "moved"),
        data__train=[str(tmp_path / "moved.jsonl")],
        data__cache=str(tmp_path / "elsewhere"),
    )
    assert build_trainer(moved).resume()


_ORDER = """
import sys
import torch.distributed as dist
from aerie_drafter.cli import run_cli
from aerie_drafter.train import data

def encode(*arguments, encode=data.encode_conversations):
    print("tokenizes", flush=True)
    return encode(*arguments)

def join(*arguments, join=dist.init_process_group):
    print("joins", flush=True)
    return join(*arguments)

data.encode_conversations = encode
dist.init_process_group = join
sys.exit(run_cli(["train", sys.argv[1]]))
"""


def test_one_process_tokenizes_before_any_joins_the_group(settings_of: Make, tmp_path: Path) -> None:
    """Tokenizing may take hours, and processes of a group wait for each other for ten minutes."""
    settings = settings_of(optimizer__epochs=1)
    ended = run_child(_ORDER, settings, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert ended.returncode == 0, ended.stderr
    events = [line for line in ended.stdout.splitlines() if line in ("tokenizes", "joins")]
    assert events == ["tokenizes", "joins", "joins"]  # the other process reads the cache


_FULL = """
import resource, sys
from pathlib import Path
from aerie_drafter.errors import CheckpointError
from aerie_drafter.train.settings import read_settings
from aerie_drafter.train.setup import build_trainer

class Fill:
    def on_step(self, step):
        if step.step == 6:  # after the save of step 4, before that of step 8
            limit = FILE.stat().st_size - 5000
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    def on_evaluation(self, evaluation):
        pass

settings = read_settings(Path(sys.argv[1]))
FILE = settings.output.folder / "last" / "NAME"
try:
    build_trainer(settings, reporter=Fill()).run()
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["model.safetensors", at_night("training.pt")])
def test_a_full_disk_keeps_the_previous_checkpoint(settings_of: Make, tmp_path: Path, name: str) -> None:
    settings = settings_of()
    ended = run_child(_FULL.replace("NAME", name), settings, tmp_path)
    assert "cannot be written (File too large)" in ended.stdout, ended.stderr
    assert "the previous one is unchanged" in ended.stdout
    resumed = build_trainer(settings)
    assert resumed.resume()
    assert resumed.progress.step == 4
    checkpoint.load_drafter(settings.output.folder / "best")
    assert sorted(path.name for path in settings.output.folder.iterdir()) == ["best", "last"]


def test_accumulated_batches_equal_one_larger_batch(settings_of: Make) -> None:
    """The loss is a mean over positions, however they are grouped, so both are equal up to rounding."""
    losses = []
    for name, rows, accumulate in (("one", 4, 1), ("two", 2, 2)):
        listener = RecordingReporter()
        fields = {
            "optimizer__batch_size_per_process": rows,
            "optimizer__gradient_accumulation_steps": accumulate,
            "data__packing": True,
            "data__max_length": 64,
        }
        build_trainer(settings_of(name, **fields), reporter=listener).run()
        losses.append([report.loss for report in listener.steps])
    # Packed rows come in one order, so the same rows make a step either way.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)  # float32 sums, in batches of other shapes


_TWO = """
import sys
from pathlib import Path
from aerie_drafter.train import processes
from aerie_drafter.train.settings import read_settings
from aerie_drafter.train.setup import build_trainer
from aerie_drafter.train.trainer import NullReporter

class Print(NullReporter):
    def on_step(self, step):
        print("loss", step.loss, step.gradient_norm, flush=True)

settings = read_settings(Path(sys.argv[1]))
with processes.join_process_group() as group:
    for shard in (False, True):
        output = settings.output.model_copy(update={"folder": settings.output.folder / f"sharded {shard}"})
        target = settings.target.model_copy(update={"shard": shard})
        build_trainer(settings.model_copy(update={"output": output, "target": target}), processes=group, reporter=Print()).run()
threads = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
assert not [name for name in threads if "gloo" in name], threads  # a thread that outlives its group may abort the process
"""


@pytest.mark.nightly  # test_processes.py has two processes with more settings
def test_two_processes_equal_one_with_twice_the_rows(settings_of: Make, tmp_path: Path) -> None:
    listener = RecordingReporter()
    alone = settings_of("alone", optimizer__batch_size_per_process=4, optimizer__epochs=1)
    build_trainer(alone, reporter=listener).run()
    both = settings_of("both", optimizer__batch_size_per_process=2, optimizer__epochs=1)
    ended = run_child(_TWO, both, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert ended.returncode == 0, ended.stderr
    reports = [tuple(map(float, line.split()[1:])) for line in ended.stdout.splitlines() if line.startswith("loss ")]
    count = len(listener.steps)
    assert len(reports) == 2 * count
    for part in (reports[:count], reports[count:]):
        assert [loss for loss, _ in part] == pytest.approx([report.loss for report in listener.steps], rel=1e-4)
        assert [norm for _, norm in part] == pytest.approx([report.gradient_norm for report in listener.steps], rel=1e-3)
    target = Path(both.target.model)
    single_process_drafter = checkpoint.load_drafter(alone.output.folder / "last", target=target)
    for shard in (False, True):
        two_process_drafter = checkpoint.load_drafter(both.output.folder / f"sharded {shard}" / "last", target=target)
        for name, parameter in single_process_drafter.named_parameters():
            torch.testing.assert_close(two_process_drafter.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)


def test_training_from_state_files_equals_training_from_the_target(
    settings_of: Make, tmp_path: Path, target_of: Callable[..., Any], tokenizer_of: Callable[..., Any]
) -> None:
    inside = settings_of("inside")
    corpus = data.load_corpus(inside.data.train, tokenizer_of(), max_length=2048)
    source, folder = InProcessTarget(target_of(), (2, 3, 6)), tmp_path / "states"
    folder.mkdir()
    for index in range(len(corpus)):
        tokens = corpus[index][0].long()
        hidden = source.fetch_hidden_states(tokens.unsqueeze(0)).aux_hidden_states[0].view(len(tokens), 3, -1).contiguous()
        save_file({"token_ids": tokens, "hidden_states": hidden}, folder / f"{index}.safetensors")
    losses = []
    files = settings_of("files", target__hidden_states=str(folder))
    for settings in (inside, files):
        listener = RecordingReporter()
        build_trainer(settings, reporter=listener).run()
        losses.append([report.loss for report in listener.steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)  # float32 sums, in batches of other shapes
    for index in (3, 5):
        (folder / f"{index}.safetensors").unlink()
    with pytest.raises(DataError, match="states: 2 of 24 conversations have no file of hidden states"):
        build_trainer(files)


def test_a_training_from_a_checkpoint_keeps_its_config(settings_of: Make) -> None:
    first = settings_of("first", drafter__fc_norm=False, drafter__norm_output=False)
    build_trainer(first).run()
    best = first.output.folder / "best"
    second = build_trainer(settings_of("second", drafter__initial_checkpoint=str(best)))
    assert second.drafter.config.eagle_version == "EAGLE 3"
    assert torch.equal(second.drafter.fc.weight, checkpoint.load_drafter(best).fc.weight)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"optimizer__batch_size_per_process": 40}, TrainingError, r"fewer rows than one step needs \(40 rows x 1 batches\)"),
        ({"data__train": ["none.jsonl"]}, DataError, "none.jsonl: cannot be read"),
        ({"target__model": "/none"}, TargetError, "target.model /none: its tokenizer cannot be loaded"),
        ({"target__shard": True}, ConfigError, "target.shard is true, but this is a single process: start it with torchrun"),
        ({"drafter__aux_layer_ids": [2, 9]}, TargetError, "aux_layer_ids contains layer 9, but the target has 6 layers"),
        ({"drafter__draft_vocab_size": 300}, ConfigError, "draft_vocab_size 300 is larger than vocab_size 264"),
        ({"drafter__family": "deepseek_v2"}, TargetError, "the target's configuration has no kv_lora_rank"),
        ({"drafter__initial_checkpoint": "/none"}, CheckpointError, "/none"),
        ({"data__chat_template": "/none"}, ConfigError, "data.chat_template /none: cannot be read"),
    ],
)
def test_settings_that_cannot_be_trained_are_rejected(
    settings_of: Make, fields: dict[str, Any], kind: type[DrafterError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build_trainer(settings_of(**fields))


def test_a_nan_gradient_ends_the_training(settings_of: Make) -> None:
    trainer = build_trainer(settings_of())
    with torch.no_grad():
        trainer.drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"step 1: the gradient is nan"):
        trainer.run()


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [scheduled_learning_rate(step, 100, 0.1, 2.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[10] == 2.0
    assert 0 < rates[-1] < 0.01
    assert rates[55] == pytest.approx(1.0)
