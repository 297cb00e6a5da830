"""The bundle's text: documentation that ships with Python itself, as questions and answers and as plain text.

Docstrings of the standard library and the topics of pydoc are read from source, by `ast`, so nothing is imported and no
compiled module matters. The text is Python's, under the PSF licence (https://docs.python.org/3/license.html); it is used
for training and never copied into this repository.

Guarantees: the same Python release gives the same text in the same order; `held_out` questions are in no training text.
Not guaranteed: the same text under another release; `digest` tells the difference.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie_drafter.errors import DataError

# Every CPython since 3.11 has these as Python source; what PEP 594 removed later is not among them.
MODULES = """
argparse bisect calendar cmd collections configparser contextlib copy csv dataclasses difflib enum fileinput fnmatch fractions
functools getopt gettext glob gzip heapq html inspect ipaddress json linecache logging numbers optparse os pickle pprint queue
random reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver statistics string subprocess tarfile
tempfile textwrap threading timeit tokenize traceback types uuid warnings wave weakref
asyncio.events asyncio.locks asyncio.queues asyncio.runners asyncio.streams asyncio.tasks concurrent.futures._base
email.message http.client http.cookies http.server json.decoder json.encoder logging.handlers multiprocessing.pool
unittest.case unittest.mock urllib.parse urllib.request wsgiref.headers xml.dom.minidom xml.etree.ElementTree
"""

ASK = {
    "module": ("What is the module {} for?", "Tell me about the module {}.", "Describe the Python module {}."),
    "class": ("What is the class {}?", "Explain the class {}.", "When do I use {}?"),
    "function": ("What does {} do?", "Explain the function {}.", "How do I use {}?"),
    "method": ("What does the method {} do?", "Explain {}.", "Describe the method {}."),
    "topic": ("Explain {} in Python.", "How does {} work in Python?", "Tell me about {}."),
}
"""Ways to ask, by category. The category is the kind of the documented thing."""

LONGEST = 480
"""Characters of an answer; a longer text ends at its last whole paragraph before that."""


@dataclass(frozen=True)
class Item:
    """One documented thing."""

    category: str
    name: str
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """One in twelve, by name: kept out of every training, for evaluation."""
        return zlib.crc32(self.name.encode()) % 12 == 0


def items() -> list[Item]:
    """Return all documented things, in a fixed order. Raises DataError if this Python lacks a module's source."""
    return items_of(MODULES.split(), topics())


def items_of(modules: Iterable[str], texts_by_topic: Mapping[str, str]) -> list[Item]:
    """Return the documented things of modules and topics, in this order. Raises DataError if a module has no source here."""
    result = [item for module in modules for item in _of_module(module)]
    result += [_item("topic", f"`{name}`", text) for name, text in texts_by_topic.items()]
    first = {item.question: item for item in reversed(result)}  # a repeated question keeps its first answer
    return [item for item in result if len(item.answer) >= 20 and first[item.question] is item]


def plain() -> list[str]:
    """Return the first 2,000 characters of each pydoc topic, as texts to continue."""
    return [text[:2000] for text in topics().values()]


def digest(items: list[Item], texts: list[str]) -> str:
    """Return the SHA-256 of all text."""
    total = hashlib.sha256()
    for part in [text for item in items for text in (item.category, item.question, item.answer)] + texts:
        total.update(part.encode() + b"\0")
    return total.hexdigest()


def _item(category: str, subject: str, text: str) -> Item:
    forms = ASK[category]
    question = forms[zlib.crc32(subject.encode()[::-1]) % len(forms)].format(subject)
    return Item(category, subject, question, _cut(text))


def _cut(text: str) -> str:
    text = inspect.cleandoc(text).strip()
    if len(text) <= LONGEST:
        return text
    head = text[:LONGEST]
    for end in ("\n\n", ". ", "\n", " "):
        if head.rfind(end) > LONGEST // 3:
            return head[: head.rfind(end) + 1].strip()
    return head


def _of_module(module: str) -> Iterator[Item]:
    tree = ast.parse(_source(module).read_bytes())
    if text := ast.get_docstring(tree):
        yield _item("module", f"`{module}`", text)
    yield from _of_body(tree.body, module, "function")


def _of_body(body: list[ast.stmt], owner: str, kind: str) -> Iterator[Item]:
    for node in body:
        if _is_private(node):
            continue
        if isinstance(node, ast.ClassDef):
            name = f"{owner}.{node.name}"
            if text := ast.get_docstring(node):
                yield _item("class", f"`{name}`", text)
            yield from _of_body(node.body, name, "method")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg not in ("self", "cls")]
            yield _item(kind, f"`{owner}.{node.name}({', '.join(arguments[:4])})`", text)


def _is_private(node: ast.stmt) -> bool:
    name = getattr(node, "name", "")
    return name.startswith("_") and not name.endswith("__")


def topics() -> dict[str, str]:
    """pydoc's topics by name: the one dictionary of strings that its source holds."""
    tree = ast.parse(_source("pydoc_data.topics").read_bytes())
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    topics: dict[str, str] = ast.literal_eval(tables[0])
    return {name: inspect.cleandoc(text) for name, text in sorted(topics.items())}


def _source(module: str) -> Path:
    library = Path(sysconfig.get_path("stdlib"))
    stem = library.joinpath(*module.split("."))
    for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        if file.is_file():
            return file
    raise DataError(f"this Python's library in {library} has no source of {module}: build the bundle with a whole CPython 3.11.")
