"""The commands of the repository: the README's, the benchmarks', and the tiers of the tests."""

from __future__ import annotations

import importlib.util
import json
import os
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
    ("readme", "makefile", "messages"),
    [
        ("```\nmake demo\nmake test\n```\n", MAKEFILE, []),
        ("`make demo`, `make test` and `make test-unit`", MAKEFILE, []),
        ("`make demo`; we make tests run", MAKEFILE, ["README.md does not name `make test`"]),
        ("`make demos` and `make test`", MAKEFILE, ["does not name `make demo`", "names `make demos`, and the Makefile"]),
        ("`make demo` and `make test`", "test: setup\n", ["names `make demo`, and the Makefile has no such target"]),
    ],
)
def test_readme_names_the_targets_of_the_makefile(
    check_readme: ModuleType, readme: str, makefile: str, messages: list[str]
) -> None:
    problems = check_readme.find_errors(readme, makefile)
    assert len(problems) == len(messages)
    for problem, part in zip(problems, messages, strict=True):
        assert part in problem


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("[a](b.md), [b](b.md#two-words-k-3), [c](#page), [d](../Makefile), [e](https://example.com/x)", None),
        ("`[a](c.md)`\n```\n[b](c.md)\n```\n", None),
        ("[a](c.md)", "docs/README.md links to c.md, and there is no such file"),
        ("[a](b.md#two)", "docs/README.md links to b.md#two, and that page has no such heading"),
        ("[a](b.md#two-words-k-3-1)", None),
        ("[a](b.md#two-words-k-3-2)", "that page has no such heading"),
        ("[a](#other)", "docs/README.md links to #other, and that page has no such heading"),
    ],
)
def test_relative_links_resolve(check_readme: ModuleType, tmp_path: Path, page: str, message: str | None) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "Makefile").touch()
    (tmp_path / "docs/README.md").write_text(f"# Page\n\n[b](b.md)\n{page}\n")
    (tmp_path / "docs/b.md").write_text("# B\n\n## Two words: `K` 3\n\n## Two words, K 3\n")
    problems = check_readme.find_link_errors(tmp_path)
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def test_index_lists_every_page(check_readme: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs/decisions").mkdir(parents=True)
    (tmp_path / "docs/README.md").write_text("[a](a.md#a)\n")
    for name in ("a", "decisions/b"):
        (tmp_path / f"docs/{name}.md").write_text("# A\n")
    (problem,) = check_readme.find_link_errors(tmp_path)
    assert problem == "docs/README.md does not list docs/decisions/b.md: add a line for it."
    (tmp_path / "docs/a.md").write_text("# A\n\n[b](decisions/b.md)\n")
    assert check_readme.find_link_errors(tmp_path) == []
    (tmp_path / "docs/README.md").write_text("* [a](a.md)\n* [again](a.md)\n")
    (problem,) = check_readme.find_link_errors(tmp_path)
    assert problem.startswith("docs/README.md lists a.md 2 times")
    assert check_readme.find_link_errors(ROOT) == []


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """Return a copy of the runner with one benchmark of its own."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks")
    (tmp_path / "benchmarks/small.py").write_text("def measure():\n    print('warming up')\n    return {'wait_ms': 1.5}\n")
    return tmp_path


def run_benchmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=folder, capture_output=True, text=True)


def test_benchmark_ends_with_one_flat_json_object(benchmarks: Path) -> None:
    done = run_benchmark(benchmarks, "small")
    assert done.stdout.splitlines() == ["warming up", '{"wait_ms": 1.5}']
    assert not (benchmarks / "benchmarks/results").exists()


def test_saved_results_name_their_origin(benchmarks: Path) -> None:
    run_benchmark(benchmarks, "small", "--save")
    saved = json.loads((benchmarks / "benchmarks/results/small.json").read_text())
    assert saved["wait_ms"] == 1.5
    assert {"date", "machine", "commit"} < saved.keys()
    assert all(saved.values())


@pytest.mark.parametrize(("name", "message"), [("", "no benchmark is named"), ("fast", "no benchmark is called 'fast'")])
def test_an_unknown_benchmark_lists_the_known_ones(benchmarks: Path, name: str, message: str) -> None:
    done = run_benchmark(benchmarks, name)
    assert done.returncode == 2
    assert done.stderr == f"bench: {message}: use make bench NAME=..., with one of: small.\n"


@pytest.fixture
def tests_folder(tmp_path: Path) -> Path:
    """Return the folder of a project without tests, with this project's conftest.py (without the lab) and settings."""
    conftest = (ROOT / "tests/conftest.py").read_text()
    folder = tmp_path / "tests"
    for tier in ("lab", "unit"):
        (folder / tier).mkdir(parents=True)
    for name in ("pyproject.toml", "tests/golden.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    changed = conftest.replace('pytest_plugins = ["aerie_lab.testing.plugin", ', "pytest_plugins = [")
    assert changed != conftest
    (folder / "conftest.py").write_text(changed)
    return folder


def run_pytest(tests_folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=tests_folder.parent, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
def test_a_test_outside_a_tier_fails_and_quick_tiers_run_first(tests_folder: Path) -> None:
    (tests_folder / "lab/test_cluster.py").write_text("def test_cluster(): pass\n")
    (tests_folder / "unit/test_pure.py").write_text("def test_pure(): pass\n")

    test_ids = [line for line in run_pytest(tests_folder, "--collect-only").stdout.splitlines() if "::" in line]
    assert test_ids == ["tests/unit/test_pure.py::test_pure", "tests/lab/test_cluster.py::test_cluster"]
    assert "test_cluster" not in run_pytest(tests_folder, "--collect-only", "-m", "unit").stdout

    (tests_folder / "test_stray.py").write_text("def test_stray(): pass\n")
    stray = run_pytest(tests_folder, "--collect-only")
    assert stray.returncode != 0
    assert "test_stray.py is in no tier: move it below one of tests/{unit,lab,vllm}." in stray.stderr


EXAMPLES = """
import hypothesis, pytest
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, rule

def count(name):
    with open(name, "a") as file:
        file.write(".")

@pytest.mark.slow
def test_simulation():
    count("simulation")

@hypothesis.given(strategies.integers())
def test_numbers(number):
    count("numbers")

class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.steps = 0
        count("machine")

    @rule(number=strategies.integers())
    def step(self, number):
        self.steps += 1
        assert self.steps <= {most}

Machine.TestCase.settings = hypothesis.settings(max_examples=40, stateful_step_count=25)
test_machine = Machine.TestCase
"""


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "numbers", "machine", "steps"), [("quick", 10, 10, 15), ("full", 100, 40, 25)])
def test_quick_profile_runs_few_examples(tests_folder: Path, profile: str, numbers: int, machine: int, steps: int) -> None:
    (tests_folder / "unit/test_examples.py").write_text(EXAMPLES.replace("{most}", str(steps)))
    done = run_pytest(tests_folder, "-m", "not slow", HYPOTHESIS_PROFILE=profile)
    assert done.returncode == 0, done.stdout
    assert len((tests_folder.parent / "numbers").read_text()) == numbers
    assert (
        machine <= len((tests_folder.parent / "machine").read_text()) <= machine + 1
    )  # hypothesis also creates one to read its rules
    assert not (tests_folder.parent / "simulation").exists()


@pytest.mark.slow
def test_two_processes_share_the_tests_and_write_no_golden_file(tests_folder: Path) -> None:
    for name in ("one", "two"):
        (tests_folder / f"unit/test_{name}.py").write_text("def test_text(messages): messages.check('greeting', 'hello')\n")
    assert run_pytest(tests_folder, "--update-messages").returncode == 0
    assert (tests_folder / "unit/messages/test_two.txt").read_text() == "## greeting\nhello\n"
    together = run_pytest(tests_folder, "--numprocesses=2", "--dist=loadfile")
    assert together.returncode == 0, together.stdout
    assert "2 passed" in together.stdout
    refused = run_pytest(tests_folder, "--numprocesses=2", "--update-messages")
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "leave out -n" in refused.stderr


@pytest.mark.parametrize(("arguments", "expected_folders"), [(("PKG=rollout",), {"rollout"}), ((), None)])
def test_make_quick_runs_the_folders_of_unit_tests(arguments: tuple[str, ...], expected_folders: set[str] | None) -> None:
    done = subprocess.run(["make", "--dry-run", "quick-tests", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    others = {"binaries", "drafter", "simulator", "__pycache__"}
    folders = {folder.name for folder in (ROOT / "tests/unit").iterdir() if folder.is_dir()} - others
    tested_paths = [argument for argument in done.stdout.split() if argument.startswith("tests/")]
    assert {path.removeprefix("tests/unit/") for path in tested_paths} == (expected_folders or folders)
