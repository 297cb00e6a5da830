"""The plugin's worker on real vLLM: other drafters in a running engine draft as fresh engines do, and failures change nothing.

The fresh engines do not have the plugin, so they are vLLM as it is.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie_drafter.bundle import find_bundle_path
from aerie_vllm.worker_protocol import DESCRIBE, SWAP
from tests.vllm.inplace_engine import STAGE_TIMEOUT_SECONDS, OfflineEngine, PreloadedVllm, preload_vllm
from tests.vllm.inplace_server import hash_files

pytestmark = pytest.mark.timeout(2400)  # a start on busy cores


@pytest.fixture(scope="module")
def fresh(preloaded_vllm: PreloadedVllm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what engines without the plugin generate, by drafter."""
    results = {}
    for name in ("eagle3", "eagle31", "weak"):
        with preloaded_vllm.start_engine(tmp_path_factory.mktemp("fresh"), find_bundle_path(name), plugin=False) as engine:
            results[name] = engine.generate()
    return results


@pytest.fixture(scope="module")
def engine(preloaded_vllm: PreloadedVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineEngine]:
    with preloaded_vllm.start_engine(tmp_path_factory.mktemp("engine"), find_bundle_path("eagle3")) as running:
        yield running


@pytest.fixture
def own(engine: OfflineEngine) -> Any:
    """Load the engine's own drafter, and return it."""
    deadline = time.monotonic() + STAGE_TIMEOUT_SECONDS
    while (own := engine.call(DESCRIBE)["own"]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    report = engine.change(find_bundle_path("eagle3"))
    assert (report["loaded"], report["problem"]) == (own["digest"], None)
    return own


def assert_drafts_like_fresh(engine: OfflineEngine, fresh: dict[str, Any], order: tuple[str, ...]) -> None:
    """Change to each drafter, and compare all that is generated with a fresh engine's, to the digit."""
    assert engine.generate() == fresh["eagle3"]
    for name in order:
        report = engine.change(find_bundle_path(name))
        assert report["problem"] is None
        assert engine.generate() == fresh[name]


def test_drafters_in_a_running_engine_draft_as_in_fresh_ones(fresh: dict[str, Any], engine: OfflineEngine) -> None:
    """EAGLE 3 -> 3.1 -> 3 -> another 3.1 -> 3.1: loaded for the first time and from host memory."""
    assert len({(result["drafts"], result["accepted"]) for result in fresh.values()}) == 3
    assert_drafts_like_fresh(engine, fresh, ("eagle31", "eagle3", "weak", "eagle31", "eagle3"))


def test_a_compiled_engine_follows(preloaded_vllm: PreloadedVllm, fresh: dict[str, Any], tmp_path: Path) -> None:
    with preloaded_vllm.start_engine(tmp_path, find_bundle_path("eagle3"), compiled=True) as compiled:
        assert_drafts_like_fresh(compiled, fresh, ("eagle31", "eagle3", "eagle31"))


def test_vllm_0_33_follows(vllm_0_33: Path, fresh: dict[str, Any], tmp_path: Path) -> None:
    with (
        preload_vllm(vllm_0_33, tmp_path) as preloaded,
        preloaded.start_engine(tmp_path / "engine", find_bundle_path("eagle3")) as newer,
    ):
        assert_drafts_like_fresh(newer, fresh, ("eagle31", "eagle3", "eagle31"))


def test_what_is_held_and_dropped(engine: OfflineEngine, own: Any) -> None:
    assert own["kind"] == "eagle3"
    assert own["files"] == hash_files(find_bundle_path("eagle3"))
    better = engine.stage(find_bundle_path("eagle31"))["staging"]["digest"]
    assert {drafter["digest"] for drafter in engine.call(DESCRIBE)["held"]} == {own["digest"], better}
    report = engine.stage(find_bundle_path("weak"))
    weak = report["staging"]["digest"]
    assert {drafter["digest"] for drafter in report["held"]} == {own["digest"], weak}
    report = engine.stage(find_bundle_path("eagle31"), keep=(weak,))
    assert {drafter["digest"]: drafter["kind"] for drafter in report["held"]} == {
        own["digest"]: "eagle3",
        weak: "eagle3.1",
        better: "eagle3.1",
    }
    assert engine.call(SWAP, "0" * 64)["problem"]["reason"] == "NotStaged"


@pytest.mark.parametrize(("where", "count"), [("load", 0), ("load", 5), ("load", 14), ("finalize", 0), ("capture", 0)])
def test_a_swap_that_fails_is_undone(fresh: dict[str, Any], engine: OfflineEngine, own: Any, where: str, count: int) -> None:
    engine.stage(find_bundle_path("weak"))  # what was staged before has been loaded: a failure needs a first time
    staged = engine.stage(find_bundle_path("eagle31"))["staging"]["digest"]
    engine.call("aerie_drafter_break", where, count)
    report = engine.call(SWAP, staged)
    engine.call("aerie_drafter_break", "", 0)
    assert report["problem"]["reason"] in ("SwapFailed", "SnapshotFailed")
    assert (report["loaded"], report["broken"]) == (own["digest"], None)
    assert engine.generate() == fresh["eagle3"]
    assert engine.change(find_bundle_path("eagle31"))["problem"] is None
    assert engine.generate() == fresh["eagle31"]


Edit = Callable[[dict[str, torch.Tensor]], object]


def copy_drafter(folder: Path, edit: Edit, name: str = "eagle31") -> Path:
    """Return a copy of one of the bundle's drafters with edited tensors."""
    copy = Path(shutil.copytree(find_bundle_path(name), folder / "drafter"))
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


TARGET_EMBEDDING = "model.embed_tokens.weight"
EDITS: dict[str, tuple[str, Edit]] = {
    "a tensor less": ("TensorMissing", lambda tensors: tensors.pop("fc_norm.1.weight")),
    "a tensor more": ("TensorUnknown", lambda tensors: tensors.update({"input_norm.weight": torch.ones(768)})),
    "another shape": ("Shape", lambda tensors: tensors.update({"fc.weight": torch.ones(256, 512)})),
    "another vocabulary": ("VocabularyMap", lambda tensors: tensors["d2t"].add_(2000)),
    "a NaN": ("NotFinite", lambda tensors: tensors["norm.weight"].fill_(float("nan"))),
    "another embedding": ("SharedWithTarget", lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(2048, 256)})),
}


