"""The worker's drafters with a small torch model and a stand-in for vLLM's reload: what is held, swapped and undone.

tests/vllm/test_inplace_worker.py has the same with vLLM itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from aerie_vllm.checkpoint import open_checkpoint
from aerie_vllm.reader import Own, Reader, compare_shared, create_tensor, find_unfit, find_value_problem
from aerie_vllm.weights import Layout, ReloadError, Snapshot, detached
from aerie_vllm.worker import Drafters, DrafterWorker
from aerie_vllm.worker_protocol import MAX_MESSAGE_CHARACTERS, Problem, Report, compute_digest

VOCABULARY, WIDTH = 8, 4
WAIT_SECONDS = 10.0


def is_filled(tensor: torch.Tensor, value: float) -> bool:
    return torch.equal(tensor, torch.full_like(tensor, value))


class FakeDrafter(nn.Module):
    """A model whose loader puts tensors on the meta device first, as vLLM's reload does."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.Linear(WIDTH, 1, bias=False)
        self.embed_tokens: Any = target.embed_tokens
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.table = torch.zeros(3)
        self.rope: Any = nn.Module()
        self.rope.register_buffer("cos", torch.arange(4.0))
        self.rope_table: Any = self.rope.cos  # an alias, as DFlash has
        self.rotary: Any = target.rotary
        self.fail_at = ""
        self.derive: Callable[[], torch.Tensor] = lambda: self.fc.weight.detach()[0, :3].clone()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer: Any = self.get_submodule(name.removesuffix(".weight"))
            weight = layer.weight
            layer.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
            if name == self.fail_at:
                raise RuntimeError(f"no {name}")
            weight.data.copy_(tensor)
            layer.weight = weight
        self.table = self.derive()  # a new tensor
        assert self.rotary.head_size == 2, "constants of a shared module are read"
        self.kept_buffer: Any = self.rope.cos
        self.rope.cos = torch.empty_like(self.kept_buffer, device="meta")
        self.rope_table = self.rope.cos

    def finish(self) -> None:
        """Put the buffer back that had no memory while the weights were loaded, as vLLM's reload does at its end."""
        self.rope.cos = self.kept_buffer
        del self.kept_buffer


@pytest.fixture(autouse=True)
def vllm_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the modules of vLLM that the worker uses."""

    def add(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    def get_config(folder: str, trust_remote_code: bool) -> Any:
        assert not trust_remote_code
        keys = json.loads((Path(folder) / "config.json").read_text())
        return SimpleNamespace(to_dict=lambda: keys)

    info = SimpleNamespace(reset=lambda: None, can_load=lambda: False, load_numel=0)
    layerwise = {"initialize_layerwise_reload": lambda _: None, "finalize_layerwise_reload": lambda model, _: model.finish()}
    add("vllm", ModelRegistry=SimpleNamespace(models={}))
    add("vllm.config", set_current_vllm_config=lambda _: nullcontext())
    add("vllm.transformers_utils", config=None)
    add("vllm.transformers_utils.config", get_config=get_config)
    add("vllm.model_executor")
    add("vllm.model_executor.model_loader", reload=SimpleNamespace(**layerwise))
    add("vllm.model_executor.model_loader.reload", **layerwise)
    add("vllm.model_executor.model_loader.reload.layerwise", get_layerwise_info=lambda _: info)


class FakeWorker(DrafterWorker):
    """vLLM's worker with the plugin's methods."""

    def __init__(self, own: Path) -> None:
        self.rank = 0
        self.target = nn.Module()
        self.target.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.target.rotary = nn.Module()
        self.target.rotary.register_buffer("cos", torch.ones(2))
        vars(self.target.rotary)["head_size"] = 2
        self.drafter = FakeDrafter(self.target)
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(method="draft_model", draft_model_config=SimpleNamespace(model=str(own))),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            model_config=SimpleNamespace(model="target", get_vocab_size=lambda: VOCABULARY),
        )

    def get_draft_model(self) -> nn.Module:
        return self.drafter

    def get_model(self) -> nn.Module:
        return self.target

    def describe_until_read(self) -> Report:
        """Return the report once no thread reads any more."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            report = self.aerie_drafter_describe()
            is_staging = report["staging"] is not None and report["staging"]["state"] == "Reading"
            if not is_staging and (report["own"] or report["unfit"]):
                return report
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stage(self, folder: Path, *keep: str) -> str:
        """Stage a drafter, and return its digest."""
        files = hash_files(folder)
        self.aerie_drafter_stage(str(folder), files, list(keep))
        report = self.describe_until_read()
        assert report["staging"] is not None
        assert report["staging"]["problem"] is None
        return compute_digest(files)


