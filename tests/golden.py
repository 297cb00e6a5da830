"""The texts that people read, kept in golden files, so that a rewording is one reviewed diff.

A test hands each text to `messages.check(name, text)`. The texts of `DIR/test_x.py` are in `DIR/messages/test_x.txt`, ordered
by name. `pytest --update-messages FILE` writes the files of the modules that it runs: exactly the texts that these tests check,
so run whole modules with it, in one process (without -n), and read the diff.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


class Messages:
    """The golden file of one test module."""

    def __init__(self, path: Path, *, update: bool) -> None:
        self.path = path
        self.update = update
        self.checked: dict[str, str] = {}
        self.expected = {} if update else self._read()

    def check(self, name: str, text: str) -> None:
        """Compare a text with the golden file. `name` is unique in the module and one line."""
        __tracebackhide__ = True
        assert "\n" not in name, f"the name of a message has one line: {name!r}"
        text = text.strip("\n")
        assert self.checked.setdefault(name, text) == text, f"two texts are called {name!r} in {self.path.name}"
        if not self.update:
            assert name in self.expected, f"{self.path} has no {name!r}: run pytest --update-messages on the module"
            assert text == self.expected[name]

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("\n\n".join(f"## {name}\n{text}" for name, text in sorted(self.checked.items())) + "\n")

    def _read(self) -> dict[str, str]:
        parts = _HEADING.split(self.path.read_text())[1:] if self.path.exists() else []
        return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.fixture(scope="module")
def messages(request: pytest.FixtureRequest) -> Iterator[Messages]:
    """The golden file of the requesting module."""
    module = request.path
    golden = Messages(module.parent / "messages" / f"{module.stem}.txt", update=request.config.getoption("--update-messages"))
    yield golden
    if golden.update and golden.checked:
        golden.write()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help="write the golden files of messages of the modules that run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-messages") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--update-messages needs all tests of a module in one process: leave out -n.")
