"""The documentation site: its sections are those of the index, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "scripts/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sections_are_those_of_the_index(site: ModuleType) -> None:
    index = "# All\n\n## Start\n\n* [a.md](a.md): see [b](b.md#x), [b](b.md).\n\n## Project\n\n* [c](../C.md), [d](d.yaml)\n"
    assert site.read_sections(index) == {"Start": ["docs/a.md", "docs/b.md"], "Project": ["C.md"]}
    first_page = site.build_first_page("# Aerie", {"Start": ["docs/a.md"]})
    assert first_page.startswith("# Aerie\n")
    assert ":caption: Start\n\ndocs/a\n```" in first_page


@pytest.mark.nightly  # the links of the pages have tests of their own
@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: ModuleType, tmp_path: Path) -> None:
    assert site.build_site(tmp_path / "site") == 0
    html = tmp_path / "site" / "html"
    pages = [path.relative_to(ROOT) for path in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if not (html / page.with_suffix(".html")).exists()] == []
    first_page = (html / "index.html").read_text()
    assert "Aerie" in first_page
    missing_pictures = [
        name for page in html.rglob("*.html") for name in _read_pictures(page) if not (page.parent / name).resolve().exists()
    ]
    assert missing_pictures == []


def _read_pictures(page: Path) -> list[str]:
    """Return the local addresses of a page's pictures."""
    names = re.findall(r'<(?:img|source)[^>]* (?:src|srcset)="([^"]+)"', page.read_text())
    return [name for name in names if not name.startswith(("http", "data:"))]
