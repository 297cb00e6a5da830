"""The plugin that fixes vLLM's sampling on CPU: the replaced functions, the supported sources, and the replacement's results."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from aerie_lab.binaries import environment
from aerie_lab.binaries.addons import aerie_vllm_sampling as addon
from aerie_lab.binaries.families import ENVIRONMENTS

EXPAND, TOP_K = addon.MENDS
FAULTY = """
def _expand_kernel_impl(
    output,
    input_val,
    cu_num_tokens,
    replace_from,
    replace_to,
    MAX_NUM_TOKENS=None,
):
    torch.ops._C.expand_kernel_impl(
        _ensure_int64(output),
        _ensure_int64(input_val),
        _ensure_int64(cu_num_tokens),
        replace_from,
        replace_to,
    )
"""
"""Extract of vllm/utils/cpu_triton_utils.py, vLLM 0.32.0 and 0.33.0 (Apache-2.0)."""
EMPTY = """
import torch


def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(torch.arange(logits.shape[1]) >= k.max(), -1.0)
"""
"""Equivalent of vLLM's function of that name, which takes the maximum of a tensor that may be empty."""


def import_module_with(text: str, folder: Path) -> ModuleType:
    """Import a module whose source `inspect` can read."""
    file = folder / "cpu_triton_utils.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("cpu_triton_utils", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0"])
def test_the_faulty_function_is_replaced_once(version: str, tmp_path: Path) -> None:
    module = import_module_with(FAULTY, tmp_path)
    addon.apply(EXPAND, module, version)
    assert module._expand_kernel_impl is addon.expand
    addon.apply(EXPAND, module, version)  # vLLM loads plugins more than once in a process


CHANGED = FAULTY.replace("_ensure_int64(output)", "output")


@pytest.mark.parametrize(
    ("text", "version", "sentence"),
    [
        (FAULTY, "0.34.0", r"vLLM is 0\.34\.0, and the lab mends sampling on CPU .* in 0\.32\.0 and 0\.33\.0: install"),
        (CHANGED, "0.33.0+cpu", r"and the lab mends cb72d4d389c5: install vLLM 0\.33\.0 as it was released"),
        ("", "0.33.0", "has the digest absent"),
    ],
)
def test_an_unknown_function_is_not_replaced(text: str, version: str, sentence: str, tmp_path: Path) -> None:
    module = import_module_with(text, tmp_path)
    before = getattr(module, EXPAND.name, None)
    with pytest.raises(addon.MendError, match=sentence):
        addon.apply(EXPAND, module, version)
    assert getattr(module, EXPAND.name, None) is before


@pytest.mark.parametrize(
    ("values", "dtype", "replacement", "expected"),
    [
        ([0.7, 0.0, 1.5], torch.float32, (0, 1), [0.7, 0.7, 1.0, 1.5, 1.5, 1.5]),  # temperatures; the second is greedy
        ([0.9, 0.0, 1.0], torch.float32, (0, 0), [0.9, 0.9, 0.0, 1.0, 1.0, 1.0]),  # top_p
        ([5, 0, 40], torch.int32, (0, 0), [5, 5, 0, 40, 40, 40]),  # top_k
        ([5, 0, 40], torch.int64, (5, 7), [7, 7, 0, 40, 40, 40]),
    ],
)
def test_the_value_of_a_request_is_written_for_each_draft(
    values: list[float], dtype: torch.dtype, replacement: tuple[int, int], expected: list[float]
) -> None:
    output = torch.full((6,), -123, dtype=dtype)
    addon.expand(output, torch.tensor(values, dtype=dtype), torch.tensor([2, 3, 6], dtype=torch.int32), *replacement)
    assert output.tolist() == torch.tensor(expected, dtype=dtype).tolist()


def test_a_request_without_drafts_writes_nothing() -> None:
    output = torch.full((3,), -123.0)
    addon.expand(output, torch.tensor([0.5, 9.0, 2.0]), torch.tensor([2, 2, 3], dtype=torch.int32), 0, 1)
    assert output.tolist() == [0.5, 0.5, 2.0]


def test_a_step_without_drafts_is_not_truncated(tmp_path: Path) -> None:
    module = import_module_with(EMPTY, tmp_path)
    none, some = torch.zeros(0, 5), torch.zeros(1, 5)
    with pytest.raises(RuntimeError, match="numel"):
        module.apply_top_k_only(none, torch.zeros(0))
    patch = replace(TOP_K, digests={"0.33.0": addon.digest(module.apply_top_k_only)})
    for _ in range(2):
        addon.apply(patch, module, "0.33.0")
    assert module.apply_top_k_only(none, torch.zeros(0)) is none
    assert module.apply_top_k_only(some, torch.tensor([2])).tolist() == [[0, 0, -1, -1, -1]]


def test_the_addon_is_installed_with_its_entry_point(tmp_path: Path) -> None:
    (sampling_addon,) = ENVIRONMENTS["vllm"].addons
    environment.install_addon(sampling_addon, tmp_path)
    (distribution,) = importlib.metadata.Distribution.discover(name=sampling_addon.module, path=[str(tmp_path)])
    (entry_point,) = distribution.entry_points
    assert (entry_point.group, entry_point.value) == ("vllm.general_plugins", "aerie_vllm_sampling:register")
    assert (tmp_path / "aerie_vllm_sampling.py").read_text() == Path(addon.__file__).read_text()
    assert f"{ENVIRONMENTS['vllm'].site_packages}/aerie_vllm_sampling.py" in ENVIRONMENTS["vllm"].files


def test_a_changed_addon_gives_another_environment_key(tmp_path: Path) -> None:
    vllm = ENVIRONMENTS["vllm"]
    changed = tmp_path / "aerie_vllm_sampling.py"
    changed.write_text("def register(): ...")
    assert environment.hash_environment(vllm) != environment.hash_environment(
        replace(vllm, addons=(replace(vllm.addons[0], source=changed),))
    )
