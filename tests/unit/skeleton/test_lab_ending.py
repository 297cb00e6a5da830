"""A signal that ends a process with labs: they are taken down first, whenever it arrives."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HEAD = """
import os, signal, sys
from aerie_lab.cluster.signal_cleanup import clean_up_on_signal, defer_signals

def say(text):
    print(text, flush=True)

def down(name):
    with defer_signals():
        say(f"{name} begins")
        if name == DISTURBED:
            signal.raise_signal(signal.SIGTERM)
        say(f"{name} is down")
        if name == FAILS:
            raise OSError("disk")

DISTURBED = FAILS = None
"""
BLOCKS = """
with clean_up_on_signal(lambda: down("one")):
    with clean_up_on_signal(lambda: down("two")):
        %s
    down("two")
    say("between")
down("one")
say("after")
"""


def run(body: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", HEAD + body], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, [line for line in done.stdout.splitlines() if not line.endswith("begins")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_labs_are_taken_down_newest_first_and_the_signal_ends_the_process(number: signal.Signals) -> None:
    assert run(BLOCKS % f"signal.raise_signal({int(number)})") == (-number, ["two is down", "one is down"])


def test_without_a_signal_the_previous_handlers_are_restored() -> None:
    ends = "signal.raise_signal(signal.SIGTERM)"
    assert run(BLOCKS % "pass" + ends) == (-signal.SIGTERM, ["two is down", "between", "one is down", "after"])


def test_a_second_signal_is_ignored() -> None:
    body = "DISTURBED = 'two'\n" + BLOCKS % "signal.raise_signal(signal.SIGHUP)"
    assert run(body) == (-signal.SIGHUP, ["two is down", "one is down"])


def test_a_signal_during_down_takes_down_the_other_labs_afterwards() -> None:
    body = "DISTURBED = 'three'\n" + BLOCKS % "down('three')"
    assert run(body) == (-signal.SIGTERM, ["three is down", "two is down", "one is down"])


def test_a_failed_down_does_not_stop_the_others() -> None:
    body = "FAILS = 'two'\n" + BLOCKS % "signal.raise_signal(signal.SIGTERM)"
    assert run(body) == (-signal.SIGTERM, ["two is down", "one is down"])


def test_a_forked_process_takes_no_lab_down() -> None:
    fork = "say(os.waitpid(child, 0)[1]) if (child := os.fork()) else signal.raise_signal(signal.SIGTERM)"
    expected = [str(int(signal.SIGTERM)), "two is down", "between", "one is down", "after"]
    assert run(BLOCKS % fork) == (0, expected)


def test_a_signal_handler_of_the_program_is_kept() -> None:
    own = "signal.signal(signal.SIGTERM, lambda *_: say('own'))\n"
    expected = ["own", "two is down", "between", "one is down", "after"]
    assert run(own + BLOCKS % "signal.raise_signal(signal.SIGTERM)") == (0, expected)


DEMO = """
from pathlib import Path
from aerie_lab.cli import demo, demo_refresh

FOLDERS = []

class FakeLab:
    kubeconfig, gateway_url = "", ""

    def __init__(self):
        self.block = clean_up_on_signal(lambda: down("lab"))

    def __enter__(self):
        self.block.__enter__()
        return self

    def __exit__(self, *error):
        down("lab")

    def environment(self):
        return {}

class Demo:
    def __init__(self, *parts):
        FOLDERS.extend(part for part in parts if isinstance(part, Path))

    def run(self, *_):
        child = [sys.executable, "-c", "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"]
        if FOLDERS:
            demo_refresh.run_program(child, os.environ, 60)
        signal.raise_signal(signal.SIGTERM)

make_folder = demo_refresh.tempfile.mkdtemp
demo_refresh.tempfile.mkdtemp = lambda **options: say(folder := make_folder(**options)) or folder
demo_refresh.ensure_family = demo.ensure_family = lambda *_: None
demo.Lab.up = lambda *_: FakeLab()
demo_refresh.RefreshDemo = demo.DemoRunner = Demo
"""


def test_a_signal_takes_down_the_lab_of_the_demo() -> None:
    assert run(DEMO + "demo._run_in_lab('simulator', 'x', keep=False)") == (-signal.SIGTERM, ["lab is down"])


def test_a_signal_ends_the_refresh_of_the_demo_takes_down_its_lab_and_removes_its_folder() -> None:
    status, (folder, *lines) = run(DEMO + "demo_refresh.run_refresh_demo('x')")
    assert (status, lines) == (-signal.SIGTERM, ["lab is down"])
    assert not Path(folder).exists()
