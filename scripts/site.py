"""Build the documentation site from the pages of the repository: `make site`.

The README is the first page, and docs/README.md gives sections and their order. So the same pages are read on a forge and on the
site, and none of them needs a directive of the generator.

Guarantees: every page of the repository is on the site, and every link on it leads somewhere: a warning of the generator is an
error. A link to another file of the repository is a download of it. Not guaranteed: that addresses elsewhere answer.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "site"
INDEX = "docs/README.md"
PAGES = (
    "*.md",
    "charts/**/*.md",
    "docs/**/*.md",
    "drafter/README.md",
    "drafter/bundle/README.md",
    "examples/**/*.md",
    "lab/README.md",
    "plugin/README.md",
)
PICTURES = ("docs/**/*.svg", "docs/**/*.png")
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<link>[^()\s]+)\)")
_LINK_OR_CODE = re.compile(rf"{_LINK.pattern}|^(?P<indent> *)```.*?^(?P=indent)```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## +(.+)$", re.MULTILINE)


def read_sections(index: str) -> Mapping[str, Sequence[str]]:
    """Return the pages of each section of the index, in their order, as paths from the repository's root."""
    _, *parts = _SECTION.split(index)
    sections = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        targets = (target.partition("#")[0] for _, target in _LINK.findall(text))
        pages = dict.fromkeys(_normalize(f"docs/{target}") for target in targets if target.endswith(".md"))
        sections[title] = [page for page in pages if page != "README.md"]
    return sections


def build_first_page(readme: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return the README with a table of contents for each section, which the site shows beside each page."""
    tables = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *(page.removesuffix(".md") for page in pages), "```"])
        for title, pages in {"Documentation": [INDEX], **sections}.items()
    ]
    return "\n\n".join([readme, *tables]) + "\n"


def stage_pages(source: Path) -> None:
    """Copy the pages, and the files that they show or link to, as the generator needs them."""
    sections = read_sections((ROOT / INDEX).read_text(encoding="utf-8"))
    listed = {INDEX, *(page for pages in sections.values() for page in pages)}
    for page in {path for pattern in PAGES for path in ROOT.glob(pattern)} - {ROOT / "README.md"}:
        name = page.relative_to(ROOT).as_posix()
        is_listed = name in listed
        _write(
            source / name, _stage_links(page, source) if is_listed else f"---\norphan: true\n---\n{_stage_links(page, source)}"
        )
    readme = _stage_links(ROOT / "README.md", source)
    _write(source / "index.md", build_first_page(readme, sections))
    for picture in (path for pattern in PICTURES for path in ROOT.glob(pattern)):
        _copy(picture, source)
        _copy(picture, source.parent / "pictures")


def _stage_links(page: Path, source: Path) -> str:
    """Return a page's text. A link to a folder leads to its page, if it has one; a linked file of another kind is copied."""

    def replace(match: re.Match[str]) -> str:
        text, link = match["text"], match["link"]
        if link is None or re.match(r"[a-z][a-z+.-]*:|#", link):
            return match[0]
        path, mark, anchor = link.partition("#")
        linked = (page.parent / path).resolve()
        if linked == ROOT / "README.md":
            up = "../" * len(page.parent.relative_to(ROOT).parts)
            return f"[{text}]({up}index.md{mark}{anchor})"
        if linked.is_dir():
            return f"[{text}]({path.rstrip('/')}/README.md)" if (linked / "README.md").exists() else text
        if linked.suffix != ".md":
            _copy(linked, source)
        elif text in (path, Path(path).name):  # the generator fills in the title
            return f"[]({link})"
        return match[0]

    return _LINK_OR_CODE.sub(replace, page.read_text(encoding="utf-8"))


def _copy(file: Path, folder: Path) -> None:
    """Copy a file of the repository into a folder of the same structure."""
    copy = folder / file.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _normalize(path: str) -> str:
    """Return a path from the root without `..`."""
    return (ROOT / path).resolve().relative_to(ROOT).as_posix()


def build_site(folder: Path) -> int:
    """Build the site in folder/html, and return the exit status of the generator, which names each problem."""
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    stage_pages(source)
    shutil.copyfile(ROOT / "docs" / "site" / "conf.py", source / "conf.py")
    command = [sys.executable, "-m", "sphinx", "--builder=html", "--fail-on-warning", "--keep-going", "--quiet"]
    return subprocess.run([*command, str(source), str(folder / "html")], check=False).returncode


def main() -> int:
    status = build_site(FOLDER)
    if status == 0:
        print(f"site: open {FOLDER.relative_to(ROOT)}/html/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