def hash_files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def write_drafter(folder: Path, value: float, **more: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    weights = {"fc.weight": torch.full((WIDTH, WIDTH), value), "norm.weight": torch.full((1, WIDTH), value), **more}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {name: write_drafter(tmp_path / name, value) for name, value in {"own": 1.0, "b": 2.0, "c": 3.0}.items()}


@pytest.fixture
def worker(folders: dict[str, Path]) -> FakeWorker:
    worker = FakeWorker(folders["own"])
    with torch.no_grad():
        worker.drafter.fc.weight.fill_(1.0)
        worker.drafter.norm.weight.fill_(1.0)
    worker.describe_until_read()
    return worker


def test_a_swap_loads_and_returns_in_place(worker: FakeWorker, folders: dict[str, Path]) -> None:
    drafter, embedding = worker.drafter, worker.target.embed_tokens
    before = {name: tensor.data_ptr() for name, tensor in drafter.named_parameters()}
    table, rope_table, rotary = drafter.table, drafter.rope_table, worker.target.rotary
    own, digest = worker.describe_until_read()["loaded"], worker.stage(folders["b"])
    assert own == compute_digest(hash_files(folders["own"]))
    for expected, value in ((digest, 2.0), (own, 1.0), (digest, 2.0), (digest, 2.0)):
        assert expected is not None
        report = worker.aerie_drafter_swap(expected)
        assert (report["loaded"], report["problem"], report["broken"]) == (expected, None, None)
        assert is_filled(drafter.fc.weight, value)
        assert is_filled(drafter.norm.weight, value)
        assert drafter.table is table  # derived weights stay where a graph reads them
        assert drafter.rope_table is rope_table
        assert drafter.rope_table is drafter.rope.cos
        assert drafter.rope_table.tolist() == [0, 1, 2, 3]
    assert table.tolist() == [2.0, 2.0, 2.0]
    assert {name: tensor.data_ptr() for name, tensor in drafter.named_parameters()} == before
    assert drafter.embed_tokens is embedding
    assert drafter.rotary is rotary


@pytest.mark.parametrize(("derived", "message"), [(torch.empty(3, device="meta"), "no values"), (torch.zeros(2), "another form")])
def test_weights_that_cannot_be_calculated_again_are_an_error(
    worker: FakeWorker, folders: dict[str, Path], derived: torch.Tensor, message: str
) -> None:
    own, digest = worker.describe_until_read()["loaded"], worker.stage(folders["b"])
    table = worker.drafter.table
    worker.drafter.derive = lambda: derived
    report = worker.aerie_drafter_swap(digest)
    assert report["problem"] is not None
    assert f"table of FakeDrafter has {message} after the reload" in report["problem"]["message"]
    assert (report["loaded"], report["broken"]) == (own, None)
    assert worker.drafter.table is table
    assert is_filled(worker.drafter.fc.weight, 1.0)


@pytest.mark.parametrize("fail_at", ["fc.weight", "norm.weight"])
def test_a_swap_that_fails_is_undone(worker: FakeWorker, folders: dict[str, Path], fail_at: str) -> None:
    own, digest = worker.describe_until_read()["loaded"], worker.stage(folders["b"])
    worker.drafter.fail_at = fail_at
    report = worker.aerie_drafter_swap(digest)
    assert report["problem"] == {"reason": "SwapFailed", "message": f"RuntimeError: no {fail_at}"}
    assert (report["loaded"], report["broken"]) == (own, None)
    assert not any(parameter.is_meta for parameter in worker.drafter.parameters())
    assert is_filled(worker.drafter.fc.weight, 1.0)
    assert worker.drafter.embed_tokens is worker.target.embed_tokens
    worker.drafter.fail_at = ""
    assert worker.aerie_drafter_swap(digest)["problem"] is None
    assert is_filled(worker.drafter.fc.weight, 2.0)


def test_an_undo_that_fails_breaks_the_engine(
    worker: FakeWorker, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = worker.stage(folders["b"])
    worker.drafter.fail_at = "fc.weight"

    def fail(_: Snapshot) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Snapshot, "restore", fail)
    report = worker.aerie_drafter_swap(digest)
    assert report["broken"] == {"reason": "RestoreFailed", "message": "RuntimeError: no memory"}
    monkeypatch.undo()
    assert worker.aerie_drafter_swap(digest)["problem"] == report["broken"]


def test_the_loaded_and_the_kept_stay_in_memory(worker: FakeWorker, folders: dict[str, Path]) -> None:
    own = worker.describe_until_read()["loaded"]
    assert own is not None
    b = worker.stage(folders["b"])
    worker.aerie_drafter_swap(b)
    c = worker.stage(folders["c"], own)
    assert {drafter["digest"] for drafter in worker.describe_until_read()["held"]} == {own, b, c}
    worker.aerie_drafter_swap(own)
    assert worker.stage(folders["c"]) == c
    assert {drafter["digest"] for drafter in worker.describe_until_read()["held"]} == {own, c}
    assert worker.aerie_drafter_swap(b)["problem"]["reason"] == "NotStaged"  # type: ignore[index]


def test_a_hanging_disk_delays_no_swap(worker: FakeWorker, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own, b = worker.describe_until_read()["loaded"], worker.stage(folders["b"])
    assert own is not None
    worker.aerie_drafter_swap(b)
    is_released = threading.Event()
    read_candidate = Reader.read_candidate

    def hang(reader: Reader, own: Own, folder: Path, *arguments: Any) -> Any:
        if folder == folders["c"]:
            is_released.wait(WAIT_SECONDS)
        return read_candidate(reader, own, folder, *arguments)

    monkeypatch.setattr(Reader, "read_candidate", hang)
    files = hash_files(folders["c"])
    staging = worker.aerie_drafter_stage(str(folders["c"]), files, [own])["staging"]
    assert staging is not None
    assert staging["state"] == "Reading"
    assert worker.aerie_drafter_swap(own)["loaded"] == own
    assert worker.stage(folders["b"], own) == b  # replaces the one that hangs
    is_released.set()
    assert compute_digest(files) not in {drafter["digest"] for drafter in worker.describe_until_read()["held"]}
    assert worker.stage(folders["c"]) == compute_digest(files)


def test_rejected_files_change_nothing(worker: FakeWorker, folders: dict[str, Path], tmp_path: Path) -> None:
    own = worker.describe_until_read()["loaded"]
    for folder, reason in (
        (write_drafter(tmp_path / "more", 2.0, bias=torch.ones(1)), "TensorUnknown"),
        (write_drafter(tmp_path / "nan", float("nan")), "NotFinite"),
        (
            write_drafter(tmp_path / "embedding", 2.0, **{"embed_tokens.weight": torch.ones(VOCABULARY, WIDTH)}),
            "SharedWithTarget",
        ),
        (tmp_path / "none", "FolderMissing"),
    ):
        worker.aerie_drafter_stage(str(folder), hash_files(folder if folder.exists() else folders["b"]), [])
        report = worker.describe_until_read()
        assert report["staging"] is not None
        assert report["staging"]["problem"] is not None
        assert (report["staging"]["state"], report["staging"]["problem"]["reason"]) == ("Rejected", reason)
        assert (report["loaded"], [drafter["digest"] for drafter in report["held"]]) == (own, [own])
        assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("text", ["\ud800", "x" * 3_000_000, "\ud800" * 3_000_000])
@pytest.mark.parametrize("place", ["name", "type", "config"])
def test_a_report_can_be_sent_whatever_a_checkpoint_has(
    worker: FakeWorker, folders: dict[str, Path], text: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's output thread encodes reports as UTF-8, and the operator reads two megabytes of a pod's state."""
    monkeypatch.setattr("aerie_vllm.checkpoint.MAX_HEADER_BYTES", 1 << 26)
    if place == "config":

        def find_problem(*_: Any) -> Problem:
            return {"reason": "Config", "message": f"the checkpoint has {text}."}

        monkeypatch.setattr("aerie_vllm.validation.find_problem", find_problem)
    else:
        dtype, name = (text, "a") if place == "type" else ("U8", text)
        header = json.dumps({name: {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]}}).encode()
        (folders["b"] / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    worker.aerie_drafter_stage(str(folders["b"]), hash_files(folders["b"]), [])
    staging = worker.describe_until_read()["staging"]
    assert staging is not None
    assert staging["problem"] is not None
    assert staging["problem"]["reason"] == ("Config" if place == "config" else "InvalidHeader")
    assert len(staging["problem"]["message"].encode()) <= MAX_MESSAGE_CHARACTERS


def test_an_own_drafter_without_safetensors_is_unfit(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    worker = FakeWorker(folder)
    report = worker.describe_until_read()
    assert report["unfit"] is not None
    assert report["unfit"]["reason"] == "FileMissing"
    assert worker.aerie_drafter_swap("0" * 64)["problem"] == report["unfit"]
    assert (report["own"], report["loaded"], report["held"]) == (None, None, [])


def fail_reads(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Let the first reads of the own drafter fail as those of a network disk may."""
    read, errors = Reader.read_own, [OSError(errno.ESTALE, "Stale file handle")] * failures

    def read_own(reader: Reader, is_cancelled: Callable[[], bool]) -> Own:
        if errors:
            raise errors.pop()
        return read(reader, is_cancelled)

    monkeypatch.setattr(Reader, "read_own", read_own)


def test_an_own_drafter_is_read_again_after_an_error(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_reads(monkeypatch, 2)
    worker = FakeWorker(folders["own"])
    problems = [worker.aerie_drafter_describe()["own_problem"]]
    while (report := worker.aerie_drafter_describe())["own"] is None:
        assert report["unfit"] is None
        problems.append(report["own_problem"])
        time.sleep(0.005)
    stale = {"reason": "OwnDrafterUnreadable", "message": "OSError: [Errno 116] Stale file handle"}
    assert (problems[0], problems[-1], report["own_problem"]) == (None, stale, None)
    assert worker.stage(folders["b"]) in {drafter["digest"] for drafter in worker.describe_until_read()["held"]}


def test_an_own_drafter_that_is_not_read_for_long_is_unfit(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_reads(monkeypatch, 1)
    monkeypatch.setattr("aerie_vllm.worker.OWN_RETRY_SECONDS", 0.0)
    report = FakeWorker(folders["own"]).describe_until_read()
    assert report["unfit"] is not None
    assert report["unfit"]["reason"] == "OwnDrafterUnreadable"


UNFIT: dict[str, tuple[str, dict[str, Any]]] = {
    "no speculation": ("NoDrafter", {"speculative_config": None}),
    "a pipeline": ("PipelineParallel", {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}),
    "part of the target": ("PartOfTarget", {"model_config": SimpleNamespace(model="own")}),
    "a derived head": ("DerivedHead", {"draft_lm_head_quantization": "fp8"}),
}


@pytest.mark.parametrize("case", UNFIT)
def test_engines_that_cannot_change_their_drafter_name_the_reason(case: str) -> None:
    reason, parts = UNFIT[case]
    worker = FakeWorker(Path("own"))
    is_of_speculation = case == "a derived head"
    vars(worker.vllm_config.speculative_config if is_of_speculation else worker.vllm_config).update(parts)
    report = Drafters(worker).describe()
    assert report["unfit"] is not None
    assert (report["unfit"]["reason"], report["own"], report["staging"]) == (reason, None, None)


def test_a_drafter_with_state_outside_its_model_is_unfit() -> None:
    worker = FakeWorker(Path("own"))
    worker.drafter.mask_hidden = torch.zeros(1)
    problem = find_unfit(worker.vllm_config, worker.drafter, Layout(worker.drafter, worker.target))
    assert problem is not None
    assert problem["reason"] == "ParallelDrafting"


def test_a_drafter_that_has_read_more_than_safetensors_is_unfit() -> None:
    worker = FakeWorker(Path("own"))
    vars(worker.drafter.fc)["has_separate_mask_embedding"] = True
    problem = find_unfit(worker.vllm_config, worker.drafter, Layout(worker.drafter, worker.target))
    assert problem is not None
    assert problem["reason"] == "MaskEmbedding"


@pytest.mark.parametrize("owner", ["drafter", "target"])
def test_a_drafter_with_a_tied_parameter_is_unfit(owner: str) -> None:
    worker = FakeWorker(Path("own"))
    drafter, target = worker.drafter, worker.target
    fc, embedding = drafter.get_parameter("fc.weight"), target.get_parameter("embed_tokens.weight")
    target.add_module("head", nn.Linear(WIDTH, VOCABULARY))
    target.get_submodule("head").register_parameter("weight", embedding)  # tied in the target alone, it does not matter
    assert find_unfit(worker.vllm_config, drafter, Layout(drafter, target)) is None
    drafter.add_module("head", nn.Linear(WIDTH, WIDTH))
    drafter.get_submodule("head").register_parameter("weight", fc if owner == "drafter" else embedding)
    problem = find_unfit(worker.vllm_config, drafter, Layout(drafter, target))
    assert problem is not None
    assert problem["reason"] == "TiedWeights"


def test_shared_modules_are_out_of_reach_while_detached() -> None:
    worker = FakeWorker(Path("own"))
    layout = Layout(worker.drafter, worker.target)
    assert list(layout.shared) == ["embed_tokens", "rotary"]
    with detached(layout):
        assert not list(worker.drafter.embed_tokens.parameters())
        assert worker.drafter.rotary is worker.target.rotary, "it has constants, and nothing to load"
        assert worker.target.rotary not in set(worker.drafter.modules())
    assert worker.drafter.embed_tokens is worker.target.embed_tokens
    assert "rotary" not in vars(worker.drafter)
    assert worker.target.rotary in set(worker.drafter.modules())


def test_a_snapshot_needs_the_tensors_of_its_layout() -> None:
    worker = FakeWorker(Path("own"))
    snapshot = Snapshot(Layout(worker.drafter, worker.target))
    worker.drafter.fc.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(ReloadError, match="other tensors"):
        snapshot.capture()
    assert not snapshot.is_captured


@pytest.mark.parametrize(("first", "last"), [(0, VOCABULARY), (0, 4), (4, 8)])
def test_a_part_of_a_shared_embedding_is_compared_with_its_rows(first: int, last: int) -> None:
    full = torch.randn(VOCABULARY, WIDTH)
    module = nn.Module()
    module.weight = nn.Parameter(torch.cat([full[first:last], torch.zeros(2, WIDTH)]).bfloat16())  # padded
    vars(module).update(
        org_vocab_size=VOCABULARY, shard_indices=SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
    )
    assert compare_shared("embed_tokens.weight", full, module) is None
    other = full.clone()
    other[last - 1, 0] += 1
    assert compare_shared("embed_tokens.weight", other, module) is not None
    assert compare_shared("embed_tokens.weight", full[:-1], module) is not None
    assert compare_shared("embed_tokens.weight", full, nn.Identity()) is not None


def test_values() -> None:
    assert find_value_problem("a", torch.ones(2, dtype=torch.int64)) is None
    assert find_value_problem("a", torch.tensor([1.0, float("inf")])) is not None


def test_empty_tensors_have_a_shape(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", 1.0, empty=torch.empty(0, 3))
    files = hash_files(folder)
    with open_checkpoint(folder) as checkpoint:
        content = checkpoint.load(files, lambda: False)["model.safetensors"]
        tensors = {name: create_tensor(tensor, content) for name, tensor in checkpoint.tensors.items()}
    assert tensors["empty"].shape == (0, 3)
    assert tensors["fc.weight"].tolist() == [[1.0] * WIDTH] * WIDTH
