"""Real vLLM, installed when a test first needs it, and a tiny model. Each test module starts its own server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aerie_lab.binaries import ensure_family, find_family_folder
from aerie_lab.errors import BuildError
from aerie_lab.testing.model import write_tiny_llama
from tests.vllm.inplace_engine import PreloadedVllm, preload_vllm


@pytest.fixture(scope="session")
def vllm(report_progress: Callable[[str], None]) -> Path:
    """Return the folder with the `vllm` program. The first installation takes minutes."""
    return ensure_family("vllm", report_progress)


@pytest.fixture(scope="session")
def vllm_0_33() -> Path:
    """Return the folder with the `vllm` program of 0.33. No test installs it: without it its tests are skipped."""
    try:
        return find_family_folder("vllm-0.33")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def preloaded_vllm(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreloadedVllm]:
    """Yield a process that has imported vLLM, for engines without a server."""
    with preload_vllm(vllm, tmp_path_factory.mktemp("preloaded")) as preloaded:
        yield preloaded


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that vLLM can serve."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
