"""The commands of the repository: the README's, the benchmarks', and the tiers of the tests."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = "demo: setup ## x\ntest: setup ## y\ntest-unit: setup\n"


@pytest.fixture(scope="module")
def check_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_readme", ROOT / "scripts/check_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("readme", "makefile", "found"),
    [
        ("```\nmake demo\nmake test\n```\n", MAKEFILE, []),
        ("`make demo`, `make test` and `make test-unit`", MAKEFILE, []),
        ("`make demo`; we make tests run", MAKEFILE, ["README.md does not name `make test`"]),
        ("`make demos` and `make test`", MAKEFILE, ["does not name `make demo`", "names `make demos`, and the Makefile"]),
        ("`make demo` and `make test`", "test: setup\n", ["names `make demo`, and the Makefile has no such target"]),
    ],
)
def test_readme_is_held_to_the_makefile(check_readme: ModuleType, readme: str, makefile: str, found: list[str]) -> None:
    problems = check_readme.problems(readme, makefile)
    assert len(problems) == len(found)
    for problem, part in zip(problems, found, strict=True):
        assert part in problem


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """A copy of the runner with one benchmark of its own."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks")
    (tmp_path / "benchmarks/small.py").write_text("def measure():\n    print('warming up')\n    return {'wait_ms': 1.5}\n")
    return tmp_path


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=folder, capture_output=True, text=True)


def test_benchmark_ends_with_one_flat_json_object(benchmarks: Path) -> None:
    done = bench(benchmarks, "small")
    assert done.stdout.splitlines() == ["warming up", '{"wait_ms": 1.5}']
    assert not (benchmarks / "benchmarks/results").exists()


def test_saved_figures_tell_where_they_are_from(benchmarks: Path) -> None:
    bench(benchmarks, "small", "--save")
    saved = json.loads((benchmarks / "benchmarks/results/small.json").read_text())
    assert saved["wait_ms"] == 1.5
    assert {"date", "machine", "commit"} < saved.keys()
    assert all(saved.values())


@pytest.mark.parametrize(("name", "said"), [("", "no benchmark is named"), ("fast", "no benchmark is called 'fast'")])
def test_unknown_benchmark_lists_the_known(benchmarks: Path, name: str, said: str) -> None:
    done = bench(benchmarks, name)
    assert done.returncode == 2
    assert done.stderr == f"bench: {said}: use make bench NAME=..., with one of: small.\n"


def test_test_outside_a_tier_is_an_error_and_quick_tiers_come_first(tmp_path: Path) -> None:
    conftest = (ROOT / "tests/conftest.py").read_text()
    lines = [line for line in conftest.splitlines() if not line.startswith("pytest_plugins")]
    (tmp_path / "tests/lab").mkdir(parents=True)
    (tmp_path / "tests/unit").mkdir()
    (tmp_path / "tests/conftest.py").write_text("\n".join(lines))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests/lab/test_slow.py").write_text("def test_slow(): pass\n")
    (tmp_path / "tests/unit/test_quick.py").write_text("def test_quick(): pass\n")

    def collect(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    found = [line for line in collect().stdout.splitlines() if "::" in line]
    assert found == ["tests/unit/test_quick.py::test_quick", "tests/lab/test_slow.py::test_slow"]
    assert "test_slow" not in collect("-m", "unit").stdout

    (tmp_path / "tests/test_stray.py").write_text("def test_stray(): pass\n")
    stray = collect()
    assert stray.returncode != 0
    assert "test_stray.py is in no tier: move it below one of tests/{unit,lab,vllm}." in stray.stderr
