"""Several processes (gloo on CPU) against one: equal losses, whole checkpoints, stop and kill in the middle of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie_drafter import checkpoint
from aerie_drafter.errors import ConfigError
from aerie_drafter.train.setup import build_trainer

from .test_trainer import Make, RecordingReporter, run_child, settings_of  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from aerie_drafter.train import processes
from aerie_drafter.train.settings import read_settings
from aerie_drafter.train.setup import build_trainer
from aerie_drafter.train.trainer import NullReporter

class Print(NullReporter):
    def __init__(self, name):
        self.name = name
    def on_step(self, step):
        print(json.dumps([self.name, step.step, step.loss, step.gradient_norm]), flush=True)

settings = read_settings(Path(sys.argv[1]))

def change(name, **fields):
    raw = settings.model_dump()
    raw["output"]["folder"] = settings.output.folder / name
    for field, value in fields.items():
        group, key = field.split("__")
        raw[group][key] = value
    return type(settings).model_validate(raw)

def build(name, group, **fields):
    return build_trainer(change(name, **fields), processes=group, reporter=Print(name))
"""

_EQUAL = (
    _PROGRAM
    + """
with processes.join_process_group() as group:
    for shard in (False, True):
        build(f"accumulated {shard}", group, optimizer__shard=shard, optimizer__gradient_accumulation_steps=2).run()
        build(f"packed {shard}", group, optimizer__shard=shard, data__packing=True, data__max_length=64).run()
    build("recomputed True", group, optimizer__shard=True, optimizer__activation_checkpointing=True).run()
threads = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
assert not [name for name in threads if "gloo" in name], threads  # a thread that outlives its group may abort the process
"""
)


