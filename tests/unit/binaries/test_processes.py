"""Builds in several processes, and processes that end in the middle of one."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aerie_lab.binaries import store
from aerie_lab.binaries.families import BinaryFamily

BUILD = """
import pickle, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background of a script
from aerie_lab.binaries import store
store.ensure_build(pickle.loads(Path(sys.argv[1]).read_bytes()), lambda line: print(line, flush=True))
"""
# Writes its process id and that of a child that never ends, as a compiler would.
HANG = 'sleep 600 & echo $$ $! > "$AERIE_LAB_CACHE/pids.new"; mv "$AERIE_LAB_CACHE/pids.new" "$AERIE_LAB_CACHE/pids"; wait'


@pytest.fixture
def start_build_process(tiny: BinaryFamily, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Return a function that starts a process that builds `tiny`."""
    (tmp_path / "family").write_bytes(pickle.dumps(tiny))
    started: list[subprocess.Popen[str]] = []

    def start_build() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILD, str(tmp_path / "family")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start_build
    for process in started:
        process.kill()
        process.communicate()


def wait_for(is_done: Callable[[], bool], timeout_seconds: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_hanging_build(cache: Path) -> list[int]:
    """Return the process ids of go and its child, once both run."""
    wait_for((cache / "pids").exists)
    return [int(pid) for pid in (cache / "pids").read_text().split()]


def test_two_processes_build_once(
    start_build_process: Callable[[], subprocess.Popen[str]], fake_go: Callable[[str], Path], cache: Path
) -> None:
    fake_go('echo >> "$AERIE_LAB_CACHE/builds"; until [ -e "$AERIE_LAB_CACHE/go-on" ]; do sleep 0.05; done; produce')
    first = start_build_process()
    wait_for((cache / "builds").exists)
    second = start_build_process()
    assert second.stdout is not None
    while "another process is building it" not in (line := second.stdout.readline()):
        assert line, "the second process says that it waits"
    (cache / "go-on").touch()
    for process in (first, second):
        process.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0)
    assert (cache / "builds").read_text() == "\n"


def test_ctrl_c_ends_go_with_its_children_and_leaves_no_files(
    start_build_process: Callable[[], subprocess.Popen[str]], fake_go: Callable[[str], Path], cache: Path, tiny: BinaryFamily
) -> None:
    fake_go(HANG)
    process = start_build_process()
    pids = wait_for_hanging_build(cache)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors
    wait_for(
        lambda: not any(is_running(pid) for pid in pids)
    )  # killed, which is visible a moment later, because it is a child of a child
    assert not (cache / "bin/.tiny.building").exists()
    assert not store.build_folder(tiny).exists()


def test_a_killed_process_ends_go_and_the_next_build_works(
    start_build_process: Callable[[], subprocess.Popen[str]], fake_go: Callable[[str], Path], cache: Path
) -> None:
    fake_go(HANG)
    process = start_build_process()
    pids = wait_for_hanging_build(cache)
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(pids[0]))
    os.kill(pids[1], signal.SIGKILL)  # a compiler would end
    assert (cache / "bin/.tiny.building").exists()

    fake_go("produce")
    second_process = start_build_process()
    assert "ready after" in second_process.communicate(timeout=120)[0]
    assert second_process.returncode == 0
    assert not (cache / "bin/.tiny.building").exists()