@pytest.mark.parametrize("edit", EDITS)
def test_checkpoints_that_do_not_fit_change_nothing(engine: OfflineEngine, own: Any, edit: str, tmp_path: Path) -> None:
    reason, change = EDITS[edit]
    report = engine.stage(copy_drafter(tmp_path, change))
    assert (report["staging"]["state"], report["staging"]["problem"]["reason"]) == ("Rejected", reason)
    assert report["loaded"] == own["digest"]
    assert [drafter["digest"] for drafter in report["held"]] == [own["digest"]]


def test_truncated_and_replaced_files_change_nothing(
    fresh: dict[str, Any], engine: OfflineEngine, own: Any, tmp_path: Path
) -> None:
    folder = copy_drafter(tmp_path, lambda tensors: tensors)
    files = hash_files(folder)
    os.truncate(folder / "model.safetensors", 1_000_000)
    assert engine.stage(folder, files)["staging"]["problem"]["reason"] == "Truncated"
    shutil.copy(find_bundle_path("weak") / "model.safetensors", folder)
    report = engine.stage(folder, files)
    assert report["staging"]["problem"]["reason"] == "DigestMismatch"
    assert report["loaded"] == own["digest"]
    assert engine.generate() == fresh["eagle3"]


@pytest.mark.usefixtures("own")
def test_a_copy_of_the_targets_embedding_is_left_out(fresh: dict[str, Any], engine: OfflineEngine, tmp_path: Path) -> None:
    embedding = load_file(find_bundle_path("target") / "model.safetensors")[TARGET_EMBEDDING]
    report = engine.stage(copy_drafter(tmp_path, lambda tensors: tensors.update({"embed_tokens.weight": embedding})))
    assert engine.call(SWAP, report["staging"]["digest"])["problem"] is None
    assert engine.generate() == fresh["eagle31"]


def test_an_engine_that_cannot_go_back_is_broken(engine: OfflineEngine, own: Any) -> None:
    """The last test, because only a restart helps."""
    staged = engine.stage(find_bundle_path("weak"))["staging"]["digest"]
    engine.call("aerie_drafter_break", "restore", 0)
    engine.call(SWAP, staged)
    assert engine.call(SWAP, own["digest"])["broken"]["reason"] == "RestoreFailed"
    engine.call("aerie_drafter_break", "", 0)
    assert engine.call(SWAP, staged)["problem"]["reason"] == "RestoreFailed"
    assert engine.call(DESCRIBE)["broken"]["reason"] == "RestoreFailed"
