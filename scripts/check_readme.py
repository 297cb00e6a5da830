"""Check of README and docs: named commands exist, relative links resolve, and the index lists every page once.

Links in code are no links. An anchor has to be a heading of the page that it leads to, by GitHub's rule. Addresses elsewhere are
not requested.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = ("make demo", "make test")
INDEX = "docs/README.md"
PAGES = ("*.md", "charts/**/*.md", "docs/**/*.md", "drafter/**/*.md", "examples/**/*.md", "lab/**/*.md", "plugin/**/*.md")
"""Patterns of the files whose links are checked."""
LISTED_BY_A_PAGE = ("docs/decisions", "docs/how-to/runbooks")
"""Folders whose pages a page of the index lists, instead of the index."""
_FENCED_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_LISTED = re.compile(r"^\* \[[^]]*\]\(([^()\s]+)\)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.MULTILINE)


def find_errors(readme: str, makefile: str) -> list[str]:
    """Return one sentence for each error in the commands of the README."""
    # Only code counts: a fenced block, or a word between backticks.
    blocks = re.findall(r"^```.*?\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    code = [*blocks, *re.findall(r"`([^`\n]+)`", prose)]
    named_commands = {f"make {target}" for text in code for target in re.findall(r"\bmake ([a-z][a-z0-9-]*)", text)}
    targets = {f"make {target}" for target in re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE)}
    unnamed = [command for command in REQUIRED if command not in named_commands]
    messages = [f"README.md does not name `{command}`: write it exactly so." for command in unnamed]
    messages += [
        f"README.md names `{command}`, and the Makefile has no such target: correct one of them."
        for command in sorted((named_commands | set(REQUIRED)) - targets)
    ]
    return messages


def find_link_errors(root: Path) -> list[str]:
    """Return one sentence for each relative link that leads nowhere, and for each page of docs/ that the index lacks."""
    pages = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    links = {page: list(_read_links(page)) for page in pages}
    messages = [
        f"{page.relative_to(root)} links to {link}, and {problem}: correct the link."
        for page, page_links in links.items()
        for link in page_links
        if (problem := _find_problem(page, link))
    ]
    index = root / INDEX
    listed = _resolve(index, links)
    linked = set().union(*(_resolve(page, links) for page in pages if page.resolve() in listed))
    listed |= {page for page in linked if page.parent in {(root / folder).resolve() for folder in LISTED_BY_A_PAGE}}
    messages += [
        f"{INDEX} does not list {page.relative_to(root)}: add a line for it."
        for page in pages
        if page.is_relative_to(index.parent) and page != index and page.resolve() not in listed
    ]
    messages += [
        f"{INDEX} lists {link} {count} times: keep the line in the section of its folder."
        for link, count in Counter(_LISTED.findall(index.read_text(encoding="utf-8"))).items()
        if count > 1
    ]
    return messages


def _resolve(page: Path, links: Mapping[Path, Sequence[str]]) -> set[Path]:
    """Return the files that a page links to."""
    return {(page.parent / link.split("#")[0]).resolve() for link in links.get(page, [])}


def _read_links(page: Path) -> Iterator[str]:
    """Yield the page's links to files and headings of the repository."""
    prose = _INLINE_CODE.sub("", _FENCED_BLOCK.sub("", page.read_text(encoding="utf-8")))
    for link in _LINK.findall(prose):
        if not re.match(r"[a-z][a-z+.-]*:", link):
            yield link


def _find_problem(page: Path, link: str) -> str:
    """Return what is wrong with a link, as a clause; empty if it is right."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return "there is no such file"
    if anchor and target.suffix == ".md" and anchor not in _read_anchors(target):
        return "that page has no such heading"
    return ""


def _read_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, words joined by hyphens, repetitions numbered."""
    counts: Counter[str] = Counter()
    anchors = set()
    for heading in _HEADING.findall(_FENCED_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return anchors


def main() -> int:
    messages = [
        *find_errors((ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()),
        *find_link_errors(ROOT),
    ]
    for problem in messages:
        print(problem, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
