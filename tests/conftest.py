"""The tier of every test, from its folder; the quick tiers run first.

Only the folder determines the tier, so a test cannot be in a tier by mistake or without one.

Environment: HYPOTHESIS_PROFILE=quick runs few examples, as `make quick` does, and `short` some, as `make test` does; `full` is
the default.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from aerie_lab.binaries import DEFAULT_FAMILY_NAMES, ensure_family
from aerie_lab.errors import LabError

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; more threads wait for each other beside other tests
pytest_plugins = ["aerie_lab.testing.plugin", "tests.golden"]
hypothesis.settings.register_profile("full", deadline=None)  # an example that takes 200 ms is no error
hypothesis.settings.register_profile("short", deadline=None, max_examples=15, stateful_step_count=25)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10, stateful_step_count=15)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full"))

SHORTER_PROFILES = ("short", "quick")
TIERS = ("unit", "lab", "vllm")
BINARIES = {"unit": (), "lab": DEFAULT_FAMILY_NAMES, "vllm": (*DEFAULT_FAMILY_NAMES, "vllm")}
"""Families of binaries that the tests of a tier may use."""
HERE = Path(__file__).resolve().parent


def tier(path: Path) -> str:
    """Return the tier of a test file. Raises UsageError if its folder is no tier."""
    inside = path.relative_to(HERE).parts if path.is_relative_to(HERE) else ()
    if len(inside) < 2 or inside[0] not in TIERS:
        raise pytest.UsageError(f"{path} is in no tier: move it below one of tests/{{{','.join(TIERS)}}}.")
    return inside[0]


def is_quick() -> bool:
    """Return whether the profile asks for few examples only."""
    return hypothesis.settings.get_current_profile_name() == "quick"


def limit_state_machine(item: pytest.Item) -> None:
    """Limit the examples and steps of a hypothesis state machine to the profile's, which its own settings override."""
    case = getattr(item, "cls", None)
    own, profile = (
        getattr(case, "settings", None),
        hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name()),
    )
    if case is not None and isinstance(own, hypothesis.settings):
        case.settings = hypothesis.settings(
            own,
            max_examples=min(own.max_examples, profile.max_examples),
            stateful_step_count=min(own.stateful_step_count, profile.stateful_step_count),
        )


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects by the marks that are set here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier(item.path))
        if hypothesis.settings.get_current_profile_name() in SHORTER_PROFILES:
            limit_state_machine(item)
    # Files with slow tests begin, so that no worker has minutes of them at the end while another has nothing left. Stable: the
    # order inside a file stays.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (TIERS.index(tier(item.path)), item.path not in slow_files))


def pytest_collection_finish() -> None:
    """Exclude what collection has created from later garbage collections: looking through it took 0.35 s after each module."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest-timeout's own wrapper
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Build what the test's tier needs before the test's time limit runs: the first build takes minutes, and hits one test."""
    from aerie_lab.testing.plugin import create_progress_writer  # not before pytest has it as a plugin, or its asserts stay plain

    for family in BINARIES[tier(item.path)]:
        with contextlib.suppress(LabError):  # the test raises it again, as its own failure
            ensure_family(family, create_progress_writer(item.config))
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Collect what a module has left open, so that the warning fails this module, not another one or the end of the run.

    Not in the quick profile: a collection after each module takes seconds in all.
    """
    yield
    if not is_quick():
        gc.collect()