def read_reports(output: str) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, loss, gradient norm) of each report, by the name of the training."""
    reports: dict[str, list[tuple[int, float, float]]] = {}
    for line in output.splitlines():
        if line.startswith("["):
            name, *values = json.loads(line)
            reports.setdefault(name, []).append(tuple(values))
    return reports


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of `last`: weights and AdamW's moments."""
    tensors = dict(checkpoint.read_checkpoint(folder / "last").tensors)
    state = torch.load(folder / "last" / "training.pt", weights_only=True)["optimizer"]["state"]
    return tensors | {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def test_two_processes_equal_one_with_accumulation_packing_and_shards(settings_of: Make, tmp_path: Path) -> None:  # noqa: F811
    """Also a checkpoint of a sharded drafter is that of one process, and contains no shard."""
    variants: dict[str, dict[str, Any]] = {
        "accumulated": {"optimizer__gradient_accumulation_steps": 2},
        "packed": {"data__packing": True, "data__max_length": 64},
        "recomputed": {},
    }
    expected = {}
    for name, fields in variants.items():
        reporter = RecordingReporter()
        alone = settings_of(f"alone/{name}", optimizer__batch_size_per_process=4, optimizer__epochs=2, **fields)
        build_trainer(alone, reporter=reporter).run()
        expected[name] = [(step.step, step.loss, step.gradient_norm) for step in reporter.steps]
        assert len(expected[name]) >= 2
    both = settings_of("both", optimizer__batch_size_per_process=2, optimizer__epochs=2)
    ended = run_child(_EQUAL, both, tmp_path, *TORCHRUN)
    assert ended.returncode == 0, ended.stderr
    reports = read_reports(ended.stdout)
    assert len(reports) == 5
    for run, steps in reports.items():
        name = run.split()[0]
        assert [step for step, *_ in steps] == [step for step, *_ in expected[name]]
        # A loss consists of log-probabilities of order 1, which float32 rounds to 1e-7: of a loss below 0.01, more than 1e-4.
        assert [loss for _, loss, _ in steps] == pytest.approx([loss for _, loss, _ in expected[name]], rel=1e-4, abs=1e-6)
        assert [norm for *_, norm in steps] == pytest.approx([norm for *_, norm in expected[name]], rel=1e-3)
        whole = load_tensors(both.output.folder.parent / "alone" / name)
        of_two = load_tensors(both.output.folder / run)
        assert set(of_two) == set(whole)
        for tensor_name, tensor in whole.items():
            torch.testing.assert_close(of_two[tensor_name], tensor, rtol=1e-3, atol=1e-4)
    # What was saved from shards resumes in one process too: only the number of processes is rejected.
    resumed = build_trainer(
        settings_of("both/packed True", optimizer__batch_size_per_process=4, optimizer__epochs=2, **variants["packed"])
    )
    resumed._load(checkpoint.read_checkpoint(both.output.folder / "packed True" / "last").tensors, resumed.optimizer.state_dict())


_INTERRUPTED = (
    _PROGRAM
    + """
def kill_in_the_middle(trainer, step):
    compute_loss = trainer._compute_loss
    def compute(*arguments):
        loss = compute_loss(*arguments)
        if trainer.progress.step + 1 == step and arguments[1] is trainer.corpus:
            loss.weighted_sum.backward(retain_graph=True)
            os.kill(os.getpid(), signal.SIGKILL)  # gradients are added up, the weights are the old ones
        return loss
    trainer._compute_loss = compute

with processes.join_process_group() as group:
    for shard in (False, True):
        fields = {"optimizer__shard": shard, "output__save_every": 2, "output__evaluate_every": 5}
        trainer = build(f"stopped {shard}", group, **fields)
        if not trainer.resume():
            build(f"undisturbed {shard}", group, **fields).run()
            on_step, train_step = trainer.reporter.on_step, trainer._train_step
            def stop_in_one_process(*arguments):
                if trainer.progress.step + 1 == 3 and group.rank == 1:
                    trainer.request_stop()
                return train_step(*arguments)
            trainer._train_step = stop_in_one_process
            assert trainer.run().step == 3  # neither a multiple of save_every nor of evaluate_every
            trainer = build(f"stopped {shard}", group, **fields)
            assert trainer.resume() and trainer.progress.step == 3
            if shard:
                kill_in_the_middle(trainer, 7)
        trainer.run()
"""
)


@pytest.mark.nightly  # test_trainer.py and test_checkpoint.py have kills and resumed steps of one process
def test_a_kill_in_the_middle_of_a_step_changes_no_loss(settings_of: Make, tmp_path: Path) -> None:  # noqa: F811
    """Both processes are killed within step 7 by SIGKILL; the resumed ones repeat it from the save after step 6, bit for bit."""
    both = settings_of("both", optimizer__batch_size_per_process=2, optimizer__epochs=2)
    killed = run_child(_INTERRUPTED, both, tmp_path, *TORCHRUN)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr, killed.stderr
    resumed = run_child(_INTERRUPTED, both, tmp_path, *TORCHRUN)
    assert resumed.returncode == 0, resumed.stderr
    before, after = read_reports(killed.stdout), read_reports(resumed.stdout)
    assert before["stopped False"] == before["undisturbed False"]  # stopped after step 3 and resumed
    undisturbed = before["undisturbed True"]
    assert before["stopped True"] == undisturbed[:6]
    assert after["stopped True"] == undisturbed[6:]
    assert len(undisturbed) > 7
    for shard in (False, True):
        whole, stopped = (load_tensors(both.output.folder / f"{name} {shard}") for name in ("undisturbed", "stopped"))
        assert all(torch.equal(stopped[name], tensor) for name, tensor in whole.items())


def test_shards_need_several_processes(settings_of: Make) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"optimizer\.shard is true, but this is a single process: start it with torchrun"):
        build_trainer(settings_of(optimizer__shard=True))


def test_a_single_process_stops_on_request_and_resumes_with_the_same_bits(settings_of: Make) -> None:  # noqa: F811
    whole, stopped = settings_of("whole"), settings_of("stopped")
    build_trainer(whole).run()
    for step in (1, 6):  # once before the first save
        reporter = RecordingReporter()
        trainer = build_trainer(stopped, reporter=reporter)
        reporter.at = _stop_at(trainer, step)
        assert trainer.run().step == step + 1
    assert build_trainer(stopped).run().step == build_trainer(whole).total_steps
    for name, tensor in load_tensors(whole.output.folder).items():
        assert torch.equal(load_tensors(stopped.output.folder)[name], tensor)


def _stop_at(trainer: Any, step: int) -> Any:
    def stop(number: int) -> None:
        if number == step:
            trainer.request_stop()

    return stop
